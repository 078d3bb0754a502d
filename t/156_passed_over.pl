# Missing tables. One that the provider does not have or publish any more is skipped, with a line in
# the log, and everything else of its transactions is applied. One that the provider still has stops
# the subscription. So does a view or another relation in the place of a table.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo', conf => "logical_decoding_work_mem = 64kB\n");
my $paris = new_node('paris', publication => '');
on_all('create table kept (k int primary key, v text)', $tokyo, $paris);
my $name = subscribe($paris, $tokyo);

sub sql { my ($node, $text) = @_; return $node->safe_psql('postgres', $text); }
sub here { return sql($paris, $_[0]); }
sub stops
{
	my ($state, $what) = @_;
	ok(wait_until(sub { here('select state from braid.subscription_status') eq 'error' }, 30), "$what: the subscription stops");
	is(here('select error_sqlstate from braid.subscription'), $state, "$what: as the error says");
	return here('select last_error || $$: $$ || error_hint from braid.subscription_status');
}
sub goes_on
{
	my ($what) = @_;
	here("select braid.enable_subscription('$name'); select braid.wait_for_subscription('$name', '180 s')");
	caught_up($paris, $tokyo);
	becomes($paris, 'select state from braid.subscription_status', 'streaming', "$what: it goes on");
}

# Made and dropped in one transaction, beside other changes, in each of the ways in which a
# transaction comes.
for my $mode (qw(parallel serial batch aggregate))
{
	here("select braid.alter_subscription('$name', apply_mode => '$mode')");
	for my $rows (10, 5000)
	{
		my $table = "scratch_${mode}_$rows";
		sql($tokyo, qq[begin; insert into kept values ($rows + length('$mode') * 100000, '$mode'); create table $table (k int primary key, v text);
			insert into $table select k, repeat('x', 100) from generate_series(1, $rows) k; update $table set v = 'y'; delete from $table where k % 2 = 0;
			truncate $table; drop table $table; update kept set v = v || ' after'; commit]);
		caught_up($paris, $tokyo);
		same_tables([ $tokyo, $paris ], 'kept');
		is(here("select reason from braid.left_out_tables where table_name = '$table'"), 'gone', "$table is recorded");
	}
}
here("select braid.alter_subscription('$name', apply_mode => 'parallel')");

# Dropped by a later transaction, before the subscriber has come to the first one.
here("select braid.disable_subscription('$name')");
sql($tokyo, q[create table later (k int); insert into later values (1); insert into kept values (1, 'between')]);
sql($tokyo, 'truncate later; drop table later');
goes_on('a table that was dropped meanwhile');
same_tables([ $tokyo, $paris ], 'kept');

# As the table is still there, the subscription stops, until it is gone.
sql($tokyo, 'create table there (k int primary key); insert into there values (1)');
like(stops('42P01', 'a table that is there'), qr/table "public.there" does not exist here: Create it/, 'with what to do');
is(here(q[select count(*) from braid.left_out_tables where table_name = 'there']), '0', 'it is not left out');
sql($tokyo, 'drop table there');
goes_on('once it is gone');

# The hint: it is created, and has all rows.
sql($tokyo, q[create table there (k int primary key); insert into there values (1), (2)]);
stops('42P01', 'another of that name');
here('create table there (k int primary key)');
here("select * from braid.refresh_subscription('$name')");
goes_on('once it is created');
sql($tokyo, 'insert into there values (3)');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'there');

# Created under one name and renamed: its rows come with the copy of the table of the new name.
# While it has the first name the subscription would stop.
here('create table final (k int primary key, v text)');
here("select braid.disable_subscription('$name')");
sql($tokyo, q[create table first_name (k int primary key, v text); insert into first_name values (1, 'before'); alter table first_name rename to final; insert into final values (2, 'after')]);
goes_on('a table that has another name by now');
ok(wait_until(sub { here(q[select count(*) from final]) eq '2' }, 30), 'both rows come');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'final');
sql($tokyo, q[begin; create table in_one (k int primary key, v text); insert into in_one values (1, 'before'); alter table in_one rename to in_two; insert into in_two values (2, 'after'); drop table in_two; commit]);
caught_up($paris, $tokyo);
becomes($paris, 'select state from braid.subscription_status', 'streaming', 'a table that had two names and is gone is passed over under both');

# A name that was passed over is used again, for a table that stays.
on_all('create table scratch_serial_10 (k int primary key, v text)', $tokyo, $paris);
sql($tokyo, q[insert into scratch_serial_10 values (1, 'stays')]);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'scratch_serial_10');

