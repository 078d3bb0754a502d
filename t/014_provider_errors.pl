# Failures at the provider, or for lack of a resource, are reported with a hint. The remedy in the
# hint lets the subscription go on.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo', conf => "max_slot_wal_keep_size = '16MB'\n");
my $paris = new_node('paris', publication => '');
on_all('create table item (id int primary key, v text)', $tokyo, $paris);

my $id = 0;

sub write_one
{
	$id++;
	$tokyo->safe_psql('postgres', "insert into item values ($id, 'row $id')");
	return;
}

sub in_state
{
	my ($state, $name, $why) = @_;
	ok(wait_until(sub { status($paris, $name)->{state} eq $state }, 20), $why)
	  or diag(explain(status($paris, $name)));
	return status($paris, $name);
}

# Disabled, and not connected any more.
sub pause
{
	my ($name) = @_;
	$paris->safe_psql('postgres', "select braid.disable_subscription('$name')");
	ok(wait_until(sub { $tokyo->safe_psql('postgres', 'select count(*) from pg_replication_slots where active') eq '0' }, 10), 'the slot is let go');
	return;
}

sub slot_of { return $paris->safe_psql('postgres', "select slot_name from braid.subscription_detail where name = '$_[0]'"); }

sub enable { return $paris->safe_psql('postgres', "select braid.enable_subscription('$_[0]')"); }

# The publication is gone. Where nothing was written without it, it is enough to create it again.
my $name = subscribe($paris, $tokyo);
write_one();
caught_up($paris, $tokyo);
pause($name);
$tokyo->safe_psql('postgres', 'drop publication braid');
enable($name);
my $status = in_state('error', $name, 'publication dropped: stops');
like($status->{last_error}, qr/publication "braid" does not exist/, 'and names it');
like($status->{error_hint}, qr/[Cc]reate the publication/, 'and says what to do');
$tokyo->safe_psql('postgres', 'create publication braid for all tables');
write_one();
enable($name);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'item');

# No publication had the rows that were written meanwhile: they must not be left out silently.
$tokyo->safe_psql('postgres', 'drop publication braid');
write_one();
$status = in_state('error', $name, 'written to without the publication: stops');
like($status->{last_error}, qr/publication "braid" does not exist/, 'and names it');
$tokyo->safe_psql('postgres', 'create publication braid for all tables');
enable($name);
$status = in_state('error', $name, 'the change is still there');
like($status->{error_hint}, qr/create it again/, 'and the hint says what is left to do');
$paris->safe_psql('postgres', "select braid.drop_subscription('$name'); truncate item");
$name = subscribe($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'item');

# The slot is dropped.
pause($name);
my $slot = slot_of($name);
$tokyo->safe_psql('postgres', "select pg_drop_replication_slot('$slot')");
enable($name);
$status = in_state('error', $name, 'slot dropped: stops');
like($status->{last_error}, qr/replication slot "$slot" does not exist/, 'and names it');
like($status->{error_hint}, qr/create it again/, 'and says what to do');
$paris->safe_psql('postgres', "select braid.drop_subscription('$name'); truncate item");
ok($paris->poll_query_until('postgres', 'select count(*) = 0 from braid.pending_cleanup'), 'a slot that is gone is not left to clean up');
$name = subscribe($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'item');

# WAL that the slot needs is removed.
pause($name);
$slot = slot_of($name);
ok(wait_until(sub {
	$tokyo->safe_psql('postgres', "select pg_logical_emit_message(false, 'braid_test', repeat('x', 1000)); select pg_switch_wal()") for 1 .. 3;
	$tokyo->safe_psql('postgres', 'checkpoint');
	$tokyo->safe_psql('postgres', "select wal_status from pg_replication_slots where slot_name = '$slot'") eq 'lost';
}, 30), 'the provider removes WAL that the slot needs');
enable($name);
$status = in_state('error', $name, 'WAL removed: stops');
like($status->{last_error}, qr/has removed WAL/, 'and says so');
like($status->{error_hint}, qr/max_slot_wal_keep_size.*create it again/s, 'and what to do');
$paris->safe_psql('postgres', "select braid.drop_subscription('$name'); truncate item");
ok($tokyo->poll_query_until('postgres', 'select count(*) = 0 from pg_replication_slots'), 'its slot is dropped with it');

