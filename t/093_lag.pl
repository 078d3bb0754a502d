# lag_time: how old the local rows may be. It is not the age of the last transaction, which may be
# from last night, and not 0 while the provider is out of reach. Also: which transaction an applier
# is applying.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep time);

my $tokyo = new_node('tokyo');
# Hears of an idle provider once a second.
my $paris = new_node('paris', publication => '', conf => "wal_receiver_timeout = '2s'\n");
on_all('create table item (id int primary key, v text)', $tokyo, $paris);
my $name = subscribe($paris, $tokyo);
$tokyo->safe_psql('postgres', q[insert into item values (0, 'before')]);
caught_up($paris, $tokyo);
my $last = time;

sub lag { return $paris->safe_psql('postgres', "select extract(epoch from lag_time) from braid.subscription_status where name = '$name'"); }
sub heard { return $paris->safe_psql('postgres', 'select extract(epoch from clock_timestamp() - caught_up_at) from braid.subscription_detail'); }

# A quiet night.
my $quiet = 8;
sleep $quiet;
ok(wait_until(sub { lag() eq '0.000000' }, 10), 'nothing is left to apply: no lag') or diag lag();
ok(wait_until(sub { my $age = heard(); $age < $quiet / 2 }, 10), 'the provider is heard while nothing happens') or diag heard();

# A change that has to wait.
my $session = $paris->background_psql('postgres', on_error_die => 1);
$session->query_safe('begin; lock table item');
my $held = time;
my $from = $tokyo->safe_psql('postgres', 'select pg_current_wal_insert_lsn()');
$tokyo->safe_psql('postgres', q[insert into item values (1, 'held up')]);
my $to = $tokyo->safe_psql('postgres', 'select pg_current_wal_insert_lsn()');
ok(wait_until(sub { lag() > 0 }, 10), 'a change waits: there is lag');
my $lag = lag();
my $now = time;
cmp_ok($lag, '<', $now - $held + 3, 'no more than it waits, and a moment') or diag 'the last transaction before: ' . ($now - $last) . ' s ago';
my $before = lag();
sleep 1.5;
cmp_ok(lag() - $before, '>=', 1.4, 'it grows while it waits');
is($paris->safe_psql('postgres', qq[
	select count(*), bool_and(commit_lsn >= '$from' and commit_lsn < '$to'), bool_and(now() - taken_at > interval '1.4 s') from braid.apply_workers where taken_at is not null
]), '1|t|t', 'the applier that waits shows which transaction it has in hand, and for how long');
is($paris->safe_psql('postgres', q[select count(*) from braid.apply_workers where worker <> 'leader' and taken_at is null and commit_lsn is not null]), '0', 'and no other shows one');
$session->query_safe('commit');
$session->quit;
caught_up($paris, $tokyo);
ok(wait_until(sub { lag() eq '0.000000' }, 10), 'and is gone when it has been applied') or diag lag();
is($paris->safe_psql('postgres', 'select count(taken_at) from braid.apply_workers'), '0', 'as is what an applier had in hand');

# A provider that is out of reach, with all of its changes applied here as far as anybody knows.
$tokyo->stop('fast');
ok(wait_until(sub { status($paris, $name)->{state} ne 'streaming' }, 10), 'the provider is away');
my $away = time;
sleep 2;
cmp_ok(lag(), '>', 1.5, 'lag grows while it is');
cmp_ok(lag(), '<', time - $away + 6, 'from when it was last heard');
$paris->safe_psql('postgres', "select braid.disable_subscription('$name')");
$before = lag();
sleep 1;
cmp_ok(lag() - $before, '>=', 0.9, 'of a subscription that is disabled as well');
$tokyo->start;
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
caught_up($paris, $tokyo);
ok(wait_until(sub { lag() eq '0.000000' }, 10), 'none when it is back') or diag lag();

done_testing();
