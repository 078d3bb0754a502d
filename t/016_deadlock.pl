# Transactions that are independent at the provider collide at the subscriber where that can't be
# foreseen: by a trigger that claims to see its own row only, and writes another one; and by
# sessions that lock rows in another order. Nobody notices.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '', conf => "braid.appliers_per_subscription = 4\ndeadlock_timeout = '50ms'\n");
on_all(q[
	create table item (id int primary key, n int not null);
	create table seat (id int primary key, place int, moves int not null default 0);
], $tokyo, $paris);
$tokyo->safe_psql('postgres', q[
	insert into item select i, 0 from generate_series(1, 200) i;
	insert into seat select i, case when i <= 5 then i end from generate_series(1, 10) i;
]);
my $name = subscribe($paris, $tokyo);
$paris->safe_psql('postgres', q[
	create unique index on seat (place);
	create table counter (id int primary key, n int not null);
	insert into counter values (1, 0);
	create function bump() returns void language plpgsql as $$
	begin
		update public.counter set n = n + 1;
		perform pg_catalog.pg_sleep(0.001);
	end $$;
	-- The leader would order its transactions if it were not declared so.
	create function count_change() returns trigger immutable language plpgsql as $$
	begin
		perform public.bump();
		return new;
	end $$;
	create trigger count_change after update on item for each row execute function count_change();
	alter table item enable always trigger count_change;
]);

my $dir = PostgreSQL::Test::Utils::tempdir();
# Every transaction of the stream changes the one counter, after it has locked a row of its own.
# Three rows: smaller transactions would go to one applier in runs, and not collide.
append_to_file("$dir/item.sql", "\\set k random(1, 198)\nupdate item set n = n + 1 where id between :k and :k + 2;\n");
# At the subscriber: rows locked in any order, and the counter before or after them. SELECT .. FOR
# UPDATE leaves no trace in the data.
append_to_file("$dir/lock.sql", q[
\set a random(1, 200)
\set b random(1, 200)
begin;
select from counter for update;
select from item where id = :a for update;
select from item where id = :b for update;
select from seat where id = 1 + :a % 10 for update;
commit;
]);
append_to_file("$dir/lock2.sql", q[
\set a random(1, 200)
\set b random(1, 200)
begin;
select from seat where id = 1 + :b % 10 for update;
select from item where id = :b for update;
select from item where id = :a for update;
select from counter for update;
commit;
]);
my $writers = start_pgbench($tokyo, '-c', 4, '-t', 100, '-R', 200, '-f', "$dir/item.sql");
my $lockers = start_pgbench($paris, '-c', 4, '-T', 3, '-R', 100, '-f', "$dir/lock.sql", '-f', "$dir/lock2.sql");
# Places change hands: freed by one transaction, taken by the next.
$tokyo->safe_psql('postgres', q[
	do $$
	begin
		for i in 1 .. 150 loop
			update seat set place = null, moves = moves + 1 where id = 1 + (i - 1) % 10;
			commit;
			update seat set place = (select min(p) from generate_series(1, 6) p where p not in (select place from seat where place is not null)),
			       moves = moves + 1 where id = 1 + (i + 4) % 10;
			commit;
		end loop;
	end $$;
]);
my $changes = finish_pgbench($writers);
finish_pgbench($lockers);
caught_up($paris, $tokyo);

same_tables([ $tokyo, $paris ], qw(item seat));
is($paris->safe_psql('postgres', 'select n from counter'), 3 * $changes, 'the trigger ran once for each change');
is($tokyo->safe_psql('postgres', 'select sum(moves) from seat'), 300, 'all moves were made');
my ($failures, $retries, $error) = split /\|/, $paris->safe_psql('postgres',
	"select failures, retries, last_failure from braid.subscription_detail where name = '$name'");
cmp_ok($retries, '>', 0, "transactions were tried again ($retries)");
is($failures, 0, 'without a restart of the workers') or diag($error);
streams($paris, $name, 'and without an error');
unlike(slurp_file($paris->logfile), qr/subscription "$name" (has stopped|will be tried again)/, 'at any time');
is($paris->safe_psql('postgres', 'select count(*) from braid.conflict_history'), '0', 'none of it is a conflict');

done_testing();
