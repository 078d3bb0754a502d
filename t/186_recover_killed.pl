# A node of a group dies. While its last transactions are passed on, a process is killed with
# SIGKILL in each state, at each of the two others. The transactions reach both all the same, and
# none counts twice.

use strict;
use warnings;

use Braid;
use Group;
use Test::More;
use Time::HiRes qw(sleep time);

my ($tokyo, $paris, $oslo) = my @all = group([qw(tokyo paris oslo)], q{
	create table item (id bigint primary key, v text, n int not null default 0);
	create table log (line text);
	alter table log replica identity full;
	create table total (id int primary key, n bigint not null default 0);
	alter table total replica identity full;
	insert into item select i, 'first' from generate_series(1, 1000) i;
	insert into total values (1, 0);
});
sql($_, q{select braid.set_column_rule('total', 'n', 'delta')}) for @all;
keeps($_, 2) for @all;
have_all(@all);
disable($paris, 'paris_from_oslo');
$oslo->safe_psql('postgres', join('', map { "insert into item values (10000 + $_, 'oslo'); update item set n = n + 1 where id = $_; delete from item where id = 1001 - $_; insert into log values ('line'); update total set n = n + 1;\n" } 1 .. 400));
my $position = sql($oslo, 'select braid.sync_event()');
sql($tokyo, "select braid.wait_for_event('oslo', '$position', '180 s')");
$oslo->stop('immediate');
ok($tokyo->poll_query_until('postgres', q{select not reachable from braid.group_nodes where name = 'oslo'}), 'oslo is away');
my ($status, $out, $err) = $tokyo->psql('postgres', q{select braid.remove_node('oslo', recover => true)});
is($err, '', 'it is removed');

my (%killed, @at);
my @kinds = ('braid group steps', 'braid leader', 'braid applier', 'braid group');
my $end = time + 200;
my $done = 0;
while (time < $end && !$done)
{
	$done = 1;
	for my $node ($paris, $tokyo)
	{
		my $state = look($node, q{select coalesce((select r.state from braid.group_recovery r join braid.group_self s on s.member_id = r.survivor_id), 'none')});
		$done &&= defined $state && $state eq 'done';
		next if !defined $state || $state eq 'none' || $state eq 'done' || $killed{ $node->name . $state }++ >= 2;
		my $kind = $kinds[ @at % @kinds ];
		my $pid = look($node, "select pid from pg_stat_activity where backend_type = '$kind' and datname = 'postgres' limit 1");
		$pid = look($node, q{select pid from pg_stat_activity where backend_type = 'braid manager' and datname = 'postgres' limit 1}) if !$pid;
		next if !$pid;
		kill 'KILL', $pid;
		push @at, "$state: $kind of " . $node->name;
		sleep 0.3;
	}
	sleep 0.002;
}
note(join ', ', @at);
cmp_ok(scalar(@at), '>=', 5, 'processes were killed in most states: ' . scalar(@at));
for my $node ($tokyo, $paris)
{
	ok($node->poll_query_until('postgres', q{select count(*) = 2 and bool_and(state in ('complete', 'done')) from braid.recovery}), 'recovered, says ' . $node->name)
	  or diag(sql($node, 'table braid.recovery'));
	ok($node->poll_query_until('postgres', q{select count(*) = 1 from braid.subscription}), 'no subscription is left over: ' . $node->name);
	ok($node->poll_query_until('postgres', q{select count(*) = 1 from pg_replication_slots where plugin = 'braid' and slot_name !~ '^braid_deletions'}), 'nor a slot: ' . $node->name)
	  or diag(sql($node, 'select slot_name from pg_replication_slots'));
}
have_all($tokyo, $paris);
same_tables([ $tokyo, $paris ], qw(item log total));
is(sql($_, q{select (select count(*) from item where v = 'oslo'), (select sum(n) from item), (select count(*) from log), (select n from total)}), '400|400|400|400', 'all of it, once: ' . $_->name) for $tokyo, $paris;

done_testing();
