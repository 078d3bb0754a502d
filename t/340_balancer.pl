# The balancer of routing on three nodes under load: a hot tenant is found and advised, then spread,
# while clients see no error. The leader is killed: the next one goes on, and adds no rule twice.

use strict;
use warnings;

use Braid;
use Group;
use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

# As in a group in which nothing happens: autovacuum writes, and removals of what is old take ids.
my $conf = "autovacuum = off\nbraid.purge_interval = 60s\n";
my @all = group([qw(tokyo paris oslo)], q{
	create table orders (tenant_id bigint not null, order_id uuid not null default gen_random_uuid(), created_at timestamptz not null default now(), item text,
		primary key (tenant_id, order_id, created_at));
	create table hot (only_row boolean primary key default true, tenant bigint not null);
	insert into hot (tenant) values (7);
	-- A client writes the rows that are at home on its node: half of them of the hot tenant. A row
	-- that is placed between a rule and its time would be refused, and end the client.
	create function put(me text, tenant bigint) returns void language plpgsql as $$
		declare id uuid := gen_random_uuid(); at timestamptz := clock_timestamp();
		begin
			if random() < 0.5 then select h.tenant into tenant from hot h; end if;
			if exists (select from braid.route('orders', tenant::text, id::text, at) r where me = any (r.nodes)) then
				insert into orders values (tenant, id, at, 'x');
			end if;
		end $$;
}, conf => $conf);
my %named = map { $_->name => $_ } @all;
my ($tokyo, $paris, $oslo) = @all;
on_all(qq{alter system set $_}, @all)
  for q(braid.balancer_period = '500ms'), q(braid.balancer_pause = '1s'), q(braid.balancer_least_writes = 10), q(braid.balancer_largest_spread = 8);
on_all('select pg_reload_conf()', @all);

