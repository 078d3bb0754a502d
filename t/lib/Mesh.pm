# For tests of nodes that all subscribe to each other: the nodes are cut off from each other, write,
# and then get the others' changes in any order.

package Mesh;

use strict;
use warnings;

use Exporter 'import';
use Braid;
use List::Util qw(shuffle);
use Test::More;

our @EXPORT = qw(mesh sql cut heal stream heal_all all_have);

my @nodes;
# Subscriber, name and provider of each stream.
my @streams;

# Subscribes each of these nodes to each other one. Returns the streams.
sub mesh
{
	@nodes = @_;
	for my $provider (@nodes)
	{
		for my $subscriber (@nodes)
		{
			next if $provider == $subscriber;
			push @streams, [ $subscriber, subscribe($subscriber, $provider), $provider ];
		}
	}
	return @streams;
}

sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }

# Cuts these streams, or all.
sub cut
{
	for my $stream (@_ ? @_ : @streams)
	{
		my ($subscriber, $name, $provider) = @$stream;
		sql($subscriber, "select braid.disable_subscription('$name')");
		$provider->poll_query_until('postgres', "select not active from pg_replication_slots where slot_name like '%$name'") or die;
	}
	return;
}

# Heals these streams, one after the other, each until it has caught up.
sub heal
{
	for my $stream (@_)
	{
		my ($subscriber, $name, $provider) = @$stream;
		sql($subscriber, "select braid.enable_subscription('$name')");
		caught_up($subscriber, $provider);
	}
	return;
}

sub stream { my ($subscriber, $provider) = @_; return grep { $_->[0] == $subscriber && $_->[2] == $provider } @streams; }

# Heals the streams one after the other, in random order, then waits for all.
sub heal_all
{
	heal(shuffle @streams);
	converged(@nodes);
	is(join('', map { status($_->[0], $_->[1])->{last_error} } @streams), '', 'all streams go on');
	return;
}

# One test: a query has this result on all nodes. Returns true if it passed.
sub all_have
{
	my ($query, $expected, $what) = @_;
	my @got = map { sql($_, $query) } @nodes;
	return 1 if is_deeply(\@got, [ ($expected) x @nodes ], $what);
	diag(join("\n", @got));
	return 0;
}

1;
