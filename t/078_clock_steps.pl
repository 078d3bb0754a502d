# A clock that steps back changes which version wins, but never makes nodes differ. If a commit
# would have to wait too long for this node's clock, its transaction gets a version behind all that
# it may have seen. Each of three nodes has a clock that is set while it runs.

use strict;
use warnings;

use Braid;
use Clocks;
use IPC::Run ();
use PostgreSQL::Test::Utils;
use Test::More;

my ($clocks, @nodes) = nodes_on_clocks('');
my @clocks = @$clocks;
my ($tokyo, $paris, $oslo) = @nodes;
sub on_clock { my ($i, $seconds, $sql) = @_; $clocks[$i]->set($seconds); return sql($nodes[$i], $sql); }

# At random: rows of few keys are written everywhere, while clocks are set forth and back.
write_while_clocks_step($clocks, \@nodes, q[
\set k random(1, 40)
\set what random(1, 4)
\if :what = 4
delete from hot where k = :k;
\else
insert into hot values (:k, 1, '%s') on conflict (k) do update set n = hot.n + 1, who = excluded.who;
\endif
], 15);
sql($_, 'delete from braid.local_version') for @nodes;

# Tokyo writes in a minute, and again, now. In between, paris has written, and knows of neither.
# Oslo gets tokyo's first.
link_up($paris, $tokyo, 0);
link_up($_, $paris, 0) for $tokyo, $oslo;
on_clock(0, 60, q[update item set v = 'first' where id in (1, 4); delete from item where id = 2; truncate hot]);
my $before = sql($tokyo, 'select count(*) from braid.local_version where xid <> 0');
is($before, '0', 'with its clock ahead, a node goes by its clock');
on_clock(0, 0, q[do $$ begin begin update item set v = 'second' where id in (1, 4); exception when unique_violation then raise; end; end $$]);
sql($tokyo, q[insert into item values (2, 'again'); delete from item where id = 2; delete from item where id = 4]);
is(sql($tokyo, 'select count(distinct committed_at) from braid.local_version where xid <> 0'), '4', 'each with a version of its own');
is(sql($tokyo, q[select count(*) from braid.local_version v join item i on v.xid & 4294967295 = i.xmin::text::bigint]), '1', 'also of a row that was written in a subtransaction');
is(sql($tokyo, q[select braid.commit_timestamp(xmin) - pg_xact_commit_timestamp(xmin) between '5 s' and '60.1 s' from item where id = 1]), 't', 'which is that of a row');
is(sql($tokyo, q[select v.committed_at = braid.commit_timestamp(i.xmin) and v.node = 'tokyo' from item i, braid.row_version(i.tableoid, i.ctid) v where id = 1]), 't', 'asked either way');
is(sql($tokyo, q[select braid.commit_timestamp(xmin) = pg_xact_commit_timestamp(xmin) from item where id = 3]), 't', 'other transactions have that of their commit');
on_clock(1, 10, q[update item set v = 'paris' where id <= 4]);
caught_up($oslo, $tokyo);
is(sql($oslo, q[select v from item where id in (1, 2, 4)]), 'second', 'oslo has what tokyo wrote last');
is(sql($oslo, q[select pg_xact_commit_timestamp(o.xmin)::text from item o where id = 1]), sql($tokyo, 'select braid.commit_timestamp(xmin)::text from item where id = 1'), 'under that version');
# Whatever becomes of the table's files before that is decoded.
sql($_, 'vacuum full braid.local_version; reindex table braid.local_version') for $tokyo, $paris;
link_up($_, $paris, 1) for $tokyo, $oslo;
caught_up($_, $paris) for $tokyo, $oslo;
link_up($paris, $tokyo, 1);
converged(@nodes);
same_tables(\@nodes, qw(item));
is(sql($_, q[select string_agg(v, ' ' order by id) from item where id <= 4]), 'second paris', 'what tokyo wrote in a minute counts, at ' . $_->name) for @nodes;

# The server forgets nothing of that when it starts again.
my $newest = sql($tokyo, 'select newest_seen from braid.clock_status');
$clocks[0]->over(sub { $tokyo->restart });
is(sql($tokyo, q[select braid.commit_timestamp(xmin) - pg_xact_commit_timestamp(xmin) > '5 s' from item where id = 1]), 't', 'versions are known after a restart');
sql($tokyo, q[update item set v = 'third' where id = 1]);
is(sql($tokyo, qq[select braid.commit_timestamp(xmin) > '$newest' from item where id = 1]), 't', 'the first transaction after it has a newer one than all before');
converged(@nodes);
is(sql($_, 'select v from item where id = 1'), 'third', 'and wins at ' . $_->name) for @nodes;

# A transaction that is sent before it ends, and a larger one that is not.
link_up($oslo, $tokyo, 0);
sql($oslo, q[select braid.alter_subscription('oslo_from_tokyo', streaming => 'off')]);
sql($tokyo, q[update item set v = repeat('long', 50) || id where id > 10]);
link_up($oslo, $tokyo, 1);
converged(@nodes);
same_tables(\@nodes, qw(item));
for my $node ($paris, $oslo)
{
	is(sql($node, q[select count(distinct pg_xact_commit_timestamp(xmin)) || ' ' || min(pg_xact_commit_timestamp(xmin)) from item where id > 10]),
		'1 ' . sql($tokyo, q[select braid.commit_timestamp(xmin) from item where id = 11]), 'a large transaction comes under its version, at ' . $node->name);
}
is(sql($tokyo, q[select count(*) from pg_stat_replication_slots where slot_name like 'braid%' and stream_txns > 0 or spill_txns > 0]) > 0 ? 1 : 0, 1, 'large enough for that');

