# Shared code of the scenario tests: nodes with the right settings, subscriptions between them,
# waiting until they have caught up, and comparing them.

package Braid;

use strict;
use warnings;

use Exporter 'import';
use IPC::Run ();
use List::Util ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Session;
use Test::More;
use Time::HiRes qw(sleep time);

our @EXPORT = qw(
  new_server new_node subscribe alter_running disable on_all keep_newest
  caught_up converged status streams becomes
  digest same_tables
  worker_pids wait_for_worker end_of_commits
  start_pgbench finish_pgbench
  wait_until attempt kill_process restart_crashed write_by_hand
);

# The time limit of a session's query does not limit the session.
{
	no warnings 'redefine';
	my $background_psql = \&PostgreSQL::Test::Cluster::background_psql;
	*PostgreSQL::Test::Cluster::background_psql = sub {
		my $session = $background_psql->(@_);
		$session->set_query_timer_restart;
		return $session;
	};
	# A session may be idle for longer than that before it ends.
	my $quit = \&PostgreSQL::Test::BackgroundPsql::quit;
	*PostgreSQL::Test::BackgroundPsql::quit = sub {
		$_[0]{timeout}->start;
		return $quit->(@_);
	};
}

# Every node of this test, and its subscriptions: $subscription{subscriber}{provider} = name.
my @nodes;
my %subscription;

# Starts a server with Braid's settings and without the extension.
#   init => [arguments of initdb]   conf => "more settings"
sub new_server
{
	my ($name, %opt) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name, $opt{install_path} ? (install_path => $opt{install_path}) : ());
	$node->init(allows_streaming => 'logical', extra => $opt{init} // []);
	$node->append_conf('postgresql.conf', slurp_file($ENV{BRAID_NODE_CONF}));
	$node->append_conf('postgresql.conf', <<'CONF');
shared_buffers = 32MB
max_connections = 60
max_wal_size = 1GB
log_statement = none
restart_after_crash = on
# With little to do, one of several appliers would do it: what they do side by side is to be tested.
braid.parallel_apply = always
braid.retry_interval = 100ms
# What has stopped stays so until the test has looked at it.
braid.stopped_retry_interval = 0
braid.retry_interval_max = 1s
# What is done from time to time comes soon enough to wait for it.
braid.supervisor_interval = 5s
braid.manager_interval = 5s
braid.purge_interval = 5s
braid.collector_interval = 1s
braid.clock_interval = 3s
CONF
	$node->append_conf('postgresql.conf', $opt{conf}) if $opt{conf};
	$node->start;
	push @nodes, $node;
	return $node;
}

# Creates a node: the extension, its name, and a publication of all tables unless publication => ''
# or another clause is given.
sub new_node
{
	my ($name, %opt) = @_;
	my $node = new_server($name, %opt);
	my $dsn = dsn($node);
	my $publication = $opt{publication} // 'for all tables';
	$node->safe_psql('postgres', qq[
		create extension braid;
		select braid.create_node('$name', \$dsn\$$dsn\$dsn\$);
	]);
	$node->safe_psql('postgres', "create publication braid $publication") if $publication ne '';
	return $node;
}

sub dsn
{
	my ($node) = @_;
	return $node->connstr('postgres');
}

# Subscribes, and waits until the copy is done and changes stream. Further options become named
# arguments of create_subscription, as SQL text. This function's own options are name =>, wait => 0
# and dsn => another way to the provider.
sub subscribe
{
	my ($subscriber, $provider, %opt) = @_;
	my $name = delete $opt{name} // $subscriber->name . '_from_' . $provider->name;
	my $wait = delete $opt{wait} // 1;
	my $dsn = delete $opt{dsn} // dsn($provider);
	my $arguments = join '', map { ", $_ => $opt{$_}" } sort keys %opt;
	$subscriber->safe_psql('postgres', "select braid.create_subscription('$name', \$dsn\$$dsn\$dsn\$$arguments)");
	$subscription{ $subscriber->name }{ $provider->name } = $name;
	$subscriber->safe_psql('postgres', "select braid.wait_for_subscription('$name')", timeout => $PostgreSQL::Test::Utils::timeout_default) if $wait;
	return $name;
}

# Alters a running subscription in an option that only takes effect in a new leader, and waits for
# that leader: until then changes come as before.
sub alter_running
{
	my ($subscriber, $name, $options) = @_;
	my $leader_pid = "select leader_pid from braid.subscription_detail where name = '$name'";
	my $leader = $subscriber->safe_psql('postgres', $leader_pid);
	$subscriber->safe_psql('postgres', "select braid.alter_subscription('$name', $options)");
	return wait_until(sub { my $now = $subscriber->safe_psql('postgres', $leader_pid); $now && $now ne $leader }, 30);
}

