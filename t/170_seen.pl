# A change that meets a row that its writer had seen is counted as a conflict, but is not recorded.
# The rows themselves show that unrecorded changes had seen the row. Changes that may have been
# concurrent are recorded, also under load in both directions.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my $conf = "max_worker_processes = 32\nautovacuum = off\nbraid.clock_skew_limit = 0\nlogical_decoding_work_mem = 64kB\n";
my $tokyo = new_node('tokyo', conf => $conf);
my $paris = new_node('paris', conf => $conf);
my @both = ($tokyo, $paris);
on_all(q[
	create table item (id int primary key, code text unique, v text, n int);
	create table wide (id int primary key, v text);
	create table hot (id int primary key, version text, seen text);
	create table moved (id int, v text, primary key (id, v)) partition by list (v);
	create table moved_a partition of moved for values in ('a');
	create table moved_b partition of moved for values in ('b', 'c');
], @both);
subscribe($paris, $tokyo);
subscribe($tokyo, $paris);
$tokyo->safe_psql('postgres', q[
	insert into item select i, 'c' || i, 'first', i from generate_series(1, 20) i;
	insert into hot select i, 'first', '' from generate_series(1, 10) i;
]);
my @streams = ([ $paris, 'paris_from_tokyo' ], [ $tokyo, 'tokyo_from_paris' ]);

sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }

sub history
{
	my ($node, $table) = @_;
	return sql($node, qq[
		select string_agg(concat_ws(' ', key ->> 'id', kind, winner, coalesce(concurrent::text, 'unknown'), columns, constraint_name), ', ' order by (key ->> 'id')::int)
		from braid.conflict_history where relation::text ~ '^$table']);
}

sub counted { return sql($_[0], "select coalesce(sum(conflicts), 0) from braid.conflict_stats where relation::text ~ '^$_[1]'"); }

# One after the other, each in sight of what the other has done.
sub in_turn
{
	while (my ($node, $sql) = splice @_, 0, 2) { sql($node, $sql); converged(@both); }
	return;
}

sub cut
{
	converged(@both);
	sql($_->[0], "select braid.disable_subscription('$_->[1]')") for @streams;
	$_->poll_query_until('postgres', q[select not coalesce(bool_or(active), false) from pg_replication_slots where slot_name !~ '^braid_deletions']) for @both;
	return;
}

# Runs changes while they are cut off from each other, first those of the first.
sub apart
{
	my ($first, $second) = @_;
	cut();
	sql($tokyo, $first);
	sql($paris, $second);
	sql($_->[0], "select braid.enable_subscription('$_->[1]')") for @streams;
	converged(@both);
	return;
}

in_turn(
	$tokyo => q[update item set v = 'tokyo'],
	$paris => q[update item set v = 'paris' where id <= 5; delete from item where id = 20],
	$tokyo => q[update item set v = 'tokyo again' where id <= 5],
	$paris => q[begin; update item set n = 0 where id = 1; savepoint s; update item set n = 1 where id = 2; update item set n = 2 where id = 2; commit],
);
is(history($_, 'item'), '', 'what was seen is not recorded at ' . $_->name) for @both;
is(counted($tokyo, 'item'), 8, 'and counted there');
is(counted($paris, 'item'), 5, 'and here');
in_turn($tokyo => q[insert into moved values (1, 'a'), (2, 'b')], $paris => q[update moved set v = 'b' where id = 1; update moved set v = 'c' where id = 2]);
is(history($tokyo, 'moved'), '', 'a row that was seen and moves on');

apart(q[update item set v = 'tokyo', n = 5 where id = 10; update item set v = 'tokyo' where id = 11; insert into item values (30, 'c30', 'tokyo', 1), (31, 'same', 'tokyo', 1); delete from item where id = 12],
	q[update item set v = 'paris' where id = 10; delete from item where id = 11; insert into item values (30, 'c30', 'paris', 1), (32, 'same', 'paris', 1); update item set v = 'paris' where id = 12]);
is(history($tokyo, 'item'),
	'10 update_origin_differs remote true {v,n}, 11 delete_origin_differs remote true, 12 update_deleted remote true, 30 insert_exists remote true {v} item_pkey, 32 insert_exists remote true {id,v} item_code_key',
	'what was not seen is recorded, with the columns and the constraint');
is(history($paris, 'item'),
	'10 update_origin_differs local true {v,n}, 11 update_deleted local true, 12 delete_origin_differs local true, 30 insert_exists local true {v} item_pkey, 31 insert_exists local true {id,v} item_code_key',
	'at the other node too') or diag(sql($paris, 'select conflict_id, kind, winner, key, columns, concurrent, local_row, remote_row, reason from braid.conflict_history'));
