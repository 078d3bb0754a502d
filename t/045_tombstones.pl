# Deleted rows stay deleted: a late older change from another node does not bring one back. VACUUM
# may have removed the dead versions meanwhile, the server may have been killed, and the change may
# come over a third node.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
my $oslo = new_node('oslo');
my @all = ($tokyo, $paris, $oslo);
my %named = map { $_->name => $_ } @all;
on_all(q[
	create table t (k int primary key, v text);
	create table texty (a text, b int, v text, primary key (b, a));
	create table parted (k int primary key, v text) partition by range (k);
	create table parted_low partition of parted for values from (0) to (100);
	create table parted_high partition of parted for values from (100) to (200);
	create table whole (k int primary key, v text);
	alter table whole replica identity full;
], @all);

sub slots { return $_[0]->safe_psql('postgres', q[select count(*) from pg_replication_slots where slot_name like 'braid_deletions_%']) }
sub collectors { return scalar worker_pids($_[0], 'braid collector') }

# One direction: a row has one writer.
subscribe($paris, $tokyo);
is(collectors($_), 0, $_->name . ' has no collector of deletions yet') for $tokyo, $paris;
subscribe($tokyo, $paris);
ok(wait_until(sub { collectors($_) && slots($_) }, 20), $_->name . ' has one') for $tokyo, $paris;
for my $subscriber (@all)
{
	for my $provider (@all)
	{
		next if $subscriber == $provider || ($subscriber->name ne 'oslo' && $provider->name ne 'oslo');
		subscribe($subscriber, $provider);
	}
}
ok(wait_until(sub { collectors($oslo) }, 20), 'and oslo, once it has several providers');
# The slots of the peers are there only since the last subscriptions.
ok(wait_until(sub { $_->safe_psql('postgres', q[select xmin is not null from pg_replication_slots where slot_name like 'braid_deletions_%']) eq 't' }, 20),
	$_->name . ' keeps dead rows until they are collected') for @all;

sub quiet { return $_[0]->poll_query_until('postgres', q[select not coalesce(bool_or(active), false) from pg_replication_slots where slot_name not like 'braid_deletions_%']) }
my @streams = map { my $s = $_; map { [ $s, $s->name . '_from_' . $_->name, $_ ] } grep { $_ != $s } @all } @all;

sub cut
{
	converged(@all);
	disable($_->[0], $_->[1]) for @_ ? @_ : @streams;
	return if @_;
	quiet($_) or die for @all;
	return;
}
sub heal
{
	$_->[0]->safe_psql('postgres', "select braid.enable_subscription('$_->[1]')") for @_ ? @_ : @streams;
	converged(@all);
	is(status(@$_)->{last_error}, '', "$_->[1] goes on") for grep { status(@$_)->{last_error} ne '' } @streams;
	return;
}

# Dead rows are gone. They are kept until the collector has processed their deletion.
sub vacuumed
{
	my ($node, @tables) = @_;
	for my $table (@tables)
	{
		my $gone = wait_until(sub {
			# With what a checkpoint writes, slots come on: without it the background writer does so
			# every 15 seconds.
			$node->safe_psql('postgres', 'checkpoint');
			my (undef, undef, $said) = $node->psql('postgres', "vacuum (verbose, index_cleanup on, truncate off) $table");
			return $said =~ /0 are dead but not yet removable/ && $said !~ /[1-9]\d* are dead but not yet removable/;
		}, 20);
		ok($gone, "dead rows of $table are removed at " . $node->name) if !$gone;
	}
	return;
}
sub on
{
	my ($node, $sql) = @_;
	$node->safe_psql('postgres', $sql);
	return;
}
sub everywhere
{
	my ($table, $expected, $what) = @_;
	is(join(' / ', map { $_->safe_psql('postgres', "select coalesce(string_agg(v, ' ' order by v), '') from $table") } @all), join(' / ', ($expected) x 3), $what);
	return;
}

# Deletion and update, either one newer; each kind of table.
for my $case ([ 't', '1, ', 'k = 1' ], [ 'texty', q['x', 1, ], q[a = 'x' and b = 1] ], [ 'parted', '150, ', 'k = 150' ], [ 'whole', '1, ', 'k = 1' ])
{
	my ($table, $key, $where) = @$case;
	on($tokyo, "insert into $table values (${key}'old')");
	cut();
	on($tokyo, "update $table set v = 'updated' where $where");
	on($paris, "delete from $table where $where");
	vacuumed($paris, $table);
	heal();
	everywhere($table, '', "$table: a newer deletion stays");
	on($tokyo, "insert into $table values (${key}'new')");
	cut();
	on($paris, "delete from $table where $where");
	on($tokyo, "update $table set v = 'updated' where $where");
	vacuumed($paris, $table);
	heal();
	everywhere($table, 'updated', "$table: a newer update too");
	on($tokyo, "delete from $table");
	converged(@all);
}
cmp_ok($paris->safe_psql('postgres', 'select count(*) from braid.tombstone where origin_id = 0'), '>=', 4, 'local deletions are collected');
cmp_ok($oslo->safe_psql('postgres', 'select count(*) from braid.tombstone where origin_id <> 0'), '>=', 4, 'those of other nodes are written as they are applied');
is($paris->safe_psql('postgres', q[select string_agg(distinct relation::regclass::text, ' ' order by relation::regclass::text) from braid.tombstone where origin_id = 0]),
	'parted_high t texty whole', 'with their tables');

