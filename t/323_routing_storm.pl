# A routed table with sets of two nodes, on four nodes, under load: rules are added, servers and
# workers are killed. Each accepted row is on both nodes of its set and on no other one, and all
# nodes agree on the place of each row.

use strict;
use warnings;

use Braid;
use Group;
use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;

srand(my $seed = $ENV{BRAID_SEED} // 20261129);
note("seed $seed");
my @all = group([qw(tokyo paris oslo lima)], q{
	create table orders (tenant_id bigint not null, order_id uuid not null default gen_random_uuid(), created_at timestamptz not null default now(), item text,
		primary key (tenant_id, order_id, created_at));
	create table accepted (order_id uuid primary key);
});
sql($all[0], q[select braid.route_table('orders', 'tenant_id', 'order_id', 'created_at', shards => 32, copies => 2)]);
is(sql($all[0], q[select count(distinct nodes) || ' ' || min(cardinality(nodes)) from braid.shards]), '2 2', 'two sets of two nodes');

# Rows that this node takes are noted in the same transaction; others are refused. Waits may end
# with 55P03 while there is no majority.
my $file = PostgreSQL::Test::Utils::tempdir() . '/write.sql';
append_to_file($file, q{
\set tenant random_zipfian(1, 20, 1.5)
do $$ declare id uuid := gen_random_uuid(); begin insert into orders values (:tenant, id, clock_timestamp(), 'x'); insert into accepted values (id);
	exception when sqlstate 'RT001' or sqlstate '55P03' then null; end $$;
update orders set item = item || 'y' where ctid = (select ctid from orders where tenant_id = :tenant limit 1);
});
sub start_writer
{
	my ($node) = @_;
	my ($in, $out, $err) = ('', '', '');
	return IPC::Run::start([ 'pgbench', '-n', '-T', '600', '-c', '2', '-R', '40', '-f', $file, '-h', $node->host, '-p', $node->port, 'postgres' ], \$in, \$out, \$err);
}
my @writers = map { start_writer($_) } @all;
my $rules = 0;
for my $round (1 .. 6)
{
	my $victim = 1 + int(rand(3));
	if ($round % 2)
	{
		$all[$victim]->stop('immediate');
	}
	else
	{
		attempt($all[$victim], q[select pg_terminate_backend(pid) from pg_stat_activity where backend_type like 'braid group%']);
	}
	# Three of four are a majority: rules can still be added.
	my ($status) = attempt($all[0], "select braid.add_routing_rule('orders', " . 2**(1 + int(rand(5))) . ", '{" . (1 + int(rand(4))) . "}')");
	$rules++ if $status == 0;
	if ($round % 2)
	{
		$all[$victim]->start;
		$writers[$victim]->kill_kill;
		$writers[$victim] = start_writer($all[$victim]);
	}
	my $before = sql($all[0], 'select count(*) from accepted');
	ok($all[0]->poll_query_until('postgres', "select count(*) > $before + 20 from accepted"), "round $round: rows are written");
}
$_->kill_kill for @writers;
cmp_ok($rules, '>', 2, 'rules were added meanwhile');
$_->poll_query_until('postgres', q[select bool_and(reachable) from braid.group_nodes where not is_local]) for @all;
have_all(@all) for 1 .. 2;
my (%found, %set);
for my $node (@all)
{
	my $name = $node->name;
	$found{$_} .= "$name " for split /\n/, sql($node, 'select order_id from orders');
	is(sql($node, "select count(*) from orders o cross join lateral braid.route('orders', o.tenant_id::text, o.order_id::text, o.created_at) r
		where not '$name' = any (r.nodes)"), 0, "$name has rows of its own shards alone");
	is(sql($node, 'select count(*) from braid.routing_rules'), sql($all[0], 'select count(*) from braid.routing_rules'), "$name knows all rules");
}
$set{$_}++ for values %found;
is(join('; ', sort keys %set), 'oslo lima ; tokyo paris ', 'each row is on the two nodes of a set');
my @accepted = split /\n/, sql($all[0], 'select order_id from accepted');
is(join(' ', grep { !$found{$_} } @accepted), '', 'no row that was accepted is lost: ' . @accepted);
same_tables([ @all[0, 1] ], 'orders');
same_tables([ @all[2, 3] ], 'orders');
note(sql($_, 'table braid.routing_activity')) for @all;

done_testing;
