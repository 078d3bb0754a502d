# For tests that kill -9 processes of a provider and its subscriber under load: a load of every
# kind, the kills, and whether each transaction took effect once.
#
# A row of the ledger and one step of a counter are one transaction: the counter is compared with
# how often it was incremented by a transaction that committed. The ledger has no key, so what came
# twice would be there twice. What was rolled back has an id below 0.

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
	# By one, in two steps.
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
# Nodes that have no limit for crashes at one transaction.
my %unlimited;
# The process that was killed last at each node, and where its log was then.
my %last_killed;

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

# A session of the subscriber that holds up some of the transactions for a while, so that others get
# ahead of them where they may; SELECT .. FOR UPDATE leaves no trace in the data.
sub hold_up
{
	my ($node) = @_;
	start_load($node, "\\set k random(1, 40)\nbegin;\nselect from counter where k = :k for update;\n\\sleep 150 ms\ncommit;\n" => '-c 1');
	return;
}

# Checkpoints all the time. Where a walsender starts to read moves only with what a checkpoint
# writes, or a server that has lived for 15 seconds: without them each connection would read all WAL
# of the test again, and be killed before it has come to what is new.
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

# kill -9 of a process of this kind, or of the postmaster, which is started again. False when there
# is none within 20 seconds.
sub kill_one
{
	my ($node, $kind) = @_;
	# Here processes may well be killed at one transaction again and again.
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
	# It may have ended by itself since it was asked for.
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

# Every kind of process of either server, for kill_processes(): those that make the subscription go,
# more often those that work, and what any server has, which brings as much down as a postmaster
# that is killed. There has to be a session at each all the time.
sub every_kind
{
	my ($provider, $subscriber) = @_;
	return [
		(map { [ $subscriber, "braid $_" ] } qw(applier applier applier leader leader manager supervisor)),
		(map { [ $provider, 'walsender' ] } 1 .. 3),
		(map { ([ $_, 'postmaster' ], [ $_, 'client backend', 'checkpointer', 'walwriter' ]) } $provider, $subscriber),
	];
}

# kill -9 of one process after the other: so many `rounds`, or for so many `seconds`, and then until
# there were `at_least` so many, which is tested, and `enough` is true, with more time between kills
# and for no more than PG_TEST_TIMEOUT_DEFAULT or four times as long. `kinds` are lists of a node
# and of kinds of process, or 'postmaster', one of which is chosen at random; each list comes as
# often as it is there, in random order. `tally` is looked at before each kill. Returns how many
# were killed.
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
		# On a slow machine kills can leave too little time for what is to be seen, and each takes
		# counters along.
		last if time >= $end && $all >= ($opt{at_least} // 0) && wait_until(sub { look($opt{tally}) if $opt{tally}; $enough->() }, 5);
		$round++;
		sleep 0.2 + rand 0.8;
		@next = shuffle @$kinds if !@next;
		my ($node, @of) = @{ shift @next };
		my $kind = $of[ int rand @of ];
		# Mostly something has been applied since the last kill, so that it is work that is
		# interrupted; now and then what is just starting.
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

# What a subscription has done from now on, added up over the restarts of its server, each of which
# empties the counters of the views: nearly every kill of a process there brings one. What was done
# between the last look and a restart is not in it.
sub start_tally
{
	my ($subscriber, $name) = @_;
	my $tally = { node => $subscriber, name => $name, since => '', last => {}, sum => {}, most => 0 };
	wait_until(sub { look($tally) }, 30) or die "$name has no statistics";
	$tally->{sum} = {};
	$tally->{most} = 0;
	return $tally;
}

# How many transactions the tally has.
sub applied
{
	my ($tally) = @_;
	my $all = 0;
	$all += $tally->{sum}{$_} for grep { /^applier/ } keys %{ $tally->{sum} };
	return $all;
}

# Add what is new. False when there is nobody to ask.
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
	# Counters that started anew. An applier's may, while the others go on.
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

# It gets through without help.
sub goes_on
{
	my ($label, $name, $provider, $subscriber) = @_;
	# A postmaster that has not noticed yet that one of its processes was killed lets sessions in,
	# and ends them a moment later.
	for my $node ($provider, $subscriber)
	{
		my ($pid, $offset) = @{ delete $last_killed{ $node->name } // next };
		wait_until(sub { slurp_file($node->logfile, $offset) =~ /\(PID $pid\) was terminated by signal 9/ }, 30);
	}
	ok(wait_until(sub { (attempt($_, 'select 1'))[0] == 0 }, 30), $_->name . " is up, $label") for $provider, $subscriber;
	ok(wait_until(sub { ((eval { status($subscriber, $name) } // {})->{state} // '') =~ /streaming|catching up/ }, 30), "the subscription goes on, $label");
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

# What has to show in the counters of a subscription in that apply mode: a name, and whether it
# does.
sub expected_of
{
	my ($mode, $opt, $tally) = @_;
	my $sum = sub { $tally->{sum}{ $_[0] } // 0 };
	# One that takes over while others start, or are tried, has a few too.
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

# Kills for twenty seconds (nine in the gate, ten minutes in scripts/soak) while the subscription is
# in one apply mode and commit order. `opt` are further options of create_subscription, and the
# setting parallel_apply; of two values in a list the first one counts for half of the time and the
# second one for the other half.
sub kill_in_mode
{
	my ($mode, $order, %opt) = @_;
	my $relaxed = $order eq 'relaxed';
	$opt{parallel_apply} //= 'always';
	my ($changes) = grep { ref $opt{$_} } keys %opt;
	my @values = $changes ? @{ $opt{$changes} } : ();
	$opt{$changes} = $values[0] if $changes;
	kill_seed();
	# A small buffer: what is large is applied while it comes. More appliers have more ahead of the
	# mark.
	my $tokyo = new_node('tokyo');
	my $paris = new_node('paris', publication => '', conf => "braid.apply_buffer_size = 1MB\nbraid.parallel_apply = $opt{parallel_apply}\n" . ($relaxed ? "braid.appliers_per_subscription = 4\n" : ''));
	ledger_tables($tokyo, $paris);
	my %options = %opt;
	delete $options{parallel_apply};
	my $name = subscribe($paris, $tokyo, apply_mode => "'$mode'", commit_order => "'$order'", %options);
	start_load($tokyo, small => '-c 2 -R 200', moving => '-c 2 -R 200', large => '-c 1');
	hold_up($paris) if $relaxed;
	start_checkpoints($tokyo);
	# Somebody reads at the subscriber all the time, and is killed too.
	start_load($paris, 'select count(*), sum(n) from counter;' => '-c 1 -R 20');

	my $label = "$mode, $order";
	# What is joined shares keys with most of what follows, so little gets ahead of it.
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
			# A server that is just starting anew reads the file by itself.
			wait_until(sub { (attempt($paris, 'select pg_reload_conf()'))[0] == 0 }, 30) or die 'cannot reload';
		}
		my $part = $seconds / (@values || 1);
		my $tally = start_tally($paris, $name);
		# A kill and what follows it take one to two seconds; where a machine takes longer, the
		# kills do.
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
