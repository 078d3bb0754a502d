# The umbrella of a routed table: at each node, `everywhere.orders` has the rows of all nodes. It is
# read and written there, also while a shard has moved, a set of nodes is added, and a node has
# left.

use strict;
use warnings;

use Braid;
use Group;
use PostgreSQL::Test::Utils;
use Test::More;

my ($tokyo, $paris) = my @all = group([qw(tokyo paris)], q{
	create table orders (tenant_id bigint not null, order_id bigint not null, created_at timestamptz not null default now(), item text default 'thing', n int default 0,
		primary key (tenant_id, order_id, created_at));
	create table tenant (tenant_id bigint primary key, name text);
	insert into tenant select t, 'tenant ' || t from generate_series(0, 39) t;
	create table counted (tenant_id bigint not null, id bigint generated always as identity, created_at timestamptz not null, primary key (tenant_id, id, created_at));
});
sql($_, q[set braid.ddl_replication = off; create role clerk login; create role guest login; grant select, insert, update, delete on orders to clerk; set braid.ddl_replication = default])
	for @all;
my $route = q[select braid.route_table('orders', tenant => 'tenant_id', record => 'order_id', created => 'created_at', shards => 8];

# What can't have one.
like(refusal($tokyo, q[select braid.add_umbrella('orders')]), qr/table public.orders is not routed.*HINT/s, 'a table that is not routed');
like(refusal($tokyo, q[select braid.route_table('counted', 'tenant_id', 'id', 'created_at', umbrella => true)]),
	qr/cannot make an umbrella for table public.counted: identity columns id.*HINT/s, 'a table with an identity column');
is(sql($tokyo, q[select count(*) from braid.routed_tables]), 0, 'it is not routed then');

sql($tokyo, "$route, umbrella => true)");
for my $node (@all)
{
	my ($other) = grep { $_ != $node } @all;
	is(sql($node, q[select string_agg(inhrelid::regclass::text, ' ' order by inhrelid::regclass::text) from pg_inherits where inhparent = 'everywhere.orders'::regclass]),
		q[everywhere."orders@] . $other->name . q[" orders], $node->name . ': the plain table, and a foreign one');
}

# Written at one node, to both.
sql($tokyo, q[insert into everywhere.orders (tenant_id, order_id) select t, t from generate_series(0, 39) t]);
sub counts { return join ' ', map { sql($_, 'select count(*) from orders') } @all; }
my $counts = counts();
isnt($counts, '40 0', 'rows are at both nodes');
isnt($counts, '0 40', 'and not at the other one alone');
is(sql($_, 'select count(*), count(distinct tenant_id) from everywhere.orders'), '40|40', $_->name . ': all rows are read') for @all;
# At home, as `braid.route` says.
sub strays
{
	my $strays = 0;
	$strays += sql($_, "select count(*) from orders o cross join lateral braid.route('orders', o.tenant_id::text, o.order_id::text, o.created_at) r
		where not '" . $_->name . "' = any (r.nodes)") for @_;
	return $strays;
}
is(strays(@all), 0, 'each row is at home');
my $file = PostgreSQL::Test::Utils::tempdir() . '/rows.txt';
append_to_file($file, join '', map { "$_\t" . ($_ + 1000) . "\tcopied\n" } 0 .. 39);
sql($paris, "copy everywhere.orders (tenant_id, order_id, item) from '$file'");
is(strays(@all), 0, 'in COPY, too');
is(sql($tokyo, q[select count(*), min(item), max(n) from everywhere.orders where order_id >= 1000]), '40|copied|0', 'all copied rows are read, with defaults');
sql($tokyo, q[update everywhere.orders set n = n + 1 where order_id >= 1000]);
is(sql($paris, q[select sum(n) from everywhere.orders]), 40, 'rows of both nodes are updated');
sql($paris, q[delete from everywhere.orders where order_id = 1003 or order_id = 1004]);
is(sql($tokyo, q[select count(*) from everywhere.orders]), 78, 'and deleted');
is(sql($tokyo, q[select count(*), count(t.name) from everywhere.orders o join tenant t using (tenant_id)]), '78|78', 'joins');
is(sql($tokyo, q[select count(*) from (select tenant_id from everywhere.orders group by 1 having count(*) = 2) s]), 38, 'groups');
is(sql($tokyo, q[begin; set local search_path = everywhere, public; select count(*) from orders; commit]), 78, 'under the name of the table, by the search path');
is(sql($tokyo, q[with u as (insert into everywhere.orders (tenant_id, order_id) select t, 2000 + t from generate_series(0, 9) t returning tableoid) select count(distinct tableoid) from u]), 2,
	'RETURNING');
sql($tokyo, q[delete from everywhere.orders where order_id >= 2000]);
like(refusal($tokyo, q[insert into everywhere.orders (tenant_id, order_id, created_at) values (1, 1, now() + interval '1 hour')]), qr/dated in the future/, 'a row of the future is refused');
like(refusal($tokyo, q[insert into everywhere.orders (tenant_id, order_id) values (null, 1)]), qr/null/, 'and one without a tenant');
my ($here) = split /\n/, sql($tokyo, q[select tenant_id from orders order by 1]);
my ($there) = split /\n/, sql($paris, q[select tenant_id from orders order by 1]);
like(refusal($tokyo, "insert into everywhere.orders (tenant_id, order_id, created_at) select tenant_id, order_id, created_at from everywhere.orders where tenant_id = $there limit 1"),
	qr/duplicate key value violates unique constraint "orders_pkey"/, 'a key that is there at another node');
like(refusal($tokyo, "insert into orders (tenant_id, order_id) values ($there, 7777)"), qr/belongs to node paris.*HINT:  Write it there/s, 'the plain table refuses rows of others as ever');
like(refusal($tokyo, "update orders set tenant_id = $there where tenant_id = $here"), qr/violates partition constraint/, 'and updates that would move rows');
like(refusal($tokyo, 'drop table everywhere.orders'), qr/cannot drop or alter the guard of routed table "public.orders"/, 'the umbrella is not dropped with the table');
is(counts(), join(' ', map { sql($_, 'select count(*) from only orders') } @all), 'the table has its rows');
is(sql($tokyo, 'select count(*) from everywhere.orders'), 78, 'all are there');

# Rights. A role has those of the table; and goes to other nodes as itself, once a superuser says
# how.
is(sql($tokyo, q[select has_table_privilege('clerk', 'everywhere.orders', 'insert'), has_table_privilege('guest', 'everywhere.orders', 'select')]), 't|f', 'rights are those of the table');
my $as = sub { my ($role, $sql) = @_; return "set session authorization $role; $sql"; };
like(refusal($tokyo, $as->('guest', 'select * from everywhere.orders')), qr/permission denied for table orders/, 'a role without rights');
like(refusal($tokyo, $as->('clerk', 'select count(*) from everywhere.orders')), qr/user mapping not found for/, 'a role without a way to other nodes');
like(refusal($tokyo, $as->('clerk', q[select braid.add_umbrella_user('clerk')])), qr/permission denied/, 'does not give it to itself');
like(refusal($tokyo, q[select braid.add_umbrella_user('nobody')]), qr/role "nobody" does not exist/, 'a role that is not there');
sql($tokyo, q[select braid.add_umbrella_user('clerk')]);
is(sql($_, $as->('clerk', 'select count(*) from everywhere.orders')), 78, $_->name . ': the role reads all rows') for @all;
sql($_, 'reset session authorization') for @all;
like(refusal($tokyo, $as->('clerk', q[alter user mapping for clerk server everywhere_paris options (set user 'postgres')])), qr/permission denied|must be|superuser/,
	'and does not become another one');
like(refusal($tokyo, $as->('clerk', q[create user mapping for clerk server everywhere_paris options (user 'postgres')])), qr/permission denied|must be/, 'by no new way either');
sql($tokyo, q[select braid.add_umbrella_user('clerk', 'se cr''et')]);
is(sql($paris, q[select umoptions from pg_user_mapping m join pg_roles r on r.oid = m.umuser where rolname = 'clerk']), q[{user=clerk,"password=se cr'et"}], 'a password');
is(sql($paris, $as->('guest', q[select umoptions is null from pg_user_mappings where usename = 'clerk'])), 't', 'which others do not see');
sql($paris, 'reset session authorization');
sql($tokyo, q[select braid.remove_umbrella_user('clerk')]);
is(sql($paris, q[select count(*) from pg_user_mapping m join pg_roles r on r.oid = m.umuser where rolname = 'clerk']), 0, 'the way is taken back');
sql($tokyo, q[select braid.add_umbrella_user('clerk')]);

# Column DDL goes through the umbrella, at all nodes.
like(refusal($tokyo, 'alter table orders add column note text'), qr/cannot add column to a partition/, 'the plain table takes no column by itself');
sql($tokyo, q[alter table everywhere.orders add column note text]);
have_all(@all);
sql($paris, q[insert into everywhere.orders (tenant_id, order_id, note) select t, 3000 + t, 'a note' from generate_series(0, 39) t]);
is(sql($tokyo, q[select count(*) from everywhere.orders where note = 'a note']), 40, 'a column that was added through the umbrella');
sql($tokyo, q[delete from everywhere.orders where order_id >= 3000]);

like(refusal($tokyo, 'alter table everywhere.orders rename column tenant_id to t'), qr/cannot rename column "tenant_id" of routed table/, 'no new name for a column of the routing');
like(refusal($tokyo, 'alter table everywhere.orders rename to other'), qr/cannot rename umbrella "everywhere.orders".*HINT/s, 'nor for the umbrella');
like(refusal($tokyo, 'alter table everywhere.orders drop column created_at'), qr/part of the partition key/, 'and it is not dropped');

# A rule: new rows of a tenant are at both nodes.
my $from = sql($paris, "select braid.add_routing_rule('orders', 8, '{$here}')");
ok($_->poll_query_until('postgres', q[select count(*) = 1 from braid.routing_rules]), $_->name . ' knows the rule') for @all;
ok($tokyo->poll_query_until('postgres', "select now() > '$from'"), 'the rule counts');
sql($tokyo, "insert into everywhere.orders (tenant_id, order_id) select $here, 4000 + i from generate_series(1, 40) i");
is(strays(@all), 0, 'with a rule each row is at home');
is(sql($_, "select count(*) from everywhere.orders where order_id > 4000"), 40, $_->name . ': all are read') for @all;
isnt(sql($paris, "select count(*) from orders where order_id > 4000"), 0, 'some are at the other node');

# A shard moves. Afterwards its rows are read and written at their new place.
my $set = sql($tokyo, q[select node_set from braid.shards where nodes = '{paris}' limit 1]);
my ($shard) = split /\n/, sql($tokyo, q[select r.shard from orders o cross join lateral braid.route('orders', o.tenant_id::text, o.order_id::text, o.created_at) r]);
sql($tokyo, "select braid.move_shard('orders', $shard, $set)");
have_all(@all);
is(strays(@all), 0, 'after a move each row is at home');
is(sql($_, 'select count(*), count(distinct order_id) from everywhere.orders'), '118|118', $_->name . ': after a move each row is read once') for @all;
sql($_, 'update everywhere.orders set n = n + 1') for @all;
is(sql($tokyo, q[select count(*) from everywhere.orders where n >= 2]), 118, 'and written');

# A node joins, and a set is added with it: it has the umbrella, and the others its partition.
my $lima = new_server('lima', init => ['--data-checksums']);
sql($lima, 'create role clerk login; create role guest login; create extension braid');
join_group($lima, $tokyo);
joined($lima);
push @all, $lima;
joined(@all);
is(sql($lima, q[select to_regclass('everywhere.orders') is null, to_regclass('orders') is not null]), 't|t', 'a node that joins gets the table without the umbrella');
my $new = sql($tokyo, q[select braid.add_node_set('orders', '{lima}')]);
is(sql($_, q[select count(*) from pg_inherits where inhparent = 'everywhere.orders'::regclass]), 3, $_->name . ': three partitions') for @all;
is(sql($_, 'select count(*), count(distinct order_id) from everywhere.orders'), '118|118', $_->name . ': all rows are read') for @all;
is(sql($lima, $as->('clerk', 'select count(*) from everywhere.orders')), 118, 'a role that could connect can do so from the new node');
sql($lima, 'reset session authorization');
my ($next) = split /\n/, sql($tokyo, q[select shard from braid.shards where nodes = '{paris}' order by 1]);
sql($tokyo, "select braid.move_shard('orders', $next, $new)");
have_all(@all);
is(sql($_, 'select count(*), count(distinct order_id) from everywhere.orders'), '118|118', $_->name . ': with a shard at the new node each row is read once') for @all;
sql($lima, q[insert into everywhere.orders (tenant_id, order_id) select t, 5000 + t from generate_series(0, 39) t]);
is(strays(@all), 0, 'rows that are written there are at home');
is(sql($paris, 'select count(*) from everywhere.orders where order_id >= 5000'), 40, 'and read elsewhere');

# It gives its shard back, and leaves.
sql($tokyo, "select braid.move_shard('orders', $next, $set)");
sql($lima, 'select braid.leave_group()');
ok($tokyo->poll_query_until('postgres', q[select not exists (select from braid.group_nodes where name = 'lima')]), 'a node leaves');
pop @all;
sql($tokyo, q[select braid.add_umbrella('orders')]);
is(sql($_, q[select count(*) from pg_inherits where inhparent = 'everywhere.orders'::regclass]), 2, $_->name . ': its partition is gone') for @all;
is(sql($_, 'select count(*), count(distinct order_id) from everywhere.orders'), '158|158', $_->name . ': all rows are read') for @all;

# The end of an umbrella, and of the routing.
sql($paris, q[select braid.remove_umbrella('orders')]);
is(sql($_, q[select to_regnamespace('everywhere') is null, (select count(*) from pg_foreign_server), (select count(*) from braid.routed_tables)]), 't|0|1',
	$_->name . ': nothing is left but the routing') for @all;
sql($tokyo, q[alter table orders add column other text]);
sql($tokyo, q[select braid.add_umbrella('orders')]);
have_all(@all);
is(sql($_, 'select count(*), count(other) from everywhere.orders'), '158|0', $_->name . ': made anew') for @all;
sql($paris, q[select braid.unroute_table('orders', rows => 'keep')]);
is(sql($_, q[select to_regclass('everywhere.orders') is null, (select count(*) from braid.routed_tables)]), 't|0', $_->name . ': it goes with the routing') for @all;

$lima->stop;
$_->stop for @all;
done_testing();
