# A transaction is prepared, and its PREPARE decoded, some time before the provider's
# pg_prepared_xacts shows it. A transaction that can't be prepared here is noted until it has ended
# at the provider. It must not count as ended in between: its COMMIT PREPARED would find nothing.
#
# A debugger holds the session at that point.

use strict;
use warnings;

use Braid;
use IPC::Run ();
use Test::More;

plan skip_all => 'no gdb here' if system('gdb --version > /dev/null 2>&1') != 0;

my $conf = "max_prepared_transactions = 10\n";
my $tokyo = new_node('tokyo', conf => $conf);
my $paris = new_node('paris', publication => '', conf => $conf);
on_all('create table mail (k int primary key, address text unique); create table item (k int primary key)', $tokyo, $paris);
my $name = subscribe($paris, $tokyo, two_phase => 'true');
sub sql { return $_[0]->safe_psql('postgres', $_[1]) }
sub noted { return sql($paris, 'select count(*) from braid.unprepared') }

# Another row here has its address: it waits for its commit.
sql($paris, q[insert into mail values (1, 'x')]);
my $session = $tokyo->background_psql('postgres');
my $pid = $session->query_safe('select pg_backend_pid()');
$session->query_safe(q[begin; insert into mail values (11, 'x')]);
my ($in, $out) = ("set pagination off\nbreak XLogFlush\ncontinue\nfinish\n", '');
my $gdb = IPC::Run::start([ 'gdb', '-q', '-nx', '-p', $pid ], '<', \$in, '>', \$out, '2>&1', IPC::Run::timeout(60));
if (!eval { $gdb->pump until $out =~ /Continuing\.|ptrace: |not permitted/; $out =~ /Continuing\./ })
{
	$gdb->kill_kill;
	$session->quit;
	plan skip_all => 'gdb may not look at a process here';
}
$session->{stdin} .= "prepare transaction 'now';\n";
$session->{run}->pump_nb;
$gdb->pump until $out =~ /Run till exit.*\n.*\n/;

ok(wait_until(sub { noted() eq '1' }, 20), 'it is noted down');
is(sql($tokyo, 'select count(*) from pg_prepared_xacts'), '0', 'before it is shown');
# Each start of the leader checks which transactions are over, and forgets those behind which it
# goes on.
for my $k (1 .. 3)
{
	sql($paris, "select braid.disable_subscription('$name')");
	sql($paris, "select braid.enable_subscription('$name')");
	sql($tokyo, "insert into item values ($k)");
	caught_up($paris, $tokyo);
}
is(noted(), '1', 'and stays noted down');

$in .= "delete\ndetach\nquit\n";
$gdb->finish;
ok(wait_until(sub { sql($tokyo, 'select count(*) from pg_prepared_xacts') eq '1' }, 20), 'now it is shown');
$session->quit;
sql($tokyo, q[commit prepared 'now']);
caught_up($paris, $tokyo);
is(sql($paris, 'select string_agg(k::text, \' \') from mail'), '11', 'and applied when it has committed');
is(status($paris, $name)->{last_error} // '', '', 'without an error');
done_testing();
