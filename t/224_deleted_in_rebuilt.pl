# A table has just taken the place of another one. Its deletions are remembered from the start,
# before any process has found out which table belongs to the subscription now: a later older update
# does not bring a row back.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my @both = my ($tokyo, $paris) = map { new_node($_, publication => '', conf => "autovacuum = off\n") } qw(tokyo paris);

sub sql { my ($node, $text) = @_; return $node->safe_psql('postgres', $text); }

# Removes the dead row, which would also tell of the deletion. It is kept until the collector has
# processed that.
sub vacuumed
{
	my ($table) = @_;
	return ok(wait_until(sub {
		sql($paris, 'checkpoint');
		return ($paris->psql('postgres', "vacuum (verbose, index_cleanup on, truncate off) $table"))[2] =~ /1 removed/;
	}, 60), "the collector has come past the deletion from $table");
}

my @tables = qw(t parted);
on_all(q[
	create table t (k int primary key, v text);
	create table parted (k int primary key, v text) partition by range (k);
	create table part partition of parted for values from (0) to (1000);
	create publication p for table t, parted with (publish_via_partition_root = true);
], @both);
sql($tokyo, "insert into $_ select k, 'first' from generate_series(1, 100) k") for @tables;
my @names = (subscribe($paris, $tokyo, publications => q['{p}']), subscribe($tokyo, $paris, publications => q['{p}'], copy_data => 'false'));
converged(@both);

# Nothing comes to paris, so nothing there looks at its tables.
disable($paris, $names[0]);
disable($tokyo, $names[1]);
sql($tokyo, "update $_ set v = 'older' where k = 57") for @tables;
sql($paris, q[
	begin; alter table t rename to t_old; create table t (k int primary key, v text); insert into t select * from t_old; drop table t_old; commit;
	begin; alter table parted rename to parted_old; create table parted (k int primary key, v text) partition by range (k);
	create table parts partition of parted for values from (0) to (1000); insert into parted select * from parted_old; drop table parted_old; commit;
	alter publication p add table t, parted;
]);
sql($paris, "delete from $_ where k = 57") for @tables;
vacuumed($_) for qw(t parts);
sql($paris, "select braid.enable_subscription('$names[0]')");
caught_up($paris, $tokyo);
sql($tokyo, "select braid.enable_subscription('$names[1]')");
converged(@both) for 1 .. 2;
for my $table (@tables)
{
	is(sql($_, "select count(*) from $table where k = 57"), '0', "$table: the row stays deleted at " . $_->name) for @both;
}

# So are those of a table that is new at both nodes, and of which nothing has come yet.
sql($_->[0], "select braid.drop_subscription('$_->[1]')") for [ $paris, $names[0] ], [ $tokyo, $names[1] ];
on_all('drop table t, parted; create publication q for all tables', @both);
@names = qw(paris_q tokyo_q);
subscribe($paris, $tokyo, name => $names[0], publications => q['{q}'], copy_data => 'false');
subscribe($tokyo, $paris, name => $names[1], publications => q['{q}'], copy_data => 'false');
disable($paris, $names[0]);
disable($tokyo, $names[1]);
on_all('create table late (k int primary key, v text)', @both);
sql($tokyo, q[insert into late values (57, 'older')]);
sql($paris, q[insert into late values (57, 'newer'), (58, 'newer'); delete from late where k = 57]);
vacuumed('late');
sql($paris, "select braid.enable_subscription('$names[0]')");
caught_up($paris, $tokyo);
sql($tokyo, "select braid.enable_subscription('$names[1]')");
converged(@both) for 1 .. 2;
is(sql($_, q[select string_agg(concat(k, v), ',') from late]), '58newer', 'a new table: the row stays deleted at ' . $_->name) for @both;

done_testing();
