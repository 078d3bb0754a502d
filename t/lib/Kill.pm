# For tests that kill -9 processes of a provider and its subscriber under load: the load, the kills,
# and the check that each transaction took effect once.
#
# Each transaction adds a row to the ledger and one to a counter. The counter must equal the number
# of committed transactions. The ledger has no key, so a transaction that was applied twice would be
# there twice. Rows of rolled back transactions have an id below 0.

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

our @EXPORT = qw(kill_seed ledger_tables start_load start_loop start_checkpoints hold_up stop_load kill_one kill_processes every_kind start_tally look applied goes_on each_once kill_in_mode);

my %script = (
	# Adds one, in two steps.
	small => q[
\set k random(1, 40)
\set i random(1, 50)
begin;
insert into ledger values (nextval('ledger_id'), :k);
update counter set n = n + 3 where k = :k;
update counter set n = n - 2 where k = :k;
update item set n = n + 1 where k = :i;
commit;
],
	# A row gets another key, is deleted, and comes back. Changes that are rolled back to a
	# savepoint must not arrive.
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
# Nodes without a limit for crashes at one transaction.
my %unlimited;
# The last process that was killed at each node, and the end of its log at that time.
my %last_killed;

# Prints the seed of random choices, so that a run can be repeated.
sub kill_seed
{
	my $seed = $ENV{BRAID_TEST_SEED} // int(rand(1_000_000));
	srand($seed);
	note("seed $seed: BRAID_TEST_SEED=$seed repeats the choices");
	return;
}

# Creates the tables of the load on both nodes, and their first rows at the provider.
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

# Runs a shell command in a loop, also while its server is down, until stop_load().
sub start_loop
{
	my ($command) = @_;
	push @loops, IPC::Run::start([ 'sh', '-c', "while [ ! -e $dir/stop ]; do $command; sleep 0.05; done" ], '<', \undef, '>', '/dev/null', '2>', '/dev/null');
	return;
}

# Runs pgbench in loops. The arguments are pairs of a script, or its name, and options of pgbench.
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

# A session of the subscriber that delays some transactions for a while, so that others get ahead of
# them in relaxed order. SELECT .. FOR UPDATE leaves no trace in the data.
sub hold_up
{
	my ($node) = @_;
	start_load($node, "\\set k random(1, 40)\nbegin;\nselect from counter where k = :k for update;\n\\sleep 150 ms\ncommit;\n" => '-c 1');
	return;
}

# Runs checkpoints all the time. The position from which a walsender reads moves only with a
# checkpoint's record, or after a server has run for 15 seconds. Without them each connection would
# read all WAL of the test again, and be killed before it reaches new WAL.
sub start_checkpoints
{
	start_loop(sprintf 'psql -qX -h %s -p %s -c checkpoint postgres; sleep 1', $_->host, $_->port) for @_;
	return;
}

sub stop_load
{
	return unless @loops;
	PostgreSQL::Test::Utils::append_to_file("$dir/stop", '');
	$_->finish for splice @loops;
	# There may be another load.
	unlink "$dir/stop", glob "$dir/*.sql";
	return;
}

# A test that dies leaves no loop behind.
END
{
	my $status = $?;
	eval { stop_load() };
	$? = $status;
}

# Kills a process of this kind with kill -9, or the postmaster, which is started again. Returns
# false if there is none within 20 seconds.
sub kill_one
{
	my ($node, $kind) = @_;
	# In these tests, processes may be killed at one transaction again and again.
	if (!$unlimited{ $node->name }++)
	{
		$node->append_conf('postgresql.conf', 'braid.max_transaction_crashes = 0');
		$node->reload;
	}
	if ($kind eq 'postmaster')
	{
		$node->kill9;
		restart_crashed($node);
		delete $last_killed{ $node->name };
		return 1;
	}
	# The process may have ended by itself since its pid was read.
	return wait_until(sub {
		my @pids = worker_pids($node, $kind) or return 0;
		my $pid = $pids[ int rand @pids ];
		note("process $pid");
		my $offset = -s $node->logfile;
		kill 9, $pid or return 0;
		$last_killed{ $node->name } = [ $pid, $offset ];
		return 1;
	}, 20);
}

# Every kind of process of either server, for kill_processes(): those of the subscription, the
# working ones more often; and processes of any server, whose death brings down as much as the
# postmaster's. A session must be open at each node all the time.
sub every_kind
{
	my ($provider, $subscriber) = @_;
	return [
		(map { [ $subscriber, "braid $_" ] } qw(applier applier applier leader leader manager supervisor)),
		(map { [ $provider, 'walsender' ] } 1 .. 3),
		(map { ([ $_, 'postmaster' ], [ $_, 'client backend', 'checkpointer', 'walwriter' ]) } $provider, $subscriber),
	];
}

# Kills one process after the other with kill -9: `rounds` of them, or for `seconds`. Then it goes
# on, with longer pauses, until `at_least` were killed, which is tested, and `enough` is true; at
# most for PG_TEST_TIMEOUT_DEFAULT or four times as long. `kinds` are lists of a node and kinds of
# processes, or 'postmaster', one of which is chosen at random. The lists are used in random order,
# each as often as it is given. `tally` is updated before each kill. Returns the number of kills.
sub kill_processes
{
	my ($label, %opt) = @_;
	my ($provider, $subscriber) = @{ $opt{between} };
	my $kinds = $opt{kinds} // [
		[ $subscriber, 'braid applier' ], [ $subscriber, 'braid leader' ], [ $provider, 'walsender' ],
		[ $subscriber, 'postmaster' ], [ $subscriber, 'braid applier' ], [ $provider, 'postmaster' ]
	];
	my $seconds = $opt{seconds} // 86400;
	my ($end, $limit) = (time + $seconds, time + List::Util::max($PostgreSQL::Test::Utils::timeout_default, 4 * $seconds));
	my $rounds = $opt{rounds} // 1_000_000;
	my $enough = $opt{enough} // sub { 1 };
	my ($round, $all, $missed, %killed, @next) = (0, 0, 0);
	while ($round < $rounds && (time < $end || (time < $limit && ($all < ($opt{at_least} // 0) || !$enough->()))))
	{
		# On a slow machine, kills can leave too little time for the expected events, and each
		# resets counters.
		last if time >= $end && $all >= ($opt{at_least} // 0) && wait_until(sub { look($opt{tally}) if $opt{tally}; $enough->() }, 5);
		$round++;
		sleep 0.2 + rand 0.8;
		@next = shuffle @$kinds if !@next;
		my ($node, @of) = @{ shift @next };
		my $kind = $of[ int rand @of ];
		# Mostly waits until something was applied since the last kill, so that work is interrupted;
		# now and then kills a process that is just starting.
		if ($opt{tally})
		{
			my $before = applied($opt{tally});
			my $until = rand() < 0.75 ? 5 : 0;
			wait_until(sub { look($opt{tally}); applied($opt{tally}) > $before }, $until);
		}
		note("$label: kill -9 $kind of " . $node->name);
		if (!kill_one($node, $kind)) { diag("no $kind on " . $node->name . " within 20 s"); $missed++; next; }
		$killed{"$kind of " . $node->name}++;
		$all++;
	}
	is($missed, 0, "every kind of process came back each time, $label");
	cmp_ok($all, '>=', $opt{at_least}, "$all were killed, $label") if $opt{at_least};
	note("$label: $all killed in " . int(time - $end + $seconds) . ' s: ' . join '; ', map { "$_: $killed{$_}" } sort keys %killed);
	return $all;
}

# Counts the transactions of a subscription from now on, over the restarts of its server. Each
# restart empties the counters of the views, and nearly every kill of a process causes one.
# Transactions between the last look and a restart are not counted.
sub start_tally
{
	my ($subscriber, $name) = @_;
	my $tally = { node => $subscriber, name => $name, since => '', last => {}, sum => {}, most => 0 };
	wait_until(sub { look($tally) }, 30) or die "$name has no statistics";
	$tally->{sum} = {};
	$tally->{most} = 0;
	return $tally;
}

# Number of transactions that were counted.
sub applied
{
	my ($tally) = @_;
	my $all = 0;
	$all += $tally->{sum}{$_} for grep { /^applier/ } keys %{ $tally->{sum} };
	return $all;
}

# Adds new transactions. Returns false if the server can't be queried.
sub look
{
	my ($tally) = @_;
	my ($status, $out) = attempt($tally->{node}, qq[
		select 'since', extract(epoch from stats_since)::text from braid.dependency_stats where subscription = '$tally->{name}'
		union all
		select key, value::text from braid.dependency_stats d,
			lateral (values ('batches', batches), ('batched', round(batches * batch_mean)), ('most', batch_max), ('consolidated', consolidated),
				('running', applied_while_running)) v (key, value)
			where subscription = '$tally->{name}'
		union all
		select worker, transactions::text from braid.apply_workers where subscription = '$tally->{name}' and worker <> 'leader'
	]);
	my %now = map { /^(.+)\|(.*)$/ ? ($1 => $2 || 0) : () } split /\n/, $out;
	return 0 if $status != 0 || !defined $now{since};
	my ($since, $most) = delete @now{qw(since most)};
	# Counters that were reset. An applier's may be, while the others go on.
	$tally->{last} = {} if $since ne $tally->{since};
	$tally->{since} = $since;
	$tally->{most} = $most if $most > $tally->{most};
	for (keys %now)
	{
		my $last = $tally->{last}{$_} // 0;
		$tally->{sum}{$_} += $now{$_} - ($now{$_} >= $last ? $last : 0);
	}
	$tally->{last} = \%now;
	return 1;
}

# Tests that the subscription gets through without help.
sub goes_on
{
	my ($label, $name, $provider, $subscriber) = @_;
	# A postmaster that has not noticed a killed process yet accepts sessions, and ends them a
	# moment later.
	for my $node ($provider, $subscriber)
	{
		my ($pid, $offset) = @{ delete $last_killed{ $node->name } // next };
		wait_until(sub { slurp_file($node->logfile, $offset) =~ /\(PID $pid\) was terminated by signal 9/ }, 30);
	}
	ok(wait_until(sub { (attempt($_, 'select 1'))[0] == 0 }, 30), $_->name . " is up, $label") for $provider, $subscriber;
	ok(wait_until(sub { ((eval { status($subscriber, $name) } // {})->{state} // '') =~ /streaming|catching up/ }, 30), "the subscription goes on, $label");
	return;
}

# Ends the load, and tests that each transaction took effect once.
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

# Returns what the counters of a subscription must show in that apply mode: a name, and whether it
# is so.
sub expected_of
{
	my ($mode, $opt, $tally) = @_;
	my $sum = sub { $tally->{sum}{ $_[0] } // 0 };
	# An applier that takes over while others start, or are tried, has applied a few too.
	my @busy = grep { $_ > 100 && $_ > applied($tally) / 10 } map { $sum->($_) } grep { /^applier/ } keys %{ $tally->{sum} };
	my $join = $mode eq 'batch' || $mode eq 'aggregate';
	my @expected;
	push @expected, [ 'several appliers have applied transactions', scalar @busy > 1 ] if $mode eq 'parallel' && $opt->{parallel_apply} eq 'always';
	push @expected, [ 'one applier has applied transactions', scalar @busy == 1 ] if $mode eq 'serial';
	push @expected, $join
	  ? [ 'transactions were joined in batches', $sum->('batches') > 50 && $sum->('batched') > 500 && $tally->{most} > 20 ]
	  : [ 'no transactions were joined', $sum->('batches') == 0 ];
	my $consolidates = $mode eq 'aggregate' || ($opt->{consolidate} // '') eq 'true';
	push @expected, $consolidates
	  ? [ 'changes of one row were joined', $sum->('consolidated') > 100 ]
	  : [ 'no changes of one row were joined', $sum->('consolidated') == 0 ];
	return @expected;
}

# Kills for twenty seconds (nine in the gate, ten minutes in scripts/soak) while the subscription
# has this apply mode and commit order. `opt` are further options of create_subscription, and the
# setting parallel_apply. If an option is a list of two values, the first counts for one half of the
# time and the second for the other.
sub kill_in_mode
{
	my ($mode, $order, %opt) = @_;
	my $relaxed = $order eq 'relaxed';
	$opt{parallel_apply} //= 'always';
	my ($changes) = grep { ref $opt{$_} } keys %opt;
	my @values = $changes ? @{ $opt{$changes} } : ();
	$opt{$changes} = $values[0] if $changes;
	kill_seed();
	# A small buffer, so that large transactions are applied while they arrive. With more appliers,
	# more transactions get ahead of the low-water mark.
	my $tokyo = new_node('tokyo');
	my $paris = new_node('paris', publication => '', conf => "braid.apply_buffer_size = 1MB\nbraid.parallel_apply = $opt{parallel_apply}\n" . ($relaxed ? "braid.appliers_per_subscription = 4\n" : ''));
	ledger_tables($tokyo, $paris);
	my %options = %opt;
	delete $options{parallel_apply};
	my $name = subscribe($paris, $tokyo, apply_mode => "'$mode'", commit_order => "'$order'", %options);
	start_load($tokyo, small => '-c 2 -R 200', moving => '-c 2 -R 200', large => '-c 1');
	hold_up($paris) if $relaxed;
	start_checkpoints($tokyo);
	# Sessions read at the subscriber all the time, and are killed too.
	start_load($paris, 'select count(*), sum(n) from counter;' => '-c 1 -R 20');

	my $label = "$mode, $order";
	# A batch shares keys with most later transactions, so few get ahead of it.
	my $is_ahead = sub {
		my $ahead = () = slurp_file($paris->logfile) =~ /goes on at .* committed already/g;
		return $ahead > 2 || !$relaxed || $mode ne 'parallel';
	};
	my $seconds = $ENV{BRAID_TEST_SECONDS} // ($ENV{BRAID_GATE} ? 9 : 20);
	for my $value ($changes ? @values : undef)
	{
		my $what = $label;
		if ($changes)
		{
			$what .= ", $changes => $value";
			$opt{$changes} = $value;
			my $sql = $changes eq 'parallel_apply' ? "alter system set braid.parallel_apply = $value" : "select braid.alter_subscription('$name', $changes => $value)";
			wait_until(sub { (attempt($paris, $sql))[0] == 0 }, 30) or die "cannot change $changes";
			# A server that is just starting reads the file by itself.
			wait_until(sub { (attempt($paris, 'select pg_reload_conf()'))[0] == 0 }, 30) or die 'cannot reload';
		}
		my $part = $seconds / (@values || 1);
		my $tally = start_tally($paris, $name);
		# A kill and the restart take one to two seconds. On a slower machine, there are fewer
		# kills.
		my $least = int($part / 3);
		kill_processes($what, between => [ $tokyo, $paris ], kinds => every_kind($tokyo, $paris), seconds => $part, at_least => $least, tally => $tally,
			enough => sub { $is_ahead->() && !grep { !$_->[1] } expected_of($mode, \%opt, $tally) });
		note("$what: at most $tally->{most} in a batch; " . join '; ', map { "$_: $tally->{sum}{$_}" } sort keys %{ $tally->{sum} });
		ok($_->[1], "$_->[0], $what") for expected_of($mode, \%opt, $tally);
	}
	goes_on($label, $name, $tokyo, $paris);
	is($paris->safe_psql('postgres', "select apply_mode || ', ' || commit_order from braid.subscription where subscription_name = '$name'"), $label, 'in its mode');
	stop_load();
	caught_up($paris, $tokyo);
	ok($is_ahead->(), 'leaders started with transactions ahead of the mark');
	each_once([ $tokyo, $paris ]);
	return;
}

1;