# Disables a subscription, and waits until it has no process any more: later changes of the provider
# do not come here.
sub disable
{
	my ($subscriber, $name) = @_;
	$subscriber->safe_psql('postgres', "select braid.disable_subscription('$name')");
	$subscriber->poll_query_until('postgres', "select not exists (select from braid.apply_workers where subscription = '$name' and pid is not null)") or die "$name does not stop";
	return;
}

# Runs SQL on each node.
sub on_all
{
	my ($sql, @on) = @_;
	$_->safe_psql('postgres', $sql) for @on;
	return;
}

# Returns SQL that sets a conflict function for each conflict in a table. The function keeps the
# newest row, as is done without one.
sub keep_newest
{
	my ($table) = @_;
	return qq[
		create function newest_$table(local $table, remote $table, before $table, info braid.conflict) returns $table language plpgsql as \$\$
		declare
			is_newer bool := (info.remote_timestamp, info.remote_origin::text collate "C") > (info.local_timestamp, info.local_origin::text collate "C");
		begin
			if local is null then
				return case when info.local_timestamp is null or is_newer then remote end;
			elsif remote is null then
				return case when is_newer then null else local end;
			end if;
			return case when is_newer then remote else local end;
		end \$\$;
		select braid.set_conflict_resolution('$table', null, 'function', 'newest_$table');
	];
}

# Waits until the subscriber has confirmed everything that is committed at the provider now.
sub caught_up
{
	my ($subscriber, $provider) = @_;
	my $name = $subscription{ $subscriber->name }{ $provider->name };
	my $ok = eval { wait_for_position($provider, $name, end_of_commits($provider)); 1 };
	BAIL_OUT_of_test("$name has not caught up: $@") unless $ok;
	return;
}

# Waits in one statement at the server. Each check is a transaction of its own, and the pauses
# between them grow. At most five seconds count between two checks, as in Session::patience.
sub wait_for_position
{
	my ($provider, $name, $lsn) = @_;
	my $seconds = $PostgreSQL::Test::Utils::timeout_default;
	$provider->safe_psql('postgres', qq[
		do \$\$
		declare
			now timestamptz := clock_timestamp();
			waited interval := '0';
			pause double precision := 0.002;
			is_there bool;
			seen text;
		begin
			loop
				perform pg_stat_clear_snapshot();
				select bool_or(state = 'streaming' and replay_lsn >= '$lsn'),
					string_agg(concat_ws(' ', application_name, state, replay_lsn), ', ') into is_there, seen
				  from pg_stat_replication where application_name in ('$name', 'walreceiver');
				exit when is_there;
				waited := waited + least(clock_timestamp() - now, interval '5 s');
				now := clock_timestamp();
				if waited > interval '$seconds s' then
					raise exception '$name has not come to $lsn: %', seen;
				end if;
				commit;
				perform pg_sleep(pause);
				pause := least(pause * 1.5, 0.04);
			end loop;
		end \$\$;
	]);
	return;
}

# Returns the position up to which WAL has to be read for everything that is committed. Asynchronous
# commits, such as those of appliers, are flushed a moment later; a synchronous commit flushes them.
sub end_of_commits
{
	my ($node) = @_;
	my ($unwritten, $end) = split /\n/, $node->safe_psql('postgres', 'select pg_current_wal_insert_lsn() > pg_current_wal_lsn(); select pg_current_wal_lsn()');
	return $end if $unwritten ne 't';
	return (split /\n/, $node->safe_psql('postgres', q[
		begin;
		set local synchronous_commit = local;
		select pg_logical_emit_message(true, 'written', '');
		commit;
		select pg_current_wal_lsn();
	]))[-1];
}

# Waits until each of these nodes has what all others have committed.
sub converged
{
	my (@among) = @_;
	for my $provider (@among)
	{
		for my $subscriber (@among)
		{
			caught_up($subscriber, $provider) if $subscription{ $subscriber->name }{ $provider->name };
		}
	}
	return;
}

# Returns a row of braid.subscription_status, by column name.
sub status
{
	my ($node, $name) = @_;
	my $row = $node->safe_psql('postgres',
		"select key || '=' || coalesce(value, '') from braid.subscription_status s, jsonb_each_text(to_jsonb(s)) where s.name = '$name'");
	return { map { /^([^=]+)=(.*)$/s ? ($1 => $2) : () } split /\n/, $row };
}

