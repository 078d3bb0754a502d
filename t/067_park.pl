# on_error => 'park': a transaction that can't be applied is parked with its dependents, and
# everything else goes on. It survives a restart, and is applied later, in order and with its own
# version, or given up.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo', conf => "max_prepared_transactions = 5\n");
my $paris = new_node('paris', publication => '', conf => "braid.appliers_per_subscription = 4\n");

on_all('create table item (id int primary key, v text); create table other (id int primary key, v text)', $tokyo, $paris);
my $name = subscribe($paris, $tokyo, on_error => "'park'");

# SQL's answer at the subscriber.
sub here { return $paris->safe_psql('postgres', shift) }

# Parked transactions: state, and the place in the list of the one that each waits for.
sub parked
{
	return here(q[with p as (select *, row_number() over (order by parked_id) as n from braid.parked_transactions where state <> 'skipped')
		select string_agg(state || coalesce(' ' || (select q.n from p q where q.parked_id = p.waits_for), ''), ', ' order by parked_id) from p]);
}

sub ids { return split /\n/, here(q[select parked_id from braid.parked_transactions where state <> 'skipped' order by parked_id]) }

sub retry
{
	my ($id) = @_;
	my ($out, $err) = ('', '');
	my $status = $paris->psql('postgres', "select braid.retry_parked('$name'" . (defined $id ? ", $id" : '') . ')', stdout => \$out, stderr => \$err);
	return ($status == 0 ? $out : 'error', $err);
}

sub versions_are_the_sources
{
	my ($table, $why) = @_;
	my $sql = "select id || ' ' || pg_xact_commit_timestamp(xmin) from $table order by id";
	is(here($sql), $tokyo->safe_psql('postgres', $sql), "$why: rows of $table have the source's timestamps");
	return;
}

foreach my $mode (q[apply_mode => 'parallel'], q[apply_mode => 'serial'], q[apply_mode => 'parallel', commit_order => 'relaxed'], q[apply_mode => 'batch', commit_order => 'source'],
	q[apply_mode => 'aggregate'], q[apply_mode => 'batch', commit_order => 'relaxed', consolidate => true])
{
	here("select braid.alter_subscription('$name', $mode)");
	$tokyo->safe_psql('postgres', 'truncate item, other');
	caught_up($paris, $tokyo);

	# A constraint that is only here.
	here(q[alter table item add constraint short check (length(v) < 10)]);
	$tokyo->safe_psql('postgres', $_)
	  for q[insert into item select i, 'v' || i from generate_series(1, 5) i],
	  q[begin; update item set v = 'much too long' where id = 1; insert into other values (1, 'with it'); commit],
	  q[insert into other values (2, 'alone')],
	  q[update other set v = 'after' where id = 1],
	  q[update item set v = 'short' where id = 1],
	  q[begin; update item set v = 'fine' where id = 2; update other set v = 'fine' where id = 2; commit],
	  q[begin; update item set v = 'both' where id in (1, 3); commit],
	  q[update item set v = 'three' where id = 3],
	  q[update item set v = 'four' where id = 4];
	caught_up($paris, $tokyo);
	is(parked(), 'failed, waiting 1, waiting 1, waiting 3, waiting 4', "$mode: one fails, four wait");
	is(here(q[select string_agg(id || v, ',' order by id) from item]), '1v1,2fine,3v3,4four,5v5', "$mode: what is independent is there");
	is(here(q[select string_agg(id || v, ',' order by id) from other]), '2fine', "$mode: and nothing of what is parked");
	like(status($paris, $name)->{state}, qr/streaming|catching up/, "$mode: the subscription runs");
	is(status($paris, $name)->{parked}, '5', "$mode: and says how many are parked");

	# The cause is still there.
	my ($done, $said) = retry();
	is($done, '0', "$mode: nothing can be applied yet");
	like($said, qr/WARNING.*still has 5 parked/s, "$mode: and the session is told");

	here('alter table item drop constraint short');
	is((retry())[0], '5', "$mode: all are applied");
	caught_up($paris, $tokyo);
	same_tables([ $tokyo, $paris ], qw(item other));
	versions_are_the_sources($_, $mode) for qw(item other);
	is(here('select count(*) from braid.parked_transaction') . here('select count(*) from braid.parked_record'), '00', "$mode: nothing is left");
}

here("select braid.alter_subscription('$name', apply_mode => 'parallel', consolidate => false, commit_order => 'source')");

