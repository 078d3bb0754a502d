# Exclusion constraints, deferrable constraints, unique keys of generated columns: two nodes, while
# cut off, write rows that can't be in a table together. The newer one stays on both, the older one
# is deleted and is in the history; nothing stops. A transaction that violates a deferrable
# constraint only before its end is applied.

use strict;
use warnings;

use Braid;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
my @both = ($tokyo, $paris);
on_all(q[
	create function reach(a int, b int) returns int4range language sql immutable as 'select int4range(a, b)';
	create table stay (id int primary key, room int4range, during int4range, v text,
		exclude using gist (room with =, during with &&));
	create table part (id int primary key, during int4range, cancelled bool not null default false, v text,
		exclude using gist (during with &&) where (not cancelled));
	create table span (id int primary key, a int, b int, v text, exclude using gist (reach(a, b) with &&));
	create table shape (id int primary key, area circle, v text, exclude using gist (area with &&));
	create table swap (id int primary key, place int unique deferrable initially deferred, v text);
	create table turn (id int primary key, place int unique deferrable, v text);
	create table slot (id int primary key, during int4range, v text, exclude using gist (during with &&) deferrable initially deferred);
	create table made (id int primary key, name text, folded text generated always as (lower(name)) stored unique, v text);
	create table bare (id int);
], @both);
subscribe($paris, $tokyo);
subscribe($tokyo, $paris);
my @streams = ([ $paris, 'paris_from_tokyo' ], [ $tokyo, 'tokyo_from_paris' ]);

sub cut
{
	converged(@both);
	$_->[0]->safe_psql('postgres', "select braid.disable_subscription('$_->[1]')") for @streams;
	$_->poll_query_until('postgres', "select not coalesce(bool_or(active), false) from pg_replication_slots where slot_name !~ '^braid_deletions'") or die for @both;
	return;
}

# Announced deletions go to the other node: waits until nothing moves any more.
sub heal
{
	$_->[0]->safe_psql('postgres', "select braid.enable_subscription('$_->[1]')") for @streams;
	for my $round (1 .. 3)
	{
		converged(@both);
	}
	is(status(@$_)->{last_error}, '', "$_->[1] goes on") for @streams;
	return;
}

sub both_have
{
	my ($table, $expected, $what) = @_;
	is(join(' / ', map { $_->safe_psql('postgres', "select coalesce(string_agg(id || ':' || v, ' ' order by id), '') from $table t") } @both),
		"$expected / $expected", $what);
	return;
}

sub meet
{
	my ($first, $second) = @_;
	cut();
	$tokyo->safe_psql('postgres', $first);
	$paris->safe_psql('postgres', $second);
	heal();
	return;
}

sub conflicts
{
	my ($node, $table) = @_;
	return $node->safe_psql('postgres', qq[select string_agg(kind || ' ' || winner || ' ' || coalesce(local_row ->> 'id', '') || '/' || coalesce(remote_row ->> 'id', ''), ', ' order by conflict_id)
		from braid.conflict_history where relation = '$table'::regclass]);
}

# Exclusion constraints.
meet(q{insert into stay values (1, '[1,1]', '[10,20)', 'first')}, q{insert into stay values (2, '[1,1]', '[15,25)', 'second')});
both_have('stay', '2:second', 'of two ranges that overlap the newer one stays');
is(conflicts($tokyo, 'stay'), 'insert_exists remote 1/2', 'the one that left is in the history');
is(conflicts($paris, 'stay'), 'insert_exists local 2/1', 'there too, where it never came to be');
meet(q{insert into stay values (3, '[1,1]', '[25,30)', 'first')}, q{insert into stay values (4, '[2,2]', '[15,35)', 'second')});
both_have('stay', '2:second 3:first 4:second', 'ranges that meet no other');
meet(q{update stay set during = '[40,50)', v = 'moved' where id = 2}, q{update stay set during = '[45,60)', v = 'moved too' where id = 3});
both_have('stay', '3:moved too 4:second', 'updates that come to overlap');

