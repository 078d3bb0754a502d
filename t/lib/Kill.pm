# For tests that kill -9 processes of a provider and its subscriber under load: a load of every kind, the kills, and whether each
# transaction took effect once.
#
# A row of the ledger and one step of a counter are one transaction: the counter is compared with how often it was incremented by a
# transaction that committed. The ledger has no key, so what came twice would be there twice. What was rolled back has an id below 0.

package Kill;

use strict;
use warnings;

use Exporter 'import';
use Braid;
use IPC::Run ();
use List::Util qw(shuffle);
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep time);

our @EXPORT = qw(kill_seed ledger_tables start_load start_loop hold_up stop_load kill_one kill_processes goes_on each_once kill_in_mode);

my %script = (
	small => q[
\set k random(1, 40)
\set i random(1, 50)
begin;
insert into ledger values (nextval('ledger_id'), :k);
update counter set n = n + 1 where k = :k;
update item set n = n + 1 where k = :i;
commit;
],
	# To another key, gone, and here again; what is rolled back to a savepoint never was.
	moving => q[
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
],
	large => q[
\set k random(1, 40)
begin;
insert into ledger values (nextval('ledger_id'), :k);
update counter set n = n + 1 where k = :k;
insert into bulk select nextval('bulk_id'), repeat('x', 200) from generate_series(1, 3000);
savepoint one;
insert into bulk select -nextval('bulk_id'), repeat('never', 40) from generate_series(1, 300);
rollback to one;
delete from bulk where id % 3 = 0 and id > (select max(id) - 4000 from bulk);
commit;
\sleep 300 ms
],
);

my $dir = PostgreSQL::Test::Utils::tempdir();
my @loops;

# The seed of what is chosen at random, told to whom wants to repeat it.
sub kill_seed
{
	my $seed = $ENV{BRAID_TEST_SEED} // int(rand(1_000_000));
	srand($seed);
	note("seed $seed: BRAID_TEST_SEED=$seed repeats the choices");
	return;
}

# What the load writes to, on both, with what it changes at the provider.
sub ledger_tables
{
	my ($provider, $subscriber) = @_;
	on_all(q[
		create table ledger (id bigint, k int);
		create table counter (k int primary key, n bigint not null);
		create table item (k int primary key, place int not null, n int not null default 0);
		create table bulk (id bigint primary key, t text);
		create sequence ledger_id;
		create sequence bulk_id;
	], $provider, $subscriber);
	$provider->safe_psql('postgres', q[
		insert into counter select k, 0 from generate_series(1, 40) k;
		insert into item select k, k from generate_series(1, 50) k;
	]);
	return;
}

# A shell command in a loop that does not end when its server does, until stop_load().
sub start_loop
{
	my ($command) = @_;
	push @loops, IPC::Run::start([ 'sh', '-c', "while [ ! -e $dir/stop ]; do $command; sleep 0.05; done" ], '<', \undef, '>', '/dev/null', '2>', '/dev/null');
	return;
}

