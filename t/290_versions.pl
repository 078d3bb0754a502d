# Versioned transactions on one node: which transactions wait for which, and what ends a wait.
# Transactions that declare their tables run as if one after the other, and none of them fails for
# that. A rollback, an error, and the end of a session or process release what they hold.

use strict;
use warnings;

use Braid;
use Group;
use PostgreSQL::Test::Utils;
use Session;
use Test::More;

my ($tokyo) = group([qw(tokyo)], q[
	create table stock (id int primary key, amount int not null);
	create table accounts (id int primary key, amount int not null);
	create table plain_stock (id int primary key, amount int not null);
	create table plain_accounts (id int primary key, amount int not null);
	create table chain (n int not null, by_whom int not null);
	create table note (v text);
	insert into stock values (1, 100);
	insert into accounts values (1, 10);
	insert into plain_stock table stock;
	insert into plain_accounts table accounts], conf => 'braid.version_timeout = 100s');
sql($tokyo, "select braid.version_table('$_')") for qw(stock accounts chain);

# Sessions that are open side by side.
sub session
{
	my $session = Session::connect_to($tokyo, 'postgres') or die 'no connection';
	$session->{pid} = run($session, 'select pg_backend_pid()');
	return $session;
}

# Rows, or the error.
sub shown { my ($failed, $out, $err) = @_; chomp $out; return $failed ? $err : $out; }
sub run { my ($session, $sql) = @_; return shown(Session::query($session, $sql, 1)); }
sub ask { my ($session, $sql) = @_; Session::ask($session, $sql); return; }
sub answer { my ($session) = @_; return shown(Session::answer($session, '', 1)); }

sub begin_with
{
	my ($session, $versions) = @_;
	run($session, 'begin isolation level repeatable read');
	return run($session, "set local braid.versions = '$versions'");
}

# Begins a transaction that is to wait.
sub begins_to_wait
{
	my ($session, $versions) = @_;
	run($session, 'begin isolation level repeatable read');
	ask($session, "set local braid.versions = '$versions'");
	return;
}

sub waits
{
	my ($session, $for, $table, $name) = @_;
	my $so = "select count(*) > 0 from braid.table_versions where waiting_pid = $session->{pid} and waits_for_pid = $for->{pid} and relation = '$table'::regclass and waiting_until > waiting_since";
	ok($tokyo->poll_query_until('postgres', $so), $name) or diag(sql($tokyo, 'table braid.table_versions'));
	return;
}

sub nobody_waits
{
	my ($name) = @_;
	ok($tokyo->poll_query_until('postgres', 'select count(waiting_pid) = 0 from braid.table_versions'), $name) or diag(sql($tokyo, 'table braid.table_versions'));
	return;
}

my ($one, $two, $three) = map { session() } 1 .. 3;

# The purpose. T1 takes from the stock as much as the accounts have, T2 the reverse. The results of
# either order are right; if both read the old values, the result is wrong.
my $take_stock = 'update %1$sstock set amount = amount - (select amount from %1$saccounts)';
my $take_accounts = 'update %1$saccounts set amount = amount - (select amount from %1$sstock)';
run($_, 'begin isolation level repeatable read') for $one, $two;
run($one, sprintf $take_stock, 'plain_');
run($two, sprintf $take_accounts, 'plain_');
run($_, 'commit') for $one, $two;
is(sql($tokyo, 'select s.amount, a.amount from plain_stock s, plain_accounts a'), '90|-90', 'without versions both read what was before');

is(begin_with($one, 'read accounts, write stock'), '', 'the first transaction begins');
begins_to_wait($two, 'read stock, write accounts');
waits($two, $one, 'stock', 'the second waits for it');
is(run($one, sprintf $take_stock, ''), '', 'the first writes');
is(run($one, 'commit'), '', 'and commits');
is(answer($two), '', 'the second goes on');
is(run($two, sprintf $take_accounts, ''), '', 'and writes');
is(run($two, 'commit'), '', 'and commits');
is(sql($tokyo, 'select s.amount, a.amount from stock s, accounts a'), '90|-80', 'they ran one after the other');
nobody_waits('nobody waits then');

# A reader waits, and no session waits for a reader.
begin_with($one, 'write stock');
run($one, 'update stock set amount = 50');
is(begin_with($three, 'read accounts'), '', 'a reader of another table does not wait');
begins_to_wait($two, 'read stock, read accounts');
waits($two, $one, 'stock', 'a reader waits for a writer');
run($one, 'commit');
answer($two);
is(run($two, 'select amount from stock'), '50', 'and reads what was written');
is(begin_with($one, 'write stock, write accounts'), '', 'a writer does not wait for readers');
is(run($one, 'update stock set amount = 51'), '', 'and writes');
is(run($one, 'commit'), '', 'and commits');
is(run($two, 'select amount from stock'), '50', 'the reader reads on');
run($_, 'commit') for $two, $three;