# Several blocking rows, and one row that does not overlap: decided row by row.
meet(q{insert into stay values (5, '[3,3]', '[0,10)', 'five'), (6, '[3,3]', '[10,20)', 'six'), (7, '[3,3]', '[20,30)', 'seven')},
	q{insert into stay values (8, '[3,3]', '[5,15)', 'eight')});
both_have('stay', '3:moved too 4:second 7:seven 8:eight', 'two in the way of one');
like(conflicts($tokyo, 'stay'), qr/multiple_unique_conflicts remote 5\/8, multiple_unique_conflicts remote 6\/8$/, 'both are in the history');
cut();
$tokyo->safe_psql('postgres', q{insert into stay values (11, '[4,4]', '[0,10)', 'oldest')});
$paris->safe_psql('postgres', q{insert into stay values (12, '[4,4]', '[5,15)', 'middle')});
$tokyo->safe_psql('postgres', q{insert into stay values (13, '[4,4]', '[10,20)', 'newest')});
heal();
same_tables(\@both, 'stay');
is($tokyo->safe_psql('postgres', q{select bool_or(id = 13), bool_or(id = 12) from stay}), 't|f', 'the newest of a chain stays, and nothing that meets it');

# The loser changes again, and is the newest of all.
cut();
$tokyo->safe_psql('postgres', q{insert into stay values (14, '[5,5]', '[0,10)', 'oldest')});
$paris->safe_psql('postgres', q{insert into stay values (15, '[5,5]', '[5,15)', 'newer')});
$tokyo->safe_psql('postgres', q{update stay set v = 'newest' where id = 14});
heal();
is($_->safe_psql('postgres', q{select string_agg(v, ' ') from stay where id in (14, 15)}), 'newest', 'the row that was written last stays: ' . $_->name) for @both;

# Partial; on an expression; with a lossy index.
meet(q{insert into part values (1, '[1,5)', false, 'first')}, q{insert into part values (2, '[2,6)', true, 'cancelled')});
both_have('part', '1:first 2:cancelled', 'rows that a partial constraint leaves alone');
meet(q{insert into part values (3, '[10,20)', false, 'third')}, q{update part set cancelled = false, during = '[8,12)', v = 'back' where id = 2});
both_have('part', '1:first 2:back', 'one that comes under it');
meet(q{insert into span values (1, 1, 5, 'first')}, q{insert into span values (2, 4, 9, 'second')});
both_have('span', '2:second', 'an expression');
meet(q{insert into shape values (1, '<(0,0),2>', 'first')}, q{insert into shape values (3, '<(-3.4,-3.4),2.3>', 'near'), (2, '<(1,0),2>', 'second')});
both_have('shape', '2:second 3:near', 'what is near does not meet');
is(conflicts($tokyo, 'shape'), 'insert_exists remote 1/2', 'nor is it spoken of');