# A parked transaction's record, which survives a restart. Here a trigger fails; the whole table
# waits, because nobody knows what triggers do.
here(q[create function refuse() returns trigger language plpgsql as $$ begin if new.v = 'bad' then raise exception 'not here' using hint = 'Ask somebody.'; end if; return new; end $$;
	create trigger refuse before insert or update on item for each row execute function refuse();
	alter table item enable always trigger refuse]);
$tokyo->safe_psql('postgres', $_)
  for q[begin; update item set v = 'bad' where id = 5; insert into other values (50, 'é "x"'); commit], q[update item set v = 'good' where id = 4], q[insert into other values (51, 'flows')];
caught_up($paris, $tokyo);
is(parked(), 'failed, waiting 1', 'a trigger fails: its table waits');
is(here('select string_agg(id::text, $$,$$ order by id) from other where id >= 50'), '51', 'the other table does not');
my ($first, $second) = ids();
is( here("select subscription, state, error, error_sqlstate, error_hint, attempts, changes, relations, origin, bytes > 50 from braid.parked_transactions where parked_id = $first"),
	"$name|failed|not here|P0001|Ask somebody.|1|2|{public.item,public.other}|tokyo|t", 'the view says why and what');
is(here("select commit_lsn < end_lsn and committed_at < parked_at and xid::text::int > 0 from braid.parked_transactions where parked_id = $first"), 't', 'and which');
is( here("select number || ' ' || (record ->> 'operation') || ' ' || (record -> 'schema' ->> 'table') || ' ' || (record -> 'after')::text from braid.parked_changes where parked_id = $first order by number"),
	qq[1 update item {"id":5,"v":"bad"}\n2 insert other {"id":50,"v":"é \\"x\\""}], 'its changes can be read');
like(slurp_file($paris->logfile), qr/WARNING:.*has parked the transaction that ends at .* as number $first: not here/, 'the log warns');
$paris->restart;
$tokyo->safe_psql('postgres', q[update other set v = 'later' where id = 50; update other set v = 'too' where id = 51]);
caught_up($paris, $tokyo);
is(parked(), 'failed, waiting 1, waiting 1', 'after a restart they are there, and hold what they held');

# Writes of this node itself are not held back: versions decide when the transaction is applied.
here(q[alter table item disable trigger refuse; update item set v = 'here' where id = 5]);
is((retry($second))[0], '0', 'one that has to wait is not applied before the other');
is((retry($first))[0], '3', 'the first takes along what waited for it');
is(here('select v from item where id = 5'), 'here', 'a newer row of this node has stayed');
is(here('select count(*) from braid.conflict_history where local_row ->> $$v$$ = $$here$$'), '1', 'and the conflict is recorded');
here('drop trigger refuse on item');
$tokyo->safe_psql('postgres', q[update item set v = 'here' where id = 5]);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], qw(item other));

# A table that is not here, and one that lacks a column.
here('alter table item rename to away; alter table other drop column v');
$tokyo->safe_psql('postgres', $_) for q[update item set v = 'r' where id = 1], q[update other set v = 'c' where id = 1], q[update item set v = 's' where id = 2];
caught_up($paris, $tokyo);
is(parked(), 'failed, failed, failed', 'independent ones fail one by one');
is(here('select string_agg(error_sqlstate, $$,$$ order by parked_id) from braid.parked_transactions'), '42P01,42703,42P01', 'each with its error');
here('alter table away rename to item');
is((retry())[0], '2', 'two can be applied now');
is(parked(), 'failed', 'one is left');
here('alter table other add column v text');
is((retry())[0], '1', 'and now that');
here(q[update other set v = null]);
$tokyo->safe_psql('postgres', q[update other set v = 'all']);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], qw(item other));

# A conflict that is to be an error, and a function that fails: only that row waits.
here(q[create function clash(local item, remote item, before item, info braid.conflict) returns item language plpgsql as $$ begin raise exception 'no idea'; end $$]);
foreach my $resolution (q['error'], q['function', 'clash'])
{
	here("select braid.set_conflict_resolution('item', 'update_origin_differs', $resolution); update item set v = 'mine' where id = 3");
	$tokyo->safe_psql('postgres', $_) for q[update item set v = 'theirs' where id = 3], q[update item set v = 'flows' where id = 4], q[update item set v = 'follows' where id = 3];
	caught_up($paris, $tokyo);
	is(parked(), 'failed, waiting 1', "$resolution: what meets it is parked");
	is(here('select string_agg(v, $$,$$ order by id) from item where id in (3, 4)'), 'mine,flows', "$resolution: the rest flows");
	here(q[select braid.set_conflict_resolution('item', 'update_origin_differs', null)]);
	is((retry())[0], '2', "$resolution: another rule lets it pass");
	same_tables([ $tokyo, $paris ], 'item');
}

