# A statement adds a column with a volatile default while other nodes write. Rows that its node did
# not have yet get other values on each node, until the nodes that have them send theirs. Changes on
# their way, a lock and a restart in between, a table that is rewritten meanwhile; under load on
# three nodes.

use strict;
use warnings;

use Braid;
use Ddl;
use PostgreSQL::Test::Utils;
use Test::More;

my $setup = q[
	create table item (id int primary key, v int, note text);
	create table part (id int, place int, v int, primary key (id, place)) partition by range (place);
	create table part_1 partition of part for values from (0) to (10);
	create table part_2 partition of part for values from (10) to (20);
	create table hot (id bigint primary key, n int not null, who text);
];
my @nodes = my ($tokyo, $paris) = ddl_nodes([qw(tokyo paris)], setup => $setup);
sql($tokyo, q[
	insert into item select i, 0, case when i % 10 = 0 then repeat(md5(i::text), 200) end from generate_series(1, 2500) i;
	insert into part select i, i % 20, 0 from generate_series(1, 40) i;
]);
converged(@nodes);

my ($to_tokyo, $to_paris) = ([ $tokyo, 'tokyo_from_paris' ], [ $paris, 'paris_from_tokyo' ]);

# Nobody has anything left to send.
sub all_sent
{
	my (@among) = @_;
	for (1 .. 2)
	{
		converged(@among);
		$_->poll_query_until('postgres', 'select count(*) = 0 from braid.own_value') or die 'values of ' . $_->name . ' are left' for @among;
	}
	converged(@among);
	return;
}

sub rows_of
{
	my ($node, $table, $writer) = @_;
	return sql($node, "select string_agg(id::text, ' ' order by id) from $table t, braid.row_version(t.tableoid, t.ctid) v where v.node = '$writer'");
}

# Nothing is under way: nothing is sent twice.
sql($tokyo, 'alter table item add calm double precision default random()');
all_sent(@nodes);
same_tables(\@nodes, 'item');
is(rows_of($tokyo, 'item', 'paris'), '', 'nothing is sent where all rows were known');

# Rows that the other node writes before the statement comes there, older than it and newer.
disable(@$_) for $to_tokyo, $to_paris;
sql($paris, q[update item set v = 1 where id in (1, 2); insert into item values (3001, 1); update part set v = 1 where id = 1; insert into part values (101, 1, 1)]);
sql($tokyo, q[
	alter table item add r double precision default random(), add s serial;
	alter table part add r double precision default random();
	update item set v = 2 where id = 2;
]);
sql($paris, q[update item set v = 3 where id in (3, 10); insert into item values (3002, 3); update part set v = 3 where id = 2; update part set place = 15 where id = 3; insert into part values (102, 15, 3)]);
enable($to_tokyo, $to_paris);
all_sent(@nodes);
same_tables(\@nodes, 'item', 'part');
is(rows_of($tokyo, 'item', 'paris'), '3 10 3001 3002', 'the rows that the statement had not met');
is(rows_of($tokyo, 'part', 'paris'), '2 3 101 102', 'those of partitions');
is(sql($tokyo, 'select v from item where id = 1'), '0', 'a change that is older than the statement has lost');

# The table is rewritten before they are sent, one of them is locked when that is to be done, and
# the server crashes then.
disable(@$to_tokyo);
sql($paris, 'insert into item (id, v) select i, 4 from generate_series(4001, 4010) i');
my $session = $paris->background_psql('postgres', on_error_stop => 1);
$session->query_safe('begin; lock table item in access share mode');
sql($tokyo, 'alter table item add q double precision default random()');
$paris->poll_query_until('postgres', q[select count(*) > 0 from pg_locks where relation = 'item'::regclass and not granted]) or die 'the statement does not wait';
my ($manager) = worker_pids($paris, 'braid manager');
kill 'STOP', $manager;
$session->query_safe('commit');
caught_up($paris, $tokyo);
sql($paris, 'alter table item alter v type bigint');
is(sql($paris, 'select count(*) from braid.own_value'), '1', 'a table has values that are to be sent');
$session->query_safe('begin; select 1 from item where id = 4001 for update');
kill 'CONT', $manager;
my $left = 'select count(*) from item where xmin = (select xid::text::xid from braid.own_value)';
ok($paris->poll_query_until('postgres', "select ($left) = 1"), 'all are sent but the one that is locked');
is(sql($paris, "select id from item where xmin = (select xid::text::xid from braid.own_value)"), '4001', 'which is left');
eval { $session->{run}->kill_kill };
$paris->stop('immediate');
$paris->start;
enable($to_tokyo);
all_sent(@nodes);
same_tables(\@nodes, 'item', 'part');

# A table that is dropped before that, and one that is empty.
disable(@$to_tokyo);
sql($paris, 'insert into hot values (1, 1)');
sql($tokyo, 'alter table hot add r double precision default random()');
caught_up($paris, $tokyo);
sql($paris, 'drop table hot');;
enable($to_tokyo);
all_sent(@nodes);
is(sql($_, q[select to_regclass('hot') is null]), 't', 'dropped on ' . $_->name) for @nodes;

# Under load on three nodes.
my $oslo = new_node('oslo', conf => "braid.ddl_replication = on\n");
sql($oslo, "set braid.ddl_replication = off; create table busy (id bigint primary key, n int not null, who text)");
sql($_, "set braid.ddl_replication = off; create table busy (id bigint primary key, n int not null, who text)") for @nodes;
sql($_->[1], "select * from braid.refresh_subscription('$_->[0]', copy_data => false)") for ([ 'tokyo_from_paris', $tokyo ], [ 'paris_from_tokyo', $paris ]);
sql($_, "set braid.ddl_replication = off; drop table item, part") for @nodes;
subscribe($oslo, $_, replicate_ddl => 'true', copy_data => 'false') for $tokyo, $paris;
subscribe($_, $oslo, replicate_ddl => 'true', copy_data => 'false') for $tokyo, $paris;
my @all = (@nodes, $oslo);
sql($tokyo, q[insert into busy select i, 0, 'tokyo' from generate_series(1, 200) i]);
converged(@all);
my $seconds = $ENV{BRAID_TEST_SECONDS} // 4;
my @loads;
for my $number (0 .. $#all)
{
	my ($node, $me) = ($all[$number], $all[$number]->name);
	my $file = $node->basedir . '/load.sql';
	append_to_file($file, qq[
		\\set id random(1, 200)
		\\set new random(1000, 1000000)
		update busy set n = n + 1, who = '$me' where id = :id;
		insert into busy values (:new * 3 + $number, 0, '$me') on conflict do nothing;
		\\sleep 3 ms
	]);
	push @loads, IPC::Run::start([ 'pgbench', '-n', '-c', '2', '-T', $seconds, '--max-tries=1000', '-f', $file, $node->connstr('postgres') ], '>', '/dev/null', '2>', $node->basedir . '/load.err');
}
my $end = time + $seconds;
my $statements = 0;
while (time < $end)
{
	$statements++;
	sql($tokyo, "alter table busy add t_$statements double precision default random()");
	sql($paris, "alter table busy add p_$statements uuid default gen_random_uuid(), add s_$statements serial");
}
ok($_->finish, 'load') for @loads;
all_sent(@all);
cmp_ok($statements, '>=', 1, "$statements statements at each of two nodes under load");
my @columns = split /\n/, sql($tokyo, q[select attname from pg_attribute where attrelid = 'busy'::regclass and attnum > 0 and not attisdropped order by attname collate "C"]);
same_tables(\@all, '(select ' . join(', ', @columns) . ' from busy)');
all_stream(@all);
done_testing();
