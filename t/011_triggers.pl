# Changes are applied as with session_replication_role = replica: which triggers fire, foreign keys
# are not checked, and what happens to generated, identity, extra and defaulted columns.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '');

on_all(q[
	create table item (id int primary key, v text);
	create table parent (id int primary key);
	create table child (id int primary key, parent_id int references parent on delete cascade);
	create table made (id int generated always as identity primary key, a int, twice int generated always as (a * 2) stored);
	create table full_identity (a int, b text);
	alter table full_identity replica identity full;
], $tokyo, $paris);
$tokyo->safe_psql('postgres', 'create table extra (id int primary key, a text, b text)');
$paris->safe_psql('postgres', q[
	create table extra (b text, more text, id int primary key, counted int default 7, stamped timestamptz not null default now(), a text);

	create table fired (seq serial, what text);
	create function note_it() returns trigger language plpgsql as $$
	begin
		insert into public.fired (what) values (format('%s %s %s %s', tg_argv[0], tg_when, tg_op, tg_level));
		if tg_op = 'DELETE' then return old; end if;
		if tg_argv[0] = 'change' then new.v := new.v || '!'; end if;
		return new;
	end $$;
	create trigger by_default after insert or update or delete on item for each row execute function note_it('default');
	create trigger on_replica after insert or update or delete on item for each row execute function note_it('replica');
	create trigger on_always before insert or update or delete on item for each row execute function note_it('always');
	create trigger off after insert on item for each row execute function note_it('off');
	alter table item enable replica trigger on_replica;
	alter table item enable always trigger on_always;
	alter table item disable trigger off;
]);
subscribe($paris, $tokyo);

$tokyo->safe_psql('postgres', q[insert into item values (1, 'a')]);
$tokyo->safe_psql('postgres', q[update item set v = 'b']);
$tokyo->safe_psql('postgres', q[delete from item]);
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', q[select what from fired order by seq]), join("\n",
	'always BEFORE INSERT ROW', 'replica AFTER INSERT ROW',
	'always BEFORE UPDATE ROW', 'replica AFTER UPDATE ROW',
	'always BEFORE DELETE ROW', 'replica AFTER DELETE ROW'), 'replica and always triggers fire, others do not');

# A trigger may change what is stored.
$paris->safe_psql('postgres', q[create trigger changes before insert on item for each row execute function note_it('change'); alter table item enable replica trigger changes]);
$tokyo->safe_psql('postgres', q[insert into item values (2, 'x')]);
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select v from item where id = 2'), 'x!', 'a row trigger changes the row');

# Foreign keys: neither checked nor acted upon; the provider has done both.
$tokyo->safe_psql('postgres', 'insert into parent values (1), (2); insert into child values (1, 1), (2, 2)');
caught_up($paris, $tokyo);
$paris->safe_psql('postgres', 'set session_replication_role = replica; delete from parent where id = 1');
$tokyo->safe_psql('postgres', 'insert into child values (3, 1)');
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select count(*) from child where parent_id = 1'), '2', 'a child without its parent is taken');
$tokyo->safe_psql('postgres', 'delete from parent where id = 2');
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select count(*) from child where parent_id = 2'), '0', 'what a cascade deleted is deleted');

# Identity columns keep the provider's number, generated ones are computed here.
$tokyo->safe_psql('postgres', 'insert into made (a) values (10), (20); update made set a = 11 where a = 10');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'made');

# More columns here than there, in another order.
$tokyo->safe_psql('postgres', q[insert into extra values (1, 'a', 'b'), (2, 'c', null)]);
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select id, a, b, more, counted, stamped is not null from extra order by id'), "1|a|b||7|t\n2|c|||7|t", 'defaults and nulls fill the columns that the provider lacks');
$paris->safe_psql('postgres', q[update extra set more = 'local', counted = 8 where id = 1]);
$tokyo->safe_psql('postgres', q[update extra set a = 'changed' where id = 1]);
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select a, more, counted from extra where id = 1'), 'changed|local|8', 'an update leaves them alone');
# A trigger UPDATE OF goes by the columns that the provider sends.
$paris->safe_psql('postgres', q[
	truncate fired;
	alter table extra add twice int generated always as (counted * 2) stored;
	create function note_columns() returns trigger language plpgsql as $$ begin insert into public.fired (what) values (tg_name); return null; end $$;
	create trigger sent after update of a, more on extra for each row execute function note_columns();
	create trigger not_sent after update of more, counted on extra for each row execute function note_columns();
	alter table extra enable always trigger sent; alter table extra enable always trigger not_sent;
]);
$tokyo->safe_psql('postgres', q[update extra set a = 'again' where id = 1]);
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select what from fired order by seq'), 'sent', 'UPDATE OF columns that are sent fires, of others it does not');
is($paris->safe_psql('postgres', 'select a, counted, twice from extra where id = 1'), 'again|8|16', 'and what is generated of others stays');

# Rows without a key are found by all their columns, one for each.
$tokyo->safe_psql('postgres', q[
	insert into full_identity values (1, 'same'), (1, 'same'), (2, null), (null, 'x');
	update full_identity set b = 'was null' where a = 2;
	update full_identity set a = 3 where a is null;
	delete from full_identity where ctid = (select min(ctid) from full_identity where a = 1);
]);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'full_identity');

done_testing();
