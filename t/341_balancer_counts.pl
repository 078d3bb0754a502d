# Writes of tenants are counted once, though three subscribers read them: committed ones in each way
# of committing, none that was rolled back, and none of a shard that moves.

use strict;
use warnings;

use Braid;
use Group;
use PostgreSQL::Test::Utils;
use Test::More;

my $conf = "max_prepared_transactions = 10\nlogical_decoding_work_mem = '64kB'\n";
my ($tokyo, $paris, $oslo, $lima) = my @all = group([qw(tokyo paris oslo lima)], q{
	create table orders (tenant_id bigint not null, order_id bigint not null, created_at timestamptz not null default now(), item text,
		primary key (tenant_id, order_id, created_at));
	create table twin (tenant_id bigint not null, order_id bigint not null, created_at timestamptz not null default now(), primary key (tenant_id, order_id, created_at));
}, conf => $conf);
sub set_all { my ($setting) = @_; on_all("alter system set $setting", @all); on_all('select pg_reload_conf()', @all); return; }
# Nothing is decided at first: storage would be.
set_all(q(braid.balancer_least_writes = 1000000));
set_all(q(braid.balancer_period = '8s'));
sql($tokyo, q[select braid.route_table('orders', 'tenant_id', 'order_id', 'created_at', shards => 16)]);
my @own = split /\n/, sql($tokyo, q[select t from generate_series(1, 1000) t cross join lateral braid.route('orders', t::text, '1') r where r.nodes = '{tokyo}' limit 12]);
my ($single, $whole, $aborted, $savepoint, $prepared, $unprepared, $streamed, $updated, $deleted, $marker, $moved) = @own;
sub rows { my ($tenant, $count, $from) = @_; return "insert into orders select $tenant, i, now(), repeat('x', 100) from generate_series($from + 1, $from + $count) i"; }
sql($tokyo, rows($_, 100, 0)) for $updated, $deleted;
sql($tokyo, rows($moved, 2000, 0));
have_all(@all);
sql($paris, q[select braid.set_balancer('orders', 'advise')]);
ok($tokyo->poll_query_until('postgres', q[select balancer = 'advise' from braid.routed_tables]), 'the balancer advises');
my $load = "select count(*) from braid.tenant_load where node = 'tokyo' and tenant = ";
# A period has just begun, as the last one had a row.
sub begin_period
{
	my ($from) = @_;
	sql($tokyo, rows($marker, 10, $from));
	ok($tokyo->poll_query_until('postgres', "$load'$marker'", '1'), 'a period is over');
	return;
}
begin_period(0);
sql($tokyo, join(q(;), map { rows($single, 1, $_) } 1 .. 100));
sql($tokyo, rows($single, 1, $_)) for 101 .. 120;
sql($tokyo, rows($whole, 100, 0));
sql($tokyo, 'begin; ' . rows($aborted, 100, 0) . '; rollback');
sql($tokyo, 'begin; ' . rows($savepoint, 50, 0) . '; savepoint a; ' . rows($savepoint, 30, 100) . '; rollback to a; ' . rows($savepoint, 10, 200) . '; commit');
sql($tokyo, 'begin; ' . rows($prepared, 100, 0) . q[; prepare transaction 'yes']);
sql($tokyo, 'begin; ' . rows($unprepared, 100, 0) . q[; prepare transaction 'no']);
sql($tokyo, 'begin; ' . rows($streamed, 1000, 0) . '; savepoint a; ' . rows($streamed, 1000, 1000) . '; rollback to a; savepoint b; ' . rows($streamed, 500, 2000) . '; commit');
sql($tokyo, "update orders set item = 'y' where tenant_id = $updated");
sql($tokyo, "delete from orders where tenant_id = $deleted");
sql($tokyo, q[commit prepared 'yes']);
sql($tokyo, q[rollback prepared 'no']);
ok($tokyo->poll_query_until('postgres', "$load'$single'", '1'), 'the writes are shown');
my %share = map { split /\|/ } split /\n/, sql($tokyo, q[select tenant, share from braid.tenant_load where node = 'tokyo']);
# In the shares of one node's writes: one row of `whole` is a hundredth of its share.
my $one = $share{$whole} / 100;
sub count_of { my ($tenant) = @_; return sprintf('%.0f', ($share{$tenant} // 0) / $one); }
is(count_of($single), 120, 'single rows, in one statement string and alone');
is(count_of($aborted), 0, 'a transaction that is rolled back');
is(count_of($savepoint), 60, 'a savepoint that is rolled back');
is(count_of($prepared), 100, 'a prepared transaction that is committed');
is(count_of($unprepared), 0, 'one that is rolled back');
is(count_of($streamed), 1500, 'a large transaction, of which a part is rolled back');
is(count_of($updated), 100, 'updates');
is(count_of($deleted), 100, 'deletions');
# The rate says whether rows were counted more than once: a hundred in about eight seconds.
my $rate = sql($tokyo, "select writes_per_second from braid.tenant_load where node = 'tokyo' and tenant = '$whole'");
cmp_ok($rate, '>', 100 / 24, 'the rate is that of a hundred rows');
cmp_ok($rate, '<', 150 / 8, 'and not that of two hundred');
is(sql($tokyo, q[select max(error_per_second) from braid.tenant_load where node = 'tokyo']), 0, 'counts are exact');

# A row with a copy at another node counts where it was written.
sql($tokyo, q[select braid.route_table('twin', 'tenant_id', 'order_id', 'created_at', shards => 16, copies => 2)]);
sql($lima, q[select braid.set_balancer('twin', 'advise')]);
ok($_->poll_query_until('postgres', q[select balancer = 'advise' from braid.routed_tables where relation = 'public.twin']), $_->name . ': the balancer of the other table advises') for @all;
my ($shared, $copy) = split / /, sql($tokyo, q[select t || ' ' || array_to_string(array_remove(r.nodes, 'tokyo'), '')
	from generate_series(1, 1000) t cross join lateral braid.route('twin', t::text, '1') r where 'tokyo' = any (r.nodes) limit 1]);
sql($tokyo, "insert into twin select $shared, i from generate_series(1, 500) i");
have_all(@all);
my $leader = (grep { $_->name eq sql($tokyo, q[select name from braid.group_nodes where leads]) } @all)[0];
ok($leader->poll_query_until('postgres', q[select count(*) > 0 from braid.tenant_load where relation = 'public.twin']), 'its writes are shown');
is(sql($leader, q[select string_agg(node, ' ') from braid.tenant_load where relation = 'public.twin']), 'tokyo', "at the node that wrote them, not at $copy");

# From here on decisions come at once.
set_all(q(braid.balancer_period = '1s'));
set_all($_) for q(braid.balancer_pause = '1s'), q(braid.balancer_periods = 1), q(braid.balancer_least_writes = 500);
ok($_->poll_query_until('postgres', q[select current_setting('braid.balancer_least_writes') = '500']), $_->name . ' has the settings') for @all;

# A move writes 2,000 rows of a tenant again, of which the balancer knows nothing. Then another
# tenant becomes hot.
my $shard = sql($tokyo, "select shard from braid.route('orders', '$moved', '1')");
my $set = sql($tokyo, "select node_set from braid.shards where nodes = '{oslo}' limit 1");
sql($tokyo, "select braid.move_shard('orders', $shard, $set)");
is(sql($oslo, "select count(*) from orders where tenant_id = $moved"), 2000, 'the shard has moved');
sql($tokyo, rows($marker, 2000, 1000));
ok($_->poll_query_until('postgres', "select count(*) > 0 from braid.balancer_decisions where tenant = '$marker'"), $_->name . ': a hot tenant is found') for @all;
is(sql($tokyo, "select count(*) from braid.balancer_decisions where tenant = '$moved'"), 0, 'rows that a move has written do not count');
is(sql($tokyo, q[select string_agg(distinct decided_by, ' ') from braid.balancer_decisions]), $leader->name, 'the leader has decided');

done_testing;
