# Nodes in a line, each of which passes on what it has from others: east, hub, west and far. A
# deletion that finds no row at one of them is news to those behind it. Everything is done in steps,
# so that the order is known.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($east, $hub, $west, $far) = my @all = map { new_node($_) } qw(east hub west far);
on_all(q[
	create table gone (k int primary key, v text);
	create table moved (k int primary key, v text);
	create table parted (k int primary key, v text) partition by range (k);
	create table parted_low partition of parted for values from (0) to (100);
	create table parted_high partition of parted for values from (100) to (200);
	create table whole (k int primary key, v text);
	alter table whole replica identity full;
	create table emptied (k int primary key, v text);
	create table parent (k int primary key);
	create table child (k int primary key, parent int not null references parent);
	create table many (k int primary key, v text);
	create table met (k int primary key, v text);
], @all);
my @links = ([ $east, $hub ], [ $hub, $west ], [ $west, $far ]);
my @streams = map { my ($one, $other) = @$_; ([ $one, $other ], [ $other, $one ]) } @links;
subscribe(@$_, origin => q['any'], copy_data => 'false') for @streams;
ok(wait_until(sub { scalar worker_pids($_, 'braid collector') }, 20), $_->name . ' collects deletions') for @all;

sub on { my ($node, @sql) = @_; $node->safe_psql('postgres', $_) for @sql; return; }
sub one { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
sub name { my ($to, $from) = @_; return $to->name . '_from_' . $from->name; }

sub hold
{
	for (@_)
	{
		my ($to, $from) = @$_;
		on($to, "select braid.disable_subscription('" . name($to, $from) . "')");
		$from->poll_query_until('postgres', "select not exists (select from pg_stat_replication where application_name = '" . name($to, $from) . "')") or die;
	}
	return;
}

sub let { on($_->[0], "select braid.enable_subscription('" . name(@$_) . "')") for @_; return; }

# From end to end, and back.
sub settle
{
	caught_up($_->[1], $_->[0]) for @links;
	caught_up($_->[0], $_->[1]) for reverse @links;
	return;
}

sub everywhere
{
	my ($table, $expected, $what) = @_;
	is(join(' / ', map { one($_, "select coalesce(string_agg(concat(k, v), ' ' order by k), '') from $table") } @all), join(' / ', ($expected) x @all), $what);
	return;
}

my @keyed = qw(gone parted whole);
for my $mode (qw(parallel batch))
{
	on($_->[0], "select braid.alter_subscription('" . name(@$_) . "', apply_mode => '$mode')") for @streams;
	on($east, map { "insert into $_ values (1, 'old'), (101, 'old')" } @keyed, 'moved', 'emptied');
	on($east, 'insert into parent values (1)', 'insert into child values (1, 1)');
	settle();

	# The older of two deletions comes to the hub first. Then the newer one finds nothing there, nor
	# does an update that changes the key.
	hold([ $hub, $west ], [ $west, $hub ], [ $east, $hub ]);
	on($east, (map { "delete from $_ where k = 1" } @keyed), 'delete from moved where k = 1');
	caught_up($hub, $east);
	hold([ $hub, $east ]);
	on($east, map { "insert into $_ values (1, 'between')" } @keyed, 'moved');
	# Older than the truncate.
	on($east, (map { "insert into $_ values (2, 'older')" } qw(emptied)), 'insert into parent values (2)', 'insert into child values (2, 2)');
	on($west, (map { "delete from $_ where k = 1" } @keyed), 'update moved set k = 3 where k = 1');
	on($west, 'truncate emptied', 'truncate parent, child');
	# Newer: the hub truncates row by row.
	on($hub, (map { "insert into $_ values (4, 'newer')" } qw(emptied)), 'insert into parent values (4)', 'insert into child values (4, 4)');
	# No node has asked for these changes since then.
	$hub->restart;
	let([ $hub, $west ]);
	caught_up($hub, $west);
	let([ $east, $hub ]);
	caught_up($east, $hub);
	my $known = $mode eq 'parallel' ? 'who is behind the hub is told' : "$mode: who is behind the hub is told";
	is(one($east, "select count(*) from $_ where k = 1"), '0', "$known of a deletion in $_") for @keyed;
	is(one($east, 'select string_agg(concat(k, v), \' \' order by k) from moved'), '3old 101old', "$known of a key that a row has left");
	is(one($east, "select string_agg(concat(k, v), ' ') from $_"), '4newer', "$known of a truncate of $_") for 'emptied';
	is(one($east, "select string_agg(k::text, ' ') from $_"), '4', "$known of a truncate of $_") for qw(parent child);
	let([ $hub, $east ], [ $west, $hub ]);
	settle();
	everywhere($_, '101old', "$mode: $_ is the same on all") for @keyed;
	everywhere('moved', '3old 101old', "$mode: moved is the same on all");
	everywhere($_, '4newer', "$mode: $_ is the same on all") for 'emptied';
	is(join(' ', map { one($_, 'select count(*) from braid.unfound') } @all), '0 0 0 0', 'nothing is left behind');

	on($west, (map { "truncate $_" } @keyed, 'moved', 'emptied'), 'truncate parent, child');
	settle();
	everywhere($_, '', "$mode: and all of it goes") for @keyed, 'emptied';
}

# The hub replaces a row for a writer that has not seen that row: the conflict is in the history of
# all nodes that get the change.
on($east, q[insert into met values (1, 'first')]);
settle();
hold([ $hub, $east ], [ $east, $hub ]);
on($west, q[update met set v = 'west']);
caught_up($hub, $west);
on($east, q[update met set v = 'east']);
let([ $hub, $east ], [ $east, $hub ]);
settle();
everywhere('met', '1east', 'the later one is on all');
is(one($_, q[select string_agg(concat_ws(' ', kind, winner, local_origin, remote_origin, coalesce(concurrent::text, 'unknown')), ', ') from braid.conflict_history where relation = 'met'::regclass]),
	'update_origin_differs remote west east unknown', 'not called seen by what came before it at the hub: ' . $_->name) for $hub, $west, $far;

# Transactions are not joined, so their versions are passed on.
for my $mode (qw(batch aggregate))
{
	on($hub, "select braid.alter_subscription('hub_from_east', apply_mode => '$mode', consolidate => " . ($mode eq 'batch' ? 'true' : 'false') . ')');
	on($hub, q[select braid.wait_for_subscription('hub_from_east')]);
	hold([ $hub, $east ]);
	$east->safe_psql('postgres', join('', map { "insert into many values ($_, '$mode') on conflict (k) do update set v = excluded.v;\n" } 1 .. 300));
	let([ $hub, $east ]);
	settle();
	my $versions = q[select md5(string_agg(k || ' ' || pg_xact_commit_timestamp(xmin), ',' order by k)) from many];
	is(join(' ', map { one($_, $versions) } @all), join(' ', (one($east, $versions)) x @all), "$mode: versions are those of the source's transactions on all nodes");
	same_tables(\@all, 'many');
}
my $slots = one($hub, q[select array_agg(slot_name order by slot_name) from pg_replication_slots where slot_name !~ '^braid_deletions']);
is(one($hub, q[select not_joined_for from braid.dependency_stats where subscription = 'hub_from_east']), $slots, 'for the two that read from it');
is(one($hub, 'select sum(batches) from braid.dependency_stats'), '0', 'the hub has joined nothing');
ok($hub->log_contains(qr/subscription "hub_from_east" commits each transaction by itself, as a node may read from this one with origin => 'any'/), 'and says so');

# Changes that were passed on go no further: WAL comes to rest.
my $quiet = wait_until(sub {
	my $positions = sub { join ' ', map { one($_, 'select pg_current_wal_insert_lsn()') } @all };
	my $before = $positions->();
	select undef, undef, undef, 0.7;
	$before eq $positions->();
}, 20);
ok($quiet, 'no node writes WAL any more');

done_testing();
