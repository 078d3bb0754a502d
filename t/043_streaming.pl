# Large transactions are sent before they end: several at once, with small ones between them, with
# subtransactions and whole transactions rolled back, DDL, TOAST and truncate inside. Nothing of
# them is visible before their commit, all of it after.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep);

my $tokyo = new_node('tokyo', conf => "logical_decoding_work_mem = 64kB\n");
my $paris = new_node('paris', publication => '', conf => "braid.apply_buffer_size = 1MB\nlogical_decoding_work_mem = 64kB\n");
on_all(q[
	create table bulk (id int primary key, k int, v text);
	create table wide (id int primary key, n int, t text);
	create table small (id int primary key, n int);
	create table gone (id int primary key);
	create table late (id int primary key, v text);
	create table evens (id int primary key, v text);
	create table ddl (id int primary key, v text);
], $tokyo, $paris);
$tokyo->safe_psql('postgres', q[
	insert into small select i, 0 from generate_series(1, 20) i;
	insert into gone select i from generate_series(1, 100) i;
	alter table wide alter t set storage external;
	insert into wide select i, 0, repeat(md5(i::text), 200) from generate_series(1, 50) i;
]);
my $name = subscribe($paris, $tokyo, streaming => "'on'");
is($paris->safe_psql('postgres', "select streaming from braid.subscription_detail where name = '$name'"), 'on', 'the option is shown');

sub stats
{
	my ($column) = @_;
	return $tokyo->safe_psql('postgres', "select coalesce(sum($column), 0) from pg_stat_replication_slots");
}

# How much came in, as the subscriber counts it.
sub arrived
{
	return $paris->safe_psql('postgres', "select bytes from braid.subscription_detail where name = '$name'");
}

# Total size of the files that the leader keeps at the moment.
sub spooled
{
	return $paris->safe_psql('postgres', 'select coalesce(sum(size), 0) from pg_ls_tmpdir()');
}

# One that runs on while others commit.
my $one = $tokyo->background_psql('postgres');
my $other = $tokyo->background_psql('postgres');
my $before = arrived();
$one->query_safe(q[
	begin;
	insert into bulk select i, 1, repeat('a', 100) || i from generate_series(1, 5000) i;
]);
$other->query_safe(q[
	begin;
	insert into bulk select i, 2, repeat('b', 100) || i from generate_series(100001, 103000) i;
]);
ok(wait_until(sub { arrived() > $before + 800_000 }, 30), 'changes arrive before the commit');
ok(wait_until(sub { spooled() > 500_000 }, 10), 'and are kept in a file');
is($paris->safe_psql('postgres', 'select count(*) from bulk'), '0', 'and are not seen');
$tokyo->safe_psql('postgres', 'update small set n = n + 1');
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select sum(n) from small'), '20', 'small transactions commit in between, and are confirmed');

# Of this one some subtransactions are rolled back, also one with others inside, and one of which a
# part was released.
$one->query_safe(q[
	savepoint a;
	update bulk set v = 'never' where id <= 2000;
	insert into bulk select i, 9, repeat('never', 20) from generate_series(10001, 12000) i;
	savepoint b;
	delete from bulk where id between 2001 and 3000;
	release b;
	insert into bulk select i, 9, repeat('never', 20) from generate_series(12001, 13000) i;
]);
$tokyo->safe_psql('postgres', 'update small set n = n + 1 where id <= 10');
$one->query_safe(q[
	rollback to a;
	update bulk set v = 'kept ' || id where id <= 1000;
	savepoint c;
	insert into bulk select i, 3, repeat('c', 100) from generate_series(20001, 22000) i;
	savepoint d;
	insert into bulk select i, 9, repeat('never', 20) from generate_series(30001, 32000) i;
	rollback to d;
	insert into bulk select i, 3, repeat('d', 100) from generate_series(32001, 34000) i;
	release c;
]);
# The other one commits first.
$other->query_safe(q[
	update wide set n = n + 1;
	delete from bulk where id % 7 = 0 and k = 2;
	commit;
]);
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select count(*), count(distinct k) from bulk'), $tokyo->safe_psql('postgres', 'select count(*), count(distinct k) from bulk'),
	'one that commits is there as a whole, one that runs is not');
