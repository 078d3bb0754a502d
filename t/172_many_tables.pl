# The cost of a table's first change does not grow with the number of tables: catalogs are looked up by key, never
# read whole. Each table has a rule for conflicts of its own, every fifth one a trigger that fires. The test counts rows
# that scans have read, not time: for changes, for a TRUNCATE of all tables, and after everything was invalidated.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my $tables = 400;
my $conf = "max_locks_per_transaction = 256\nautovacuum = off\nbraid.appliers_per_subscription = 1\n";
my $tokyo = new_node('tokyo', conf => $conf);
my $paris = new_node('paris', conf => $conf);
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

# What those who are not measured read: the end and the start of the workers, and looking.
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

$_->stop for $tokyo, $paris;
done_testing();
