# The initial copy: while both nodes are written to, of several tables at once, interrupted, and
# refused if the table has rows.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
my @nodes = ($tokyo, $paris);

on_all(q[
	create table big (id int primary key, node text, filler text);
	create table small_a (id int primary key, v text);
	create table small_b (id int primary key, v text);
	create table "Odd ""name""" (id int primary key, "Odd ""column""" text, gone int, made int generated always as (id * 2) stored);
	alter table "Odd ""name""" drop column gone;
], @nodes);
$tokyo->safe_psql('postgres', q[
	insert into big select i, 'copied', repeat('x', 200) from generate_series(1, 100000) i;
	insert into small_a select i, E'tab\there\nand a \\\\ backslash' from generate_series(1, 100) i;
	insert into small_b select i, null from generate_series(1, 100) i;
	insert into "Odd ""name""" (id, "Odd ""column""") select i, 'v' || i from generate_series(1, 100) i;
]);

# Writers on both nodes all the while; each has keys of its own for inserts, tokyo also changes and
# deletes what is being copied.
my $dir = PostgreSQL::Test::Utils::tempdir();
PostgreSQL::Test::Utils::append_to_file("$dir/tokyo.sql", q[
\set k random(1, 100000)
\set n random(200000, 90000000)
update big set filler = 'updated ' || :k where id = :k;
delete from big where id = :k + 1;
insert into big values (:n, 'tokyo', 'during the copy') on conflict do nothing;
]);
PostgreSQL::Test::Utils::append_to_file("$dir/paris.sql", q[
\set n random(100000000, 190000000)
insert into big values (:n, 'paris', 'during the copy') on conflict do nothing;
]);
my $to_tokyo = subscribe($tokyo, $paris, copy_data => 'false');
my @bench = (start_pgbench($tokyo, '-c', '2', '-R', '400', '-T', '6', '-f', "$dir/tokyo.sql"));
my $to_paris = subscribe($paris, $tokyo, wait => 0);

# Paris writes as soon as its copy has begun, not before: copying into a table that has rows is
# refused.
ok(wait_until(sub { $paris->safe_psql('postgres', q[select count(*) > 0 from braid.subscription_tables where state <> 'waiting']) eq 't' }, 20), 'the copy begins');
push @bench, start_pgbench($paris, '-c', '2', '-R', '400', '-T', '4', '-f', "$dir/paris.sql");

# Interrupt it wherever it is, twice.
for (1 .. 2)
{
	my ($leader) = wait_for_worker($paris, 'braid leader');
	$paris->safe_psql('postgres', "select pg_terminate_backend($leader)") if $leader;
	sleep 1;
}
$paris->safe_psql('postgres', "select braid.wait_for_subscription('$to_paris')", timeout => $PostgreSQL::Test::Utils::timeout_default);
finish_pgbench($_) for @bench;
converged(@nodes);
same_tables(\@nodes, qw(big small_a small_b), '"Odd ""name"""');
is($paris->safe_psql('postgres', q[select count(*) from braid.subscription_tables where state = 'ready']), '4', 'each table is ready');

# Into a table that has rows: refused, with what to do.
$paris->safe_psql('postgres', "select braid.drop_subscription('$to_paris')");
my (undef, undef, $stderr) = $paris->psql('postgres', sprintf q[select braid.create_subscription('again', $dsn$%s$dsn$)], $tokyo->connstr('postgres'));
like($stderr, qr/ERROR: .*(has|contains|not empty|rows)/, 'copying into a table that has rows is an error');
like($stderr, qr/HINT: .*copy_data/, 'whose hint names the way out');

done_testing();
