# Transactions that are prepared before, while and after tables are copied: changes that a copy has
# seen are left out, the rest is applied. Deletions by a prepared transaction are remembered with
# the time of its commit.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $conf = "max_prepared_transactions = 20\nautovacuum = off\n";
my $tokyo = new_node('tokyo', conf => $conf);
my $paris = new_node('paris', conf => $conf);
my $oslo = new_node('oslo', conf => $conf);
my @nodes = ($tokyo, $paris);
on_all('create table item (id int primary key, v text); create table other (id int primary key)', @nodes, $oslo);
$tokyo->safe_psql('postgres', q[insert into item select i, 'old' from generate_series(1, 20) i]);

sub sql { return $_[0]->safe_psql('postgres', $_[1]) }
sub gids { return sql($_[0], 'select count(*) from pg_prepared_xacts') }

# A transaction with an id, and whether a session waits for its end.
sub runner
{
	my $session = $tokyo->background_psql('postgres');
	$session->query_safe('begin');
	my $xid = $session->query_safe('select pg_current_xact_id()');
	return ($session, $xid);
}

sub waits_for
{
	my ($xid) = @_;
	ok(wait_until(sub { sql($tokyo, "select count(*) from pg_locks where not granted and locktype = 'transactionid' and transactionid = '$xid'") > 0 }, 30), 'a slot waits for what runs');
	return;
}

# The slot of a copy waits twice: for what runs at its first look, and for what runs then. In
# between, decoding has begun.
sub while_slot_is_made
{
	my ($begin, $meanwhile) = @_;
	my ($one, $first) = runner();
	$begin->();
	waits_for($first);
	my ($two, $second) = runner();
	$one->query_safe('commit');
	waits_for($second);
	$meanwhile->();
	$two->query_safe('commit');
	$_->quit for $one, $two;
	return;
}

# Prepared before the subscription: the slot waits for its end, and the copy has it.
sql($tokyo, q[begin; update item set v = 'before' where id = 1; prepare transaction 'before']);
my $name;
while_slot_is_made(
	sub {
		$name = subscribe($paris, $tokyo, two_phase => 'true', wait => 0);
		ok(wait_until(sub { sql($tokyo, "select count(*) from pg_locks where not granted and locktype = 'transactionid'") > 0 }, 30), 'the slot waits');
		sql($tokyo, q[commit prepared 'before']);
	},
	# Before the slot's first position, and committed after it; before it and committed before it.
	sub {
		sql($tokyo, q[begin; update item set v = 'straddles' where id = 2; insert into item values (102, 'straddles'); prepare transaction 'straddles']);
		sql($tokyo, q[begin; update item set v = 'rolled back' where id = 3; prepare transaction 'rolled back']);
		sql($tokyo, q[begin; insert into item values (103, 'gone'); prepare transaction 'gone']);
		sql($tokyo, q[commit prepared 'gone'; delete from item where id = 103]);
	});
