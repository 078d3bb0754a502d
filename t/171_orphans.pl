# Rows whose referenced row lost a conflict, or was deleted meanwhile at another node. They are
# found on all nodes, and recorded or deleted by a rule, with the same outcome everywhere, or the
# referenced row is restored. A referenced row that is only late is waited for.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my $conf = "max_worker_processes = 32\nbraid.orphan_check_interval = 200ms\n";
my @nodes = my ($tokyo, $paris, $osaka) = map { new_node($_, conf => $conf) } qw(tokyo paris osaka);
on_all(q[
	create table orders (id int primary key, number text unique);
	create table line (id int primary key, orders int constraint line_orders references orders, v text);
	create table note (line int primary key constraint note_line references line on delete cascade, v text);
	create table fired (line int primary key, by_whom text);
	create function fire() returns trigger language plpgsql as $$ begin insert into public.fired values (old.id, current_user); return null; end $$;
	create trigger line_deleted after delete on line for each row execute function fire();
	create role clerk;
	grant select, insert on orders, fired to clerk;
	alter table line owner to clerk;
	alter table note owner to clerk;
	create table place (id bigint generated always as identity primary key, v text);
	create table moment (at timestamptz primary key, place bigint constraint moment_place references place on delete cascade, n numeric, tags int[] default '{1}',
		doc json, made int generated always as (7) stored, upper_v text) partition by range (at);
	create table moment_all partition of moment (doc, upper_v, n, at not null, tags, place) default;
	create table visit (id int primary key, at timestamptz constraint visit_at references moment on delete cascade);
	create function shout() returns trigger language plpgsql as $$ begin new.upper_v := 'by the trigger'; return new; end $$;
	create trigger shout before insert on moment for each row execute function shout();
	alter table place owner to clerk;
	create table marker (n int primary key, missing int constraint marker_missing references marker);
	create table base (id int primary key);
	create table held (id int primary key, base int constraint held_base references base);
	create function hold() returns trigger language plpgsql as $$ begin return null; end $$;
	create trigger hold before delete on held for each row execute function hold();
	create table ruled (id int primary key, base int constraint ruled_base references base);
	create rule hold as on delete to ruled do instead nothing;
], @nodes);
$osaka->safe_psql('postgres', q[alter database postgres set timezone = 'Asia/Tokyo']);
for my $subscriber (@nodes) { for my $provider (@nodes) { subscribe($subscriber, $provider) if $subscriber != $provider } }

sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
sub on_each { my ($sql) = @_; return join ' / ', map { sql($_, $sql) } @nodes; }
my $orphans = q[select coalesce(string_agg(key ->> 'id', ',' order by key ->> 'id'), '-') from braid.orphans('line')];
my $recorded = q[select coalesce(string_agg(concat_ws(' ', local_row ->> 'id', resolution, winner, constraint_name, columns), ', ' order by local_row ->> 'id'), '-') from braid.conflict_history where kind = 'foreign_key' and relation <> 'marker'::regclass];

# Waits until these nodes have looked for orphans once, from beginning to end. One look records an
# orphan with a version of the time $at. A later look records another one. An orphan counts once
# everything has arrived that is older, so the first look has seen all orphans that are older than
# $at.
my $markers = 0;
sub look_again
{
	my ($at, @at_nodes) = @_;
	for my $time ($at, undef)
	{
		$markers++;
		write_by_hand($_, "insert into marker values ($markers, -1)", $time) for @at_nodes;
		for (@at_nodes)
		{
			$_->poll_query_until('postgres', qq[select exists (select from braid.conflict_history where relation = 'marker'::regclass and local_row ->> 'n' = '$markers')])
			  or die $_->name . ' does not look for orphans';
		}
	}
	return;
}

sub links
{
	my ($verb, @subscriptions) = @_;
	for (@subscriptions) { sql($_->[0], "select braid.${verb}_subscription('$_->[1]')"); }
	return if $verb eq 'enable';
	$_->[2]->poll_query_until('postgres', qq[select not coalesce(bool_or(active), false) from pg_replication_slots where slot_name = (select '$_->[3]')]) for @subscriptions;
	return;
}

sub slot { my ($subscriber, $name) = @_; return sql($subscriber, "select slot_name from braid.subscription where subscription_name = '$name'"); }

sub link_of { my ($subscriber, $provider) = @_; my $name = $subscriber->name . '_from_' . $provider->name; return [ $subscriber, $name, $provider, slot($subscriber, $name) ]; }

