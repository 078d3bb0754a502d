# The cost of a table's first change does not grow with the number of tables: catalogs are looked up
# by key, never read whole. Each table has a conflict rule of its own, every fifth one a trigger
# that fires. The test counts rows that scans have read, not time: for changes, for a TRUNCATE of
# all tables, and after everything was invalidated. Counters by table have room for a quarter of the
# tables. The others are counted together, and no view shows 0 for them.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my $tables = 400;
my $conf = "max_locks_per_transaction = 256\nautovacuum = off\nbraid.appliers_per_subscription = 1\n";
my $tokyo = new_node('tokyo', conf => $conf);
my $paris = new_node('paris', conf => $conf . "braid.max_table_counters = 100\n");
my $names = qq[select format('many_%s', i) from generate_series(1, $tables) i];
on_all(qq[
	do \$\$ declare t text; begin
		for t in $names loop
			execute format('create table %s (id int primary key, a text, b int unique)', t);
		end loop;
	end \$\$;
], $tokyo, $paris);
subscribe($paris, $tokyo, copy_data => 'false');
$paris->safe_psql('postgres', qq[
	create function same() returns trigger language plpgsql immutable as 'begin return new; end';
	do \$\$ declare t text; begin
		for t in $names loop
			perform braid.set_conflict_resolution(t::regclass, 'update_missing', 'keep_local');
			if t like '%0' or t like '%5' then
				execute format('create trigger same before insert or update on %s for each row execute function same()', t);
				execute format('alter table %s enable always trigger same', t);
			end if;
		end loop;
	end \$\$;
]);

sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }

# Workers tell what they have read when they end.
sub rows_read
{
	sql($paris, q[select braid.disable_subscription('paris_from_tokyo')]);
	ok(wait_until(sub { sql($paris, q[select count(*) from pg_stat_activity where backend_type in ('braid leader', 'braid applier')]) eq '0' }, 60), 'the workers have ended');
	my $read = sql($paris, q[select sum(seq_tup_read) from pg_stat_all_tables where schemaname in ('pg_catalog', 'braid')]);
	sql($paris, q[select braid.enable_subscription('paris_from_tokyo'); select braid.wait_for_subscription('paris_from_tokyo')]);
	return $read;
}

# Rows that other processes read: the end and the start of the workers, and the measurement itself.
my $before = rows_read();
my $own = rows_read() - $before;
for my $case (
	[ 'the first change of each', qq[do \$\$ declare t text; begin for t in $names loop execute format('insert into %s values (1, 1, 1)', t); end loop; end \$\$] ],
	[ 'a change of each in a transaction of its own', qq[do \$\$ declare t text; begin for t in $names loop execute format('update %s set b = 2', t); commit; end loop; end \$\$] ],
	[ 'TRUNCATE of all', 'truncate ' . join(', ', map { "many_$_" } 1 .. $tables) ])
{
	my ($what, $sql) = @$case;
	$before = rows_read();
	sql($tokyo, $sql);
	converged($tokyo, $paris);
	my $read = rows_read() - $before - $own;
	note("$what: $read rows read");
	cmp_ok($read, '<', 20 * $tables, "$what reads no catalog whole");
}
same_tables([ $tokyo, $paris ], 'many_1', "many_$tables");

sub counters { return sql($paris, 'select state, count(*), count(inserts), sum(inserts), sum(updates), sum(deletes), sum(truncates) from braid.subscription_tables group by 1 order by 1') }
my $others = $tables - 100;
my $expected = "other tables|1|1|$others|$others|0|$others\nready|$tables|100|100|100|0|100";
ok(wait_until(sub { counters() eq $expected }, 60), 'tables without counters of their own are counted together') or diag(counters());

# Another subscription gets the counters that the dropped one has released.
sql($paris, q[select braid.drop_subscription('paris_from_tokyo')]);
ok(wait_until(sub { sql($paris, 'select count(*) from braid.table_activity()') eq '0' }, 60), 'a dropped subscription gives its counters back');
subscribe($paris, $tokyo, copy_data => 'false');
for my $case ([ 1 .. 50 ], [ 31 .. 60 ], [ 51 .. 150 ])
{
	sql($tokyo, join '', map { "insert into many_$_ values (1, 1, 1) on conflict (id) do update set a = 'again';" } @$case);
}
converged($tokyo, $paris);
$expected = "other tables|1|1|50|0|0|0\nready|$tables|100|100|30|0|0";
ok(wait_until(sub { counters() eq $expected }, 60), 'and so are the next subscription\'s') or diag(counters());

$_->stop for $tokyo, $paris;
done_testing();
