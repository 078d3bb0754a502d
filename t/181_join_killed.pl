# A node joins a group of two that are written to. At each of its steps, once the work is done and
# before that is noted, two processes are killed with SIGKILL: the one that does the steps, and one
# at any node, or that whole server. The step is repeated, the node joins, and no row is lost.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

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

# Rows that each of the two writes all the time, with numbers of its own. Servers are killed
# meanwhile, so each transaction is recorded when it has committed.
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

# Each step is held once its work is done, before that is noted, while a file of its number is
# there.
my $dir = PostgreSQL::Test::Utils::tempdir();
sql($oslo, qq{
	create function braid.hold() returns trigger language plpgsql as \$f\$ begin
		while (pg_catalog.pg_stat_file('$dir/' || old.step, true)).size is not null loop
			perform pg_catalog.pg_sleep(0.02);
		end loop;
		return new;
	end \$f\$;
	create trigger hold before update on braid.join_step for each row when (new.done_at is not null and old.done_at is null) execute function braid.hold();
	alter table braid.join_step enable always trigger hold});
append_to_file("$dir/$_", '') for 1 .. 99;
join_by($oslo, $tokyo);
my @steps = split /\n/, sql($oslo, 'select step from braid.join_step order by step');
cmp_ok(scalar @steps, '>', 5, 'the steps: ' . @steps);

# The steps process has done all of this step, but to say so.
sub held
{
	my ($step, $when) = @_;
	my $found = wait_until(sub {
			write_some();
			return (look($oslo, q{select min(j.step) || ' ' || (select count(*) from pg_stat_activity where backend_type = 'braid group steps' and wait_event = 'PgSleep')
				from braid.join_step j where j.done_at is null}) // '') eq "$step 1";
		}, 120);
	ok($found, "step $step, $when") or diag(look($oslo, 'table braid.join_progress') // 'no server');
	return;
}
# A process is killed, and its server starts all processes anew; or the whole server.
sub kill_one
{
	my ($node, $kind) = @_;
	my $pid = $kind eq 'server' ? undef : look($node, "select pid from pg_stat_activity where backend_type = '$kind' and datname = 'postgres' limit 1");
	if ($pid)
	{
		kill_process($node, $pid);
	}
	else
	{
		$node->kill9;
		restart_crashed($node);
	}
	return;
}
my @others = ([ $tokyo, 'server' ], [ $paris, 'braid group' ], [ $oslo, 'braid group' ], [ $paris, 'server' ], [ $tokyo, 'walsender' ], [ $oslo, 'server' ], [ $tokyo, 'braid group' ]);
for my $step (@steps)
{
	held($step, 'for the first time');
	kill_one($oslo, 'braid group steps');
	held($step, 'repeated');
	my ($node, $kind) = @{ $others[ $step % @others ] };
	kill_one($node, $kind);
	held($step, "after a kill of a $kind of " . $node->name);
	unlink "$dir/$step";
}
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
