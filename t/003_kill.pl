# kill -9 of every kind of process on either side, at random moments, while both nodes write: each
# transaction takes effect once.
#
# The ledger has no key, so a row that was applied twice would be there twice. Each transaction also
# raises a counter of its own node: after a lost or doubled transaction, counter and ledger differ.
# Rows that both nodes write must converge.

use strict;
use warnings;

use Braid;
use Kill;
use Test::More;
use Time::HiRes qw(sleep);

my $kills = $ENV{BRAID_TEST_KILLS} // 24;
kill_seed();

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
my @nodes = ($tokyo, $paris);

on_all(q[
	create table ledger (node text, id bigint, k int);
	create table counter (node text, k int, n bigint not null, primary key (node, k));
	create table shared (k int primary key, node text, v bigint);
	create sequence ledger_id;
], @nodes);
$tokyo->safe_psql('postgres', q[
	insert into counter select node, k, 0 from unnest('{tokyo,paris}'::text[]) node, generate_series(1, 50) k;
	insert into shared select k, 'tokyo', 0 from generate_series(1, 50) k;
]);
subscribe($paris, $tokyo);
subscribe($tokyo, $paris, copy_data => 'false');

for my $node (@nodes)
{
	my $name = $node->name;
	start_load($node, qq[
\\set k random(1, 50)
\\set s random(1, 50)
begin;
insert into ledger values ('$name', nextval('ledger_id'), :k);
update counter set n = n + 1 where node = '$name' and k = :k;
update shared set node = '$name', v = v + 1 where k = :s;
commit;
] => '-c 2 -R 300');
}

start_checkpoints(@nodes);
kill_processes('both write', between => \@nodes, rounds => $kills,
	kinds => [ map { my $node = $_; map { [ $node, $_ ] } 'braid leader', 'braid applier', 'walsender', 'braid manager', 'postmaster', 'braid supervisor' } @nodes ]);
sleep 1;
stop_load();
for my $node (@nodes)
{
	ok(wait_until(sub { (attempt($node, 'select 1'))[0] == 0 }, 30), $node->name . ' is up');
}
converged(@nodes);

same_tables(\@nodes, qw(ledger counter shared));
for my $node (@nodes)
{
	my $name = $node->name;
	cmp_ok($node->safe_psql('postgres', "select count(*) from ledger where node = '$name'"), '>', 100, "$name went on writing");
	is($node->safe_psql('postgres', 'select count(*) - count(distinct (node, id)) from ledger'), '0', "nothing came twice to $name");
	is($node->safe_psql('postgres', q[
		select count(*) from counter c
		where n <> (select count(*) from ledger l where l.node = c.node and l.k = c.k)
	]), '0', "no transaction was lost, doubled or torn on $name");
}

done_testing();
