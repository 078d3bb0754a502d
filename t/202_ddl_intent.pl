# Statements that can't run in a transaction, or take long, are run by each node by itself, and the
# stream goes on meanwhile. They fail, are cancelled, interrupted, killed and retried by themselves.
# Statements that depend on them run after them.

use strict;
use warnings;

use Braid;
use Ddl;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($tokyo, $paris) = my @nodes = ddl_nodes([qw(tokyo paris)], conf => 'braid.retry_interval = 100ms');

# The state of the intent whose statement matches comes to be that.
sub comes_to
{
	my ($state, $match, $what) = @_;
	my $sql = qq[select string_agg(state, ' ') from braid.ddl_log where statement ~ '$match'];
	ok(wait_until(sub { sql($paris, $sql) eq $state }, 120), $what // "$match: $state")
	  or diag sql($paris, 'select state, attempts, reason, statement from braid.ddl_log where attempts is not null');
	return;
}

sub id_of { my ($match) = @_; return sql($paris, "select ddl_id from braid.ddl_log where statement ~ '$match' order by recorded_at limit 1"); }

# A snapshot that CREATE INDEX CONCURRENTLY waits for at paris, until the session ends.
sub hold_snapshot
{
	my $session = $paris->background_psql('postgres');
	$session->query_safe('begin isolation level repeatable read; select 1');
	return $session;
}

# A statement that matches waits at paris for one that the node runs by itself.
sub is_awaiting
{
	my ($match, $what) = @_;
	return ok(wait_until(sub { slurp_file($paris->logfile) =~ /waits for an earlier one that this node runs by itself\n(?:[^\n]*\n){2}[^\n]*for statement "$match/ }, 20), $what);
}

# The worker at paris waits for another session's snapshot.
sub is_blocked
{
	my ($what) = @_;
	return ok(wait_until(sub { sql($paris, q[select count(*) from pg_stat_activity where backend_type = 'braid intent' and wait_event_type = 'Lock']) eq '1' }, 120), $what);
}

my $n = 1000;
sub rows_flow
{
	my ($what) = @_;
	$n++;
	sql($tokyo, "insert into item (id, k) values ($n, $n)");
	ok(wait_until(sub { sql($paris, "select count(*) from item where id = $n") eq '1' }, 120), "rows go on coming: $what");
	return;
}

sql($tokyo, q[
	create table item (id int primary key, k int, v int default 0);
	insert into item select g, g from generate_series(1, 100) g;
]);
converged(@nodes);

# Under writes of both.
my $script = PostgreSQL::Test::Utils::tempdir() . '/write.sql';
append_to_file($script, "\\set k random(1, 100)\nupdate item set v = v + 1 where id = :k;\n");
my @bench = map { start_pgbench($_, '-c', '2', '-T', '6', '-f', $script) } @nodes;
sql($tokyo, 'create index concurrently item_k on item (k)');
sql($tokyo, 'create index concurrently on item (v, k)');
sql($tokyo, 'create index concurrently if not exists item_k on item (k)');
comes_to('done', '^create index concurrently item_k', 'an index is created here, too');
comes_to('done', 'item_v_k_idx', 'and one whose name PostgreSQL has chosen');
comes_to('done', 'if not exists', 'and one that is there');
is(sql($tokyo, q[select string_agg(distinct state, ' ') from braid.ddl_log where statement ~ '^(create|reindex)' and statement ~ 'concurrently' and node = 'tokyo']), 'done', 'done at its own node');
is(sql($tokyo, q[select count(*) from braid.ddl_log where attempts is not null and node = 'tokyo']), '0', 'where it was run by a session');
sql($paris, 'reindex index concurrently item_pkey');
finish_pgbench($_) for @bench;
converged(@nodes);
same_schema('indexes', @nodes);
same_tables(\@nodes, 'item');
is(sql($paris, q[select count(*) from pg_index where not indisvalid]), '0', 'all are valid');

# Others.
sql($tokyo, 'drop index concurrently item_k');
comes_to('done', '^drop index concurrently item_k', 'an index is dropped');
for my $statement ('reindex table item', 'reindex table concurrently item', 'reindex schema public', 'vacuum (full, analyze) item', 'vacuum full item', 'cluster item using item_pkey')
{
	my $before = sql($paris, q[select pg_relation_filenode('item_pkey')]);
	sql($tokyo, $statement);
	(my $match = $statement) =~ s/([()])/./g;
	comes_to('done', "^$match\$", $statement);
	isnt(sql($paris, q[select pg_relation_filenode('item_pkey')]), $before, "$statement: it was run here");
}
sql($tokyo, 'begin; alter table item add constraint k_small check (k < 1000000) not valid; commit');
sql($tokyo, 'alter table item validate constraint k_small');
comes_to('done', 'validate constraint', 'a constraint is validated');
is(sql($paris, q[select convalidated from pg_constraint where conname = 'k_small']), 't', 'here');
sql($tokyo, q[
	create table parts (id int primary key) partition by range (id);
	create table part_1 partition of parts for values from (1) to (10); create table part_2 partition of parts for values from (10) to (20);
]);
sql($tokyo, 'alter table parts detach partition part_2 concurrently');
comes_to('done', 'detach partition', 'a partition is detached');
converged(@nodes);
same_schema('all kinds', @nodes);

# Statements that stay on their node.
my $count = sql($tokyo, 'select count(*) from braid.ddl_log');
sql($tokyo, $_) for 'vacuum item', 'analyze item', 'vacuum', 'reindex database postgres', 'reindex table pg_class', 'create temp table t (id int primary key)';
is(sql($tokyo, 'select count(*) from braid.ddl_log'), $count, 'other maintenance is the own matter of each node');

# A duplicate that only paris has: rows with an origin are not passed on.
sql($paris, q[select pg_replication_origin_create('by_hand')]);
sql($paris, q[begin; select pg_replication_origin_session_setup('by_hand'); insert into item (id, k) values (500, 1); commit; select pg_replication_origin_session_reset()]);
sql($tokyo, 'create unique index concurrently item_u on item (k)');
comes_to('failed', 'item_u', 'a duplicate here lets it fail');
like(sql($paris, q[select reason from braid.ddl_log where statement ~ 'item_u']), qr/could not create unique index "item_u"/, 'braid.ddl_log says why');
rows_flow('after a failure');
all_stream(@nodes);
sql($paris, q[begin; select pg_replication_origin_session_setup('by_hand'); delete from item where id = 500; commit; select pg_replication_origin_session_reset()]);
sql($paris, sprintf q[select braid.retry_ddl('%s')], id_of('item_u'));
comes_to('done', 'item_u', 'without the duplicate it is created');
ok(sql($paris, q[select attempts > 1 from braid.ddl_log where statement ~ 'item_u']) eq 't', 'in another attempt');
same_schema('repaired', @nodes);

# The worker is killed, and the server restarted, while it waits.
my $holder = hold_snapshot();
sql($tokyo, 'create index concurrently item_killed on item (v)');
is_blocked('it waits for a snapshot');
rows_flow('while it waits');
is(sql($paris, q[select state from braid.ddl_log where statement ~ 'item_killed']), 'running', 'and is shown');
my ($pid) = worker_pids($paris, 'braid intent');
ok(kill_process($paris, $pid), 'killed');
eval { $holder->quit };
comes_to('done', 'item_killed', 'the next worker creates it');
$holder = hold_snapshot();
sql($tokyo, 'create index concurrently item_restarted on item (v)');
is_blocked('it waits again');
$paris->restart;
eval { $holder->quit };
comes_to('done', 'item_restarted', 'after a restart it is created');
converged(@nodes);
same_schema('killed and restarted', @nodes);

# Cancelled, and tried again.
$holder = hold_snapshot();
sql($tokyo, 'create index concurrently item_cancelled on item (v)');
is_blocked('it waits once more');
my $id = id_of('item_cancelled');
sql($paris, "select braid.cancel_ddl('$id')");
is(sql($paris, "select state from braid.ddl_log where ddl_id = '$id'"), 'cancelled', 'cancelled');
$holder->quit;
ok(wait_until(sub { sql($paris, q[select to_regclass('item_cancelled') is null]) eq 't' }, 60), 'what it has left is dropped');
sql($paris, "select braid.cancel_ddl('$id')");
sql($paris, "select braid.retry_ddl('$id')");
comes_to('done', 'item_cancelled', 'it can be tried again');
like(raised($paris, "select braid.cancel_ddl('$id')"), qr/is done and cannot be cancelled/, 'what is done stays');
like(raised($tokyo, 'select braid.retry_ddl(gen_random_uuid())'), qr/there is no statement/, 'what is not known is an error');

# Statements that come later.
$holder = hold_snapshot();
sql($tokyo, 'create index concurrently item_dropped on item (v)');
is_blocked('it waits');
sql($tokyo, 'drop index item_dropped');
comes_to('cancelled', '^create index concurrently item_dropped', 'an index that is dropped is not created');
ok(wait_until(sub { sql($paris, q[select count(*) from braid.ddl_log where statement = 'drop index item_dropped']) eq '1' }, 60), 'and its drop goes on');
is(sql($paris, q[select to_regclass('item_dropped') is null]), 't', 'it is gone');
sql($tokyo, 'create index concurrently item_waits on item (v)');
is_blocked('the next one waits');
sql($tokyo, 'alter table item add column extra int default 7');
ok(wait_until(sub { sql($paris, q[select state from braid.ddl_log where statement ~ 'extra']) eq 'applied' }, 60), 'another statement about the table does not wait')
  or diag sql($paris, q[select state, reason, statement from braid.ddl_log order by recorded_at desc limit 5]);
rows_flow('after the statement');
sql($tokyo, 'create unique index concurrently item_two on item (k, id)');
sql($tokyo, 'alter table item add constraint item_two unique using index item_two');
ok(wait_until(sub { sql($paris, q[select count(*) from braid.ddl_log where statement ~ 'index concurrently item_two' and state in ('waiting', 'running')]) eq '1' }, 60), 'an index is awaited');
is(sql($paris, q[select count(*) from pg_constraint where conname = 'item_two']), '0', 'by a constraint of it');
sql($tokyo, 'create index concurrently item_old on item (v)');
sql($tokyo, 'alter index item_old rename to item_new');
$holder->quit;
comes_to('done', 'item_waits', 'then it is created');
comes_to('done', 'index concurrently item_two', 'and that one');
ok(wait_until(sub { sql($paris, q[select count(*) from pg_constraint where conname = 'item_two']) eq '1' }, 60), 'so the constraint is added');
comes_to('done', 'index concurrently item_old', 'one that was renamed while it waited, too');
ok(wait_until(sub { sql($paris, q[select to_regclass('item_new') is not null and to_regclass('item_old') is null]) eq 't' }, 60), 'and has its new name');
rows_flow('in the end');
converged(@nodes);
same_schema('in the end', @nodes);
same_tables(\@nodes, 'item');
all_stream(@nodes);

# Statements about a table that is dropped before they are run are not run for another one of its
# name; and one about a table that gets another name comes first.
sql($tokyo, 'create table brief (id int primary key, k int); create table named (id int primary key, k int, constraint named_k check (k > 0) not valid)');
converged(@nodes);
$holder = hold_snapshot();
sql($tokyo, 'create index concurrently item_busy on item (v)');
is_blocked('the worker is busy');
sql($tokyo, 'create index concurrently brief_k on brief (k)');
sql($tokyo, 'alter table named validate constraint named_k');
sql($tokyo, 'drop table brief; create table brief (id int primary key, k text); create schema after_brief');
ok(wait_until(sub { sql($paris, q[select to_regnamespace('after_brief') is not null]) eq 't' }, 60), 'another table has the name of one that was dropped');
sql($tokyo, 'alter table named rename to renamed');
is_awaiting('alter table named rename', 'a new name waits');
is(sql($paris, q[select to_regclass('renamed') is null]), 't', 'for what is said about the table');
$holder->quit;
comes_to('done', 'item_busy', 'the worker goes on');
comes_to('skipped', 'brief_k', 'the other table gets no index');
comes_to('done', 'validate constraint named_k', 'the constraint is validated under its name');
converged(@nodes);
same_schema('tables that are gone, or have other names', @nodes);
sql($tokyo, 'drop index item_busy; drop table brief, renamed; drop schema after_brief');
converged(@nodes);

# A partition that is still to be detached: what comes later about its parent waits.
sql($tokyo, q[
	create table years (at int primary key) partition by range (at); create table year_1 partition of years for values from (1) to (2);
	create table year_2 partition of years for values from (2) to (3); insert into years values (1), (2);
]);
converged(@nodes);
$holder = hold_snapshot();
sql($tokyo, 'create index concurrently item_busy on item (v)');
is_blocked('the worker is busy');
sql($tokyo, 'alter table years detach partition year_1 concurrently');
sql($tokyo, 'create table year_1_anew partition of years for values from (1) to (2); alter table years add column n int; insert into years values (1, 1)');
sql($tokyo, 'alter table years detach partition year_2 concurrently');
sql($tokyo, 'drop table years');
is_awaiting('create table year_1_anew', 'a statement about the parent waits');
$holder->quit;
converged(@nodes);
same_schema('partitions that were detached are there', @nodes);
is(sql($paris, 'select (select array_agg(at) from year_1) || (select array_agg(at) from year_2)'), '{1,2}', 'with their rows');
sql($tokyo, 'drop index item_busy; drop table year_1, year_2');
converged(@nodes);

# Statements that name an index and leave its definition as it is wait for it.
$holder = hold_snapshot();
sql($tokyo, 'create table months (at int primary key) partition by range (at); create table month_1 partition of months for values from (1) to (2); create index months_at on only months (at)');
sql($tokyo, 'create index concurrently item_busy on item (v)');
is_blocked('the worker is busy');
sql($tokyo, 'create index concurrently month_1_at on month_1 (at)');
sql($tokyo, 'alter index months_at attach partition month_1_at');
is_awaiting('alter index months_at attach', 'an index that is to be attached is awaited');
$holder->quit;
converged(@nodes);
same_schema('an index is attached', @nodes);
is(sql($paris, q[select indisvalid from pg_index where indexrelid = 'months_at'::regclass]), 't', 'so that of the parent is valid');
sql($tokyo, 'drop index item_busy; drop table months');
converged(@nodes);

# A schema that is gone.
$holder = hold_snapshot();
sql($tokyo, 'create schema brief; create table brief.t (id int primary key)');
sql($tokyo, 'create index concurrently item_busy on item (v)');
is_blocked('the worker is busy again');
sql($tokyo, 'reindex schema brief');
sql($tokyo, 'drop schema brief cascade; create schema after_brief');
ok(wait_until(sub { sql($paris, q[select to_regnamespace('after_brief') is not null]) eq 't' }, 60), 'a schema is gone');
$holder->quit;
comes_to('skipped', 'reindex schema brief', 'its indexes are as well');
sql($tokyo, 'drop index item_busy; drop schema after_brief');
converged(@nodes);

# An index that could not be created there, until REINDEX makes it valid.
sql($tokyo, 'create table twice (id int primary key, k int); insert into twice values (1, 1), (2, 1)');
like(raised($tokyo, 'create unique index concurrently twice_k on twice (k)'), qr/could not create unique index/, 'an index that fails at its own node');
sql($tokyo, 'alter index twice_k rename to twice_once; delete from twice where id = 2');
sql($tokyo, 'reindex index concurrently twice_once');
comes_to('done', 'UNIQUE INDEX CONCURRENTLY twice_once', 'it is created here when it is valid there');
converged(@nodes);
same_schema('an index that was repaired', @nodes);
all_stream(@nodes);

# As the role that has run it, with its rights here.
sql($_, 'set braid.ddl_replication = off; create role keeper; create role stranger; grant create on schema public to keeper, stranger') for @nodes;
sql($tokyo, 'create table owned (id int primary key, k int); alter table owned owner to keeper');
sql($tokyo, "set role keeper;\n$_") for 'create index concurrently owned_k on owned (k)', 'reindex table concurrently owned', 'vacuum full owned';
comes_to('done', $_, "$_, by a role that is no superuser") for 'concurrently owned_k', 'reindex table concurrently owned', 'vacuum full owned';
is(sql($paris, q[select pg_get_userbyid(relowner) from pg_class where relname = 'owned_k']), 'keeper', 'the index is of the owner of the table');
converged(@nodes);
sql($paris, 'set braid.ddl_replication = off; alter table owned owner to stranger');
sql($tokyo, "set role keeper;\ncreate index concurrently owned_id on owned (id, k)");
comes_to('failed', 'owned_id', 'a role that may not do it here');
like(sql($paris, q[select reason from braid.ddl_log where statement ~ 'owned_id']), qr/must be owner of table owned/, 'is told so');
sql($paris, 'set braid.ddl_replication = off; alter table owned owner to keeper');
comes_to('done', 'owned_id', 'with the right it is done');
same_schema('by other roles', @nodes);

# The statement of PostgreSQL 19 that does what VACUUM FULL and CLUSTER do.
SKIP:
{
	skip('REPACK came with PostgreSQL 19', 6) if $tokyo->pg_version < 19;
	for my $statement ('repack item', 'repack item using index item_pkey', 'repack (concurrently) item')
	{
		my $before = sql($paris, q[select pg_relation_filenode('item')]);
		sql($tokyo, $statement);
		(my $match = $statement) =~ s/([()])/./g;
		comes_to('done', "^$match\$", $statement);
		isnt(sql($paris, q[select pg_relation_filenode('item')]), $before, "$statement: it was run here");
	}
	converged(@nodes);
	same_tables(\@nodes, 'item');
}

# Along a chain.
my $rome = new_node('rome', conf => "braid.ddl_replication = on\nbraid.retry_interval = 100ms\n");
sql($_, 'set braid.ddl_replication = off; create schema chained') for @nodes, $rome;
sql($paris, 'create publication onward for tables in schema chained');
subscribe($rome, $paris, origin => "'any'", replicate_ddl => 'true', copy_data => 'false', publications => "'{onward}'");
sql($tokyo, 'create table chained.t (id int primary key, k int); insert into chained.t select g, g from generate_series(1, 20) g');
sql($tokyo, 'create index concurrently chain_k on chained.t (k)');
for my $node ($paris, $rome)
{
	ok(wait_until(sub { sql($node, q[select count(*) from pg_index where indexrelid = to_regclass('chained.chain_k') and indisvalid]) eq '1' }, 60), 'it is created on ' . $node->name)
	  or diag sql($node, 'select state, attempts, reason, statement from braid.ddl_log');
}
is(sql($rome, q[select count(*) from chained.t]), '20', 'rows go along');

done_testing();
