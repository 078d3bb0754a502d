# kill -9 of random processes of provider and subscriber under a load of prepared transactions: committed at once, later, by another
# session, rolled back, large ones, and ordinary ones between them. Each takes effect once, and nothing stays prepared.
#
# A row of the ledger and one step of a counter are one transaction: the counter is compared with how often it was incremented
# by a transaction that committed.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep time);

# In all; a kill and what follows it take about a second.
my $kills = $ENV{BRAID_TEST_KILLS} // 16;
my $seed = $ENV{BRAID_TEST_SEED} // int(rand(1_000_000));
srand($seed);
note("seed $seed: BRAID_TEST_SEED=$seed repeats the choices");
my @modes = qw(parallel batch);

my $conf = "max_prepared_transactions = 50\n";
my $tokyo = new_node('tokyo', conf => "${conf}logical_decoding_work_mem = 64kB\n");
my $paris = new_node('paris', publication => '', conf => "${conf}braid.apply_buffer_size = 1MB\n");
my @nodes = ($tokyo, $paris);

on_all(q[
	create table ledger (id bigint, k int);
	create table counter (k int primary key, n bigint not null);
	create table item (k int primary key, place int not null, n int not null default 0);
	create table bulk (id bigint primary key, t text);
	create sequence ledger_id;
	create sequence bulk_id;
], @nodes);
$tokyo->safe_psql('postgres', q[
	insert into counter select k, 0 from generate_series(1, 40) k;
	insert into item select k, k from generate_series(1, 50) k;
]);
my $name = subscribe($paris, $tokyo, two_phase => 'true', streaming => "'on'");

