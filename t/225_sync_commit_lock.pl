# A commit that waits for its subscriber keeps its locks. If the subscriber needs a large value of a
# table that is locked so, the transaction is parked, which makes it durable and confirmed. Then the
# lock is released, and the transaction is applied. The views show the wait.

use strict;
use warnings;

use Braid;
use Proxy;
use Test::More;

# A question waits for a lock for half a second.
my $conf = "braid.querier_timeout = 2s\nmax_prepared_transactions = 5\nlogical_decoding_work_mem = 64kB\n";
my ($tokyo, $paris) = my @nodes = map { new_node($_, conf => $conf) } qw(tokyo paris);
on_all(q[
	create table doc (id int primary key, n int, v text, big text);
	create table two (id int primary key, n int, big text);
	create table plain (id int primary key, n int);
	alter table doc alter column big set storage external;
	alter table two alter column big set storage external;
], @nodes);
my $to_tokyo = Proxy->new($paris);
subscribe($tokyo, $paris, copy_data => 'false', dsn => $to_tokyo->connstr('postgres'));
subscribe($paris, $tokyo, copy_data => 'false', synchronous_commit => q['on']);
my $name = 'paris_from_tokyo';

sub run { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
sub big { my ($seed) = @_; $seed =~ tr/'//d; return "repeat(md5('$seed'), 100)"; }
sub waits_for_standby { return q[select count(*) > 0 from pg_stat_activity where wait_event = 'SyncRep'] }
sub parked { return run($paris, "select count(*) from braid.parked_transaction where subscription_name = '$name'") }

# Has commits at tokyo wait for these standbys.
sub standbys
{
	my ($names) = @_;
	run($tokyo, "alter system set synchronous_standby_names = '$names'");
	$tokyo->reload;
	my $is_set = sub { run($tokyo, 'show synchronous_standby_names') eq $names };
	ok(wait_until($is_set, 30), "commits wait for '$names'") or die;
	return;
}

# Whether SQL at tokyo ends by itself. If it does not, commits no longer wait for standbys, so that
# the test can go on.
sub ends
{
	my ($what, $sql) = @_;
	my ($out, $error, $timed_out) = ('', '', 0);
	my $status = $tokyo->psql('postgres', $sql, stdout => \$out, stderr => \$error, timeout => $PostgreSQL::Test::Utils::timeout_default, timed_out => \$timed_out);
	ok(!$timed_out && defined $status && $status == 0, "$what: the commit ends by itself") or diag($error);
	standbys('') if $timed_out;
	return;
}

# Both nodes are equal, and nothing is parked.
sub settled
{
	my ($what, @tables) = @_;
	my $is_empty = sub { parked() eq '0' };
	ok(wait_until($is_empty, 30), "$what: nothing stays parked") or diag(run($paris, 'select state, error from braid.parked_transactions'));
	converged(@nodes) for 1 .. 2;
	same_tables(\@nodes, @tables);
	return;
}

# Rows that both nodes have changed: paris has other large values, and tokyo does not know of them
# before its own transaction is at paris.
sub conflict
{
	my ($what, $sql, @tables) = @_;
	$to_tokyo->link('down');
	run($paris, "update $_ set big = " . big($what) . ', n = -1') for @tables;
	ends($what, $sql);
	$to_tokyo->link('up');
	settled($what, @tables);
	return;
}

run($tokyo, "insert into $_ (id, n, big) select i, 0, " . big('start') . ' from generate_series(1, 3) i') for qw(doc two);
converged(@nodes);
standbys("FIRST 1 ($name)");

# Paris wrote the rows last, and there is no conflict.
run($paris, 'update doc set n = n + 1');
converged(@nodes);
my $questions = run($paris, "select questions from braid.subscription_detail where name = '$name'");
ends('one writer after the other', 'begin; lock table doc; update doc set n = n + 1; commit');
settled('one writer after the other', 'doc');
is(run($paris, 'select count(*) from doc where n = 2 and big = ' . big('start')), '3', 'with the large values that they had');
cmp_ok(run($paris, "select questions from braid.subscription_detail where name = '$name'"), '>', $questions, 'which paris has asked for');
is(status($paris, $name)->{last_error}, '', 'nothing is wrong any more');

# The transaction stays parked while another standby is missing, and the views show why. Independent
# transactions are applied.
standbys("FIRST 2 ($name, nobody)");
$to_tokyo->link('down');
run($paris, 'update doc set n = 10, big = ' . big('paris'));
my $waiting = $tokyo->background_psql('postgres');
$waiting->query_until(qr/sent/, "\\echo sent\nbegin; lock table doc; update doc set n = 20; commit;\n");
ok(wait_until(sub { parked() eq '1' }, 30), 'a transaction that needs a value of a locked table is parked');
my $status = status($paris, $name);
like($status->{last_error}, qr/could not ask node "tokyo" for large values of table "public.doc".*lock/, 'the view says what it waits for');
like($status->{error_hint}, qr/node "tokyo"/, 'and where to look');
is($status->{parked}, '1', 'and that it is parked');
is(run($paris, q[select state || ' ' || error_sqlstate || ' ' || coalesce(waits_for::text, '') from braid.parked_transactions]), 'waiting 55P03 ', 'as one that waits for a lock');
is(run($paris, 'select count(*) from doc where n = 10 and big = ' . big('paris')), '3', 'rows are whole meanwhile');
run($tokyo, q[set synchronous_commit = local; insert into plain values (1, 1)]);
caught_up($paris, $tokyo);
is(run($paris, 'select n from plain'), '1', 'other transactions go on');
ok(wait_until(sub { run($paris, 'select attempts > 2 from braid.parked_transactions') eq 't' }, 30), 'it is tried again and again');
is(run($tokyo, waits_for_standby()), 't', 'the commit still waits');

# A restart of the subscriber changes nothing of that.
$paris->restart;
ok(wait_until(sub { my $now = status($paris, $name); ($now->{last_error} // '') =~ /could not ask node "tokyo"/ && $now->{parked} eq '1' }, 30), 'as after a restart');
standbys("FIRST 1 ($name)");
ok(wait_until(sub { run($tokyo, waits_for_standby()) eq 'f' }, 30), 'the commit ends when no other standby is asked for');
$waiting->quit;
$to_tokyo->link('up');
settled('a conflict', 'doc', 'plain');
is(run($paris, 'select count(*) from doc where n = 20 and big = ' . big('start')), '3', 'the later update has won, with its large values');
is(status($paris, $name)->{last_error}, '', 'and the view says no more');

# In all ways to apply, and for all that locks a table.
my %locked = (
	'lock table' => [ 'lock table doc', 'doc' ],
	'alter table' => [ 'alter table doc alter column v set default 7', 'doc' ],
	'truncate' => [ 'truncate plain; lock table doc; insert into plain values (5, 5)', 'doc' ],
	'two tables' => [ 'lock table doc, two; update two set n = n + 1', 'doc', 'two' ],
);
for my $mode (q[apply_mode => 'serial'], q[apply_mode => 'parallel'], q[apply_mode => 'parallel', commit_order => 'relaxed'], q[apply_mode => 'batch', commit_order => 'source'])
{
	alter_running($paris, $name, $mode);
	my ($what, $left) = $mode =~ /serial/ ? ('lock table', 'on') : $mode =~ /relaxed/ ? ('truncate', 'on') : $mode =~ /batch/ ? ('two tables', 'remote_apply') : ('alter table', 'remote_apply');
	my ($lock, @tables) = @{ $locked{$what} };
	conflict("$mode, $what, $left", "set synchronous_commit = $left; begin; $lock; update doc set n = n + 1; commit", @tables);
}
alter_running($paris, $name, q[apply_mode => 'parallel', commit_order => 'source']);
same_tables(\@nodes, 'plain');

# A later transaction has the lock. The one before it does not wait for anybody.
run($paris, "select braid.disable_subscription('$name')");
$to_tokyo->link('down');
run($paris, 'update doc set n = -1, big = ' . big('later'));
run($tokyo, 'set synchronous_commit = local; update doc set n = n + 1');
$waiting = $tokyo->background_psql('postgres');
$waiting->query_until(qr/sent/, "\\echo sent\nbegin; lock table doc; insert into plain values (7, 7); commit;\n");
ok(wait_until(sub { run($tokyo, waits_for_standby()) eq 't' }, 30), 'a later commit waits with the lock');
run($paris, "select braid.enable_subscription('$name')");
ok(wait_until(sub { run($tokyo, waits_for_standby()) eq 'f' }, 30), 'a later commit that has the lock ends by itself') or standbys('');
$waiting->quit;
$to_tokyo->link('up');
settled('a later transaction', 'doc', 'plain');

# A transaction that is sent while it is in progress, also in chunks.
for my $split (0, 20)
{
	alter_running($paris, $name, "streaming => 'on', split_transactions_above => $split");
	conflict("streamed, split above $split", q[begin; lock table doc; insert into plain select i, i from generate_series(100, 3000) i; update doc set n = n + 1; delete from plain where id >= 100; commit], 'doc');
}
alter_running($paris, $name, q[streaming => 'off', split_transactions_above => 0]);

# No room to park it: it is retried, and the view shows it.
run($paris, q[alter system set braid.max_parked_size = '1MB'; select pg_reload_conf()]);
$to_tokyo->link('down');
run($paris, 'update doc set n = -1, big = ' . big('room'));
$waiting = $tokyo->background_psql('postgres');
$waiting->query_until(qr/sent/, "\\echo sent\nbegin; lock table doc; insert into two select i, i, repeat(md5(i::text), 3000) from generate_series(100, 130) i; update doc set n = n + 1; commit;\n");
ok(wait_until(sub { status($paris, $name)->{last_error} =~ /braid.max_parked_size is reached/ }, 30), 'without room to park it the view says so');
is(parked(), '0', 'and it is not parked');
run($paris, q[alter system reset braid.max_parked_size; select pg_reload_conf()]);
ok(wait_until(sub { run($tokyo, waits_for_standby()) eq 'f' }, 30), 'the commit ends once there is room') or standbys('');
$waiting->quit;
$to_tokyo->link('up');
settled('without room', 'doc', 'two');

# If no commit waits for the subscriber, the transaction waits for the lock, and the view shows it.
standbys('');
$to_tokyo->link('down');
run($paris, 'update doc set n = -1, big = ' . big('plain lock'));
my $locker = $tokyo->background_psql('postgres');
$locker->query_safe('begin');
run($tokyo, 'update doc set n = n + 1');
$locker->query_safe('lock table doc');
ok(wait_until(sub { status($paris, $name)->{last_error} =~ /could not ask node "tokyo"/ }, 30), 'the view says what a transaction waits for that is tried again')
  or diag(run($paris, 'select * from braid.subscription_status'));
is(parked(), '0', 'which is not parked');
$locker->query_safe('commit');
$locker->quit;
$to_tokyo->link('up');
settled('a plain lock', 'doc');
ok(wait_until(sub { status($paris, $name)->{last_error} eq '' }, 30), 'and no more once it is applied');

# One that is prepared: its PREPARE waits for the subscriber, and so does its COMMIT PREPARED.
run($paris, "select braid.drop_subscription('$name')");
subscribe($paris, $tokyo, copy_data => 'false', synchronous_commit => q['on'], two_phase => 'true');
standbys("FIRST 1 ($name)");
conflict('prepared', q[begin; lock table doc; update doc set n = n + 1; prepare transaction 'p'; commit prepared 'p'], 'doc');
is($tokyo->safe_psql('postgres', 'select count(*) from pg_prepared_xacts'), '0', 'nothing stays prepared');

done_testing();
