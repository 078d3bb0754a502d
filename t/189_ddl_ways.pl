# Schema changes in every way in which changes travel: through a chain of nodes (origin => 'any'),
# in transactions that are applied while in progress, in chunks, in batches, in relaxed order,
# prepared, and parked.

use strict;
use warnings;

use Braid;
use Ddl;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $conf = "braid.ddl_replication = on\nbraid.apply_buffer_size = 1MB\nlogical_decoding_work_mem = 64kB\nmax_prepared_transactions = 10\n";
my ($tokyo, $paris, $rome) = my @nodes = map { new_node($_, conf => $conf) } qw(tokyo paris rome);
my %with = (copy_data => 'false', replicate_ddl => 'true');
my $way = subscribe($paris, $tokyo, %with, streaming => "'parallel'");
subscribe($rome, $paris, %with, origin => "'any'", streaming => "'parallel'");

# All three have what was committed at tokyo and at paris.
sub arrived
{
	my ($what, @tables) = @_;
	caught_up($paris, $tokyo);
	caught_up($rome, $paris);
	same_schema($what, @nodes);
	same_tables(\@nodes, @tables) if @tables;
	return;
}

# A chain: what comes from tokyo is passed on by paris, which has statements of its own.
sql($tokyo, q[
	create table item (id int primary key, n int);
	insert into item select i, i from generate_series(1, 10) i;
	create function twice(int) returns int language sql immutable as 'select $1 * 2';
	alter table item add column doubled int generated always as (twice(n)) stored;
]);
caught_up($paris, $tokyo);
sql($paris, q[create table of_paris (id int primary key); insert into of_paris values (1); create index item_n on item (n)]);
caught_up($rome, $paris);
is(sql($rome, q[select string_agg(node || ' ' || command_tag || ' ' || state, ', ' order by recorded_at) from braid.ddl_log]),
	'tokyo CREATE TABLE applied, tokyo CREATE FUNCTION applied, tokyo ALTER TABLE applied, paris CREATE TABLE applied, paris CREATE INDEX applied', 'statements of both reach the end of the chain');
is(sql($rome, q[select string_agg(distinct subscription, ' ') from braid.ddl_log]), 'rome_from_paris', 'by the one way there is');
same_schema('a chain', $paris, $rome);
same_tables([ $paris, $rome ], qw(item of_paris));
sql($tokyo, q[set braid.ddl_replication = off; create table of_paris (id int primary key); create index item_n on item (n)]);

# In each apply mode and commit order: small transactions around statements; large ones that are
# applied while they run, or as they come, with statements in between and some that are rolled back
# with their savepoint.
my $number = 0;
for my $case ([ 'batch', 'source', 'on' ], [ 'aggregate', 'source', 'parallel' ], [ 'serial', 'source', 'off' ], [ 'parallel', 'relaxed', 'parallel' ],
	[ 'batch', 'relaxed', 'parallel' ], [ 'parallel', 'source', 'parallel' ])
{
	my ($mode, $order, $streaming) = @$case;
	my $what = "$mode, $order, streaming $streaming";
	alter_running($_->[0], $_->[1], "apply_mode => '$mode', commit_order => '$order', streaming => '$streaming'") or die 'not altered'
	  for [ $paris, $way ], [ $rome, 'rome_from_paris' ];
	my $t = 't' . ++$number;
	my $rows = 'select i, repeat(md5(i::text), 4) from generate_series';
	sql($tokyo, qq[
		create table $t (id int primary key, v text);
		insert into $t values (1, 'a');
		update $t set v = 'b';
		alter table $t add column n int not null default 5;
		insert into $t values (2, 'a', 1);
		update $t set n = n + 1;
		alter table $t rename column v to w;
		update $t set w = w || 'c', n = n + 1;
		alter table $t alter column n type bigint using n * 10;
		insert into $t values (3, 'a', 1);
		delete from $t where id = 1;
		begin;
		insert into $t (id, w) $rows(100, 3000) i;
		alter table $t add column big text default 'large';
		savepoint s;
		alter table $t drop column big;
		create table never (id int primary key);
		insert into $t (id, w) $rows(4000, 6000) i;
		rollback to s;
		update $t set big = 'x' where id % 3 = 0;
		create table ${t}_child (id int primary key references $t);
		insert into ${t}_child select id from $t where id between 100 and 200;
		alter table $t rename to ${t}_new;
		alter table ${t}_child rename to $t;
		insert into ${t}_new (id, w) $rows(7000, 9000) i;
		commit;
		insert into $t values (2);
		truncate $t;
		drop table $t;
		insert into ${t}_new (id, w) values (-1, 'last');
	]);
	arrived($what, "${t}_new");
	is(sql($_, qq[select count(*) from ${t}_new where big = 'x']), '968', "rows under the shape of their moment, $what, " . $_->name) for $paris, $rome;
}

# Rows that were written before a statement come after it, under names of columns that were renamed,
# and dropped since.
sql($tokyo, 'create table names (id int primary key, a int, b int)');
subscribe($tokyo, $paris, %with);
caught_up($paris, $tokyo);
disable($paris, $way);
sql($tokyo, 'alter table names rename a to aa; alter table names rename aa to aaa; alter table names rename b to bb; alter table names drop column bb');
sql($paris, 'insert into names values (1, 2, 3)');
caught_up($tokyo, $paris);
is(sql($tokyo, 'select id, aaa from names'), '1|2', 'a column that was renamed twice has its value, one that was renamed and dropped is left out');
sql($paris, "select braid.enable_subscription('$way')");
arrived('former names', 'names');

