# A member that has shown an answer of the group goes on from it after kill -9 of its whole server,
# also where no majority comes together any more: a node that takes no writes does not take them
# again.

use strict;
use warnings;

use Braid;
use Group;
use PostgreSQL::Test::Utils;
use Test::More;

# What is not flushed by a commit is not flushed at all for ten seconds.
my ($tokyo, $paris) = group([qw(tokyo paris)], q[create table item (id int primary key); create sequence ticket],
	conf => "wal_writer_delay = 10s\nbraid.supervisor_interval = 60s\nbraid.manager_interval = 60s\nbraid.purge_interval = 60s\nbraid.collector_interval = 60s\n");

# The answer to a call at tokyo, whose server is killed at once. Then it is alone.
sub alone_after
{
	my ($sql) = @_;
	sql($tokyo, $sql);
	$tokyo->kill9;
	$paris->stop('immediate');
	restart_crashed($tokyo);
	return;
}
sub together
{
	$paris->start;
	joined($tokyo, $paris);
	return;
}
my $waits = q[select message from braid.group_nodes where is_local];

for my $round (1, 2)
{
	alone_after('select braid.set_read_only(true)');
	like(refusal($tokyo, "insert into item values ($round)"), qr/cannot execute INSERT in a read-only transaction/, "round $round: no writes before, no writes after");
	becomes($tokyo, $waits, 'no majority: waiting for members paris', 'without a majority');
	is(sql($tokyo, 'select read_only from braid.group_nodes where is_local'), 't', 'as the view says');
	together();
	is(sql($tokyo, 'select read_only from braid.group_nodes where is_local'), 't', 'and with one');

	alone_after('select braid.set_read_only(false)');
	is(refusal($tokyo, "insert into item values ($round)"), 'no error: ', "round $round: it takes writes again, and goes on to do so");
	together();

	alone_after('select braid.begin_maintenance()');
	is(sql($tokyo, 'select state from braid.group_nodes where is_local'), 'in maintenance', "round $round: in maintenance");
	together();
	sql($tokyo, 'select braid.end_maintenance()');

	alone_after(q[select braid.set_sequence('ticket', 'local')]);
	is(sql($tokyo, q[select kind from braid.sequences where sequence = 'ticket'::regclass]), 'local', "round $round: the kind of a sequence");
	together();
	sql($tokyo, q[select braid.set_sequence('ticket', 'range')]);
}
have_all($tokyo, $paris);
same_tables([ $tokyo, $paris ], 'item');
is(sql($_, 'select string_agg(id::text, $$ $$ order by id) from item'), '1 2', $_->name . ' has what was written') for $tokyo, $paris;

# One of two is gone for good, and nobody is left to agree with.
$paris->stop('immediate');
becomes($tokyo, q[select message || ' ' || hint from braid.group_nodes where is_local],
	'no majority: waiting for members paris Data is written and replicated as ever. Joining, leaving and removing wait. See braid.forget_group if a majority is gone for good.', 'the view says what to do');
like(refusal($tokyo, 'select braid.forget_group()'), qr/still is a member of group "shop"\n.*HINT:  .*abandon => true/s, 'the group is not forgotten unasked');
is(refusal($tokyo, 'select braid.forget_group(abandon => true)'), 'no error: ', 'the other one abandons the group');
sql($tokyo, 'select braid.drop_subscription(name, drop_slot => false) from braid.subscription_status');
is(sql($tokyo, q[select string_agg(slot_name, ' ') from pg_replication_slots where slot_name !~ '^braid_(deletions|kept)']), '', 'no slot holds WAL for it');
sql($tokyo, q[select braid.create_group('anew')]);
joined($tokyo);
is(sql($tokyo, q[select name || ' ' || state || ' ' || (select count(*) from item) from braid.group_nodes]), 'tokyo active 2', 'and begins another one, with its rows');

done_testing();
