# commit_order => 'relaxed' with two appliers, the default: one transaction waits for a lock here,
# and others depend on it. All others arrive meanwhile, even those behind it that were claimed with
# it. It is applied once after a crash.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '', conf => "braid.appliers_per_subscription = 2\nautovacuum = off\n");
on_all(q[
	create table hot (k int primary key, n bigint not null default 0, last int);
	create table cold (id bigint primary key, t text);
	create table plain (id bigint, k int);
], $tokyo, $paris);
$tokyo->safe_psql('postgres', 'insert into hot select k from generate_series(1, 20) k');
my $name = subscribe($paris, $tokyo, commit_order => "'relaxed'", apply_mode => "'parallel'");
caught_up($paris, $tokyo);

sub value { my ($sql) = @_; return $paris->safe_psql('postgres', $sql) }
sub arrives
{
	my ($sql, $expected, $what) = @_;
	ok(wait_until(sub { value($sql) eq $expected }, 30), $what)
	  or diag("$sql: " . value($sql) . ", not $expected\n" . value('table braid.apply_workers') . "\n" . value('table braid.applied'));
	return;
}

sub is_held_up
{
	return wait_until(sub { value("select count(*) from pg_stat_activity where wait_event_type = 'Lock' and backend_type like 'braid%'") ne '0' }, 30);
}

# Changes of a row that is locked here, three transactions that wait for it in turn, and 200 that do
# not: single rows, each its own transaction, among them such as have no key, so that twice would be
# seen.
sub load
{
	my ($round) = @_;
	$tokyo->safe_psql('postgres', "update hot set n = n + 1, last = -$round where k = 7");
	ok(is_held_up(), 'a transaction waits for a lock');
	$tokyo->safe_psql('postgres', 'update hot set n = n + 1 where k = 7');
	$tokyo->safe_psql('postgres', "begin; update hot set n = n + 1 where k = 7; insert into plain values (-$round, 7); commit");
	$tokyo->safe_psql('postgres', "update hot set n = n + 1 where k in (7, 8)");
	$tokyo->safe_psql('postgres', qq[
		do \$\$ begin
			for i in 1 .. 200 loop
				if i % 2 = 0 then insert into cold values ($round * 1000 + i, 'x'); else insert into plain values ($round * 1000 + i, i); end if;
				commit;
			end loop;
		end \$\$
	]);
	return;
}
sub ahead { my ($round) = @_; return "select (select count(*) from cold where id between $round * 1000 and $round * 1000 + 999) + (select count(*) from plain where id between $round * 1000 and $round * 1000 + 999)" }

my $locker = $paris->background_psql('postgres', on_error_stop => 1);
$locker->query_safe('begin; select from hot where k = 7 for update');
load(1);
arrives(ahead(1), '200', 'all that does not depend on it arrives while it waits');
is(value('select n, last from hot where k = 7'), '0|', 'it does not');
is(value('select n from hot where k = 8'), '0', 'nor what depends on it');
is(value('select count(*) from plain where id < 0'), '0', 'nor what depends on that');
arrives("select state || ' ' || wait_event from braid.apply_workers where subscription = '$name' and worker like 'applier%' and state <> 'applying'",
	'waiting for a dependency BraidApplierDependency', 'the other applier waits for that one: nothing else is left');
cmp_ok(value('select max(cardinality(ranges)) from braid.applied'), '<=', 4, 'what follows each other is noted down as one');
# One that comes by itself does not wait for others to come.
$tokyo->safe_psql('postgres', "insert into cold values (1, 'alone')");
arrives('select count(*) from cold where id = 1', '1', 'a single one arrives too');
# A transaction that fails here at first, and has to wait for all before it, delays nothing either.
value("insert into cold values (2, 'local')");
$tokyo->safe_psql('postgres', "alter table cold add constraint few check (t <> 'never')");
value("alter table cold add constraint few check (t <> 'late')");
$tokyo->safe_psql('postgres', "insert into cold values (3, 'late')");
$tokyo->safe_psql('postgres', "insert into cold values (4, 'behind')");
arrives('select count(*) from cold where id = 4', '1', 'what comes after one that fails arrives');
is(value('select count(*) from cold where id = 3'), '0', 'that one is tried again when all before it are there');
streams($paris, $name, 'and stops nothing');
value('alter table cold drop constraint few');
$locker->query_safe('commit');
caught_up($paris, $tokyo);
is(value('select n, last from hot where k = 7'), '4|-1', 'then all is there');
value('delete from cold where id = 2');
same_tables([ $tokyo, $paris ], 'hot', 'cold', 'plain');

# Many more than a note has ranges for, some of which wait: still one range between those.
$locker->query_safe('begin; select from hot where k = 7 for update');
$tokyo->safe_psql('postgres', 'update hot set n = n + 1 where k = 7');
ok(is_held_up(), 'a transaction waits for a lock again');
$tokyo->safe_psql('postgres', q[
	do $$ begin
		for i in 1 .. 1000 loop
			insert into cold values (50000 + i, 'y');
			commit;
			if i % 20 = 0 then update hot set n = n + 1 where k = 7; commit; end if;
		end loop;
	end $$
]);
arrives('select count(*) from cold where id > 50000', '1000', 'a thousand arrive, among which fifty wait');
is(value('select n from hot where k = 7'), '4', 'none of these has come');
$locker->query_safe('commit');
caught_up($paris, $tokyo);
is(value('select n from hot where k = 7'), '55', 'then they do');
same_tables([ $tokyo, $paris ], 'hot', 'cold', 'plain');

# A crash while some are ahead. What was committed then is on disk.
$locker->query_safe('begin; select from hot where k = 7 for update');
load(2);
arrives(ahead(2), '200', 'all that does not depend on it is there before the crash');
value('set synchronous_commit = on; create table flushed ()');
$paris->stop('immediate');
$locker->quit;
$paris->start;
caught_up($paris, $tokyo);
is(value('select n, last from hot where k = 7'), '59|-2', 'each is applied once after it');
same_tables([ $tokyo, $paris ], 'hot', 'cold', 'plain');

# A crash in the middle of it: some are on disk, some are not.
$locker = $paris->background_psql('postgres', on_error_stop => 1);
$locker->query_safe('begin; select from hot where k = 7 for update');
load(3);
$paris->stop('immediate');
$locker->quit;
$paris->start;
caught_up($paris, $tokyo);
is(value('select n, last from hot where k = 7'), '63|-3', 'each is applied once after that');
same_tables([ $tokyo, $paris ], 'hot', 'cold', 'plain');

done_testing();
