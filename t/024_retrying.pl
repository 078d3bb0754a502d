# Errors that may pass are retried. Until then the status shows the whole error: message, hint and
# position.

use strict;
use warnings;

use Braid;
use IPC::Run ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo', conf => "logical_decoding_work_mem = 64kB\n");
my $paris = new_node('paris', publication => '');
on_all('create table item (id int primary key, v text)', $tokyo, $paris);
my $name = subscribe($paris, $tokyo, streaming => q('on'));
my $slot;

sub retrying
{
	my ($why) = @_;
	my $status;
	ok(wait_until(sub { $status = status($paris, $name); $status->{state} eq 'retrying' && $status->{last_error} ne '' }, 20), "$why: retrying")
	  or diag(explain($status));
	return $status;
}

sub over
{
	my ($why) = @_;
	caught_up($paris, $tokyo);
	my $status;
	ok(wait_until(sub { ($status = status($paris, $name))->{state} eq 'streaming' }, 20), "$why: streams again");
	is_deeply([ @$status{qw(last_error error_hint error_lsn)} ], [ '', '', '' ], "$why: nothing of the past is shown");
	ok(wait_until(sub { $paris->safe_psql('postgres', "select failures = 0 and last_failure is null from braid.subscription_detail") eq 't' }, 10),
		"$why: nor kept");
	return;
}

# An applier fails with an error that may pass: the whole error is visible, and its transaction.
$paris->safe_psql('postgres', q[
	create function full_up() returns trigger language plpgsql as $$
	begin
		raise exception using errcode = '53100', message = 'could not extend file', detail = 'No space is left.', hint = 'Free some.';
	end $$;
	create trigger full_up before insert on item for each row execute function full_up();
	alter table item enable always trigger full_up;
]);
my $before = $tokyo->safe_psql('postgres', 'select pg_current_wal_insert_lsn()');
$tokyo->safe_psql('postgres', q[insert into item values (1, 'one')]);
my $after = $tokyo->safe_psql('postgres', 'select pg_current_wal_insert_lsn()');
my $status = retrying('an applier fails');
like($status->{last_error}, qr/could not extend file/, 'the message');
like($status->{error_hint}, qr/Free some\./, 'the hint');
is($tokyo->safe_psql('postgres', "select pg_lsn '$status->{error_lsn}' > '$before' and pg_lsn '$status->{error_lsn}' <= '$after'"), 't',
	'the end of the transaction')
  or diag(explain($status));
is($paris->safe_psql('postgres', 'select last_failure_sqlstate, last_failure_detail, last_failure_hint, last_failure_lsn from braid.subscription_detail'),
	"53100|No space is left.|Free some.|$status->{error_lsn}", 'the whole of it in the details');
$paris->safe_psql('postgres', 'drop trigger full_up on item');
over('an applier fails');

# PostgreSQL raises some errors of a full disk as XX000.
$paris->safe_psql('postgres', q[
	create or replace function full_up() returns trigger language plpgsql as
		'begin raise exception using errcode = ''XX000'', message = ''could not create temporary file "base/pgsql_tmp/t": No space left on device''; end';
	create trigger full_up before insert on item for each row execute function full_up();
	alter table item enable always trigger full_up;
]);
$tokyo->safe_psql('postgres', q[insert into item values (3, 'three')]);
$status = retrying('an applier can not create a file');
is($paris->safe_psql('postgres', 'select last_failure_sqlstate, last_failure_hint from braid.subscription_detail'), '53100|Free disk space.',
	'as a full disk');
$paris->safe_psql('postgres', 'drop trigger full_up on item');
over('an applier can not create a file');

# The disk is full while the leader keeps a large transaction in a file: the files that it, and
# those who follow it, would create are there already, and have no room. PostgreSQL names them by
# the process, and uses one again that is left.
my ($leader) = wait_for_worker($paris, 'braid leader');
my $directory = $paris->data_dir . '/base/pgsql_tmp';
mkdir $directory, 0700 unless -d $directory;
my @full = map { "$directory/pgsql_tmp$_.0" } $leader .. $leader + 20_000;
symlink('/dev/full', $_) or die "$_: $!" for @full;
$tokyo->safe_psql('postgres', q[insert into item select i, repeat('x', 200) from generate_series(1000, 5000) i]);
$status = retrying('the leader has no room for a transaction');
is($paris->safe_psql('postgres', 'select last_failure_sqlstate, last_failure, last_failure_hint from braid.subscription_detail'),
	'53100|could not write a temporary file|Free disk space.', 'it says which error that was');
