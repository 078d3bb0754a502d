# Processor time of TPC-W's interactions on two nodes of this machine, for the simulation: prints
# what bench/tpcw/costs.json has.
#
#   make bench-tpcw-costs
#
# Each interaction runs BENCH_TIMES times (300) at tokyo, first before the tables are versioned,
# then versioned. Processor time does not count waits for a processor, so other programs change it
# little. What ended backends have used is what the postmaster has of its children.

use strict;
use warnings;

use Braid;
use Group;
use POSIX ();
use PostgreSQL::Test::Utils;
use Test::More;
use Tpcw;

my $times = $ENV{BENCH_TIMES} // 300;
sub show { my ($line) = @_; note($line); append_to_file($ENV{BENCH_OUTPUT}, "$line\n") if $ENV{BENCH_OUTPUT}; return; }

my ($tokyo, $paris) = my @both = group([qw(tokyo paris)], Tpcw::tables(), conf => "braid.version_timeout = 120s\nautovacuum = off\nshared_buffers = 256MB\n");
my $shop = Tpcw->new(\@both, items => $ENV{BENCH_ITEMS} // 10000, customers => $ENV{BENCH_CUSTOMERS} // 28800, versioned => 0);
my @interactions = sort keys %{ { Tpcw::shares('browsing') } };

# Microseconds of processes that a node has now, by their type.
sub running
{
	my ($node) = @_;
	my %used;
	for (split /\n/, sql($node, q[select pid, backend_type from pg_stat_activity where backend_type ~ 'braid|walsender']))
	{
		my ($pid, $type) = split /\|/;
		my ($nanoseconds) = slurp_file("/proc/$pid/schedstat") =~ /^(\d+)/;
		my $kind = $type =~ /versions/ ? 'keeper' : $type =~ /appl|leader/ ? 'apply' : $type =~ /walsender/ ? 'sender' : 'other';
		$used{$kind} += $nanoseconds / 1000;
	}
	return %used;
}

# Microseconds that ended backends of a node have used.
sub ended
{
	my ($node) = @_;
	my ($pid) = slurp_file($node->data_dir . '/postmaster.pid') =~ /^(\d+)/;
	my @fields = split ' ', (slurp_file("/proc/$pid/stat") =~ s/.*\) //r);
	return ($fields[13] + $fields[14]) * 1e6 / POSIX::sysconf(POSIX::_SC_CLK_TCK());
}

# Runs an interaction; returns what each of its transactions has used, by place.
sub measure
{
	my ($node, $other, $interaction, $mode, $count) = @_;
	my $options = sub { return $shop->options($node, $mode, $interaction => 1); };
	run_command([ 'pgbench', '-t', 5, $options->() ]);
	have_all(@both);
	$node->poll_query_until('postgres', q[select count(*) = 0 from pg_stat_activity where application_name = 'pgbench']);
	my ($before, %here) = (ended($node), running($node));
	my %there = running($other);
	my ($out, $err) = run_command([ 'pgbench', '-t', $count, $options->() ]);
	die $err if $err =~ /ERROR|aborted/;
	have_all(@both);
	$node->poll_query_until('postgres', q[select count(*) = 0 from pg_stat_activity where application_name = 'pgbench']);
	my ($after, %here_after) = (ended($node), running($node));
	my %there_after = running($other);
	my %each = (backend => ($after - $before) / $count);
	$each{"here $_"} = (($here_after{$_} // 0) - ($here{$_} // 0)) / $count for keys %here_after;
	$each{"there $_"} = (($there_after{$_} // 0) - ($there{$_} // 0)) / $count for keys %there_after;
	return \%each;
}

sub line
{
	my ($name, $each) = @_;
	show(sprintf "%-34s %s", $name, join '  ', map { sprintf '%s %.0f', $_, $each->{$_} } sort keys %$each);
	return;
}

# What a backend costs that begins and ends.
my $start = measure($tokyo, $paris, 'order_inquiry', 'plain', 1)->{backend};
show("a backend: $start");
my %plain;
for my $interaction (@interactions)
{
	$plain{$interaction} = measure($tokyo, $paris, $interaction, 'plain', $times);
	$plain{$interaction}{backend} -= $start / $times;
	line("plain $interaction", $plain{$interaction});
}
sql($tokyo, "select braid.version_table('$_')") for @Tpcw::tables;
$_->poll_query_until('postgres', 'select count(*) = ' . scalar(@Tpcw::tables) . ' from braid.table_versions where reached is not null') for @both;
my $holder = sql($tokyo, 'select node_name from braid.version_cut c join braid.group_member m on m.member_id = c.holder_id order by term desc limit 1');
show("sequencer at $holder");
for my $node (@both)
{
	my ($other) = grep { $_ != $node } @both;
	for my $interaction (@interactions)
	{
		next if $node == $paris && $interaction !~ /product_detail|buy_confirm|shopping_cart/;
		my $each = measure($node, $other, $interaction, 'versioned', $times);
		$each->{backend} -= $start / $times;
		$each->{more} = $each->{backend} - $plain{$interaction}{backend};
		line($node->name . " versioned $interaction", $each);
	}
}
ok(1, 'measured');
$_->stop for @both;
done_testing();
