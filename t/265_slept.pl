# A member's machine sleeps. Its group worker counts that time, as the other members do: a lease
# that ran out meanwhile is over. The test sees that the worker takes all nodes for out of reach
# from which it has received nothing for so long.

use strict;
use warnings;

use Braid;
use FakeClock;
use Group;
use Test::More;

my $clock = FakeClock->new or plan skip_all => 'a C compiler is needed';
my ($tokyo, $paris) = $clock->over(sub { group([qw(tokyo paris)], 'create table item (id bigint primary key, v text)') });
my $since = q[select reachable_since from braid.group_nodes where name = 'paris' and reachable];
ok($tokyo->poll_query_until('postgres', "select exists ($since)"), 'tokyo hears of paris');
my $before = sql($tokyo, $since);
# The machine sleeps again and again: messages from just before are old when the worker looks.
my $hours = 0;
ok(wait_until(sub {
			$clock->sleep(3600 * ++$hours);
			(look($tokyo, "select exists (select from braid.group_nodes where name = 'paris' and reachable_since > '$before')") // 'f') eq 't';
		}, 60), 'when the machine wakes, it has not heard of paris for long');
like(refusal($tokyo, q[select braid.set_sequence_default('step'); select braid.set_sequence_default('range')]), qr/^no error:\s*$/, 'the group goes on');
sql($tokyo, q[insert into item values (1, 'tokyo')]);
have_all($tokyo, $paris);
same_tables([ $tokyo, $paris ], 'item');

done_testing();
