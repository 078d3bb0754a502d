# Leftovers: the slots of a node that is forgotten, the slot at a provider that is gone, the owner
# of a subscription, tables that are dropped.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo', publication => '');
my $paris = new_node('paris', publication => '');
on_all(q[
	create table kept (k int primary key);
	create table gone (k int primary key);
	create schema apart;
	create table apart.gone_too (k int primary key);
	create table parted (k int primary key) partition by range (k);
	create table parted_1 partition of parted for values from (0) to (10);
	create publication braid for table kept, gone, apart.gone_too, parted with (publish_via_partition_root = true);
], $tokyo, $paris);
$paris->safe_psql('postgres', q[create role keeper superuser; create role other superuser; create role plain]);
my $dsn = $tokyo->connstr('postgres') =~ s/'/''/gr;
$paris->safe_psql('postgres', "set role keeper; select braid.create_subscription('paris_from_tokyo', '$dsn')");
$paris->safe_psql('postgres', q[select braid.wait_for_subscription('paris_from_tokyo')]);
subscribe($tokyo, $paris);

# Tables.
sub tables { return $paris->safe_psql('postgres', q[select string_agg(relation::text, ' ' order by relation::text) from braid.subscription_tables where subscription = 'paris_from_tokyo']); }
is(tables(), 'apart.gone_too gone kept parted', 'the tables of the subscription');
$tokyo->safe_psql('postgres', 'drop table gone; drop schema apart cascade; drop table parted');
$paris->safe_psql('postgres', 'begin; drop table gone; rollback');
$paris->safe_psql('postgres', 'drop table gone; drop schema apart cascade; drop table parted');
ok(wait_until(sub { tables() eq 'kept' }, 30), 'tables that are dropped leave by themselves');
$tokyo->safe_psql('postgres', 'insert into kept values (1)');
$tokyo->wait_for_catchup('paris_from_tokyo');
is($paris->safe_psql('postgres', 'select count(*) from kept'), '1', 'the others go on');

# The owner.
sub owner { return $paris->safe_psql('postgres', q[select owner from braid.subscription_detail where name = 'paris_from_tokyo']); }
sub fails
{
	my ($sql, $error, $what) = @_;
	my (undef, undef, $said) = $paris->psql('postgres', $sql);
	like($said, $error, $what);
	return;
}
fails('drop role keeper', qr/role "keeper" cannot be dropped because some objects depend on it\n.*braid\.subscription/s, 'an owner is not dropped');
fails(q[drop owned by keeper; drop role keeper], qr/role "keeper" cannot be dropped/, 'nor after DROP OWNED');
fails(q[select braid.set_subscription_owner('paris_from_tokyo', 'nobody')], qr/role "nobody" does not exist\n.*HINT/s, 'a role that is not there');
fails(q[select braid.set_subscription_owner('paris_from_tokyo', 'plain')], qr/password is required/, 'one whose connections need a password');
$paris->safe_psql('postgres', q[grant usage on schema braid to plain; grant execute on function braid.set_subscription_owner to plain]);
fails(q[set role plain; select braid.set_subscription_owner('paris_from_tokyo', 'plain')], qr/permission denied to change the owner of subscription/, 'not by anybody');
$paris->safe_psql('postgres', q[begin; select braid.set_subscription_owner('paris_from_tokyo', 'other'); rollback]);
fails('drop role keeper', qr/cannot be dropped/, 'the owner stays when that is rolled back');
$paris->safe_psql('postgres', q[select braid.set_subscription_owner('paris_from_tokyo', 'other')]);
is(owner(), 'other', 'another owner');
$paris->safe_psql('postgres', 'drop role keeper');
fails('drop role other', qr/cannot be dropped/, 'who is not dropped either');
$tokyo->safe_psql('postgres', 'insert into kept values (2)');
$tokyo->wait_for_catchup('paris_from_tokyo');
is($paris->safe_psql('postgres', 'select count(*) from kept'), '2', 'the subscription goes on under it');
# As after pg_upgrade, which does not keep dependencies.
$paris->safe_psql('postgres', q[set allow_system_table_mods = on; delete from pg_shdepend where refobjid = 'other'::regrole and objid = 'braid.subscription'::regclass]);
$paris->restart;
ok($paris->poll_query_until('postgres', q[select count(*) = 1 from pg_shdepend where refobjid = 'other'::regrole and objid = 'braid.subscription'::regclass]), 'the manager restores the dependency');

# A provider that is gone for good.
$tokyo->stop;
$paris->safe_psql('postgres', q[select braid.drop_subscription('paris_from_tokyo')]);
$paris->safe_psql('postgres', 'drop role other');
my $slot = $paris->safe_psql('postgres', 'select slot_name from braid.pending_cleanup');
is($slot, 'braid_paris_paris_from_tokyo', 'a slot is to be dropped');
fails(q[select braid.forget_slot('nothing', 'tokyo')], qr/replication slot "nothing" at node "tokyo" is not to be dropped\n.*HINT:.*pending_cleanup/s, 'another one is not');
fails("select braid.forget_slot('$slot', 'tokyo')", qr/NOTICE:  replication slot "$slot" stays at node "tokyo"\n.*HINT:.*pg_drop_replication_slot\('$slot'\)/s, 'it is given up');
is($paris->safe_psql('postgres', 'select count(*) from braid.pending_cleanup'), '0', 'and not listed any more');

# Slots of tokyo's subscription at this node.
fails(q[select braid.drop_node('tokyo')], qr/WARNING:  slots of node "tokyo" hold back WAL here until they are dropped: "braid_tokyo_tokyo_from_paris" \(\d+ \w+ of WAL\)\n.*HINT:.*pg_drop_replication_slot\('braid_tokyo_tokyo_from_paris'\)/s,
	'who forgets a node hears of its slots');
$paris->safe_psql('postgres', q[select pg_drop_replication_slot('braid_tokyo_tokyo_from_paris')]);
my (undef, undef, $said) = $paris->psql('postgres', q[select braid.drop_node('paris')]);
is($said, '', 'without slots nothing is said');

# The extension itself, made and dropped while its manager looks at its tables: neither waits for
# the other in a circle.
$paris->safe_psql('postgres', 'create database again');
my $errors = '';
for my $round (1 .. 15)
{
	my (undef, undef, $err) = $paris->psql('again', q[
		set client_min_messages = warning;
		create extension braid;
		select braid.create_node('again', 'host=127.0.0.1 dbname=again');
		select pg_sleep(0.02 * (random() * 10)::int);
		drop extension braid;
	]);
	$errors .= $err;
}
is($errors, '', 'it is dropped as often as it is made');
done_testing();
