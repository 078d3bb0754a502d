# ALTER TABLE VALIDATE CONSTRAINT is run by each node by itself. Statements that PostgreSQL refuses,
# or runs otherwise, while a constraint is to be validated wait for that: a table becomes a
# partition or a child, its parent gets the constraint that it has, a column gets NOT NULL.

use strict;
use warnings;

use Braid;
use Ddl;
use Test::More;

my ($tokyo, $paris) = my @nodes = ddl_nodes([qw(tokyo paris)]);
my $has_not_null = sql($tokyo, 'show server_version_num') >= 180000;
sql($tokyo, q[
	create table country (id int primary key);
	create table city (id int not null, country int references country, size int constraint known check (size > 0)) partition by list (id);
	create table place (id int, size int constraint known check (size > 0));
	create table base (id int, size int);
	create table above (id int, size int);
]);
# As it would be without the other node: the constraint is not valid, then it is, then it is needed.
sub now_valid
{
	my ($table, $constraint, $needs) = @_;
	my ($name) = $constraint =~ /constraint (\w+)/;
	return "alter table $table add $constraint not valid;\nalter table $table validate constraint $name;\n$needs;\n";
}
my @needs = (
	[ 'part', 'int not null, country int, size int', 'constraint known check (size > 0)', 'alter table city attach partition part for values in (1)' ],
	[ 'referring', 'int not null, country int, size int check (size > 0)', 'constraint to_country foreign key (country) references country', 'alter table city attach partition referring for values in (2)',
		'alter table referring rename constraint referring_size_check to known' ],
	[ 'heir', 'int, size int', 'constraint known check (size > 0)', 'alter table heir inherit place' ],
	[ 'low', 'int, size int', 'constraint small check (size < 10)', 'alter table base add constraint small check (size < 10)', 'alter table low inherit base' ]);
push @needs,
  [ 'third', 'int, country int, size int constraint known check (size > 0)', 'constraint third_id not null id', 'alter table city attach partition third for values in (3)' ],
  [ 'single', 'int, size int', 'constraint single_id not null id', 'alter table single alter id set not null, alter size set default 1' ],
  [ 'under', 'int, size int', 'constraint under_id not null id', 'alter table above alter id set not null', 'alter table under inherit above' ]
  if $has_not_null;
for my $need (@needs)
{
	my ($table, $columns, $constraint, $needs, $before) = @$need;
	# The rows are enough that validating takes a moment.
	sql($tokyo, "create table $table (id $columns)");
	sql($tokyo, $before) if $before;
	my $id = $needs =~ /in \((\d)\)/ ? $1 : 'i';
	sql($tokyo, "insert into $table (id, size) select $id, 1 from generate_series(1, 100000) i");
}
caught_up($paris, $tokyo);
sql($tokyo, join '', map { now_valid(@$_[ 0, 2, 3 ]) } @needs);
caught_up($paris, $tokyo);
becomes($paris, q[select count(*) from braid.ddl_log where state in ('waiting', 'running')], 0, 'all that paris runs by itself is done');
same_schema('tables whose constraints were validated', @nodes);
is(sql($_, 'select count(*) from pg_constraint where not convalidated'), 0, 'all constraints are valid at ' . $_->name) for @nodes;
is(sql($_, q[select count(*) from pg_constraint where contype = 'f' and conrelid = 'referring'::regclass]), sql($tokyo, q[select count(*) from pg_constraint where contype = 'f' and conrelid = 'referring'::regclass]), 'one foreign key at ' . $_->name) for $paris;
all_stream(@nodes);

$_->stop for @nodes;
done_testing();
