# braid.set_rate_limit: a subscriber reads as fast as the limit allows, and follows changes of the
# limit while it runs, in streaming and in the initial copy. The provider's walsender does not take
# it for dead.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep time);

my $tokyo = new_node('tokyo', conf => "wal_sender_timeout = 2s\n");
my $paris = new_node('paris', publication => '');
on_all(q[
	create table small (id int primary key generated always as identity, v int);
	create table wide (id int primary key generated always as identity, v text);
], $tokyo, $paris);
my $name = subscribe($paris, $tokyo);

sub count { return $paris->safe_psql('postgres', "select count(*) from $_[0]"); }

sub limit { return $paris->safe_psql('postgres', "select braid.set_rate_limit('$name'" . join('', map { ", $_" } @_) . ')'); }

# So many transactions of one row each.
sub write_small
{
	my ($rows) = @_;
	return $tokyo->safe_psql('postgres', "set synchronous_commit = off; do \$\$ begin for i in 1 .. $rows loop insert into small (v) values (i); commit; end loop; end \$\$");
}

# Rows of 10 kB that do not compress well.
sub write_wide
{
	my ($rows) = @_;
	return $tokyo->safe_psql('postgres', "insert into wide (v) select (select string_agg(md5(n::text || m::text), '') from generate_series(1, 320) m) from generate_series(1, $rows) n");
}

# Rows a second that arrive, over so many seconds.
sub rate
{
	my ($seconds) = @_;
	my ($from, $rows) = (time, count('small'));
	sleep $seconds;
	$rows = count('small') - $rows;
	return $rows / (time - $from);
}

sub throttled { return $paris->safe_psql('postgres', "select throttled from braid.subscription_status where name = '$name'"); }

# Seconds until all is here.
sub seconds_to_catch_up
{
	my $from = time;
	caught_up($paris, $tokyo);
	return time - $from;
}

# How fast it is without a limit.
my $from = time;
write_small(10_000);
my $without = 10_000 / (seconds_to_catch_up() + time - $from);
note(sprintf 'without a limit: %d rows/s', $without);
cmp_ok($without, '>', 2000, 'without a limit: more than what is set below');
is(throttled(), 'f', 'and not throttled');

# Rows a second, measured while a backlog is read; a message of joined transactions has some
# hundred.
my $leader = join ',', worker_pids($paris, 'braid leader');
my $walsender = join ',', worker_pids($tokyo, 'walsender');
limit('rows_per_second => 1000');
$from = time;
my $before = count('small');
write_small(20_000);
ok(wait_until(sub { throttled() eq 't' }, 10), 'throttled, as the status says');
is($paris->safe_psql('postgres', 'select row_limit, byte_limit, throttled from braid.subscription_detail'), '1000||t', 'and the details, with the limit');
SKIP:
{
	skip 'wait events have no names of ours before version 17', 1 if $paris->pg_version < 17;
	ok(wait_until(sub { $paris->safe_psql('postgres', q[select wait_event from pg_stat_activity where backend_type = 'braid leader']) eq 'BraidRateLimit' }, 10),
		'the leader waits under that name');
}
sleep 1;
my $rate = rate(4);
note(sprintf 'limit 1000: %d rows/s', $rate);
cmp_ok($rate, '<', 1500, 'not faster than the limit');
cmp_ok($rate, '>', 600, 'nor much slower');
my $rows = count('small') - $before;
my $allowed = 1000 * (time - $from) + 100 + 1000;
cmp_ok($rows, '<=', $allowed, 'all the time since it was set');

# Changed while it runs: at once, without a new leader.
limit('rows_per_second => 4000');
sleep 0.5;
$rate = rate(2);
note(sprintf 'limit 4000: %d rows/s', $rate);
cmp_ok($rate, '<', 5500, 'a higher limit: not faster than that');
cmp_ok($rate, '>', 2000, 'but faster than before');
limit();
cmp_ok(seconds_to_catch_up(), '<', 5, 'without a limit: the rest at once');
ok(wait_until(sub { throttled() eq 'f' }, 5), 'not throttled any more');
same_tables([ $tokyo, $paris ], 'small');

