# Functions that visit many tables hold the locks of one table at a time. A transaction with
# create_subscription has as many relation locks for 400 tables with three indexes each, a
# partitioned table and sequences, as for two tables. So a server with a smaller lock table creates
# the subscription, keeps it in step with its publications, and applies changes of all tables.

use strict;
use warnings;

use Braid;
use Test::More;

my $tables = 400;
my $tokyo = new_node('tokyo', publication => '', conf => "autovacuum = off\n");
my $paris = new_node('paris', publication => '', conf => "autovacuum = off\n");
on_all(qq[
	create table few_1 (id int primary key);
	create table few_2 (id int primary key, few int references few_1);
	create table parted (id int, v int) partition by range (id);
	do \$\$ begin
		for i in 1 .. $tables loop
			execute format('create table many_%s (id int primary key, a int unique, b int)', i);
			execute format('create index on many_%s (b)', i);
			if i % 4 = 0 then
				execute format('create table parted_%s partition of parted for values from (%s) to (%s)', i, i, i + 4);
				execute format('create sequence many_%1\$s_id_seq owned by many_%1\$s.id', i);
				execute format('alter table many_%s add foreign key (b) references few_1', i);
			end if;
			if i % 100 = 0 then
				commit;
			end if;
		end loop;
	end \$\$;
], $tokyo, $paris);
# Room for some hundred locks, and about as many again in what shared memory has to spare.
for my $node ($tokyo, $paris)
{
	$node->append_conf('postgresql.conf', <<'CONF');
max_locks_per_transaction = 10
max_connections = 12
max_worker_processes = 16
max_wal_senders = 4
max_replication_slots = 6
CONF
	$node->restart;
}
$tokyo->safe_psql('postgres', 'create publication few for table few_1, few_2; create publication many for tables in schema public with (publish_via_partition_root)');

my $dsn = $tokyo->connstr('postgres');
my $count = "select count(*) from pg_locks where pid = pg_backend_pid() and locktype = 'relation'";

# How many locks a transaction has after these statements, the last of which is looked at.
sub locks
{
	my ($node, @statements) = @_;
	return (split /\n/, $node->safe_psql('postgres', join('; ', 'begin', @statements, $count, 'rollback')))[-1];
}

sub same_locks
{
	my ($node, $what, $few, $many) = @_;
	my ($of_few, $of_many) = (locks($node, @$few), locks($node, @$many));
	note("$what: $of_few locks for two tables, $of_many for all");
	cmp_ok($of_many, '<=', $of_few + 8, "$what holds as many locks for all tables as for two");
	return;
}

sub create
{
	my ($publication, $copy_data) = @_;
	return "select braid.create_subscription('paris_from_tokyo', \$dsn\$$dsn\$dsn\$, publications => '{$publication}', copy_data => $copy_data)";
}
same_locks($paris, "create_subscription with copy_data => $_", [ create('few', $_) ], [ create('many', $_) ]) for qw(true false);

subscribe($paris, $tokyo, publications => q['{few}'], copy_data => 'false');
my $refresh = q[select count(*) from braid.refresh_subscription('paris_from_tokyo')];
my $alter = q[select braid.alter_subscription('paris_from_tokyo', publications => '{%s}')];
same_locks($paris, 'alter_subscription', [ sprintf($alter, 'few') ], [ sprintf($alter, 'many') ]);
my $few = locks($paris, $refresh);
$tokyo->safe_psql('postgres', 'alter publication few add tables in schema public; alter publication few set (publish_via_partition_root)');
my $many = locks($paris, $refresh);
cmp_ok($many, '<=', $few + 8, "refresh_subscription with $tables more tables holds $many locks, as with none more: $few");

# With all tables in the subscription.
is($paris->safe_psql('postgres', q[select count(*) from braid.refresh_subscription('paris_from_tokyo', copy_data => false)]), $tables + 1, 'all tables are added');
same_locks($paris, 'braid.orphans', [q[select count(*) from braid.orphans('few_2')]], ['select count(*) from braid.orphans()']);
cmp_ok(locks($tokyo, 'select count(*) from braid.check()'), '<=', 130, 'braid.check holds few locks');
# braid.check asks the other node in parts; 20 findings of a kind are listed.
my $here = $paris->connstr('postgres');
cmp_ok(locks($tokyo, "select count(*) from braid.check(\$dsn\$$here\$dsn\$)"), '<=', 130, 'braid.check with another node holds few locks');
is($tokyo->safe_psql('postgres', "select finding from braid.check(\$dsn\$$here\$dsn\$) where code = 'peer_sequence' and subject = 'further'"),
	($tables / 4 - 20) . ' more findings of this kind are not listed', 'braid.check asks the other node about all tables');

$tokyo->safe_psql('postgres', qq[
	do \$\$ begin
		for i in 1 .. $tables loop
			execute format('insert into many_%s values (1, 1, null)', i);
			if i % 20 = 0 then
				commit;
			end if;
		end loop;
	end \$\$;
	insert into parted select i, i from generate_series(4, 12) i;
]);
converged($tokyo, $paris);
same_tables([ $tokyo, $paris ], 'many_1', "many_$tables", 'parted');
streams($paris, 'paris_from_tokyo', 'the subscription streams');

$_->stop for $tokyo, $paris;
done_testing();
