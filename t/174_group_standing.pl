# A member of a group that refuses writes of users, and one in maintenance.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my %node = map { $_ => new_server($_, init => ['--data-checksums']) } qw(tokyo paris);
sub sql { my ($node, $sql) = @_; return $node{$node}->safe_psql('postgres', $sql); }
sub refused
{
	my ($node, $sql, $like, $what) = @_;
	my ($status, undef, $err) = $node{$node}->psql('postgres', "\\set VERBOSITY verbose\n$sql", on_error_stop => 1);
	isnt($status, 0, "$what is refused");
	like($err, $like, "$what: why");
	return;
}
sub eventually
{
	my ($node, $sql, $what) = @_;
	ok($node{$node}->poll_query_until('postgres', $sql), $what);
	return;
}
my %dsn = map { $_ => $node{$_}->connstr('postgres') =~ s/'/''/gr } keys %node;
sql('tokyo', q[create table stock (id int primary key, n int); create sequence ticket; insert into stock select i, 0 from generate_series(1, 10) i]);
sql($_, q[create extension braid]) for keys %node;
sql('tokyo', qq[select braid.create_group('shop', node_name => 'tokyo', dsn => '$dsn{tokyo}')]);
sql('tokyo', q[select braid.wait_for_group()]);
sql('paris', qq[select braid.join_group('$dsn{tokyo}', node_name => 'paris', dsn => '$dsn{paris}')]);
sql($_, q[select braid.wait_for_group()]) for qw(paris tokyo);

# Read only
my $open = $node{paris}->background_psql('postgres', on_error_stop => 0);
$open->query_safe('create temp table scratch (id int); begin; update stock set n = n where id = 10');
# Another member may set it.
sql('tokyo', q[select braid.set_read_only(node_name => 'paris')]);
eventually('paris', q[select read_only from braid.group_nodes where is_local], 'the member knows it');
eventually('paris', q[select current_setting('transaction_read_only')::bool from (select count(*) from stock) s], 'transactions are read only');
is(sql('tokyo', q[select read_only from braid.group_nodes where name = 'paris']), 't', 'the others show it');
is(sql('tokyo', q[select read_only from braid.group_nodes where name = 'tokyo']), 'f', 'of this one alone');
refused('paris', 'insert into stock values (11, 1)', qr/25006:.*cannot execute INSERT.*HINT:.*braid\.set_read_only\(false\)/s, 'an INSERT');
refused('paris', 'with d as (delete from stock returning 1) select * from d', qr/25006:/, 'a DELETE in a query');
refused('paris', 'create table more (id int)', qr/25006:.*HINT:.*read only/s, 'DDL');
refused('paris', "select nextval('ticket')", qr/25006:/, 'a sequence');
refused('paris', "copy stock from stdin;\n12\t1\n\\.\n", qr/25006:/, 'COPY');
refused('paris', 'do $$ begin update stock set n = 5; end $$', qr/25006:/, 'an UPDATE in a block');
refused('paris', 'set default_transaction_read_only = off; begin read write; set transaction read write; insert into stock values (11, 1)', qr/25006:/, 'a transaction that asks for writing');
refused('paris', "select braid.replicate_ddl('create table more (id int)')", qr/25006:/, 'a statement for all nodes');
refused('paris', q[select * from braid.ingest('[]'::jsonb)], qr/25006:.*takes no writes/s, 'records of another system');
refused('paris', "set role pg_read_all_data; reset role; create role clerk", qr/25006:/, 'a role');
$open->query('update stock set n = n + 1 where id = 10; commit');
$open->query('insert into scratch values (1)');
is($open->query('select count(*) from scratch'), '1', 'temporary tables are written to');
$open->quit;
is(sql('paris', 'select n from stock where id = 10'), '0', 'an open transaction does not write on');
sql('tokyo', 'update stock set n = 1; alter table stock add column note text');
eventually('paris', q[select count(*) = 10 from stock where n = 1], 'changes of others come');
eventually('paris', q[select exists (select from pg_attribute where attrelid = 'stock'::regclass and attname = 'note')], 'and their statements');
# Braid's own functions still work.
is(sql('paris', q[select braid.set_rate_limit('paris_from_tokyo', rows_per_second => 100000); select braid.set_rate_limit('paris_from_tokyo')]), "\n", 'a function of the extension works');
# No process of Braid can start, so none has looked when the first statement comes.
my $processes = sql('paris', 'show max_worker_processes');
$node{paris}->append_conf('postgresql.conf', 'max_worker_processes = 0');
for my $first (
	[ 'an INSERT', 'insert into stock values (11, 1)' ],
	[ 'DDL in a serializable transaction', 'begin; set transaction isolation level serializable; create table more (id int); commit' ],
	[ 'a sequence', "select nextval('ticket')" ],
	[ 'COPY', "copy stock (id, n) from stdin;\n12\t1\n\\.\n" ])
{
	$node{paris}->restart;
	refused('paris', $first->[1], qr/25006:/, "$first->[0] right after a restart");
}
$node{paris}->append_conf('postgresql.conf', "max_worker_processes = $processes");
$node{paris}->restart;
eventually('paris', q[select current_setting('transaction_read_only')::bool from (select count(*) from stock) s], 'so it is later on');
eventually('paris', q[select exists (select from braid.group_nodes where leads)], 'the group goes on');
sql('paris', q[select braid.set_read_only(false)]);
eventually('paris', q[select not current_setting('transaction_read_only')::bool from (select count(*) from stock) s], 'it takes writes again');
sql('paris', 'insert into stock values (11, 1)');
eventually('tokyo', q[select count(*) = 11 from stock], 'which reach the others');

# Maintenance
sql('paris', q[select braid.begin_maintenance()]);
eventually($_, q[select state = 'in maintenance' from braid.group_nodes where name = 'paris'], "$_ knows it") for qw(paris tokyo);
eventually($_, q[select count(*) = 0 from pg_stat_replication where application_name ~ '_from_'], "nobody reads from $_") for qw(paris tokyo);
is(sql('tokyo', q[select state from braid.subscription_status]), 'in maintenance', 'the subscription shows it');
is(sql('tokyo', q[select enabled from braid.subscription]), 't', 'and is enabled as before');
sql('tokyo', 'insert into stock values (21, 1)');
sql('paris', 'insert into stock values (22, 1)');
$node{paris}->restart;
# The manager that starts the process of the group also starts subscriptions, if they are to run.
sql('tokyo', q[select braid.set_sequence_default('local')]);
eventually('paris', q[select exists (select from braid.group_option where option_name = 'sequence_kind' and value = 'local')], 'the group goes on at paris');
is(scalar(worker_pids($node{$_}, 'braid leader')), 0, "no subscription runs at $_") for qw(tokyo paris);
is(sql('tokyo', 'select count(*) from stock where id > 20') . sql('paris', 'select count(*) from stock where id > 20'), '11', 'each has its own row');
# The slots stay.
is(sql('tokyo', q[select count(*) from pg_replication_slots where plugin = 'braid' and slot_name ~ 'paris']), '1', 'the slot for it is there');
sql('tokyo', q[select braid.end_maintenance('paris')]);
eventually($_, q[select count(*) = 2 from stock where id > 20], "$_ has both rows") for qw(paris tokyo);
sql($_, q[select braid.wait_for_group()]) for qw(paris tokyo);
refused('tokyo', q[select braid.begin_maintenance('oslo')], qr/has no node "oslo".*HINT/s, 'an unknown member');
sql('tokyo', q[create role clerk; grant usage on schema braid to clerk]);
refused('tokyo', q[set role clerk; select braid.set_read_only()], qr/42501:/, 'a role without rights');

done_testing();
