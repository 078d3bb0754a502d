# The SQL of docs/routing-balancer.md, typed as it stands there.

use strict;
use warnings;

use Braid;
use Group;
use Page;
use PostgreSQL::Test::Utils;
use Test::More;

my @all = group([qw(tokyo paris oslo)], q{
	create table orders (tenant_id bigint not null, order_id uuid not null default gen_random_uuid(), created_at timestamptz not null default now(), item text,
		primary key (tenant_id, order_id, created_at));
});
my %node = map { $_->name => $_ } @all;
sql($all[0], q[select braid.route_table('orders', tenant => 'tenant_id', record => 'order_id', created => 'created_at', shards => 64)]);
# Rows enough for a decision, of a tenant that is at home on this node.
my $tenant = sql($all[1], q[select t from generate_series(1, 1000) t cross join lateral braid.route('orders', t::text, gen_random_uuid()::text) r where r.nodes = '{paris}' limit 1]);
sql($all[1], "insert into orders (tenant_id) select $tenant from generate_series(1, 2000)");
my ($heading, %printed) = ('');
for my $part (parts('docs/routing-balancer.md'), { heading => '' })
{
	if ($heading eq 'Turn it on' && $part->{heading} ne $heading)
	{
		is(sql($_, q[select balancer from braid.routed_tables]), 'advise', $_->name . ': the balancer advises') for @all;
		ok($_->poll_query_until('postgres', "select (mode, tenant, spread) = ('advise', '$tenant', 64) from braid.balancer_decisions"), $_->name . ': the tenant with all rows is to be spread') for @all;
	}
	$heading = $part->{heading};
	next unless defined $part->{sql};
	$printed{$heading} = join '', values %{ { run_part($part, 'postgres', \%node) } };
}
like($printed{'Read a decision'} // '', qr/100 % of all storage, threshold 0.78 %/, 'a decision is read');
is(join(', ', sort keys %printed), 'Read a decision, Turn it on, Who writes', 'the page has each section that is looked at');

done_testing();