# Given up: it is kept, and what waited for it is applied.
here(q[alter table item add constraint short check (length(v) < 10)]);
$tokyo->safe_psql('postgres', $_) for q[update item set v = 'much too long' where id = 1], q[update item set v = 'next' where id = 1], q[update item set v = 'also too long' where id = 1], q[update item set v = 'last' where id = 1];
caught_up($paris, $tokyo);
is(parked(), 'failed, waiting 1, waiting 2, waiting 3', 'a chain');
my ($status, undef, $said) = $paris->psql('postgres', "select braid.drop_subscription('$name')");
like($said, qr/cannot drop subscription.*not applied: 4/s, 'a subscription with parked transactions is not dropped');
here("select braid.skip_parked('$name', " . (ids())[0] . ')');
ok(wait_until(sub { parked() eq 'failed, waiting 1' }, 20), 'up to the next that fails') or diag parked();
is(here('select v from item where id = 1'), 'next', 'what waited is applied');
here("select braid.skip_parked('$name', " . (ids())[0] . ')');
ok(wait_until(sub { status($paris, $name)->{parked} eq '0' }, 20), 'and then the rest');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'item');
is(here(q[select count(*), count(distinct c.parked_id) from braid.parked_changes c join braid.parked_transactions using (parked_id) where state = 'skipped']), '2|2', 'what was given up is kept');

# A session that holds a lock that the retry waits for gets an error that says so.
$tokyo->safe_psql('postgres', q[update item set v = 'much too long' where id = 1]);
caught_up($paris, $tokyo);
($status, undef, $said) = $paris->psql('postgres', "begin; alter table item drop constraint short; select braid.retry_parked('$name')");
like($said, qr/lock that this transaction holds/, 'a deadlock with the session is seen');
is((retry())[0], '0', 'nothing has changed');
is(parked(), 'failed', 'it is still parked');
here('alter table item drop constraint short');
is((retry())[0], '1', 'now it is applied');
$tokyo->safe_psql('postgres', q[update item set v = 'short' where id = 1]);
caught_up($paris, $tokyo);

# So many and no more; a stopped subscription takes requests for when it runs.
here(q[alter system set braid.max_parked = 2]);
here(q[select pg_reload_conf()]);
here(q[alter table item add constraint short check (length(v) < 10)]);
$tokyo->safe_psql('postgres', "update item set v = 'much too long $_' where id = 1") for 1 .. 4;
ok(wait_until(sub { status($paris, $name)->{state} eq 'error' }, 30), 'too many stop it');
my $stopped = status($paris, $name);
like($stopped->{last_error}, qr/braid.max_parked is reached/, 'and it says so');
is(parked(), 'failed, waiting 1', 'two are parked');
here('alter table item drop constraint short');
is((retry())[0], '0', 'what is asked for now');
here("select braid.enable_subscription('$name')");
caught_up($paris, $tokyo);
ok(wait_until(sub { status($paris, $name)->{parked} eq '0' }, 20), 'is tried as soon as it runs');
$tokyo->safe_psql('postgres', q[update item set v = 'short' where id = 1]);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'item');
here(q[alter system reset braid.max_parked]);
here(q[select pg_reload_conf()]);

# on_error => 'stop' with something parked: it holds what it held, and the next one stops the
# subscription.
here(q[alter table item add constraint short check (length(v) < 20)]);
$tokyo->safe_psql('postgres', q[update item set v = 'a value that is far too long' where id = 2]);
caught_up($paris, $tokyo);
here("select braid.alter_subscription('$name', on_error => 'stop')");
$tokyo->safe_psql('postgres', q[update item set v = 'two' where id = 2]);
caught_up($paris, $tokyo);
is(parked(), 'failed, waiting 1', 'what is parked holds its keys all the same');
$tokyo->safe_psql('postgres', q[update item set v = 'another value that is far too long' where id = 3]);
ok(wait_until(sub { status($paris, $name)->{state} eq 'error' }, 30), 'and the next one stops the subscription');
here("select braid.alter_subscription('$name', on_error => 'park'); select braid.enable_subscription('$name')");
caught_up($paris, $tokyo);
is(parked(), 'failed, waiting 1, failed', 'until it may be parked');
here('alter table item drop constraint short');
is((retry())[0], '3', 'all are applied');
$tokyo->safe_psql('postgres', q[update item set v = 'short' where id in (2, 3)]);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'item');

