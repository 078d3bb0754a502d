# Slots: an existing slot is used if that is possible. A slot of another owner is never dropped.

use strict;
use warnings;

use Braid;
use IPC::Run ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo', conf => "max_slot_wal_keep_size = '16MB'\n");
my $paris = new_node('paris', publication => '');
on_all('create table item (id int primary key, v text)', $tokyo, $paris);
my $dsn = $tokyo->connstr('postgres');

sub write_one
{
	my ($id) = @_;
	$tokyo->safe_psql('postgres', "insert into item values ($id, 'row $id')");
	return;
}

sub slots { return $tokyo->safe_psql('postgres', 'select slot_name from pg_replication_slots order by 1'); }

sub refused
{
	my ($arguments, $state, $message, $hint, $why) = @_;
	my ($code, undef, $error) = $paris->psql('postgres', "select braid.create_subscription('s', \$dsn\$$dsn\$dsn\$, $arguments)",
		extra_params => [ '-v', 'VERBOSITY=verbose' ]);
	isnt($code, 0, "$why: refused");
	like($error, qr/ERROR:  $state: $message/, "$why: SQLSTATE and message");
	like($error, qr/HINT:  $hint/, "$why: hint");
	return;
}

sub in_state
{
	my ($state, $name, $why) = @_;
	my $status;
	ok(wait_until(sub { ($status = status($paris, $name))->{state} eq $state }, 20), $why) or diag(explain($status));
	return $status;
}

# A slot of ours, made by hand: what was committed since then arrives, without a copy.
$tokyo->safe_psql('postgres', q[select pg_create_logical_replication_slot('by_hand', 'braid')]);
write_one($_) for 1 .. 3;
subscribe($paris, $tokyo, name => 's', slot_name => q('by_hand'), create_slot => 'false', copy_data => 'false');
write_one(4);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'item');
is(slots(), 'by_hand', 'no other slot was made');
is($paris->safe_psql('postgres', q[select phase, slot_name from braid.subscription_detail]), 'stream|by_hand', 'as the details say');

# While the slot is in use, no other subscription can use it.
my $rome = new_node('rome', publication => '');
$rome->safe_psql('postgres', 'create table item (id int primary key, v text)');
my ($code, undef, $error) = $rome->psql('postgres',
	"select braid.create_subscription('s', \$dsn\$$dsn\$dsn\$, slot_name => 'by_hand', create_slot => false)", extra_params => [ '-v', 'VERBOSITY=verbose' ]);
isnt($code, 0, 'active slot: refused');
like($error, qr/ERROR:  55006: replication slot "by_hand" is in use at the provider/, 'active slot: SQLSTATE and message');
like($error, qr/DETAIL:  Process \d+ there reads from it/, 'active slot: by whom');
like($error, qr/HINT:  End that reader, or name another slot/, 'active slot: hint');

# A slot that its last reader is just leaving does not count as in use: dropped and created again
# without a pause.
$paris->safe_psql('postgres', q[select braid.drop_subscription('s', drop_slot => false)]);
subscribe($paris, $tokyo, name => 's', slot_name => q('by_hand'), create_slot => 'false', copy_data => 'false');
write_one(5);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'item');

# With a copy: rows from before the slot too, and none twice.
$paris->safe_psql('postgres', q[select braid.drop_subscription('s')]);
ok($paris->poll_query_until('postgres', 'select count(*) = 0 from braid.pending_cleanup'), 'its slot is dropped with it');
is(slots(), '', 'at the provider');
$paris->safe_psql('postgres', 'truncate item');
$tokyo->safe_psql('postgres', q[select pg_create_logical_replication_slot('by_hand', 'braid')]);
write_one(6);
subscribe($paris, $tokyo, name => 's', slot_name => q('by_hand'), create_slot => 'false');
write_one(7);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'item');
$paris->safe_psql('postgres', q[select braid.drop_subscription('s'); truncate item]);
ok($paris->poll_query_until('postgres', 'select count(*) = 0 from braid.pending_cleanup'), 'and again');

