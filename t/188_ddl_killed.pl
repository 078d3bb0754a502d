# kill -9 of random processes of two nodes that both write and both change the schema, in each apply
# mode and commit order, with transactions that are applied while in progress and with prepared
# ones. Each statement runs once at each node, and both end with the same schema and the same rows.

use strict;
use warnings;

use Braid;
use Ddl;
use Kill;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

kill_seed();
my $publication = 'for tables in schema public';
my ($tokyo, $paris) = my @nodes = map {
	new_node($_, publication => $publication, conf => "braid.ddl_replication = on\nbraid.max_transaction_crashes = 0\nbraid.apply_buffer_size = 1MB\n"
		  . "braid.appliers_per_subscription = 4\nlogical_decoding_work_mem = 64kB\nmax_prepared_transactions = 20\n")
} qw(tokyo paris);

# Objects that each node keeps for itself: a list of the statements that were run here, written by
# an event trigger, and a function that changes the schema. A node changes columns, tables and
# indexes of its own, in tables that all write.
on_all(q[
	set braid.ddl_replication = off;
	create schema local;
	create table local.ran (tag text, identity text);
	create function local.note() returns event_trigger language plpgsql as $$ begin
		insert into local.ran select command_tag, object_identity from pg_event_trigger_ddl_commands() where object_type in ('table', 'table column', 'index');
	end $$;
	create event trigger note on ddl_command_end when tag in ('CREATE TABLE', 'ALTER TABLE', 'CREATE INDEX') execute function local.note();
	alter event trigger note enable always;
	create sequence local.step_number;
	create table item (id int primary key, n int not null default 0, note text);
	create table ledger (id bigint, node text);
	create table bulk (id bigserial primary key, t text);
	create function local.step(me text) returns void language plpgsql as $$
	declare
		s bigint := nextval('local.step_number');
		has text[] := array(select attname from pg_attribute where attrelid = 'item'::regclass and attnum > 0 and not attisdropped and attname like me || '%');
		first_column text := has[1 + floor(random() * array_length(has, 1))::int];
		made text := (select relname from pg_class where relname like 'made_' || me || '%' and relkind = 'r' order by random() limit 1);
		indexed text := (select relname from pg_class where relname like 'by_' || me || '%' and relkind = 'i' order by random() limit 1);
	begin
		insert into ledger values (s, me);
		case floor(random() * 10)::int
			when 0 then execute format('create table made_%s_%s (id int primary key, v text default %L); insert into made_%s_%s values (1, 1), (2, default)', me, s, s, me, s);
			when 1 then if made is not null then execute format('drop table %I', made); end if;
			when 2 then if made is not null then execute format('alter table %I rename to made_%s_%s', made, me, s); end if;
			when 3, 4 then execute format('alter table item add column %s_%s int default %s', me, s, s);
			when 5 then if array_length(has, 1) > 3 then execute format('alter table item drop column %I', first_column); end if;
			when 6 then if first_column is not null then execute format('alter table item rename column %I to %s_%s', first_column, me, s); end if;
			-- Tables that are rewritten, by one node, as two types of a column at once would be for somebody to decide.
			when 7 then if me = 'tokyo' then
				if random() < 0.5 then execute format('alter table bulk alter column t type %s', case when random() < 0.5 then 'text' else 'varchar(500)' end);
				else execute format('alter table item alter column n type %s', case when random() < 0.5 then 'int' else 'bigint' end); end if;
			end if;
			when 8 then execute format('create index by_%s_%s on item (n, id)', me, s);
			else if indexed is not null then execute format('drop index %I', indexed); end if;
		end case;
		update item set n = n + 1 where id = floor(random() * 20)::int;
		if random() < 0.2 then
			insert into bulk (t) select repeat(me, 20) from generate_series(1, 2000);
		end if;
		insert into ledger values (-s, me);
	end $$;
	insert into item select i, 0, 'x' from generate_series(0, 20) i;
], @nodes);
on_all(q[set braid.ddl_replication = off; alter sequence bulk_id_seq increment 2 start 1 restart 1], $tokyo);
on_all(q[set braid.ddl_replication = off; alter sequence bulk_id_seq increment 2 start 2 restart 2], $paris);
my $is_two_phase = 1;
sub receive
{
	my @more = $is_two_phase ? (two_phase => 'true') : ();
	subscribe($_->[0], $_->[1], copy_data => 'false', replicate_ddl => 'true', streaming => "'parallel'", @more) for [ $paris, $tokyo ], [ $tokyo, $paris ];
	return;
}
receive();
my %name = (tokyo => 'tokyo_from_paris', paris => 'paris_from_tokyo');

