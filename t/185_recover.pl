# Three nodes of a group, of which one dies. If only one of the others has some of its last
# transactions, the other one gets them, with versions and deletions; the report shows it. If
# neither lacks anything, nothing is passed on. The dead node learns of that when it comes back.

use strict;
use warnings;

use Braid;
use Group;
use Test::More;

my ($tokyo, $paris, $oslo) = my @all = group([qw(tokyo paris oslo)], q{
	create table item (id bigint primary key, v text, n int not null default 0);
	create table big (id int primary key, v text);
	create table emptied (id int primary key);
	create table log (line text);
	alter table log replica identity full;
	create table total (id int primary key, n bigint not null default 0);
	alter table total replica identity full;
	insert into item select i, 'first' from generate_series(1, 1000) i;
	insert into emptied select i from generate_series(1, 100) i;
	insert into log values ('twice'), ('twice');
	insert into total values (1, 0);
});
sql($_, q{select braid.set_column_rule('total', 'n', 'delta')}) for @all;
keeps($_, 2) for @all;
# Rows that came with the initial copy have no versions of before.
my $versions = q{select md5(string_agg(i.id || ' ' || v.committed_at || v.node, ',' order by i.id)) from item i cross join lateral braid.row_version(i.tableoid, i.ctid) v where i.id in (2, 7, 8, 9, 100) or i.id > 5000};

# Oslo's stream to paris ends. What it writes from then on only tokyo has.
sql($oslo, q{update item set v = 'known to all' where id = 2; update total set n = n + 1});
have_all(@all);
disable($paris, 'paris_from_oslo');
sql($paris, q{update item set v = 'older, of paris' where id = 7});
$tokyo->poll_query_until('postgres', q{select v ~ 'older' from item where id = 7}) or die;
sql($oslo, q{insert into item select 5000 + i, 'new' from generate_series(1, 50) i});
sql($oslo, q{update item set v = 'oslo', n = n + 1 where id between 7 and 8});
sql($oslo, q{delete from item where id between 100 and 119});
sql($oslo, q{begin; insert into item values (6000, 'with'); update item set id = 6001 where id = 200; delete from item where id = 6000; commit});
sql($oslo, q{insert into big select 1, string_agg(md5(i::text), '') from generate_series(1, 60000) i});
sql($oslo, q{insert into big select 10 + i, 'many' from generate_series(1, 20000) i});
sql($oslo, q{truncate emptied; insert into emptied values (1000)});
sql($oslo, q{insert into log values ('thrice'), ('thrice'), ('thrice')});
sql($oslo, q{delete from log where ctid = (select min(ctid) from log where line = 'twice')});
sql($oslo, q{update total set n = n + 10});
sql($oslo, q{alter table item add column note text default 'none'; update item set note = 'oslo' where id = 9});
sql($oslo, q{create table later (id int primary key); insert into later values (1), (2)});
my $position = sql($oslo, 'select braid.sync_event()');
sql($tokyo, "select braid.wait_for_event('oslo', '$position', '180 s')");
$oslo->stop('immediate');
# Newer than what is to come.
sql($paris, q{update item set v = 'newer, of paris' where id = 8});
sql($paris, q{insert into item values (100, 'again')}) if sql($paris, q{delete from item where id = 100 returning id});
is(sql($paris, q{select count(*) from item where id > 5000}), '0', 'paris lacks it');

