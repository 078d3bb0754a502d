# A provider goes down and comes back, in each way: the subscriber waits, reports it, and goes on.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep time);

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '');
on_all('create table item (id int primary key, v text)', $tokyo, $paris);
my $name = subscribe($paris, $tokyo);

$tokyo->safe_psql('postgres', q[insert into item values (0, 'before')]);
caught_up($paris, $tokyo);

my $id = 0;
for my $mode (qw(fast immediate))
{
	$tokyo->stop($mode);
	ok(wait_until(sub { status($paris, $name)->{state} ne 'streaming' }, 10), "$mode: the subscriber notices");
	isnt(status($paris, $name)->{state}, 'error', "$mode: a provider that is away is no error to stop at");
	$tokyo->start;
	$id++;
	$tokyo->safe_psql('postgres', "insert into item values ($id, 'after $mode')");
	caught_up($paris, $tokyo);
	is($paris->safe_psql('postgres', "select v from item where id = $id"), "after $mode", "$mode: goes on");
}

# While the provider is away attempts grow rarer: seconds of absence do not fill the log.
my $log_start = -s $paris->logfile;
$tokyo->stop('fast');
my $from = time;
my $attempts = sub { my $found = () = slurp_file($paris->logfile, $log_start) =~ /could not connect|connection to server .* failed/g; return $found; };
ok(wait_until(sub { $attempts->() >= 8 }, 60), 'it tries again');
# Pauses of 0.1, 0.2, 0.4, 0.8 s and then of one second each. Without them eight attempts take no
# time.
cmp_ok(time - $from, '>', 2, 'but backs off');
$tokyo->start;

# The connection alone is cut.
my ($walsender) = wait_for_worker($tokyo, 'walsender');
$tokyo->safe_psql('postgres', "select pg_terminate_backend($walsender)");
$tokyo->safe_psql('postgres', q[insert into item values (100, 'after the cut')]);
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select v from item where id = 100'), 'after the cut', 'a cut connection is made again');

# Disabled while the provider is away, enabled when it is back.
$tokyo->stop('fast');
$paris->safe_psql('postgres', "select braid.disable_subscription('$name')");
ok(wait_until(sub { !worker_pids($paris, 'braid leader') && !worker_pids($paris, 'braid applier') }, 30), 'disabling stops the workers of a subscription that cannot connect');
$tokyo->start;
$tokyo->safe_psql('postgres', q[insert into item values (101, 'while disabled')]);
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'item');

# The subscriber goes away and comes back.
$paris->stop('immediate');
$tokyo->safe_psql('postgres', q[insert into item values (102, 'while paris was down')]);
$paris->start;
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'item');

# An idle connection is no silent one, however short the time that silence may last.
$paris->append_conf('postgresql.conf', "wal_receiver_timeout = 3s\n");
$paris->reload;
my ($leader) = wait_for_worker($paris, 'braid leader');
$log_start = -s $paris->logfile;
sleep 9;
is_deeply([ worker_pids($paris, 'braid leader') ], [$leader], 'while nothing happens for three times wal_receiver_timeout, the connection stays');
unlike(slurp_file($paris->logfile, $log_start), qr/silent for longer than wal_receiver_timeout/, 'and nobody says that the provider is silent');
$tokyo->safe_psql('postgres', q[insert into item values (103, 'at last')]);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'item');

done_testing();
