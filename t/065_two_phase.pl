# Prepared transactions arrive prepared: visible only once they are committed, with the source's
# origin and time, whatever is restarted or stopped in between. They are rolled back here if they
# are rolled back at the provider.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep);

my $conf = "max_prepared_transactions = 20\nautovacuum = off\n";
my $tokyo = new_node('tokyo', conf => $conf);
my $paris = new_node('paris', conf => $conf);
my @nodes = ($tokyo, $paris);
on_all(q[
	create table item (id int primary key, v text, n int);
	create table bulk (id int primary key, t text);
], @nodes);
$tokyo->safe_psql('postgres', q[insert into item select i, 'copied', 0 from generate_series(1, 20) i]);
my $name = subscribe($paris, $tokyo, two_phase => 'true');

sub sql { return $_[0]->safe_psql('postgres', $_[1]) }
sub gids { return sql($_[0], 'select count(*) from pg_prepared_xacts') }

is(sql($paris, "select two_phase from braid.subscription_detail where name = '$name'"), 't', 'the option is shown');
is(sql($tokyo, 'select two_phase from pg_replication_slots where plugin = \'braid\' and slot_name not like \'braid_deletions%\''), 't', 'the slot has it');

# Prepare, commit.
sql($tokyo, q[begin; update item set v = 'one' where id = 1; insert into item values (101, 'one', 1); prepare transaction 'one']);
caught_up($paris, $tokyo);
like(sql($paris, 'select gid from pg_prepared_xacts'), qr/^braid_\d+_\d+_\d+$/, 'what is prepared there is prepared here');
is(sql($paris, 'select count(*) from item where v = \'one\''), '0', 'and is not seen');
# Other transactions go on meanwhile.
sql($tokyo, q[update item set v = 'meanwhile' where id = 2]);
caught_up($paris, $tokyo);
is(sql($paris, 'select v from item where id = 2'), 'meanwhile', 'others go past it');
sql($tokyo, q[commit prepared 'one'; update item set n = n + 10 where id in (1, 101)]);
caught_up($paris, $tokyo);
is(gids($paris), '0', 'nothing is left prepared');
same_tables(\@nodes, 'item');

# Roll back.
sql($tokyo, q[begin; update item set v = 'two' where id = 1; prepare transaction 'two']);
caught_up($paris, $tokyo);
is(gids($paris), '1', 'prepared');
sql($tokyo, q[rollback prepared 'two'; update item set n = n + 1 where id = 1]);
caught_up($paris, $tokyo);
is(gids($paris), '0', 'and rolled back');
same_tables(\@nodes, 'item');


# The rows' versions are the source's: time and origin.
sql($tokyo, q[begin; insert into item values (102, 'versioned', 1); update item set v = 'versioned' where id = 3; prepare transaction 'three']);
caught_up($paris, $tokyo);
sql($tokyo, q[commit prepared 'three']);
caught_up($paris, $tokyo);
my $times = 'select id, pg_xact_commit_timestamp(xmin) from item where id in (3, 102) order by 1';
is(sql($paris, $times), sql($tokyo, $times), 'the commit timestamp is that of COMMIT PREPARED');
is(sql($paris, q[select distinct o.node_name from item i, pg_xact_commit_timestamp_origin(i.xmin) c join braid.origin o on o.origin_id = c.roident where i.id in (3, 102)]),
	'tokyo', 'and the origin its node');

# Whatever stops in between.
sql($tokyo, qq[begin; update item set n = n + 100 where id = $_; prepare transaction 'stop$_']) for 4 .. 7;
caught_up($paris, $tokyo);
$_->restart for @nodes;
is(gids($paris), '4', 'still prepared after both servers were started again');
sql($tokyo, q[commit prepared 'stop4']);
sql($tokyo, q[rollback prepared 'stop5']);
caught_up($paris, $tokyo);
is(gids($paris), '2', 'two have ended since');
disable($paris, $name);
sql($tokyo, q[commit prepared 'stop6']);
sql($tokyo, q[rollback prepared 'stop7']);
sql($tokyo, q[begin; update item set n = n + 1000 where id = 8; prepare transaction 'off8']);
sql($tokyo, q[begin; update item set n = n + 1000 where id = 9; prepare transaction 'off9']);
sql($tokyo, q[commit prepared 'off9']);
sql($paris, "select braid.enable_subscription('$name')");
caught_up($paris, $tokyo);
is(gids($paris), '1', 'what was prepared and ended while the subscription was off');
$paris->kill9;
restart_crashed($paris);
$tokyo->kill9;
restart_crashed($tokyo);
is(gids($paris), '1', 'prepared after a crash');
sql($tokyo, q[commit prepared 'off8']);
caught_up($paris, $tokyo);
same_tables(\@nodes, 'item');

