# The initial copy of a routed table takes the rows that belong to the subscriber, and no others,
# with any names of node, schema, table and columns, and any owner of the table. A table without a
# guard of its own is copied whole. So is every table of a provider that lacks braid.is_at.
# Functions of this test make the decisions.

use strict;
use warnings;

use Braid;
use Test::More;

my $tokyo = new_node('tokyo');
my ($paris, $odd) = map { new_server($_) } qw(paris odd);
sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
sub dsn { my ($node) = @_; return $node->connstr('postgres'); }

my $odd_name = q[o'slo, "x")\\];
my %named = (paris => [ $paris, 'paris' ], odd => [ $odd, $odd_name ]);
for my $named (values %named)
{
	my ($node, $name) = @$named;
	my $dsn = dsn($node);
	sql($node, "create extension braid; select braid.create_node(\$name\$$name\$name\$, \$dsn\$$dsn\$dsn\$)");
}

my $tables = q[
	create schema "Sh'op (x";
	grant usage on schema "Sh'op (x" to public;
	create table "Sh'op (x"."or""ders)" ("Ten'ant" text not null, id bigint not null, at timestamptz not null, v text, primary key ("Ten'ant", id, at));
	create table orders (tenant bigint, id bigint, at timestamptz, v text, primary key (tenant, id, at));
	create table alike (tenant bigint, id bigint, at timestamptz, v text, primary key (tenant, id, at));
	create table other (tenant bigint constraint braid_routing check (tenant > 0), id bigint primary key);
];
on_all($tables, $tokyo, $paris, $odd);
sql($tokyo, q[
	create role keeper;
	alter table orders owner to keeper;
	insert into orders select 1, i, '2026-01-01', repeat('x', i) from generate_series(1, 300) i;
	insert into alike table orders;
	insert into other select 1, i from generate_series(1, 300) i;
	insert into "Sh'op (x"."or""ders)" select 'a)', i, '2026-01-01', 'v' from generate_series(1, 300) i;
	create function braid.is_here(relation regclass, tenant bigint, record bigint, created timestamptz) returns boolean language sql immutable as 'select true';
	create function braid.is_here(relation regclass, tenant text, record bigint, created timestamptz) returns boolean language sql immutable as 'select true';
	grant execute on all functions in schema braid to public;
	alter table orders add constraint braid_routing check (braid.is_here('orders'::regclass, tenant, id, at)) not valid;
	drop table alike;
	create table alike (like orders including all);
	insert into alike table orders;
	alter table "Sh'op (x"."or""ders)" add constraint braid_routing
		check (braid.is_here('"Sh''op (x"."or""ders)"'::regclass, replace("Ten'ant", ')', E'\\\\''('), id + 0, at)) not valid;
]);

my $rows = q[select (select count(*) from orders), (select count(*) from "Sh'op (x"."or""ders)"), (select count(*) from alike), (select count(*) from other)];

# Tables can't be routed at a provider that can't say which rows belong to a node.
sql($tokyo, q[alter extension braid drop function braid.is_at(text, regclass, "any", "any", timestamptz);
	drop function braid.is_at(text, regclass, "any", "any", timestamptz)]);
subscribe($paris, $tokyo);
is(sql($paris, $rows), '300|300|300|300', 'without braid.is_at all rows are copied');
sql($paris, q[select braid.drop_subscription('paris_from_tokyo'); truncate orders, "Sh'op (x"."or""ders)", alike, other]);

# Even rows are of paris, those that three divides of the odd node; the odd table's tenant has to
# come as the expression makes it.
for my $type (qw(bigint text))
{
	my $is_it = $type eq 'text' ? q[and tenant = E'a\\\\''('] : 'and tenant = 1';
	sql($tokyo, qq[
		create function braid.is_at(node text, relation regclass, tenant $type, record bigint, created timestamptz) returns boolean
		language plpgsql stable as \$is_at\$
		begin
			if relation not in ('public.orders'::regclass, '"Sh''op (x"."or""ders)"'::regclass) then
				raise exception 'asked for %', relation;
			end if;
			return case node when 'paris' then record % 2 = 0 when \$name\$$odd_name\$name\$ then record % 3 = 0 end $is_it;
		end \$is_at\$;
		grant execute on function braid.is_at(text, regclass, $type, bigint, timestamptz) to public;
	]);
}
subscribe($paris, $tokyo, name => 'paris_again');
subscribe($odd, $tokyo);
is(sql($paris, $rows), '150|150|300|300', 'paris has its rows of the routed tables, and all of the others');
is(sql($odd, $rows), '100|100|300|300', 'so does a node with an odd name');
is(sql($paris, q[select bool_and(id % 2 = 0 and v = repeat('x', id::int)) from orders]), 't', 'they are the right ones');
is(sql($odd, q[select bool_and(id % 3 = 0) from "Sh'op (x"."or""ders)"]), 't', 'of the odd table, too');
is(sql($paris, q[select rows_total from braid.subscription_tables where relation = 'orders'::regclass]), '150', 'the others are not counted');

# A guard that can't be called stops the copy: nothing is copied in its place.
sql($tokyo, 'create or replace function braid.is_at(node text, relation regclass, tenant bigint, record bigint, created timestamptz) returns boolean language sql stable as $$ select 1 / 0 = 1 $$');
my $more = new_node('more', publication => '');
sql($more, $tables);
subscribe($more, $tokyo, wait => 0);
becomes($more, q[select copy_error ~ 'division by zero' from braid.subscription_tables where relation = 'orders'::regclass], 't', 'an error of braid.is_at is the error of the copy');
is(sql($more, 'select count(*) from orders'), '0', 'and no row is copied');

done_testing();
