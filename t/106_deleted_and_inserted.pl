# Rows that a transaction deletes and inserts again, in every mode. A row that it has deleted is not
# looked up again. So everything that may have put a row in its place is tried: the transaction
# itself, a trigger, a savepoint, a newer local row, another unique key.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', conf => "autovacuum = off\n");
on_all(q[
	create table plain (k int primary key, v text);
	create table pair (a text, b numeric, v text, u int unique, primary key (a, b));
	create table part (k int primary key, v text) partition by range (k);
	create table part_low partition of part for values from (0) to (100);
	create table part_high partition of part for values from (100) to (1000);
	create table sprung (k int primary key, v text);
], $tokyo, $paris);
# A row that is deleted springs up again at once.
$paris->safe_psql('postgres', q[
	create function spring() returns trigger language plpgsql as $$ begin insert into public.sprung values (old.k, 'sprung'); return null; end $$;
	create trigger spring after delete on sprung for each row execute function spring();
	alter table sprung enable always trigger spring;
]);
my $name = subscribe($paris, $tokyo, copy_data => 'false');
my @tables = qw(plain pair part sprung);

sub at_tokyo { return $tokyo->safe_psql('postgres', $_[0]); }
sub at_paris { return $paris->safe_psql('postgres', $_[0]); }

my @modes = (
	"apply_mode => 'serial'", "apply_mode => 'parallel'", "apply_mode => 'batch'", "apply_mode => 'aggregate'",
	"apply_mode => 'batch', consolidate => true", "apply_mode => 'serial', consolidate => true", "apply_mode => 'parallel', consolidate => true",
	"apply_mode => 'parallel', consolidate => false, commit_order => 'relaxed'",
);
for my $mode (@modes)
{
	at_paris("select braid.alter_subscription('$name', $mode)");
	at_tokyo(q[
		truncate plain, pair, part, sprung;
		insert into plain select i, 'first' from generate_series(1, 200) i;
		insert into pair select 'key ' || i, i + 0.50, 'first', i from generate_series(1, 20) i;
		insert into part select i * 10, 'first' from generate_series(1, 20) i;
		insert into sprung select i, 'first' from generate_series(1, 5) i;
	]);
	caught_up($paris, $tokyo);
	# A row that is newer here than what is about to be done to it: that row stays, in both places.
	at_tokyo(q[begin; delete from plain where k = 1; insert into plain values (1, 'again'); commit]);
	at_tokyo(q[
		begin;
		delete from plain where k = 2;
		insert into plain values (2, 'again');
		update plain set v = v || ' changed' where k = 2;
		delete from plain where k = 2;
		insert into plain values (2, 'and again');
		delete from plain where k in (3, 4);
		insert into plain values (3, 'again'), (4, 'again');
		delete from plain where k = 5;
		update plain set k = 5 where k = 6;
		insert into plain values (6, 'again');
		delete from plain where k = 7;
		savepoint s;
		insert into plain values (7, 'never');
		rollback to s;
		insert into plain values (7, 'again');
		savepoint s;
		delete from plain where k = 8;
		rollback to s;
		update plain set v = 'not deleted' where k = 8;
		delete from pair where u = 1;
		insert into pair values ('key 1', 1.5, 'equal, not the same', 1);
		delete from pair where u = 2;
		insert into pair values ('key 3.5', 2, 'takes its other key', 2);
		insert into pair values ('key 2', 2.50, 'again', 2000);
		delete from part where k = 90;
		insert into part values (90, 'again');
		update part set k = 115 where k = 100;
		insert into part values (100, 'again');
		delete from sprung where k = 1;
		insert into sprung values (1, 'again');
		commit;
	]);
	# Each in a transaction of its own, many of which are one here.
	at_tokyo(join '', map { "delete from plain where k = $_; insert into plain values ($_, 'one by one');\n" } 20 .. 120);
	caught_up($paris, $tokyo);
	same_tables([ $tokyo, $paris ], @tables);
	streams($paris, $name, "$mode: it goes on");
}

# One that is newer here: it is neither deleted nor written over; and one that was deleted here, by
# something newer, stays away.
at_paris(q[select braid.alter_subscription('] . $name . q[', apply_mode => 'parallel', commit_order => 'source')]);
caught_up($paris, $tokyo);
at_paris("select braid.disable_subscription('$name')");
at_tokyo(q[begin; delete from plain where k = 150; insert into plain values (150, 'older'); commit]);
at_tokyo(q[begin; delete from plain where k = 151; insert into plain values (151, 'older'); commit]);
at_paris(q[update plain set v = 'newer' where k = 150; delete from plain where k = 151]);
at_paris("select braid.enable_subscription('$name')");
caught_up($paris, $tokyo);
is(at_paris(q[select string_agg(k || ' ' || v, ', ') from plain where k in (150, 151)]), '150 newer', 'what is newer here stays, and stays away');

done_testing();
