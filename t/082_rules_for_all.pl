# A conflict rule that is set on one node for all nodes: it arrives in order with other commits, the
# newer of two stays on every node, and nobody else can send one.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $conf = "max_prepared_transactions = 5\nlogical_decoding_work_mem = '64kB'\n";
my ($tokyo, $paris, $oslo) = my @nodes = map { new_node($_, conf => $conf) } qw(tokyo paris oslo);
# Receives what comes to paris, from wherever.
my $rome = new_node('rome', publication => '', conf => $conf);
on_all(q[
	create table account (id int primary key, owner text, balance int not null default 0);
	create function later(l account, r account, b account, i braid.conflict) returns account language sql immutable
		as $$ select case when $1.balance > $2.balance then $1 else $2 end $$;
], @nodes, $rome);
for my $to (@nodes)
{
	for my $from (grep { $_ != $to } @nodes)
	{
		subscribe($to, $from, copy_data => 'false', streaming => "'on'", two_phase => 'true');
	}
}
my $chain = subscribe($rome, $paris, origin => "'any'", copy_data => 'false');

sub sql
{
	my ($node, $sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

sub rules
{
	return sql($_[0], q[select coalesce(string_agg(concat_ws(' ', coalesce(relation::text, 'all'), coalesce(kind, 'all'), resolution, function, replicates), ', '), 'none')
		from braid.conflict_resolutions]);
}

sub all_have
{
	my ($expected, $what) = @_;
	converged(@nodes);
	caught_up($rome, $paris);
	is(rules($_), $expected, "$what: " . $_->name) for @nodes, $rome;
	return;
}

# Set, changed, removed, from any of them.
sql($tokyo, q[select braid.set_conflict_resolution('account', 'update_origin_differs', 'keep_local', on_all_nodes => true)]);
all_have('account update_origin_differs keep_local', 'set for all');
sql($oslo, q[select braid.set_conflict_resolution('account', 'update_origin_differs', 'function', 'later', replicate => true, on_all_nodes => true)]);
all_have('account update_origin_differs function later(account,account,account,braid.conflict) t', 'changed at another node');
sql($paris, q[select braid.set_conflict_resolution(null, null, 'first_update_wins', on_all_nodes => true)]);
sql($paris, q[select braid.set_conflict_resolution('account', 'update_origin_differs', null, on_all_nodes => true)]);
all_have('all all first_update_wins', 'one for all tables, one removed');
sql($tokyo, 'select braid.set_conflict_resolution(null, null, null, on_all_nodes => true)');
all_have('none', 'removed');
is(sql($_, 'select count(*) from braid.rule_change'), '0', 'nothing is left of it on ' . $_->name) for @nodes, $rome;

# A rule for one node stays there; a rolled back one is nowhere; a prepared one counts when it
# commits.
sql($paris, q[select braid.set_conflict_resolution('account', 'delete_missing', 'keep_local')]);
sql($tokyo, q[begin; select braid.set_conflict_resolution('account', null, 'apply_remote', on_all_nodes => true); rollback]);
converged(@nodes);
is(join(' / ', map { rules($_) } @nodes), 'none / account delete_missing keep_local / none', 'for one node, and rolled back');
sql($paris, q[select braid.set_conflict_resolution('account', 'delete_missing', null)]);
sql($tokyo, q[begin; select braid.set_conflict_resolution('account', 'insert_exists', 'keep_local', on_all_nodes => true); prepare transaction 'rule']);
converged(@nodes);
is(rules($paris), 'none', 'prepared');
sql($tokyo, q[commit prepared 'rule']);
all_have('account insert_exists keep_local', 'and committed');
# In the middle of a large transaction, which is sent while it runs.
sql($tokyo, q[
	begin;
	insert into account select i, repeat('x', 100) from generate_series(1000, 4000) i;
	select braid.set_conflict_resolution('account', 'insert_exists', null, on_all_nodes => true);
	insert into account select i, repeat('x', 100) from generate_series(4001, 7000) i;
	commit]);
all_have('none', 'in a large transaction');

# Cut off from each other, two nodes set the same rule: the newer one stays everywhere, whichever
# comes first. So does a newer removal.
my @subscriptions = map { my $to = $_; map { [ $to, $to->name . '_from_' . $_->name ] } grep { $_ != $to } @nodes } @nodes;
sub cut { disable($_->[0], $_->[1]) for @subscriptions; return }
sub heal { sql($_->[0], "select braid.enable_subscription('$_->[1]')") for @subscriptions; return }
cut();
sql($tokyo, q[select braid.set_conflict_resolution('account', 'update_exists', 'keep_local', on_all_nodes => true)]);
sql($oslo, q[select braid.set_conflict_resolution('account', 'update_missing', 'keep_local', on_all_nodes => true)]);
sql($paris, q[select braid.set_conflict_resolution('account', 'update_exists', 'apply_remote', on_all_nodes => true)]);
sql($tokyo, q[select braid.set_conflict_resolution('account', 'update_missing', null, on_all_nodes => true)]);
heal();
all_have('account update_exists apply_remote', 'the newer rule, the newer removal');
sql($paris, q[select braid.set_conflict_resolution('account', 'update_exists', null, on_all_nodes => true)]);
all_have('none', 'removed again');

# A rule counts for later commits, and not for earlier ones, in every apply mode. No node reads
# others' changes from oslo: transactions are joined there.
my $number = 0;
for my $mode ("'parallel'", "'batch'", "'batch', consolidate => true", "'aggregate'")
{
	my ($first, $second) = ($number + 1, $number + 2);
	$number += 2;
	sql($tokyo, "insert into account values ($first, 'tokyo'), ($second, 'tokyo')");
	converged(@nodes);
	sql($oslo, "select braid.alter_subscription('oslo_from_tokyo', apply_mode => $mode)");
	cut();
	sql($oslo, "update account set owner = 'oslo' where id in ($first, $second)");
	sql($tokyo, "update account set owner = 'newer' where id = $first");
	sql($tokyo, q[select braid.set_conflict_resolution('account', 'update_origin_differs', 'keep_local', on_all_nodes => true)]);
	sql($tokyo, "update account set owner = 'newer' where id = $second");
	sql($_->[0], "select braid.enable_subscription('$_->[1]')") for grep { $_->[1] eq 'oslo_from_tokyo' } @subscriptions;
	caught_up($oslo, $tokyo);
	is(sql($oslo, "select string_agg(owner, ' ' order by id) from account where id in ($first, $second)"), 'newer oslo', "before and after it: $mode");
	heal();
	converged(@nodes);
	sql($tokyo, q[select braid.set_conflict_resolution('account', 'update_origin_differs', null, on_all_nodes => true)]);
	sql($tokyo, "update account set owner = 'equal' where id in ($first, $second)");
	converged(@nodes);
}

# If the table is missing, the log says so. If the function is missing, the subscription stops until
# it exists.
my $log = -s $paris->logfile;
sql($tokyo, 'create table tokyos_own (id int primary key)');
sql($tokyo, q[select braid.set_conflict_resolution('tokyos_own', null, 'keep_local', on_all_nodes => true)]);
converged(@nodes);
is(rules($paris), 'none', 'no rule for a table that is not there');
like(slurp_file($paris->logfile, $log), qr/WARNING: .*node "tokyo" has set a rule for conflicts of table public\.tokyos_own on all nodes, and there is no such table here/, 'which is in the log');
sql($tokyo, q[select braid.set_conflict_resolution('tokyos_own', null, null)]);
sql($tokyo, q[create function larger(l account, r account, b account, i braid.conflict) returns account language sql immutable as 'select $1']);
sql($tokyo, q[select braid.set_conflict_resolution('account', 'insert_exists', 'function', 'larger', on_all_nodes => true)]);
ok(wait_until(sub { status($paris, 'paris_from_tokyo')->{state} eq 'error' }, 30), 'without the function the subscription stops');
my $status = status($paris, 'paris_from_tokyo');
like($status->{last_error}, qr/there is no conflict function public\.larger for table public\.account here/, 'and says which one is missing');
sql($_, q[create function larger(l account, r account, b account, i braid.conflict) returns account language sql immutable as 'select $1']) for $paris, $oslo, $rome;
ok(wait_until(sub { status($oslo, 'oslo_from_tokyo')->{state} eq 'error' }, 30), 'so does the other one');
sql($paris, q[select braid.enable_subscription('paris_from_tokyo')]);
sql($oslo, q[select braid.enable_subscription('oslo_from_tokyo')]);
all_have('account insert_exists function larger(account,account,account,braid.conflict) f', 'with it all have the rule');
sql($tokyo, q[select braid.set_conflict_resolution('account', 'insert_exists', null, on_all_nodes => true)]);
all_have('none', 'and are without it again');

# A joining node gets the rules for all nodes, and which were removed. Rules for one node stay
# there. Older rules of the joining node are replaced.
my $lima = new_node('lima', conf => $conf);
sql($lima, q[create table account (id int primary key, owner text, balance int not null default 0); create table tokyos_own (id int primary key)]);
sql($lima, q[select braid.set_conflict_resolution('account', 'insert_exists', 'keep_local')]);
sql($tokyo, q[select braid.set_conflict_resolution('account', 'update_origin_differs', 'function', 'later', on_all_nodes => true)]);
sql($tokyo, q[select braid.set_conflict_resolution('account', 'insert_exists', null, on_all_nodes => true)]);
sql($tokyo, q[select braid.set_conflict_resolution('account', 'update_missing', 'keep_local')]);
is(sql($tokyo, q[select string_agg(kind || ' ' || on_all_nodes, ', ') from braid.conflict_resolutions]), 'update_missing false, update_origin_differs true', 'which are for all is shown');
subscribe($lima, $tokyo, wait => 0);
ok(wait_until(sub { status($lima, 'lima_from_tokyo')->{state} eq 'error' }, 30), 'without its function the subscription stops');
like(status($lima, 'lima_from_tokyo')->{last_error}, qr/there is no conflict function public\.later for table public\.account here/, 'and says which one is missing');
sql($lima, q[create function later(l account, r account, b account, i braid.conflict) returns account language sql immutable
	as $$ select case when $1.balance > $2.balance then $1 else $2 end $$]);
sql($lima, q[select braid.enable_subscription('lima_from_tokyo')]);
caught_up($lima, $tokyo);
is(rules($lima), 'account update_origin_differs function later(account,account,account,braid.conflict) f', 'it has what counts on all');
is($tokyo->safe_psql('postgres', q[select count(*) from pg_replication_slots where slot_name like '%lima%']), '1', 'one slot for it');
sql($lima, q[select braid.drop_subscription('lima_from_tokyo')]);
sql($tokyo, q[select braid.set_conflict_resolution('account', 'update_missing', null)]);
sql($tokyo, q[select braid.set_conflict_resolution('account', 'update_origin_differs', null, on_all_nodes => true)]);
all_have('none', 'and the others have none again');

# A message of that name that anybody may write is not sent.
sql($tokyo, q[create role somebody]);
sql($tokyo, q[set role somebody; select pg_logical_emit_message(true, 'braid.conflict_rule', encode(convert_to(
	'{"schema": null, "table": null, "kind": null, "resolution": "keep_local", "replicate": false, "set_at": "2100-01-01 00:00:00+00", "set_by": "tokyo"}', 'UTF8'), 'hex'))]);
sql($tokyo, q[insert into account values (0, 'last')]);
all_have('none', 'a message of somebody');
my ($ret, $out, $err) = $tokyo->psql('postgres', q[set role somebody; insert into braid.rule_change values ('')]);
like($err, qr/permission denied/, 'nor can anybody write the table');
($ret, $out, $err) = $tokyo->psql('postgres', q[create database other]);
($ret, $out, $err) = $tokyo->psql('other', q[create extension braid; select braid.set_conflict_resolution(null, null, 'keep_local', on_all_nodes => true)]);
like($err, qr/this database is not a node/, 'only a node can tell others');
same_tables([ @nodes, $rome ], 'account');

done_testing();
