# Schema changes are run at the other node, at their place among the changes, by their role and
# under its settings. They are rolled back with their transaction or savepoint, and stay on their
# node if the session is set so.

use strict;
use warnings;

use Braid;
use Ddl;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($tokyo, $paris) = my @nodes = ddl_nodes([qw(tokyo paris)], setup => q[
	create role planner login; create role nobody_there; grant create on schema public to planner;
]);

# A table and its rows, in one transaction.
sql($tokyo, q[
	begin;
	create table a (id serial primary key, note text default 'none');
	insert into a (note) values ('one'), (default);
	alter table a add column n int not null default 7;
	insert into a (note, n) values ('three', 3);
	commit;
	insert into a (note, n) values ('four', 4);
]);
converged(@nodes);
same_schema('a table', @nodes);
is(sql($paris, 'select string_agg(note || n, \' \' order by id) from a'), 'one7 none7 three3 four4', 'rows before and after each statement');
is(sql($paris, q[select state from braid.subscription_tables where relation = 'a'::regclass]), 'ready', 'part of the subscription, without a copy');
is(sql($tokyo, q[select state from braid.subscription_tables where relation = 'a'::regclass]), 'ready', 'at its own node too');
is(ddl_log($tokyo), 'sent CREATE TABLE, sent ALTER TABLE', 'noted where they were run: a sequence is part of its table');
is(ddl_log($paris), 'applied CREATE TABLE, applied ALTER TABLE', 'and where they were applied');
is(sql($_, 'select count(*) from braid.ddl_message'), '0', 'nothing is left of it on ' . $_->name) for @nodes;

# The other direction, at once.
sql($paris, q[alter table a add column back int; update a set back = id; create index a_back on a (back)]);
converged(@nodes);
same_schema('a column and an index', @nodes);
same_tables(\@nodes, 'a');
is(sql($tokyo, 'select sum(back) from a'), '10', 'rows come under the new shape');

# Rolled back statements are not sent.
sql($tokyo, q[
	begin; create table gone (id int primary key); rollback;
	begin; savepoint s; create table gone (id int primary key); rollback to s; create table stays (id int primary key); insert into stays values (1); commit;
	do $$ begin
		begin
			create table gone (id int primary key);
			raise exception 'no';
		exception when raise_exception then null;
		end;
		execute 'create table in_block (id int primary key); comment on table in_block is ''second of a string''';
	end $$;
]);
converged(@nodes);
same_schema('roll back, savepoints, blocks', @nodes);
is(sql($paris, q[select to_regclass('gone') is null and to_regclass('stays') is not null]), 't', 'what was rolled back is not there');
is(sql($paris, q[select statement from braid.ddl_log where command_tag = 'COMMENT']), q[comment on table in_block is 'second of a string'], 'a statement by itself');

# Statements of several in one string.
sql($tokyo, q[create table first (id int primary key);  alter table first add x int  ; insert into first values (1, 2)]);
converged(@nodes);
is(sql($paris, q[select statement from braid.ddl_log where 'public.first' = any (tables) and command_tag = 'ALTER TABLE']), 'alter table first add x int', 'the text of one statement');
same_tables(\@nodes, 'first');

# CREATE TABLE AS and SELECT INTO: the shape as a statement, the rows as rows. A function that is
# called meanwhile has a statement of its own.
sql($tokyo, q[
	create function makes() returns int language plpgsql volatile as $$ begin create table made_inside (id int primary key); return 5; end $$;
	create table as_query with (fillfactor = 70) as select g as id, random() as r, 'x'::varchar(10) collate "C" as v from generate_series(1, 20) g;
	select id, r into into_query from as_query where id < 5;
	create table as_function as select makes() as m;
	create unlogged table unlogged_query as select 1 as a;
	create materialized view mv as select count(*) from as_query;
]);
converged(@nodes);
same_schema('tables of queries', @nodes);
same_tables(\@nodes, qw(as_query into_query as_function mv));
is(sql($paris, 'select count(distinct r) from as_query'), '20', 'values that no other node would have made');

# The role, its search path and its settings; none of them stays set.
sql($tokyo, q[
	create schema other; grant all on schema other to planner;
	set role planner;
	set search_path = other, public;
	set datestyle = 'SQL, DMY';
	create table planned (id int primary key, d date default '03/04/2020');
	insert into planned values (1);
]);
converged(@nodes);
same_schema('a role, a search path and a date style', @nodes);
is(sql($paris, q[select relowner::regrole || ' ' || relnamespace::regnamespace from pg_class where relname = 'planned']), 'planner other', 'owner and schema');
is(sql($paris, q[insert into other.planned values (2); select min(d)::text || max(d) from other.planned]), '2020-04-032020-04-03', 'a constant is read as at its node');

