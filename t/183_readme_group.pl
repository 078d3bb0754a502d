# The steps of the README for a group, typed as they stand there: the role in the connection strings is the one that the README makes.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my ($steps) = slurp_file("$ENV{TESTDIR}/README.md") =~ /^## A group, one call a node\n(.*?)^## /ms or die 'the README has no such steps';
my @blocks = $steps =~ /^```sql\n(-- on .*?)^```/msg;
is(scalar @blocks, 2, 'the README has steps for two nodes');

my %node = map { $_ => new_server($_, init => ['--data-checksums']) } qw(tokyo paris);
on_all('create database shop', values %node);
sub sql { my ($node, $sql) = @_; return $node{$node}->safe_psql('shop', $sql); }
sql('tokyo', q[
	create table customer (id uuid primary key default gen_random_uuid(), name text);
	insert into customer (name) select 'c' || i from generate_series(1, 25) i;
]);
my $shown;
for my $block (@blocks)
{
	my ($where) = $block =~ /^-- on (\w+)/m;
	my $text = $block =~ s/host=(\w+)\.example/'host=' . $node{$1}->host . ' port=' . $node{$1}->port/ger;
	$shown = sql($where, $text);
}
like($shown, qr/^tokyo\|active\|data\|f\|f\|/m, 'the view shows the first node');
like($shown, qr/^paris\|active\|data\|f\|t\|/m, 'and the second one');
sql('paris', q[insert into customer (name) values ('paris'); alter table customer add column town text; create table later (id int primary key)]);
ok($node{tokyo}->poll_query_until('shop', q[select count(*) = 1 from pg_attribute where attrelid = 'customer'::regclass and attname = 'town']), 'a column comes to the other node');
ok($node{tokyo}->poll_query_until('shop', q[select count(*) = 26 from customer]), 'and rows');
ok($node{tokyo}->poll_query_until('shop', q[select to_regclass('later') is not null]), 'and a table');
sql('tokyo', q[insert into later values (1)]);
ok($node{paris}->poll_query_until('shop', q[select count(*) = 1 from later]), 'which has rows of both');
is(sql('tokyo', q[select string_agg(distinct usename, ' ') from pg_stat_replication]), 'replicator', 'nodes connect as the role of the README');

done_testing();
