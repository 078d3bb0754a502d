# A provider does not answer: at every step of a leader's start, while a slot is created, in the
# middle of a copy. It is given up after wal_receiver_timeout, and asked again. A provider that is
# at work, on a slot that waits for a transaction or on rows behind a lock, is not given up.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Proxy;
use Test::More;
use Time::HiRes qw(sleep);

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '', conf => "wal_receiver_timeout = 1500ms\nwal_receiver_status_interval = 1s\nbraid.copy_workers_per_subscription = 1\n");
on_all(q[
	create table item (id int primary key, v text);
	create table large (id int primary key, v text);
], $tokyo, $paris);
$tokyo->safe_psql('postgres', q[
	insert into item values (0, 'copied');
	insert into large select n, repeat(md5(n::text), 10) from generate_series(1, 10000) n;
]);
my $proxy = Proxy->new($tokyo);
my $dsn = $proxy->connstr('postgres') . ' connect_timeout=2';
my $silent = qr/silent for longer than wal_receiver_timeout/;

sub tried_again
{
	my ($offset) = @_;
	my @errors = slurp_file($paris->logfile, $offset) =~ /"paris_from_tokyo" will be tried again: (.*)/g;
	return join "\n", grep { !/due to administrator command|is active for PID/ } @errors;
}

# Creating a slot waits for transactions in progress; that silence is no failure.
my $session = $tokyo->background_psql('postgres', on_error_die => 1);
$session->query_safe('begin; select pg_current_xact_id()');
my $offset = -s $paris->logfile;
my $name = subscribe($paris, $tokyo, dsn => $dsn, wait => 0);
ok(wait_until(sub {
	$tokyo->safe_psql('postgres', q[select count(*) from pg_stat_activity where query like 'CREATE_REPLICATION_SLOT%' and wait_event_type = 'Lock']) eq '1'
}, 20), 'the slot waits for a transaction');
my $leader = $paris->safe_psql('postgres', 'select leader_pid from braid.subscription_detail');
sleep 5;
is($paris->safe_psql('postgres', 'select leader_pid from braid.subscription_detail'), $leader, 'and for three times wal_receiver_timeout, so does the leader');

# Rows of the other table are behind a lock, which must not come before the snapshot of the copies.
my $here = $paris->background_psql('postgres', on_error_die => 1);
$here->query_safe('begin; lock table item in share mode');
$session->query_safe('commit');
$session->quit;
ok(wait_until(sub { $paris->safe_psql('postgres', q[select count(*) from pg_locks where relation = 'item'::regclass and not granted]) eq '1' }, 20), 'the first table waits here');
my $locked = $tokyo->background_psql('postgres', on_error_die => 1);
$locked->query_safe('begin; lock table large in access exclusive mode');
$here->query_safe('commit');
$here->quit;
ok(wait_until(sub {
	$tokyo->safe_psql('postgres', q[select count(*) from pg_stat_activity where application_name like '% copy' and wait_event_type = 'Lock']) eq '1'
}, 20), 'a copy waits for a lock at the provider');
sleep 5;
is($paris->safe_psql('postgres', 'select leader_pid from braid.subscription_detail'), $leader, 'the leader is the same');
is(tried_again($offset), '', 'nothing was given up');
unlike(slurp_file($paris->logfile, $offset), $silent, 'nor was the copy');
$locked->query_safe('commit');
$locked->quit;
$paris->safe_psql('postgres', "select braid.wait_for_subscription('$name', '180 s')");
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], qw(item large));

# A copy that stops in the middle: the backend at the provider waits for its reader.
$offset = -s $paris->logfile;
my $faults = $proxy->faults;
$proxy->behave('stall 1000000');
$paris->safe_psql('postgres', "select braid.resync_table('$name', 'large')");
ok(wait_until(sub { $proxy->faults > $faults }, 20), 'a copy is silent in its middle');
$proxy->behave('pass');
ok(wait_until(sub { slurp_file($paris->logfile, $offset) =~ $silent }, 20), 'it is given up');
$paris->safe_psql('postgres', "select braid.wait_for_subscription('$name', '180 s')");
same_tables([ $tokyo, $paris ], 'large');

# A start, at each of its steps: what a leader reads until changes come is some thousand bytes.
my ($given_up, $n) = (0, 0);
for my $place (map { 150 + 350 * $_ } 0 .. 11)
{
	$offset = -s $paris->logfile;
	$faults = $proxy->faults;
	$proxy->behave("stall $place");
	$tokyo->safe_psql('postgres', q[select pg_terminate_backend(pid) from pg_stat_replication]);
	# There is always something to send, in the end.
	$tokyo->safe_psql('postgres', 'insert into item values (' . ++$n . q[, repeat('x', 6000))]);
	ok(wait_until(sub { $proxy->faults > $faults }, 20), "silence after $place bytes");
	$proxy->behave('pass');
	ok(wait_until(sub { tried_again($offset) =~ /$silent|timeout expired/ }, 20), 'it is noticed') or diag(slurp_file($paris->logfile, $offset));
	$given_up++ if tried_again($offset) =~ $silent;
	caught_up($paris, $tokyo);
}
cmp_ok($given_up, '>', 6, 'most of them after the connection had been made');
same_tables([ $tokyo, $paris ], 'item');

# A slot is created while the link is held: paris does not get the confirmation.
$paris->safe_psql('postgres', "select braid.drop_subscription('$name')");
$offset = -s $paris->logfile;
$session = $tokyo->background_psql('postgres', on_error_die => 1);
$session->query_safe('begin; select pg_current_xact_id()');
$paris->safe_psql('postgres', 'truncate item, large');
subscribe($paris, $tokyo, dsn => $dsn, wait => 0);
ok(wait_until(sub {
	$tokyo->safe_psql('postgres', q[select count(*) from pg_stat_activity where query like 'CREATE_REPLICATION_SLOT%' and wait_event_type = 'Lock']) eq '1'
}, 20), 'a slot waits once more');
$proxy->link('hold');
$session->query_safe('commit');
$session->quit;
ok(wait_until(sub {
	$tokyo->safe_psql('postgres', q[select count(*) from pg_stat_activity where query like 'CREATE_REPLICATION_SLOT%' and state = 'active']) eq '0'
}, 20), 'it has been created, and nobody hears of it');
sleep 3;
$proxy->link('up');
$paris->safe_psql('postgres', "select braid.wait_for_subscription('$name', '180 s')");
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], qw(item large));

$proxy->stop;
done_testing();
