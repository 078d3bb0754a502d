# A statement rewrites a table while other nodes write to it. Rows keep their versions, so changes
# that are on their way win or lose alike at every node. With a key, without one, in partitions,
# with another type of the key; rows of the statement's own transaction, before and after it; twice,
# rolled back, and moved by VACUUM FULL; under load on three nodes.

use strict;
use warnings;

use Braid;
use Ddl;
use PostgreSQL::Test::Utils;
use Test::More;

my $setup = q[
	create table account (id int primary key, v int, t text);
	create table part (id int, place int, v int, primary key (id, place)) partition by range (place);
	create table part_1 partition of part for values from (0) to (10);
	create table part_2 partition of part for values from (10) to (20);
	create table bag (k int, v int);
	alter table bag replica identity full;
	create table hot (id int primary key, n int not null, who text);
];
my @nodes = my ($tokyo, $paris) = ddl_nodes([qw(tokyo paris)], setup => $setup);
sql($tokyo, q[
	insert into account select i, 0, 'first' from generate_series(1, 50) i;
	insert into part select i, i % 20, 0 from generate_series(1, 40) i;
	insert into bag select i, 0 from generate_series(1, 20) i;
]);
converged(@nodes);

sub versions
{
	my ($node, $table) = @_;
	return sql($node, "select string_agg(format('%s %s %s', id, v.node, v.committed_at), E'\\n' order by id) from $table t, braid.row_version(t.tableoid, t.ctid) v");
}
my ($to_tokyo, $to_paris) = ([ $tokyo, 'tokyo_from_paris' ], [ $paris, 'paris_from_tokyo' ]);

# Versions of rows stay known, on both nodes.
my %before = map { $_->name => versions($_, 'account') } @nodes;
sql($tokyo, 'alter table account alter v type bigint');
converged(@nodes);
for my $node (@nodes)
{
	is(sql($node, q[select data_type from information_schema.columns where table_name = 'account' and column_name = 'v']), 'bigint', 'the table is rewritten on ' . $node->name);
	is(versions($node, 'account'), $before{ $node->name }, 'rows have the versions that they had on ' . $node->name);
}

# Changes that are under way while one node rewrites: older than the statement, and newer.
sub meet
{
	my ($what, %do) = @_;
	disable(@$_) for $to_tokyo, $to_paris;
	sql($paris, $do{older});
	sql($tokyo, $do{statement});
	sql($tokyo, $do{between}) if $do{between};
	sql($paris, $do{newer}) if $do{newer};
	enable($to_tokyo, $to_paris);
	converged(@nodes);
	same_tables(\@nodes, 'account', 'part', 'bag');
	for my $check (@{ $do{is} })
	{
		is(sql($_, $check->[0]), $check->[1], "$what, on " . $_->name . ": $check->[2]") for @nodes;
	}
	return;
}
meet(
	'another type',
	older => q[update account set v = 1, t = 'paris' where id in (1, 2)],
	statement => 'alter table account alter v type int',
	between => q[update account set t = 'tokyo' where id in (2, 3, 4)],
	newer => q[update account set t = 'paris, last' where id in (3, 5)],
	is => [
		[ 'select t from account where id = 1', 'paris', 'an older change of a row that the statement has written only anew' ],
		[ 'select t from account where id = 2', 'tokyo', 'a later change of the node of the statement' ],
		[ 'select t from account where id = 3', 'paris, last', 'a change that is newer than both' ],
		[ 'select t from account where id = 5', 'paris, last', 'a change that is newer than the statement' ],
	]);
meet(
	'another type of the key',
	older => q[update account set t = 'paris, key' where id = 6; delete from account where id = 7; insert into account values (101, 1, 'paris')],
	statement => 'alter table account alter id type bigint',
	newer => q[update account set t = 'paris, key, last' where id = 8],
	is => [
		[ 'select t from account where id = 6', 'paris, key', 'an older change' ],
		[ 'select count(*) from account where id = 7', '0', 'an older deletion' ],
		[ 'select t from account where id = 8', 'paris, key, last', 'a newer change' ],
	]);
meet(
	'in one transaction with changes',
	older => q[update account set t = 'paris, older' where id between 10 and 13; insert into account values (60, 1, 'paris, older')],
	statement => q[
		begin;
		update account set t = 'tokyo, before' where id = 10;
		alter table account alter v type bigint;
		update account set t = 'tokyo, after' where id = 11;
		savepoint s;
		alter table account alter v type text;
		rollback to s;
		insert into account values (60, 1, 'tokyo, after');
		alter table account alter v type numeric;
		commit;
	],
	is => [
		[ 'select t from account where id = 10', 'tokyo, before', 'the change before the statement is newer' ],
		[ 'select t from account where id = 11', 'tokyo, after', 'and the one after it' ],
		[ 'select t from account where id = 12', 'paris, older', 'a row that it has not changed' ],
		[ 'select t from account where id = 60', 'tokyo, after', 'a row that it has inserted' ],
	]);
