# Functions that are called while changes are applied, and for which PostgreSQL keeps state from one
# call to the next: SECURITY DEFINER and SET (fmgr_security_definer), SQL functions, domains,
# expressions. That state must live as long as its owner, in every apply mode and in braid.ingest.
# Otherwise a server with CLOBBER_FREED_MEMORY crashes at once.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo', conf => "logical_decoding_work_mem = 64kB\n");
my $paris = new_node('paris', publication => '');
my @both = ($tokyo, $paris);

# The kinds of function, by what PostgreSQL calls them through.
my %kind = (
	plain => '',
	definer => 'security definer',
	setting => q[set work_mem = '5MB' set search_path = public],
	both => q[security definer set work_mem = '6MB'],
);
my @kinds = sort keys %kind;

on_all(q[
	create table row_fired (id int primary key, v text, n int);
	create table parted (id int, k int, v text, primary key (id, k)) partition by range (k);
	create table parted_1 partition of parted for values from (0) to (100);
	create table parted_2 (v text, k int not null, id int not null);
	alter table parted attach partition parted_2 for values from (100) to (200);
	create table bag (a int, v text);
	alter table bag replica identity full;
	create table checked (id int primary key, v text, n int);
	create table emptied (id int primary key);
	create table deferred (id int primary key, v text);
	create table filler (t text);
	create table counted (id int primary key, v text);
], @both);

# Here only: triggers, and whatever else has functions called.
my $functions = join '', map { qq[
	create function fire_$_() returns trigger language plpgsql $kind{$_} as \$\$
	begin
		insert into public.fired values (tg_table_name, '$_', tg_when || ' ' || tg_op || ' ' || tg_level, current_setting('work_mem'));
		if tg_level = 'STATEMENT' then return null; end if;
		if tg_op = 'DELETE' then return old; end if;
		if tg_when = 'BEFORE' then new.v := new.v || '+'; end if;
		return new;
	end \$\$;
	create function same_$_(text) returns text language plpgsql immutable $kind{$_} as \$\$ begin return \$1; end \$\$;
	create function sql_$_(text) returns text language sql immutable $kind{$_} as \$\$ select \$1 || '' \$\$;
] } @kinds;
my $triggers = '';
for my $table (qw(row_fired parted bag))
{
	for my $kind (@kinds)
	{
		for my $when (qw(before after))
		{
			my $name = "${when}_$kind";
			my $enable = $when eq 'before' ? 'always' : 'replica';
			my $condition = $kind eq 'plain' ? 'when (public.same_both(\'x\') = public.sql_definer(\'x\'))' : '';
			$triggers .= "create trigger $name $when insert or update or delete on $table for each row $condition execute function fire_$kind();\n";
			# A partition's trigger is enabled by itself before 16.
			$triggers .= "alter table $_ enable $enable trigger $name;\n" for $table eq 'parted' ? qw(parted parted_1 parted_2) : $table;
		}
	}
}
$paris->safe_psql('postgres', qq[
	create table fired (relation name, kind text, what text, work_mem text);
	create role reader;
	$functions
	$triggers
	create constraint trigger late after insert or update or delete on deferred deferrable initially deferred for each row execute function fire_both();
	create constraint trigger late_too after insert or update or delete on deferred deferrable initially deferred for each row execute function fire_setting();
	alter table deferred enable always trigger late;
	alter table deferred enable always trigger late_too;
	create trigger emptied_before before truncate on emptied for each statement execute function fire_both();
	create trigger emptied_after after truncate on emptied for each statement execute function fire_setting();
	alter table emptied enable always trigger emptied_before;
	alter table emptied enable replica trigger emptied_after;
	create domain told as text check (public.same_both(value) = public.sql_setting(value));
	alter table checked
		alter v type told,
		add check (public.same_definer(v) is not distinct from public.sql_both(v)),
		add extra text default public.same_setting('here'),
		add made text generated always as (public.sql_both(id::text)) stored;
	create index on checked (public.same_both(v::text));
	create index on checked (n) where public.same_setting(v::text) <> '';
	create unique index on checked (public.sql_definer(id::text));
	create table routed (like checked including all);
]);

