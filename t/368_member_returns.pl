# A member of a group comes back: the others subscribe to it again at once, and not when the next
# attempt is due.

use strict;
use warnings;

use Braid;
use Group;
use Test::More;

my ($tokyo, $paris) = group([qw(tokyo paris)], 'create table item (id int primary key, v text)',
	conf => "braid.retry_interval = 1h\nbraid.retry_interval_max = 1h\n");
sql($paris, q[insert into item values (1, 'before')]);
have_all($tokyo, $paris);
for my $round (1 .. 2)
{
	$paris->stop($round == 1 ? 'fast' : 'immediate');
	ok($tokyo->poll_query_until('postgres', q[select state = 'retrying' from braid.subscription_status]), 'tokyo is to try again, an hour later')
	  or diag(sql($tokyo, 'table braid.subscription_status'));
	ok($tokyo->poll_query_until('postgres', q[select not reachable from braid.group_nodes where name = 'paris']), 'paris is away');
	$paris->start;
	sql($paris, "insert into item values (1 + $round, 'after')");
	ok($tokyo->poll_query_until('postgres', "select count(*) = 1 from item where id = 1 + $round"), 'what paris has written meanwhile comes') or diag(sql($tokyo, 'table braid.subscription_status'));
}
done_testing();