# Pieces.
alter_running($paris, $way, q[split_transactions_above => 500]) or die 'not altered';
sql($tokyo, q[
	begin;
	create table pieces (id int primary key, v text);
	insert into pieces select i, 'a' from generate_series(1, 1200) i;
	alter table pieces add column n int default 3;
	insert into pieces select i, 'b', 4 from generate_series(2000, 3200) i;
	update pieces set n = n + 1 where id % 2 = 0;
	commit;
]);
arrived('a transaction in pieces', 'pieces');

sql($paris, "select braid.drop_subscription('$way')");
subscribe($paris, $tokyo, %with, streaming => "'parallel'", two_phase => 'true');

# Prepared: the statement is run once it has committed, and leaves no trace when it is rolled back;
# also if the subscriber is restarted meanwhile.
sql($tokyo, q[
	create table prepared (id int primary key);
	begin; alter table prepared add column a int; insert into prepared values (1, 1); prepare transaction 'one';
	commit prepared 'one';
	begin; alter table prepared add column never int; insert into prepared values (2, 2, 2); prepare transaction 'two';
	insert into item (id, n) values (50, 1);
	rollback prepared 'two';
	begin; insert into prepared values (3, 3); alter table prepared add column b int default 9; create table beside (id int primary key); insert into beside values (1); prepare transaction 'three';
	insert into item (id, n) values (51, 1);
]);
caught_up($paris, $tokyo);
$paris->stop('immediate');
$paris->start;
caught_up($paris, $tokyo);
is(sql($paris, q[select count(*) from item where id > 40]), '2', 'others go on while one that changes the schema is prepared');
is(sql($paris, q[select to_regclass('beside') is null]), 't', 'which is not applied');
sql($tokyo, q[commit prepared 'three'; insert into prepared values (4, 4, 4)]);
arrived('prepared transactions', qw(prepared beside item));

# A parked transaction: a statement about its table waits behind it, and so do changes with the new
# shape; another table goes on.
alter_running($paris, $way, q[on_error => 'park']) or die 'not altered';
sql($tokyo, q[create table held (id int primary key, n int); create table free (id int primary key, n int); insert into held values (1, 1)]);
caught_up($paris, $tokyo);
sql($paris, q[set braid.ddl_replication = off; alter table held add constraint small check (n < 10)]);
sql($tokyo, 'insert into held values (2, 20)');
ok($paris->poll_query_until('postgres', q[select count(*) = 1 from braid.parked_transactions]), 'one is parked');
# By processes for whom the statement is the first that they see of the stream.
disable($paris, $way);
sql($paris, "select braid.enable_subscription('$way')");
sql($tokyo, q[
	alter table held add column v text default 'v';
	update held set v = 'w', n = n + 1 where id = 2;
	insert into held values (3, 3, 'x');
	alter table free add column v text;
	insert into free values (1, 1, 'f');
	begin; create table of_both (id int primary key); alter table held add column late int; insert into of_both values (1); commit;
	insert into of_both values (2);
]);
caught_up($paris, $tokyo);
is(sql($paris, q[select string_agg(state, ' ' order by parked_id) from braid.parked_transactions]), 'failed waiting waiting waiting waiting waiting', 'all that follows a parked transaction waits');
is(sql($paris, q[select string_agg(attname, ' ' order by attnum) from pg_attribute where attrelid = 'held'::regclass and attnum > 0]), 'id n', 'its table has its shape');
is(sql($paris, q[select v from free]), 'f', 'and others are altered');
sql($paris, q[set braid.ddl_replication = off; alter table held drop constraint small; select braid.retry_parked('paris_from_tokyo')]);
ok($paris->poll_query_until('postgres', 'select count(*) = 0 from braid.parked_transactions'), 'they are applied, one after the other') or diag sql($paris, 'select parked_id, state, error, error_hint from braid.parked_transactions');
arrived('after parked transactions', qw(held free of_both));

# A statement that can't be run is parked, and what comes after it waits.
sql($tokyo, q[set braid.ddl_replication = off; create function only_there() returns int language sql as 'select 1']);
sql($tokyo, q[
	alter table held add column computed int default only_there();
	insert into held (id) values (4);
	insert into free values (2, 2, 'g');
]);
caught_up($paris, $tokyo);
is(sql($paris, q[select string_agg(state, ' ' order by parked_id) from braid.parked_transactions]), 'failed waiting', 'a statement that fails is parked');
like(sql($paris, q[select error_context from braid.parked_transactions where state = 'failed']), qr/"DDL" for statement "alter table held add column computed/, 'and named');
is(sql($paris, q[select count(*) from free]), '2', 'others go on');
is(sql($paris, q[select state || ': ' || reason from braid.ddl_log where statement ~ 'computed']), 'failed: function only_there() does not exist', 'braid.ddl_log says so');
$paris->stop('immediate');
$paris->start;
for my $node ($paris, $rome)
{
	sql($node, q[set braid.ddl_replication = off; create function only_there() returns int language sql as 'select 1']);
}
sql($paris, q[select braid.retry_parked('paris_from_tokyo')]);
ok($paris->poll_query_until('postgres', 'select count(*) = 0 from braid.parked_transactions'), 'with what it needs it is run') or diag sql($paris, 'select parked_id, state, error, error_hint from braid.parked_transactions');
arrived('after a parked statement', qw(held free));
is(sql($paris, q[select state from braid.ddl_log where statement ~ 'computed']), 'applied', 'the attempt that went well takes its place');
is(sql($paris, q[select count(*) - count(distinct ddl_id) from braid.ddl_log]), '0', 'each statement once');
is(sql($rome, q[select count(*) from braid.ddl_log]), sql($paris, q[select count(*) from braid.ddl_log]), 'as many at the end of the chain');
all_stream($paris, $rome);
done_testing();
