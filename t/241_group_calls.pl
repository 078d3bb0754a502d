# Effects of group calls besides joining: they grant the role of the connection string its rights,
# log what was agreed, add a witness, add tables, and report what is known of a removed node.

use strict;
use warnings;

use Braid;
use Group qw(sql refusal joined have_all);
use PostgreSQL::Test::Utils;
use Test::More;

my ($tokyo, $paris, $oslo, $observer) = my @all = map { new_server($_, init => ['--data-checksums']) } qw(tokyo paris oslo observer);
sql($_, 'create extension braid; create role replicator login') for @all;
sub dsn { my ($node) = @_; return '$d$host=' . $node->host . ' port=' . $node->port . ' dbname=postgres user=replicator$d$'; }
sub own { my ($node) = @_; return "node_name => '" . $node->name . "', dsn => " . dsn($node); }

# The role that was made with LOGIN alone can do all that members do by it. Nobody has granted it
# anything on the tables.
sql($tokyo, q[
	create schema shop;
	create table shop.item (id serial primary key, v text);
	insert into shop.item (v) select 'tokyo' from generate_series(1, 100);
	create publication chosen for table shop.item;
]);
my ($status, $out, $err) = $tokyo->psql('postgres', "select braid.create_group('shop', publications => '{chosen}', " . own($tokyo) . ')');
like($err, qr/NOTICE:  role "replicator" was given REPLICATION, braid_monitor, pg_read_all_data/, 'create_group says which rights it has given');
for my $node ($paris, $oslo)
{
	# Granted by hand, and so not granted again.
	sql($node, 'alter role replicator replication; grant braid_monitor, pg_read_all_data to replicator') if $node == $oslo;
	($status, $out, $err) = $node->psql('postgres', 'select braid.join_group(' . dsn($tokyo) . ', ' . own($node) . ')');
	$node == $oslo ? unlike($err, qr/was given/, 'rights that are there are not given') : like($err, qr/"replicator" was given REPLICATION, braid_monitor, pg_read_all_data/, 'so does join_group');
	joined($node);
}
my @data = ($tokyo, $paris, $oslo);
have_all(@data);
same_tables(\@data, 'shop.item');
is(sql($_, 'select string_agg(distinct usename, $$ $$) from pg_stat_replication'), 'replicator', 'all streams to ' . $_->name . ' are of that role') for @data;
# A role that can't be found here, or is a superuser, is left alone.
sql($observer, 'drop role replicator; create role replicator login superuser');

# A witness.
like(refusal($observer, 'create role someone; set role someone; select braid.add_witness(' . dsn($tokyo) . ', ' . own($observer) . ')'), qr/permission denied/, 'not for all');
like(refusal($observer, 'select braid.add_witness(null, ' . own($observer) . ')'), qr/member_dsn must not be null.*HINT/s, 'a member has to be named');
($status, $out, $err) = $observer->psql('postgres', 'select braid.add_witness(' . dsn($tokyo) . ', ' . own($observer) . ')');
unlike($err, qr/was given/, 'a superuser needs no rights');
joined($observer, @data);
is(sql($observer, q[select string_agg(name || ' ' || role, ', ' order by node_number) from braid.group_nodes]), 'tokyo data, paris data, oslo data, observer witness', 'the witness is a member');
is(sql($observer, 'select count(*) from braid.subscription'), '0', 'without data');

# The log: all members have the same entries, but for those that were agreed before they came.
my $log = q[select string_agg(kind || ' ' || subject || ' (' || result || ') by ' || proposed_by, ', ' order by log_index) from braid.group_log where kind ~ 'member$'];
my $wanted = 'add member paris (node number 2) by tokyo, activate member paris (done) by paris, add member oslo (node number 3) by tokyo, activate member oslo (done) by oslo, '
  . 'add member observer, a witness (node number 4) by tokyo, activate member observer (done) by observer';
