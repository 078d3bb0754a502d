# kill -9 of random processes of provider and subscriber while large transactions are committed in
# chunks: in each apply mode and commit order, sent before they end or not, larger than the buffer
# or not, with small ones between them. Each change takes effect once.
#
# Each transaction adds a row to the ledger and one to a counter, but not in the same chunk. The
# counter must equal the number of committed transactions. The ledger has no key, so a transaction
# that was applied twice would be there twice. The same holds for the trace, where larger
# transactions add a row for each row that they change.

use strict;
use warnings;

use Braid;
use Kill;
use PostgreSQL::Test::Utils;
use Test::More;

# In all; a kill and what follows it take about a second.
my $kills = $ENV{BRAID_TEST_KILLS} // 24;
kill_seed();
my @modes = ('parallel source off', 'batch source on', 'parallel relaxed on', 'aggregate relaxed off');
my $most = 50;

# Decoded changes are sent at once if allowed; large transactions are applied through a small
# buffer.
my $tokyo = new_node('tokyo', conf => "logical_decoding_work_mem = 64kB\n");
my $paris = new_node('paris', publication => '', conf => "braid.apply_buffer_size = 1MB\n");
my @nodes = ($tokyo, $paris);

ledger_tables($tokyo, $paris);
on_all(q[
	create table steps (k int primary key, n bigint not null);
	create table trace (id bigint, k int);
], @nodes);
$tokyo->safe_psql('postgres', 'insert into steps select k, 0 from generate_series(1, 3000) k');
my $name = subscribe($paris, $tokyo, split_transactions_above => $most);

my $large = q[
\set k random(1, 40)
begin;
insert into ledger values (nextval('ledger_id'), :k);
update counter set n = n + 1 where k = :k;
insert into bulk select nextval('bulk_id'), repeat('x', 200) from generate_series(1, 1500);
savepoint one;
insert into bulk select -nextval('bulk_id'), repeat('never', 40) from generate_series(1, 1000);
rollback to one;
insert into bulk select nextval('bulk_id'), repeat('y', 200) from generate_series(1, 1500);
delete from bulk where id % 3 = 0 and id > (select max(id) - 2000 from bulk);
commit;
\sleep 400 ms
];
my $steps = q[
\set f random(1, 2400)
\set l :f + random(40, 600)
begin;
update steps set n = n + 1 where k between :f and :l;
insert into trace select nextval('bulk_id'), k from generate_series(:f, :l) k;
commit;
\sleep 50 ms
];
start_load($tokyo, small => '-c 1 -R 100', moving => '-c 1 -R 100', $large => '-c 2', $steps => '-c 1');

for my $mode (@modes)
{
	my ($apply_mode, $order, $streaming) = split / /, $mode;
	wait_until(sub { (attempt($paris, "select braid.alter_subscription('$name', apply_mode => '$apply_mode', commit_order => '$order', streaming => '$streaming')"))[0] == 0 }, 30)
	  or die "cannot change to $mode";
	kill_processes($mode, between => \@nodes, rounds => $kills / @modes);
	goes_on($mode, $name, @nodes);
	is($paris->safe_psql('postgres', "select apply_mode || ' ' || commit_order || ' ' || streaming from braid.subscription where subscription_name = '$name'"), $mode, "in its mode, $mode");
}

stop_load();
caught_up($paris, $tokyo);

# All random kills may have come between two transactions. This one comes after some chunks: a later
# one waits for a row.
alter_running($paris, $name, q[apply_mode => 'parallel', commit_order => 'source']) or die 'cannot change to parallel';
my $lock = $paris->background_psql('postgres');
$lock->query_safe('begin; select from steps where k = 1500 for update');
$tokyo->safe_psql('postgres', q[
	do $$ begin
		for step in 1 .. 3000 loop
			update steps set n = n + 1 where k = step;
			insert into trace values (nextval('bulk_id'), step);
		end loop;
	end $$
]);
ok(wait_until(sub { $paris->safe_psql('postgres', "select coalesce(half_applied_changes, 0) > 0 from braid.subscription_detail where name = '$name'") eq 't' }, 30), 'some pieces are committed');
ok(kill_process($paris, wait_for_worker($paris, 'braid applier')), 'a kill after some pieces');
eval { $lock->quit };
caught_up($paris, $tokyo);
my $resumed = () = slurp_file($paris->logfile) =~ /goes on with the transaction that commits at \S+ after [0-9]+ changes/g;
cmp_ok($resumed, '>', 0, "$resumed times a transaction went on after some of its pieces");
each_once(\@nodes, qw(steps trace));
for my $node (@nodes)
{
	is($node->safe_psql('postgres', 'select count(*) - count(distinct id) from trace'), '0', 'nothing came twice to trace of ' . $node->name);
	is($node->safe_psql('postgres', q[
		select count(*) from steps s left join (select k, count(*) as n from trace group by k) t using (k) where s.n <> coalesce(t.n, 0)
	]), '0', 'each step left its trace, on ' . $node->name);
}
is($paris->safe_psql('postgres', 'select count(*) from braid.split_progress'), '0', 'no transaction is left in part');
my ($pieces, $largest) = split /\|/, $paris->safe_psql('postgres', q[
	select count(*), max(n) from (select count(*) as n from bulk where xmin::text::bigint > 2 group by xmin::text) w
]);
cmp_ok($largest, '<=', $most, "no piece is larger than it may be, of $pieces");

done_testing();
