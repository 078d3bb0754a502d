# Records a history of versioned transactions: clients on all nodes of a group append to lists and
# read them. check-history of crates/histories judges it (BRAID_CHECK_HISTORY is its path).
#
#   my $history = VersionHistory->new(\@nodes, clients => 6, transactions => 60);
#       versions the tables that VersionHistory::tables() creates
#   $history->start;
#   $history->ended                     number of transactions so far
#   $history->is_running                whether a client has something left to do
#   $history->judge;                    waits for the clients, and tests the whole
#
# Each client takes its choices from its own number and the seed.

package VersionHistory;

use strict;
use warnings;

use Braid;
use Group;
use IPC::Run ();
use POSIX ();
use PostgreSQL::Test::Utils;
use Session;
use Test::More;
use Time::HiRes qw(clock_gettime CLOCK_MONOTONIC sleep);

my @tables = qw(a b c);
# A client goes on to other lists after that many transactions, so that none becomes long.
my $each = 40;

# The tables, for a group that is made.
sub tables { return join ';', map { "create table $_ (k int primary key, v int[] not null)" } @tables; }

sub new
{
	my ($class, $nodes, %opt) = @_;
	my $self = bless { nodes => $nodes, clients => 6, transactions => 60, seed => 0, parent => $$, dir => PostgreSQL::Test::Utils::tempdir(), %opt }, $class;
	my $last = 2 * int($self->{transactions} / $each) + 1;
	sql($nodes->[0], "insert into $_ select k, '{}' from generate_series(0, $last) k") for @tables;
	sql($nodes->[0], "select braid.version_table('$_')") for @tables;
	ok($_->poll_query_until('postgres', q[select count(*) = 3 from braid.table_versions where reached is not null]), $_->name . ' has the tables') for @$nodes;
	return $self;
}

sub start
{
	my ($self) = @_;
	for my $number (0 .. $self->{clients} - 1)
	{
		my $file = "$self->{dir}/client$number";
		push @{ $self->{files} }, $file;
		my $pid = fork // die $!;
		if ($pid == 0)
		{
			# Not a test: ends without running END blocks.
			eval { client($self, $number, $self->{nodes}[ $number % @{ $self->{nodes} } ], $file); 1 } or print STDERR "# client $number: $@";
			POSIX::_exit(0);
		}
		push @{ $self->{children} }, $pid;
	}
	return;
}

