# Groups of nodes: made, joined, and caught up with.
#
#   my ($tokyo, $paris, $oslo) = group([qw(tokyo paris oslo)], $setup)
#                            makes nodes with these names; the first one runs the SQL before
#   joined(@nodes)           each has joined, and changes stream
#   have_all(@nodes)         each has what each other one has committed by now
#   sql($node, $sql)         result of SQL
#   refusal($node, $sql)     error of SQL, with detail and hint
#   keeps($node, 2)          the node keeps changes for that many others

package Group;

use strict;
use warnings;

use Braid;
use Exporter 'import';
use Test::More;

our @EXPORT = qw(group join_group joined have_all sql look refusal keeps);

sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }

# Returns the result of SQL; undef while the server is starting.
sub look { my ($node, $sql) = @_; my ($status, $out) = attempt($node, $sql); return $status == 0 ? $out : undef; }

sub refusal
{
	my ($node, $sql) = @_;
	my ($status, $out, $err) = $node->psql('postgres', $sql);
	return $status == 0 ? "no error: $out" : $err;
}

sub join_group
{
	my ($node, $member) = @_;
	my ($there, $here) = ($member->connstr('postgres'), $node->connstr('postgres'));
	sql($node, "select braid.join_group(\$d\$$there\$d\$, node_name => '" . $node->name . "', dsn => \$d\$$here\$d\$)");
	return;
}

sub joined
{
	my (@all) = @_;
	for my $node (@all)
	{
		my ($status, $out, $err) = $node->psql('postgres', "select braid.wait_for_group('180 s')");
		is($err, '', $node->name . ' is in the group') or diag(look($node, 'table braid.join_progress') // '', "\n", look($node, 'table braid.group_nodes') // '');
	}
	return;
}

sub group
{
	my ($names, $setup, %opt) = @_;
	# An initdb for each: servers that begin as copies of one are not taken for different ones.
	my ($first, @others) = my @all = map { new_server($_, init => ['--data-checksums'], %opt) } @$names;
	sql($_, 'create extension braid') for @all;
	sql($first, $setup);
	my $dsn = $first->connstr('postgres');
	sql($first, "select braid.create_group('shop', node_name => '" . $first->name . "', dsn => \$d\$$dsn\$d\$)");
	for my $node (@others)
	{
		join_group($node, $first);
		joined($node);
	}
	joined(@all);
	return @all;
}

sub have_all
{
	my (@all) = @_;
	for my $node (@all)
	{
		for my $other (grep { $_ != $node } @all)
		{
			my $position = sql($other, 'select braid.sync_event()');
			sql($node, "select braid.wait_for_event('" . $other->name . "', '$position', '180 s')");
		}
	}
	return;
}

sub keeps
{
	my ($node, $count) = @_;
	ok($node->poll_query_until('postgres', "select count(*) = $count from braid.kept_changes where wal_status = 'reserved'"), $node->name . ' keeps changes for others')
	  or diag(sql($node, 'table braid.kept_changes'));
	return;
}

1;