# Slots that can't be read from.
$tokyo->safe_psql('postgres', q[
	select pg_create_logical_replication_slot('anothers', 'test_decoding');
	select pg_create_physical_replication_slot('physical');
	create database elsewhere;
]);
$tokyo->safe_psql('elsewhere', q[select pg_create_logical_replication_slot('elsewhere', 'braid')]);
my $not_ours = 'is not one of output plugin braid in the provider\'s database';
refused(q(slot_name => 'missing', create_slot => false), '42704', 'replication slot "missing" does not exist at the provider',
	q{Create it there with pg_create_logical_replication_slot\('missing', 'braid'\)}, 'missing slot');
refused(qq(slot_name => '$_', create_slot => false), '55000', qq(replication slot "$_" $not_ours), 'Name another slot', "slot $_")
  for qw(anothers physical elsewhere);
refused(qq(slot_name => '$_'), '42710', qq(replication slot "$_" already exists at the provider), 'Choose another slot_name', "creating slot $_")
  for qw(anothers physical elsewhere);
$tokyo->safe_psql('postgres', q[select pg_create_logical_replication_slot('behind', 'braid')]);
ok(wait_until(sub {
	$tokyo->safe_psql('postgres', "select pg_logical_emit_message(false, 'braid_test', repeat('x', 1000)); select pg_switch_wal()") for 1 .. 3;
	$tokyo->safe_psql('postgres', 'checkpoint');
	$tokyo->safe_psql('postgres', "select wal_status from pg_replication_slots where slot_name = 'behind'") eq 'lost';
}, 30), 'the provider removes WAL that a slot needs');
refused(q(slot_name => 'behind', create_slot => false), '55000', 'the provider has removed WAL that replication slot "behind" needs', 'Drop the slot there', 'WAL removed');
$tokyo->safe_psql('postgres', 'select pg_drop_replication_slot(slot_name) from pg_replication_slots');
$tokyo->safe_psql('postgres', 'drop database elsewhere');

