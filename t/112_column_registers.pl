# Column rule last_update_wins: each column is a register of its own. If nodes that are cut off
# write to different columns of a row, all writes stay. If they write to the same column, the newer
# value stays. All nodes agree, in any order of arrival.

use strict;
use warnings;

use Braid;
use List::Util qw(shuffle);
use Mesh;
use Test::More;

my $seed = $ENV{BRAID_TEST_SEED} // int(rand(1 << 31));
srand($seed);
diag("BRAID_TEST_SEED=$seed");

my @nodes = map { new_node($_, conf => "max_prepared_transactions = 5\n") } qw(tokyo paris osaka);
my ($tokyo, $paris, $osaka) = @nodes;
on_all(q[
	create table doc (id int primary key, a int, b text, c text, d numeric, name text);
	alter table doc alter c set storage external, replica identity full;
	create table plain (id int primary key, a int, b int);
	alter table plain replica identity full;
	create procedure many(col text, first int, times int) language plpgsql as $$
	begin
		for i in first .. first + times - 1 loop
			loop
				-- Appliers lock the same rows.
				begin
					execute format('update doc set %I = $1::text::%s, name = $2 where id = 100 + $3 %% 3', col, case col when 'a' then 'int' else 'text' end)
						using i, col || i, i;
					exit;
				exception when deadlock_detected then
					null;
				end;
			end loop;
			commit;
			if i % 5 = 0 then
				loop
					begin
						execute format('update doc set %I = $1::text::%s where id between 100 and 102', col, case col when 'a' then 'int' else 'text' end) using i;
						exit;
					exception when deadlock_detected then
						null;
					end;
				end loop;
				commit;
			end if;
		end loop;
	end
	$$;
], @nodes);
my @streams = mesh(@nodes);
on_all(q[select braid.set_column_rule('doc', c, 'last_update_wins') from unnest('{a,b,c,d}'::name[]) c], @nodes);

