# Column rules: additions on several nodes that are cut off from each other add up on all of them,
# in any order of arrival; likewise largest and smallest values. The row keeps the version of the
# newest change, even if an older one has added to it.

use strict;
use warnings;

use Braid;
use Mesh;
use PostgreSQL::Test::Utils;
use Test::More;

my $seed = $ENV{BRAID_TEST_SEED} // int(rand(1 << 31));
srand($seed);
diag("BRAID_TEST_SEED=$seed");

my @nodes = map { new_node($_) } qw(tokyo paris osaka);
my ($tokyo, $paris, $osaka) = @nodes;
on_all(q[
	create table stock (id int primary key, n int, amount numeric(12,2) not null default 0, free numeric, high int, first timestamptz, label text, name text);
	alter table stock replica identity full;
	create table top (id int primary key, high int, label text collate "C", name text);
	create table small (id int primary key, n smallint);
	alter table small replica identity full;
	create table plain (id int primary key, n int);
	alter table plain replica identity full;
	create procedure many(node int, times int) language plpgsql as $$
	begin
		for i in 1 .. times loop
			loop
				-- Appliers lock the same rows.
				begin
					update stock set n = n + node, high = greatest(high, i * node), name = node::text where id = 100 + i % 3;
					exit;
				exception when deadlock_detected then
					null;
				end;
			end loop;
			commit;
			if i % 7 = 0 then
				loop
					begin
						update stock set amount = amount + 0.01 * node where id = 100 + i % 2;
						update stock set n = n + 1, amount = amount - 1 where id between 100 and 102;
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
on_all(q[
	select braid.set_column_rule('stock', c, 'delta') from unnest('{n,amount,free}'::name[]) c;
	select braid.set_column_rule('stock', 'high', 'max'), braid.set_column_rule('stock', 'first', 'min'), braid.set_column_rule('stock', 'label', 'max');
	select braid.set_column_rule('top', 'high', 'max'), braid.set_column_rule('top', 'label', 'min');
	select braid.set_column_rule('small', 'n', 'delta'), braid.set_column_rule('plain', 'n', 'delta');
], @nodes);

# Two nodes, then three; in whatever order.
sql($tokyo, q[insert into stock (id, n, free, high, name) select i, 100, 1, 0, 'start' from generate_series(1, 9) i]);
converged(@nodes);
cut();
sql($tokyo, q[update stock set n = n + 5, name = 'tokyo' where id = 1; update stock set n = n - 5, amount = amount + 0.10, free = free + 0.125 where id = 2]);
sql($paris, q[update stock set n = n + 7 where id = 1; update stock set n = n - 7, amount = amount + 0.20, free = free * 3, name = 'paris' where id = 2]);
sql($osaka, q[update stock set n = n + 11, name = 'osaka' where id = 2; update stock set n = n * 2 where id = 2]);
heal_all();
all_have('select n, name from stock where id = 1', '112|start', 'both increments count, the rest is the newest row');
all_have('select n, amount, free, name from stock where id = 2', '210|0.30|3.125|osaka', 'of three nodes too');
is(sql($paris, q[select kind, resolution, winner, reason from braid.conflict_history where relation = 'stock'::regclass and key = '{"id": 1}']),
	'update_origin_differs|last_update_wins|local|the local version is newer; merged by column: n (delta)', 'the history says that what lost was added');
is(sql($tokyo, q[select winner, local_row -> 'n', remote_row -> 'n', reason from braid.conflict_history where relation = 'stock'::regclass and key = '{"id": 1}']),
	'remote|105|107|the remote version is newer; merged by column: n (delta)', 'and has both rows as they were');

sql($paris, q[select braid.restore_conflict(conflict_id) from braid.conflict_history where relation = 'stock'::regclass and key = '{"id": 1}']);
converged(@nodes);
all_have('select n, name from stock where id = 1', '112|tokyo', 'what lost is put back without taking away what was added');

# A row that an older change has added to still wins against changes older than its own version.
converged(@nodes);
cut();
sql($tokyo, q[update stock set n = n + 1, name = 'oldest' where id = 3]);
sql($osaka, q[update stock set n = n + 10, name = 'between' where id = 3]);
sql($paris, q[update stock set n = n + 100, name = 'newest' where id = 3]);
heal(stream($paris, $tokyo));
is(sql($paris, 'select n, name from stock where id = 3'), '201|newest', 'an older change adds');
heal(stream($paris, $osaka));
is(sql($paris, 'select n, name from stock where id = 3'), '211|newest', 'and the row keeps its version');
# The writer of the newest version has not seen the others, and goes on.
sql($tokyo, q[update stock set n = n + 1000, name = 'tokyo again' where id = 3]);
heal_all();
all_have('select n, name from stock where id = 3', '1211|tokyo again', 'the same on all');

# Several changes of a row in one transaction, and of several rows in several.
cut();
sql($tokyo, q[begin; update stock set n = n + 1, name = 'a' where id in (4, 5); update stock set n = n + 1 where id in (4, 5); commit; update stock set n = n - 5, name = 'b' where id = 4]);
sql($paris, q[update stock set n = n + 20, name = 'c' where id = 5; begin; update stock set n = n + 20, name = 'd' where id = 4; update stock set n = 0 where id = 4; commit]);
sql($osaka, q[update stock set name = 'e' where id in (4, 5)]);
heal_all();
all_have('select n, name from stock where id in (4, 5) order by id', "-3|e\n122|e", 'several in a row');

# Largest and smallest values: with and without the whole old row, whichever version wins.
sql($tokyo, q[insert into top values (1, 10, 'm', 'x'), (2, null, null, 'x')]);
converged(@nodes);
cut();
sql($tokyo, q[update top set high = 30, label = 'f', name = 'tokyo'; update stock set high = 30, first = '2001-01-01Z', label = 'b' where id = 6]);
sql($paris, q[update top set high = 20, label = 'd', name = 'paris'; update stock set high = 20, first = '2000-01-01Z' where id = 6]);
sql($osaka, q[update top set name = 'osaka'; update stock set high = 40, first = '2002-01-01Z', label = 'a', n = n + 1 where id = 6]);
heal_all();
all_have('select * from top order by id', "1|30|d|osaka\n2|30|d|osaka", 'largest and smallest values');
all_have(q[select high, first at time zone 'UTC', label, n from stock where id = 6], '40|2000-01-01 00:00:00|b|101', 'beside sums');

# Null counts as 0.
sql($tokyo, q[insert into stock (id) values (10), (11), (12); insert into stock (id, n) values (13, 5), (14, 5)]);
converged(@nodes);
sql($paris, q[update stock set n = 3 where id = 10; update stock set n = null where id = 13]);
converged(@nodes);
all_have('select id, n from stock where id in (10, 13) order by id', "10|3\n13|", 'from null and to null');
cut();
sql($tokyo, q[update stock set n = 1 where id = 11; update stock set name = 'x' where id = 12; update stock set n = null where id = 14]);
sql($paris, q[update stock set n = 2 where id = 11; update stock set n = 2 where id = 12; update stock set n = n + 2 where id = 14]);
heal_all();
all_have('select id, n from stock where id in (11, 12, 14) order by id', "11|3\n12|2\n14|2", 'null is 0 where several meet');

# An increment before its row; a row that two nodes insert.
cut(stream($osaka, $tokyo));
sql($tokyo, q[insert into stock (id, n, name) values (20, 50, 'new')]);
caught_up($paris, $tokyo);
sql($paris, q[update stock set n = n + 1, high = 7 where id = 20]);
sql($tokyo, q[update stock set n = n + 2 where id = 20]);
caught_up($osaka, $paris);
is(sql($osaka, 'select n, high from stock where id = 20'), '1|7', 'the row that an increment brings has what that adds');
heal(stream($osaka, $tokyo));
converged(@nodes);
all_have('select n, high from stock where id = 20', '53|7', 'and the rest when it comes');
cut();
sql($tokyo, q[insert into stock (id, n, high, name) values (21, 1, 5, 'tokyo'); update stock set n = n + 1 where id = 21]);
sql($paris, q[insert into stock (id, n, high, name) values (21, 10, 4, 'paris'); update stock set n = n + 10 where id = 21]);
heal_all();
all_have('select n, high, name from stock where id = 21', '22|5|paris', 'two inserts of one key add up, too');

# Deletions: by version as ever. What was added to a row before that is not for the next one with
# its key.
cut();
sql($paris, q[update stock set n = n + 1 where id in (7, 8)]);
sql($tokyo, q[delete from stock where id in (7, 8); insert into stock (id, n, name) values (8, 1000, 'again')]);
sql($osaka, q[update stock set n = n + 1 where id = 9]);
$tokyo->poll_query_until('postgres', 'select count(*) = 2 from braid.tombstone') or die;
heal_all();
all_have('select id, n from stock where id in (7, 8) order by id', '8|1000', 'deleted, and inserted anew');
cut();
sql($tokyo, q[delete from stock where id = 9]);
sql($paris, q[update stock set n = n + 1, name = 'kept' where id = 9]);
heal_all();
all_have('select n, name from stock where id = 9', '102|kept', 'a newer update undoes a deletion');

# A value that can't be added stops the subscription, with a hint how to go on.
sql($tokyo, q[insert into small values (1, 30000), (2, 0)]);
converged(@nodes);
cut();
sql($paris, q[update small set n = n + 2000 where id = 1]);
sql($tokyo, q[update small set n = n + 2000 where id = 1]);
sql($paris, "select braid.enable_subscription('paris_from_tokyo')");
$paris->poll_query_until('postgres', q[select state = 'error' from braid.subscription_status where name = 'paris_from_tokyo']) or die;
is(sql($paris, q[select error_sqlstate, error_message from braid.subscription where subscription_name = 'paris_from_tokyo']),
	'22003|sum of column "n" is out of range', 'out of range');
on_all('alter table small alter n type int', @nodes);
heal_all();
all_have('select n from small where id = 1', '34000', 'a larger type lets it go on');

# A node that does not write old values.
sql($tokyo, q[insert into plain values (1, 1)]);
converged(@nodes);
sql($tokyo, 'alter table plain replica identity default; update plain set n = 2 where id = 1');
$paris->poll_query_until('postgres', q[select state = 'error' from braid.subscription_status where name = 'paris_from_tokyo']) or die;
is(sql($paris, q[select error_sqlstate, error_message, error_hint like 'Run ALTER TABLE public.plain REPLICA IDENTITY FULL there%' from braid.subscription where subscription_name = 'paris_from_tokyo']),
	'55000|changes of table "public.plain" come without the old values that column rule "delta" needs|t', 'without old values nothing is applied');
is(sql($tokyo, 'select relation, column_name, rule, problem from braid.column_rules where problem is not null'),
	'plain|n|delta|updates made here lack the old values: the table has not REPLICA IDENTITY FULL', 'the view shows it where it is to be mended');
sql($tokyo, 'alter table plain replica identity full');
on_all(q[select braid.set_column_rule('plain', 'n', null)], @nodes);
$osaka->poll_query_until('postgres', q[select state = 'error' from braid.subscription_status where name = 'osaka_from_tokyo']);
heal(stream($paris, $tokyo), stream($osaka, $tokyo));
on_all(q[select braid.set_column_rule('plain', 'n', 'delta')], @nodes);
cut();
sql($_, 'update plain set n = n + 1 where id = 1') for @nodes;
heal_all();
all_have('select n from plain where id = 1', '5', 'and once they are there, it adds up again');

# Renamed, dropped, another type: the rule is the column's.
cut();
on_all('alter table plain rename n to m', @nodes);
sql($_, 'update plain set m = m + 1 where id = 1') for @nodes;
heal_all();
all_have('select m from plain where id = 1', '8', 'a renamed column keeps its rule');
on_all('alter table plain drop m; alter table plain add n int default 0', @nodes);
is(sql($tokyo, q[select count(*) from braid.column_rules where relation = 'plain'::regclass]), '0', 'that of a dropped column is gone');
sql($tokyo, 'update plain set n = 1 where id = 1');
converged(@nodes);
all_have('select * from plain', '1|1', 'and in nobody\'s way');

# In all modes, in bulk, with streams cut again and again.
sql($tokyo, q[insert into stock (id, n, high) select i, 0, 0 from generate_series(100, 102) i]);
converged(@nodes);
my %sum = (n => 0, amount => 0);
for my $mode (q[apply_mode => 'serial'], q[apply_mode => 'batch'], q[apply_mode => 'batch', consolidate => true], q[apply_mode => 'aggregate'], q[apply_mode => 'parallel', commit_order => 'relaxed'],
	q[apply_mode => 'parallel', split_transactions_above => 2])
{
	cut();
	sql($_->[0], "select braid.alter_subscription('$_->[1]', $mode)") for @streams;
	my $times = 150;
	sql($nodes[$_], "call many($_ + 1, $times)") for 0 .. 2;
	sql($_->[0], "select braid.enable_subscription('$_->[1]')") for @streams;
	sql($nodes[$_], "call many($_ + 1, $times)") for 0 .. 2;
	converged(@nodes) for 1 .. 2;
	$sum{n} += 2 * ((1 + 2 + 3) * $times + 3 * 3 * int($times / 7));
	all_have('select sum(n), max(high) from stock where id between 100 and 102', "$sum{n}|" . 3 * $times, "all count: $mode");
	is(join('', map { status($_->[0], $_->[1])->{last_error} } @streams), '', 'and all streams go on');
}
same_tables(\@nodes, qw(stock top small plain));

# All of them at once, while nothing is cut.
my $dir = PostgreSQL::Test::Utils::tempdir();
append_to_file("$dir/add.sql", q[\set id random(100, 102)
update stock set n = n + 1, name = :client_id where id = :id;
]);
my @bench = map { start_pgbench($_, '-c', '2', '-R', '300', '-T', '4', '-f', "$dir/add.sql") } @nodes;
$sum{n} += finish_pgbench($_) for @bench;
converged(@nodes) for 1 .. 2;
all_have('select sum(n) from stock where id between 100 and 102', $sum{n}, 'all count while all write');
same_tables(\@nodes, 'stock');

# A table that is copied while it is written.
my $kobe = new_node('kobe');
sql($kobe, q[
	create table stock (id int primary key, n int, amount numeric(12,2) not null default 0, free numeric, high int, first timestamptz, label text, name text);
	alter table stock replica identity full;
	create table top (id int primary key, high int, label text, name text);
	create table small (id int primary key, n int);
	create table plain (id int primary key, n int);
]);
sql($kobe, q[select braid.set_column_rule('stock', c, 'delta') from unnest('{n,amount,free}'::name[]) c]);
my $bench = start_pgbench($tokyo, '-c', '2', '-R', '300', '-T', '4', '-f', "$dir/add.sql");
subscribe($kobe, $tokyo);
sql($kobe, 'update stock set n = n + 1 where id between 100 and 102') for 1 .. 10;
$sum{n} += finish_pgbench($bench);
caught_up($kobe, $tokyo);
is(sql($kobe, 'select sum(n) from stock where id between 100 and 102'), $sum{n} + 30, 'what is added during a copy, and here, counts once');

# A change that might come by two paths would count twice.
sql($kobe, sprintf(q[select braid.create_subscription('kobe_from_paris', $dsn$%s$dsn$, copy_data => false, origin => 'any')], Braid::dsn($paris)));
sql($kobe, q[select braid.wait_for_subscription('kobe_from_paris')]);
sql($paris, 'update stock set n = n + 1 where id = 100');
$kobe->poll_query_until('postgres', q[select count(*) > 0 from braid.subscription where error_sqlstate = '55000' and error_message like '%by two paths%']) or die;
pass('and is refused');

done_testing();