# pgbench in loops: pairs of a script, or its name, and the arguments for pgbench.
sub start_load
{
	my ($node, @scripts) = @_;
	while (my ($text, $arguments) = splice @scripts, 0, 2)
	{
		my $file = "$dir/" . scalar(@loops) . '.sql';
		PostgreSQL::Test::Utils::append_to_file($file, $script{$text} // $text);
		start_loop(sprintf 'pgbench -n %s -T 1 --max-tries=1000 -h %s -p %s -f %s postgres', $arguments, $node->host, $node->port, $file);
	}
	return;
}

# A session of the subscriber that holds up some of the transactions for a while, so that others get ahead of them where they may; SELECT .. FOR
# UPDATE leaves no trace in the data.
sub hold_up
{
	my ($node) = @_;
	start_load($node, "\\set k random(1, 40)\nbegin;\nselect from counter where k = :k for update;\n\\sleep 150 ms\ncommit;\n" => '-c 1');
	return;
}

sub stop_load
{
	return unless @loops;
	PostgreSQL::Test::Utils::append_to_file("$dir/stop", '');
	$_->finish for splice @loops;
	return;
}

# A test that dies leaves no loop behind.
END
{
	my $status = $?;
	eval { stop_load() };
	$? = $status;
}

# kill -9 of a process of this kind, or of the postmaster, which is started again. False when there is none within 20 seconds.
sub kill_one
{
	my ($node, $kind) = @_;
	if ($kind eq 'postmaster')
	{
		$node->kill9;
		restart_crashed($node);
		return 1;
	}
	my @pids = wait_for_worker($node, $kind) or return 0;
	my $pid = $pids[ int rand @pids ];
	note("process $pid");
	kill 9, $pid;
	return 1;
}

# kill -9 of one process after the other: so many `rounds`, or for so many `seconds`. `kinds` are pairs of a node and a kind of
# process, or 'postmaster', of either by default; each comes as often as it is there, in random order. Returns how many were killed.
sub kill_processes
{
	my ($label, %opt) = @_;
	my ($provider, $subscriber) = @{ $opt{between} };
	my $kinds = $opt{kinds} // [
		[ $subscriber, 'braid applier' ], [ $subscriber, 'braid leader' ], [ $provider, 'walsender' ],
		[ $subscriber, 'postmaster' ], [ $subscriber, 'braid applier' ], [ $provider, 'postmaster' ]
	];
	my $end = time + ($opt{seconds} // 86400);
	my $rounds = $opt{rounds} // 1_000_000;
	my ($round, $missed, %killed, @next) = (0, 0);
	while (time < $end && $round++ < $rounds)
	{
		sleep 0.2 + rand 0.8;
		@next = shuffle @$kinds if !@next;
		my ($node, $kind) = @{ shift @next };
		note("$label: kill -9 $kind of " . $node->name);
		if (!kill_one($node, $kind)) { diag("no $kind on " . $node->name . " within 20 s"); $missed++; next; }
		$killed{"$kind of " . $node->name}++;
	}
	is($missed, 0, "every kind of process came back each time, $label");
	note("$label: " . join '; ', map { "$_: $killed{$_}" } sort keys %killed);
	my $all = 0;
	$all += $_ for values %killed;
	return $all;
}

# It gets through without help.
sub goes_on
{
	my ($label, $name, $provider, $subscriber) = @_;
	ok(wait_until(sub { (attempt($_, 'select 1'))[0] == 0 }, 30), $_->name . " is up, $label") for $provider, $subscriber;
	ok(wait_until(sub { status($subscriber, $name)->{state} =~ /streaming|catching up/ }, 30), "the subscription goes on, $label");
	return;
}

# The load is over: each transaction took effect once.
sub each_once
{
	my ($nodes, @others) = @_;
	same_tables($nodes, qw(ledger counter item bulk), @others);
	cmp_ok($nodes->[0]->safe_psql('postgres', 'select count(*) from ledger'), '>', 200, 'there was load');
	for my $node (@$nodes)
	{
		is($node->safe_psql('postgres', 'select count(*) - count(distinct id) from ledger where id > 0'), '0', 'nothing came twice to ' . $node->name);
		is($node->safe_psql('postgres', q[
			select count(*) from counter c where n <> (select count(*) from ledger l where l.k = c.k)
		]), '0', 'each counter is what was added to it, on ' . $node->name);
		is($node->safe_psql('postgres', q[
			select (select count(*) from ledger where id < 0) + (select count(*) from bulk where id < 0 or t like 'never%')
		]), '0', 'nothing that was rolled back came to ' . $node->name);
	}
	return;
}

# A minute of kills while the subscription is in one apply mode and commit order. `opt` are further options of create_subscription, and the
# setting parallel_apply.
sub kill_in_mode
{
	my ($mode, $order, %opt) = @_;
	my $relaxed = $order eq 'relaxed';
	my $spread = delete $opt{parallel_apply} // 'always';
	kill_seed();
	# A small buffer: what is large is applied while it comes. More appliers have more ahead of the mark.
	my $tokyo = new_node('tokyo');
	my $paris = new_node('paris', publication => '', conf => "braid.apply_buffer_size = 1MB\nbraid.parallel_apply = $spread\n" . ($relaxed ? "braid.appliers_per_subscription = 4\n" : ''));
	ledger_tables($tokyo, $paris);
	my $name = subscribe($paris, $tokyo, apply_mode => "'$mode'", commit_order => "'$order'", %opt);
	start_load($tokyo, small => '-c 2 -R 200', moving => '-c 2 -R 200', large => '-c 1');
	hold_up($paris) if $relaxed;

	my $label = "$mode, $order";
	my $killed = kill_processes($label, between => [ $tokyo, $paris ], seconds => $ENV{BRAID_TEST_SECONDS} // 60);
	cmp_ok($killed, '>', 5, "$killed were killed");
	goes_on($label, $name, $tokyo, $paris);
	is($paris->safe_psql('postgres', "select apply_mode || ', ' || commit_order from braid.subscription where subscription_name = '$name'"), $label, 'in its mode');
	stop_load();
	caught_up($paris, $tokyo);
	my $ahead = () = slurp_file($paris->logfile) =~ /goes on at .* committed already/g;
	# What is joined shares keys with most of what follows, so little gets ahead of it.
	cmp_ok($ahead, '>', 2, "$ahead leaders started with transactions ahead of the mark") if $relaxed && $mode eq 'parallel';
	each_once([ $tokyo, $paris ]);
	return;
}

1;
