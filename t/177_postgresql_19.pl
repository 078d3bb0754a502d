# PostgreSQL 19: a server with wal_level = replica is a node, publications except tables, REPACK
# rewrites tables while changes stream, and the kinds of conflicts have PostgreSQL's names.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_server('tokyo');
if ($tokyo->safe_psql('postgres', "select current_setting('server_version_num')::int < 190000") eq 't')
{
	plan skip_all => 'for PostgreSQL 19 and later';
}
my $paris = new_server('paris');

# The first slot raises the level, without a restart.
for my $node ($tokyo, $paris)
{
	$node->append_conf('postgresql.conf', "wal_level = replica\n");
	$node->restart;
	my $dsn = $node->connstr('postgres') =~ s/'/''/gr;
	$node->safe_psql('postgres', "create extension braid; select braid.create_node('" . $node->name . "', '$dsn')");
	is($node->safe_psql('postgres', 'select wal_level from braid.node_info()'), 'logical', $node->name . ': a node with wal_level = replica');
}
on_all(q[
	create table item (id int primary key, v text);
	create table secret (id int primary key);
	create table parted (id int primary key) partition by range (id);
	create table parted_1 partition of parted for values from (0) to (100);
	create table later (id int primary key);
], $tokyo, $paris);
$tokyo->safe_psql('postgres', q[
	insert into item select i, 'x' from generate_series(1, 100) i;
	insert into secret values (1);
	insert into parted values (1);
	insert into later values (1);
	create publication braid for all tables except (table secret, parted);
]);
$paris->safe_psql('postgres', 'create publication braid for all tables except (table secret, parted)');
subscribe($paris, $tokyo);
is($tokyo->safe_psql('postgres', 'show effective_wal_level'), 'logical', 'the level is raised');
subscribe($tokyo, $paris, copy_data => 'false');

# EXCEPT.
sub counts { return $paris->safe_psql('postgres', 'select (select count(*) from item), (select count(*) from secret), (select count(*) from parted), (select count(*) from later)'); }
is(counts(), '100|0|0|1', 'tables that are excepted are not copied');
is($paris->safe_psql('postgres', q[select string_agg(relation::text, ' ' order by relation::text) from braid.subscription_tables]), 'item later', 'nor are they of the subscription');
$tokyo->safe_psql('postgres', q[insert into item values (101, 'y'); insert into secret values (2); insert into parted values (2); insert into later values (2); truncate secret, parted]);
caught_up($paris, $tokyo);
is(counts(), '101|0|0|2', 'their changes are not sent');
$tokyo->safe_psql('postgres', 'alter publication braid set all tables except (table later); insert into parted values (3); insert into later values (3)');
$paris->safe_psql('postgres', q[select * from braid.refresh_subscription('paris_from_tokyo')]);
$paris->safe_psql('postgres', q[select braid.wait_for_subscription('paris_from_tokyo')]);
caught_up($paris, $tokyo);
is(counts(), '101|0|1|2', 'what is excepted now leaves, and what no longer is joins, with its rows');

# REPACK, at both ends.
my $versions = 'select md5(string_agg(id || xmin::text, chr(44) order by id)) from item';
my $before = $paris->safe_psql('postgres', $versions);
$paris->safe_psql('postgres', 'repack item');
is($paris->safe_psql('postgres', $versions), $before, 'REPACK keeps versions');
# As the reference says of tables that are rewritten.
my $own = q[select count(*) from item where not (pg_xact_commit_timestamp_origin(xmin)).roident = 0];
is($paris->safe_psql('postgres', $own), '101', 'all rows are versions of the other node');
$paris->safe_psql('postgres', 'repack (concurrently) item');
is($paris->safe_psql('postgres', $own), '0', 'REPACK (CONCURRENTLY) makes them versions of this node');
# No row is changed by both at a time: a newer update would bring a deleted row back.
for my $round (1 .. 5)
{
	$tokyo->safe_psql('postgres', "update item set v = 'tokyo $round' where id % 2 = 0; insert into item values (1000 + $round, 'new'); delete from item where id = $round");
	$tokyo->safe_psql('postgres', $round % 2 ? 'repack (concurrently) item' : 'repack item');
	$paris->safe_psql('postgres', "update item set v = 'paris $round' where id % 2 = 1 and id > 5");
	caught_up($paris, $tokyo);
	caught_up($tokyo, $paris);
	$paris->safe_psql('postgres', $round % 2 ? 'repack item' : 'repack (concurrently) item');
}
caught_up($paris, $tokyo);
caught_up($tokyo, $paris);
same_tables([ $tokyo, $paris ], 'item');
is($paris->safe_psql('postgres', 'select count(*) from item'), '101', 'all changes came, once, through tables that were rewritten');
becomes($_, q[select string_agg(state, ',') from braid.subscription_status], 'streaming', $_->name . ': streaming') for $tokyo, $paris;

# Names of conflicts.
my $kinds = q[select string_agg(kind, ' ' order by kind) from (select distinct kind from braid.conflict_stats where kind <> 'foreign_key')];
my $theirs = q[select string_agg(substr(attname, 7), ' ' order by substr(attname, 7)) from pg_attribute where attrelid = 'pg_stat_subscription_stats'::regclass and attname like 'confl\_%'];
$tokyo->safe_psql('postgres', q[update item set v = 'a' where id = 7]);
caught_up($paris, $tokyo);
$paris->safe_psql('postgres', q[update item set v = 'b' where id = 7]);
caught_up($tokyo, $paris);
my ($ours, $all) = map { $tokyo->safe_psql('postgres', $_) } $kinds, $theirs;
my %known = map { $_ => 1 } split / /, $all;
is(join(' ', grep { !$known{$_} } split / /, $ours), '', 'each kind that was counted has a name of PostgreSQL\'s');
is($all, join(' ', sort qw(insert_exists update_origin_differs update_exists update_missing update_deleted delete_origin_differs delete_missing multiple_unique_conflicts)), 'PostgreSQL has the eight kinds');

done_testing();
