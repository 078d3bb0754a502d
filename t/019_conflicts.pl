# Two nodes change the same rows while they are cut off from each other. Afterwards they agree. Each
# has recorded its conflicts, with the winning and the losing rows.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# VACUUM takes away what tells of deletions.
my $conf = "autovacuum = off\n";
my $tokyo = new_node('tokyo', conf => $conf);
my $paris = new_node('paris', conf => $conf);
my @nodes = ($tokyo, $paris);
my %node = (tokyo => $tokyo, paris => $paris);
on_all('create table item (id int primary key, v text, n int)', @nodes);
$tokyo->safe_psql('postgres', q[insert into item select i, 'copied', i from generate_series(1, 40) i]);
my %name = (paris => subscribe($paris, $tokyo), tokyo => subscribe($tokyo, $paris, copy_data => 'false'));

# Ordinary traffic: each node its own rows, old and new, from both sides at once.
my $dir = PostgreSQL::Test::Utils::tempdir();
my @benches;
for my $i (0, 1)
{
	my $from = 10000 * ($i + 1);
	append_to_file("$dir/$i.sql", qq[
\\set k random(1, 200)
begin;
insert into item values ($from + :k, 'new', 1) on conflict (id) do update set n = item.n + 1;
delete from item where id = $from + 1 + (:k * 7) % 200;
commit;
]);
	$nodes[$i]->safe_psql('postgres', "insert into item select $from + i, 'old', 0 from generate_series(1, 200, 2) i");
	push @benches, start_pgbench($nodes[$i], '-c', 2, '-t', 300, '-f', "$dir/$i.sql");
}
finish_pgbench($_) for @benches;
# Copied rows, each from one side.
$tokyo->safe_psql('postgres', q[update item set v = 'tokyo' where id between 31 and 33; delete from item where id = 34]);
$paris->safe_psql('postgres', q[update item set v = 'paris' where id between 36 and 37]);
converged(@nodes);
same_tables(\@nodes, 'item');
for my $node (@nodes)
{
	is($node->safe_psql('postgres', q[select count(*) from braid.conflict_history where not (key->>'id')::int between 36 and 37]), '0',
		'ordinary traffic is no conflict on ' . $node->name)
	  or diag($node->safe_psql('postgres', 'select kind, winner, reason, key, local_origin, remote_origin from braid.conflict_history limit 10'));
}

sub counted { return $_[0]->safe_psql('postgres', 'select sum(conflicts) from braid.subscription_detail'); }

# One step of a case, at a node; the clock moves on between any two.
sub at
{
	my ($where, $sql) = @_;
	$node{$where}->safe_psql('postgres', $sql);
	return;
}

# Each case has a row of its own. Every row was written by tokyo last, and paris has it as tokyo's.
my %case = (
	1 => 'insert against a newer insert',
	2 => 'insert against an older insert',
	3 => 'update against a newer update',
	4 => 'update against an older update',
	5 => 'update against a newer delete',
	6 => 'update against an older delete',
	7 => 'delete against delete',
	8 => 'delete and re-insert against an older update',
	9 => 'delete and re-insert against a newer update',
	10 => 'delete and re-insert around an update',
	11 => 'a new key against a newer insert',
	12 => 'a new key against an older insert',
	13 => 'delete against a newer delete and re-insert',
	14 => 'insert and delete against an older insert',
	15 => 'insert against an older insert and delete',
);
my $rows = '(3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13)';
at('tokyo', "delete from item where id <= 20; insert into item select i, 'tokyo before', 0 from generate_series(1, 20) i where i in $rows");
converged(@nodes);
on_all('truncate braid.conflict_record', @nodes);
my %counted = map { $_->name => counted($_) } @nodes;

# Dead rows are what tells of deletions: an old snapshot keeps them from being pruned while a case
# is under way.
my @keepers = map { $_->background_psql('postgres') } @nodes;
$_->query_safe('begin isolation level repeatable read; select count(*) from item') for @keepers;

for my $subscriber (@nodes)
{
	my $name = $name{ $subscriber->name };
	disable($subscriber, $name);
}
for my $provider (@nodes)
{
	ok($provider->poll_query_until('postgres', q[select not bool_or(active) from pg_replication_slots where slot_name !~ '^braid_deletions']), $provider->name . ' is not heard any more');
}

