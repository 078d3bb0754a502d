# A transaction conflicts with very many rows under a further unique key. It is applied a few times,
# not once more for each of them. Both nodes end with the newer rows.

use strict;
use warnings;

use Braid;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
my @both = ($tokyo, $paris);
on_all(q[
	create table item (id int primary key, code int not null unique, v text);
	create table late (id int primary key, code int not null, v text, unique (code) deferrable initially deferred);
	create table asked (id int primary key, code int not null unique, v text);
] . keep_newest('asked'), @both);
subscribe($paris, $tokyo);
subscribe($tokyo, $paris);
my @streams = ([ $paris, 'paris_from_tokyo' ], [ $tokyo, 'tokyo_from_paris' ]);
my $count = 300;

sub retries { my ($node, $name) = @_; return $node->safe_psql('postgres', "select retries from braid.subscription_detail where name = '$name'"); }

# The first rows are written before the second, while the nodes are cut off. Returns how often each
# node has applied a transaction again.
sub meet
{
	my ($first, $second) = @_;
	converged(@both);
	disable(@$_) for @streams;
	$tokyo->safe_psql('postgres', $first);
	$paris->safe_psql('postgres', $second);
	$_->[0]->safe_psql('postgres', "select braid.enable_subscription('$_->[1]')") for @streams;
	my @before = map { retries(@$_) } @streams;
	converged(@both) for 1 .. 3;
	is(status(@$_)->{last_error}, '', "$_->[1] goes on") for @streams;
	return map { retries(@{ $streams[$_] }) - $before[$_] } 0 .. 1;
}

for my $table (qw(item late asked))
{
	my @again = meet("insert into $table select i, i, 'older' from generate_series(1, $count) i",
		"insert into $table select 1000 + i, i, 'newer' from generate_series(1, $count) i");
	same_tables(\@both, $table);
	is($paris->safe_psql('postgres', "select count(*), count(*) filter (where v = 'newer') from $table"), "$count|$count", "$table: the newer rows stay");
	cmp_ok($again[$_], '<', 20, "$table: $streams[$_][1] applies it a few times") for 0 .. 1;
}
is($_->safe_psql('postgres', q[select count(*) from braid.displacement]), 0, 'all is told on ' . $_->name) for @both;
is($tokyo->safe_psql('postgres', q[select count(*), count(distinct local_row ->> 'id') from braid.conflict_history where relation = 'item'::regclass and winner = 'remote' and kind = 'insert_exists']),
	"$count|$count", 'each row that has left is in the history once');

# The transaction changes rows that it has displaced: by their keys they come again, under another
# code.
my @again = meet("insert into item select 3000 + i, 7000 + i, 'older' from generate_series(1, $count) i",
	"begin; insert into item select 4000 + i, 7000 + i, 'newer' from generate_series(1, $count) i; insert into item select 3000 + i, 8000 + i, 'newer' from generate_series(1, $count) i; " .
	"update item set v = 'newest' where id > 4200; delete from item where id between 3101 and 3200; commit");
same_tables(\@both, 'item');
is($paris->safe_psql('postgres', q[select count(*) filter (where id between 3001 and 3300), count(*) filter (where id between 4001 and 4300 and v like 'new%') from item]), ($count - 100) . "|$count",
	'rows that were displaced and come again');
cmp_ok($again[$_], '<', 20, "$streams[$_][1] applies that a few times") for 0 .. 1;

# Some win and some lose, in one transaction.
converged(@both);
disable(@$_) for @streams;
$tokyo->safe_psql('postgres', "insert into item select 7000 + i, 10000 + i, 'tokyo' from generate_series(1, $count) i where i % 2 = 0");
$paris->safe_psql('postgres', "begin; insert into item select 7500 + i, 10000 + i, 'paris' from generate_series(1, $count) i; commit");
$tokyo->safe_psql('postgres', "insert into item select 7000 + i, 10000 + i, 'tokyo' from generate_series(1, $count) i where i % 2 = 1");
$_->[0]->safe_psql('postgres', "select braid.enable_subscription('$_->[1]')") for @streams;
converged(@both) for 1 .. 3;
same_tables(\@both, 'item');
is($paris->safe_psql('postgres', q[select string_agg(v || ' ' || n, ', ' order by v) from (select v, count(*) n from item where code between 10001 and 10300 group by v) x]),
	'paris ' . $count / 2 . ', tokyo ' . $count / 2, 'the newer of each pair');

done_testing();
