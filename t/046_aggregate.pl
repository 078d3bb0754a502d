# Apply mode aggregate: a backlog is regrouped by table and new rows are inserted in bulk, with the
# same result. Tables of every kind, conflicts with rows of this node, unique violations, and
# sessions that insert the same keys meanwhile.

use strict;
use warnings;

use Braid;
use Churn;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
# Dead rows are what is known of deletions: nothing may remove them. Lima is for comparison, in mode
# parallel.
my ($paris, $lima) = map { new_node($_, publication => '', conf => "autovacuum = off\n") } qw(paris lima);
my @subscribers = ($paris, $lima);

churn_tables($tokyo, $paris);
my $name = subscribe($paris, $tokyo, apply_mode => q('aggregate'));
is($paris->safe_psql('postgres', 'select apply_mode from braid.subscription_detail'), 'aggregate', 'the mode is shown');

sub count { return $_[0]->safe_psql('postgres', "select $_[1]"); }
sub apart { return join "\n", map { "$_;" } @_; }

# A backlog of everything, with many rows of few tables in between.
my ($from, $here);
on_all(q[
	create table fact (k int primary key, v int, t text);
	create table named (a text, b int, v int, primary key (a, b));
	create table twice (k int primary key, u int unique, v int);
], $tokyo, $paris);
$paris->safe_psql('postgres', "select braid.refresh_subscription('$name')");
$tokyo->safe_psql('postgres', 'insert into fact values (0, 0)');
caught_up($paris, $tokyo);
ok(wait_until(sub { count($paris, q[count(*) from braid.subscription_tables where state <> 'ready']) eq '0' }, 30), 'all tables are ready');
backlog($tokyo, $paris, $name, sub {
	($from, $here) = (next_xid($tokyo), next_xid($paris));
	my $tables = join ',', @keyed, 'whole';
	$tokyo->safe_psql('postgres', "call churn('{$tables}', 1500)");
	$tokyo->safe_psql('postgres', join ";\n", map { "insert into keyless values ($_, $_, 'x')" } 1 .. 50);
	for my $round (1 .. 3)
	{
		$tokyo->safe_psql('postgres', "insert into cleared select k, $round from generate_series(1, 20) k");
		$tokyo->safe_psql('postgres', 'truncate cleared') if $round < 3;
	}
	$tokyo->safe_psql('postgres', 'begin; truncate cleared; insert into cleared values (1, 1); truncate cleared; insert into cleared values (2, 2); commit');
	# Keys in no order, tables in turn; rows that come and change, or go, in one batch; values that
	# go from row to row.
	my @keys = map { $_ * 7919 % 1009 + 1 } 1 .. 900;
	$tokyo->safe_psql('postgres', apart(map {
		my $k = $keys[$_];
		("insert into fact values ($k, $_, repeat('x', $_))", "insert into named values ('n ' || $k % 10, $k, $_)", "insert into twice values ($k, $k, $_)",
			$_ % 3 ? () : "update fact set v = v + 1, t = null where k = $keys[$_ / 2]",
			$_ % 5 ? () : "delete from named where b = $keys[$_ / 2]",
			$_ % 7 ? () : "update twice set u = -u where k = $k", $_ % 7 ? () : "insert into twice values (10000 + $k, $k, $_)")
	} 0 .. $#keys));
	$tokyo->safe_psql('postgres', "call churn('{$tables}', 500)");
});
caught_up($paris, $tokyo);
same_churn($tokyo, $paris);
same_tables([ $tokyo, $paris ], qw(fact named twice));
my ($sent, $used) = (next_xid($tokyo) - $from, next_xid($paris) - $here);
cmp_ok($used * 20, '<', $sent, "$sent transactions of the provider took $used here");
triggers_did($tokyo, $paris);
is(status($paris, $name)->{last_error}, '', 'no error on the way');
sound($paris, 'after a backlog');

# One transaction of many rows, of values small and large, twice as large as what is applied as it
# comes.
$paris->append_conf('postgresql.conf', "braid.apply_buffer_size = 1MB\n");
$paris->restart;
$tokyo->safe_psql('postgres', q[
	begin;
	insert into fact select k, k, repeat('y', k % 500) from generate_series(20000, 2, -1) k on conflict do nothing;
	insert into toasted select k, k, repeat(md5(k::text), 100) from generate_series(5000, 5100) k;
	insert into parted select k, k from generate_series(500, 1500) k on conflict do nothing;
	insert into always select k, k from generate_series(500, 520) k;
	update tally set n = n + 21 where name = 'always';
	insert into keyless select k, k from generate_series(1, 3000) k;
	delete from fact where k % 10 = 0;
	insert into fact select k, -k from generate_series(10, 20000, 10) k;
	commit;
]);
caught_up($paris, $tokyo);
same_churn($tokyo, $paris);
same_tables([ $tokyo, $paris ], qw(fact named twice));
triggers_did($tokyo, $paris);
sound($paris, 'after a large transaction');

# A failure in a large transaction may be due to a session's row that was not there at the look-up.
# So the transaction is received again and applied row by row. It has to be larger than the buffer.
# An older row that is equal under another key is deleted then.
$paris->safe_psql('postgres', 'insert into twice values (340000, 331500, 0)');
$tokyo->safe_psql('postgres', "insert into twice select k, k, k from generate_series(300001, 350000) k where k <> 340000");
caught_up($paris, $tokyo);
my $again = () = slurp_file($paris->logfile) =~ /receives a large transaction again/g;
is($again, 1, 'a large transaction that fails is received again, once');
is(count($paris, 'count(*) from twice where k > 300000'), '49999', 'and is there');
# An error that a retry can't cure stops the subscription.
$paris->safe_psql('postgres', 'alter table twice add check (u <> 431500)');
$tokyo->safe_psql('postgres', "insert into twice select k, k, k from generate_series(400001, 450000) k");
ok(wait_until(sub { status($paris, $name)->{state} eq 'error' }, 60), 'a violation in a large transaction stops the subscription');
like(status($paris, $name)->{last_error}, qr/twice_u_check/, 'the error names the constraint');
is(count($paris, 'count(*) from twice where k > 400000'), '0', 'nothing of it is there');
$paris->safe_psql('postgres', "alter table twice drop constraint twice_u_check; select braid.enable_subscription('$name')");
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'twice');

# Rows that this node wrote: what wins, and what is recorded, is as in mode parallel.
on_all(q[
	create table met (k int primary key, v text);
	create table met_named (a text, b int, v text, primary key (a, b));
], $tokyo, @subscribers);
$tokyo->safe_psql('postgres', 'create publication conflicts for table met, met_named');
my %names = (paris => $name, lima => subscribe($lima, $tokyo, publications => q('{conflicts}')));
$paris->safe_psql('postgres', "select braid.refresh_subscription('$name')");
ok(wait_until(sub { count($paris, q[count(*) from braid.subscription_tables where state <> 'ready']) eq '0' }, 30), 'all tables are ready');
my @changes = map {
	my $k = $_;
	my ($insert, $update, $delete) = (
		[ "insert into met values ($k, 'tokyo')", "insert into met_named values ('n ' || $k % 3, $k, 'tokyo')" ],
		[ "update met set v = v || '+' where k = $k", "update met_named set v = v || '+' where b = $k" ],
		[ "delete from met where k = $k", "delete from met_named where b = $k" ]);
	# All kinds of ends.
	map { @$_ } ($k % 2 ? ($insert) : ()), ($k % 3 ? ($update) : ()), ($k % 5 ? () : ($delete)), ($k % 15 ? () : ($insert, $update));
} 1 .. 400;
$tokyo->safe_psql('postgres', apart(map { ("insert into met values ($_, 'old')", "insert into met_named values ('n ' || $_ % 3, $_, 'old')") } grep { $_ % 2 == 0 } 1 .. 400));
caught_up($_, $tokyo) for @subscribers;
for my $node (@subscribers)
{
	$node->safe_psql('postgres', "select braid.disable_subscription('$names{$node->name}')");
}
$tokyo->poll_query_until('postgres', q[select not bool_or(active) from pg_replication_slots where slot_name !~ '^braid_deletions']) or die 'still active';
# Scans remove dead rows from pages, not in the same way on both nodes, unless a session may still
# see the rows.
my @watching = map { $_->background_psql('postgres', on_error_stop => 1) } @subscribers;
$_->query_safe('begin isolation level repeatable read; select count(*) from met') for @watching;
sub here
{
	my ($who, @rows) = @_;
	my @sql = map { my $k = $_;
		("insert into met values ($k, '$who') on conflict (k) do update set v = excluded.v",
		 "insert into met_named values ('n ' || $k % 3, $k, '$who') on conflict (a, b) do update set v = excluded.v",
		 $k % 4 ? () : ("delete from met where k = $k", "delete from met_named where b = $k")) } @rows;
	on_all(apart(@sql), @subscribers);
	return;
}
here('early', grep { $_ % 7 == 0 } 1 .. 400);
$tokyo->safe_psql('postgres', apart(@changes));
here('late', grep { $_ % 11 == 0 } 1 .. 400);
for my $node (@subscribers)
{
	$node->safe_psql('postgres', "select braid.enable_subscription('$names{$node->name}')");
	caught_up($node, $tokyo);
}
$_->quit for @watching;
same_tables([ $lima, $paris ], qw(met met_named));
my $history = q[
	select string_agg(n || ' ' || kind || ' ' || winner, ', ' order by kind, winner), md5(string_agg(hash, ',' order by kind, winner))
	from (select kind, winner, count(*) as n, md5(string_agg(concat_ws(' ', relation, key, remote_row, local_row, remote_xid), ',' order by relation::text, key::text, remote_xid::text, remote_row::text)) as hash
	      from braid.conflict_history where relation::text in ('met', 'met_named') group by 1, 2) h];
my $recorded = $lima->safe_psql('postgres', $history);
note($recorded);
like($recorded, qr/insert_exists/, 'there were conflicts');
is($paris->safe_psql('postgres', $history), $recorded, 'as in mode parallel, with the same rows');

# A violation in the middle: all before it is applied, it is named, and with its cause gone all goes
# on.
$paris->safe_psql('postgres', 'alter table twice add check (u <> 60150)');
backlog($tokyo, $paris, $name, sub {
	$tokyo->safe_psql('postgres', apart(map { ("insert into twice values ($_, $_, 1)", "insert into fact values ($_ + 1000, 1)") } 60001 .. 60300));
});
ok(wait_until(sub { status($paris, $name)->{state} eq 'error' }, 30), 'a violation stops the subscription');
like(status($paris, $name)->{last_error}, qr/twice_u_check/, 'the error names the constraint');
is(count($paris, 'count(*), max(k) from twice where k between 60001 and 99998'), '149|60149', 'all before it is applied, at its place');
is(count($paris, 'max(k) from fact'), '61149', 'other tables too');
$paris->safe_psql('postgres', "alter table twice drop constraint twice_u_check; select braid.enable_subscription('$name')");
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], qw(twice fact));

