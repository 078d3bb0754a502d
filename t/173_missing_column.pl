# A local table lacks a published column. The subscription stops, or the column's values are left
# out, by the subscription's option and the table's rule, in each way in which a row can come. A
# column of a key is never left out. At last a column is dropped in a mesh with writers.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my @nodes = map { new_node($_, publication => '', conf => "logical_decoding_work_mem = 64kB\n") } qw(tokyo paris);
my ($tokyo, $paris) = @nodes;
sub sql { my ($node, $text) = @_; return $node->safe_psql('postgres', $text); }
sub here { return sql($paris, $_[0]); }
# One that does not stop the test.
sub raised { my ($node, $text) = @_; return ($node->psql('postgres', $text, on_error_stop => 0))[2]; }

on_all(q[
	create table t (k int primary key, v text, gone text not null default 'as ever', kept int not null default 0);
	create table whole (k int, v text, extra text);
	alter table whole replica identity full;
	create table ruled (k int primary key, v text, extra text);
	create table strict (k int primary key, v text, extra text);
	create table keyed (a int, b int, v text, primary key (a, b));
	create table merged (k int primary key, v int, extra text);
	alter table merged replica identity full;
], @nodes);
sql($tokyo, q[create table m (k int primary key, v text, extra text, big text); create table parts (k int primary key, v text, extra text)]);
here(q[
	create table m (big text, v text, k int primary key);
	create table parts (v text, k int primary key) partition by range (k);
	create table parts_1 partition of parts for values from (0) to (100);
	create table parts_2 (k int not null, v text);
	alter table parts attach partition parts_2 for values from (100) to (1000000);
]);
on_all('create publication braid for table t, whole, ruled, strict, keyed, merged', $paris);
on_all('create publication braid for all tables', $tokyo);
sql($tokyo, q[
	insert into t select k, 'first', 'first', 0 from generate_series(1, 40) k;
	insert into m select k, 'copied', 'x', repeat('y', k) from generate_series(1, 10) k;
	insert into parts select k, 'copied', 'x' from generate_series(90, 110) k;
]);

# At creation: refused, unless columns are left out. The initial copy leaves them out too.
my $create = 'select braid.create_subscription($$paris_from_tokyo$$, $dsn$' . $tokyo->connstr('postgres') . '$dsn$';
like(raised($paris, "$create)"), qr/table "public.m" lacks published columns: "extra"\nHINT:  .*on_missing_column/, 'refused at creation, with a hint');
like(raised($paris, "$create, on_missing_column => 'skip')"), qr/unrecognized value for on_missing_column: "skip"\nHINT/, 'an option that is none');
my $name = subscribe($paris, $tokyo, on_missing_column => "'ignore'");
subscribe($tokyo, $paris, copy_data => 'false');
my ($here, $there) = ('(select k, v, big from m)', '(select k, v from parts)');
same_tables(\@nodes, 't', $here, $there);
my $recorded = q[select relation || '.' || column_name || ' ' || is_missing || ' ' || (first_at > now() - interval '1 hour') || ' ' || subscription
	from braid.missing_columns order by 1];
is(here($recorded), "m.extra true true $name\nparts.extra true true $name", 'the copy has recorded what it has left out');

# The stream, in all modes: all kinds of changes, and transactions that are sent while they run.
my $changes = sub {
	my ($mode) = @_;
	return qq[
		insert into m values (50, '$mode', 'left out', repeat('$mode', 10));
		update m set extra = '$mode' where k = 1;
		update m set v = '$mode', extra = null where k = 2;
		update m set k = 60 where k = 50;
		delete from m where k = 60;
		update m set big = (select string_agg(md5(i::text || '$mode'), '') from generate_series(1, 500) i) where k = 3;
		update m set extra = '$mode', v = v || '+' where k = 3;
		insert into whole values (1, '$mode', 'one'), (1, '$mode', 'two'), (2, '$mode', null);
		update whole set extra = 'three' where extra = 'one' and v = '$mode';
		update whole set v = v || '!' where k = 2 and v = '$mode';
		delete from whole where extra = 'two' and v = '$mode';
		update parts set v = '$mode', extra = '$mode', k = case k when 90 then 110 when 110 then 90 else k + 0 end where k between 95 and 105;
		begin; insert into m select k, 'large', md5(k::text), '$mode' from generate_series(1000, 2500) k; savepoint s;
		update m set extra = 'more', big = big || '.' where k > 1000; release s; delete from m where k > 1005; commit;
		delete from m where k >= 1000;
	];
};
here('alter table whole drop column extra');
for my $mode (qw(parallel serial batch aggregate))
{
	here("select braid.alter_subscription('$name', apply_mode => '$mode', streaming => '" . ($mode eq 'serial' ? 'on' : 'parallel') . "')");
	my $inserts = join '', map { "insert into m values (300 + $_, '$mode', 'x', ''); update m set extra = 'y' where k = 300 + $_;" } 1 .. 20;
	sql($tokyo, $changes->($mode) . $inserts . 'delete from m where k > 300');
	caught_up($paris, $tokyo);
	same_tables(\@nodes, $here, $there, '(select k, v from whole)');
}
becomes($paris, 'select state from braid.subscription_status', 'streaming', 'in all modes');
here("select braid.alter_subscription('$name', apply_mode => 'parallel')");
is(here("select count(*) from braid.missing_columns where column_name = 'extra'"), 3, 'each column is recorded once');
is(here(q[select count(*) from braid.missing_column where relation = 'm'::regclass]), 1, 'as long as the table has the same shape');
ok($paris->log_contains(qr/LOG:  column "extra" of table public\.m is left out/), 'and is in the log');

