# Queries of an umbrella ask the nodes that can have rows, and no other one: by constants when they
# are planned, by parameters and joins when they run. The plans say so, and results are as without
# that.

use strict;
use warnings;

use Braid;
use Group;
use PostgreSQL::Test::Utils;
use Test::More;

my ($tokyo, $paris, $oslo) = my @all = group([qw(tokyo paris oslo)], q{
	create table orders (tenant_id bigint not null, order_id bigint not null, created_at timestamptz not null default now(), n int default 0,
		primary key (tenant_id, order_id, created_at));
	create table tenant (tenant_id bigint primary key, name text);
	insert into tenant select t, 'tenant ' || t from generate_series(0, 59) t;
	create table notes (author varchar(20) collate "C" not null, id bigint not null, created_at timestamptz not null default now(), note text, primary key (author, id, created_at));
});
sql($tokyo, q[select braid.route_table('orders', tenant => 'tenant_id', record => 'order_id', created => 'created_at', shards => 12, umbrella => true)]);
sql($tokyo, q[select braid.route_table('notes', tenant => 'author', record => 'id', created => 'created_at', shards => 12, umbrella => true)]);
sql($tokyo, q[insert into everywhere.orders (tenant_id, order_id) select t, 100 * t + i from generate_series(0, 59) t, generate_series(1, 3) i]);
sql($tokyo, q[insert into everywhere.notes (author, id, note) select 'author ' || t, t, 'x' from generate_series(0, 59) t]);
sql($_, 'analyze') for @all;
my %named = map { $_->name => $_ } @all;

# The tenants of each node, as `braid.route_query` says.
my %tenants;
push @{ $tenants{ (split /\|/)[1] } }, (split /\|/)[0]
	for split /\n/, sql($tokyo, q[select t, q.nodes[1] from generate_series(0, 59) t cross join lateral braid.route_query('orders', t::text) q]);
is(scalar keys %tenants, 3, 'all nodes have tenants');
my ($mine, $mine_too) = @{ $tenants{tokyo} };
my ($yours, $yours_too) = @{ $tenants{paris} };
my ($theirs) = @{ $tenants{oslo} };

