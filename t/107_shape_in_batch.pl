# The provider's table is altered between transactions that are joined here: each row has all of its
# columns, each in its place.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', conf => "braid.appliers_per_subscription = 1\n");
on_all('create table item (k int primary key, a text, b text); create table gate (k int)', $tokyo, $paris);
my $name = subscribe($paris, $tokyo, copy_data => 'false');
sub at_tokyo { return $tokyo->safe_psql('postgres', $_[0]); }
sub at_paris { return $paris->safe_psql('postgres', $_[0]); }

my $consolidated = 0;
for my $mode ("apply_mode => 'batch', consolidate => false", "apply_mode => 'batch', consolidate => true", "apply_mode => 'aggregate'")
{
	at_paris("select braid.alter_subscription('$name', $mode)");
	on_all('drop table item', $tokyo, $paris);
	on_all('create table item (k int primary key, a text, b text)', $tokyo, $paris);
	at_paris("select braid.refresh_subscription('$name', copy_data => false)");
	at_tokyo("insert into item select i, 'a', 'b' from generate_series(1, 10) i");
	caught_up($paris, $tokyo);
	# While the applier waits here, all that follows comes together.
	my $keeper = $paris->background_psql('postgres');
	$keeper->query_safe('begin; lock table gate in exclusive mode');
	at_tokyo('insert into gate values (1)');
	at_tokyo($_) for
		"update item set a = 'a1' where k = 1", "update item set b = 'b1' where k = 1", "update item set a = 'a2' where k = 2", "insert into item values (11, 'a', 'b')",
		"insert into item values (12, 'a', 'b')", "update item set a = 'a4' where k = 4",
		# Now its columns have another order: k, b, a.
		'begin; alter table item drop column a, add column a text; update item set a = $$anew$$; commit',
		"update item set b = 'b1 again' where k = 1", "update item set a = 'a3' where k = 3", "update item set a = 'a11', b = 'b11' where k = 11",
		"delete from item where k = 4", "delete from item where k = 12", "insert into item values (12, 'b12', 'a12')",
		'begin; alter table item alter column a type varchar(20); commit', "update item set b = 'b2', a = 'a2 again' where k = 2", "update item set b = 'last' where k in (1, 3)";
	my $end = at_tokyo('select pg_current_wal_flush_lsn()');
	ok(wait_until(sub { at_paris("select received_lsn >= '$end' from braid.subscription_status where name = '$name'") eq 't' }, 20), 'all is received');
	$keeper->query_safe('rollback');
	$keeper->quit;
	caught_up($paris, $tokyo);
	is(at_paris('select k, a, b from item order by k'), at_tokyo('select k, a, b from item order by k'), "$mode: each column has its own");
	my ($most, $joined) = split /\|/, at_paris("select batch_max, consolidated from braid.dependency_stats where subscription = '$name'");
	cmp_ok($most, '>', 7, "$most in a batch");
	cmp_ok($joined, '>', $consolidated, "$joined changes joined with others") if $mode !~ /false/;
	$consolidated = $joined;
}

done_testing();
