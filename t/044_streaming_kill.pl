# kill -9 of random processes of provider and subscriber while large transactions are on their way in segments: several at once,
# with small ones between them, with savepoints and whole transactions rolled back, some still running when a process dies. Each that
# commits takes effect once.
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
my $kills = $ENV{BRAID_TEST_KILLS} // 15;
my $seed = $ENV{BRAID_TEST_SEED} // int(rand(1_000_000));
srand($seed);
note("seed $seed: BRAID_TEST_SEED=$seed repeats the choices");
my @modes = qw(parallel batch);

# What is decoded leaves at once; what is large is applied through a small buffer.
my $tokyo = new_node('tokyo', conf => "logical_decoding_work_mem = 64kB\n");
my $paris = new_node('paris', publication => '', conf => "braid.apply_buffer_size = 1MB\n");
my @nodes = ($tokyo, $paris);

on_all(q[
	create table ledger (id bigint, k int);
	create table counter (k int primary key, n bigint not null);
	create table item (k int primary key, place int not null, n int not null default 0);
	create table bulk (id bigint primary key, t text);
	create table shape (id bigint primary key, v text);
	create sequence ledger_id;
	create sequence bulk_id;
], @nodes);
$tokyo->safe_psql('postgres', q[
	insert into counter select k, 0 from generate_series(1, 40) k;
	insert into item select k, k from generate_series(1, 50) k;
]);
my $name = subscribe($paris, $tokyo, streaming => "'on'");

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
# To another key, gone, and here again; what is rolled back to a savepoint never was.
$write->('moving', q[
\set k random(1, 40)
\set i random(1, 50)
begin;
savepoint one;
update counter set n = n + 100 where k = :k;
insert into ledger values (-1, :k);
rollback to one;
savepoint two;
insert into ledger values (nextval('ledger_id'), :k);
update counter set n = n + 1 where k = :k;
release two;
update item set k = k + 1000 where k = :i;
update item set place = place + 1 where k = :i + 1000;
delete from item where k = :i + 1000;
insert into item values (:i, :k) on conflict (k) do update set place = excluded.place;
commit;
]);
$write->('large', q[
\set k random(1, 40)
\set r random(1, 5)
\set end (:r = 1)
begin;
insert into ledger values (nextval('ledger_id'), :k);
update counter set n = n + 1 where k = :k;
insert into bulk select nextval('bulk_id'), repeat('x', 200) from generate_series(1, 1500);
savepoint one;
insert into bulk select -nextval('bulk_id'), repeat('never', 40) from generate_series(1, 1000);
update bulk set t = 'never' where id > (select max(id) - 500 from bulk);
\sleep 50 ms
rollback to one;
savepoint two;
insert into bulk select nextval('bulk_id'), repeat('y', 200) from generate_series(1, 1000);
release two;
\sleep 50 ms
delete from bulk where id % 3 = 0 and id > (select max(id) - 2000 from bulk);
\if :end
insert into ledger values (-2, :k);
rollback;
\else
commit;
\endif
\sleep 100 ms
]);
# Shapes that are rolled back while their rows are decoded, and one that stays as it was.
$write->('shapes', q[
\set n random(300, 900)
begin;
create table passing (id int primary key, v text);
insert into passing select i, repeat('never', 40) from generate_series(1, :n) i;
rollback;
begin;
insert into shape select nextval('bulk_id'), 'kept' from generate_series(1, :n) i;
savepoint one;
alter table shape add column w text default 'never';
insert into shape select -nextval('bulk_id'), 'never', repeat('never', 20) from generate_series(1, :n) i;
rollback to one;
insert into shape select nextval('bulk_id'), 'kept' from generate_series(1, :n) i;
commit;
\sleep 200 ms
]);
my @writers = map {
	my $command = sprintf 'while [ ! -e %s/stop ]; do pgbench -n %s -T 1 --max-tries=1000 -h %s -p %s -f %s/%s.sql postgres; sleep 0.05; done',
	  $dir, { large => '-c 2', shapes => '-c 1' }->{$_} // '-c 1 -R 150', $tokyo->host, $tokyo->port, $dir, $_;
	IPC::Run::start([ 'sh', '-c', $command ], '<', \undef, '>', '/dev/null', '2>', '/dev/null');
} qw(small moving large shapes);

# Of the subscriber, of the provider, and the server as a whole of either.
my @kinds = ([ $paris, 'braid applier' ], [ $paris, 'braid leader' ], [ $tokyo, 'walsender' ], [ $paris, 'postmaster' ], [ $paris, 'braid applier' ], [ $tokyo, 'postmaster' ]);
my $missing = 0;
my %killed;
for my $mode (@modes)
{
	wait_until(sub { ($paris->psql('postgres', "select braid.alter_subscription('$name', apply_mode => '$mode')"))[0] == 0 }, 30)
	  or die "cannot change to $mode";
	for my $round (1 .. $kills / @modes)
	{
		sleep 0.2 + rand 0.8;
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
	# Up to here in this mode: it has to get through without help.
	ok(wait_until(sub { ($_->psql('postgres', 'select 1'))[0] == 0 }, 30), $_->name . " is up, $mode") for @nodes;
	ok(wait_until(sub { status($paris, $name)->{state} =~ /streaming|catching up/ }, 30), "the subscription goes on, $mode");
	is($paris->safe_psql('postgres', "select apply_mode from braid.subscription where subscription_name = '$name'"), $mode, "in its mode, $mode");
}
is($missing, 0, 'every kind of process came back each time');
note(join '; ', map { "$_: $killed{$_}" } sort keys %killed);

ok(wait_until(sub { $tokyo->safe_psql('postgres', 'select coalesce(sum(stream_bytes), 0) from pg_stat_replication_slots') > 0 }, 30), 'transactions are streamed');
PostgreSQL::Test::Utils::append_to_file("$dir/stop", '');
$_->finish for @writers;
caught_up($paris, $tokyo);
same_tables(\@nodes, qw(ledger counter item bulk shape));
cmp_ok($tokyo->safe_psql('postgres', 'select count(*) from ledger'), '>', 200, 'there was load');
for my $node (@nodes)
{
	is($node->safe_psql('postgres', 'select count(*) - count(distinct id) from ledger'), '0', 'nothing came twice to ' . $node->name);
	is($node->safe_psql('postgres', q[
		select count(*) from counter c where n <> (select count(*) from ledger l where l.k = c.k)
	]), '0', 'each counter is what was added to it, on ' . $node->name);
	is($node->safe_psql('postgres', q[select (select count(*) from ledger where id < 0) + (select count(*) from bulk where id < 0 or t like 'never%') + (select count(*) from shape where id < 0)]), '0', 'nothing that was rolled back came to ' . $node->name);
}

done_testing();
