# A node leaves while its group worker is about to write what was agreed: nothing of the membership
# stays behind. Otherwise the node's next membership would use it as its own log, and the group
# worker would not run.

use strict;
use warnings;

use Braid;
use Group;
use Test::More;

my ($tokyo, $paris) = group([qw(tokyo paris)], 'create table item (id bigint primary key, v text)');

# The membership is being deleted, and not yet committed. Meanwhile the group agrees on something,
# which paris has to write.
my $session = $paris->background_psql('postgres');
$session->query_safe('begin; select braid.forget_members()');
# Without paris there is no majority, so the call gives up.
my (undef, undef, $error) = $tokyo->psql('postgres', 'select braid.set_read_only()');
like($error, qr/the group has not agreed in time/, 'tokyo asks for something');
ok($paris->poll_query_until('postgres', q[select exists (select from pg_stat_activity where backend_type = 'braid group' and wait_event_type = 'Lock')]), 'the group worker waits for who leaves')
  or diag(sql($paris, q[select backend_type, wait_event_type, wait_event, query from pg_stat_activity where backend_type ~ 'braid']));
$session->query_safe('commit');
$session->quit;
ok($paris->poll_query_until('postgres', q[select count(*) = 0 from pg_stat_activity where backend_type = 'braid group']), 'it ends');
my $left = q[
	select string_agg(t || ' ' || n, ', ' order by t) from (
		select 'entry' t, count(*) n from braid.group_entry union all select 'snapshot', count(*) from braid.group_snapshot
		union all select 'known', count(*) from braid.group_known union all select 'member', count(*) from braid.group_member
		union all select 'option', count(*) from braid.group_option union all select 'self', count(*) from braid.group_self) s];
is(sql($paris, $left), 'entry 0, known 0, member 0, option 0, self 0, snapshot 0', 'and leaves nothing');

done_testing();
