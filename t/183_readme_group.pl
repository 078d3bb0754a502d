# The three calls of the README, run as written, while tokyo is written to. The role in the
# connection strings is the one that the README creates.

use strict;
use warnings;

use Braid;
use Page;
use PostgreSQL::Test::Utils;
use Test::More;

my @parts = parts('README.md', 'Three nodes in three calls');
is(scalar(grep { $_->{sql} =~ /braid\.(create|join)_group\(/ } @parts), 3, 'three calls');

my %node = map { $_ => new_server($_, init => ['--data-checksums']) } qw(tokyo paris oslo);
my @names = qw(tokyo paris oslo);
on_all('create database shop', values %node);
sub sql { my ($node, $sql) = @_; return $node{$node}->safe_psql('shop', $sql); }
sql('tokyo', q[
	create table customer (id uuid primary key default gen_random_uuid(), name text);
	insert into customer (name) select 'c' || i from generate_series(1, 25) i;
	create table visit (id serial primary key, node text);
	insert into visit (node) values ('tokyo');
]);
for my $part (@parts)
{
	sql('tokyo', q[insert into customer (name) values ('meanwhile')]);
	run_part($part, 'shop', \%node);
}
# Tests that this node's rows reach all others.
sub reaches_all
{
	my ($query) = @_;
	ok($node{$_}->poll_query_until('shop', $query), "$_: $query") for @names;
	return;
}
my $meanwhile = @parts;
for my $name (@names)
{
	sql($name, qq[select braid.wait_for_group('180 s')]);
	sql($name, qq[insert into customer (name) values ('$name'); insert into visit (node) values ('$name')]);
}
reaches_all("select count(*) = 25 + 3 + $meanwhile from customer");
reaches_all('select count(*) = 4 from visit');
sql('paris', q[alter table customer add column town text; create table later (id int primary key)]);
reaches_all(q[select exists (select from pg_attribute where attrelid = 'customer'::regclass and attname = 'town') and to_regclass('later') is not null]);
sql('oslo', 'insert into later values (1)');
reaches_all('select count(*) = 1 from later');
is(sql('tokyo', q[select string_agg(name || ' ' || state, ', ' order by node_number) from braid.group_nodes]), 'tokyo active, paris active, oslo active', 'the view shows three nodes');
is(sql('tokyo', q[select string_agg(distinct usename, ' ') from pg_stat_replication]), 'replicator', 'nodes connect as the role of the README');

done_testing();
