# A member writes a row after a joining node has created its slot there, and another member
# overwrites or deletes the row before the copy begins. The joining node gets the change by both
# paths, late by the stream. The row does not come back.

use strict;
use warnings;

use Braid;
use Group;
use PostgreSQL::Test::Utils;
use Test::More;

my ($tokyo, $paris) = my @all = group([qw(tokyo paris)], q{
	create table item (id int primary key, v text, n int not null default 0);
	create table event (v text, n int);
	alter table event replica identity full;
	insert into item select i, 'first' from generate_series(1, 70) i;
	insert into event select 'first', i from generate_series(1, 20) i});

my $oslo = new_server('oslo', init => ['--data-checksums']);
sql($oslo, 'create extension braid');
# The source does not get changes of paris, so the join waits before it copies.
my $from_paris = sql($tokyo, q{select name from braid.subscription_status where provider = 'paris'});
sql($tokyo, "select braid.disable_subscription('$from_paris')");
join_group($oslo, $tokyo);
ok($oslo->poll_query_until('postgres', q{select count(*) > 0 from braid.join_progress where step = 6 and waits_for ~ 'apply changes of paris'}), 'the join waits for the source to have all of paris')
  or diag(sql($oslo, 'table braid.join_progress'));
is(sql($oslo, q{select s.enabled from braid.subscription s where s.provider_name = 'paris'}), 'f', 'the subscription to paris is there, and waits');

# From here on the copy can't begin.
my $holds = $oslo->background_psql('postgres', on_error_stop => 1);
$holds->query_safe('begin; lock table braid.subscription in exclusive mode');

sql($paris, q{update item set v = 'paris', n = 1 where id <= 40});
sql($paris, q{insert into item select i, 'new at paris' from generate_series(101, 140) i});
sql($paris, q{delete from item where id between 61 and 65});
sql($paris, q{update item set id = id + 1000 where id between 51 and 60});
sql($paris, q{update event set v = 'paris' where n <= 10; insert into event select 'new at paris', i from generate_series(21, 30) i});
sql($tokyo, "select braid.enable_subscription('$from_paris')");
have_all($tokyo, $paris);
sql($tokyo, q{update item set v = 'tokyo', n = 2 where id <= 10});
sql($tokyo, q{delete from item where id between 11 and 20});
sql($tokyo, q{delete from item where id between 21 and 30; insert into item select i, 'again' from generate_series(21, 30) i});
sql($tokyo, q{update item set n = 7 where id between 31 and 35});
sql($tokyo, q{update item set v = 'tokyo' where id between 101 and 110; delete from item where id between 111 and 120});
sql($tokyo, q{insert into item select i, 'again' from generate_series(61, 65) i});
sql($tokyo, q{delete from item where id between 1051 and 1055});
sql($tokyo, q{delete from event where n between 1 and 5; update event set v = 'tokyo' where n between 6 and 8; delete from event where n between 21 and 25});
have_all($tokyo, $paris);
is(sql($oslo, q{select count(*) from item}), '0', 'nothing was copied by then');
my $step = sql($oslo, q{select min(step) from braid.join_step where done_at is null});
cmp_ok($step, '<=', 7, "the join has not come past the copy: step $step");
$holds->query_safe('rollback');
$holds->quit;

push @all, $oslo;
joined(@all);
have_all(@all);
same_tables(\@all, 'item', 'event');
my $counts = q{select v, count(*), sum(n) from item group by v order by v collate "C"};
is(sql($_, $counts), join("\n", 'again|15|0', 'first|20|0', 'new at paris|20|0', 'paris|10|40', 'tokyo|20|20'), 'each row is the newest one: ' . $_->name) for @all;
is(sql($_, q{select v, count(*) from event group by v order by v collate "C"}), join("\n", 'first|10', 'new at paris|5', 'paris|2', 'tokyo|3'), 'the same of rows without a key: ' . $_->name) for @all;

# And what is written from now on arrives.
sql($_, 'insert into item values (' . (10000 + $_->port) . q{, 'last')}) for @all;
have_all(@all);
same_tables(\@all, 'item');
is(sql($_, q{select count(*) from item where v = 'last'}), '3', 'all directions stream: ' . $_->name) for @all;
done_testing();