# A wait has an end.
begin_with($one, 'write stock');
run($two, q[set braid.version_timeout = '100ms']);
my $late = begin_with($two, 'write stock');
like($late, qr/timeout expired while waiting for versions/, 'a wait ends');
like($late, qr/DETAIL:  The transaction waits for write \d+ of process $one->{pid} of table stock\./, 'and says for whom it was');
run($two, 'rollback');
nobody_waits('it waits no more');
run($two, 'reset braid.version_timeout');
run($one, 'commit');
is(begin_with($two, 'write stock'), '', 'its number is void: the next one goes on');
run($two, 'commit');

# Rolled back, as a whole and to a savepoint.
begin_with($one, 'write stock');
begins_to_wait($two, 'write stock');
waits($two, $one, 'stock', 'one waits');
run($one, 'rollback');
is(answer($two), '', 'for a transaction that is rolled back');
run($two, 'commit');

run($one, 'begin isolation level repeatable read');
run($one, 'savepoint a');
run($one, 'savepoint b');
is(run($one, q[set local braid.versions = 'write stock']), '', 'declared within savepoints');
run($one, 'release b');
begins_to_wait($two, 'write stock');
waits($two, $one, 'stock', 'one waits');
run($one, 'rollback to a');
is(answer($two), '', 'until that is rolled back');
like(run($one, q[set local braid.versions = 'write stock']), qr/must be set before the transaction has its snapshot/, 'it can\'t be declared again');
run($one, 'rollback to a');
like(run($one, 'update stock set amount = 0'), qr/can only be written in a versioned transaction/, 'the transaction is no versioned one any more');
run($_, 'rollback') for $one, $two;

run($one, 'begin isolation level repeatable read');
run($one, 'savepoint a');
begin_with($one, 'write stock');
run($one, 'release a');
is(run($one, 'update stock set amount = 60'), '', 'a released savepoint keeps the declaration');
is(run($one, 'commit'), '', 'which commits');

# An error within.
begin_with($one, 'write stock');
begins_to_wait($two, 'write stock');
waits($two, $one, 'stock', 'one waits');
like(run($one, 'select 1 / 0'), qr/division by zero/, 'for a transaction that fails');
is(answer($two), '', 'and goes on before that is rolled back');
run($_, 'rollback') for $one, $two;

# Ended: a session that goes, a backend that is terminated, a wait that is cancelled.
my $gone = session();
begin_with($gone, 'write stock');
run($gone, 'update stock set amount = 0');
begins_to_wait($two, 'write stock');
waits($two, $gone, 'stock', 'one waits');
close $gone->{socket};
is(answer($two), '', 'for a session that goes');
is(run($two, 'select amount from stock'), '60', 'what that has written is gone');
run($two, 'commit');

$gone = session();
begin_with($gone, 'write stock');
begins_to_wait($two, 'write stock');
waits($two, $gone, 'stock', 'one waits');
sql($tokyo, "select pg_terminate_backend($gone->{pid})");
is(answer($two), '', 'for a backend that is terminated');
begins_to_wait($three, 'write stock');
waits($three, $two, 'stock', 'another one waits');
sql($tokyo, "select pg_cancel_backend($three->{pid})");
like(answer($three), qr/canceling statement due to user request/, 'and is cancelled');
nobody_waits('it waits no more');
run($_, 'rollback') for $two, $three;

# Early release.
begin_with($one, 'write stock, write accounts, read chain');
run($one, 'update accounts set amount = 5');
begins_to_wait($two, 'write stock');
waits($two, $one, 'stock', 'one waits for a table that is declared');
is(run($one, q[set local braid.release = 'stock']), '', 'which is released');
is(answer($two), '', 'before the transaction ends');
is(run($two, 'update stock set amount = 70'), '', 'it is written');
is(run($two, 'commit'), '', 'and committed');
begins_to_wait($two, 'write accounts');
waits($two, $one, 'accounts', 'the other table is waited for');
is(run($one, q[set local braid.release = 'accounts, chain']), '', 'a table that was used is released');
run($one, 'savepoint a');
like(run($one, "update $_ set amount = 0"), qr/versioned table $_ was released by this transaction/, "$_ can't be used any more"), run($one, 'rollback to a') for qw(stock accounts);
waits($two, $one, 'accounts', 'but it counts until the end');
is(run($one, 'commit'), '', 'which comes');
is(answer($two), '', 'and then the wait is over');
is(run($two, 'select amount from accounts'), '5', 'with what was written');
run($two, 'commit');
is(sql($tokyo, 'select amount from stock'), '70', 'what was written to the released table stays');