# Large ones: too large to be held whole, or sent while they run.
here(q[alter system set braid.apply_buffer_size = '1MB']);
here(q[select pg_reload_conf()]);
$tokyo->safe_psql('postgres', q[alter system set logical_decoding_work_mem = '64kB']);
$tokyo->safe_psql('postgres', q[select pg_reload_conf()]);
foreach my $streaming ('off', 'on')
{
	foreach my $rows (1000, 20000)
	{
		here("select braid.alter_subscription('$name', streaming => '$streaming')");
		$tokyo->safe_psql('postgres', 'truncate other');
		caught_up($paris, $tokyo);
		here(q[alter table other add constraint short check (length(v) < 50)]);
		$tokyo->safe_psql('postgres', $_)
		  for "insert into other select i, repeat('x', case i when $rows then 60 else 40 end) from generate_series(1, $rows) i", "update other set v = 'small' where id = 1", "update item set v = '$rows' where id = 5",
		  "begin; update item set v = 'held $rows' where id = 4; update other set v = repeat('y', 45); commit", "update item set v = 'and $rows' where id = 4";
		caught_up($paris, $tokyo);
		is(parked(), 'failed, waiting 1, waiting 2, waiting 3', "streaming $streaming, $rows rows: what is large is parked too");
		is(here('select v from item where id = 5'), $rows, "streaming $streaming, $rows rows: and the rest flows");
		here(q[alter table other drop constraint short]);
		is((retry())[0], '4', "streaming $streaming, $rows rows: it is applied") or diag((retry())[1]);
		same_tables([ $tokyo, $paris ], qw(item other));
		versions_are_the_sources($_, "streaming $streaming, $rows rows") for qw(item other);
	}
}
# A transaction that is committed in chunks: committed chunks stay, the rest is parked, and holds
# back its dependents.
here("select braid.alter_subscription('$name', streaming => 'off', split_transactions_above => 100)");
here(q[alter table other add constraint short check (length(v) < 50)]);
my $update = q[do $$ begin for i in 1 .. 300 loop update other set v = repeat('z', case i when 150 then 60 else 40 end) where id = i; end loop; end $$];
$tokyo->safe_psql('postgres', $_) for $update, q[update other set v = 'flows' where id = 50], q[update other set v = 'held' where id = 200], q[update item set v = 'flows' where id = 5];
caught_up($paris, $tokyo);
is(parked(), 'failed, waiting 1', 'in pieces: the rest is parked, and what depends on it');
is(here('select from_change, changes, commit_lsn < end_lsn from braid.parked_transactions where state = $$failed$$'), '101|200|t', 'from its second piece on');
is(here(q[select min(number), max(number), count(*) from braid.parked_changes where parked_id = (select min(parked_id) from braid.parked_transactions where state = 'failed')]), '101|300|200', 'which can be read');
is(here('select count(*) from other where v = repeat($$z$$, 40)'), '99', 'the first one stays');
is(here('select v from other where id = 50') . here('select v from item where id = 5'), 'flowsflows', 'the rest flows');
is(here('select half_applied_lsn is null from braid.subscription_detail') . here('select count(*) from braid.split_progress'), 't0', 'nothing is half applied any more');
$paris->restart;
is((retry())[0], '0', 'it fails again');
here(q[alter table other drop constraint short]);
is((retry())[0], '2', 'then the rest is applied');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], qw(item other));
versions_are_the_sources('other', 'in pieces');

# A transaction that depends on a parked one is parked from the chunk on in which that turns out.
here(q[alter table item add constraint short check (length(v) < 20)]);
$tokyo->safe_psql('postgres', $_)
  for q[update item set v = 'a value that is far too long' where id = 2],
  q[begin; update other set v = 'pieces' where id <= 150; update item set v = 'two' where id = 2; update other set v = 'pieces' where id > 150 and id <= 300; commit],
  q[update other set v = 'held' where id = 300], q[update other set v = 'flows' where id = 301];
caught_up($paris, $tokyo);
is(parked(), 'failed, waiting 1, waiting 2', 'in pieces: the rest follows what is parked');
is(here('select string_agg(from_change || $$ $$ || changes, $$, $$ order by parked_id) from braid.parked_transactions where state <> $$skipped$$'), '1 1, 101 201, 1 1', 'from that piece on');
is(here('select count(*) from other where v = $$pieces$$'), '100', 'what comes before stays');
here('alter table item drop constraint short');
is((retry())[0], '3', 'all are applied');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], qw(item other));

