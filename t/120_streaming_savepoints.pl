# A large transaction is applied while it is in progress. If a part of it is rolled back at the
# provider, that part is undone here too, and nothing else, and the transaction goes on.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo', conf => "logical_decoding_work_mem = 64kB\n");
# After a process of it was killed, a subscription takes one transaction at a time for a while,
# unless deaths are not counted.
my $paris = new_node('paris', publication => '', conf => "logical_decoding_work_mem = 64kB\nautovacuum = off\nbraid.remember_deletions = on\nbraid.max_transaction_crashes = 0\n");
on_all(q[
	create table bulk (id int primary key, k int, v text);
	create table gone (id int primary key, v text);
	create table late (id int primary key, v text);
	create table swap (id int primary key, place int unique deferrable initially deferred, v text);
	create table small (id int primary key, n int);
	create table part (id int primary key, v text) partition by range (id);
	create table part_low partition of part for values from (0) to (1500);
	create table part_high partition of part for values from (1500) to (10000);
], $tokyo, $paris);
my @tables = qw(bulk gone late swap small part);
$tokyo->safe_psql('postgres', q[
	insert into small values (1, 0);
	insert into gone select i, repeat(md5(i::text), 5) from generate_series(1, 9000) i;
	insert into swap select i, i, repeat('v', 100) from generate_series(1, 2000) i;
]);
my $name = subscribe($paris, $tokyo, streaming => "'parallel'");
caught_up($paris, $tokyo);
my $one = $tokyo->background_psql('postgres');
my $next = 1;

sub bytes { return $paris->safe_psql('postgres', "select pg_relation_size('$_[0]')"); }
sub wal { return $paris->safe_psql('postgres', q[select pg_current_wal_insert_lsn() - '0/0']); }

sub stats
{
	return $paris->safe_psql('postgres', 'select applied_while_running, given_up_while_running from braid.dependency_stats');
}

# A transaction runs at tokyo. Each part that is to be streamed is larger than the memory for
# decoding.
sub start
{
	my ($then, $rows) = @_;
	$one->query_safe('begin');
	more($then, $rows);
	return;
}

# Rows of no importance; applied here once they are there, and so is all before them. They are 1.6
# MB: what the provider, and bulk inserts here, may have held back of the part before is less than 1
# MB, and so is what is held back of them.
sub more
{
	my ($then, $rows) = @_;
	# Pages that a crash left empty are used again, and the table does not grow. Many rows show in
	# the WAL.
	my ($measure, $enough) = $rows ? (\&wal, 150 * $rows) : (sub { bytes('bulk') }, 1_000_000);
	my $before = $measure->();
	my $first = $next;
	$next += $rows // 8000;
	$one->query_safe("insert into bulk select i, 1, repeat(md5(i::text), 5) from generate_series($first, $next - 1) i");
	ok(wait_until(sub { $measure->() >= $before + $enough }, 30), "$then: applied while it runs");
	return;
}

# The transaction commits, and was applied by the process that followed it.
sub ended
{
	my ($then, $how) = @_;
	my ($applied, $given_up) = split /\|/, stats();
	$one->query_safe($how // 'commit');
	$tokyo->safe_psql('postgres', 'update small set n = n + 1');
	caught_up($paris, $tokyo);
	same_tables([ $tokyo, $paris ], @tables);
	$applied++ unless defined $how;
	is(stats(), "$applied|$given_up", "$then: by the process that followed it");
	return;
}

my $retries = "select retries from braid.subscription_detail where name = '$name'";

# One part, and what came before and comes after it.
start('a part');
$one->query_safe(q[update bulk set k = 2 where id <= 1000; delete from gone where id <= 500; savepoint a]);
more('in a part');
$one->query_safe(q[update bulk set k = 3 where id <= 2000; delete from bulk where id > 3000; delete from gone where id between 501 and 2000; update gone set v = 'never' where id > 7000]);
more('more of it');
$one->query_safe(q[rollback to a; update bulk set k = k + 10 where id <= 1500; delete from gone where id between 1501 and 1600]);
more('after it');
ended('a part');
is($paris->safe_psql('postgres', 'select count(*) from braid.tombstone where relation = $$gone$$::regclass'), '600', 'what was rolled back has deleted nothing');
my $versions = q[select count(*), count(distinct t.timestamp), max(t.timestamp) from bulk, pg_xact_commit_timestamp_origin(xmin) t];
is($paris->safe_psql('postgres', $versions), $tokyo->safe_psql('postgres', $versions), 'rows of all parts have its version');

# Inside of each other; released ones; the outer one rolled back after inner ones were released; a
# table first used in one; the same again.
start('nested');
$one->query_safe('savepoint a');
more('nested, a');
$one->query_safe(q[insert into late select i, repeat(md5(i::text), 5) from generate_series(1, 3000) i; savepoint b; update late set v = 'b' where id <= 2000; delete from gone where id between 2001 and 3000]);
more('nested, b');
$one->query_safe(q[release b; savepoint c; update late set v = 'c' where id <= 1000; delete from late where id > 2500]);
more('nested, c');
$one->query_safe(q[rollback to c; update late set v = v || 'd' where id <= 1500]);
more('nested, c again');
$one->query_safe('rollback to a; insert into late select i, $$kept$$ from generate_series(1, 3000) i');
more('nested, a again');
$one->query_safe('release a; savepoint e; delete from late where id <= 100; update gone set v = $$e$$ where id between 4000 and 5000');
more('nested, e');
ended('nested');
is($paris->safe_psql('postgres', 'select count(*), min(v) from late'), '2900|kept', 'the outer one took the inner ones with it');

# A deferrable constraint that only the part that was rolled back would violate, and rows that swap.
start('deferred');
$one->query_safe('savepoint a; update swap set place = place + 1 where id <= 1999');
more('deferred, in it');
$one->query_safe('rollback to a; update swap set place = 2001 - place');
more('deferred, after it');
ended('deferred');

# Partitions, one of which is first used in the part that is rolled back.
start('partitions');
$one->query_safe('insert into part select i, $$kept$$ from generate_series(1, 1000) i; savepoint a');
more('partitions, in it');
$one->query_safe('insert into part select i, $$never$$ from generate_series(1001, 3000) i; delete from part where id <= 500; update part set v = $$never$$ where id between 501 and 600');
more('partitions, more of it');
$one->query_safe('rollback to a; insert into part select i, $$kept$$ from generate_series(1401, 1600) i; delete from part where id <= 100');
more('partitions, after it');
ended('partitions');
is($paris->safe_psql('postgres', 'select count(*), min(v), max(v) from part'), '1100|kept|kept', 'what was rolled back is in none');

# More parts than there are savepoints: none of them is rolled back; then one of them is, which
# takes the commit.
my $many = 'do $$ begin for i in 1 .. 100 loop begin update gone set v = %s where id = 6000 + i; exception when others then null; end; end loop; end $$';
start('many');
$one->query_safe(sprintf $many, "'many'");
more('many, after them');
ended('many');
start('too many');
$one->query_safe(sprintf $many, "'too many'");
$one->query_safe('savepoint a');
more('too many, in the last');
$one->query_safe('rollback to a');
$one->query_safe("insert into bulk select -i, 9, repeat(md5(i::text), 5) from generate_series(1, 4000) i");
$one->query_safe('commit');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], @tables);
is((split /\|/, stats())[1], 1, 'one without a savepoint is rolled back with all of it');
like(slurp_file($paris->logfile), qr/once it has committed: It has rolled back to a savepoint/, 'and that is said');

