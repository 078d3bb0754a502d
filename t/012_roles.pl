# A role that is no superuser sets up and runs replication with braid_admin alone, over a connection
# with a password. No password reaches a log.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_server('tokyo');
my $paris = new_server('paris');
my $password = 'pw-4-the-peer';
for my $node ($tokyo, $paris)
{
	$node->safe_psql('postgres', qq[
		create extension braid;
		create role operator login in role braid_admin;
		create role watcher login in role braid_monitor;
		create role peer login replication password '$password';
		grant braid_monitor to peer;
		create table item (id int primary key, name text);
		grant select on item to peer;
		create publication braid for all tables;
	]);
	# Sockets: the local roles are trusted, the peer is asked.
	my $hba = $node->data_dir . '/pg_hba.conf';
	my $rules = slurp_file($hba);
	unlink $hba;
	append_to_file($hba, "local all peer scram-sha-256\nhost all peer all scram-sha-256\n$rules");
	$node->reload;
}

sub as_operator
{
	my ($node, $sql, %opt) = @_;
	my ($code, $out, $error) = $node->psql('postgres', $sql, extra_params => [ '-U', 'operator' ], %opt);
	return ($code, $out, $error);
}

sub succeeds
{
	my ($node, $sql, $name) = @_;
	my ($code, $out, $error) = as_operator($node, $sql, timeout => $PostgreSQL::Test::Utils::timeout_default);
	is($code, 0, $name) or diag($error);
	return $out;
}

my %dsn = map { $_->name => $_->connstr('postgres') . " user=peer password=$password" } $tokyo, $paris;
succeeds($_, "select braid.create_node('" . $_->name . "', \$\$" . $dsn{ $_->name } . '$$)', $_->name . ' is made a node') for $tokyo, $paris;
$tokyo->safe_psql('postgres', q[insert into item select n, 'copied' from generate_series(1, 100) n]);
succeeds($paris, "select braid.create_subscription('from_tokyo', \$\$$dsn{tokyo}\$\$)", 'the operator subscribes');
succeeds($paris, q[select braid.wait_for_subscription('from_tokyo', '180 s')], 'it copies and streams');

my $position = $tokyo->safe_psql('postgres', q[
	insert into item values (0, 'streamed');
	select braid.sync_event();
]);
succeeds($paris, "select braid.wait_for_event('tokyo', '$position', '180 s')", 'the position is reached');
same_tables([ $tokyo, $paris ], 'item');

# Without the password, or with a password that the server does not ask for, the connection is
# refused.
my ($code, undef, $error) = as_operator($paris, "select braid.alter_subscription('from_tokyo', dsn => \$\$" . $tokyo->connstr('postgres') . ' user=peer$$)');
like($error, qr/password is required/, 'a connection string without a password is refused');
($code, undef, $error) = as_operator($paris, "select braid.alter_subscription('from_tokyo', dsn => \$\$" . $tokyo->connstr('postgres') . " user=watcher password=$password\$\$)");
like($error, qr/without asking for the password/, 'a password that is not asked for is refused');
($code, undef, $error) = as_operator($paris, "select braid.alter_subscription('from_tokyo', dsn => \$\$" . $tokyo->connstr('postgres') . " user=peer password=$password-wrong\$\$)");
like($error, qr/could not connect/, 'a wrong password is refused');
unlike($error, qr/$password/, 'and not quoted');

# Day to day.
succeeds($paris, q[select braid.disable_subscription('from_tokyo')], 'disable');
succeeds($paris, q[select braid.enable_subscription('from_tokyo')], 'enable');
succeeds($paris, q[select braid.refresh_subscription('from_tokyo')], 'refresh');
succeeds($paris, q[select braid.wait_for_subscription('from_tokyo', '180 s')], 'streaming again');
succeeds($paris, q[select braid.resync_table('from_tokyo', 'item', truncate_first => true)], 'copy a table anew');
succeeds($paris, q[select braid.wait_for_subscription('from_tokyo', '180 s')], 'which is done');
same_tables([ $tokyo, $paris ], 'item');
succeeds($paris, q[select braid.set_rate_limit('from_tokyo', rows_per_second => 100000)], 'limit the rate');
succeeds($paris, q[select braid.set_conflict_resolution('item', 'insert_exists', 'keep_local')], 'set a rule');
$paris->safe_psql('postgres', q[alter table item add constraint polite check (name <> 'bad')]);
$tokyo->safe_psql('postgres', q[insert into item values (1000, 'bad')]);
ok(wait_until(sub { status($paris, 'from_tokyo')->{state} eq 'error' }, 30), 'a transaction that is refused');
succeeds($paris, q[select braid.skip_transaction(name, error_lsn) from braid.subscription_status where name = 'from_tokyo'], 'leave a transaction out');
succeeds($paris, q[select braid.wait_for_subscription('from_tokyo', '180 s')], 'and go on');
$tokyo->safe_psql('postgres', 'delete from item where id = 1000');
succeeds($paris, "select braid.wait_for_event('tokyo', '" . $tokyo->safe_psql('postgres', 'select braid.sync_event()') . "', '180 s')", 'up to now');
like(succeeds($paris, q[call braid.compare('from_tokyo', 'item')], 'compare'), qr/\|0\|0\|101$/, 'nothing differs');
streams($paris, 'from_tokyo', 'the subscription streams');
my ($status) = $paris->safe_psql('postgres', q[select state from braid.subscription_status where name = 'from_tokyo'], extra_params => [ '-U', 'watcher' ]);
is($status, 'streaming', 'the watcher sees it');

