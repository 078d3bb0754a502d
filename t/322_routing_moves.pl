# Shards of a routed table move between nodes while rows are written: none is lost or doubled, and
# large values come along. A node dies in the middle, a node joins and gets shards, and a node is
# lost with its shards.

use strict;
use warnings;

use Braid;
use Group;
use PostgreSQL::Test::Utils;
use IPC::Run;
use Test::More;

my ($tokyo, $paris) = my @all = group([qw(tokyo paris)], q{
	create table orders (tenant_id bigint not null, order_id bigint not null, created_at timestamptz not null default now(), n int default 0, note text,
		primary key (tenant_id, order_id, created_at));
	alter table orders alter note set storage external;
	create table accepted (order_id bigint primary key, node text);
});
sql($tokyo, q[select braid.route_table('orders', tenant => 'tenant_id', record => 'order_id', created => 'created_at', shards => 8)]);
# Rows that this node takes; the others are refused, and left out.
my $try = q{do $$ declare t bigint; begin for t in 0..199 loop begin
	insert into orders values (t, %d + t, now(), 0, repeat(md5(t::text), 200)); insert into accepted values (%d + t, %s);
	exception when sqlstate 'RT001' then null; end; end loop; end $$};
sub try_all { my ($node, $from) = @_; sql($node, sprintf($try, $from, $from, "'" . $node->name . "'")); return; }
try_all($_, 0) for @all;
have_all(@all);
is(sql($tokyo, 'select count(*) from accepted'), 200, 'each row is taken by one node');

