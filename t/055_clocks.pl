# I4: a transaction that changes a row gets a newer version than the row had, even if the clock of
# the node that wrote the row is ahead: its commit waits. If that would take too long, it does not
# wait but warns, or fails if so configured. No other session waits.

use strict;
use warnings;

use Braid;
use IPC::Run ();
use Test::More;
use Time::HiRes qw(time);

my $conf = "max_prepared_transactions = 5\nbraid.max_clock_wait = 20s\n";
my $tokyo = new_node('tokyo', conf => $conf);
my $paris = new_node('paris', conf => $conf);
my @both = ($tokyo, $paris);
on_all('create table item (id int primary key, v text)', @both);
$tokyo->safe_psql('postgres', q[
	insert into item select i, 'old' from generate_series(1, 20) i;
	create sequence position;
	-- A change that came to tokyo from a system whose clock is ahead.
	create function shop(id int, v text, ahead interval) returns void language sql as $$
		select braid.ingest(jsonb_build_object('operation', 'update',
			'transaction', jsonb_build_object('lsn', ('0/0'::pg_lsn + nextval('position'))::text,
				'commit_time', to_char((clock_timestamp() + ahead) at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')),
			'schema', jsonb_build_object('namespace', 'public', 'table', 'item', 'columns',
				'[{"name": "id", "type": "int4", "identity": true}, {"name": "v", "type": "text"}]'::jsonb),
			'after', jsonb_build_object('id', id, 'v', v)), 'shop') $$;
]);
subscribe($paris, $tokyo, origin => q['any']);
subscribe($tokyo, $paris, origin => q['any'], copy_data => 'false');
$paris->safe_psql('postgres', 'create database other');

sub waits { return $_[0]->safe_psql('postgres', 'select waits from braid.clock_status'); }
sub stamp { return $_[0]->safe_psql('postgres', "select extract(epoch from pg_xact_commit_timestamp(xmin)) from item where id = $_[1]"); }
# Once the shop's value is there, in the same session: no time passes.
sub when_there { return "do \$\$ begin while (select v from item where id = $_[0]) <> 'shop' loop perform pg_sleep(0.01); end loop; end \$\$;"; }

# A version from a clock that is ahead: at the node that has ingested it, and at its subscriber.
$tokyo->safe_psql('postgres', q[select shop(1, 'shop', '4 s'); update item set v = 'tokyo' where id = 1]);
is(waits($tokyo), '1', 'a commit after it waits, where it came in');
$tokyo->safe_psql('postgres', q[select shop(2, 'shop', '4 s')]);
my $shop = stamp($tokyo, 2);
$paris->safe_psql('postgres', when_there(2) . q[update item set v = 'paris' where id = 2]);
cmp_ok(stamp($paris, 2), '>', $shop, 'the newer value has the newer version');
is(waits($paris), '1', 'since its commit has waited');
converged(@both);
is(join(' ', map { $_->safe_psql('postgres', q[select v from item where id <= 2 order by id]) } @both), "tokyo\nparis tokyo\nparis", 'and wins everywhere');
is($paris->safe_psql('postgres', q[select waited between '1 ms' and '5 s' and exceeded = 0 from braid.clock_status]), 't', 'the view says so');

# A transaction that was prepared before; one that another of its savepoints wrote.
$paris->safe_psql('postgres', q[begin; update item set v = 'prepared' where id = 4; prepare transaction 'p']);
$tokyo->safe_psql('postgres', q[select shop(3, 'shop', '4 s')]);
$shop = stamp($tokyo, 3);
$paris->safe_psql('postgres', when_there(3) . q[commit prepared 'p'; begin; savepoint s; update item set v = 'part' where id = 3; release s; commit]);
cmp_ok(stamp($paris, 4), '>', $shop, 'a prepared transaction waits when it is committed');
cmp_ok(stamp($paris, 3), '>', $shop, 'a part of a transaction is one');
converged(@both);

# Sessions that saw no newer row do not wait: readers, a transaction that is rolled back, another
# database.
my $before = waits($paris);
$tokyo->safe_psql('postgres', q[select shop(5, 'shop', '4 s')]);
$paris->safe_psql('postgres', when_there(5) . q[begin; select count(*) from item; commit; begin; update item set v = 'no' where id = 6; rollback;]);
$paris->safe_psql('other', 'create table t (i int); insert into t values (1)');
is(waits($paris), $before, 'readers, what is rolled back and other databases do not wait');
# Nor what is applied: it has a version.
$tokyo->safe_psql('postgres', q[set braid.max_clock_wait = 0; update item set v = 'tokyo' where id = 6]);
caught_up($paris, $tokyo);
is(waits($paris), $before, 'nor do appliers');

# Cancelled while it waits: nothing is committed.
$tokyo->safe_psql('postgres', q[select shop(7, 'shop', '15 s')]);
my ($status, $out, $err) = (undef, '', '');
my $waiting = IPC::Run::start([ 'psql', '-XAtq', '-d', $paris->connstr('postgres'), '-c', when_there(7), '-c', q[update item set v = 'late' where id = 7] ],
	'<', \undef, '>', \$out, '2>', \$err);
ok($paris->poll_query_until('postgres', q[select count(*) > 0 from (select pg_cancel_backend(pid) from pg_stat_activity
	where query ~ '^update item set v = .late' and wait_event_type = 'Extension') c]), 'a commit is seen to wait');
$waiting->finish;
like($err, qr/canceling statement due to user request/, 'it can be cancelled');
is($paris->safe_psql('postgres', q[select v from item where id = 7]), 'shop', 'with its transaction');

# The newest version is remembered through a restart.
$paris->restart;
ok($paris->poll_query_until('postgres', "select newest_seen >= to_timestamp(" . stamp($paris, 7) . ") from braid.clock_status"), 'a restart does not forget what was seen');
$paris->safe_psql('postgres', q[update item set v = 'paris' where id = 7]);
converged(@both);
is(join(' ', map { $_->safe_psql('postgres', q[select v from item where id = 7]) } @both), 'paris paris', 'and the later one wins');

# Hours ahead: to wait would be of no use.
$tokyo->safe_psql('postgres', q[select shop(8, 'shop', '3 h')]);
my $began = time;
($status, $out, $err) = $paris->psql('postgres', when_there(8) . q[update item set v = 'paris' where id = 9; update item set v = 'paris' where id = 10]);
is($status, 0, 'commits go on');
is(() = $err =~ /WARNING:  this node's clock is 10\d+ ms behind/g, 1, 'with one warning, not one for each') or diag $err;
like($err, qr/HINT:  Synchronize the clocks/, 'that says what to do');
cmp_ok(time - $began, '<', 15, 'and at once');
is($paris->safe_psql('postgres', q[select exceeded, behind > '2 h' from braid.clock_status]), '2|t', 'each is counted');
($status, $out, $err) = $paris->psql('postgres', q[set braid.clock_behind_action = error; update item set v = 'no' where id = 9]);
like($err, qr/ERROR:  this node's clock is \d+ ms behind/, 'or they fail');
is($paris->safe_psql('postgres', 'select v from item where id = 9'), 'paris', 'and nothing is written');
($status, $out, $err) = $paris->psql('postgres', q[set braid.max_clock_wait = 0; set braid.clock_behind_action = error; update item set v = 'yes' where id = 9]);
is("$status $err", '0 ', 'with 0 nothing waits and nothing fails');
cmp_ok($paris->safe_psql('postgres', q[select extract(epoch from braid.commit_timestamp(i.xmin) - s.xmin_at) from item i, (select pg_xact_commit_timestamp(xmin) as xmin_at from item where id = 8) s where i.id = 9]),
	'>', 0, 'but its version is newer than what was seen');
($status, $out, $err) = $paris->psql('other', 'insert into t values (2)');
is("$status $err", '0 ', 'another database has a clock of its own');
# Braid's own commits do not wait.
$paris->safe_psql('postgres', q[select braid.disable_subscription('paris_from_tokyo')]);
$paris->safe_psql('postgres', q[select braid.enable_subscription('paris_from_tokyo')]);
$tokyo->safe_psql('postgres', q[update item set v = 'last' where id = 20]);
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select v from item where id = 20'), 'last', 'subscriptions go on');

done_testing();
