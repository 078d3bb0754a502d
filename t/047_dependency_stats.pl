# Values of braid.dependency_stats for loads whose shape is known.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '', conf => "braid.apply_buffer_size = '1MB'\n");
on_all(q[
	create table item (id int primary key, n int not null);
	create table hot (id int primary key, n int not null);
	create table cleared (id int primary key);
	create table whole (id int, n int);
	alter table whole replica identity full;
	create table odd (id int primary key, n int);
	create table fired (id int primary key);
	create table large (id int primary key, t text);
], $tokyo, $paris);
# This node's constraints order more than the provider's keys do.
$paris->safe_psql('postgres', q[
	create unique index on odd (n);
	create function fire() returns trigger language plpgsql as $$ begin return new; end $$;
	create trigger fire before insert on fired for each row execute function fire();
	alter table fired enable always trigger fire;
]);
$tokyo->safe_psql('postgres', 'insert into hot values (1, 0); insert into whole values (1, 0)');
my $name = subscribe($paris, $tokyo);

sub stats
{
	my $row = $paris->safe_psql('postgres',
		"select key || '=' || coalesce(value, '') from braid.dependency_stats s, jsonb_each_text(to_jsonb(s)) where s.subscription = '$name'");
	return { map { /^([^=]+)=(.*)$/s ? ($1 => $2) : () } split /\n/, $row };
}

