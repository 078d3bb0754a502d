# Three nodes in a full mesh, with pgbench on all three and the same keys.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $seconds = $ENV{BRAID_TEST_SECONDS} // 4;
my @nodes = map { new_node($_) } qw(tokyo paris quito);
my ($first, @others) = @nodes;

$first->command_ok([ 'pgbench', '-i', '-q', '-s', '1', 'postgres' ], 'tables with data on ' . $first->name);
$_->command_ok([ 'pgbench', '-i', '-q', '-I', 'dtp', 'postgres' ], 'empty tables on ' . $_->name) for @others;

# The data comes from the first node; every other edge only streams.
subscribe($_, $first) for @others;
for my $subscriber (@nodes)
{
	for my $provider (@others)
	{
		subscribe($subscriber, $provider, copy_data => 'false') unless $subscriber == $provider;
	}
}

my @bench = map { start_pgbench($_, '-c', '3', '-T', $seconds) } @nodes;
my $transactions = 0;
$transactions += finish_pgbench($_) for @bench;
converged(@nodes);

same_tables(\@nodes, qw(pgbench_branches pgbench_tellers pgbench_accounts pgbench_history));
is($first->safe_psql('postgres', 'select count(*) from pgbench_history'), $transactions, 'every transaction took effect once');

# No change goes in circles: without writers, no node writes any row again.
my $versions = q[select md5(string_agg(ctid::text || xmin::text, ',' order by ctid)) from pgbench_tellers];
my @before = map { $_->safe_psql('postgres', $versions) } @nodes;
# A change that went round would have come by then: each position here is behind everything that had
# been received before.
converged(@nodes) for 1 .. 2;
my @after = map { $_->safe_psql('postgres', $versions) } @nodes;
is_deeply(\@after, \@before, 'no change comes round again');

done_testing();
