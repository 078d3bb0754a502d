# After a restart of its machine a member waits until all other voters confirm its start. A voter
# that is gone for good never does: a person who knows that the disk was not restored says so, and
# the group goes on.

use strict;
use warnings;

use Braid;
use Group;
use Test::More;

my ($tokyo, $paris) = group([qw(tokyo paris)], 'create table item (id int primary key, v text)');
my $observer = new_server('observer', init => ['--data-checksums']);
sql($observer, 'create extension braid');
my ($there, $here) = ($tokyo->connstr('postgres'), $observer->connstr('postgres'));
sql($observer, "select braid.join_group(\$d\$$there\$d\$, node_name => 'observer', dsn => \$d\$$here\$d\$, mode => 'witness')");
joined($observer, $tokyo, $paris);

# The machine of tokyo has restarted, as its files say; the witness is lost.
$observer->stop('immediate');
sql($tokyo, q[update braid.group_self set files = split_part(files, ' ', 1) || ' of another start of the machine']);
$tokyo->restart;
my $own = q[select message || '|' || hint from braid.group_nodes where is_local];
ok($tokyo->poll_query_until('postgres', qq[select ($own) like 'this node''s start is not confirmed: waiting for members observer|%braid.start_without%']), 'the view says for whom it waits')
  or diag(sql($tokyo, $own));
ok($paris->poll_query_until('postgres', q[select message ~ 'a leader is being elected|no majority' from braid.group_nodes where is_local]), 'nobody leads')
  or diag(sql($paris, $own));
sql($tokyo, q[insert into item values (1, 'meanwhile')]);
have_all($tokyo, $paris);
is(sql($paris, 'select v from item'), 'meanwhile', 'data does not wait');

# Roles that may call it, and nodes that it may name.
sql($tokyo, 'set braid.ddl_replication = off; create role clerk; grant usage on schema braid to clerk; grant braid_admin to clerk');
like(refusal($tokyo, q[set role clerk; select braid.start_without('observer')]), qr/permission denied|superuser/, 'a superuser has to');
like(refusal($tokyo, q[select braid.start_without('rome')]), qr/group "shop" has no node "rome".*HINT/s, 'an unknown node');
like(refusal($tokyo, q[select braid.start_without(null)]), qr/node_name must not be null/, 'none');
like(refusal($tokyo, q[select braid.start_without('paris')]), qr/does not wait for member \d+ to confirm its start.*HINT/s, 'one that has confirmed it');
like(refusal($paris, q[select braid.start_without('observer')]), qr/does not wait for member \d+ to confirm its start.*HINT/s, 'a node that is confirmed');
sql($tokyo, q[select braid.start_without('observer')]);
ok($_->poll_query_until('postgres', q[select message ~ 'leads' from braid.group_nodes where is_local]), $_->name . ' has a majority') or diag(sql($_, $own)) for $tokyo, $paris;
sql($tokyo, q[select braid.remove_node('observer')]);
ok($_->poll_query_until('postgres', q[select string_agg(name, ' ' order by name) = 'paris tokyo' from braid.group_nodes]), $_->name . ': it is removed') for $tokyo, $paris;

# From then on it starts as ever.
$tokyo->restart;
joined($tokyo, $paris);
done_testing();
