# The creation of a slot at a joining node fails. The slot is not taken for one that is there: the
# node goes on only once it has it, and the others get what is written at the node.

use strict;
use warnings;

use Braid;
use Group;
use Test::More;

my ($tokyo, $paris) = my @nodes = map { new_server($_, init => ['--data-checksums']) } qw(tokyo paris);
sql($_, 'create extension braid') for @nodes;
sql($tokyo, q[create table item (id int primary key, v text); insert into item values (1, 'first')]);
my $dsn = $tokyo->connstr('postgres');
sql($tokyo, "select braid.create_group('shop', node_name => 'tokyo', dsn => \$d\$$dsn\$d\$)");

# In another database, so that the schema can be copied.
sql($paris, 'create database other');
my $session = $paris->background_psql('other');
$session->query_safe('begin; create table t (id int)');
join_group($paris, $tokyo);
my $waits = q[backend_type = 'braid group steps' and wait_event_type = 'Lock'];
for my $attempt (1 .. 3)
{
	ok($paris->poll_query_until('postgres', "select count(*) = 1 from pg_stat_activity where $waits"), "attempt $attempt: a slot waits for a transaction");
	next if $attempt == 3;
	is(sql($paris, "select pg_cancel_backend(pid) from pg_stat_activity where $waits"), 't', "attempt $attempt: it is cancelled");
	ok($paris->poll_query_until('postgres', "select count(*) = 0 from pg_stat_activity where $waits"), "attempt $attempt: it fails");
}
is(sql($paris, q[select state || ': ' || last_error from braid.join_progress where name ~ 'create slots here']),
	'failing: canceling statement due to user request', 'the view says why');
$session->query_safe('commit');
$session->quit;
joined(@nodes);
is(sql($paris, q[select count(*) from pg_replication_slots where slot_name ~ 'tokyo' and active]), 1, 'tokyo reads its slot at paris');
sql($paris, q[insert into item values (2, 'second')]);
sql($tokyo, q[insert into item values (3, 'third')]);
becomes($_, 'select count(*) from item', 3, $_->name . ' has all rows') for @nodes;

$_->stop for @nodes;
done_testing();
