# Apply mode batch: a backlog is committed in far fewer transactions than at the provider, with the
# same result. Tables of every kind, a transaction in the middle that can't be applied, and changes
# of the subscriber's tables meanwhile.

use strict;
use warnings;

use Braid;
use Churn;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '', conf => "allow_in_place_tablespaces = on\n");

churn_tables($tokyo, $paris);
my $name = subscribe($paris, $tokyo, apply_mode => q('batch'));

sub count { return $_[0]->safe_psql('postgres', "select $_[1]"); }

# A backlog of everything.
my ($from, $here);
backlog($tokyo, $paris, $name, sub {
	($from, $here) = (next_xid($tokyo), next_xid($paris));
	my $tables = join ',', @keyed, 'whole';
	$tokyo->safe_psql('postgres', "call churn('{$tables}', 1500)");
	$tokyo->safe_psql('postgres', join ";\n", map { "insert into keyless values ($_, $_, 'x')" } 1 .. 50);
	# Cleared, and filled again, twice in one batch, and in one transaction.
	for my $round (1 .. 3)
	{
		$tokyo->safe_psql('postgres', "insert into cleared select k, $round from generate_series(1, 20) k");
		$tokyo->safe_psql('postgres', 'truncate cleared') if $round < 3;
	}
	$tokyo->safe_psql('postgres', 'begin; truncate cleared; insert into cleared values (1, 1); truncate cleared; insert into cleared values (2, 2); commit');
	$tokyo->safe_psql('postgres', "call churn('{$tables}', 500)");
});
caught_up($paris, $tokyo);
same_churn($tokyo, $paris);
my $sent = next_xid($tokyo) - $from;
my $used = next_xid($paris) - $here;
cmp_ok($used * 5, '<', $sent, "$sent transactions of the provider took $used here");
cmp_ok(count($paris, 'count(*) from braid.batch'), '>', 0, 'true versions of what was joined are kept');
triggers_did($tokyo, $paris);
is(status($paris, $name)->{last_error}, '', 'no error on the way');

sound($paris, 'after batches');

# A transaction in the middle of a backlog that this node refuses: all before it is applied, it is
# named, nothing after it is.
on_all('create table line (k int primary key, v int); create table refused (k int primary key, v int)', $tokyo, $paris);
$tokyo->safe_psql('postgres', 'insert into line values (0, 0); insert into refused values (0, 0)');
caught_up($paris, $tokyo);
$paris->safe_psql('postgres', 'alter table refused add constraint small check (v < 100)');
sub fill
{
	my ($first, $bad, $last) = @_;
	backlog($tokyo, $paris, $name, sub {
		my $lines = sub { join ";\n", map { "insert into line values ($_, $_)" } $_[0] .. $_[1] };
		$tokyo->safe_psql('postgres', $lines->($first, $bad - 1));
		$tokyo->safe_psql('postgres', "begin; insert into line values ($bad, $bad); insert into refused values ($bad, 666); commit");
		$tokyo->safe_psql('postgres', $lines->($bad + 1, $last));
	});
	ok(wait_until(sub { status($paris, $name)->{state} eq 'error' }, 30), 'what is refused stops the subscription');
	is(count($paris, "count(*), max(k) from line where k >= $first"), ($bad - $first) . '|' . ($bad - 1), 'at its place, all before it applied');
	my $status = status($paris, $name);
	like($status->{last_error}, qr/small/, 'the error names the constraint');
	return $status->{error_lsn};
}
my $lsn = fill(1, 150, 300);
$paris->safe_psql('postgres', "select braid.skip_transaction('$name', '$lsn')");
caught_up($paris, $tokyo);
is(count($paris, 'count(*), count(*) filter (where k = 150), max(k) from line where k > 0'), '299|0|300', 'it alone is skipped');
$paris->safe_psql('postgres', 'insert into line values (150, 150)');
fill(301, 450, 600);
$paris->safe_psql('postgres', "alter table refused drop constraint small; select braid.enable_subscription('$name')");
caught_up($paris, $tokyo);
is(count($paris, 'count(*), count(*) filter (where k = 450), max(k) from line where k > 0'), '600|1|600', 'with the cause removed it is applied, and what follows');

