# Rows whose referenced row lost a conflict, or was deleted meanwhile at another node: found on all nodes, recorded or deleted where a rule says
# so, with the same outcome everywhere. A referenced row that is only late is waited for.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my $conf = "max_worker_processes = 32\nbraid.orphan_check_interval = 200ms\n";
my @nodes = my ($tokyo, $paris, $osaka) = map { new_node($_, conf => $conf) } qw(tokyo paris osaka);
on_all(q[
	create table orders (id int primary key, number text unique);
	create table line (id int primary key, orders int constraint line_orders references orders, v text);
	create table note (line int primary key constraint note_line references line on delete cascade, v text);
	create table fired (line int primary key, by_whom text);
	create function fire() returns trigger language plpgsql as $$ begin insert into public.fired values (old.id, current_user); return null; end $$;
	create trigger line_deleted after delete on line for each row execute function fire();
	create role clerk;
	grant select, insert on orders, fired to clerk;
	alter table line owner to clerk;
	alter table note owner to clerk;
], @nodes);
for my $subscriber (@nodes) { for my $provider (@nodes) { subscribe($subscriber, $provider) if $subscriber != $provider } }

sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
sub on_each { my ($sql) = @_; return join ' / ', map { sql($_, $sql) } @nodes; }
my $orphans = q[select coalesce(string_agg(key ->> 'id', ',' order by key ->> 'id'), '-') from braid.orphans('line')];
my $recorded = q[select coalesce(string_agg(concat_ws(' ', local_row ->> 'id', resolution, winner, constraint_name, columns), ', ' order by local_row ->> 'id'), '-') from braid.conflict_history where kind = 'foreign_key'];

sub links
{
	my ($verb, @subscriptions) = @_;
	for (@subscriptions) { sql($_->[0], "select braid.${verb}_subscription('$_->[1]')"); }
	return if $verb eq 'enable';
	$_->[2]->poll_query_until('postgres', qq[select not coalesce(bool_or(active), false) from pg_replication_slots where slot_name = (select '$_->[3]')]) for @subscriptions;
	return;
}

sub slot { my ($subscriber, $name) = @_; return sql($subscriber, "select slot_name from braid.subscription where subscription_name = '$name'"); }

sub link_of { my ($subscriber, $provider) = @_; my $name = $subscriber->name . '_from_' . $provider->name; return [ $subscriber, $name, $provider, slot($subscriber, $name) ]; }

sql($tokyo, q[insert into orders select i, 'n' || i from generate_series(1, 5) i; insert into line select i, i, 'first' from generate_series(1, 5) i]);
converged(@nodes);
is(on_each($orphans), '- / - / -', 'no orphans');

# A line comes while its order is deleted; an order loses to another one under its number.
my @links = map { my $node = $_; map { link_of($node, $_) } grep { $_ != $node } @nodes } @nodes;
links('disable', @links);
sql($tokyo, q[insert into line values (10, 1, 'late'), (11, null, 'nothing'); insert into orders values (20, 'same'); insert into line values (20, 20, 'loser'); insert into note values (10, 'on the line')]);
sql($paris, q[delete from line where id = 1; delete from orders where id = 1; insert into orders values (21, 'same'); insert into line values (21, 21, 'winner')]);
links('enable', @links);
converged(@nodes);
is(on_each($orphans), '10,20 / 10,20 / 10,20', 'the same orphans everywhere');
is(sql($osaka, q[select concat_ws(' ', referencing, constraint_name, key, referenced, referenced_key, "row") from braid.orphans() where key ->> 'id' = '10']),
	'line line_orders {"id": 10} orders {"id": 1} {"v": "late", "id": 10, "orders": 1}', 'with what there is to say');
sleep 1;
is(on_each($orphans), '10,20 / 10,20 / 10,20', 'without a rule they stay');
is(on_each($recorded), '- / - / -', 'and nothing is recorded');

# Recorded once.
sql($osaka, q[select braid.set_foreign_key_rule('line', 'line_orders', 'record')]);
my $both = '10 record local line_orders {orders}, 20 record local line_orders {orders}';
ok(wait_until(sub { sql($osaka, $recorded) eq $both }, 60), 'recorded') or diag(sql($osaka, $recorded));
sleep 1;
is(sql($osaka, $recorded), $both, 'once');
is(on_each($orphans), '10,20 / 10,20 / 10,20', 'they stay');

# An order that is late, as its stream is stopped: the line is no orphan to be deleted.
my $late = link_of($osaka, $tokyo);
links('disable', $late);
sql($tokyo, q[insert into orders values (30, 'n30')]);
ok(wait_until(sub { sql($paris, 'select count(*) from orders where id = 30') eq '1' }, 60), 'the order is at paris');
sql($paris, q[insert into line values (30, 30, 'waits')]);
ok(wait_until(sub { sql($osaka, 'select count(*) from line where id = 30') eq '1' }, 60), 'the line is at osaka');
is(sql($osaka, $orphans), '10,20,30', 'its order is not');
sql($osaka, q[select braid.set_foreign_key_rule('line', null, 'delete')]);
sleep 2;
is(sql($osaka, 'select count(*) from line where id = 30'), '1', 'the order is waited for');
links('enable', $late);
ok(wait_until(sub { on_each($orphans) eq '- / - / -' }, 60), 'orphans are deleted on all nodes') or diag(on_each($orphans));
converged(@nodes);
is(on_each('select string_agg(id::text, $$,$$ order by id) from line'), join(' / ', ('2,3,4,5,11,21,30') x 3), 'and nothing else is');
same_tables(\@nodes, qw(orders line note fired));
is(sql($tokyo, 'select count(*) from note'), '0', 'what refers to them follows');
is(sql($osaka, 'select string_agg(line || by_whom, $$,$$ order by line) from fired where line > 1'), '10clerk,20clerk', 'triggers fire as the owner');
is(sql($osaka, q[select string_agg(concat_ws(' ', local_row ->> 'v', resolution, winner), ', ' order by local_row ->> 'v') from braid.conflict_history where kind = 'foreign_key' and resolution = 'delete']),
	'late delete none, loser delete none', 'what is deleted is recorded');

$_->stop for @nodes;
done_testing();
