# Nodes join while a member is away that has changes which nobody else has. They join without it,
# take part in everything, and get its changes once it is back. If it never comes back, it is
# removed as usual.

use strict;
use warnings;

use Braid;
use Group;
use PostgreSQL::Test::Utils;
use Test::More;

my ($tokyo, $paris, $lima) = group([qw(tokyo paris lima)], q{create table item (id int primary key, v text); insert into item select i, 'old' from generate_series(1, 100) i});

# Runs code while paris is down. The last changes of paris are only at paris then.
sub alone
{
	my ($writes, @deaf) = @_;
	my %name = map { $_->name => sql($_, q{select name from braid.subscription_status where provider = 'paris'}) } @deaf;
	for my $node (@deaf)
	{
		sql($node, "select braid.disable_subscription('" . $name{ $node->name } . "')");
		ok($node->poll_query_until('postgres', "select not exists (select from pg_stat_activity where backend_type = 'braid leader' and application_name = '" . $name{ $node->name } . "') and (select state = 'disabled' from braid.subscription_status where provider = 'paris')"), $node->name . ' does not hear of paris');
	}
	$writes->();
	$paris->stop('immediate');
	sql($_, "select braid.enable_subscription('" . $name{ $_->name } . "')") for @deaf;
	return;
}
sub joins_without
{
	my ($node, $member) = @_;
	join_group($node, $member);
	ok($node->poll_query_until('postgres', q{select count(*) > 0 and count(*) = count(*) filter (where state = 'done') from braid.join_progress}), $node->name . ' has joined without paris')
	  or diag(sql($node, 'table braid.join_progress'));
	like(sql($node, q{select message from braid.group_nodes where name = 'paris'}), qr/^was away when this node joined, which follows it once it is back($|; )/, 'which is shown');
	return;
}
sub server { my ($name) = @_; my $node = new_server($name, init => ['--data-checksums']); sql($node, 'create extension braid'); return $node; }
my $holds = q{select string_agg(m.node_name || ' for ' || f.node_name, ', ' order by f.node_name) from braid.group_hold h join braid.group_member m using (member_id) join braid.group_member f on f.member_id = h.for_id};

alone(sub {
	sql($paris, q{update item set v = 'unseen' where id <= 20 or id between 81 and 90});
	sql($paris, q{insert into item select i, 'unseen' from generate_series(201, 260) i});
	sql($paris, q{delete from item where id between 91 and 95});
	sql($paris, q{create table late (id int primary key, v text); insert into late values (1, 'paris')});
}, $tokyo, $lima);
# Later than what paris has written, and it must win wherever that comes late.
sql($tokyo, q{update item set v = 'tokyo' where id between 11 and 20});
sql($tokyo, q{delete from item where id between 81 and 90});
sql($tokyo, q{insert into item select i, 'tokyo' from generate_series(301, 310) i});
sql($lima, q{update item set v = 'lima' where id between 31 and 35});

my $oslo = server('oslo');
joins_without($oslo, $tokyo);
is(sql($tokyo, $holds), 'paris for oslo', 'tokyo holds back what oslo needs');
like(refusal($oslo, q{select braid.wait_for_group('1 s')}), qr/Node "paris" cannot be reached from here/, 'waiting for the group says who is missing');
sql($oslo, q{update item set v = 'oslo' where id between 41 and 45});
$tokyo->restart;
# Not from one that joined in the same way: it knows what was deleted by its own copy only.
my $rome = server('rome');
join_group($rome, $oslo);
ok($rome->poll_query_until('postgres', q{select count(*) > 0 from braid.join_progress where step = 5 and last_error ~ 'itself has joined while node "paris" was away' and last_hint ~ 'abort_join'}), 'the join says from whom it can not copy')
  or diag(sql($rome, 'table braid.join_progress'));
sql($rome, 'select braid.abort_join()');
is(sql($oslo, $holds), '', 'nothing is held back for it');
sql($rome, 'drop extension braid; drop table item; create extension braid');
joins_without($rome, $tokyo);
is(sql($tokyo, $holds), 'paris for oslo, paris for rome', 'tokyo holds back for both');
sql($rome, q{update item set v = 'rome' where id between 46 and 50});
have_all($tokyo, $lima, $oslo, $rome);
sql($tokyo, q{alter table item add column note text});
have_all($tokyo, $lima, $oslo, $rome);
is(sql($rome, q{select count(*) from information_schema.columns where table_name = 'item'}), '3', 'statements come through');
$oslo->restart;
same_tables([ $tokyo, $lima, $oslo, $rome ], 'item');

$paris->start;
my @all = ($tokyo, $lima, $oslo, $rome, $paris);
joined(@all);
Test::More->builder->is_passing or Braid::BAIL_OUT_of_test('paris was not met');
have_all(@all) for 1 .. 2;
same_tables(\@all, 'item', 'late');
my $counts = q{select string_agg(v || ' ' || count, ', ' order by v collate "C") from (select v, count(*) from item group by v) x};
is(sql($_, $counts), 'lima 5, old 50, oslo 5, rome 5, tokyo 20, unseen 70', 'each row is the newest one: ' . $_->name) for @all;
for my $node (@all)
{
	ok($node->poll_query_until('postgres', q{select not exists (select from braid.group_hold) and not exists (select from braid.group_member where held_by is not null or held_slot is not null)}), 'nothing is held back any more: ' . $node->name);
	is(sql($node, q{select count(*) from pg_replication_slots where plugin = 'braid' and slot_name !~ '^braid_(deletions|kept)'}), '4', 'no slot is left over, none is missing: ' . $node->name);
}
my $position = sql($paris, 'select braid.sync_event()');
ok($paris->poll_query_until('postgres', "select min(confirmed_flush_lsn) >= '$position' from pg_replication_slots where plugin = 'braid' and slot_name !~ '^braid_(deletions|kept)'"), 'all confirm to paris what they have');
sql($_, 'insert into item (id, v) values (' . (10000 + $_->port) . q{, 'last')}) for @all;
have_all(@all);
same_tables(\@all, 'item');
is(sql($_, q{select count(*) from item where v = 'last'}), '5', 'all directions stream: ' . $_->name) for @all;

# A member dies for good, and one of the others has its last transactions.
keeps($_, 4) for $tokyo, $lima, $oslo, $rome;
alone(sub {
	sql($paris, q{insert into item (id, v) select i, 'only lima' from generate_series(401, 410) i});
	$lima->poll_query_until('postgres', q{select count(*) = 10 from item where v = 'only lima'});
}, $tokyo, $oslo, $rome);
my $milan = server('milan');
joins_without($milan, $tokyo);
sql($tokyo, q{select braid.remove_node('paris', recover => true)});
@all = ($tokyo, $lima, $oslo, $rome, $milan);
joined(@all);
for my $node (@all)
{
	ok($node->poll_query_until('postgres', "select state = 'done' from braid.recovery where removed = 'paris' and node = '" . $node->name . "'"), 'recovered: ' . $node->name)
	  or diag(sql($node, 'table braid.recovery'));
}
have_all(@all);
same_tables(\@all, 'item', 'late');
is(sql($_, q{select count(*) from item where v = 'only lima'}), '10', 'what one of them had is at all: ' . $_->name) for @all;
for my $node (@all)
{
	ok($node->poll_query_until('postgres', q{select not exists (select from braid.group_hold) and not exists (select from braid.subscription where provider_name = 'paris')}), 'nothing of paris is left: ' . $node->name);
}
done_testing();
