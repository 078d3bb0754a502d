# TPC-W: its fourteen interactions as versioned transactions on three nodes, or as many as
# BENCH_NODES says. Whatever the mix: stock, orders and payments agree, and all nodes are the same.
#
# As a benchmark: make bench-tpcw. BENCH_OUTPUT is a file for the figures, BENCH_SECONDS the length
# of a run, BENCH_CLIENTS a list of numbers of clients at all nodes together, BENCH_MODES a list of
# modes (see t/lib/Tpcw.pm).

use strict;
use warnings;

use Braid;
use Group;
use PostgreSQL::Test::Utils;
use Test::More;
use Tpcw;

my $seconds = $ENV{BENCH_SECONDS} // 3;
my @names = (qw(tokyo paris oslo))[ 0 .. ($ENV{BENCH_NODES} // 3) - 1 ];
my @clients = split /,/, $ENV{BENCH_CLIENTS} // 6;
my @modes = split /,/, $ENV{BENCH_MODES} // 'versioned,single';
sub show { my ($line) = @_; note($line); append_to_file($ENV{BENCH_OUTPUT}, "$line\n") if $ENV{BENCH_OUTPUT}; return; }

my @all = group(\@names, Tpcw::tables(), conf => "braid.version_timeout = 120s\nmax_connections = 200\nautovacuum = off\n" . ($ENV{BENCH_OUTPUT} ? "fsync = on\n" : ''));
my $shop = Tpcw->new(\@all, items => $ENV{BENCH_ITEMS} // 200, customers => $ENV{BENCH_CUSTOMERS} // 400);

my %declared = map { $_ => $shop->script($_, 'versioned') } keys %{ { Tpcw::shares('browsing') } };
is(scalar keys %declared, 14, 'there are fourteen interactions');
show(scalar(@all) . " nodes, $shop->{items} items, $shop->{customers} customers, $seconds s each");
my %seen;
for my $mode (@modes)
{
	for my $mix (qw(browsing shopping ordering))
	{
		for my $clients (@clients)
		{
			my $each = int($clients / @all) || 1;
			my ($load) = slurp_file('/proc/loadavg') =~ /^(\S+)/;
			my ($rate, $latency, $failed, $done) = $shop->run($mix, clients => $each, seconds => $seconds, mode => $mode);
			is($failed, 0, "$mix, $mode: nothing fails");
			$seen{$_} += $done->{$_} for keys %$done;
			show(sprintf '%-10s %-9s %4d clients  %8.1f interactions a second  %8.1f ms  load %s', $mode, $mix, $each * @all, $rate, $latency, $load);
		}
	}
}
# What is seldom in all mixes, once more.
for my $node (@all)
{
	for my $interaction (sort keys %declared)
	{
		for my $mode (qw(versioned single))
		{
			my ($out, $err) = run_command([ 'pgbench', '-t', 2, $shop->options($node, $mode, $interaction => 1) ]);
			unlike($err, qr/ERROR|aborted/, $node->name . ": $interaction, $mode");
		}
	}
}
cmp_ok($seen{buy_confirm} // 0, '>', 0, 'something was bought');
cmp_ok(sql($all[0], 'select count(*) from orders where o_id > 1000000000'), '>=', $seen{buy_confirm} // 0, 'and all orders are there');
$shop->check;
$_->stop for @all;
done_testing();
