# A source sends again everything that was not confirmed: kill -9 of the server before and after the
# commit of braid.ingest, at random moments. Each record takes effect once, and the position is
# committed with the rows.

use strict;
use warnings;

use Braid;
use IPC::Run ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep);

my $node = new_node('tokyo', publication => '');
# No key: a row that came twice would stay twice.
$node->safe_psql('postgres', 'create table ledger (id bigint); create table counter (id int primary key, n bigint)');

my $begin = q[{"lsn": "0/%X", "commit_time": "2024-01-01T00:00:00Z"}];
my $columns = q["columns": [{"name": "id", "type": "int8"}]];
my $record = qq[{"operation": "insert", "transaction": $begin, "schema": {"namespace": "public", "table": "ledger", $columns}, "after": {"id": %d}}];
my $call = sub {
	my ($from, $to) = @_;
	return "select applied, skipped from braid.ingest('[" . join(', ', map { sprintf $record, $_, $_ } $from .. $to) . "]', 'shop')";
};
my $state = q[select count(*), count(distinct id), coalesce(max(id), 0) = coalesce((select "position" - '0/0'::pg_lsn from braid.ingest_sources where origin = 'shop'), 0) from ledger];

# Before the commit: nothing is left, the position included.
my $session = $node->background_psql('postgres', on_error_stop => 0);
$session->query_safe('begin');
is($session->query_safe($call->(1, 10)), '10|0', 'applied, not committed');
$node->stop('immediate');
eval { $session->quit };
$node->start;
is($node->safe_psql('postgres', $state), '0|0|t', 'killed before the commit: nothing has come');

# After it, before the answer was read: all is there, and is skipped when it is sent again.
is($node->safe_psql('postgres', $call->(1, 10)), '10|0', 'committed');
$node->stop('immediate');
$node->start;
is($node->safe_psql('postgres', $state), '10|10|t', 'killed after the commit: all has come');
is($node->safe_psql('postgres', $call->(5, 15)), '5|6', 'what was sent again is skipped');
is($node->safe_psql('postgres', $state), '15|15|t', 'and the rest is there once');

# At random moments. The source goes on from the position that it knows to be confirmed.
my $seed = $ENV{BRAID_TEST_SEED} // int(rand(1_000_000));
srand($seed);
note("seed $seed");
my $next = 11;
for my $round (1 .. 6)
{
	my $pid = $node->safe_psql('postgres', q[select pg_read_file('postmaster.pid')]);
	($pid) = $pid =~ /^(\d+)/;
	my $pids = fork();
	if ($pids == 0)
	{
		sleep(0.2 + rand(0.6));
		kill 'KILL', $pid;
		require POSIX;
		POSIX::_exit(0);
	}
	for (1 .. 500)
	{
		my ($status) = attempt($node, $call->($next, $next + 19));
		last if $status != 0;
		# Goes back by some, as a source does that confirms less than it has sent.
		$next += 15;
	}
	waitpid $pids, 0;
	restart_crashed($node);
	my ($rows, $distinct, $agrees) = split /\|/, $node->safe_psql('postgres', $state);
	is("$rows $agrees", "$distinct t", "round $round: each of $rows rows once, the position agrees");
}
$node->safe_psql('postgres', $call->($next, $next + 19));
is($node->safe_psql('postgres', 'select count(*) = max(id), count(*) = count(distinct id) from ledger'), 't|t', 'none is missing');

# Two sessions with one source: the second waits, and then skips what the first has brought.
my $last = $node->safe_psql('postgres', 'select max(id) from ledger');
my $first = $node->background_psql('postgres');
$first->query_safe('begin');
$first->query_safe($call->($last + 1, $last + 5));
my ($out, $err) = ('', '');
my $second = IPC::Run::start([ 'psql', '-XAtq', '-d', $node->connstr('postgres'), '-c', $call->($last + 1, $last + 6) ], '<', \undef, '>', \$out, '2>', \$err);
ok($node->poll_query_until('postgres', q[select count(*) > 0 from pg_stat_activity where wait_event_type = 'Lock' and query like 'select applied%']), 'the second waits');
$first->query_safe('commit');
$first->quit;
$second->finish;
is("$out$err", "1|5\n", 'and goes on from where the first came to');
is($node->safe_psql('postgres', 'select count(*) = count(distinct id) from ledger'), 't', 'each once');

# Versions of rows that came joined are kept for as long as a source may bring something older than
# them. A manager looks when it starts.
my $at = sub {
	my ($source, $time, @numbers) = @_;
	my $records = join ', ', map {
		sprintf q[{"operation": "insert", "transaction": {"lsn": "0/%X", "commit_time": "%s"}, "schema": {"namespace": "public", "table": "counter", "columns": [{"name": "id", "type": "int4", "identity": true}]}, "after": {"id": %d}}],
		  $_, $time =~ s/SS/sprintf '%02d', $_/er, $_
	} @numbers;
	return $node->safe_psql('postgres', "select applied, skipped from braid.ingest('[$records]', '$source')");
};
my $batches = sub { return $node->safe_psql('postgres', 'select count(*) from braid.batch'); };
my $looked = sub {
	my ($pid) = worker_pids($node, 'braid manager');
	$node->safe_psql('postgres', "select pg_terminate_backend($pid)") if $pid;
	wait_until(sub { my ($now) = worker_pids($node, 'braid manager'); defined $now && $now != ($pid // 0) }, 30);
	sleep 1;
	return;
};
$node->safe_psql('postgres', q[select braid.forget_source('shop'); delete from braid.batch]);
is($at->('quiet', '2024-01-01T00:00:SSZ', 1), '1|0', 'a source that says no more');
is($at->('joined', '2024-01-01T05:00:SSZ', 2, 3), '2|0', 'another one, whose two transactions are joined');
is($batches->(), '1', 'their versions are kept');
is($at->('joined', '2024-02-01T00:00:SSZ', 4), '1|0', 'it goes on');
$looked->();
is($batches->(), '1', 'they are kept while the first one may bring something older');
$node->safe_psql('postgres', q[select braid.forget_source('quiet')]);
$looked->();
ok(wait_until(sub { $batches->() eq '0' }, 30), 'and go when that is forgotten');
is($at->('joined', '2024-02-01T00:30:SSZ', 5, 6), '2|0', 'joined again');
$looked->();
is($batches->(), '1', 'within the hour of the newest they stay');

done_testing();