# Deleted and inserted again there, and deleted later here.
on($tokyo, "insert into t values (2, 'old'), (3, 'old'), (4, 'old'), (5, 'old')");
cut();
on($tokyo, "delete from t where k in (2, 3)");
on($tokyo, "insert into t values (2, 'again'), (3, 'again')");
on($tokyo, "insert into t select i, 'many' from generate_series(100, 199) i");
on($paris, "delete from t where k in (2, 3)");
on($paris, "insert into t select i, 'gone' from generate_series(100, 199) i");
on($paris, "delete from t where k >= 100");
# A key that a row has left.
on($tokyo, "update t set v = 'stayed' where k = 4");
on($paris, "update t set k = 40, v = 'moved' where k = 4");
vacuumed($paris, 't');
heal();
everywhere('t', 'moved old', 'a row that was inserted again, many rows at once, a key that was left');
is($paris->safe_psql('postgres', q[select count(*) from braid.conflict_history where kind = 'update_deleted' and winner = 'local']) > 0, 1, 'each is in the history as deleted');

# The deletion comes before the insert: by another link.
cut([ $oslo, 'oslo_from_tokyo' ]);
on($tokyo, "insert into t values (6, 'first'), (7, 'first')");
caught_up($paris, $tokyo);
on($paris, 'delete from t where k in (6, 7)');
caught_up($oslo, $paris);
is($oslo->safe_psql('postgres', q[select count(*) from t where k in (6, 7)]), '0', 'nothing to delete yet');
vacuumed($oslo, 't');
$oslo->restart;
heal([ $oslo, 'oslo_from_tokyo' ]);
everywhere('t', 'moved old', 'nor does it come later, after a restart');

