# The difference of clocks is measured, shown and warned about, while clocks are set. If so
# configured, changes from the future are held back until their time.

use strict;
use warnings;

use Braid;
use FakeClock;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep);

my $clock = FakeClock->new or plan skip_all => 'there is no C compiler to make a clock with';
my $conf = "wal_sender_timeout = 0\nbraid.max_clock_wait = 3s\n";
my $tokyo = $clock->over(sub { new_node('tokyo', conf => $conf) });
# The clock moves forward only, by hours: then the duration of a step of this test does not matter.
my $clock_here = FakeClock->new;
my $paris = $clock_here->over(sub { new_node('paris', conf => $conf) });
my @both = ($tokyo, $paris);
on_all('create table item (id int primary key, v text)', @both);
my $name = subscribe($paris, $tokyo, origin => q['any']);
my $back = subscribe($tokyo, $paris, origin => q['any'], copy_data => 'false');

sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
# The leader has the value when this returns. A new session has it once the postmaster has read the
# file and signalled all processes. The leader reads it before it reports the next position.
sub set
{
	my ($setting, $value) = @_;
	my $loaded = sql($paris, 'select pg_conf_load_time()');
	sql($paris, "alter system set braid.$setting = $value");
	sql($paris, 'select pg_reload_conf()');
	wait_until(sub { Session::close_all($paris); return sql($paris, "select pg_conf_load_time() > '$loaded'") eq 't' }, 30) or die 'the file is not read';
	sql($tokyo, q[select pg_logical_emit_message(true, 'to have a position', '')]);
	caught_up($paris, $tokyo);
	return;
}
# Tests the difference that a node shows to the other's clock, when that is so many seconds ahead.
sub measures
{
	my ($node, $ahead, $why) = @_;
	ok($node->poll_query_until('postgres', "select abs(extract(epoch from ahead) - ($ahead)) <= extract(epoch from error) and error < '2 s' from braid.clock_skew"), $why)
	  or diag(sql($node, 'select * from braid.clock_skew'));
	return;
}
sub state { return sql($_[0], 'select state from braid.clock_skew'); }
sub wait_for_state { my ($node, $state, $why) = @_; ok($node->poll_query_until('postgres', "select state = '$state' from braid.clock_skew"), $why); return; }
# Whether there is such a line after a place in the log.
sub logs { my ($node, $line, $from, $why) = @_; ok(wait_until(sub { slurp_file($node->logfile, $from) =~ $line }, 30), $why); return; }
sub here { return -s $_[0]->logfile; }
sub count_lines { my ($node, $line, $from) = @_; return scalar(() = slurp_file($node->logfile, $from) =~ /$line/g); }

# One clock for both.
measures($_, 0, 'the same clock: no difference but for the error, at ' . $_->name) for @both;
is(state($paris), 'ok', 'which is fine');
my $first = sql($paris, 'select clock_measured_at from braid.subscription_detail');
ok($paris->poll_query_until('postgres', "select clock_measured_at > '$first' from braid.subscription_detail"), 'it is measured again in the stream');
measures($paris, 0, 'and still holds');
is(sql($paris, 'select clock_offset = ahead and clock_error = error and age < interval \'1 min\' from braid.subscription_detail, braid.clock_skew'), 't', 'the details say the same');

