# A node with rows joins a group of two (mode data), while all three are written to, and processes are killed with SIGKILL in the
# middle. All of them end with the same rows: the newer one where a key is in both, nothing is truncated, and what has lost is in
# the history of the source. What can't be reconciled is refused before anything is changed.
# Majors: all

use strict;
use warnings;

use Braid;
use Group;
use Test::More;
use Time::HiRes qw(sleep time);

my @tables = ('item', 'part', 'visit');
my $shape = q{
	create table item (id bigint primary key, code text unique, v text, n int not null default 0);
	create table part (a int, b text, v numeric(10, 2), big text, primary key (a, b));
	create table visit (id bigserial primary key, v text);
};
my $rows = sub { my ($name, $from, $to) = @_; return qq{insert into item select i, '$name ' || i, '$name', 0 from generate_series($from, $to) i} };

my ($tokyo, $paris) = group([qw(tokyo paris)], qq{
	$shape
	insert into item select i, 'both ' || i, 'both', 0 from generate_series(1, 3000) i;
	insert into item select i, 'older ' || i, 'tokyo, older', 0 from generate_series(3001, 3500) i;
	insert into item values (9001, 'taken', 'tokyo, under another key');
	insert into part select i, 'b' || i, i / 7.0, repeat('x', 10) from generate_series(1, 200) i;
	insert into visit (v) select 'tokyo ' || i from generate_series(1, 100) i;
});
my $oslo = new_server('oslo', init => ['--data-checksums']);
sql($oslo, "create extension braid; $shape");
my @all = ($tokyo, $paris, $oslo);
sql($oslo, q{
	insert into item select i, 'both ' || i, 'both', 0 from generate_series(1, 3000) i;
	insert into item select i, 'older ' || i, 'oslo, newer', 0 from generate_series(3001, 3500) i;
	insert into item select i, 'mixed ' || i, 'oslo, older', 0 from generate_series(3501, 4000) i;
	insert into item select i, 'oslo ' || i, 'oslo only', 0 from generate_series(20001, 24000) i;
	insert into item values (9002, 'taken', 'oslo, under another key');
	insert into part select i, 'b' || i, i / 7.0, repeat('y', 20000) from generate_series(150, 400) i;
	insert into visit (v) select 'oslo ' || i from generate_series(1, 150) i;
});
sql($tokyo, q{insert into item select i, 'mixed ' || i, 'tokyo, newer', 0 from generate_series(3501, 4000) i});
sql($paris, q{insert into item select i, 'paris ' || i, 'paris only', 0 from generate_series(30001, 31000) i});
have_all($tokyo, $paris);

# Refusals.
my ($there, $here) = map { $_->connstr('postgres') } $tokyo, $oslo;
my $join = "select braid.join_group(\$d\$$there\$d\$, node_name => 'oslo', dsn => \$d\$$here\$d\$, mode => 'data')";
my $refused = sub {
	my ($node, $before, $after, $like, $what) = @_;
	sql($node, $before);
	like(refusal($oslo, $join), $like, $what);
	sql($node, $after);
	return;
};
$refused->($oslo, 'alter table item add column extra int', 'alter table item drop column extra', qr/another shape than at node "tokyo".*DETAIL:\s+Tables: public\.item.*HINT/s, 'a table of another shape');
$refused->($oslo, 'alter table visit drop constraint visit_pkey', 'alter table visit add primary key (id)', qr/shape|primary key/, 'a table without key');
$refused->($oslo, 'create table mine (id int primary key)', 'drop table mine', qr/does not have all tables of this database.*public\.mine/s, 'a table that the group lacks');
$refused->($oslo, 'alter table part rename to parts', 'alter table parts rename to part', qr/lacks tables of the group.*public\.part/s, 'a table that is missing here');
$refused->($oslo, 'create publication braid for table item where (id > 5), part, visit', 'drop publication braid', qr/does not publish all of its rows.*Publications.*braid/s, 'a row filter');
$refused->($oslo, 'alter table item replica identity full', 'alter table item replica identity default', qr/no primary key by which rows are found.*public\.item/s, 'rows that are found by all of their values');
$refused->($tokyo, q{select braid.begin_maintenance('paris')}, q{select braid.end_maintenance('paris')}, qr/not all members.*paris/s, 'a member that rests');
joined($paris);
is(sql($oslo, q{select (select count(*) from braid.group_self) + (select count(*) from braid.subscription) + (select count(*) from pg_replication_slots)}), '0', 'refusals leave nothing behind');
is(sql($tokyo, q{select count(*) from braid.group_nodes}), '2', 'nor at the group');

