# A commit counts as in progress until its synchronous subscriber has confirmed it. If the
# subscriber has to copy a table, the snapshot for that waits for the commit. So transactions that
# change tables which are still to be copied are parked, and the commit ends by itself.

use strict;
use warnings;

use Braid;
use Test::More;

my $conf = "max_prepared_transactions = 5\nlogical_decoding_work_mem = 64kB\n";
my ($tokyo, $paris) = my @nodes = map { new_node($_, conf => $conf, publication => '') } qw(tokyo paris);
on_all(q[
	create table doc (id int primary key, v text);
	create table added (id int primary key, v text);
	create table other (id int primary key, v text);
	create table bag (v text);
], @nodes);
for my $node (@nodes)
{
	$node->safe_psql('postgres', 'create publication chosen for table doc, other, bag');
}
$tokyo->safe_psql('postgres', q[insert into doc select i, 'first' from generate_series(1, 3) i; insert into added values (1, 'first'); insert into bag values ('first')]);
my $name = 'paris_from_tokyo';
subscribe($paris, $tokyo, publications => q['{chosen}'], synchronous_commit => q['on']);

sub run { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
sub waits { return run($tokyo, q[select count(*) > 0 from pg_stat_activity where wait_event = 'SyncRep']) eq 't' }

# Has commits at tokyo wait for these standbys.
sub standbys
{
	my ($names) = @_;
	run($tokyo, "alter system set synchronous_standby_names = '$names'");
	$tokyo->reload;
	ok(wait_until(sub { run($tokyo, 'show synchronous_standby_names') eq $names }, 30), "commits wait for '$names'") or die;
	return;
}

# The view's message about a copy that waits for a transaction at tokyo.
my $waiting = qr/the copy of a table waits for a transaction at the provider/;
sub copy_waits { return (status($paris, $name)->{last_error} // '') =~ $waiting }

# Requests a copy while a transaction of these statements is open at tokyo; the copy waits for it.
# Then the transaction commits: the commit ends by itself, and the nodes are equal.
sub copies
{
	my ($what, $statements, $copy, $end, @tables) = @_;
	standbys("FIRST 1 ($name)");
	my $session = $tokyo->background_psql('postgres');
	$session->query_safe("begin; $statements");
	run($paris, $copy);
	ok(wait_until(\&copy_waits, 60), "$what: the view says that the copy waits");
	$session->query_until(qr/sent/, "\\echo sent\n$end;\n");
	my $ends = wait_until(sub { run($tokyo, q[select count(*) from pg_stat_activity where state <> 'idle' and query ~ '^(commit|prepare)'] ) eq '0' }, 60);
	ok($ends, "$what: the commit ends by itself") or diag(run($paris, 'select * from braid.subscription_status; select * from braid.subscription_tables'));
	standbys('');
	$session->quit;
	caught_up($paris, $tokyo);
	becomes($paris, 'select count(*) from braid.parked_transaction', '0', "$what: nothing stays parked");
	becomes($paris, q[select count(*) from braid.subscription_tables where state <> 'ready'], '0', "$what: all tables are copied");
	caught_up($paris, $tokyo);
	same_tables(\@nodes, @tables);
	becomes($paris, "select coalesce(last_error, '') from braid.subscription_status where name = '$name'", '', "$what: nothing is wrong any more");
	return;
}

sub resync { my ($table) = @_; return "select braid.resync_table('$name', '$table')"; }
streams($paris, $name, 'the subscription streams');

copies('resync', q[update doc set v = 'resync'], resync('doc'), 'commit', 'doc');
run($tokyo, q[alter publication chosen add table added]);
copies('an added table', q[update added set v = 'added'], "select count(*) from braid.refresh_subscription('$name')", 'commit', 'doc', 'added');
copies('a lock on another table', q[lock table other; update doc set v = 'lock'], resync('doc'), 'commit', 'doc', 'other');
copies('a truncate', q[truncate doc; insert into doc values (7, 'truncate')], resync('doc'), 'commit', 'doc');
copies('no key', q[insert into bag values ('second')], resync('bag'), 'commit', 'bag');

# A commit waits already when the subscription starts.
standbys("FIRST 1 ($name)");
run($paris, "select braid.disable_subscription('$name')");
my $before = $tokyo->background_psql('postgres');
$before->query_until(qr/sent/, "\\echo sent\nupdate doc set v = 'before';\n");
ok(wait_until(\&waits, 30), 'a commit waits before the subscription starts');
run($paris, resync('doc'));
run($paris, "select braid.enable_subscription('$name')");
ok(wait_until(sub { !waits() }, 60), 'it ends by itself while its table is copied');
standbys('');
$before->quit;
caught_up($paris, $tokyo);
becomes($paris, q[select count(*) from braid.subscription_tables where state <> 'ready'], '0', 'the table is copied');
becomes($paris, 'select count(*) from braid.parked_transaction', '0', 'nothing of it stays parked');
same_tables(\@nodes, 'doc');

# A large transaction, whole or in chunks.
for my $split (0, 20)
{
	alter_running($paris, $name, "streaming => 'on', split_transactions_above => $split");
	copies("streamed, split above $split", "insert into doc select i, 'streamed' from generate_series(1000 * ($split + 1), 1000 * ($split + 1) + 3000) i", resync('doc'), 'commit', 'doc');
}
alter_running($paris, $name, q[streaming => 'off', split_transactions_above => 0]);
for my $mode (q[apply_mode => 'serial'], q[apply_mode => 'parallel', commit_order => 'relaxed'], q[apply_mode => 'batch', commit_order => 'source'])
{
	alter_running($paris, $name, $mode);
	copies($mode, q[update doc set v = v || '!'], resync('doc'), 'commit', 'doc');
}
alter_running($paris, $name, q[apply_mode => 'parallel', commit_order => 'source']);

# Other commits go on while the copy waits for a transaction that stays open. The views show it.
standbys("FIRST 1 ($name)");
my $open = $tokyo->background_psql('postgres');
$open->query_safe(q[begin; insert into added values (100, 'open')]);
run($paris, resync('doc'));
ok(wait_until(\&copy_waits, 60), 'the view says what the copy waits for');
like(status($paris, $name)->{error_hint}, qr/pg_stat_activity/, 'and where to look');
for my $i (1 .. 3)
{
	my $session = $tokyo->background_psql('postgres');
	$session->query_until(qr/sent/, "\\echo sent\nupdate doc set v = 'while $i';\n");
	ok(wait_until(sub { !waits() }, 60), "commit $i ends while the copy waits");
	$session->quit;
}
is(run($paris, q[select count(*) from braid.parked_transaction]), '3', 'they are parked');
is(run($paris, q[select distinct error from braid.parked_transactions where error is not null]), 'table "public.doc" is still to be copied', 'and it is said why');
# A restart of the subscriber changes nothing of that.
$paris->restart;
is(run($paris, q[select count(*) from braid.parked_transaction]), '3', 'they stay parked across a restart');
standbys('');
$open->query_safe('commit');
$open->quit;
becomes($paris, q[select count(*) from braid.subscription_tables where state <> 'ready'], '0', 'the copy ends once that transaction has ended');
becomes($paris, 'select count(*) from braid.parked_transaction', '0', 'and nothing stays parked');
caught_up($paris, $tokyo);
same_tables(\@nodes, 'doc', 'added', 'other', 'bag');
becomes($paris, "select last_error is null from braid.subscription_status where name = '$name'", 't', 'nothing is wrong any more');

# One that is prepared.
run($paris, "select braid.drop_subscription('$name')");
subscribe($paris, $tokyo, publications => q['{chosen}'], copy_data => 'false', synchronous_commit => q['on'], two_phase => 'true');
streams($paris, $name, 'the subscription streams with two_phase');
copies('prepared', q[update doc set v = 'prepared'], resync('doc'), "prepare transaction 'p'; commit prepared 'p'", 'doc');
is(run($tokyo, 'select count(*) from pg_prepared_xacts'), '0', 'nothing stays prepared');

# A question of the leader does not wait for the lock of a waiting commit: what has become of a
# table that is not here.
run($tokyo, q[create table gone (id int primary key); alter publication chosen add table gone]);
standbys("FIRST 1 ($name)");
run($paris, "select braid.disable_subscription('$name')");
run($tokyo, q[set synchronous_commit = local; insert into gone values (1); drop table gone]);
my $session = $tokyo->background_psql('postgres');
$session->query_until(qr/sent/, "\\echo sent\nbegin; lock table other; insert into doc values (-1, 'question'); commit;\n");
ok(wait_until(\&waits, 30), 'a commit that has locked a table waits');
run($paris, "select braid.enable_subscription('$name')");
ok(wait_until(sub { !waits() }, 60), 'it ends by itself while the leader asks about another table');
standbys('');
$session->quit;
caught_up($paris, $tokyo);
same_tables(\@nodes, 'doc');

# A comparison does not wait for a lock at the provider without end.
my $locker = $tokyo->background_psql('postgres');
$locker->query_safe('begin; lock table doc');
my ($status, $out, $err) = $paris->psql('postgres', "\\set VERBOSITY verbose\ncall braid.compare('$name', 'doc')", timeout => 120, timed_out => \my $timed_out);
ok(!$timed_out, 'a comparison of a locked table ends');
like($err, qr/55P03: .*lock timeout/, 'with an error that says so');
$locker->query_safe('rollback');
$locker->quit;

$_->stop for @nodes;
done_testing();
