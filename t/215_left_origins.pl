# Dropped databases, nodes that are taken down and a dropped extension leave no replication origin
# and no file: databases can be created, joined and dropped any number of times. Origins in use
# stay, and rows of a former node do not count for another one.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo', conf => "max_replication_slots = 40\nmax_wal_senders = 40\n");
my $few = $tokyo->pg_version < 18 ? 'max_replication_slots' : 'max_active_replication_origins';
my $paris = new_server('paris', conf => "$few = 12\nbraid.appliers_per_subscription = 2\n");
$tokyo->safe_psql('postgres', 'create table item (id int primary key, v text); insert into item select i, $$start$$ from generate_series(1, 3) i');
my $dsn = $tokyo->connstr('postgres');
my $origins = q[select count(*) from pg_replication_origin where roname like 'braid/%'];
my $states = q[select count(*) from pg_replication_origin_status where local_id <> 0];

# A database that subscribes to tokyo.
sub join_tokyo
{
	my ($database, $copies) = @_;
	$paris->safe_psql($database, 'create extension if not exists braid');
	$paris->safe_psql($database, 'create table if not exists item (id int primary key, v text)');
	$paris->safe_psql($database, "select braid.create_node('$database', \$\$" . $paris->connstr($database) . '$$)');
	$paris->safe_psql($database, "select braid.create_subscription('from_tokyo', \$\$$dsn\$\$, copy_data => $copies)");
	$paris->safe_psql($database, "select braid.wait_for_subscription('from_tokyo')", timeout => $PostgreSQL::Test::Utils::timeout_default);
	return;
}

sub files { my ($oid) = @_; return join ' ', grep { /^braid\.$oid\b/ } slurp_dir($paris->data_dir . '/pg_stat_tmp'); }
sub arrives
{
	my ($database, $id) = @_;
	$tokyo->safe_psql('postgres', "update item set v = v || 'x' where id = $id; insert into item values ($id + 100, 'new')");
	return ok($paris->poll_query_until($database, "select count(*) = 1 from item where id = $id + 100"), "changes arrive in $database");
}

# One that stays: its origins are not touched by what becomes of others.
$paris->safe_psql('postgres', 'create database stays');
join_tokyo('stays', 'true');
arrives('stays', 1);
my $own = $paris->safe_psql('postgres', $origins);
cmp_ok($own, '>', 0, 'a subscription has origins');
for my $round (1 .. 4)
{
	$paris->safe_psql('postgres', 'create database goes');
	my $oid = $paris->safe_psql('postgres', q[select oid from pg_database where datname = 'goes']);
	join_tokyo('goes', 'true');
	like(files($oid), qr/\d/, 'its processes have a file');
	$paris->safe_psql('postgres', 'drop database goes with (force)');
	is($paris->safe_psql('postgres', $origins), $own, 'the origins of a dropped database are dropped');
	is(files($oid), '', 'and its files are gone');
	$tokyo->safe_psql('postgres', q[select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name like '%goes%']);
	ok($tokyo->poll_query_until('postgres', q[select count(*) = 0 from pg_replication_slots where slot_name like '%goes%' and active]), 'the slot is free');
	$tokyo->safe_psql('postgres', q[select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name like '%goes%']);
}
arrives('stays', 2);

# A database that cannot be dropped keeps what it has.
my ($status, $out, $err) = $paris->psql('stays', 'drop database stays');
isnt($status, 0, 'a database with a session stays');
is($paris->safe_psql('postgres', $origins), $own, 'and keeps its origins');
arrives('stays', 3);

# The node is taken down, then the extension is dropped.
my $oid = $paris->safe_psql('postgres', q[select oid from pg_database where datname = 'stays']);
my $written = q[select string_agg(coalesce(v.node, '?'), ' ' order by id) from item i left join lateral braid.row_version(i.tableoid, i.ctid) v on true where id > 100];
is($paris->safe_psql('stays', $written), 'tokyo tokyo tokyo', 'rows have their writer');
$paris->safe_psql('stays', q[select braid.drop_subscription('from_tokyo'); select braid.drop_node('stays')]);
ok($paris->poll_query_until('postgres', "select ($origins) = 0 and ($states) = 0"), 'a node that is taken down has no origins');
is($paris->safe_psql('stays', $written), 'tokyo tokyo tokyo', 'but its rows have their writer');
my $third = new_node('osaka', publication => 'for all tables');
$third->safe_psql('postgres', 'create table item (id int primary key, v text)');
$dsn = $third->connstr('postgres');
join_tokyo('stays', 'false');
is($paris->safe_psql('stays', $written), 'tokyo tokyo tokyo', 'also when another node has origins');
$paris->safe_psql('stays', q[select braid.drop_subscription('from_tokyo'); select braid.drop_node('stays')]);
$paris->safe_psql('stays', 'drop extension braid');
ok($paris->poll_query_until('postgres', "select ($origins) = 0 and ($states) = 0"), 'a dropped extension leaves no origins');
ok(wait_until(sub { files($oid) eq '' }, 30), 'and no files');
join_tokyo('stays', 'false');
is($paris->safe_psql('stays', $written), 'stays stays stays', 'what was written in an earlier life is not the new provider\'s');
like(files($oid), qr/\d/, 'its processes have a file again');
$paris->safe_psql('stays', q[select braid.drop_subscription('from_tokyo')]);
ok(wait_until(sub { files($oid) eq '' }, 30), 'a dropped subscription leaves no file');

done_testing();
