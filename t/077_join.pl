# A third node joins while the two others write. The rows that it copies from one of them keep their
# versions. So later changes of the other node change nothing if they are older, or if the first
# node had seen them already. Deleted rows stay deleted.

use strict;
use warnings;

use Braid;
use Kill;
use Test::More;
use Time::HiRes qw(sleep);

my $all = 'for all tables with (publish_via_partition_root)';
my $tokyo = new_node('tokyo', publication => $all);
my $paris = new_node('paris', publication => $all);
on_all(q[
	create table account (id int primary key, n int not null, note text);
	create table part (id int, place int, n int not null, primary key (id, place)) partition by list (place);
	create table part_1 partition of part for values in (1);
	create table part_2 (n int not null, place int, id int, primary key (id, place));
	alter table part attach partition part_2 for values in (2);
	create table emptied (id int primary key);
], $tokyo, $paris);
subscribe($paris, $tokyo);
subscribe($tokyo, $paris, copy_data => 'false');
$tokyo->safe_psql('postgres', q[
	insert into account select i, 0, 'start' from generate_series(1, 40) i;
	insert into part select i, 1 + i % 2, 0 from generate_series(1, 40) i;
	insert into emptied values (1);
]);
caught_up($paris, $tokyo);

# The version of a row, for everybody who may read the table.
is($paris->safe_psql('postgres', 'select v.node from account a, braid.row_version(a.tableoid, a.ctid) v where a.id = 1'), 'tokyo', 'a row has a version');
is( $paris->safe_psql('postgres', 'select v.committed_at = pg_xact_commit_timestamp(a.xmin) from account a, braid.row_version(a.tableoid, a.ctid) v where a.id = 1'),
	't', 'of its transaction');
is($tokyo->safe_psql('postgres', 'select v.node from part a, braid.row_version(a.tableoid, a.ctid) v where a.id = 2'), 'tokyo', 'one in a partition, and written here');
is($tokyo->safe_psql('postgres', q[select count(*) from braid.row_version('account'::regclass, '(9999,1)')]), '0', 'a place without a row has none');
is($tokyo->safe_psql('postgres', q[select count(*) from braid.row_version('account'::regclass, '(0,0)')]), '0', 'nor has no place');
like((attempt_error($tokyo, q[select braid.row_version('part'::regclass, '(0,1)')]))[0], qr/42809|only rows of ordinary tables/, 'a partitioned table has no rows');
$tokyo->safe_psql('postgres', 'create role watcher; grant braid_monitor to watcher');
like((attempt_error($tokyo, q[set role watcher; select braid.row_version('account'::regclass, '(0,1)')]))[0], qr/permission denied/, 'for whom may read it');

# Oslo: the slot at paris exists, and nothing of it is applied yet.
my $oslo = new_node('oslo', publication => $all);
$oslo->safe_psql('postgres', q[
	create table account (id int primary key, n int not null, note text);
	create table part (place int, id int, n int not null, primary key (id, place));
	create table emptied (id int primary key);
]);
my $from_paris = subscribe($oslo, $paris, copy_data => 'false');
disable($oslo, $from_paris);
subscribe($_, $oslo, copy_data => 'false') for $tokyo, $paris;

# Oslo gets the next changes of paris later. Tokyo sees them, and overwrites some rows.
$paris->safe_psql('postgres', q[
	update account set n = 1, note = 'paris' where id <= 20;
	delete from account where id in (21, 22);
	insert into account values (101, 1, 'paris'), (102, 1, 'paris'), (103, 1, 'paris');
	update part set n = 1 where id <= 20;
	insert into part values (101, 1, 1), (102, 2, 1);
]);
caught_up($tokyo, $paris);
$tokyo->safe_psql('postgres', q[
	update account set n = 2, note = 'tokyo' where id <= 10;
	delete from account where id in (11, 12, 101);
	insert into account values (21, 2, 'again');
	update account set id = 203 where id = 103;
	update part set n = 2 where id <= 10;
	delete from part where id in (11, 12, 101);
	update part set place = 1 where id = 102;
]);
caught_up($paris, $tokyo);
# And what tokyo will not have seen when it is copied.
disable($tokyo, 'tokyo_from_paris');
$paris->safe_psql('postgres', q[
	update account set n = 3, note = 'late' where id in (1, 30);
	delete from account where id = 2;
	insert into account values (104, 3, 'late');
	update part set n = 3 where id in (1, 30);
	truncate emptied;
]);
$tokyo->safe_psql('postgres', 'insert into emptied values (2)');

my $from_tokyo = subscribe($oslo, $tokyo);
my $state = q[select id, n, note from account order by 1];
is($oslo->safe_psql('postgres', $state), $tokyo->safe_psql('postgres', $state), 'the copy is what tokyo has');
cmp_ok($oslo->safe_psql('postgres', 'select count(*) from braid.copied_version'), '>=', 40, 'versions came along');
is($oslo->safe_psql('postgres', q[select string_agg(distinct v.node, ' ' order by v.node) from account a, braid.row_version(a.tableoid, a.ctid) v]), 'paris tokyo', 'of both nodes');
is($oslo->safe_psql('postgres', 'select bool_and(v.committed_at < ready_at - interval \'0.01 s\') from account a, braid.row_version(a.tableoid, a.ctid) v, braid.subscription_tables t where t.relation::text = \'account\' and t.subscription = \'oslo_from_tokyo\''),
	't', 'older than the copy');

