# Partitioned tables: leaf to leaf, root to a differently partitioned root, root to a plain table,
# rows that change partition.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo', publication => '');
my $paris = new_node('paris', publication => '');

# The same partitions on both; changes travel as the leaves'.
on_all(q[
	create table leafwise (id int, v text, primary key (id)) partition by range (id);
	create table leafwise_1 partition of leafwise for values from (0) to (100);
	create table leafwise_2 partition of leafwise for values from (100) to (200);
], $tokyo, $paris);
# By the root's name, into other partitions, with another order of columns and a column that was
# dropped.
$tokyo->safe_psql('postgres', q[
	create table rootwise (id int, region text, v text, primary key (id, region)) partition by list (region);
	create table rootwise_eu partition of rootwise for values in ('eu');
	create table rootwise_us partition of rootwise for values in ('us');
	create table flat (id int primary key, v text) partition by hash (id);
	create table flat_0 partition of flat for values with (modulus 2, remainder 0);
	create table flat_1 partition of flat for values with (modulus 2, remainder 1);
]);
$paris->safe_psql('postgres', q[
	create table rootwise (id int, region text, v text, primary key (id, region)) partition by range (id);
	create table rootwise_low (gone int, v text, region text not null, id int not null);
	alter table rootwise_low drop column gone;
	alter table rootwise attach partition rootwise_low for values from (minvalue) to (50);
	create table rootwise_high partition of rootwise for values from (50) to (maxvalue) partition by list (region);
	create table rootwise_high_eu partition of rootwise_high for values in ('eu');
	create table rootwise_high_rest partition of rootwise_high default;
	create table flat (id int primary key, v text);
]);
$tokyo->safe_psql('postgres', q[
	create publication leaves for table leafwise;
	create publication roots for table rootwise, flat with (publish_via_partition_root = true);
	insert into leafwise select i, 'copied' from generate_series(0, 190, 10) i;
	insert into rootwise select i, case when i % 2 = 0 then 'eu' else 'us' end, 'copied' from generate_series(1, 99, 7) i;
	insert into flat select i, 'copied' from generate_series(1, 20) i;
]);
subscribe($paris, $tokyo, publications => q['{leaves,roots}']);

my @tables = qw(leafwise leafwise_1 leafwise_2 rootwise flat);
# Column orders are the same where whole tables are compared.
same_tables([ $tokyo, $paris ], @tables);

$tokyo->safe_psql('postgres', q[
	insert into leafwise values (5, 'new'), (105, 'new');
	update leafwise set v = 'updated' where id in (10, 110);
	delete from leafwise where id in (20, 120);
	insert into rootwise values (2, 'eu', 'new'), (77, 'us', 'new'), (88, 'eu', 'new');
	update rootwise set v = 'updated' where id in (1, 8, 64);
	delete from rootwise where id in (15, 71);
	insert into flat values (100, 'new'), (101, 'new');
	update flat set v = 'updated' where id in (1, 2);
	delete from flat where id in (3, 4);
]);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], @tables);

# From one partition to another, on either side or both.
$tokyo->safe_psql('postgres', q[
	update leafwise set id = 151 where id = 50;
	update rootwise set region = 'us' where id = 22;
	update rootwise set id = 90 where id = 36;
	update flat set id = 1000 + id where id between 10 and 13;
]);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], @tables);
is($paris->safe_psql('postgres', 'select tableoid::regclass from rootwise where id = 90'), 'rootwise_high_eu', 'a row is in the partition that it belongs to');

$tokyo->safe_psql('postgres', 'truncate leafwise_2; truncate rootwise');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], @tables);

done_testing();
