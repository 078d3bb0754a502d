# A node joins a group of two that are written to, and at each of its steps a process is killed with SIGKILL: here, at the node that is
# copied from, or at the other one. It joins all the same, and no row is lost.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep time);

sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
# Of a server that may be starting: nothing then.
sub look { my ($node, $sql) = @_; my ($status, $out) = $node->psql('postgres', $sql, stderr => \my $ignored); return $status == 0 ? $out : undef; }
sub server { my ($name) = @_; my $node = new_server($name, init => ['--data-checksums']); sql($node, 'create extension braid'); return $node; }
sub join_by
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

my $tokyo = server('tokyo');
my $paris = server('paris');
my $oslo = server('oslo');
my $dsn = $tokyo->connstr('postgres');
sql($tokyo, 'create table item (id bigint primary key, v text, n int not null default 0)');
sql($tokyo, q{insert into item select i, repeat('row ' || i, 20) from generate_series(1, 30000) i});
sql($tokyo, "select braid.create_group('shop', node_name => 'tokyo', dsn => \$d\$$dsn\$d\$)");
join_by($paris, $tokyo);
joined($paris, $tokyo);

# Rows that each of the two writes all the time, with numbers of its own; servers are killed meanwhile, so each transaction says that it is there.
my %written = map { $_->name => 0 } $tokyo, $paris;
my $number = 0;
sub write_some
{
	for my $node ($tokyo, $paris)
	{
		$number++;
		my $id = 1000000 + $number;
		# Twice by number, as the answer to a commit may be lost.
		if (defined look($node, "insert into item values ($id, '" . $node->name . "') on conflict do nothing; update item set n = n + 1 where id = $number; delete from item where id = 30001 - $number"))
		{
			$written{ $node->name }++;
		}
	}
	return;
}

join_by($oslo, $tokyo);
my @victims = ([ $oslo, 'braid group steps' ], [ $tokyo, 'walsender' ], [ $oslo, 'braid group' ], [ $paris, 'braid group' ], [ $oslo, 'braid leader' ], [ $tokyo, 'braid group' ], [ $oslo, 'braid copy' ]);
my (%killed, @at);
my $end = time + 150;
while (time < $end)
{
	my $step = look($oslo, q{select coalesce(min(step) filter (where done_at is null), 99) from braid.join_step});
	if (defined $step && $step eq '99') { last; }
	if (defined $step && !$killed{$step}++)
	{
		my ($node, $kind) = @{ $victims[ @at % @victims ] };
		my $pid = look($node, "select pid from pg_stat_activity where backend_type = '$kind' and datname = 'postgres' limit 1");
		# Where that one does not run just now, the server is killed by another of its processes.
		$pid = look($node, q{select pid from pg_stat_activity where backend_type = 'braid manager' and datname = 'postgres' limit 1}) if !$pid;
		if ($pid)
		{
			kill 'KILL', $pid;
			push @at, "$step: $kind of " . $node->name;
			sleep 0.2;
		}
	}
	write_some();
	sleep 0.01;
}
note(join ', ', @at);
cmp_ok(scalar(@at), '>=', 6, 'processes were killed at most steps: ' . scalar(@at));
joined($oslo, $tokyo, $paris);
write_some() for 1 .. 20;
cmp_ok($written{$_}, '>', 20, "$_ was written to: $written{$_} times") for sort keys %written;
my @all = ($tokyo, $paris, $oslo);
sql($_, "insert into item values (" . (9000000 + $_->port) . ", 'last')") for @all;
sub have_all
{
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
have_all() for 1 .. 2;
same_tables(\@all, 'item');
is(sql($_, 'select count(*) from item where id > 9000000'), '3', 'all directions stream: ' . $_->name) for @all;
is(sql($_, q{select count(*) from pg_replication_slots where plugin = 'braid' and slot_name !~ '^braid_(deletions|kept)'}), '2', 'no slot is left over: ' . $_->name) for @all;

done_testing();
