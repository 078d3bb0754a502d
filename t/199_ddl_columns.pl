# A column gets the name of one that was dropped or renamed, while three nodes write the table and a
# stream is held back. Values of older rows go to the column that they were written to, or nowhere
# if it was dropped. All nodes end with the same rows.

use strict;
use warnings;

use Braid;
use Ddl;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($tokyo, $paris, $rome) = my @nodes = ddl_nodes([qw(tokyo paris rome)]);

# Statements of tokyo on a table in which rome writes $early before them, and $late after them;
# paris has the statements before all of it. Rows at the end are $expected, by id.
sub late_rows
{
	my ($what, $table, $definition, $statements, $early, $late, $expected) = @_;
	my $parts = $table eq 'parted' ? ' partition by hash (id); create table parted_0 partition of parted for values with (modulus 2, remainder 0); create table parted_1 partition of parted for values with (modulus 2, remainder 1)' : '';
	sql($tokyo, "create table $table (id int primary key, $definition)$parts");
	converged(@nodes);
	sql($_->[0], "insert into $table (id) values ($_->[1])") for [ $tokyo, 1 ], [ $paris, 2 ], [ $rome, 3 ];
	converged(@nodes);
	disable($paris, 'paris_from_rome');
	sql($rome, $early);
	sql($tokyo, $statements);
	caught_up($rome, $tokyo);
	caught_up($paris, $tokyo);
	sql($rome, $late);
	sql($paris, "insert into $table (id) values (20)");
	sql($paris, q[select braid.enable_subscription('paris_from_rome')]);
	converged(@nodes);
	same_tables(\@nodes, $table);
	all_stream(@nodes);
	is(sql($_, "select string_agg(t::text, ' ' order by id) from (select * from $table) t"), $expected, "$what, at " . $_->name) for @nodes;
	return;
}

late_rows('the same type', 'same_type', 'c text', q[alter table same_type drop column c; alter table same_type add column c text default 'new'],
	q[insert into same_type values (10, 'old'); update same_type set c = 'old' where id = 3], q[insert into same_type values (11, 'late'); update same_type set c = 'late' where id = 10],
	'(1,new) (2,new) (3,new) (10,late) (11,late) (20,new)');
late_rows('another type', 'other_type', 'c text', q[alter table other_type drop column c; alter table other_type add column c int],
	q[insert into other_type values (10, 'old'); update other_type set c = 'old'], q[insert into other_type values (11, 5)],
	'(1,) (2,) (3,) (10,) (11,5) (20,)');
late_rows('dropped and added three times', 'three_times', 'c text',
	join('; ', map { "alter table three_times drop column c; alter table three_times add column c text default 'new$_'" } 1 .. 3),
	q[insert into three_times values (10, 'old')], q[insert into three_times values (11, 'late')],
	'(1,new3) (2,new3) (3,new3) (10,new3) (11,late) (20,new3)');
late_rows('renamed', 'renamed', 'c text', q[alter table renamed rename column c to d; alter table renamed add column c text default 'new'],
	q[insert into renamed values (10, 'old'); update renamed set c = 'old' where id = 3], q[insert into renamed values (11, 'd', 'c')],
	'(1,,new) (2,,new) (3,old,new) (10,old,new) (11,d,c) (20,,new)');
late_rows('names are swapped', 'swapped', q[a text default 'a', b text default 'b'],
	'alter table swapped rename column a to x; alter table swapped rename column b to a; alter table swapped rename column x to b',
	q[insert into swapped values (10, 'to b', 'to a')], q[insert into swapped (id, a) values (11, 'late')],
	'(1,a,b) (2,a,b) (3,a,b) (10,"to b","to a") (11,a,late) (20,a,b)');
late_rows('there and back', 'back', 'c text', 'alter table back rename column c to d; alter table back rename column d to c',
	q[insert into back values (10, 'old')], q[insert into back values (11, 'late')], '(1,) (2,) (3,) (10,old) (11,late) (20,)');
late_rows('partitions', 'parted', 'c text', q[alter table parted drop column c; alter table parted add column c text default 'new'],
	q[insert into parted values (10, 'old')], q[insert into parted values (11, 'late')], '(1,new) (2,new) (3,new) (10,new) (11,late) (20,new)');

# Rows of a node that is ahead wait for the statement.
sql($tokyo, q[create table ahead (id int primary key, c text); insert into ahead values (1, 'old')]);
converged(@nodes);
disable($paris, 'paris_from_tokyo');
my $seen = -s $paris->logfile;
sql($tokyo, q[alter table ahead drop column c; alter table ahead add column c text default 'new']);
caught_up($rome, $tokyo);
sql($rome, q[insert into ahead values (2, 'ahead'); update ahead set c = 'set' where id = 1]);
$paris->wait_for_log(qr/column "c" of the provider is newer than the table here/, $seen);
is(sql($paris, 'select * from ahead'), '1|old', 'a row of a later column does not come to the earlier one');
sql($paris, q[select braid.enable_subscription('paris_from_tokyo')]);
converged(@nodes);
same_tables(\@nodes, 'ahead');
is(sql($paris, q[select string_agg(c, ' ' order by id) from ahead]), 'set ahead', 'and comes to the later one');

# Two nodes add the column at once, and each has rows of the other and of the third.
sql($tokyo, q[create table of_both (id int primary key, c text)]);
converged(@nodes);
sql($tokyo, 'alter table of_both drop column c');
converged(@nodes);
my @sessions = map { $_->background_psql('postgres') } $tokyo, $paris;
$_->query_safe('begin; alter table of_both add column c text') for @sessions;
$_->query_safe('commit') for @sessions;
$_->quit for @sessions;
converged(@nodes);
sql($nodes[$_], "insert into of_both values ($_, 'of $_')") for 0 .. 2;
converged(@nodes);
sql($nodes[$_], "insert into of_both values (1$_, 'of $_'); update of_both set c = c || ' then' where id = $_") for 0 .. 2;
converged(@nodes);
same_tables(\@nodes, 'of_both');
is(sql($_, 'select count(*) from of_both where c is null'), '0', 'no value of a column that two nodes have added is lost at ' . $_->name) for @nodes;

# The table that the output plugin reads is rewritten while a stream is held.
sql($_, 'vacuum full braid.given_column') for @nodes;
late_rows('after it was rewritten', 'rewritten', 'c text', q[alter table rewritten drop column c; alter table rewritten add column c text; vacuum full braid.given_column],
	q[insert into rewritten values (10, 'old')], q[vacuum full braid.given_column; insert into rewritten values (11, 'late')], '(1,) (2,) (3,) (10,) (11,late) (20,)');

done_testing();
