# The server's transaction_timeout is meant for sessions of users. It ends nothing of Braid's:
# no copy, no transaction that is applied, decoded or compared.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

plan(skip_all => 'transaction_timeout came with PostgreSQL 17') if PostgreSQL::Test::Cluster->new('any')->pg_version < 17;

# Sessions of this test may take longer. Connections of Braid have options of their own.
$ENV{PGOPTIONS} = '-c transaction_timeout=0';
my ($tokyo, $paris) = my @nodes = map { new_node($_, conf => "transaction_timeout = 1s\nlogical_decoding_work_mem = 64kB\nmax_prepared_transactions = 5\n") } qw(tokyo paris);
sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql, timeout => $PostgreSQL::Test::Utils::timeout_default); }

# Rows with this value take two seconds.
on_all(q[
	create table item (id int primary key, v text);
	create table slow (id int primary key, v text);
	create function sleep() returns trigger language plpgsql as $$ begin perform pg_sleep(2); return new; end $$;
], @nodes);
sql($paris, "create trigger sleep before insert on $_ for each row when (new.v = 'slow') execute function sleep(); alter table $_ enable always trigger sleep") for qw(item slow);
sql($tokyo, q[insert into item values (1, 'slow')]);

my $name = subscribe($paris, $tokyo, streaming => q['parallel']);
same_tables(\@nodes, 'item');
my $id = 10;
for my $mode (qw(serial parallel batch aggregate))
{
	alter_running($paris, $name, "apply_mode => '$mode'") or fail("$mode: altered");
	sql($tokyo, "insert into item values ($id, 'slow'), ($id + 1, 'after')");
	caught_up($paris, $tokyo);
	$id += 10;
}
same_tables(\@nodes, 'item');

# A transaction that runs for long at the provider, and is applied meanwhile; then one that is
# prepared.
for my $end ('commit', q[prepare transaction 'long'])
{
	my $session = $tokyo->background_psql('postgres');
	$session->query_safe("begin; insert into item select i, repeat('x', 100) from generate_series($id * 1000, $id * 1000 + 2000) i; select pg_sleep(2); insert into item select i, repeat('x', 100) from generate_series($id * 1000 + 3000, $id * 1000 + 5000) i; $end");
	$session->quit;
	$id += 10;
}
sql($tokyo, q[commit prepared 'long']);
caught_up($paris, $tokyo);
same_tables(\@nodes, 'item');

# A transaction whose decoding takes long.
alter_running($paris, $name, "streaming => 'off', apply_mode => 'serial'") or fail('altered');
sql($tokyo, "insert into item select i, repeat('y', 200) from generate_series(1000000, 1030000) i");
caught_up($paris, $tokyo);
same_tables(\@nodes, 'item');

# Both sides of a comparison, whose transaction is the session's own here.
write_by_hand($paris, q[delete from item where id = 1000000]);
is((split /\|/, sql($paris, "call braid.compare('$name', 'item')"))[1], 1, 'a difference is found');
sql($paris, "call braid.repair('$name', 'item', side => 'provider')");
same_tables(\@nodes, 'item');

streams($paris, $name, 'it streams');
unlike(slurp_file($_->logfile), qr/due to transaction timeout/, 'nothing was ended at ' . $_->name) for @nodes;

done_testing();