# A single read of what is known.
begin_with($one, 'write stock');
run($one, 'update stock set amount = 80');
begins_to_wait($two, 'read stock');
waits($two, $one, 'stock', 'it is known that a write is under way');
ask($three, q[call braid.read_current('stock')]);
ok($tokyo->poll_query_until('postgres', "select count(*) = 1 from braid.table_versions where waiting_pid = $three->{pid} and waits_for is not null"), 'a single read waits for it');
run($one, 'commit');
is(answer($three), '', 'and goes on');
is(run($three, 'select amount from stock'), '80', 'with what was written');
answer($two);
run($two, 'commit');

# Parallel workers read for their leader.
run($one, "set $_") for 'parallel_setup_cost = 0', 'parallel_tuple_cost = 0', 'min_parallel_table_scan_size = 0', 'max_parallel_workers_per_gather = 2';
begin_with($one, 'read stock');
like(run($one, 'explain (analyze, costs off, timing off, summary off) select sum(amount) from stock'), qr/Workers Launched: [12]/, 'a query runs in parallel');
is(run($one, 'select sum(amount) from stock'), '80', 'and gives its result');
run($one, 'commit');

# The versions process ends: numbers that it has assigned are void, and requests are made again.
my $process = q[select pid from pg_stat_activity where backend_type = 'braid versions'];
begin_with($one, 'write stock');
run($one, 'update stock set amount = 0');
begins_to_wait($two, 'write accounts, read stock');
waits($two, $one, 'stock', 'one waits');
my $before = sql($tokyo, $process);
sql($tokyo, "select pg_terminate_backend($before)");
is(answer($two), '', 'the wait goes on with the next process');
isnt(sql($tokyo, $process), $before, 'which is another one');
like(run($one, 'commit'), qr/the process that gives versions has started anew.*Run the transaction again/s, 'a transaction of before can\'t commit');
is(run($two, 'select amount from stock'), '80', 'and has written nothing');
is(run($two, 'commit'), '', 'one that only reads commits');

# The server ends: nothing is held then, and the tables are versioned.
begin_with($one, 'write stock');
run($one, 'update stock set amount = 0');
$tokyo->stop('immediate');
$tokyo->start;
like(refusal($tokyo, 'update stock set amount = 1'), qr/can only be written in a versioned transaction/, 'the first statement after a crash knows');
joined($tokyo);
($one, $two) = map { session() } 1 .. 2;
is(begin_with($one, 'write stock'), '', 'a versioned transaction begins');
is(run($one, 'update stock set amount = amount + 1'), '', 'and writes');
is(run($one, 'commit'), '', 'and commits');
is(sql($tokyo, 'select amount from stock'), '81', 'to what was there');

# Many at once: each counts the rows and adds one. Nobody fails, and no two have counted the same.
my $script = $tokyo->basedir . '/chain.sql';
append_to_file($script, <<'SQL');
begin isolation level repeatable read;
set local braid.versions = 'write chain';
insert into chain select count(*) + 1, :client_id from chain;
commit;
SQL
my $bench = start_pgbench($tokyo, '-M', 'extended', '-c', 8, '-j', 2, '-t', 25, '-f', $script);
is(finish_pgbench($bench), 200, 'all transactions have committed');
unlike(${ $bench->{out} }, qr/retried: [1-9]|failed transactions: [1-9]/, 'at the first attempt');
is(sql($tokyo, 'select count(*), count(distinct n), min(n), max(n), count(distinct by_whom) from chain'), '200|200|1|200|8', 'each after the one before');

# A standby can be read, and runs no versioned transactions.
$tokyo->backup('b');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($tokyo, 'b', has_streaming => 1);
$standby->start;
$tokyo->wait_for_catchup($standby);
is(sql($standby, 'select amount from stock'), '81', 'a standby has the rows');
like(refusal($standby, q[begin isolation level repeatable read; set local braid.versions = 'read stock']), qr/versioned transactions cannot run on a standby.*Run them on the primary/s, 'and no versioned transactions');
like(refusal($standby, q[call braid.read_current('stock')]), qr/a standby does not know which writes are current/, 'and no current reads');
$standby->stop;

# A node with data can't join as long as tables are versioned.
my $paris = new_server('paris', init => ['--data-checksums']);
sql($paris, 'create extension braid');
my ($there, $here) = ($tokyo->connstr('postgres'), $paris->connstr('postgres'));
like(refusal($paris, "select braid.join_group(\$d\$$there\$d\$, node_name => 'paris', dsn => \$d\$$here\$d\$)"),
	qr/a node with data cannot join yet, as the group has versioned tables/, 'no node with data joins');

# Unversioned, it is a table as before.
sql($tokyo, "select braid.unversion_table('$_')") for qw(stock accounts chain);
is(sql($tokyo, 'update stock set amount = 1; select amount from stock'), '1', 'an unversioned table is written as ever');
ok($tokyo->poll_query_until('postgres', "select count(*) = 0 from pg_stat_activity where backend_type = 'braid versions'"), 'the versions process ends');
is(sql($tokyo, 'select count(*) from braid.table_versions'), '0', 'the view is empty');
done_testing();