sql($tokyo, q[insert into orders select i, 'n' || i from generate_series(1, 5) i; insert into line select i, i, 'first' from generate_series(1, 5) i]);
converged(@nodes);
is(on_each($orphans), '- / - / -', 'no orphans');
on_all(q[select braid.set_foreign_key_rule('marker', 'marker_missing', 'record')], @nodes);

# A line comes while its order is deleted; an order loses to another one under its number.
my @links = map { my $node = $_; map { link_of($node, $_) } grep { $_ != $node } @nodes } @nodes;
links('disable', @links);
sql($tokyo, q[insert into line values (10, 1, 'late'), (11, null, 'nothing'); insert into orders values (20, 'same'); insert into line values (20, 20, 'loser'); insert into note values (10, 'on the line')]);
sql($paris, q[delete from line where id = 1; delete from orders where id = 1; insert into orders values (21, 'same'); insert into line values (21, 21, 'winner')]);
links('enable', @links);
converged(@nodes);
is(on_each($orphans), '10,20 / 10,20 / 10,20', 'the same orphans everywhere');
is(sql($osaka, q[select concat_ws(' ', referencing, constraint_name, key, referenced, referenced_key, "row") from braid.orphans() where key ->> 'id' = '10']),
	'line line_orders {"id": 10} orders {"id": 1} {"v": "late", "id": 10, "orders": 1}', 'with what there is to say');
look_again('now()', @nodes);
is(on_each($orphans), '10,20 / 10,20 / 10,20', 'without a rule they stay');
is(on_each($recorded), '- / - / -', 'and nothing is recorded');

# Recorded once.
sql($osaka, q[select braid.set_foreign_key_rule('line', 'line_orders', 'record')]);
my $both = '10 record local line_orders {orders}, 20 record local line_orders {orders}';
ok(wait_until(sub { sql($osaka, $recorded) eq $both }, 60), 'recorded') or diag(sql($osaka, $recorded));
look_again(undef, $osaka);
is(sql($osaka, $recorded), $both, 'once');
is(on_each($orphans), '10,20 / 10,20 / 10,20', 'they stay');

# An order that is late, as its stream is stopped: the line is no orphan to be deleted.
my $late = link_of($osaka, $tokyo);
links('disable', $late);
sql($tokyo, q[insert into orders values (30, 'n30')]);
ok(wait_until(sub { sql($paris, 'select count(*) from orders where id = 30') eq '1' }, 60), 'the order is at paris');
sql($paris, q[insert into line values (30, 30, 'waits')]);
ok(wait_until(sub { sql($osaka, 'select count(*) from line where id = 30') eq '1' }, 60), 'the line is at osaka');
is(sql($osaka, $orphans), '10,20,30', 'its order is not');
sql($osaka, q[select braid.set_foreign_key_rule('line', null, 'delete')]);
ok(wait_until(sub { sql($osaka, $orphans) eq '30' }, 60), 'older orphans are deleted') or diag(sql($osaka, $orphans));
look_again(undef, $osaka);
is(sql($osaka, 'select count(*) from line where id = 30'), '1', 'the order is waited for');
links('enable', $late);
ok(wait_until(sub { on_each($orphans) eq '- / - / -' }, 60), 'orphans are deleted on all nodes') or diag(on_each($orphans));
converged(@nodes);
is(on_each('select string_agg(id::text, $$,$$ order by id) from line'), join(' / ', ('2,3,4,5,11,21,30') x 3), 'and nothing else is');
same_tables(\@nodes, qw(orders line note fired));
is(sql($tokyo, 'select count(*) from note'), '0', 'what refers to them follows');
is(sql($osaka, 'select string_agg(line || by_whom, $$,$$ order by line) from fired where line > 1'), '10clerk,20clerk', 'triggers fire as the owner');
is(sql($osaka, q[select string_agg(concat_ws(' ', local_row ->> 'v', resolution, winner), ', ' order by local_row ->> 'v') from braid.conflict_history where kind = 'foreign_key' and resolution = 'delete']),
	'late delete none, loser delete none', 'what is deleted is recorded');

