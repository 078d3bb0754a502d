# Tables without a key on three nodes, whose rows are found by all of their values (REPLICA IDENTITY
# FULL). Rows that one node adds and another removes arrive at the third in any order. All nodes end
# with the same rows, each as often.

use strict;
use warnings;

use Braid;
use Mesh;
use Test::More;

my ($tokyo, $paris, $quito) = my @nodes = map { new_node($_) } qw(tokyo paris quito);
on_all(q[
	create table bag (a int, b text);
	create table parts (a int, b text) partition by range (a);
	create table parts_low partition of parts for values from (0) to (10);
	create table parts_high partition of parts for values from (10) to (20);
	alter table bag replica identity full;
	alter table parts replica identity full;
	alter table parts_low replica identity full;
	alter table parts_high replica identity full;
], @nodes);
mesh(@nodes);
ok(wait_until(sub { scalar worker_pids($_, 'braid collector') }, 20), $_->name . ' collects deletions') for @nodes;

sub rows { my ($table) = @_; return "select coalesce(string_agg(a || b, ' ' order by a, b), '') from $table"; }
sub remembered { my ($node) = @_; return sql($node, q[select count(*) from braid.tombstone where relation in ('bag'::regclass, 'parts_low'::regclass, 'parts_high'::regclass)]); }
sub kinds { my ($node) = @_; return sql($node, q[select string_agg(kind, ' ' order by remote_lsn, conflict_id) from braid.conflict_history]); }
sub forget { sql($_, 'delete from braid.conflict_history') for @nodes; return; }

for my $mode (qw(parallel batch aggregate))
{
	for my $stream (map { my $to = $_; map { stream($to, $_) } @nodes } @nodes)
	{
		sql($stream->[0], "select braid.alter_subscription('$stream->[1]', apply_mode => '$mode')");
	}
	forget();

	# Rows of tokyo that paris changes come to quito from paris first.
	cut(stream($quito, $tokyo));
	sql($tokyo, q[insert into bag values (1, 'a'), (2, 'a'), (3, 'a'), (3, 'a')]);
	sql($tokyo, q[insert into bag values (4, 'a')]);
	sql($tokyo, q[insert into parts values (1, 'a'), (2, 'a')]);
	caught_up($paris, $tokyo);
	sql($paris, q[delete from bag where a = 1]);
	sql($paris, q[update bag set b = 'b' where a = 2]);
	sql($paris, q[delete from bag where ctid = (select ctid from bag where a = 3 limit 1)]);
	sql($paris, q[update parts set a = a + 10 where a = 1]);
	sql($paris, q[delete from parts where a = 2]);
	# And on from what has not come.
	sql($tokyo, q[update bag set b = 'b' where a = 4]);
	caught_up($paris, $tokyo);
	sql($paris, q[update bag set b = 'c' where a = 4]);
	caught_up($quito, $paris);
	is(sql($quito, rows('bag')), '2b 4c', "$mode: at quito, what paris has made of rows that are not there yet");
	is(remembered($quito), 6, 'and what was to be taken out is remembered');
	is(kinds($quito), 'delete_missing update_missing delete_missing delete_missing delete_missing update_missing', 'as a conflict each; a row that changes partitions leaves one');
	# A crash forgets none of it.
	$quito->stop('immediate');
	$quito->start;
	heal(stream($quito, $tokyo));
	converged(@nodes);
	all_have(rows('bag'), '2b 3a 4c', "$mode: rows that come after what became of them do not come back");
	all_have(rows('parts'), '11a', "$mode: nor into partitions");
	is(remembered($quito), 0, 'each removal has counted once');

	# A row that is added again is another row.
	cut(stream($quito, $tokyo), stream($tokyo, $paris), stream($paris, $tokyo));
	sql($tokyo, q[delete from bag where a = 2]);
	sql($paris, q[delete from bag where a = 2]);
	caught_up($quito, $paris);
	heal(stream($quito, $tokyo), stream($tokyo, $paris), stream($paris, $tokyo));
	converged(@nodes);
	sql($paris, q[insert into bag values (2, 'b')]);
	converged(@nodes);
	all_have(rows('bag'), '2b 3a 4c', "$mode: a row that two nodes have deleted, and one adds again");

	# A newer row that is the same is not the one that was meant.
	cut(stream($tokyo, $paris));
	sql($paris, q[delete from bag where a = 3]);
	sql($tokyo, q[insert into bag values (3, 'a')]);
	converged($tokyo, $quito);
	caught_up($quito, $paris);
	heal(stream($tokyo, $paris));
	converged(@nodes);
	all_have(rows('bag'), '2b 3a 4c', "$mode: of two rows that are the same the older one goes");
	cut(stream($tokyo, $paris), stream($paris, $tokyo));
	sql($paris, q[update bag set b = 'p' where a = 3]);
	sql($tokyo, q[delete from bag where a = 3]);
	sql($tokyo, q[insert into bag values (3, 'a')]);
	heal(stream($tokyo, $paris), stream($paris, $tokyo));
	converged(@nodes);
	all_have(rows('bag'), '2b 3a 3p 4c', "$mode: and what is newer than an update is no longer its row");

	sql($tokyo, q[delete from bag]);
	sql($tokyo, q[delete from parts]);
	converged(@nodes);
	sql($_, 'delete from braid.tombstone') for @nodes;
}

# A removal and its row at the same time, by two streams, many times.
forget();
cut(stream($quito, $tokyo), stream($quito, $paris));
$tokyo->safe_psql('postgres', join '', map { "insert into bag values ($_, 'x');\n" } 1 .. 150);
caught_up($paris, $tokyo);
$paris->safe_psql('postgres', join '', map { $_ % 3 ? "delete from bag where a = $_;\n" : "update bag set b = 'y' where a = $_;\n" } 1 .. 150);
sql($quito, "select braid.enable_subscription('$_->[1]')") for stream($quito, $tokyo), stream($quito, $paris);
converged(@nodes);
same_tables(\@nodes, 'bag');
is(sql($quito, 'select count(*) from bag'), 50, 'two streams at once: what was changed is there once, what was deleted is not');
is(remembered($quito), 0, 'and nothing is left to be taken out');
ok(!$quito->log_contains(qr/tuple concurrently/), 'nobody stumbled over another');

done_testing();
