# braid.check: each finding is there when its cause is, and gone after its remedy.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

sub dsn { return Braid::dsn(@_) }
sub at { my ($node, $sql, $database) = @_; return $node->safe_psql($database // 'postgres', $sql); }

# Findings of a code as "subject|remedy". With `dsn`, of the other server that it leads to.
sub findings
{
	my ($node, $code, %opt) = @_;
	my $dsn = $opt{dsn} ? "\$dsn\$$opt{dsn}\$dsn\$" : '';
	return split /\n/, at($node, "select subject || '|' || remedy from braid.check($dsn) where code = '$code' or code = 'check_failed'", $opt{database});
}

# Tests that a finding is there, or comes; runs its remedy, at `there` if it says so; and tests that
# the finding goes.
#   subject => regex   cure => SQL in place of the remedy   restart => 1: at the end by the caller
my %seen;
sub provoked
{
	my ($node, $code, %opt) = @_;
	my $subject = $opt{subject} // qr/./;
	my @found;
	my $look = sub { @found = grep { (split /\|/)[0] =~ $subject } findings($node, $code, %opt); return scalar @found };
	ok(wait_until($look, $opt{patience} // 20), "$code is found") or return;
	$seen{$code} = 1;
	return if $opt{leave};
	for (@found)
	{
		my $remedy = $opt{cure} // (split /\|/, $_, 2)[1];
		my ($on, $database) = $remedy =~ s/^There: // ? ($opt{there} // $node, $opt{there_database}) : ($node, $opt{database});
		$remedy =~ s/ --.*//;
		at($on, $remedy, $database);
	}
	return if $opt{restart};
	ok(wait_until(sub { !$look->() }, 20), "$code is gone") or diag("@found");
	return;
}

# A server that is not fit to be a node.
my $tokyo = new_server('tokyo', conf => <<'CONF');
shared_preload_libraries = ''
wal_level = minimal
max_wal_senders = 0
track_commit_timestamp = off
max_replication_slots = 0
max_worker_processes = 2
wal_sender_timeout = 0
wal_receiver_timeout = 2s
max_prepared_transactions = 0
CONF
my $is_known = sub { at($tokyo, "select count(*) from pg_settings where name = '$_[0]'") };
my @restart = qw(preload wal_level track_commit_timestamp replication_slots wal_senders worker_processes);
if ($is_known->('max_active_replication_origins'))
{
	$tokyo->append_conf('postgresql.conf', 'max_active_replication_origins = 0');
	$tokyo->append_conf('postgresql.conf', 'idle_replication_slot_timeout = 3600');
	push @restart, 'replication_origins';
	$seen{idle_replication_slot_timeout} = 0;
}
if ($is_known->('output_plugin_libraries')) { $tokyo->append_conf('postgresql.conf', "output_plugin_libraries = 'pgoutput, test_decoding'"); }
$tokyo->restart;
at($tokyo, 'create extension braid');
provoked($tokyo, $_, restart => 1) for @restart;
provoked($tokyo, 'replication_timeout');
provoked($tokyo, 'durability');
provoked($tokyo, 'idle_replication_slot_timeout') if exists $seen{idle_replication_slot_timeout};
provoked($tokyo, 'output_plugin_libraries') if $is_known->('output_plugin_libraries');
# Other settings for the rest of the test.
at($tokyo, "alter system set $_") for 'max_replication_slots = 10', 'max_wal_senders = 10', 'max_worker_processes = 20', 'fsync = off';
at($tokyo, 'alter system set max_active_replication_origins = 20') if $is_known->('max_active_replication_origins');
$tokyo->append_conf('postgresql.conf', 'braid.max_subscriptions = 1');
$tokyo->restart;
is(join(',', map { findings($tokyo, $_) } @restart), '', 'after a restart all settings are as they have to be');

# No node, and nothing published.
provoked($tokyo, 'publication');
my $dsn = dsn($tokyo) . ' user=courier';
provoked($tokyo, 'node', cure => "select braid.create_node('tokyo', \$dsn\$$dsn\$dsn\$)");
provoked($tokyo, 'node_role', subject => qr/courier/);
at($tokyo, 'revoke braid_monitor from courier; alter role courier noreplication');
provoked($tokyo, 'role_monitor', subject => qr/courier/);
provoked($tokyo, 'role_replication', subject => qr/courier/);
at($tokyo, q[update braid.node set database_oid = '1']);
provoked($tokyo, 'node_standing', cure => q[update braid.node set database_oid = (select oid from pg_database where datname = 'postgres')]);
at($tokyo, q[select pg_create_logical_replication_slot('left_behind', 'braid')]);

# Tables that are published, and tables that are not.
at($tokyo, q[
	create table nokey (k int);
	create unlogged table fleeting (k int primary key);
	create foreign data wrapper nowhere; create server nowhere foreign data wrapper nowhere; create foreign table distant (k int) server nowhere;
	create publication empty;
	create table part (k int primary key); alter extension plpgsql add table part;
	select lo_create(1);
	create database shop;
]);
provoked($tokyo, 'replica_identity', subject => qr/nokey/);
provoked($tokyo, 'not_replicated', subject => qr/fleeting/);
provoked($tokyo, 'not_replicated', subject => qr/distant/, cure => 'drop foreign table distant');
provoked($tokyo, 'publication_empty', subject => qr/empty/, cure => 'drop publication empty');
provoked($tokyo, 'extension_tables', cure => 'alter extension plpgsql drop table part; drop table part');
provoked($tokyo, 'large_objects', cure => 'select lo_unlink(1)');
at($tokyo, q[
	create extension braid;
	create table parent (k int primary key); create table child (k int primary key references parent);
	create publication braid for table child;
], 'shop');
provoked($tokyo, 'foreign_key_outside', database => 'shop', leave => 1);
provoked($tokyo, 'not_published', database => 'shop', subject => qr/parent/);
is(join(',', findings($tokyo, 'foreign_key_outside', database => 'shop')), '', 'with which its foreign key leads to a published table');

# A server that is to join, from one that it can't join yet to one that has joined.
my $paris = new_server('paris', conf => "track_commit_timestamp = off\nmax_worker_processes = 3\n");
my $others = dsn($paris) . ' user=guest';
$others =~ s/dbname='?postgres'?/dbname=join/ or die $others;
my @peer = (dsn => $others, there => $paris, there_database => 'join');
is((grep { /secret/ } map { findings($tokyo, $_, dsn => 'host=/nonexistent password=secret') } 'peer_connection', 'peer_fact'), 0, 'no password is shown');
provoked($tokyo, 'peer_connection', dsn => 'host=/nonexistent password=secret', leave => 1);
provoked($tokyo, 'peer_itself', dsn => dsn($tokyo), leave => 1);
at($tokyo, q[
	drop table nokey, fleeting;
	create table item (k serial primary key, v text, n int unique, g int generated always as (n * 2) stored);
	create table entry (k int primary key, item int references item);
	create role clerk; grant select on item to clerk;
]);
at($paris, q[create role guest login; create database "join" encoding 'LATIN1' locale 'C' template template0]);
at($paris, 'drop extension plpgsql', 'join');
provoked($tokyo, 'peer_extension_missing', @peer, subject => qr/plpgsql/);
provoked($tokyo, 'peer_extension', @peer);
provoked($tokyo, 'peer_role', @peer, subject => qr/guest/);
provoked($tokyo, 'peer_replication', @peer, subject => qr/guest/);
provoked($tokyo, 'peer_setting', @peer, restart => 1);
provoked($tokyo, 'peer_room', @peer, restart => 1, subject => qr/worker/);
at($paris, 'alter system set max_worker_processes = 30');
$paris->restart;
is(join(',', findings($tokyo, 'peer_setting', @peer)), '', 'a setting of the other server is mended');
is(join(',', findings($tokyo, 'peer_room', @peer)), '', 'and there is room');
provoked($tokyo, 'peer_owner', @peer, subject => qr/clerk/);
provoked($tokyo, 'peer_encoding', @peer, leave => 1);
at($paris, q[update pg_extension set extversion = '0.1' where extname in ('plpgsql', 'braid')], 'join');
provoked($tokyo, 'peer_extension_version', @peer, cure => q[There: update pg_extension set extversion = '1.0' where extname = 'plpgsql']);
provoked($tokyo, 'peer_version', @peer, cure => q[There: update pg_extension set extversion = '0.0.0' where extname = 'braid']);
provoked($tokyo, 'peer_node', @peer, cure => "There: select braid.create_node('tokyo', 'dbname=join')");
provoked($tokyo, 'peer_name', @peer, cure => q[There: select braid.drop_node('tokyo'); select braid.create_node('paris_join', 'dbname=join')]);
at($paris, q[update braid.node set database_oid = '1'], 'join');
provoked($tokyo, 'peer_standing', @peer, cure => q[There: update braid.node set database_oid = (select oid from pg_database where datname = 'join')]);
provoked($tokyo, 'peer_publication', @peer);
provoked($tokyo, 'peer_table_missing', @peer, subject => qr/item/, leave => 1);
at($paris, q[
	create table item (k serial primary key, v varchar(3), n int unique, g int generated always as (n * 3) stored);
	create table entry (k int primary key, item int references item); create table own (k int primary key);
	insert into item values (1, 'x', 1);
], 'join');
is(join(',', findings($tokyo, 'peer_table_missing', @peer)), '', 'no table is missing any more');
like(at($tokyo, "select finding from braid.check(\$dsn\$$others\$dsn\$) where code = 'peer_table_shape'"),
	qr/only here: column g integer generated as \(n \* 2\), column v text; only there: column g integer generated as \(n \* 3\), column v character varying\(3\)$/, 'both shapes are shown');
provoked($tokyo, 'peer_table_shape', @peer, subject => qr/item/, cure => 'There: alter table item alter v type text; alter table item drop g; alter table item add g int generated always as (n * 2) stored');
provoked($tokyo, 'peer_table_extra', @peer, subject => qr/own/, cure => 'There: drop table own');
provoked($tokyo, 'peer_table_unreadable', @peer, subject => qr/item/);
provoked($tokyo, 'peer_data', @peer, cure => 'There: truncate item, entry');
provoked($tokyo, 'peer_sequence', @peer, subject => qr/item_k_seq/, cure => 'alter sequence item_k_seq increment 10; alter sequence item_k_seq restart 11');
# Rights that a role lacks are a finding, too.
at($paris, 'revoke execute on function pg_control_system() from public', 'join');
provoked($tokyo, 'peer_fact', @peer, cure => 'There: grant execute on function pg_control_system() to public');

# Two nodes that both write.
at($paris, qq[create extension braid; select braid.create_node('paris', \$dsn\$@{[dsn($paris)]}\$dsn\$); create publication braid for all tables;
	create table item (k serial primary key, v text, n int unique, g int generated always as (n * 2) stored);
	create table entry (k int primary key, item int references item); create table bag (k int); alter table bag replica identity full]);
at($tokyo, 'create table bag (k int); alter table bag replica identity full');
my $from_paris = subscribe($tokyo, $paris, copy_data => 'false');
my $from_tokyo = subscribe($paris, $tokyo, copy_data => 'false');
provoked($paris, 'sequence', subject => qr/item_k_seq/);
provoked($tokyo, 'foreign_key', subject => qr/entry_item_fkey/);
provoked($tokyo, 'primary_key', subject => qr/bag/, cure => 'alter table bag add primary key (k)');
provoked($tokyo, 'generated_column', subject => qr/item/, cure => 'alter table item alter g drop expression');
provoked($tokyo, 'unique_key', subject => qr/item/, cure => 'alter table item drop constraint item_n_key');
at($_, 'alter table item replica identity full') for $tokyo, $paris;
at($tokyo, q[create function f() returns trigger language plpgsql as 'begin return new; end'; create trigger t before insert on item for each row execute function f(); alter table item enable always trigger t]);
provoked($tokyo, 'trigger', subject => qr/t on public.item/);
at($tokyo, 'alter table entry set unlogged');
provoked($tokyo, 'unlogged', subject => qr/entry/);
at($tokyo, q[select braid.set_column_rule('item', 'n', 'delta'); alter table item replica identity default]);
provoked($tokyo, 'column_rule', subject => qr/item/);

# Subscriptions that fail.
at($paris, 'alter table item add constraint v check (v is null)');
at($tokyo, q[insert into item (v) values ('x')]);
provoked($paris, 'subscription_error', subject => qr/$from_tokyo/, cure => "alter table item drop constraint v; select braid.enable_subscription('$from_tokyo')");
at($paris, "select braid.alter_subscription('$from_tokyo', on_error => 'park'); alter table item add constraint v check (v <> 'y')");
caught_up($paris, $tokyo);
at($tokyo, q[insert into item (v) values ('y')]);
provoked($paris, 'parked', subject => qr/$from_tokyo/, leave => 1);
provoked($paris, 'parked', cure => "alter table item drop constraint v; select braid.retry_parked('$from_tokyo')");
at($paris, "select braid.disable_subscription('$from_tokyo')");
provoked($paris, 'subscription_disabled', subject => qr/$from_tokyo/);
at($paris, q[insert into braid.left_out_table select subscription_id, 'public', 'item', 0, 'not refreshed' from braid.subscription]);
provoked($paris, 'left_out', subject => qr/item/, cure => 'delete from braid.left_out_table');
at($paris, q[update braid.subscription_table set copy_error = 'no', state = 'waiting' where relation = 'bag'::regclass]);
provoked($paris, 'copy_error', subject => qr/bag/, cure => q[update braid.subscription_table set copy_error = null, state = 'ready' where relation = 'bag'::regclass]);
at($paris, q[update braid.subscription set two_phase = true]);
is(join(',', findings($paris, 'prepared_transactions')), '', 'transactions can be prepared') if at($paris, 'show max_prepared_transactions') > 0;
at($paris, q[update braid.subscription set two_phase = false]);
at($tokyo, q[update braid.subscription set two_phase = true]);
provoked($tokyo, 'prepared_transactions', restart => 1);
at($tokyo, q[update braid.subscription set two_phase = false]);
provoked($tokyo, 'subscriptions', restart => 1);

# Slots whose readers stay away, and what becomes of them.
provoked($tokyo, 'slot_inactive', subject => qr/left_behind/, leave => 1, patience => 30);
provoked($tokyo, 'slot_wal_keep_size', cure => q[alter system set max_slot_wal_keep_size = '80MB'; select pg_reload_conf()]);
# Of a segment at a time, which the other slots keep up with.
my $write = sub { at($tokyo, q[select pg_logical_emit_message(false, 'x', 'y'); select pg_switch_wal(); checkpoint]); caught_up($paris, $tokyo); };
ok(wait_until(sub { $write->(); findings($tokyo, 'slot_wal') }, 30), 'slot_wal is found');
$seen{slot_wal} = 1;
ok(wait_until(sub { $write->(); findings($tokyo, 'slot_lost') }, 30), 'slot_lost is found');
provoked($tokyo, 'slot_lost', subject => qr/left_behind/);
is(join(',', grep { /left_behind/ } map { findings($tokyo, $_) } 'slot_wal', 'slot_inactive'), '', 'nothing is left of it');

# A copy of the server, first as its standby.
$tokyo->backup('copy', backup_options => [ '--checkpoint', 'fast' ]);
my $copy = PostgreSQL::Test::Cluster->new('copy');
$copy->init_from_backup($tokyo, 'copy', has_streaming => 1);
$copy->start;
provoked($copy, 'recovery', leave => 1);
provoked($tokyo, 'peer_recovery', dsn => dsn($copy), leave => 1);
$copy->append_conf('postgresql.conf', "shared_preload_libraries = ''\n");
$copy->promote;
provoked($tokyo, 'peer_copy', dsn => dsn($copy), leave => 1);
$copy->stop('immediate');

# A provider that is away, and one that was left while it was.
$tokyo->stop('fast');
provoked($paris, 'subscription_retrying', subject => qr/$from_tokyo/, leave => 1);
at($paris, "select braid.drop_subscription('$from_tokyo')");
provoked($paris, 'pending_cleanup', cure => 'select braid.forget_slot(slot_name, provider) from braid.pending_cleanup');
$tokyo->start;
is(join(',', map { findings($tokyo, $_) } 'prepared_transactions', 'subscriptions'), '', 'settings that wait for a restart are mended by it');

# Many tables. The goal is a second; the test is for what grows faster than their number.
at($paris, q[do $$ begin for i in 1..1000 loop execute format('create table many_%s (k int primary key, v text)', i); end loop; end $$], 'join');
my $began = time;
at($paris, 'select count(*) from braid.check()', 'join');
my $took = time - $began;
cmp_ok($took, '<', 5, sprintf('1,000 tables take %.2f s', $took));

# Neither a password nor the statement with it is logged.
for my $statement ('select braid.check($1)', 'select braid."check"($1)', 'select * from braid . check($1)', 'select braid.peer_facts($1, null, null)', 'select braid.dsn_role($1) / 0')
{
	my $sql = $statement =~ s/\$1/'password=topsecret nonsense'/r;
	my ($code, undef, $error) = $tokyo->psql('postgres', $sql);
	isnt($code, 0, "an error: $sql");
	unlike($error =~ s/^LINE.*//mr, qr/topsecret/, 'without the password');
}
unlike(slurp_file($_->logfile), qr/topsecret/, 'nor is it in the log') for $tokyo, $paris;

# Each check is provoked above, or named here: what takes another major, library, or clock; or a
# group (187).
my %elsewhere = map { $_ => 1 } qw(kept_slot routing_guard collation_version peer_collation_version peer_locale peer_postgres clock_skew peer_clock);
my $of_others = join '|', 'output_plugin_libraries', 'idle_replication_slot_timeout', 'replication_origins';
is(join(' ', grep { !$seen{$_} && !$elsewhere{$_} && !/^(?:$of_others)$/ } split /\n/, at($tokyo, 'select code from braid.checks()')), '', 'each check was provoked');

# docs/reference/checks.md has a row for each.
my $page = slurp_file("$ENV{TESTDIR}/docs/reference/checks.md");
my @rows = split /\n/, at($tokyo, q[select format('| `%s` | %s |', code, says) from braid.checks()]);
is(join("\n", grep { index($page, "$_\n") < 0 } @rows), '', 'docs/reference/checks.md has each check');

done_testing();
