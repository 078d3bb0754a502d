# Two nodes, both written to: single changes in each direction, then pgbench on both with the same
# keys.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');

on_all('create table item (id int primary key, name text, price numeric)', $tokyo, $paris);
$tokyo->safe_psql('postgres', q[insert into item select i, 'item ' || i, i * 1.5 from generate_series(1, 100) i]);
$tokyo->command_ok([ 'pgbench', '-i', '-q', '-s', '1', 'postgres' ], 'tables with data on tokyo');
$paris->command_ok([ 'pgbench', '-i', '-q', '-I', 'dtp', 'postgres' ], 'the same tables, empty, on paris');

subscribe($paris, $tokyo);
subscribe($tokyo, $paris, copy_data => 'false');
same_tables([ $tokyo, $paris ], qw(item pgbench_accounts));

# Each kind of change, in each direction.
$tokyo->safe_psql('postgres', q[insert into item values (1001, 'from tokyo', 1)]);
$paris->safe_psql('postgres', q[insert into item values (1002, 'from paris', 2)]);
converged($tokyo, $paris);
is($paris->safe_psql('postgres', 'select name from item where id = 1001'), 'from tokyo', 'an insert travels to paris');
is($tokyo->safe_psql('postgres', 'select name from item where id = 1002'), 'from paris', 'an insert travels to tokyo');

$tokyo->safe_psql('postgres', q[update item set name = 'changed in tokyo' where id = 1002]);
$paris->safe_psql('postgres', q[update item set price = 17.25 where id = 1001]);
converged($tokyo, $paris);
is($paris->safe_psql('postgres', 'select name from item where id = 1002'), 'changed in tokyo', 'an update travels to paris');
is($tokyo->safe_psql('postgres', 'select price from item where id = 1001'), '17.25', 'an update travels to tokyo');

$tokyo->safe_psql('postgres', 'update item set id = 2001 where id = 1');
converged($tokyo, $paris);
is($paris->safe_psql('postgres', 'select string_agg(id::text, $$,$$) from item where id in (1, 2001)'), '2001', 'a changed key travels');

$tokyo->safe_psql('postgres', 'delete from item where id = 1002');
$paris->safe_psql('postgres', 'delete from item where id = 1001');
converged($tokyo, $paris);
same_tables([ $tokyo, $paris ], 'item');
is($paris->safe_psql('postgres', 'select count(*) from item where id between 1001 and 1002'), '0', 'deletes travel');

# A transaction arrives as a whole or not at all.
$tokyo->safe_psql('postgres', q[begin; insert into item values (3000, 'rolled back', 0); rollback;
	begin; insert into item values (3001, 'kept', 0); savepoint s; insert into item values (3002, 'not kept', 0); rollback to s; commit;]);
converged($tokyo, $paris);
is($paris->safe_psql('postgres', 'select string_agg(id::text, $$,$$) from item where id >= 3000'), '3001', 'what was rolled back stays away');

$tokyo->safe_psql('postgres', 'truncate item');
converged($tokyo, $paris);
is($paris->safe_psql('postgres', 'select count(*) from item'), '0', 'truncate travels');

# The same keys on both at once: one branch, ten tellers.
my @bench = map { start_pgbench($_, '-c', '4', '-T', '4') } $tokyo, $paris;
my $transactions = 0;
$transactions += finish_pgbench($_) for @bench;
converged($tokyo, $paris);
same_tables([ $tokyo, $paris ], qw(pgbench_branches pgbench_tellers pgbench_accounts pgbench_history));
is($tokyo->safe_psql('postgres', 'select count(*) from pgbench_history'), $transactions, 'every transaction took effect once');
is($paris->safe_psql('postgres', q[select count(*) > 0 from braid.conflict_history]), 't', 'conflicts were seen and recorded');

done_testing();
