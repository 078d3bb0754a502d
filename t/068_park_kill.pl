# kill -9 of random processes while transactions are parked, retried and applied. Each takes effect
# once, or is parked once, and in the end all are applied.
#
# Each transaction has a row of the ledger. One that was applied twice would be a conflict; one that
# was neither applied nor parked would be missing. In the end they are committed in chunks of one
# change: of most of them, the changes behind that row are parked.

use strict;
use warnings;

use Braid;
use IPC::Run ();
use Kill;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep);

my $kills = $ENV{BRAID_TEST_KILLS} // 20;
kill_seed();
my @modes = ("apply_mode => 'parallel', commit_order => 'source'", "apply_mode => 'parallel', commit_order => 'relaxed'", "apply_mode => 'batch', commit_order => 'source'", "apply_mode => 'aggregate', commit_order => 'relaxed'",
	"apply_mode => 'parallel', commit_order => 'source', split_transactions_above => 1");

my $conf = "braid.appliers_per_subscription = 3\nbraid.max_parked = 1000000\nmax_prepared_transactions = 20\n";
my $tokyo = new_node('tokyo', conf => "max_prepared_transactions = 20\n");
# Oslo prepares what is prepared at tokyo.
my ($paris, $oslo) = map { new_node($_, publication => '', conf => $conf) } qw(paris oslo);
on_all(q[
	create table ledger (id bigint primary key, k int);
	create table item (k int primary key, n int not null);
	create sequence ledger_id;
], $tokyo, $paris, $oslo);
$tokyo->safe_psql('postgres', 'insert into item select k, 0 from generate_series(1, 60) k');

my $change = q[
insert into ledger values (nextval('ledger_id'), :k);
update item set n = n + 1 where k = :k;
];
# At the subscriber alone, some numbers are not allowed. What is there already stays.
my $forbid = 'alter table item add constraint forbidden check (n % 9 <> 4) not valid';
my ($missing, $retried) = (0, 0);
my @kinds = ('braid applier', 'braid leader', 'postmaster', 'braid applier', 'braid manager');

sub kill_while_parking
{
	my ($node, $name, $mode, $rounds) = @_;
	wait_until(sub { (attempt($node, "select braid.alter_subscription('$name', $mode)"))[0] == 0 }, 30) or die "cannot change to $mode";
	for my $round (1 .. $rounds)
	{
		sleep 0.3 + rand 0.5;
		# Two times in three, the cause is gone for a moment, and what is parked is tried while the
		# process is killed.
		my $retry;
		if ($round % 3)
		{
			attempt($node, 'alter table item drop constraint if exists forbidden');
			$retry = IPC::Run::start([ 'psql', '-X', '-q', '-h', $node->host, '-p', $node->port, '-c', "set statement_timeout = '5s'; select braid.retry_parked('$name')", 'postgres' ],
				'<', \undef, '>', '/dev/null', '2>', '/dev/null');
			$retried++;
			sleep rand 0.3;
		}
		my $kind = $kinds[ $round % @kinds ];
		note("$mode: kill -9 $kind, " . ((attempt($node, "select count(*) filter (where state = 'failed') || ' failed, ' || count(*) || ' parked' from braid.parked_transactions"))[1]));
		kill_one($node, $kind) or $missing++;
		$retry->finish if $retry;
		wait_until(sub { (attempt($node, $forbid))[0] == 0 || (attempt($node, "select 1 from pg_constraint where conname = 'forbidden'"))[1] eq '1' }, 30) or die 'no constraint';
	}
	return;
}

# Each transaction is either applied or parked, and none is both; then all are applied.
sub applied_or_parked
{
	my ($node, $name) = @_;
	is($missing, 0, "$name: there was something to kill each time");
	caught_up($node, $tokyo);
	my $sent = $tokyo->safe_psql('postgres', 'select count(*) from ledger');
	my ($applied, $parked, $rest) = split /\|/, $node->safe_psql('postgres', q[
		select (select count(*) from ledger), count(*) filter (where from_change = 1), count(*) filter (where from_change > 1) from braid.parked_transactions]);
	note("$name: $sent transactions, $parked of them parked, and the rest of $rest, $retried attempts");
	is($applied + $parked, $sent, "$name: each is applied or parked");
	is( $node->safe_psql('postgres', q[select count(*) from braid.parked_changes c join ledger l on l.id = (c.record -> 'after' ->> 'id')::bigint where c.record -> 'schema' ->> 'table' = 'ledger']),
		'0', "$name: and none is both");
	is($node->safe_psql('postgres', q[select count(distinct parked_id) = count(distinct commit_lsn) from braid.parked_transaction]), 't', "$name: none is parked twice");

	$node->safe_psql('postgres', 'alter table item drop constraint forbidden');
	$node->safe_psql('postgres', "select braid.wait_for_subscription('$name')");
	# An attempt whose session was cut off may still be under way, and has its part.
	cmp_ok($node->safe_psql('postgres', "select braid.retry_parked('$name')"), '<=', $parked + $rest, "$name: all are applied in the end");
	same_tables([ $tokyo, $node ], qw(ledger item));
	is($node->safe_psql('postgres', q[select (select count(*) from braid.parked_transaction), (select count(*) from braid.parked_record), (select count(*) from braid.conflict_history), (select count(*) from braid.split_progress), (select count(*) from pg_prepared_xacts)]),
		'0|0|0|0|0', "$name: nothing is left, and nothing came twice");
	return;
}

my $name = subscribe($paris, $tokyo, on_error => "'park'");
$paris->safe_psql('postgres', $forbid);
start_load($tokyo, "\n\\set k random(1, 60)\nbegin;${change}commit;\n" => '-c 2 -R 80');
kill_while_parking($paris, $name, $_, $kills / @modes) for @modes;
# The last attempt may have applied all that was parked, and the numbers may be far from what is not
# allowed.
ok(wait_until(sub { (attempt($paris, 'select count(*) > 0 from braid.parked_transactions where from_change > 1'))[1] eq 't' }, 60), 'of some the rest was parked');
stop_load();
applied_or_parked($paris, $name);

# Transactions that were to be prepared are parked when they have committed.
$paris->stop;
$name = subscribe($oslo, $tokyo, on_error => "'park'", two_phase => 'true');
$oslo->safe_psql('postgres', $forbid);
start_load($tokyo, "\n\\set k random(1, 60)\n\\set gid random(1, 1000000000)\nbegin;${change}prepare transaction 'p:gid';\ncommit prepared 'p:gid';\n" => '-c 2 -R 40');
kill_while_parking($oslo, $name, "apply_mode => 'parallel'", $kills / @modes);
stop_load();
# One that its session has left.
$tokyo->safe_psql('postgres', $_) for split /\n/, $tokyo->safe_psql('postgres', q[select format('commit prepared %L', gid) from pg_prepared_xacts]);
applied_or_parked($oslo, $name);
like(slurp_file($oslo->logfile), qr/instead of preparing it: It cannot be applied\..*has parked the transaction/s, 'prepared ones were parked');
done_testing();
