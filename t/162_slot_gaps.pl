# A slot that was advanced, or created again, begins behind the subscriber's position: changes in
# between would be missing. The subscription stops and reports that, in whatever way it had ended
# before. It goes on if nothing is missing.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '');
my @both = ($tokyo, $paris);
on_all('create table item (id int primary key, v text)', @both);
my $name = subscribe($paris, $tokyo);
my $slot = $tokyo->safe_psql('postgres', q[select slot_name from pg_replication_slots]);
my $row = 0;

sub insert
{
	$row++;
	$tokyo->safe_psql('postgres', "insert into item values ($row, 'row')");
	return;
}

sub slot_is_free
{
	return wait_until(sub { $tokyo->safe_psql('postgres', q[select count(*) from pg_replication_slots where active]) eq '0' }, 30);
}

sub stop_reading
{
	$paris->safe_psql('postgres', "select braid.disable_subscription('$name')");
	return slot_is_free();
}

my $advance = "select pg_replication_slot_advance('$slot', pg_current_wal_lsn())";
my $anew = "select pg_drop_replication_slot('$slot'); select pg_create_logical_replication_slot('$slot', 'braid')";

# Tests that the gap of the slot, the last insert, is noticed, and that a copy fills it.
sub stops
{
	my ($what) = @_;
	ok(wait_until(sub { status($paris, $name)->{state} eq 'error' }, 30), "$what: it stops") or diag(explain(status($paris, $name)));
	my $status = status($paris, $name);
	like($status->{last_error}, qr/^replication slot "$slot" at the provider begins at [0-9A-F\/]+, after [0-9A-F\/]+, up to where/, "$what: and says why");
	like($status->{error_hint}, qr/braid\.resync_table/, "$what: and what to do");
	$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
	ok(wait_until(sub { status($paris, $name)->{state} eq 'error' }, 30), "$what: also when it is enabled as it is");
	$paris->safe_psql('postgres', "select braid.resync_table('$name', 'item'); select braid.enable_subscription('$name')");
	insert();
	caught_up($paris, $tokyo);
	same_tables(\@both, 'item');
	return;
}

insert();
caught_up($paris, $tokyo);

# Nothing has happened to the slot, however it is left and taken up again. WAL that has nothing for
# the subscription is confirmed too.
for my $rest (
	[ 'disabled', sub { stop_reading(); $paris->safe_psql('postgres', "select braid.enable_subscription('$name')") } ],
	[ 'restarted', sub { $paris->restart } ],
	[ 'crashed', sub { $paris->stop('immediate'); $paris->start } ],
	[ 'provider restarted', sub { $tokyo->restart } ])
{
	my ($what, $do) = @$rest;
	$tokyo->safe_psql('postgres', q[select pg_logical_emit_message(false, 'filler', repeat('x', 3000000))]);
	caught_up($paris, $tokyo);
	$do->();
	insert();
	caught_up($paris, $tokyo);
	streams($paris, $name, "$what: it goes on");
}

# Advanced, and created again.
for my $moved ([ 'moved on', $advance ], [ 'made anew', $anew ])
{
	my ($what, $do) = @$moved;
	stop_reading();
	insert();
	$tokyo->safe_psql('postgres', $do);
	$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
	stops("$what while disabled");

	$paris->stop;
	insert();
	slot_is_free();
	$tokyo->safe_psql('postgres', $do);
	$paris->start;
	stops("$what while the server was down");
}

# By a session that reads it.
stop_reading();
insert();
$tokyo->safe_psql('postgres', "select count(*) from pg_logical_slot_get_binary_changes('$slot', null, null, 'proto_version', '1', 'publication_names', 'braid')");
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
stops('read by a session');

# After a crash the bound is what was written down, with what it had to spare.
$paris->stop('immediate');
insert();
$tokyo->safe_psql('postgres', q[select pg_logical_emit_message(false, 'filler', repeat('x', 5000000))]);
slot_is_free();
$tokyo->safe_psql('postgres', $advance);
$paris->start;
stops('moved on far after a crash');

# Of a slot that is the user's, before it was read for the first time.
$paris->safe_psql('postgres', "select braid.drop_subscription('$name')");
ok(wait_until(sub { $tokyo->safe_psql('postgres', 'select count(*) from pg_replication_slots') eq '0' }, 30), 'the slot is dropped');
$tokyo->safe_psql('postgres', "select pg_create_logical_replication_slot('$slot', 'braid')");
subscribe($paris, $tokyo, slot_name => "'$slot'", create_slot => 'false', copy_data => 'false', enabled => 'false', wait => 0);
insert();
$tokyo->safe_psql('postgres', $advance);
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
stops('moved on before it was read');
done_testing();
