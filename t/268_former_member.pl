# A removed member forgets its group and keeps its subscriptions, disabled. A new member with its
# name has slots of the same names at the others: the former member does not read them, and does not
# drop them with its old subscriptions.

use strict;
use warnings;

use Braid;
use Group;
use Test::More;

my ($tokyo, $paris, $oslo) = group([qw(tokyo paris oslo)], 'create table item (id int primary key, v text); insert into item select i, $$tokyo$$ from generate_series(1, 100) i');
# The removed member is still running, and reads its slots.
sql($tokyo, q[select braid.remove_node('oslo')]);
ok($oslo->poll_query_until('postgres', q[select state = 'stopped' from braid.group_nodes where is_local]), 'oslo hears that it was removed');
my ($status, $out, $notice) = $oslo->psql('postgres', 'select braid.forget_group()');
like($notice, qr/NOTICE:  subscriptions to former fellow members are disabled: (oslo_from_tokyo, oslo_from_paris|oslo_from_paris, oslo_from_tokyo); drop them/, 'what becomes of its subscriptions');
is(sql($oslo, q[select string_agg(subscription_name || ' ' || enabled::text, ', ' order by subscription_name) from braid.subscription]), 'oslo_from_paris false, oslo_from_tokyo false', 'they are disabled');
like(refusal($oslo, q[select braid.enable_subscription('oslo_from_tokyo')]), qr/^psql.*ERROR:  subscription "oslo_from_tokyo" is one of a group that this node has forgotten\n.*HINT:  Drop it/s, 'for good');
is(sql($oslo, q[select string_agg(remedy, ' ' order by subject) from braid.check() where code = 'subscription_disabled']), "select braid.drop_subscription('oslo_from_paris'); select braid.drop_subscription('oslo_from_tokyo');", 'and braid.check says what to do');
# With them it does not join.
my ($there, $here, $anew) = ($tokyo->connstr('postgres'), $oslo->connstr('postgres'), $oslo->connstr('anew'));
like(refusal($oslo, "select braid.join_group(\$d\$$there\$d\$, dsn => \$d\$$here\$d\$, mode => 'adopt')"), qr/ERROR:  this node has subscriptions to members of the group\n.*DETAIL:  Subscriptions: oslo_from_paris, oslo_from_tokyo\.\n.*HINT:  Drop those of a former membership/s, 'they are not taken for those of another membership');
is(sql($oslo, 'select count(*) from braid.group_self'), '0', 'which has not begun');

# Another database of the server joins under the former name.
sql($oslo, 'create database anew');
$oslo->safe_psql('anew', 'create extension braid');
$oslo->safe_psql('anew', "select braid.join_group(\$d\$$there\$d\$, node_name => 'oslo', dsn => \$d\$$anew\$d\$)");
$oslo->safe_psql('anew', q[select braid.wait_for_group('150 s')]);
sub at_new { my ($sql) = @_; return $oslo->safe_psql('anew', $sql); }
sub arrives
{
	my ($id) = @_;
	sql($tokyo, "insert into item values ($id, 'tokyo')");
	sql($paris, "insert into item values ($id + 1, 'paris')");
	for my $node ($tokyo, $paris)
	{
		my $position = sql($node, 'select braid.sync_event()');
		at_new("select braid.wait_for_event('" . $node->name . "', '$position', '100 s')");
	}
	is(at_new("select count(*) from item where id in ($id, $id + 1)"), '2', 'the new member has what the others write');
	is(sql($oslo, "select count(*) from item where id in ($id, $id + 1)"), '0', 'and the former one has not');
	return;
}
arrives(1001);
# Dropping the old subscriptions leaves the new member's slots alone, even while they are not in
# use.
at_new('select braid.disable_subscription(name) from braid.subscription_status');
my $slots = q[select count(*) from pg_replication_slots where plugin = 'braid' and slot_name like '%oslo%'];
for my $node ($tokyo, $paris)
{
	ok($node->poll_query_until('postgres', q[select not exists (select from pg_replication_slots where slot_name like '%oslo%' and active)]), 'nobody reads the slots at ' . $node->name);
}
sql($oslo, 'select braid.drop_subscription(name) from braid.subscription_status');
ok($oslo->poll_query_until('postgres', 'select not exists (select from braid.pending_cleanup)'), 'nothing is left to be dropped');
is(sql($_, $slots), '1', 'the slot stays: ' . $_->name) for $tokyo, $paris;
at_new('select braid.enable_subscription(name) from braid.subscription_status');
arrives(2001);

done_testing();
