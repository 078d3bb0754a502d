# A table is truncated on one node while others write it, and all are cut off: rows older than the
# truncate are deleted everywhere, whenever they come, and newer ones stay everywhere.

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
on_all(q[
	create table t (k int primary key, v text);
	create table parted (k int primary key, v text) partition by range (k);
	create table parted_low partition of parted for values from (0) to (100);
	create table parted_high partition of parted for values from (100) to (200);
	create table bare (k int, v text);
	create table parent (k int primary key, v text);
	create table child (k int primary key, parent int not null references parent, v text);
	create table ruled (k int primary key, v text);
	create table fired (what text);
	create function fire() returns trigger language plpgsql as $$ begin insert into public.fired values (tg_when || ' ' || tg_op); return null; end $$;
	create table watched (k int primary key, v text);
	create trigger a before truncate on watched for each statement execute function fire();
	create trigger b after truncate on watched for each statement execute function fire();
	create trigger c after delete on watched for each row execute function fire();
	alter table watched enable always trigger a;
	alter table watched enable replica trigger b;
	alter table watched enable always trigger c;
	drop publication braid;
	create publication braid for table t, parted, bare, parent, child, ruled, watched;
], @all);
for my $subscriber (@all)
{
	subscribe($subscriber, $_) for grep { $_ != $subscriber } @all;
}
my @streams = map { my $s = $_; map { [ $s, $s->name . '_from_' . $_->name ] } grep { $_ != $s } @all } @all;
ok(wait_until(sub { scalar worker_pids($_, 'braid collector') }, 20), $_->name . ' collects deletions') for @all;

sub on { my ($node, @sql) = @_; $node->safe_psql('postgres', $_) for @sql; return; }
sub one { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }

sub cut
{
	converged(@all);
	disable($_->[0], $_->[1]) for @_ ? @_ : @streams;
	return if @_;
	$_->poll_query_until('postgres', q[select not coalesce(bool_or(active), false) from pg_replication_slots where slot_name not like 'braid_deletions_%']) or die for @all;
	on($_, 'truncate braid.conflict_record') for @all;
	return;
}

sub heal
{
	on($_->[0], "select braid.enable_subscription('$_->[1]')") for @_ ? @_ : @streams;
	converged(@all);
	is(status(@$_)->{last_error}, '', "$_->[1] goes on") for grep { status(@$_)->{last_error} ne '' } @streams;
	return;
}

sub everywhere
{
	my ($table, $expected, $what) = @_;
	is(join(' / ', map { one($_, "select coalesce(string_agg(k || v, ' ' order by k), '') from $table") } @all), join(' / ', ($expected) x 3), $what);
	return;
}

sub met
{
	my ($node, $kind, $winner) = @_;
	return one($node, "select coalesce(string_agg(distinct coalesce(key ->> 'k', local_row ->> 'k', remote_row ->> 'k') || ':' || coalesce(remote_row ->> 'v', local_row ->> 'v'), ' '), '') "
		. "from braid.conflict_history where kind = '$kind' and winner = '$winner'");
}

