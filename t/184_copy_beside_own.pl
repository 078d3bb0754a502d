# The copy of a table is cut off, and begins again after this node's sessions have written to the
# table. If a unique key or an exclusion constraint keeps one of their rows apart from one of the
# provider, one of the two is deleted: the newer one stays on both nodes, and the copy goes on by
# itself.

use strict;
use warnings;

use Braid;
use Test::More;

my ($tokyo, $paris) = map { new_node($_, conf => "braid.retry_interval = 200ms\nbraid.retry_interval_max = 2s\nbraid.copy_workers_per_subscription = 3\n") } qw(tokyo paris);
my @both = ($tokyo, $paris);
sub sql { return $_[0]->safe_psql('postgres', $_[1]) }
on_all(q[
	-- A key that SQL does not compare by just any operator: there is none for a domain over an enum.
	create type label as enum ('0', '1', '2', '3', '4', '10', '20', '30');
	create domain any_label as label;
	create table account (id any_label primary key, code int unique, v text);
	create table stay (id int primary key, during int4range, v text, exclude using gist (during with &&));
	-- With a rule for UPDATE, PostgreSQL refuses ON CONFLICT, also if the rule does not fire.
	create table ruled (id int primary key, during int4range, v text, exclude using gist (during with &&));
	create rule kept as on update to ruled do also notify kept;
], @both);
for my $table ('account', 'stay', 'ruled')
{
	sql($tokyo, qq[
		create function hold_$table() returns trigger language plpgsql as \$\$ begin perform pg_advisory_xact_lock_shared(1); return new; end \$\$;
		create trigger hold before insert on $table for each row when (new.id::text = '0') execute function hold_$table();
		alter table $table enable replica trigger hold;
	]);
}
sql($paris, q{insert into account values ('0', 0, 'paris'); insert into stay values (0, '[0,1)', 'paris'); insert into ruled table stay});

my $there = subscribe($paris, $tokyo, copy_data => 'false');
my $holder = $tokyo->background_psql('postgres');
$holder->query_safe('select pg_advisory_lock(1)');
my $here = subscribe($tokyo, $paris, wait => 0);
$tokyo->poll_query_until('postgres', q[select count(*) = 3 from pg_stat_activity where backend_type = 'braid copy' and wait_event = 'advisory']) or die;
disable($tokyo, $here);
disable($paris, $there);
$tokyo->poll_query_until('postgres', q[select count(*) = 0 from pg_stat_activity where backend_type = 'braid copy']) or die;
$holder->quit;
is(sql($tokyo, 'select (select count(*) from account) + (select count(*) from stay) + (select count(*) from ruled)'), '0', 'nothing is copied yet');

# Older here; older there; without a conflict; another row with its key.
sql($tokyo, q{insert into account values ('1', 1, 'older'), ('10', 10, 'own'); insert into stay values (1, '[10,20)', 'older'), (10, '[100,110)', 'own'); insert into ruled table stay});
sql($paris, q{insert into account values ('2', 1, 'newer'), ('3', 2, 'older'), ('20', 20, 'paris'), ('30', 30, 'older');
	insert into stay values (2, '[15,25)', 'newer'), (3, '[30,40)', 'older'), (20, '[200,210)', 'paris'); insert into ruled select * from stay where id > 0});
sql($tokyo, q{insert into account values ('4', 2, 'newer'), ('30', 31, 'newer'); insert into stay values (4, '[35,45)', 'newer'); insert into ruled select * from stay where id = 4});

