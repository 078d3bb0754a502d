# Apply mode batch: a backlog is committed in far fewer transactions than it came in, and nothing else differs: tables of every
# kind, a transaction that can't be applied in the middle, changes of the subscriber's tables meanwhile.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '', conf => "allow_in_place_tablespaces = on\n");

# What both have. Each table has a tally, counted up with each change, so that triggers there can be held against it.
my @keyed = qw(plain always replica checked generated defaulted parted expressed toasted texty composite);
on_all(q[
	create table plain (k int primary key, v int, t text);
	create table always (k int primary key, v int, t text);
	create table replica (k int primary key, v int, t text);
	create table checked (k int primary key, v int, t text);
	create table generated (k int primary key, v int, t text);
	create table defaulted (k int primary key, v int, t text);
	create table parted (k int primary key, v int, t text) partition by range (k);
	create table parted_low partition of parted for values from (minvalue) to (20);
	create table parted_mid partition of parted for values from (20) to (1000);
	create table parted_high partition of parted for values from (1000) to (maxvalue);
	create table expressed (k int primary key, v int, t text);
	create table toasted (k int primary key, v int, t text);
	alter table toasted alter column t set storage external;
	create table texty (k text primary key, v int, t text);
	create table composite (k int, part text default 'x', v int, t text, primary key (part, k));
	create table whole (k int, v int, t text);
	alter table whole replica identity full;
	create table keyless (k int, v int, t text);
	create table cleared (k int primary key, v int);
	create table tally (name text primary key, n int not null);
], $tokyo, $paris);
$paris->safe_psql('postgres', q[
	create table fired (name text, op text);
	create function note() returns trigger language plpgsql as
	  $$ begin insert into public.fired values (tg_table_name, tg_op); return null; end $$;
	create trigger note after insert or update or delete on always for each row execute function note();
	alter table always enable always trigger note;
	alter table replica add column seen int not null default 0;
	create function seen() returns trigger language plpgsql as $$ begin new.seen := new.v * 3; return new; end $$;
	create trigger seen before insert or update on replica for each row execute function seen();
	alter table replica enable replica trigger seen;
	alter table checked add check (v >= 0), add check (k < 100000);
	alter table generated add column g int generated always as (v * 2) stored;
	alter table defaulted add column d int not null default 7, add column at timestamptz not null default now();
	create index on expressed (lower(t));
	create index on expressed (v) where v > 500;
	create unique index on expressed (k) where v > 100;
]);
$tokyo->safe_psql('postgres', q[
	insert into tally select unnest('{plain,always,replica,checked,generated,defaulted,parted,expressed,toasted,texty,composite,whole,keyless,cleared}'::text[]), 0;
	-- Random changes of few rows, each in a transaction of its own: so rows come, change, move, go and come again in one batch.
	create procedure churn(tables text[], rounds int) language plpgsql as $$
	declare
	  target text; a int; value int; done int; k text; big text;
	begin
	  for i in 1 .. rounds loop
	    target := tables[1 + floor(random() * cardinality(tables))];
	    a := 1 + floor(random() * 30);
	    value := floor(random() * 1000);
	    k := case when target = 'texty' then quote_literal('key ' || a) else a::text end;
	    big := case when target = 'toasted' then repeat(md5(value::text), 200) else 'T' || value end;
	    case floor(random() * 6)::int
	    when 0 then
	      execute format('delete from %I where k = %s', target, k);
	    when 1 then
	      -- To another key and back, where there is room.
	      execute format('update %1$I set k = %2$s, v = %3$s where k = %4$s and not exists (select from %1$I where k = %2$s)',
	        target, case when target = 'texty' then quote_literal('moved ' || a) else (a + 1000)::text end, value, k);
	    when 2 then
	      execute format('update %1$I set k = %4$s, v = %3$s where k = %2$s and not exists (select from %1$I where k = %4$s)',
	        target, case when target = 'texty' then quote_literal('moved ' || a) else (a + 1000)::text end, value, k);
	    when 3 then
	      execute format('update %I set v = %s where k = %s', target, value, k);
	    else
	      execute format('insert into %1$I (k, v, t) select %2$s, %3$s, %4$L where not exists (select from %1$I where k = %2$s)',
	        target, k, value, big);
	    end case;
	    get diagnostics done = row_count;
	    update tally set n = n + done where name = target;
	    commit;
	  end loop;
	end $$;
]);
my $name = subscribe($paris, $tokyo, apply_mode => q('batch'));

sub count { return $_[0]->safe_psql('postgres', "select $_[1]"); }

