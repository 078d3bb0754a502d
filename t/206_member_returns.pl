# A member leaves its group, and the same node joins it again: leftovers of its former membership do
# not count for the new one.

use strict;
use warnings;

use Braid;
use Group;
use PostgreSQL::Test::Utils;
use Test::More;

my ($tokyo, $paris) = my @nodes = group([qw(tokyo paris)], 'create table item (id int primary key, v text); insert into item select i, $$tokyo$$ from generate_series(1, 100) i');
sql($paris, 'select braid.leave_group()');
ok($paris->poll_query_until('postgres', 'select not exists (select from braid.group_self) and not exists (select from braid.subscription)'), 'paris has left');
ok($tokyo->poll_query_until('postgres', 'select not exists (select from braid.subscription)'), 'and tokyo has dropped its subscription');
sql($paris, 'truncate item');
my ($there, $here) = map { $_->connstr('postgres') } $tokyo, $paris;
sql($paris, "select braid.join_group(\$d\$$there\$d\$, dsn => \$d\$$here\$d\$, mode => 'schema')");
for my $node ($paris, $tokyo)
{
	is(refusal($node, q{select braid.wait_for_group('180 s')}), 'no error: ', $node->name . ' has its group again') or BAIL_OUT(look($paris, 'table braid.join_progress'));
}
sql($tokyo, q{insert into item values (1001, 'tokyo')});
sql($paris, q{insert into item values (1002, 'paris')});
have_all(@nodes);
same_tables(\@nodes, 'item');
is(sql($tokyo, 'select count(*) from item'), '102', 'changes stream both ways');
done_testing();