# Also too large for the ring; and given up, after which the rest is missing.
here("select braid.alter_subscription('$name', split_transactions_above => 5000)");
foreach my $streaming ('off', 'on')
{
	here("select braid.alter_subscription('$name', streaming => '$streaming')");
	$tokyo->safe_psql('postgres', 'truncate other');
	caught_up($paris, $tokyo);
	here(q[alter table other add constraint short check (length(v) < 50)]);
	$tokyo->safe_psql('postgres', $_)
	  for q[insert into other select i, repeat('x', case i when 15500 then 60 else 40 end) from generate_series(1, 20000) i], q[update other set v = 'small' where id = 1],
	  q[insert into other select i, 'large' from generate_series(20001, 40001) i], qq[update item set v = '$streaming' where id = 5];
	caught_up($paris, $tokyo);
	is(parked(), 'failed, waiting 1, waiting 2', "streaming $streaming: what is large and in pieces is parked from there");
	is(here('select string_agg(from_change || $$ $$ || changes, $$, $$ order by parked_id) from braid.parked_transactions where state <> $$skipped$$'), '15001 5000, 1 1, 1 20001', "streaming $streaming: which is shown");
	is(here('select count(*) from other') . ' ' . here('select v from item where id = 5'), "15000 $streaming", "streaming $streaming: the rest flows");
	here(q[alter table other drop constraint short]);
	is((retry())[0], '3', "streaming $streaming: it is applied") or diag((retry())[1]);
	caught_up($paris, $tokyo);
	same_tables([ $tokyo, $paris ], qw(item other));
}
here("select braid.alter_subscription('$name', split_transactions_above => 0)");

# Prepared transactions: one that can't be applied, or has to follow a parked one, is not prepared
# here, comes when it has committed, and is parked then.
my $oslo = new_node('oslo', publication => '', conf => "max_prepared_transactions = 5\n");
$oslo->safe_psql('postgres', 'create table item (id int primary key, v text); create table other (id int primary key, v text)');
subscribe($oslo, $tokyo, on_error => "'park'", two_phase => 'true');
$oslo->safe_psql('postgres', q[alter table item add constraint short check (length(v) < 20)]);
my $there = q[select count(*) from pg_prepared_xacts];
my $noted = q[select count(*) from braid.unprepared where over_lsn is null];
my $state = q[select string_agg(state, ', ' order by parked_id) from braid.parked_transactions];
$tokyo->safe_psql('postgres', q[begin; update item set v = 'a value that is far too long' where id = 2; prepare transaction 'first']);
caught_up($oslo, $tokyo);
is($oslo->safe_psql('postgres', $there) . $oslo->safe_psql('postgres', $noted), '01', 'one that fails is not prepared');
$tokyo->safe_psql('postgres', q[commit prepared 'first']);
caught_up($oslo, $tokyo);
is($oslo->safe_psql('postgres', $state), 'failed', 'but parked when it has committed');
$tokyo->safe_psql('postgres', $_)
  for q[begin; update item set v = 'two' where id = 2; prepare transaction 'second'], q[begin; update item set v = 'three' where id = 3; prepare transaction 'third'], q[update item set v = 'flows' where id = 4];
caught_up($oslo, $tokyo);
is($oslo->safe_psql('postgres', $there), '1', 'one that has to follow it is not prepared either, another is');
is($oslo->safe_psql('postgres', q[select v from item where id = 4]), 'flows', 'and the rest flows');
$tokyo->safe_psql('postgres', $_) for q[commit prepared 'third'], q[commit prepared 'second'], q[begin; update item set v = 'no' where id = 2; prepare transaction 'fourth'], q[rollback prepared 'fourth'];
caught_up($oslo, $tokyo);
is($oslo->safe_psql('postgres', $state), 'failed, waiting', 'it is parked behind it');
is($oslo->safe_psql('postgres', q[select v from item where id = 3]), 'three', 'the other one is committed');
$oslo->safe_psql('postgres', 'alter table item drop constraint short');
is($oslo->safe_psql('postgres', q[select braid.retry_parked('oslo_from_tokyo')]), '2', 'both are applied');
caught_up($oslo, $tokyo);
same_tables([ $tokyo, $oslo ], qw(item other));
is($oslo->safe_psql('postgres', $there), '0', 'and nothing is left');

is(here('select count(*) from braid.parked_record r where not exists (select from braid.parked_transaction p where p.parked_id = r.parked_id)'), '0', 'no records are left over');

done_testing();
