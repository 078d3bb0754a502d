# kill -9 of random processes of provider and subscriber while large transactions are sent in
# segments: several at once, with small ones between them, with savepoints and whole transactions
# rolled back, some still in progress when a process dies. Each committed one takes effect once.
#
# Each transaction adds a row to the ledger and one to a counter. The counter must equal the number
# of committed transactions.

use strict;
use warnings;

use Braid;
use Kill;
use PostgreSQL::Test::Utils;
use Test::More;

# In all; a kill and what follows it take about a second.
my $kills = $ENV{BRAID_TEST_KILLS} // 20;
kill_seed();
# Applied while they run, and at their commit.
my @modes = (
	{ apply_mode => 'parallel', commit_order => 'source', streaming => 'parallel' },
	{ apply_mode => 'batch', commit_order => 'relaxed', streaming => 'on', consolidate => 'true' },
	{ apply_mode => 'aggregate', commit_order => 'source', streaming => 'parallel', consolidate => 'false' },
	{ apply_mode => 'parallel', commit_order => 'relaxed', streaming => 'parallel' });

# Decoded changes are sent at once; large transactions are applied through a small buffer.
my $tokyo = new_node('tokyo', conf => "logical_decoding_work_mem = 64kB\n");
my $paris = new_node('paris', publication => '', conf => "braid.apply_buffer_size = 1MB\n");
my @nodes = ($tokyo, $paris);

ledger_tables($tokyo, $paris);
on_all('create table shape (id bigint primary key, v text)', @nodes);
my $name = subscribe($paris, $tokyo, streaming => "'on'");

my $large = q[
\set k random(1, 40)
\set r random(1, 5)
\set end (:r = 1)
begin;
insert into ledger values (nextval('ledger_id'), :k);
update counter set n = n + 1 where k = :k;
insert into bulk select nextval('bulk_id'), repeat('x', 200) from generate_series(1, 1500);
savepoint one;
insert into bulk select -nextval('bulk_id'), repeat('never', 40) from generate_series(1, 1000);
update bulk set t = 'never' where id > (select max(id) - 500 from bulk);
\sleep 50 ms
rollback to one;
savepoint two;
insert into bulk select nextval('bulk_id'), repeat('y', 200) from generate_series(1, 1000);
release two;
\sleep 50 ms
delete from bulk where id % 3 = 0 and id > (select max(id) - 2000 from bulk);
\if :end
insert into ledger values (-2, :k);
rollback;
\else
commit;
\endif
\sleep 100 ms
];
# And one of which nothing is rolled back.
my $whole = q[
\set k random(1, 40)
begin;
insert into ledger values (nextval('ledger_id'), :k);
update counter set n = n + 1 where k = :k;
insert into bulk select nextval('bulk_id'), repeat('x', 200) from generate_series(1, 1500);
\sleep 30 ms
insert into bulk select nextval('bulk_id'), repeat('z', 200) from generate_series(1, 500);
delete from bulk where id % 3 = 0 and id > (select max(id) - 2000 from bulk);
commit;
\sleep 20 ms
];
# Shapes that are rolled back while their rows are decoded, and one that stays as it was.
my $shapes = q[
\set n random(300, 900)
begin;
create table passing (id int primary key, v text);
insert into passing select i, repeat('never', 40) from generate_series(1, :n) i;
rollback;
begin;
insert into shape select nextval('bulk_id'), 'kept' from generate_series(1, :n) i;
savepoint one;
alter table shape add column w text default 'never';
insert into shape select -nextval('bulk_id'), 'never', repeat('never', 20) from generate_series(1, :n) i;
rollback to one;
insert into shape select nextval('bulk_id'), 'kept' from generate_series(1, :n) i;
commit;
\sleep 200 ms
];
start_load($tokyo, small => '-c 1 -R 150', moving => '-c 1 -R 150', $large => '-c 1', $whole => '-c 2', $shapes => '-c 1');
start_checkpoints($tokyo);

for my $options (@modes)
{
	my $mode = "$options->{apply_mode}, $options->{commit_order}";
	my $sql = "select braid.alter_subscription('$name', " . join(', ', map { "$_ => '$options->{$_}'" } sort keys %$options) . ')';
	wait_until(sub { (attempt($paris, $sql))[0] == 0 }, 30) or die "cannot change to $mode";
	my $tally = start_tally($paris, $name);
	kill_processes($mode, between => \@nodes, rounds => $kills / @modes, tally => $tally);
	note("$mode: " . join '; ', map { "$_: $tally->{sum}{$_}" } sort keys %{ $tally->{sum} });
	goes_on($mode, $name, @nodes);
	# Few transactions may have come that far between the kills, and counts since the last look are
	# lost with their server. So the load goes on.
	ok(wait_until(sub { look($tally); ($tally->{sum}{running} // 0) > 5 }, 60), "transactions are applied while they run at the provider, $mode")
	  if $options->{streaming} eq 'parallel';
	ok(wait_until(sub { look($tally); ($tally->{sum}{consolidated} // 0) > 0 }, 60), "changes of one row are joined in $mode") if ($options->{consolidate} // '') eq 'true';
	is($paris->safe_psql('postgres', "select apply_mode || ', ' || commit_order from braid.subscription where subscription_name = '$name'"), $mode, "in its mode, $mode");
}

ok(wait_until(sub { $tokyo->safe_psql('postgres', 'select coalesce(sum(stream_bytes), 0) from pg_stat_replication_slots') > 0 }, 30), 'transactions are streamed');
stop_load();
caught_up($paris, $tokyo);
each_once(\@nodes, 'shape');
is($paris->safe_psql('postgres', 'select count(*) from shape where id < 0'), '0', 'nothing that was rolled back came in another shape');

done_testing();
