# Tables come and go while a subscription runs: a publication gains and loses some. A table that has
# come to differ is copied again, which the provider does not notice.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo', publication => '');
my $paris = new_node('paris');
on_all('create table one (id int primary key, v text)', $tokyo, $paris);
on_all('create table two (id int primary key, v text)', $tokyo, $paris);
$tokyo->safe_psql('postgres', q[
	create publication braid for table one;
	insert into one select n, 'copied' from generate_series(1, 1000) n;
	insert into two select n, 'copied' from generate_series(1, 1000) n;
]);
my $to_paris = subscribe($paris, $tokyo);
my $to_tokyo = subscribe($tokyo, $paris, copy_data => 'false');

# The publication gains a table.
$tokyo->safe_psql('postgres', 'alter publication braid add table two');
is($paris->safe_psql('postgres', "select relation, action from braid.refresh_subscription('$to_paris')"), 'two|added', 'a table is added');
$paris->safe_psql('postgres', "select braid.wait_for_subscription('$to_paris', '180 s')");
$tokyo->safe_psql('postgres', q[insert into two values (1001, 'streamed')]);
converged($tokyo, $paris);
same_tables([ $tokyo, $paris ], qw(one two));

# A table comes to differ: while paris does not publish it, it loses rows there, and no other node
# gets the deletions. It is copied again, while tokyo writes, and the truncate for that does not
# come back to tokyo.
$paris->safe_psql('postgres', q[
	alter publication braid set (publish = 'insert');
	delete from one where id <= 500;
]);
converged($tokyo, $paris);
$paris->safe_psql('postgres', q[alter publication braid set (publish = 'insert, update, delete, truncate')]);
is($tokyo->safe_psql('postgres', 'select count(*) from one'), '1000', 'tokyo has all rows');
is($paris->safe_psql('postgres', 'select count(*) from one'), '500', 'paris has lost half of them');
$paris->safe_psql('postgres', "select braid.resync_table('$to_paris', 'one')");
$tokyo->safe_psql('postgres', q[insert into one values (1001, 'during the copy')]);
$paris->safe_psql('postgres', "select braid.wait_for_subscription('$to_paris', '180 s')");
converged($tokyo, $paris);
is($tokyo->safe_psql('postgres', 'select count(*) from one'), '1001', 'tokyo still has all rows');
same_tables([ $tokyo, $paris ], qw(one two));

# The publication loses a table: what is here stays, and no longer follows.
$tokyo->safe_psql('postgres', 'alter publication braid drop table two');
is($paris->safe_psql('postgres', "select relation, action from braid.refresh_subscription('$to_paris')"), 'two|removed', 'a table is removed');
$tokyo->safe_psql('postgres', q[insert into two values (1002, 'tokyo only'); insert into one values (1002, 'both')]);
converged($tokyo, $paris);
is($paris->safe_psql('postgres', 'select count(*) from two'), '1001', 'its rows stay, and no more come');
same_tables([ $tokyo, $paris ], 'one');

# Positions: what was committed before an event there is visible behind it here.
for my $round (1 .. 20)
{
	my $position = $tokyo->safe_psql('postgres', "insert into one values (2000 + $round, 'round'); select braid.sync_event()");
	$paris->safe_psql('postgres', "select braid.wait_for_event('tokyo', '$position', '180 s')");
	$paris->safe_psql('postgres', "select 1 / count(*) from one where id = 2000 + $round");
}
pass('20 events were waited for, and each row was there');
# With nothing to apply, too.
my $position = $tokyo->safe_psql('postgres', 'select braid.sync_event()');
$paris->safe_psql('postgres', "select braid.wait_for_event('tokyo', '$position', '180 s')");
pass('an event behind nothing new is reached');

done_testing();
