# Three nodes, each of which changes the schema while all of them write: different columns at once,
# the same column at once, renames, a table that is dropped and created again, two tables that swap
# their names, defaults of every kind, a type that rewrites the table, another primary key. All end
# with the same schemas and rows, and nothing is parked.

use strict;
use warnings;

use Braid;
use Ddl;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($tokyo, $paris, $rome) = my @nodes = ddl_nodes([qw(tokyo paris rome)]);
sql($tokyo, q[
	create table item (id int primary key, n int not null default 0, note text);
	create table left_one (id int primary key, v text);
	create table right_one (id int primary key, v text);
	create table again (id int primary key, v text);
]);
converged(@nodes);
same_schema('tables', @nodes);
all_stream(@nodes);

# Writers of each node have keys of their own, and change common ones.
my @loads;
for my $i (0 .. $#nodes)
{
	my $script = $nodes[$i]->basedir . '/write.sql';
	append_to_file($script, <<"SQL");
\\set id random(1, 1000)
\\set common random(1, 20)
insert into item (id, n) values (3 * :id + $i + 1000, 1) on conflict (id) do update set n = item.n + 1;
insert into item (id, n) values (:common, 1) on conflict (id) do update set n = item.n + 1;
SQL
	push @loads, start_pgbench($nodes[$i], '-n', '-c', '2', '-T', '25', '-R', '150', '-f', $script);
}

# Columns may have another order if two nodes have added them at once: shapes have no order.
sub same_shapes
{
	my ($what, @tables) = @_;
	converged(@nodes);
	for my $table (@tables)
	{
		my @shapes = map { sql($_, qq[select array_to_string(braid.table_shape('$table'), E'\\n')]) } @nodes;
		is($shapes[$_], $shapes[0], "$what: $table of " . $nodes[$_]->name) for 1 .. $#nodes;
	}
	return;
}

sub at_once
{
	my (@statements) = @_;
	my @sessions = map { $_->background_psql('postgres') } @nodes;
	for my $i (0 .. $#statements)
	{
		next if !$statements[$i];
		$sessions[$i]->query_safe("begin; $statements[$i]");
	}
	for my $i (0 .. $#statements)
	{
		$sessions[$i]->query_safe('commit') if $statements[$i];
	}
	$_->quit for @sessions;
	return;
}

at_once('alter table item add column from_tokyo int', 'alter table item add column from_paris text default 1', 'alter table item add column from_rome timestamptz default now()');
same_shapes('different columns', 'item');
at_once('alter table item add column same text', 'alter table item add column same text');
same_shapes('the same column', 'item');
at_once('create index by_n on item (n)', 'alter table item add constraint positive check (n >= 0)', 'comment on table item is $$of rome$$');
same_shapes('an index and a constraint', 'item');
sql($paris, 'alter table item alter column n type bigint');
same_shapes('a type', 'item');
sql($rome, 'alter table item rename column note to remark');
same_shapes('a column has another name', 'item');
at_once('insert into left_one values (1, $$l$$)', 'insert into right_one values (1, $$r$$)');
converged(@nodes);
sql($paris, 'begin; alter table left_one rename to swap; alter table right_one rename to left_one; alter table swap rename to right_one; commit');
converged(@nodes);
at_once('insert into left_one values (2, $$tokyo$$)', 'insert into left_one values (3, $$paris$$)', 'insert into right_one values (4, $$rome$$)');
same_shapes('names are swapped', qw(left_one right_one));
at_once('insert into again values (1, 1)', 'insert into again values (2, 2)');
converged(@nodes);
sql($rome, 'begin; drop table again; create table again (id bigint primary key, w int); insert into again values (7, 7); commit');
converged(@nodes);
at_once('insert into again values (8, 8)', 'insert into again values (9, 9)');
same_shapes('a table made anew', 'again');

sql($paris, 'alter table item drop constraint item_pkey, add constraint item_key primary key (id) include (n)');
same_shapes('another primary key', 'item');

finish_pgbench($_) for @loads;
converged(@nodes);
sql($tokyo, 'alter table item add column volatile double precision default random()');
same_shapes('a volatile default', 'item');
all_stream(@nodes);
same_tables(\@nodes, qw(left_one right_one again));
my $columns = 'id, n, remark, from_tokyo, from_paris, from_rome, same, volatile';
is(digest($_, "(select $columns from item)"), digest($tokyo, "(select $columns from item)"), 'rows of ' . $_->name) for $paris, $rome;
is(sql($tokyo, 'select count(distinct volatile) > 1 from item'), 't', 'the volatile default had different values');
is(sql($_, q[select array_to_string(braid.table_shape('right_one'), E'\n') ~ 'column v']), 't', 'a table under its new name') for @nodes;

done_testing();
