# Code of a table's owner runs with the rights of the owner, whichever process runs it and however:
# an index on an expression is enough to run it. Each function logs the role that it runs as; the
# log says which process it was.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

# The process, and what its session calls itself.
my $conf = "max_worker_processes = 32\nmax_prepared_transactions = 5\nlog_line_prefix = '%b|%a|'\nbraid.orphan_check_interval = 200ms\nbraid.querier_timeout = 5s\nlogical_decoding_work_mem = 64kB\n";
my @nodes = my ($tokyo, $paris) = map { new_node($_, conf => $conf) } qw(tokyo paris);

my $schema = q[
	create role app login;
	grant braid_admin to app;
	create schema app authorization app;
	set session authorization app;
	create function app.saw(place text) returns void language plpgsql as $$
	declare confined text := 'free';
	begin
		-- PostgreSQL 18 with assertions fails at a subtransaction that is rolled back while the checks of a domain are prepared.
		if place like 'domain%' then
			confined := 'confined';
		else
			begin perform set_config('role', current_setting('role'), true); exception when insufficient_privilege then confined := 'confined'; end;
		end if;
		raise log 'identity % % %', place, current_user, confined;
	end $$;
	create function app.mark(place text) returns text immutable language plpgsql as $$ begin perform app.saw(place); return ''; end $$;
	-- What the first report of this had.
	create function app.grab() returns void language plpgsql as $$ begin execute 'alter role app superuser'; exception when others then null; end $$;
	create function app.same(v text) returns text immutable language plpgsql as $$ begin perform app.grab(); return v; end $$;
	create domain app.dom as text check (coalesce(value, '') || app.mark('domain') is not null);
	create type app.mood as enum ('sad', 'ok');
	create function app.as_json(app.mood) returns json immutable language plpgsql as $$ begin perform app.saw('cast'); return '"mood"'; end $$;
	create cast (app.mood as json) with function app.as_json(app.mood);
	create function app.as_text(app.mood) returns text immutable language plpgsql as $$ begin perform app.saw('cast'); return case $1 when 'sad' then 's' else 'o' end; end $$;
	create cast (app.mood as text) with function app.as_text(app.mood);
	create function app.equals(int, int) returns boolean immutable language plpgsql as $$ begin perform app.saw('operator'); return int4eq($1, $2); end $$;
	create operator app.= (leftarg = int, rightarg = int, function = app.equals);
	create type app.pair as (a int, b text);
	create domain app.pairs as app.pair check ((value).b || app.mark('domain_pair') is not null);
	create domain app.doms as app.dom[] check (array_to_string(value, ',') || app.mark('domain_array') is not null);
	create function app.emptied() returns trigger language plpgsql as $$ begin perform app.saw('truncate'); return null; end $$;
	create function app.fire() returns trigger language plpgsql as $$ begin perform app.saw('trigger'); return new; end $$;

	create table app.t (id int primary key, n int, v text, d app.dom, m app.mood, big text, pd app.pairs default '(1,x)', ad app.doms default '{a,b}',
		g text generated always as (v || app.mark('generated')) stored,
		constraint checked check (v || app.mark('check') is not null));
	alter table app.t alter column big set storage external;
	alter table app.t add constraint t_exclusion exclude using gist (int4range(id, id + 1 + length(app.mark('exclusion'))) with &&) where (v || app.mark('exclusion_predicate') is not null);
	create unique index t_further on app.t ((id + length(app.mark('unique')))) where (v || app.mark('unique_predicate') is not null);
	create index t_expression on app.t ((v || app.mark('index')));
	create index t_same on app.t ((v || app.same('')));
	create index t_predicate on app.t (n) where v || app.mark('predicate') is not null;
	create statistics app.t_statistics on (v || app.mark('statistics')), n from app.t;
	create trigger fire before insert or update on app.t for each row when (new.v || app.mark('when') is not null) execute function app.fire();
	alter table app.t enable always trigger fire;
	alter table app.t enable row level security;
	create policy p on app.t using (v || app.mark('policy') is not null);

	create table app.part (id int, v text) partition by range ((id + length(app.mark('partition'))));
	create table app.part_low partition of app.part for values from (0) to (1000);
	create table app.part_high partition of app.part for values from (1000) to (2000);
	create trigger emptied before truncate on app.part_low for each statement execute function app.emptied();
	alter table app.part_low enable always trigger emptied;
	alter table app.part replica identity full;
	alter table app.part_low replica identity full;
	alter table app.part_high replica identity full;
	create index on app.part_low ((v || app.mark('index')));
	create index on app.part_high ((v || app.mark('index')));

	create table app.parent (id int primary key, m app.mood, v text);
	create index on app.parent ((v || app.mark('index')));
	create rule also as on insert to app.parent do also select app.saw('rule');
	alter table app.parent enable always rule also;
	create table app.child (id int primary key, parent int references app.parent, v text);
	create index on app.child ((v || app.mark('index')));
	-- The question for a large value names the table and the key.
	create table app."per%cent %1$L" (k text primary key, n int, big text);
	alter table app."per%cent %1$L" alter column big set storage external;
	create index on app."per%cent %1$L" ((big || app.mark('index')));
	reset session authorization;
	alter database postgres set search_path = app, public, pg_catalog;
];
on_all($schema, @nodes);
# Columns that the other node does not have get their defaults.
$paris->safe_psql('postgres', q[alter table app.t add column extra text default 'x' || app.mark('default')]);

