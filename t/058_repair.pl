# braid.repair: rows become what they are at the provider, with its versions and origins. The repair
# is not sent to other nodes, fires no trigger that an applier would not fire, leaves rows alone
# that were written meanwhile, and is recorded.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep);

my ($tokyo, $paris, $quito) = my @nodes = map { new_node($_) } qw(tokyo paris quito);
on_all(q[
	create table account (id int primary key, owner text unique, balance numeric, note text, n int generated always as identity, doubled numeric generated always as (balance * 2) stored);
	create table entry (id int primary key, account int references account, big text, d timestamptz, b bytea);
	create table fired (name text);
	create function fire() returns trigger language plpgsql as $$ begin insert into public.fired values (tg_name); return new; end $$;
	create trigger ordinary before insert or update on account for each row execute function fire();
	create trigger always before insert or update on entry for each row execute function fire();
], @nodes);
for my $subscriber (@nodes)
{
	for my $provider (@nodes)
	{
		subscribe($subscriber, $provider, copy_data => 'false') if $subscriber != $provider;
	}
}

my %from = (paris => 'paris_from_tokyo', tokyo => 'tokyo_from_paris', quito => 'quito_from_tokyo');
sub compare { my ($node, $table) = @_; return (split /\|/, $node->safe_psql('postgres', "call braid.compare('$from{ $node->name }', '$table')"))[1]; }

