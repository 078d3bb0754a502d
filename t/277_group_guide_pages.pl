# The SQL of the guide's pages that begin with a group of three, run as written: its output is the
# one that the pages show. docs/group.md has a test of its own, 240.

use strict;
use warnings;

use Braid;
use Page;
use PostgreSQL::Test::Utils;
use Test::More;

my %node = map { $_ => new_server($_, init => ['--data-checksums']) } qw(tokyo paris oslo);
on_all('create database shop', values %node);
sub sql { my ($node, $sql) = @_; return $node{$node}->safe_psql('shop', $sql); }
sub dsn { my ($name) = @_; return sprintf 'host=%s port=%s dbname=shop', $node{$name}->host, $node{$name}->port; }

sql($_, 'create extension braid') for sort keys %node;
sql('tokyo', "select braid.create_group('shop', node_name => 'tokyo', dsn => '" . dsn('tokyo') . "')");
sql($_, "select braid.join_group('" . dsn('tokyo') . "', node_name => '$_', dsn => '" . dsn($_) . "')") for qw(paris oslo);
my @live = qw(tokyo paris oslo);
sql($_, q[select braid.wait_for_group('170 s')]) for @live;

# Each of these has what each other one has committed by now.
sub have_all
{
	for my $one (@live)
	{
		for my $other (grep { $_ ne $one } @live)
		{
			my $position = sql($other, 'select braid.sync_event()');
			sql($one, "select braid.wait_for_event('$other', '$position', '100 s')");
		}
	}
	return;
}
sub becomes_so { my ($node, $query, $name) = @_; ok($node{$node}->poll_query_until('shop', $query), $name); return; }

for my $page (qw(group-rules sequences lost-node))
{
	for my $part (parts("docs/guide/$page.md"))
	{
		have_all();
		if ($part->{sql} =~ /braid\.remove_node/)
		{
			$node{oslo}->stop('immediate');
			@live = qw(tokyo paris);
		}
		# The group is called at one node, and the others learn of it.
		becomes_so('tokyo', 'select count(*) = ' . @live . ' from braid.group_nodes', 'tokyo knows who is a member') if $part->{sql} =~ /from braid\.group_nodes/;
		becomes_so('paris', q[select count(*) filter (where state = 'done') = 2 from braid.recovery], 'the recovery ends') if $part->{sql} =~ /from braid\.recovery/;
		run_and_compare($part, 'shop', \%node);
	}
}

done_testing();