# A row that a trigger or a rule keeps stays, and is recorded as such once.
write_by_hand($osaka, 'insert into held values (1, -1); insert into ruled values (2, -1)');
sql($osaka, "select braid.set_foreign_key_rule('$_', null, 'delete')") for qw(held ruled);
look_again(undef, $osaka) for 1 .. 2;
is(sql($osaka, q[select string_agg(concat_ws(' ', relation, local_row ->> 'id', resolution, winner, reason), ', ' order by relation::text) from braid.conflict_history where relation in ('held'::regclass, 'ruled'::regclass)]),
	join(', ', map { qq[$_ record local the referenced row is missing in public.base {"id": -1}, and a trigger or a rule keeps the row from being deleted] } 'held 1', 'ruled 2'),
	'a row that is kept is recorded');
is(sql($osaka, 'select (select count(*) from held) + (select count(*) from ruled)'), '2', 'it stays');
unlike(slurp_file($osaka->logfile), qr/deleted \d+ rows under foreign key (held|ruled)_base/, 'and is not said to be deleted');

# The referenced row is restored. Not if no node has an image of it: the rule is newer than the
# deletion.
sql($osaka, q[select braid.set_foreign_key_rule('line', null, null)]);
links('disable', @links);
sql($tokyo, q[insert into line values (40, 2, 'no image')]);
sql($paris, q[delete from line where id = 2; delete from orders where id = 2]);
links('enable', @links);
converged(@nodes);
on_all(q[
	select braid.set_foreign_key_rule('line', 'line_orders', 'restore');
	select braid.set_foreign_key_rule('moment', 'moment_place', 'restore');
	select braid.set_foreign_key_rule('visit', null, 'restore');
], @nodes);
sub why { my ($line) = @_; return qq[select coalesce(string_agg(resolution || ' ' || winner || ' ' || reason, ', '), '-') from braid.conflict_history where kind = 'foreign_key' and local_row ->> 'id' = '$line' and resolution <> 'delete']; }

for my $mode (qw(parallel batch))
{
	my ($order, $taken, $late_line, $at) = $mode eq 'parallel' ? (100, 110, 120, '2026-01-01 12:00Z') : (200, 210, 220, '2026-01-02 12:00Z');
	sql($_->[0], "select braid.alter_subscription('$_->[1]', apply_mode => '$mode')") for @links;
	sql($tokyo, qq[insert into orders select i, 'n' || i from generate_series($order, $order + 4) i; insert into orders values ($late_line, 'late$mode');
		insert into line values ($late_line, $late_line, 'goes');
		insert into place overriding system value values ($order, 'here');
		insert into moment (at, place, n, tags, doc) values ('$at', $order, 1.50, '[0:1]={5,6}', '{"b": 1, "a": "x"}');
		update moment set upper_v = 'later' where place = $order;]);
	converged(@nodes);
	my $before = on_each(qq[select * from moment, place where place.id = $order and place = $order]);
	links('disable', @links);
	# Four orders, and a place whose moment goes with it, in transactions of their own.
	sql($paris, qq[delete from orders where id = $_]) for $order .. $order + 3;
	sql($paris, qq[delete from place where id = $order]);
	sql($tokyo, qq[insert into line select i, i, 'stays' from generate_series($order, $order + 1) i; insert into line values ($order + 50, $order, 'too'), ($taken, $order + 2, 'taken')]);
	sql($tokyo, qq[insert into visit select $order + 60, at from moment where place = $order]);
	# An order that loses under its number, and can't be restored.
	sql($tokyo, qq[insert into orders values ($taken + 1, '$mode'); insert into line values ($taken + 1, $taken + 1, 'loser')]);
	sql($paris, qq[insert into orders values ($taken + 2, '$mode')]);
	links('enable', @links);
	converged(@nodes);
	my $helpless = join ',', $taken + 1, $mode eq 'parallel' ? 40 : ();
	ok(wait_until(sub { on_each($orphans) eq join ' / ', ($helpless) x 3 }, 60), "$mode: no other orphan is left") or diag(on_each('select string_agg(o::text, $$,$$) from braid.orphans() o'));
	ok(wait_until(sub { on_each('select count(*) from visit v left join moment m using (at) left join place p on p.id = m.place where p.id is null') eq '0 / 0 / 0' }, 60),
		"$mode: nor one further up");
	converged(@nodes);
	is(on_each(qq[select string_agg(id || number, ',' order by id) from orders where id between $order and $order + 4]),
		join(' / ', (join ',', map { $_ . 'n' . $_ } $order .. $order + 2, $order + 4) x 3), "$mode: what is referred to is back, and nothing else");
	is(on_each(qq[select * from moment, place where place.id = $order and place = $order]), $before, "$mode: to the letter, with what it refers to itself");
	same_tables(\@nodes, qw(orders line place));
	like(on_each(why($order)), qr/restore local the referenced row was put back in public.orders \{"id": $order\}/, "$mode: recorded where it was done");

	# An order and its line are deleted, and the line's deletion is late: nothing is restored.
	links('disable', $late);
	sql($tokyo, qq[delete from line where id = $late_line]);
	caught_up($paris, $tokyo);
	sql($paris, qq[delete from orders where id = $late_line]);
	caught_up($osaka, $paris);
	like(sql($osaka, $orphans), qr/\b$late_line\b/, "$mode: the line is still there");
	look_again(undef, $osaka);
	like(sql($osaka, $orphans), qr/\b$late_line\b/, "$mode: its deletion is waited for");
	links('enable', $late);
	converged(@nodes);
	is(on_each(qq[select count(*) from orders where id = $late_line]), '0 / 0 / 0', "$mode: the order stays deleted");

	ok(wait_until(sub { on_each(why($taken + 1)) =~ m{^(record local the referenced row is missing in public.orders \{"id": \d+\}, and cannot be put back: [^/]+( / |$)){3}$} }, 60), "$mode: a row that lost under a unique key is recorded")
	  or diag(on_each(why($taken + 1)));
	is(on_each($orphans), join(' / ', ($helpless) x 3), "$mode: it stays");
	my $no_image = q[record local the referenced row is missing in public.orders {"id": 2}, and cannot be put back: no image of it is here];
	ok(wait_until(sub { on_each(why(40)) eq join ' / ', ($no_image) x 3 }, 60), "$mode: a row without an image, too") or diag(on_each(why(40)));
	sql($tokyo, qq[delete from line where id in (40, $taken + 1)]);
	converged(@nodes);
}