unlink @full;
over('the leader has no room for a transaction');

# So is a copy, which goes on by itself.
$paris->safe_psql('postgres', qq[
	create or replace function full_up() returns trigger language plpgsql as 'begin raise exception using errcode = ''53100'', message = ''could not extend file''; end';
	create trigger full_up before insert on item for each row execute function full_up();
	alter table item enable always trigger full_up;
	select braid.resync_table('$name', 'item');
]);
ok(wait_until(sub { $paris->safe_psql('postgres', 'select copy_error, copy_error_hint from braid.subscription_tables') eq 'could not extend file|Free disk space.' }, 20),
	'a copy that fails: message and hint');
$paris->safe_psql('postgres', 'drop trigger full_up on item');
ok(wait_until(sub { $paris->safe_psql('postgres', q[select state, copy_error is null, copy_error_hint is null from braid.subscription_tables]) eq 'ready|t|t' }, 20),
	'and nothing of it once it is done');
same_tables([ $tokyo, $paris ], 'item');

# One that brings no hint gets one.
$tokyo->stop('fast');
$status = retrying('the provider is down');
like($status->{error_hint}, qr/braid\.alter_subscription/, 'a hint');
$paris->safe_psql('postgres', "select braid.disable_subscription('$name')");
ok(wait_until(sub { ($status = status($paris, $name))->{state} eq 'disabled' }, 10), 'disabled while it is retrying');
is_deeply([ @$status{qw(last_error error_hint)} ], [ '', '' ], 'what is disabled has no error');
$tokyo->start;
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
over('the provider is down');

# Another reader of the slot.
sub read_slot
{
	my $reader = IPC::Run::start(
		[ 'pg_recvlogical', '-d', $tokyo->connstr('postgres'), '--slot', $slot, '--start', '-f', '-', '-o', q(proto_version=1),
			'-o', 'publication_names=braid' ],
		'<', \undef, '>', '/dev/null', '2>', '/dev/null');
	ok($tokyo->poll_query_until('postgres', "select active from pg_replication_slots where slot_name = '$slot'"), 'another reader has it');
	return $reader;
}

# Somebody else reads the slot.
$slot = $paris->safe_psql('postgres', 'select slot_name from braid.subscription_detail');
$paris->safe_psql('postgres', "select braid.disable_subscription('$name')");
ok($tokyo->poll_query_until('postgres', "select not active from pg_replication_slots where slot_name = '$slot'"), 'the slot is let go');
my $other = read_slot();
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
$status = retrying('the slot is in use');
like($status->{last_error}, qr/"$slot" is active/, 'the message names it');
like($status->{error_hint}, qr/active_pid/, 'and the hint where to look');
$other->kill_kill;
$tokyo->safe_psql('postgres', q[insert into item values (2, 'two')]);
over('the slot is in use');

# A slot that is still in use is no failure: a new leader may find its predecessor's walsender
# there.
$paris->safe_psql('postgres', "select braid.disable_subscription('$name'); select braid.alter_subscription('$name', disable_on_error => true)");
ok($tokyo->poll_query_until('postgres', "select not active from pg_replication_slots where slot_name = '$slot'"), 'the slot is let go again');
$other = read_slot();
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
$status = retrying('disable_on_error: the slot is in use');
like($status->{last_error}, qr/"$slot" is active/, 'disable_on_error: the message names it');
$other->kill_kill;
over('disable_on_error: the slot is in use');

# With disable_on_error a lost connection stops it, and the hint says how to go on.
$tokyo->stop('fast');
ok(wait_until(sub { ($status = status($paris, $name))->{state} eq 'error' }, 20), 'disable_on_error: stops') or diag(explain($status));
like($status->{error_hint}, qr/braid\.enable_subscription/, 'and says how to go on');
$tokyo->start;
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
over('disable_on_error');

same_tables([ $tokyo, $paris ], 'item');

done_testing();
