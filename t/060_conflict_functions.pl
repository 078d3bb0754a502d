# Conflict functions: each node makes the same row of two, in whichever order they came, with the
# same version. A merged row is not lost to the next change of a node that had not seen it. Other
# writes of the function stay here or go to the others.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
my @both = ($tokyo, $paris);
my $schema = q[
	create table label (id int primary key, tags text[], big text);
	create table account (id int primary key, n int, v text);
	alter table account replica identity full;
	create table split (id int, place text, n int, primary key (id, place)) partition by list (place);
	create table split_a (n int, place text not null, id int not null);
	alter table split attach partition split_a for values in ('a');
	create table seen (id int generated always as identity, node text, what text, primary key (id, node));
	create table word (id int primary key, word text not null unique);
	create table mention (id int primary key, word_id int not null);

	-- What either has.
	create function merge_label(local label, remote label, before label, info braid.conflict) returns label language sql stable as $$
		select row(coalesce((local).id, (remote).id),
			array(select distinct t from unnest((local).tags || (remote).tags) t order by t),
			greatest((local).big, (remote).big))::public.label
	$$;
	-- Both increments count; a deleted account stays deleted.
	create function merge_account(local account, remote account, before account, info braid.conflict) returns account language plpgsql as $$
	begin
		if local is null or remote is null then
			return null;
		end if;
		local.n := local.n + remote.n - coalesce(before.n, 0);
		local.v := greatest(local.v, remote.v);
		return local;
	end
	$$;
	create function largest(local split, remote split, before split, info braid.conflict) returns split language plpgsql as $$
	begin
		return case when local.n >= remote.n then local else remote end;
	end
	$$;
];
on_all($schema, @both);
subscribe($paris, $tokyo);
subscribe($tokyo, $paris);
on_all(q[
	select braid.set_conflict_resolution('label', kind, 'function', 'merge_label') from unnest('{insert_exists,update_origin_differs}'::text[]) kind;
	select braid.set_conflict_resolution('account', null, 'function', 'merge_account');
	select braid.set_conflict_resolution('split', null, 'function', 'largest');
], @both);
my @streams = ([ $paris, 'paris_from_tokyo' ], [ $tokyo, 'tokyo_from_paris' ]);

sub cut
{
	my (@which) = @_;
	@which = @streams unless @which;
	for (@which)
	{
		$_->[0]->safe_psql('postgres', "select braid.disable_subscription('$_->[1]')");
		my $provider = $_->[0] == $paris ? $tokyo : $paris;
		$provider->poll_query_until('postgres', "select not active from pg_replication_slots where slot_name like '%$_->[1]'") or die;
	}
	return;
}

sub heal
{
	$_->[0]->safe_psql('postgres', "select braid.enable_subscription('$_->[1]')") for @streams;
	converged(@both) for 1 .. 2;
	is(status(@$_)->{last_error}, '', "$_->[1] goes on") for @streams;
	return;
}

# One thing on tokyo, then another on paris, while nothing is delivered.
sub meet
{
	my ($first, $second) = @_;
	converged(@both);
	cut();
	$tokyo->safe_psql('postgres', $first);
	$paris->safe_psql('postgres', $second);
	heal();
	return;
}

sub both_have
{
	my ($table, $expected, $what) = @_;
	is(join(' / ', map { $_->safe_psql('postgres', "select coalesce(string_agg(t::text, ' ' order by t), '') from $table t") } @both),
		"$expected / $expected", $what);
	return;
}

# Updates, in either order of time, and inserts.
$tokyo->safe_psql('postgres', q[insert into label values (1, '{a}'), (2, '{a}')]);
meet(q[update label set tags = tags || '{t}' where id = 1], q[update label set tags = tags || '{p}' where id = 1]);
meet(q[insert into label values (3, '{t}')], q[insert into label values (3, '{p}')]);
both_have('label', '(1,"{a,p,t}",) (2,{a},) (3,"{p,t}",)', 'both changes are in the row, on both nodes');
is($tokyo->safe_psql('postgres', q[select kind, resolution, winner, local_row -> 'tags', remote_row -> 'tags' from braid.conflict_history where key = '{"id": 1}' order by conflict_id desc limit 1]),
	'update_origin_differs|function|merged|"{a,t}"|"{a,p}"', 'the history has both');