# A provider that does not let the plugin be loaded; only some minor releases know the setting.
SKIP:
{
	my $setting = $tokyo->safe_psql('postgres', "select current_setting('output_plugin_libraries', true)");
	skip 'this server has no output_plugin_libraries', 3 if $setting eq '';
	$tokyo->safe_psql('postgres', q[alter system set output_plugin_libraries = pgoutput, test_decoding]);
	$tokyo->reload;
	$tokyo->poll_query_until('postgres', "select current_setting('output_plugin_libraries') !~ 'braid'");
	my $dsn = $tokyo->connstr('postgres');
	my ($code, undef, $error) = $paris->psql('postgres', "select braid.create_subscription('refused', \$\$$dsn\$\$)");
	isnt($code, 0, 'plugin not listed: creation is refused');
	like($error, qr/ERROR:.*output_plugin_libraries/, 'and names the setting');
	like($error, qr/HINT:.*SET output_plugin_libraries = .*'braid';/, 'and says what to set');
	$tokyo->safe_psql('postgres', 'alter system reset output_plugin_libraries');
	$tokyo->reload;
	$tokyo->poll_query_until('postgres', "select current_setting('output_plugin_libraries') ~ 'braid'");
}
$name = subscribe($paris, $tokyo);

# A password that is not right any more, then a host that is not there.
my $hba = $tokyo->data_dir . '/pg_hba.conf';
my $rules = slurp_file($hba);
unlink $hba;
append_to_file($hba, "local all peer scram-sha-256\nhost all peer all scram-sha-256\n$rules");
$tokyo->safe_psql('postgres', q[
	create role peer login superuser replication password 'the-right-one';
]);
$tokyo->reload;
my $dsn = $tokyo->connstr('postgres');
# A host name that is too long for a name server.
my $nowhere = 'a' x 70;
my %wrong = (
	'wrong password' => "$dsn user=peer password=the-wrong-one",
	'unknown host' => "host=$nowhere.invalid dbname=postgres user=peer password=the-wrong-one connect_timeout=2",
	'nobody listens' => 'host=/nonexistent dbname=postgres user=peer password=the-wrong-one',
);
for my $case (sort keys %wrong)
{
	pause($name);
	my ($code, undef, $error) = $paris->psql('postgres', "select braid.alter_subscription('$name', dsn => \$\$$wrong{$case}\$\$)");
	if ($code != 0)
	{
		# create_subscription connects at once, which is the better moment for an error. Here the
		# connection string becomes wrong later.
		unlike($error, qr/the-wrong-one/, "$case: no password in the error");
		$paris->safe_psql('postgres', "with c as (insert into braid.connection (dsn) values (\$\$$wrong{$case}\$\$) returning connection_id)
			update braid.subscription set connection_id = c.connection_id from c where subscription_name = '$name'");
	}
	enable($name);
	$status = in_state('retrying', $name, "$case: is tried again");
	ok(wait_until(sub { ($status = status($paris, $name))->{last_error} ne '' }, 10), "$case: says why");
	like($status->{last_error}, qr/password|host|connection|connect/i, "$case: in words");
	write_one();
	$paris->safe_psql('postgres', "select braid.alter_subscription('$name', dsn => \$\$$dsn user=peer password=the-right-one\$\$)");
	caught_up($paris, $tokyo);
	is(in_state('streaming', $name, "$case: streams again")->{last_error}, '', 'without an error of the past');
}
my $views = join "\n", map { $paris->safe_psql('postgres', "select v::text from braid.$_ v") }
  qw(subscription_status subscription_detail nodes pending_cleanup apply_workers);
unlike($views, qr/the-(wrong|right)-one/, 'no password in a view');
unlike(slurp_file($_->logfile), qr/the-(wrong|right)-one/, 'no password in the log of ' . $_->name) for $paris, $tokyo;
same_tables([ $tokyo, $paris ], 'item');

# Too few processes: first none for the leader, then none for an applier.
for my $workers (2, 3, 4)
{
	$paris->append_conf('postgresql.conf', "max_worker_processes = $workers\nmax_logical_replication_workers = 0\n");
	my $log_start = -s $paris->logfile;
	$paris->restart;
	ok(wait_until(sub { ($status = status($paris, $name))->{last_error} ne '' }, 15), "$workers worker processes: says so")
	  or diag(explain($status));
	like($status->{last_error}, qr/background worker/, 'in words');
	isnt($status->{state}, 'streaming', 'and does not pretend');
	like($status->{error_hint}, qr/max_worker_processes/, 'the setting is named');
	unlike(slurp_file($paris->logfile, $log_start), qr/terminated by signal|PANIC/, 'nothing crashes');
}
write_one();
$paris->append_conf('postgresql.conf', "max_worker_processes = 16\n");
$paris->restart;
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'item');

done_testing();