# A truncate keeps a line that is newer, and goes by row there.
on_all('alter table line owner to current_user; alter table note owner to current_user', @nodes);
links('disable', @links);
sql($paris, q[truncate orders, line, note]);
sql($tokyo, q[insert into line values (300, 204, 'newer')]);
links('enable', @links);
converged(@nodes);
ok(wait_until(sub { on_each('select string_agg(id || number, $$,$$) from orders') eq join ' / ', ('204n204') x 3 }, 60), 'after a truncate the order is back')
  or diag(on_each('select string_agg(id || number, $$,$$) from orders'));
converged(@nodes);
same_tables(\@nodes, qw(orders line));

# More orphans than are looked at in one transaction: none hides the others.
on_all(q[
	create table many (id int primary key);
	create table part (id int, many int constraint part_many references many, primary key (id)) partition by range (id);
	create table part_low partition of part for values from (0) to (1500);
	create table part_high partition of part for values from (1500) to (10000);
	create table single (id int primary key, many int constraint single_many references many);
], @nodes);
sql($tokyo, q[
	insert into many select generate_series(1, 2500);
	insert into part select i, i from generate_series(1, 2500) i;
	insert into single select i, i from generate_series(1, 2500) i;
]);
sql($tokyo, q[set session_replication_role = replica; delete from many]);
converged(@nodes);
sql($osaka, qq[select braid.set_foreign_key_rule('$_', null, 'record')]) for qw(part single);
my $numbers = q[select string_agg(n::text, ' ') from (select count(distinct local_row ->> 'id') || '/' || count(*) n from braid.conflict_history where resolution = '%s' and constraint_name = any ('{part_many,single_many}') group by constraint_name) g];
my $all_recorded = sprintf $numbers, 'record';
ok(wait_until(sub { (sql($osaka, $all_recorded) // '') eq '2500/2500 2500/2500' }, 60), 'all orphans are recorded') or diag(sql($osaka, $all_recorded));
sql($osaka, qq[select braid.set_foreign_key_rule('$_', null, 'delete')]) for qw(part single);
ok(wait_until(sub { on_each('select (select count(*) from part) + (select count(*) from single)') eq '0 / 0 / 0' }, 60), 'all are deleted') or diag(on_each('select (select count(*) from part) + (select count(*) from single)'));
is(sql($osaka, sprintf $numbers, 'delete'), '2500/2500 2500/2500', 'and that is recorded of each');
is(sql($osaka, $all_recorded), '2500/2500 2500/2500', 'once');

$_->stop for @nodes;
done_testing();