# The writer of the newer version has not seen the older one, and goes on.
converged(@both);
cut([ $tokyo, 'tokyo_from_paris' ]);
$paris->safe_psql('postgres', q[update label set tags = tags || '{p}' where id = 2]);
$tokyo->safe_psql('postgres', q[update label set tags = tags || '{t}' where id = 2]);
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select tags from label where id = 2'), '{a,p,t}', 'merged where the older one was');
$tokyo->safe_psql('postgres', q[update label set tags = tags || '{u}' where id = 2]);
$tokyo->safe_psql('postgres', q[update label set tags = tags || '{v}' where id = 2; update label set tags = tags || '{w}' where id = 2]);
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select tags from label where id = 2'), '{a,p,t,u,v,w}', 'and kept when the other goes on');
heal();
both_have('label', '(1,"{a,p,t}",) (2,"{a,p,t,u,v,w}",) (3,"{p,t}",)', 'then the other has it too');

# With the row as its writer saw it: increments count, and a change of what the other has is no
# conflict.
$tokyo->safe_psql('postgres', q[insert into account values (1, 100, 'a')]);
meet(q[update account set n = n + 5 where id = 1], q[update account set n = n + 7, v = 'b' where id = 1]);
both_have('account', '(1,112,b)', 'both increments count');
my $before = $tokyo->safe_psql('postgres', q[select count(*) from braid.conflict_history where relation = 'account'::regclass]);
for my $node (@both, @both)
{
	$node->safe_psql('postgres', 'update account set n = n + 1 where id = 1');
	converged(@both);
}
both_have('account', '(1,116,b)', 'one after the other');
is($tokyo->safe_psql('postgres', q[select count(*) from braid.conflict_history where relation = 'account'::regclass]), $before, 'is no conflict');
meet(q[begin; update account set n = n + 1 where id = 1; update account set n = n + 2 where id = 1; commit; update account set n = n + 3 where id = 1],
	q[update account set n = n + 10 where id = 1; begin; update account set n = n + 20 where id = 1; update account set n = n + 30 where id = 1; commit]);
both_have('account', '(1,182,b)', 'several in a row, in one transaction and in several');

# Null: the row goes; on both, whichever was newer.
$tokyo->safe_psql('postgres', q[insert into account values (2, 1, 'x'), (3, 1, 'x')]);
meet(q[delete from account where id = 2; update account set n = 2 where id = 3], q[update account set n = 2 where id = 2; delete from account where id = 3]);
both_have('account', '(1,182,b)', 'a function that keeps deleted rows deleted');
$tokyo->safe_psql('postgres', q[delete from label where id = 1]);
converged(@both);
meet(q[delete from label where id = 2; update label set tags = tags || '{x}' where id = 3], q[update label set tags = tags || '{x}' where id = 2; delete from label where id = 3]);
both_have('label', '(2,"{a,p,t,u,v,w,x}",)', 'and the newer one, by another rule for that kind');

# Partitions have columns in another order.
$tokyo->safe_psql('postgres', q[insert into split values (1, 'a', 5)]);
meet(q[update split set n = 9 where id = 1], q[update split set n = 7 where id = 1]);
both_have('split', '(1,a,9)', 'a partition, with the function of its table');
meet(q[update split set n = 10 where id = 1], q[update split set n = 20 where id = 1]);
both_have('split', '(1,a,20)', 'in the other order');
is($tokyo->safe_psql('postgres', q[select string_agg(winner, ' ' order by conflict_id) from braid.conflict_history where relation = 'split_a'::regclass]), 'local remote',
	'whose row it is');

