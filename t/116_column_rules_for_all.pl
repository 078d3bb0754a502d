# A column rule that is set on one node for all nodes: it arrives in order with other commits,
# passes through nodes that forward, and the newer of two stays on every node. A node that joins has
# it. If it can't be set, the subscription stops.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($tokyo, $paris) = my @nodes = map { new_node($_) } qw(tokyo paris);
# Receives what comes to paris, from wherever, and lima what comes to rome.
my ($rome, $lima) = my @chain = map { new_node($_) } qw(rome lima);
my @all = (@nodes, @chain);
on_all(q[
	create table stock (id int primary key, n int not null default 0, high int, label text);
	alter table stock replica identity full;
	create table late (id int primary key, n int not null default 0);
], @all);
subscribe($tokyo, $paris, copy_data => 'false');
subscribe($paris, $tokyo, copy_data => 'false');
subscribe($rome, $paris, origin => "'any'", copy_data => 'false');
subscribe($lima, $rome, origin => "'any'", copy_data => 'false');

sub sql
{
	my ($node, $sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

sub rules
{
	return sql($_[0], q[select coalesce(string_agg(concat_ws(' ', relation::text, column_name, rule, on_all_nodes), ', '), 'none') from braid.column_rules]);
}

sub all_have
{
	my ($expected, $what) = @_;
	converged(@nodes);
	caught_up($rome, $paris);
	caught_up($lima, $rome);
	is(rules($_), $expected, "$what: " . $_->name) for @all;
	return;
}

# Set, changed, removed, from either of them; what is for one node stays there.
sql($tokyo, q[select braid.set_column_rule('stock', 'n', 'delta', on_all_nodes => true)]);
all_have('stock n delta t', 'set for all');
sql($paris, q[select braid.set_column_rule('stock', 'high', 'min', on_all_nodes => true)]);
all_have('stock n delta t, stock high min t', 'a second one');
sql($tokyo, q[select braid.set_column_rule('stock', 'high', 'max', on_all_nodes => true)]);
all_have('stock n delta t, stock high max t', 'changed at the other node');
sql($tokyo, q[select braid.set_column_rule('stock', 'label', 'max')]);
converged(@nodes);
is(rules($paris), 'stock n delta t, stock high max t', 'for one node');
is(rules($tokyo), 'stock n delta t, stock high max t, stock label max f', 'which is shown');
sql($tokyo, q[select braid.set_column_rule('stock', 'label', null)]);
sql($tokyo, q[begin; select braid.set_column_rule('stock', 'n', 'max', on_all_nodes => true); rollback]);
is(sql($_, 'select count(*) from braid.rule_change'), '0', 'nothing is left of it on ' . $_->name) for @all;

# The rules count.
my @subscriptions = ([ $tokyo, 'tokyo_from_paris' ], [ $paris, 'paris_from_tokyo' ]);
sub cut { sql($_->[0], "select braid.disable_subscription('$_->[1]')") for @subscriptions; return }
sub heal { sql($_->[0], "select braid.enable_subscription('$_->[1]')") for @subscriptions; return }
sql($tokyo, q[insert into stock values (1, 10, 10)]);
converged(@nodes);
cut();
sql($tokyo, q[update stock set n = n + 5, high = 30]);
sql($paris, q[update stock set n = n + 7, high = 20]);
heal();
converged(@nodes);
is(sql($_, 'select n, high from stock'), '22|30', 'what both add counts: ' . $_->name) for @nodes;

# A rule counts for later commits, and not for earlier ones, in every apply mode.
my $id = 10;
for my $mode (qw(parallel batch aggregate))
{
	sql($paris, "select braid.alter_subscription('paris_from_tokyo', apply_mode => '$mode')");
	sql($tokyo, "insert into stock (id, label) values ($id, 'm')");
	converged(@nodes);
	cut();
	sql($paris, "update stock set label = 'z' where id = $id");
	sql($tokyo, "update stock set label = 'b' where id = $id");
	sql($tokyo, q[select braid.set_column_rule('stock', 'label', 'min', on_all_nodes => true)]);
	sql($tokyo, "update stock set label = 'c' where id = $id");
	sql($paris, q[select braid.enable_subscription('paris_from_tokyo')]);
	caught_up($paris, $tokyo);
	is(sql($paris, "select label from stock where id = $id"), 'b', "before and after it: $mode");
	heal();
	converged(@nodes);
	sql($tokyo, q[select braid.set_column_rule('stock', 'label', null, on_all_nodes => true)]);
	all_have('stock n delta t, stock high max t', "removed: $mode");
	$id++;
}

# Cut off from each other, both set the same rule: the newer one stays everywhere, whichever comes
# first. So does a newer removal, and a newer rule than a removal.
cut();
sql($tokyo, q[select braid.set_column_rule('stock', 'label', 'max', on_all_nodes => true)]);
sql($paris, q[select braid.set_column_rule('stock', 'high', 'min', on_all_nodes => true)]);
sql($paris, q[select braid.set_column_rule('stock', 'label', 'min', on_all_nodes => true)]);
sql($tokyo, q[select braid.set_column_rule('stock', 'high', null, on_all_nodes => true)]);
sql($_->[0], "select braid.enable_subscription('$_->[1]')"), caught_up($paris, $tokyo) for $subscriptions[1];
heal();
all_have('stock n delta t, stock label min t', 'the newer rule, the newer removal');
cut();
sql($paris, q[select braid.set_column_rule('stock', 'label', null, on_all_nodes => true)]);
sql($tokyo, q[select braid.set_column_rule('stock', 'label', 'max', on_all_nodes => true)]);
heal();
all_have('stock n delta t, stock label max t', 'the newer rule after a removal');
# A rule that could not be set here delays nothing if it is out of date.
sql($tokyo, q[alter table late replica identity full]);
cut();
sql($tokyo, q[select braid.set_column_rule('late', 'n', 'delta', on_all_nodes => true)]);
sql($paris, q[select braid.set_column_rule('late', 'n', 'max', on_all_nodes => true)]);
heal();
all_have('late n max t, stock n delta t, stock label max t', 'one that is out of date');
sql($tokyo, q[select braid.set_column_rule('late', 'n', null, on_all_nodes => true), braid.set_column_rule('stock', 'label', null, on_all_nodes => true)]);
all_have('stock n delta t', 'both removed');

# If the rule can't be set, the subscription stops, and names the reason and the remedy.
sub refused
{
	my ($message, $detail, $hint, $mend, $what, @where) = @_;
	for my $where (@where)
	{
		my ($node, $name) = @$where;
		ok(wait_until(sub { status($node, $name)->{state} eq 'error' }, 30), "$what: $name stops");
		my $status = status($node, $name);
		like($status->{last_error}, $message, "$what: it says what");
		like($status->{error_hint}, $hint, "$what: and what to do");
		like(sql($node, "select error_sqlstate || ' ' || error_detail from braid.subscription_detail where name = '$name'"), qr/^55000 .*$detail/, "$what: and why");
		sql($node, $mend);
		sql($node, "select braid.enable_subscription('$name')");
	}
	return;
}
my @forward = ([ $paris, 'paris_from_tokyo' ], [ $rome, 'rome_from_paris' ], [ $lima, 'lima_from_rome' ]);
sql($tokyo, q[select braid.set_column_rule('late', 'n', 'delta', on_all_nodes => true)]);
refused(qr/^column "n" of table public\.late cannot have rule "delta"$/, qr/old value.* Node "tokyo" has set it on all nodes\./, qr/ALTER TABLE public\.late REPLICA IDENTITY FULL.*braid\.enable_subscription/,
	'alter table late replica identity full', 'no whole old rows', @forward);
all_have('late n delta t, stock n delta t', 'then they have it');
sql($tokyo, q[alter table late add column high int]);
sql($tokyo, q[select braid.set_column_rule('late', 'high', 'max', on_all_nodes => true)]);
refused(qr/^column "high" of table public\.late does not exist here/, qr/Node "tokyo"/, qr/Add the column.*braid\.enable_subscription/, 'alter table late add column high int', 'no column', @forward);
sql($tokyo, q[create table another (id int primary key, n int)]);
sql($tokyo, q[select braid.set_column_rule('another', 'n', 'max', on_all_nodes => true)]);
refused(qr/^table public\.another does not exist here/, qr/Node "tokyo"/, qr/Create the table.*braid\.enable_subscription.*braid\.skip_transaction/, 'create table another (id int, n int)', 'no table', $forward[0]);
refused(qr/^column "n" of table public\.another cannot have rule "max"$/, qr/no primary key/, qr/Add a primary key.*braid\.enable_subscription/, 'alter table another add primary key (id)', 'no primary key', $forward[0]);
refused(qr/^table public\.another does not exist here/, qr/Node "tokyo"/, qr/Create the table/, 'create table another (id int primary key, n int)', 'no table', @forward[ 1, 2 ]);
all_have('another n max t, late n delta t, late high max t, stock n delta t', 'with all that, all have them');

# The removal of a rule for a missing table stops no subscription.
sql($tokyo, q[create table tokyos_own (id int primary key, n int); select braid.set_column_rule('tokyos_own', 'n', 'max')]);
sql($tokyo, q[select braid.set_column_rule('tokyos_own', 'n', null, on_all_nodes => true)]);
all_have('another n max t, late n delta t, late high max t, stock n delta t', 'a removal where there is no table');

# A joining node gets the rules for all nodes, and which were removed; its own older rules are
# replaced. For tables that it does not get, it only warns.
my $oslo = new_node('oslo');
sql($oslo, q[
	create table stock (id int primary key, n int not null default 0, high int, label text);
	create table late (id int primary key, n int not null default 0, high int);
	alter table late replica identity full;
	select braid.set_column_rule('stock', 'label', 'min'), braid.set_column_rule('stock', 'high', 'min');
]);
sql($tokyo, q[
	create publication part for table stock, late;
	select braid.set_column_rule('stock', 'high', 'max', on_all_nodes => true), braid.set_column_rule('stock', 'label', 'max', on_all_nodes => true);
	select braid.set_column_rule('stock', 'label', null, on_all_nodes => true);
	select braid.set_column_rule('late', 'high', 'min');
]);
subscribe($oslo, $tokyo, publications => "'{part}'", wait => 0);
refused(qr/^column "n" of table public\.stock cannot have rule "delta"$/, qr/Node "tokyo"/, qr/ALTER TABLE public\.stock REPLICA IDENTITY FULL.*braid\.enable_subscription/, 'alter table stock replica identity full', 'joining', [ $oslo, 'oslo_from_tokyo' ]);
sql($oslo, q[select braid.wait_for_subscription('oslo_from_tokyo')]);
caught_up($oslo, $tokyo);
is(rules($oslo), 'late n delta t, stock n delta t, stock high max t', 'it has what counts on all');
like(slurp_file($oslo->logfile), qr/WARNING: .*node "tokyo" has set a rule for column "n" of table public\.another on all nodes, and there is no such table here/, 'what is not for it is in the log');
same_tables([ $tokyo, $oslo ], 'stock', 'late');

# Only a node can tell others.
my ($ret, $out, $err) = $tokyo->psql('postgres', q[create database other]);
($ret, $out, $err) = $tokyo->psql('other', q[create extension braid; create table t (id int primary key, n int); select braid.set_column_rule('t', 'n', 'max', on_all_nodes => true)]);
like($err, qr/this database is not a node/, 'only a node can tell others');

done_testing();