# One during which the table was rewritten.
link_up($oslo, $tokyo, 0);
my $running = IPC::Run::start([ 'psql', '-XAtq', '-d', $tokyo->connstr('postgres'), '-c', q[begin; update item set v = 'slow' where id = 8; select pg_sleep(2); commit] ], '<', \undef, '>', \my $out, '2>', \my $err);
ok($tokyo->poll_query_until('postgres', q[select count(*) > 0 from pg_stat_activity where wait_event = 'PgSleep']), 'a transaction is running');
sql($tokyo, 'vacuum full braid.local_version');
ok($running->finish, 'and commits') or diag($err);
is(sql($tokyo, q[select braid.commit_timestamp(xmin) > pg_xact_commit_timestamp(xmin) from item where id = 8]), 't', 'with a version');
link_up($oslo, $tokyo, 1);
converged(@nodes);
is(sql($_, q[select pg_xact_commit_timestamp(xmin) from item where id = 8]), sql($tokyo, q[select braid.commit_timestamp(xmin) from item where id = 8]), 'under which it comes to ' . $_->name) for $paris, $oslo;

# Consumers of JSON get the version as the time of the commit; wal2json's form has the time in WAL.
sql($tokyo, q[select pg_create_logical_replication_slot('json', 'braid')]);
sql($tokyo, q[update item set v = 'json' where id = 5]);
my $version = sql($tokyo, q[select extract(epoch from braid.commit_timestamp(xmin)) from item where id = 5]);
is(sql($tokyo, q[select extract(epoch from (data::jsonb #>> '{transaction,commit_time}')::timestamptz) from pg_logical_slot_peek_changes('json', null, null, 'format', 'gir-json', 'publication_names', 'braid') where data like '%update%']),
	$version, 'gir-json has the version');
my $clock = sql($tokyo, q[select extract(epoch from pg_xact_commit_timestamp(xmin)) from item where id = 5]);
is(sql($tokyo, q[select extract(epoch from (data::jsonb ->> 'timestamp')::timestamptz) from pg_logical_slot_peek_changes('json', null, null, 'format', 'wal2json', 'include-timestamp', 'true', 'add-tables', 'public.item') where data like '%update%']),
	$clock, 'wal2json the time of the commit');

# Rows that were copied from a node with such versions keep them.
my $lima = new_node('lima', conf => "braid.max_clock_wait = 10ms\n");
sql($lima, 'create table item (id int primary key, v text); create table hot (k int primary key, n int not null, who text)');
subscribe($lima, $paris, copy_data => 'false');
subscribe($lima, $tokyo);
is(sql($lima, q[select v.committed_at from item i, braid.row_version(i.tableoid, i.ctid) v where id = 5]), sql($tokyo, q[select braid.commit_timestamp(xmin) from item where id = 5]), 'a copy brings them along');
sql($lima, "select braid.drop_subscription('lima_from_$_')") for qw(tokyo paris);
# The slots go in the background; one that stays would hold what is to be forgotten below.
ok(wait_until(sub { sql($lima, 'select count(*) from braid.pending_cleanup') eq '0' && sql($tokyo, q[select count(*) from pg_replication_slots where slot_name like '%lima%']) eq '0' }, 60), 'its slots are gone');
$lima->stop;
sql($tokyo, q[select pg_drop_replication_slot('json')]);

# The newest time from the future is remembered through a restart, also if the last transactions are
# older.
$clocks[0]->set(0);
$clocks[2]->set(140);
sql($oslo, q[update item set v = 'future' where id = 6]);
converged(@nodes);
sql($paris, q[set braid.max_clock_wait = 0; do $$ begin for i in 1 .. 20 loop update item set v = 'p' || i where id = 7; commit; end loop; end $$]);
my $future = sql($oslo, 'select pg_xact_commit_timestamp(xmin) from item where id = 6');
cmp_ok(sql($paris, 'select count(*) from braid.local_version where xid = 0'), '>', 0, 'it is written down');
sql($paris, q[delete from braid.local_version where xid <> 0]);
$clocks[1]->over(sub { $paris->restart });
is(sql($paris, qq[select newest_seen >= '$future' from braid.clock_status]), 't', 'and known after a restart');
converged(@nodes);

# The records are removed once nothing older can arrive, and no slot needs them.
sql($tokyo, q[update braid.local_version set committed_at = committed_at - 3 * 3600 * 1000000::bigint]);
sql($tokyo, q[select txid_current() from generate_series(1, 2)]) for 1 .. 3;
sql($tokyo, q[do $$ begin for i in 1 .. 1200 loop perform txid_current(); commit; end loop; end $$]);
converged(@nodes);
$clocks[0]->set(0);
$clocks[0]->over(sub { $tokyo->restart });
ok($tokyo->poll_query_until('postgres', qq[select count(*) = 0 from braid.local_version where committed_at < extract(epoch from now() - interval '2 h') * 1000000]), 'what nobody asks for any more is forgotten')
  or diag(sql($tokyo, 'select * from pg_replication_slots'));

like(slurp_file($tokyo->logfile), qr/WARNING:  this node's clock is \d+ ms behind.*DETAIL:  The transaction gets a version that follows that change/s, 'a warning has said so');
unlike(slurp_file($_->logfile), qr/PANIC|TRAP|panicked/, 'nothing broke at ' . $_->name) for @nodes;

done_testing();
