# Two tables swap their names while three nodes write them, and a stream is held back. Rows of a
# node that still uses the old names, and of one that uses the new ones already, go to the table
# that they were written to.

use strict;
use warnings;

use Braid;
use Ddl;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($tokyo, $paris, $rome) = my @nodes = ddl_nodes([qw(tokyo paris rome)]);
# Rows of the first pair have come from all nodes before names change, so that streams know the
# tables; of the others from none.
my %pair = (known => [qw(known_left known_right)], fresh => [qw(fresh_left fresh_right)], late => [qw(late_left late_right)]);
sql($tokyo, join '; ', map { "create table $_ (id text primary key, made text default '$_')" } map { @$_ } values %pair);
converged(@nodes);
for my $node (@nodes)
{
	my $me = $node->name;
	sql($node, "insert into known_left values ('$me', 'known_left'); insert into known_right values ('$me', 'known_right')");
}
converged(@nodes);

# The default of a column stays with the table: a row whose text is another one has gone to the
# wrong table.
sub swap
{
	my ($node, $pair) = @_;
	my ($left, $right) = @{ $pair{$pair} };
	sql($node, "begin; alter table $left rename to swapping; alter table $right rename to $left; alter table swapping rename to $right; commit");
	return;
}

# A swap may come between two statements, so that both are about one table.
sub write_both
{
	my ($node, $pair, $id) = @_;
	sql($node, "insert into $_ values ('$id: $_')") for @{ $pair{$pair} };
	sql($node, "update $_ set made = made where id = '$id: $_'") for @{ $pair{$pair} };
	return;
}

sub right_tables
{
	my ($what, $pair) = @_;
	converged(@nodes);
	all_stream(@nodes);
	for my $table (@{ $pair{$pair} })
	{
		same_tables(\@nodes, $table);
		for my $node (@nodes)
		{
			my $default = sql($node, "select pg_get_expr(adbin, adrelid) from pg_attrdef where adrelid = '$table'::regclass");
			is(sql($node, "select count(*) from $table where made <> $default"), '0', "$what: all rows of $table are its own at " . $node->name);
		}
	}
	return;
}

# rome lacks two swaps when it writes, and paris lacks none.
sub behind
{
	my ($pair) = @_;
	disable($rome, 'rome_from_tokyo');
	swap($tokyo, $pair);
	write_both($tokyo, $pair, 'tokyo between');
	swap($tokyo, $pair);
	write_both($tokyo, $pair, 'tokyo after');
	caught_up($paris, $tokyo);
	write_both($rome, $pair, 'rome behind');
	caught_up($paris, $rome);
	sql($rome, q[select braid.enable_subscription('rome_from_tokyo')]);
	right_tables("$pair, the writer is behind", $pair);
	return;
}

for my $pair (qw(known fresh))
{
	# rome has the new names before paris has the statements.
	disable($paris, 'paris_from_tokyo');
	swap($tokyo, $pair);
	caught_up($rome, $tokyo);
	write_both($rome, $pair, "rome ahead");
	caught_up($paris, $rome);
	sql($paris, q[select braid.enable_subscription('paris_from_tokyo')]);
	right_tables("$pair, the writer is ahead", $pair);

	# Rows of rome from before the statements, and after them, come to paris late.
	disable($paris, 'paris_from_rome');
	write_both($rome, $pair, 'rome early');
	swap($tokyo, $pair);
	caught_up($rome, $tokyo);
	caught_up($paris, $tokyo);
	write_both($rome, $pair, 'rome late');
	write_both($paris, $pair, 'paris late');
	sql($paris, q[select braid.enable_subscription('paris_from_rome')]);
	right_tables("$pair, rows come late", $pair);
	$paris->stop('immediate');
	$paris->start;

	behind($pair);

	# The next swap is another node's.
	swap($tokyo, $pair);
	caught_up($rome, $tokyo);
	caught_up($paris, $tokyo);
	swap($rome, $pair);
	write_both($_, $pair, $_->name . ' at last') for @nodes;
	right_tables("$pair, another node swaps", $pair);
}

behind('late');

# A table gets another's former name, by a statement in one transaction with rows.
sql($tokyo, q[
	begin;
	alter table known_left rename to known_old;
	create table known_left (id text primary key, made text default 'anew');
	insert into known_left values ('in the transaction');
	commit;
]);
converged(@nodes);
sql($_, "insert into known_left values ('" . $_->name . " anew'); insert into known_old values ('" . $_->name . " old')") for @nodes;
converged(@nodes);
all_stream(@nodes);
same_tables(\@nodes, qw(known_left known_old));
is(sql($_, q[select count(*) from known_left where made <> 'anew']), '0', 'a new table has its own rows at ' . $_->name) for @nodes;

# A column that is dropped and added again, in a table that is dropped before a stream comes to its
# rows.
my $held = sql($paris, q[select name from braid.subscription_status where provider = 'tokyo']);
sql($paris, "select braid.disable_subscription('$held')");
sql($tokyo, $_) for 'create table brief (id int primary key, a int)', 'alter table brief drop a', 'alter table brief add a int not null', 'insert into brief values (1, 2)', 'drop table brief';
sql($paris, "select braid.enable_subscription('$held')");
converged(@nodes);
all_stream(@nodes);
is(sql($_, q[select to_regclass('brief') is null]), 't', 'a table that was there for a moment only: ' . $_->name) for @nodes;

done_testing();
