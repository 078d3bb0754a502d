# The SQL of docs/umbrella.md, typed as it stands there.

use strict;
use warnings;

use Braid;
use Group;
use Page;
use PostgreSQL::Test::Utils;
use Test::More;

my %node = map { $_ => new_server($_, init => ['--data-checksums']) } qw(tokyo paris);
on_all('create database shop', values %node);
sub sql_at { my ($node, $sql) = @_; return $node{$node}->safe_psql('shop', $sql); }
sub dsn { my ($node) = @_; return $node{$node}->connstr('shop'); }
sql_at($_, 'create extension braid') for sort keys %node;
sql_at('tokyo', q[select braid.create_group('shop', node_name => 'tokyo', dsn => $d$] . dsn('tokyo') . q[$d$)]);
sql_at('paris', q[select braid.join_group($d$] . dsn('tokyo') . q[$d$, node_name => 'paris', dsn => $d$] . dsn('paris') . q[$d$)]);
sql_at($_, q[select braid.wait_for_group('150 s')]) for qw(paris tokyo);

my %after = (
	'Make one' => sub {
		is(sql_at($_, q[select count(*) from pg_inherits where inhparent = to_regclass('everywhere.orders')]), 2, "$_ has the umbrella") for sort keys %node;
	},
	'Read and write' => sub {
		is(sql_at($_, q[select count(*), count(*) filter (where item = 'table') from everywhere.orders]), '19|1', "$_ reads all rows") for sort keys %node;
	},
	'Roles' => sub {
		is(sql_at($_, q[set session authorization app; select count(*) from everywhere.orders]), '19', "$_: a role reads all rows") for sort keys %node;
		sql_at($_, 'reset session authorization') for sort keys %node;
	},
	'Columns' => sub {
		ok($node{$_}->poll_query_until('shop', q[select count(*) = 2 from pg_attribute where attname = 'note' and attrelid in ('orders'::regclass, 'everywhere.orders'::regclass)]),
			"$_ has the column") for sort keys %node;
	},
	'Remove it' => sub {
		is(sql_at($_, q[select to_regclass('everywhere.orders') is null]), 't', "$_ has no umbrella any more") for sort keys %node;
	},
);
my ($heading, %seen) = ('');
for my $part (parts('docs/umbrella.md'), { heading => '' })
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
	# What the statement made is on all nodes.
	my $position = sql_at('tokyo', 'select braid.sync_event()');
	sql_at('paris', "select braid.wait_for_event('tokyo', '$position', '180 s')");
}
is(join(', ', grep { !$seen{$_} } sort keys %after), '', 'the page has each section that is looked at');

done_testing();
