# The stream waits for a table that is being copied, for longer than wal_receiver_timeout: the copy
# goes on, and the connection is kept.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep);

my $tokyo = new_node('tokyo', publication => '');
my $paris = new_node('paris', conf => "wal_receiver_timeout = 1s\nwal_receiver_status_interval = 1s");
on_all('create table one (id int primary key, v text); create table two (id int primary key, v text)', $tokyo, $paris);
$tokyo->safe_psql('postgres', q[
	create publication braid for table one;
	insert into two select n, 'copied' from generate_series(1, 1000) n;
]);
my $name = subscribe($paris, $tokyo);
$tokyo->safe_psql('postgres', 'alter publication braid add table two');

# The copy waits for this lock, and the change of the table, at the leader, for the copy.
my $session = $paris->background_psql('postgres');
$session->query_safe('begin');
$session->query_safe('lock table two in share mode');
$paris->safe_psql('postgres', "select braid.refresh_subscription('$name')");
$tokyo->safe_psql('postgres', q[insert into two values (1001, 'streamed')]);
my $leader = $paris->safe_psql('postgres', "select leader_pid from braid.subscription_detail where name = '$name'");
sleep 3;
is($paris->safe_psql('postgres', "select leader_pid from braid.subscription_detail where name = '$name'"), $leader, 'the leader is the same');
$session->query_safe('commit');
$session->quit;

$paris->safe_psql('postgres', "select braid.wait_for_subscription('$name', '180 s')");
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'two');
is($paris->safe_psql('postgres', "select failures from braid.subscription_detail where name = '$name'"), '0', 'and nothing had to be tried again');

done_testing();
