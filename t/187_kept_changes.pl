# Each node of a group has a slot that keeps what others may lack. It moves on while all are written
# to, and so retains little WAL. A member that is away holds it back, for braid.peer_away_limit at
# most. Changes that are not kept any more are not passed on, and the report says so.

use strict;
use warnings;

use Braid;
use Group;
use PostgreSQL::Test::Utils;
use Test::More;

my ($tokyo, $paris, $oslo) = my @all = group([qw(tokyo paris oslo)], q{
	create table item (id bigint primary key, v text, n int not null default 0);
	insert into item select i, repeat('x', 200) from generate_series(1, 2000) i;
});
keeps($_, 2) for @all;
my $slot = q{(select l.slot_name from pg_replication_slots l where l.slot_name ~ '^braid_kept')};
my $at = "select l.confirmed_flush_lsn from pg_replication_slots l where l.slot_name = $slot";

# Under load it moves with what all have.
my %before = map { $_->name => sql($_, $at) } @all;
my $script = $tokyo->basedir . '/write.sql';
append_to_file($script, "\\set id random(1, 2000)\nupdate item set n = n + 1, v = repeat('y', 200) where id = :id;\n");
my @load = map { start_pgbench($_, '-T', 45, '-c', 1, '-R', 50, '-f', $script) } @all;
for my $node (@all)
{
	my $start = sql($node, 'select pg_current_wal_lsn()');
	ok($node->poll_query_until('postgres', "select l.confirmed_flush_lsn > '$start' and l.restart_lsn > '" . $before{ $node->name } . "' from pg_replication_slots l where l.slot_name = $slot"), 'the slot moves under load: ' . $node->name)
	  or diag(sql($node, 'select * from braid.kept_changes'));
	cmp_ok(sql($node, 'select max(wal_bytes) from braid.kept_changes'), '<', 64 * 1024 * 1024, 'and holds back little');
	is(sql($node, q{select count(*) from braid.check() where subject ~ 'braid_kept'}), '0', 'it is no slot that somebody should drop');
}
finish_pgbench($_) for @load;

# All places for slots are taken.
my $name = sql($oslo, "select $slot");
my $finding = q{select severity, subject, finding, remedy from braid.check() where code = 'kept_slot'};
is(sql($oslo, $finding), '', 'nothing is found while the slot is there');
my $places = sql($oslo, q{select current_setting('max_replication_slots')::int});
sql($oslo, "select pg_create_physical_replication_slot('filler_' || i) from generate_series(1, $places - (select count(*) from pg_replication_slots)) i");
sql($oslo, "select pg_drop_replication_slot('$name'); select pg_create_physical_replication_slot('filler')");
sql($oslo, 'update braid.group_self set kept_looked_at = clock_timestamp() - interval \'1 hour\'');
ok($oslo->poll_query_until('postgres', 'select kept_looked_at > clock_timestamp() - interval \'1 minute\' from braid.group_self'), 'the slot is tried');
is(sql($oslo, $finding), "warning|$name|there is no slot \"$name\", so what other members lack is not kept for them|alter system set max_replication_slots = " . ($places + 1) . ';  -- then restart the server', 'that it can not be made is found');
sql($oslo, q{select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name ~ '^filler'});
is(sql($oslo, q{select remedy from braid.check() where code = 'kept_slot'}), "See the server's log. It is tried every 10 s.", 'with another remedy when there is room');
sql($oslo, 'update braid.group_self set kept_looked_at = clock_timestamp() - interval \'1 hour\'');
ok($oslo->poll_query_until('postgres', 'select count(*) = 2 from braid.kept_changes where wal_status is not null'), 'it is made when there is room');
is(sql($oslo, $finding), '', 'and nothing is found');

# A member that is away.
have_all(@all);
$paris->stop('immediate');
sql($tokyo, q{insert into item select 10000 + i, 'away' from generate_series(1, 200) i});
ok($oslo->poll_query_until('postgres', q{select count(*) = 200 from item where v = 'away'}), 'oslo has what paris lacks');
my $kept = sql($oslo, $at);
my $looked = sql($oslo, 'select kept_looked_at from braid.group_self');
ok($oslo->poll_query_until('postgres', "select kept_looked_at > '$looked'::timestamptz + interval '11 s' from braid.group_self"), 'the slot is looked at');
# The slot may have moved once, to the position that paris had.
my $later = sql($oslo, $at);
ok($oslo->poll_query_until('postgres', "select kept_looked_at > '$looked'::timestamptz + interval '21 s' from braid.group_self"), 'and again');
is(sql($oslo, $at), $later, 'it stays where the member that is away is') or diag("$kept $later");
my $offset = -s $oslo->logfile;
sql($oslo, q{alter system set braid.peer_away_limit = '15s'});
sql($oslo, q{select pg_reload_conf()});
ok($oslo->poll_query_until('postgres', "select l.confirmed_flush_lsn > '$later' from pg_replication_slots l where l.slot_name = $slot"), 'beyond the limit it is made anew');
ok($oslo->log_contains(qr/keeps no earlier changes for other members any more: a member was away for longer than braid.peer_away_limit/, $offset), 'and the log says so');
sql($oslo, q{alter system reset braid.peer_away_limit});
sql($oslo, q{select pg_reload_conf()});
ok($oslo->poll_query_until('postgres', q{select count(*) = 2 from braid.kept_changes}), 'it is there again');

# Tokyo dies, and what only oslo has of it is not kept there any more.
$tokyo->stop('immediate');
$paris->start;
# Oslo may have given up the former subscriptions meanwhile.
ok($paris->poll_query_until('postgres', q{select reachable from braid.group_nodes where name = 'oslo'}), 'paris is back');
is(sql($paris, q{select count(*) from item where v = 'away'}), '0', 'and lacks what tokyo wrote');
sql($paris, q{select braid.remove_node('tokyo', recover => true)});
ok($paris->poll_query_until('postgres', q{select count(*) = 2 and bool_and(state in ('complete', 'done')) from braid.recovery}), 'the recovery ends')
  or diag(sql($paris, 'table braid.recovery'));
like(sql($paris, q{select not_kept from braid.recovery where node = 'paris'}), qr/^no node keeps transactions that node tokyo committed between \S+ and \S+ any more$/, 'and says what was not kept')
  or diag(sql($paris, 'table braid.recovery'));
ok($paris->log_contains(qr/transactions that removed node "tokyo" committed between .* are no longer available.*HINT:  Find the rows with braid.compare/s), 'with a hint');

done_testing();
