# A storm: nodes in a full mesh whose writers change the same few rows, while links are cut and
# healed, processes are killed and servers crash. At the end, all nodes must have the same rows, and
# for each key the row that was written last.
#
#   my $storm = Storm->new(nodes => [qw(tokyo paris quito)], with => [qw(plain toast)]);
#   $storm->run($seed, mode => 'batch')          a test; true when it passed
#
# A seed determines the writes and their order, and the disturbances and their order; the times
# depend on the machine. Every option can be reduced, so that a failure can be narrowed down by
# hand:
#
#   BRAID_STORM='nodes=2 with=toast disturb= seconds=3 keys=2 writers=1' BRAID_TEST_SEED=7 \
#       make tap TESTS=t/063_storm.pl
#
# Options, with their defaults:
#   nodes => [..]           names, or their number; tokyo, paris, quito
#   with => [plain]         ingredients of the writes:
#       plain       inserts, upserts, updates of a table with a primary key
#       key         a table whose rows change their primary key: to a free one, in swaps, in chains
#       toast       a table with a large column that most updates leave unchanged
#       keys        such tables whose keys are a domain over an enum, a composite and an array
#       unique      a table with another unique key, which is changed too
#       deferred    a table with another key that is unique when a transaction ends; rows swap it
#       range       a table whose rows must not overlap
#       bag         a table without a key, with REPLICA IDENTITY FULL; all rows differ
#       same        such a table with many identical rows
#       delete      rows of all these tables are deleted, and deleted and inserted again in one
#                   transaction
#       truncate    now and then a table is truncated
#       ddl         a table whose writers add, rename and drop columns and indexes, and a table of
#                   inserts; both are rewritten by another type of a column; tables are created and
#                   dropped
#       swap        with ddl: two tables swap their names
#   disturb => [..]         down (a link is cut), hold (nothing passes through a link), isolate (all
#                           links of a node), terminate (a process is asked to end), kill (kill -9
#                           of a process), crash (kill -9 of a server), vacuum
#   seconds => 8            duration of the writers, approximately
#   keys => 12              number of hot keys; which keys are hot changes
#   writers => 2            writing sessions per node
#   pause => 15             milliseconds between the transactions of a session, on average
#   large => 0              one transaction of so many is larger than the subscriber's buffer
#   stream => 0             transactions of more than 64 kB are sent before they have ended
#                           (streaming => 'parallel')
#   prepare => 0            one transaction of so many is prepared, and ended by its session a
#                           moment later; the subscriptions have two_phase. With two nodes only:
#                           streams of several nodes wait for one another's prepared transactions,
#                           two seconds each
#   ask => 0                a conflict function for each row of the tables of plain and key; it
#                           keeps the newest
#   keep_dead => 0          a prepared transaction on each node keeps dead rows from being pruned
#   mode, order             apply_mode and commit_order of the subscriptions: parallel, source. For
#                           run() only; so is disturb, if given there
#   consolidate => false    the same for consolidate
#   journal => 1            each transaction records, in a table that is not replicated, what it did
#                           to its rows: the outcome is compared with that, and a report shows it

package Storm;

use strict;
use warnings;

use Braid;
use POSIX ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Proxy;
use Storm::Outcome;
use Storm::Statements;
use Test::More;
use Time::HiRes qw(sleep time);

our @ISA = qw(Storm::Statements Storm::Outcome);

# Kept to the end of the test, when the links are still needed to look at the nodes.
our @storms;

# The table of each ingredient that has one.
my %table_of = (plain => 'item', key => 'moving', toast => 'toasted', unique => 'taken', deferred => 'shared', range => 'booked', bag => 'keyless', same => 'alike');
# The tables of ingredients that have several.
my %more_of = (ddl => [qw(shaped appended)], swap => [qw(swapped_one swapped_other)], keys => [qw(by_mood by_pair by_list)]);
# Types of keys. The hot keys are among the first thousand values.
my $types = "create type mood as enum (@{[ join ', ', map { qq['m$_'] } 0 .. 999 ]}); create domain any_mood as mood; create type pair as (a int, b text); ";
my %definition = (
	item => '(k int primary key, n int not null, v text)',
	moving => '(k int primary key, n int not null, v text)',
	toasted => '(k int primary key, n int not null, v text, big text)',
	by_mood => '(k any_mood primary key, n int not null, v text, big text)',
	by_pair => '(k pair primary key, n int not null, v text, big text)',
	by_list => '(k int[] primary key, n int not null, v text, big text)',
	taken => '(k int primary key, code int not null unique, n int not null, v text)',
	shared => '(k int primary key, code int not null unique deferrable initially deferred, n int not null, v text)',
	booked => '(k int primary key, code int not null, n int not null, v text, exclude using gist (int4range(code, code + 2) with &&))',
	keyless => '(k int, n int not null, v text)',
	alike => '(k int, v text)',
	shaped => '(k int primary key, n int not null, v text)',
	swapped_one => '(k int primary key, n int not null, v text)',
	swapped_other => '(k int primary key, n int not null, v text)',
	appended => '(k text primary key, n int not null)',
);

