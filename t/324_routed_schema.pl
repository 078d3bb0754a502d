# A node joins a group with routed tables, and has the tables already. From then on it refuses rows
# of other nodes, as the others do.

use strict;
use warnings;

use Braid;
use Group;
use Test::More;

my $table = 'create table orders (tenant_id bigint, order_id bigint, created_at timestamptz not null default now(), primary key (tenant_id, order_id, created_at))';
my ($tokyo, $paris) = group([qw(tokyo paris)], $table);
sql($tokyo, q[select braid.route_table('orders', tenant => 'tenant_id', record => 'order_id', created => 'created_at', shards => 16)]);

my $oslo = new_server('oslo', init => ['--data-checksums']);
sql($oslo, 'create extension braid');
sql($oslo, $table);
my ($there, $here) = ($tokyo->connstr('postgres'), $oslo->connstr('postgres'));
sql($oslo, "select braid.join_group(\$d\$$there\$d\$, node_name => 'oslo', dsn => \$d\$$here\$d\$, mode => 'schema')");
joined($tokyo, $paris, $oslo);

my $constraint = q[select pg_get_constraintdef(oid) from pg_constraint where conname = 'braid_routing'];
is(sql($oslo, $constraint), sql($tokyo, $constraint), 'the table is guarded as elsewhere');
for my $node ($tokyo, $paris)
{
	my $name = $node->name;
	my ($tenant) = grep { sql($tokyo, "select nodes from braid.route('orders', '$_', '1')") eq "{$name}" } 1 .. 50;
	my $insert = "insert into orders (tenant_id, order_id) values ($tenant, 1)";
	like(refusal($oslo, $insert), qr/belongs to node $name/, "a row of $name is refused");
	sql($node, $insert);
}
is(sql($oslo, q[select string_agg(finding, ', ') from braid.check() where severity = 'error']), '', 'nothing is wrong');
is(sql($oslo, 'select count(*) from orders'), 0, 'it has no rows of others');

$_->stop for $tokyo, $paris, $oslo;
done_testing();