sub plan
{
	my ($sql, $before) = @_;
	return sql($tokyo, ($before // '') . "explain (costs off, timing off, summary off) $sql");
}
# The tables that a plan scans, in order; and whether partitions go when it runs.
sub scans
{
	my ($plan) = @_;
	my @scans = map { /(?:Scan|Foreign Update|Foreign Delete)(?: using \S+)? on "?([\w@]+)"?/ ? ($1) : () } split /\n/, $plan;
	my %seen;
	my $scans = join ' ', sort grep { !$seen{$_}++ && $_ ne 'tenant' } @scans;
	$scans .= " removed $1" if $plan =~ /Subplans Removed: (\d+)/;
	return $scans;
}
sub asks { my ($sql, $scans, $name) = @_; my $plan = plan($sql); is(scans($plan), $scans, $name) or diag($plan); return; }

my $all = 'orders orders@oslo orders@paris';
asks('select * from everywhere.orders', $all, 'no tenant: all nodes');
asks("select * from everywhere.orders where tenant_id = $mine", 'orders', 'a tenant of this node');
unlike(plan("select * from everywhere.orders where tenant_id = $mine"), qr/Append/, 'no Append is left');
asks("select * from everywhere.orders where tenant_id = $yours", 'orders@paris', 'a tenant of another node');
asks("select * from everywhere.orders where $theirs = tenant_id and order_id = 1", 'orders@oslo', 'the constant first');
asks("select * from everywhere.orders where tenant_id in ($mine, $mine_too)", 'orders', 'a list');
asks("select * from everywhere.orders where tenant_id = any ('{$mine,$yours}')", 'orders orders@paris', 'an array');
asks("select * from everywhere.orders where tenant_id = $yours\::int", 'orders@paris', 'an int against a bigint');
asks("select * from everywhere.orders where tenant_id = $yours\::numeric", $all, 'a numeric: unknown');
asks("select * from everywhere.orders where tenant_id > $yours", $all, 'a range: unknown');
asks("select * from everywhere.orders where tenant_id = $mine or tenant_id = $yours", $all, 'or: unknown');
asks("select * from everywhere.orders where tenant_id = null", '', 'null: nothing');
asks("select o.* from everywhere.orders o join tenant t using (tenant_id) where t.tenant_id = $yours", 'orders@paris', 'a join with a constant on the other side');
asks("select * from everywhere.orders a join everywhere.orders b using (tenant_id) where a.tenant_id = $yours", 'orders@paris', 'a self join');
asks("update everywhere.orders set n = 1 where tenant_id = $yours", 'orders@paris', 'an update of another node');
asks("delete from everywhere.orders where tenant_id = $mine", 'orders', 'a delete of this node');
like(plan("update everywhere.orders set n = 1 where tenant_id = $yours"), qr/Foreign Update on "orders\@paris"/, 'is pushed down whole');
my ($author) = split /\n/, sql($paris, 'select author from notes order by 1');
asks("select * from everywhere.notes where author = '$author'", 'notes@paris', 'a varchar');

# Parameters, in plans for any value: PostgreSQL prunes when the plan starts.
my $prepared = 'set plan_cache_mode = force_generic_plan; ';
for my $case ([ 'bigint', '$1', $mine, 'orders removed 2' ], [ 'int', '$1', $yours, 'orders@paris removed 2' ],
	[ 'bigint[]', 'any ($1)', "'{$mine,$yours}'", 'orders orders@paris removed 1' ])
{
	my ($type, $expression, $value, $scans) = @$case;
	my $plan = plan("execute q ($value)", "${prepared}prepare q ($type) as select * from everywhere.orders where tenant_id = $expression; ");
	is(scans($plan), $scans, "a parameter of type $type") or diag($plan);
}
is(scans(plan(q[select * from everywhere.orders where tenant_id = current_setting('app.tenant')::bigint], "set app.tenant = $yours; ")), 'orders@paris removed 2', 'a setting');
like(sql($tokyo, "explain (analyze, costs off, timing off, summary off) select * from everywhere.orders where tenant_id = (select $mine\::bigint offset 0)"),
	qr/(never executed.*){2}/s, 'a subquery: two nodes are not asked');

# Results are those of all nodes.
for my $where ('true', "tenant_id = $yours", "tenant_id in ($mine, $theirs)", 'tenant_id % 7 = 3')
{
	my $parts = 0;
	$parts += sql($_, "select count(*) from orders where $where") for @all;
	is(sql($_, "select count(*) from everywhere.orders where $where"), $parts, $_->name . ": rows where $where") for @all;
}
my $session = $tokyo->background_psql('postgres');
$session->query_safe('set plan_cache_mode = force_generic_plan');
$session->query_safe('prepare p (bigint) as select count(*) from everywhere.orders where tenant_id = $1');
is($session->query_safe("execute p ($yours)"), 3, 'a generic plan finds them');

# ON CONFLICT with columns takes the unique index of the plain table: rows of this node alone.
my $upsert = 'insert into everywhere.orders as o (tenant_id, order_id, created_at, n) select tenant_id, order_id, created_at, 5 from everywhere.orders where tenant_id = %d
	on conflict (tenant_id, order_id, created_at) do update set n = o.n + excluded.n returning o.n';
is(sql($tokyo, sprintf($upsert, $mine)), "5\n5\n5", 'rows of this node are inserted or updated');
is(sql($tokyo, 'prepare u as ' . sprintf($upsert, $mine_too) . '; execute u'), "5\n5\n5", 'by a prepared statement, too');
is(sql($tokyo, 'with u as (' . sprintf($upsert, $mine) . ') select sum(n) from u'), 30, 'and in a common table expression');
like(refusal($tokyo, sprintf($upsert, $yours)), qr/row of routed table public.orders belongs to node paris.*HINT:  Write it there: .*port=/s, 'a row of another node: an error with the way there');
is(sql($paris, sprintf($upsert, $yours)), "5\n5\n5", 'there it works');
is(sql($tokyo, "with i as (insert into everywhere.orders select * from everywhere.orders where tenant_id in ($mine, $yours) on conflict do nothing returning 1) select count(*) from i"), 0,
	'ON CONFLICT DO NOTHING without columns works for all rows');
sql($_, q[update everywhere.orders set n = 0 where n <> 0]) for $tokyo;

# A node that is down keeps nobody from the others.
$oslo->stop('immediate');
is(sql($tokyo, "select count(*) from everywhere.orders where tenant_id = $yours"), 3, 'a query that does not need the node that is down');
is($session->query_safe("execute p ($mine)"), 3, 'nor does this one, by a parameter');
sql($tokyo, "insert into everywhere.orders (tenant_id, order_id) values ($yours, 99901)");
sql($tokyo, "update everywhere.orders set n = 7 where tenant_id = $yours");
like(refusal($tokyo, 'select count(*) from everywhere.orders'), qr/could not connect to server "everywhere_oslo"/, 'one that needs it fails');
$oslo->start;
ok($tokyo->poll_query_until('postgres', q[select bool_and(reachable) from braid.group_nodes where not is_local]), 'it is back');

# A rule spreads a tenant: the plan of a prepared statement is made anew.
$session->query_safe("prepare c as select count(*) from everywhere.orders where tenant_id = $yours");
is($session->query_safe('execute c'), 4, 'before the rule');
is(scans($session->query_safe('explain (costs off) execute c')), 'orders@paris', 'one node');
my $from = sql($paris, "select braid.add_routing_rule('orders', 8, '{$yours}')");
ok($_->poll_query_until('postgres', q[select count(*) = 1 from braid.routing_rules]), $_->name . ' knows the rule') for @all;
ok($tokyo->poll_query_until('postgres', "select now() > '$from'"), 'the rule counts');
sql($paris, "insert into everywhere.orders (tenant_id, order_id) select $yours, 88800 + i from generate_series(1, 30) i");
is(scans($session->query_safe('explain (costs off) execute c')), $all, 'all nodes, of the same prepared statement');
is($session->query_safe('execute c'), 34, 'all rows are found');
is($session->query_safe("execute p ($yours)"), 34, 'by a parameter, too');

# While a shard moves, and after that, each row counts once. The move is held in the middle.
my $shard = sql($tokyo, "select (braid.shard(12, $yours\::bigint, 88801::bigint, 8))");
my ($home) = split /\|/, sql($tokyo, "select node_set || '|' || nodes[1] from braid.shards where relation = 'public.orders' and shard = $shard");
my $to = sql($tokyo, "select min(node_set) from braid.shards where relation = 'public.orders' and node_set <> $home");
my $total = sql($tokyo, 'select count(*) from everywhere.orders');
my $hold = $named{ sql($tokyo, "select nodes[1] from braid.shards where relation = 'public.orders' and shard = $shard") }->background_psql('postgres');
$hold->query_safe('begin');
$hold->query_safe('update orders set n = n where (tenant_id, order_id) in (select tenant_id, order_id from orders order by braid.shard_of($$orders$$, tenant_id, order_id, created_at) <> '
	. $shard . ' limit 1)');
my ($in, $out, $err) = ('', '', '');
my $move = IPC::Run::start([ 'psql', '-X', '-d', $tokyo->connstr('postgres'), '-c', "select braid.move_shard('orders', $shard, $to)" ], \$in, \$out, \$err);
ok($tokyo->poll_query_until('postgres', "select phase = 'copying' from braid.shards where relation = 'public.orders' and shard = $shard"), 'a shard is being moved');
like(plan('select * from everywhere.orders'), qr/answering_set\('public.orders'/, 'rows are checked while it moves');
is(sql($_, 'select count(*) from everywhere.orders'), $total, $_->name . ': each row counts once while the shard moves') for @all;
$hold->query_safe('commit');
$hold->quit;
$move->finish;
is($err, '', 'the move has ended');
have_all(@all);
is(sql($_, 'select count(*), count(distinct (tenant_id, order_id)) from everywhere.orders'), "$total|$total", $_->name . ': each row counts once') for @all;
# Rows that the old node has kept, as if it had crashed before it deleted them.
my ($old) = grep { $_->name eq sql($tokyo, "select nodes[1] from braid.shards where relation = 'public.orders' and node_set = $home limit 1") } @all;
my ($new) = grep { $_->name eq sql($tokyo, "select nodes[1] from braid.shards where relation = 'public.orders' and node_set = $to limit 1") } @all;
my $row = sql($new, "select tenant_id || ', ' || order_id || ', ' || quote_literal(created_at) from orders where braid.shard_of('orders', tenant_id, order_id, created_at) = $shard limit 1");
sql($old, "select pg_replication_origin_create('by hand'); select pg_replication_origin_session_setup('by hand'); insert into orders values ($row); select pg_replication_origin_session_reset()");
have_all(@all);
is(sql($old, 'select count(*) from orders o cross join lateral braid.route($$orders$$, o.tenant_id::text, o.order_id::text, o.created_at) r where not $$' . $old->name . '$$ = any (r.nodes)'), 1, 'a row is left behind');
is(sql($_, 'select count(*) from everywhere.orders'), $total, $_->name . ': it does not count') for @all;

$session->quit;
$_->stop for @all;
done_testing();
