# Idle nodes write no WAL, however often they look for old rows to remove: neither two nodes that
# subscribe to each other, nor the members of a group. Nodes rarely note that a provider is
# connected.

use strict;
use warnings;

use Braid;
use Group qw(group sql have_all);
use Test::More;

my $conf = "autovacuum = off\nbraid.purge_interval = 200ms\nbraid.manager_interval = 200ms\n";
my @pair = my ($tokyo, $paris) = map { new_node($_, conf => $conf) } qw(tokyo paris);
on_all('create table item (id int primary key, v text)', @pair);
subscribe($tokyo, $paris, copy_data => 'false');
subscribe($paris, $tokyo, copy_data => 'false');
my @group = group([qw(oslo rome)], 'create table item (id int primary key, v text)', conf => $conf);
my @all = (@pair, @group);
# The group's other member gets it as a statement.
sql($_, 'create extension pg_walinspect') for @pair, $group[0];
sql($_, q[insert into item values (1, 'first')]) for $tokyo, $group[0];
converged(@pair);
have_all(@group);
is(sql($_, q[select count(*) from item, pg_extension where extname = 'pg_walinspect']), '1', $_->name . ' has a row') for @all;

# Each round of the purge deletes the notes of crashes of subscriptions that are gone. These are
# files: when such a file is gone, a round has reached it.
my $database = sql($tokyo, q[select oid from pg_database where datname = 'postgres']);
sub rounds
{
	my ($count) = @_;
	for my $round (1 .. $count)
	{
		my @files = map { $_->data_dir . "/pg_stat_tmp/braid.$database.999999999" } @all;
		for my $file (@files) { open my $to, '>', $file or die "$file: $!"; close $to; }
		wait_until(sub { !grep { -e } @files }, 60) or die 'no round comes';
	}
	return;
}

# The next transaction id of each node, and the end of its WAL.
my $place = 'select pg_snapshot_xmax(pg_current_snapshot()), pg_current_wal_insert_lsn()';
sub places { return map { [ split /\|/, sql($_, $place) ] } @all; }
sub ids { return join ' ', map { $_->[0] } @_; }

# Counts a node's WAL records between two places. PostgreSQL's checkpoints and lists of running
# transactions do not count.
sub written
{
	my ($node, $from, $to) = @_;
	return '' if $from eq $to;
	# All WAL up to there is flushed.
	sql($node, 'select pg_current_xact_id()');
	return sql($node, qq[select resource_manager, record_type, count(*) from pg_get_wal_records_info('$from', '$to')
		where resource_manager not in ('XLOG', 'Standby') group by 1, 2 order by 1, 2]);
}

# Changes and notes of the setup end here.
my $is_quiet = sub { my $before = ids(places()); rounds(5); return ids(places()) eq $before; };
ok(wait_until($is_quiet, 60), 'rounds take no transaction ids');

# A note that is a minute old stays as it is.
my $are_old = q[select bool_and(connected_at < clock_timestamp() - interval '65 s') from braid.subscription];
ok(wait_until(sub { !grep { sql($_, $are_old) ne 't' } @all }, 180), 'nodes rarely note that a provider is connected');
my @before = places();
rounds(15);
my @after = places();
is(ids(@after), ids(@before), 'no node has taken a transaction id');
is(written($all[$_], $before[$_][1], $after[$_][1]), '', $all[$_]->name . ' has written no WAL') for 0 .. $#all;
is(sql($_, q[select bool_and(state = 'streaming') from braid.subscription_status]), 't', $_->name . ' streams all the while') for @all;

# The last moment of a provider that stops is noted, and an old deletion is removed.
my $gone = sql($tokyo, 'select clock_timestamp()');
$paris->stop;
ok(wait_until(sub { sql($tokyo, "select connected_at > '$gone'::timestamptz - interval '30 s' from braid.subscription") eq 't' }, 60), 'when a provider was connected last is noted once it is gone');
sql($tokyo, q[insert into braid.tombstone values (4711, extract(epoch from now() - interval '3 h') * 1000000, 'item'::regclass, 0)]);
ok(wait_until(sub { sql($tokyo, 'select count(*) from braid.tombstone where key_hash = 4711') eq '0' }, 60), 'an old deletion is forgotten');
done_testing();
