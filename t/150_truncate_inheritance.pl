# TRUNCATE of tables with children and partitions empties the tables that native replication
# empties: each statement is applied by both, side by side.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo', publication => '');
my $paris = new_node('paris', publication => '');
# A second database of paris, which receives the same by native replication.
$paris->safe_psql('postgres', 'create database native');

my $tables = q[
	create table par (k int);
	create table chi (v text) inherits (par);
	create table grandchi () inherits (chi);
	create table z_par (k int);
	create table a_chi () inherits (z_par);
	create table one (k int);
	create table other (l int);
	create table both_of () inherits (one, other);
	create table some_par (k int);
	create table some_chi () inherits (some_par);
	create table some_hidden () inherits (some_par);
	create table late (k int);
	create table late_chi (k int);
	create table early (k int);
	create table early_chi (k int);
	create table parted (k int) partition by list (k);
	create table parted_1 partition of parted for values in (1, 2) partition by list (k);
	create table parted_1a partition of parted_1 for values in (1);
	create table parted_1b partition of parted_1 for values in (2);
	create table parted_3 partition of parted for values in (3);
	create table rooted (k int) partition by list (k);
	create table rooted_1 partition of rooted for values in (1, 2);
	create table rooted_3 partition of rooted for values in (3);
];
my @tables = qw(par chi grandchi z_par a_chi one other both_of some_par some_chi some_hidden late late_chi early early_chi parted_1a parted_1b parted_3 rooted_1 rooted_3);
$tokyo->safe_psql('postgres', "$tables alter table early_chi inherit early");
$paris->safe_psql($_, "$tables alter table late_chi inherit late") for qw(postgres native);
$tokyo->safe_psql('postgres', q[
	create publication braid for table only par, chi, grandchi, only z_par, a_chi, only one, only other, both_of, only some_par, some_chi,
		late, late_chi, only early, early_chi, parted;
	create publication rooted for table rooted with (publish_via_partition_root = true);
]);
subscribe($paris, $tokyo, publications => "'{braid,rooted}'");
my $connection = $tokyo->connstr('postgres');
$paris->safe_psql('native', "create subscription native_sub connection \$\$$connection\$\$ publication braid, rooted");
$paris->wait_for_subscription_sync($tokyo, 'native_sub', 'native');

sub catch_up
{
	caught_up($paris, $tokyo);
	$tokyo->wait_for_catchup('native_sub');
	return;
}

sub counts
{
	my ($database) = @_;
	return $paris->safe_psql($database, join(' union all ', map { "select '$_ ' || count(*) from only $_" } @tables));
}

sub fill
{
	$tokyo->safe_psql('postgres', q[
		insert into par values (1); insert into chi values (2, 'x'); insert into grandchi values (3, 'x');
		insert into z_par values (1); insert into a_chi values (2);
		insert into one values (1); insert into other values (1); insert into both_of values (1, 1);
		insert into some_par values (1); insert into some_chi values (1); insert into some_hidden values (1);
		insert into late values (1); insert into late_chi values (1); insert into early values (1); insert into early_chi values (1);
		insert into parted values (1), (2), (3);
		insert into rooted values (1), (2), (3);
	]);
	$paris->safe_psql($_, 'insert into some_hidden values (9)') for qw(postgres native);
	catch_up();
	return;
}

for my $statement ('truncate par', 'truncate only par', 'truncate chi', 'truncate only chi, grandchi', 'truncate grandchi, par', 'truncate z_par',
	'truncate a_chi, only z_par', 'truncate one', 'truncate other', 'truncate both_of', 'truncate one, other', 'truncate some_par', 'truncate late', 'truncate late_chi',
	'truncate early', 'truncate only early', 'truncate parted', 'truncate parted_1', 'truncate parted_1b, parted', 'truncate parted_3', 'truncate rooted',
	'truncate rooted_3', 'truncate rooted_1, rooted', 'truncate par, parted, rooted restart identity cascade')
{
	fill();
	my $full = counts('postgres');
	is($full, counts('native'), "the same before $statement");
	$tokyo->safe_psql('postgres', $statement);
	catch_up();
	my $expected = counts('native');
	is(counts('postgres'), $expected, $statement);
	# A leaf under a publication by the root is the one whose truncate nobody hears of.
	isnt($expected, $full, "$statement empties something") unless $statement eq 'truncate rooted_3';
}
is(status($paris, 'paris_from_tokyo')->{last_error}, '', 'no error');
# The rows of a table that is not named stay unlocked.
my $reader = $paris->background_psql('postgres', on_error_stop => 1);
$reader->query_safe('begin; select * from late_chi');
$tokyo->safe_psql('postgres', 'truncate late');
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select count(*) from only late'), '0', 'a reader of a child does not hold up a truncate of its parent alone');
$reader->query_safe('commit');
$reader->quit;
$paris->safe_psql('native', 'drop subscription native_sub');

# The owner of the subscription may do in a trigger what a session of that role may.
$paris->safe_psql('postgres', q[
	select braid.alter_subscription('paris_from_tokyo', run_as_owner => true);
	create role keeper;
	create table emptied (by text);
	grant insert on emptied to keeper;
	create function keep() returns trigger language plpgsql set role to keeper as $$ begin insert into public.emptied values (current_user); return null; end $$;
	create trigger keep before truncate on par for each statement execute function keep();
	alter table par enable always trigger keep;
	alter table par owner to keeper;
]);
$tokyo->safe_psql('postgres', 'insert into par values (1); truncate par');
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select string_agg(by, $$ $$), (select count(*) from par) from emptied'), 'keeper|0', 'a trigger of TRUNCATE takes a role');

done_testing();