# In each apply mode; large ones: through the ring while they come, and in segments.
for my $mode (qw(serial batch aggregate parallel))
{
	sql($paris, "select braid.alter_subscription('$name', apply_mode => '$mode', consolidate => true, split_transactions_above => 3)");
	$tokyo->safe_psql('postgres', join ';', map { "update item set n = n + 1 where id = $_" } 1 .. 20);
	sql($tokyo, qq[begin; savepoint a; update item set n = n + 1 where id <= 10; rollback to a; update item set v = '$mode' where id <= 10; prepare transaction 'mode']);
	$tokyo->safe_psql('postgres', join ';', map { "update item set n = n + 1 where id = $_" } 11 .. 20);
	sql($tokyo, q[commit prepared 'mode'; update item set n = n + 1]);
	caught_up($paris, $tokyo);
	same_tables(\@nodes, 'item');
}
is(sql($paris, 'select count(*) from braid.unprepared'), '0', 'all of them could be prepared');
for my $streaming (qw(off on))
{
	sql($paris, "select braid.alter_subscription('$name', streaming => '$streaming', split_transactions_above => 0)");
	my $id = $streaming eq 'on' ? 100000 : 0;
	sql($tokyo, qq[begin; insert into bulk select $id + i, repeat('x', 1000) from generate_series(1, 20000) i; prepare transaction 'large']);
	sql($tokyo, qq[begin; insert into bulk select $id - i, repeat('y', 1000) from generate_series(1, 9000) i; prepare transaction 'never']);
	caught_up($paris, $tokyo);
	is(gids($paris), '2', "prepared: large ones, streaming $streaming");
	$paris->restart;
	$tokyo->restart;
	sql($tokyo, q[commit prepared 'large']);
	sql($tokyo, q[rollback prepared 'never']);
	caught_up($paris, $tokyo);
	is(gids($paris), '0', 'and ended');
	same_tables(\@nodes, 'bulk');
}

# Both ways, under the same name.
my $back = subscribe($tokyo, $paris, two_phase => 'true', copy_data => 'false');
sql($tokyo, q[begin; update item set v = 'tokyo' where id = 10; prepare transaction 'same']);
sql($paris, q[begin; update item set v = 'paris' where id = 11; prepare transaction 'same']);
converged(@nodes);
is(gids($_), '2', 'its own and the other node\'s, on ' . $_->name) for @nodes;
sql($_, q[commit prepared 'same']) for @nodes;
converged(@nodes);
is(gids($_), '0', 'both committed, on ' . $_->name) for @nodes;
is(sql($_, q[select string_agg(v, ',' order by id) from item where id in (10, 11)]), 'tokyo,paris', 'each has both') for @nodes;

# Conflicts. A row that is older than the PREPARE loses, and is kept.
sub cut { disable($_[0], $_[1]); return }
sub join_again { sql($_[0], "select braid.enable_subscription('$_[1]')"); return }
sub row { return sql($_[0], "select v from item where id = $_[1]") }
sub waiting_for { my ($where, $n) = @_; return wait_until(sub { sql($where, 'select count(*) from braid.unprepared') eq $n }, 20) }
sub apart
{
	cut($paris, $name);
	cut($tokyo, $back);
	$_->poll_query_until('postgres', q[select not exists (select from pg_replication_slots where active and slot_name !~ '^braid_deletions')]) for @nodes;
	return;
}
apart();
sql($paris, q[update item set v = 'paris earlier' where id = 12]);
sql($tokyo, q[begin; update item set v = 'tokyo prepared' where id = 12; prepare transaction 'conflict']);
join_again($paris, $name);
caught_up($paris, $tokyo);
is(sql($paris, q[select count(*) from braid.conflict_history]), '0', 'the conflict is in the prepared transaction');
sql($tokyo, q[commit prepared 'conflict']);
join_again($tokyo, $back);
converged(@nodes);
is(row($_, 12), 'tokyo prepared', 'the later one stays, on ' . $_->name) for @nodes;
is(sql($paris, q[select kind, winner, local_row->>'v' from braid.conflict_history]), 'update_origin_differs|remote|paris earlier', 'and the other one is kept');

