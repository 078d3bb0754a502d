# A large transaction is applied while it is in progress at the provider (streaming => 'parallel').
# Nothing of it is visible before its commit, all of it a moment after. Nobody waits for it.
# Decisions that need its commit are made then.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep time);

my $tokyo = new_node('tokyo', conf => "logical_decoding_work_mem = 64kB\n");
my $paris = new_node('paris', publication => '', conf => "logical_decoding_work_mem = 64kB\nautovacuum = off\nbraid.remember_deletions = on\n");
my $name;

# Bytes that a table has at paris, visible or not.
sub bytes { return $paris->safe_psql('postgres', "select pg_relation_size('$_[0]')"); }

# Whether rows of a running transaction are written at paris.
sub is_written
{
	my ($table, $more) = @_;
	return wait_until(sub { bytes($table) >= $more }, 30);
}

sub log_since
{
	my ($offset) = @_;
	return substr(slurp_file($paris->logfile), $offset);
}

my $seen = 0;
# Returns the new lines of the log about why a transaction is not applied while it is in progress.
sub reason
{
	my $log = slurp_file($paris->logfile);
	my ($reason) = substr($log, $seen) =~ /applies transaction \d+ of the provider once it has committed: (.*)/;
	$seen = length $log;
	return $reason;
}