meet(
	'a table that is not rewritten, in the same transaction',
	older => q[update account set t = 'paris, older' where id in (20, 22); delete from account where id = 24],
	statement => q[
		begin;
		update account set t = 'tokyo, before' where id = 20;
		alter table part alter v type numeric;
		update account set t = 'tokyo, after' where id in (21, 22, 24);
		insert into account values (62, 1, 'tokyo');
		commit;
		begin;
		update account set t = 'tokyo, last' where id = 23;
		alter table part alter v type int;
		commit;
		alter table account alter v type int;
		alter table account alter v type numeric;
	],
	newer => q[update account set t = 'paris, newer' where id = 21],
	is => [
		[ 'select t from account where id = 20', 'tokyo, before', 'a change before the statement' ],
		[ 'select t from account where id = 22', 'tokyo, after', 'one after it' ],
		[ 'select t from account where id = 24', 'tokyo, after', 'an older deletion' ],
		[ 'select t from account where id = 21', 'paris, newer', 'a newer change' ],
		[ 'select t from account where id = 23', 'tokyo, last', 'nobody else has changed it' ],
	]);
meet(
	'a generated column, and VACUUM FULL',
	older => q[update account set t = 'paris, generated' where id = 15],
	statement => q[insert into account values (61, 1, 'own'); alter table account add w int generated always as (id * 2) stored; vacuum full account],
	newer => q[update account set t = 'paris, generated, last' where id = 16],
	is => [
		[ 'select t from account where id = 15', 'paris, generated', 'an older change' ],
		[ 'select t from account where id = 16', 'paris, generated, last', 'a newer change' ],
	]);
meet(
	'partitions',
	older => q[update part set v = 1 where id in (1, 15); update part set place = 12 where id = 2],
	statement => 'alter table part alter v type bigint',
	between => q[update part set v = 2 where id in (15, 16)],
	newer => q[update part set v = 3 where id in (16, 3)],
	is => [
		[ 'select v from part where id = 1', '1', 'an older change' ],
		[ 'select place from part where id = 2', '12', 'an older change of the partition' ],
		[ 'select string_agg(v::text, $$ $$ order by id) from part where id in (15, 16, 3)', '3 2 3', 'the newest of several' ],
	]);
meet(
	'without a key',
	older => q[update bag set v = 1 where k = 1; delete from bag where k = 2; insert into bag values (3, 0)],
	statement => 'alter table bag alter v type bigint',
	between => 'update bag set v = 2 where k = 4',
	newer => 'update bag set v = 3 where k in (4, 5)',
	is => [
		[ 'select v from bag where k = 1', '1', 'an older change' ],
		[ 'select count(*) from bag where k = 2', '0', 'an older deletion' ],
		[ 'select count(*) from bag where k = 3', '2', 'a row that there is twice' ],
	]);

# Known after a restart, and forgotten when nothing older can arrive.
%before = map { $_->name => versions($_, 'account') } @nodes;
$_->restart for @nodes;
is(versions($_, 'account'), $before{ $_->name }, 'after a restart of ' . $_->name) for @nodes;
sql($tokyo, q[
	update braid.rewrite set newest = newest - 3 * 3600 * 1000000::bigint;
	update braid.copied_version set version_at = version_at - 3 * 3600 * 1000000::bigint;
]);
$tokyo->restart;
ok(wait_until(sub { sql($tokyo, 'select (select count(*) from braid.rewrite) + (select count(*) from braid.copied_version)') eq '0' }, 60), 'versions are forgotten');

# Rows that are older than whatever can arrive are not written down: nothing arrives from nowhere.
my $lima = new_node('lima');
sql($lima, q[create table t (id int primary key, v int); insert into t select i, i from generate_series(1, 100) i; alter table t alter v type bigint]);
is(sql($lima, 'select (select count(*) from braid.rewrite) + (select count(*) from braid.copied_version)'), '0', 'a node that gets no changes remembers nothing');

# Under load on three nodes, of which one changes the type again and again, and another one adds and
# drops a column that rewrites the table.
my $oslo = new_node('oslo', conf => "braid.ddl_replication = on\n");
sql($oslo, "set braid.ddl_replication = off; $setup; alter table account alter id type bigint, alter v type numeric; alter table account add w int generated always as (id * 2) stored; alter table part alter v type bigint; alter table bag alter v type bigint");
subscribe($oslo, $_, replicate_ddl => 'true', copy_data => 'false') for $tokyo, $paris;
subscribe($_, $oslo, replicate_ddl => 'true', copy_data => 'false') for $tokyo, $paris;
my @all = (@nodes, $oslo);
sql($tokyo, q[insert into hot select i, 0, 'tokyo' from generate_series(1, 10) i]);
converged(@all);
my $seconds = $ENV{BRAID_TEST_SECONDS} // 12;
my @loads;
for my $node (@all)
{
	my ($me, $file) = ($node->name, $node->basedir . '/load.sql');
	append_to_file($file, qq[\\set id random(1, 10)\nupdate hot set n = n + 1, who = '$me' where id = :id;\n\\sleep 3 ms\n]);
	push @loads, IPC::Run::start([ 'pgbench', '-n', '-c', '2', '-T', $seconds, '--max-tries=1000', '-f', $file, $node->connstr("postgres") ], '>', '/dev/null', '2>', $node->basedir . '/load.err');
}
my $end = time + $seconds;
my $statements = 0;
while (time < $end)
{
	sql($tokyo, 'alter table hot alter n type ' . ($statements % 2 ? 'int' : 'bigint'));
	sql($paris, $statements % 2 ? 'alter table hot drop z' : 'alter table hot add z int default (random() * 0)::int');
	$statements++;
}
ok($_->finish, 'load') for @loads;
converged(@all) for 1 .. 2;
cmp_ok($statements, '>', 3, "$statements statements at each of two nodes under load");
same_tables(\@all, '(select id, n, who from hot)');
all_stream(@all);
done_testing();
