# Rows with growing keys: appliers see at the end of an index that a key is not there yet. Rows that
# are there, or come, or go at that end are noticed all the same: rows of both nodes with the same
# keys, open transactions, deleted rows, and an index that is split, vacuumed, emptied or rebuilt.

use strict;
use warnings;

use Braid;
use IPC::Run ();
use PostgreSQL::Test::Utils;
use Test::More;

my @both = my ($tokyo, $paris) = map { new_node($_, conf => "autovacuum = off\n") } qw(tokyo paris);
my @tables = qw(plain pair down words);
sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
sub conflicts { my ($node, $kind) = @_; return sql($node, "select coalesce(sum(conflicts), 0) from braid.conflict_stats where kind = '$kind'"); }

# One transaction for each row: one column, two, falling order, a collation's order. Each row names
# its writer.
# who wrote it.
on_all(q[
	create table plain (id int primary key, who text);
	create table pair (a int, b int, who text, primary key (b, a));
	create table down (id bigint not null, who text); create unique index on down (id desc); alter table down replica identity using index down_id_idx;
	create table words (w text primary key, who text);
	create procedure write(a int, z int, who text) language plpgsql as $$
	begin
		for i in a..z loop
			insert into plain values (i, who) on conflict do nothing;
			insert into pair values (i % 3, i, who) on conflict do nothing;
			insert into down values (-i, who) on conflict do nothing;
			insert into words values (to_char(i, 'FM000000'), who) on conflict do nothing;
			commit;
		end loop;
	end $$;
], @both);
subscribe($tokyo, $paris, copy_data => 'false');
subscribe($paris, $tokyo, copy_data => 'false');

# From one node, over several pages.
sql($tokyo, q[call write(1, 2000, 'tokyo')]);
converged(@both);
same_tables(\@both, @tables);

# Both write the same keys at once, behind the end and at it.
my @runs = map {
	my ($node, $who) = ($_, $_->name);
	my ($out, $err) = ('', '');
	[ IPC::Run::start([ 'psql', '-XAtq', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr('postgres'), '-c', "call write(2001, 4000, '$who')" ], '<', \undef, '>', \$out, '2>', \$err), \$err ];
} @both;
ok($_->[0]->finish, 'both nodes write') or diag ${ $_->[1] } for @runs;
converged(@both);
same_tables(\@both, @tables);
is(sql($paris, 'select count(*) from plain'), '4000', 'each key once');

# A row at the end of the index that paris has, and tokyo has not received: a conflict, not a
# duplicate key.
sql($tokyo, "select braid.disable_subscription('tokyo_from_paris')");
wait_until(sub { worker_pids($tokyo, 'braid leader') == 0 }, 20);
my $before = conflicts($paris, 'insert_exists');
sql($paris, q[call write(4001, 4100, 'paris')]);
sql($tokyo, q[select pg_sleep(0.05); call write(4001, 4150, 'tokyo')]);
caught_up($paris, $tokyo);
is(conflicts($paris, 'insert_exists') - $before, '400', 'rows at the end are met');
is(sql($paris, "select string_agg(distinct who, ' ') from plain where id > 4000"), 'tokyo', 'and the newer ones stay');

# The last one of all, after one that was not there. It is found at once: an attempt that fails
# would be made again.
my $retries = 'select sum(retries) from braid.apply_workers';
my $tried = sql($paris, $retries);
for my $n (1 .. 20)
{
	sql($paris, qq[insert into plain values (4300 + 2 * $n, 'paris')]);
	sql($tokyo, qq[select pg_sleep(0.01); insert into plain values (4299 + 2 * $n, 'tokyo')]);
	caught_up($paris, $tokyo);
	sql($tokyo, qq[insert into plain values (4300 + 2 * $n, 'tokyo')]);
	caught_up($paris, $tokyo);
}
is(sql($paris, $retries), $tried, 'the last row is met without a failed attempt');
is(sql($paris, q[select count(*) from plain where id > 4300 and who = 'tokyo']), '40', 'and loses to the newer one');

# One whose transaction is open: it is waited for. It rolls back; another one commits, and is older.
for my $end (qw(rollback commit))
{
	my $session = $paris->background_psql('postgres');
	$session->query_safe(q[begin; insert into plain select max(id) + 1, 'open' from plain]);
	sql($tokyo, q[insert into plain select max(id) + 1, 'tokyo' from plain]);
	ok(wait_until(sub { sql($paris, q[select count(*) from pg_stat_activity where backend_type = 'braid applier' and wait_event_type = 'Lock']) > 0 }, 10), "an open transaction is waited for ($end)");
	$session->query_safe($end);
	$session->quit;
	caught_up($paris, $tokyo);
}
sql($tokyo, "select braid.enable_subscription('tokyo_from_paris')");
converged(@both);
same_tables(\@both, @tables);