# Tests that the log has the reason. The process rolls the transaction back first, so others go on
# before the line is written.
sub gives_reason
{
	my ($pattern, $what) = @_;
	my $reason;
	ok(wait_until(sub { $reason = reason() // $reason; defined $reason && $reason =~ $pattern }, 30), $what) or diag($reason // 'no reason');
	return;
}

on_all(q[
	create table bulk (id int primary key, k int, v text);
	create table gone (id int primary key, v text);
	create table small (id int primary key, n int);
], $tokyo, $paris);
$tokyo->safe_psql('postgres', q[
	insert into small select i, 0 from generate_series(1, 20) i;
	insert into gone select i, repeat(md5(i::text), 5) from generate_series(1, 5000) i;
]);
$name = subscribe($paris, $tokyo, streaming => "'parallel'");
is($paris->safe_psql('postgres', "select streaming from braid.subscription_detail where name = '$name'"), 'parallel', 'the option is shown');
caught_up($paris, $tokyo);

my $one = $tokyo->background_psql('postgres');
my $next = 1;

# A transaction runs at tokyo and is applied at paris. Its first key.
sub start
{
	my ($then) = @_;
	my ($first, $before) = ($next, bytes('bulk'));
	$next += 5000;
	$one->query_safe("begin; insert into bulk select i, 1, repeat(md5(i::text), 5) from generate_series($first, $next - 1) i;");
	ok(is_written('bulk', $before + 500_000), "$then: it is applied while it runs");
	return $first;
}

sub ended
{
	my ($then) = @_;
	$one->query_safe('commit');
	caught_up($paris, $tokyo);
	same_tables([ $tokyo, $paris ], qw(bulk gone small));
	is($paris->safe_psql('postgres', 'select count(*) from pg_ls_tmpdir()'), '0', "$then: no file is left");
}

# Seen at its commit, with its version.
start('one that commits');
is($paris->safe_psql('postgres', 'select count(*) from bulk'), '0', 'and not seen');
$tokyo->safe_psql('postgres', 'update small set n = n + 1');
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select sum(n) from small'), '20', 'others commit meanwhile');
$one->query_safe("update bulk set k = 2 where id % 10 = 0; delete from bulk where id % 10 = 1; delete from gone where id <= 2000; update gone set v = 'kept' where id > 3000;");
ended('one that commits');
is(reason(), undef, 'it was committed by the process that had applied it');
is($paris->safe_psql('postgres', 'select applied_while_running, given_up_while_running, large from braid.dependency_stats'), '1|0|0', 'and counts so');
my $versions = q[select count(*), max(t.timestamp) from bulk, pg_xact_commit_timestamp_origin(xmin) t];
is($paris->safe_psql('postgres', $versions), $tokyo->safe_psql('postgres', $versions), 'its rows have its version');
is($paris->safe_psql('postgres', "select count(*) from braid.conflict_history"), '0', 'there was no conflict');

# Rows that it has deleted count as deleted at its commit: an older change does not bring them back.
is($paris->safe_psql('postgres', q[
	select count(*) from braid.tombstone
	 where relation = 'gone'::regclass
	   and deleted_at = (select max((extract(epoch from t.timestamp) * 1000000)::bigint) from gone, pg_xact_commit_timestamp_origin(xmin) t)]),
	'2000', 'its deletions have its version');

# Nobody waits for it: not for a row,
my $first = start('a row that a local session wants too');
my $began = time;
$paris->safe_psql('postgres', "set statement_timeout = '30s'; insert into bulk values ($first + 10, 7, 'local')");
cmp_ok(time - $began, '<', 10, 'a local session does not wait for its end');
gives_reason(qr/waits for a row/, 'and that is said');
ended('a row that a local session wants too');
is($paris->safe_psql('postgres', "select k from bulk where id = $first + 10"), '1', 'the newer one has won');

# nor for a table,
start('a table that a local session wants');
$paris->safe_psql('postgres', "set statement_timeout = '30s'; begin; lock table bulk in access exclusive mode; commit");
gives_reason(qr/waits for a table/, 'a local session does not wait for its table');
ended('a table that a local session wants');

# and it for nobody for long.
my $local = $paris->background_psql('postgres');
$local->query_safe('begin; update gone set v = \'here\' where id = 4000');
start('a row that a local session has');
$one->query_safe("update gone set v = 'there' where id > 3000");
$tokyo->safe_psql('postgres', 'update small set n = n + 1');
caught_up($paris, $tokyo);
gives_reason(qr/lock timeout/, 'it does not wait for a lock for long');
$local->query_safe('commit');
ended('a row that a local session has');
is($paris->safe_psql('postgres', 'select v from gone where id = 4000'), 'there', 'the newer one has won');

# Cases that only the commit can decide.
$paris->safe_psql('postgres', "update gone set v = 'here' where id = 4500");
start('a conflict');
$one->query_safe("update gone set v = 'there again' where id > 3000");
gives_reason(qr/conflict|written after/, 'a conflict waits for its commit');
ended('a conflict');
cmp_ok($paris->safe_psql('postgres', "select count(*) from braid.conflict_history where kind = 'update_origin_differs'"), '>=', 1, 'and is recorded');

# A part that is rolled back; all of it; a process that is ended; a leader.
start('a savepoint');
$one->query_safe("savepoint a; insert into bulk select -i, 9, repeat('never', 20) from generate_series(1, 5000) i; rollback to a; insert into bulk values (-1, 3, 'kept')");
ended('a savepoint');
is($paris->safe_psql('postgres', 'select count(*) from bulk where id < 0'), '1', 'nothing that was rolled back');

start('one that is rolled back');
$one->query_safe('rollback');
$tokyo->safe_psql('postgres', 'update small set n = n + 1');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], qw(bulk gone small));
reason();

sub processes
{
	return split /\n/, $paris->safe_psql('postgres', "select pid from braid.apply_workers where worker = 'applier ' || current_setting('braid.appliers_per_subscription')");
}

ok(wait_until(sub { !processes() }, 30), 'its process has ended');
start('a process that is ended');
my @pids = processes();
is(scalar @pids, 1, 'the process is shown');
$paris->safe_psql('postgres', "select pg_terminate_backend($_)") for @pids;
ended('a process that is ended');

start('a leader that is ended');
$paris->safe_psql('postgres', "select pg_terminate_backend(pid) from braid.apply_workers where worker = 'leader'");
ended('a leader that is ended');

# Two at once: one of them is applied, the other one at its commit.
my $other = $tokyo->background_psql('postgres');
start('two at once');
$other->query_safe('begin; insert into bulk select -i, 5, repeat(md5(i::text), 5) from generate_series(100, 5000) i');
$one->query_safe("insert into bulk values (-2, 5, 'of the first')");
$other->query_safe('commit');
ended('two at once');
$other->quit;

# Given up when it has committed at the provider, behind a transaction that waits here: it is
# requested again.
reason();
$first = start('given up late');
$local->query_safe('begin; select from small where id = 1 for update');
$tokyo->safe_psql('postgres', 'update small set n = n + 1 where id = 1');
$one->query_safe('commit');
ok(wait_until(sub { $paris->safe_psql('postgres', "select count(*) from pg_stat_activity where wait_event_type = 'Lock' or wait_event = 'transactionid'") > 0 }, 30), 'one before it waits');
$paris->safe_psql('postgres', "set statement_timeout = '30s'; begin; insert into bulk values ($first + 20, 7, 'local'); rollback");
gives_reason(qr/waits for a row/, 'a local session does not wait for it');
$local->query_safe('commit');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], qw(bulk gone small));
start('and after that');
ended('and after that');

# More than there may be in temporary files: it is sent once it has committed.
$paris->safe_psql('postgres', q[alter system set temp_file_limit = '2MB']);
$paris->safe_psql('postgres', 'select pg_reload_conf()');
start('a limit');
$one->query_safe("insert into bulk select -i, 6, repeat(md5(i::text), 5) from generate_series(10001, 30000) i");
$one->query_safe('commit');
caught_up($paris, $tokyo);
like(slurp_file($paris->logfile), qr/asks for large transactions once they have committed: .*temp_file_limit/, 'a limit: the log says so');
$paris->safe_psql('postgres', 'alter system reset temp_file_limit');
$paris->safe_psql('postgres', 'select pg_reload_conf()');
same_tables([ $tokyo, $paris ], qw(bulk gone small));

# In all modes and orders.
for my $mode (qw(batch aggregate))
{
	$paris->safe_psql('postgres', "select braid.alter_subscription('$name', apply_mode => '$mode', commit_order => 'relaxed')");
	ok(wait_until(sub { $paris->safe_psql('postgres', "select state from braid.subscription_status where name = '$name'") eq 'streaming' }, 30), "$mode: it goes on");
	start($mode);
	ended($mode);
}
$_->quit for $one, $local;
done_testing();
