# Values of the views while changes arrive: lag, speed, and the changes of each table; and the
# rights to see them.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Proxy;
use Test::More;
use Time::HiRes qw(sleep time);

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
on_all(q[
	create table item (k int primary key, v text);
	create table other (k int primary key);
	create table still (k int primary key);
	create table split (k int primary key) partition by range (k);
	create table split_1 partition of split for values from (0) to (10);
	create table split_2 partition of split for values from (10) to (20);
], $tokyo, $paris);
my $proxy = Proxy->new($tokyo);
my $name = subscribe($paris, $tokyo, copy_data => 'false', dsn => $proxy->connstr('postgres'));
sub at_paris { return $paris->safe_psql('postgres', $_[0]); }

# By table, each operation.
$tokyo->safe_psql('postgres', q[
	insert into item select i, 'row' from generate_series(1, 70) i;
	update item set v = 'changed' where k <= 30;
	update item set k = k + 1000 where k <= 5;
	delete from item where k between 41 and 52;
	insert into other select generate_series(1, 9);
	truncate other;
	insert into split values (1), (11), (12);
]);
caught_up($paris, $tokyo);
my $counters = sub { at_paris("select inserts, updates, deletes, truncates, conflicts from braid.subscription_tables where relation = '$_[0]'::regclass") };
ok(wait_until(sub { $counters->('item') eq '70|35|12|0|0' }, 10), 'changes are counted by table') or diag($counters->('item'));
ok(wait_until(sub { $counters->('other') eq '9|0|0|1|0' }, 10), 'and apart') or diag($counters->('other'));
my $all = at_paris("select transactions >= 6, inserts, updates, deletes, truncates from braid.subscription_detail where name = '$name'");
ok(wait_until(sub { $counters->('split_1') eq '1|0|0|0|0' && $counters->('split_2') eq '2|0|0|0|0' }, 10), 'those of partitions too');
is($counters->('still'), '0|0|0|0|0', 'a table without changes has none');
is($all, 't|82|35|12|1', 'and for the subscription');

# Rates: so many transactions a second, of three rows each.
my $per_second = 40;
my $script = $tokyo->basedir . '/rate.sql';
append_to_file($script, "insert into item values (10000 + :client_id * 100000 + nextval('number'), 'a'), (10000000 + :client_id * 100000 + currval('number'), 'b'), "
	  . "(20000000 + :client_id * 100000 + currval('number'), 'c');\n");
$tokyo->safe_psql('postgres', 'create sequence number');
my $load = IPC::Run::start([ 'pgbench', '-n', '-h', $tokyo->host, '-p', $tokyo->port, '-R', $per_second, '-T', 40, '-f', $script, 'postgres' ],
	'>', \my $out, '2>', \my $err);
my ($tx, $rows) = (0, 0);
my $near = sub { my ($value, $wanted) = @_; return $value > 0.5 * $wanted && $value < 1.5 * $wanted };
ok(wait_until(sub {
	($tx, $rows) = split /\|/, at_paris("select tx_per_s, rows_per_s from braid.subscription_status where name = '$name'");
	return $near->($tx, $per_second) && $near->($rows, 3 * $per_second);
}, 18), 'rates are what comes') or diag("$tx and $rows a second, of $per_second and @{[ 3 * $per_second ]}");
$load->finish;
caught_up($paris, $tokyo);
ok(wait_until(sub { at_paris("select tx_per_s = 0 and rows_per_s = 0 from braid.subscription_status where name = '$name'") eq 't' }, 30), 'and 0 some time after it was the last');

# Bytes of WAL that are not here yet, as of the provider's last message.
my $lag = sub { at_paris("select lag_bytes from braid.subscription_status where name = '$name'") };
ok(wait_until(sub { $lag->() eq '0' }, 20), 'with all of it here it is not behind');
my $keeper = $paris->background_psql('postgres');
$keeper->query_safe('begin; lock table item in exclusive mode');
# One that waits, so that none of what follows counts as here while it is written: before a large
# one has committed, part of its WAL does.
$tokyo->safe_psql('postgres', 'insert into item values (-10)');
ok(wait_until(sub { $lag->() > 0 }, 20), 'behind by a row');
my $before = $tokyo->safe_psql('postgres', 'select pg_current_wal_lsn()');
$tokyo->safe_psql('postgres', q[insert into item select i, repeat('x', 1000) from generate_series(2000001, 2002000) i]);
my $written = $tokyo->safe_psql('postgres', "select pg_current_wal_lsn() - '$before'");
cmp_ok($written, '>', 2_000_000, "$written bytes of WAL");
ok(wait_until(sub { my $bytes = $lag->(); $bytes > 0.95 * $written && $bytes < 1.1 * $written + 100_000 }, 20), 'behind by what was written') or diag($lag->() . " of $written");
$keeper->query_safe('rollback');
$keeper->quit;
caught_up($paris, $tokyo);
ok(wait_until(sub { $lag->() eq '0' }, 20), 'and by nothing once it is here');

# With whose rights: the table's owner's, or the subscription's.
at_paris(q[
	create role clerk;
	create table who (k int, role name);
	grant insert on who to public;
	grant create, usage on schema public to clerk;
	alter table item owner to clerk;
	create function tell() returns trigger language plpgsql as $$ begin insert into public.who values (new.k, current_user); return new; end $$;
	create trigger tell after insert on item for each row execute function tell();
	alter table item enable always trigger tell;
]);
$tokyo->safe_psql('postgres', 'insert into item values (-1)');
caught_up($paris, $tokyo);
# Options count from the commit of their change on, however soon something comes.
my $owner = at_paris('select current_user');
my @wanted = '-1 clerk';
for my $number (2 .. 9)
{
	my $as_owner = $number % 2 ? 'false' : 'true';
	at_paris("select braid.alter_subscription('$name', run_as_owner => $as_owner)");
	$tokyo->safe_psql('postgres', "insert into item values (-$number)");
	caught_up($paris, $tokyo);
	push @wanted, "-$number " . ($as_owner eq 'true' ? $owner : 'clerk');
}
is(at_paris('select string_agg(k || $$ $$ || role, $$, $$ order by k desc) from who'), join(', ', @wanted), 'changes are applied as the owner of the table, or of the subscription');

done_testing();