# Sessions that insert some of the keys: who waits for whom, and who wins, is as it is row by row.
for my $end (qw(commit rollback))
{
	my $base = $end eq 'commit' ? 70000 : 80000;
	my $session = $paris->background_psql('postgres', on_error_stop => 1);
	$session->query_safe("begin; insert into fact values ($base + 20, -1), ($base + 40, -1)");
	backlog($tokyo, $paris, $name, sub {
		$tokyo->safe_psql('postgres', apart(map { "insert into fact values ($base + $_, 1)" } 1 .. 60));
	});
	ok(wait_until(sub { count($paris, q[count(*) from pg_stat_activity where backend_type = 'braid applier' and wait_event_type = 'Lock']) > 0 }, 30), 'an applier waits');
	$session->query_safe($end);
	$session->quit;
	caught_up($paris, $tokyo);
	# The session's rows are the newer ones: its transaction committed last.
	my $kept = $end eq 'commit' ? 2 : 0;
	is(count($paris, "count(*), count(*) filter (where v = -1) from fact where k > $base and k <= $base + 60"), "60|$kept", "a session that inserts the same keys: $end");
	$tokyo->safe_psql('postgres', "update fact set v = 2 where k > $base and k <= $base + 60");
	caught_up($paris, $tokyo);
}
same_tables([ $tokyo, $paris ], 'fact');
sound($paris, 'at the end');
is(status($paris, $name)->{last_error}, '', 'no error is left');

done_testing();
