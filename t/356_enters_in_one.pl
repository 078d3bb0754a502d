# A transaction inserts a row and then moves it into a row filter, and its commit waits for this
# subscription as a synchronous standby. The provider does not show the row before that: the
# transaction is parked, the commit returns, and the row arrives whole.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo', publication => '', conf => "max_prepared_transactions = 5\n");
my $paris = new_node('paris', publication => '', conf => "braid.querier_timeout = 4s\nmax_prepared_transactions = 5\n");
sub run { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
on_all('create table f (id int primary key, n int, big text not null); alter table f alter big set storage external', $tokyo, $paris);
run($tokyo, 'create publication braid for table f where (id > 10)');
my $name = subscribe($paris, $tokyo, two_phase => 'true');
run($tokyo, "insert into f values (1, 0, repeat('one', 2000))");
caught_up($paris, $tokyo);
run($tokyo, "alter system set synchronous_standby_names = 'FIRST 1 ($name)'");
$tokyo->reload;

# Whether the statements end, though the subscription can't apply them before that.
sub ends
{
	my ($sql, $what) = @_;
	my ($status, undef, $said) = $tokyo->psql('postgres', $sql, timeout => $PostgreSQL::Test::Utils::timeout_default, timed_out => \my $late, on_error_die => 0);
	ok(!$late && $status == 0, "$what: the commit returns") or diag($said);
	return;
}

ends("begin; insert into f values (0, 1, repeat('two', 2000)); update f set id = 20 where id = 0; commit", 'inserted and moved');
becomes($paris, 'select id, n, md5(big) from f where id = 20', run($tokyo, 'select id, n, md5(big) from f where id = 20'), 'the row arrives whole');
ends("begin; lock table f; insert into f values (0, 1, repeat('three', 2000)); update f set id = 21 where id = 0; update f set id = 22 where id = 1; commit", 'with a lock');
ends('update f set n = n + 1', 'changed afterwards');
ends("begin; insert into f values (0, 1, repeat('four', 2000)); update f set id = 23 where id = 0; prepare transaction 'p'; commit prepared 'p'", 'prepared');
becomes($paris, 'select string_agg(id || $$ $$ || n || md5(big), $$,$$ order by id) from f', run($tokyo, 'select string_agg(id || $$ $$ || n || md5(big), $$,$$ order by id) from f where id > 10'), 'all rows arrive whole');
becomes($paris, 'select parked from braid.subscription_status', 0, 'nothing stays parked');
streams($paris, $name, 'the subscription goes on');

run($tokyo, 'alter system reset synchronous_standby_names');
$tokyo->reload;
$_->stop for $tokyo, $paris;
done_testing();
