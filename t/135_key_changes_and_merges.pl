# A row gets another primary key at one node while others change it, or delete it. Also with
# conflict functions and column rules, the rows under the old and the new key are decided each by
# itself, and the same everywhere.

use strict;
use warnings;

use Braid;
use Mesh;
use PostgreSQL::Test::Utils;
use Test::More;

my @nodes = map { new_node($_) } qw(tokyo paris oslo);
my ($tokyo, $paris, $oslo) = @nodes;
on_all(q[
	create table plain (id int primary key, v text, big text);
	create table whole (id int primary key, v text, big text);
	create table sums (id int primary key, n int not null default 0, top int, v text);
	create table highs (id int primary key, top int, v text);
	alter table whole replica identity full;
	alter table sums replica identity full;
	alter table plain alter big set storage external;
	alter table whole alter big set storage external;
], @nodes);
on_all(keep_newest($_), @nodes) for qw(plain whole);
mesh(@nodes);
on_all(q[
	select braid.set_column_rule('sums', 'n', 'delta');
	select braid.set_column_rule('sums', 'top', 'max');
	select braid.set_column_rule('highs', 'top', 'max');
], @nodes);
$tokyo->safe_psql('postgres', q[
	insert into plain select i, 'first', repeat('big ' || i, 1000) from generate_series(1, 20) i;
	insert into whole select * from plain;
	insert into sums select i, 100, i, 'first' from generate_series(1, 20) i;
	insert into highs select i, i, 'first' from generate_series(1, 20) i;
]);
converged(@nodes);

# Without concurrent changes: one row, with all values that its change left unchanged.
$paris->safe_psql('postgres', q[
	update plain set id = 201 where id = 20; update whole set id = 201, v = 'both' where id = 20;
	update sums set id = 201, n = n + 5 where id = 20; update highs set id = 201, top = 1 where id = 20;
]);
converged(@nodes);
all_have(q[select v, length(big) from plain where id in (20, 201)], 'first|6000', 'a function: the row has its new key');
all_have(q[select v, length(big) from whole where id in (20, 201)], 'both|6000', 'a function, with the whole old row');
all_have(q[select n, top from sums where id in (20, 201)], '105|20', 'sums: as it was written');
all_have(q[select top from highs where id in (20, 201)], '1', 'a maximum: as it was written');
# A row that only swaps its key with another.
$paris->safe_psql('postgres', q[begin; update whole set id = -1 where id = 18; update whole set id = 18 where id = 19; update whole set id = 19 where id = -1; commit]);
$oslo->safe_psql('postgres', q[begin; update sums set id = -1 where id = 18; update sums set id = 18 where id = 19; update sums set id = 19 where id = -1; commit]);
converged(@nodes);
all_have(q[select string_agg(left(big, 6), ' ' order by id) from whole where id in (18, 19, -1)], 'big 19 big 18', 'keys are swapped');
all_have(q[select string_agg(top::text, ' ' order by id) from sums where id in (18, 19, -1)], '19 18', 'keys are swapped, with sums');

my @tables = qw(plain whole sums highs);
for my $round (1 .. 4)
{
	my ($one, $other, $third) = $round % 2 ? ($tokyo, $paris, $oslo) : ($oslo, $tokyo, $paris);
	my $new = 100 * ($round + 2);
	# Changes of others before and after. (An earlier addition to a row that a later change brings
	# back may count at some nodes only, as for deletions.)
	cut();
	$other->safe_psql('postgres', "update plain set v = 'early $round' where id in (1, 2); update whole set v = 'early $round' where id in (1, 2);
		update sums set n = n + 1 where id = 1; update highs set top = 700 where id = 1; delete from plain where id = 3; delete from whole where id = 3");
	$one->safe_psql('postgres', "update $_ set id = id + $new where id between 1 and 6") for @tables;
	$third->safe_psql('postgres', "update plain set v = 'late $round' where id in (2, 4); update whole set v = 'late $round' where id in (2, 4);
		update sums set v = 'late $round' where id in (2, 4); update highs set v = 'late $round' where id in (2, 4);
		delete from plain where id = 5; delete from whole where id = 5; delete from sums where id = 5; delete from highs where id = 5");
	# Something is under the new key already.
	$third->safe_psql('postgres', "insert into $_ (id, v) values (6 + $new, 'taken $round')") for @tables;
	heal_all();
	same_tables(\@nodes, @tables);
	all_have("select count(*) from whole where id between 1 + $new and 6 + $new", '6', "round $round: all have come to their new keys");
	all_have("select string_agg(id::text || v, ' ' order by id) from whole where id in (1, 2, 3, 4, 5, 6)", "2late $round 4late $round", "round $round: what is newer stays under the old key");
	# The same keys again.
	$tokyo->safe_psql('postgres', q[
		insert into plain select i, 'first', 'small' from generate_series(1, 6) i on conflict (id) do update set v = 'first';
		insert into whole select i, 'first', 'small' from generate_series(1, 6) i on conflict (id) do update set v = 'first';
		insert into sums select i, 100, i, 'first' from generate_series(1, 6) i on conflict (id) do update set v = 'first';
		insert into highs select i, i, 'first' from generate_series(1, 6) i on conflict (id) do update set v = 'first';
	]);
	converged(@nodes);
}
same_tables(\@nodes, @tables);

done_testing();