# Inserts and updates, older and newer; in all modes.
for my $mode (qw(parallel batch aggregate serial relaxed))
{
	for my $table (qw(t parted bare))
	{
		# Nobody can tell rows of a table without a key apart.
		my $has_key = $table ne 'bare';
		my $order = $mode eq 'relaxed' ? 'relaxed' : 'source';
		my $apply = $mode eq 'relaxed' ? 'parallel' : $mode;
		on($_->[0], "select braid.alter_subscription('$_->[1]', apply_mode => '$apply', commit_order => '$order')") for @streams;
		on($tokyo, "insert into $table values (1, 'old'), (2, 'old'), (3, 'old'), (101, 'old'), (102, 'old')");
		cut();
		on($paris, "insert into $table values (10, 'older'), (110, 'older')");
		on($paris, "update $table set v = 'older' where k = 1") if $has_key;
		on($tokyo, "truncate $table");
		on($paris, "insert into $table values (11, 'newer')", "insert into $table select 120 + i, 'newer' from generate_series(1, 6) i");
		on($paris, "update $table set v = 'newer' where k = 2") if $has_key;
		on($tokyo, "insert into $table values (12, 'newer')");
		heal();
		everywhere($table, ($has_key ? '2newer ' : '') . '11newer 12newer 121newer 122newer 123newer 124newer 125newer 126newer', "$mode, $table: what is newer stays, what is older is gone");
		if ($has_key)
		{
			is(met($tokyo, 'update_deleted', 'local'), '10:older 110:older 1:older', 'what the truncating node had not seen is recorded there') if $table eq 't';
			is(met($tokyo, 'update_deleted', 'remote'), '2:newer', 'and what came back') if $table eq 't';
			is(met($paris, 'delete_origin_differs', 'local'), '11:newer 121:newer 122:newer 123:newer 124:newer 125:newer 126:newer 2:newer', 'what stayed is recorded where it was') if $table eq 't';
		}
		on($tokyo, "truncate $table");
		converged(@all);
		everywhere($table, '', 'and all of it goes by a later one');
	}
}
on($_->[0], "select braid.alter_subscription('$_->[1]', apply_mode => 'parallel', commit_order => 'source')") for @streams;

# One after the other, by two nodes.
on($tokyo, q[insert into t values (1, 'old')]);
cut();
on($tokyo, 'truncate t', q[insert into t values (23, 'between')]);
on($paris, q[insert into t values (20, 'between')], 'truncate t');
on($oslo, q[insert into t values (25, 'newer')]);
on($tokyo, q[insert into t values (24, 'newer')]);
heal();
everywhere('t', '24newer 25newer', 'two truncates');

# Within a transaction what comes before goes, and what comes after stays.
cut();
on($tokyo, q[begin; insert into t values (30, 'before'); truncate t; insert into t values (31, 'after'); commit]);
on($paris, q[insert into t values (32, 'newer')]);
heal();
everywhere('t', '31after 32newer', 'in a transaction that writes too');

# Changes of keys, to and from a row that was truncated.
on($tokyo, q[insert into t values (40, 'old'), (41, 'old')]);
cut();
on($paris, q[update t set k = 42, v = 'older' where k = 40]);
on($tokyo, 'truncate t');
on($paris, q[update t set k = 43, v = 'newer' where k = 41]);
heal();
everywhere('t', '43newer', 'keys that change');

# By way of a third node: the truncate comes there first.
on($tokyo, 'truncate t');
cut([ $oslo, 'oslo_from_paris' ], [ $tokyo, 'tokyo_from_paris' ]);
on($paris, q[insert into t values (50, 'older')], q[insert into bare values (50, 'older')]);
on($tokyo, 'truncate t, bare');
caught_up($oslo, $tokyo);
$oslo->restart;
$tokyo->stop('immediate');
restart_crashed($tokyo);
heal([ $oslo, 'oslo_from_paris' ], [ $tokyo, 'tokyo_from_paris' ]);
everywhere($_, '', "$_: by three nodes, with a restart and a crash") for qw(t bare);

# The change comes before the truncate is collected.
cut();
on($paris, q[insert into t values (51, 'older')], q[insert into bare values (51, 'older')]);
my ($collector) = wait_for_worker($tokyo, 'braid collector');
kill 'STOP', $collector;
on($tokyo, 'truncate t, bare');
on($tokyo, q[select braid.enable_subscription('tokyo_from_paris')]);
becomes($tokyo, q[select exists (select from braid.apply_workers where subscription = 'tokyo_from_paris' and state = 'applying')], 't', 'an applier has a change, and waits for the collector');
is(one($tokyo, 'select count(*) from t'), '0', 'so nothing has come');
is(one($tokyo, 'select count(*) from bare'), '0', 'nor to the table without a key');
kill 'CONT', $collector;
heal();
everywhere($_, '', "$_: before it is collected") for qw(t bare);

