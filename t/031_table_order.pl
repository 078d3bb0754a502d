# Transactions that share no key at the provider conflict at the subscriber, through unique indexes,
# exclusion constraints and triggers that only the subscriber has. The leader knows these and orders
# the transactions beforehand, so none is applied twice.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '', conf => "braid.appliers_per_subscription = 4\n");

on_all(q[
	create table same (id int primary key, email text not null unique, region text, unique (region, id));
	create table plain (id int primary key, place int, moves int not null default 0);
	create table partial (id int primary key, place int, moves int not null default 0);
	create table expression (id int primary key, place int, moves int not null default 0);
	create table excluded (id int primary key, place int, moves int not null default 0);
	create table parted (id int primary key, place int, moves int not null default 0) partition by range (id);
	create table parted_1 partition of parted for values from (0) to (1000);
	create table watched (id int primary key, place int, moves int not null default 0);
	create table stamped (id int primary key, place int, moves int not null default 0);
], $tokyo, $paris);
$tokyo->safe_psql('postgres', 'create table rounded (id numeric primary key, place int, moves int not null default 0)');
# Words that differ by their case are equal at the subscriber alone.
$tokyo->safe_psql('postgres', "create table $_ (id int primary key, place text unique, moves int not null default 0)") for qw(collated folded);
$paris->safe_psql('postgres', q[
	create collation any_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
	create extension citext;
	create table collated (id int primary key, place text collate any_case unique, moves int not null default 0);
	create table folded (id int primary key, place citext unique, moves int not null default 0);
]);
$paris->safe_psql('postgres', q[
	create table rounded (id numeric(6, 2) primary key, place int, moves int not null default 0);
	create unique index on plain (place);
	create unique index on partial (place) where place > 0;
	create unique index on expression ((place + 1));
	alter table excluded add exclude using btree (place with =);
	create unique index on parted_1 (place);
	create table counter (n int not null);
	insert into counter values (0);
	create function count_change() returns trigger language plpgsql as $$
	begin
		update public.counter set n = n + 1;
		return new;
	end $$;
	create function stamp_change() returns trigger immutable language plpgsql as $$
	begin
		new.moves := new.moves * 10;
		return new;
	end $$;
	create trigger count_change after update on watched for each row execute function count_change();
	alter table watched enable always trigger count_change;
	create trigger stamp_change before insert on stamped for each row execute function stamp_change();
	alter table stamped enable replica trigger stamp_change;
]);
my @moving = qw(plain partial expression excluded parted rounded);
my $name = subscribe($paris, $tokyo);

# A place changes hands: freed by one transaction, taken by another one, which has nothing in common
# with it at the provider.
sub play
{
	my (@tables) = @_;
	my $each = join '', map { qq[
		update $_ set place = null, moves = moves + 1 where place = 1 + i % 5;
		commit;
		update $_ set place = 1 + i % 5, moves = moves + 1 where id = 1 + (i * 7) % 20 and place is null;
		commit;
	] } @tables;
	$tokyo->safe_psql('postgres', "do \$\$ begin for i in 1 .. 150 loop $each end loop; end \$\$");
	caught_up($paris, $tokyo);
	return;
}

# A word changes hands, and its case.
sub play_words
{
	my ($table) = @_;
	$tokyo->safe_psql('postgres', qq[
		do \$\$ begin
			for i in 1 .. 150 loop
				update $table set place = null, moves = moves + 1 where lower(place) = 'w' || i % 5;
				commit;
				update $table set place = case when i % 2 = 0 then 'w' else 'W' end || i % 5, moves = moves + 1 where id = 1 + (i * 7) % 20 and place is null;
				commit;
			end loop;
		end \$\$]);
	caught_up($paris, $tokyo);
	return;
}

sub retries
{
	return $paris->safe_psql('postgres', "select retries from braid.subscription_detail where name = '$name'");
}

sub logged
{
	my ($text) = @_;
	return scalar grep { index($_, $text) >= 0 } split /\n/, slurp_file($paris->logfile);
}

$tokyo->safe_psql('postgres', "insert into $_ select i, case when i <= 5 then i end from generate_series(1, 20) i") for @moving, 'watched', 'stamped';
$tokyo->safe_psql('postgres', "insert into $_ select i, case when i <= 5 then 'w' || i % 5 end from generate_series(1, 20) i") for qw(collated folded);
$tokyo->safe_psql('postgres', q[
	insert into same select i, i || '@example.org', 'r' || i % 3 from generate_series(1, 20) i;
	update same set region = 'x' where id = 1;
]);
caught_up($paris, $tokyo);

play($_) for @moving;
play(@moving);
play('watched', 'plain');
play_words($_) for qw(collated folded);
same_tables([ $tokyo, $paris ], 'same', (grep { $_ ne 'rounded' } @moving), 'watched', 'collated', 'folded');
is(digest($paris, '(select id::int, place, moves from rounded)'), digest($tokyo, '(select id::int, place, moves from rounded)'), 'rounded too');
is(retries(), 0, 'nothing was applied twice');
is($paris->safe_psql('postgres', 'select count(*) from braid.conflict_history'), '0', 'nor was there a conflict');
is($paris->safe_psql('postgres', 'select n from counter'), $tokyo->safe_psql('postgres', 'select sum(moves) from watched'),
	'the trigger ran once for each change');

# A partition is sent under its own name.
my %index = (
	plain => 'plain_place_idx', partial => 'partial_place_idx', expression => 'expression_expr_idx',
	excluded => 'excluded_place_excl', parted_1 => 'parted_1_place_idx', rounded => 'rounded_pkey', collated => 'collated_place_key', folded => 'folded_place_key');
ok(logged(qq[changes of table "public.$_" are ordered among themselves: the provider has no unique key that covers index "$index{$_}"]),
	"$_: the log says why") for sort keys %index;
ok(logged('changes of table "public.watched" are ordered with all others: trigger "count_change" fires here'), 'watched: the log says why');
ok(!logged('changes of table "public.same"'), 'the same keys on both sides are nothing to speak of');
ok(!logged('changes of table "public.stamped"'), 'nor is a trigger that sees its row only');

# Altered while it runs: noticed with the next transaction.
$paris->safe_psql('postgres', 'create unique index late on same (region, email)');
$tokyo->safe_psql('postgres', q[update same set region = 'y' where id = 2]);
caught_up($paris, $tokyo);
ok(!logged('changes of table "public.same"'), 'more columns than a key of the provider are covered by it');
$paris->safe_psql('postgres', q[drop index late; create unique index late on same ((email || '!'))]);
$tokyo->safe_psql('postgres', q[update same set region = 'z' where id = 2]);
caught_up($paris, $tokyo);
is(logged('changes of table "public.same" are ordered among themselves: the provider has no unique key that covers index "late"'), 1,
	'a new index is noticed');
$paris->safe_psql('postgres', q[alter function stamp_change() volatile]);
$tokyo->safe_psql('postgres', q[update stamped set place = 0 where id = 1]);
caught_up($paris, $tokyo);
is(logged('changes of table "public.stamped" are ordered with all others: trigger "stamp_change" fires here'), 1, 'an altered function too');
# The provider loses a key that the subscriber has.
$paris->safe_psql('postgres', 'drop index late');
$tokyo->safe_psql('postgres', q[alter table same drop constraint same_email_key; update same set region = 'w' where id = 2]);
caught_up($paris, $tokyo);
is(logged('changes of table "public.same" are ordered among themselves: the provider has no unique key that covers index "same_email_key"'), 1,
	'and a key that is gone at the provider');
streams($paris, $name, 'the subscription streams');

done_testing();