# A client that reads and appends. It writes a line for each event: "time process type value".
sub client
{
	my ($self, $number, $node, $file) = @_;
	open my $out, '>', $file or die $!;
	my ($process, $next) = ($number, $number * 10_000_000);
	my $session;
	srand($self->{seed} * 1000 + $number);
	for my $done (0 .. $self->{transactions} - 1)
	{
		my (@ops, %declared);
		for (1 .. 1 + int rand 4)
		{
			my ($table, $k) = (int rand @tables, 2 * int($done / $each) + int rand 2);
			my $is_append = rand() < 0.5;
			$declared{$table} = 'write' if $is_append;
			$declared{$table} //= 'read';
			push @ops, { table => $table, k => $k, n => $is_append ? $next++ : undef };
		}
		while (!$session || !defined $session->{transaction})
		{
			# Not beyond its test.
			return if getppid != $self->{parent};
			$session = eval { Session::connect_to($node, 'postgres') };
			sleep 0.1 if !$session;
		}
		my $sql = 'begin isolation level repeatable read; set local braid.versions = ' . q['] . join(', ', map { "$declared{$_} $tables[$_]" } sort keys %declared) . q['; ];
		for my $op (@ops)
		{
			my $table = $tables[ $op->{table} ];
			$sql .= defined $op->{n} ? "update $table set v = v || $op->{n} where k = $op->{k}; " : "select '[' || array_to_string(v, ' ') || ']' from $table where k = $op->{k}; ";
		}
		my $shown = sub {
			my @lists = @_;
			return '[' . join(' ', map { my $key = $_->{table} * 100_000 + $_->{k}; defined $_->{n} ? "[:append $key $_->{n}]" : "[:r $key " . (shift(@lists) // 'nil') . ']' } @ops) . ']';
		};
		printf $out "%d %d invoke %s\n", nanoseconds(), $process, $shown->();
		my ($failed, $rows, $messages) = eval { Session::query($session, "$sql commit", 1) };
		my $is_lost = $@ || !defined $session->{transaction};
		my $at = nanoseconds();
		if (!$is_lost && !$failed) { printf $out "%d %d ok %s\n", $at, $process, $shown->(split /\n/, $rows); }
		# Refused before its commit, or the server said that it is rolled back.
		elsif (!$is_lost)
		{
			printf $out "%d %d fail %s\n", $at, $process, $shown->();
			my ($first) = $messages =~ /(?:ERROR|FATAL):\s+(.*)/;
			print $out "# $first\n" if defined $first;
			eval { Session::query($session, 'rollback', 1) };
		}
		# Nobody knows whether it was committed. What comes next is of another client.
		else
		{
			printf $out "%d %d info %s\n", $at, $process, $shown->();
			$process += 1000;
			undef $session;
		}
		$out->flush;
	}
	close $out;
	return;
}

sub nanoseconds { return int(clock_gettime(CLOCK_MONOTONIC) * 1e9); }

sub ended
{
	my ($self) = @_;
	my $count = 0;
	for my $file (@{ $self->{files} })
	{
		open my $in, '<', $file or next;
		while (<$in>) { $count++ if / (?:ok|fail|info) /; }
		close $in;
	}
	return $count;
}

sub is_running
{
	my ($self) = @_;
	$self->{children} = [ grep { waitpid($_, POSIX::WNOHANG()) == 0 } @{ $self->{children} } ];
	return scalar @{ $self->{children} };
}

# What somebody wants to read who has asked for a run of that length.
sub say_so { return $ENV{BRAID_TEST_TRANSACTIONS} ? diag(@_) : note(@_); }

# Waits for all clients for that many seconds; tests that they have ended, that enough was
# committed, and that the history is strictly serializable. Then that all nodes have the same rows.
sub judge
{
	my ($self, %opt) = @_;
	ok(wait_until(sub { !$self->is_running }, $opt{seconds} // 180), 'no client waits for ever');
	kill 'KILL', @{ $self->{children} };
	my (@events, %count, %refused);
	for my $file (@{ $self->{files} })
	{
		for my $line (split /\n/, slurp_file($file))
		{
			if ($line =~ /^# (.*)/) { $refused{ $1 =~ s/\d+/N/gr }++; next; }
			push @events, [ split / /, $line, 4 ];
			$count{ $events[-1][2] }++;
		}
	}
	open my $out, '>', "$self->{dir}/history.edn" or die $!;
	my $index = 0;
	for my $event (sort { $a->[0] <=> $b->[0] } @events)
	{
		my ($time, $process, $type, $value) = @$event;
		print $out "{:index $index, :time $time, :type :$type, :process $process, :f :txn, :value $value}\n";
		$index++;
	}
	close $out;
	my $all = $self->{clients} * $self->{transactions};
	cmp_ok($count{ok} // 0, '>=', $all * ($opt{share} // 0.5), "transactions were committed, of $all");
	say_so(join ', ', map { "$count{$_} $_" } sort keys %count);
	say_so("$refused{$_} times: $_") for sort { $refused{$b} <=> $refused{$a} } keys %refused;
	ok(!(grep { /contradict/ } keys %refused), 'no transaction met an error of ours');
	my $report = '';
	my $is_valid = IPC::Run::run([ $ENV{BRAID_CHECK_HISTORY}, "$self->{dir}/history.edn" ], '>', \$report, '2>&1');
	if (!$is_valid && $ENV{BRAID_KEEP_HISTORY}) { PostgreSQL::Test::Utils::run_log([ 'cp', "$self->{dir}/history.edn", $ENV{BRAID_KEEP_HISTORY} ]); }
	ok($is_valid, 'the history is strictly serializable') or diag(substr($report, 0, 4000));
	say_so(substr($report, 0, 1000));
	have_all(@{ $self->{nodes} });
	same_tables($self->{nodes}, @tables);
	return \%count;
}

1;
