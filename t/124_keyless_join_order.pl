# A node joins others by a copy, while changes of tables without a key have not arrived everywhere.
# The copied node's records come along: removals that have found no row, and the versions of its
# rows.

use strict;
use warnings;

use Braid;
use Mesh;
use Test::More;

my ($tokyo, $paris, $lima) = my @nodes = map { new_node($_) } qw(tokyo paris lima);
on_all(q[create table bag (id int, v text); alter table bag replica identity full], @nodes);
mesh(@nodes);
ok(wait_until(sub { scalar worker_pids($_, 'braid collector') }, 20), $_->name . ' collects deletions') for @nodes;
sub rows { my ($node) = @_; return sql($node, q[select coalesce(string_agg(concat_ws(':', id, v), ' ' order by id, v collate "C"), '') from bag]); }

sql($paris, q[insert into bag values (1, 'stays'), (2, 'again'), (2, 'again'), (3, 'twice')]);
converged(@nodes);

# Oslo is to join by a copy from tokyo: what the others write is kept for it from here on.
sub joins
{
	my ($name, @providers) = @_;
	my $node = new_node($name);
	sql($node, q[create table bag (v text, id int); alter table bag replica identity full]);
	my @streams = map { subscribe($node, $_, copy_data => 'false') } @providers;
	sql($node, "select braid.disable_subscription('$_')") for @streams;
	return ($node, @streams);
}
my ($oslo, $oslo_from_paris, $oslo_from_lima) = joins('oslo', $paris, $lima);

# Paris does not reach tokyo: lima removes a row of paris before it has arrived.
cut(stream($tokyo, $paris));
sql($paris, q[insert into bag values (4, 'removed'), (5, 'changed')]);
caught_up($lima, $paris);
sql($lima, q[delete from bag where id = 4]);
sql($lima, q[update bag set v = 'by lima' where id = 5]);
caught_up($_, $lima) for $tokyo, $paris;
is(rows($tokyo), '1:stays 2:again 2:again 3:twice 5:by lima', 'tokyo has what lima made of rows that have not come');
is(sql($tokyo, q[select count(*) from braid.tombstone where relation = 'bag'::regclass]), 2, 'and remembers that they were to be taken out');

# Lima reaches no node: paris and lima remove the same rows, and paris adds some identical ones
# later.
heal(stream($tokyo, $paris));
cut(stream($tokyo, $lima), stream($paris, $lima), stream($lima, $paris));
sql($lima, q[delete from bag where id in (2, 3)]);
sql($paris, q[delete from bag where id in (2, 3)]);
sql($paris, q[insert into bag values (2, 'again'), (2, 'again'), (3, 'twice'), (3, 'twice')]);
caught_up($tokyo, $paris);
# And again what has not come to tokyo.
cut(stream($tokyo, $paris));
heal(stream($lima, $paris));
sql($paris, q[insert into bag values (6, 'removed')]);
caught_up($lima, $paris);

sql($lima, q[delete from bag where id = 6]);
subscribe($oslo, $tokyo);
is(rows($oslo), rows($tokyo), 'the copy');
is(sql($oslo, q[select count(*) from braid.copied_version where relation = 'bag'::regclass]) >= 5, 1, 'with versions of its rows');
# First what takes rows out, then what added them.
sql($oslo, "select braid.enable_subscription('$oslo_from_lima')");
caught_up($oslo, $lima);
is(rows($oslo), '1:stays 2:again 2:again 3:twice 3:twice 5:by lima', 'lima took out older ones');
sql($oslo, "select braid.enable_subscription('$oslo_from_paris')");
caught_up($oslo, $paris);
is(rows($oslo), '1:stays 2:again 2:again 3:twice 3:twice 5:by lima', 'what was taken out does not come');
heal_all();
subscribe($_, $oslo, copy_data => 'false') for @nodes;
converged(@nodes, $oslo);
is(rows($_), '1:stays 2:again 2:again 3:twice 3:twice 5:by lima', 'the same at ' . $_->name) for @nodes, $oslo;

# Tokyo remembers a removal at the time of the copy.
my ($quito, @streams) = joins('quito', $paris, $lima, $oslo);
cut(stream($tokyo, $paris));
sql($paris, q[insert into bag values (7, 'removed'), (8, 'stays')]);
caught_up($lima, $paris);
sql($lima, q[delete from bag where id = 7]);
caught_up($tokyo, $lima);
is(sql($tokyo, q[select count(*) from braid.tombstone where relation = 'bag'::regclass]) > 0, 1, 'tokyo remembers a row that is to come');
subscribe($quito, $tokyo);
sql($quito, "select braid.enable_subscription('$_')") for @streams;
caught_up($quito, $_) for $paris, $lima, $oslo;
is(rows($quito), '1:stays 2:again 2:again 3:twice 3:twice 5:by lima 8:stays', 'a row does not come of which the copied node had only known that it was to be taken out');
heal_all();
converged(@nodes, $oslo, $quito);
is(rows($_), '1:stays 2:again 2:again 3:twice 3:twice 5:by lima 8:stays', 'the same at ' . $_->name) for @nodes, $oslo, $quito;

# Tokyo has set a transaction of paris aside: the copy is without it, so it is applied by the stream
# of paris.
my ($lagos, @lagos_streams) = joins('lagos', $paris, $lima, $oslo, $quito);
my ($tokyo_from_paris) = map { $_->[1] } stream($tokyo, $paris);
sql($tokyo, "select braid.alter_subscription('$tokyo_from_paris', on_error => 'park')");
sql($tokyo, 'alter table bag add constraint small check (id < 100)');
sql($paris, q[insert into bag values (100, 'large'), (9, 'with it')]);
sql($paris, q[insert into bag values (10, 'after it')]);
caught_up($tokyo, $paris);
is(rows($tokyo), '1:stays 2:again 2:again 3:twice 3:twice 5:by lima 8:stays 10:after it', 'a transaction is set aside');
subscribe($lagos, $tokyo);
is(rows($lagos), rows($tokyo), 'the copy is without it');
sql($lagos, "select braid.enable_subscription('$_')") for @lagos_streams;
caught_up($lagos, $_) for $paris, $lima, $oslo, $quito;
my $all = '1:stays 2:again 2:again 3:twice 3:twice 5:by lima 8:stays 9:with it 10:after it 100:large';
is(rows($lagos), $all, 'its own stream brings it');
sql($tokyo, 'alter table bag drop constraint small');
is(sql($tokyo, "select braid.retry_parked('$tokyo_from_paris')"), '1', 'it is applied at last');
converged(@nodes, $oslo, $quito, $lagos);
is(rows($_), $all, 'the same at ' . $_->name) for @nodes, $oslo, $quito, $lagos;

done_testing();