# Transactions that were left prepared are committed by the next session.
my $leftover = q[select format('commit prepared %L', gid) from pg_prepared_xacts where gid like 'step%' and prepared < now() - interval '1 s' \gexec];
sub start_steps
{
	# A session that waits for one of those would never come to commit it.
	local $ENV{PGOPTIONS} = '-c lock_timeout=2s';
	for my $node (@nodes)
	{
		my $me = $node->name;
		start_load($node, qq[
\\set id random(1, 20)
\\set other random(1000, 2000)
begin;
insert into item (id, n, note) values (:id, 1, '$me') on conflict (id) do update set n = item.n + 1, note = excluded.note;
insert into item (id, n) values (2 * :other + @{[ $me eq 'tokyo' ? 1 : 0 ]}, 1) on conflict (id) do update set n = item.n + 1;
commit;
], '-c 1 -R 100');
		my $psql = sprintf 'psql -qXAt -h %s -p %s postgres', $node->host, $node->port;
		start_loop(qq[echo "begin; select local.step('$me'); commit;" | $psql]);
		start_loop(qq[echo "$leftover" | $psql; g=step\$\$_\$(date +%N); echo "begin; select local.step('$me'); prepare transaction '\$g'; commit prepared '\$g'" | $psql; sleep 0.5]);
	}
	start_checkpoints(@nodes);
	return;
}

my @kinds = (
	(map { my $node = $_; map { [ $node, "braid $_" ] } qw(applier applier leader leader manager) } @nodes),
	(map { ([ $_, 'walsender' ], [ $_, 'walsender' ], [ $_, 'postmaster' ]) } @nodes),
);
my @ways = (
	[ parallel => 'source' ], [ batch => 'source' ], [ aggregate => 'source' ], [ serial => 'source' ], [ parallel => 'relaxed' ], [ batch => 'relaxed' ],
);
for my $way (@ways)
{
	my ($mode, $order) = @$way;
	if ($order eq 'relaxed' && $is_two_phase)
	{
		# Prepared transactions want commits in order.
		$is_two_phase = 0;
		sql($_, "select braid.drop_subscription('$name{ $_->name }')") for @nodes;
		receive();
	}
	for my $node (@nodes)
	{
		wait_until(sub { (attempt($node, "select braid.alter_subscription('$name{ $node->name }', apply_mode => '$mode', commit_order => '$order')"))[0] == 0 }, 30)
		  or die 'cannot alter';
	}
	my %before = map { $_->name => sql($_, 'select count(*) from braid.ddl_log where subscription is not null') } @nodes;
	start_steps();
	my $seconds = ($ENV{BRAID_TEST_SECONDS} // 60) / @ways;
	kill_processes("$mode, $order", between => \@nodes, kinds => \@kinds, seconds => $seconds, at_least => int($seconds / 4));
	goes_on("$mode, $order", $name{ $_->[0]->name }, $_->[1], $_->[0]) for [ $paris, $tokyo ], [ $tokyo, $paris ];
	my $came = sub { sql($_[0], 'select count(*) from braid.ddl_log where subscription is not null') - $before{ $_[0]->name } };
	wait_until(sub { $came->($tokyo) > 3 && $came->($paris) > 3 }, 60);
	stop_load();
	for my $node (@nodes)
	{
		sql($node, $_) for split /\n/, sql($node, q[select format('commit prepared %L', gid) from pg_prepared_xacts where gid like 'step%']);
	}
	converged(@nodes) for 1 .. 2;
	same_shapes();
	same_rows();
	for my $node (@nodes)
	{
		cmp_ok($came->($node), '>', 3, 'statements came to ' . $node->name . ", $mode, $order");
	}
}

# Columns that both add at once are in another order on each.
sub same_shapes
{
	my @shapes = map { sql($_, q[
		select string_agg(c.relname || E'\n' || array_to_string(braid.table_shape(c.oid), E'\n'), E'\n\n' order by c.relname)
		  from pg_class c where relnamespace = 'public'::regnamespace and relkind = 'r'
	]) } @nodes;
	my $same = is($shapes[1] eq $shapes[0], 1, 'one schema');
	Ddl::diag_lines(@shapes) unless $same;
	return;
}

sub same_rows
{
	same_tables(\@nodes, qw(ledger bulk));
	my ($mine) = sql($tokyo, q[select string_agg(quote_ident(attname), ', ' order by attname) from pg_attribute where attrelid = 'item'::regclass and attnum > 0 and not attisdropped]);
	same_tables(\@nodes, "(select $mine from item)");
	same_tables(\@nodes, $_) for split /\n/, sql($tokyo, q[select relname from pg_class where relname like 'made%' and relkind = 'r']);
	return;
}

for my $node (@nodes)
{
	my $me = $node->name;
	is(sql($node, q[select count(*) - count(distinct (id, node)) from ledger]), '0', "no step came twice to $me");
	is(sql($node, q[select count(*) from ledger l where not exists (select from ledger o where o.node = l.node and o.id = -l.id)]), '0', "nor a half of one");
	is(sql($node, q[select count(*) from (select identity from local.ran where tag = 'CREATE INDEX' or (tag = 'CREATE TABLE' and identity like 'public.made%') group by identity having count(*) > 1) twice]),
		'0', "nothing was made twice at $me");
	is(sql($node, q[select count(*) from local.ran where tag = 'ALTER TABLE' and identity like 'public.%']),
		sql($node, q[select count(*) from braid.ddl_log where command_tag = 'ALTER TABLE' and state <> 'done already']), "each ALTER TABLE was run once at $me");
	is(sql($node, 'select count(*) from braid.ddl_log'), sql($tokyo, 'select count(*) from braid.ddl_log'), "all statements are known at $me");
}
all_stream(@nodes);
done_testing();
