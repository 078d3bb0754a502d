# A little of each feature, in little time: `make valgrind` runs it on servers that are many times
# slower and report invalid reads. Both nodes must have the same rows in the end.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my $conf = "max_prepared_transactions = 5\nautovacuum = off\nlogical_decoding_work_mem = 64kB\n";
my $tokyo = new_node('tokyo', conf => $conf, publication => '');
my $paris = new_node('paris', conf => $conf);
my @nodes = ($tokyo, $paris);
sub tokyo { return $tokyo->safe_psql('postgres', shift) }
sub paris { return $paris->safe_psql('postgres', shift) }

on_all(q[
	create type mood as enum ('sad', 'glad');
	create type pair as (a int, b text);
	create domain positive as int check (value > 0);
	create table kind (id int primary key, i2 smallint, i8 bigint, n numeric, f real, d double precision, t text, v varchar(9), c char(5), s name, b bytea,
		o boolean, j json, jb jsonb, u uuid, da date, ts timestamp, tz timestamptz, ti time, tt timetz, iv interval, ip inet, m macaddr, p point, bi bit(3),
		vb varbit, tv tsvector, tq tsquery, r int4range, mr int4multirange, e mood, x pair, po positive, ia int[], ta text[], ea mood[], xa pair[], mo money, l pg_lsn, q "char");
	create table doc (id int primary key, n int, big text, list numeric[], made text generated always as (n::text || '!') stored, at timestamptz default now());
	alter table doc alter column big set storage external;
	create table bag (a int, t text);
	alter table bag replica identity full;
	create table parted (id int, k int, t text, primary key (id, k)) partition by range (k);
	create table parted_1 partition of parted for values from (0) to (100);
	create table parted_2 (t text, gone int, k int not null, id int not null);
	alter table parted_2 drop column gone;
	alter table parted attach partition parted_2 for values from (100) to (200);
	create table parent (id int primary key, t text);
	create table child (extra int) inherits (parent);
	alter table child add primary key (id);
	create table orders (id int primary key, parent_id int, code text unique, qty int, check (qty >= 0));
	create index on orders (lower(code)) where qty > 0;
	create table filtered (id int, region text, t text, secret text, primary key (id, region));
	create table sums (id int primary key, n int, high int);
	alter table sums replica identity full;
	create table judged (id int primary key, t text);
	alter table judged replica identity full;
	create table fired (t text);
	create function fire() returns trigger language plpgsql security definer set work_mem = '5MB' as $$
	begin
		if tg_when = 'BEFORE' and tg_op <> 'DELETE' then new.t := coalesce(new.t, '') || '+'; end if;
		return coalesce(new, old);
	end $$;
], @nodes);
tokyo(q[create publication braid for table kind, doc, bag, parted, parent, orders, sums, judged, fired, filtered (id, region, t) where (region in ('eu', 'uk') and id > 0)]);
paris(q[
	create trigger before before insert or update or delete on bag for each row execute function fire();
	create trigger after after insert or update or delete on doc for each row execute function fire();
	alter table bag enable replica trigger before;
	alter table doc enable always trigger after;
]);
my $every = q{values (%s, %s, -9223372036854775808, 1e-30, 1.5, -0.1, 'déjà', 'nine', 'c', 'name', '\x00ff', true, '{"a": [1, null]}', '{"b": {"c": "d"}}',
	'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '2026-04-05', 'infinity', '2026-03-29 02:30+02', '24:00', '12:00+05:30', '1 year -3 days', '::1/64', '08:00:2b:01:02:03',
	'(1,2)', '101', '1', 'a:1A b', 'a & !b', '[1,5)', '{[1,2),[4,)}', 'glad', '(1,"x y")', 7, '{1,NULL}', '{"a b",NULL,""}', '{sad}', '{"(1,x)",NULL}', 1.5, '0/16B3748', 'z')};
sub every { my ($id, $n) = @_; return sprintf "insert into kind $every;", $id, $n }
tokyo(every(1, 1) . q[
	insert into kind (id) values (2);
	insert into doc select i, i, repeat(md5(i::text), 300), array[i, null, 1.5] from generate_series(1, 3) i;
	insert into bag values (1, 'a'), (1, 'a'), (null, null);
	insert into parted select i, i * 40, 'p' from generate_series(1, 4) i;
	insert into parent values (1, 'a'); insert into child values (2, 'b', 3);
	insert into orders select i, 1, 'code ' || i, i from generate_series(1, 5) i;
	insert into filtered values (1, 'eu', 'a', 's'), (2, 'us', 'b', 's');
	insert into sums values (1, 0, 0); insert into judged values (1, 'a');
]);
my $name = subscribe($paris, $tokyo, two_phase => 'true');
my $back = subscribe($tokyo, $paris, copy_data => 'false');
my @same = qw(kind doc parted parent child orders sums judged);
same_tables(\@nodes, @same);

