# Passwords in connection strings: no output plugin decodes them, no log and no view shows them, and
# they exist after a crash and on a standby. Braid's own plugin leaves out the extension's tables
# unless they are requested by name.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_server('paris', conf => "max_replication_slots = 40\n");
sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
(my $dsn = $tokyo->connstr('postgres')) =~ s{'}{''}g;
sql($_, 'create extension braid; create publication braid for all tables; create table item (id int primary key, v text)') for $paris;
sql($tokyo, 'create table item (id int primary key, v text)');

# Each is long enough to be stored out of line, and does not compress.
my $n = 0;
sub password { return join '-', 'secret' . ++$n, map { sprintf '%08x', rand 2**32 } 1 .. 600; }
my %password = map { $_ => password() } qw(node created altered dropped);

# All WAL from before the node is made, through each plugin and format.
my $gir = q['proto_version', '1', 'publication_names', 'braid', 'messages', 'on'];
my %stream = (
	gir => [ 'braid', $gir ],
	gir_streaming => [ 'braid', "$gir, 'streaming', 'on'" ],
	gir_any => [ 'braid', "$gir, 'origin', 'any'" ],
	gir_json => [ 'braid', "$gir, 'format', 'gir-json'" ],
	json1 => [ 'braid', q['format-version', '1'] ],
	json1_chunks => [ 'braid', q['format-version', '1', 'write-in-chunks', 'on', 'add-tables', '*.*'] ],
	json2 => [ 'braid', q['format-version', '2'] ],
	json2_any => [ 'braid', q['format-version', '2', 'add-tables', '*.*'] ],
	json2_published => [ 'braid', q['format-version', '2', 'publication_names', 'braid'] ],
	json2_named => [ 'braid', q['format-version', '2', 'add-tables', 'public.*,braid.*'] ],
	test_decoding => [ 'test_decoding', q['include-xids', 'on', 'stream-changes', 'on'] ],
	pgoutput => [ 'pgoutput', q['proto_version', '2', 'publication_names', 'braid', 'messages', 'on', 'streaming', 'on'] ],
);
# A server with assertions fails where pgoutput looks up the origin of the initial copy's rows,
# which has no name.
$stream{pgoutput}[1] .= q[, 'origin', 'none'] if $paris->pg_version >= 16;
sql($paris, "select pg_create_logical_replication_slot('$_', '$stream{$_}[0]')") for sort keys %stream;

sql($paris, "select braid.create_node('paris', 'dbname=postgres password=$password{node}')");
my $start = "select braid.create_subscription";
sql($paris, "$start('from_tokyo', '$dsn password=$password{created}')");
sql($paris, "select braid.wait_for_subscription('from_tokyo', '180 s')");
sql($tokyo, q[insert into item select i, 'tokyo' from generate_series(1, 10) i]);
my $streamed = sub { $paris->poll_query_until('postgres', q[select count(*) = 10 from item]) };
ok($streamed->(), 'the subscription streams');
is(sql($paris, 'select count(*) from braid.connection'), '3', 'one string for the node, one for its peer, one for the subscription');
sql($paris, "select braid.alter_subscription('from_tokyo', dsn => '$dsn password=$password{altered}')");
is(sql($paris, "select count(*) filter (where dsn like '%$password{altered}%'), count(*) from braid.connection"), '2|3', 'another one takes its place');
# Further writes to the catalog: commands, conflicts, the manager's records.
sql($paris, "select braid.alter_subscription('from_tokyo', apply_mode => 'batch'); select braid.set_rate_limit('from_tokyo', rows_per_second => 100000)");
sql($paris, q[update item set v = 'written here' where id = 1]);
sql($tokyo, q[update item set v = 'tokyo again' where id = 1]);
ok($paris->poll_query_until('postgres', q[select count(*) > 0 from braid.conflict_history]), 'a conflict is recorded');
# As the manager does it once a minute.
sql($paris, q[update braid.subscription set caught_up_at = now(), connected_at = now()]);
# A failed call, and one whose provider is away: its slot is remembered with its connection string.
my ($code, undef, $error) = $paris->psql('postgres', "$start('other', 'host=/nonexistent password=$password{dropped}')");
isnt($code, 0, 'a provider that is not there');
# The statement that fails need not name the function.
$paris->psql('postgres', "prepare p as select braid.create_subscription($_); execute p('host=/nonexistent password=$password{dropped}')") for q['other', $1];
unlike($error, qr/$password{dropped}/, 'is an error without the password');
# Nor is a call logged that fails before the function runs.
$paris->psql('postgres', "select braid.$_('host=/nonexistent password=$password{dropped}', no_such => 1)") for qw(create_node create_group join_group add_witness);
sql($paris, "$start('dropped', '$dsn password=$password{dropped}', copy_data => false)");
sql($paris, "select braid.wait_for_subscription('dropped', '180 s')");
$tokyo->stop;
sql($paris, "select braid.drop_subscription('dropped')");
is(sql($paris, 'select slot_name from braid.pending_cleanup'), 'braid_paris_dropped', 'a slot is left at a provider that is away');

# The password survives a crash, and is on a standby.
$paris->backup('copy', backup_options => [ '--checkpoint', 'fast' ]);
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($paris, 'copy', has_streaming => 1);
$standby->start;
my $strings = 'select md5(string_agg(dsn, chr(10) order by connection_id)) from braid.connection';
sql($paris, q[select braid.create_node('x', 'password=x') where false; select pg_switch_wal()]);
$paris->wait_for_catchup($standby, 'replay', $paris->lsn('flush'));
my $expected = sql($paris, $strings);
is(sql($standby, $strings), $expected, 'a standby has the strings');
$standby->stop;
$paris->stop('immediate');
$paris->start;
is(sql($paris, $strings), $expected, 'as has the server after a crash');
$tokyo->start;
sql($tokyo, q[insert into item values (11, 'tokyo')]);
ok($paris->poll_query_until('postgres', 'select count(*) = 11 from item'), 'with which it streams again');
ok($paris->poll_query_until('postgres', 'select count(*) = 0 from braid.pending_cleanup'), 'and drops the slot that was left');
is(sql($paris, "select count(*) from braid.connection where dsn like '%$password{dropped}%' and connection_id in (select connection_id from braid.subscription)"), '0', 'the string of what was dropped');

my $secret = qr/@{[ join '|', map { substr $_, 0, 16 } values %password ]}|secret\d/;
for my $slot (sort keys %stream)
{
	my ($plugin, $options) = $stream{$slot}->@*;
	my $text = sql($paris, "select encode(string_agg(data, chr(10)::bytea), 'escape') from pg_logical_slot_peek_binary_changes('$slot', null, null, $options)");
	# A value that is stored out of line would be decoded in chunks; each chunk begins somewhere in
	# a password.
	my $pieces = join '|', map { substr $_, 2000, 30 } values %password;
	ok($text !~ $secret && $text !~ /$pieces/, "$slot: no password");
	like($text, qr/written here/, "$slot: but the changes of users' tables");
	my $own = $text =~ /caught_up_at|conflict_record|subscription_table/;
	my $shown = $slot =~ /named|test_decoding|pgoutput/;
	is($own ? 1 : 0, $shown ? 1 : 0, "$slot: the extension's own tables are " . ($shown ? 'there' : 'left out'));
}

# Nobody else sees them.
sql($paris, 'create role watcher login in role braid_admin, braid_monitor; create role reader login in role pg_read_all_data');
for my $role (qw(watcher reader))
{
	my ($status, $out, $why) = $paris->psql('postgres', 'select dsn from braid.connection', extra_params => [ '-U', $role ]);
	unlike($out . $why, $secret, "$role reads none");
}
my @views = split /\n/, sql($paris, q[select c.relname from pg_class c where c.relnamespace = 'braid'::regnamespace and c.relkind = 'v']);
cmp_ok(scalar @views, '>', 15, 'of all views');
unlike(join("\n", map { sql($paris, "set role watcher; select v::text from braid.\"$_\" v") } @views), $secret, 'none shows a password');
my @tables = split /\n/, sql($paris, q[select c.relname from pg_class c where c.relnamespace = 'braid'::regnamespace and c.relkind = 'r' and c.relname <> 'connection']);
unlike(join("\n", map { sql($paris, "select t::text from braid.\"$_\" t") } @tables), $secret, 'and no other table has one');
unlike(slurp_file($_->logfile), $secret, 'nor the log of ' . $_->name) for $tokyo, $paris, $standby;

# A connection string that was deleted is an error, and does not mean the local server.
sql($paris, q[delete from braid.connection where connection_id = (select connection_id from braid.subscription)]);
($code, undef, $error) = $paris->psql('postgres', q[select braid.refresh_subscription('from_tokyo')]);
like($error, qr/has no connection string/, 'a string that is gone is missed');
sql($paris, "select braid.alter_subscription('from_tokyo', dsn => '$dsn password=$password{altered}')");
sql($tokyo, q[insert into item values (12, 'tokyo')]);
ok($paris->poll_query_until('postgres', 'select count(*) = 12 from item'), 'and can be given anew');
sql($paris, q[select braid.drop_subscription('from_tokyo'); select braid.drop_node('tokyo')]);
ok($paris->poll_query_until('postgres', 'select count(*) = 1 from braid.connection'), 'nothing is left of a provider that was dropped');
sql($paris, q[select braid.drop_node('paris')]);
is(sql($paris, 'select count(*) from braid.connection'), '0', 'nor of the node');
sql($paris, 'drop extension braid');

done_testing();