# Changes are applied with the rights of a role, and the policies for it are no less than for what
# it writes itself.
sub refuses
{
	my ($change, $error, $right, $name) = @_;
	$tokyo->safe_psql('postgres', $change);
	ok(wait_until(sub { status($paris, 'from_tokyo')->{state} eq 'error' }, 30), "$name: it stops");
	my $status = status($paris, 'from_tokyo');
	like($status->{last_error}, $error, "$name: it says why");
	isnt($status->{error_hint}, '', "$name: and what to do");
	$paris->safe_psql('postgres', $right);
	succeeds($paris, q[select braid.enable_subscription('from_tokyo')], "$name: then it is granted");
	succeeds($paris, "select braid.wait_for_event('tokyo', '" . $tokyo->safe_psql('postgres', 'select braid.sync_event()') . "', '180 s')", "$name: and goes on");
	same_tables([ $tokyo, $paris ], 'item');
	return;
}
succeeds($paris, q[select braid.alter_subscription('from_tokyo', run_as_owner => true)], 'apply as the operator');
for my $mode (qw(parallel aggregate))
{
	succeeds($paris, "select braid.alter_subscription('from_tokyo', apply_mode => '$mode')", $mode);
	refuses(q[insert into item select i, 'new' from generate_series(2000, 2010) i], qr/permission denied for table "public\.item"/, 'grant insert, select on item to operator', "$mode: insert");
	refuses(q[update item set name = 'newer' where id = 2000], qr/permission denied for table "public\.item"/, 'grant update on item to operator', "$mode: update");
	refuses(q[delete from item where id = 2000], qr/permission denied for table "public\.item"/, 'grant delete on item to operator', "$mode: delete");
	$paris->safe_psql('postgres', q[alter table item enable row level security; create policy mine on item using (name = 'mine')]);
	refuses(q[insert into item values (3000, 'theirs')], qr/row-level security applies to the role/, 'alter role operator bypassrls', "$mode: policies");
	$paris->safe_psql('postgres', q[revoke all on item from operator; drop policy mine on item; alter table item disable row level security; alter role operator nobypassrls]);
	$tokyo->safe_psql('postgres', q[delete from item where id >= 2000]);
	ok(wait_until(sub { status($paris, 'from_tokyo')->{state} eq 'error' }, 30), "$mode: taken away, it stops again");
	$paris->safe_psql('postgres', 'grant all on item to operator');
	succeeds($paris, q[select braid.enable_subscription('from_tokyo')], "$mode: and goes on");
	succeeds($paris, "select braid.wait_for_event('tokyo', '" . $tokyo->safe_psql('postgres', 'select braid.sync_event()') . "', '180 s')", "$mode: up to now");
	$paris->safe_psql('postgres', 'revoke all on item from operator');
}
succeeds($paris, q[select braid.alter_subscription('from_tokyo', run_as_owner => false)], 'apply as the owner of the table');
$paris->safe_psql('postgres', q[
	create role owner; grant create, usage on schema public to owner; alter table item owner to owner;
	alter table item enable row level security; alter table item force row level security; create policy mine on item using (name = 'mine');
]);
refuses(q[insert into item values (3000, 'theirs')], qr/row-level security applies to the role/, 'alter table item no force row level security', 'an owner whom policies bind');
succeeds($paris, q[select braid.drop_subscription('from_tokyo')], 'drop');
ok(wait_until(sub { $tokyo->safe_psql('postgres', 'select count(*) from pg_replication_slots') eq '0' }, 30), 'the slot goes too');
succeeds($paris, q[select braid.drop_node('paris')], 'the operator drops the node');

unlike(slurp_file($_->logfile), qr{\Q$password\E}, "no password in the log of " . $_->name) for $tokyo, $paris;

done_testing();