# Triggers with transition tables, beside the same under native replication, which has statements in
# the initial copy only.
my $summing = join '', 'create table summed (what text, n bigint, work_mem text);', map {
	my $kind = $_;
	my $made = qq[create function sum_$kind() returns trigger language plpgsql $kind{$kind} as \$\$
	declare
		n bigint;
	begin
		if tg_op <> 'DELETE' then select count(*) into n from new_rows; end if;
		if tg_op <> 'INSERT' then select coalesce(n, 0) + 10 * count(*) into n from old_rows; end if;
		insert into public.summed values (tg_op || ' $kind', n, current_setting('work_mem'));
		return null;
	end \$\$;
	create function note_$kind() returns trigger language plpgsql $kind{$kind} as \$\$
	begin
		insert into public.summed values (tg_op || ' row $kind', null, current_setting('work_mem'));
		return null;
	end \$\$;];
	for my $event ([ insert => 'new table as new_rows' ], [ update => 'old table as old_rows new table as new_rows' ], [ delete => 'old table as old_rows' ])
	{
		my ($operation, $tables) = @$event;
		for my $way ([ statement => 'sum' ], [ row => 'note' ])
		{
			my ($level, $function) = @$way;
			my $trigger = "${operation}_${level}_$kind";
			$made .= "create trigger $trigger after $operation on counted referencing $tables for each $level execute function ${function}_$kind();\n";
			$made .= "alter table counted enable always trigger $trigger;\n";
		}
	}
	$made;
} @kinds;
$tokyo->safe_psql('postgres', q[insert into counted select i, 'copied' from generate_series(1, 3) i; create publication counted for table counted]);
$paris->safe_psql('postgres', $summing);
$paris->safe_psql('postgres', 'create database native');
$paris->safe_psql('native', "create table counted (id int primary key, v text); $summing");
my $connection = $tokyo->connstr('postgres');
$paris->safe_psql('native', "create subscription native_sub connection \$\$$connection\$\$ publication counted");
my $name = subscribe($paris, $tokyo);
$paris->wait_for_subscription_sync($tokyo, 'native_sub', 'native');
my $summed = 'select what, n, work_mem, count(*) from summed group by 1, 2, 3 order by 1, 2, 3';
like($paris->safe_psql('postgres', $summed), qr/^INSERT both\|3\|6MB\|1\nINSERT definer\|3\|4MB\|1\nINSERT plain\|3\|4MB\|1\nINSERT row both\|\|6MB\|3$/m, 'the copy has fired triggers with transition tables');
for my $mode (qw(serial batch aggregate parallel))
{
	is($paris->safe_psql('postgres', $summed), $paris->safe_psql('native', $summed), "as often as native replication has, before $mode");
	$paris->safe_psql('postgres', "select braid.alter_subscription('$name', apply_mode => '$mode')");
	$tokyo->safe_psql('postgres', qq[
		insert into counted select i, '$mode' from generate_series(101, 300) i;
		update counted set v = v || 'x' where id > 290;
		begin;
		delete from counted where id > 250;
		insert into counted values (400, '$mode');
		commit;
		delete from counted where id > 100;
	]);
	caught_up($paris, $tokyo);
	$tokyo->wait_for_catchup('native_sub');
}
is($paris->safe_psql('postgres', $summed), $paris->safe_psql('native', $summed), 'as often as native replication has');
like($paris->safe_psql('postgres', $summed), qr/^DELETE row definer\|\|4MB\|804\n/m, 'for each row');
$paris->safe_psql('native', 'drop subscription native_sub');

sub work
{
	my ($base) = @_;
	my @statements = map { my $id = $base + $_; (
		"insert into row_fired values ($id, 'a', 0)",
		"insert into parted values ($id, @{[ $_ * 30 ]}, 'a')",
		"insert into bag values ($id, 'a')",
		"insert into checked values ($id, 'a', $_)",
		"insert into deferred values ($id, 'a')",
	) } 1 .. 4;
	push @statements,
		"update row_fired set n = n + 1 where id > $base", "update parted set v = 'b' where id > $base",
		"update parted set k = k + 60 where id > $base and k < 100", "update bag set v = 'b' where a > $base",
		"update checked set v = 'b', n = -n where id > $base", "update deferred set v = 'b' where id > $base",
		"insert into emptied values ($base)", 'truncate emptied',
		"delete from row_fired where id = $base + 1", "delete from parted where id = $base + 1", "delete from bag where a = $base + 1",
		"delete from checked where id = $base + 1", "delete from deferred where id = $base + 1";
	return @statements;
}

# How often each trigger has fired, and under which settings, since the last look.
sub fired
{
	my $fired = $paris->safe_psql('postgres', q[
		select relation, what, string_agg(distinct kind || ' ' || work_mem, ', ' order by kind || ' ' || work_mem), count(*)
			from fired group by 1, 2 order by 1, 2
	]);
	$paris->safe_psql('postgres', 'truncate fired');
	return $fired;
}

