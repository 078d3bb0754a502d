# A peer sends garbage, stalls, or closes the connection in the middle of a record, at random places
# of the stream, under load. The subscriber reports an error and tries again. Nothing is lost or
# applied twice, and no process crashes.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Proxy;
use Test::More;
use Time::HiRes qw(sleep);

my $rounds = $ENV{BRAID_TEST_FAULTS} // 4;
my $seed = $ENV{BRAID_TEST_SEED} // int(rand(1_000_000));
srand($seed);
note("seed $seed: BRAID_TEST_SEED=$seed repeats the choices");

my $tokyo = new_node('tokyo');
# A silent peer is given up soon.
my $paris = new_node('paris', publication => '', conf => "wal_receiver_timeout = 1500ms\nwal_receiver_status_interval = 1s\n");
on_all(q[
	create table ledger (id bigint, k int);
	create table counter (k int primary key, n bigint not null, t text);
	create sequence ledger_id;
], $tokyo, $paris);
$tokyo->safe_psql('postgres', 'insert into counter select k, 0 from generate_series(1, 50) k');
my $name = subscribe($paris, $tokyo);
my $proxy = Proxy->new($tokyo, seed => $seed);
my $dsn = $proxy->connstr('postgres');
$paris->safe_psql('postgres', "select braid.alter_subscription('$name', dsn => '$dsn')");
caught_up($paris, $tokyo);

my $dir = PostgreSQL::Test::Utils::tempdir();
PostgreSQL::Test::Utils::append_to_file("$dir/load.sql", q[
\set k random(1, 50)
begin;
insert into ledger values (nextval('ledger_id'), :k);
update counter set n = n + 1, t = repeat(md5(:k::text), 1 + :k % 20) where k = :k;
commit;
]);
my $load = IPC::Run::start(
	[ 'sh', '-c', "while [ ! -e $dir/stop ]; do pgbench -n -c 2 -R 300 -T 1 --max-tries=1000 -h " . $tokyo->host . ' -p ' . $tokyo->port . " -f $dir/load.sql postgres; done" ],
	'<', \undef, '>', '/dev/null', '2>', '/dev/null');

# The log's message, about the subscription or about a statement that it sent to the provider.
# Garbage may look like anything to libpq, and to the reader of records.
my %said = (
	garbage => qr/connection to the provider: |from the provider|silent for longer than wal_receiver_timeout/,
	cut => qr/connection to the provider: .*(?:closed the connection unexpectedly|reset by peer|unexpected answer)/,
	stall => qr/silent for longer than wal_receiver_timeout|timeout expired/,
);

# Of the subscription since then, without what comes of ending its walsender, which is not the
# fault.
sub errors
{
	my ($offset) = @_;
	return join "\n", grep { !/due to administrator command/ } slurp_file($paris->logfile, $offset) =~ /"$name" will be tried again: (.*)/g;
}
my %happened;
for my $round (1 .. $rounds)
{
	for my $how (qw(garbage cut stall))
	{
		# A stall takes as long as its discovery.
		next if $how eq 'stall' && $round % 4 != 2;
		my $before = $proxy->faults;
		my $offset = -s $paris->logfile;
		$proxy->behave($how);
		# For the connection that there is, as if the network had let it go.
		$tokyo->safe_psql('postgres', 'select pg_terminate_backend(pid) from pg_stat_replication');
		my $met = wait_until(sub { $proxy->faults > $before }, 20);
		ok($met, "$how $round") or diag($paris->safe_psql('postgres', "select * from braid.subscription_status"));
		$happened{$how}++ if $met;
		ok(!$met || wait_until(sub { errors($offset) =~ $said{$how} }, 20), "the subscriber has said what went wrong: $how $round") or diag(errors($offset));
		note(errors($offset));
		$proxy->behave('pass');
		ok(wait_until(sub { status($paris, $name)->{state} =~ /streaming|catching up/ || status($paris, $name)->{state} eq 'error' }, 20)
			&& status($paris, $name)->{state} ne 'error', "it goes on after $how $round")
		  or diag(join ', ', map { status($paris, $name)->{$_} } qw(state last_error));
	}
}
note(join ', ', map { "$_: $happened{$_}" } sort keys %happened);
PostgreSQL::Test::Utils::append_to_file("$dir/stop", '');
$load->finish;
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], qw(ledger counter));
is($paris->safe_psql('postgres', 'select count(*) - count(distinct id) from ledger'), '0', 'nothing came twice');
is($paris->safe_psql('postgres', 'select count(*) from counter c where n <> (select count(*) from ledger l where l.k = c.k)'), '0',
	'nothing was lost, doubled or torn');
cmp_ok($paris->safe_psql('postgres', 'select count(*) from ledger'), '>', 500, 'there was something to lose');

$proxy->stop;
done_testing();