# Each kind of change, in transactions of their own and together, in each way of applying.
my $id = 10;
sub changes
{
	my $i = $id;
	$id += 10;
	return (
		every($i, $i), "insert into kind (id) values ($i + 1)", "update kind set i2 = i2 + 1, t = null, j = null, xa = '{}' where id = $i", "delete from kind where id = $i + 1",
		"insert into doc values ($i, 1, repeat('big $i', 2000)), ($i + 1, 1, 'small')", "update doc set n = n + 1 where id >= $i", "delete from doc where id = $i + 1",
		"insert into bag values ($i, 'a'), ($i, 'a')", "update bag set t = 'b' where a = $i", "delete from bag where a = $i",
		"insert into parted values ($i, 50, 'x')", "update parted set k = 150 where id = $i", "update parted set t = 'y', id = id + 1 where id = $i",
		"insert into parent values ($i, 'a')", "insert into child values ($i + 1, 'b', 1)", "update parent set t = 'c' where id >= $i",
		"insert into orders (id, code, qty) select $i + n, 'code ' || $i + n, n from generate_series(1, 5) n", "update orders set id = id + 1000, qty = 0 where id = $i + 1",
		"insert into filtered values ($i, 'eu', 'a', 's')", "update filtered set region = 'us' where id = $i", "update filtered set region = 'uk', t = 'back' where id = $i",
		'update sums set n = n + 1', "insert into fired values ('x')", 'truncate fired');
}
sub drain { my ($label) = @_; converged(@nodes); streams($paris, $name, $label); return }
paris(q[select braid.set_column_rule('sums', 'n', 'delta'); select braid.set_column_rule('sums', 'high', 'max')]);
for my $mode (qw(parallel batch aggregate))
{
	paris("select braid.alter_subscription('$name', apply_mode => '$mode'); select braid.wait_for_subscription('$name')");
	tokyo(join ";\n", changes());
	tokyo(join ";\n", 'begin', changes(), 'savepoint s', changes(), 'rollback to s', 'commit');
	drain("in mode $mode");
}

# Streamed while it runs, prepared, and after other columns have come.
paris("select braid.alter_subscription('$name', apply_mode => 'parallel', streaming => 'parallel'); select braid.wait_for_subscription('$name')");
tokyo(join ";\n", 'begin', q[insert into doc select i, i, repeat('x', 500) from generate_series(5000, 5200) i], 'savepoint s', changes(), 'rollback to s', changes(), 'commit');
tokyo(join ";\n", 'begin', changes(), "prepare transaction 'later'");
tokyo("commit prepared 'later'");
drain('streamed and prepared');
on_all('alter table orders add note text default $$n$$, drop column parent_id', @nodes);
tokyo(q[update orders set note = 'told' where id < 4; truncate judged; insert into judged values (1, 'a'), (2, 'b'), (3, 'c')]);
drain('with other columns');

# Conflicts, with functions and without.
on_all(keep_newest('judged') . q[select braid.set_conflict_resolution('orders', 'update_missing', 'keep_local');], @nodes);
for my $round (1 .. 2)
{
	$_->safe_psql('postgres', "select braid.disable_subscription('" . ($_ == $paris ? $name : $back) . "')") for @nodes;
	tokyo(qq[update judged set t = 'tokyo' where id = 1; delete from judged where id = 2; insert into orders (id, code, qty) values (7000 + $round, 'twice $round', 1); update kind set t = 'tokyo' where id = 1]);
	paris(qq[update judged set t = 'paris' where id < 3; insert into orders (id, code, qty) values (8000 + $round, 'twice $round', 2); delete from kind where id = 1 + $round; update kind set i2 = 5 where id = 1]);
	$_->safe_psql('postgres', "select braid.enable_subscription('" . ($_ == $paris ? $name : $back) . "')") for @nodes;
	converged(@nodes);
}
cmp_ok(paris('select count(*) from braid.conflict_history'), '>', 0, 'conflicts are recorded');

# Compare and repair, with a row that the other node never gets.
write_by_hand($paris, 'update doc set n = -1 where id = 1');
write_by_hand($paris, 'delete from parted where id = 2');
for my $table (qw(doc parted_1 parted_2 kind))
{
	paris("call braid.compare('$name', '$table')");
	paris("call braid.repair('$name', '$table', side => 'provider')");
}
converged(@nodes);

# Records of other systems, which neither node sends on.
my $columns = q["columns": [{"name": "id", "type": "int4", "identity": true, "primary_key": true}, {"name": "t", "type": "text"}]];
my $records = join ', ', map { sprintf '{"operation": "%s", "transaction": {"lsn": "0/%X", "commit_time": "2026-01-01T00:00:00Z"}, "schema": {"namespace": "public", "table": "parent", %s}, %s}',
	$_->[0], $_->[1], $columns, $_->[2] } [ insert => 1, '"after": {"id": 900, "t": "é"}' ], [ update => 2, '"after": {"id": 900, "t": null}' ], [ insert => 3, '"after": {"id": 901, "t": "x"}' ],
	[ delete => 4, '"before": {"id": 901}' ];
on_all("select braid.ingest(\$json\$[$records]\$json\$, 'shop')", @nodes);
converged(@nodes);

# Formats of the plugin.
tokyo(q[select pg_create_logical_replication_slot('feed', 'braid', false, true)]);
tokyo(join ";\n", changes(), 'begin', changes(), 'savepoint s', changes(), 'rollback to s', 'commit');
for my $options ("'format-version', '1'", "'format-version', '1', 'pretty-print', '1', 'include-pk', '1'", "'format-version', '2', 'include-types', 'true'",
	"'format', 'gir-json', 'publication_names', 'braid'")
{
	cmp_ok(tokyo("select count(*) from pg_logical_slot_peek_changes('feed', null, null, $options)"), '>', 1, "output with $options");
}
drain('after all of it');
same_tables(\@nodes, @same);

$_->stop for @nodes;
done_testing();