# As PostgreSQL itself would do it.
fired();
my ($base, $expected) = (0, undef);
sub each_fired
{
	my ($label, $how) = @_;
	my $pid = $paris->safe_psql('postgres', q[select pid from pg_stat_activity where backend_type = 'checkpointer']);
	$base += 10;
	$how->(work($base));
	caught_up($paris, $tokyo);
	my $fired = fired();
	$expected //= $fired;
	is($fired, $expected, "each trigger has fired as often as it is to, $label");
	is($paris->safe_psql('postgres', q[select pid from pg_stat_activity where backend_type = 'checkpointer']), $pid, "the server has not crashed, $label");
	return;
}

each_fired('serial', sub { $tokyo->safe_psql('postgres', $_) for @_ });
like($expected, qr/^row_fired\|AFTER INSERT ROW\|both 6MB, definer 4MB, plain 4MB, setting 5MB\|16$/m, 'with their settings');
like($expected, qr/^deferred\|AFTER UPDATE ROW\|both 6MB, setting 5MB\|8$/m, 'deferred ones too');
like($expected, qr/^emptied\|BEFORE TRUNCATE STATEMENT\|both 6MB\|1$/m, 'and those of TRUNCATE');
is($paris->safe_psql('postgres', 'select string_agg(distinct extra, $$ $$), bool_and(made = id::text) from checked'), 'here|t', 'defaults and generated columns are computed');
is($paris->safe_psql('postgres', 'select distinct v from row_fired'), 'a++++', 'BEFORE triggers have changed the rows');

for my $mode (qw(serial parallel batch aggregate))
{
	$paris->safe_psql('postgres', "select braid.alter_subscription('$name', apply_mode => '$mode')");
	$paris->safe_psql('postgres', "select braid.wait_for_subscription('$name')");
	each_fired("$mode, single statements", sub { $tokyo->safe_psql('postgres', join ";\n", map { "begin; $_; commit" } @_) });
	each_fired("$mode, one transaction", sub { $tokyo->safe_psql('postgres', join ";\n", 'begin', @_, 'commit') });
	next if $mode ne 'parallel';
	$paris->safe_psql('postgres', "select braid.alter_subscription('$name', streaming => 'parallel')");
	$paris->safe_psql('postgres', "select braid.wait_for_subscription('$name')");
	each_fired("$mode, streamed", sub {
		$tokyo->safe_psql('postgres', join ";\n", 'begin', q[insert into filler select repeat(md5(i::text), 20) from generate_series(1, 3000) i],
			'savepoint s', q[insert into row_fired values (-1, 'never', 0)], 'rollback to s', @_, 'commit');
	});
}

# braid.ingest calls them in a session.
my $position = 0;
sub record
{
	my ($operation, $table, %images) = @_;
	my $columns = join ', ', map { qq[{"name": "$_", "type": "] . ($_ eq 'v' ? 'text' : 'int4') . '"' . (($_ eq 'id') ? ', "identity": true, "primary_key": true' : '') . '}' } qw(id v n);
	my $text = join ', ', map { qq["$_": $images{$_}] } sort keys %images;
	return sprintf '{"operation": "%s", "transaction": {"lsn": "0/%X", "commit_time": "2099-01-01T00:00:00Z"}, "schema": {"namespace": "public", "table": "%s", "columns": [%s]}, %s}',
	  $operation, ++$position, $table, $columns, $text;
}
my @records = map { record('insert', 'row_fired', after => qq[{"id": $_, "v": "i", "n": 1}]) } 1001 .. 1020;
push @records, map { record('update', 'row_fired', after => qq[{"id": $_, "v": "j", "n": 2}]) } 1001 .. 1020;
push @records, map { record('delete', 'row_fired', before => qq[{"id": $_}]) } 1001 .. 1010;
push @records, map { record('insert', 'checked', after => qq[{"id": $_, "v": "i", "n": 1}]) } 1001 .. 1020;
fired();
my $records = join ', ', @records;
$paris->safe_psql('postgres', "select braid.ingest(\$json\$[$records]\$json\$, 'shop')");
is(fired(), join("\n", map { "row_fired|$_" }
	'AFTER DELETE ROW|both 6MB, definer 4MB, plain 4MB, setting 5MB|40',
	'AFTER INSERT ROW|both 6MB, definer 4MB, plain 4MB, setting 5MB|80',
	'AFTER UPDATE ROW|both 6MB, definer 4MB, plain 4MB, setting 5MB|80',
	'BEFORE DELETE ROW|both 6MB, definer 4MB, plain 4MB, setting 5MB|40',
	'BEFORE INSERT ROW|both 6MB, definer 4MB, plain 4MB, setting 5MB|80',
	'BEFORE UPDATE ROW|both 6MB, definer 4MB, plain 4MB, setting 5MB|80'), 'triggers fire for what is ingested');
is($paris->safe_psql('postgres', 'select count(*), bool_and(made = id::text) from checked where id > 1000'), '20|t', 'and the rest is computed');

done_testing();
