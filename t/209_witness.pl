# A witness: a member without data, which makes a majority with one of two nodes. The group does not
# touch the contents of its database. It can be away, start again, leave and come back, and be
# removed.

use strict;
use warnings;

use Braid;
use Group;
use Test::More;

my ($tokyo, $paris) = group([qw(tokyo paris)], q[create table item (id serial primary key, v text); insert into item (v) select 'tokyo' from generate_series(1, 100)]);
my ($observer, $oslo) = map { new_server($_, init => ['--data-checksums']) } qw(observer oslo);
sql($_, 'create extension braid') for $observer, $oslo;
sql($observer, q[create table own (id serial primary key, v text); insert into own (v) values ('of the witness')]);

sub observe
{
	my ($there, $here) = ($tokyo->connstr('postgres'), $observer->connstr('postgres'));
	sql($observer, "select braid.join_group(\$d\$$there\$d\$, node_name => 'observer', dsn => \$d\$$here\$d\$, mode => 'witness')");
	joined($observer);
	return;
}

my $there = $tokyo->connstr('postgres');
like(refusal($observer, "select braid.join_group(\$d\$$there\$d\$, node_name => 'observer', dsn => 'dbname=x', mode => 'wild')"), qr/invalid mode "wild".*witness for one that only votes/s, 'an unknown mode');
observe();
joined($tokyo, $paris);
my @all = ($tokyo, $paris, $observer);
my $members = q[select string_agg(name || ' ' || role || ' ' || state, ', ' order by node_number) from braid.group_nodes];
is(sql($_, $members), 'tokyo data active, paris data active, observer witness active', $_->name . ' knows it') for @all;
is(sql($observer, q[select string_agg(step || '/' || steps || ' ' || state, ', ' order by step) from braid.join_progress]), '1/2 done, 2/2 done', 'it joins in two steps');

# No data goes to it or from it.
sub keeps_apart
{
	my ($when) = @_;
	is(sql($observer, q[select (select count(*) from braid.subscription) || ' ' || (select count(*) from pg_replication_slots) || ' ' || (select count(*) from pg_publication) || ' ' || (select count(*) from braid.sequences)]),
		'0 0 0 0', "$when: it has no subscription, slot, publication or sequence of the group");
	is(sql($_, q[select (select count(*) from braid.subscription where subscription_name like '%observer%') + (select count(*) from pg_replication_slots where slot_name like '%observer%')]), '0', "$when: none goes to it from " . $_->name) for $tokyo, $paris;
	return;
}
keeps_apart('after the join');
sql($tokyo, 'alter table item add n int');
sql($observer, q[create table public.another (id serial primary key); insert into own (v) select 'more' from generate_series(1, 10)]);
have_all($tokyo, $paris);
is(sql($paris, q[select count(*) from pg_attribute where attrelid = 'item'::regclass and attname = 'n']), '1', 'statements go on between the others');
is(sql($observer, q[select to_regclass('item') is null]), 't', 'and do not come to it');
is(sql($_, q[select to_regclass('another') is null]), 't', 'nor from it to ' . $_->name) for $tokyo, $paris;
is(sql($observer, q[select min(id) || ' ' || max(id) from own]), '1 11', 'its sequences count as ever');
is(sql($observer, q[select string_agg(code, ', ') from braid.check() where code in ('kept_slot', 'subscription_error')]), '', 'it lacks nothing that it does not need');

# The witness is away.
$observer->stop('immediate');
sql($tokyo, q[insert into item (v) values ('without a witness'); alter table item add m int]);
have_all($tokyo, $paris);
same_tables([ $tokyo, $paris ], 'item');
$observer->start;
joined($observer);

# With one of two nodes it removes the other, and lets another one join.
$paris->stop('immediate');
ok($tokyo->poll_query_until('postgres', q[select not reachable from braid.group_nodes where name = 'paris']), 'paris is away');
sql($tokyo, q[select braid.remove_node('paris', recover => true)]);
is(sql($tokyo, $members), 'tokyo data active, observer witness active', 'it is removed by the majority');
ok($tokyo->poll_query_until('postgres', q[select count(*) = 1 and bool_and(state = 'done') from braid.recovery]), 'one node has all')
  or diag(sql($tokyo, 'table braid.recovery'));
join_group($oslo, $tokyo);
joined($oslo, $tokyo, $observer);
have_all($tokyo, $oslo);
same_tables([ $tokyo, $oslo ], 'item');
is(sql($observer, 'select count(*) from braid.subscription'), '0', 'the witness does not follow it');

# The witness leaves, comes back, and is removed.
sql($observer, 'select braid.leave_group()');
ok($observer->poll_query_until('postgres', 'select count(*) = 0 from braid.group_self'), 'it has left');
ok($oslo->poll_query_until('postgres', q[select count(*) = 2 from braid.group_nodes]), 'the others know');
observe();
joined($oslo, $tokyo);
is(sql($oslo, $members), 'tokyo data active, oslo data active, observer witness active', 'it is back');
sql($oslo, q[select braid.remove_node('observer')]);
ok($observer->poll_query_until('postgres', q[select state = 'stopped' and message ~ 'removed' and hint ~ 'join anew' from braid.group_nodes where is_local]), 'it knows that it was removed');
sql($observer, 'select braid.forget_group()');
is(sql($observer, 'select count(*) from own'), '11', 'what it had is there');
have_all($tokyo, $oslo);

# Connections to members that are no more are closed.
for my $node ($observer, $tokyo, $oslo)
{
	my $wanted = $node == $observer ? 0 : 1;
	ok($node->poll_query_until('postgres', "select count(*) = $wanted from pg_stat_activity where query ~ 'group_receive' and pid <> pg_backend_pid()"),
		$node->name . ' has no connection of former members')
	  or diag(sql($node, q[select application_name, backend_start, left(query, 60) from pg_stat_activity where query ~ 'group_receive']));
}
done_testing();