# A transaction of many rows is limited as well, so slowly that the provider would give up a silent
# reader.
limit('rows_per_second => 2000');
$tokyo->safe_psql('postgres', 'insert into small (v) select generate_series(1, 16000)');
my $seconds = seconds_to_catch_up();
note(sprintf '16000 rows at 2000/s: %.1f s', $seconds);
# The last message of a quarter MB is not waited for.
cmp_ok($seconds, '>', 4, 'a large transaction takes its time');
cmp_ok($seconds, '<', 20, 'but not for ever');

# Bytes, in messages of 10 kB; then so few that nothing is read for longer than wal_sender_timeout.
# An idle pause saves nothing up.
limit('bytes_per_second => 500000');
sleep 2;
write_wide(200);
$seconds = seconds_to_catch_up();
note(sprintf '2 MB at 500 kB/s: %.1f s', $seconds);
cmp_ok($seconds, '>', 3, 'bytes: not faster than the limit');
cmp_ok($seconds, '<', 10, 'nor much slower');
limit('bytes_per_second => 1000');
# Until the leader has the new limit.
sleep 2;
my $wide = count('wide');
write_wide(1) for 1 .. 20;
sleep 6;
# One message is read whole, and may hold several transactions.
cmp_ok(count('wide') - $wide, '<=', 8, 'hardly anything is read');
is(throttled(), 't', 'it is throttled');
limit('rows_per_second => 0, bytes_per_second => 0');
cmp_ok(seconds_to_catch_up(), '<', 3, 'a debt is forgotten with its limit');
same_tables([ $tokyo, $paris ], 'wide');

is(join(',', worker_pids($paris, 'braid leader')), $leader, 'one leader all the time');
is(join(',', worker_pids($tokyo, 'walsender')), $walsender, 'and one walsender');
unlike(slurp_file($tokyo->logfile), qr/replication timeout/, 'that did not take it for dead');

# A stop is a stop, also while it is held back.
limit('rows_per_second => 10');
write_small(2000);
ok(wait_until(sub { throttled() eq 't' }, 10), 'held back');
$from = time;
$paris->safe_psql('postgres', "select braid.disable_subscription('$name')");
ok(wait_until(sub { !worker_pids($paris, 'braid leader') }, 10), 'disabled: it stops');
cmp_ok(time - $from, '<', 3, 'soon');
# The limit outlives a restart of the server.
$paris->restart;
is($paris->safe_psql('postgres', 'select row_limit from braid.subscription_detail'), '10', 'the limit is durable');
limit();
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'small');

# The initial copy counts.
$paris->safe_psql('postgres', "select braid.drop_subscription('$name'); truncate small, wide");
my $dsn = $tokyo->connstr('postgres');
$paris->safe_psql('postgres', "select braid.create_subscription('$name', \$dsn\$$dsn\$dsn\$, enabled => false)");
limit('bytes_per_second => 300000');
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
ok(wait_until(sub { throttled() eq 't' && status($paris, $name)->{state} eq 'copying' }, 10), 'the copy is throttled');
$from = time;
my $bytes = $paris->safe_psql('postgres', 'select coalesce(sum(bytes_copied), 0) from braid.subscription_tables');
sleep 3;
$bytes = $paris->safe_psql('postgres', 'select coalesce(sum(bytes_copied), 0) from braid.subscription_tables') - $bytes;
$rate = $bytes / (time - $from);
note(sprintf 'copy at 300 kB/s: %d bytes/s', $rate);
cmp_ok($rate, '<', 400_000, 'to the limit, for all tables together');
cmp_ok($rate, '>', 150_000, 'and not far below');
limit();
$from = time;
$paris->safe_psql('postgres', "select braid.wait_for_subscription('$name')", timeout => $PostgreSQL::Test::Utils::timeout_default);
cmp_ok(time - $from, '<', 5, 'without it the rest is copied at once');
same_tables([ $tokyo, $paris ], 'small', 'wide');

done_testing();
