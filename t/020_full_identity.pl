# REPLICA IDENTITY FULL: rows are found by all of their columns, or by a local key. A row that
# becomes equal to another, or that changes outside of its key, has no conflict.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
on_all(q[
	create table bag (a int, b text);
	alter table bag replica identity full;
	create table keyed (id int primary key, b text);
	alter table keyed replica identity full;
], $tokyo, $paris);
subscribe($paris, $tokyo);
$tokyo->safe_psql('postgres', q[
	insert into bag values (1, 'x'), (2, 'x'), (3, 'x');
	insert into keyed values (1, 'x'), (2, 'y'), (3, 'z');
]);
$tokyo->safe_psql('postgres', $_) for
  'update bag set a = 2 where a = 1',
  q[update keyed set b = 'changed' where id = 1],
  'update keyed set id = 4 where id = 2',
  'delete from keyed where id = 3';
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], qw(bag keyed));
is($paris->safe_psql('postgres', 'select relation, kind from braid.conflict_history'), '', 'and none of it is a conflict');

done_testing();
