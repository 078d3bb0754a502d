# kill -9 of random processes of provider and subscriber while large transactions are committed in pieces: in each apply mode and commit
# order, sent while they run or not, larger than the buffer or not, with small ones between them. Each change takes effect once.
#
# A row of the ledger and one step of a counter are one transaction, though not one piece: the counter is compared with how often it was
# incremented by a transaction that committed. The ledger has no key, so what came twice would be there twice; so has the trace, where larger
# transactions leave a row for each row that they change.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep time);

# In all; a kill and what follows it take about a second.
my $kills = $ENV{BRAID_TEST_KILLS} // 24;
my $seed = $ENV{BRAID_TEST_SEED} // int(rand(1_000_000));
srand($seed);
note("seed $seed: BRAID_TEST_SEED=$seed repeats the choices");
my @modes = ('parallel source off', 'batch source on', 'parallel relaxed on', 'aggregate relaxed off');
my $most = 50;

# What is decoded leaves at once where it may; what is large is applied through a small buffer.
my $tokyo = new_node('tokyo', conf => "logical_decoding_work_mem = 64kB\n");
my $paris = new_node('paris', publication => '', conf => "braid.apply_buffer_size = 1MB\n");
my @nodes = ($tokyo, $paris);

on_all(q[
	create table ledger (id bigint, k int);
	create table counter (k int primary key, n bigint not null);
	create table item (k int primary key, place int not null, n int not null default 0);
	create table bulk (id bigint primary key, t text);
	create table steps (k int primary key, n bigint not null);
	create table trace (id bigint, k int);
	create sequence ledger_id;
	create sequence bulk_id;
], @nodes);
$tokyo->safe_psql('postgres', q[
	insert into counter select k, 0 from generate_series(1, 40) k;
	insert into item select k, k from generate_series(1, 50) k;
	insert into steps select k, 0 from generate_series(1, 3000) k;
]);
my $name = subscribe($paris, $tokyo, split_transactions_above => $most);

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
begin;
insert into ledger values (nextval('ledger_id'), :k);
update counter set n = n + 1 where k = :k;
insert into bulk select nextval('bulk_id'), repeat('x', 200) from generate_series(1, 1500);
savepoint one;
insert into bulk select -nextval('bulk_id'), repeat('never', 40) from generate_series(1, 1000);
rollback to one;
insert into bulk select nextval('bulk_id'), repeat('y', 200) from generate_series(1, 1500);
delete from bulk where id % 3 = 0 and id > (select max(id) - 2000 from bulk);
commit;
\sleep 400 ms
]);
$write->('steps', q[
\set f random(1, 2400)
\set l :f + random(40, 600)
begin;
update steps set n = n + 1 where k between :f and :l;
insert into trace select nextval('bulk_id'), k from generate_series(:f, :l) k;
commit;
\sleep 50 ms
]);
my @writers = map {
	my $command = sprintf 'while [ ! -e %s/stop ]; do pgbench -n %s -T 1 --max-tries=1000 -h %s -p %s -f %s/%s.sql postgres; sleep 0.05; done',
	  $dir, { large => '-c 2', steps => '-c 1' }->{$_} // '-c 1 -R 100', $tokyo->host, $tokyo->port, $dir, $_;
	IPC::Run::start([ 'sh', '-c', $command ], '<', \undef, '>', '/dev/null', '2>', '/dev/null');
} qw(small moving large steps);

# Of the subscriber, of the provider, and the server as a whole of either.
my @kinds = ([ $paris, 'braid applier' ], [ $paris, 'braid leader' ], [ $tokyo, 'walsender' ], [ $paris, 'postmaster' ], [ $paris, 'braid applier' ], [ $tokyo, 'postmaster' ]);
my $missing = 0;
my %killed;
for my $mode (@modes)
{
	my ($apply_mode, $order, $streaming) = split / /, $mode;
	wait_until(sub { ($paris->psql('postgres', "select braid.alter_subscription('$name', apply_mode => '$apply_mode', commit_order => '$order', streaming => '$streaming')"))[0] == 0 }, 30)
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
	is($paris->safe_psql('postgres', "select apply_mode || ' ' || commit_order || ' ' || streaming from braid.subscription where subscription_name = '$name'"), $mode, "in its mode, $mode");
}
is($missing, 0, 'every kind of process came back each time');
note(join '; ', map { "$_: $killed{$_}" } sort keys %killed);

PostgreSQL::Test::Utils::append_to_file("$dir/stop", '');
$_->finish for @writers;
caught_up($paris, $tokyo);
my $resumed = () = slurp_file($paris->logfile) =~ /goes on with the transaction that commits at \S+ after [0-9]+ changes/g;
cmp_ok($resumed, '>', 0, "$resumed times a transaction went on after some of its pieces");
same_tables(\@nodes, qw(ledger counter item bulk steps trace));
cmp_ok($tokyo->safe_psql('postgres', 'select count(*) from ledger'), '>', 200, 'there was load');
for my $node (@nodes)
{
	is($node->safe_psql('postgres', "select count(*) - count(distinct id) from $_"), '0', "nothing came twice to $_ of " . $node->name) for qw(ledger trace);
	is($node->safe_psql('postgres', q[
		select count(*) from steps s left join (select k, count(*) as n from trace group by k) t using (k) where s.n <> coalesce(t.n, 0)
	]), '0', 'each step left its trace, on ' . $node->name);
	is($node->safe_psql('postgres', q[
		select count(*) from counter c where n <> (select count(*) from ledger l where l.k = c.k)
	]), '0', 'each counter is what was added to it, on ' . $node->name);
	is($node->safe_psql('postgres', q[select (select count(*) from ledger where id < 0) + (select count(*) from bulk where id < 0)]), '0', 'nothing that was rolled back came to ' . $node->name);
}
is($paris->safe_psql('postgres', 'select count(*) from braid.split_progress'), '0', 'no transaction is left in part');
my ($pieces, $largest) = split /\|/, $paris->safe_psql('postgres', q[
	select count(*), max(n) from (select count(*) as n from bulk where xmin::text::bigint > 2 group by xmin::text) w
]);
cmp_ok($largest, '<=', $most, "no piece is larger than it may be, of $pieces");

done_testing();