# Deferrable: in one transaction rows swap values that no two rows may share.
for my $table ('swap', 'turn')
{
	$tokyo->safe_psql('postgres', "insert into $table values (1, 1, 'one'), (2, 2, 'two'), (3, 3, 'three')");
	converged(@both);
	$tokyo->safe_psql('postgres', "update $table set place = 3 - place where id < 3");
	$tokyo->safe_psql('postgres', "update $table set place = place % 3 + 1");
	converged(@both);
	same_tables(\@both, $table);
	is($paris->safe_psql('postgres', "select string_agg(id || ':' || place, ' ' order by id) from $table"), '1:3 2:2 3:1', "$table: places that change hands");
	meet("insert into $table values (4, 4, 'first')", "insert into $table values (5, 4, 'second')");
	both_have($table, '1:one 2:two 3:three 5:second', "$table: of two inserts the newer one stays");
	is(conflicts($tokyo, $table), 'insert_exists remote 4/5', "$table: in the history");
	is(conflicts($paris, $table), 'insert_exists local 5/4', "$table: there too");
	$tokyo->safe_psql('postgres', "insert into $table values (6, 6, 'six'), (7, 7, 'seven')");
	meet("update $table set place = 8, v = 'first' where id = 6", "update $table set place = 8, v = 'second' where id = 7");
	both_have($table, '1:one 2:two 3:three 5:second 7:second', "$table: of two updates too");
	# Violated only between two changes of the transaction.
	meet("insert into $table values (9, 11, 'first')",
		"begin; insert into $table values (10, 11, 'second'); update $table set place = 12 where id = 10; commit");
	both_have($table, '1:one 2:two 3:three 5:second 7:second 9:first 10:second', "$table: what its transaction leaves is in no way");
	# A noted row outlives a TRUNCATE of another table.
	meet("insert into $table values (13, 13, 'first')", "begin; insert into $table values (14, 13, 'second'); truncate bare; commit");
	both_have($table, '1:one 2:two 3:three 5:second 7:second 9:first 10:second 14:second', "$table: and a TRUNCATE beside it");
	is($_->safe_psql('postgres', "select count(*) - count(distinct place) from $table"), 0, "$table: no two have one place: " . $_->name) for @both;
}
meet(q{insert into slot values (1, '[1,5)', 'first'), (2, '[5,9)', 'first')}, q{insert into slot values (3, '[4,6)', 'second')});
both_have('slot', '3:second', 'a deferrable exclusion constraint');
$tokyo->safe_psql('postgres', q{insert into slot values (4, '[10,20)', 'four')});
$tokyo->safe_psql('postgres', q{begin; update slot set during = '[0,10)' where id = 4; update slot set during = '[10,20)' where id = 3; commit});
converged(@both);
both_have('slot', '3:second 4:four', 'ranges that change hands');
same_tables(\@both, 'slot');

# Generated columns.
meet(q{insert into made (id, name, v) values (1, 'Ada', 'first')}, q{insert into made (id, name, v) values (2, 'ADA', 'second')});
both_have('made', '2:second', 'a unique key that is generated');
$tokyo->safe_psql('postgres', q{insert into made (id, name, v) values (3, 'Bob', 'three')});
meet(q{update made set name = 'Cyd', v = 'first' where id = 2}, q{update made set name = 'CYD', v = 'second' where id = 3});
both_have('made', '3:second', 'of two updates too');

is($_->safe_psql('postgres', q{select count(*) from braid.displacement}), '0', 'nothing is left behind on ' . $_->name) for @both;
is($_->safe_psql('postgres', q{select coalesce(string_agg(kind || ' ' || table_name || ' ' || (key ->> 'id'), ', '), '') from braid.conflict_history
	where kind in ('delete_missing', 'update_deleted') and winner = 'local'}), '', 'no conflict is spoken of twice on ' . $_->name) for @both;

# Keys without overlaps.
if ($tokyo->safe_psql('postgres', 'show server_version_num') >= 180000)
{
	on_all(q{create table lease (id int primary key, room int4range, during int4range, v text, unique (room, during without overlaps))}, @both);
	$_->[0]->safe_psql('postgres', "select braid.refresh_subscription('$_->[1]')") for @streams;
	# Copied, before anything is cut (t/184_copy_beside_own.pl is about the other case).
	$_->[0]->safe_psql('postgres', "select braid.wait_for_subscription('$_->[1]')") for @streams;
	converged(@both);
	meet(q{insert into lease values (1, '[1,1]', '[0,10)', 'first'), (2, '[2,2]', '[0,10)', 'other')}, q{insert into lease values (3, '[1,1]', '[5,15)', 'second')});
	both_have('lease', '2:other 3:second', 'of two leases that overlap the newer one stays');
	is(conflicts($tokyo, 'lease'), 'insert_exists remote 1/3', 'the one that left is in the history');
}

# A transaction that is applied while it arrives.
$paris->safe_psql('postgres', "alter system set braid.apply_buffer_size = '1MB'");
$paris->restart;
meet(q{insert into swap select i, i, 'many' from generate_series(100, 20000) i}, q{insert into swap values (40001, 777, 'newer')});
is($paris->safe_psql('postgres', 'select string_agg(v, $$ $$) from swap where place = 777'), 'newer', 'one of them in a large one');
same_tables(\@both, 'swap');

done_testing();
