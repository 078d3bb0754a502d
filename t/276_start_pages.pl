# The SQL of docs/three-nodes.md, run as written: its output is the one that the page shows. Test
# 168 has docs/two-nodes.md, 183 the README.

use strict;
use warnings;

use Braid;
use Page;
use PostgreSQL::Test::Utils;
use Test::More;

my %node = map { $_ => new_server($_, init => ['--data-checksums']) } qw(tokyo paris oslo);
on_all('create database shop', values %node);
sub sql { my ($node, $sql) = @_; return $node{$node}->safe_psql('shop', $sql); }

# Once all have joined, each has what the others have committed before the next part.
sub have_all
{
	return if sql('tokyo', q[select to_regclass('braid.group_nodes') is null]) eq 't';
	return if sql('tokyo', q[select count(*) filter (where state = 'active') = 3 from braid.group_nodes]) ne 't';
	for my $name (sort keys %node)
	{
		sql($name, q[select braid.wait_for_group('100 s')]);
		for my $other (grep { $_ ne $name } sort keys %node)
		{
			my $position = sql($other, 'select braid.sync_event()');
			sql($name, "select braid.wait_for_event('$other', '$position', '100 s')");
		}
	}
	return;
}
for my $part (parts('docs/three-nodes.md'))
{
	have_all();
	# The view shows a member as active when this node has received that.
	if ($part->{sql} =~ /group_nodes/)
	{
		my $all = q[select count(*) filter (where state = 'active') = 3 from braid.group_nodes];
		ok($node{$_}->poll_query_until('shop', $all), "$_ knows three members") for sort keys %node;
	}
	run_and_compare($part, 'shop', \%node);
}

done_testing();
