# A clock that steps back between PREPARE TRANSACTION and COMMIT PREPARED never makes nodes differ.
# The transaction gets a version behind all that its node has seen, though nothing can be added to
# it any more. That version reaches nodes that had it prepared, nodes that get it whole, the
# collector of deletions and readers of JSON.

use strict;
use warnings;

use Braid;
use Clocks;
use PostgreSQL::Test::Utils;
use Test::More;

my ($clocks, @nodes) = nodes_on_clocks("max_prepared_transactions = 50\n");
my @clocks = @$clocks;
my ($tokyo, $paris, $oslo) = @nodes;
sub on_clock { my ($i, $seconds, $sql) = @_; $clocks[$i]->set($seconds); return sql($nodes[$i], $sql); }
sub written { return sql($tokyo, 'select count(distinct committed_at) from braid.local_version where xid <> 0'); }

# At random: rows of few keys are written everywhere, half of them by prepared transactions, while
# clocks are set forth and back.
write_while_clocks_step($clocks, \@nodes, q[
\set k random(1, 40)
\set what random(1, 6)
\set r random(1, 1000000000)
begin;
\if :what = 4
delete from hot where k = :k;
\else
insert into hot values (:k, 1, '%s') on conflict (k) do update set n = hot.n + 1, who = excluded.who;
\endif
\if :what > 3
prepare transaction 'load :client_id :r';
commit prepared 'load :client_id :r';
\else
commit;
\endif
], 12);

# From here on paris has tokyo's prepared transactions prepared; oslo gets them whole.
sql($paris, q[select braid.drop_subscription('paris_from_tokyo')]);
subscribe($paris, $tokyo, copy_data => 'false', two_phase => 'true');
# The rows' version as tokyo, or another node's commit record, has it.
my $versions = sub { return "select id, braid.commit_timestamp(xmin) from item where id in ($_[0]) order by 1" };

# Tokyo writes in a minute, and again, now, by prepared transactions. In between, paris has written,
# and knows of neither. Oslo gets tokyo's first.
link_up($_, $paris, 0) for $tokyo, $oslo;
link_up($paris, $tokyo, 0);
on_clock(0, 60, q[update item set v = 'first' where id in (1, 4)]);
sql($tokyo, q[begin; savepoint a; update item set v = 'second' where id in (1, 4); release a; insert into item values (5001, 'second'); delete from item where id = 3; prepare transaction 'second']);
my $before = written();
on_clock(0, 0, q[commit prepared 'second']);
is(written(), $before + 1, 'one version is written down');
is(sql($tokyo, q[select count(distinct braid.commit_timestamp(xmin)) || ' ' || min(braid.commit_timestamp(xmin) - pg_xact_commit_timestamp(xmin)) between '1 00:00:05' and '1 00:01:01' from item where id in (1, 4, 5001)]),
	't', 'which is that of its rows');
on_clock(1, 10, q[update item set v = 'paris' where id <= 4]);
# Whatever becomes of the table's files before that is decoded.
sql($tokyo, 'vacuum full braid.local_version; reindex table braid.local_version');
caught_up($oslo, $tokyo);
is(sql($oslo, q[select string_agg(v, ' ' order by id) from item where id in (1, 2, 3, 4)]), 'second old second', 'oslo has what tokyo wrote last');
is(sql($oslo, $versions->('1, 4, 5001')), sql($tokyo, $versions->('1, 4, 5001')), 'under that version');
link_up($_, $paris, 1) for $tokyo, $oslo;
caught_up($_, $paris) for $tokyo, $oslo;
link_up($paris, $tokyo, 1);
converged(@nodes);
same_tables(\@nodes, qw(item));
is(sql($_, q[select string_agg(v, ' ' order by id) from item where id <= 4]), 'second paris second', 'what tokyo wrote in a minute counts, and what it deleted, at ' . $_->name) for @nodes;

# Prepared at paris before it is committed.
my $newest = sql($tokyo, 'select newest_seen from braid.clock_status');
sql($tokyo, q[begin; update item set v = 'there' where id = 5; prepare transaction 'there']);
caught_up($paris, $tokyo);
is(sql($paris, 'select count(*) from pg_prepared_xacts'), '1', 'it is prepared at paris');
sql($tokyo, q[commit prepared 'there']);
is(sql($tokyo, qq[select braid.commit_timestamp(xmin) > '$newest' from item where id = 5]), 't', 'its version is after all that tokyo has seen');
converged(@nodes);
is(sql($_, $versions->(5)), sql($tokyo, $versions->(5)), 'and the same at ' . $_->name) for $paris, $oslo;

# A large one, which paris gets before it is prepared.
sql($paris, q[select braid.alter_subscription('paris_from_tokyo', streaming => 'on')]);
sql($tokyo, q[begin; update item set v = repeat('long', 50) || id where id > 10; prepare transaction 'large'; commit prepared 'large']);
converged(@nodes);
same_tables(\@nodes, qw(item));
is(sql($_, $versions->('11, 1000')), sql($tokyo, $versions->('11, 1000')), 'a large one comes under its version, at ' . $_->name) for $paris, $oslo;