is(sql($tokyo, 'select bool_and(conflict_id < before) from (select conflict_id, lag(conflict_id) over () before from braid.conflict_history) h'), 't', 'the newest comes first');

# The rows that a subscription has brought are known while it is disabled.
in_turn($tokyo => q[update item set v = 'tokyo' where id = 18]);
my $counted = counted($tokyo, 'item');
cut();
sql($paris, q[update item set v = 'seen' where id = 18]);
sql($tokyo, "select braid.enable_subscription('tokyo_from_paris')");
caught_up($tokyo, $paris);
is(counted($tokyo, 'item'), $counted + 1, 'the node that it is disabled at tells what it has');
is(sql($tokyo, q[select count(*) from braid.conflict_history where key ->> 'id' = '18']), '0', 'so it is not recorded');
sql($paris, "select braid.enable_subscription('paris_from_tokyo')");
converged(@both);

# The same for changes that are collected before they are applied.
for my $options (q[apply_mode => 'batch'], q[apply_mode => 'batch', consolidate => true], q[apply_mode => 'aggregate'], q[apply_mode => 'parallel', consolidate => true])
{
	for my $stream (@streams)
	{
		sql($stream->[0], "select braid.alter_subscription('$stream->[1]', $options)");
		sql($stream->[0], "select braid.wait_for_subscription('$stream->[1]')");
	}
	my @before = map { history($_, 'item') } @both;
	my @counted = map { counted($_, 'item') } @both;
	in_turn(
		$tokyo => q[update item set v = 'tokyo' where id between 13 and 16],
		$paris => q[begin; update item set v = 'paris' where id = 13; update item set n = n + 1 where id = 14; update item set n = n + 1 where id in (14, 15); commit],
		$tokyo => q[begin; update item set n = n + 1 where id = 13; update item set v = 'tokyo again' where id in (13, 14); commit],
	);
	is(history($both[$_], 'item'), $before[$_], "$options: what was seen is not recorded at " . $both[$_]->name) for 0, 1;
	cmp_ok(counted($both[$_], 'item'), '>', $counted[$_], "$options: but counted") for 0, 1;
	apart(q[update item set v = 'not seen' where id = 17], q[update item set n = 99 where id = 17]);
	is(sql($_, q[select concurrent from braid.conflict_history where key ->> 'id' = '17' order by conflict_id desc limit 1]), 't', "$options: what was not seen is recorded at " . $_->name) for @both;
	in_turn($tokyo => q[delete from braid.conflict_record where key ->> 'id' = '17'; update item set v = 'x' where id = 17], $paris => q[delete from braid.conflict_record where key ->> 'id' = '17']);
}
for my $stream (@streams)
{
	sql($stream->[0], "select braid.alter_subscription('$stream->[1]', apply_mode => 'parallel', consolidate => false)");
	sql($stream->[0], "select braid.wait_for_subscription('$stream->[1]')");
}

# The same for large transactions, which are sent while they are in progress. They are applied once
# they have committed, because they have conflicts.
sub streamed { return sql($paris, q[select coalesce(sum(stream_txns), 0) from pg_stat_replication_slots]) }
sub while_running { return sql($tokyo, q[select coalesce(sum(applied_while_running), 0) from braid.dependency_stats where subscription = 'tokyo_from_paris']) }
sub large
{
	my ($what, $when) = @_;
	my $streams = streamed();
	my $large = $paris->background_psql('postgres');
	$large->query_safe(q[begin; update wide set v = v || ' here'; savepoint s; update wide set v = v || ' again' where id > 1000]);
	ok(wait_until(sub { streamed() > $streams }, 20), "$what: it leaves while it runs");
	$when->() if $when;
	$large->query_safe('commit');
	$large->quit;
	converged(@both);
	return;
}
in_turn($tokyo => q[insert into wide select i, 'first' from generate_series(1, 2000) i]);
for my $options (q[streaming => 'parallel'], q[streaming => 'on'], q[streaming => 'on', apply_mode => 'batch', consolidate => true])
{
	sql($tokyo, "select braid.alter_subscription('tokyo_from_paris', $options)");
	sql($tokyo, "select braid.wait_for_subscription('tokyo_from_paris')");
	my $before = counted($tokyo, 'wide');
	large($options);
	is(history($tokyo, 'wide'), '', "$options: what was seen is not recorded");
	is(counted($tokyo, 'wide'), $before + 2000, "$options: but counted");
	in_turn($tokyo => q[update wide set v = 'seen at tokyo']);
	# The update that arrives first prunes the page of its row, where the versions are that the
	# large transaction has replaced: an older snapshot keeps them.
	my $reader = $paris->background_psql('postgres');
	$reader->query_safe(q[begin isolation level repeatable read; select count(*) from wide]);
	apart(q[update wide set v = 'not seen' where id = 7], q[update wide set v = v || ' large']);
	$reader->quit;
	is(history($tokyo, 'wide'), '7 update_origin_differs remote true {v}', "$options: what was not seen is recorded");
	sql($_, q[delete from braid.conflict_record where relation = 'wide'::regclass]) for @both;
	in_turn($tokyo => q[update wide set v = 'tokyo']);
}
# Without conflicts, they can be applied while they are in progress. The versions that they replace
# are of another node, and have not arrived here yet.
sql($tokyo, q[select braid.alter_subscription('tokyo_from_paris', streaming => 'parallel', apply_mode => 'parallel', consolidate => false)]);
sql($tokyo, q[select braid.wait_for_subscription('tokyo_from_paris')]);
in_turn($paris => q[update wide set v = 'paris']);
sql($paris, q[select pg_replication_origin_create('braid/osaka/1')]);
sql($paris, q[select pg_replication_origin_session_setup('braid/osaka/1'); update wide set v = 'osaka']);
my $running = while_running();
large('no conflict', sub { ok(wait_until(sub { sql($tokyo, q[select exists (select from pg_locks where relation = 'wide'::regclass and mode = 'RowExclusiveLock')]) eq 't' }, 20), 'and is applied') });
is(while_running(), $running + 1, 'and was when it committed');