# Conflicts, and a function that gets the old row.
on_all(q[
	create function sum_up(local merged, remote merged, before merged, info braid.conflict) returns merged language plpgsql immutable as $$
	begin
		local.v := coalesce(local.v, 0) + coalesce(remote.v, 0) - coalesce(before.v, 0);
		return local;
	end $$;
	select braid.set_conflict_resolution('merged', 'update_origin_differs', 'function', 'sum_up');
], @nodes);
sql($tokyo, q[insert into merged values (1, 10, 'a')]);
converged(@nodes);
here('alter table merged drop column extra');
here("select braid.disable_subscription('$name')");
sql($tokyo, q[select braid.disable_subscription('tokyo_from_paris')]);
sql($tokyo, q[update merged set v = v + 1, extra = 'b'; update t set v = 'tokyo', gone = 'tokyo' where k = 1]);
here(q[update merged set v = v + 5; update t set v = 'paris', kept = 7 where k = 1]);
sql($tokyo, q[select braid.enable_subscription('tokyo_from_paris')]);
here("select braid.enable_subscription('$name')");
converged(@nodes);
same_tables(\@nodes, '(select k, v from merged)', 't');
is(here('select v from merged'), 16, 'a conflict function has both rows and the one before them, without the column');

# The rule of a table, over that of the subscription. A partition has that of the table above it.
here(q[
	alter table ruled drop column extra;
	alter table strict drop column extra;
	select braid.set_missing_column_rule('ruled', 'ignore'), braid.set_missing_column_rule('parts', 'ignore'), braid.set_missing_column_rule('strict', 'error');
]);
is(here('select string_agg(relation || $$ $$ || rule, $$, $$) from braid.missing_column_rules'), 'parts ignore, ruled ignore, strict error', 'rules are shown');
sub stops
{
	my ($what) = @_;
	ok(wait_until(sub { here('select state from braid.subscription_status') eq 'error' }, 30), "$what: the subscription stops");
	is(here('select error_sqlstate from braid.subscription'), '42703', "$what: as the error says");
	return here(q[select concat_ws(' ', error_message, error_detail, error_hint) from braid.subscription_detail]);
}
sub goes_on
{
	here("select braid.enable_subscription('$name'); select braid.wait_for_subscription('$name', '180 s')");
	caught_up($paris, $tokyo);
	return;
}
sql($tokyo, q[insert into strict values (1, 'one', 'x')]);
like(stops('a rule'), qr/table "public.strict" lacks column "extra" that the provider sends.*set_missing_column_rule/, 'the error says what to do');
here(q[select braid.set_missing_column_rule('strict', null)]);
goes_on();
is(here('select v from strict'), 'one', 'without the rule it is as the subscription says');
here("select braid.alter_subscription('$name', on_missing_column => 'error')");
is(here('select on_missing_column from braid.subscription_detail'), 'error', 'the option is changed');
sql($tokyo, q[insert into ruled values (1, 'one', 'x'); update parts set v = 'ruled' where k in (95, 105)]);
caught_up($paris, $tokyo);
same_tables(\@nodes, '(select k, v from ruled)', $there);
sql($tokyo, q[begin; update strict set v = 'two', extra = 'y'; update ruled set v = 'two'; commit]);
stops('the option');
is(here('select v from ruled'), 'one', 'nothing of the transaction is applied');
here("select braid.alter_subscription('$name', on_missing_column => 'ignore')");
goes_on();
same_tables(\@nodes, '(select k, v from ruled)', '(select k, v from strict)');

# A column of a key.
here(q[alter table keyed drop column b]);
sql($tokyo, q[insert into keyed values (1, 1, 'one')]);
like(stops('a key'), qr/table "public.keyed" lacks key column "b".*cannot be ignored.*Add what is missing here/, 'the error says so');
like(raised($paris, "select braid.refresh_subscription('$name')"), qr/lacks published columns of a key: "b"\n.*HINT/s, 'as does a refresh');
here(q[alter table keyed add b int, add primary key (a, b)]);
goes_on();
same_tables(\@nodes, '(select a, b, v from keyed)');