# An attempt that ended between the version and the commit. Much has come since, and the clock is
# right again.
sql($tokyo, q[begin; update item set v = 'again' where id = 6; prepare transaction 'again']);
sql($tokyo, q[insert into braid.local_version select transaction::text::bigint, extract(epoch from now()) * 1000000 from pg_prepared_xacts where gid = 'again']);
on_clock(0, 120, q[update item set v = 'since' where id = 7]);
sql($tokyo, q[commit prepared 'again']);
is(sql($tokyo, q[select (select braid.commit_timestamp(xmin) from item where id = 6) > (select braid.commit_timestamp(xmin) from item where id = 7)]), 't', 'the next attempt has a version of its own, though the clock is ahead');
converged(@nodes);
is(sql($_, $versions->('6, 7')), sql($tokyo, $versions->('6, 7')), 'and is known by it at ' . $_->name) for $paris, $oslo;

# In the extended protocol too.
$clocks[0]->set(0);
sql($tokyo, q[begin; update item set v = 'extended' where id = 8; prepare transaction 'extended']);
append_to_file(my $script = PostgreSQL::Test::Utils::tempdir() . '/commit.sql', "commit prepared 'extended';\n");
$before = written();
$tokyo->command_ok([ 'pgbench', '-n', '-t', '1', '-M', 'extended', '-f', $script, 'postgres' ], 'COMMIT PREPARED as a message of its own');
is(written(), $before + 1, 'has a version');

# A COMMIT PREPARED that fails leaves nothing behind.
sub refused
{
	my ($sql, $expected, $what) = @_;
	my $count = written();
	my (undef, undef, $said) = $tokyo->psql('postgres', $sql, extra_params => [ '-v', 'VERBOSITY=verbose' ]);
	like($said, qr/$expected/, $what);
	is(written(), $count, 'and nothing is written down');
	is(sql($tokyo, q[select count(*) from pg_prepared_xacts where gid = 'refused']), '1', 'it is still prepared');
	return;
}
sql($tokyo, q[create role stranger; create database elsewhere; begin; update item set v = 'refused' where id = 9; prepare transaction 'refused']);
refused(q[begin; commit prepared 'refused'], '25001', 'in a transaction block');
refused(q[select 1\; commit prepared 'refused'], '25001', 'with other statements in one query');
refused(q[do $$ begin execute $x$commit prepared 'refused'$x$; end $$], '0A000|2D000|25001', 'in a function');
refused(q[set role stranger; commit prepared 'refused'], '42501', 'as somebody else');
refused(q[commit prepared 'unheard of'], '42704', 'under a name that is none');
refused(q[\c elsewhere
commit prepared 'refused'], '0A000', 'in another database');
refused(q[set braid.clock_behind_action = error; commit prepared 'refused'], '55000', 'where it is to fail');
sql($tokyo, q[set braid.max_clock_wait = 0; commit prepared 'refused']);
is(sql($tokyo, q[select braid.commit_timestamp(xmin) - pg_xact_commit_timestamp(xmin) > '5 s' from item where id = 9]), 't', 'it can be tried again, and without a wait it has a version too');

# Consumers of JSON get the version as the time of the commit; wal2json's form has the time in WAL.
sql($tokyo, q[select pg_create_logical_replication_slot('json', 'braid')]);
sql($tokyo, q[begin; update item set v = 'json' where id = 10; prepare transaction 'json'; commit prepared 'json']);
my $version = sql($tokyo, q[select extract(epoch from braid.commit_timestamp(xmin)) from item where id = 10]);
is(sql($tokyo, q[select extract(epoch from (data::jsonb #>> '{transaction,commit_time}')::timestamptz) from pg_logical_slot_peek_changes('json', null, null, 'format', 'gir-json', 'publication_names', 'braid') where data like '%update%']),
	$version, 'gir-json has the version');
my $clock = sql($tokyo, q[select extract(epoch from pg_xact_commit_timestamp(xmin)) from item where id = 10]);
cmp_ok($version, '>', $clock + 5, 'which is ahead of the clock');
is(sql($tokyo, q[select extract(epoch from (data::jsonb ->> 'timestamp')::timestamptz) from pg_logical_slot_peek_changes('json', null, null, 'format', 'wal2json', 'include-timestamp', 'true', 'add-tables', 'public.item') where data like '%update%']),
	$clock, 'wal2json the time of the commit');
converged(@nodes);
same_tables(\@nodes, qw(item hot));

# After a restart, too.
$clocks[0]->over(sub { $tokyo->restart });
sql($tokyo, q[begin; update item set v = 'restart' where id = 10; prepare transaction 'restart']);
$clocks[0]->over(sub { $tokyo->restart });
sql($tokyo, q[commit prepared 'restart']);
converged(@nodes);
is(sql($_, $versions->(10)), sql($tokyo, $versions->(10)), 'a version that was given after a restart is the same at ' . $_->name) for $paris, $oslo;
is(sql($tokyo, qq[select extract(epoch from braid.commit_timestamp(xmin)) > $version from item where id = 10]), 't', 'and newer than all before');

like(slurp_file($tokyo->logfile), qr/WARNING:  this node's clock is \d+ ms behind.*DETAIL:  The transaction gets a version that follows that change/s, 'a warning has said so');
unlike(slurp_file($_->logfile), qr/PANIC|TRAP|panicked/, 'nothing broke at ' . $_->name) for @nodes;

done_testing();