# The provider's subscription goes on first: it has the conflicts behind it when the rows are
# copied.
sql($paris, "select braid.enable_subscription('$there')");
caught_up($paris, $tokyo);
sub rows { my ($node, $table) = @_; return sql($node, "select string_agg(id || ':' || v, ' ' order by id) from $table"); }
is(rows($paris, 'account'), '0:paris 2:newer 4:newer 10:own 20:paris 30:newer', 'the provider has decided');
is(rows($paris, 'stay'), '0:paris 2:newer 4:newer 10:own 20:paris', 'by the exclusion constraint, too');
is(rows($paris, 'ruled'), '0:paris 2:newer 4:newer 10:own 20:paris', 'of a table with rules, too');
sql($tokyo, "select braid.enable_subscription('$here')");
ok(wait_until(sub { status($tokyo, $here)->{state} =~ /^(?:streaming|error)$/ }, 60), 'the copy comes to an end');
streams($tokyo, $here, 'by itself') or diag(explain(status($tokyo, $here)));
converged(@both);
converged(@both);
is(rows($tokyo, 'account'), '0:paris 2:newer 4:newer 10:own 20:paris 30:newer', 'what has lost there leaves here');
is(rows($tokyo, 'stay'), '0:paris 2:newer 4:newer 10:own 20:paris', 'by the exclusion constraint, too');
is(rows($tokyo, 'ruled'), '0:paris 2:newer 4:newer 10:own 20:paris', 'of a table with rules, too');
same_tables(\@both, 'account', 'stay', 'ruled');
is(sql($paris, q{select string_agg(coalesce(local_row ->> 'id', '') || '/' || coalesce(remote_row ->> 'id', '') || ' ' || winner, ', ' order by local_row ->> 'id')
	from braid.conflict_history where relation = 'account'::regclass and kind = 'insert_exists'
	and local_row ->> 'id' is distinct from remote_row ->> 'id'}), '2/1 local, 3/4 remote', 'each that left is in the history, where the two met');

# And what was known of the dead holds: a change of now goes both ways.
sql($tokyo, q[update account set v = 'changed' where id::text in ('2', '10')]);
sql($paris, q[update account set v = 'changed' where id::text in ('4', '20')]);
converged(@both);
is(rows($_, 'account'), '0:paris 2:changed 4:changed 10:changed 20:changed 30:newer', 'it goes on: ' . $_->name) for @both;

# Both copy a table from each other, and are cut off when neither has it: neither can decide for the
# other. Rows that were written after a copy had begun come once more with the changes, and conflict
# as these do.
on_all(q[
	create table twin (id int primary key, code int unique, v text);
	create function hold_twin() returns trigger language plpgsql as $$ begin perform pg_advisory_xact_lock_shared(1); return null; end $$;
	create trigger hold before insert on twin for each statement execute function hold_twin();
	alter table twin enable replica trigger hold;
], @both);
my @ends = ([ $tokyo, $here ], [ $paris, $there ]);
my @holders = map { $_->background_psql('postgres') } @both;
$_->query_safe('select pg_advisory_lock(1)') for @holders;
sql($_->[0], "select braid.refresh_subscription('$_->[1]')") for @ends;
$_->poll_query_until('postgres', q[select count(*) = 1 from pg_stat_activity where backend_type = 'braid copy' and wait_event = 'advisory']) or die for @both;
disable(@$_) for @ends;
$_->poll_query_until('postgres', q[select count(*) = 0 from pg_stat_activity where backend_type = 'braid copy']) or die for @both;
$_->quit for @holders;
sql($tokyo, q{insert into twin values (1, 1, 'older'), (10, 10, 'tokyo')});
sql($paris, q{insert into twin values (2, 1, 'newer'), (3, 2, 'older'), (20, 20, 'paris')});
sql($tokyo, q{insert into twin values (4, 2, 'newer')});
sql($_->[0], "select braid.enable_subscription('$_->[1]')") for @ends;
for my $end (@ends)
{
	ok(wait_until(sub { status(@$end)->{state} =~ /^(?:streaming|error)$/ }, 60), "$end->[1]: the copy comes to an end");
	streams(@$end, 'by itself') or diag(explain(status(@$end)));
}
converged(@both) for 1 .. 3;
is(rows($_, 'twin'), '2:newer 4:newer 10:tokyo 20:paris', 'the newer ones stay: ' . $_->name) for @both;

done_testing();
