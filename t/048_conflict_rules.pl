# A conflict is resolved by this node's rule for the table and the kind. A changed rule counts from
# the next transaction on. The history names the rule.

use strict;
use warnings;

use Braid;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
my @both = ($tokyo, $paris);
on_all(q[
	create table account (id int primary key, v text);
	create table other (id int primary key, v text);
	create table split (id int primary key, v text) partition by range (id);
	create table split_low partition of split for values from (0) to (1000);
], @both);
subscribe($paris, $tokyo);
subscribe($tokyo, $paris);

my $id = 0;

# One row that both nodes change while nothing is delivered, tokyo first; what each has afterwards.
# `do` is what each does.
sub meet
{
	my ($table, $before, $first, $second) = @_;
	$id++;
	my $run = sub { my ($node, $sql) = @_; $node->safe_psql('postgres', $sql =~ s/\$t/$table/gr =~ s/\$id/$id/gr) if $sql };
	$run->($tokyo, $before);
	converged(@both);
	my @streams = ([ $paris, 'paris_from_tokyo' ], [ $tokyo, 'tokyo_from_paris' ]);
	disable($_->[0], $_->[1]) for @streams;
	$_->poll_query_until('postgres', "select not coalesce(bool_or(active), false) from pg_replication_slots where slot_name !~ '^braid_deletions'") for @both;
	$run->($tokyo, $first);
	$run->($paris, $second);
	$_->[0]->safe_psql('postgres', "select braid.enable_subscription('$_->[1]')") for @streams;
	return $id;
}

sub seen
{
	my ($table, $row) = @_;
	return join ' ', map { $_->safe_psql('postgres', "select coalesce((select v from $table where id = $row), 'none')") } @both;
}

sub history
{
	my ($node, $row) = @_;
	return $node->safe_psql('postgres',
		"select kind, resolution, winner from braid.conflict_history where key = jsonb_build_object('id', $row) order by conflict_id desc limit 1");
}

my $insert = q[insert into $t values ($id, 'old')];
my @update = (q[update $t set v = 'first' where id = $id], q[update $t set v = 'second' where id = $id]);
my @inserts = (q[insert into $t values ($id, 'first')], q[insert into $t values ($id, 'second')]);
my $delete = q[delete from $t where id = $id];

# Without a rule the newer one stays, on both.
my $row = meet('account', $insert, @update);
converged(@both);
is(seen('account', $row), 'second second', 'last update wins');
is(history($tokyo, $row), 'update_origin_differs|last_update_wins|remote', 'and the history says so');

# The older one, on both.
$_->safe_psql('postgres', "select braid.set_conflict_resolution('account', null, 'first_update_wins')") for @both;
for my $case ([ 'updates', $insert, @update ], [ 'inserts', '', @inserts ])
{
	my ($what, @do) = @$case;
	$row = meet('account', @do);
	converged(@both);
	is(seen('account', $row), 'first first', "first update wins, $what");
	like(history($tokyo, $row), qr/\|first_update_wins\|local/, 'the winner is here');
	like(history($paris, $row), qr/\|first_update_wins\|remote/, 'or there');
}
$row = meet('account', $insert, $delete, $update[1]);
converged(@both);
is(seen('account', $row), 'none none', 'a delete that was first stays');
$row = meet('account', $insert, $update[0], $delete);
converged(@both);
is(seen('account', $row), 'first first', 'one that was not does not');
$row = meet('other', $insert, @update);
converged(@both);
is(seen('other', $row), 'second second', 'another table has its own rule');

# A rule counts on its node only: paris always takes the remote row, tokyo never does.
$paris->safe_psql('postgres', "select braid.set_conflict_resolution('account', null, 'apply_remote')");
$tokyo->safe_psql('postgres', "select braid.set_conflict_resolution('account', null, 'keep_local')");
$row = meet('account', $insert, @update);
converged(@both);
is(seen('account', $row), 'first first', 'one node always wins');
$row = meet('account', $insert, $delete, $update[1]);
converged(@both);
is(seen('account', $row), 'none none', 'with a delete');
$row = meet('account', $insert, $update[0], $delete);
converged(@both);
is(seen('account', $row), 'first first', 'against a delete');
is(history($tokyo, $row), 'delete_origin_differs|keep_local|local', 'what is kept is said');
is(history($paris, $row), 'update_deleted|apply_remote|remote', 'and what is applied');

# A rule for a partitioned table is one for its partitions; the nearer one counts, and that for the
# kind.
$_->safe_psql('postgres', q[
	select braid.set_conflict_resolution(null, null, 'keep_local');
	select braid.set_conflict_resolution('split', 'insert_exists', 'first_update_wins');
]) for @both;
$row = meet('split', '', @inserts);
converged(@both);
is(seen('split', $row), 'first first', 'the rule of a partitioned table');
$_->safe_psql('postgres', q[select braid.set_conflict_resolution('split_low', null, 'last_update_wins')]) for @both;
$row = meet('split', '', @inserts);
converged(@both);
is(seen('split', $row), 'second second', 'the rule of the partition');
$row = meet('other', '', @inserts);
converged(@both);
is(seen('other', $row), 'first second', 'the default rule, for a table without one');

# Rule `error`: the subscription stops, nothing is lost, and another rule lets it go on.
$_->safe_psql('postgres', q[
	select braid.set_conflict_resolution(null, null, null);
	select braid.set_conflict_resolution('other', 'insert_exists', 'error');
]) for @both;
$row = meet('other', '', @inserts);
for my $stopped ([ $paris, 'paris_from_tokyo' ], [ $tokyo, 'tokyo_from_paris' ])
{
	my ($node, $name) = @$stopped;
	ok(wait_until(sub { status($node, $name)->{state} eq 'error' }, 30), "$name stops");
	my $status = status($node, $name);
	is($status->{last_error}, 'conflict insert_exists in table "public.other"', 'it says why');
	like($status->{error_hint}, qr/set_conflict_resolution/, 'and what to do');
	$node->safe_psql('postgres', "select braid.set_conflict_resolution('other', null, null), braid.set_conflict_resolution('other', 'insert_exists', null)");
	$node->safe_psql('postgres', "select braid.enable_subscription('$name')");
}
converged(@both);
is(seen('other', $row), 'second second', 'then it goes on');

# While it runs: from the next transaction on.
$paris->safe_psql('postgres', "insert into account values (500, 'here')");
converged(@both);
for my $step ([ 'keep_local', 'here' ], [ 'apply_remote', '2' ], [ 'keep_local', '2' ])
{
	my ($rule, $expected) = @$step;
	$paris->safe_psql('postgres', "update account set v = v where id = 500");
	converged(@both);
	$paris->safe_psql('postgres', "select braid.set_conflict_resolution('account', null, '$rule')");
	# Tokyo's own subscription is disabled, so that paris changes the row without tokyo's knowledge.
	disable($tokyo, 'tokyo_from_paris');
	$tokyo->safe_psql('postgres', "update account set v = '1' where id = 500");
	caught_up($paris, $tokyo);
	$tokyo->safe_psql('postgres', "update account set v = '2' where id = 500");
	caught_up($paris, $tokyo);
	is($paris->safe_psql('postgres', 'select v from account where id = 500'), $expected, "$rule counts at once");
	$tokyo->safe_psql('postgres', "select braid.enable_subscription('tokyo_from_paris')");
	$tokyo->safe_psql('postgres', "update account set v = '2' where id = 500") if $rule eq 'apply_remote';
}

done_testing();