at('tokyo', q[insert into item values (1, 'tokyo', 1)]);
at('paris', q[insert into item values (1, 'paris', 2)]);

at('paris', q[insert into item values (2, 'paris', 1)]);
at('tokyo', q[insert into item values (2, 'tokyo', 2)]);

at('tokyo', q[update item set v = 'tokyo', n = 1 where id = 3]);
at('paris', q[update item set v = 'paris', n = 2 where id = 3]);

at('paris', q[update item set v = 'paris', n = 1 where id = 4]);
at('tokyo', q[update item set v = 'tokyo', n = 2 where id = 4]);

at('tokyo', q[update item set v = 'tokyo', n = 1 where id = 5]);
at('paris', q[delete from item where id = 5]);

at('paris', q[delete from item where id = 6]);
at('tokyo', q[update item set v = 'tokyo', n = 2 where id = 6]);

at('tokyo', q[delete from item where id = 7]);
at('paris', q[delete from item where id = 7]);

at('paris', q[update item set v = 'paris', n = 1 where id = 8]);
at('tokyo', q[begin; delete from item where id = 8; insert into item values (8, 'tokyo', 2); commit]);

at('tokyo', q[begin; delete from item where id = 9; insert into item values (9, 'tokyo', 1); commit]);
at('paris', q[update item set v = 'paris', n = 2 where id = 9]);

at('tokyo', q[delete from item where id = 10]);
at('paris', q[update item set v = 'paris', n = 2 where id = 10]);
at('tokyo', q[insert into item values (10, 'tokyo', 3)]);

at('tokyo', q[update item set id = 111, v = 'tokyo', n = 1 where id = 11]);
at('paris', q[insert into item values (111, 'paris', 2)]);

at('paris', q[insert into item values (112, 'paris', 1)]);
at('tokyo', q[update item set id = 112, v = 'tokyo', n = 2 where id = 12]);

at('tokyo', q[delete from item where id = 13]);
at('paris', q[begin; delete from item where id = 13; insert into item values (13, 'paris', 2); commit]);

at('paris', q[insert into item values (14, 'paris', 1)]);
at('tokyo', q[insert into item values (14, 'tokyo', 2)]);
at('tokyo', q[delete from item where id = 14]);

at('paris', q[insert into item values (15, 'paris', 1)]);
at('paris', q[delete from item where id = 15]);
at('tokyo', q[insert into item values (15, 'tokyo', 2)]);

# Both are connected again.
$_->safe_psql('postgres', "select braid.enable_subscription('$name{ $_->name }')") for @nodes;
converged(@nodes);
same_tables(\@nodes, 'item');
$_->quit for @keepers;

my %stays = (
	1 => 'paris|2', 2 => 'tokyo|2', 3 => 'paris|2', 4 => 'tokyo|2', 5 => '', 6 => 'tokyo|2', 7 => '', 8 => 'tokyo|2',
	9 => 'paris|2', 10 => 'tokyo|3', 11 => '', 12 => '', 13 => 'paris|2', 14 => '', 15 => 'tokyo|2', 111 => 'paris|2', 112 => 'tokyo|2',
);
for my $id (sort { $a <=> $b } keys %stays)
{
	my $what = $case{$id} // $case{ $id - 100 };
	is($_->safe_psql('postgres', "select v, n from item where id = $id"), $stays{$id}, "$what ($id): what stays on " . $_->name) for @nodes;
}

