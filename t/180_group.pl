# A group: created at one node, joined by others with one call each, while all of them are written
# to; two that join at once; refused calls; leaving, removing, and giving up.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
# The error of a statement, its detail and hint.
sub refusal
{
	my ($node, $sql) = @_;
	my ($status, $out, $err) = $node->psql('postgres', $sql);
	return $status == 0 ? "no error: $out" : $err;
}
# Each by an initdb of its own: servers that begin as copies of one are not believed to be several.
sub empty_server { my ($name) = @_; my $node = new_server($name, init => ['--data-checksums']); sql($node, 'create extension braid'); return $node; }
sub dsn { my ($node) = @_; return $node->connstr('postgres'); }
sub create { my ($node, $more) = @_; my $dsn = dsn($node); return 'select braid.create_group($$shop$$, ' . "node_name => '" . $node->name . "', dsn => \$d\$$dsn\$d\$" . ($more // '') . ')'; }
sub join_by
{
	my ($node, $member, $more) = @_;
	my ($there, $here) = (dsn($member), dsn($node));
	return "select braid.join_group(\$d\$$there\$d\$, node_name => '" . $node->name . "', dsn => \$d\$$here\$d\$" . ($more // '') . ')';
}
sub joined
{
	my (@all) = @_;
	for my $node (@all)
	{
		my ($status, $out, $err) = $node->psql('postgres', "select braid.wait_for_group('180 s')");
		is($err, '', $node->name . ' is in the group')
		  or diag(sql($node, 'table braid.join_progress') . "\n" . sql($node, 'table braid.group_nodes'));
	}
	return;
}
# Each has all that each other one has committed by now.
sub caught_up_all
{
	my (@all) = @_;
	for my $node (@all)
	{
		for my $other (@all)
		{
			next if $node == $other;
			my $position = sql($other, 'select braid.sync_event()');
			sql($node, "select braid.wait_for_event('" . $other->name . "', '$position', '180 s')");
		}
	}
	return;
}
sub all_have
{
	my (@all) = @_;
	caught_up_all(@all) for 1 .. 2;
	same_tables(\@all, 'item', 'public.customer', 'shop.customer', 'purchase');
	return;
}

my $tokyo = empty_server('tokyo');
my $paris = empty_server('paris');
my $oslo = empty_server('oslo');
my $lima = empty_server('lima');

sql($tokyo, q{
	create type mood as enum ('glad', 'sad');
	create schema shop;
	create table shop.customer (id uuid primary key default gen_random_uuid(), name text not null, state mood default 'glad');
	alter database postgres set search_path = public, shop;
	create table public.customer (id int primary key, name text);
	create table item (id bigint primary key, v text, n int not null default 0);
	create table purchase (id bigint primary key, item bigint references item, at timestamptz default now());
	create function loud() returns trigger language plpgsql as $f$ begin new.v := upper(new.v); return new; end $f$;
	create trigger loud before insert on item for each row execute function loud();
	create view cheap as select * from item where n < 10;
	insert into item select i, 'row ' || i from generate_series(1, 20000) i;
	insert into public.customer select i, 'c' || i from generate_series(1, 1000) i;
	insert into purchase select i, i from generate_series(1, 1000) i;
});

# Refused calls, which leave nothing behind.
like(refusal($tokyo, 'select braid.leave_group()'), qr/not a member of a group.*HINT:  Create one with braid.create_group/s, 'no group yet');
like(refusal($paris, join_by($paris, $tokyo)), qr/HINT/, 'a member that is no node');
sql($tokyo, create($tokyo));
joined($tokyo);
is(sql($tokyo, 'select name, state, role, is_local, leads, reachable from braid.group_nodes'), 'tokyo|active|data|t|t|t', 'a group of one');
like(refusal($tokyo, create($tokyo)), qr/is a member of group "shop" already/, 'it is in one group at a time');
like(refusal($tokyo, join_by($tokyo, $paris)), qr/is a member of group "shop" already/, 'and can not join another');
my $leads_back = dsn($tokyo);
like(refusal($paris, "select braid.join_group('host=127.0.0.1 port=1 dbname=x', node_name => 'paris', dsn => 'dbname=postgres')"), qr/HINT/, 'nobody there');
like(refusal($paris, "select braid.join_group(\$d\$$leads_back\$d\$, node_name => 'paris', dsn => 'dbname=postgres', mode => 'wild')"), qr/invalid mode "wild".*HINT/s, 'a mode that is none');
like(refusal($paris, "select braid.join_group(\$d\$$leads_back\$d\$)"), qr/node_name must not be null.*HINT/s, 'a node needs a name');
like(refusal($paris, "select braid.join_group(\$d\$$leads_back\$d\$, node_name => 'tokyo', dsn => 'dbname=postgres')"), qr/"tokyo".*HINT/s, 'a name that is taken');
sql($lima, 'create table item (id int)');
like(refusal($lima, join_by($lima, $tokyo)), qr/has tables already.*Tables: public.item.*mode => 'schema'/s, 'a database that is not empty');
sql($lima, 'drop table item');
sql($paris, 'create role someone; grant braid_admin to someone');
like(refusal($paris, 'set role someone; ' . join_by($paris, $tokyo)), qr/permission denied to change the group.*HINT/s, 'not a superuser');
is(sql($_, 'select (select count(*) from braid.node), (select count(*) from braid.group_self), (select count(*) from braid.subscription), (select count(*) from pg_replication_slots)'), '0|0|0|0',
	'nothing is left behind on ' . $_->name) for $paris, $lima;
is(sql($tokyo, 'select count(*) from braid.group_member'), '1', 'nor at the member');

# One joins while the first is written to.
my $script = $tokyo->basedir . '/write.sql';
append_to_file($script, <<'SQL');
\set id random(1, 20000)
update item set n = n + 1 where id = :id;
insert into item values (:client_id * 1000000 + 100000 + (random() * 800000)::int, 'new') on conflict do nothing;
delete from item where id = :id + 100000;
SQL
my $bench = start_pgbench($tokyo, '-T', 20, '-c', 2, '-R', 200, '-f', $script);
sql($paris, join_by($paris, $tokyo));
joined($paris, $tokyo);
is(sql($paris, q{select count(*) filter (where state = 'done') || '/' || count(*), max(steps) from braid.join_progress}), '10/10|10', 'all steps are done');
is(sql($paris, "select string_agg(name || ' ' || state || ' ' || coalesce(subscription, '-'), ', ' order by name) from braid.group_nodes"), 'paris active -, tokyo active paris_from_tokyo', 'both are active');
sql($paris, q{insert into item values (5000001, 'from paris')});
sql($paris, q{insert into shop.customer (name, state) values ('there', 'sad')});
caught_up_all($tokyo, $paris);
is(sql($tokyo, q{select state from shop.customer}), 'sad', 'types came along');

# Two at once, by different members.
sql($oslo, join_by($oslo, $paris));
sql($lima, join_by($lima, $tokyo));
my @all = ($tokyo, $paris, $oslo, $lima);
joined(@all);
finish_pgbench($bench);
sql($_, "insert into item values (" . (6000000 + $_->port) . ", '" . $_->name . "')") for @all;
all_have(@all);
is(sql($_, "select count(*) from item where id > 6000000"), '4', 'each has what each wrote: ' . $_->name) for @all;
sql($paris, q{alter table item add column note text default 'none'; create table later (id int primary key); insert into later values (1)});
sql($oslo, q{update item set note = 'oslo' where id = 1}) if $oslo->poll_query_until('postgres', q{select exists (select from pg_attribute where attrelid = 'item'::regclass and attname = 'note')});
all_have(@all);
same_tables(\@all, 'later');
is(sql($_, 'select note from item where id = 1'), 'oslo', 'a column that was added is everywhere: ' . $_->name) for @all;
is(sql($_, 'select count(*) from braid.group_nodes where state = $$active$$ and reachable'), '4', 'all see all: ' . $_->name) for @all;
is(sql($_, 'select count(*) from braid.subscription'), '3', 'a subscription to each: ' . $_->name) for @all;
is(sql($_, q{select count(*) from pg_replication_slots where plugin = 'braid' and slot_name !~ '^braid_(deletions|kept)'}), '3', 'and a slot for each: ' . $_->name) for @all;
is(sql($tokyo, 'select count(*) filter (where leads) from braid.group_nodes'), '1', 'one leads');

# A leaving member hands over the changes that the others lack.
sql($lima, q{insert into item select 7000000 + i, 'last words' from generate_series(1, 1000) i});
sql($lima, 'select braid.leave_group()');
ok($lima->poll_query_until('postgres', 'select not exists (select from braid.group_self) and not exists (select from braid.subscription)'), 'lima has left');
for my $node ($tokyo, $paris, $oslo)
{
	ok($node->poll_query_until('postgres', q{select count(*) = 3 from braid.group_nodes}), $node->name . ' knows');
	ok($node->poll_query_until('postgres', q{select count(*) = 2 from braid.subscription}), 'and has dropped its subscription');
	is(sql($node, 'select count(*) from item where id > 7000000'), '1000', 'all that it wrote is there');
}
ok($lima->poll_query_until('postgres', q{select count(*) = 0 from pg_replication_slots where slot_name !~ '^braid_(deletions|kept)'}), 'no slot stays there');

# A member that is dead is removed, by a majority.
$oslo->stop('immediate');
like(refusal($tokyo, "select braid.remove_node('rome')"), qr/group "shop" has no node "rome".*HINT/s, 'who is not there can not be removed');
like(refusal($tokyo, "select braid.remove_node('tokyo')"), qr/cannot remove itself.*HINT/s, 'nor oneself');
ok($tokyo->poll_query_until('postgres', q{select not reachable from braid.group_nodes where name = 'oslo'}), 'it is seen to be away');
sql($tokyo, "select braid.remove_node('oslo')");
for my $node ($tokyo, $paris)
{
	ok($node->poll_query_until('postgres', q{select count(*) = 2 from braid.group_nodes}), $node->name . ': oslo is removed');
	ok($node->poll_query_until('postgres', q{select count(*) = 1 from braid.subscription}), 'with its subscription');
	ok($node->poll_query_until('postgres', q{select count(*) = 1 from pg_replication_slots where plugin = 'braid' and slot_name !~ '^braid_(deletions|kept)'}), 'and its slot');
}
# When it comes back, it learns of the removal.
$oslo->start;
ok($oslo->poll_query_until('postgres', q{select message ~ 'removed' from braid.group_nodes where is_local}), 'oslo knows that it was removed')
  or diag(sql($oslo, 'table braid.group_nodes'));
sql($oslo, 'select braid.forget_group()');
is(sql($oslo, 'select count(*) from braid.group_nodes'), '0', 'it forgets the group');

# Without a majority nothing is agreed, and the error names the missing members. Data still flows.
$paris->stop('fast');
ok($tokyo->poll_query_until('postgres', q{select message ~ 'no majority: waiting for members paris' from braid.group_nodes where is_local}), 'no majority, says the view')
  or diag(sql($tokyo, 'table braid.group_nodes'));
sql($tokyo, q{insert into item values (8000000, 'alone')});
like(refusal($lima, "select braid.drop_node('lima'); drop schema shop cascade; drop table item cascade; drop table public.customer cascade; drop table purchase cascade; drop table later; drop function loud cascade; drop type if exists mood; " . join_by($lima, $tokyo)),
	qr/not agreed in time.*paris.*HINT/s, 'nobody can join, and the error says why');
is(sql($lima, 'select count(*) from braid.group_self'), '0', 'nothing is left behind');
$paris->start;
joined($tokyo, $paris);
all_have($tokyo, $paris);

# Giving up.
sql($lima, 'create table item (id bigint primary key, v text, n int not null default 0, note text); create table later (id int primary key); create table customer (id int primary key, name text); create schema shop; create type mood as enum ($$glad$$, $$sad$$);
	create table shop.customer (id uuid primary key, name text not null, state mood); create table purchase (id bigint primary key, item bigint, at timestamptz)');
sql($lima, 'alter system set max_replication_slots = 10');
sql($lima, join_by($lima, $tokyo, q{, mode => 'schema'}));
my ($status, $out, $err) = $lima->psql('postgres', 'select braid.abort_join()');
ok($err eq '' || $err =~ /has joined group/, 'a join is given up, or was over') or diag($err);
if ($err eq '')
{
	is(sql($lima, 'select (select count(*) from braid.group_self), (select count(*) from braid.subscription)'), '0|0', 'nothing is left of it');
	for my $node ($tokyo, $paris)
	{
		ok($node->poll_query_until('postgres', q{select count(*) = 2 from braid.group_nodes}), 'nor at ' . $node->name);
	}
}

done_testing();