# Rows that the function writes stay here, or go to the others.
on_all(q[
	create function telling(local account, remote account, before account, info braid.conflict) returns account language plpgsql
	set search_path = public as $$
	begin
		insert into seen (node, what)
		  select name, concat_ws(' ', info.kind, info.key, info.local_origin, info.remote_origin, info.local_timestamp < info.remote_timestamp)
		    from braid.nodes where is_local;
		return merge_account(local, remote, before, info);
	end
	$$;
	select braid.set_conflict_resolution('account', null, 'function', 'telling');
], @both);
$tokyo->safe_psql('postgres', q[insert into account values (4, 1, 'x')]);
meet(q[update account set n = n + 1 where id = 4], q[update account set n = n + 1 where id = 4]);
both_have('account', '(1,182,b) (4,3,x)', 'a function that writes');
is($tokyo->safe_psql('postgres', 'select node, what from seen order by node'), 'tokyo|update_origin_differs {"id": 4} tokyo paris t', 'what it wrote stays here');
is($paris->safe_psql('postgres', 'select node, what from seen order by node'), 'paris|update_origin_differs {"id": 4} paris tokyo f', 'and there');
on_all(q[truncate seen; select braid.set_conflict_resolution('account', null, 'function', 'telling', replicate => true)], @both);
converged(@both);
meet(q[update account set n = n + 1 where id = 4], q[update account set n = n + 1 where id = 4; update account set v = 'y' where id = 4]);
both_have('account', '(1,182,b) (4,5,y)', 'with writes that are sent on');
same_tables(\@both, 'seen');
is($tokyo->safe_psql('postgres', 'select node, count(*) from seen group by node order by node'), "paris|1\ntokyo|2", 'once for each time that rows met');
my $often = join ' ', map { 'update account set n = n + 1 where id = 4;' } 1 .. 4;
meet("begin; $often commit", "begin; $often commit");
both_have('account', '(1,182,b) (4,13,y)', 'one row several times in a transaction');
same_tables(\@both, 'seen');
is($tokyo->safe_psql('postgres', 'select node, count(*) from seen group by node order by node'), "paris|5\ntokyo|6", 'once for each');
is(join(' ', map { $_->safe_psql('postgres', 'select count(*) from braid.conflict_call') } @both), '0 0', 'no note is left');

# In chunks: a row that one chunk has merged is merged by the next one too. The function is called
# once for each.
$_->[0]->safe_psql('postgres', "select braid.alter_subscription('$_->[1]', split_transactions_above => 2)") for @streams;
$tokyo->safe_psql('postgres', q[insert into label select i, '{}' from generate_series(11, 13) i; insert into account select i, 0, '' from generate_series(11, 13) i]);
sub in_pieces
{
	my ($tag) = @_;
	my $steps = join ' ', map { my $step = $_; map { "update label set tags = tags || '{$tag$step}' where id = $_;" } 11 .. 13 } 1 .. 3;
	return "begin; $steps commit";
}
meet(in_pieces('t'), in_pieces('p'));
my $all_tags = join ',', map { my $tag = $_; map { "$tag$_" } 1 .. 3 } qw(p t);
is(join(' / ', map { $_->safe_psql('postgres', q[select string_agg(distinct tags::text, ' ') from label where id between 11 and 13]) } @both),
	"{$all_tags} / {$all_tags}", 'pieces of one transaction, merged by each node');
on_all('truncate seen', @both);
converged(@both);
my $increments = join ' ', map { map { "update account set n = n + 1 where id = $_;" } 11, 11, 12, 13 } 1 .. 3;
meet("begin; $increments commit", "begin; $increments commit");
is(join(' ', map { $_->safe_psql('postgres', q[select string_agg(n::text, ',' order by id) from account where id between 11 and 13]) } @both), '12,6,6 12,6,6',
	'increments count in pieces that were applied again');
same_tables(\@both, 'seen');
is($tokyo->safe_psql('postgres', 'select node, count(*) from seen group by node order by node'), "paris|12\ntokyo|12", 'each once');
is(join(' ', map { $_->safe_psql('postgres', 'select count(*) from braid.conflict_call') } @both), '0 0', 'no note is left of them');
cmp_ok($_->safe_psql('postgres', 'select sum(pieces) from braid.dependency_stats'), '>', 5, $_->name . ' has applied pieces') for @both;
$_->[0]->safe_psql('postgres', "select braid.alter_subscription('$_->[1]', split_transactions_above => 0)") for @streams;