# kind, winner, v of both rows, both origins.
my $newer = 'the remote version is newer';
my $older = 'the local version is newer';
my $gone = 'the row was deleted here by a newer transaction';
my %met = (
	tokyo => {
		1 => "insert_exists|remote|tokyo|paris|tokyo|paris|$newer",
		2 => "insert_exists|local|tokyo|paris|tokyo|paris|$older",
		3 => "update_origin_differs|remote|tokyo|paris|tokyo|paris|$newer",
		4 => "update_origin_differs|local|tokyo|paris|tokyo|paris|$older",
		5 => "delete_origin_differs|remote|tokyo||tokyo|paris|$newer",
		6 => "delete_origin_differs|local|tokyo||tokyo|paris|$older",
		7 => 'delete_missing|local|||tokyo|paris|there is no row to delete',
		8 => "update_origin_differs|local|tokyo|paris|tokyo|paris|$older",
		9 => "update_origin_differs|remote|tokyo|paris|tokyo|paris|$newer",
		10 => "update_origin_differs|local|tokyo|paris|tokyo|paris|$older",
		111 => "insert_exists|remote|tokyo|paris|tokyo|paris|$newer",
		112 => "insert_exists|local|tokyo|paris|tokyo|paris|$older",
		13 => 'delete_missing|local|||tokyo|paris|there is no row to delete',
		14 => "update_deleted|local||paris|tokyo|paris|$gone",
		15 => "insert_exists|local|tokyo|paris|tokyo|paris|$older\ndelete_origin_differs|local|tokyo||tokyo|paris|$older",
	},
	paris => {
		1 => "insert_exists|local|paris|tokyo|paris|tokyo|$older",
		2 => "insert_exists|remote|paris|tokyo|paris|tokyo|$newer",
		3 => "update_origin_differs|local|paris|tokyo|paris|tokyo|$older",
		4 => "update_origin_differs|remote|paris|tokyo|paris|tokyo|$newer",
		5 => "update_deleted|local||tokyo|paris|tokyo|$gone",
		6 => 'update_deleted|remote||tokyo|paris|tokyo|the deletion here is older',
		7 => 'delete_missing|local|||paris|tokyo|there is no row to delete',
		8 => "delete_origin_differs|remote|paris||paris|tokyo|$newer",
		9 => "delete_origin_differs|local|paris||paris|tokyo|$older\ninsert_exists|local|paris|tokyo|paris|tokyo|$older",
		10 => "delete_origin_differs|local|paris||paris|tokyo|$older\ninsert_exists|remote|paris|tokyo|paris|tokyo|$newer",
		111 => "update_exists|local|paris|tokyo|paris|tokyo|$older",
		112 => "update_exists|remote|paris|tokyo|paris|tokyo|$newer",
		13 => "delete_origin_differs|local|paris||paris|tokyo|$older",
		14 => "insert_exists|remote|paris|tokyo|paris|tokyo|$newer",
		15 => '',
	},
);
for my $where (sort keys %met)
{
	for my $id (sort { $a <=> $b } keys %{ $met{$where} })
	{
		is($node{$where}->safe_psql('postgres', qq[
			select kind, winner, local_row->>'v', case when kind !~ '^delete' then remote_row->>'v' end, local_origin, remote_origin, reason
			from braid.conflict_history where key->>'id' = '$id' and resolution = 'last_update_wins' order by conflict_id
		]), $met{$where}{$id}, "$where wrote down: " . ($case{$id} // $case{ $id - 100 }));
	}
	my $others = join ',', keys %{ $met{$where} };
	is($node{$where}->safe_psql('postgres', "select count(*) from braid.conflict_history where coalesce((key->>'id')::int, 0) not in ($others)"), '0', 'and nothing else')
	  or diag($node{$where}->safe_psql('postgres', "select kind, winner, reason, key, local_row, remote_row from braid.conflict_history where coalesce((key->>'id')::int, 0) not in ($others)"));
	is($node{$where}->safe_psql('postgres', q[
		select count(*) from braid.conflict_history
		where remote_timestamp is null or remote_lsn is null or remote_xid is null
		   or (winner = 'remote' and remote_timestamp < local_timestamp)
		   or (winner = 'local' and kind <> 'delete_missing' and remote_timestamp > local_timestamp)
	]), '0', 'the versions say who is the winner');
	is(counted($node{$where}) - $counted{$where}, $node{$where}->safe_psql('postgres', 'select count(*) from braid.conflict_history'), 'as many as were counted');
}
# The history has whole rows, so that losing rows can be restored.
is($tokyo->safe_psql('postgres', q[select local_row from braid.conflict_history where key->>'id' = '5']), '{"n": 1, "v": "tokyo", "id": 5}', 'a lost row is kept whole');

done_testing();