# Everything that the provider commits in the meantime is a backlog.
sub backlog
{
	my ($work) = @_;
	$paris->safe_psql('postgres', "select braid.disable_subscription('$name')");
	$tokyo->poll_query_until('postgres', "select not bool_or(active) from pg_replication_slots") or die 'still active';
	$work->();
	$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
	return;
}

my @shared = (@keyed, qw(whole keyless cleared tally));

# What both nodes have of the tables.
sub same
{
	for my $table (@shared)
	{
		my $columns = $table eq 'tally' ? 'name, n' : $table eq 'composite' ? 'k, part, v, t' : $table eq 'cleared' ? 'k, v' : 'k, v, t';
		my $query = "select count(*), md5(string_agg(r::text, ',' order by r::text collate \"C\")) from (select $columns from $table) r";
		is($paris->safe_psql('postgres', $query), $tokyo->safe_psql('postgres', $query), "$table is the same");
	}
	return;
}

sub next_xid { return $_[0]->safe_psql('postgres', 'select pg_snapshot_xmax(pg_current_snapshot())') }

# A backlog of everything.
my ($from, $here);
backlog(sub {
	($from, $here) = (next_xid($tokyo), next_xid($paris));
	my $tables = join ',', @keyed, 'whole';
	$tokyo->safe_psql('postgres', "call churn('{$tables}', 1500)");
	$tokyo->safe_psql('postgres', join ";\n", map { "insert into keyless values ($_, $_, 'x')" } 1 .. 50);
	# Cleared, and filled again, twice in one batch, and in one transaction.
	for my $round (1 .. 3)
	{
		$tokyo->safe_psql('postgres', "insert into cleared select k, $round from generate_series(1, 20) k");
		$tokyo->safe_psql('postgres', 'truncate cleared') if $round < 3;
	}
	$tokyo->safe_psql('postgres', 'begin; truncate cleared; insert into cleared values (1, 1); truncate cleared; insert into cleared values (2, 2); commit');
	$tokyo->safe_psql('postgres', "call churn('{$tables}', 500)");
});
caught_up($paris, $tokyo);
same();
my $sent = next_xid($tokyo) - $from;
my $used = next_xid($paris) - $here;
cmp_ok($used * 5, '<', $sent, "$sent transactions of the provider took $used here");
cmp_ok(count($paris, 'count(*) from braid.batch'), '>', 0, 'true versions of what was joined are kept');
is(count($paris, q['always ' || count(*) from fired where name = 'always']), count($tokyo, q['always ' || n from tally where name = 'always']),
	'a trigger that fires here fired once for each change');
is(count($paris, 'count(*) from replica where seen <> v * 3'), '0', 'one that changes rows did');
is(count($paris, 'count(*) from generated where g is distinct from v * 2'), '0', 'generated columns are');
is(count($paris, 'count(*) from defaulted where d <> 7 or at is null'), '0', 'defaults are');
is(status($paris, $name)->{last_error}, '', 'no error on the way');

# Indexes hold what tables hold.
$paris->safe_psql('postgres', 'create extension amcheck');
sub sound
{
	my ($when) = @_;
	is($paris->safe_psql('postgres', q[
		select count(bt_index_check(i.indexrelid, true)::text) from pg_index i join pg_class c on c.oid = i.indexrelid
		join pg_class r on r.oid = i.indrelid
		where r.relnamespace = 'public'::regnamespace and c.relkind = 'i' and c.relam = (select oid from pg_am where amname = 'btree')
	]) > 10 ? 1 : 0, 1, "indexes are sound $when");
	return;
}
sound('after batches');

# A transaction in the middle of a backlog that this node refuses: all before it is applied, it is named, nothing after it is.
on_all('create table line (k int primary key, v int); create table refused (k int primary key, v int)', $tokyo, $paris);
$tokyo->safe_psql('postgres', 'insert into line values (0, 0); insert into refused values (0, 0)');
caught_up($paris, $tokyo);
$paris->safe_psql('postgres', 'alter table refused add constraint small check (v < 100)');
sub fill
{
	my ($first, $bad, $last) = @_;
	backlog(sub {
		my $lines = sub { join ";\n", map { "insert into line values ($_, $_)" } $_[0] .. $_[1] };
		$tokyo->safe_psql('postgres', $lines->($first, $bad - 1));
		$tokyo->safe_psql('postgres', "begin; insert into line values ($bad, $bad); insert into refused values ($bad, 666); commit");
		$tokyo->safe_psql('postgres', $lines->($bad + 1, $last));
	});
	ok(wait_until(sub { status($paris, $name)->{state} eq 'error' }, 30), 'what is refused stops the subscription');
	is(count($paris, "count(*), max(k) from line where k >= $first"), ($bad - $first) . '|' . ($bad - 1), 'at its place, all before it applied');
	my $status = status($paris, $name);
	like($status->{last_error}, qr/small/, 'the error names the constraint');
	return $status->{error_lsn};
}
my $lsn = fill(1, 150, 300);
$paris->safe_psql('postgres', "select braid.skip_transaction('$name', '$lsn')");
caught_up($paris, $tokyo);
is(count($paris, 'count(*), count(*) filter (where k = 150), max(k) from line where k > 0'), '299|0|300', 'it alone is skipped');
$paris->safe_psql('postgres', 'insert into line values (150, 150)');
fill(301, 450, 600);
$paris->safe_psql('postgres', "alter table refused drop constraint small; select braid.enable_subscription('$name')");
caught_up($paris, $tokyo);
is(count($paris, 'count(*), count(*) filter (where k = 450), max(k) from line where k > 0'), '600|1|600', 'with the cause removed it is applied, and what follows');

