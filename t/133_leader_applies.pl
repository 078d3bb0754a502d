# braid.leader_applies: the leader itself applies a small transaction that comes alone, with the
# same version and position as an applier. A transaction that would have to wait, or runs code of
# users, goes to an applier, and the leader reads on.

use strict;
use warnings;

use Braid;
use Mesh;
use Test::More;
use Time::HiRes qw(sleep);

my ($tokyo, $paris) = my @nodes = map { new_node($_) } qw(tokyo paris);
my @tables = qw(item coded fired ruled);
on_all(q[
	create table item (id int primary key, v int not null, note text);
	create table coded (id int primary key, code int unique);
	create table fired (id int primary key, v int not null);
	create table ruled (id int primary key, v int not null);
	create table seen (who text);
	create function see() returns trigger language plpgsql as $$
		begin insert into public.seen select backend_type from pg_stat_activity where pid = pg_backend_pid(); return new; end $$;
	create function larger(local ruled, remote ruled, before ruled, info braid.conflict) returns ruled language sql immutable
		as 'select case when (local).v > (remote).v then local else remote end';
], @nodes);
sql($paris, 'create trigger see after insert or update on fired for each row execute function see(); alter table fired enable always trigger see');
my $name = subscribe($paris, $tokyo, copy_data => 'false');
subscribe($tokyo, $paris, copy_data => 'false');

sub by_leader { return sql($paris, "select applied_by_leader from braid.dependency_stats where subscription = '$name'"); }

# Sends one transaction after the other, each alone, until the leader has applied one. After
# anything slow, it leaves transactions to the appliers for a moment.
sub leader_applies
{
	my ($what, $statement) = @_;
	my $before = by_leader();
	my $n = 0;
	ok(wait_until(sub { $n++; sql($tokyo, $statement =~ s/N/$n/gr); caught_up($paris, $tokyo); by_leader() > $before }, 20), "the leader applies $what");
	return $n;
}

# The same, all of which is another's.
sub others_apply
{
	my ($what, @statements) = @_;
	my $before = by_leader();
	for my $statement (@statements)
	{
		sql($tokyo, $statement);
		caught_up($paris, $tokyo);
		sleep 0.15;
	}
	is(by_leader(), $before, "not the leader: $what");
	return;
}

my $items = leader_applies('inserts', 'insert into item values (N, 0)');
leader_applies('updates', 'update item set v = v + 1 where id = 1');
leader_applies('several changes', 'insert into coded values (N, N); update coded set code = -N where id = N; begin; update coded set code = code - 1000; delete from coded where id > 1000; commit');
leader_applies('updates of a large value', q[update item set note = repeat('n', 4000) || N where id = 1]);
same_tables(\@nodes, @tables);
my $version = q[select string_agg(t.timestamp::text, ' ' order by id) from item, pg_xact_commit_timestamp_origin(xmin) t];
is(sql($paris, $version), sql($tokyo, $version), 'with their versions');
is(sql($paris, q[select count(*) from item, pg_xact_commit_timestamp_origin(xmin) t where not exists (select from braid.origin o where o.origin_id = t.roident and o.node_name = 'tokyo')]), 0, 'and the node that they come from');
is(sql($paris, 'select count(*) from braid.conflict_history'), 0, 'without a conflict');
is(sql($paris, "select count(*) from braid.apply_workers where worker like 'applier %' and subscription = '$name'"), 2, 'the appliers are there');
ok($paris->poll_query_until('postgres', q[select n_tup_ins >= 1 from pg_stat_user_tables where relname = 'item']), 'autovacuum hears of it');

# Other work of the leader stays its own: it has no other node's origin, and is not sent.
sql($_, 'create table fresh (id int primary key)') for @nodes;
leader_applies('inserts into a new table', 'insert into fresh values (N)');
is(sql($paris, "select distinct t.roident from braid.subscription_table s, pg_xact_commit_timestamp_origin(s.xmin) t where s.relation = 'fresh'::regclass and s.subscription_id = (select subscription_id from braid.subscription where subscription_name = '$name')"), 0, 'that it is part of the subscription is written by this node');

