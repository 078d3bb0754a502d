# The leader reads a table that may have just joined, while a session has it locked. The leader goes
# on with its regular work meanwhile, because the lock may wait for that.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my ($tokyo, $paris) = map { new_node($_, conf => "max_prepared_transactions = 20\nautovacuum = off\n") } qw(tokyo paris);
sub sql { return $_[0]->safe_psql('postgres', $_[1]) }
on_all('create table item (id int primary key, v text)', $tokyo, $paris);
sql($tokyo, q[insert into item select i, 'old' from generate_series(1, 20) i]);
my $name = subscribe($paris, $tokyo, two_phase => 'true');

# A session waits for a lock on the table, which a prepared transaction holds here, when the stream
# starts again.
sql($tokyo, q[begin; update item set v = 'prepared' where id = 1; prepare transaction 'one']);
caught_up($paris, $tokyo);
is(sql($paris, 'select count(*) from pg_prepared_xacts'), '1', 'it is prepared here');
my $session = $paris->background_psql('postgres');
my $pid = $session->query_safe('select pg_backend_pid()');
$session->query_until(qr/asked/, "\\echo asked\nbegin;\nlock table item;\ncommit;\nselect 'committed';\n");
ok(wait_until(sub { sql($paris, "select count(*) from pg_locks where not granted and pid = $pid") > 0 }, 20), 'a session waits for it');
my $log = -s $paris->logfile;
my $old = sql($paris, 'select leader_pid from braid.subscription_detail');
sql($paris, "select pg_terminate_backend($old)");
ok(wait_until(sub { sql($paris, "select leader_pid <> $old from braid.subscription_detail") eq 't' }, 20), 'there is another leader');
sql($tokyo, q[update item set v = 'next' where id = 2]);
sql($tokyo, q[commit prepared 'one']);
caught_up($paris, $tokyo);
is($session->query_safe('select 1'), "committed\n1", 'the session has had its lock');
$session->quit;
unlike(slurp_file($paris->logfile, $log), qr/canceling statement|deadlock detected/, 'and nobody was cancelled');
same_tables([ $tokyo, $paris ], 'item');

# A table that joins, which a session keeps locked.
on_all('create table fresh (id int primary key, v text)', $tokyo, $paris);
$session = $paris->background_psql('postgres');
$session->query_safe('begin; lock table fresh');
sql($tokyo, q[update item set v = 'before' where id = 3]);
sql($tokyo, q[insert into fresh values (1, 'one')]);
sql($tokyo, q[update item set v = 'after' where id = 4]);
ok(wait_until(sub { sql($paris, 'select v from item where id = 3') eq 'before' }, 20), 'what came before is applied');
my $reply = sql($tokyo, "select max(reply_time) from pg_stat_replication where application_name = '$name'");
ok(wait_until(sub { sql($tokyo, "select max(reply_time) > '$reply' from pg_stat_replication where application_name = '$name'") eq 't' }, 60), 'the provider hears of the subscriber all the same');
is(sql($paris, 'select v from item where id = 4'), 'old', 'what comes after it waits');
$session->query_safe('commit');
$session->quit;
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], qw(item fresh));
is(sql($paris, "select failures from braid.subscription_detail where name = '$name'"), '0', 'nothing has failed');
unlike(slurp_file($paris->logfile), qr/PANIC|TRAP|panicked/, 'nothing broke');

done_testing();