# New lines of the log: "process place role confined", counted. Lines of sessions of the test and of
# the owner do not count.
my %read = map { $_->name => 0 } @nodes;
my %all;
sub noted
{
	my %seen;
	for my $node (@nodes)
	{
		my $log = slurp_file($node->logfile, $read{ $node->name });
		$read{ $node->name } += length $log;
		while ($log =~ /^([^|\n]*)\|([^|\n]*)\|LOG:  identity (\S+) (\S+) (\S+)$/mg)
		{
			my ($process, $session, $place, $role, $confined) = ($1, $2, $3, $4, $5);
			next if $session =~ /\.pl$|^psql$|^owner$/;
			$process = $session if $process eq 'client backend';
			$seen{"$place $role $confined"}{$process}++;
			$all{$process}{$place}++;
		}
	}
	return \%seen;
}

# Places whose code runs when rows are written.
my @written = qw(index predicate unique unique_predicate exclusion exclusion_predicate check domain domain_pair domain_array trigger when default generated partition);

# One test: all that was noted ran as the owner and confined, and these places were among it.
sub ran_as_owner
{
	my ($what, @places) = @_;
	my $seen = noted();
	my @wrong = grep { !/^\S+ app confined$/ } sort keys %$seen;
	is_deeply([ map { "$_: " . join ', ', sort keys %{ $seen->{$_} } } @wrong ], [], "$what: as the owner only");
	my @missed = grep { my $place = $_; !grep { /^\Q$place\E / } keys %$seen } @places;
	is_deeply(\@missed, [], "$what: code ran");
	is($_->safe_psql('postgres', q[select rolsuper from pg_roles where rolname = 'app']), 'f', "$what: app is no superuser at " . $_->name) for @nodes;
	return;
}

# SQL of the owner, which is not what is tested.
sub own
{
	my ($node, $sql) = @_;
	return $node->safe_psql('postgres', $sql, extra_params => [ '-U', 'app' ], connstr => $node->connstr('postgres') . ' application_name=owner');
}

# SQL by which a superuser calls a function of ours.
sub call
{
	my ($node, $name, $sql) = @_;
	return $node->safe_psql('postgres', $sql, connstr => $node->connstr('postgres') . " application_name=$name");
}

my $rows = q[insert into app.t (id, n, v, d, m, big) select i, 0, 'v', 'd', 'ok', repeat('x', 5000) from generate_series(%d, %d) i];
own($tokyo, sprintf $rows, 1, 50);
my ($odd, $key) = ('app."per%cent %1$L"', q[E'it''s %1$L $1 \\\\ ü']);
own($tokyo, "insert into $odd values ($key, 0, repeat('x', 5000))");
own($tokyo, q[insert into app.part select i, 'v' from generate_series(900, 1100, 10) i; insert into app.parent select i, 'ok', 'p' from generate_series(1, 20) i; insert into app.child select i, i, 'c' from generate_series(1, 20) i]);
noted();

subscribe($paris, $tokyo, on_missing_column => q['ignore'], replicate_ddl => 'true');
ran_as_owner('initial copy', @written);

