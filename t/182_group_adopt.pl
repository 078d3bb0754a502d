# Two nodes that were set up by hand become a group: existing subscriptions go on, under their
# names. A third node joins by one call.

use strict;
use warnings;

use Braid;
use Test::More;

sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
sub refusal { my ($node, $sql) = @_; my ($status, $out, $err) = $node->psql('postgres', $sql); return $status == 0 ? "no error: $out" : $err; }
sub joined
{
	my (@all) = @_;
	for my $node (@all)
	{
		my ($status, $out, $err) = $node->psql('postgres', "select braid.wait_for_group('180 s')");
		is($err, '', $node->name . ' is in the group') or diag(sql($node, 'table braid.join_progress') . "\n" . sql($node, 'table braid.group_nodes'));
	}
	return;
}
my $slots = q{select string_agg(slot_name, ', ' order by slot_name) from pg_replication_slots where slot_name !~ '^braid_deletions'};

my ($tokyo, $paris) = map { new_node($_, init => ['--data-checksums']) } 'tokyo', 'paris';
on_all('create table item (id int primary key, v text)', $tokyo, $paris);
sql($tokyo, q{insert into item select i, 'first' from generate_series(1, 100) i});
subscribe($paris, $tokyo, name => 'all_of_tokyo');
subscribe($tokyo, $paris, name => 'all_of_paris', copy_data => 'false');
my %before = map { $_->name => sql($_, $slots) } $tokyo, $paris;

is(sql($_, q{select string_agg(distinct backend_type, ', ' order by backend_type) from pg_stat_activity where backend_type ~ '^braid' and backend_type !~ '^braid applier'}),
	'braid collector, braid leader, braid manager, braid supervisor', 'without a group no process works for one: ' . $_->name) for $tokyo, $paris;
like(refusal($tokyo, q{select braid.create_group('shop')}), qr/has subscriptions already.*all_of_paris.*adopt => true/s, 'subscriptions are not taken over unasked');
sql($tokyo, q{select braid.create_group('shop', adopt => true)});
my $there = $tokyo->connstr('postgres');
sql($paris, "select braid.join_group(\$d\$$there\$d\$, mode => 'adopt')");
joined($paris, $tokyo);
is(sql($_, $slots), $before{ $_->name }, 'no slot has come at ' . $_->name) for $tokyo, $paris;
is(sql($tokyo, 'select string_agg(subscription, $$ $$) from braid.group_nodes'), 'all_of_paris', 'the subscription of before is the group\'s');
is(sql($paris, 'select string_agg(subscription, $$ $$) from braid.group_nodes'), 'all_of_tokyo', 'there too');
like(refusal($tokyo, q{select braid.drop_subscription('all_of_paris')}), qr/belongs to group "shop".*node "paris".*braid.leave_group/s, 'a subscription of the group can not be dropped');
like(refusal($tokyo, q{select braid.drop_node('tokyo')}), qr/HINT/, 'nor the node');

my $oslo = new_server('oslo', init => ['--data-checksums']);
my $here = $oslo->connstr('postgres');
sql($oslo, 'create extension braid');
sql($oslo, "select braid.join_group(\$d\$$there\$d\$, node_name => 'oslo', dsn => \$d\$$here\$d\$)");
my @all = ($tokyo, $paris, $oslo);
joined(@all);
sql($_, q{insert into item values (1000 + } . $_->port . q{, 'last')}) for @all;
for my $node (@all)
{
	for my $other (grep { $_ != $node } @all)
	{
		my $position = sql($other, 'select braid.sync_event()');
		sql($node, "select braid.wait_for_event('" . $other->name . "', '$position', '180 s')");
	}
}
same_tables(\@all, 'item');
is(sql($oslo, 'select count(*) from item'), '103', 'all of it');

# A member that is removed leaves no slot, whatever name that was given by hand.
ok($tokyo->poll_query_until('postgres', q{select slot_name = 'braid_paris_all_of_tokyo' from braid.group_member where node_name = 'paris'}), 'tokyo knows which slot paris reads');
$paris->stop('immediate');
ok($tokyo->poll_query_until('postgres', q{select not reachable from braid.group_nodes where name = 'paris'}), 'paris is away');
sql($tokyo, q{select braid.remove_node('paris')});
for my $node ($tokyo, $oslo)
{
	ok($node->poll_query_until('postgres', q{select count(*) = 0 from pg_replication_slots where slot_name ~ '^braid_paris'}), 'no slot of paris stays at ' . $node->name)
	  or diag(sql($node, 'select slot_name, active from pg_replication_slots'));
	ok($node->poll_query_until('postgres', q{select count(*) = 1 from braid.subscription}), 'nor a subscription to it');
}

done_testing();