sql($paris, "select braid.wait_for_subscription('$name')");
caught_up($paris, $tokyo);
is(gids($paris), '0', 'what was prepared before the slot was there is not prepared here');
is(sql($paris, 'select v from item where id in (1, 2) order by id'), "before\nold", 'what had been committed is copied');
# The commit is later than the newest time that came from a clock that is ahead.
on_all('create table ahead (id int primary key)', @nodes);
sql($tokyo, q[
	select * from braid.ingest(jsonb_build_object('operation', 'insert', 'after', '{"id": 1}'::jsonb,
		'transaction', jsonb_build_object('lsn', '0/10', 'commit_time', to_char((now() + '5 s') at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')),
		'schema', '{"namespace": "public", "table": "ahead", "columns": [{"name": "id", "type": "int4", "identity": true}]}'::jsonb), 'ahead')]);
sql($tokyo, q[commit prepared 'straddles']);
sql($tokyo, q[rollback prepared 'rolled back']);
caught_up($paris, $tokyo);
same_tables(\@nodes, 'item');
my $times = q[select braid.commit_timestamp(xmin) from item where id in (2, 102)];
is(sql($paris, $times), sql($tokyo, $times), 'it came as a whole when it was committed, with that time');
is(sql($tokyo, q[select braid.commit_timestamp(xmin) > pg_xact_commit_timestamp(xmin) + interval '1 s' from item where id = 2]), 't', 'or that of its version, rather');
ok($tokyo->poll_query_until('postgres', q[select behind = '0' from braid.clock_status]), 'which is past');

# The same while a table is copied again, when such transactions come prepared: the snapshot says of
# each whether it is in the copy.
sql($paris, 'truncate item');
while_slot_is_made(
	sub { sql($paris, "select braid.resync_table('$name', 'item')") },
	sub {
		sql($tokyo, q[begin; update item set v = 'straddles again' where id = 4; insert into item values (104, 'straddles'); insert into other values (4); prepare transaction 'straddles']);
		sql($tokyo, q[begin; update item set v = 'rolled back' where id = 5; prepare transaction 'rolled back']);
		sql($tokyo, q[begin; insert into item values (105, 'gone'); insert into other values (5); prepare transaction 'gone']);
		sql($tokyo, q[commit prepared 'gone'; delete from item where id = 105]);
	});
$paris->poll_query_until('postgres', q[select state = 'ready' from braid.subscription_table where relation = 'item'::regclass]) or die 'not ready';
caught_up($paris, $tokyo);
is(gids($paris), '2', 'two are prepared');
is(sql($paris, 'select string_agg(id::text, \',\') from item where id > 100'), '102', 'and what had ended is as it was copied');
sql($tokyo, q[commit prepared 'straddles']);
sql($tokyo, q[rollback prepared 'rolled back']);
caught_up($paris, $tokyo);
same_tables(\@nodes, 'item', 'other');
is(sql($paris, 'select count(*) from braid.conflict_history'), '0', 'nothing was applied to rows that had it');

# A new table of a publication FOR ALL TABLES.
sql($paris, 'create table new (id int primary key)');
sql($tokyo, q[begin; create table new (id int primary key); insert into new values (1), (2); prepare transaction 'new']);
caught_up($paris, $tokyo);
sql($tokyo, q[commit prepared 'new'; insert into new values (3)]);
caught_up($paris, $tokyo);
same_tables(\@nodes, 'new');
sql($paris, 'create table never (id int primary key)');
sql($tokyo, q[begin; create table never (id int primary key); insert into never values (1), (2); prepare transaction 'never']);
caught_up($paris, $tokyo);
sql($tokyo, q[rollback prepared 'never'; insert into new values (4)]);
# There is nothing to copy, because the provider has no such table: the log says so, and the
# subscription goes on.
ok(wait_until(sub { sql($paris, q[select state from braid.subscription_table where relation = 'never'::regclass]) eq 'ready' }, 20), 'one that never came to be is not copied');
like(slurp_file($paris->logfile), qr/public\.never: the table is not at the provider any more, and not copied/, 'is said');
isnt(status($paris, $name)->{state}, 'error', 'and stops nobody');
caught_up($paris, $tokyo);
same_tables(\@nodes, 'new');

# Deleted at a time that is known with the commit: what another node wrote before that does not come
# back.
my $third = subscribe($paris, $oslo, copy_data => 'false');
ok(wait_until(sub { sql($paris, 'select remembered from braid.deletions') eq 't' }, 20), 'deletions are remembered');
sql($tokyo, q[begin; delete from item where id in (6, 7); prepare transaction 'deletes']);
caught_up($paris, $tokyo);
disable($paris, $third);
sql($oslo, q[insert into item values (6, 'while it was prepared')]);
sql($tokyo, q[commit prepared 'deletes']);
caught_up($paris, $tokyo);
sql($oslo, q[insert into item values (7, 'later')]);
ok(wait_until(sub { sql($paris, 'vacuum item'); sql($paris, q[select count(*) from braid.tombstone where deleted_at = 0]) eq '2' }, 5), 'two tombstones, whose time their commit tells');
sql($paris, "select braid.enable_subscription('$third')");
caught_up($paris, $oslo);
is(sql($paris, 'select id, v from item where id in (6, 7)'), '7|later', 'only what is newer than the commit comes back');
is(sql($paris, q[select kind, winner from braid.conflict_history]), 'update_deleted|local', 'the other one is recorded') or diag(sql($paris, 'select kind, winner, reason, key from braid.conflict_history'));
# Work that the manager does once an hour.
is(sql($paris, q[select count(*) from braid.tombstone where abs((extract(epoch from pg_xact_commit_timestamp(xmin)) * 1000000)::bigint - (select (extract(epoch from max(pg_xact_commit_timestamp(t.xmin))) * 1000000)::bigint from braid.tombstone t where deleted_at = 0)) < 1]) > 0 ? 1 : 0, 1, 'they have it');

done_testing();
