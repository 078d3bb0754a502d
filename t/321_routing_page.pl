# The SQL of docs/routing.md, run as written.

use strict;
use warnings;

use Braid;
use Group;
use Page;
use PostgreSQL::Test::Utils;
use Test::More;

my %node = map { $_ => new_server($_, init => ['--data-checksums']) } qw(tokyo paris oslo);
on_all('create database shop', values %node);
sub sql_at { my ($node, $sql) = @_; return $node{$node}->safe_psql('shop', $sql); }
sub dsn { my ($node) = @_; return $node{$node}->connstr('shop'); }
sql_at($_, 'create extension braid') for sort keys %node;
sql_at('tokyo', q[select braid.create_group('shop', node_name => 'tokyo', dsn => $d$] . dsn('tokyo') . q[$d$)]);
for my $name (qw(paris oslo))
{
	sql_at($name, q[select braid.join_group($d$] . dsn('tokyo') . qq[\$d\$, node_name => '$name', dsn => \$d\$] . dsn($name) . q[$d$)]);
	sql_at($name, q[select braid.wait_for_group('150 s')]);
}
sql_at('tokyo', q[select braid.wait_for_group('150 s')]);

my %after = (
	'Route a table' => sub {
		is(sql_at($_, q[select relation, state, shards, node_sets from braid.routed_tables]), 'public.orders|open|64|3', "$_ routes the table") for sort keys %node;
	},
	'Write and read' => sub {
		is(sql_at($_, q[select count(*) from braid.route_query('orders', '42')]), 1, "$_: a small tenant is on one node") for sort keys %node;
	},
	'Spread a large tenant' => sub {
		is(sql_at('tokyo', q[select spread || ' ' || tenants::text from braid.routing_rules]), '8 {42}', 'the rule is known');
		is(sql_at('tokyo', q[select count(*) from braid.route_query('orders', '42')]), 3, 'new rows are on all nodes');
		is(sql_at('oslo', q[select count(*) from braid.route_query('orders', '42', upto => now() - interval '1 day')]), 1, 'old ones on one');
	},
	'Move shards' => sub {
		is(sql_at('tokyo', q[select nodes from braid.shards where shard = 0]), '{paris}', 'the shard has moved');
	},
	'End it' => sub {
		is(sql_at($_, q[select count(*) from braid.routed_tables]), 0, "$_ does not route it any more") for sort keys %node;
	},
);
my ($heading, %seen) = ('');
for my $part (parts('docs/routing.md'), { heading => '' })
{
	if ($part->{heading} ne $heading)
	{
		($after{$heading} // sub { })->();
		$heading = $part->{heading};
		$seen{$heading} = 1;
	}
	next unless defined $part->{sql};
	my %printed = run_part($part, 'shop', \%node);
	next unless $part->{sql} =~ /select braid\.sync_event/;
	# The statement that made the table is on all nodes.
	for my $name (qw(paris oslo))
	{
		ok($node{$name}->poll_query_until('shop', q[select to_regclass('orders') is not null]), "$name has the table");
	}
}
is(join(', ', grep { !$seen{$_} } sort keys %after), '', 'the page has each section that is looked at');

done_testing();