# Writes of nodes that are cut off from each other, one case after the other; then all are
# delivered, the streams in random order.
sql($tokyo, q[
	insert into doc select i, 0, 'b', 'c', 0, 'start' from generate_series(1, 30) i;
	update doc set c = repeat('c', 10000) where id in (6, 7, 8);
]);
converged(@nodes);
cut();
# Different columns, and the same one.
sql($tokyo, q[update doc set a = 1, name = 'tokyo' where id in (1, 2, 3)]);
sql($paris, q[update doc set b = 'paris', name = 'paris' where id in (1, 2, 3)]);
sql($osaka, q[update doc set c = 'osaka' where id = 2; update doc set a = 3 where id = 3; update doc set name = 'osaka' where id = 3]);
sql($tokyo, q[update doc set b = 'tokyo' where id = 3]);
# Null, from both sides; a value that is set to what it was.
sql($tokyo, q[update doc set a = null, d = 1.0 where id = 4; update doc set a = 5 where id = 5]);
sql($paris, q[update doc set b = null, d = 1.00 where id = 4; update doc set a = null, b = 'x' where id = 5]);
sql($osaka, q[update doc set c = null where id = 4; update doc set a = 0, c = 'y' where id = 5]);
# Large values that an update of another column leaves unchanged.
sql($tokyo, q[update doc set a = 6, name = 'tokyo' where id in (6, 7); update doc set c = repeat('t', 9000) where id = 8]);
sql($paris, q[update doc set c = repeat('p', 12000) where id = 6; update doc set b = 'b7' where id = 7; update doc set b = 'b8' where id = 8]);
sql($osaka, q[update doc set b = 'b6', name = 'osaka' where id = 6; update doc set c = repeat('o', 11000) where id = 8]);
# Several changes of a row in one transaction and in several; rolled back subtransactions.
sql($tokyo, q[begin; update doc set a = 1 where id = 9; update doc set b = 't' where id = 9; savepoint s; update doc set c = 'never' where id = 9; rollback to s; commit]);
sql($paris, q[update doc set c = 'p' where id = 9; update doc set b = 'p' where id = 9]);
sql($tokyo, q[update doc set a = 2 where id = 9; update doc set name = 'last' where id = 9]);
# Two inserts of one key.
sql($tokyo, q[insert into doc (id, a, b) values (40, 1, 'tokyo')]);
sql($paris, q[insert into doc (id, a, b, c) values (40, 2, 'paris', 'paris'); update doc set a = 3 where id = 40]);
sql($tokyo, q[update doc set c = 'newer' where id = 40]);
# Deletions go by version; what is older is not for the row that comes after. Another key.
sql($paris, q[update doc set a = 11 where id in (10, 11)]);
sql($tokyo, q[delete from doc where id in (10, 11); insert into doc (id, a, b) values (11, 0, 'again'); update doc set id = 50, a = 12 where id = 12]);
# A prepared transaction here.
sql($tokyo, q[update doc set a = 18 where id = 18]);
sql($paris, q[begin; update doc set b = 'prepared', name = 'paris' where id = 18; prepare transaction 'p']);
sql($tokyo, q[update doc set c = 'tokyo' where id = 18]);
sql($paris, q[commit prepared 'p']);
heal_all();
all_have('select a, b, c, name from doc where id = 1', '1|paris|c|paris', 'two columns of a row');
all_have('select a, b, c, name from doc where id = 2', '1|paris|osaka|start', 'three; the rest goes with the newest change, as its writer saw it');
all_have('select a, b, c, name from doc where id = 3', '3|tokyo|c|tokyo', 'of the same column the newer value stays');
all_have('select a is null, b is null, c is null, d from doc where id = 4', 't|t|t|1.00', 'nulls');
all_have('select a is null, b, c from doc where id = 5', 't|x|y', 'a column that is left as it is was not written');
all_have('select a, b, left(c, 1), length(c), name from doc where id between 6 and 8 order by id', "6|b6|p|12000|osaka\n6|b7|c|10000|start\n0|b8|o|11000|start", 'large values');
all_have('select a, b, c, name from doc where id = 9', '2|p|p|last', 'several changes in a row');
all_have('select a, b, c from doc where id = 40', '3|paris|newer', 'two inserts of one key');
all_have('select id, a, b from doc where id in (10, 11) order by id', '11|0|again', 'deleted, and inserted anew');
all_have('select id, a from doc where id in (12, 50)', '50|12', 'another key');
all_have('select a, b, c, name from doc where id = 18', '18|prepared|tokyo|paris', 'a prepared transaction');
is(sql($paris, q[select kind, resolution, winner, reason, local_row ->> 'a', remote_row ->> 'a' from braid.conflict_history
	where relation = 'doc'::regclass and key = '{"id": 1}' and remote_origin = 'tokyo']),
	'update_origin_differs|last_update_wins|local|the local version is newer; merged by column: a (last_update_wins)|0|1', 'the history says what was taken of the loser');
is(sql($tokyo, q[select kind, winner, reason, local_row ->> 'a', remote_row ->> 'a' from braid.conflict_history
	where relation = 'doc'::regclass and key = '{"id": 1}' and remote_origin = 'paris']),
	'update_origin_differs|remote|the remote version is newer; merged by column: a (last_update_wins)|1|0', 'and what was kept from the winner');

# An update that comes before its row.
cut(stream($osaka, $tokyo));
sql($tokyo, q[insert into doc (id, a, b) values (41, 1, 'tokyo')]);
caught_up($paris, $tokyo);
sql($paris, q[update doc set b = 'paris' where id = 41]);
sql($tokyo, q[update doc set a = 2 where id = 41]);
caught_up($osaka, $paris);
heal(stream($osaka, $tokyo));
converged(@nodes);
all_have('select a, b from doc where id = 41', '2|paris', 'an update before its row');

# Appliers wait for writes of a session here that the collector has not read from WAL yet.
cut(stream($paris, $tokyo));
sql($tokyo, q[update doc set a = 14, name = 'tokyo' where id = 14; update doc set b = 'tokyo', name = 'tokyo' where id = 15]);
my $collector = sql($paris, 'select collector_pid from braid.deletions');
kill 'STOP', $collector;
sql($paris, q[update doc set b = 'paris', name = 'paris' where id in (14, 15)]);
sql($paris, q[select braid.enable_subscription('paris_from_tokyo')]);
# The transactions that wait have locked the row.
$paris->poll_query_until('postgres', q[select count(*) > 0 from pg_stat_activity where backend_type = 'braid applier' and backend_xid is not null]) or die;
is(sql($paris, q[select a, b, name from doc where id = 14]), '0|paris|paris', 'nothing is decided before it is known who has written what');
kill 'CONT', $collector;
converged(@nodes);
all_have('select a, b, name from doc where id in (14, 15) order by id', "14|paris|paris\n0|paris|paris", 'then it is right');