# A virtual generated column is no part of a stored row, nor of what is recorded.
if (sql($tokyo, 'show server_version_num') >= 180000)
{
	sql($_, 'create table twice (id int primary key, n int, doubled int generated always as (n * 2) virtual, made int generated always as (n * 3) stored)') for @both;
	sql($tokyo, 'insert into twice values (1, 1)');
	converged(@both);
	apart('update twice set n = 2', 'update twice set n = 3');
	is(sql($_, q[select local_row is not null and not local_row ? 'doubled' and not remote_row ? 'doubled' and local_row ? 'made' from braid.conflict_history where relation = 'twice'::regclass]),
		't', 'a virtual column is left out at ' . $_->name) for @both;
	is(sql($tokyo, q[select (braid.restore_conflict(conflict_id)).new_row ->> 'n' from braid.conflict_history where relation = 'twice'::regclass]), '2', 'the row is put back without it');
	is(sql($tokyo, 'select doubled from twice'), '4', 'and computes it');
	converged(@both);
}

# Each update says which version it has replaced, and so whether the conflict was one.
sql($_, q[alter system set braid.conflict_history = 'all'; select pg_reload_conf()]) for @both;
ok(wait_until(sub { join(' ', map { sql($_, 'show braid.conflict_history') } @both) eq 'all all' }, 10), 'all are recorded');
my $script = PostgreSQL::Test::Utils::tempdir() . '/hot.sql';
append_to_file($script, q[
\set id random(1, 10)
update hot set seen = version, version = gen_random_uuid() where id = :id;
\sleep 3 ms
]);
# Once an old row version is pruned, its writer is not known any more. Here none is pruned, because
# a session might still read it.
my @readers = map { my $session = $_->background_psql('postgres'); $session->query_safe('begin isolation level repeatable read; select count(*) from hot'); $session } @both;
my @load = map { start_pgbench($_, '-f', $script, '-c', '4', '-T', '6') } @both;
finish_pgbench($_) for @load;
converged(@both);
# However far behind each other they were, these are seen.
my $change = q[update hot set seen = version, version = gen_random_uuid()];
in_turn($tokyo => $change, $paris => $change, $tokyo => $change);
$_->quit for @readers;
same_tables(\@both, 'hot');
for my $node (@both)
{
	my $name = $node->name;
	my ($all, $seen, $wrong, $missed, $concurrent) = split /\|/, sql($node, q[
		select count(*), count(*) filter (where concurrent = false),
		       count(*) filter (where concurrent = false and remote_row ->> 'seen' <> local_row ->> 'version'),
		       count(*) filter (where concurrent is null and remote_row ->> 'seen' = local_row ->> 'version'),
		       count(*) filter (where concurrent and remote_row ->> 'seen' = local_row ->> 'version')
		from braid.conflict_history where relation = 'hot'::regclass]);
	note("$name: $all conflicts, $seen were seen, of $missed that is not known");
	is($all, counted($node, 'hot'), "all of them are recorded at $name");
	cmp_ok($seen, '>', 0, 'there are some that were seen');
	is($wrong, 0, 'none that was not is taken for one');
	is($concurrent, 0, 'nor the other way round');
	is($missed, 0, 'of none it is not known');
}

$_->stop for @both;
done_testing();
