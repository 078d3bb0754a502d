# Nodes join others that write tables without a key. A row that comes with a copy, and again by the
# stream of the node that wrote it, is there once. A row that was removed before the copy is not
# there.

use strict;
use warnings;

use Braid;
use Mesh;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tables = q[
	create table log (at int, who text);
	create table bag (id int, v text);
	alter table bag replica identity full;
];
my ($tokyo, $paris) = map { new_node($_) } qw(tokyo paris);
on_all($tables, $tokyo, $paris);
my ($paris_from_tokyo, $tokyo_from_paris) = mesh($tokyo, $paris);
sub at { my ($node, @sql) = @_; sql($node, $_) for @sql; return; }
# Columns by name: at oslo they have another order.
my %columns = (log => 'at, who', bag => 'id, v');
sub rows { my ($node, $table) = @_; return sql($node, "select coalesce(string_agg(concat_ws(':', $columns{$table}), ' ' order by concat_ws(':', $columns{$table}) collate \"C\"), '') from $table"); }

# The rows of the first node are those of the others, each as often.
sub same
{
	my ($what, $first, @others) = @_;
	for my $table (sort keys %columns)
	{
		my %wanted;
		$wanted{$_}++ for split / /, rows($first, $table);
		for my $node (@others)
		{
			my %differs = map { $_ => -$wanted{$_} } keys %wanted;
			$differs{$_}++ for split / /, rows($node, $table);
			is(join(' ', map { "$_($differs{$_})" } grep { $differs{$_} } sort keys %differs), '', "$what: $table at " . $node->name);
		}
	}
	return;
}
sub table_state { my ($node, $subscription, $table) = @_; return sql($node, "select concat_ws(': ', state, copy_error) from braid.subscription_tables where subscription = '$subscription' and relation = '$table'::regclass"); }

at($paris, q[insert into log values (1, 'before'), (1, 'before')], q[insert into bag values (1, 'a'), (2, 'a'), (3, 'a'), (4, 'a')]);
converged($tokyo, $paris);

# Oslo: the slot at paris exists, and nothing of it is applied yet.
my $oslo = new_node('oslo');
at($oslo, q[create table log (who text, at int); create table bag (v text, id int); alter table bag replica identity full]);
my $oslo_from_paris = subscribe($oslo, $paris, copy_data => 'false');
at($oslo, "select braid.disable_subscription('$oslo_from_paris')");

# Comes with the copy, and once more. Two rows that are the same, by one transaction; and some more
# by others.
at($paris, q[insert into log values (2, 'both'), (2, 'both'), (3, 'both')], q[insert into log values (2, 'both')],
	q[insert into log select i, 'many' from generate_series(100, 400) i],
	q[insert into bag values (5, 'b'), (6, 'b')], q[update bag set v = 'c' where id = 1], q[update bag set v = 'd' where id = 1], q[delete from bag where id = 6], q[update bag set v = 'c' where id = 5]);
caught_up($tokyo, $paris);
# Only tokyo has changed it since.
at($tokyo, q[update bag set v = 't' where id = 5]);
converged($tokyo, $paris);
# Does not come with the copy.
cut($tokyo_from_paris);
at($paris, q[insert into log values (2, 'both'), (4, 'late')], q[update bag set v = 'e' where id = 1], q[delete from bag where id = 2], q[insert into bag values (7, 'late')]);
my $oslo_from_tokyo = subscribe($oslo, $tokyo);
is(sql($oslo, 'select count(*) from log'), sql($tokyo, 'select count(*) from log'), 'the copy');
is(sql($oslo, 'select count(*) from braid.copied_position'), 2, 'which says how much of paris it has, of each table');
at($oslo, "select braid.enable_subscription('$oslo_from_paris')");
heal($tokyo_from_paris);
subscribe($_, $oslo, copy_data => 'false') for $tokyo, $paris;
converged($tokyo, $paris, $oslo);
is(rows($tokyo, 'bag'), '1:e 3:a 4:a 5:t 7:late', 'what there is');
same('a node that has joined', $tokyo, $paris, $oslo);