# What is refused.
like(refusal($tokyo, q[select braid.set_balancer('orders', 'advise')]), qr/table public.orders is not routed.*HINT:/s, 'a table that is not routed');
sql($tokyo, q[select braid.route_table('orders', 'tenant_id', 'order_id', 'created_at', shards => 16)]);
like(refusal($tokyo, q[select braid.set_balancer('orders', 'yes')]), qr/invalid balancer "yes".*HINT:  Use advise/s, 'a word that is none');
like(refusal($tokyo, q[select braid.set_balancer('orders', null)]), qr/mode must not be null/, 'no word');
sql($paris, q[alter system set braid.balancer_threshold = 1]);
sql($paris, 'select pg_reload_conf()');
ok($paris->poll_query_until('postgres', q[select current_setting('braid.balancer_threshold') = '1']), 'a threshold that is very low');
sql($paris, 'create table wide (a bigint, b bigint, c timestamptz, primary key (a, b, c))');
sql($paris, 'select braid.sync_event()');
have_all(@all);
sql($paris, q[select braid.route_table('wide', 'a', 'b', 'c', shards => 64)]);
like(refusal($paris, q[select braid.set_balancer('wide', 'on')]), qr/number of counters 2048 does not fit the balancer's threshold.*HINT:/s, 'a threshold that has more tenants hot than are counted');
sql($paris, q[alter system reset braid.balancer_threshold]);
sql($paris, 'select pg_reload_conf()');
sql($tokyo, q[select braid.set_balancer('orders', 'off')]);
is(sql($_, q[select relation, balancer from braid.routed_tables order by 1]), "public.orders|off\npublic.wide|off", $_->name . ': the balancer is off') for @all;

# Load on each node. A client that meets an error ends.
my (%writer, %file);
for my $name (keys %named)
{
	$file{$name} = PostgreSQL::Test::Utils::tempdir() . '/write.sql';
	append_to_file($file{$name}, "\\set tenant random(100, 400)\nselect put('$name', :tenant);\n\\sleep 3 ms\n");
}
sub start_writer
{
	my ($node) = @_;
	my ($in, $out, $err) = ('', '', '');
	my @command = ('pgbench', '-n', '-T', '3600', '-c', '2', '-M', 'prepared', '-f', $file{ $node->name }, '-h', $node->host, '-p', $node->port, 'postgres');
	$writer{ $node->name } = { run => IPC::Run::start(\@command, \$in, \$out, \$err), err => \$err };
	return;
}
sub check_writers
{
	my ($name) = @_;
	for my $node (@all)
	{
		my $writer = $writer{ $node->name };
		ok($writer->{run}->pumpable, "$name: the clients of " . $node->name . ' go on') or diag(${ $writer->{err} });
	}
	return;
}
sub stop_writers { $_->{run}->kill_kill for values %writer; %writer = (); return; }
sub rows { my ($node, $where) = @_; return sql($node, "select count(*) from orders where $where"); }
sub leader { my ($node) = @_; return sql($node, q[select name from braid.group_nodes where leads]); }
# More rows of the hot tenant: periods have gone by.
sub go_on
{
	my ($name, $tenant) = @_;
	my %before = map { $_->name => rows($_, "tenant_id = $tenant") } @all;
	my $sum = sub { my $sum = 0; $sum += rows($_, "tenant_id = $tenant") - $before{ $_->name } for @all; return $sum; };
	my $from = sql($tokyo, 'select clock_timestamp()');
	wait_until(sub { $sum->() > 100 }, 180) or diag("$name: rows of tenant $tenant are not written");
	ok($tokyo->poll_query_until('postgres', "select clock_timestamp() > '$from'::timestamptz + interval '4 s'"), "$name: eight periods are over");
	return;
}
my $decided = q[select mode, basis, tenant, spread_before, spread from braid.balancer_decisions where tenant in ('7', '8', '9') order by decided_at];

start_writer($_) for @all;
go_on('without a balancer', 7);
is(sql($_, 'select (select count(*) from braid.balancer_decisions) || (select count(*) from braid.tenant_load)::text'), '00', $_->name . ': nothing is counted or decided') for @all;

# Advice: a decision and no rule.
sql($paris, q[select braid.set_balancer('orders', 'advise')]);
ok($_->poll_query_until('postgres', q[select count(*) > 0 from braid.balancer_decisions where tenant = '7']), $_->name . ' has a decision')
  or diag(sql($_, 'table braid.balancer_decisions'), sql($_, 'table braid.tenant_load')) for @all;
go_on('with advice', 7);
my $advice = sql($tokyo, $decided);
like($advice, qr/^advise\|(storage|writes)\|7\|1\|8$/, 'it is advised once that tenant 7 is spread over 8');
is(sql($_, $decided), $advice, $_->name . ': the decision is the same everywhere') for @all;
is(sql($_, 'select count(*) from braid.balancer_decisions'), 1, $_->name . ': no other tenant is hot') for @all;
is(sql($tokyo, q[select amount <= total and error <= amount and share > threshold and abs(threshold - 0.5 / 16) < 1e-9 and reason ~ 'of all' and effect ~ 'on each of 8 shards'
	from braid.balancer_decisions]), 't', 'the decision says from what and what for');
is(sql($_, 'select count(*) from braid.routing_rules'), 0, $_->name . ': there is no rule') for @all;
is(sql($_, q[select balancer from braid.routed_tables where relation = 'public.orders']), 'advise', $_->name . ': the balancer advises') for @all;
my $leader = $named{ leader($tokyo) };
ok($leader->poll_query_until('postgres', q[select count(distinct node) = 3 from braid.tenant_load where relation = 'public.orders']), 'the leader knows the writes of all nodes')
  or diag(sql($leader, 'table braid.tenant_load'));
for my $node (grep { $_ != $leader } @all)
{
	ok($node->poll_query_until('postgres', q[select string_agg(distinct node, ' ') = '] . $node->name . q[' from braid.tenant_load]), $node->name . ' knows its own');
}
my ($home) = grep { rows($_, 'tenant_id = 7') } @all;
ok($home->poll_query_until('postgres', q[select tenant = '7' and writes_per_second > 1 and spread = 1 and share > 0.2 and error_per_second = 0
	from braid.tenant_load where node = '] . $home->name . q[' limit 1]), 'tenant 7 writes most at its node') or diag(sql($home, 'table braid.tenant_load'));

# On: the rule is added, and no client notices.
my %waits = map { $_->name => sql($_, 'select waits from braid.routing_activity') } @all;
sql($oslo, q[select braid.set_balancer('orders', 'on')]);
ok($_->poll_query_until('postgres', q[select (tenants, spread) = (array['7'], 8) from braid.routing_rules]), $_->name . ' has the rule') or diag(sql($_, 'table braid.routing_rules')) for @all;
ok($tokyo->poll_query_until('postgres', q[select now() > max(counts_after) from braid.routing_rules]), 'it counts');
ok(wait_until(sub { 3 == grep { rows($_, 'tenant_id = 7') > 5 } @all }, 180), 'new rows of tenant 7 are on all nodes');
check_writers('with a rule');
is(sql($_, 'select waits from braid.routing_activity'), $waits{ $_->name }, $_->name . ': no row has waited') for @all;
go_on('with a rule', 7);
like(sql($tokyo, $decided), qr/^$advice\non\|(storage|writes)\|7\|1\|8$/, 'it is decided once');
is(sql($_, 'select count(*) from braid.routing_rules'), 1, $_->name . ': there is one rule') for @all;

# The leader is killed. The next one does not add the rule again, and goes on with another tenant.
$leader->stop('immediate');
delete($writer{ $leader->name })->{run}->kill_kill;
my ($next) = grep { $_ != $leader } @all;
ok($next->poll_query_until('postgres', q[select count(*) = 1 from braid.group_nodes where leads and name <> '] . $leader->name . q[']), 'another node leads');
$leader->start;
start_writer($leader);
sql($next, 'update hot set tenant = 8');
ok($_->poll_query_until('postgres', q[select count(*) = 1 from braid.routing_rules where tenants = array['8']]), $_->name . ': the next leader spreads tenant 8')
  or diag(sql($_, 'table braid.routing_rules'), sql($_, 'table braid.balancer_decisions')) for @all;
go_on('with another leader', 8);
is(sql($_, q[select string_agg(tenants::text || ' ' || spread, ', ' order by counts_after) from braid.routing_rules]), '{7} 8, {8} 8', $_->name . ': each has one rule') for @all;
is(sql($next, q[select string_agg(tenant || ' ' || mode, ', ' order by decided_at) from braid.balancer_decisions]), '7 advise, 7 on, 8 on', 'each is decided once');
check_writers('after a kill');

# Off: nothing is counted any more.
sql($next, q[select braid.set_balancer('orders', 'off')]);
sql($next, 'update hot set tenant = 9');
have_all(@all);
go_on('without a balancer again', 9);
is(sql($_, q[select count(*) from braid.routing_rules]), 2, $_->name . ': no rule comes') for @all;
is(sql($_, q[select count(*) from braid.balancer_decisions where tenant = '9']), 0, $_->name . ': and no decision') for @all;
is(sql($_, q[select count(*) from braid.tenant_load]), 0, $_->name . ': nothing is counted') for @all;
check_writers('off');
stop_writers();

# All rows are where reads look for them, each on one node.
have_all(@all) for 1 .. 2;
my %found;
for my $node (@all)
{
	my $name = $node->name;
	$found{$_}++ for split /\n/, sql($node, 'select order_id from orders');
	is(sql($node, "select count(*) from orders o cross join lateral braid.route('orders', o.tenant_id::text, o.order_id::text, o.created_at) r
		where r.nodes <> '{$name}'"), 0, "$name has rows of its own shards alone");
	is(sql($node, "select count(*) from (select distinct tenant_id from orders) t
		where not exists (select from braid.route_query('orders', t.tenant_id::text) q where '$name' = any (q.nodes))"), 0, "$name is asked for each tenant that it has");
}
is(join(' ', grep { $found{$_} != 1 } keys %found), '', 'each row is on one node: ' . keys %found);

# A balancer that starts with rows knows what tenants have stored. A table that is not written to
# costs nothing: no transaction writes.
sql($tokyo, q[select braid.set_balancer('orders', 'advise')]);
is(sql($tokyo, q[select basis || ' ' || tenant || ' ' || spread_before || ' ' || spread from braid.balancer_decisions where basis = 'storage' and tenant = '9']), 'storage 9 1 8',
	'tenant 9 has much storage');
have_all(@all);
# Checkpoints, and the snapshots of running transactions after it, end by themselves. Work that
# comes each 10 s, as on the kept slot, falls into the stretch.
my $stretch = 12;
my $positions = sub { join ' ', map { sql($_, 'select pg_current_wal_insert_lsn()') } @all };
my ($last, $since) = ($positions->(), time);
my $is_quiet = sub {
	my $now = $positions->();
	($last, $since) = ($now, time) if $now ne $last;
	return time - $since >= $stretch;
};
ok(wait_until($is_quiet, 120), "no WAL in $stretch seconds, which are 24 periods");

# The end of the routing ends the balancer.
sql($tokyo, q[select braid.unroute_table('orders', rows => 'keep')]);
is(sql($tokyo, q[select count(*) from braid.group_option where option_name like 'balancer %']), 0, 'no balancer without routing');

done_testing;