# All write, all the time: with keys of their own, of rows that all have, and of rows that only oslo has had.
my (%number, %count);
sub write_some
{
	for my $node (@all)
	{
		my $name = $node->name;
		my $i = ++$number{$name};
		my $own = 1000000 + 100000 * (index('tpo', substr($name, 0, 1)) + 1) + $i;
		my @statements = (
			"insert into item values ($own, '$name $own', '$name, during')",
			"update item set n = n + 1, v = '$name, during' where id = 1 + ($i * 37) % 4000",
			"update item set n = n + 1, v = '$name, during' where id = 20001 + ($i * 41) % 4000",
			"delete from item where id = 22000 - $i",
			"delete from item where id = 2999 - $i * 3 - length('$name')",
			"update part set v = v + 1 where a = 100 + $i % 300",
			"delete from part where a = 1 + ($i * 3 + length('$name')) % 400",
		);
		# Each by itself: a copy, a kill or another's lock may end one.
		for my $statement (@statements)
		{
			my ($status) = attempt($node, "set statement_timeout = '20s'; $statement");
			$count{$name}++ if $status == 0;
		}
	}
	return;
}
write_some() for 1 .. 3;
sql($oslo, $join);
my @kills = ([ $tokyo, 'braid group steps' ], [ $oslo, 'braid group steps' ], [ $oslo, 'braid copy' ], [ $tokyo, 'braid leader' ], [ $tokyo, 'braid group steps' ], [ $oslo, 'walsender' ]);
my (%seen, @killed);
my $end = time + 170;
while (time < $end)
{
	my $left = look($oslo, q{select coalesce(min(step) filter (where done_at is null), 99) from braid.join_step});
	last if defined $left && $left eq '99';
	write_some();
	next if !defined $left;
	my $where = $left . ' ' . (look($tokyo, q{select coalesce(string_agg(t.rows_compared::text, ' ' order by relation), '') from braid.group_merge_table t where done_at is null}) // '');
	# At each place once.
	next if $left < 6 || $seen{$where}++ || !@kills;
	my ($which, $pid);
	for my $place (0 .. $#kills)
	{
		my ($node, $kind) = @{ $kills[$place] };
		$pid = look($node, "select pid from pg_stat_activity where backend_type = '$kind' and datname = 'postgres' limit 1");
		if ($pid) { $which = $place; last; }
	}
	next if !$pid;
	my ($node, $kind) = @{ (splice @kills, $which, 1)[0] };
	kill 'KILL', $pid;
	push @killed, "$where: $kind of " . $node->name;
	sleep 0.2;
}
note(join ', ', @killed);
cmp_ok(scalar(@killed), '>=', 3, 'processes were killed meanwhile: ' . scalar(@killed));
joined(@all);
write_some() for 1 .. 5;
cmp_ok($count{$_}, '>', 20, "$_ was written to: $count{$_} times") for sort keys %count;
sql($_, "insert into item values (" . (9000000 + $_->port) . ", 'last " . $_->name . "', 'last')") for @all;
have_all(@all) for 1 .. 2;
same_tables(\@all, $_) for @tables;
is(sql($_, q{select count(*) from item where id > 9000000}), '3', 'all directions stream: ' . $_->name) for @all;

# What each has brought, and what it had in common.
my $one = sub { return sql($paris, $_[0]) };
is($one->(q{select count(*) from item where id between 3001 and 3500 and v not in ('oslo, newer') and v !~ 'during'}), '0', 'the newer row stays where it was oslo\'s');
is($one->(q{select count(*) from item where id between 3501 and 4000 and v not in ('tokyo, newer') and v !~ 'during'}), '0', 'and where it was tokyo\'s');
is($one->(q{select count(*) from item where id between 3001 and 4000}), '1000', 'none of both is lost');
is($one->(q{select count(*) from item where id between 22001 and 24000}), '2000', 'rows that only oslo had are there');
is($one->(q{select count(*) from item where id between 30001 and 31000}), '1000', 'rows that only paris had are there');
is($one->(q{select string_agg(v, ',') from item where code = 'taken'}), 'oslo, under another key', 'of two rows under a further key the newer one stays');
is($one->(q{select count(*) from part where a > 200 and big <> repeat('y', 20000)}), '0', 'large values are whole');
my $history = sub { return sql($tokyo, "select count(*) from braid.conflict_history where $_[0]") };
is($history->(q{local_row ->> 'v' = 'tokyo, older' and winner = 'remote'}) > 400 ? 'most' : 'few', 'most', 'rows of tokyo that lost are in its history');
is($history->(q{remote_row ->> 'v' = 'oslo, older' and winner = 'local'}) > 400 ? 'most' : 'few', 'most', 'rows of oslo that lost are, too');
is($history->(q{local_row ->> 'v' = 'tokyo, under another key'}), '1', 'and that which left for another one');
is($history->(q{local_row ->> 'v' = 'both' and remote_row ->> 'v' = 'both' and local_row ->> 'n' = remote_row ->> 'n'}), '0', 'rows that are equal are no conflict');

# Versions are the same everywhere, so what is written next has one outcome.
my $versions = q{select md5(string_agg(i.id || ' ' || v.committed_at || ' ' || v.node, ',' order by i.id)) from item i, braid.row_version(i.tableoid, i.ctid) v where i.id between 20001 and 24000};
is(sql($_, $versions), sql($tokyo, $versions), 'rows that oslo brought have one version: ' . $_->name) for $paris, $oslo;
is(sql($tokyo, q{select count(*) from item i, braid.row_version(i.tableoid, i.ctid) v where i.v = 'oslo only' and v.node = 'tokyo'}), sql($tokyo, q{select count(*) from item where v = 'oslo only'}), 'it is the source\'s');
ok($tokyo->poll_query_until('postgres', 'select count(*) = 0 from braid.group_merge'), 'nothing of it is left at the source');

# Numbers that rows have are not given again.
for my $node (@all)
{
	my ($status, $out, $err) = attempt($node, q{insert into visit (v) select 'after' from generate_series(1, 20)});
	is($status, 0, 'sequences go on after what is there: ' . $node->name) or diag($err);
}
have_all(@all);
same_tables(\@all, 'visit');
# What each writes next to rows of any origin comes everywhere.
for my $node (@all)
{
	sql($node, "update item set v = 'after, " . $node->name . "', n = n + 1");
	have_all(@all);
}
is(sql($_, q{select count(*) from item where v <> 'after, oslo'}), '0', 'the last one to write has written all: ' . $_->name) for @all;
same_tables(\@all, 'item');

# The same with a single node, which has nobody else to tell, and rows here of no known time.
my ($lima) = group(['lima'], q{create table item (id int primary key, v text); insert into item values (1, 'lima'), (2, 'both'), (3, 'lima, older')});
my $rome = new_server('rome', init => ['--data-checksums'], conf => "track_commit_timestamp = off\n");
sql($rome, q{create extension braid; create table item (id int primary key, v text); insert into item values (1, 'rome, no time'), (2, 'both')});
$rome->append_conf('postgresql.conf', "track_commit_timestamp = on\n");
$rome->restart;
sql($rome, q{insert into item values (3, 'rome, newer'), (4, 'rome')});
my ($lima_dsn, $rome_dsn) = map { $_->connstr('postgres') } $lima, $rome;
sql($rome, "select braid.join_group(\$d\$$lima_dsn\$d\$, node_name => 'rome', dsn => \$d\$$rome_dsn\$d\$, mode => 'data')");
joined($lima, $rome);
for my $node ($lima, $rome)
{
	is(sql($node, q{select string_agg(id || ' ' || v, ', ' order by id) from item}), '1 lima, 2 both, 3 rome, newer, 4 rome', 'what has no time is the older: ' . $node->name);
}
is(sql($lima, q{select winner || ' ' || (remote_row ->> 'v') from braid.conflict_history where key ->> 'id' = '1'}), 'local rome, no time', 'and is in the history');

done_testing();