# A table that is copied again gets the changes that are on their way to the provider, of this node
# and of others: the copy waits for them.
cut($tokyo_from_paris);
at($paris, q[insert into log values (6, 'on its way')], q[delete from bag where id = 3]);
caught_up($oslo, $paris);
at($oslo, "select braid.resync_table('$oslo_from_tokyo', '$_')") for qw(log bag);
ok(wait_until(sub { table_state($oslo, $oslo_from_tokyo, 'log') =~ /has not yet applied all changes of node "paris" that this node has/ }, 30), 'the copy waits, and says for what');
heal($tokyo_from_paris);
sql($oslo, "select braid.wait_for_subscription('$oslo_from_tokyo')");
converged($tokyo, $paris, $oslo);
same('copied anew', $tokyo, $paris, $oslo);

# Streams run already while tables are copied, and all write. A transaction at tokyo keeps the copy
# from the tables for a while: so rows of paris and oslo come before it.
my $lima = new_node('lima');
at($lima, $tables);
my @streams = map { subscribe($lima, $_, copy_data => 'false') } $paris, $oslo;
at($lima, map { "select braid.disable_subscription('$_')" } @streams);
my $script = "$PostgreSQL::Test::Utils::tmp_check/writes.sql";
append_to_file($script, <<'SQL');
\set id random(1, 40)
insert into log (at, who) values (:id, md5(random()::text));
begin \; insert into log (at, who) values (:id, 'alike') \; insert into log (at, who) values (:id, 'alike') \; commit;
insert into bag (id, v) values (:id, md5(random()::text));
update bag set v = md5(random()::text) where ctid = (select ctid from bag where id > 0 order by random() limit 1);
delete from bag where ctid = (select ctid from bag where id > 0 order by random() limit 1);
SQL
my @writers = map { start_pgbench($_, '-c', '2', '-T', '12', '-R', '60', '-f', $script) } $tokyo, $paris, $oslo;
ok(wait_until(sub { sql($tokyo, q[select count(*) from log where who = 'alike']) > 20 }, 20), 'tokyo has what comes with the copy');
my $holder = $tokyo->background_psql('postgres');
$holder->query_safe('begin; lock table log, bag in row exclusive mode');
my $lima_from_tokyo = subscribe($lima, $tokyo, wait => 0);
ok(wait_until(sub { table_state($lima, $lima_from_tokyo, 'log') =~ /by a transaction that does not end/ }, 30), 'the copy says what it waits for');
at($lima, map { "select braid.enable_subscription('$_')" } @streams);
ok(wait_until(sub { sql($lima, 'select count(*) from log') > 40 }, 20), 'lima has some of it before the copy');
$holder->query_safe('commit');
$holder->quit;
sql($lima, "select braid.wait_for_subscription('$lima_from_tokyo')");
finish_pgbench($_) for @writers;
subscribe($_, $lima, copy_data => 'false') for $tokyo, $paris, $oslo;
at($lima, q[insert into log values (0, 'lima')], q[delete from bag where id = 1]);
converged($tokyo, $paris, $oslo, $lima);
same('joined under load', $tokyo, $paris, $oslo, $lima);
ok(sql($lima, 'select count(*) from bag') > 0, 'which has rows');

# A role that may not lock the table gets an error, and a copy all the same.
is(sql($tokyo, q[select has_function_privilege('public', 'braid.hold_table(oid)', 'execute')]), 'f', 'not everybody holds tables');
at($tokyo, q[create role reader login replication; grant braid_monitor to reader; grant select on bag to reader]);
my ($code, $out, $error) = $tokyo->psql('postgres', q[set role reader; begin; select braid.hold_table('bag'::regclass); select mode from pg_locks where relation = 'bag'::regclass and pid = pg_backend_pid(); rollback]);
is($out, "\nShareLock", 'who may read a table and replicate holds it') or diag($error);
($code, $out, $error) = $tokyo->psql('postgres', q[set role reader; select braid.hold_table('log'::regclass)]);
like($error, qr/a table is held only by roles that may read it, and connect for replication/, 'others do not');
($code, $out, $error) = $tokyo->psql('postgres', q[select braid.hold_table(1)]);
like($error, qr/there is no table with OID 1/, 'and it has to be there');

# Positions of other nodes are removed when their changes have arrived.
ok(wait_until(sub { sql($_, 'select count(*) from braid.copied_position') == 0 }, 90), 'positions are forgotten at ' . $_->name) for $oslo, $lima;

done_testing();