# The column is added again, and has values from then on. A comparison names what it does not
# compare, and finds the values that were left out.
like(raised($paris, "call braid.compare('$name', 'm')"), qr/WARNING:  column "extra" is not compared/, 'a comparison says what it leaves out');
here('alter table m add extra text');
is(here(q[select is_missing from braid.missing_columns where relation = 'm'::regclass]), 'f', 'the column is back');
sql($tokyo, q[update m set extra = 'back' where k = 4]);
caught_up($paris, $tokyo);
is(here('select extra from m where k = 4'), 'back', 'values come again');
here("call braid.compare('$name', 'm')");
is(here(q[select count(*) > 0 and bool_and(columns = '{extra}') from braid.differences where relation = 'm'::regclass]), 't', 'what was left out is a difference');
here("call braid.repair('$name', 'm', side => 'provider')");
same_tables(\@nodes, '(select k, v, extra, big from m)');
here('alter table m drop column extra');
here("select braid.resync_table('$name', 'm'); select braid.wait_for_subscription('$name', '180 s')");
caught_up($paris, $tokyo);
same_tables(\@nodes, $here);
is(here(q[select is_missing and last_at > first_at from braid.missing_columns where relation = 'm'::regclass]), 't', 'the copy has recorded that it is missing again');

# braid.ingest: by the rule of the table.
my $record = q['[{"operation": "insert", "transaction": {"lsn": "0/%d", "commit_time": "2024-01-01T00:00:00Z"}, "schema": {"namespace": "public", "table": "%s",
	"columns": [{"name": "k", "type": "int4", "primary_key": true}, {"name": "v", "type": "text"}, {"name": "extra", "type": "text"}]}, "after": {"k": 70, "v": "ingested", "extra": "x"}}]'];
like(raised($paris, sprintf "select braid.ingest($record, 'shop')", 1, 'strict'), qr/lacks column "extra".*HINT:  [^\n]*set_missing_column_rule/s, 'ingest: an error');
here(sprintf "select braid.ingest($record, 'shop')", 1, 'ruled');
is(here('select v from ruled where k = 70'), 'ingested', 'ingest: left out by the rule of the table');
here(q[create table keyless (v text); select braid.set_missing_column_rule('keyless', 'ignore')]);
like(raised($paris, sprintf "select braid.ingest($record, 'shop')", 2, 'keyless'), qr/lacks key column "k"/, 'ingest: but for a key');
is(here(q[select relation || '.' || column_name from braid.missing_columns where subscription = 'shop']), 'ruled.extra', 'ingest: recorded under the name of the source');
here(q[select braid.forget_source('shop')]);
is(here(q[select count(*) from braid.missing_columns where subscription = 'shop']), 0, 'as long as the source is known');

# A column is dropped at one node after the other, while both are written to by those who do not
# name it.
sql($tokyo, q[select braid.alter_subscription('tokyo_from_paris', on_missing_column => 'ignore')]);
on_all('alter table t alter gone drop not null, alter gone drop default', @nodes);
my %first = (tokyo => 1001, paris => 1002);
my $file = "$PostgreSQL::Test::Utils::tmp_check/write.sql";
append_to_file($file, q[
	\set k random(1, 40)
	update t set v = current_setting('port') || :k, kept = kept + 1 where k = :k;
	insert into t (k, v) values (nextval('written'), 'new');
]);
sql($_, 'create sequence written increment 2 start ' . $first{ $_->name }) for @nodes;
my $written = sub { my ($count) = @_; return wait_until(sub { !grep { sql($_, 'select last_value from written') < 1000 + 2 * $count } @nodes }, 60) };
# The last changes that name it.
on_all(q[update t set gone = 'last' where k % 2 = 0; insert into t values (500 + current_setting('port')::int % 2, 'named', 'last', 0) on conflict do nothing], @nodes);
my @writers = map { start_pgbench($_, '-f', $file, '-c', 2, '-t', 400) } @nodes;
ok($written->(100), 'both nodes are written to');
sql($tokyo, 'alter table t drop column gone');
ok($written->(300), 'while one of them has the column');
here('update t set gone = $$later$$ where k < 5; alter table t drop column gone');
finish_pgbench($_) for @writers;
converged(@nodes);
same_tables(\@nodes, 't');
is(sql($tokyo, q[select count(*) from t where k > 1000]), 1600, 'no row is lost');
is(sql($tokyo, q[select column_name || is_missing || subscription from braid.missing_columns where relation = 't'::regclass]), 'gonetruetokyo_from_paris', 'what came for the column is recorded');
becomes($_, q[select string_agg(state, ',') from braid.subscription_status], 'streaming', $_->name . ' streams') for @nodes;
sql($tokyo, q[select braid.drop_subscription('tokyo_from_paris')]);
is(sql($tokyo, q[select count(*) from braid.missing_column]), 0, 'the records go with their subscription');

done_testing();
