# An idle group of three writes no WAL, although each node looks after a slot that keeps what the
# others may lack. When something is written, the slots move again.

use strict;
use warnings;

use Braid;
use Group;
use Test::More;
use Time::HiRes qw(time);

my @all = my ($tokyo, $paris, $oslo) = group([qw(tokyo paris oslo)], q[create table item (id int primary key, v text)], conf => "autovacuum = off\nbraid.purge_interval = 60s\n");
my $where = q[select min(confirmed_flush_lsn) from pg_replication_slots where slot_name ~ '^braid_kept_'];
sub slots { return map { sql($_, $where) } @all; }
sub ends { return join ' ', map { sql($_, 'select pg_current_wal_insert_lsn()') } @all; }
ok($_->poll_query_until('postgres', "select exists ($where having count(*) = 1)"), $_->name . ' keeps changes') for @all;

# A slot is looked at each 10 s. What was written before ends by itself, and so do checkpoints.
my $stretch = 21;
sub is_quiet
{
	my ($last, $since) = (ends(), time);
	return wait_until(sub {
			my $now = ends();
			($last, $since) = ($now, time) if $now ne $last;
			return time - $since >= $stretch;
		}, 120);
}
sql($tokyo, q[insert into item values (1, 'first')]);
have_all(@all);
ok(is_quiet(), "no WAL in $stretch seconds");

# A row that arrives moves the slot, and so does much that only this node has.
my @before = slots();
sql($tokyo, q[insert into item values (2, 'second')]);
have_all(@all);
ok(wait_until(sub { my @now = slots(); return $now[1] ne $before[1] && $now[2] ne $before[2] }, 120), 'the slots of nodes that get a row move');
ok($paris->poll_query_until('postgres', q[select p.written_lsn <= k.kept_lsn from braid.kept_changes k join braid.group_member m on m.node_name = k.node join braid.member_positions() p using (member_id)
	where k.node = 'tokyo']), 'in the end up to what all have');
ok(is_quiet(), 'then it is quiet again');
@before = slots();
sql($oslo, q[select pg_logical_emit_message(false, 'filler', repeat('x', 1100000))]);
ok(wait_until(sub { (slots())[2] ne $before[2] }, 120), 'a slot does not hold back more than a megabyte');

done_testing;