# The writer had seen one of the rows, and not the other.
sql($paris, q[update item set v = 'paris' where id in (18, 19)]);
converged(@nodes);
apart();
sql($paris, q[update item set v = 'not seen' where id = 19]);
sql($tokyo, q[begin; update item set v = 'prepared' where id in (18, 19); prepare transaction 'seen']);
join_again($paris, $name);
caught_up($paris, $tokyo);
sql($tokyo, q[commit prepared 'seen']);
join_again($tokyo, $back);
converged(@nodes);
is(sql($paris, q[select string_agg(concat_ws(' ', key ->> 'id', winner, coalesce(concurrent::text, 'unknown')), ', ') from braid.conflict_history where key ->> 'id' in ('18', '19')]),
	'19 remote true', 'what was seen is not recorded');

# For rows that were written after the PREPARE, the time of the commit decides, either way.
for my $newer (qw(tokyo paris))
{
	cut($paris, $name);
	sql($tokyo, q[begin; update item set v = 'tokyo prepared', n = 1 where id = 13; insert into item values (300, 'with it', 0) on conflict (id) do update set n = item.n + 1; prepare transaction 'open']);
	my $commit = sub { sql($tokyo, q[commit prepared 'open']); return };
	$commit->() if $newer eq 'paris';
	sql($paris, q[update item set v = 'paris meanwhile', n = 2 where id = 13]);
	join_again($paris, $name);
	if ($newer eq 'tokyo')
	{
		ok(waiting_for($paris, 1), 'it waits for its commit');
		caught_up($paris, $tokyo);
		is(gids($paris), '0', 'and is not prepared');
		$commit->();
	}
	converged(@nodes);
	is(row($_, 13), $newer eq 'tokyo' ? 'tokyo prepared' : 'paris meanwhile', "the newer one, $newer, on " . $_->name) for @nodes;
	same_tables(\@nodes, 'item');
}
# One that is rolled back in the end; and another row under a unique key.
on_all('create table mail (id int primary key, a text unique)', @nodes);
sql($_->[0], "select count(*) from braid.refresh_subscription('$_->[1]', copy_data => false)") for [ $paris, $name ], [ $tokyo, $back ];
cut($paris, $name);
cut($tokyo, $back);
sql($paris, q[insert into mail values (1, 'x'), (2, 'y')]);
sql($tokyo, q[begin; insert into mail values (11, 'x'); prepare transaction 'kept']);
sql($tokyo, q[begin; insert into mail values (12, 'y'); prepare transaction 'dropped']);
join_again($paris, $name);
caught_up($paris, $tokyo);
ok(waiting_for($paris, 2), 'rows in the way: they wait for their commit');
is(sql($paris, q[select string_agg(id::text, ',' order by id) from mail]), '1,2', 'and nothing leaves before');
sql($tokyo, q[commit prepared 'kept']);
sql($tokyo, q[rollback prepared 'dropped']);
join_again($tokyo, $back);
converged(@nodes);
is(sql($_, q[select string_agg(id::text, ',' order by id) from mail]), '2,11', 'one row left for the one that was committed, on ' . $_->name) for @nodes;
# Notes go once they are over, when the stream begins behind their end. It begins where changes are
# flushed, which may be earlier than where they are applied.
sql($tokyo, 'insert into item values (400, \'later\', 0)');
caught_up($paris, $tokyo);
for (1 .. 10)
{
	cut($paris, $name);
	join_again($paris, $name);
	sql($tokyo, 'update item set n = n + 1 where id = 400');
	caught_up($paris, $tokyo);
	last if sql($paris, 'select count(*) from braid.unprepared') eq '0';
}
ok(waiting_for($paris, 0), 'the notes are gone');

