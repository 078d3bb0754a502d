# A node of a mesh is moved to another server by pg_upgrade: to a newer version if one is installed,
# else to the same version. Nothing is lost, applied twice or copied again, and rows keep their
# versions. Its peers need no action, and write all the time.

use strict;
use warnings;

use Braid;
use File::Basename qw(dirname);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $own_bin = `pg_config --bindir`;
chomp $own_bin;

sub major
{
	my ($bin) = @_;
	return `$bin/pg_config --version` =~ /(\d+)/ ? $1 : 0;
}

# A server of the installation, empty, at the port of the one that it replaces.
sub new_home
{
	my ($node, $bin) = @_;
	my $home = PostgreSQL::Test::Cluster->new($node->name . '_moved', port => $node->port, install_path => dirname($bin));
	my @extra = major($bin) >= 18 && $node->safe_psql('postgres', 'show data_checksums') eq 'off' ? ('--no-data-checksums') : ();
	$home->init(allows_streaming => 'logical', extra => \@extra);
	my $known = `$bin/postgres --describe-config`;
	$home->append_conf('postgresql.conf', <<'CONF');
shared_preload_libraries = 'braid'
track_commit_timestamp = on
max_worker_processes = 32
max_replication_slots = 32
max_wal_senders = 32
autovacuum_naptime = 1s
braid.retry_interval = 100ms
braid.retry_interval_max = 1s
CONF
	$home->append_conf('postgresql.conf', "output_plugin_libraries = 'pgoutput, braid'\n") if $known =~ /^output_plugin_libraries\t/m;
	return $home;
}

sub upgrade
{
	my ($node, $home, $bin) = @_;
	my @command = ("$bin/pg_upgrade", '-d', $node->data_dir, '-D', $home->data_dir, '-b', $own_bin, '-B', $bin,
		'-p', $node->port, '-P', $home->port);
	push @command, '--no-sync' if major($bin) >= 16;
	my $out = '';
	my $ok = IPC::Run::run(\@command, '>', \$out, '2>&1', init => sub { chdir $home->basedir });
	return ($ok, $out);
}

my $rows = q[select count(*), min(v), max(v) from item];
my $versions = q[select i.id, v.committed_at, v.node from item i, lateral braid.row_version('item'::regclass, i.ctid) v where i.id <= 20 order by i.id];

