# commit_order => 'relaxed': a transaction is committed as soon as its dependencies are, even if
# earlier ones are not. A transaction that has to wait here does not delay those behind it, but
# nothing behind it counts as applied. Every row ends as at the provider.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '', conf => "braid.appliers_per_subscription = 5\nmax_prepared_transactions = 5\n");
on_all(q[
	create table hot (k int primary key, n bigint not null default 0, last int);
	create table cold (id bigint primary key, k int not null references hot, t text, code int unique);
	create table plain (id bigint, k int);
	create sequence cold_id;
], $tokyo, $paris);
$tokyo->safe_psql('postgres', 'insert into hot select k from generate_series(1, 20) k');
my $name = subscribe($paris, $tokyo, commit_order => "'relaxed'");
is($paris->safe_psql('postgres', "select commit_order from braid.subscription_detail where name = '$name'"), 'relaxed', 'the order is shown');

# The applied position is that of the waiting transaction, in the status, the origins, at the
# provider, and for sessions that wait for an event.
sub positions
{
	my $applied = $paris->safe_psql('postgres', "select applied_lsn from braid.subscription_detail where name = '$name'");
	my $origins = $paris->safe_psql('postgres', q[select max(remote_lsn) from pg_replication_origin_status s join braid.origin o on o.origin_id = s.local_id]);
	my $confirmed = $tokyo->safe_psql('postgres', "select confirmed_flush_lsn from pg_replication_slots where slot_name = 'braid_paris_$name'");
	return ($applied, $origins, $confirmed);
}
sub before
{
	my ($a, $b) = @_;
	return $tokyo->safe_psql('postgres', "select '$a'::pg_lsn < '$b'::pg_lsn") eq 't';
}

# Rows to lock, and to be changed later.
caught_up($paris, $tokyo);
# As a prepared transaction, which a crash does not end.
$paris->safe_psql('postgres', q[begin; select from hot where k = 7 for update; prepare transaction 'locker']);
$tokyo->safe_psql('postgres', 'update hot set n = n + 1, last = -7 where k = 7');
sub is_held_up
{
	return wait_until(sub { $paris->safe_psql('postgres', "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and backend_type like 'braid%'") ne '0' }, 20);
}
ok(is_held_up(), 'a transaction waits for a lock');
is($paris->safe_psql('postgres', q[select string_agg(distinct wait_event, ' ') from braid.apply_workers where wait_event !~ '^Braid']), 'transactionid', 'and its applier says for what');
my $held = $tokyo->safe_psql('postgres', 'select pg_current_wal_insert_lsn()');
# One after the other; with the two appliers that there are by default, in t/115_relaxed_two.pl.
for my $id (1 .. 60)
{
	$tokyo->safe_psql('postgres', "insert into cold (id, k, t, code) select -$id * 10 - i, 1 + $id % 20, 'x', -$id * 10 - i from generate_series(0, 3) i");
}
# This one waits for it, and this one for this one.
$tokyo->safe_psql('postgres', 'update hot set n = n + 1, last = -77 where k = 7');
$tokyo->safe_psql('postgres', 'begin; update hot set n = n + 1 where k = 7; insert into plain values (-1, 7); commit');
my $event = $tokyo->safe_psql('postgres', 'select braid.sync_event()');
ok(wait_until(sub { $paris->safe_psql('postgres', 'select count(*) from cold') eq '240' }, 20), 'what is behind the one that is held up is visible');
is($paris->safe_psql('postgres', 'select n, last from hot where k = 7'), '0|', 'and that one is not, nor what depends on it');
is($paris->safe_psql('postgres', 'select count(*) from plain'), '0', 'nor what depends on that');
cmp_ok($paris->safe_psql('postgres', 'select count(*) from braid.applied'), '>', 0, 'what is ahead is written down');
$tokyo->safe_psql('postgres', 'select pg_sleep(0.5)');
my ($applied, $origins, $confirmed) = positions();
ok(before($applied, $held), "applied up to $applied, before $held");
ok(before($origins, $held), "the origins are at $origins");
ok(before($confirmed, $held), "the provider knows of $confirmed");
my ($rc, $out, $err) = $paris->psql('postgres', "select braid.wait_for_event('tokyo', '$event', '500 ms')");
like($err, qr/timeout expired/, 'an event behind it has not come');