# The last rows go, with their pages; growing keys again, the same ones, which are newer than the
# deletion, and older ones, which are not.
sql($tokyo, "delete from $_ where who > ''") for qw(pair down);
sql($tokyo, q[delete from plain where id > 1000; delete from words where w > '001000']);
converged(@both);
sql($_, 'vacuum plain, pair, down, words') for @both;
sql($_, 'vacuum plain, pair, down, words') for @both;
sql($tokyo, q[call write(900, 1500, 'again')]);
converged(@both);
same_tables(\@both, @tables);

# While rows arrive, the index is rebuilt on the other side, and the table truncated.
my ($out, $err) = ('', '');
my $run = IPC::Run::start([ 'psql', '-XAtq', '-d', $tokyo->connstr('postgres'), '-c', q[call write(1501, 6000, 'more')] ], '<', \undef, '>', \$out, '2>', \$err);
for my $table (@tables, @tables)
{
	sql($paris, "reindex table $table; vacuum $table");
	sql($paris, "reindex table concurrently $table");
}
ok($run->finish, 'rows come while indexes are built anew');
converged(@both);
same_tables(\@both, @tables);
sql($tokyo, 'truncate ' . join(', ', @tables));
sql($tokyo, q[call write(3000, 3600, 'after'); call write(1, 50, 'before')]);
converged(@both);
same_tables(\@both, @tables);
is(sql($paris, 'select count(*) from plain'), '651', 'and when the table was emptied');

# The last entry of an index stands for several versions of its row, which a session keeps from
# being removed.
my @often = map { "often_$_" } 1 .. 3;
on_all("create table $_ (id int primary key, n int); create index on $_ (n)", @both) for @often;
sql($_, 'select braid.refresh_subscription(name, copy_data => false) from braid.subscription_status') for @both;
# The row is on the table's last page, with room on those before it: so its newest versions are not
# the last ones in the index.
sql($tokyo, "insert into $_ select k, 0 from generate_series(-4000, 0) k; delete from $_ where id < -50") for @often;
converged(@both);
# Of which tokyo does not know.
sql($tokyo, "select braid.disable_subscription('tokyo_from_paris')");
wait_until(sub { worker_pids($tokyo, 'braid leader') == 0 }, 20);
sql($paris, "insert into $_ values (1, 1)") for @often;
sql($paris, q[
	create extension pageinspect; create extension pg_freespacemap;
	create function versions_at_end(name text) returns int language sql as $$
		select coalesce(cardinality(i.tids), 1)
		from generate_series(1, pg_relation_size(name) / current_setting('block_size')::int - 1) b, lateral bt_page_stats(name, b::int) p,
		     lateral (select tids from bt_page_items(name, b::int) order by itemoffset desc limit 1) i where p.btpo_level = 0 and p.btpo_next = 0 $$]);
for my $table (@often)
{
	# Not before the collector has processed their deletion.
	ok(wait_until(sub { sql($paris, "vacuum $table"); sql($paris, "select coalesce(sum(avail), 0) from pg_freespace('$table')") > 80_000 }, 30), "there is room in $table");
}
my $watching = $paris->background_psql('postgres', on_error_stop => 1);
$watching->query_safe('begin isolation level repeatable read; select count(*) from plain');
for my $table (@often)
{
	sql($paris, "do \$\$ begin for i in 1..2000 loop update $table set n = -i where id = 1; commit; exit when versions_at_end('${table}_pkey') > 1; end loop; end \$\$");
	cmp_ok(sql($paris, "select versions_at_end('${table}_pkey')"), '>', 1, "the last entry stands for several versions of a row in $table");
	# The end is looked at after keys that were not found, and not at once again.
	sql($tokyo, "begin; " . join('; ', map { "insert into $table values ($_, 0)" } -100, -99, -98, 1 .. 6) . "; commit");
}
caught_up($paris, $tokyo);
sql($tokyo, "select braid.enable_subscription('tokyo_from_paris')");
converged(@both);
same_tables(\@both, @often);
$watching->quit;

# Every index has what its table has.
for my $node (@both)
{
	sql($node, 'create extension if not exists amcheck');
	is(sql($node, q[select count(bt_index_check(indexrelid, true)) from pg_index where indrelid in ('plain'::regclass, 'pair'::regclass, 'down'::regclass, 'words'::regclass)]), '4', 'indexes are whole at ' . $node->name);
}

done_testing();
