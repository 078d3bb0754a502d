# An update that brings a row into a publication's row filter arrives as an insert. Large values
# that the update left unchanged are neither in WAL nor at the subscriber. They are fetched from the
# provider, and never become null.

use strict;
use warnings;

use Braid;
use Test::More;

my $publication = 'create publication braid for table f where (id > 10), c (id, big) where (id > 10), p where (id > 10), k where (b > 10), s where (id > 100000) with (publish_via_partition_root = true)';
my $tokyo = new_node('tokyo', publication => '', conf => "logical_decoding_work_mem = 64kB\nbraid.querier_timeout = 2s\nmax_prepared_transactions = 5\n");
my $paris = new_node('paris', publication => '', conf => "max_prepared_transactions = 5\n");
on_all(q[
	create table f (id int primary key, n int, big text not null, raw bytea, j jsonb);
	alter table f alter big set storage external, alter raw set storage external, alter j set storage external;
	create table c (id int primary key, secret text, big text);
	alter table c alter big set storage external, alter secret set storage external;
	create table k (a text, b int, list numeric[], other int, primary key (a, b));
	alter table k alter list set storage external;
	create table s (id int primary key, big text not null);
	alter table s alter big set storage external;
], $tokyo, $paris);
$tokyo->safe_psql('postgres', q[
	create table p (id int primary key, n int, big text not null) partition by range (id);
	create table p_low partition of p for values from (0) to (20);
	create table p_high partition of p for values from (20) to (1000);
	alter table p_low alter big set storage external;
	alter table p_high alter big set storage external;
	insert into f select i, 0, repeat(i || 'f', 3000), decode(repeat(md5(i::text), 200), 'hex'), jsonb_build_object('k', repeat(i || 'ü', 3000)) from generate_series(1, 10) i;
	insert into c select i, repeat(i || 's', 3000), repeat(i || 'c', 3000) from generate_series(1, 10) i;
	insert into p select i, 0, repeat(i || 'p', 3000) from generate_series(1, 10) i;
	insert into k select 'k''\\' || i, i, (select array_agg(x::numeric / 7) from generate_series(1, 900) x), 0 from generate_series(1, 10) i;
]);
$tokyo->safe_psql('postgres', $publication);
$paris->safe_psql('postgres', q[
	create table p (id int primary key, n int, big text not null) partition by hash (id);
	create table p_0 partition of p for values with (modulus 2, remainder 0);
	create table p_1 partition of p for values with (modulus 2, remainder 1);
]);
my $name = subscribe($paris, $tokyo, two_phase => 'true');