$oslo->safe_psql('postgres', "select braid.enable_subscription('$from_paris'); select braid.wait_for_subscription('$from_paris')");
$tokyo->safe_psql('postgres', q[select braid.enable_subscription('tokyo_from_paris')]);
converged($tokyo, $paris, $oslo);
same_tables([ $tokyo, $paris, $oslo ], 'account', 'emptied');
is($oslo->safe_psql('postgres', 'select id from emptied'), '2', 'a late truncate leaves what was copied and is newer');
my $parts = 'select id, place, n from part order by 1, 2';
is($oslo->safe_psql('postgres', $parts), $tokyo->safe_psql('postgres', $parts), 'part is the same on oslo');
is($paris->safe_psql('postgres', $parts), $tokyo->safe_psql('postgres', $parts), 'and on paris');
is($oslo->safe_psql('postgres', "select string_agg(id || note, ' ' order by id) from account where id in (1, 2, 5, 15, 21, 22, 30, 101, 103, 104, 203)"),
	'1late 5tokyo 15paris 21again 30late 104late 203paris', 'each row is the last one written');

# The same at random: rows of few keys are written at both, while a fourth node joins.
on_all(q[create table hot (k int primary key, n int not null, who text)], $tokyo, $paris, $oslo);
$_->safe_psql('postgres', q[select braid.refresh_subscription(name) from braid.subscription_status]) for $tokyo, $paris, $oslo;
$_->safe_psql('postgres', q[select braid.wait_for_subscription(name) from braid.subscription_status]) for $tokyo, $paris, $oslo;
my @old = ($tokyo, $paris, $oslo);
for my $node (@old)
{
	my $name = $node->name;
	start_load($node, qq[
\\set k random(1, 60)
\\set what random(1, 3)
\\if :what = 3
delete from hot where k = :k;
\\else
insert into hot values (:k, 1, '$name') on conflict (k) do update set n = hot.n + 1, who = excluded.who;
\\endif
] => '-c 1 -R 60');
}
sleep 2;
my $lima = new_node('lima', publication => $all, conf => "max_logical_replication_workers = 8\n");
$lima->safe_psql('postgres', q[
	create table account (id int primary key, n int not null, note text);
	create table part (place int, id int, n int not null, primary key (id, place));
	create table emptied (id int primary key);
	create table hot (k int primary key, n int not null, who text);
]);
# The slots come first: from there on nothing is lost. Nothing is applied until the copy is there.
my @disabled;
for my $other ($paris, $oslo)
{
	$other->safe_psql('postgres', q[select pg_create_logical_replication_slot('lima_joins', 'braid')]);
	push @disabled, subscribe($lima, $other, copy_data => 'false', create_slot => 'false', slot_name => q['lima_joins'], enabled => 'false', wait => 0);
}
subscribe($_, $lima, copy_data => 'false') for @old;
# Their commits from before their slots are in the copy: tokyo has them by then.
for my $other ($paris, $oslo)
{
	my $position = $other->safe_psql('postgres', 'select braid.sync_event()');
	$tokyo->safe_psql('postgres', sprintf q[select braid.wait_for_event('%s', '%s', '60s')], $other->name, $position);
}
sleep 1;
subscribe($lima, $tokyo, wait => 0);
# The others' changes come while it copies, one time in two; as soon as it is known that the tables
# were empty.
ok(wait_until(sub {
	$lima->safe_psql('postgres', q[select count(*) filter (where copy_began_at is not null or state = 'ready') from braid.subscription_table join braid.subscription using (subscription_id)
		where subscription_name = 'lima_from_tokyo']) eq '4';
}, 30), 'it is noted that the tables are empty');
$lima->safe_psql('postgres', q[select braid.wait_for_subscription('lima_from_tokyo')]) if rand(2) < 1;
$lima->safe_psql('postgres', "select braid.enable_subscription('$_'); select braid.wait_for_subscription('$_')") for @disabled;
sleep 1;
stop_load();
$lima->safe_psql('postgres', q[select braid.wait_for_subscription('lima_from_tokyo')]);
converged(@old, $lima);
cmp_ok($lima->safe_psql('postgres', 'select count(*) from braid.copied_version'), '>', 0, 'versions came along');
same_tables([ @old, $lima ], qw(account hot));

# The records are removed when nothing older can arrive any more, and with the next copy.
cmp_ok($oslo->safe_psql('postgres', 'select count(*) from braid.copied_table'), '>', 0, 'it is known where rows were copied from');
$oslo->safe_psql('postgres', q[update braid.copied_version set version_at = version_at - 3 * 3600 * 1000000::bigint; update braid.copied_table set newest = newest - 3 * 3600 * 1000000::bigint]);
$oslo->restart;
ok(wait_until(sub { $oslo->safe_psql('postgres', 'select (select count(*) from braid.copied_version) + (select count(*) from braid.copied_table)') == 0 }, 60), 'versions are forgotten');

done_testing();

# Returns psql's message about a statement that fails.
sub attempt_error
{
	my ($node, $sql) = @_;
	my ($status, $out, $err) = $node->psql('postgres', $sql);
	return ($err, $status);
}