# The leader is restarted meanwhile: transactions that were ahead are not applied twice, in either
# order from then on.
for my $order ('source', 'relaxed')
{
	my ($pid) = $paris->safe_psql('postgres', "select leader_pid from braid.subscription_detail where name = '$name'");
	$paris->safe_psql('postgres', "select braid.alter_subscription('$name', commit_order => '$order')");
	ok(wait_until(sub { my $now = $paris->safe_psql('postgres', "select leader_pid from braid.subscription_detail where name = '$name'"); $now && $now ne $pid }, 20),
		"another leader, $order");
	ok(is_held_up(), 'it is held up again');
	# Without a key: applied twice it would be there twice.
	if ($order eq 'source')
	{
		$tokyo->safe_psql('postgres', 'insert into plain values (1, 1); select pg_sleep(0.5)');
		is($paris->safe_psql('postgres', 'select count(*) from plain'), '0', 'in the order of the source it waits');
	}
	else
	{
		$tokyo->safe_psql('postgres', 'insert into plain values (2, 2)');
		ok(wait_until(sub { $paris->safe_psql('postgres', 'select count(*) from plain where id = 2') eq '1' }, 20), 'out of order it does not');
	}
}
# Processes are killed, and the server crashes with them, between commits that have overtaken others
# and those that have to wait.
my $id = 100;
for my $victim ('leader', 'applier 0', 'applier 3', 'postmaster')
{
	# Not by the number of rows: a crash may just have taken one that comes again.
	$id++;
	$tokyo->safe_psql('postgres', "insert into plain values ($id, $id)");
	ok(wait_until(sub { $paris->safe_psql('postgres', "select count(*) from plain where id = $id") eq '1' }, 60), "$victim: another one overtakes");
	cmp_ok($paris->safe_psql('postgres', 'select count(*) from braid.applied'), '>', 0, "$victim: and is written down");
	my $pid = $victim eq 'postmaster' ? slurp_file($paris->data_dir . '/postmaster.pid') : $paris->safe_psql('postgres', "select pid from braid.apply_workers where worker = '$victim'");
	my ($number) = $pid =~ /^(\d+)/;
	my $log = -s $paris->logfile;
	if ($victim eq 'postmaster')
	{
		$paris->stop('immediate');
		$paris->start;
	}
	else
	{
		kill 'KILL', $number or die "no process $number: $!";
		$paris->wait_for_log(qr/database system is ready to accept connections/, $log);
	}
	ok(wait_until(sub { my $held = eval { is_held_up() }; $held }, 120), "$victim: after it the one that is held up waits again");
	# A commit that the crash has taken before it was flushed comes again.
	wait_until(sub { $paris->safe_psql('postgres', "select count(*) from plain where id = $id") >= 1 }, 20);
	is($paris->safe_psql('postgres', "select (select count(*) from cold), (select count(*) from plain where id = $id), (select n from hot where k = 7)"), '240|1|0',
		"$victim: what had overtaken it is there once");
}
is($paris->safe_psql('postgres', 'select count(*) from cold'), '240', 'nothing was lost or repeated');
unlike(slurp_file($paris->logfile), qr/duplicate key/, 'nor tried again');
$paris->safe_psql('postgres', q[commit prepared 'locker']);
$paris->safe_psql('postgres', "select braid.wait_for_event('tokyo', '$event', '180 s')");
is($paris->safe_psql('postgres', 'select n, last from hot where k = 7'), '3|-77', 'then it comes, and those that depend on it after it');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'hot', 'cold', 'plain');

# Load: few hot rows, many others, changed keys, foreign keys, a table without a key.
my $dir = PostgreSQL::Test::Utils::tempdir();
append_to_file("$dir/load.sql", q[
\set k random(1, 20)
\set hot random(1, 5)
\set old random(1, 2000)
begin;
insert into cold (id, k, t, code) select i, :k, 'y', i from (select nextval('cold_id') i) s;
delete from cold where id = :old;
update cold set code = -code - 100000 where id = :old + 1 and code > 0;
update hot set n = n + 1, last = :k where k = 1 + (:hot * :hot) / 5;
commit;
]);
append_to_file("$dir/single.sql", "insert into plain values (:client_id, 1);\n");
sub digests { return join ';', map { digest($_[0], $_) } qw(hot cold plain) }
my $retries = 0;
for my $mode ('parallel', 'batch', 'batch and consolidate')
{
	my ($apply_mode) = split / /, $mode;
	my $consolidate = $mode =~ /consolidate/ ? 'true' : 'false';
	$paris->safe_psql('postgres', "select braid.alter_subscription('$name', apply_mode => '$apply_mode', consolidate => $consolidate)");
	# A backlog, and what comes while it is applied.
	$paris->safe_psql('postgres', "select braid.disable_subscription('$name')");
	$tokyo->run_log([ 'pgbench', '-n', '-c', '4', '-t', '500', '-h', $tokyo->host, '-p', $tokyo->port, '-f', "$dir/load.sql\@3", '-f', "$dir/single.sql\@1", '--max-tries=1000', 'postgres' ]);
	$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
	$tokyo->run_log([ 'pgbench', '-n', '-c', '4', '-t', '300', '-h', $tokyo->host, '-p', $tokyo->port, '-f', "$dir/load.sql\@3", '-f', "$dir/single.sql\@1", '--max-tries=1000', 'postgres' ]);
	caught_up($paris, $tokyo);
	same_tables([ $tokyo, $paris ], 'hot', 'cold', 'plain');
	is($paris->safe_psql('postgres', 'select count(*) from braid.conflict_record'), '0', "no conflict, $mode");
}
streams($paris, $name, 'no error on the way');

# A leader that starts when no transaction is ahead any more removes all records of such.
$paris->restart;
ok(wait_until(sub { status($paris, $name)->{state} eq 'streaming' }, 20), 'it streams again');
is($paris->safe_psql('postgres', 'select count(*) from braid.applied'), '0', 'no row is left');
$paris->safe_psql('postgres', "insert into braid.applied select subscription_id, 0, '{1/1,1/2}' from braid.subscription; select braid.drop_subscription('$name')");
is($paris->safe_psql('postgres', 'select count(*) from braid.applied'), '0', 'nor of a subscription that is gone');

done_testing();
