# Three nodes that all write and replicate to each other, each on a clock of its own that is set
# while it runs.
#
#   my ($clocks, @nodes) = nodes_on_clocks($conf);
#       tokyo, paris and oslo, with tables item and hot; skips the test without a C compiler
#   write_while_clocks_step($clocks, \@nodes, $script, 15);
#       pgbench with that script on each, for 15 seconds; "%s" in it is the node's name. Then hot is
#       the same on all nodes, and the clocks are right again.

package Clocks;

use strict;
use warnings;

use Exporter 'import';
use Braid;
use FakeClock;
use Kill;
use Test::More;
use Time::HiRes qw(sleep time);

our @EXPORT = qw(nodes_on_clocks write_while_clocks_step sql link_up);

my @names = qw(tokyo paris oslo);

sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }

# Enables or disables a node's subscription to another one.
sub link_up
{
	my ($node, $from, $up) = @_;
	my $do = $up ? 'enable' : 'disable';
	sql($node, "select braid.${do}_subscription('" . $node->name . '_from_' . $from->name . "')");
	return;
}

sub nodes_on_clocks
{
	my ($more) = @_;
	my $conf = "wal_sender_timeout = 0\nbraid.max_clock_wait = 10ms\nbraid.clock_skew_warning = 0\nlogical_decoding_work_mem = 64kB\n$more";
	my @clocks = map { FakeClock->new or plan skip_all => 'there is no C compiler to make a clock with' } @names;
	my @nodes = map { my $i = $_; $clocks[$i]->over(sub { new_node($names[$i], conf => $conf) }) } 0 .. $#names;
	on_all('create table item (id int primary key, v text); create table hot (k int primary key, n int not null, who text)', @nodes);
	for my $node (@nodes) { subscribe($node, $_, copy_data => 'false') for grep { $_ != $node } @nodes; }
	sql($nodes[0], q[insert into item select i, 'old' from generate_series(1, 2000) i]);
	converged(@nodes);
	return (\@clocks, @nodes);
}

sub write_while_clocks_step
{
	my ($clocks, $nodes, $script, $seconds) = @_;
	kill_seed();
	start_load($_, sprintf($script, $_->name) => '-c 2 -R 70') for @$nodes;
	my $until = time + ($ENV{BRAID_TEST_SECONDS} // $seconds);
	while (time < $until)
	{
		$clocks->[ int rand @$clocks ]->set(rand(6) - 3);
		sleep 0.3;
	}
	stop_load();
	converged(@$nodes);
	same_tables($nodes, 'hot');
	cmp_ok(sql($_, 'select count(*) from braid.local_version where xid <> 0'), '>', 10, 'clocks were behind at ' . $_->name) for @$nodes;
	$_->set(0) for @$clocks;
	ok($_->poll_query_until('postgres', "select behind = '0' from braid.clock_status"), 'its time comes at ' . $_->name) for @$nodes;
	return;
}

1;