# Rights: a setting for superusers; no other role writes what is sent.
like(raised($tokyo, 'set role planner; set braid.ddl_replication = off'), qr/permission denied to set parameter/, 'not for everybody');
like(raised($tokyo, q[set role planner; insert into braid.ddl_message values ('00')]), qr/permission denied/, 'nor is the table of messages');
sql($tokyo, q[
	set role planner;
	select pg_logical_emit_message(true, 'braid.ddl', 'drop table a');
]);
converged(@nodes);
is(sql($paris, q[select to_regclass('a') is not null]), 't', 'a message of this name is none of ours');
sql($tokyo, q[set braid.ddl_replication = off; create table only_here (id int primary key)]);
sql($tokyo, q[create temp table t1 (id int); create temp view v1 as select 1; create table t2 (id int); create temp table t3 (id int); drop table t2, t3; create index on t1 (id); drop table t1 cascade]);
sql($tokyo, q[create role somebody password 'secret'; create publication more for table a; drop publication more; vacuum a; analyze a]);
converged(@nodes);
is(sql($paris, q[select coalesce(to_regclass('only_here'), to_regclass('t2'))::text is null]), 't', 'what stays on its node');
is(sql($paris, q[select count(*) from braid.ddl_log where statement ~* 'secret|publication|temp|t1|only_here']), '0', 'and is not told');
is(sql($paris, q[select statement from braid.ddl_log where command_tag = 'DROP TABLE']), 'DROP TABLE "t2"', 'a list with a temporary table');
sql($tokyo, q[set braid.ddl_replication = off; drop table only_here]);
all_stream(@nodes);
same_schema('at the end', @nodes);

# A missing role: the subscription stops, reports it, and goes on when the role exists.
sql($tokyo, q[set braid.ddl_replication = off; create role late; grant create on schema public to late; reset braid.ddl_replication; set role late; create table of_late (id int primary key)]);
$paris->poll_query_until('postgres', q[select last_error is not null from braid.subscription_status], 't') or die 'no error';
my $status = status($paris, 'paris_from_tokyo');
like($status->{last_error}, qr/role "late" .* does not exist here/, 'a missing role');
like($status->{error_hint}, qr/CREATE ROLE "late"/, 'with a hint');
like(sql($paris, 'select error_context from braid.subscription_status'), qr/"DDL" for statement "create table of_late/, 'the statement is named');
sql($paris, q[set braid.ddl_replication = off; create role late; grant create on schema public to late; select braid.enable_subscription('paris_from_tokyo')]);
converged(@nodes);
same_schema('after the role was made', @nodes);

# A statement that fails here: done by hand, it counts as done.
sql($paris, q[set braid.ddl_replication = off; create table taken (id int primary key, other text)]);
sql($tokyo, q[create table taken (id int primary key, x int); insert into taken values (1, 2)]);
$paris->poll_query_until('postgres', q[select last_error is not null from braid.subscription_status], 't') or die 'no error';
like(sql($paris, 'select last_error from braid.subscription_status'), qr/table "public.taken" does not have the shape here/, 'another table has the name');
is(sql($paris, q[select string_agg(state || ': ' || reason, ' ') from braid.ddl_log where 'public.taken' = any (tables)]),
	'failed: table "public.taken" does not have the shape here that a statement from the provider was made for', 'and is in braid.ddl_log as failed');
like(sql($paris, 'select error_detail from braid.subscription'), qr/create table taken \(id int primary key, x int\)/, 'the statement is shown');
sql($paris, q[set braid.ddl_replication = off; alter table taken drop other, add x int; select braid.enable_subscription('paris_from_tokyo')]);
converged(@nodes);
is(sql($paris, q[select state from braid.ddl_log where 'public.taken' = any (tables)]), 'done already', 'done by hand');
same_tables(\@nodes, 'taken');
all_stream(@nodes);

# A subscription that does not ask for it.
sql($paris, q[select braid.alter_subscription('paris_from_tokyo', replicate_ddl => false)]);
sql($tokyo, 'create table unasked (id int primary key)');
converged(@nodes);
is(sql($paris, q[select to_regclass('unasked') is null]), 't', 'a subscription without it');

done_testing();
