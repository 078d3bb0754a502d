# PostgreSQL 15 has no snapshot to give to a slot if the configuration is loaded again while the
# slot waits for running transactions. The copy of a table is tried again by itself.

use strict;
use warnings;

use Braid;
use Test::More;

my ($tokyo, $paris) = my @nodes = map { new_node($_) } qw(tokyo paris);
on_all('create table item (id int primary key, v text); create table open (id int primary key)', @nodes);
$tokyo->safe_psql('postgres', q[insert into item values (1, 'first')]);

# While a slot waits for a transaction, the configuration is loaded again.
sub reloads
{
	my ($what, $start) = @_;
	my $session = $tokyo->background_psql('postgres');
	$session->query_safe("begin; insert into open select coalesce(max(id), 0) + 1 from open");
	$paris->safe_psql('postgres', $start);
	ok($tokyo->poll_query_until('postgres', q[select count(*) > 0 from pg_stat_activity where backend_type = 'walsender' and wait_event_type = 'Lock']),
		"$what: a slot waits for a transaction");
	$tokyo->safe_psql('postgres', 'select pg_reload_conf()');
	$session->query_safe('commit');
	$session->quit;
	streams($paris, 'paris_from_tokyo', "$what: it goes on");
	return;
}

my $dsn = $tokyo->connstr('postgres');
reloads('subscription', "select braid.create_subscription('paris_from_tokyo', \$d\$$dsn\$d\$)");
$tokyo->wait_for_catchup('paris_from_tokyo');
is($paris->safe_psql('postgres', 'select v from item'), 'first', 'the rows are there');
# The row has to come by the copy.
$paris->safe_psql('postgres', 'delete from item');
reloads('copy', q[select braid.resync_table('paris_from_tokyo', 'item')]);
becomes($paris, 'select v from item', 'first', 'the row is there again');
same_tables(\@nodes, 'item', 'open');

$_->stop for @nodes;
done_testing();
