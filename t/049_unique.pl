# Two nodes write rows that are equal under another unique key than the primary key, while they are
# cut off. The newer row stays on both. The older one is deleted and is in the history; nothing
# stops.

use strict;
use warnings;

use Braid;
use Test::More;
use Time::HiRes qw(sleep);

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
my @both = ($tokyo, $paris);
on_all(q[
	create table account (id int primary key, email text unique, card int, v text);
	create unique index card on account (card) where card > 0;
	create table person (id int primary key, name text, place int);
	create unique index on person (lower(name));
	create unique index on person (place) nulls not distinct where id > 0;
	create table plain (id int primary key, code int not null unique, n int not null default 0);
], @both);
subscribe($paris, $tokyo);
subscribe($tokyo, $paris);
my @streams = ([ $paris, 'paris_from_tokyo' ], [ $tokyo, 'tokyo_from_paris' ]);

sub cut
{
	converged(@both);
	$_->[0]->safe_psql('postgres', "select braid.disable_subscription('$_->[1]')") for @streams;
	$_->poll_query_until('postgres', "select not coalesce(bool_or(active), false) from pg_replication_slots where slot_name !~ '^braid_deletions'") or die for @both;
	return;
}

# Announced deletions go to the other node: waits until nothing moves any more.
sub heal
{
	$_->[0]->safe_psql('postgres', "select braid.enable_subscription('$_->[1]')") for @streams;
	for my $round (1 .. 3)
	{
		converged(@both);
	}
	is(status(@$_)->{last_error}, '', "$_->[1] goes on") for @streams;
	return;
}

# Tests the contents of a table on both nodes.
sub both_have
{
	my ($table, $expected, $what) = @_;
	is(join(' / ', map { $_->safe_psql('postgres', "select coalesce(string_agg(t::text, ' ' order by id), '') from $table t") } @both),
		"$expected / $expected", $what);
	return;
}

sub meet
{
	my ($first, $second) = @_;
	cut();
	$tokyo->safe_psql('postgres', $first);
	$paris->safe_psql('postgres', $second);
	heal();
	return;
}

meet(q[insert into account values (1, 'a', 0, 'first')], q[insert into account values (2, 'a', 0, 'second')]);
both_have('account', '(2,a,0,second)', 'of two inserts the newer one stays');
is($tokyo->safe_psql('postgres', q[select kind, winner, local_row ->> 'v', remote_row ->> 'v' from braid.conflict_history where local_row ->> 'id' = '1']),
	'insert_exists|remote|first|second', 'the one that left is in the history');
is($paris->safe_psql('postgres', q[select kind, winner, local_row ->> 'v', remote_row ->> 'v' from braid.conflict_history where remote_row ->> 'id' = '1' and kind = 'insert_exists']),
	'insert_exists|local|second|first', 'there too, where it never came to be');

$tokyo->safe_psql('postgres', q[insert into account values (3, 'c', 0, 'three'), (4, 'd', 0, 'four')]);
meet(q[update account set email = 'e', v = 'first' where id = 3], q[update account set email = 'e', v = 'second' where id = 4]);
both_have('account', '(2,a,0,second) (4,e,0,second)', 'of two updates too');

# One row is blocked by two, by two keys.
$tokyo->safe_psql('postgres', q[insert into account values (5, 'f', 5, 'five'), (6, 'g', 6, 'six')]);
meet(q[update account set v = v || '!' where id in (5, 6)], q[delete from account where id in (5, 6); insert into account values (7, 'f', 6, 'seven')]);
both_have('account', '(2,a,0,second) (4,e,0,second) (7,f,6,seven)', 'several rows in the way');
is($tokyo->safe_psql('postgres', q[select count(*) from braid.conflict_history where kind = 'multiple_unique_conflicts']), '0',
	'the deletes were newer, so there was none');
meet(q[insert into account values (8, 'h', 8, 'eight'), (9, 'i', 9, 'nine')], q[insert into account values (10, 'h', 9, 'ten')]);
both_have('account', '(2,a,0,second) (4,e,0,second) (7,f,6,seven) (10,h,9,ten)', 'two that were inserted there');
is($tokyo->safe_psql('postgres', q[select string_agg(local_row ->> 'id', ' ' order by conflict_id) from braid.conflict_history where kind = 'multiple_unique_conflicts' and winner = 'remote']),
	'8 9', 'both are in the history');

