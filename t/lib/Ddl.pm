# Nodes that send each other schema changes, and the comparison of their schemas.

package Ddl;

use strict;
use warnings;

use Exporter 'import';

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

our @EXPORT = qw(ddl_nodes enable sql raised schema_of same_schema ddl_log all_stream);

# Creates nodes of these names, each of which subscribes to all others.
sub ddl_nodes
{
	my ($names, %opt) = @_;
	my $setup = delete $opt{setup} // '';
	my $conf = delete $opt{conf} // '';
	my @nodes = map { new_node($_, conf => "braid.ddl_replication = on\n$conf") } @$names;
	for my $node (@nodes)
	{
		$node->safe_psql('postgres', "set braid.ddl_replication = off; $setup") if $setup ne '';
	}
	for my $subscriber (@nodes)
	{
		subscribe($subscriber, $_, copy_data => 'false', replicate_ddl => 'true', %opt) for grep { $_ != $subscriber } @nodes;
	}
	return @nodes;
}

# Each argument is a node and a subscription of it.
sub enable { sql($_->[0], "select braid.enable_subscription('$_->[1]')") for @_; return; }

sub sql
{
	my ($node, $sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

# Returns the error of a statement.
sub raised
{
	my ($node, $sql) = @_;
	my ($ret, $out, $err) = $node->psql('postgres', $sql);
	return $err;
}

# Returns the schema as pg_dump writes it.
sub schema_of
{
	my ($node) = @_;
	my ($out, $err) = run_command([ 'pg_dump', '-s', '-d', $node->connstr('postgres') ]);
	die "pg_dump: $err" if $err =~ /error/;
	# Columns of a table may have another order, because two nodes may have added them at once.
	return join "\n", grep { !/^(\\(un)?restrict|--|$)/ } split /\n/, $out;
}

# One test: all of these nodes have the same schema.
sub same_schema
{
	my ($what, @nodes) = @_;
	my ($first, @others) = @nodes;
	# Statements that each node runs by itself end after the stream has gone on.
	for my $node (@nodes)
	{
		wait_until(sub { sql($node, q[select count(*) from braid.ddl_log where state in ('waiting', 'running')]) eq '0' }, 60);
	}
	my $expected = schema_of($first);
	for my $node (@others)
	{
		my $found = schema_of($node);
		my $same = ok($found eq $expected, $what . (@others > 1 ? ': ' . $node->name : ''));
		diag_lines($expected, $found) unless $same;
	}
	return;
}

sub diag_lines
{
	my ($expected, $found) = @_;
	my %seen;
	$seen{$_}++ for split /\n/, $expected;
	$seen{$_}-- for split /\n/, $found;
	diag(map { $seen{$_} ? ($seen{$_} > 0 ? '-' : '+') . " $_\n" : () } sort keys %seen);
	return;
}

# Returns state and tag of the statements that a node has recorded, the oldest first.
sub ddl_log
{
	my ($node, $where) = @_;
	$where //= 'true';
	return sql($node, "select string_agg(state || ' ' || command_tag, ', ' order by recorded_at) from braid.ddl_log where $where");
}

# One test for each node: its subscriptions stream, and nothing is parked.
sub all_stream
{
	my (@nodes) = @_;
	for my $node (@nodes)
	{
		is(sql($node, q[select count(*) filter (where state <> 'streaming') || ' ' || (select count(*) from braid.parked_transactions) from braid.subscription_status]),
			'0 0', 'all streams of ' . $node->name . ' go on');
	}
	return;
}

1;