# The same word on both nodes under two ids: the smaller one stays, mentions of the other go to it,
# everywhere.
on_all(q[
	create function one_word(local word, remote word, before word, info braid.conflict) returns word language plpgsql
	set search_path = public as $$
	declare
		winner word := case when local.id <= remote.id then local else remote end;
		loser word := case when local.id <= remote.id then remote else local end;
	begin
		update mention set word_id = winner.id where word_id = loser.id;
		return winner;
	end
	$$;
	select braid.set_conflict_resolution('word', null, 'function', 'one_word', replicate => true);
], @both);
meet(q[insert into word values (1, 'braid'); insert into mention values (10, 1), (11, 1)], q[insert into word values (2, 'braid'); insert into mention values (20, 2), (21, 2)]);
both_have('word', '(1,braid)', 'the same word stays once');
both_have('mention', '(10,1) (11,1) (20,1) (21,1)', 'and all mentions are of it');
meet(q[insert into word values (4, 'rope'); insert into mention values (40, 4)], q[insert into word values (3, 'rope'); insert into mention values (30, 3)]);
both_have('word', '(1,braid) (3,rope)', 'whoever came first');
both_have('mention', '(10,1) (11,1) (20,1) (21,1) (30,3) (40,3)', 'with its mentions');

# Under load, in every apply mode: changes of the same rows on both, all the time.
$tokyo->safe_psql('postgres', q[insert into account select i, 0, '' from generate_series(101, 120) i; insert into label select i, '{}' from generate_series(101, 120) i]);
on_all(q[select braid.set_conflict_resolution('account', null, 'function', 'merge_account')], @both);
converged(@both);
my $script = $tokyo->basedir . '/add.sql';
append_to_file($script, <<'SQL');
\set i random(101, 120)
\set j random(101, 120)
\set k random(1, 60)
begin;
update account set n = n + 1 where id = :i;
update label set tags = array(select distinct unnest(tags || :k::text) order by 1) where id = :j;
commit;
SQL
my $done = 0;
for my $mode (q('parallel'), q('batch', consolidate => true), q('aggregate'), q('parallel', commit_order => 'relaxed'))
{
	$_->[0]->safe_psql('postgres', "select braid.alter_subscription('$_->[1]', apply_mode => $mode)") for @streams;
	my @running = map { start_pgbench($_, '-c', 2, '-T', 4, '-f', $script) } @both;
	$done += finish_pgbench($_) for @running;
	converged(@both) for 1 .. 2;
	is(join(' ', map { $_->safe_psql('postgres', 'select sum(n) from account where id > 100') } @both), "$done $done", "all increments count on both, $mode");
	same_tables(\@both, 'account', 'label');
}
cmp_ok($paris->safe_psql('postgres', q[select count(*) from braid.conflict_history where winner = 'merged']), '>', 5, 'there were conflicts');

# A third node gets the changes of two others in another order than they do.
my $berlin = new_node('berlin');
my @all = (@both, $berlin);
$berlin->safe_psql('postgres', $schema);
subscribe($berlin, $tokyo);
subscribe($berlin, $paris, copy_data => 'false');
subscribe($_, $berlin, copy_data => 'false') for @both;
$berlin->safe_psql('postgres', q[
	select braid.set_conflict_resolution('label', kind, 'function', 'merge_label') from unnest('{insert_exists,update_origin_differs}'::text[]) kind;
	select braid.set_conflict_resolution('account', null, 'function', 'merge_account');
]);
converged(@all);
my @running = map { start_pgbench($_, '-c', 2, '-T', 5, '-f', $script) } @all;
$done += finish_pgbench($_) for @running;
converged(@all) for 1 .. 2;
is(join(' ', map { $_->safe_psql('postgres', 'select sum(n) from account where id > 100') } @all), "$done $done $done", 'all increments count on three nodes');
same_tables(\@all, 'account', 'label');

done_testing();
