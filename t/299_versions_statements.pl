# Statements of versioned transactions that do more than change a row: they alter a table, truncate
# and copy, cascade, and fire triggers. Both nodes have the same afterwards.

use strict;
use warnings;

use Braid;
use Group;
use Test::More;

my @both = my ($tokyo, $paris) = group([qw(tokyo paris)], q[
	create table stock (id int primary key, amount int not null);
	create table accounts (id int primary key, amount int not null);
	create table child (id int primary key, stock_id int references stock on delete cascade);
	insert into stock values (1, 100), (2, 200);
	insert into accounts values (1, 0);
	insert into child values (1, 1), (2, 2)], conf => 'braid.version_timeout = 60s');
sql($tokyo, "select braid.version_table('$_')") for qw(stock accounts);
ok($_->poll_query_until('postgres', q[select count(*) = 2 from braid.versioned_table where phase = 1]), $_->name . ' knows the tables') for @both;

sub begins { my ($versions) = @_; return "begin isolation level repeatable read; set local braid.versions = '$versions'; "; }
sub versioned { my ($node, $versions, $sql) = @_; return sql($node, begins($versions) . "$sql; commit"); }
my $turn = 0;
sub both_have
{
	my ($sql, $expected, $what) = @_;
	have_all(@both);
	is(sql($_, $sql), $expected, "$what: " . $_->name) for @both;
	return;
}

# Each node in turn.
versioned($tokyo, 'write stock', q[alter table stock add note text default 'x'; update stock set note = 'y' where id = 1]);
versioned($paris, 'write stock', q[create index stock_note on stock (note); update stock set note = note || 'z' where id = 1]);
both_have(q[select string_agg(id || note, ' ' order by id) from stock], '1yz 2x', 'a new column and its values');
both_have(q[select to_regclass('stock_note') is not null], 't', 'an index that another node has created');
versioned($tokyo, 'write stock', q[alter table stock alter amount type bigint; update stock set amount = 5000000000 where id = 2]);
both_have('select amount from stock where id = 2', '5000000000', 'a table that was rewritten');
like(refusal($paris, 'alter table stock drop note'), qr/can only be written in a versioned transaction/, 'an undeclared statement');
like(refusal($paris, begins('read stock') . 'alter table stock drop note'), qr/versioned table stock was declared as read, and is written/, 'one that is declared as reading');
like(refusal($tokyo, 'drop table stock cascade'), qr/versioned table stock cannot be dropped.*unversion_table/s, 'a table that is versioned');

versioned($paris, 'write stock', 'delete from stock where id = 1');
both_have('select string_agg(id::text, $$ $$) from child', '2', 'a cascade');
versioned($tokyo, 'write stock', q[insert into stock values (3, 3); truncate stock cascade; insert into stock values (7, 7)]);
both_have('select (select string_agg(id::text, $$ $$) from stock), (select count(*) from child)', '7|0', 'a truncate that cascades');
versioned($paris, 'write stock', q[copy stock (id, amount) from program 'echo 8,8' (format csv)]);
versioned($tokyo, 'write stock', q[merge into stock using (values (8, 1), (9, 9)) v(i, a) on id = i when matched then update set amount = a when not matched then insert values (i, a)]);
both_have(q[select string_agg(id || ':' || amount, ' ' order by id) from stock], '7:7 8:1 9:9', 'copied and merged');
versioned($paris, 'write stock', q[insert into stock values (8, 80), (10, 100) on conflict (id) do update set amount = stock.amount + excluded.amount]);
both_have(q[select string_agg(id || ':' || amount, ' ' order by id) from stock], '7:7 8:81 9:9 10:100', 'an upsert');

# A trigger fires where the row is written, and only there.
sql($tokyo, 'create function bump() returns trigger language plpgsql as $$ begin update accounts set amount = amount + 1; return new; end $$');
have_all(@both);
versioned($paris, 'write stock', 'create trigger bump after insert on stock for each row execute function bump()');
have_all(@both);
for my $node (@both)
{
	my $id = 20 + $turn++;
	like(refusal($node, begins('write stock') . "insert into stock values ($id, 0)"), qr/versioned table accounts was not declared.*Add 'write accounts'/s, 'a trigger writes what was not declared: ' . $node->name);
	versioned($node, 'write stock, write accounts', "insert into stock values ($id, 0)");
}
both_have('select amount from accounts', '2', 'each trigger has fired once');

# As programs send it: savepoints, cursors, a parameter of each type, and what ORMs write.
versioned($tokyo, 'write stock', q[savepoint a; update stock set amount = 0; rollback to a; update stock set amount = amount + 1 where id = 7; release a]);
versioned($paris, 'write stock', q[declare c cursor for select * from stock where id = 7 for update; fetch c; update stock set amount = amount + 1 where current of c; close c]);
both_have('select amount from stock where id = 7', '9', 'savepoints and cursors');
is(versioned($paris, 'write stock, write accounts', q[with gone as (delete from stock where id >= 20 returning *) insert into stock select id + 100, amount from gone returning id]), "120\n121", 'a query that writes twice');
both_have('select count(*) from stock where id > 100', '2', 'both of it');
same_tables(\@both, qw(stock accounts child));
is(sql($_, q[select count(*) from braid.conflict_history where relation::text <> 'child']), '0', 'no conflict of versioned tables at ' . $_->name) for @both;
done_testing();