# A server that is restarted, or killed, remembers.
cut();
sql($tokyo, q[update doc set a = 16, name = 'tokyo' where id in (16, 17)]);
sql($osaka, q[update doc set b = 'osaka', name = 'osaka' where id in (16, 17)]);
sql($paris, q[update doc set c = 'paris', a = -1, name = 'paris' where id in (16, 17)]);
heal(stream($paris, $osaka));
$paris->stop('immediate');
$osaka->restart;
$paris->start;
sql($osaka, q[update doc set a = 17 where id = 17]);
heal_all();
all_have('select a, b, c, name from doc where id in (16, 17) order by id', "-1|osaka|paris|paris\n17|osaka|paris|osaka", 'who wrote what outlasts the server');

# Lost values can be restored.
sql($paris, q[select braid.restore_conflict(conflict_id) from braid.conflict_history where relation = 'doc'::regclass and key = '{"id": 16}' and remote_row ->> 'name' = 'tokyo']);
converged(@nodes);
all_have('select a from doc where id = 16', '16', 'a value that lost is put back');

# The rule is set while rows are written: it counts from there on.
sql($tokyo, 'insert into plain values (1, 0, 0)');
converged(@nodes);
on_all(q[select braid.set_column_rule('plain', 'a', 'last_update_wins'), braid.set_column_rule('plain', 'b', 'last_update_wins')], @nodes);
cut();
sql($tokyo, 'update plain set a = 1');
sql($paris, 'update plain set b = 2');
heal_all();
all_have('select * from plain', '1|1|2', 'a rule that was just set');
on_all(q[select braid.set_column_rule('plain', 'a', null), braid.set_column_rule('plain', 'b', null)], @nodes);
cut();
sql($tokyo, 'update plain set a = 3');
sql($paris, 'update plain set b = 4');
heal_all();
all_have('select * from plain', '1|1|4', 'and one that was removed');
on_all(q[select braid.set_column_rule('plain', 'a', 'last_update_wins')], @nodes);
sql($tokyo, 'alter table plain replica identity default; update plain set a = 5');
$paris->poll_query_until('postgres', q[select state = 'error' from braid.subscription_status where name = 'paris_from_tokyo']) or die;
is(sql($paris, q[select error_sqlstate, error_message from braid.subscription where subscription_name = 'paris_from_tokyo']),
	'55000|changes of table "public.plain" come without the old values that column rule "last_update_wins" needs', 'without old values nothing is applied');
is(sql($tokyo, 'select relation, column_name, rule, problem from braid.column_rules where problem is not null'),
	'plain|a|last_update_wins|updates made here lack the old values: the table has not REPLICA IDENTITY FULL', 'and the view shows it');
sql($tokyo, 'alter table plain replica identity full');
on_all(q[select braid.set_column_rule('plain', 'a', null)], @nodes);
heal_all();

# In all modes. Each node has a column of its own, so its last value is known.
sql($tokyo, q[insert into doc (id) select i from generate_series(100, 102) i]);
converged(@nodes);
my ($first, $times) = (1, 30);
my @columns = qw(a b c);
for my $mode (q[apply_mode => 'parallel'], q[apply_mode => 'serial'], q[apply_mode => 'batch'], q[apply_mode => 'batch', consolidate => true], q[apply_mode => 'aggregate'],
	q[apply_mode => 'parallel', commit_order => 'relaxed'], q[apply_mode => 'parallel', split_transactions_above => 2])
{
	cut();
	sql($_->[0], "select braid.alter_subscription('$_->[1]', $mode)") for @streams;
	sql($nodes[$_], "call many('$columns[$_]', $first, $times)") for 0 .. 2;
	sql($_->[0], "select braid.enable_subscription('$_->[1]')") for shuffle @streams;
	$first += $times;
	sql($nodes[$_], "call many('$columns[$_]', $first, $times)") for shuffle 0 .. 2;
	$first += $times;
	converged(@nodes) for 1 .. 2;
	my $last = $first - 1;
	all_have('select distinct a, b, c from doc where id between 100 and 102', "$last|$last|$last", "each column has its last value: $mode");
	is(join('', map { status($_->[0], $_->[1])->{last_error} } @streams), '', 'and all streams go on');
}
same_tables(\@nodes, qw(doc plain));

