# A join is given up before each of its steps: nothing is left of it, at the node or at a member,
# but tables and rows. The node can join again. A node that was to be adopted keeps the
# subscriptions that were made by hand.

use strict;
use warnings;

use Braid;
use Group;
use PostgreSQL::Test::Utils;
use Test::More;

my ($tokyo, $paris) = my @members = group([qw(tokyo paris)], q[
	create table item (id serial primary key, v text);
	insert into item (v) select 'row ' || i from generate_series(1, 500) i]);
my $oslo = new_server('oslo', init => ['--data-checksums']);

# No step of this number or a later one begins while the file is there.
my $dir = PostgreSQL::Test::Utils::tempdir();
sub hold_steps
{
	my ($node) = @_;
	sql($node, qq[
		create extension if not exists braid;
		create function braid.hold() returns trigger language plpgsql as \$f\$ begin
			if (pg_catalog.pg_stat_file('$dir/' || old.step, true)).size is not null then
				raise exception 'step % is held', old.step;
			end if;
			return new;
		end \$f\$;
		create trigger hold before update on braid.join_step for each row when (new.started_at is not null and old.started_at is null) execute function braid.hold();
		alter table braid.join_step enable always trigger hold]);
	return;
}
sub held
{
	my ($node, $step) = @_;
	ok($node->poll_query_until('postgres', qq[select count(*) = 1 from braid.join_step where step = $step and started_at is null
			and not exists (select from braid.join_step b where b.step < $step and b.done_at is null)]), "step $step comes next")
	  or diag(sql($node, 'table braid.join_progress'));
	return;
}
hold_steps($oslo);

# All that Braid knows of nodes, subscriptions and members, in numbers. Of rows that stay, the
# origins stay as well, and so does the publication.
my $state = join ' union all ',
	map({ "select '$_ ' || count(*) from braid.$_" }
		qw(node connection subscription subscription_table join_step sequence group_self group_member group_entry group_snapshot group_known group_letter group_option group_hold group_kept group_merge)),
	q{select 'slots ' || count(*) from pg_replication_slots where slot_name !~ '^braid_(deletions|kept)'};
# A removed member is remembered, with its connection string, to tell it so.
my $at_member = q[
	select 'members ' || string_agg(name || ' ' || state, ', ' order by name) from braid.group_nodes
	union all select 'slots ' || string_agg(slot_name, ', ' order by slot_name) from pg_replication_slots where slot_name !~ '^braid_(deletions|kept)'
	union all select 'subscriptions ' || string_agg(subscription_name, ', ' order by subscription_name) from braid.subscription
	union all select 'holds ' || count(*) from braid.group_hold];

my $own = $oslo->connstr('postgres');
sql($oslo, "select braid.create_node('oslo', \$d\$$own\$d\$)");
my $before = sql($oslo, $state);
my %at_member = map { $_->name => sql($_, $at_member) } @members;
my @steps;
for (my $next = 0; $next <= $#steps || !@steps; $next++)
{
	append_to_file("$dir/$_", '') for @steps ? $steps[$next] : 1;
	join_group($oslo, $next % 2 ? $paris : $tokyo);
	@steps = split /\n/, sql($oslo, 'select step from braid.join_step order by step') if !@steps;
	my $step = $steps[$next];
	held($oslo, $step);
	sql($tokyo, "insert into item (v) values ('before step $step')");
	is(refusal($oslo, 'select braid.abort_join()'), 'no error: ', "it is given up before step $step");
	becomes($oslo, $state, $before, 'nothing is left of it');
	becomes($_, $at_member, $at_member{ $_->name }, '... nor at ' . $_->name) for @members;
	unlink "$dir/$step";
	sql($oslo, 'drop table if exists item');
}
is(scalar @steps, 10, 'before each step');
join_group($oslo, $tokyo);
joined($oslo, @members);
have_all(@members, $oslo);
same_tables([ @members, $oslo ], 'item');
is(sql($oslo, 'select count(*) from item'), 510, 'in the end it joins');

# Two nodes that were set up by hand.
my ($rome, $lima) = map { new_node($_, init => ['--data-checksums']) } qw(rome lima);
on_all('create table item (id int primary key, v text)', $rome, $lima);
subscribe($lima, $rome, name => 'all_of_rome');
subscribe($rome, $lima, name => 'all_of_lima', copy_data => 'false');
hold_steps($lima);
sql($rome, q[select braid.create_group('market', adopt => true)]);
my $there = $rome->connstr('postgres');
for my $step (@steps[ 1 .. $#steps ])
{
	append_to_file("$dir/$step", '');
	sql($lima, "select braid.join_group(\$d\$$there\$d\$, mode => 'adopt')");
	held($lima, $step);
	is(refusal($lima, 'select braid.abort_join()'), 'no error: ', "the adoption is given up before step $step");
	unlink "$dir/$step";
	is(sql($lima, q[select string_agg(subscription_name, ' ') from braid.subscription]), 'all_of_rome', 'its subscription stays');
	becomes($rome, q[select count(*) || ' ' || (select string_agg(subscription_name, ' ') from braid.subscription) from braid.group_nodes], '1 all_of_lima', 'and that of the member');
	sql($lima, "insert into item values ($step * 2, 'lima')");
	sql($rome, "insert into item values ($step * 2 + 1, 'rome')");
	caught_up($lima, $rome);
	caught_up($rome, $lima);
	same_tables([ $rome, $lima ], 'item');
}

# Adopted, it leaves. The other one has all that was committed before, by the slot that was made by
# hand.
sql($lima, "select braid.join_group(\$d\$$there\$d\$, mode => 'adopt')");
joined($lima, $rome);
sql($rome, q[select braid.disable_subscription('all_of_lima')]);
ok($lima->poll_query_until('postgres', q[select count(*) = 1 from pg_replication_slots where slot_name = 'braid_rome_all_of_lima' and not active]), 'rome does not hear of lima');
sql($lima, q[insert into item select i, 'last words' from generate_series(1001, 1100) i]);
my ($status, undef, $notice) = $lima->psql('postgres', 'select braid.leave_group()');
like($notice, qr/NOTICE:  this node leaves group "market" once all other members have what was committed here/, 'leaving says what it waits for');
becomes($lima, q[select message from braid.group_nodes where is_local], 'leaving: waits for rome to receive what was written here', 'as does the view');
like(refusal($lima, q[select braid.wait_for_group('1 s')]), qr/DETAIL:  The node is leaving: waits for rome to receive what was written here\./, 'and a wait');
sql($rome, q[select braid.enable_subscription('all_of_lima')]);
becomes($lima, q[select count(*) from braid.group_nodes], '0', 'it has left');
becomes($rome, q[select count(*) || ' ' || (select count(*) from braid.subscription) from braid.group_nodes], '1 0', 'the other one knows');
same_tables([ $rome, $lima ], 'item');
is(sql($rome, q[select count(*) from item where v = 'last words']), '100', 'and has all');
becomes($_, q[select count(*) from pg_replication_slots where slot_name !~ '^braid_(deletions|kept)'], '0', 'no slot stays at ' . $_->name) for $lima, $rome;

done_testing();
