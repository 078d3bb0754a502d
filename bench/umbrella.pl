# Times of queries through an umbrella beside those without it, on two nodes of this machine.
#
#   cp bench/umbrella.pl t/999_umbrella_bench.pl
#   BENCH_OUTPUT=/tmp/figures.txt TESTS=t/999_umbrella_bench.pl PG_CONFIG=... scripts/test tap
#
# Each line compares two statements. They take turns, in rounds of some seconds, with one client of
# pgbench; the figures are medians of the rounds, in microseconds. BENCH_ROUNDS and BENCH_SECONDS
# change how many rounds there are, and how long. A server with assertions plans slower: take
# figures of another one.

use strict;
use warnings;

use Braid;
use Group;
use PostgreSQL::Test::Utils;
use Test::More;

my ($rounds, $seconds) = ($ENV{BENCH_ROUNDS} // 7, $ENV{BENCH_SECONDS} // 2);
my ($tokyo, $paris) = my @all = group([qw(tokyo paris)], q{
	create table orders (tenant_id bigint not null, order_id bigint not null, created_at timestamptz not null default now(), item text,
		primary key (tenant_id, order_id, created_at));
	create table twin (like orders including all);
}, conf => "fsync = off\n");
sql($tokyo, q[select braid.route_table('orders', tenant => 'tenant_id', record => 'order_id', created => 'created_at', shards => 16, umbrella => true)]);
sql($tokyo, q[insert into everywhere.orders (tenant_id, order_id, item) select t, i, 'item' from generate_series(0, 99) t, generate_series(1, 200) i]);
sql($tokyo, q[insert into twin select * from orders]);
have_all(@all);
sql($_, 'vacuum analyze') for @all;
my $mine = sql($tokyo, 'select tenant_id from orders limit 1');
my $yours = sql($paris, 'select tenant_id from orders limit 1');

my $scratch = PostgreSQL::Test::Utils::tempdir();
my $count = 0;
sub script
{
	my ($sql) = @_;
	my $file = "$scratch/" . $count++ . '.sql';
	append_to_file($file, "\\set o random(1, 200)\n\\set n random(1000000, 900000000000)\n$sql;\n");
	return $file;
}

sub latency
{
	my ($file, $mode) = @_;
	my ($out, $err) = run_command([ 'pgbench', '-n', '-M', $mode, '-T', $seconds, '-f', $file, '-d', $tokyo->connstr('postgres') ]);
	return $out =~ /latency average = ([\d.]+) ms/ ? $1 * 1000 : die "pgbench: $out $err";
}

# The harness shows nothing of a test that passes.
sub show { my ($line) = @_; note($line); append_to_file($ENV{BENCH_OUTPUT}, "$line\n") if $ENV{BENCH_OUTPUT}; return; }
sub median { my @sorted = sort { $a <=> $b } @_; return $sorted[ @sorted / 2 ]; }

sub compare
{
	my ($name, $mode, $without, $with, $goal) = @_;
	my @files = map { script($_) } $without, $with;
	latency($_, $mode) for @files;
	my @times;
	for my $round (1 .. $rounds)
	{
		# Who comes first changes from round to round.
		for my $place ($round % 2 ? (0, 1) : (1, 0)) { push @{ $times[$place] }, latency($files[$place], $mode); }
	}
	my ($plain, $umbrella) = map { median(@$_) } @times;
	my @ratios = sort { $a <=> $b } map { $times[1][$_] / $times[0][$_] } 0 .. $rounds - 1;
	show(sprintf('%-58s %8.1f %8.1f   %.2f (%.2f to %.2f)%s', "$name, $mode", $plain, $umbrella, median(@ratios), $ratios[0], $ratios[-1], $goal ? "   goal $goal" : ''));
	return;
}

show(sprintf('%-58s %8s %8s   %s', 'median of ' . $rounds . ' rounds of ' . $seconds . ' s, microseconds', 'without', 'with', 'ratio'));
my $where = 'tenant_id = %s and order_id = :o';
for my $mode (qw(simple extended prepared))
{
	compare('select, own tenant: table, umbrella', $mode, sprintf("select * from orders where $where", $mine), sprintf("select * from everywhere.orders where $where", $mine), $mode eq 'prepared' ? '1.0' : 1.1);
}
for my $mode (qw(simple prepared))
{
	compare('select, other node: foreign table, umbrella', $mode, sprintf("select * from everywhere.\"orders\@paris\" where $where", $yours), sprintf("select * from everywhere.orders where $where", $yours), 1.1);
}
compare('update, other node: foreign table, umbrella', 'simple', sprintf("update everywhere.\"orders\@paris\" set item = 'x' where $where", $yours), sprintf("update everywhere.orders set item = 'x' where $where", $yours), 1.1);
compare('insert, own tenant: table that is not routed, routed', 'prepared', "insert into twin (tenant_id, order_id, item) values ($mine, :n, 'x')", "insert into orders (tenant_id, order_id, item) values ($mine, :n, 'x')", 1.1);
compare('insert, own tenant: routed table, umbrella', 'prepared', "insert into orders (tenant_id, order_id, item) values ($mine, :n, 'x')", "insert into everywhere.orders (tenant_id, order_id, item) values ($mine, :n, 'x')");
compare('insert, other node: foreign table, umbrella', 'prepared', "insert into everywhere.\"orders\@paris\" (tenant_id, order_id, item) values ($yours, :n, 'x')",
	"insert into everywhere.orders (tenant_id, order_id, item) values ($yours, :n, 'x')", 1.1);
ok(1, 'measured');
$_->stop for @all;
done_testing();
