# Errors of PostgreSQL and of users' code pass through the library unchanged, in each database of a
# server that loads it: compared with a server that does not. Functions that run users' code return
# all fields of the user's error.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $plain = PostgreSQL::Test::Cluster->new('plain');
$plain->init;
$plain->start;
my $node = new_node('tokyo', publication => '');
$node->safe_psql('postgres', 'create database other');

my $setup = q[
	create table t (id int primary key, v int constraint positive check (v > 0), w text not null default 'w');
	create table twice (v int);
	insert into twice values (1), (1);
	create table child (id int references t deferrable initially deferred);
	create domain short as text constraint brief check (length(value) < 3);
	create table holder (s text);
	insert into holder values ('long');
	create procedure fails() language plpgsql as $$ begin insert into t values (1, -1); end $$;
	create function on_ddl() returns event_trigger language plpgsql as $$ begin if tg_tag = 'CREATE SEQUENCE' then raise exception 'no sequences' using schema = 's', table = 't', column = 'c', datatype = 'd', constraint = 'k', hint = 'h', detail = 'd'; end if; end $$;
	create event trigger on_ddl on ddl_command_start execute function on_ddl();
];
my %fails = (
	'a type that is missing' => 'create table bad (a int, b nonsense)',
	'a syntax error' => 'create tble bad ()',
	'a syntax error in a body' => 'create function f() returns int language plpgsql as $$ begin return 1 +; end $$',
	'an error in an SQL body' => 'create function f() returns int language sql as $$ select missing from t $$',
	'COPY' => "copy t (id, v) from stdin;\n1\t1\n2\tx\n\\.\n",
	'COPY of a row that a constraint forbids' => "copy t (id, v) from stdin;\n1\t-1\n\\.\n",
	'a unique index' => 'create unique index once on twice (v)',
	'a constraint that is added' => 'alter table twice add constraint large check (v > 1)',
	'a column that is altered' => 'alter table holder alter column s type int using s::int',
	'a domain' => 'alter table holder alter column s type short',
	'a procedure' => 'call fails()',
	'a block' => 'do $$ begin perform 1 / 0; end $$',
	'a constraint at commit' => 'begin; insert into child values (7); commit',
	'a constraint that is checked at once' => 'begin; insert into child values (7); set constraints all immediate; rollback',
	'what others depend on' => 'drop table t',
	'an event trigger' => 'create sequence s',
	'an EXPLAIN' => 'explain analyze insert into t values (1, -1)',
	'a prepared statement' => 'prepare p as insert into t values (1, $1); execute p(-1)',
	'a cursor' => 'begin; declare c cursor for select 1 / (id - 1) from generate_series(1, 2) id; fetch all from c; rollback',
	'a subtransaction' => 'begin; savepoint a; alter table t drop column missing; rollback to a; select 1; rollback',
	'a prepared transaction that is missing' => q[commit prepared 'missing'],
	'a database that is missing' => 'drop database missing',
	'a setting' => q[set work_mem = 'x'],
	'fields in PL/pgSQL' => q[do $$
		declare constraint_is text; table_is text; schema_is text; column_is text; context_is text; detail_is text;
		begin
			execute 'alter table twice add constraint large check (v > 1)';
		exception when others then
			get stacked diagnostics constraint_is = constraint_name, table_is = table_name, schema_is = schema_name, column_is = column_name,
				context_is = pg_exception_context, detail_is = pg_exception_detail;
			raise notice '% % % % % %', constraint_is, table_is, schema_is, column_is, context_is, detail_is;
		end $$],
);

# All messages of psql about a statement.
sub says
{
	my ($server, $database, $sql) = @_;
	my ($out, $err);
	$server->psql($database, "\\set VERBOSITY verbose\n\\set SHOW_CONTEXT always\n$sql\n;", stdout => \$out, stderr => \$err, on_error_stop => 0);
	$err =~ s/^psql:<stdin>:\d+: //mg;
	return "$out\n$err";
}

$_->[0]->safe_psql($_->[1], $setup) for [ $plain, 'postgres' ], [ $node, 'postgres' ], [ $node, 'other' ];
for my $what (sort keys %fails)
{
	my $right = says($plain, 'postgres', $fails{$what});
	like($right, qr/ERROR|NOTICE/, "$what fails");
	is(says($node, 'other', $fails{$what}), $right, "$what: the error of a server that does not load the library");
	is(says($node, 'postgres', $fails{$what}), $right, "$what: and where the extension is");
}

# Functions that run users' code.
$node->safe_psql('postgres', q[
	create table item (id int primary key, v int not null, constraint small check (v < 100));
	create table log (id int constraint logged unique);
	insert into log values (1);
	create function note_it() returns trigger language plpgsql as $$
	begin
		if new.id = 1 then insert into public.log values (new.id); end if;
		if new.id = 2 then perform 1 / 0; end if;
		return new;
	end $$;
	create trigger note_it before insert on item for each row execute function note_it();
	alter table item enable always trigger note_it;
	create function decide(local item, remote item, before item, info braid.conflict) returns item language plpgsql as $$
	begin
		insert into public.log values (1);
		return local;
	end $$;
	select braid.set_conflict_resolution('item', 'insert_exists', 'function', 'decide');
	insert into item values (3, 3);
]);
my $lsn = 1;
sub ingest
{
	my ($id, $v) = @_;
	return sprintf q[braid.ingest('{"operation": "insert", "transaction": {"lsn": "0/%X", "commit_time": "2024-01-01T00:00:00Z"}, "schema": {"namespace": "public", "table": "item", "columns": [{"name": "id", "type": "int4"}, {"name": "v", "type": "int4"}]}, "after": {"id": %d, "v": %d}}', 'shop')],
	  $lsn++, $id, $v;
}

