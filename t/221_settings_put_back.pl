# Functions and hooks of Braid that need settings of their own restore those of the session: with
# work to do, without work, and after an error.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Session;
use Test::More;

my $conf = "search_path = 'app, public'\n";
my $tokyo = new_node('tokyo', conf => $conf);
my $paris = new_node('paris', conf => $conf);
my @both = ($tokyo, $paris);
on_all(q[
	create table item (id int primary key, v text, n int);
	create schema app;
], @both);
subscribe($paris, $tokyo);
subscribe($tokyo, $paris, copy_data => 'false');

# All settings of a session.
my $settings = q[select md5(string_agg(format('%s=%s', name, setting), ' ' order by name)) from pg_settings where name !~ '^(transaction_|in_hot)'];

# restore_conflict: an update, a delete, an insert, each also without work to do, and with a failure
# within a block that goes on.
$tokyo->safe_psql('postgres', q[insert into item values (1, 'old', 0), (2, 'old', 0), (3, 'old', 0)]);
converged(@both);
disable($tokyo, 'tokyo_from_paris');
disable($paris, 'paris_from_tokyo');
$tokyo->safe_psql('postgres', q[update item set v = 'tokyo' where id = 1; delete from item where id = 2; update item set v = 'tokyo' where id = 3]);
$paris->safe_psql('postgres', q[update item set v = 'paris' where id = 1; update item set v = 'paris' where id = 2; delete from item where id = 3]);
$_->[0]->safe_psql('postgres', "select braid.enable_subscription('$_->[1]')") for [ $tokyo, 'tokyo_from_paris' ], [ $paris, 'paris_from_tokyo' ];
converged(@both);
my %of = map { split /=/ } split /\n/, $tokyo->safe_psql('postgres',
	q[select (key ->> 'id') || '=' || max(conflict_id) from braid.conflict_history where relation = 'item'::regclass group by key ->> 'id']);
is(join(' ', sort keys %of), '1 2 3', 'a conflict of each row at tokyo');
for my $id (1 .. 3)
{
	my $got = $tokyo->safe_psql('postgres', qq[
		begin;
		$settings;
		show search_path;
		select coalesce((braid.restore_conflict($of{$id})).action, '-');
		show search_path;
		$settings;
		select coalesce((braid.restore_conflict($of{$id})).action, '-');
		show search_path;
		$settings;
		select count(*) > 0 from item;
		do \$\$ begin perform braid.restore_conflict(4711); exception when undefined_object then perform 1 from item; end \$\$;
		show search_path;
		$settings;
		rollback;
	]);
	my @lines = split /\n/, $got;
	is(join(' ', @lines[ 1, 3, 6, 9 ]), join(' ', ('app, public') x 4), "row $id: search_path is the caller's: $lines[2], $lines[5]");
	is(join(' ', @lines[ 0, 4, 7, 10 ]), join(' ', ($lines[0]) x 4), "row $id: all settings are");
}

# A statement that rewrites a table.
is($tokyo->safe_psql('postgres', q[
	begin;
	show synchronize_seqscans;
	alter table item alter n type bigint;
	show synchronize_seqscans;
	do $$ begin alter table item alter v type int using v::int; exception when invalid_text_representation then null; end $$;
	show synchronize_seqscans;
	rollback;
]), "on\non\non", 'a statement that rewrites a table leaves the settings');

# Each function, called with nulls: whatever it does or reports, the settings stay. Procedures
# commit in between, and are left out.
is($tokyo->safe_psql('postgres', qq[
	create function pg_temp.settings() returns text language sql as \$\$ $settings \$\$;
	create function pg_temp.changed() returns text language plpgsql as \$\$
	declare
		f record;
		before text := pg_temp.settings();
		changed text := '';
		called int := 0;
	begin
		for f in
			select p.oid::regprocedure as name, format('select * from braid.%I(%s)', p.proname,
					(select string_agg(format('null::%s', format_type(t, null)), ', ' order by i) from unnest(p.proargtypes) with ordinality a (t, i))) as call
			  from pg_proc p where p.pronamespace = 'braid'::regnamespace and p.prokind = 'f' and p.prorettype not in ('trigger'::regtype, 'event_trigger'::regtype)
			   and not 'record'::regtype = any (p.proargtypes)
			 order by 1
		loop
			begin
				begin
					execute f.call;
				exception when others then
					null;
				end;
				called := called + 1;
				if pg_temp.settings() is distinct from before then
					changed := changed || f.name || ' ';
				end if;
				raise exception using errcode = 'BR001';
			exception when sqlstate 'BR001' then
				null;
			end;
		end loop;
		return changed || (called > 100);
	end \$\$;
	begin;
	select pg_temp.changed();
	rollback;
]), 'true', 'no function changes a setting');

# A stream that ends with an error leaves a connection that takes SQL.
my $walsender = Session::connect_to($tokyo, 'postgres', replication => 'database') or die 'no connection';
my @names = qw(DateStyle IntervalStyle extra_float_digits bytea_output lc_monetary TimeZone search_path);
sub shown { return join '|', map { (Session::query($walsender, "show $_", 1))[1] } @names; }
Session::query($walsender, $_, 1) for q(set datestyle = 'German'), q(set intervalstyle = 'sql_standard'), q(set timezone = 'Asia/Tokyo'), q(set bytea_output = 'escape');
my $before = shown();
like($before, qr/German.*sql_standard.*escape.*Tokyo/s, 'a connection has settings of its own');
$tokyo->safe_psql('postgres', q[select pg_create_logical_replication_slot('reader', 'braid'); insert into item values (10, 'ten', 0)]);
my ($failed, undef, $said) = Session::query($walsender, q(START_REPLICATION SLOT reader LOGICAL 0/0 (proto_version '1', publication_names 'missing')), 1);
ok($failed, 'the stream ends with an error');
like($said, qr/publication "missing" does not exist/, 'and says why');
is(shown(), $before, 'and the settings are those of before');
close $walsender->{socket};
ok($tokyo->poll_query_until('postgres', q[select not active from pg_replication_slots where slot_name = 'reader']), 'the slot is let go');
$tokyo->safe_psql('postgres', q[select pg_drop_replication_slot('reader')]);
converged(@both);
same_tables(\@both, 'item');

done_testing();
