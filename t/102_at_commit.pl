# Creating, altering and dropping a subscription takes effect at the commit, not before, and not
# after a rollback.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep);

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
on_all('create table item (k int primary key, v text)', $tokyo, $paris);
$tokyo->safe_psql('postgres', q[insert into item values (1, 'copied')]);
sub at_paris { return $paris->safe_psql('postgres', $_[0]); }
sub slots { return $tokyo->safe_psql('postgres', 'select count(*) from pg_replication_slots where slot_name not like $$braid_deletions%$$'); }
sub workers { return at_paris(q[select count(*) from pg_stat_activity where backend_type in ('braid leader', 'braid applier', 'braid copy')]); }
my $row = 1;
# Whether what is written at tokyo comes here within a few seconds.
sub comes
{
	my ($seconds) = @_;
	$row++;
	$tokyo->safe_psql('postgres', "insert into item values ($row, 'streamed')");
	return wait_until(sub { at_paris("select count(*) from item where k = $row") eq '1' }, $seconds);
}
my $session = $paris->background_psql('postgres');
$session->query_safe('set client_min_messages = error');
# Long enough for the manager to look at the catalog, which it does when it is woken, and once in a
# while.
sub a_moment { sleep 2; return; }

my $create = q[select braid.create_subscription('s', $dsn$] . $tokyo->connstr('postgres') . q[$dsn$)];
$session->query_safe("begin; $create");
a_moment();
is(slots() . ' ' . workers(), '0 0', 'before the commit there are no slot and no worker');
is(at_paris('select count(*) from braid.subscription_status'), 0, 'and nothing to see');
$session->query_safe('rollback');
a_moment();
is(slots() . ' ' . workers(), '0 0', 'after a rollback neither');
$session->query_safe("begin; $create; commit");
at_paris(q[select braid.wait_for_subscription('s')]);
is(slots(), 1, 'after a commit there is a slot');
is(at_paris('select string_agg(v, $$,$$) from item'), 'copied', 'and the copy');
ok(comes(20), 'and the stream');

$session->query_safe(q[begin; select braid.disable_subscription('s')]);
ok(comes(10), 'it goes on until the command that disables it is committed');
$session->query_safe('commit');
ok(wait_until(sub { workers() eq '0' }, 10), 'then it stops');
$session->query_safe(q[begin; select braid.enable_subscription('s')]);
ok(!comes(2), 'and does not start before the command that enables it is committed');
$session->query_safe('commit');
ok(wait_until(sub { at_paris('select max(k) from item') eq $row }, 20), 'then it does');

# A leader with another mode is another process. How many appliers it has follows its load.
my $leader = sub { at_paris(q[select pid from pg_stat_activity where backend_type = 'braid leader']) };
my $appliers = sub { at_paris(q[select count(*) from pg_stat_activity where backend_type = 'braid applier']) };
my $before = $leader->();
like($before, qr/^\d+$/, 'it has one leader');
$session->query_safe(q[begin; select braid.alter_subscription('s', apply_mode => 'serial')]);
a_moment();
is($leader->(), $before, 'which stays until the change of its mode is committed');
$session->query_safe('rollback');
a_moment();
is($leader->(), $before, 'and when it is not');
$session->query_safe(q[begin; select braid.alter_subscription('s', apply_mode => 'serial'); commit]);
ok(wait_until(sub { my $now = $leader->(); $now ne '' && $now ne $before && $appliers->() eq '1' }, 20), 'a serial one has another leader, and one applier');
ok(comes(20), 'with which it goes on');

$session->query_safe(q[begin; select braid.drop_subscription('s')]);
ok(comes(10), 'it goes on until the command that drops it is committed');
is(slots(), 1, 'and has its slot');
$session->query_safe('rollback');
ok(comes(10), 'and after a rollback');
$session->query_safe(q[begin; select braid.drop_subscription('s'); commit]);
ok(wait_until(sub { slots() eq '0' && workers() eq '0' }, 20), 'then its workers and its slot are gone');
ok(!comes(1), 'and nothing comes any more');
$session->quit;

done_testing();