# Changes of the subscriber's tables while batches come and tables are kept set up: the next change
# honours each.
my $dir = PostgreSQL::Test::Utils::tempdir();
PostgreSQL::Test::Utils::append_to_file("$dir/line.sql", "\\set k random(200, 600)\nupdate line set v = v + 1 where k = :k;\n");
my $load = start_pgbench($tokyo, '-c', 2, '-R', 300, '-t', 1200, '-f', "$dir/line.sql");
my $next = 1000;
sub here { return $paris->safe_psql('postgres', $_[0]); }
# One more row, applied here; the query about it.
sub then_row
{
	my ($query, $expected, $what, $v) = @_;
	$next++;
	$tokyo->safe_psql('postgres', 'insert into line values (' . $next . ', ' . ($v // $next) . ')');
	caught_up($paris, $tokyo);
	is(here($query =~ s/\$k/$next/gr), $expected, $what);
	return;
}
then_row('select v = k from line where k = $k', 't', 'changes are applied');
here("alter table line add column d text default 'new'");
then_row('select d from line where k = $k', 'new', 'an added column has its default');
here('alter table line drop column d; create index line_v on line (v)');
then_row('set enable_seqscan = off; select k = $k from line where v = $k', 't', 'an added index has the row');
here('alter index line_v rename to line_w');
then_row('set enable_seqscan = off; select k = $k from line where v = $k', 't', 'a renamed one too');
here("create tablespace elsewhere location ''");
here('alter index line_w set tablespace elsewhere');
then_row('set enable_seqscan = off; select k = $k from line where v = $k', 't', 'a moved one too');
here('create unique index concurrently line_u on line (k, v)');
then_row('set enable_seqscan = off; select k = $k from line where v = $k and k = $k', 't', 'one made concurrently too');
here('drop index line_w');
then_row('select v = k from line where k = $k', 't', 'an index is dropped');
here('reindex table concurrently line');
then_row('set enable_seqscan = off; select v = k from line where k = $k', 't', 'the indexes are made anew, concurrently');
here('vacuum full line');
then_row('set enable_seqscan = off; select v = k from line where k = $k', 't', 'the table is rewritten');
here('cluster line using line_pkey');
then_row('set enable_seqscan = off; select v = k from line where k = $k', 't', 'and once more');
here('alter table line set tablespace elsewhere');
then_row('select v = k from line where k = $k', 't', 'the table is moved');
here('create trigger note after insert on line for each row execute function note(); alter table line enable replica trigger note');
then_row(q[select count(*) from fired where name = 'line'], '1', 'a trigger fires');
here('drop trigger note on line');
then_row(q[select count(*) from fired where name = 'line'], '1', 'and fires no more');
finish_pgbench($load);
caught_up($paris, $tokyo);
# Rows that ALTER TABLE rewrites become this node's own: a change that was on its way would lose
# against them.
here('alter table line alter v type bigint');
then_row('select v = k from line where k = $k', 't', 'a column has another type');
here('vacuum analyze line; alter table line add column g bigint generated always as (v + 1) stored');
then_row('select g - 1 = k from line where k = $k', 't', 'a generated column is');
here('alter table line drop column g');
same_tables([ $tokyo, $paris ], 'line');
is(count($paris, q[coalesce(string_agg(to_jsonb(h)::text, ' '), '') from braid.conflict_history h]), '', 'no conflict was seen');
sound($paris, 'after changes of tables');
here('alter table line add constraint small check (v < 1000000)');
$tokyo->safe_psql('postgres', 'insert into line values (9999, 1000000)');
ok(wait_until(sub { status($paris, $name)->{last_error} =~ /small/ }, 30), 'a CHECK refuses');
here("alter table line drop constraint small; select braid.enable_subscription('$name')");
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'line');

done_testing();