# A row is locked here, then a table: the leader leaves it to an applier, and others overtake it.
for my $lock ('update item set v = v where id = 1', 'lock table coded in share mode')
{
	my $session = $paris->background_psql('postgres', on_error_stop => 1);
	$session->query_safe("begin; $lock");
	my ($waits, $table) = $lock =~ /item/ ? ('update item set v = 100 where id = 1', 'item') : ('insert into coded values (2000, 2000)', 'coded');
	sql($tokyo, $waits);
	ok($paris->poll_query_until('postgres', q[select count(*) > 0 from pg_locks l join pg_stat_activity a using (pid) where not l.granted and a.backend_type = 'braid applier']), "$lock: an applier waits");
	my $received = sql($tokyo, 'insert into fired values (1, 1) on conflict (id) do update set v = fired.v + 1; select pg_current_wal_lsn()');
	ok($paris->poll_query_until('postgres', "select received_lsn >= '$received' from braid.subscription_detail where name = '$name'"), 'the leader reads on');
	$session->query_safe('commit');
	$session->quit;
	# An update of paris has to arrive at tokyo too.
	converged(@nodes);
	same_tables(\@nodes, @tables);
}
is(sql($paris, "select last_failure from braid.subscription_detail where name = '$name'"), '', 'nothing has failed');

# Triggers, conflict functions, and what is not of keys.
sql($paris, 'truncate seen');
others_apply('what fires a trigger', map { "update fired set v = v + $_" } 1 .. 4);
is(sql($paris, 'select distinct who from seen'), 'braid applier', 'that runs in an applier');
others_apply('a truncate', 'truncate coded', 'truncate coded');
on_all(q[select braid.set_conflict_resolution('ruled', null, 'function', 'larger')], @nodes);
converged(@nodes);
sql($tokyo, 'insert into ruled values (1, 10)');
converged(@nodes);
for my $n (1 .. 4)
{
	sql($paris, "update ruled set v = v + $n");
	others_apply('what asks a conflict function', 'update ruled set v = v + 1');
	converged(@nodes);
}

# Two rows want one value: as without.
sql($tokyo, 'insert into coded values (1, 1)');
converged(@nodes);
sql($paris, "select braid.disable_subscription('$name')");
sql($tokyo, 'insert into coded values (12, 7)');
sql($paris, 'insert into coded values (11, 7)');
sql($paris, "select braid.enable_subscription('$name')");
converged(@nodes);
same_tables(\@nodes, 'coded');

# Transactions that come together while the leader is busy: a few are applied by the leader; of
# more, at most the last ones.
sub come_together
{
	my ($n) = @_;
	leader_applies('what comes alone', 'update item set v = v + N');
	my ($leader) = worker_pids($paris, 'braid leader');
	my $before = by_leader();
	kill 'STOP', $leader;
	sql($tokyo, 'update item set v = v + 1 where id = 1') for 1 .. $n;
	my $end = sql($tokyo, 'select pg_current_wal_insert_lsn()');
	my $sent = $tokyo->poll_query_until('postgres', "select sent_lsn >= '$end' from pg_stat_replication where application_name = '$name'");
	kill 'CONT', $leader;
	ok($sent, "$n come together");
	caught_up($paris, $tokyo);
	return by_leader() - $before;
}
# Not in the moment after something has taken long.
ok(wait_until(sub { come_together(3) == 3 }, 60), 'the leader applies them all');
cmp_ok(come_together(8), '<=', 3, 'appliers are woken for those that are more');
same_tables(\@nodes, @tables);

# Whether it does is a setting, changed while it runs; and a matter of the mode.
sub set_it { my ($value) = @_; $paris->append_conf('postgresql.conf', "braid.leader_applies = $value"); $paris->reload; sleep 0.3; return; }
set_it('off');
others_apply('switched off', map { "update item set v = v + $_" } 1 .. 4);
set_it('on');
leader_applies('again', 'update item set v = v + N');
for my $options ("apply_mode => 'serial'", "apply_mode => 'batch'", "apply_mode => 'aggregate'", "apply_mode => 'parallel', commit_order => 'relaxed'", "commit_order => 'source', on_error => 'park'", "on_error => 'stop', origin => 'any'")
{
	my ($leader) = worker_pids($paris, 'braid leader');
	sql($paris, "select braid.alter_subscription('$name', $options)");
	ok(wait_until(sub { my ($other) = worker_pids($paris, 'braid leader'); $other && $other != $leader }, 20), 'it starts anew');
	caught_up($paris, $tokyo);
	others_apply($options, map { "update item set v = v + $_" } 1 .. 3);
}
same_tables(\@nodes, @tables);

done_testing();
