# A history of versioned transactions from three nodes is strictly serializable: lists that
# transactions append to and read, while processes are ended and a server crashes. check-history of
# crates/histories judges it (BRAID_CHECK_HISTORY is its path; without it nothing is tested).

use strict;
use warnings;

use Braid;
use Group;
use PostgreSQL::Test::Utils;
use Session;
use Test::More;
use Time::HiRes qw(clock_gettime CLOCK_MONOTONIC);

my $checker = $ENV{BRAID_CHECK_HISTORY};
plan skip_all => 'BRAID_CHECK_HISTORY is not set' if !$checker || !-x $checker;

my $transactions = $ENV{BRAID_HISTORY_TRANSACTIONS} // 60;
my @tables = qw(a b c);
my @all = group([qw(tokyo paris oslo)], join(';', map { "create table $_ (k int primary key, v int[] not null); insert into $_ values (0, '{}'), (1, '{}')" } @tables),
	conf => 'braid.version_timeout = 20s');
sql($all[0], "select braid.version_table('$_')") for @tables;
for my $node (@all) { ok($node->poll_query_until('postgres', q[select count(*) = 3 from braid.versioned_table where phase = 1]), $node->name . ' knows the tables'); }

my $dir = PostgreSQL::Test::Utils::tempdir();
my $parent = $$;
sub nanoseconds { return int(clock_gettime(CLOCK_MONOTONIC) * 1e9); }

# One client: a line for each event, "time process type value".
sub client
{
	my ($number, $node, $file) = @_;
	open my $out, '>', $file or die $!;
	my ($process, $next) = ($number, $number * 1_000_000);
	my $session;
	srand($number);
	for (1 .. $transactions)
	{
		# Not beyond its test.
		return if getppid != $parent;
		for my $try (1 .. 600)
		{
			last if $session && defined $session->{transaction};
			$session = eval { Session::connect_to($node, 'postgres') };
			select undef, undef, undef, 0.1 if !$session;
		}
		my (@ops, %declared);
		for (1 .. 1 + int rand 4)
		{
			my ($table, $k) = (int rand @tables, int rand 2);
			my $is_append = rand() < 0.5;
			$declared{$table} = 'write' if $is_append;
			$declared{$table} //= 'read';
			push @ops, { table => $table, k => $k, n => $is_append ? $next++ : undef };
		}
		my $sql = 'begin isolation level repeatable read; set local braid.versions = ' . q['] . join(', ', map { "$declared{$_} $tables[$_]" } sort keys %declared) . q['; ];
		for my $op (@ops)
		{
			my $table = $tables[ $op->{table} ];
			$sql .= defined $op->{n} ? "update $table set v = v || $op->{n} where k = $op->{k}; " : "select '[' || array_to_string(v, ' ') || ']' from $table where k = $op->{k}; ";
		}
		my $shown = sub {
			my @lists = @_;
			return '[' . join(' ', map { my $key = $_->{table} * 10 + $_->{k}; defined $_->{n} ? "[:append $key $_->{n}]" : "[:r $key " . (shift(@lists) // 'nil') . ']' } @ops) . ']';
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
			eval { Session::query($session, 'rollback', 1) };
		}
		else
		{
			printf $out "%d %d info %s\n", $at, $process, $shown->();
			$process += 1000;
			undef $session;
		}
	}
	close $out;
	return;
}

my (@children, @files);
for my $number (0 .. 5)
{
	my $file = "$dir/client$number";
	push @files, $file;
	my $pid = fork // die $!;
	if ($pid == 0) { client($number, $all[ $number % 3 ], $file); require POSIX; POSIX::_exit(0); }
	push @children, $pid;
}
# Meanwhile: processes that give versions end, and a server crashes.
my $lines = sub { my $count = 0; for my $file (@files) { next if !-e $file; $count += () = slurp_file($file) =~ /\n/g; } return $count; };
my $of = 12 * $transactions;
for my $round (1 .. 4)
{
	wait_until(sub { $lines->() >= $of * $round / 5 }, 300);
	my $victim = $all[ $round % 3 ];
	my ($kind, $signal) = $round == 3 ? ('braid applier', 'KILL') : ('braid versions', 'TERM');
	my $pid = look($victim, "select pid from pg_stat_activity where backend_type = '$kind' limit 1");
	kill $signal, $pid if $pid;
}
waitpid $_, 0 for @children;

my @events = sort { $a->[0] <=> $b->[0] } map { map { [ split / /, $_, 4 ] } split /\n/, slurp_file($_) } @files;
my %count;
my $history = '';
my $index = 0;
for my $event (@events)
{
	my ($time, $process, $type, $value) = @$event;
	$count{$type}++;
	$history .= "{:index $index, :time $time, :type :$type, :process $process, :f :txn, :value $value}\n";
	$index++;
}
append_to_file("$dir/history.edn", $history);
cmp_ok($count{ok} // 0, '>', $transactions, 'transactions were committed');
note(join ', ', map { "$count{$_} $_" } sort keys %count);
my ($in, $report) = ('', '');
my $is_valid = IPC::Run::run([ $checker, "$dir/history.edn" ], '>', \$report, '2>&1');
ok($is_valid, 'the history is strictly serializable') or diag(substr($report, 0, 4000));
note(substr($report, 0, 1000));

$_->stop for @all;
done_testing();