# One test: the subscription streams, now or soon. Its state is catching up until the provider's
# next sign of life.
sub streams
{
	my ($node, $name, $what) = @_;
	my $state = '';
	wait_until(sub { $state = status($node, $name)->{state} // ''; $state =~ /^(?:streaming|error|disabled)$/ }, 30);
	return is($state, 'streaming', $what);
}

# One test: the query has this result, now or soon.
sub becomes
{
	my ($node, $sql, $expected, $what) = @_;
	my $got = '';
	wait_until(sub { $got = $node->safe_psql('postgres', $sql); $got eq $expected }, 30);
	return is($got, $expected, $what);
}

# Returns the number of rows and a checksum of a table, whatever the order of rows.
sub digest
{
	my ($node, $table) = @_;
	return $node->safe_psql('postgres',
		"select count(*), md5(coalesce(string_agg(r, E'\\n' order by r collate \"C\"), '')) from (select t::text as r from $table t) t");
}

# One test for each table: its contents are the same on all of these nodes.
sub same_tables
{
	my ($on, @tables) = @_;
	my ($first, @others) = @$on;
	for my $table (@tables)
	{
		my $expected = digest($first, $table);
		for my $node (@others)
		{
			is(digest($node, $table), $expected, "$table is the same on " . $first->name . ' and ' . $node->name)
			  or diag_difference($first, $node, $table);
		}
	}
	return;
}

sub diag_difference
{
	my ($one, $other, $table) = @_;
	my %rows;
	$rows{$_}++ for split /\n/, $one->safe_psql('postgres', "select t::text from $table t");
	$rows{$_}-- for split /\n/, $other->safe_psql('postgres', "select t::text from $table t");
	my @differ = sort grep { $rows{$_} } keys %rows;
	my $shown = @differ > 10 ? 9 : $#differ;
	diag sprintf '%s %+d %s', $rows{$_} > 0 ? 'only ' . $one->name : 'only ' . $other->name, $rows{$_}, $_ for @differ[ 0 .. $shown ];
	diag scalar(@differ) . ' rows differ';
	return;
}

# Returns the pids of processes by backend_type: 'braid leader', 'braid applier', 'braid manager',
# 'braid supervisor', 'walsender'. Without the session that asks.
sub worker_pids
{
	my ($node, $type) = @_;
	my ($status, $out) = attempt($node, "select pid from pg_stat_activity where backend_type = '$type' and pid <> pg_backend_pid() order by pid");
	return $status == 0 ? split /\n/, $out : ();
}

# Returns the pids of that type once there are any; none if there are none after that many seconds.
sub wait_for_worker
{
	my ($node, $type, $seconds) = @_;
	my @pids;
	wait_until(sub { @pids = worker_pids($node, $type); @pids > 0 }, $seconds // 20);
	return @pids;
}

# Starts pgbench in the background; -n because a vacuum would truncate pgbench_history.
sub start_pgbench
{
	my ($node, @arguments) = @_;
	my ($out, $err) = ('', '');
	my $run = IPC::Run::start(
		[ 'pgbench', '-n', '--max-tries=1000', '-h', $node->host, '-p', $node->port, @arguments, 'postgres' ],
		'<', \undef, '>', \$out, '2>', \$err);
	return { run => $run, out => \$out, err => \$err, node => $node };
}

# Waits for pgbench, tests that it succeeded, and returns the number of its transactions.
sub finish_pgbench
{
	my ($bench) = @_;
	my $ok = $bench->{run}->finish;
	my ($n) = ${ $bench->{out} } =~ /number of transactions actually processed: (\d+)/;
	ok($ok && $n, 'pgbench on ' . $bench->{node}->name . ' (' . ($n // 0) . ' transactions)') or diag ${ $bench->{err} };
	return $n // 0;
}

# Waits for a condition, and returns whether it became true. A limit of up to five seconds is kept:
# it is for an event that need not happen. A longer limit is reached only by a failure, so it is
# PG_TEST_TIMEOUT_DEFAULT if that is longer. A condition that takes long is checked less and less
# often.
sub wait_until
{
	my ($condition, $seconds) = @_;
	my $limit = $seconds <= 5 ? $seconds : List::Util::max($seconds, $PostgreSQL::Test::Utils::timeout_default);
	my $is_over = Session::patience($limit);
	my $pause = 0.01;
	while (1)
	{
		return 1 if $condition->();
		if ($is_over->())
		{
			my (undef, $file, $line) = caller;
			diag("waited in vain for $limit s at $file line $line; last seen: " . Session::last_seen()) if $limit > 5;
			return 0;
		}
		sleep $pause;
		$pause = $pause * 1.4 > 0.2 ? 0.2 : $pause * 1.4;
	}
}

# Returns status and output of SQL on a server that may be killed meanwhile. The status is not 0 for
# any failure. That includes a psql that ends before it has read its input, which PostgreSQL's class
# takes for an error of the test.
sub attempt
{
	my ($node, $sql) = @_;
	local $SIG{PIPE} = 'IGNORE';
	my ($status, $out) = eval { $node->psql('postgres', $sql) };
	return ($status // -1, $out // '');
}

# Kills a process of a server with kill -9, which takes down all others. Returns once the server
# serves again: a postmaster that has not noticed yet still accepts sessions.
sub kill_process
{
	my ($node, $pid, $seconds) = @_;
	my $offset = -s $node->logfile;
	kill 9, $pid or die "no process $pid: $!";
	return wait_until(sub {
			slurp_file($node->logfile, $offset) =~ /all server processes terminated; reinitializing/ && (attempt($node, 'select 1'))[0] == 0;
		}, $seconds // 60);
}

# Starts a node whose postmaster was killed: its orphans hold shared memory for a moment.
sub restart_crashed
{
	my ($node) = @_;
	# A failed start leaves the dead postmaster's pid in the object, which then takes the server for
	# running.
	my $started = wait_until(sub { $node->{_pid} = undef; forget_postmaster($node); $node->start(fail_ok => 1) }, 30);
	return if $started;
	# Remaining processes of the killed server hold its memory: one that has not noticed yet, and
	# what it waits for.
	my $name = $node->name;
	diag($_) for grep { /postgres: $name: / } split /\n/, `ps -eo pid,ppid,stat,etimes,wchan:30,args`;
	BAIL_OUT_of_test("$name does not start again");
	return;
}

# Removes the pid file of a killed postmaster. If many processes start and end, another one may have
# its number, and the server would take that for the postmaster.
sub forget_postmaster
{
	my ($node) = @_;
	my $file = $node->data_dir . '/postmaster.pid';
	my ($pid) = -e $file ? slurp_file($file) =~ /^(\d+)/ : ();
	return if !$pid || !-r "/proc/$pid/cmdline";
	my $command = eval { slurp_file("/proc/$pid/cmdline") } // '';
	# A process that is just ending has no command line.
	unlink $file if $command ne '' && index($command, $node->data_dir) < 0;
	return;
}

# Gives up this file, not the whole run.
sub BAIL_OUT_of_test
{
	my ($why) = @_;
	fail($why);
	done_testing();
	exit 1;
}

# Runs before Cluster's own END, while the servers can still be queried.
END
{
	my $status = $?;
	for my $node (@nodes)
	{
		# Finds a fault that no comparison of tables shows. Processes that a test kills end by
		# signal 9.
		my %seen;
		my @faults = grep { !$seen{ s/^.*?(?=WARNING|PANIC|LOG|TRAP)//r }++ }
		  grep { /(?:reference|refcount) leak|resource was not closed|PANIC:|TRAP:|terminated by signal (?:4|6|7|8|11)\b/ }
		  split /\n/, -e $node->logfile ? slurp_file($node->logfile) : '';
		next unless @faults;
		$status ||= 1;
		diag '--- ' . $node->name . ': faults in its log';
		diag $_ for splice @faults, 0, 10;
	}
	if ($status != 0 || !PostgreSQL::Test::Utils::all_tests_passing())
	{
		for my $node (@nodes)
		{
			my ($ok, $out) = eval { $node->psql('postgres', 'select * from braid.subscription_status', extra_params => ['-x'], timeout => 5) };
			diag '--- ' . $node->name . ': braid.subscription_status';
			diag $out // '(not available)';
			# A subscription that does not go on waits for something, and queries about it may have
			# to wait too.
			(undef, $out) = eval { $node->psql('postgres', q[select backend_type, pid, wait_event_type, wait_event, pg_blocking_pids(pid), now() - xact_start, left(query, 80) from pg_stat_activity where (xact_start is not null or backend_type ~ '^braid') and pid <> pg_backend_pid() order by 1, 2], timeout => 5) };
			diag '--- ' . $node->name . ': what its processes wait for';
			diag $out // '(not available)';
			# Each message once, searched from the end: a loop of retries would hide earlier
			# messages.
			my (%seen, @log);
			for my $line (reverse split /\n/, slurp_file($node->logfile))
			{
				my ($message) = $line =~ /((?:WARNING|ERROR|FATAL|PANIC|HINT):.*|.*terminated by signal.*)/ or next;
				unshift @log, $line unless $seen{$message}++ || @log >= 25;
			}
			diag '--- ' . $node->name . ': the last errors in its log';
			diag $_ for @log;
		}
	}
	$? = $status;
}

# Changes rows on one node, and no other node gets the changes. Their version has another origin,
# and the time of $at, an SQL expression; the default is an hour ago. The session releases the
# origin before it ends: a backend may still hold it when the next session begins.
sub write_by_hand
{
	my ($node, $sql, $at) = @_;
	$at //= q[now() - interval '1 hour'];
	$node->safe_psql('postgres', q[select pg_replication_origin_create('by hand') where not exists (select from pg_replication_origin where roname = 'by hand')]);
	$node->safe_psql('postgres', qq[
		select pg_replication_origin_session_setup('by hand');
		set session_replication_role = replica;
		begin;
		select pg_replication_origin_xact_setup('0/1', $at);
		$sql;
		commit;
		select pg_replication_origin_session_reset();
	]);
	return;
}

1;