# A node that joins: who wrote what comes along with the copy. What paris writes now comes there
# later, and is older than what tokyo has by then.
my $kobe = new_node('kobe', conf => "max_prepared_transactions = 5\n");
sql($kobe, q[
	create table doc (name text, d numeric, c text, b text, a int, id int primary key);
	alter table doc replica identity full;
	create table plain (id int primary key, a int, b int);
]);
my $from_paris = subscribe($kobe, $paris, copy_data => 'false', two_phase => 'true');
cut([ $kobe, $from_paris, $paris ]);
cut(stream($tokyo, $paris));
sql($paris, q[update doc set b = 'older', c = 'older' where id in (20, 21)]);
sql($tokyo, q[update doc set a = 20, name = 'tokyo' where id = 20; update doc set b = 'newer', name = 'tokyo' where id = 21; insert into doc (id, b) values (60, 'tokyo')]);
subscribe($kobe, $tokyo);
sql($kobe, q[select braid.set_column_rule('doc', c, 'last_update_wins') from unnest('{a,b,c,d}'::name[]) c]);
heal([ $kobe, $from_paris, $paris ], stream($tokyo, $paris));
converged(@nodes);
is(sql($kobe, 'select id, a, b, c, name from doc where id in (20, 21, 60) order by id'), "20|20|older|older|tokyo\n21|0|newer|older|tokyo\n60||tokyo||", 'a node that joins decides as the others did');
is(sql($kobe, 'select id, a, b, c, d, name from doc order by id'), sql($tokyo, 'select id, a, b, c, d, name from doc order by id'), 'and is equal to them');

# Transactions whose version is not known yet while they come.
sql($paris, q[begin; update doc set c = 'prepared', a = 1 where id = 22; prepare transaction 'q']);
sql($kobe, q[update doc set b = 'kobe', name = 'kobe' where id = 22]);
sql($paris, q[commit prepared 'q']);
sql($paris, q[alter system set logical_decoding_work_mem = '64kB'; select pg_reload_conf()]);
sql($kobe, q[insert into doc (id, b, name) values (1000, 'kobe', 'kobe')]);
sql($paris, q[insert into doc (id, a, c) select i, 1, repeat('x', 200) from generate_series(1000, 3000) i]);
caught_up($kobe, $paris);
is(sql($kobe, 'select a, b, c from doc where id = 22'), '1|kobe|prepared', 'a transaction that comes prepared');
is(sql($kobe, 'select count(*), sum(a), count(b) from doc where id between 1000 and 3000'), '2001|2001|0', 'one that comes while it runs');

# A local transaction with more than the collector holds in memory.
sql($kobe, q[insert into doc (id, a) select i, 0 from generate_series(10001, 80000) i]);
sql($kobe, q[update doc set a = 1, b = 'b' where id > 10000]);
ok($kobe->poll_query_until('postgres', q[select count(*) filter (where columns is null) >= 70000 and count(*) filter (where columns = '{4,5}') = 70000
	from braid.column_write where origin_id = 0 and relation = 'doc'::regclass]), 'a large local transaction');

# The records are removed when nothing older can arrive.
sql($kobe, 'update braid.column_write set written_at = written_at - 2 * 3600 * 1000000::bigint');
$kobe->restart;
# The collector reads again what it has read since its position was saved last.
ok(wait_until(sub { sql($kobe, 'select count(*) from braid.column_write where written_at < (extract(epoch from now()) - 5400) * 1000000') == 0 }, 90), 'what is old is forgotten');

done_testing();
