# kill -9 of every kind of process on either side, at random moments, while both nodes write: each transaction takes
# effect once.
#
# The ledger has no key, so a row that came twice would stay twice. Each transaction also counts in a row of its own node:
# what was lost or doubled makes the count differ from the ledger. Rows that both nodes write must converge.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep time);

my $kills = $ENV{BRAID_TEST_KILLS} // 24;
my $seed = $ENV{BRAID_TEST_SEED} // int(rand(1_000_000));
srand($seed);
note("seed $seed: BRAID_TEST_SEED=$seed repeats the choices");

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
my @nodes = ($tokyo, $paris);

on_all(q[
	create table ledger (node text, id bigint, k int);
	create table counter (node text, k int, n bigint not null, primary key (node, k));
	create table shared (k int primary key, node text, v bigint);
	create sequence ledger_id;
], @nodes);
$tokyo->safe_psql('postgres', q[
	insert into counter select node, k, 0 from unnest('{tokyo,paris}'::text[]) node, generate_series(1, 50) k;
	insert into shared select k, 'tokyo', 0 from generate_series(1, 50) k;
]);
subscribe($paris, $tokyo);
subscribe($tokyo, $paris, copy_data => 'false');

# Writers that come back whenever their server does.
my $dir = PostgreSQL::Test::Utils::tempdir();
my @writers;
for my $node (@nodes)
{
	my $name = $node->name;
	PostgreSQL::Test::Utils::append_to_file("$dir/$name.sql", qq[
\\set k random(1, 50)
\\set s random(1, 50)
begin;
insert into ledger values ('$name', nextval('ledger_id'), :k);
update counter set n = n + 1 where node = '$name' and k = :k;
update shared set node = '$name', v = v + 1 where k = :s;
commit;
]);
	my $command = sprintf 'while [ ! -e %s/stop ]; do pgbench -n -c 2 -R 300 -T 1 --max-tries=1000 -h %s -p %s -f %s/%s.sql postgres; sleep 0.05; done',
	  $dir, $node->host, $node->port, $dir, $name;
	push @writers, IPC::Run::start([ 'sh', '-c', $command ], '<', \undef, '>', '/dev/null', '2>', '/dev/null');
}

my @kinds = ('braid leader', 'braid applier', 'walsender', 'braid manager', 'postmaster', 'braid supervisor');
my %killed;
my $missing = 0;
for my $round (1 .. $kills)
{
	my $kind = $kinds[ $round % @kinds ];
	my $node = $nodes[ int rand @nodes ];
	sleep 0.1 + rand 0.7;
	if ($kind eq 'postmaster')
	{
		note("kill -9 the postmaster of " . $node->name);
		$node->kill9;
		restart_crashed($node);
	}
	else
	{
		# The processes of a kind are back within seconds of the last kill.
		my @pids = wait_for_worker($node, $kind);
		if (!@pids) { diag("no $kind on " . $node->name . " within 20 s"); $missing++; next; }
		my $pid = $pids[ int rand @pids ];
		note("kill -9 $kind $pid of " . $node->name);
		kill 9, $pid;
	}
	$killed{$kind}++;
}
is($missing, 0, 'every kind of process came back each time');
note(join ', ', map { "$_: $killed{$_}" } sort keys %killed);

sleep 1;
PostgreSQL::Test::Utils::append_to_file("$dir/stop", '');
$_->finish for @writers;
for my $node (@nodes)
{
	ok(wait_until(sub { (attempt($node, 'select 1'))[0] == 0 }, 30), $node->name . ' is up');
}
converged(@nodes);

same_tables(\@nodes, qw(ledger counter shared));
for my $node (@nodes)
{
	my $name = $node->name;
	cmp_ok($node->safe_psql('postgres', "select count(*) from ledger where node = '$name'"), '>', 100, "$name went on writing");
	is($node->safe_psql('postgres', 'select count(*) - count(distinct (node, id)) from ledger'), '0', "nothing came twice to $name");
	is($node->safe_psql('postgres', q[
		select count(*) from counter c
		where n <> (select count(*) from ledger l where l.node = c.node and l.k = c.k)
	]), '0', "no transaction was lost, doubled or torn on $name");
}

done_testing();
