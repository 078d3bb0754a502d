# Rows are found by whatever identifies them: whole rows with duplicates and nulls, keys, chosen
# indexes. Keys change, also in chains and swaps within one transaction. Unchanged large values keep
# their contents.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '');
on_all(q[
	create table whole (a int, b text, c numeric);
	alter table whole replica identity full;
	create table odd (a int, j json, p point);
	alter table odd replica identity full;
	create table whole_keyed (id int primary key, v text, w text);
	alter table whole_keyed replica identity full;
	create table chosen (id int primary key, code text not null, part int not null, v text);
	create unique index chosen_code on chosen (part, code);
	alter table chosen replica identity using index chosen_code;
	create table log (at int, what text);
	create table nobody (at int, what text);
	alter table nobody replica identity nothing;
	create table moving (id int primary key, v text);
	create table deferred (id int, v text, primary key (id) deferrable initially deferred);
	alter table deferred replica identity full;
	create table two_keys (id int primary key, name text unique, v text);
	create table wide (id int primary key, n int, doc text, other text);
	alter table wide alter doc set storage external, alter other set storage external;
	create table wide_whole (n int, doc text, other text);
	alter table wide_whole alter doc set storage external, alter other set storage external;
	alter table wide_whole replica identity full;
], $tokyo, $paris);
my $name = subscribe($paris, $tokyo);

# One by one, so that what differs is known by what was done last.
sub step
{
	my ($what, $table, $sql) = @_;
	$tokyo->safe_psql('postgres', $sql);
	caught_up($paris, $tokyo);
	note($what);
	same_tables([ $tokyo, $paris ], $table);
	return;
}

# The whole row identifies: duplicates are as many as at the provider.
step('duplicates and nulls', 'whole', q[
	insert into whole values (1, 'x', 1.0), (1, 'x', 1.0), (1, 'x', 1.0), (2, null, null), (2, null, null), (null, null, null), (null, 'y', 1.50), (3, 'z', 'NaN');
]);
step('one of several duplicates', 'whole', q[
	delete from whole where ctid = (select min(ctid) from whole where a = 1);
	update whole set b = 'changed' where ctid = (select min(ctid) from whole where a = 1);
]);
step('rows with nulls', 'whole', q[
	update whole set c = 7 where ctid = (select min(ctid) from whole where a = 2);
	delete from whole where ctid = (select min(ctid) from whole where a = 2 and c is null);
	update whole set a = 9 where a is null and b is null;
	delete from whole where a is null;
]);
step('every duplicate by one statement', 'whole', q[
	insert into whole select 5, 'five', 5 from generate_series(1, 20);
	update whole set c = c + 1 where a = 5;
	update whole set b = null where a = 5;
]);
step('values that are equal and not the same', 'whole', q[
	insert into whole values (6, 'six', 1.0), (6, 'six', 1.00);
	update whole set b = 'seven' where a = 6 and c::text = '1.00';
	delete from whole where a = 3;
]);
step('all of them', 'whole', 'delete from whole where a = 5');

# Types that have no equality, and columns that only this side has.
step('types without equality', 'odd', q[
	insert into odd select i % 3, format('{"n": %s}', i / 2)::json, point(i, 1) from generate_series(1, 8) i;
	insert into odd values (1, null, null), (1, null, null);
	update odd set j = '{"n":  1}' where p ~= point(2, 1);
	update odd set a = 7 where j is null and ctid = (select min(ctid) from odd where j is null);
	delete from odd where a = 2;
]);
$paris->safe_psql('postgres', q[alter table whole add extra int default 5]);
$tokyo->safe_psql('postgres', q[
	insert into whole values (8, 'eight', 8), (8, 'eight', 8);
	update whole set b = 'one of two' where ctid = (select min(ctid) from whole where a = 8);
	delete from whole where a = 9;
]);
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select a, b, c, extra from whole where a >= 8 order by 1, 2'), "8|eight|8|5\n8|one of two|8|5", 'columns of this side alone are not looked at');
$paris->safe_psql('postgres', 'alter table whole drop extra');
step('without them', 'whole', q[update whole set c = 0 where a = 8]);