ok($tokyo->poll_query_until('postgres', "select ($log) = '$wanted'"), 'the log says what was agreed, and who proposed it') or diag(sql($tokyo, 'table braid.group_log'));
is(sql($tokyo, q[select bool_and(term > 0 and applied_at between now() - interval '10 min' and now()), count(distinct log_index) = count(*) from braid.group_log]), 't|t', 'when, and in whose term');
sql($tokyo, q[select braid.set_read_only(true, 'oslo'); select braid.set_read_only(false, 'oslo')]);
my $standing = q[select string_agg(subject, ', ' order by log_index) from braid.group_log where kind = 'set read only'];
ok($_->poll_query_until('postgres', "select ($standing) = 'oslo: on, oslo: off'"), $_->name . ' has it') for @all;
is(sql($_, q[select count(*) from braid.group_log l where l::text ~ 'host=|user=']), '0', 'no connection string is shown: ' . $_->name) for @all;
my $before = sql($tokyo, 'select count(*), max(log_index), md5(string_agg(l::text, chr(10) order by log_index)) from braid.group_log l where kind <> $$set version$$');
$tokyo->restart;
joined($tokyo);
like(sql($tokyo, 'select count(*), max(log_index), md5(string_agg(l::text, chr(10) order by log_index)) from braid.group_log l where kind <> $$set version$$'), qr/^\Q$before\E$/, 'entries that are applied again after a start are logged once');

# Since when members are reachable.
my $since = q[select coalesce(reachable_since::text, 'never') from braid.group_nodes where name = 'oslo'];
my $first = sql($paris, $since);
isnt($first, 'never', 'oslo is reachable');
$oslo->stop('fast');
ok($paris->poll_query_until('postgres', q[select not reachable and reachable_since is null from braid.group_nodes where name = 'oslo']), 'and is not any more');
$oslo->start;
ok($paris->poll_query_until('postgres', "select reachable and reachable_since > '$first' from braid.group_nodes where name = 'oslo'"), 'since it is back');
joined($oslo);

# Tables that join the publications come in with one call at each node.
like(refusal($paris, 'select * from braid.refresh_group(null)'), qr/copy_data must not be null/, 'an argument that is needed');
sql($_, q[set braid.ddl_replication = off; create table shop.late (id int primary key, v text)]) for @data;
# The others have the publication as tokyo had it when they joined.
sql($_, q[set braid.ddl_replication = off; alter publication chosen add table shop.late]) for @data;
for my $node (@data)
{
	my $name = $node->name;
	is(sql($node, q[select string_agg(subscription || ' ' || relation || ' ' || action, ', ' order by subscription) from braid.refresh_group()]),
		join(', ', map { "${name}_from_$_ shop.late added" } grep { $_ ne $name } qw(oslo paris tokyo)), "$name brings the table in");
}
joined(@data);
sql($paris, q[insert into shop.late select i, 'paris' from generate_series(1, 10) i]);
sql($tokyo, q[insert into shop.late values (12, 'tokyo')]);
sql($oslo, q[insert into shop.late values (11, 'oslo')]);
have_all(@data);
same_tables(\@data, 'shop.late');
is(sql($tokyo, 'select count(*) from braid.refresh_group()'), '0', 'nothing is to be done then');
like(refusal($observer, q[grant braid_admin to someone; set role someone; select * from braid.refresh_group()]), qr/permission denied to change the group.*HINT/s, 'not for all');

# Information about a removed node.
my $before_it = sql($paris, 'select pg_current_wal_insert_lsn()');
sql($paris, q[insert into shop.item (v) values ('last of paris')]);
my $behind_it = sql($paris, 'select pg_current_wal_insert_lsn()');
have_all(@data);
$paris->stop('immediate');
ok($tokyo->poll_query_until('postgres', q[select not reachable from braid.group_nodes where name = 'paris']), 'paris is away');
is(sql($tokyo, "select string_agg(node || ' ' || (applied_lsn > '$before_it' and applied_lsn <= '$behind_it') || coalesce(' ' || problem, ''), ', ' order by node) from braid.remove_node('paris')"),
	'oslo true, tokyo true', 'remove_node says up to where each of the others has it');
ok($_->poll_query_until('postgres', q[select count(*) = 3 from braid.group_nodes]), $_->name . ' knows') for $tokyo, $oslo;
is(sql($tokyo, q[select node, applied_lsn is null, problem from braid.remove_node('observer')]), '', 'nobody has anything of a witness');
done_testing();
