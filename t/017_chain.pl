# With origin => 'any', a node passes on what it received, under the first origin. In a ring of
# three, a change stops where it began.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
my $oslo = new_node('oslo');
my @nodes = ($tokyo, $paris, $oslo);
on_all('create table item (id int primary key, v text)', @nodes);
$tokyo->safe_psql('postgres', q[insert into item select i, 'copied' from generate_series(1, 10) i]);
subscribe($paris, $tokyo);
my $chain = subscribe($oslo, $paris, origin => q['any']);

# Where a row was first committed, as the node sees it.
sub origin_of
{
	my ($node, $id) = @_;
	return $node->safe_psql('postgres', qq[
		select coalesce(regexp_replace(o.roname, '^braid/(.*)/[0-9]+\$', '\\1'), 'here')
		from item i, pg_xact_commit_timestamp_origin(i.xmin) v left join pg_replication_origin o on o.roident = v.roident
		where i.id = $id
	]);
}

sub version_of
{
	my ($node, $id) = @_;
	return $node->safe_psql('postgres', "select pg_xact_commit_timestamp(xmin) from item where id = $id");
}

# A chain.
$tokyo->safe_psql('postgres', q[insert into item values (100, 'of tokyo'); update item set v = 'changed' where id = 1]);
$paris->safe_psql('postgres', q[insert into item values (200, 'of paris')]);
caught_up($paris, $tokyo);
caught_up($oslo, $paris);
same_tables([ $paris, $oslo ], 'item');
is(origin_of($paris, 100), 'tokyo', 'paris has the row as tokyo\'s');
is(origin_of($oslo, 100), 'tokyo', 'oslo too, though paris sent it');
is(origin_of($oslo, 1), 'tokyo', 'also what was changed');
is(origin_of($oslo, 200), 'paris', 'and what paris wrote as paris\'s');
is(version_of($_, 100), version_of($tokyo, 100), 'with its time, on ' . $_->name) for $paris, $oslo;

# A conflict shows the origin, not the sender.
$oslo->safe_psql('postgres', q[update item set v = 'of oslo' where id = 100]);
$tokyo->safe_psql('postgres', q[update item set v = 'of tokyo, again' where id = 100]);
caught_up($paris, $tokyo);
caught_up($oslo, $paris);
is($oslo->safe_psql('postgres', "select kind, winner, local_origin, remote_origin from braid.conflict_history where key = '{\"id\": 100}'"),
	'update_origin_differs|remote|oslo|tokyo', 'a conflict at the end of the chain is with tokyo');
is($oslo->safe_psql('postgres', 'select v from item where id = 100'), 'of tokyo, again', 'and is decided by its version');

# A large transaction and one with many origins in a row go the same way.
$tokyo->safe_psql('postgres', q[insert into item select i, 'bulk' from generate_series(1000, 6000) i]);
$_->safe_psql('postgres', "delete from item where id = 200") for $paris;
caught_up($paris, $tokyo);
caught_up($oslo, $paris);
same_tables(\@nodes, 'item');

# Make it a ring: everything is forwarded by everyone.
my $paris_any = 'paris_from_tokyo';
$paris->safe_psql('postgres', "select braid.alter_subscription('$paris_any', origin => 'any')");
subscribe($tokyo, $oslo, origin => q['any'], copy_data => 'false');

# Positions mean something in a ring only when the change has gone all the way.
sub around
{
	for (1 .. 2)
	{
		caught_up($paris, $tokyo);
		caught_up($oslo, $paris);
		caught_up($tokyo, $oslo);
	}
	return;
}

sub applied { return join ' ', map { $_->safe_psql('postgres', 'select sum(inserts + updates + deletes) from braid.subscription_detail') } @nodes; }

around();
my $rows_before = applied();
$tokyo->safe_psql('postgres', q[insert into item values (10001, 'of tokyo')]);
$paris->safe_psql('postgres', q[insert into item values (10002, 'of paris')]);
$oslo->safe_psql('postgres', q[insert into item values (10003, 'of oslo')]);
around();
same_tables(\@nodes, 'item');
my @before = split / /, $rows_before;
my @after = split / /, applied();
is($after[$_] - $before[$_], 2, $nodes[$_]->name . ' applied what the other two wrote, once') for 0 .. 2;
is(origin_of($tokyo, 10002), 'paris', 'by way of oslo, tokyo has paris\'s row');
is(origin_of($oslo, 10001), 'tokyo', 'by way of paris, oslo has tokyo\'s row');
is(origin_of($paris, 10003), 'oslo', 'by way of tokyo, paris has oslo\'s row');

# Updates of one row by all three, while they cross.
for my $round (1 .. 20)
{
	$_->safe_psql('postgres', "update item set v = '" . $_->name . " $round' where id = 1") for @nodes;
}
around();
same_tables(\@nodes, 'item');

# Rows that all nodes delete are not found anywhere else. The deletions are passed on until all
# nodes know them; so is a truncate.
on_all('delete from item where id between 1000 and 1100', @nodes);
around();
same_tables(\@nodes, 'item');
$oslo->safe_psql('postgres', 'truncate item');
around();
is($_->safe_psql('postgres', 'select count(*) from item'), '0', $_->name . ' has truncated') for @nodes;

# No change goes in circles: WAL comes to rest.
my $quiet = wait_until(sub {
	my $positions = sub { join ' ', map { $_->safe_psql('postgres', 'select pg_current_wal_insert_lsn()') } @nodes };
	my $one = $positions->();
	select undef, undef, undef, 0.7;
	$one eq $positions->();
}, 15);
ok($quiet, 'no node writes WAL any more');
for my $node (@nodes)
{
	becomes($node, q[select count(*) from braid.subscription_status where state = 'streaming'], '1', $node->name . ' is streaming');
}

done_testing();
