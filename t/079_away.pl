# A provider that stays away for longer than a limit is given up: its subscription stops, and then
# the records that were kept for it are removed. A person has to decide what follows. Without a
# limit, and while the provider is connected, the records are kept.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my @both = my ($tokyo, $paris) = map { new_node($_) } qw(tokyo paris);
sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
sub limit { my ($limit) = @_; sql($tokyo, "alter system set braid.peer_away_limit = '$limit'"); return; }
on_all('create table item (id int primary key, v text)', @both);
my $name = subscribe($tokyo, $paris, copy_data => 'false');
subscribe($paris, $tokyo, copy_data => 'false');
sql($tokyo, q[insert into item select i, 'old' from generate_series(1, 10) i]);
converged(@both);
ok($tokyo->poll_query_until('postgres', "select caught_up_at is not null from braid.subscription"), 'how far a provider was heard is noted');
my $state = "select state from braid.subscription_status where name = '$name'";
# One that was made long ago. Managers look when they start.
sql($tokyo, q[insert into braid.tombstone values (4711, extract(epoch from now() - interval '3 h') * 1000000, 'item'::regclass, 0)]);
my $deletions = q[select count(*) from braid.tombstone where key_hash = 4711];

# Paris writes a row that tokyo deletes, and goes away before it has sent that.
disable($tokyo, $name);
sql($paris, q[update item set v = 'paris' where id = 1]);
sql($tokyo, q[select pg_sleep(0.1); delete from item where id = 1]);
caught_up($paris, $tokyo);
$paris->stop;
ok($tokyo->poll_query_until('postgres', 'select count(*) = 2 from braid.tombstone'), 'what is deleted is remembered');

# No limit.
sql($tokyo, q[update braid.subscription set connected_at = now() - interval '1 year', caught_up_at = now() - interval '1 year']);
$tokyo->restart;
ok($tokyo->poll_query_until('postgres', q[select count(*) > 0 from pg_stat_activity where backend_type = 'braid manager']), 'the manager is there');
sleep 2;
is(sql($tokyo, $state) . ' ' . sql($tokyo, $deletions), 'disabled 1', 'without a limit that is kept for as long as it takes');

# One that is not reached, and one that is; whether the subscription is enabled makes no difference.
limit('700 d');
$tokyo->restart;
sleep 2;
is(sql($tokyo, $state) . ' ' . sql($tokyo, $deletions), 'disabled 1', 'within the limit, too');
limit('2 s');
my $before = -s $tokyo->logfile;
$tokyo->restart;
ok($tokyo->poll_query_until('postgres', "select state = 'error' from braid.subscription_status where name = '$name'"), 'beyond it the provider is given up') or diag(sql($tokyo, $state));
like(sql($tokyo, 'select last_error from braid.subscription_status'), qr/^provider "paris" was away for longer than braid.peer_away_limit: what was deleted here since \d{4}-.* is no longer remembered/, 'the view says so');
like(sql($tokyo, 'select error_hint from braid.subscription_status'), qr/Drop the subscription, create it again with copy_data => false, and copy its tables with braid.resync_table; or .* after_away => true/, 'and what to do');
like(slurp_file($tokyo->logfile, $before), qr/WARNING:  provider "paris" of subscription "$name" was away for longer/, 'and the log');
$tokyo->restart;
ok($tokyo->poll_query_until('postgres', "select ($deletions) = 0"), 'what was deleted is forgotten then');

# Paris comes back. The subscription does not go on without the user.
$paris->start;
is((attempt_error("select braid.enable_subscription('$name')"))[0] =~ /provider "paris" of subscription "$name" was away for longer.*HINT:.*after_away => true/s, 1, 'it does not go on by itself');
is(sql($tokyo, $state), 'error', 'it stays stopped');
is(sql($tokyo, 'select count(*) from item where id = 1'), '0', 'the row stays deleted');
sql($tokyo, "select braid.enable_subscription('$name', after_away => true)");
sql($tokyo, "select braid.wait_for_subscription('$name')");
sql($paris, q[update item set v = 'later' where id = 2]);
converged(@both);
is(sql($tokyo, 'select v from item where id = 2'), 'later', 'it goes on when it is told to');
is(sql($tokyo, 'select given_up_at is null and connected_at > now() - interval \'1 min\' from braid.subscription'), 't', 'and counts as back');

# While it is connected it is no matter how far behind it is.
sql($tokyo, q[update braid.subscription set connected_at = now() - interval '1 year', caught_up_at = now() - interval '1 year']);
$tokyo->restart;
sql($tokyo, "select braid.wait_for_subscription('$name')");
sleep 4;
is(sql($tokyo, $state), 'streaming', 'a server that was away itself waits for providers to be reached');
is(sql($tokyo, 'select given_up_at is null from braid.subscription'), 't', 'and gives up nobody who is');

done_testing();

sub attempt_error
{
	my ($sql) = @_;
	my ($status, $out, $err) = $tokyo->psql('postgres', $sql);
	return ($err, $status);
}