my $dir = PostgreSQL::Test::Utils::tempdir();
my $write = sub { PostgreSQL::Test::Utils::append_to_file("$dir/$_[0].sql", $_[1]) };
$write->('small', q[
\set k random(1, 40)
\set i random(1, 50)
begin;
insert into ledger values (nextval('ledger_id'), :k);
update counter set n = n + 1 where k = :k;
update item set n = n + 1 where k = :i;
commit;
]);
# Ended by the same session: committed, or rolled back.
$write->('prepared', q[
\set k random(1, 40)
\set i random(1, 50)
\set gid random(1, 1000000000)
\set r random(1, 4)
\set end (:r = 1)
begin;
savepoint one;
update counter set n = n + 100 where k = :k;
insert into ledger values (-1, :k);
rollback to one;
insert into ledger values (case when :r = 1 then -2 else nextval('ledger_id') end, :k);
update counter set n = n + 1 where k = :k;
delete from item where k = :i;
insert into item values (:i, :k) on conflict (k) do update set place = excluded.place;
prepare transaction 's:gid';
\sleep :r ms
\if :end
rollback prepared 's:gid';
\else
commit prepared 's:gid';
\endif
]);
$write->('large', q[
\set k random(1, 40)
\set gid random(1, 1000000000)
\set r random(1, 5)
\set end (:r = 1)
begin;
insert into ledger values (case when :r = 1 then -2 else nextval('ledger_id') end, :k);
update counter set n = n + 1 where k = :k;
insert into bulk select nextval('bulk_id'), repeat('x', 200) from generate_series(1, 1500);
savepoint one;
insert into bulk select -nextval('bulk_id'), repeat('never', 40) from generate_series(1, 1000);
rollback to one;
delete from bulk where id % 3 = 0 and id > (select max(id) - 2000 from bulk);
prepare transaction 'l:gid';
\sleep 50 ms
\if :end
rollback prepared 'l:gid';
\else
commit prepared 'l:gid';
\endif
\sleep 200 ms
]);
my $writer = sub {
	my $command = sprintf 'while [ ! -e %s/stop ]; do %s; sleep 0.05; done', $dir, $_[0];
	return IPC::Run::start([ 'sh', '-c', $command ], '<', \undef, '>', '/dev/null', '2>', '/dev/null');
};
my $at = '-h ' . $tokyo->host . ' -p ' . $tokyo->port;
my @writers = map { $writer->(sprintf "pgbench -n %s -T 1 --max-tries=1000 $at -f $dir/%s.sql postgres", { large => '-c 1', prepared => '-c 3 -R 100' }->{$_} // '-c 2 -R 150', $_) }
  qw(small prepared large);
# A coordinator that comes back: what a session or a crash has left is ended by another.
push @writers, $writer->(qq[psql -XAtq $at postgres -c "select format(case when gid like '%7' then 'rollback' else 'commit' end || ' prepared %L;', gid) from pg_prepared_xacts where prepared < now() - interval '1 s'" | psql -XAtq $at postgres]);

# Of the subscriber, of the provider, and the server as a whole of either.
my @kinds = ([ $paris, 'braid applier' ], [ $paris, 'braid leader' ], [ $tokyo, 'walsender' ], [ $paris, 'postmaster' ], [ $paris, 'braid applier' ], [ $tokyo, 'postmaster' ]);
my $missing = 0;
my %killed;
for my $mode (@modes)
{
	wait_until(sub { (attempt($paris, "select braid.alter_subscription('$name', apply_mode => '$mode')"))[0] == 0 }, 30)
	  or die "cannot change to $mode";
	for my $round (1 .. $kills / @modes)
	{
		sleep 0.5 + rand 1;
		my ($node, $kind) = @{ $kinds[ $round % @kinds ] };
		if ($kind eq 'postmaster')
		{
			note("$mode: kill -9 the postmaster of " . $node->name);
			$node->kill9;
			restart_crashed($node);
		}
		else
		{
			my @pids = wait_for_worker($node, $kind);
			if (!@pids) { diag("no $kind on " . $node->name . " within 20 s"); $missing++; next; }
			my $pid = $pids[ int rand @pids ];
			note("$mode: kill -9 $kind $pid of " . $node->name);
			kill 9, $pid;
		}
		$killed{"$mode, $kind of " . $node->name}++;
	}
	ok(wait_until(sub { (attempt($_, 'select 1'))[0] == 0 }, 30), $_->name . " is up, $mode") for @nodes;
	ok(wait_until(sub { status($paris, $name)->{state} =~ /streaming|catching up/ }, 30), "the subscription goes on, $mode");
}
is($missing, 0, 'every kind of process came back each time');
note(join '; ', map { "$_: $killed{$_}" } sort keys %killed);

# The coordinator ends what the others have left. A row of a transaction that it has rolled back is in neither table.
sleep 2;
PostgreSQL::Test::Utils::append_to_file("$dir/stop", '');
$_->finish for @writers;
$tokyo->safe_psql('postgres', "rollback prepared '$_'") for split /\n/, $tokyo->safe_psql('postgres', 'select gid from pg_prepared_xacts');
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select count(*) from pg_prepared_xacts'), '0', 'nothing stays prepared');
is($paris->safe_psql('postgres', 'select count(*) from braid.unprepared'), '0', 'and all could be prepared');
same_tables(\@nodes, qw(ledger counter item bulk));
cmp_ok($tokyo->safe_psql('postgres', 'select count(*) from ledger'), '>', 200, 'there was load');
for my $node (@nodes)
{
	is($node->safe_psql('postgres', 'select count(*) - count(distinct id) from ledger where id > 0'), '0', 'nothing came twice to ' . $node->name);
	is($node->safe_psql('postgres', q[
		select count(*) from counter c where n <> (select count(*) from ledger l where l.k = c.k)
	]), '0', 'each counter is what was added to it, on ' . $node->name);
	is($node->safe_psql('postgres', 'select count(*) from ledger where id = -1'), '0', 'nothing that was rolled back to a savepoint came to ' . $node->name);
	is($node->safe_psql('postgres', 'select count(*) from bulk where id < 0'), '0', 'nor of what is large, to ' . $node->name);
}

done_testing();
