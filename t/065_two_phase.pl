# Prepared transactions arrive prepared: seen only once they are committed, with the source's origin and time, whatever is restarted or
# stopped in between; rolled back where they are rolled back at the provider.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep);

my $conf = "max_prepared_transactions = 20\nautovacuum = off\n";
my $tokyo = new_node('tokyo', conf => $conf);
my $paris = new_node('paris', conf => $conf);
my @nodes = ($tokyo, $paris);
on_all(q[
	create table item (id int primary key, v text, n int);
	create table bulk (id int primary key, t text);
], @nodes);
$tokyo->safe_psql('postgres', q[insert into item select i, 'copied', 0 from generate_series(1, 20) i]);
my $name = subscribe($paris, $tokyo, two_phase => 'true');

sub sql { return $_[0]->safe_psql('postgres', $_[1]) }
sub gids { return sql($_[0], 'select count(*) from pg_prepared_xacts') }

is(sql($paris, "select two_phase from braid.subscription_detail where name = '$name'"), 't', 'the option is shown');
is(sql($tokyo, 'select two_phase from pg_replication_slots where plugin = \'braid\' and slot_name not like \'braid_deletions%\''), 't', 'the slot has it');

# Prepare, commit.
sql($tokyo, q[begin; update item set v = 'one' where id = 1; insert into item values (101, 'one', 1); prepare transaction 'one']);
caught_up($paris, $tokyo);
like(sql($paris, 'select gid from pg_prepared_xacts'), qr/^braid_\d+_\d+_\d+$/, 'what is prepared there is prepared here');
is(sql($paris, 'select count(*) from item where v = \'one\''), '0', 'and is not seen');
# Others go on meanwhile.
sql($tokyo, q[update item set v = 'meanwhile' where id = 2]);
caught_up($paris, $tokyo);
is(sql($paris, 'select v from item where id = 2'), 'meanwhile', 'others go past it');
sql($tokyo, q[commit prepared 'one'; update item set n = n + 10 where id in (1, 101)]);
caught_up($paris, $tokyo);
is(gids($paris), '0', 'nothing is left prepared');
same_tables(\@nodes, 'item');

# Roll back.
sql($tokyo, q[begin; update item set v = 'two' where id = 1; prepare transaction 'two']);
caught_up($paris, $tokyo);
is(gids($paris), '1', 'prepared');
sql($tokyo, q[rollback prepared 'two'; update item set n = n + 1 where id = 1]);
caught_up($paris, $tokyo);
is(gids($paris), '0', 'and rolled back');
same_tables(\@nodes, 'item');

done_testing();