# Taken out of the publication, with changes on their way.
my $to_list = 'listed_sub';
sql($tokyo, 'create table listed (k int primary key); create table other (k int primary key); create publication list for table listed, other');
here('create table listed (k int primary key); create table other (k int primary key)');
caught_up($paris, $tokyo);
here("select braid.drop_subscription('$name')");
here("truncate kept, there, final, scratch_serial_10");
here("select braid.create_subscription('$name', \$dsn\$" . $tokyo->connstr('postgres') . "\$dsn\$, publications => '{list}')");
here("select braid.wait_for_subscription('$name', '180 s')");
here('drop table listed');
sql($tokyo, 'insert into listed values (1); insert into other values (1)');
like(stops('42P01', 'a table of a list'), qr/public.listed/, 'it is named');
sql($tokyo, 'alter publication list drop table listed');
goes_on('once it is not published');
same_tables([ $tokyo, $paris ], 'other');

# Another kind of relation is in the place of a table that was ready.
my %other = (
	view => 'create view other as select 1 as k',
	'materialized view' => 'create materialized view other as select 1 as k',
	sequence => 'create sequence other',
	'composite type' => 'create type other as (k int)',
	index => 'create index other on listed_index (k)',
	'foreign table' => 'create foreign table other (k int) server elsewhere',
);
here('create table listed_index (k int); create foreign data wrapper none; create server elsewhere foreign data wrapper none');
my $k = 10;
for my $kind (sort keys %other)
{
	here("drop table other; $other{$kind}");
	sql($tokyo, 'insert into other values (' . $k++ . ')');
	like(stops('42809', $kind), qr/"public.other" is not a table here/, "$kind: which is said");
	(my $drop = $kind) =~ s/composite //;
	here("drop $drop other; create table other (k int primary key)");
	here("select * from braid.refresh_subscription('$name')");
	goes_on($kind);
	same_tables([ $tokyo, $paris ], 'other');
}

# A table that is left out shows as such, until it is brought in.
on_all('create table listed (k int primary key)', $paris);
sql($tokyo, 'alter publication list add table listed; insert into listed values (2)');
caught_up($paris, $tokyo);
is(here(q[select state, copy_error_hint from braid.subscription_tables where relation::text = 'listed']), qq[left out|Run braid.refresh_subscription('$name') to bring it in.], 'a table that was published later is left out');
is(here("select relation, action from braid.refresh_subscription('$name')"), 'listed|added', 'it is brought in');
here("select braid.wait_for_subscription('$name', '180 s')");
same_tables([ $tokyo, $paris ], 'listed', 'other');
sql($tokyo, 'alter publication list drop table listed');
is(here("select relation, action from braid.refresh_subscription('$name')"), 'listed|removed', 'it is taken out');
is(here(q[select state from braid.subscription_tables where relation::text = 'listed']), 'left out', 'and shows as left out');
is(here(q[select reason from braid.left_out_tables where table_name = 'listed' order by left_out_at desc limit 1]), 'removed', 'with the reason');

# Unlogged tables, which a crash empties: a warning when they join, and at their first change.
sql($tokyo, q[create table fast (k int primary key); create table fast_leaf (k int primary key); create table logged (k int primary key); alter publication list add table fast, fast_leaf, logged]);
here(q[
	create unlogged table fast (k int primary key);
	create table fast_leaf (k int primary key) partition by range (k);
	create table fast_leaf_1 partition of fast_leaf for values from (0) to (10);
	create unlogged table fast_leaf_2 partition of fast_leaf for values from (10) to (20);
	create table logged (k int primary key);
]);
my (undef, undef, $said) = $paris->psql('postgres', "select braid.refresh_subscription('$name')");
my @warned = $said =~ /WARNING:  table "([\w.]+)" is unlogged here\nDETAIL:  After a crash/g;
is("@warned", 'public.fast public.fast_leaf', 'the unlogged tables are named');
is(here(q[select string_agg(relation::text, ' ' order by relation::text) from braid.subscription_tables where is_unlogged]), 'fast fast_leaf', 'the view shows them');
here("select braid.wait_for_subscription('$name', '180 s')");
my $log = -s $paris->logfile;
sql($tokyo, "insert into $_ values (15)") for qw(fast fast_leaf logged);
sql($tokyo, 'update fast set k = 16');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], qw(fast fast_leaf logged));
@warned = slurp_file($paris->logfile, $log) =~ /WARNING:  table "([\w.]+)" is unlogged here/g;
my %warned = map { $_ => 1 } @warned;
is(join(' ', sort keys %warned), 'public.fast public.fast_leaf', 'and the log has them');
cmp_ok(scalar @warned, '<=', 4, 'once in each process');
here('alter table fast set logged');
is(here(q[select string_agg(relation::text, ' ') from braid.subscription_tables where is_unlogged]), 'fast_leaf', 'a table that is logged now is not shown');

done_testing();