sub scenario
{
	my ($bin, $number) = @_;
	my $what = major($own_bin) . ' to ' . major($bin);
	my $tokyo = new_node("tokyo$number");
	my $paris = new_node("paris$number", conf => "autovacuum_naptime = 1s\n");
	my ($t, $p) = map { $_->name } $tokyo, $paris;
	on_all(q[
		create table item (id int primary key, v text, at text);
		create table ours (id int primary key, v text);
		create function one() returns int language sql as 'select 1';
	], $tokyo, $paris);
	# Functions have other numbers in the new server.
	$paris->safe_psql('postgres', 'drop function one');
	$paris->safe_psql('postgres', keep_newest('ours'));
	my $name = subscribe($paris, $tokyo);
	my $back = subscribe($tokyo, $paris, copy_data => 'false');
	$tokyo->safe_psql('postgres', q[insert into item select i, 'tokyo', 'first' from generate_series(1, 10) i]);
	$paris->safe_psql('postgres', q[insert into item select i, 'paris', 'first' from generate_series(11, 30) i]);
	converged($tokyo, $paris);
	ok(wait_for_worker($paris, 'braid collector'), "$what: deletions are collected");
	$paris->safe_psql('postgres', q[delete from item where id = 30]);

	# An upgrade that is called off.
	$paris->safe_psql('postgres', q[call braid.prepare_upgrade('180 s')]);
	is(status($paris, $name)->{state}, 'error', "$what: its subscriptions stand still");
	like(status($paris, $name)->{last_error}, qr/node "$p" is prepared for pg_upgrade/, "$what: and the view says why");
	like(status($paris, $name)->{error_hint}, qr/finish_upgrade/, "$what: and what to do");
	$paris->safe_psql('postgres', q[select braid.finish_upgrade()]);
	$tokyo->safe_psql('postgres', q[update item set at = 'second' where id = 1]);
	converged($tokyo, $paris);
	same_tables([ $tokyo, $paris ], 'item');

	my $before = $paris->safe_psql('postgres', $versions);
	my $ready = $paris->safe_psql('postgres', q[select string_agg(relation || ' ' || state || coalesce(ready_at::text, ''), ', ' order by relation::text) from braid.subscription_tables]);
	my $home = new_home($paris, $bin);
	$paris->safe_psql('postgres', q[call braid.prepare_upgrade('180 s')]);
	is($paris->safe_psql('postgres', q[select count(*) from pg_stat_activity where backend_type in ('braid leader', 'braid applier', 'braid collector')]), 0, "$what: no worker runs");
	# A change that a third node made before what is here already would come now, or later.
	$tokyo->safe_psql('postgres', q[insert into item values (101, 'tokyo', 'meanwhile'); update item set at = 'meanwhile' where id = 2]);
	# Minor releases that mark columns in pg_attribute can't be upgraded to those that do not know
	# the mark, whatever is in the database.
	$paris->safe_psql('postgres', q[
		set allow_system_table_mods = on;
		update pg_attribute set attoptions = null where attoptions::text like '{pg\_attver=%}' and attrelid >= 16384;
	]) if major($own_bin) != major($bin);
	$paris->stop;
	my ($ok, $out) = upgrade($paris, $home, $bin);
	ok($ok, "$what: pg_upgrade is content") or do {
		diag $out;
		diag slurp_file($_) for glob($home->data_dir . '/pg_upgrade_output.d/*/log/*.log'), glob($home->data_dir . '/*.txt');
		return;
	};
	$tokyo->safe_psql('postgres', q[insert into item values (102, 'tokyo', 'meanwhile')]);
	$home->start;
	like(status($home, $name)->{last_error}, qr/was moved to this server by pg_upgrade and is not whole yet/, "$what: it does not act as a node yet");
	ok(wait_until(sub { status($tokyo, $back)->{last_error} =~ /the provider reported: node "$p" was moved to this server/ }, 30), "$what: its peer waits for it")
	  or diag explain(status($tokyo, $back));
	is($home->safe_psql('postgres', q[select count(*) from pg_stat_activity where backend_type in ('braid leader', 'braid applier', 'braid collector')]), 0, "$what: no worker runs there");
	my ($status, undef, $err) = $home->psql('postgres', 'select braid.sync_event()');
	like($err, qr/Run braid.finish_upgrade\(\) before anybody writes/, "$what: functions say what to do");

	$home->safe_psql('postgres', q[select braid.finish_upgrade()]);
	# Row 2 is changed meanwhile.
	my ($now, $then) = map { join "\n", grep { !/^2\|/ } split /\n/ } $home->safe_psql('postgres', $versions), $before;
	is($now, $then, "$what: rows have the versions that they had");
	is($home->safe_psql('postgres', q[select count(*) from braid.conflict_resolutions where relation = 'ours'::regclass and function = 'newest_ours'::regproc::regprocedure]),
		$home->safe_psql('postgres', q[select count(*) from braid.conflict_resolutions where relation = 'ours'::regclass]), "$what: rules ask the functions that they asked");
	$home->safe_psql('postgres', q[insert into item values (201, 'paris', 'after'); delete from item where id = 29; update item set at = 'after' where id = 3]);
	$tokyo->safe_psql('postgres', q[insert into item values (103, 'tokyo', 'after')]);
	ok(wait_until(sub { digest($tokyo, 'item') eq digest($home, 'item') && $tokyo->safe_psql('postgres', q[select count(*) from item where id in (101, 102, 103, 201)]) == 4 }, 60), "$what: both have all")
	  or diag explain(status($tokyo, $back), status($home, $name));
	same_tables([ $tokyo, $home ], 'item');
	is($home->safe_psql('postgres', q[select string_agg(relation || ' ' || state || coalesce(ready_at::text, ''), ', ' order by relation::text) from braid.subscription_tables]), $ready, "$what: nothing was copied again");
	is($home->safe_psql('postgres', "select inserts || ' ' || updates from braid.subscription_detail where name = '$name'"), '3 1', "$what: what was there has not come again");
	is($home->safe_psql('postgres', q[select count(*) from braid.conflict_history]), 0, "$what: none of it is a conflict");
	is($home->safe_psql('postgres', q[select bool_and(identity_valid) from braid.node_info()]), 't', "$what: it is a node");
	streams($tokyo, $back, "$what: the peer streams");
	$_->stop for $home, $tokyo;
	return;
}

my $newer = $ENV{BRAID_NEWER_BIN} // '';
scenario($newer eq '' ? $own_bin : $newer, 1);
SKIP:
{
	skip('the upgrade to a newer major: no newer PostgreSQL with this build of braid is installed here', 1) if $newer eq '';
	ok(major($newer) > major($own_bin), 'the upgrade was to a newer major');
}
done_testing();
