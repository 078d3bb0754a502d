# A table that is copied again loses no row when it is emptied: the copy waits until the provider
# has the changes that were made here, and those of a third node.

use strict;
use warnings;

use Braid;
use Mesh;
use Test::More;

my ($tokyo, $paris, $oslo) = my @nodes = map { new_node($_) } qw(tokyo paris oslo);
on_all('create table item (id int primary key, v text)', @nodes);
mesh(@nodes);
sql($tokyo, q[insert into item select i, 'first' from generate_series(1, 5) i]);
converged(@nodes);
my $everything = q[select string_agg(id || v, ' ' order by id) from item];
sub copy_error { return sql($oslo, q[select copy_error from braid.subscription_tables where subscription = 'oslo_from_tokyo']); }

for my $writer ($oslo, $paris)
{
	# The writer's changes do not come to tokyo.
	my $name = $writer->name;
	cut(stream($tokyo, $writer));
	sql($writer, qq[insert into item select max(id) + 10, 'new' from item; update item set v = '$name' where id = 1; delete from item where id = (select max(id) from item where v = 'first')]);
	caught_up($oslo, $paris);
	my $wanted = sql($oslo, $everything);
	sql($oslo, q[select braid.resync_table('oslo_from_tokyo', 'item')]);
	ok(wait_until(sub { copy_error() eq qq[the provider has not yet applied all changes of node "$name" that this node has] }, 30), "the copy waits for $name") or diag(copy_error());
	is(sql($oslo, $everything), $wanted, 'the table is as it was meanwhile');
	heal(stream($tokyo, $writer));
	sql($oslo, q[select braid.wait_for_subscription('oslo_from_tokyo')]);
	converged(@nodes);
	all_have($everything, $wanted, "nothing of $name is lost");
}

# The link is there, and what was written is on its way.
my @writers = map { start_pgbench_inserts($_->[0], $_->[1]) } [ $oslo, 1000 ], [ $paris, 5000 ];
for my $round (1 .. 3)
{
	sql($oslo, q[select braid.resync_table('oslo_from_tokyo', 'item')]);
	sql($oslo, q[select braid.wait_for_subscription('oslo_from_tokyo')]);
}
finish_pgbench($_) for @writers;
converged(@nodes);
all_have(q[select count(*) filter (where id between 1000 and 4999) > 100, count(*) filter (where id >= 5000) > 100 from item], 't|t', 'both wrote');
my $sum = sql($oslo, 'select count(*), sum(id) from item');
all_have('select count(*), sum(id) from item', $sum, 'and all nodes have all of it');

done_testing();

sub start_pgbench_inserts
{
	my ($node, $first) = @_;
	sql($node, "create sequence if not exists item_number start $first");
	my $script = $node->basedir . '/insert.sql';
	open my $file, '>', $script or die;
	print $file "insert into item values (nextval('item_number'), 'written');\n";
	close $file;
	return start_pgbench($node, '-c', '2', '-T', '6', '-R', '150', '-f', $script);
}
