# What versioned transactions cost on this machine: beside plain ones, and how many grants a second
# a server gives.
#
#   make bench-versions
#
# 1. Grants a second: transactions that declare tables and read nothing, with several clients. The
#    processor time of the versions process says how many one core gives.
# 2. A versioned transaction beside a REPEATABLE READ one with the same statements, one client. Both
#    take turns, in rounds of some seconds. Each figure is the median of the rounds' medians. The
#    tenth percentiles are there, too: on a busy machine they show times without waits for a
#    processor. Processor time is that of all processes of the node.
# 3. One table that nodes write in turn.
#
# BENCH_ROUNDS and BENCH_SECONDS change how many rounds there are, and how long. A server with
# assertions and a library that was built for tests are slower: take figures of others.

use strict;
use warnings;

use Braid;
use Group;
use POSIX ();
use PostgreSQL::Test::Utils;
use Test::More;

my ($rounds, $seconds) = ($ENV{BENCH_ROUNDS} // 7, $ENV{BENCH_SECONDS} // 2);
my $scratch = PostgreSQL::Test::Utils::tempdir();
my $count = 0;

# The harness shows nothing of a test that passes.
sub show { my ($line) = @_; note($line); append_to_file($ENV{BENCH_OUTPUT}, "$line\n") if $ENV{BENCH_OUTPUT}; return; }
sub at { my ($part, @values) = @_; my @sorted = sort { $a <=> $b } @values; return $sorted[ int($part * $#sorted + 0.5) ]; }
sub load { my ($load) = slurp_file('/proc/loadavg') =~ /^(\S+)/; return $load; }

# Microseconds of processor time of processes that a node has now.
sub used
{
	my (@pids) = @_;
	my $sum = 0;
	for my $pid (@pids)
	{
		open my $stat, '<', "/proc/$pid/schedstat" or next;
		my ($nanoseconds) = split ' ', <$stat>;
		$sum += $nanoseconds / 1000;
	}
	return $sum;
}

# Microseconds of processor time that a node's ended backends and its versions process have used.
sub used_by
{
	my ($node) = @_;
	$node->poll_query_until('postgres', q[select count(*) = 0 from pg_stat_activity where application_name = 'pgbench']);
	my ($pid) = slurp_file($node->data_dir . '/postmaster.pid') =~ /^(\d+)/;
	my @fields = split ' ', (slurp_file("/proc/$pid/stat") =~ s/.*\) //r);
	return ($fields[13] + $fields[14]) * 1e6 / POSIX::sysconf(POSIX::_SC_CLK_TCK()) + used(versions_pid($node) || ());
}
sub versions_pid { my ($node) = @_; return sql($node, q[select pid from pg_stat_activity where backend_type = 'braid versions']); }

sub script
{
	my ($sql) = @_;
	my $file = "$scratch/script" . $count++;
	append_to_file($file, $sql);
	return $file;
}

# Runs a script at each of some nodes at once. Returns transactions a second of all of them, and the
# latencies of the first in microseconds.
sub run
{
	my ($nodes, $file, $clients) = @_;
	my $log = "$scratch/log" . $count++;
	my @running;
	for my $node (@$nodes)
	{
		my ($in, $out, $err) = ('', '', '');
		my @logged = $node == $nodes->[0] ? ('-l', '--log-prefix', $log) : ();
		my $command = [ 'pgbench', '-n', '-M', 'simple', '-c', $clients, '-T', $seconds, @logged, '-f', $file, $node->connstr('postgres') ];
		push @running, { run => IPC::Run::start($command, '<', \$in, '>', \$out, '2>', \$err), out => \$out, err => \$err };
	}
	my ($rate, @times) = (0);
	for my $one (@running)
	{
		$one->{run}->finish;
		${ $one->{out} } =~ /^tps = ([\d.]+)/m or die "pgbench: ${ $one->{out} } ${ $one->{err} }";
		$rate += $1;
	}
	for my $line (map { split /\n/, slurp_file($_) } glob "$log.*") { push @times, (split ' ', $line)[2]; }
	unlink glob "$log.*";
	return ($rate, @times);
}

# One line: a plain transaction and a versioned one, in turn.
sub compare
{
	my ($node, $name, $declared, $plain, $versioned, $goal) = @_;
	my @files = (
		script("\\set n random(1, 1000)\nbegin isolation level repeatable read;\n$plain\ncommit;\n"),
		script("\\set n random(1, 1000)\nbegin isolation level repeatable read \\; set local braid.versions = '$declared';\n$versioned\ncommit;\n"));
	run([$node], $_, 1) for @files;
	my (@median, @low, @used, @ran);
	for my $round (1 .. $rounds)
	{
		# Who comes first changes from round to round.
		for my $place ($round % 2 ? (0, 1) : (1, 0))
		{
			my $before = used_by($node);
			my ($rate, @times) = run([$node], $files[$place], 1);
			$used[$place] += used_by($node) - $before;
			$ran[$place] += @times;
			push @{ $median[$place] }, at(0.5, @times);
			push @{ $low[$place] }, at(0.1, @times);
		}
	}
	my @ratios = map { $median[1][$_] / $median[0][$_] } 0 .. $rounds - 1;
	my @low_ratios = map { $low[1][$_] / $low[0][$_] } 0 .. $rounds - 1;
	my @each = map { $used[$_] / $ran[$_] } 0, 1;
	show(sprintf '%-52s %7.0f %7.0f   %.2f (%.2f to %.2f)  %7.0f %7.0f   %.2f  %7.0f %7.0f%s',
		$name, at(0.5, @{ $median[0] }), at(0.5, @{ $median[1] }), at(0.5, @ratios), at(0, @ratios), at(1, @ratios),
		at(0.5, @{ $low[0] }), at(0.5, @{ $low[1] }), at(0.5, @low_ratios), @each, $goal ? "   goal $goal" : '');
	return;
}

sub compare_all
{
	my ($node, $where, $goal) = @_;
	compare($node, "$where: one update", 'write v', 'update p set amount = amount + 1 where id = :n;', 'update v set amount = amount + 1 where id = :n;', $goal);
	my $five = sub { my ($table) = @_; return join "\n", map({ "select amount from $table where id = (:n + $_) % 1000 + 1;" } 1 .. 3), map { "update $table set amount = amount + 1 where id = (:n + $_) % 1000 + 1;" } 4, 5; };
	compare($node, "$where: three selects, two updates", 'write v', $five->('p'), $five->('v'), $goal);
	compare($node, "$where: one select", 'read v', 'select amount from p where id = :n;', 'select amount from v where id = :n;', undef);
	my $sum = sub { my ($table) = @_; return "select sum(amount) from $table;"; };
	compare($node, "$where: select of 1000 rows", 'read v', $sum->('p'), $sum->('v'), $goal);
	return;
}

sub grants
{
	my ($name, $keeper, $clients, @nodes) = @_;
	my $file = script("begin isolation level repeatable read \\; set local braid.versions = 'read v, read hot' \\; commit;\n");
	run(\@nodes, $file, 1);
	my $pid = versions_pid($keeper);
	my $before = used($pid);
	my ($rate) = run(\@nodes, $file, $clients);
	my $each = (used($pid) - $before) / ($rate * $seconds);
	show(sprintf '%-52s %7.0f grants a second; the process that gives them: %.0f us each, so %.0f a second of one core', $name, $rate, $each, 1e6 / $each);
	return;
}

sub version_all
{
	my (@nodes) = @_;
	sql($nodes[0], "select braid.version_table('$_')") for qw(v hot);
	ok($_->poll_query_until('postgres', q[select count(*) = 2 from braid.table_versions where reached is not null]), $_->name . ' has them') for @nodes;
	sql($_, 'vacuum analyze') for @nodes;
	return;
}

my $setup = q{
	create table p (id int primary key, amount int not null);
	create table v (id int primary key, amount int not null);
	create table hot (id int primary key, amount int not null);
	insert into p select i, 0 from generate_series(1, 1000) i;
	insert into v select i, 0 from generate_series(1, 1000) i;
	insert into hot select i, 0 from generate_series(1, 1000) i;
};
# The harness turns fsync off.
my %conf = (conf => "fsync = on\nsynchronous_commit = on\nbraid.version_timeout = 120s\nmax_connections = 120\n");
my $heading = sprintf '%-52s %7s %7s   %-20s  %7s %7s   %s  %7s %7s', "microseconds, medians of $rounds rounds of $seconds s", 'plain', 'version', 'ratio', '10 %', '10 %', 'ratio', 'CPU', 'CPU';
my $hot = script("\\set n random(1, 1000)\nbegin isolation level repeatable read \\; set local braid.versions = 'write hot' \\; update hot set amount = amount + 1 where id = :n \\; commit;\n");

my ($lone) = group(['lone'], $setup, %conf);
show('server ' . sql($lone, 'select version()'));
show('assertions ' . sql($lone, 'show debug_assertions') . ', load ' . load());
version_all($lone);
show($heading);
compare_all($lone, 'one node', 1.15);
sql($lone, q[alter system set fsync = off]);
sql($lone, q[select pg_reload_conf()]);
compare_all($lone, 'one node, fsync off');
sql($lone, q[alter system reset fsync]);
sql($lone, q[select pg_reload_conf()]);
grants("one node, $_ clients", $lone, $_, $lone) for 1, 8, 32;
for my $clients (1, 8)
{
	my ($rate) = run([$lone], $hot, $clients);
	show(sprintf '%-52s %7.0f transactions a second', "one node, hot table, $clients clients", $rate);
}
$lone->stop;

my @three = group([qw(tokyo paris oslo)], $setup, %conf);
version_all(@three);
sql($_, q[select 1]) for @three;
my $holder = sql($three[0], 'select node_name from braid.version_cut c join braid.group_member m on m.member_id = c.holder_id order by term desc limit 1');
my ($keeper) = grep { $_->name eq $holder } @three;
my @others = grep { $_ != $keeper } @three;
show('load ' . load());
show($heading);
compare_all($keeper, 'three nodes, sequencer local', 1.15);
compare_all($others[0], 'three nodes, sequencer remote');
grants('three nodes, 16 clients at the sequencer\'s node', $keeper, 16, $keeper);
grants('three nodes, 16 clients at another node', $keeper, 16, $others[0]);
grants('three nodes, 8 clients at two nodes each', $keeper, 8, $keeper, $others[0]);
for my $nodes (1 .. 3)
{
	my ($rate) = run([ ($keeper, @others)[ 0 .. $nodes - 1 ] ], $hot, 2);
	show(sprintf '%-52s %7.0f transactions a second', "hot table, $nodes nodes, 2 clients each", $rate);
	have_all(@three);
}
show('load ' . load());
$_->stop for @three;
ok(1, 'measured');
done_testing();