# Rows that a partial index does not have, and nulls, do not block other rows.
meet(q[insert into account values (11, null, 0, 'first')], q[insert into account values (12, null, 0, 'second')]);
both_have('account', '(2,a,0,second) (4,e,0,second) (7,f,6,seven) (10,h,9,ten) (11,,0,first) (12,,0,second)', 'nulls are distinct');

# Expressions; nulls that are not distinct.
meet(q[insert into person values (1, 'Ada', 1)], q[insert into person values (2, 'ADA', 2)]);
both_have('person', '(2,ADA,2)', 'equal as the expression has it');
meet(q[insert into person values (3, 'Bob', null)], q[insert into person values (4, 'Cyd', null)]);
both_have('person', '(2,ADA,2) (4,Cyd,)', 'nulls that are not distinct');

# The winner is deleted before the other node ever saw it: the loser is gone all the same,
# everywhere.
cut();
$paris->safe_psql('postgres', q[insert into account values (20, 'z', 0, 'older')]);
$tokyo->safe_psql('postgres', q[insert into account values (21, 'z', 0, 'newer')]);
$tokyo->safe_psql('postgres', q[delete from account where id = 21]);
heal();
both_have('account', '(2,a,0,second) (4,e,0,second) (7,f,6,seven) (10,h,9,ten) (11,,0,first) (12,,0,second)', 'a winner that is gone');

# The winner is deleted where it was written before the loser arrives there: the node that saw both
# rows announces the loser.
meet(q[insert into account values (22, 'y', 0, 'older')], q[insert into account values (23, 'y', 0, 'newer'); delete from account where id = 23]);
both_have('account', '(2,a,0,second) (4,e,0,second) (7,f,6,seven) (10,h,9,ten) (11,,0,first) (12,,0,second)', 'there too');

# The loser changes again, and is the newest of all: it must not go for its earlier version.
cut();
$tokyo->safe_psql('postgres', q[insert into account values (24, 'x', 0, 'oldest')]);
$paris->safe_psql('postgres', q[insert into account values (25, 'x', 0, 'newer')]);
$tokyo->safe_psql('postgres', q[update account set v = 'newest' where id = 24]);
heal();
both_have('account', '(2,a,0,second) (4,e,0,second) (7,f,6,seven) (10,h,9,ten) (11,,0,first) (12,,0,second) (24,x,0,newest)',
	'the row that was written last stays');
$tokyo->safe_psql('postgres', q[delete from account where id = 24]);

# An update loses: its row goes everywhere.
$tokyo->safe_psql('postgres', q[insert into account values (26, 'w', 0, 'twenty-six')]);
meet(q[update account set email = 'v' where id = 26], q[insert into account values (27, 'v', 0, 'newer')]);
both_have('account', '(2,a,0,second) (4,e,0,second) (7,f,6,seven) (10,h,9,ten) (11,,0,first) (12,,0,second) (27,v,0,newer)', 'an update that loses');
# A row that is in another one's way only between two changes of its transaction.
meet(q[begin; insert into account values (30, 'q', 0, 'thirty'); update account set email = 'p' where id = 30; update account set email = 'o' where id = 30; commit],
	q[insert into account values (31, 'p', 0, 'newer')]);
both_have('account', '(2,a,0,second) (4,e,0,second) (7,f,6,seven) (10,h,9,ten) (11,,0,first) (12,,0,second) (27,v,0,newer) (30,o,0,thirty) (31,p,0,newer)',
	'what its transaction leaves is in no way');
is($_->safe_psql('postgres', q[select count(*) from braid.displacement]), '0', 'nothing is left behind on ' . $_->name) for @both;
is($_->safe_psql('postgres', q[select count(*) from braid.conflict_history where kind in ('delete_missing', 'update_deleted') and key ->> 'id' in ('1', '8', '9', '20', '22', '26')]), '0',
	'no conflict is spoken of twice on ' . $_->name) for @both;

# A transaction that is applied while it comes.
$paris->safe_psql('postgres', "alter system set braid.apply_buffer_size = '1MB'");
$paris->restart;
meet(q[insert into plain select i, i from generate_series(1, 30000) i], q[insert into plain values (40001, 77, 1)]);
my ($rows, $winner) = split /\|/, $paris->safe_psql('postgres', 'select count(*), max(id) from plain where code = 77');
is($rows, 1, 'one of them in a large one');
same_tables(\@both, 'plain');
is($winner, 40001, 'the newer');
$tokyo->safe_psql('postgres', 'truncate plain');

done_testing();
