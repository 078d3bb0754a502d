# A member of a group is restored from a backup. It has forgotten its promises, so it takes no part
# and reports why. The others go on, remove it, and it comes back as a new member.

use strict;
use warnings;

use Braid;
use Group;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($tokyo, $paris, $oslo) = group([qw(tokyo paris oslo)], q[create table item (id int primary key, v text); insert into item select i, 'tokyo' from generate_series(1, 100) i]);
$oslo->backup('before', backup_options => [ '--checkpoint', 'fast' ]);
# The member takes part in votes after the backup.
sql($tokyo, q[select braid.set_read_only(true, 'paris'); select braid.set_read_only(false, 'paris'); insert into item values (101, 'after the backup')]);
have_all($tokyo, $paris, $oslo);
$oslo->stop('fast');

# In its place, at the same address.
my $restored = PostgreSQL::Test::Cluster->new('restored', port => $oslo->port);
$restored->init_from_backup($oslo, 'before');
$restored->start;
my $own = q[select state || '|' || message || '|' || hint from braid.group_nodes where is_local];
ok($restored->poll_query_until('postgres', qq[select ($own) like 'stopped|%']), 'it takes no part any more') or diag(sql($restored, $own));
like(sql($restored, $own), qr/^stopped\|this node takes no part in the group: .*restored.*\|.*(remove|join)/, 'the view says why, and what to do');
like(refusal($restored, q[select braid.set_read_only()]), qr/takes no part in the group.*HINT/s, 'so does a call');
is(sql($restored, q[select count(*) from braid.group_log where kind = 'set read only']), '0', 'it has less than it had acknowledged');

# The others agree without it.
sql($paris, q[select braid.set_read_only(true, 'tokyo'); select braid.set_read_only(false, 'tokyo')]);
sql($tokyo, q[select braid.remove_node('oslo')]);
ok($_->poll_query_until('postgres', q[select count(*) = 2 from braid.group_nodes]), $_->name . ' knows that it is removed') for $tokyo, $paris;

# The node comes back with an empty database, under its name and with a new number.
sql($restored, q[select braid.forget_group()]);
sql($restored, q[select braid.drop_subscription(name) from braid.subscription_status]);
is(sql($restored, 'select count(*) from braid.group_nodes'), '0', 'it forgets the group');
sql($restored, 'create database anew');
$restored->safe_psql('anew', 'create extension braid');
my ($there, $here) = ($tokyo->connstr('postgres'), $restored->connstr('anew'));
$restored->safe_psql('anew', "select braid.join_group(\$d\$$there\$d\$, node_name => 'oslo', dsn => \$d\$$here\$d\$)");
$restored->safe_psql('anew', q[select braid.wait_for_group('180 s')]);
is($restored->safe_psql('anew', 'select count(*), max(id) from item'), '101|101', 'it has all rows');
is(sql($tokyo, q[select string_agg(name || ' ' || node_number || ' ' || state, ', ' order by node_number) from braid.group_nodes]), 'tokyo 1 active, paris 2 active, oslo 4 active', 'with a new number');
done_testing();
