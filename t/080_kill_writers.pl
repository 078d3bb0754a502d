# kill -9 of random processes of two nodes that both write the same rows: increments that add up,
# tags that a conflict function joins, another function that writes, and rows that the last writer
# wins. In the end both nodes have the same, and each committed increment and tag counts once.

use strict;
use warnings;

use Braid;
use Kill;
use Test::More;

kill_seed();
my @both = my ($tokyo, $paris) = map { new_node($_, conf => "braid.apply_buffer_size = 1MB\n") } qw(tokyo paris);
on_all(q[
	create table ledger (id bigint primary key, k int not null, node text not null);
	create table counter (k int primary key, n bigint not null, high bigint not null, who text);
	alter table counter replica identity full;
	create table label (k int primary key, tags bigint[] not null);
	create table account (k int primary key, n bigint not null);
	create table asked (node text, number bigint generated always as identity, k int not null, primary key (node, number));
	create table item (k int primary key, n int not null, who text);
	create function join_tags(local label, remote label, before label, info braid.conflict) returns label language sql stable as $$
		select row((local).k, array(select distinct t from unnest((local).tags || (remote).tags) t order by t))::public.label
	$$;
	-- Writes down that it was asked, for both nodes to see.
	create function ask(local account, remote account, before account, info braid.conflict) returns account language plpgsql set search_path = public as $$
	begin
		insert into asked (node, k) select name, (local).k from braid.nodes where is_local;
		return case when local.n >= remote.n then local else remote end;
	end
	$$;
], @both);
on_all('create sequence ledger_id increment by 2 start with ' . ($_ == $tokyo ? 1 : 2), $_) for @both;
$tokyo->safe_psql('postgres', q[
	insert into counter select k, 0, 0 from generate_series(1, 20) k;
	insert into label select k, '{}' from generate_series(1, 20) k;
	insert into account select k, 0 from generate_series(1, 20) k;
]);
my $from_tokyo = subscribe($paris, $tokyo);
my $from_paris = subscribe($tokyo, $paris, apply_mode => q['batch'], copy_data => 'false');
on_all(q[
	select braid.set_column_rule('counter', 'n', 'delta'), braid.set_column_rule('counter', 'high', 'max');
	select braid.set_conflict_resolution('label', 'update_origin_differs', 'function', 'join_tags');
	select braid.set_conflict_resolution('account', 'update_origin_differs', 'function', 'ask', replicate => true);
], @both);

for my $node (@both)
{
	my $name = $node->name;
	start_load($node, qq[
\\set k random(1, 20)
\\set i random(1, 60)
begin;
insert into ledger values (nextval('ledger_id'), :k, '$name');
update counter set n = n + 1, high = greatest(high, currval('ledger_id')), who = '$name' where k = :k;
commit;
begin;
insert into ledger values (nextval('ledger_id'), 1000 + :k, '$name');
update label set tags = array(select t from unnest(tags || currval('ledger_id')) t order by t) where k = :k;
update account set n = n + 1 where k = :k;
commit;
insert into item values (:i, 1, '$name') on conflict (k) do update set n = item.n + 1, who = excluded.who;
delete from item where k = :i + 1;
] => '-c 2 -R 40');
}

my @kinds = map { [ $_, 'braid applier' ], [ $_, 'braid leader' ], [ $_, 'walsender' ], [ $_, 'braid applier' ], [ $_, 'postmaster' ], [ $_, 'braid manager' ], [ $_, 'braid collector' ] } @both;
start_checkpoints(@both);
my $seconds = $ENV{BRAID_TEST_SECONDS} // 20;
kill_processes('both write', between => \@both, kinds => \@kinds, seconds => $seconds, at_least => int($seconds / 3));
goes_on('both write', $from_tokyo, $tokyo, $paris);
goes_on('both write', $from_paris, $paris, $tokyo);
# On a slow machine the kills leave little time for the load between them.
for my $node (@both)
{
	my $written = "select count(*) > 200 from ledger where node = '" . $node->name . "'";
	ok(wait_until(sub { $node->safe_psql('postgres', $written) eq 't' }, 120), 'there was load at ' . $node->name);
}
stop_load();
# Rows that a function has written go to the other node, whose function may write in turn.
converged(@both) for 1 .. 2;

same_tables(\@both, qw(ledger counter label account asked item));
for my $node (@both)
{
	my $name = $node->name;
	is($node->safe_psql('postgres', q[
		select count(*) from counter c, lateral (select count(*), coalesce(max(id), 0) as high from ledger l where l.k = c.k) as added
		 where (c.n, c.high) is distinct from (added.count, added.high)]), '0', "each increment counts once, on $name");
	is($node->safe_psql('postgres', q[select count(*) from label t where tags is distinct from array(select id from ledger l where l.k = 1000 + t.k order by id)]),
		'0', "each tag is there once, on $name");
	cmp_ok($node->safe_psql('postgres', q[select count(*) from braid.conflict_stats where relation::text in ('counter', 'label', 'account', 'item')]), '>', 3, "rows met on $name");
	ok(wait_until(sub { $node->safe_psql('postgres', 'select count(*) from braid.conflict_call') == 0 }, 90), "no note of a function is left on $name");
}
cmp_ok($tokyo->safe_psql('postgres', 'select count(*) from asked'), '>', 0, 'functions wrote');

done_testing();