# Repaired, left alone.
sub repair
{
	my ($node, $table, $options) = @_;
	my (undef, @counts) = split /\|/, $node->safe_psql('postgres', "call braid.repair('$from{ $node->name }', '$table'" . ($options // '') . ')');
	return "@counts";
}

# Each row with its version: time and node.
sub versions
{
	my ($node, $table) = @_;
	my $name = $node->name;
	return $node->safe_psql('postgres', qq[
		select t.id, v.timestamp, case when v.roident = 0 then '$name' else coalesce(split_part(o.roname, '/', 2), v.roident::text) end
		from $table t cross join lateral pg_xact_commit_timestamp_origin(t.xmin) v left join pg_replication_origin o on o.roident = v.roident order by 1]);
}

$tokyo->safe_psql('postgres', q[
	insert into account (id, owner, balance, note) select i, 'o' || i, i, 'it''s \\' || i from generate_series(1, 10) i;
	insert into entry select i, i, repeat(md5(i::text), 400), '2024-05-01 12:00:00.123456+00', '\x00ff' from generate_series(1, 10) i]);
$paris->safe_psql('postgres', q[insert into account (id, owner, balance) values (20, 'o20', 1), (21, 'o21', 1)]);
$quito->safe_psql('postgres', q[insert into account (id, owner, balance) values (30, 'o30', 1)]);
converged(@nodes);
same_tables(\@nodes, qw(account entry));
on_all('truncate fired', @nodes);
converged(@nodes);
my $before = versions($tokyo, 'account');

write_by_hand($paris, q[update account set balance = -1, note = null where id = 1]);
write_by_hand($paris, q[delete from account where id in (2, 20, 30)]);
write_by_hand($paris, q[insert into account (id, owner, balance) values (99, 'o99', 0)]);
write_by_hand($paris, q[update entry set big = 'short', d = 'infinity', b = null where id = 3]);
write_by_hand($paris, q[delete from entry where id = 4]);

# Said first, done then.
is(compare($paris, 'account'), 5, 'five rows of one table differ');
is(compare($paris, 'entry'), 2, 'two of another');
is(repair($paris, 'account', ', dry_run => true'), '4 1', 'what would be done');
is($paris->safe_psql('postgres', q[select key->'id', action, reason, dry_run from braid.repair_log order by (key->'id')::int]), <<'EXPECTED' =~ s/\n\z//r, 'is shown');
1|updated||t
2|inserted||t
20|inserted||t
30|inserted||t
99|kept|only here: to be repaired at the provider|t
EXPECTED
is(compare($paris, 'account'), 5, 'and not done');

# A session that holds a row makes the repair wait, and what it wrote is left alone.
my $writer = $paris->background_psql('postgres');
$writer->query_safe('begin; update account set balance = 55 where id = 1');
my $repairing = $paris->background_psql('postgres');
$repairing->query_until(qr/begun/, "\\echo begun\ncall braid.repair('paris_from_tokyo', 'account');\n");
ok($paris->poll_query_until('postgres', q[select count(*) = 1 from pg_stat_activity where wait_event_type = 'Lock' and query like 'call braid.repair%']), 'the repair waits for a lock');
my (undef, undef, $err) = $paris->psql('postgres', q[call braid.repair('paris_from_tokyo', 'account')], on_error_stop => 0);
like($err, qr/is being repaired by another session/, 'one repair of a table at a time');
$writer->query_safe('commit');
$writer->quit;
$repairing->quit;
is($paris->safe_psql('postgres', q[select key->'id', action, reason from braid.repair_log where not dry_run order by (key->'id')::int]), <<'EXPECTED' =~ s/\n\z//r, 'done, but for the row that was written');
1|left|written meanwhile: compare again
2|inserted|
20|inserted|
30|inserted|
99|kept|only here: to be repaired at the provider
EXPECTED
converged(@nodes);
is($tokyo->safe_psql('postgres', 'select balance from account where id = 1'), '55', 'which has gone to the others');
is(repair($paris, 'account', q[, side => 'provider', keys => '[{"id": 99}]']), '1 0', 'the provider is right about one row');
is($paris->safe_psql('postgres', q[select action, local_row->>'owner', provider_row is null from braid.repair_log order by done_at desc limit 1]), 'deleted|o99|t', 'which goes, and is kept in the log');
write_by_hand($paris, q[update account set balance = -7 where id in (5, 21)]);
write_by_hand($paris, q[update account set note = 'mine' where id = 1], 'now()');
is(compare($paris, 'account'), 3, 'the note of one row, and two balances');
is($paris->safe_psql('postgres', q[select key->'id', columns, local_origin from braid.differences where relation = 'account'::regclass order by 1]), "1|{note}|by hand\n5|{balance}|by hand\n21|{balance}|by hand",
	'what differs');
is(repair($paris, 'account'), '2 1', 'what is newer here stays');
is($paris->safe_psql('postgres', q[select reason from braid.repair_log where action = 'kept' and key @> '{"id": 1}']), 'newer here: to be repaired at the provider', 'and is to be repaired there');
is(compare($tokyo, 'account'), 1, 'there it is the other way around');
is(repair($tokyo, 'account'), '1 0', 'and is repaired');
is(repair($paris, 'entry'), '2 0', 'large values, infinity, null');
converged(@nodes);
same_tables([ $tokyo, $paris ], qw(account entry));
is(compare($paris, $_), 0, "$_: nothing differs any more") for qw(account entry);

# As if the rows had come by replication.
my $after = versions($paris, 'account');
is(join("\n", grep { !/^1\|/ } split /\n/, $after), join("\n", grep { !/^1\|/ } split /\n/, $before), 'versions and origins are those that the rows have elsewhere');
is($_->safe_psql('postgres', 'select count(*) from fired'), '1', 'no trigger has fired but for the one that wrote, on ' . $_->name) for @nodes;
is($paris->safe_psql('postgres', 'select sum(doubled) = sum(balance) * 2, bool_and(n is not null) from account'), 't|t', 'generated columns are computed');
is($_->safe_psql('postgres', q[select coalesce(note, 'nothing') from account where id = 1]), $_ == $quito ? 'nothing' : 'mine', 'what was repaired on ' . $_->name) for @nodes;
is($quito->safe_psql('postgres', q[select count(*) from braid.conflict_history where not key @> '{"id": 1}']), '0', 'the third node has heard nothing of it');

# A row that can't be written does not delay the others.
write_by_hand($paris, q[delete from account where id in (6, 7)]);
write_by_hand($paris, q[insert into account (id, owner, balance) values (106, 'o6', 0)]);
is(compare($paris, 'account'), 3, 'a row in the way of another');
is(repair($paris, 'account'), '1 2', 'the others are repaired') or diag($paris->safe_psql('postgres', 'select * from braid.repair_log order by done_at desc limit 3'));

# A trigger that appliers fire fires here too.
$paris->safe_psql('postgres', 'alter table entry enable replica trigger always');
write_by_hand($paris, q[delete from entry where id = 9]);
$paris->safe_psql('postgres', 'truncate fired');
is(compare($paris, 'entry'), 1, 'one is gone');
is(repair($paris, 'entry'), '1 0', 'repaired');
is($paris->safe_psql('postgres', 'select string_agg(name, $$,$$) from fired'), 'always', 'a replica trigger has fired');

# The row is replicated as before.
$tokyo->safe_psql('postgres', 'update account set balance = 1000 where id = 2; update entry set big = $$x$$ where id in (3, 4)');
$paris->safe_psql('postgres', 'update account set balance = 1001 where id = 20');
converged(@nodes);
is($paris->safe_psql('postgres', 'select count(*) from braid.conflict_history where recorded_at > (select max(done_at) from braid.repair_log)'), '0', 'no conflict is left behind');
is($paris->safe_psql('postgres', 'select balance from account where id = 2'), '1000', 'the next change is applied');

# A row that was deleted here does not come back, if only the provider has not received the deletion
# yet.
disable($tokyo, 'tokyo_from_paris');
$paris->safe_psql('postgres', 'delete from entry where account in (8, 9); delete from account where id in (8, 9)');
ok($paris->poll_query_until('postgres', 'select bool_and(collected_lsn >= pg_current_wal_flush_lsn()) from braid.deletions'), 'what was deleted is collected');
write_by_hand($paris, q[delete from account where id = 10]);
is(compare($paris, 'account'), 5, 'two are deleted here only, one was lost, one is in the way of another');
is(repair($paris, 'account', ', dry_run => true'), '1 4', 'one would be repaired');
is(repair($paris, 'account'), '1 4', 'and is');
is($paris->safe_psql('postgres', q[select dry_run, string_agg(key->>'id' || ' ' || action || coalesce(' ' || reason, ''), ', ' order by (key->>'id')::int) from braid.repair_log
		where repair_id >= (select max(repair_id) - 1 from braid.repair_log) and key->>'id' in ('8', '9', '10') group by dry_run order by dry_run desc]), <<'EXPECTED' =~ s/\n\z//r, 'for this reason');
t|8 kept deleted here later: to be repaired at the provider, 9 kept deleted here later: to be repaired at the provider, 10 inserted
f|8 kept deleted here later: to be repaired at the provider, 9 kept deleted here later: to be repaired at the provider, 10 inserted
EXPECTED
is($paris->safe_psql('postgres', 'select string_agg(id::text, $$ $$ order by id) from account where id between 8 and 10'), '10', 'nothing comes back');
$tokyo->safe_psql('postgres', "select braid.enable_subscription('tokyo_from_paris')");
converged(@nodes);
is($tokyo->safe_psql('postgres', 'select string_agg(id::text, $$ $$ order by id) from account where id between 8 and 10'), '10', 'the provider hears of it');

done_testing();