my %default = (
	nodes => [qw(tokyo paris quito)],
	with => ['plain'],
	disturb => [qw(down hold isolate terminate kill crash vacuum)],
	seconds => 8,
	keys => 12,
	writers => 2,
	pause => 15,
	large => 0,
	stream => 0,
	prepare => 0,
	keep_dead => 0,
	ask => 0,
	mode => 'parallel',
	order => 'source',
	consolidate => 'false',
	journal => 1,
);

sub new
{
	my ($class, %opt) = @_;
	my $self = bless { %default, %opt, by_hand() }, $class;
	$self->{nodes} = [ (qw(tokyo paris quito lima oslo))[ 0 .. $self->{nodes}[0] - 1 ] ] if $self->{nodes}[0] =~ /^[2-5]$/;
	$self->{has} = { map { $_ => 1 } @{ $self->{with} } };
	$self->{tables} = [ map { $self->{has}{$_} ? $table_of{$_} : () } qw(plain key toast unique deferred range bag same) ];
	push @{ $self->{tables} }, map { $self->{has}{$_} ? @{ $more_of{$_} } : () } sort keys %more_of;
	$self->{dir} = PostgreSQL::Test::Utils::tempdir();
	$self->start;
	push @storms, $self;
	return $self;
}

# Options from BRAID_STORM override those of the test.
sub by_hand
{
	my %opt;
	for (split ' ', $ENV{BRAID_STORM} // '')
	{
		my ($name, $value) = /^(\w+)=(.*)$/ or die "BRAID_STORM: $_";
		die "BRAID_STORM: no option $name" unless exists $default{$name};
		$opt{$name} = ref $default{$name} ? [ split /,/, $value ] : $value;
	}
	return %opt;
}

# Starts the nodes, and a link for each direction between any two of them.
sub start
{
	my ($self) = @_;
	my $tables = join '; ', map { "create table $_ $definition{$_}" } @{ $self->{tables} };
	$tables = "$types$tables" if $self->{has}{keys};
	$tables .= "; alter table $_ alter column big set storage external" for grep { $Storm::Statements::has_big{$_} } @{ $self->{tables} };
	$tables .= "; alter table $table_of{$_} replica identity full" for grep { $self->{has}{$_} } qw(bag same);
	my @nodes = map {
		new_node($_, publication => '', conf => "braid.max_transaction_crashes = 0\nmax_prepared_transactions = @{[ $self->{prepare} ? 60 : 2 ]}\nwal_receiver_timeout = 5s\nwal_receiver_status_interval = 1s\n"
			  . ($self->{large} ? "braid.apply_buffer_size = '1MB'\n" : '')
			  . ($self->{stream} ? "logical_decoding_work_mem = '64kB'\n" : '')
			  . ($self->{has}{ddl} ? "braid.ddl_replication = on\n" : ''))
	} @{ $self->{nodes} };
	# Tables that are created later are published too, and the journal is not.
	my $published = $self->{has}{ddl} ? 'tables in schema public' : 'table ' . join ', ', @{ $self->{tables} };
	my $journal = $self->{has}{ddl} ? 'local.storm_journal' : 'storm_journal';
	on_all('create schema local; alter database postgres set search_path = public, local', @nodes) if $self->{has}{ddl};
	on_all(qq[
		$tables;
		create table $journal (id bigint generated always as identity, tbl text, k int, image jsonb, what text);
		create publication braid for $published], @nodes);
	$self->{members} = \@nodes;
	if ($self->{ask}) { on_all("alter table $_ replica identity full; " . keep_newest($_), @nodes) for grep { /^(item|moving)$/ } @{ $self->{tables} }; }
	for my $subscriber (@nodes)
	{
		for my $provider (@nodes)
		{
			next if $subscriber == $provider;
			my $proxy = Proxy->new($provider);
			my $name = subscribe($subscriber, $provider, copy_data => 'false', dsn => $proxy->connstr('postgres'),
				$self->{prepare} ? (two_phase => 'true') : (), $self->{stream} ? (streaming => "'parallel'") : (),
				$self->{has}{ddl} ? (replicate_ddl => 'true') : ());
			push @{ $self->{links} }, { from => $provider, to => $subscriber, proxy => $proxy, name => $name };
		}
	}
	return;
}

# Runs storms of several kinds, one after the other; the seed's number selects the kind. Seeds 1 to
# a limit; in a soak new ones until time is over or one fails; or the seeds that are to be repeated.
sub storms
{
	my ($count, @kinds) = @_;
	@kinds = $kinds[0] if $ENV{BRAID_STORM};
	my $seeds = $ENV{BRAID_TEST_SEED};
	if (my $seconds = $ENV{BRAID_TEST_SECONDS})
	{
		my $end = time + $seconds;
		my $seed = $seeds // int(rand(1_000_000));
		while (time < $end) { $kinds[ $seed % @kinds ]->($seed) or last; $seed++; }
	}
	else
	{
		$kinds[ $_ % @kinds ]->($_) for defined $seeds ? split ' ', $seeds : 1 .. $count;
	}
	return;
}

# Runs one storm, from empty tables to the comparison.
sub run
{
	my ($self, $seed, %opt) = @_;
	%opt = (%opt, by_hand());
	my $started = time;
	$self->{seed} = $seed;
	$self->{mode} = $opt{mode} // $default{mode};
	$self->{order} = $opt{order} // $default{order};
	$self->{consolidate} = $opt{consolidate} // $default{consolidate};
	local $self->{disturb} = $opt{disturb} // $self->{disturb};
	my $what = join ', ', @{ $self->{with} }, $self->{ask} ? 'a function' : (), $self->{mode}, $self->{order}, $self->{consolidate} eq 'true' ? 'consolidate' : ();
	# Printed even if all is well: what was tried is part of the result.
	diag("storm: seed $seed, $what");
	return 0 unless $self->reset;
	my ($files, $decisions) = $self->decide($seed);
	my @done = $self->blow($files, $decisions);
	my $calm = time;
	if (my $why = $self->settle(240))
	{
		fail("seed $seed: all nodes catch up");
		diag($why);
		return 0;
	}
	my $differences = $self->compare;
	is($self->compare_schemas, 0, "seed $seed: the nodes have one schema") if $self->{has}{ddl};
	is($differences, 0, "seed $seed ($what): the nodes are equal");
	$self->told;
	my $written = join ' ', map { $_->safe_psql('postgres', 'select count(distinct xmin::text) from storm_journal') } @{ $self->{members} };
	note(sprintf 'seed %s: %.0f s, calm after %.0f; transactions at each node: %s; %s', $seed, time - $started, time - $calm, $written, join(', ', @done));
	note('conflicts: ' . join ', ', map { $self->{members}[$_]->name . ' ' . ($self->conflicts($self->{members}[$_]) || 'none') } 0 .. $#{ $self->{members} });
	# The function must have been called, and has been where rows of both sides are.
	my $asked = $self->{ask} ? join ' ', map { $_->safe_psql('postgres', q[select count(*) from braid.conflict_history where reason ~ 'function']) } @{ $self->{members} } : '';
	unlike($asked, qr/\b0\b/, "seed $seed: functions were asked ($asked times)") if $self->{ask};
	note('asked for large values: ' . join ', ', map { $_->name . ' ' . $_->safe_psql('postgres', 'select sum(questions) from braid.subscription_detail') } @{ $self->{members} })
	  if $self->{has}{toast} || $self->{has}{keys};
	# Equal contents may still violate a constraint: nothing else checks it while changes are
	# applied.
	my $doubled = $self->{has}{deferred} ? $self->{members}[0]->safe_psql('postgres', 'select count(*) - count(distinct code) from shared') : 0;
	is($doubled, 0, "seed $seed: no two rows share a key") if $self->{has}{deferred};
	return $differences == 0 && $doubled == 0;
}

sub conflicts
{
	my ($self, $node) = @_;
	return $node->safe_psql('postgres', q[
		select string_agg(kind || ' ' || n, ' ' order by kind) from (select kind, count(*) as n from braid.conflict_history group by kind) c
	]);
}

# Removes everything of an earlier storm, on all nodes.
sub reset
{
	my ($self) = @_;
	my @nodes = @{ $self->{members} };
	my $tables = join ', ', @{ $self->{tables} };
	if ($self->{kept}) { $_->safe_psql('postgres', "rollback prepared 'storm'") for @nodes; }
	$_->safe_psql('postgres', "truncate $tables") for @nodes;
	if (my $why = $self->settle(240))
	{
		fail('the nodes catch up before the storm');
		diag($why);
		return 0;
	}
	$_->safe_psql('postgres', 'truncate storm_journal, braid.conflict_record') for @nodes;
	$_->{to}->safe_psql('postgres', "select braid.alter_subscription('$_->{name}', apply_mode => '$self->{mode}', commit_order => '$self->{order}', consolidate => $self->{consolidate})") for @{ $self->{links} };
	# A transaction with an id holds back pruning, also after a crash.
	if ($self->{keep_dead}) { $_->safe_psql('postgres', "begin; select pg_current_xact_id(); prepare transaction 'storm'") for @nodes; }
	$self->{kept} = $self->{keep_dead};
	return 1;
}

# Makes everything that the seed determines: files of transactions for each writer, and the
# disturbances.
sub decide
{
	my ($self, $seed) = @_;
	my $chunk = 20;
	my $chunks = int($self->{seconds} * 1000 / ($self->{pause} + 4) / $chunk) + 1;
	my %files;
	$self->{larges} = 0;
	for my $index (0 .. $#{ $self->{members} })
	{
		for my $writer (1 .. $self->{writers})
		{
			srand($seed * 64 + $index * 8 + $writer);
			my $who = "$self->{nodes}[$index].$writer";
			my $number = 0;
			for my $part (1 .. $chunks)
			{
				my $text = "\\set VERBOSITY terse\nset client_min_messages = warning;\n";
				$text .= $self->transaction($who, ++$number) . sprintf("select pg_sleep(%.4f);\n", rand(2 * $self->{pause}) / 1000) for 1 .. $chunk;
				my $file = "$self->{dir}/$seed.$who.$part.sql";
				PostgreSQL::Test::Utils::append_to_file($file, $text);
				push @{ $files{$who} }, $file;
			}
		}
	}
	srand($seed);
	my @decisions = map { $self->decision } 1 .. (@{ $self->{disturb} } ? 60 * (1 + int($self->{seconds} / 8)) : 0);
	return (\%files, \@decisions);
}

# Returns a disturbance of links, processes or servers, and the pause after it.
sub decision
{
	my ($self) = @_;
	my %weight = (down => 5, hold => 3, isolate => 3, terminate => 3, kill => 1, crash => 2, vacuum => 2);
	my $what = Storm::Statements::pick(map { ($_) x ($weight{$_} // die "no disturbance $_") } @{ $self->{disturb} });
	# Always all of these random numbers, so that leaving out one kind changes the others as little
	# as possible.
	my ($which, $how, $long, $pause) = map { rand } 1 .. 4;
	return { what => $what, which => $which, how => $how, for => 0.1 + $long * $long * 2.4, pause => 0.1 + $pause * 0.7 };
}

# Runs the writers, and the disturbances until the writers have finished. Returns counts of the
# disturbances.
sub blow
{
	my ($self, $files, $decisions) = @_;
	my @nodes = @{ $self->{members} };
	my %node = map { $_->name => $_ } @nodes;
	my %running;
	for my $who (sort keys %$files)
	{
		my $node = $node{ $who =~ s/\..*//r };
		my $at = '-h ' . $node->host . ' -p ' . $node->port;
		# If a server is down, the rest of the file that was being run is lost, no more.
		my $script = "for f in @{ $files->{$who} }; do until pg_isready -q $at; do [ -e $self->{dir}/stop ] && exit; sleep 0.1; done; "
		  . "[ -e $self->{dir}/stop ] && exit; psql -X -q -A -t $at -d postgres -f \$f; done";
		my $pid = fork // die "cannot fork: $!";
		if ($pid == 0)
		{
			open STDIN, '<', '/dev/null';
			open STDOUT, '>', '/dev/null';
			open STDERR, '>>', "$self->{dir}/$self->{seed}.$who.err";
			exec 'sh', '-c', $script or POSIX::_exit(1);
		}
		$running{$pid} = 1;
		$self->{writing}{$pid} = 1;
	}
	my (%heal, %done);
	my $limit = time + 3 * $self->{seconds} + 20;
	my $next = time + 0.3;
	my $look = time + 1;
	while (%running && time < $limit)
	{
		for my $pid (keys %running)
		{
			if (waitpid($pid, POSIX::WNOHANG()) > 0) { delete $running{$pid}; delete $self->{writing}{$pid}; }
		}
		for my $index (keys %heal)
		{
			next if $heal{$index} > time;
			$self->{links}[$index]{proxy}->link('up');
			delete $heal{$index};
		}
		if ($self->{prepare} && time >= $look) { $self->end_prepared(1); $look = time + 1; }
		if (time >= $next && @$decisions)
		{
			my $decision = shift @$decisions;
			$done{ $decision->{what} }++ if $self->carry_out($decision, \%heal);
			$next = time + $decision->{pause};
		}
		sleep 0.02;
	}
	PostgreSQL::Test::Utils::append_to_file("$self->{dir}/stop", '') if %running;
	waitpid($_, 0) for keys %running;
	unlink "$self->{dir}/stop";
	$self->{writing} = {};
	$_->{proxy}->link('up') for @{ $self->{links} };
	for my $node (@nodes)
	{
		wait_until(sub { (attempt($node, 'select 1'))[0] == 0 }, 60) or die $node->name . ' does not come back';
	}
	$self->end_prepared(0) if $self->{prepare};
	for my $who (sort keys %$files)
	{
		my $file = "$self->{dir}/$self->{seed}.$who.err";
		# Errors that concurrent sessions, and a server that goes down, have to expect.
		for my $line (-e $file ? split /\n/, slurp_file($file) : ())
		{
			next if $line =~ /duplicate key|conflicting key|deadlock detected|current transaction is aborted|terminat|connection|server closed|before or while|prepared transaction with identifier|starting up|recovery mode|not yet accepting|shutting down|out of shared memory before|could not receive|conninfo|the server|WARNING|HINT|DETAIL|CONTEXT/;
			diag("$who: $line");
		}
	}
	return map { "$_ $done{$_}" } sort keys %done;
}

sub carry_out
{
	my ($self, $decision, $heal) = @_;
	my @nodes = @{ $self->{members} };
	my $node = $nodes[ int($decision->{which} * @nodes) ];
	my $links = $self->{links};
	my $what = $decision->{what};
	if ($what eq 'down' || $what eq 'hold' || $what eq 'isolate')
	{
		my @which = $what eq 'isolate' ? grep { $links->[$_]{from} == $node || $links->[$_]{to} == $node } 0 .. $#$links : int($decision->{which} * @$links);
		my $state = $what eq 'isolate' ? ($decision->{how} < 0.5 ? 'down' : 'hold') : $what;
		for my $index (@which)
		{
			$links->[$index]{proxy}->link($state);
			$heal->{$index} = time + $decision->{for};
		}
		note(sprintf '%s %s for %.1f s', $state, join(' ', map { $links->[$_]{name} } @which), $decision->{for});
	}
	elsif ($what eq 'terminate' || $what eq 'kill')
	{
		my @kinds = ('braid applier', 'braid leader', 'braid applier', 'walsender', 'braid manager', 'braid collector');
		my $kind = $kinds[ int($decision->{how} * @kinds) ];
		my @pids = worker_pids($node, $kind) or return 0;
		my $pid = $pids[ int($decision->{which} * @nodes * @pids) % @pids ];
		note("$what $kind of " . $node->name);
		kill $what eq 'kill' ? 'KILL' : 'TERM', $pid;
	}
	elsif ($what eq 'crash')
	{
		note('crash of ' . $node->name);
		if ($decision->{how} < 0.5) { $node->stop('immediate', fail_ok => 1); }
		else { $node->kill9; }
		sleep $decision->{for} / 4;
		restart_crashed($node);
	}
	else
	{
		my $freeze = $decision->{how} < 0.5 ? '(freeze) ' : '';
		# Vacuum may wait for sessions that wait for transactions that a crash has left prepared.
		# This process ends those, so it must not wait for long.
		attempt($node, "set statement_timeout = '3s';\nvacuum $freeze" . join(', ', @{ $self->{tables} }));
	}
	return 1;
}

# Ends transactions that sessions have left prepared when their server went down.
sub end_prepared
{
	my ($self, $age) = @_;
	for my $node (@{ $self->{members} })
	{
		my ($status, $gids) = attempt($node, "select gid from pg_prepared_xacts where gid like 'storm %' and prepared < now() - interval '$age s'");
		next if $status != 0;
		attempt($node, (/[02468]$/ ? 'commit' : 'rollback') . " prepared '$_'") for split /\n/, $gids;
	}
	return;
}

# Waits until every node has what every other one has committed, and what that made it commit in
# turn. A chain of rows that lose to one another can cause that more than once, so rounds are
# repeated until one changes nothing. A round may take a number of seconds, and the number of rounds
# is limited: a slow machine needs more time, endless changes need more rounds. Returns the reason
# for a failure.
sub settle
{
	my ($self, $seconds) = @_;
	my ($before, $rounds) = ('', 0);
	while (1)
	{
		if (my $why = $self->round(time + $seconds)) { return "round @{[ $rounds + 1 ]}: $why"; }
		$rounds++;
		my $now = join ' ', map { my $node = $_; map { digest($node, $_) } @{ $self->{tables} } } @{ $self->{members} };
		last if $rounds > 2 && $now eq $before;
		return "the nodes go on changing after $rounds rounds" if $rounds == 20;
		$before = $now;
	}
	note("settled in $rounds rounds");
	return '';
}

# Waits until each node has what all others have written by now.
sub round
{
	my ($self, $end) = @_;
	# An end of WAL behind the last written record is not sent.
	my %lsn = map { $_->name => end_of_commits($_) } @{ $self->{members} };
	for my $link (@{ $self->{links} })
	{
		my $provider = $link->{from};
		while (1)
		{
			my ($status, $there) = attempt($provider,
				"select coalesce(bool_or(replay_lsn >= '$lsn{$provider->name}'), false) from pg_stat_replication where application_name = '$link->{name}'");
			last if $status == 0 && $there eq 't';
			my $state = eval { status($link->{to}, $link->{name}) } // {};
			return "$link->{name}: $state->{state}: $state->{last_error}" if ($state->{state} // '') eq 'error';
			return "$link->{name} has not caught up with $lsn{$provider->name}: " . ($state->{state} // 'unknown') . ', ' . ($state->{last_error} // '') . look_at($link) if time > $end;
			sleep 0.2;
		}
	}
	return '';
}

# Prints the state of a link that does not catch up, as both of its ends see it.
sub look_at
{
	my ($link) = @_;
	my %asked = (
		from => [
			'select pg_current_wal_insert_lsn(), pg_current_wal_lsn(), pg_current_wal_flush_lsn()',
			"select state, sent_lsn, replay_lsn, reply_time, clock_timestamp() from pg_stat_replication where application_name = '$link->{name}'",
			'select slot_name, active, restart_lsn, confirmed_flush_lsn from pg_replication_slots',
		],
		to => [
			"select to_jsonb(d) from braid.subscription_detail d where to_jsonb(d)::text ~ '$link->{name}'",
			"select to_jsonb(w) from braid.apply_workers w where subscription = '$link->{name}'",
			"select pid, backend_type, wait_event_type, wait_event, xact_start, left(query, 80) from pg_stat_activity where backend_type ~ 'braid'",
		],
	);
	my $text = '';
	for my $end (qw(from to))
	{
		for my $query (@{ $asked{$end} })
		{
			my ($status, $out) = attempt($link->{$end}, $query);
			$text .= "\n" . $link->{$end}->name . ': ' . ($_ eq '' ? '(nothing)' : $_) for $status == 0 ? split(/\n/, $out || ' ') : "cannot be asked: $query";
		}
	}
	return $text;
}

# A test that dies leaves no process behind.
sub DESTROY
{
	my ($self) = @_;
	local $?;
	kill 'TERM', keys %{ $self->{writing} // {} };
	return;
}

1;