# Somebody creates a slot of the name that was chosen, before the workers do: it stays, whatever
# happens here.
for my $case ([ named => q(, slot_name => 'wanted'), 'wanted' ], [ chosen => '', 'braid_paris_s' ])
{
	my ($which, $argument, $slot) = @$case;
	$paris->safe_psql('postgres', "select braid.create_subscription('s', \$dsn\$$dsn\$dsn\$, enabled => false$argument)");
	$tokyo->safe_psql('postgres', "select pg_create_logical_replication_slot('$slot', 'braid')");
	my $position = $tokyo->safe_psql('postgres', "select confirmed_flush_lsn from pg_replication_slots where slot_name = '$slot'");
	write_one($which eq 'named' ? 8 : 9);
	$paris->safe_psql('postgres', q[select braid.enable_subscription('s')]);
	my $status = in_state('error', 's', "$which name, taken meanwhile: stops");
	like($status->{last_error}, qr/replication slot "$slot" at the provider is not this subscription's/, "$which: says why");
	like($status->{error_hint}, qr/another slot_name.*drop it at the provider/, "$which: and what to do");
	$paris->safe_psql('postgres', q[select braid.drop_subscription('s')]);
	is($paris->safe_psql('postgres', 'select count(*) from braid.pending_cleanup'), '0', "$which: nothing to clean up");
	is($tokyo->safe_psql('postgres', "select slot_name, confirmed_flush_lsn from pg_replication_slots"), "$slot|$position", "$which: the slot is untouched");
	$tokyo->safe_psql('postgres', "select pg_drop_replication_slot('$slot')");
}

# The other slot is gone: the subscription goes on, with a slot of its own.
$paris->safe_psql('postgres', "select braid.create_subscription('s', \$dsn\$$dsn\$dsn\$, enabled => false)");
$tokyo->safe_psql('postgres', q[select pg_create_logical_replication_slot('braid_paris_s', 'test_decoding')]);
$paris->safe_psql('postgres', q[select braid.enable_subscription('s')]);
in_state('error', 's', 'of another plugin: stops');
$tokyo->safe_psql('postgres', q[select pg_drop_replication_slot('braid_paris_s')]);
$paris->safe_psql('postgres', q[select braid.enable_subscription('s'); select braid.wait_for_subscription('s')]);
same_tables([ $tokyo, $paris ], 'item');
$paris->safe_psql('postgres', q[select braid.drop_subscription('s'); truncate item]);
ok($paris->poll_query_until('postgres', 'select count(*) = 0 from braid.pending_cleanup'), 'its own slot is dropped');

# A left-over of its own, from an attempt that was cut off between slot and catalog, is replaced.
$paris->safe_psql('postgres', "select braid.create_subscription('s', \$dsn\$$dsn\$dsn\$, enabled => false, slot_name => 'cut_off')");
$tokyo->safe_psql('postgres', q[select pg_create_logical_replication_slot('cut_off', 'braid')]);
$paris->safe_psql('postgres', q[update braid.subscription set slot_attempted = true; select braid.enable_subscription('s'); select braid.wait_for_subscription('s')]);
same_tables([ $tokyo, $paris ], 'item');
is(slots(), 'cut_off', 'under its name');
$paris->safe_psql('postgres', q[select braid.drop_subscription('s'); truncate item]);
ok($paris->poll_query_until('postgres', 'select count(*) = 0 from braid.pending_cleanup'), 'and dropped in the end');

# A subscription that was to create a slot gets an existing one instead.
$paris->safe_psql('postgres', "select braid.create_subscription('s', \$dsn\$$dsn\$dsn\$, enabled => false)");
$tokyo->safe_psql('postgres', q[select pg_create_logical_replication_slot('instead', 'braid')]);
my $created = $tokyo->safe_psql('postgres', 'select restart_lsn from pg_replication_slots');
write_one(10);
$paris->safe_psql('postgres', q[
	select braid.alter_subscription('s', slot_name => 'instead');
	select braid.enable_subscription('s');
]);
$paris->safe_psql('postgres', q[select braid.wait_for_subscription('s')], timeout => $PostgreSQL::Test::Utils::timeout_default);
write_one(11);
ok(wait_until(sub { digest($paris, 'item') eq digest($tokyo, 'item') }, 20), 'given another slot: has all rows');
is(slots(), 'instead', 'and it is that slot that is read');

# A dropped subscription's slot that is in use does not keep others from being dropped.
$paris->safe_psql('postgres', q[select braid.drop_subscription('s')]);
ok($paris->poll_query_until('postgres', 'select count(*) = 0 from braid.pending_cleanup'), 'nothing is left');
$paris->safe_psql('postgres', "select braid.create_subscription('$_', \$dsn\$$dsn\$dsn\$, copy_data => false); select braid.wait_for_subscription('$_')")
  for 'busy', 'free';
$paris->safe_psql('postgres', q[select braid.disable_subscription('busy')]);
ok($tokyo->poll_query_until('postgres', q[select not active from pg_replication_slots where slot_name = 'braid_paris_busy']), 'a slot is let go');
my $other = IPC::Run::start(
	[ 'pg_recvlogical', '-d', $dsn, '--slot', 'braid_paris_busy', '--start', '-f', '-', '-o', 'proto_version=1', '-o', 'publication_names=braid' ],
	'<', \undef, '>', '/dev/null', '2>', '/dev/null');
ok($tokyo->poll_query_until('postgres', q[select active from pg_replication_slots where slot_name = 'braid_paris_busy']), 'and taken by another reader');
$paris->safe_psql('postgres', q[select braid.drop_subscription('busy'); select braid.drop_subscription('free')]);
ok(wait_until(sub { slots() eq 'braid_paris_busy' }, 20), 'the other slot is dropped');
ok(wait_until(sub { $paris->safe_psql('postgres', 'select slot_name, last_error ~ $$is active for PID$$ from braid.pending_cleanup') eq 'braid_paris_busy|t' }, 20),
	'the busy one is listed, with the reason');
$other->kill_kill;
ok($paris->poll_query_until('postgres', 'select count(*) = 0 from braid.pending_cleanup'), 'and dropped once it is let go');

# Names that fold to the same, of two nodes: two slots.
my $dash = new_node('par-is', publication => '');
$dash->safe_psql('postgres', 'create table item (id int primary key, v text)');
my $underscore = new_node('par_is', publication => '');
$underscore->safe_psql('postgres', 'create table item (id int primary key, v text)');
$_->safe_psql('postgres', "select braid.create_subscription('s', \$dsn\$$dsn\$dsn\$)") for $dash, $underscore;
$_->safe_psql('postgres', q[select braid.wait_for_subscription('s')], timeout => $PostgreSQL::Test::Utils::timeout_default) for $dash, $underscore;
is($tokyo->safe_psql('postgres', q[select count(distinct slot_name), count(*) from pg_replication_slots where slot_name like 'braid_par_is_s%']), '2|2', 'a slot for each node');

done_testing();