sub sound
{
	my ($name) = @_;
	have_all(@all) for 1 .. 2;
	my %found;
	for my $node (@all)
	{
		$found{$_}++ for split /\n/, sql($node, 'select order_id from orders');
		is(sql($node, "select count(*) from orders o cross join lateral braid.route('orders', o.tenant_id::text, o.order_id::text, o.created_at) r
			where not '" . $node->name . "' = any (r.nodes)"), 0, "$name: " . $node->name . ' has rows of its own shards alone');
		is(sql($node, 'select count(*) from orders where note is null or length(note) <> 6400'), 0, "$name: " . $node->name . ' has their large values');
	}
	my @accepted = split /\n/, sql($tokyo, 'select order_id from accepted');
	is(join(' ', grep { !$found{$_} } @accepted), '', "$name: no row is lost");
	is(join(' ', grep { $found{$_} > 1 } keys %found), '', "$name: none is there twice");
	return scalar @accepted;
}
is(sound('at first'), 200, 'all are there');
sub set_of { my ($node) = @_; return sql($tokyo, "select node_set from braid.shards where nodes = '{" . $node->name . "}' limit 1"); }
sub shards_of { my ($node) = @_; return split /\n/, sql($tokyo, "select shard from braid.shards where nodes = '{" . $node->name . "}' order by 1"); }

# Refused calls.
my ($first, @rest) = shards_of($tokyo);
my $there = set_of($paris);
like(refusal($tokyo, "select braid.move_shard('orders', 99, $there)"), qr/has no shard 99.*HINT/s, 'a shard that is none');
like(refusal($tokyo, "select braid.move_shard('orders', $first, 99)"), qr/node set 99 does not exist.*HINT/s, 'a set that is none');
like(refusal($tokyo, q[select braid.add_node_set('orders', '{nowhere}')]), qr/the group has no node "nowhere"/, 'a node that is none');
like(refusal($tokyo, q[select braid.add_node_set('orders', '{paris}')]), qr/a node comes twice/, 'a node of another set');

# Under writes on both nodes: rows come, and rows are updated.
my $file = PostgreSQL::Test::Utils::tempdir() . '/write.sql';
PostgreSQL::Test::Utils::append_to_file($file, q{
\set tenant random(0, 199)
\set order random(1000000, 900000000)
do $$ begin insert into orders values (:tenant, :order, now(), 0, repeat(md5('x'), 200)); insert into accepted values (:order, 'pgbench');
	exception when sqlstate 'RT001' or unique_violation then null; end $$;
update orders set n = n + 1 where tenant_id = :tenant;
});
my @writers = map { my ($in, $out, $err) = ('', '', '');
	IPC::Run::start([ 'pgbench', '-n', '-T', '600', '-c', '2', '-R', '60', '-f', $file, '-h', $_->host, '-p', $_->port, 'postgres' ], \$in, \$out, \$err) } @all;
sql($tokyo, "select braid.move_shard('orders', $first, $there)");
is(sql($tokyo, "select nodes from braid.shards where shard = $first"), '{paris}', 'a shard has moved');
like(sql($paris, 'select string_agg(subject, $$; $$ order by log_index) from braid.group_log where subject like $$%shard%$$'),
	qr/shard $first begins to move to node set $there; .*shard $first is at its new node set; .*shard $first has moved/, 'the log says so');
sql($tokyo, "select braid.move_shard('orders', $_, $there)") for shift @rest;
# The node that gets the next shard dies; the call fails, and is made again.
my $next = shift @rest;
my $hold = $tokyo->background_psql('postgres');
$hold->query_safe('begin');
$hold->query_safe('update orders set n = n where order_id in (select order_id from orders limit 1)');
my ($in, $out, $err) = ('', '', '');
my $call = IPC::Run::start([ 'psql', '-XAtq', '-h', $tokyo->host, '-p', $tokyo->port, '-c', "select braid.move_shard('orders', $next, $there)", 'postgres' ], \$in, \$out, \$err);
ok($tokyo->poll_query_until('postgres', "select count(*) > 0 from braid.group_log where subject ~ 'shard $next '"), 'a move has begun');
$paris->stop('immediate');
$hold->query_safe('commit');
$hold->quit;
$call->finish;
isnt($call->result(0), 0, 'the call fails') or diag($out);
$paris->start;
$writers[1]->finish;
ok($tokyo->poll_query_until('postgres', q[select bool_and(reachable) from braid.group_nodes where not is_local]), 'paris is back');
ok($paris->poll_query_until('postgres', 'select count(*) > 0 from braid.routed_tables'), 'it knows the tables');
sql($tokyo, "select braid.move_shard('orders', $next, $there)");
is(sql($tokyo, "select nodes from braid.shards where shard = $next"), '{paris}', 'the shard has moved by the second call');
$writers[0]->kill_kill;
my $count = sound('after the moves');
cmp_ok($count, '>', 200, 'rows were written meanwhile');
sql($tokyo, "select braid.move_shard('orders', $next, $there)");
is(sound('after a move that was done already'), $count, 'it changes nothing');

# A node joins. It gets no rows by itself, then a shard.
my $oslo = new_server('oslo', init => ['--data-checksums']);
sql($oslo, 'create extension braid');
join_group($oslo, $paris);
push @all, $oslo;
joined(@all);
is(sql($oslo, 'select count(*) from orders'), 0, 'a new node has no rows of the table');
like(refusal($oslo, 'insert into orders values (1, 1)'), qr/belongs to node/, 'and takes none');
my $set = sql($oslo, q[select braid.add_node_set('orders', '{oslo}')]);
my ($shard) = shards_of($paris);
sql($oslo, "select braid.move_shard('orders', $shard, $set)");
is(sql($_, "select nodes from braid.shards where shard = $shard"), '{oslo}', $_->name . ': oslo has a shard') for $oslo;
is(sound('with a third node'), $count, 'all rows are there');
try_all($_, 5000) for @all;
have_all(@all);
cmp_ok(sql($oslo, 'select count(*) from orders where order_id between 5000 and 5199'), '>', 0, 'new rows go there, too');
is(sql($tokyo, 'select count(*) from accepted where order_id between 5000 and 5199'), 200, 'each is taken by one');

# A node is lost with its shards. Another one gets them, without rows: new rows can be written.
my @lost = shards_of($oslo);
$oslo->stop('immediate');
pop @all;
sql($tokyo, q[select braid.remove_node('oslo')]);
becomes($tokyo, "select nodes from braid.shards where shard = $lost[0]", '{"oslo (removed)"}', 'the shards of the lost node are told from others');
sql($tokyo, "select braid.move_shard('orders', $_, $there)") for @lost;
try_all($_, 6000) for @all;
have_all(@all);
is(sql($tokyo, 'select count(*) from accepted where order_id between 6000 and 6199'), 200, 'rows of its shards can be written again');

done_testing;
