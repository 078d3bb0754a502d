# A routed table: each row is on one node of three, and all nodes decide alike; rows of other nodes
# are refused. A rule spreads a tenant's new rows, and no row moves. Without a majority no row is
# created whose place could change.

use strict;
use warnings;

use Braid;
use Group;
use PostgreSQL::Test::Utils;
use Test::More;

my ($tokyo, $paris, $oslo) = my @all = group([qw(tokyo paris oslo)], q{
	create table orders (tenant_id bigint not null, order_id bigint not null, created_at timestamptz not null, item text, note text,
		primary key (tenant_id, order_id, created_at));
	create table plain (id bigint primary key, v text);
	insert into orders select i % 20, i, now() - interval '1 day', 'item ' || i, repeat('x', 3000) from generate_series(1, 2000) i;
});
my %named = map { $_->name => $_ } @all;
my $route = q[select braid.route_table('orders', tenant => 'tenant_id', record => 'order_id', created => 'created_at', shards => 16];

# The node of a row, by `braid.route` on a node.
sub home { my ($node, $tenant, $record, $created) = @_; return sql($node, "select nodes[1] from braid.route('orders', '$tenant', '$record', '$created')"); }
sub rows { my ($node, $where) = @_; return sql($node, "select count(*) from orders" . ($where ? " where $where" : '')); }
# Every row of all nodes, with the node that has it.
sub everything
{
	my %found;
	for my $node (@all)
	{
		my $name = $node->name;
		push @{ $found{$_} }, $name for split /\n/, sql($node, q[select tenant_id || ' ' || order_id || ' ' || created_at from orders]);
	}
	return \%found;
}
# Each row is on one node, which is the one that every node names.
sub at_home
{
	my ($count, $name) = @_;
	have_all(@all);
	my $found = everything();
	is(scalar keys %$found, $count, "$name: all rows are there");
	is(join(', ', grep { @{ $found->{$_} } != 1 } keys %$found), '', "$name: each on one node");
	for my $node (@all)
	{
		my $strays = sql($node, "select count(*) from orders o cross join lateral braid.route('orders', o.tenant_id::text, o.order_id::text, o.created_at) r
			where r.nodes <> '{" . $node->name . "}'");
		is($strays, 0, "$name: " . $node->name . ' has rows of its own shards alone');
	}
	my $placed = sub { my ($node) = @_; return sql($node, q[select md5(string_agg(shard || ' ' || nodes::text, ',' order by t, n)) from generate_series(0, 19) t,
		generate_series(1, 20) n cross join lateral braid.route('orders', t::text, n::text, now())]); };
	my %places = map { $placed->($_) => 1 } @all;
	is(scalar keys %places, 1, "$name: all nodes place rows alike");
	return;
}

# Refused calls.
like(refusal($tokyo, "$route)"), qr/^psql.*table public.orders has rows.*HINT:  Use existing => 'move'/s, 'rows are refused without move');
like(refusal($tokyo, q[select braid.route_table('orders', 'item', 'order_id', 'created_at')]), qr/ERROR/, 'an expression that is in no key');
like(refusal($tokyo, "$route, existing => 'x')"), qr/invalid value "x" for existing/, 'a word that is none');
like(refusal($tokyo, "$route, copies => 2, existing => 'move')"), qr/3 nodes cannot be divided into sets of 2/, 'sets that do not come out even');
like(refusal($tokyo, q[select braid.add_routing_rule('orders', 4, '{1}')]), qr/table public.orders is not routed/, 'a rule for a table that is not routed');
like(refusal($tokyo, q[select * from braid.route('orders', '1', '1')]), qr/table public.orders is not routed/, 'the route of a table that is not routed');
is(sql($paris, 'select count(*) from braid.routed_tables'), 0, 'nothing is routed');

# A row that one node lacks is not deleted on the others.
sql($oslo, q[set braid.ddl_replication = off; set session_replication_role = replica; begin; select pg_replication_origin_create('by hand');
	select pg_replication_origin_session_setup('by hand'); delete from orders where order_id = 1; commit]);
like(refusal($tokyo, "$route, existing => 'move')"), qr/have different rows of table public.orders.*DETAIL:  One has 2000 rows.*HINT:/s, 'nodes with different rows');
is(join(' ', map { rows($_) } @all), '2000 2000 1999', 'nothing was deleted');
sql($tokyo, q[select braid.unroute_table('orders', rows => 'keep')]);
sql($tokyo, q[update orders set item = item where order_id = 1]);
have_all(@all);
is(join(' ', map { rows($_) } @all), '2000 2000 2000', 'the row is everywhere again');

sql($tokyo, "$route, existing => 'move')");
ok($_->poll_query_until('postgres', q[select (relation, state, shards, node_sets) = ('public.orders', 'open', 16, 3) from braid.routed_tables]), $_->name . ': the table is routed')
	for @all;
is(sql($_, 'select count(distinct nodes) from braid.shards'), 3, $_->name . ': all nodes have shards') for @all;
at_home(2000, 'after the move');
like(refusal($tokyo, "$route, existing => 'move')"), qr/routed already/, 'a table is routed once');

# One node takes a row, and no other.
my $now = sql($tokyo, 'select now()');
my $home = home($tokyo, 3, 5000, $now);
is(home($_, 3, 5000, $now), $home, 'the home of a row: ' . $_->name) for @all;
my ($there) = grep { $_->name eq $home } @all;
my ($elsewhere) = grep { $_->name ne $home } @all;
my $insert = "insert into orders values (3, 5000, '$now', 'a')";
like(refusal($elsewhere, $insert), qr/row of routed table public.orders belongs to node $home.*DETAIL:  Its shard is \d+\..*HINT:  Write it there: .*host=/s,
	'a row of another node, with the way there');
like(refusal($elsewhere, "\\set VERBOSITY verbose\n$insert"), qr/ERROR:  RT001: row of routed table/, 'under an SQLSTATE of its own');
like(refusal($elsewhere, "copy orders (tenant_id, order_id, created_at) from program 'printf \"3\\t5000\\t$now\\n\"'"), qr/belongs to node $home/, 'in COPY, too');
sql($there, $insert);
sql($there, "update orders set item = 'b' where order_id = 5000");
have_all(@all);
is(join(' ', map { rows($_, 'order_id = 5000') } @all), join(' ', map { $_ == $there ? 1 : 0 } @all), 'the row is at its home alone');
my ($other_order) = grep { home($tokyo, 3 + $_, 5000, $now) ne $home } 1 .. 16;
like(refusal($there, 'update orders set tenant_id = ' . (3 + $other_order) . ' where order_id = 5000'), qr/belongs to node/, 'an update that would move it is refused');
sql($there, 'delete from orders where order_id = 5000');
like(refusal($there, 'truncate orders'), qr/ERROR/, 'TRUNCATE is refused');
sql($there, q[insert into plain values (1, 'x')]);
have_all(@all);
is(sql($_, 'select v from plain'), 'x', $_->name . ': other tables go to all nodes') for @all;
like(refusal($tokyo, q[insert into orders values (1, 1, now() + interval '1 hour')]), qr/dated in the future.*HINT/s, 'a row of the future is refused');
like(refusal($tokyo, q[insert into orders values (1, 1, 'infinity')]), qr/dated in the future/, 'and one of the end of time');

# A rule: tenant 7 was on one node. New rows spread; old ones stay, and can be written there.
my $before = sql($tokyo, q[select count(*) from braid.route_query('orders', '7')]);
is($before, 1, 'a small tenant is on one node');
like(refusal($paris, q[select braid.add_routing_rule('orders', 3, '{7}')]), qr/spread 3 is not a power of two/, 'a spread that is no power of two');
like(refusal($paris, q[select braid.add_routing_rule('orders', 32, '{7}')]), qr/spread 32 is larger than the table's 16 shards/, 'a spread above the shards');
like(refusal($paris, q[select braid.add_routing_rule('orders', 4, '{seven}')]), qr/invalid input syntax for type bigint/, 'a tenant of another type');
my $from = sql($paris, q[select braid.add_routing_rule('orders', 8, '{7}')]);
for my $node (@all)
{
	ok($node->poll_query_until('postgres', q[select (spread, tenants) = (8, array['7']) from braid.routing_rules]), $node->name . ' knows the rule');
}
ok($tokyo->poll_query_until('postgres', "select now() > '$from'"), 'the rule counts');
sub write_rows
{
	my ($tenant, @orders) = @_;
	my %by;
	my $now = sql($tokyo, 'select now()');
	push @{ $by{ home($tokyo, $tenant, $_, $now) } }, $_ for @orders;
	sql($named{$_}, "insert into orders select $tenant, o, '$now', 'new' from unnest(array[" . join(',', @{ $by{$_} }) . ']) o') for keys %by;
	return \%by;
}
my $spread = write_rows(7, 10001 .. 10040);
is(scalar keys %$spread, 3, 'new rows of the tenant are on all nodes');
is(scalar keys %{ write_rows(8, 10041 .. 10060) }, 1, 'those of another tenant on one');
is(sql($tokyo, q[select count(*) from braid.route_query('orders', '7')]), 3, 'a query of the tenant asks all');
is(sql($tokyo, "select count(*) from braid.route_query('orders', '7', '$from')"), 1, 'up to the time of the rule one');
at_home(2060, 'with a rule');
my ($old) = grep { rows($_, q[tenant_id = 7 and created_at < now() - interval '1 hour']) } @all;
sql($old, q[update orders set item = 'old' where tenant_id = 7 and created_at < now() - interval '1 hour']);
sql($old, q[delete from orders where order_id = (select min(order_id) from orders where tenant_id = 7)]);
at_home(2059, 'old rows are written where they are');

# A node whose guard is gone, as in a database that was set up by hand: braid.check finds it.
my $findings = q[select severity || ': ' || finding || '; ' || remedy from braid.check() where code = 'routing_guard'];
is(sql($oslo, $findings), '', 'a guard that is there is not found fault with');
sql($oslo, q[set braid.ddl_replication = off; set allow_system_table_mods = on; update pg_constraint set conname = 'gone' where conname = 'braid_routing']);
is(sql($oslo, $findings), q[error: table public.orders is routed by the group, and lacks the constraint braid_routing on this node; select braid.group_route_guard('public.orders');],
	'a guard that is not there');
sql($oslo, q[select braid.group_route_guard('public.orders')]);
is(sql($oslo, $findings), '', 'it is there again');
sql($oslo, q[alter table orders drop constraint gone]);

# State after a restart of a server and a killed worker.
$paris->restart;
my $worker = sql($oslo, q[select pid from pg_stat_activity where backend_type like 'braid group%' and datname = 'postgres' limit 1]);
sql($oslo, "select pg_terminate_backend($worker)") if $worker;
write_rows(7, 10061 .. 10080);
at_home(2079, 'after restarts');
is(sql($paris, 'select count(*) from braid.routing_rules'), 1, 'a restarted node knows the rule');

# Cut off from the majority, a node creates no rows once its window is over. It reads, updates and
# deletes, and has reads ask all nodes.
$_->stop('fast') for $paris, $oslo;
my ($mine) = grep { home($tokyo, 7, $_, sql($tokyo, 'select now()')) eq 'tokyo' } 20001 .. 20100;
ok($tokyo->poll_query_until('postgres', q[select closed_upto < now() from braid.routing_activity]), 'the window is over');
like(refusal($tokyo, "set braid.routing_wait = '1 s'; insert into orders values (7, $mine, now(), 'cut off')"),
	qr/rows of routed table public.orders cannot be created now.*DETAIL:  No majority.*HINT:/s, 'without a majority no row is created');
my ($kept) = split /\n/, sql($tokyo, q[select order_id from orders limit 1]);
sql($tokyo, "update orders set item = 'alone' where order_id = $kept");
is(sql($tokyo, q[select count(*) from braid.route_query('orders', '8')]), 3, 'a read that can not know asks all');
$_->start for $paris, $oslo;
ok($tokyo->poll_query_until('postgres', q[select bool_and(reachable) from braid.group_nodes where not is_local]), 'all are back');
sql($tokyo, "insert into orders values (7, $mine, now(), 'together')");
at_home(2080, 'after the cut');

# A node that alone has rows can't leave. Routing ends by a call.
like(refusal($oslo, 'select braid.leave_group()'), qr/no other node has this node's rows of routed table public.orders.*HINT:/s, 'a node with shards stays');
like(refusal($tokyo, q[select braid.unroute_table('orders')]), qr/has rows on node.*HINT:  Use rows => 'keep'/s, 'rows are not left where they are by accident');
sql($tokyo, q[select braid.unroute_table('orders', rows => 'keep')]);
ok($_->poll_query_until('postgres', 'select count(*) = 0 from braid.routed_tables'), $_->name . ': the table is not routed any more') for @all;
sql($oslo, q[insert into orders values (1, 999999, now(), 'for all')]);
have_all(@all);
is(rows($_, 'order_id = 999999'), 1, $_->name . ': new rows go to all') for @all;

done_testing;
