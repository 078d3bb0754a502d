# Identical rows of tables without a key, which several nodes add and remove at the same time. The
# stream does not say which of them a session removes. All nodes end with the same number of them,
# in any order of arrival: the number that results if all changes are replayed in the order of their
# versions.

use strict;
use warnings;

use Braid;
use List::Util qw(shuffle);
use Mesh;
use Test::More;

my ($tokyo, $paris, $quito) = my @nodes = map { new_node($_, publication => '', conf => "max_prepared_transactions = 2\n") } qw(tokyo paris quito);
on_all(q[
	create table bag (v text, n int);
	alter table bag replica identity full;
	create table journal (id int generated always as identity, taken text, added text);
	create publication braid for table bag;
], @nodes);
my @streams = mesh(@nodes);
ok(wait_until(sub { scalar worker_pids($_, 'braid collector') }, 20), $_->name . ' collects deletions') for @nodes;

my $rows = q[select coalesce(string_agg(v, '' order by v), '') from bag];
# One of several, as a session does: whichever it comes upon.
sub one { my ($v, $order) = @_; return "ctid = (select ctid from bag where v = '$v' order by ctid $order limit 1)"; }

# Tokyo adds a row once more and removes one of the two. Paris has removed the first.
for my $order ('', 'desc')
{
	sql($tokyo, q[insert into bag values ('a', 1)]);
	converged(@nodes);
	cut();
	sql($paris, q[delete from bag]);
	sql($tokyo, q[insert into bag values ('a', 1)]);
	sql($tokyo, 'delete from bag where ' . one('a', $order));
	heal_all();
	all_have($rows, '', 'each of two removals takes a row, ' . ($order ? 'the newer one the newer' : 'the newer one the older one first'));

	# Neither is the older one of two rows there any more when the older removal comes, nor is the
	# newer one yet.
	sql($tokyo, q[insert into bag values ('a', 1)]);
	converged(@nodes);
	cut();
	sql($paris, 'delete from bag where ' . one('a', ''));
	sql($tokyo, q[insert into bag values ('a', 1)]);
	heal(stream($quito, $tokyo));
	sql($quito, 'update bag set v = $$b$$ where ' . one('a', $order));
	cut(stream($quito, $tokyo));
	heal(shuffle stream($tokyo, $quito), stream($tokyo, $paris));
	heal_all();
	all_have($rows, 'b', 'the same with an update, and three nodes');
	sql($_, 'truncate bag'), converged(@nodes) for $tokyo;
}

# The removal that is recorded without a row is another one then: the row was taken over.
cut();
sql($tokyo, q[insert into bag values ('a', 1)]);
heal(stream($paris, $tokyo), stream($quito, $tokyo));
cut();
sql($quito, q[delete from bag]);
sql($tokyo, q[insert into bag values ('a', 1)]);
heal(stream($paris, $tokyo));
sql($paris, 'delete from bag where ' . one('a', ''));
cut();
sql($tokyo, q[insert into bag values ('a', 1)]);
heal_all();
all_have($rows, 'a', 'two of three are taken out');
is(sql($_, q[select count(*) from braid.tombstone where key_hash in (select row_hash from braid.taken_row)]), 0, 'and nothing is left to be taken out at ' . $_->name) for @nodes;

# Of two identical rows a transaction removes the one that it has added. The other one stays for the
# older removal that is meant for it.
sql($tokyo, q[truncate bag; insert into bag values ('a', 1), ('b', 1)]);
converged(@nodes);
cut();
sql($quito, q[delete from bag where v = 'b']);
sql($tokyo, q[begin; update bag set v = 'b' where v = 'a'; update bag set v = 'c' where ctid = (select ctid from bag where v = 'b' order by ctid desc limit 1); commit]);
heal(stream($paris, $tokyo));
is(sql($paris, $rows), 'bc', 'of two rows that are the same a transaction takes out the one that it has added');
heal_all();
all_have($rows, 'c', 'and the other one is left for whom it is meant');
sql($tokyo, q[truncate bag]);
converged(@nodes);

# A truncate that comes late takes the row with it that a newer removal has had.
sql($tokyo, q[insert into bag values ('a', 1)]);
converged(@nodes);
cut();
sql($paris, 'truncate bag');
sql($paris, q[insert into bag values ('a', 1)]);
sql($tokyo, 'delete from bag where ' . one('a', ''));
heal(stream($quito, $tokyo));
heal_all();
all_have($rows, '', 'what was taken before a truncate that comes late is taken once more');

