# A table is copied from one node while changes of another one arrive. Rows that these have written
# or deleted before the copy was visible, and the copy's rows, end with the newest version of each
# row.

use strict;
use warnings;

use Braid;
use Test::More;

my @nodes = my ($tokyo, $paris, $oslo) = map { new_node($_) } qw(tokyo paris oslo);
my @tables = qw(quiet busy part);
my $definition = q[
	create table quiet (id int primary key, v text);
	create table busy (id int primary key, v text);
	create table part (id int primary key, v text) partition by range (id);
	create table part_low partition of part for values from (0) to (5);
	create table part_high partition of part for values from (5) to (1000);
];
on_all($definition, $tokyo, $paris);
on_all('alter publication braid set (publish_via_partition_root)', @nodes);
my $tokyo_from_paris = subscribe($tokyo, $paris);
subscribe($paris, $tokyo);
for my $table (@tables)
{
	$tokyo->safe_psql('postgres', "insert into $table select i, 'start' from generate_series(0, 20) i");
}
caught_up($paris, $tokyo);

# No change of paris reaches oslo from here on until the stream is released.
$oslo->safe_psql('postgres', $definition);
my $oslo_from_paris = subscribe($oslo, $paris, copy_data => 'false');
disable($oslo, $oslo_from_paris);
for my $table (@tables)
{
	# In quiet nothing is written under a key that the copy has.
	my $rows = $table eq 'quiet' ? 'id = 3' : 'id in (1, 3, 7)';
	$paris->safe_psql('postgres', qq[
		update $table set v = 'older' where $rows;
		delete from $table where id in (5, 8);
		insert into $table values (101, 'older');
	]);
	caught_up($tokyo, $paris);
	$tokyo->safe_psql('postgres', qq[
		update $table set v = 'newer' where id = 1;
		delete from $table where id in (3, 101);
		insert into $table values (5, 'newer');
	]);
	caught_up($paris, $tokyo);
}
disable($tokyo, $tokyo_from_paris);
for my $table (@tables)
{
	$paris->safe_psql('postgres', "delete from $table where id in (4, 9); insert into $table values (102, 'newest')");
	$paris->safe_psql('postgres', "update $table set v = 'newest' where id = 2") if $table ne 'quiet';
}

# The copy of each table waits before its first row, until what paris wrote is there.
$oslo->safe_psql('postgres', q[
	create function hold() returns trigger language plpgsql as $$ begin perform pg_advisory_xact_lock_shared(1); return new; end $$
]);
for my $table (map { $_ eq 'part' ? 'part_low' : $_ } @tables)
{
	$oslo->safe_psql('postgres', qq[
		create trigger hold before insert on $table for each row when (new.id = 0) execute function hold();
		alter table $table enable replica trigger hold;
	]);
}
my $holder = $oslo->background_psql('postgres');
$holder->query_safe('select pg_advisory_lock(1)');
my $oslo_from_tokyo = subscribe($oslo, $tokyo, wait => 0);
$oslo->poll_query_until('postgres', "select count(*) >= 2 from pg_stat_activity where backend_type = 'braid copy' and wait_event = 'advisory'") or die;
$oslo->safe_psql('postgres', "select braid.enable_subscription('$oslo_from_paris')");
caught_up($oslo, $paris);
is($oslo->safe_psql('postgres', "select string_agg(id || v, ' ' order by id) from busy"), '1older 2newest 3older 7older 101older 102newest', 'what paris wrote is there, and nothing else');
$holder->query_safe('select pg_advisory_unlock(1)');
$holder->quit;
$oslo->safe_psql('postgres', "select braid.wait_for_subscription('$oslo_from_tokyo')", timeout => $PostgreSQL::Test::Utils::timeout_default);

my %expected = (
	quiet => '1newer 2start 5newer 6start 7start 102newest',
	busy => '1newer 2newest 5newer 6start 7older 102newest',
);
$expected{part} = $expected{busy};
for my $table (@tables)
{
	is($oslo->safe_psql('postgres', "select string_agg(id || v, ' ' order by id) from $table where id between 1 and 9 or id > 100"),
		$expected{$table}, "$table: the newest of each row");
}
$tokyo->safe_psql('postgres', "select braid.enable_subscription('$tokyo_from_paris')");
subscribe($_, $oslo, copy_data => 'false') for $tokyo, $paris;
converged(@nodes);
same_tables(\@nodes, @tables);

$_->stop for @nodes;
done_testing();