# The provider's clock is set while it runs.
my ($in_paris, $in_tokyo) = map { here($_) } @both[ 1, 0 ];
$clock->set(3);
measures($paris, 3, 'a clock that was set: seen by who reads from it');
measures($tokyo, -3, 'and by itself');
wait_for_state($_, 'apart', 'too far, says ' . $_->name) for @both;
logs($paris, qr/WARNING:  the clock of the provider of subscription "$name" is (?:2999|3000) ms ahead of this node's/, $in_paris, 'there is a warning');
logs($paris, qr/the clock of the provider of subscription "$name" was set by/, $in_paris, 'and that it was set');
logs($tokyo, qr/WARNING:  the clock of the provider of subscription "$back" is (?:2999|3000) ms behind this node's/, $in_tokyo, 'at the other end, too');
# While there is something to do.
my $script = $paris->basedir . '/insert.sql';
sql($tokyo, 'create sequence number');
append_to_file($script, "insert into item values (1000 + nextval('number'), 'busy');\n");
$first = sql($paris, 'select clock_measured_at from braid.subscription_detail');
# Tests that the shown difference is right at every check until a condition is true, or for some
# seconds.
sub holds_until
{
	my ($ahead, $done, $seconds, $why) = @_;
	my @wrong;
	my $is_done = wait_until(sub {
		push @wrong, sql($paris, "select * from braid.clock_skew where not abs(extract(epoch from ahead) - ($ahead)) <= extract(epoch from error)");
		return sql($paris, $done) eq 't';
	}, $seconds);
	is(join("\n", grep { $_ ne '' } @wrong), '', "$why: it holds");
	return $is_done;
}
my $bench = start_pgbench($tokyo, '-T', 13, '-c', 2, '-f', $script);
ok(holds_until(3, "select clock_measured_at > '$first' from braid.subscription_detail", 30, 'under load'), 'it is measured there');
finish_pgbench($bench);
caught_up($paris, $tokyo);
# Answers lie behind data that is not read yet.
sql($paris, "select braid.set_rate_limit('$name', 100)");
$first = sql($paris, 'select clock_measured_at from braid.subscription_detail');
sql($tokyo, q[do $$ begin for i in 1 .. 1200 loop insert into item values (1000 + nextval('number'), 'slow'); commit; end loop; end $$]);
ok(holds_until(3, "select clock_measured_at > '$first' from braid.subscription_detail", 60, 'behind data'), 'it is measured there, too');
sql($paris, "select braid.set_rate_limit('$name')");
converged(@both);
is(count_lines($paris, qr/ms ahead of this node's/, $in_paris), 1, 'there is one warning, not one for each time');
# A new leader asks before it streams, and has nothing new to report.
sql($paris, "select braid.disable_subscription('$name')");
$clock->set(5);
sql($paris, "select braid.enable_subscription('$name')");
measures($paris, 5, 'a new leader measures at once');
$clock->set(0);
measures($_, 0, 'set right: ' . $_->name) for @both;
wait_for_state($_, 'ok', 'fine again, says ' . $_->name) for @both;
logs($paris, qr/the clock of the provider of subscription "$name" agrees with this node's again/, $in_paris, 'and the log');
is(count_lines($paris, qr/WARNING:  the clock of/, $in_paris), 1, 'without another warning');

# Past a limit, with a warning only.
set('clock_skew_warning', 0);
set('clock_skew_limit', q['1s']);
$in_paris = here($paris);
$clock->set(4);
sql($tokyo, q[insert into item values (1, 'warning'); insert into item values (2, 'warning')]);
caught_up($paris, $tokyo);
is(sql($paris, 'select count(*) from item where id <= 2'), '2', 'what is ahead of this clock is applied');
is(count_lines($paris, qr/WARNING:  a transaction of node "tokyo" was committed \d+ ms ahead of this node's clock/, $in_paris), 1, 'with a warning');

# Held back until its time has come.
set('clock_skew_action', 'pause');
set('clock_skew_limit', q['1h']);
$clock->set(2 * 3600);
sql($tokyo, q[insert into item values (3, 'pause')]);
sub paused
{
	my ($node, $why) = @_;
	my $status;
	ok(wait_until(sub { ($status = status($paris, $name))->{state} eq 'paused' }, 20), "$why: paused") or diag(explain($status));
	like($status->{last_error}, qr/a transaction of node "$node" was committed \d+ ms ahead of this node's clock/, "$why: the status says why");
	like($status->{error_hint}, qr/Synchronize the clocks of all nodes/, "$why: and what to do");
	return;
}
paused('tokyo', 'a limit');
is(sql($paris, 'select count(*) from item where id = 3'), '0', 'nothing is applied');
$clock_here->set(3000);
my $logged = here($paris);
sleep 0.5;
is(status($paris, $name)->{state}, 'paused', 'nor is anything when less time is left, and more than the limit');
is(sql($paris, 'select count(*) from item where id = 3'), '0', 'nothing at all');
unlike(slurp_file($paris->logfile, $logged), qr/goes on/, 'the leader waits');
$clock_here->set(5400);
logs($paris, qr/subscription "$name" goes on/, $logged, 'it goes on within the limit');
ok($paris->poll_query_until('postgres', q[select exists (select from item where id = 3)]), 'the row comes');
is(sql($paris, q[select pg_xact_commit_timestamp(xmin) - clock_timestamp() between '0' and '30 min' from item where id = 3]), 't', 'before its time has come');
# A change upon it has to wait for the row's time.
my $exceeded = sql($paris, 'select exceeded from braid.clock_status');
$clock_here->set(2 * 3600 - 2);
sql($paris, q[update item set v = 'paris' where id = 3]);
converged(@both);
is(join(' ', map { sql($_, 'select v from item where id = 3') } @both), 'paris paris', 'what is written upon it is newer, everywhere');
is(sql($paris, 'select exceeded from braid.clock_status'), $exceeded, 'since no commit has to wait for longer than it may');
my $status;
ok(wait_until(sub { ($status = status($paris, $name))->{state} eq 'streaming' }, 20), 'it streams again');
is("$status->{last_error}$status->{error_hint}", '', 'without an error of the past');
$clock_here->set(2 * 3600);

# Time at which another node has committed, which is the one that counts.
sub shop
{
	my ($position, $ahead, $id) = @_;
	sql($tokyo, qq[select braid.ingest(jsonb_build_object('operation', 'insert', 'transaction', jsonb_build_object('lsn', '0/$position',
			'commit_time', to_char((clock_timestamp() + '$ahead') at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')),
		'schema', jsonb_build_object('namespace', 'public', 'table', 'item', 'columns',
			'[{"name": "id", "type": "int4", "identity": true}, {"name": "v", "type": "text"}]'::jsonb),
		'after', jsonb_build_object('id', $id, 'v', 'shop')), 'shop')]);
	return;
}
shop(1, '0 s', 7);
caught_up($paris, $tokyo);
shop(2, '2 h', 4);
paused('shop', 'a node behind the provider');
$_->set(4 * 3600) for $clock, $clock_here;
caught_up($paris, $tokyo);
is(sql($paris, 'select v from item where id = 4'), 'shop', 'it comes, too');

# Hours ahead, a restart, and a clock that is set right: what is in WAL has the time that it has.
$clock->set(7 * 3600);
sql($tokyo, q[insert into item values (5, 'hours')]);
paused('tokyo', 'hours');
$clock->set(4 * 3600);
$clock_here->over(sub { $paris->restart });
paused('tokyo', 'after a restart');
sql($tokyo, q[insert into item values (6, 'right')]);
is(sql($tokyo, q[select count(*) from pg_stat_replication where application_name = 'paris_from_tokyo' and state = 'streaming']), '1', 'the provider keeps its connection');
is(sql($paris, 'select count(*) from item where id in (5, 6)'), '0', 'nothing overtakes it');
set('clock_skew_limit', 0);
caught_up($paris, $tokyo);
is(sql($paris, 'select string_agg(v, $$ $$ order by id) from item where id in (5, 6)'), 'hours right', 'without the limit all comes at once, and nothing is lost');
converged(@both);
same_tables(\@both, 'item');

done_testing();