# Each way to apply.
my $next = 100;
for my $mode (qw(serial parallel batch aggregate))
{
	alter_running($paris, 'paris_from_tokyo', "apply_mode => '$mode'") or fail("$mode: altered");
	own($tokyo, sprintf $rows, $next, $next + 2);
	own($tokyo, "update app.t set n = n + 1, v = 'w' where id < 10");
	own($tokyo, 'delete from app.t where id = ' . ($next + 1));
	own($tokyo, "insert into app.part values (" . ($next + 1) . ", 'new'); update app.part set id = id + 1000, v = 'moved' where id = " . ($next + 1));
	# What comes while tables are open for writing.
	own($paris, "create index late_$mode on app.t ((n::text || app.mark('late_$mode'))); create statistics app.late_$mode on (n::text || app.mark('stat')), id from app.t; alter table app.t add constraint late_$mode check (n::text || app.mark('check_$mode') is not null) not valid");
	# In bulk, and in progress.
	own($tokyo, sprintf $rows, 1000 + $next, 1090 + $next);
	caught_up($paris, $tokyo);
	ran_as_owner($mode, "late_$mode", "check_$mode", @written);
	$next += 100;
}
own($tokyo, 'truncate app.part');
caught_up($paris, $tokyo);
ran_as_owner('truncate', 'truncate');

# Large transactions in each way, and in chunks.
for my $options (map { my $way = $_; map { "streaming => '$way', split_transactions_above => $_" } 0, 40 } qw(off on parallel))
{
	alter_running($paris, 'paris_from_tokyo', $options) or fail("$options: altered");
	own($tokyo, 'begin; ' . sprintf($rows, 3000 + $next, 3090 + $next) . "; update app.t set n = n + 1, v = 'x' where id < 10; insert into app.part values ($next, 'new'); commit");
	caught_up($paris, $tokyo);
	ran_as_owner($options, @written);
	$next += 100;
}

# Prepared transactions, over the connection of a role that is no superuser. It copies a table, too.
$paris->safe_psql('postgres', q[select braid.drop_subscription('paris_from_tokyo')]);
$tokyo->safe_psql('postgres', q[create role reader login replication bypassrls; grant braid_monitor to reader; grant usage on schema app to reader; grant select on all tables in schema app to reader]);
subscribe($paris, $tokyo, dsn => $tokyo->connstr('postgres') . ' user=reader', copy_data => 'false', two_phase => 'true', on_missing_column => q['ignore'], replicate_ddl => 'true');
for my $end ('commit', 'rollback')
{
	own($tokyo, 'begin; ' . sprintf($rows, 3000 + $next, 3090 + $next) . "; update app.t set n = n + 1, v = 'y' where id < 10; insert into app.part values ($next, 'new'); prepare transaction '$end'");
	ok(wait_until(sub { $paris->safe_psql('postgres', 'select count(*) from pg_prepared_xacts') eq '1' }, 30), 'it is prepared');
	own($tokyo, "$end prepared '$end'");
	caught_up($paris, $tokyo);
	# One that can't be prepared here comes with its commit, and not at all if it is rolled back.
	ran_as_owner("a prepared transaction, $end", $end eq 'commit' ? @written : ());
	$next += 100;
}
call($paris, 'resync', q[select braid.resync_table('paris_from_tokyo', 'app.t')]);
$paris->safe_psql('postgres', q[select braid.wait_for_subscription('paris_from_tokyo')]);
call($paris, 'compare', q[call braid.compare('paris_from_tokyo', 'app.t')]);
ran_as_owner('a role that is no superuser', qw(index));

# Conflicts: recorded rows, a function that decides, large values that are fetched.
subscribe($tokyo, $paris, copy_data => 'false', on_missing_column => q['ignore'], replicate_ddl => 'true');
$paris->safe_psql('postgres', 'alter table app.t drop column extra');
on_all(q[
	set session authorization app;
	create function app.newest(local app.t, remote app.t, before app.t, info braid.conflict) returns app.t language plpgsql as $$
	begin perform app.saw('function'); return case when info.local_timestamp > info.remote_timestamp then local else remote end; end $$;
	reset session authorization;
	select braid.set_conflict_resolution('app.t', 'insert_exists', 'function', 'app.newest');
	alter system set braid.conflict_history = 'all';
	select pg_reload_conf();
], @nodes);
noted();
sub apart
{
	my ($at_tokyo, $at_paris) = @_;
	disable($tokyo, 'tokyo_from_paris');
	disable($paris, 'paris_from_tokyo');
	own($tokyo, $at_tokyo);
	own($paris, $at_paris);
	$tokyo->safe_psql('postgres', q[select braid.enable_subscription('tokyo_from_paris')]);
	$paris->safe_psql('postgres', q[select braid.enable_subscription('paris_from_tokyo')]);
	converged(@nodes);
	return;
}
apart(q[update app.t set big = repeat('y', 6000) where id = 5; insert into app.t (id, n, v, m) values (9000, 1, 'one', 'sad');] . "update $odd set big = repeat('y', 6000)",
	q[update app.t set n = 77 where id = 5; insert into app.t (id, n, v, m) values (9000, 2, 'two', 'ok');] . "update $odd set n = 78");