# Changes of the subscriber's tables while batches come and tables are kept set up: the next change honours each.
my $dir = PostgreSQL::Test::Utils::tempdir();
PostgreSQL::Test::Utils::append_to_file("$dir/line.sql", "\\set k random(200, 600)\nupdate line set v = v + 1 where k = :k;\n");
my $load = start_pgbench($tokyo, '-c', 2, '-R', 300, '-t', 1200, '-f', "$dir/line.sql");
my $next = 1000;
sub here { return $paris->safe_psql('postgres', $_[0]); }
# One more row, applied here; the query about it.
sub then_row
{
	my ($query, $expected, $what, $v) = @_;
	$next++;
	$tokyo->safe_psql('postgres', 'insert into line values (' . $next . ', ' . ($v // $next) . ')');
	caught_up($paris, $tokyo);
	is(here($query =~ s/\$k/$next/gr), $expected, $what);
	return;
}
then_row('select v = k from line where k = $k', 't', 'changes are applied');
here("alter table line add column d text default 'new'");
then_row('select d from line where k = $k', 'new', 'an added column has its default');
here('alter table line drop column d; create index line_v on line (v)');
then_row('set enable_seqscan = off; select k = $k from line where v = $k', 't', 'an added index has the row');
here('alter index line_v rename to line_w');
then_row('set enable_seqscan = off; select k = $k from line where v = $k', 't', 'a renamed one too');
here("create tablespace elsewhere location ''");
here('alter index line_w set tablespace elsewhere');
then_row('set enable_seqscan = off; select k = $k from line where v = $k', 't', 'a moved one too');
here('create unique index concurrently line_u on line (k, v)');
then_row('set enable_seqscan = off; select k = $k from line where v = $k and k = $k', 't', 'one made concurrently too');
here('drop index line_w');
then_row('select v = k from line where k = $k', 't', 'an index is dropped');
here('reindex table concurrently line');
then_row('set enable_seqscan = off; select v = k from line where k = $k', 't', 'the indexes are made anew, concurrently');
here('vacuum full line');
then_row('set enable_seqscan = off; select v = k from line where k = $k', 't', 'the table is rewritten');
here('cluster line using line_pkey');
then_row('set enable_seqscan = off; select v = k from line where k = $k', 't', 'and once more');
here('alter table line set tablespace elsewhere');
then_row('select v = k from line where k = $k', 't', 'the table is moved');
here('create trigger note after insert on line for each row execute function note(); alter table line enable replica trigger note');
then_row(q[select count(*) from fired where name = 'line'], '1', 'a trigger fires');
here('drop trigger note on line');
then_row(q[select count(*) from fired where name = 'line'], '1', 'and fires no more');
finish_pgbench($load);
caught_up($paris, $tokyo);
# What ALTER TABLE rewrites is this node's own from then on: a change that was on its way would lose to that.
here('alter table line alter v type bigint');
then_row('select v = k from line where k = $k', 't', 'a column has another type');
here('vacuum analyze line; alter table line add column g bigint generated always as (v + 1) stored');
then_row('select g - 1 = k from line where k = $k', 't', 'a generated column is');
here('alter table line drop column g');
same_tables([ $tokyo, $paris ], 'line');
is(count($paris, q[coalesce(string_agg(to_jsonb(h)::text, ' '), '') from braid.conflict_history h]), '', 'no conflict was seen');
sound('after changes of tables');
here('alter table line add constraint small check (v < 1000000)');
$tokyo->safe_psql('postgres', 'insert into line values (9999, 1000000)');
ok(wait_until(sub { status($paris, $name)->{last_error} =~ /small/ }, 30), 'a CHECK refuses');
here("alter table line drop constraint small; select braid.enable_subscription('$name')");
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'line');

done_testing();
