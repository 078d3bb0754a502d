# The collector of deletions is terminated again and again: an older change does not bring back rows
# that were truncated here, however long it has to wait.

use strict;
use warnings;

use Braid;
use Mesh;
use Test::More;
use Time::HiRes qw(sleep time);

my ($tokyo, $paris) = my @nodes = map { new_node($_, conf => "max_worker_processes = 10\n") } qw(tokyo paris);
on_all('create table t (k int primary key, v text); create table item (k int primary key)', @nodes);
subscribe($paris, $tokyo);
my $name = subscribe($tokyo, $paris, copy_data => 'false');
sub collectors { return worker_pids($tokyo, 'braid collector'); }
ok(wait_until(sub { scalar collectors() }, 20), 'tokyo collects deletions');

sub end_collector { kill 'TERM', $_ for collectors(); return; }

# Also one that has just been started is back before anybody who needs it has lost patience.
for my $time (1 .. 3)
{
	my ($pid) = collectors();
	end_collector();
	ok(wait_until(sub { my ($other) = collectors(); $other && $other != $pid }, 3), "it is started again, $time");
}

# An older change waits behind a truncate, and no worker is free for the collector when that
# commits.
converged(@nodes);
my $truncating = $tokyo->background_psql('postgres', on_error_stop => 1);
$truncating->query_safe('begin; truncate t');
sql($paris, q[insert into t values (1, 'older')]);
ok($tokyo->poll_query_until('postgres', q[select count(*) = 1 from pg_locks where relation = 't'::regclass and not granted]), 'an older change waits for the truncate');
my ($manager) = worker_pids($tokyo, 'braid manager');
kill 'STOP', $manager;
end_collector();
ok(wait_until(sub { !collectors() }, 10), 'the collector has ended');
my $parallel = $tokyo->pg_version < 16 ? 'force_parallel_mode' : 'debug_parallel_query';
my @busy = map { $tokyo->background_psql('postgres', on_error_stop => 0) } 1 .. 8;
$_->query_until(qr/busy/, "set $parallel = on;\n\\echo busy\nselect pg_sleep(600);\n") for @busy;
my $is_full = q[select count(*) = current_setting('max_worker_processes')::int from pg_stat_activity where backend_type in ('logical replication launcher', 'parallel worker') or backend_type like 'braid %'];
ok($tokyo->poll_query_until('postgres', $is_full), 'all workers are busy');
kill 'CONT', $manager;
$truncating->query_safe('commit');
sql($paris, q[insert into t values (2, 'newer')]);
# Longer than it is waited for.
my ($end, $most) = (time + 13, 0);
while (time < $end)
{
	my $rows = sql($tokyo, 'select count(*) from t');
	$most = $rows if $rows > $most;
	sleep 0.2;
}
is($most, 0, 'without it nothing older comes');
ok($tokyo->log_contains(qr/tries a transaction again: what sessions of this node have truncated is not known yet/), 'the log says what it waits for');
ok($tokyo->log_contains(qr/braid collector of deletions: no background worker is free/), 'and why there is none');
sql($tokyo, q[select pg_terminate_backend(pid) from pg_stat_activity where query like '%pg_sleep(600)%' and pid <> pg_backend_pid() and backend_type = 'client backend']);
converged(@nodes);
is(sql($_, q[select string_agg(k || v, ' ' order by k) from t]), '2newer', $_->name . ': what is older is gone') for @nodes;
is(status($tokyo, $name)->{last_error}, '', 'it goes on');

done_testing();