# Skipping one that can't be applied: its end finds an empty prepared transaction.
sql($paris, q[alter table item add check (v <> 'bad')]);
sql($tokyo, q[begin; update item set v = 'bad' where id = 14; prepare transaction 'bad']);
ok(wait_until(sub { status($paris, $name)->{state} eq 'error' }, 20), 'it stops');
is(sql($paris, "select error_sqlstate from braid.subscription where subscription_name = '$name'"), '23514', 'with the error');
sql($paris, "select braid.skip_transaction('$name', (select error_lsn from braid.subscription where subscription_name = '$name'))");
caught_up($paris, $tokyo);
is(gids($paris), '1', 'an empty one is prepared');
sql($tokyo, q[commit prepared 'bad'; update item set v = 'good' where id = 14]);
converged(@nodes);
is(row($paris, 14), 'good', 'and it goes on');

# A person ends it here by hand: the commit finds nothing, and reports that.
sql($tokyo, q[begin; update item set v = 'by hand' where id = 15; prepare transaction 'hand']);
caught_up($paris, $tokyo);
my $gid = sql($paris, 'select gid from pg_prepared_xacts');
my ($status, $out, $err) = $paris->psql('postgres', "select braid.resync_table('$name', 'item')");
like($err, qr/transaction "$gid" of subscription "$name" is prepared here/, 'no table is copied meanwhile');
($status, $out, $err) = $paris->psql('postgres', "select braid.alter_subscription('$name', origin => 'any')");
like($err, qr/transaction "$gid" of subscription "$name" is prepared here/, 'nor is it asked for in another way');
sql($paris, "rollback prepared '$gid'");
sql($tokyo, q[commit prepared 'hand']);
ok(wait_until(sub { status($paris, $name)->{state} eq 'error' }, 20), 'it stops');
is(sql($paris, "select error_sqlstate from braid.subscription where subscription_name = '$name'"), '42704', 'there is no such prepared transaction');
like(sql($paris, "select error_hint from braid.subscription where subscription_name = '$name'"), qr/braid\.skip_transaction/, 'with a way out');
sql($paris, "select braid.skip_transaction('$name', (select error_lsn from braid.subscription where subscription_name = '$name'))");
sql($tokyo, q[update item set v = 'again' where id = 15]);
caught_up($paris, $tokyo);
is(row($paris, 15), 'again', 'gone past');

# Calls that are refused.
($status, $out, $err) = $paris->psql('postgres', "select braid.alter_subscription('$name', two_phase => false)");
like($err, qr/two_phase of subscription "$name" cannot be changed/, 'it stays as it was created');
($status, $out, $err) = $paris->psql('postgres', "select braid.alter_subscription('$name', commit_order => 'relaxed')");
like($err, qr/exclude each other/, 'not in relaxed order');
sql($tokyo, q[begin; update item set v = 'left' where id = 16; prepare transaction 'left']);
caught_up($paris, $tokyo);
# Without room for prepared transactions.
$paris->append_conf('postgresql.conf', 'max_prepared_transactions = 1');
$paris->restart;
sql($tokyo, q[begin; update item set v = 'two' where id = 17; prepare transaction 'too many']);
ok(wait_until(sub { (status($paris, $name)->{last_error} // '') =~ /maximum number of prepared transactions reached/ }, 20), 'no room: it says so') or diag explain status($paris, $name);
$paris->append_conf('postgresql.conf', 'max_prepared_transactions = 10');
$paris->restart;
caught_up($paris, $tokyo);
is(gids($paris), '2', 'with room it goes on');
($status, $out, $err) = $paris->psql('postgres', "select braid.drop_subscription('$name')");
like($err, qr/stay prepared and keep their locks.*braid_\d+_\d+_\d+, braid_\d+_\d+_\d+/s, 'who drops the subscription is told what is left');
is(gids($paris), '2', 'they stay');
sql($paris, "commit prepared '$_'") for split /\n/, sql($paris, 'select gid from pg_prepared_xacts');
sql($tokyo, "select braid.drop_subscription('$back')");
sql($tokyo, q[commit prepared 'left']);
sql($tokyo, q[commit prepared 'too many']);
$paris->append_conf('postgresql.conf', 'max_prepared_transactions = 0');
$paris->restart;
($status, $out, $err) = $paris->psql('postgres', 'select braid.create_subscription(\'none\', $$' . $tokyo->connstr('postgres') . '$$, two_phase => true)');
like($err, qr/max_prepared_transactions must be greater than zero.*HINT:  Set max_prepared_transactions/s, 'without any it is not created');

done_testing();
