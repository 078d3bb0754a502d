# Settings of a database count for its own sessions, not for Braid's processes. Otherwise the
# database's owner could have functions and operators of his own called with the rights of a
# superuser (search_path). A read-only database still gets the changes of others.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
my @both = ($tokyo, $paris);
my @types = qw(name text oid int2 int4 int8 bool);

# Operators that are found in `caught` before pg_catalog write a line into the log, and do what
# their name says.
my $caught = join "\n", map { qq[
	create function caught.equal($_, $_) returns bool language plpgsql as \$\$ begin raise log 'CAUGHT $_'; return \$1 operator(pg_catalog.=) \$2; end \$\$;
	create operator caught.= (leftarg = $_, rightarg = $_, function = caught.equal);
] } @types;
on_all(qq[
	create table item (id int primary key, v text);
	create table late (id int primary key, v text);
	create schema caught;
	$caught
	create function caught.count() returns bigint language plpgsql as \$\$ begin raise log 'CAUGHT count'; return 0; end \$\$;
	create function caught.now() returns timestamptz language plpgsql as \$\$ begin raise log 'CAUGHT now'; return pg_catalog.now(); end \$\$;
	create function caught.coalesce_text(text) returns text language sql as 'select \$1';
], @both);
$tokyo->safe_psql('postgres', q[insert into item select i, 'copied' from generate_series(1, 100) i]);
on_all(q[
	alter database postgres set search_path = caught, pg_catalog, public;
	alter database postgres set default_transaction_read_only = on;
	alter database postgres set default_transaction_isolation = 'serializable';
	alter database postgres set default_transaction_deferrable = on;
], @both);
$_->restart for @both;
# From here on this test's own sessions set what they need.
$ENV{PGOPTIONS} = '-c search_path=public -c default_transaction_read_only=off -c default_transaction_isolation=read\ committed -c default_transaction_deferrable=off';
is($tokyo->safe_psql('postgres', q[show search_path]), 'public', 'sessions of the test choose for themselves');

subscribe($paris, $tokyo);
subscribe($tokyo, $paris, copy_data => 'false');
converged(@both);
same_tables(\@both, 'item');
on_all(q[drop table late], @both);
on_all(q[create table late (id int primary key, v text, n int default 0)], @both);
$tokyo->safe_psql('postgres', q[insert into late select i, 'late' from generate_series(1, 50) i]);
$paris->safe_psql('postgres', q[select braid.refresh_subscription('paris_from_tokyo')]);
$tokyo->safe_psql('postgres', q[select braid.refresh_subscription('tokyo_from_paris', copy_data => false)]);
ok(wait_until(sub { $paris->safe_psql('postgres', q[select string_agg(distinct state, ' ') from braid.subscription_tables]) eq 'ready' }, 30), 'a new table is copied');
$paris->safe_psql('postgres', q[select braid.disable_subscription('paris_from_tokyo')]);
$tokyo->safe_psql('postgres', q[update item set v = 'tokyo' where id <= 10; delete from item where id = 11; truncate late]);
$paris->safe_psql('postgres', q[update item set v = 'paris' where id <= 10; update item set v = 'again' where id = 11; insert into late values (77, 'seven'); select braid.enable_subscription('paris_from_tokyo')]);
converged(@both);
same_tables(\@both, 'item', 'late');
cmp_ok($paris->safe_psql('postgres', q[select count(*) from braid.conflict_history]), '>', 0, 'conflicts are recorded');

# A stop is recorded, and ends later.
$paris->safe_psql('postgres', q[alter table item drop column v]);
$tokyo->safe_psql('postgres', q[insert into item values (1000, 'x')]);
ok(wait_until(sub { status($paris, 'paris_from_tokyo')->{state} eq 'error' }, 30), 'an error is written down');
like(status($paris, 'paris_from_tokyo')->{last_error}, qr/column/, 'and shown');
$paris->safe_psql('postgres', q[alter table item add column v text; select braid.enable_subscription('paris_from_tokyo')]);
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', q[select v from item where id = 1000]), 'x', 'then it goes on');

my ($rows) = $paris->safe_psql('postgres', q[call braid.compare('paris_from_tokyo', 'late')]);
is($paris->safe_psql('postgres', q[select count(*) from braid.differences]), '0', 'tables are compared');
for my $node (@both)
{
	my $log = slurp_file($node->logfile);
	unlike($log, qr/CAUGHT/, $node->name . ': nothing but pg_catalog was looked in');
	unlike($log, qr/read-only transaction/, $node->name . ': nothing was kept from writing');
}

# The test would see it.
delete $ENV{PGOPTIONS};
$paris->safe_psql('postgres', q[select 'a'::name = 'a'::name]);
like(slurp_file($paris->logfile), qr/CAUGHT name/, 'a session with the search_path of the database is caught');

done_testing();