is(sql($tokyo, q{select count(*) from braid.recovery}), '0', 'no recovery yet');
sql($paris, q{select braid.remove_node('oslo', recover => true)});
for my $node ($tokyo, $paris)
{
	# Also of the other one, which was only complete when it was asked last.
	ok($node->poll_query_until('postgres', q{select count(*) = 2 and bool_and(state = 'done') from braid.recovery}), 'recovered, says ' . $node->name)
	  or diag(sql($_, 'table braid.recovery') . "\n" . sql($_, 'select name, state, last_error from braid.subscription_status')) for $node;
	ok($node->poll_query_until('postgres', q{select count(*) = 1 from braid.subscription}), 'no subscription is left over: ' . $node->name);
	ok($node->poll_query_until('postgres', q{select count(*) = 1 from pg_replication_slots where plugin = 'braid' and slot_name !~ '^braid_deletions'}), 'nor a slot: ' . $node->name)
	  or diag(sql($node, 'select slot_name from pg_replication_slots'));
	is(sql($node, q{select from_node, from_lsn < to_lsn, transactions, not_kept from braid.recovery where node = 'paris'}), 'tokyo|t|15|', 'paris has it from tokyo')
	  or diag(sql($node, 'table braid.recovery'));
	is(sql($node, q{select from_node is null, from_lsn = to_lsn, transactions from braid.recovery where node = 'tokyo'}), 't|t|0', 'tokyo lacked nothing')
	  or diag(sql($node, 'table braid.recovery'));
	like(sql($node, q{select lost from braid.recovery where node = 'paris'}), qr/^node oslo may have committed transactions after \S+ that no node has applied/, 'nobody knows what nobody has');
}
my @left = ($tokyo, $paris);
have_all(@left);
same_tables(\@left, qw(item big emptied log total later));
is(sql($paris, $versions), sql($tokyo, $versions), 'versions are the same');
is(sql($paris, q{select (braid.row_version(tableoid, ctid)).node from item where id = 5001}), 'oslo', 'and name the node that wrote the row');
is(sql($_, q{select count(*) from item where id between 101 and 119}), '0', 'what was deleted is gone: ' . $_->name) for @left;
is(sql($_, q{select string_agg(v, ', ' order by id) from item where id in (2, 7, 8, 100)}), 'known to all, oslo, newer, of paris, again', 'the newest version stays: ' . $_->name) for @left;
is(sql($_, q{select string_agg(id::text, ' ' order by id) from item where id in (200, 6000, 6001)}), '6001', 'a key that was changed: ' . $_->name) for @left;
is(sql($_, q{select string_agg(id::text, ' ') from emptied}), '1000', 'a truncated table: ' . $_->name) for @left;
is(sql($_, q{select string_agg(line, ' ' order by line) from log}), 'thrice thrice thrice twice', 'a table without a key: ' . $_->name) for @left;
is(sql($_, q{select n from total}), '11', 'what is added counts once: ' . $_->name) for @left;
is(sql($_, q{select note from item where id = 9}), 'oslo', 'a column that was added: ' . $_->name) for @left;
is(sql($_, q{select count(*) from later}), '2', 'a table that was created: ' . $_->name) for @left;

# Both go on.
sql($_, q{insert into item values (9000 + } . $_->port . q{ % 1000, 'after')}) for @left;
have_all(@left);
same_tables(\@left, 'item');

# The dead node comes back, and learns of the removal.
$oslo->start;
ok($oslo->poll_query_until('postgres', q{select message ~ 'removed' and hint ~ 'braid.compare' from braid.group_nodes where is_local}), 'oslo knows that it was removed, and how its rows can be found')
  or diag(sql($oslo, 'table braid.group_nodes'));
sql($oslo, q{insert into item values (8000, 'too late')});
like(refusal($oslo, q{select braid.leave_group()}), qr/removed from the group.*HINT:.*braid.compare/s, 'and is refused');
sql($oslo, q{select braid.forget_group()});
is(sql($oslo, q{select count(*) from pg_replication_slots where slot_name ~ '^braid_kept'}), '0', 'it keeps nothing any more');
is(sql($_, q{select count(*) from item where id = 8000}), '0', 'nothing of it comes to ' . $_->name) for @left;

# A third one again, that all have all of.
my $lima = new_server('lima', init => ['--data-checksums']);
sql($lima, 'create extension braid');
join_group($lima, $tokyo);
joined($lima, @left);
sql($lima, q{insert into item values (7000, 'lima')});
have_all(@left, $lima);
$lima->stop('immediate');
sql($tokyo, q{select braid.remove_node('lima', recover => true)});
for my $node (@left)
{
	ok($node->poll_query_until('postgres', q{select count(*) = 2 and bool_and(state in ('complete', 'done')) from braid.recovery where removed = 'lima'}), 'nobody lacks anything, says ' . $node->name)
	  or diag(sql($node, 'table braid.recovery'));
	is(sql($node, q{select count(*) from braid.recovery where removed = 'lima' and from_node is null and transactions = 0 and not_kept is null}), '2', 'so nothing is passed on');
	ok($node->poll_query_until('postgres', q{select count(*) = 1 from braid.subscription}), 'the subscription is dropped: ' . $node->name);
}
same_tables(\@left, 'item');

done_testing();