# A whole row that has a key as well.
step('full, with a key', 'whole_keyed', q[
	insert into whole_keyed select i, 'v' || i, case when i % 2 = 0 then 'w' || i end from generate_series(1, 20) i;
	update whole_keyed set v = 'changed' where id <= 5;
	update whole_keyed set id = id + 100 where id between 6 and 10;
	update whole_keyed set w = null where id = 12;
	delete from whole_keyed where id between 15 and 17;
	update whole_keyed set v = 'of a key that stays', w = repeat(md5(id::text), 1000) where id = 18;
	update whole_keyed set v = 'with a large value that stays' where id = 18;
]);

# An index that was chosen.
step('using index', 'chosen', q[
	insert into chosen select i, 'c' || i, i % 3, 'v' || i from generate_series(1, 20) i;
	update chosen set v = 'changed' where id <= 5;
	update chosen set code = 'other ' || code where id between 6 and 10;
	update chosen set id = id + 100 where id between 11 and 13;
	delete from chosen where id between 15 and 17;
]);

# Nothing identifies, and nothing needs to.
step('insert only', 'log', q[insert into log select i, 'w' || i % 2 from generate_series(1, 50) i; insert into log values (1, 'w1'), (null, null)]);
step('insert only, identity nothing', 'nobody', q[insert into nobody values (1, 'a'), (1, 'a'), (null, null)]);
for my $table (qw(log nobody))
{
	isnt($tokyo->psql('postgres', "update $table set what = 'b'"), 0, "an update of $table is refused at the provider");
}
step('truncated', 'log', 'truncate log');

# Keys that change.
step('rows for that', 'moving', q[insert into moving select i, 'row ' || i from generate_series(1, 100) i]);
step('a key', 'moving', 'update moving set id = 1000 where id = 50');
step('away and back', 'moving', q[begin; update moving set id = 2000 where id = 51; update moving set id = 51, v = 'was away' where id = 2000; commit]);
step('a swap of three', 'moving', q[
	begin;
	update moving set id = -1 where id = 1;
	update moving set id = 1 where id = 2;
	update moving set id = 2 where id = 3;
	update moving set id = 3 where id = -1;
	commit;
]);
step('a chain, from the far end', 'moving', q[
	begin;
	do $$ begin for i in reverse 40 .. 10 loop update moving set id = id + 1000 where id = i; end loop; end $$;
	do $$ begin for i in 1010 .. 1040 loop update moving set id = i - 1000 + 1000000 where id = i; end loop; end $$;
	commit;
]);
step('a swap of three, time and again, by transactions in a row', 'moving', q[
	do $$
	begin
		for i in 1 .. 50 loop
			update moving set id = -1 where id = 1; commit;
			update moving set id = 1 where id = 2; commit;
			update moving set id = 2 where id = 3; commit;
			update moving set id = 3, v = v || '.' where id = -1; commit;
		end loop;
	end $$;
]);
step('deleted and there again', 'moving', q[
	begin; delete from moving where id = 60; insert into moving values (60, 'again'); update moving set v = 'and changed' where id = 60; commit;
	begin; insert into moving values (5000, 'not for long'); delete from moving where id = 5000; commit;
	begin; update moving set id = 6000 where id = 61; delete from moving where id = 6000; insert into moving values (61, 'new'); commit;
]);

# All keys at once move by one: only a deferrable key lets a statement do that.
step('rows under a deferrable key', 'deferred', q[insert into deferred select i, 'row ' || i from generate_series(1, 20) i]);
step('every key by one', 'deferred', 'update deferred set id = id + 1');
step('and back', 'deferred', 'update deferred set id = id - 1');
step('a swap of two', 'deferred', q[update deferred set id = case id when 1 then 2 else 1 end where id in (1, 2)]);