$one->query_safe('commit');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], qw(bulk wide small));
is($paris->safe_psql('postgres', q[select count(*) from bulk where v like 'never%']), '0', 'nothing that was rolled back to a savepoint');
is(spooled(), '0', 'no file is left');
ok(wait_until(sub { stats('stream_bytes') > 1_000_000 }, 30), 'the provider has streamed');
is(stats('spill_bytes'), '0', 'and spilled nothing');

# Rolled back as a whole, also a transaction that has used a table which does not exist afterwards.
$before = arrived();
$tokyo->safe_psql('postgres', q[
	begin;
	create table never (id int primary key, v text);
	insert into never select i, repeat('x', 100) from generate_series(1, 5000) i;
	insert into bulk select i, 9, repeat('never', 20) from generate_series(50001, 55000) i;
	rollback;
	begin;
	insert into bulk select i, 9, repeat('never', 20) from generate_series(50001, 55000) i;
	delete from bulk where id <= 5000;
	rollback;
]);
# Of a backend that is killed there is no abort in WAL.
my $dying = $tokyo->background_psql('postgres', on_error_stop => 0);
my $pid = $dying->query_safe('select pg_backend_pid()');
$dying->query_safe(q[
	begin;
	insert into bulk select i, 9, repeat('never', 20) from generate_series(60001, 65000) i;
]);
ok(wait_until(sub { spooled() > 200_000 }, 30), 'one that will not end arrives');
$tokyo->safe_psql('postgres', "select pg_terminate_backend($pid)");
eval { $dying->quit };
caught_up($paris, $tokyo);
ok(wait_until(sub { spooled() eq '0' }, 30), 'and is forgotten');
same_tables([ $tokyo, $paris ], qw(bulk wide small));
is($paris->safe_psql('postgres', q[select count(*) from braid.subscription_tables where relation::text = 'never']), '0', 'a table that never was did not join');

# DDL inside. Here the columns are there already; a shape that is rolled back must not be taken for
# the one that stays. With assertions the reorder buffer itself does not bear catalog rows of a
# rolled back subtransaction whose places are used again in the same transaction
# (ReorderBufferBuildTupleCidHash): there the transaction is rolled back as a whole.
my $undo = $tokyo->safe_psql('postgres', 'show debug_assertions') eq 'on' ? 'rollback; begin; insert into ddl select i, repeat(\'v\', 100) from generate_series(1, 2000) i' : 'rollback to s';
$paris->safe_psql('postgres', 'alter table ddl add w int, add x text');
$tokyo->safe_psql('postgres', qq[
	begin;
	insert into ddl select i, repeat('v', 100) from generate_series(1, 2000) i;
	savepoint s;
	alter table ddl add w text;
	insert into ddl select i, 'never', repeat('w', 100) from generate_series(2001, 4000) i;
	$undo;
	alter table ddl add w int;
	insert into ddl select i, repeat('v', 100), i from generate_series(2001, 4000) i;
	alter table ddl add x text;
	update ddl set x = 'x' || id where id % 2 = 0;
	commit;
]);
$tokyo->safe_psql('postgres', q[insert into ddl values (5000, 'after', 1, 'it')]);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], qw(ddl));

# TOAST: large values of its own, unchanged ones of before; truncate; a table that was made in the
# transaction.
$paris->safe_psql('postgres', 'create table fresh (id int primary key, v text)');
$tokyo->safe_psql('postgres', q[
	begin;
	create table fresh (id int primary key, v text);
	insert into wide select i, 0, (select string_agg(md5((i * 1000 + j)::text), '') from generate_series(1, 400) j) from generate_series(101, 200) i;
	update wide set n = n + 1;
	truncate gone;
	insert into gone select i from generate_series(1000, 4000) i;
	insert into fresh select i, repeat('f', 100) from generate_series(1, 3000) i;
	delete from wide where id % 3 = 0;
	commit;
]);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], qw(wide gone fresh));

# A transaction that is to be left out: it fails here, and is skipped.
$paris->safe_psql('postgres', q[alter table late add constraint short check (length(v) < 50)]);
$tokyo->safe_psql('postgres', q[
	insert into late select i, repeat('l', 100) from generate_series(1, 5000) i;
	insert into late values (0, 'short');
]);
ok(wait_until(sub { status($paris, $name)->{state} eq 'error' }, 30), 'one that violates a constraint here stops the subscription');
$paris->safe_psql('postgres', "select braid.skip_transaction('$name', (select error_lsn from braid.subscription_detail where name = '$name'))");
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select * from late'), '0|short', 'and is left out alone');