# A transaction that is decoded again after a crash counts once.
sql($tokyo, q[insert into bag select 'a', 1 from generate_series(1, 3)]);
converged(@nodes);
cut();
sql($paris, 'delete from bag where ' . one('a', ''));
sql($tokyo, q[insert into bag select 'a', 1 from generate_series(1, 3)]);
sql($tokyo, q[delete from bag where ctid = any (array(select ctid from bag limit 3))]);
ok($tokyo->poll_query_until('postgres', q[select count(*) = 3 from braid.taken_row where removed_by = 0 and removed_at = (select max(removed_at) from braid.taken_row)]), 'what a session takes out is collected');
$tokyo->stop('immediate');
$tokyo->start;
ok($tokyo->poll_query_until('postgres', q[select coalesce(collected_lsn >= (select "position" from braid.taken_up_to), false) from braid.deletion_activity()]), 'again, after a crash');
is(sql($tokyo, q[select count(*) from braid.taken_row where removed_by = 0 and removed_at = (select max(removed_at) from braid.taken_row)]), 3, 'each once');
heal_all();
all_have($rows, 'aa', 'and so it counts');

# At random, in each mode. The expected rows are computed from the journals.
my $rule = q[select string_agg(coalesce(taken, '') || ':' || coalesce(added, '') || ':' || extract(epoch from braid.commit_timestamp(xmin)), ' ') from journal];
sub expected
{
	my @changes = map { split ' ', sql($_, $rule) } @nodes;
	my %count;
	for (sort { $a->[2] <=> $b->[2] } map { [ split /:/ ] } @changes)
	{
		my ($taken, $added) = @$_;
		if ($taken eq 'all') { %count = (); next; }
		$count{$taken}-- if $taken ne '' && $count{$taken};
		$count{$added}++ if $added ne '';
	}
	return join '', map { $_ x $count{$_} } sort keys %count;
}

sub some { return (qw(a b c))[ rand 3 ]; }

sub random_change
{
	my ($v, $w) = (some(), some());
	my $of = one($v, rand() < 0.5 ? '' : 'desc');
	my $kind = rand 10;
	return "insert into bag values ('$v', 1); insert into journal (added) values ('$v')" if $kind < 4.7;
	return q[truncate bag; insert into journal (taken) values ('all')] if $kind < 4.8;
	return "with gone as (delete from bag where $of returning v) insert into journal (taken) select v from gone" if $kind < 8;
	return "with new as (update bag set v = '$w' where $of returning v) insert into journal (taken, added) select '$v', v from new";
}

my $seed = $ENV{BRAID_TEST_SEED} // 1 + int rand 1_000_000;
srand($seed);
diag("seed $seed");
my @modes = (q[apply_mode => 'parallel'], q[apply_mode => 'batch'], q[apply_mode => 'parallel', commit_order => 'relaxed'], q[apply_mode => 'aggregate']);
my $until = time + ($ENV{BRAID_TEST_SECONDS} // 0);
for (my $round = 0; $round < 2 * @modes || time < $until; $round++)
{
	my $mode = $modes[ $round % @modes ];
	sql($_->[0], "select braid.alter_subscription('$_->[1]', apply_mode => 'parallel', commit_order => 'source'); select braid.alter_subscription('$_->[1]', $mode)") for @streams;
	sql($tokyo, q[truncate bag]);
	converged(@nodes);
	sql($_, 'truncate journal') for @nodes;
	cut();
	for (1 .. 8)
	{
		my $node = $nodes[ rand @nodes ];
		$node->safe_psql('postgres', join ";\n", map { random_change() } 1 .. 1 + rand 8);
		next if rand() < 0.4;
		my $stream = $streams[ rand @streams ];
		heal($stream);
		# At times it goes on beside what follows.
		cut($stream) if rand() < 0.7;
	}
	if ($round % 4 == 3)
	{
		my $node = $nodes[ rand @nodes ];
		$node->stop('immediate');
		$node->start;
	}
	my $expected = expected();
	if ($round % 2)
	{
		# All streams at once.
		sql($_->[0], "select braid.enable_subscription('$_->[1]')") for shuffle @streams;
	}
	heal_all();
	all_have($rows, $expected, "round $round, $mode: $expected") or last;
}
ok(!$_->log_contains(qr/tuple concurrently|PANIC|TRAP|panicked/), 'nobody stumbled over another at ' . $_->name) for @nodes;

done_testing();