# A second unique key, which changes hands.
step('rows with two keys', 'two_keys', q[insert into two_keys select i, 'name ' || i, 'v' from generate_series(1, 20) i]);
step('a name changes hands within a transaction', 'two_keys', q[
	begin; update two_keys set name = 'free' where id = 1; update two_keys set name = 'name 1' where id = 2; update two_keys set name = 'name 2' where id = 1; commit;
]);
step('and from transaction to transaction', 'two_keys', q[
	do $$
	begin
		for i in 3 .. 18 loop
			update two_keys set name = null where id = i; commit;
			update two_keys set name = 'name ' || i where id = i + 1; commit;
			delete from two_keys where id = i; commit;
			insert into two_keys values (i, 'new ' || i, 'v'); commit;
		end loop;
	end $$;
]);

# Large values.
step('large values', 'wide', q[
	insert into wide select i, 0, (select string_agg(md5((i * j)::text), '') from generate_series(1, 32768) j), repeat('o', 10000) from generate_series(1, 4) i;
]);
is($paris->safe_psql('postgres', 'select min(length(doc)), max(length(doc)) from wide'), '1048576|1048576', 'of a megabyte each');
step('unchanged', 'wide', 'update wide set n = n + 1');
step('unchanged while the key changes', 'wide', 'update wide set id = id + 100 where id = 1');
step('unchanged while the key changes and comes back', 'wide', q[begin; update wide set id = 500 where id = 2; update wide set id = 2, n = 7 where id = 500; commit]);
step('only one of them', 'wide', q[update wide set doc = reverse(doc) where id = 3]);
step('only the other', 'wide', q[update wide set other = 'short now' where id = 3]);
step('null', 'wide', q[update wide set doc = null where id = 3; update wide set doc = repeat('n', 1000000) where id = 3]);
step('deleted and there again', 'wide', q[begin; insert into wide select 600, n, doc, other from wide where id = 4; delete from wide where id = 4; update wide set n = 8 where id = 600; commit]);
step('unchanged large values, the whole row identifies', 'wide_whole', q[
	insert into wide_whole select i, (select string_agg(md5((i * j)::text), '') from generate_series(1, 32768) j), repeat('o', 10000) from generate_series(1, 3) i;
	update wide_whole set n = n + 10;
	update wide_whole set other = null where n = 11;
	update wide_whole set doc = 'short' where n = 12;
	delete from wide_whole where n = 13;
]);

is($paris->safe_psql('postgres', 'select count(*) from braid.conflict_history'), '0', 'none of this is a conflict')
  or diag($paris->safe_psql('postgres', 'select relation, kind, winner, reason, key, count(*) from braid.conflict_history group by 1, 2, 3, 4, 5 limit 20'));

# The provider's key becomes one of a generated column, which is not sent. From 18 on PostgreSQL
# itself refuses updates of such a table.
SKIP:
{
	skip 'PostgreSQL refuses such updates', 4 if $tokyo->pg_version >= 18;
	on_all('create table made (id int primary key, n int, twice int generated always as (id * 2) stored)', $tokyo, $paris);
	$paris->safe_psql('postgres', "select * from braid.refresh_subscription('$name')");
	$paris->safe_psql('postgres', "select braid.wait_for_subscription('$name')");
	$tokyo->safe_psql('postgres', 'insert into made select i, 0 from generate_series(1, 3) i');
	caught_up($paris, $tokyo);
	on_all('alter table made drop constraint made_pkey, add primary key (twice)', $tokyo, $paris);
	$tokyo->safe_psql('postgres', 'update made set n = 1 where id = 1');
	becomes($paris, "select state from braid.subscription_status where name = '$name'", 'error', 'an update does not say which row it is about');
	like(status($paris, $name)->{error_hint}, qr/^A key of the table has a generated column, which the provider does not send/, 'the hint says so');
	on_all('alter table made add unique (id)', $tokyo, $paris);
	$tokyo->safe_psql('postgres', 'alter table made replica identity using index made_id_key');
	$paris->safe_psql('postgres', "select braid.resync_table('$name', 'made')");
	$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
	$paris->safe_psql('postgres', "select braid.wait_for_subscription('$name')");
	$tokyo->safe_psql('postgres', 'update made set n = 2 where id > 1');
	streams($paris, $name, 'and how to go on');
	caught_up($paris, $tokyo);
	same_tables([ $tokyo, $paris ], 'made');
}

done_testing();