# Runs `work`, which makes that many transactions, and returns the growth of these columns.
sub grown
{
	my ($transactions, $work, @columns) = @_;
	# Transactions that a leader has not confirmed would be scheduled again after a restart.
	my $end = Braid::end_of_commits($tokyo);
	$tokyo->poll_query_until('postgres', "select bool_and(confirmed_flush_lsn >= '$end') from pg_replication_slots where slot_name !~ '^braid_deletions'") or die 'not confirmed';
	my $before = stats();
	$work->();
	caught_up($paris, $tokyo);
	my $now;
	wait_until(sub { $now = stats(); ($now->{scheduled} // 0) >= $before->{scheduled} + $transactions }, 20);
	is($now->{scheduled} - $before->{scheduled}, $transactions, "$transactions transactions");
	return { map { $_ => $now->{$_} - $before->{$_} } @columns };
}

# So many transactions, each of which runs `sql` with $1 for 1, 2, 3...
sub each_of
{
	my ($count, $sql) = @_;
	$sql =~ s/\$1/i/g;
	$tokyo->safe_psql('postgres', "do \$\$ begin for i in 1 .. $count loop $sql; commit; end loop; end \$\$");
	return;
}

# Likewise, with the transactions held back here until all are in flight; returns the statistics.
sub held_up
{
	my ($table, $count, $sql) = @_;
	my $holder = $paris->background_psql('postgres');
	$holder->query_safe("begin; lock table $table in exclusive mode");
	each_of($count, $sql);
	my $seen;
	wait_until(sub { $seen = stats(); $seen->{in_flight} >= $count }, 20);
	$holder->query_safe('commit');
	$holder->quit;
	return $seen;
}

is_deeply([ @{ stats() }{qw(edges in_flight width table_barriers all_barriers batches consolidated large)} ], [ (0) x 8 ], 'nothing yet');

my ($seen, $grown);
$grown = grown(40, sub { $seen = held_up('item', 40, 'insert into item values ($1, 0)') }, qw(without_edge edges local_commits table_barriers all_barriers));
is("$seen->{in_flight} $seen->{width}", '40 40', 'inserts of forty rows can all run side by side');
is_deeply($grown, { without_edge => 40, edges => 0, local_commits => 40, table_barriers => 0, all_barriers => 0 }, 'and none waits for another');
ok(wait_until(sub { my $now = stats(); "$now->{in_flight} $now->{width}" eq '0 0' }, 10), 'when all are applied nothing is in flight');
is(stats()->{width_max}, 40, 'the most is remembered');

$grown = grown(40, sub { $seen = held_up('hot', 40, 'update hot set n = n + 1 where id = 1') }, qw(without_edge edges local_commits));
is("$seen->{in_flight} $seen->{width}", '40 1', 'updates of one row run one after the other');
is_deeply($grown, { without_edge => 1, edges => 39, local_commits => 40 }, 'each but the first waits for the one before');
my $mean = stats()->{width_mean};
ok($mean >= 1 && $mean <= 40, "the mean is between: $mean");

# Barriers, by reason.
my @reasons = map { "barriers_$_" } qw(truncate unkeyed index trigger size);
sub barriers
{
	my ($sql, $expected) = @_;
	my $grown = grown(1, sub { $tokyo->safe_psql('postgres', $sql) }, qw(table_barriers all_barriers large), @reasons);
	is(join(' ', map { $grown->{$_} ? "$_=$grown->{$_}" : () } qw(table_barriers all_barriers large), @reasons), $expected, $sql);
	return;
}
barriers('truncate cleared', 'table_barriers=1 barriers_truncate=1');
barriers('update whole set n = 1', 'table_barriers=1 barriers_unkeyed=1');
barriers('insert into odd values (1, 1), (2, 2)', 'table_barriers=1 barriers_index=1');
barriers('insert into fired values (1)', 'all_barriers=1 barriers_trigger=1');
barriers('begin; truncate cleared; insert into odd values (3, 3); commit', 'table_barriers=1 barriers_truncate=1 barriers_index=1');
barriers(q[insert into large select i, repeat(md5(i::text), 10) from generate_series(1, 20000) i], 'all_barriers=1 large=1 barriers_size=1');
barriers('insert into item values (1001, 0)', '');

# Batches: each row tells by its xmin which commit wrote it.
sub backlog
{
	my ($count, $sql) = @_;
	$paris->safe_psql('postgres', "select braid.disable_subscription('$name')");
	$tokyo->poll_query_until('postgres', q[select not bool_or(active) from pg_replication_slots where slot_name !~ '^braid_deletions']) or die 'still active';
	is($paris->safe_psql('postgres', 'select count(*) from braid.dependency_stats'), 0, 'one that does not run has no row');
	each_of($count, $sql);
	$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
	return;
}
# Alters the subscription, and waits for the leader that runs with these options.
sub alter
{
	my ($options, $what) = @_;
	ok(alter_running($paris, $name, $options) && wait_until(sub { defined stats()->{scheduled} }, 20), $what);
	return;
}
alter(q[apply_mode => 'batch'], 'it runs in batches');
$grown = grown(300, sub { backlog(300, 'insert into item values (2000 + $1, 0)') }, qw(local_commits batches consolidated retries without_edge));
my $of = q[from (select count(*) as n from item where id > 2000 group by xmin::text) c];
my $commits = $paris->safe_psql('postgres', "select count(*) $of");
is_deeply($grown, {
	local_commits => $commits, consolidated => 0, retries => 0, without_edge => 300,
	batches => $paris->safe_psql('postgres', "select count(*) $of where n > 1"),
}, "300 transactions were $commits");
cmp_ok($commits, '<', 30, 'far fewer');
my $now = stats();
is("$now->{batch_max} $now->{batch_mean}", $paris->safe_psql('postgres', "select max(n) || ' ' || round(avg(n) filter (where n > 1), 1) $of"), 'how large they are');

# A transaction that waits for a common row looks up its other rows meanwhile. The common row is
# locked until an applier waits for another one, which may not happen if both are fast.
my $locker = $paris->background_psql('postgres');
$grown = grown(8000, sub {
	$locker->query_safe('begin; select from hot where id = 1 for update');
	backlog(8000, 'with h as (update hot set n = n + 1 where id = 1) update item set n = n + 1 where id = $1 % 1000 + 1');
	wait_until(sub { $paris->safe_psql('postgres', q[select count(*) > 0 from braid.apply_workers where state = 'waiting for a dependency']) eq 't' }, 20);
	$locker->query_safe('commit');
}, qw(sought_ahead retries));
$locker->quit;
cmp_ok($grown->{sought_ahead}, '>', 0, "$grown->{sought_ahead} rows were looked for ahead");
is($grown->{retries}, 0, 'which nobody had to give way for');
same_tables([ $tokyo, $paris ], qw(item hot));

# Consolidation: of each local commit's changes of the row the last one is written.
alter(q[consolidate => true], 'it consolidates');
$grown = grown(300, sub { backlog(300, 'update hot set n = n + 1 where id = 1') }, qw(local_commits consolidated));
is($grown->{local_commits} + $grown->{consolidated}, 300, 'each change was written, or a later one for it');
cmp_ok($grown->{consolidated}, '>', 200, "$grown->{consolidated} of 300 changes were not written");
same_tables([ $tokyo, $paris ], qw(item hot cleared whole odd fired large));

# The wait event of each process: the same names in both views, from PostgreSQL 17 on.
my $names = "select distinct wait_event from braid.apply_workers where subscription = '$name' and wait_event is not null order by 1";
ok($paris->poll_query_until('postgres', $names, "BraidApplierWork\nBraidLeaderProvider"), 'nothing to do: the leader waits for the provider, appliers for work');
alter(q[apply_mode => 'parallel', consolidate => false], 'it applies side by side');
sub waits
{
	my ($event, $what) = @_;
	ok(wait_until(sub { $paris->safe_psql('postgres', $names) =~ /^$event$/m }, 20), $what) or diag($paris->safe_psql('postgres', 'table braid.apply_workers'));
	my $shown = $paris->safe_psql('postgres',
		"select a.wait_event_type || ' ' || a.wait_event from braid.apply_workers w join pg_stat_activity a using (pid) where w.wait_event = '$event' limit 1");
	my $expected = $paris->pg_version >= 17 ? "Extension $event" : 'Extension Extension';
	ok(wait_until(sub {
		$paris->safe_psql('postgres', "select a.wait_event_type || ' ' || a.wait_event from braid.apply_workers w join pg_stat_activity a using (pid) where w.wait_event = '$event' limit 1") eq $expected;
	}, 10), "pg_stat_activity says $expected") or diag($shown);
	return;
}
waits('BraidLeaderProvider', 'the leader waits for the provider');
waits('BraidApplierWork', 'an applier waits for work');
# One of each applier's runs changes a row that is locked; what comes after it waits for its turn,
# or for the row.
my $holder = $paris->background_psql('postgres');
$holder->query_safe('begin; select from hot where id = 1 for update');
$tokyo->safe_psql('postgres', q[begin; update hot set n = n + 1 where id = 1; insert into item values (5001, 0), (5002, 0), (5003, 0); commit]);
$tokyo->safe_psql('postgres', 'insert into item values (6001, 0), (6002, 0), (6003, 0)');
waits('BraidApplierTurn', 'an applier waits for its turn');
$holder->query_safe('commit');
caught_up($paris, $tokyo);
$holder->query_safe('begin; select from hot where id = 1 for update');
$tokyo->safe_psql('postgres', q[begin; update hot set n = n + 1 where id = 1; insert into item values (7001, 0), (7002, 0), (7003, 0); commit]);
$tokyo->safe_psql('postgres', q[begin; update hot set n = n + 1 where id = 1; insert into item values (8001, 0), (8002, 0), (8003, 0); commit]);
waits('BraidApplierDependency', 'an applier waits for a transaction that its own depends on');
# More than there is room for.
$tokyo->safe_psql('postgres', 'do $$ begin for i in 1 .. 40 loop insert into large select 100000 + 1000 * i + k, repeat(md5(k::text), 10) from generate_series(1, 300) k; commit; end loop; end $$');
waits('BraidLeaderAppliers', 'the leader waits for room');
$holder->query_safe('commit');
caught_up($paris, $tokyo);
# Likewise in relaxed order: one transaction after the other, and in batches, while an applier waits
# with a batch.
for my $mode ('parallel', 'batch')
{
	alter("commit_order => 'relaxed', apply_mode => '$mode'", "relaxed, $mode");
	waits('BraidLeaderProvider', 'the leader waits for the provider');
	waits('BraidApplierWork', 'an applier waits for work');
	my $base = $mode eq 'batch' ? 20000 : 10000;
	$holder->query_safe('begin; select from hot where id = 1 for update');
	for my $part (1, 2)
	{
		# More than is joined, so that each goes to another applier.
		$tokyo->safe_psql('postgres', "begin; update hot set n = n + 1 where id = 1; insert into item select $base + 2000 * $part + i, 0 from generate_series(1, 1100) i; commit");
	}
	waits('BraidApplierDependency', 'an applier waits for a transaction that another depends on');
	ok(wait_until(
			sub {
				$paris->safe_psql('postgres', "select state from braid.apply_workers where subscription = '$name' and wait_event = 'BraidApplierDependency'") eq
				  'waiting for a dependency';
			}, 10),
		'and says so');
	$holder->query_safe('commit');
	caught_up($paris, $tokyo);
}
alter(q[commit_order => 'source', apply_mode => 'parallel'], 'in the order of the source again');
$paris->safe_psql('postgres', "select braid.set_rate_limit('$name', rows_per_second => 20)");
# The leader knows the limit once the manager has passed it on.
my $key = 100_000;
wait_until(sub {
	each_of(100, "insert into item values ($key + \$1, 0)");
	$key += 100;
	return $paris->safe_psql('postgres', $names) =~ /^BraidRateLimit$/m;
}, 20);
waits('BraidRateLimit', 'the rate limit holds the leader back');
$paris->safe_psql('postgres', "select braid.set_rate_limit('$name')");
# A table that is not copied yet is what its changes wait for.
caught_up($paris, $tokyo);
$holder->query_safe('begin; lock table hot in exclusive mode');
$paris->safe_psql('postgres', "select braid.resync_table('$name', 'hot')");
# A change that the leader hands out before it knows of the copy is left out, as the copy brings it.
wait_until(sub {
	$tokyo->safe_psql('postgres', 'update hot set n = n + 1 where id = 1');
	return $paris->safe_psql('postgres', $names) =~ /^BraidLeaderTables$/m;
}, 20);
waits('BraidLeaderTables', 'the leader waits for a table');
$holder->query_safe('commit');
$holder->quit;
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], qw(item hot large));

done_testing();
