# PostgreSQL 18: each node runs ALTER TABLE VALIDATE CONSTRAINT for a NOT NULL constraint by itself,
# as for other constraints. A statement that PostgreSQL refuses before that, such as ADD PRIMARY
# KEY, waits for it.

use strict;
use warnings;

use Braid;
use Ddl;
use Test::More;

my ($tokyo, $paris) = my @nodes = ddl_nodes([qw(tokyo paris)]);
plan(skip_all => 'NOT NULL constraints are validated from PostgreSQL 18 on') if sql($tokyo, 'show server_version_num') < 180000;
sql($tokyo, 'create table item (id int, v text); alter table item replica identity full');
sql($tokyo, 'insert into item values (null, 1), (2, 2)');
sql($tokyo, 'alter table item add constraint id_there not null id not valid');
sql($tokyo, 'create table low (id int, v text); alter table low add constraint low_there not null id not valid');
sql($tokyo, 'update item set id = 1 where id is null');
sql($tokyo, 'alter table item validate constraint id_there');
sql($tokyo, 'alter table item add primary key (id)');
sql($tokyo, 'alter table low validate constraint low_there');
caught_up($paris, $tokyo);
same_schema('constraints are validated', @nodes);
is(sql($paris, q[select string_agg(conname || ' ' || convalidated, ', ' order by conname) from pg_constraint where contype = 'n' and conrelid in ('item'::regclass, 'low'::regclass)]),
	'id_there true, low_there true', 'at the other node too');
is(sql($paris, q[select count(*) from pg_constraint where contype = 'p' and conrelid = 'item'::regclass]), '1', 'a primary key that needs one is there');
same_tables(\@nodes, 'item');
all_stream(@nodes);

$_->stop for @nodes;
done_testing();