is(own($_, "select n, left(big, 1), length(big) from $odd where k = $key"), '78|x|5000', 'the newer row whole at ' . $_->name) for @nodes;
is($tokyo->safe_psql('postgres', q[select count(*) > 0 from braid.conflict_history where kind = 'insert_exists']), 't', 'rows met');
ran_as_owner('conflicts', qw(index check function));

# A new column whose values each node computes: they are sent again, by the session itself and by a
# process of the other node.
$tokyo->safe_psql('postgres', 'alter role app set braid.ddl_replication = on');
own($tokyo, 'alter table app.t add column r double precision default random()');
$tokyo->safe_psql('postgres', 'alter role app reset braid.ddl_replication');
converged(@nodes);
ok(wait_until(sub { $paris->safe_psql('postgres', 'select count(*) from braid.own_value') eq '0' }, 60), 'all values are sent');
converged(@nodes);
is(own($paris, 'select sum(r::numeric) from app.t'), own($tokyo, 'select sum(r::numeric) from app.t'), 'and are the same');
ran_as_owner('a new column', qw(index check));

# Rules about foreign keys.
$_->safe_psql('postgres', q[select braid.set_foreign_key_rule('app.child', null, 'restore')]) for @nodes;
apart('delete from app.child where parent = 3; delete from app.parent where id = 3', q[insert into app.child values (300, 3, 'late')]);
ok(wait_until(sub { $_->safe_psql('postgres', 'select count(*) from app.parent where id = 3') eq '1' }, 60), 'a referenced row is put back at ' . $_->name) for @nodes;
call($paris, 'orphans', 'select count(*) from braid.orphans()');
ran_as_owner('orphans', qw(index rule));

# Both sides of a comparison, and what it mends.
call($paris, 'compare', q[call braid.compare('paris_from_tokyo', 'app.t')]);
ran_as_owner('compare', qw(index));
write_by_hand($paris, q[set session_replication_role = replica; delete from app.t where id = 7; update app.t set v = 'other' where id = 8]);
# That was this test's own superuser, whose rights the owner's code got.
$paris->safe_psql('postgres', 'alter role app nosuperuser');
noted();
call($paris, 'compare', q[call braid.compare('paris_from_tokyo', 'app.t')]);
call($paris, 'repair', q[call braid.repair('paris_from_tokyo', 'app.t', side => 'provider')]);
is(own($paris, 'select count(*) from app.t where id in (7, 8)'), '2', 'mended');
ran_as_owner('repair', qw(index trigger check));

# Another copy, beside rows that are there.
call($paris, 'resync', q[select braid.resync_table('paris_from_tokyo', 'app.t')]);
$paris->safe_psql('postgres', q[select braid.wait_for_subscription('paris_from_tokyo')]);
ran_as_owner('another copy', qw(index));

# Records of a source.
call($tokyo, 'ingest', q[select braid.ingest('[{"operation": "insert", "transaction": {"lsn": "0/10", "commit_time": "2024-01-01T00:00:00Z"},
	"schema": {"namespace": "app", "table": "t", "columns": [{"name": "id", "type": "int4"}, {"name": "v", "type": "text"}, {"name": "d", "type": "text"}]},
	"after": {"id": 20000, "v": "v", "d": "d"}}]', 'shop')]);
is(own($tokyo, 'select count(*) from app.t where id = 20000'), '1', 'ingested');
ran_as_owner('ingest', qw(index domain check trigger));

# The plugin, and what it looks up for values that are not in WAL.
$tokyo->safe_psql('postgres', q[select pg_create_logical_replication_slot('changes', 'braid')]);
own($tokyo, 'update app.t set n = n + 1 where id = 6');
like(call($tokyo, 'plugin', q[select string_agg(data, '') from pg_logical_slot_get_changes('changes', null, null, 'format', 'gir-json', 'publication_names', 'braid', 'include-unchanged-toast', 'fetch')]),
	qr/x{5000}/, 'a value is looked up');
$tokyo->safe_psql('postgres', q[select pg_drop_replication_slot('changes')]);
ran_as_owner('plugin', qw(index));

note("$_: " . join ' ', sort keys %{ $all{$_} }) for sort keys %all;
done_testing();
