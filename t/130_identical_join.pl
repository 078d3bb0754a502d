# A node joins others by a copy, or copies a table again, while identical rows of a table without a
# key are removed elsewhere. The records of removals and their rows come along, as of the copy. So
# an older removal that arrives later takes over the row of a newer one here, too.

use strict;
use warnings;

use Braid;
use Mesh;
use Test::More;

my ($tokyo, $paris, $lima) = my @nodes = map { new_node($_) } qw(tokyo paris lima);
on_all(q[create table bag (v text, n int); alter table bag replica identity full], @nodes);
mesh(@nodes);
ok(wait_until(sub { scalar worker_pids($_, 'braid collector') }, 20), $_->name . ' collects deletions') for @nodes;
my $rows = q[select coalesce(string_agg(v, '' order by v), '') from bag];
# Whatever was taken, under names that are the same everywhere.
my $taken = q[
	with nodes as (select origin_id::int as id, node_name from braid.origin union all select 0, node_name from braid.node where is_local)
	select string_agg(concat_ws(' ', row_hash, removed_at, r.node_name, written_at, case when written_at <> 0 then w.node_name end), ', ' order by row_hash, removed_at, written_at)
	from braid.taken_row t left join nodes r on r.id = t.removed_by left join nodes w on w.id = t.written_by
];

sql($tokyo, q[insert into bag values ('a', 1), ('b', 1)]);
converged(@nodes);
# Oslo is to join: what the others write is kept for it from here on.
my $oslo = new_node('oslo');
sql($oslo, 'create table bag (n int, v text); alter table bag replica identity full');
my @late = map { subscribe($oslo, $_, copy_data => 'false') } $paris, $lima;
sql($oslo, "select braid.disable_subscription('$_')") for @late;

# Lima reaches no node. The rows that it removes, sessions of tokyo and paris remove later, when
# each has one more.
cut(grep { $_->[0] == $lima || $_->[2] == $lima } map { my $to = $_; map { stream($to, $_) } @nodes } @nodes);
sql($lima, 'delete from bag');
sql($tokyo, q[insert into bag values ('a', 1)]);
sql($tokyo, q[delete from bag where ctid = (select ctid from bag where v = 'a' order by ctid limit 1)]);
sql($paris, q[insert into bag values ('b', 1)]);
sql($paris, q[delete from bag where ctid = (select ctid from bag where v = 'b' order by ctid limit 1)]);
converged($tokyo, $paris);
is(sql($_, $rows), 'ab', 'one of each is left at ' . $_->name) for $tokyo, $paris;

subscribe($oslo, $tokyo);
is(sql($oslo, $rows), 'ab', 'the copy');
is(sql($oslo, $taken), sql($tokyo, $taken), 'with what was taken out there');
is(sql($oslo, 'select count(*) from braid.taken_row'), 2, 'by whomever');
sql($oslo, "select braid.enable_subscription('$late[1]')");
caught_up($oslo, $lima);
is(sql($oslo, $rows), '', 'an older removal that comes later counts');
sql($oslo, "select braid.enable_subscription('$late[0]')");
caught_up($oslo, $paris);
heal_all();
subscribe($_, $oslo, copy_data => 'false') for @nodes;
converged(@nodes, $oslo);
is(sql($_, $rows), '', 'the same at ' . $_->name) for @nodes, $oslo;

# Paris copies the table again, with the rows that it has removed itself: each removal is recorded
# once.
sql($tokyo, q[insert into bag values ('c', 1), ('c', 1)]);
converged(@nodes, $oslo);
cut(grep { $_->[0] == $lima || $_->[2] == $lima } map { my $to = $_; map { stream($to, $_) } @nodes } @nodes);
sql($lima, q[delete from bag where ctid = (select ctid from bag limit 1)]);
sql($oslo, "select braid.disable_subscription('$late[1]')");
sql($paris, q[insert into bag values ('c', 1)]);
sql($paris, q[delete from bag where ctid = (select ctid from bag order by ctid limit 1)]);
my ($from_tokyo) = map { $_->[1] } stream($paris, $tokyo);
sql($paris, "select braid.resync_table('$from_tokyo', 'bag')");
ok($paris->poll_query_until('postgres', "select state = 'ready' from braid.subscription_tables where subscription = '$from_tokyo'"), 'paris copies the table anew')
  or diag(sql($paris, 'select * from braid.subscription_tables'));
is(sql($paris, $taken), sql($tokyo, $taken), 'and knows what tokyo knows');
is(sql($paris, $rows), 'cc', 'two are left');
sql($oslo, "select braid.enable_subscription('$late[1]')");
heal_all();
converged(@nodes, $oslo);
is(sql($_, $rows), 'c', 'one, once the older removal is there, at ' . $_->name) for @nodes, $oslo;

done_testing();
