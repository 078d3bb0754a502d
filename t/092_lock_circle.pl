# A prepared transaction keeps its locks until its end arrives. If earlier transactions of the
# stream wait for them, through a session, another subscription, or a table's lock, PostgreSQL sees
# no deadlock. The prepared transaction is then given up and comes again as a whole. No session is
# cancelled.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my $conf = "max_prepared_transactions = 20\nautovacuum = off\n";
my ($tokyo, $paris, $oslo) = map { new_node($_, conf => $conf) } qw(tokyo paris oslo);
my @nodes = ($tokyo, $paris, $oslo);
sub sql { return $_[0]->safe_psql('postgres', $_[1]) }
sub value { return sql($_[0], "select v from item where id = $_[1]") }
sub gids { return sql($paris, 'select count(*) from pg_prepared_xacts') }
on_all('create table item (id int primary key, v text)', @nodes);
sql($_, q[insert into item select i, 'old' from generate_series(1, 20) i]) for @nodes;
my $name = subscribe($paris, $tokyo, two_phase => 'true', copy_data => 'false');
my $other = subscribe($paris, $oslo, two_phase => 'true', copy_data => 'false');
subscribe($_, $paris, copy_data => 'false') for $tokyo, $oslo;

sub prepared_at_tokyo
{
	my ($gid, $sql) = @_;
	sql($tokyo, "begin; $sql; prepare transaction '$gid'");
	caught_up($paris, $tokyo);
	is(gids(), '1', "$gid: prepared at paris");
	return;
}

sub waits
{
	my ($session) = @_;
	return ok(wait_until(sub { sql($paris, "select count(*) from pg_locks where not granted and pid = $session") > 0 }, 20), 'a session waits for it');
}

# A session has what comes next, and waits for what is prepared.
my $session = $paris->background_psql('postgres');
my $pid = $session->query_safe('select pg_backend_pid()');
$session->query_safe(q[begin; update item set v = 'session' where id = 1]);
prepared_at_tokyo('session', q[update item set v = 'prepared' where id = 2]);
$session->query_until(qr/asked/, "\\echo asked\nupdate item set v = 'session' where id = 2;\ncommit;\nselect 'committed';\n");
waits($pid);
my $log = -s $paris->logfile;
sql($tokyo, q[update item set v = 'next' where id = 1]);
sql($tokyo, q[commit prepared 'session'; update item set v = 'last' where id = 3]);
caught_up($paris, $tokyo);
is($session->query_safe('select 1'), "committed\n1", 'the session has committed');
$session->quit;
like(slurp_file($paris->logfile, $log), qr/rolls back transaction \d+ of the provider, which is prepared here, and applies it once it has committed/, 'the log says what was done');
unlike(slurp_file($paris->logfile, $log), qr/canceling statement|deadlock detected/, 'and nobody was cancelled');
is(gids(), '0', 'nothing is left prepared');
is(sql($paris, 'select reason from braid.unprepared'), 'What comes before its end waits for rows, or tables, that it has locked.', 'it is noted down');
is(value($paris, 3), 'last', 'the stream goes on');
caught_up($tokyo, $paris);
is(value($_, 2), 'session', 'the session was the last to write, at ' . $_->name) for $tokyo, $paris;
same_tables([ $tokyo, $paris ], 'item');

# A lock on the table, which what comes next has to queue up behind.
prepared_at_tokyo('table', q[update item set v = 'prepared' where id = 4]);
$session = $paris->background_psql('postgres');
$pid = $session->query_safe('select pg_backend_pid()');
$session->query_until(qr/asked/, "\\echo asked\nbegin;\nlock table item;\ncommit;\nselect 'committed';\n");
waits($pid);
sql($tokyo, q[update item set v = 'next' where id = 5]);
caught_up($paris, $tokyo);
is(value($paris, 5), 'next', 'what comes next is applied before it ends');
is($session->query_safe('select 1'), "committed\n1", 'the session has had its lock');
$session->quit;
is(gids(), '0', 'nothing is prepared any more');
is(value($paris, 4), 'old', 'nor applied yet');
sql($tokyo, q[commit prepared 'table']);
caught_up($paris, $tokyo);
is(value($paris, 4), 'prepared', 'it comes with its commit');
my $time = 'select pg_xact_commit_timestamp(xmin) from item where id = 4';
is(sql($paris, $time), sql($tokyo, $time), 'and its time');

# Two streams that wait for what the other one has prepared.
prepared_at_tokyo('tokyo', q[update item set v = 'tokyo prepared' where id = 6]);
sql($oslo, q[begin; update item set v = 'oslo prepared' where id = 7; prepare transaction 'oslo']);
caught_up($paris, $oslo);
is(gids(), '2', 'both are prepared at paris');
sql($tokyo, q[update item set v = 'tokyo' where id = 7]);
sql($oslo, q[update item set v = 'oslo' where id = 6]);
sql($tokyo, q[commit prepared 'tokyo']);
sql($oslo, q[commit prepared 'oslo']);
caught_up($paris, $_) for $tokyo, $oslo;
is(gids(), '0', 'neither is any more');
is(value($paris, 6), 'tokyo prepared', 'the later one of two writes is there');
is(value($paris, 7), 'oslo prepared', 'of either row');

# A prepared transaction for which a session waits, without anything before its end: it stays.
prepared_at_tokyo('stays', q[update item set v = 'stays' where id = 8]);
$session = $paris->background_psql('postgres');
$pid = $session->query_safe('select pg_backend_pid()');
$session->query_until(qr/asked/, "\\echo asked\nupdate item set v = v || '!' where id = 8;\nselect 'done';\n");
waits($pid);
for (1 .. 4) { sql($tokyo, q[update item set v = v || '.' where id = 9]); sleep 1; }
caught_up($paris, $tokyo);
is(gids(), '1', 'what holds up nobody but a session stays prepared');
sql($tokyo, q[commit prepared 'stays']);
is($session->query_safe('select 1'), "done\n1", 'who waits until it is committed');
$session->quit;
is(value($paris, 8), 'stays!', 'and then sees it');

# Given up, and the server crashes before it is rolled back.
prepared_at_tokyo('crash', q[update item set v = 'crash' where id = 10]);
sql($paris, qq[insert into braid.unprepared (subscription_id, xid, prepare_lsn, reason)
	select s.subscription_id, regexp_replace(gid, '.*_', '')::bigint, '0/0', 'given up' from braid.subscription s, pg_prepared_xacts where subscription_name = '$name']);
$paris->kill9;
restart_crashed($paris);
ok(wait_until(sub { gids() eq '0' }, 30), 'it is rolled back before anything else comes');
sql($tokyo, q[commit prepared 'crash']);
caught_up($paris, $tokyo);
is(value($paris, 10), 'crash', 'and comes as a whole');
is(sql($paris, "select failures from braid.subscription_detail where name = '$_'"), '0', "no failure of $_") for $name, $other;
unlike(slurp_file($paris->logfile), qr/PANIC|TRAP|panicked/, 'nothing broke');

done_testing();
