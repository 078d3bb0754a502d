# A server with many databases: finding those that have the extension takes no worker processes from
# them.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '');
on_all('create table item (id int primary key, v text)', $tokyo, $paris);
subscribe($paris, $tokyo);
$paris->safe_psql('postgres', "create database empty_$_ strategy file_copy") for 1 .. 24;
# One more is a node, and the last to be looked at.
$paris->safe_psql('postgres', 'create database node_too');

# As many as Braid needs here: launcher, supervisor, two managers, leader, two appliers, one to find
# out with, and three that have ended without the postmaster having noticed.
$paris->append_conf('postgresql.conf', "max_worker_processes = 11\n");
my $log_start = -s $paris->logfile;
$paris->restart;
$tokyo->safe_psql('postgres', q[insert into item values (1, 'one')]);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'item');
$paris->safe_psql('node_too', q[
	create extension braid;
	select braid.create_node('paris_too', 'dbname=node_too');
]);
sub managers { return $paris->safe_psql('postgres', q[select string_agg(datname, ',' order by datname) from pg_stat_activity where backend_type = 'braid manager']); }
ok(wait_until(sub { managers() eq 'node_too,postgres' }, 20), 'a database that becomes a node is given a manager at once') or diag(managers());
unlike(slurp_file($paris->logfile, $log_start), qr/no background worker is free/, 'never were all worker processes in use');

$log_start = -s $paris->logfile;
$paris->restart;
ok(wait_until(sub { managers() eq 'node_too,postgres' }, 30), 'both are found when the server starts') or diag(managers());
$tokyo->safe_psql('postgres', q[insert into item values (2, 'two')]);
caught_up($paris, $tokyo);
unlike(slurp_file($paris->logfile, $log_start), qr/no background worker is free/, 'without a worker process too many');

# A supervisor that ends is started again, and finds the managers of the one before it.
my @before = worker_pids($paris, 'braid manager');
my ($supervisor) = worker_pids($paris, 'braid supervisor');
$paris->safe_psql('postgres', "select pg_terminate_backend($supervisor)");
ok(wait_until(sub { my ($now) = worker_pids($paris, 'braid supervisor'); defined $now && $now != $supervisor }, 20), 'another supervisor');
$tokyo->safe_psql('postgres', q[insert into item values (3, 'three')]);
caught_up($paris, $tokyo);
# The supervisor gives one more node a manager, so it has gone through all databases.
$paris->safe_psql('postgres', 'create database later');
$paris->safe_psql('later', q[
	create extension braid;
	select braid.create_node('paris_later', 'dbname=later');
]);
my $later = q[select pid from pg_stat_activity where backend_type = 'braid manager' and datname = 'later'];
ok(wait_until(sub { $paris->safe_psql('postgres', $later) ne '' }, 30), 'a manager for a node that comes later');
my $its_manager = $paris->safe_psql('postgres', $later);
is_deeply([ grep { $_ ne $its_manager } worker_pids($paris, 'braid manager') ], \@before, 'the same managers, and no second ones');
$paris->safe_psql('postgres', 'drop database later with (force)');
ok(wait_until(sub { managers() eq 'node_too,postgres' }, 30), 'two again');
# One of these ends, and is replaced though the process that started it is gone.
$paris->safe_psql('postgres', "select pg_terminate_backend($before[0])");
ok(wait_until(sub { my @now = worker_pids($paris, 'braid manager'); @now == 2 && "@now" ne "@before" }, 20), 'a manager that ends is replaced');
$tokyo->safe_psql('postgres', q[insert into item values (4, 'four')]);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'item');

# A dropped database leaves nothing in shared memory: as many subscriptions fit in as before.
my $dsn = $tokyo->connstr('postgres');
$paris->append_conf('postgresql.conf', "braid.max_subscriptions = 2\nmax_worker_processes = 20\n");
$paris->restart;
for my $round (1 .. 3)
{
	$paris->safe_psql('postgres', 'create database short_lived');
	$paris->safe_psql('short_lived', qq[
		create table item (id int primary key, v text);
		create extension braid;
		select braid.create_node('short_lived', 'dbname=short_lived');
		select braid.create_subscription('s', \$dsn\$$dsn\$dsn\$, slot_name => 'short_lived_$round');
	]);
	my ($code, undef, $error) = $paris->psql('short_lived', q[select braid.wait_for_subscription('s', '180 s')]);
	is($code, 0, "round $round: the subscription runs") or diag($error);
	$paris->safe_psql('postgres', 'drop database short_lived with (force)');
}

done_testing();