# Both at the same time, over two links. Either of the two appliers has to wait when it has written
# its part, but not committed.
my $waiting = q[select count(distinct pid) from pg_locks join pg_stat_activity using (pid) where not granted and backend_type = 'braid applier'];
for my $late (qw(tokyo paris))
{
	cut([ $oslo, 'oslo_from_tokyo' ], [ $oslo, 'oslo_from_paris' ]);
	my %also = ($late => q[update t set v = 'old' where k = 5]);
	on($tokyo, 'begin; insert into t values (8, \'first\'); ' . ($also{tokyo} // '') . '; commit');
	caught_up($paris, $tokyo);
	on($paris, 'begin; delete from t where k = 8; ' . ($also{paris} // '') . '; commit');
	my $lock = $oslo->background_psql('postgres', on_error_stop => 1);
	$lock->query_safe('begin; select from t where k = 5 for update');
	my ($first, $second) = $late eq 'tokyo' ? qw(tokyo paris) : qw(paris tokyo);
	on($oslo, "select braid.enable_subscription('oslo_from_$first')");
	ok(wait_until(sub { $oslo->safe_psql('postgres', $waiting) eq '1' }, 20), "what comes from $first is held up");
	on($oslo, "select braid.enable_subscription('oslo_from_$second')");
	# The other one waits for it, or tries again and again.
	ok(wait_until(sub { $oslo->safe_psql('postgres', "select exists (select from braid.apply_workers where subscription = 'oslo_from_$second' and worker <> 'leader' and (retries > 0 or state = 'applying'))") eq 't' }, 20),
		"what comes from $second waits for that");
	$lock->query_safe('commit');
	$lock->quit;
	heal([ $oslo, 'oslo_from_tokyo' ], [ $oslo, 'oslo_from_paris' ]);
	everywhere('t', 'moved old', "a deletion and an older insert at once, that from $late first");
}

# Killed before the deletion is collected. The collector starts again, at any point of its work.
on($tokyo, "insert into t select i, 'old' from generate_series(1000, 1999) i");
cut();
on($tokyo, "update t set v = 'updated' where k >= 1000");
for my $round (1 .. 5)
{
	my ($low, $high) = (800 + $round * 200, 999 + $round * 200);
	on($paris, "delete from t where k between $low and $high");
	if ($round == 2)
	{
		my ($pid) = worker_pids($paris, 'braid collector');
		on($paris, "select pg_terminate_backend($pid)") if $pid;
	}
	if ($round % 2)
	{
		$paris->stop('immediate');
		restart_crashed($paris);
	}
}
ok(wait_until(sub { collectors($paris) }, 20), 'there is a collector again');
vacuumed($paris, 't');
heal();
everywhere('t', 'moved old', 'deletions around crashes');

# More in one transaction than is held in memory.
on($tokyo, "insert into t select i, 'old' from generate_series(10000, 79999) i");
cut();
on($tokyo, "update t set v = 'updated' where k in (10000, 79999)");
on($paris, 'delete from t where k >= 10000');
vacuumed($paris, 't');
heal();
everywhere('t', 'moved old', 'a large transaction');

# A transaction that runs for long while others delete; one that is rolled back.
on($tokyo, "insert into t select i, 'old' from generate_series(2000, 2009) i");
cut();
my $long = $paris->background_psql('postgres', on_error_stop => 1);
$long->query_safe('begin; delete from t where k = 2000; savepoint s; delete from t where k = 2001; rollback to s; delete from t where k = 2002');
on($paris, "begin; delete from t where k = 2003; rollback; delete from t where k between 2004 and 2006");
on($tokyo, "update t set v = 'updated' where k between 2000 and 2009");
vacuumed($paris, 'texty');
$long->query_safe('commit');
$long->quit;
vacuumed($paris, 't');
heal();
everywhere('t', 'moved old' . ' updated' x 8, 'a long transaction, newer than the updates; others are older');
on($tokyo, "delete from t");
converged(@all);

# A row goes to another key on one node while it changes, or goes, under the old one on another:
# each key for itself.
on($tokyo, "insert into t values (50, 'old'), (51, 'old'), (52, 'old'), (53, 'old')");
cut();
on($paris, "update t set k = 60, v = 'moved' where k = 50; update t set k = 62, v = 'moved' where k = 52");
on($tokyo, "update t set v = 'later' where k = 50; delete from t where k = 52");
on($tokyo, "update t set v = 'earlier' where k = 51; delete from t where k = 53");
on($paris, "update t set k = 61, v = 'moved' where k = 51; update t set k = 63, v = 'moved' where k = 53");
heal();
is(join(' / ', map { $_->safe_psql('postgres', q[select string_agg(k || ' ' || v, ', ' order by k) from t]) } @all),
	join(' / ', ('50 later, 60 moved, 61 moved, 62 moved, 63 moved') x 3), 'keys that change');
on($tokyo, 'delete from t');
converged(@all);

# Random changes of few rows on all nodes, while they are apart; VACUUM at any moment.
srand 45;
for my $round (1 .. 4)
{
	cut();
	for my $step (1 .. 40)
	{
		my $node = $all[ int rand 3 ];
		my @statements;
		for (1 .. 3)
		{
			my ($k, $other) = (1 + int rand 12, 1 + int rand 12);
			push @statements, (
				"insert into t values ($k, '$round.$step') on conflict (k) do nothing",
				"insert into t values ($k, '$round.$step') on conflict (k) do update set v = excluded.v",
				"update t set v = '$round.$step' where k = $k",
				"update t set k = $other, v = '$round.$step' where k = $k and not exists (select from t where k = $other)",
				"delete from t where k = $k")[ int rand 5 ];
		}
		on($node, join ';', @statements);
		on($node, 'vacuum t') if $step % 8 == 0;
	}
	vacuumed($_, 't') for @all;
	heal();
	same_tables(\@all, 't');
}

# Records that no change can need any more are removed; here as if an hour had passed.
cmp_ok($paris->safe_psql('postgres', 'select rows from braid.deletions'), '>', 1000, 'deletions are kept');
on($paris, 'update braid.tombstone set deleted_at = deleted_at - 3700000000');
$paris->restart;
ok(wait_until(sub { $paris->safe_psql('postgres', q[select count(*) from braid.deletions where oldest < now() - interval '1 hour']) eq '0' }, 60), 'those go that are older than what can still arrive');

# One writer is left: nothing is to be remembered.
on($oslo, "select braid.drop_subscription('oslo_from_$_')") for qw(tokyo paris);
on($tokyo, "select braid.drop_subscription('tokyo_from_$_')") for qw(oslo paris);
on($paris, "select braid.drop_subscription('paris_from_$_')") for qw(oslo tokyo);
ok(wait_until(sub { !collectors($_) && !slots($_) }, 30), $_->name . ' has no collector and no slot for it any more') for @all;
# Wanted always; the slot goes with the extension.
on($oslo, 'alter system set braid.remember_deletions = on');
$oslo->reload;
ok(wait_until(sub { collectors($oslo) && slots($oslo) }, 30), 'a collector on demand');
on($oslo, 'drop extension braid');
ok(wait_until(sub { !collectors($oslo) && !slots($oslo) }, 30), 'neither it nor its slot outlive the extension');
unlike(slurp_file($_->logfile), qr/PANIC|TRAP|terminated by signal/, $_->name . ' has not crashed') for @all;

done_testing();
