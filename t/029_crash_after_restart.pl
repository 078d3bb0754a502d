# A new leader confirms the position that its predecessor had reached. It must not confirm commits
# that were never flushed: a crash would lose them, and the provider would not send them again.

use strict;
use warnings;

use Braid;
use Test::More;
use Time::HiRes qw(sleep);

my $tokyo = new_node('tokyo');
# Nobody but the leader flushes WAL here for a while.
my $paris = new_node('paris', publication => '', conf => "wal_writer_delay = 10s\nwal_writer_flush_after = 0\nautovacuum = off\n");
on_all('create table note (id int primary key, t text)', $tokyo, $paris);
$tokyo->safe_psql('postgres', q[
	create procedure write_notes(int, int) language plpgsql as $$
	begin for i in $1 .. $2 loop insert into note values (i, 'x'); commit; end loop; end $$;
]);
my $name = subscribe($paris, $tokyo);

my $unflushed = 0;
# On a busy machine WAL may be flushed just then: that round shows nothing.
for my $round (1 .. 9)
{
	last if $round > 3 && $unflushed;
	# Appliers work on what the leader has handed out, while the leader is stopped.
	my ($leader) = wait_for_worker($paris, 'braid leader');
	my $before = $paris->safe_psql('postgres', 'select count(*) from note');
	my $from = $round * 20_000;
	my $writer = IPC::Run::start(
		[ 'psql', '-qX', '-d', $tokyo->connstr('postgres'), '-c', "call write_notes($from, $from + 3999)" ], '<', \undef, '>', '/dev/null', '2>', '/dev/null');
	wait_until(sub { $paris->safe_psql('postgres', 'select count(*) from note') > $before + 200 }, 30) or die 'nothing comes';
	kill 'STOP', $leader;
	my $last = -1;
	wait_until(sub { my $now = $paris->safe_psql('postgres', 'select count(*) from note'); my $same = $now == $last; $last = $now; sleep 0.1; $same }, 30);
	$unflushed++
	  if $paris->safe_psql('postgres', 'select pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn()') eq 't';
	kill 'TERM', $leader;
	kill 'CONT', $leader;
	ok(wait_until(sub {
		my ($now) = worker_pids($paris, 'braid leader');
		$now && $now != $leader && $tokyo->safe_psql('postgres', "select count(*) from pg_stat_replication where application_name = '$name'") eq '1'
	}, 30), "round $round: another leader receives");
	$paris->kill9;
	restart_crashed($paris);
	$writer->finish;
	wait_for_worker($paris, 'braid leader');
	caught_up($paris, $tokyo);
	same_tables([ $tokyo, $paris ], 'note');
}
cmp_ok($unflushed, '>', 0, 'leaders ended with something unflushed');

done_testing();
