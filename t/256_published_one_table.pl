# A copy asks the provider about its own table only: a lock on another published table does not
# delay it. The published form of the table is right: columns, generated ones, filters, and a
# partitioned table as a whole.

use strict;
use warnings;

use Braid;
use Test::More;

my ($tokyo, $paris) = my @nodes = map { new_node($_, publication => '', conf => "braid.copy_workers_per_subscription = 1\n") } qw(tokyo paris);
on_all(q[
	create table first (id int primary key);
	create table listed (id int primary key, v text, hidden text);
	create table filtered (id int primary key, v text);
	create table whole (id int primary key, v text) partition by range (id);
	create table whole_low partition of whole for values from (0) to (100);
	create table apart (id int primary key, v text) partition by range (id);
	create table apart_low partition of apart for values from (0) to (100);
	create schema s;
	create table s.of_schema (id int primary key, v text);
], @nodes);
my $is_18 = $tokyo->safe_psql('postgres', q[select current_setting('server_version_num')::int >= 180000]) eq 't';
# At paris the columns are ordinary ones, if they come.
$tokyo->safe_psql('postgres', 'create table made (id int primary key, twice int generated always as (id * 2) stored)');
$paris->safe_psql('postgres', $is_18 ? 'create table made (id int primary key, twice int)' : 'create table made (id int primary key)');
# The last to be copied.
$_->safe_psql('postgres', 'create table other (id int primary key)') for @nodes;
my $generated = $is_18 ? 'with (publish_generated_columns = stored)' : '';
$tokyo->safe_psql('postgres', qq[
	insert into first values (1);
	insert into listed values (1, 'v', 'hidden');
	insert into filtered select i, 'v' from generate_series(1, 10) i;
	insert into whole values (1, 'v');
	insert into apart values (1, 'v');
	insert into s.of_schema values (1, 'v');
	insert into made values (1), (2);
	insert into other values (1);
	create publication lists for table first, listed (id, v), filtered where (id > 5);
	create publication roots for table whole with (publish_via_partition_root);
	create publication leaves for table apart;
	create publication schemas for tables in schema s;
	create publication rest for table made, other $generated;
]);
my $name = subscribe($paris, $tokyo, publications => q['{lists,roots,leaves,schemas,rest}'], enabled => 'false', wait => 0);

# The slot's snapshot is taken before the lock. So the first copy waits here, until the other table
# is locked at the provider.
my $here = $paris->background_psql('postgres');
$here->query_safe('begin; lock table first');
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
becomes($paris, q[select count(*) from pg_locks where not granted and relation = 'first'::regclass], '1', 'the first copy waits');
my $there = $tokyo->background_psql('postgres');
$there->query_safe('begin; lock table other');
$here->query_safe('rollback');
$here->quit;
becomes($paris, q[select string_agg(relation::text, ' ' order by relation::text) from braid.subscription_tables where state = 'ready'],
	'apart_low filtered first listed made s.of_schema whole', 'all but the locked table are copied');
is($paris->safe_psql('postgres', 'select * from listed'), '1|v|', 'with the columns of a list');
is($paris->safe_psql('postgres', 'select count(*), min(id) from filtered'), '5|6', 'with the rows of a filter');
is($paris->safe_psql('postgres', 'select * from made order by id'), $is_18 ? "1|2\n2|4" : "1\n2", 'with generated columns, where they are published');
$there->query_safe('rollback');
$there->quit;
$paris->safe_psql('postgres', "select braid.wait_for_subscription('$name')");
same_tables(\@nodes, 'whole', 'apart', 's.of_schema', 'other');

$_->stop for @nodes;
done_testing();
