# Each process of a subscription keeps its replication origin, even if the subscription has taken
# over origins of a dropped one. If an origin can't be had, the error leaves no lock behind: the
# server checkpoints, and the subscription goes on by itself.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep);

my $tokyo = new_node('tokyo', publication => '');
my $paris = new_node('paris', publication => '');
on_all('create table one (id int primary key); create table two (id int primary key)', $tokyo, $paris);
$tokyo->safe_psql('postgres', 'create publication one for table one; create publication two for table two');

# The server works: a checkpoint ends, and positions can be read.
sub is_whole
{
	my ($when) = @_;
	my ($out, $timed_out);
	my $status = eval { $paris->psql('postgres', 'checkpoint; select count(*) > 0 from pg_replication_origin_status', stdout => \$out, timeout => 30, timed_out => \$timed_out) };
	ok(!$timed_out && defined $status && $status == 0 && $out eq 't', "$when: a checkpoint comes back, positions can be read");
	BAIL_OUT_of_whole() if $timed_out;
	return;
}

sub BAIL_OUT_of_whole
{
	$_->stop('immediate') for $paris, $tokyo;
	done_testing();
	exit 1;
}

my $places = q[select string_agg(place || ':' || number, ' ' order by place) from braid.origin join braid.subscription s using (subscription_id) where s.subscription_name = 'younger'];
subscribe($paris, $tokyo, name => 'older', publications => q['{one}']);
my $younger = subscribe($paris, $tokyo, name => 'younger', publications => q['{two}']);
my $row = 0;
sub row_arrives
{
	my ($when) = @_;
	$row++;
	$tokyo->safe_psql('postgres', "insert into two values ($row)");
	ok(wait_until(sub { my ($status, $out) = attempt($paris, "select count(*) from two where id = $row"); $status == 0 && $out eq '1' }, 60), "$when: a row arrives");
	return;
}
row_arrives('two subscriptions');
my $before = $paris->safe_psql('postgres', $places);
$paris->safe_psql('postgres', q[select braid.drop_subscription('older')]);
ok($paris->poll_query_until('postgres', q[select count(*) = 0 from braid.slot_cleanup]), 'the older one is gone');
my $by_leader = q[select applied_by_leader from braid.dependency_stats where subscription = 'younger'];
my $had = $paris->safe_psql('postgres', $by_leader);
for my $try (1 .. 40)
{
	row_arrives('the older one dropped');
	sleep 0.1;
	last if $paris->safe_psql('postgres', $by_leader) > $had;
}
cmp_ok($paris->safe_psql('postgres', $by_leader), '>', $had, 'the leader has applied one itself');
is_whole('the leader has applied');
my $after = $paris->safe_psql('postgres', $places);
is(substr($after, 0, length $before), $before, 'an origin that a process had is still its own') or diag $after;
is($paris->safe_psql('postgres', q[select count(*) - count(distinct (subscription_id, node_name, place)) from braid.origin where subscription_id is not null]), 0, 'no two have one place');

# A new subscription adopts the origins that are left, and both go on.
subscribe($paris, $tokyo, name => 'third', publications => q['{one}']);
row_arrives('a third one');
is_whole('a third one');
$paris->safe_psql('postgres', q[select braid.drop_subscription('third')]);

# Sessions hold all origins of the subscription: its processes fail, and hold nothing.
$paris->safe_psql('postgres', q[select braid.disable_subscription('younger')]);
ok($paris->poll_query_until('postgres', q[select count(*) = 0 from pg_stat_activity where backend_type in ('braid leader', 'braid applier')]), 'it has stopped');
my @names = split /\n/, $paris->safe_psql('postgres', q[select roname from pg_replication_origin where roname like 'braid/%' order by 1]);
my @holders = map {
	my $session = $paris->background_psql('postgres', on_error_stop => 1);
	$session->query_safe("select pg_replication_origin_session_setup('$_')");
	$session;
} @names;
$row++;
$tokyo->safe_psql('postgres', "insert into two values ($row)");
$paris->safe_psql('postgres', q[select braid.enable_subscription('younger')]);
ok($paris->poll_query_until('postgres', q[select count(*) > 0 from braid.subscription_status where name = 'younger' and last_error like '%origin%']), 'it says that its origin is held');
is_whole('origins are held');
$_->quit for @holders;
row_arrives('origins are let go of');
is(digest($paris, 'two'), digest($tokyo, 'two'), 'nothing is missing');
is_whole('at the end');

done_testing();