# The diagnostics that PL/pgSQL gets of an expression's error.
sub diagnostics
{
	my ($expression) = @_;
	my ($out, $err);
	$node->psql('postgres', qq[do \$do\$
		declare s text; c text; t text; x text; n text;
		begin
			perform $expression;
		exception when others then
			get stacked diagnostics s = returned_sqlstate, c = constraint_name, t = table_name, n = schema_name, x = pg_exception_context;
			raise notice '% % % % %', s, n, t, c, x;
		end \$do\$], stderr => \$err);
	return $err;
}
my $unique = diagnostics(ingest(1, 1));
like($unique, qr/NOTICE:  23505 public log logged /, 'the constraint that a trigger meets in braid.ingest');
like($unique, qr/PL\/pgSQL function (?:public\.)?note_it\(\) line 3 at SQL statement/, 'and the line of the trigger');
like($unique, qr/SQL statement "insert into public\.log values \(new\.id\)"/, 'and its statement');
is(() = $unique =~ /line 3 at SQL statement/g, 1, 'once');
like($unique, qr/inline_code_block line \d+ at PERFORM/, 'and the caller');
like(diagnostics(ingest(2, 1)), qr/22012 .*line 4 at PERFORM/s, 'an error of the trigger itself');
my $check = diagnostics(ingest(4, 100));
like($check, qr/23514 public item small /, "the table's own constraint");
my $conflict = diagnostics(ingest(3, 4));
like($conflict, qr/NOTICE:  38000 public log logged .*function (?:public\.)?decide\(.*\) line 3 at SQL statement/s, 'a conflict function');
is(says($node, 'postgres', 'select 1'), "1\n", 'a session goes on');

# The output plugin hashes keys: with the function of a user's type.
$node->safe_psql('postgres', q[
	create type pair as (a int, b int);
	create function pair_cmp(pair, pair) returns int language sql immutable as $$ select case when $1.a < $2.a then -1 when $1.a > $2.a then 1 else 0 end $$;
	create function pair_eq(pair, pair) returns boolean language sql immutable as $$ select $1.a = $2.a $$;
	create function pair_hash(pair) returns int language sql immutable as $$ select $1.a $$;
	create function pair_hash_extended(pair, bigint) returns bigint language plpgsql immutable as $$
	begin
		if $1.b = 13 then
			raise exception 'not this pair' using errcode = '22023', schema = 's', table = 't', column = 'c', datatype = 'd', constraint = 'k', detail = 'why', hint = 'what';
		end if;
		return $1.a;
	end $$;
	create operator === (function = pair_eq, leftarg = pair, rightarg = pair, commutator = ===, hashes, merges);
	create operator class pair_btree default for type pair using btree as operator 3 ===, function 1 pair_cmp(pair, pair);
	create operator class pair_hashes default for type pair using hash as operator 1 ===, function 1 pair_hash(pair), function 2 pair_hash_extended(pair, bigint);
	create table odd (k pair primary key, v int);
	create publication odd for table odd;
	select pg_create_logical_replication_slot('odd', 'braid');
	insert into odd values (row(1, 1), 1), (row(2, 13), 2);
]);
my $changes = q[(select count(*) from pg_logical_slot_get_binary_changes('odd', null, null, 'proto_version', '1', 'publication_names', 'odd'))];
my $decoding = diagnostics($changes);
like($decoding, qr/NOTICE:  22023 s t k PL\/pgSQL function (?:public\.)?pair_hash_extended\((?:public\.)?pair,bigint\) line 4 at RAISE/, 'the output plugin: fields and the line of the function');
like($decoding, qr/slot "odd", output plugin "braid", in the change callback/, 'and what PostgreSQL says of the callback');
is(() = $decoding =~ /line 4 at RAISE/g, 1, 'once');
is(() = $decoding =~ /in the change callback/g, 1, 'that too');
# A client has the error before its session lets go of the slot.
ok($node->poll_query_until('postgres', q[select not active from pg_replication_slots where slot_name = 'odd']), 'the slot is free again');
like(says($node, 'postgres', "select $changes"), qr/DETAIL:  why\nHINT:  what\nCONTEXT: .*\nSCHEMA NAME:  s\nTABLE NAME:  t\nCOLUMN NAME:  c\nDATATYPE NAME:  d\nCONSTRAINT NAME:  k\n/s, 'all fields reach a client');
ok($node->poll_query_until('postgres', q[select not active from pg_replication_slots where slot_name = 'odd']), 'the slot is free then too');

done_testing();
