# kill -9 of random processes while transactions are parked, tried again and applied: each takes effect once, or is parked once, and in the end all
# are applied.
#
# Each transaction has a row of the ledger. One that was applied twice would be a conflict; one that was neither applied nor parked would be missing. In the end
# they are committed in pieces of one change: what is parked of most is what comes after that row.

use strict;
use warnings;

use Braid;
use IPC::Run ();
use Kill;
use Test::More;
use Time::HiRes qw(sleep);

my $kills = $ENV{BRAID_TEST_KILLS} // 20;
kill_seed();
my @modes = ("apply_mode => 'parallel', commit_order => 'source'", "apply_mode => 'parallel', commit_order => 'relaxed'", "apply_mode => 'batch', commit_order => 'source'", "apply_mode => 'aggregate', commit_order => 'relaxed'",
	"apply_mode => 'parallel', commit_order => 'source', split_transactions_above => 1");

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '', conf => "braid.appliers_per_subscription = 3\nbraid.max_parked = 1000000\n");
on_all(q[
	create table ledger (id bigint primary key, k int);
	create table item (k int primary key, n int not null);
	create sequence ledger_id;
], $tokyo, $paris);
$tokyo->safe_psql('postgres', 'insert into item select k, 0 from generate_series(1, 60) k');
my $name = subscribe($paris, $tokyo, on_error => "'park'");

# Here alone, some numbers are not allowed. What is here already stays.
my $forbid = 'alter table item add constraint forbidden check (n % 9 <> 4) not valid';
$paris->safe_psql('postgres', $forbid);

start_load($tokyo, q[
\set k random(1, 60)
begin;
insert into ledger values (nextval('ledger_id'), :k);
update item set n = n + 1 where k = :k;
commit;
] => '-c 2 -R 120');

my ($missing, $retried) = (0, 0);
my @kinds = ('braid applier', 'braid leader', 'postmaster', 'braid applier', 'braid manager');
for my $mode (@modes)
{
	wait_until(sub { (attempt($paris, "select braid.alter_subscription('$name', $mode)"))[0] == 0 }, 30) or die "cannot change to $mode";
	for my $round (1 .. $kills / @modes)
	{
		sleep 0.3 + rand 0.5;
		# Two times in three, the cause is gone for a moment, and what is parked is tried while the process is killed.
		my $retry;
		if ($round % 3)
		{
			attempt($paris, 'alter table item drop constraint if exists forbidden');
			$retry = IPC::Run::start([ 'psql', '-X', '-q', '-h', $paris->host, '-p', $paris->port, '-c', "set statement_timeout = '5s'; select braid.retry_parked('$name')", 'postgres' ],
				'<', \undef, '>', '/dev/null', '2>', '/dev/null');
			$retried++;
			sleep rand 0.3;
		}
		my $kind = $kinds[ $round % @kinds ];
		note("$mode: kill -9 $kind, " . ((attempt($paris, "select count(*) filter (where state = 'failed') || ' failed, ' || count(*) || ' parked' from braid.parked_transactions"))[1]));
		kill_one($paris, $kind) or $missing++;
		$retry->finish if $retry;
		wait_until(sub { (attempt($paris, $forbid))[0] == 0 || (attempt($paris, "select 1 from pg_constraint where conname = 'forbidden'"))[1] eq '1' }, 30) or die 'no constraint';
	}
}
stop_load();
is($missing, 0, 'there was something to kill each time');
caught_up($paris, $tokyo);

# What is not applied is parked, and nothing is both.
my $sent = $tokyo->safe_psql('postgres', 'select count(*) from ledger');
my ($applied, $parked) = split /\|/, $paris->safe_psql('postgres', q[select (select count(*) from ledger), (select count(*) from braid.parked_transactions where from_change = 1)]);
my $rest = $paris->safe_psql('postgres', q[select count(*) from braid.parked_transactions where from_change > 1]);
note("$sent transactions, $parked of them parked, and the rest of $rest, $retried attempts");
is($applied + $parked, $sent, 'each is applied or parked');
cmp_ok($rest, '>', 0, 'and of some the rest');
is( $paris->safe_psql('postgres', q[select count(*) from braid.parked_changes c join ledger l on l.id = (c.record -> 'after' ->> 'id')::bigint where c.record -> 'schema' ->> 'table' = 'ledger']),
	'0', 'and none is both');
is($paris->safe_psql('postgres', q[select count(distinct parked_id) = count(distinct commit_lsn) from braid.parked_transaction]), 't', 'none is parked twice');

$paris->safe_psql('postgres', 'alter table item drop constraint forbidden');
$paris->safe_psql('postgres', "select braid.wait_for_subscription('$name')");
# An attempt whose session was cut off may still be under way, and has its part.
cmp_ok($paris->safe_psql('postgres', "select braid.retry_parked('$name')"), '<=', $parked + $rest, 'all are applied in the end');
same_tables([ $tokyo, $paris ], qw(ledger item));
is($paris->safe_psql('postgres', q[select (select count(*) from braid.parked_transaction), (select count(*) from braid.parked_record), (select count(*) from braid.conflict_history), (select count(*) from braid.split_progress)]),
	'0|0|0|0', 'nothing is left, and nothing came twice');
done_testing();