# A row that was written in a part is waited for.
start('waited for');
$one->query_safe('savepoint a; update gone set v = $$a$$ where id = 8000');
more('waited for, in it');
$paris->safe_psql('postgres', q[set statement_timeout = '30s'; begin; update gone set v = 'local' where id = 8000; rollback]);
ok(wait_until(sub { (split /\|/, stats())[1] == 2 }, 20), 'it gives way');
$one->query_safe('rollback to a');
$one->query_safe('commit');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], @tables);

# Locks of a part are released when it is rolled back.
start('free again');
$one->query_safe('savepoint a; update gone set v = $$a$$ where id = 8000');
more('free again, in it');
$one->query_safe('rollback to a');
more('free again, after it');
$paris->safe_psql('postgres', q[set statement_timeout = '30s'; begin; update gone set v = 'local' where id = 8000; rollback]);
ended('free again');

# All of it.
start('all of it');
$one->query_safe('savepoint a; update gone set v = $$a$$ where id > 8000');
more('all of it, in a part');
ended('all of it', 'rollback');
is($paris->safe_psql('postgres', $retries), '2', 'only what gave way was tried again');

# The process dies while a part is open, and when it was rolled back.
for my $when (0, 1)
{
	start("killed $when", 20_000);
	$one->query_safe('savepoint a; delete from gone where id between 8000 and 8500');
	more("killed $when, in it", 20_000);
	$one->query_safe('rollback to a');
	more("killed $when, after it", 20_000) if $when;
	my $pid = $paris->safe_psql('postgres', "select pid from braid.apply_workers where worker = 'applier ' || current_setting('braid.appliers_per_subscription')");
	ok(kill_process($paris, $pid), 'the server is back');
	$one->query_safe("insert into bulk values (-10001 - $when, 0, 'after')");
	$one->query_safe('commit');
	caught_up($paris, $tokyo);
	same_tables([ $tokyo, $paris ], @tables);
}
is($paris->safe_psql('postgres', 'select count(*) from braid.conflict_history'), '0', 'there was no conflict');

# A conflict in a part: its commit has to decide, so it is left until then; and the part does not
# count.
my $given_up = (split /\|/, stats())[1];
$paris->safe_psql('postgres', q[update small set n = -1 where id = 1]);
start('conflict', 20_000);
$one->query_safe('savepoint a; update small set n = 1000 where id = 1');
$one->query_safe("insert into bulk select i, 1, repeat(md5(i::text), 5) from generate_series($next, $next + 4000) i");
$next += 4001;
ok(wait_until(sub { (split /\|/, stats())[1] == $given_up + 1 }, 30), 'it is given up');
$one->query_safe('rollback to a; update gone set v = $$after$$ where id > 8900');
$one->query_safe('commit');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], grep { $_ ne 'small' } @tables);
is($paris->safe_psql('postgres', 'select n from small'), '-1', 'and what met it never was');
is($paris->safe_psql('postgres', 'select count(*) from braid.conflict_history'), '0', 'no conflict is left of it');
is($paris->safe_psql('postgres', 'select count(*) from pg_ls_tmpdir()'), '0', 'no file is left');
unlike(slurp_file($paris->logfile), qr/WARNING|resource was not closed|TRAP/, 'nothing was left open');
$one->quit;
done_testing();