# Crashes before it is.
for my $round (1 .. 3)
{
	cut();
	on($paris, "insert into t values (5$round, 'older')");
	on($tokyo, 'truncate t');
	$tokyo->stop('immediate');
	restart_crashed($tokyo);
	heal();
	everywhere('t', '', 'or after a crash');
}

# Several tables at once: a key refers from one to the other.
on($tokyo, q[insert into parent values (1, 'old'); insert into child values (1, 1, 'old')]);
cut();
on($paris, q[insert into parent values (2, 'older'); insert into child values (2, 2, 'older')]);
on($tokyo, 'truncate parent restart identity cascade');
on($paris, q[insert into parent values (3, 'newer')]);
heal();
everywhere('parent', '3newer', 'a table to which another one refers');
everywhere('child', '', 'and that one');
on($tokyo, q[insert into child values (3, 3, 'old')]);
converged(@all);
on($paris, 'truncate parent cascade');
converged(@all);
everywhere($_, '', "$_: with nothing in the way") for qw(parent child);

# Triggers of a truncate fire on the others where they are to, and those of rows don't.
on($tokyo, q[insert into watched values (1, 'old')]);
cut();
on($tokyo, 'truncate watched');
on($paris, q[insert into watched values (2, 'newer')]);
on($_, 'delete from fired') for @all;
heal();
everywhere('watched', '2newer', 'a table with triggers');
is(one($_, q[select string_agg(what, ', ' order by what desc) from fired]), 'BEFORE TRUNCATE, AFTER TRUNCATE', 'they have fired at ' . $_->name) for $paris, $oslo;

# Other rules.
my %kept = (apply_remote => [ '', '' ], keep_local => [ '1older 2newer', '' ], last_update_wins => [ '2newer', '2newer' ]);
for my $rule (sort keys %kept)
{
	on($_, "delete from ruled; select braid.set_conflict_resolution('ruled', null, '$rule')") for @all;
	converged(@all);
	cut();
	on($paris, q[insert into ruled values (1, 'older')]);
	on($tokyo, 'truncate ruled');
	on($paris, q[insert into ruled values (2, 'newer')]);
	on($paris, q[select braid.enable_subscription('paris_from_tokyo')]);
	caught_up($paris, $tokyo);
	is(one($paris, q[select coalesce(string_agg(k || v, ' ' order by k), '') from ruled]), $kept{$rule}[0], "$rule decides about each row");
	is(one($paris, q[select count(*) from braid.conflict_history where local_row ->> 'k' = '2']), '1', 'what is newer is a conflict');
	heal();
}
on($_, q[delete from ruled; select braid.set_conflict_resolution('ruled', null, null)]) for @all;
converged(@all);
on($paris, q[select braid.set_conflict_resolution('ruled', 'delete_origin_differs', 'error')]);
cut();
on($paris, q[insert into ruled values (1, 'older')]);
on($tokyo, 'truncate ruled');
on($paris, q[select braid.enable_subscription('paris_from_tokyo')]);
ok(wait_until(sub { status($paris, 'paris_from_tokyo')->{state} eq 'error' }, 20), 'error stops it');
on($paris, q[select braid.set_conflict_resolution('ruled', 'delete_origin_differs', null)]);
heal();
everywhere('ruled', '', 'and it goes on with another one');

# At random.
srand 73;
for my $round (1 .. 4)
{
	cut();
	for my $step (1 .. 40)
	{
		my $k = 1 + int rand 12;
		on($all[ int rand 3 ], (
			"insert into t values ($k, ' $round.$step') on conflict (k) do update set v = excluded.v",
			"update t set v = ' $round.$step' where k = $k",
			"delete from t where k = $k",
			"insert into t values ($k, ' $round.$step') on conflict (k) do nothing",
			$step % 5 ? "update t set v = v || '.' where k < $k" : 'truncate t')[ int rand 5 ]);
	}
	heal();
	same_tables(\@all, 't');
}

done_testing();
