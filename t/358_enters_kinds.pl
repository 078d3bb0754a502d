# Rows with large values enter a row filter: whole rows without a key, a key that is itself large,
# an index as the identity, domains that allow no null, composites, a partition, several
# publications, generated columns, and triggers of the subscriber that read the values.

use strict;
use warnings;

use Braid;
use Test::More;

my $tokyo = new_node('tokyo', publication => '', conf => "logical_decoding_work_mem = 64kB\nbraid.querier_timeout = 5s\n");
my $paris = new_node('paris', publication => '');
sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }

# Of each table, the rows that are published.
my %rows = (
	whole => 'select * from whole where n > 10', by_index => 'select * from by_index where code > 10', no_null => 'select * from no_null where id > 10',
	made => 'select * from made where id > 10', large_key => 'select * from large_key where n > 10', twice => 'select * from twice where id > 10 or id < 0',
	part => 'select * from part where n > 10 and id >= 100', read => 'select id, n, src, big from read where id > 10');
on_all(q[
	create domain full_text as text not null check (length(value) > 10);
	create type pair as (a int, t text);
	create table whole (id int, n int, big text, raw bytea);
	alter table whole replica identity full;
	create table by_index (id int primary key, code int not null, big text not null);
	create unique index by_index_code on by_index (code);
	alter table by_index replica identity using index by_index_code;
	create table no_null (id int primary key, n int, big full_text);
	create table made (id int primary key, n int, big pair, list text[]);
	create table large_key (k text, n int, big text, primary key (k, n));
	create table twice (id int primary key, n int, big text);
	create table part (id int, n int, big text, primary key (id, n)) partition by range (id);
	create table part_low partition of part for values from (0) to (100);
	create table part_high partition of part for values from (100) to (1000);
	create table read (id int primary key, n int, src text, big text);
	do $$ declare c record; begin
		for c in select attrelid::regclass as t, quote_ident(attname) as a from pg_attribute join pg_class on attrelid = pg_class.oid
			where relnamespace = 'public'::regnamespace and relkind = 'r' and attnum > 0 and attlen = -1
		loop execute format('alter table %s alter %s set storage external', c.t, c.a); end loop;
	end $$;
], $tokyo, $paris);
sql($paris, q[
	alter table read add column short text generated always as (left(big, 10) || length(src)) stored, add check (big is not null);
	create function has_big() returns trigger language plpgsql as $$ begin if new.big is null then raise 'big is null'; end if; return new; end $$;
	create trigger has_big before insert or update on read for each row execute function has_big();
	alter table read enable always trigger has_big;
]);
my $more = '';
my @by_id = qw(no_null made read);
my $options = '';
if ($tokyo->pg_version >= 18)
{
	sql($tokyo, q[create table stored (id int primary key, n int, src text, big text generated always as (repeat(src, 3000)) stored); alter table stored alter big set storage external; insert into stored (id, n, src) select i, i, chr(64 + i) from generate_series(1, 10) i]);
	sql($paris, 'create table stored (id int primary key, n int, src text, big text)');
	$rows{stored} = 'select * from stored where id > 10';
	push @by_id, 'stored';
	($more, $options) = (', stored where (id > 10)', ' with (publish_generated_columns = stored)');
}
sql($tokyo, q[
	insert into whole select i, i, repeat(i || 'f', 3000), decode(repeat(md5(i::text), 200), 'hex') from generate_series(1, 10) i;
	insert into by_index select i, i, repeat(i || 'f', 3000) from generate_series(1, 10) i;
	insert into no_null select i, i, repeat(i || 'f', 3000) from generate_series(1, 10) i;
	insert into made select i, i, row(i, repeat(i || 'f', 3000))::pair, array_fill(repeat(i || 'f', 100), array[50]) from generate_series(1, 10) i;
	insert into large_key select repeat(chr(64 + i), 2600), i, repeat(i || 'f', 3000) from generate_series(1, 10) i;
	insert into twice select i, i, repeat(i || 'f', 3000) from generate_series(1, 10) i;
	insert into part select i, i % 200, repeat(i || 'f', 3000) from generate_series(1, 10) i;
	insert into part select i + 200, i, repeat(i || 'f', 3000) from generate_series(1, 10) i;
	insert into read select i, i, repeat(chr(64 + i), 4000), repeat(chr(64 + i), 4000) from generate_series(1, 10) i;
] . qq[
	create publication braid for table whole where (n > 10), by_index where (code > 10), no_null where (id > 10), made where (id > 10),
		large_key where (n > 10), twice where (id > 10), part_high where (n > 10), read where (id > 10)$more$options;
	create publication other for table twice where (id < 0);
]);
my $name = subscribe($paris, $tokyo, publications => q['{braid,other}']);

sub same
{
	my ($what) = @_;
	caught_up($paris, $tokyo);
	for my $table (sort keys %rows)
	{
		my $sum = "select count(*) || ' ' || md5(coalesce(string_agg(r::text, ' ' order by r::text), '')) from ($rows{$table}) r";
		is(sql($paris, $sum), sql($tokyo, $sum), "$what: $table is the same");
	}
	my $outside = join ' + ', map { my ($table, $where) = $rows{$_} =~ /from (\w+) where (.*)/; "(select count(*) from $table where ($where) is not true)" } sort keys %rows;
	is(sql($paris, "select $outside"), 0, "$what: no other row is here");
	return;
}

my $row = 1;
for my $mode (qw(serial parallel batch aggregate))
{
	alter_running($paris, $name, "apply_mode => '$mode'") or fail("$mode: altered");
	sql($tokyo, join ';', "update by_index set code = code + 10 where id = $row", "update twice set id = -id where id = $row",
		(map { "update $_ set n = n + 10 where n = $row" } qw(whole large_key part)), (map { "update $_ set id = id + 10 where id = $row" } @by_id));
	same($mode);
	$row++;

	# The provider has gone on when it is asked.
	disable($paris, $name);
	sql($tokyo, "begin; update part set id = id + 500 where id = $row; update part set n = n + 10 where n = $row; update part set n = n + 20 where n > 10; commit");
	sql($tokyo, "begin; update whole set n = n + 10 where n = $row; update whole set id = id + 100 where n > 10; commit");
	sql($tokyo, "begin; update large_key set n = n + 10 where n = $row; update large_key set n = n + 1 where n > 10; commit");
	sql($tokyo, "begin; update $_ set id = id + 10 where id = $row; update $_ set n = n + 1 where id > 10; update $_ set id = id + 100 where id > 10; commit") for @by_id;
	sql($tokyo, "update twice set id = -id where id = $row; update twice set id = abs(id) + 50 where id < 0");
	sql($paris, "select braid.enable_subscription('$name')");
	same("$mode, later");
	$row++;
}
streams($paris, $name, 'it goes on') or diag(explain(status($paris, $name)));

done_testing();
