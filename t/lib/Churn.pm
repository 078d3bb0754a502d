# Tables of every kind, random changes of few of their rows, and a comparison of two nodes: for
# tests of how a backlog is applied.

package Churn;

use strict;
use warnings;

use Exporter 'import';
use Braid;
use Test::More;

our @EXPORT = qw(@keyed churn_tables backlog same_churn triggers_did next_xid sound);

# Tables that both nodes have. Each has a tally that counts its changes, so that the work of
# triggers can be compared with it.
our @keyed = qw(plain always replica checked generated defaulted parted expressed toasted texty composite);

# Creates the tables at the provider and at the subscriber, which also has triggers, CHECKs and so
# on.
sub churn_tables
{
	my ($provider, $subscriber) = @_;
	on_all(q[
		create table plain (k int primary key, v int, t text);
		create table always (k int primary key, v int, t text);
		create table replica (k int primary key, v int, t text);
		create table checked (k int primary key, v int, t text);
		create table generated (k int primary key, v int, t text);
		create table defaulted (k int primary key, v int, t text);
		create table parted (k int primary key, v int, t text) partition by range (k);
		create table parted_low partition of parted for values from (minvalue) to (20);
		create table parted_mid partition of parted for values from (20) to (1000);
		create table parted_high partition of parted for values from (1000) to (maxvalue);
		create table expressed (k int primary key, v int, t text);
		create table toasted (k int primary key, v int, t text);
		alter table toasted alter column t set storage external;
		create table texty (k text primary key, v int, t text);
		create table composite (k int, part text default 'x', v int, t text, primary key (part, k));
		create table whole (k int, v int, t text);
		alter table whole replica identity full;
		create table keyless (k int, v int, t text);
		create table cleared (k int primary key, v int);
		create table tally (name text primary key, n int not null);
	], $provider, $subscriber);
	$subscriber->safe_psql('postgres', q[
		create table fired (name text, op text);
		create function note() returns trigger language plpgsql as
		  $$ begin insert into public.fired values (tg_table_name, tg_op); return null; end $$;
		create trigger note after insert or update or delete on always for each row execute function note();
		alter table always enable always trigger note;
		alter table replica add column seen int not null default 0;
		create function seen() returns trigger language plpgsql as $$ begin new.seen := new.v * 3; return new; end $$;
		create trigger seen before insert or update on replica for each row execute function seen();
		alter table replica enable replica trigger seen;
		alter table checked add check (v >= 0), add check (k < 100000);
		alter table generated add column g int generated always as (v * 2) stored;
		alter table defaulted add column d int not null default 7, add column at timestamptz not null default now();
		create index on expressed (lower(t));
		create index on expressed (v) where v > 500;
		create unique index on expressed (k) where v > 100;
	]);
	$provider->safe_psql('postgres', q[
		insert into tally select unnest('{plain,always,replica,checked,generated,defaulted,parted,expressed,toasted,texty,composite,whole,keyless,cleared}'::text[]), 0;
		-- Random changes of few rows, each in a transaction of its own: so rows come, change, move, go and come again in one batch.
		create procedure churn(tables text[], rounds int) language plpgsql as $$
		declare
		  target text; a int; value int; done int; k text; big text;
		begin
		  for i in 1 .. rounds loop
		    target := tables[1 + floor(random() * cardinality(tables))];
		    a := 1 + floor(random() * 30);
		    value := floor(random() * 1000);
		    k := case when target = 'texty' then quote_literal('key ' || a) else a::text end;
		    big := case when target = 'toasted' then repeat(md5(value::text), 200) else 'T' || value end;
		    case floor(random() * 6)::int
		    when 0 then
		      execute format('delete from %I where k = %s', target, k);
		    when 1 then
		      -- To another key and back, where there is room.
		      execute format('update %1$I set k = %2$s, v = %3$s where k = %4$s and not exists (select from %1$I where k = %2$s)',
		        target, case when target = 'texty' then quote_literal('moved ' || a) else (a + 1000)::text end, value, k);
		    when 2 then
		      execute format('update %1$I set k = %4$s, v = %3$s where k = %2$s and not exists (select from %1$I where k = %4$s)',
		        target, case when target = 'texty' then quote_literal('moved ' || a) else (a + 1000)::text end, value, k);
		    when 3 then
		      execute format('update %I set v = %s where k = %s', target, value, k);
		    else
		      execute format('insert into %1$I (k, v, t) select %2$s, %3$s, %4$L where not exists (select from %1$I where k = %2$s)',
		        target, k, value, big);
		    end case;
		    get diagnostics done = row_count;
		    update tally set n = n + done where name = target;
		    commit;
		  end loop;
		end $$;
	]);
	$subscriber->safe_psql('postgres', 'create extension amcheck');
	return;
}

# Disables the subscription while the code runs: the provider's commits become a backlog.
sub backlog
{
	my ($provider, $subscriber, $name, $work) = @_;
	my $slot = $subscriber->safe_psql('postgres', "select slot_name from braid.subscription_detail where name = '$name'");
	$subscriber->safe_psql('postgres', "select braid.disable_subscription('$name')");
	$provider->poll_query_until('postgres', "select not active from pg_replication_slots where slot_name = '$slot'") or die 'still active';
	$work->();
	$subscriber->safe_psql('postgres', "select braid.enable_subscription('$name')");
	return;
}

# Tests that both nodes have the same contents of the tables.
sub same_churn
{
	my ($provider, $subscriber) = @_;
	for my $table (@keyed, qw(whole keyless cleared tally))
	{
		my $columns = $table eq 'tally' ? 'name, n' : $table eq 'composite' ? 'k, part, v, t' : $table eq 'cleared' ? 'k, v' : 'k, v, t';
		my $query = "select count(*), md5(string_agg(r::text, ',' order by r::text collate \"C\")) from (select $columns from $table) r";
		is($subscriber->safe_psql('postgres', $query), $provider->safe_psql('postgres', $query), "$table is the same");
	}
	return;
}

# Tests that the values that this node's triggers add are there.
sub triggers_did
{
	my ($provider, $subscriber) = @_;
	my $count = sub { $_[0]->safe_psql('postgres', "select $_[1]") };
	is($count->($subscriber, q['always ' || count(*) from fired where name = 'always']), $count->($provider, q['always ' || n from tally where name = 'always']),
		'a trigger that fires here fired once for each change');
	is($count->($subscriber, 'count(*) from replica where seen <> v * 3'), '0', 'one that changes rows did');
	is($count->($subscriber, 'count(*) from generated where g is distinct from v * 2'), '0', 'generated columns are');
	is($count->($subscriber, 'count(*) from defaulted where d <> 7 or at is null'), '0', 'defaults are');
	return;
}

sub next_xid { return $_[0]->safe_psql('postgres', 'select pg_snapshot_xmax(pg_current_snapshot())') }

# Tests that indexes have the contents of their tables.
sub sound
{
	my ($node, $when) = @_;
	is($node->safe_psql('postgres', q[
		select count(bt_index_check(i.indexrelid, true)::text) from pg_index i join pg_class c on c.oid = i.indexrelid
		join pg_class r on r.oid = i.indrelid
		where r.relnamespace = 'public'::regnamespace and c.relkind = 'i' and c.relam = (select oid from pg_am where amname = 'btree')
	]) > 10 ? 1 : 0, 1, "indexes are sound $when");
	return;
}

1;