sub run { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
my %rows = (
	f => 'select id, n, big, raw, j from f where id > 10', c => 'select id, big from c where id > 10', p => 'select id, n, big from p where id > 10',
	k => 'select a, b, list, other from k where b > 10', s => 'select id, big from s where id > 100000');

# Both nodes have the same rows of these tables, and there are so many.
sub same
{
	my ($what, %count) = @_;
	caught_up($paris, $tokyo);
	for my $table (sort keys %count)
	{
		my $sql = "select count(*) || ' ' || md5(coalesce(string_agg(r::text, ' ' order by r::text), '')) from ($rows{$table}) r";
		my $at_paris = run($paris, $sql);
		is($at_paris, run($tokyo, $sql), "$what: $table is the same");
		like($at_paris, qr/^$count{$table} /, "$what: $table has $count{$table} rows");
	}
	return;
}

# Runs SQL while the stream is disabled: the provider has gone on when it is asked.
sub apart
{
	my ($sql) = @_;
	disable($paris, $name);
	run($tokyo, $sql);
	run($paris, "select braid.enable_subscription('$name')");
	return;
}

run($tokyo, q[update f set id = 11 where id = 1; update c set id = 11 where id = 1; update k set b = 11 where b = 1; update p set id = 11 where id = 1; update p set id = 30 where id = 2]);
same('one row each', f => 1, c => 1, k => 1, p => 2);
is(run($paris, 'select count(*) from c where secret is not null'), 0, 'a column that is not published stays away');
run($tokyo, 'begin; update f set id = 12 where id = 2; update f set n = 1 where id = 12; update p set id = 40 where id = 11; update p set n = 2 where id in (30, 40); commit');
same('changed in the same transaction', f => 2, p => 2);

# Another row has the key by the time of the question: the row got another key, left the filter
# again, or was deleted.
apart('update f set id = 13 where id = 3; update f set id = 14 where id = 13; update f set id = 13 where id = 4; update f set n = n + 1');
same('a key that is used again', f => 4);
apart('update f set id = 15 where id = 5; update f set id = 5 where id = 15; update f set id = 16 where id = 6; delete from f where id = 16; update f set n = n + 1');
same('gone again', f => 4);
is(run($paris, q[select count(*) > 0 from braid.conflict_history where relation = 'f'::regclass and reason like '%large values%']), 't', 'a row that is left out is recorded');

# A row of this node is in its place.
run($paris, q[insert into f values (17, -1, 'paris', 'paris', '{}')]);
run($tokyo, 'update f set id = 17 where id = 7');
same('over a row of this node', f => 5);

# In all ways to apply, and while it runs.
my $id = 100000;
for my $how ([ 'parallel', 'off' ], [ 'batch', 'on' ], [ 'aggregate', 'parallel' ], [ 'serial', 'parallel' ])
{
	my ($mode, $streaming) = @$how;
	run($paris, "select braid.alter_subscription('$name', apply_mode => '$mode', streaming => '$streaming')");
	run($tokyo, "insert into s select i, repeat('s' || i, 1000) from generate_series(1, 100) i");
	run($tokyo, "begin; update s set id = id + $id where id <= 50; insert into s select i, repeat('r' || i, 1000) from generate_series(101, 110) i; update s set id = id + $id where id between 101 and 110; commit");
	run($tokyo, join(';', map { "update s set id = id + $id where id = $_" } 51 .. 100));
	same("$mode, streaming $streaming", s => 110 * ($id / 100000));
	$id += 100000;
}

# Prepared, so that others do not see the row under its new key for long.
run($tokyo, q[begin; update f set id = 18 where id = 8; prepare transaction 'enters']);
caught_up($paris, $tokyo);
run($tokyo, q[commit prepared 'enters']);
same('prepared', f => 6);
run($tokyo, q[begin; insert into f select 0, n, big, raw, j from f where id = 9; update f set id = 51 where id = 0; prepare transaction 'twice']);
caught_up($paris, $tokyo);
run($tokyo, q[commit prepared 'twice']);
same('prepared, without a former key', f => 7);

# The provider shows the commit only once this subscription has confirmed it.
run($tokyo, qq[alter system set synchronous_standby_names = '$name']);
$tokyo->reload;
run($tokyo, 'update f set id = 19 where id = 9');
run($tokyo, 'alter system reset synchronous_standby_names');
$tokyo->reload;
same('a commit that waits for the subscriber', f => 8);

# Without the column no node can be asked: that is an error, and no null.
apart('update c set id = 12 where id = 2; alter table c rename big to large');
ok(wait_until(sub { status($paris, $name)->{state} eq 'error' }, 30), 'it stops where the column is gone');
like(status($paris, $name)->{last_error}, qr/the provider has no table "public.c" with the columns of a row that has entered its row filter/, 'and says why');
run($tokyo, 'alter table c rename large to big');
run($paris, "select braid.enable_subscription('$name')");
same('it goes on', c => 2);

# Other programs can see which values are missing.
run($tokyo, q[
	select pg_create_logical_replication_slot(slot, 'braid') from unnest('{json,fetch,one,two}'::text[]) slot;
	update c set id = 13 where id = 3;
	update c set id = 14 where id = 4; delete from c where id = 14;
]);
my $inserts = sub {
	my ($slot, $options) = @_;
	return run($tokyo, "select data from pg_logical_slot_get_changes('$slot', null, null, 'publication_names', 'braid', $options)");
};
like($inserts->('json', q['format', 'gir-json']), qr/"after":\{"id":13\},"unavailable":\["big"\]/, 'gir-json names the column');
my $fetched = $inserts->('fetch', q['format', 'gir-json', 'include-unchanged-toast', 'fetch']);
like($fetched, qr/"after":\{"id":13,"big":\{"fetched":"(?:3c){3000}"\}\}/, 'or has it');
like($fetched, qr/"after":\{"id":14\},"unavailable":\["big"\]/, 'if it is there');
like($inserts->('one', q['format-version', '1']), qr/"kind":"insert","schema":"public","table":"c","columnnames":\["id"\],"columntypes":\["integer"\],"columnvalues":\[13\],"columnsunchanged":\["big"\]/, 'wal2json names it');
like($inserts->('two', q['format-version', '2']), qr/\{"name":"id","type":"integer","value":13\},\{"name":"big","type":"text","unchanged":true\}/, 'in version 2 too');

done_testing();
