# kill -9 of random processes of provider and subscriber under a load of prepared transactions:
# committed at once, later, by another session, rolled back, large ones, and ordinary ones between
# them. Each takes effect once, and none stays prepared.
#
# Each transaction adds a row to the ledger and one to a counter. The counter must equal the number
# of committed transactions.

use strict;
use warnings;

use Braid;
use Kill;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep);

# In all; a kill and what follows it take about a second.
my $kills = $ENV{BRAID_TEST_KILLS} // 16;
kill_seed();
my @modes = qw(parallel batch);

my $conf = "max_prepared_transactions = 50\n";
my $tokyo = new_node('tokyo', conf => "${conf}logical_decoding_work_mem = 64kB\n");
my $paris = new_node('paris', publication => '', conf => "${conf}braid.apply_buffer_size = 1MB\n");
my @nodes = ($tokyo, $paris);

ledger_tables($tokyo, $paris);
my $name = subscribe($paris, $tokyo, two_phase => 'true', streaming => "'on'");

# Ended by the same session: committed, or rolled back.
my $prepared = q[
\set k random(1, 40)
\set i random(1, 50)
\set gid random(1, 1000000000)
\set r random(1, 4)
\set end (:r = 1)
begin;
savepoint one;
update counter set n = n + 100 where k = :k;
insert into ledger values (-1, :k);
rollback to one;
insert into ledger values (nextval('ledger_id'), :k);
update counter set n = n + 1 where k = :k;
delete from item where k = :i;
insert into item values (:i, :k) on conflict (k) do update set place = excluded.place;
prepare transaction 's:gid';
\sleep :r ms
\if :end
rollback prepared 's:gid';
\else
commit prepared 's:gid';
\endif
];
my $large = q[
\set k random(1, 40)
\set gid random(1, 1000000000)
\set r random(1, 5)
\set end (:r = 1)
begin;
insert into ledger values (nextval('ledger_id'), :k);
update counter set n = n + 1 where k = :k;
insert into bulk select nextval('bulk_id'), repeat('x', 200) from generate_series(1, 1500);
savepoint one;
insert into bulk select -nextval('bulk_id'), repeat('never', 40) from generate_series(1, 1000);
rollback to one;
delete from bulk where id % 3 = 0 and id > (select max(id) - 2000 from bulk);
prepare transaction 'l:gid';
\sleep 50 ms
\if :end
rollback prepared 'l:gid';
\else
commit prepared 'l:gid';
\endif
\sleep 200 ms
];
start_load($tokyo, small => '-c 2 -R 150', $prepared => '-c 3 -R 100', $large => '-c 1');
# A transaction manager that comes back: transactions that a session or a crash has left prepared
# are ended by another session.
my $psql = 'psql -XAtq -h ' . $tokyo->host . ' -p ' . $tokyo->port . ' postgres';
start_loop(qq[$psql -c "select format(case when gid like '%7' then 'rollback' else 'commit' end || ' prepared %L;', gid) from pg_prepared_xacts where prepared < now() - interval '1 s'" | $psql]);

for my $mode (@modes)
{
	wait_until(sub { (attempt($paris, "select braid.alter_subscription('$name', apply_mode => '$mode')"))[0] == 0 }, 30)
	  or die "cannot change to $mode";
	kill_processes($mode, between => \@nodes, rounds => $kills / @modes);
	goes_on($mode, $name, @nodes);
}

# The coordinator ends what the others have left. A row of a transaction that it has rolled back is
# in neither table.
sleep 2;
stop_load();
$tokyo->safe_psql('postgres', "rollback prepared '$_'") for split /\n/, $tokyo->safe_psql('postgres', 'select gid from pg_prepared_xacts');
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select count(*) from pg_prepared_xacts'), '0', 'nothing stays prepared');
is($paris->safe_psql('postgres', 'select count(*) from braid.unprepared'), '0', 'and all could be prepared');
each_once(\@nodes);
done_testing();