# Rows per second are counted once, when they arrive.
$paris->safe_psql('postgres', "select braid.set_rate_limit('$name', rows_per_second => 4000)");
my $start = time;
$tokyo->safe_psql('postgres', q[insert into evens select i, repeat('e', 100) from generate_series(1, 16000) i]);
caught_up($paris, $tokyo);
my $took = time - $start;
cmp_ok($took, '>=', 2, "the rate limit holds ($took s)");
cmp_ok($took, '<=', 7, 'and counts once');
$paris->safe_psql('postgres', "select braid.set_rate_limit('$name')");
same_tables([ $tokyo, $paris ], qw(evens));

# Memory, with one large transaction.
my ($leader) = worker_pids($paris, 'braid leader');
my ($sender) = worker_pids($tokyo, 'walsender');

sub peak
{
	my ($pid) = @_;
	open my $file, '<', "/proc/$pid/status" or return 0;
	my ($kb) = join('', <$file>) =~ /^VmHWM:\s+(\d+) kB/m;
	return $kb / 1024;
}
my $spilled = stats('spill_bytes');
my ($leader_before, $sender_before) = (peak($leader), peak($sender));
$tokyo->safe_psql('postgres', q[insert into bulk select i, 4, repeat('m', 300) || i from generate_series(200001, 400000) i]);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], qw(bulk));
cmp_ok(peak($leader) - $leader_before, '<', 40, sprintf('the leader stays small (%.0f MB more)', peak($leader) - $leader_before));
cmp_ok(peak($sender) - $sender_before, '<', 40, sprintf('the walsender too (%.0f MB more)', peak($sender) - $sender_before));

# With streaming off it gets whole transactions.
# (What was received before the leader started again may be spilled, as PostgreSQL does not stream
# it twice.)
is(stats('spill_bytes'), $spilled, 'which was not spilled');
my $streamed = stats('stream_txns');
$paris->safe_psql('postgres', "select braid.alter_subscription('$name', streaming => 'off')");
wait_until(sub { my ($now) = worker_pids($paris, 'braid leader'); $now && $now != $leader }, 20);
$tokyo->safe_psql('postgres', q[delete from bulk where k = 4]);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], qw(bulk));
ok(wait_until(sub { stats('spill_bytes') > 0 }, 30), 'without streaming it spills');
is(stats('stream_txns'), $streamed, 'and streams no more');
is($paris->safe_psql('postgres', 'select count(*) from braid.conflict_history'), '0', 'no conflict all the while');
$one->quit;
$other->quit;

# Changes that a node has received go on to a third one, and not back to their origin.
my $osaka = new_node('osaka', publication => '');
$osaka->safe_psql('postgres', 'create table evens (id int primary key, v text); create table small (id int primary key, n int)');
$paris->safe_psql('postgres', 'create publication braid for table evens, small');
subscribe($osaka, $paris, origin => "'any'", streaming => "'on'");
my $back = subscribe($tokyo, $paris, origin => "'any'", streaming => "'on'", copy_data => 'false');
my $came_back = "select bytes from braid.subscription_detail where name = '$back'";
$before = $tokyo->safe_psql('postgres', $came_back);
$tokyo->safe_psql('postgres', q[insert into evens select i, repeat('o', 100) from generate_series(20001, 30000) i]);
caught_up($paris, $tokyo);
$paris->safe_psql('postgres', q[update evens set v = 'of paris' where id > 29000]);
$paris->safe_psql('postgres', q[insert into evens select i, repeat('p', 100) from generate_series(40001, 45000) i]);
caught_up($osaka, $paris);
caught_up($tokyo, $paris);
same_tables([ $tokyo, $paris, $osaka ], qw(evens));
cmp_ok($paris->safe_psql('postgres', q[select sum(stream_txns) from pg_stat_replication_slots]), '>', 2, 'in segments, too');
cmp_ok($tokyo->safe_psql('postgres', $came_back) - $before, '<', 1_000_000, 'its own rows did not come back');
is($tokyo->safe_psql('postgres', "select conflicts from braid.subscription_detail where name = '$back'"), '1000', 'updates of rows from elsewhere are counted');
is($tokyo->safe_psql('postgres', q[select count(*) from braid.conflict_history where concurrent or kind <> 'update_origin_differs']), '0', 'and were no conflicts');

done_testing();
