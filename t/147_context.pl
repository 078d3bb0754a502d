# An error of apply or copy says which step it interrupted, in the views and in the log, with
# PostgreSQL's own context. A stop is an ERROR in the log; the end of a worker that was terminated
# is not. A stop whose cause is gone ends by itself.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '', conf => 'braid.stopped_retry_interval = 0');
on_all(q[
	create type kind as enum ('open', 'closed');
	create table item (id int primary key, kind kind, v int);
	create table other (id int primary key, v text);
	create table many (id int primary key, v int);
	create table child (id int primary key, parent int);
	create function note_it() returns trigger language plpgsql as $$
	begin
		insert into public.audit values (new.id);
		return new;
	end $$;
], $tokyo, $paris);
$tokyo->safe_psql('postgres', 'create table sorted (id int primary key); create table leaf (id int primary key)');
$paris->safe_psql('postgres', q[
	create table sorted (id int primary key) partition by range (id);
	create table sorted_1 partition of sorted for values from (0) to (10);
	create table above (id int primary key) partition by range (id);
	create table leaf partition of above for values from (0) to (10);
]);
my $name = subscribe($paris, $tokyo);

sub at_paris { return $paris->safe_psql('postgres', $_[0]); }
sub at_tokyo { return $tokyo->safe_psql('postgres', $_[0]); }

# The transaction's number, and where it ends at the most.
sub changes
{
	my ($sql) = @_;
	my ($xid) = at_tokyo("begin; $sql; select pg_current_xact_id()::xid; commit") =~ /(\d+)$/;
	return $xid;
}

sub stops
{
	my ($why) = @_;
	ok(wait_until(sub { status($paris, $name)->{state} eq 'error' }, 60), "it stops: $why") or diag(status($paris, $name)->{state});
	return status($paris, $name);
}

# Tests the row of the status, the detail and the log after a stop.
sub says
{
	my ($why, $offset, @patterns) = @_;
	my $status = stops($why);
	# From 19 on a position's type has leading zeros.
	my $lsn = $status->{error_lsn} =~ s{/0*}{/}r;
	my $context = at_paris("select error_context from braid.subscription_status where name = '$name'");
	like($context, $_, "$why: the context says $_") for @patterns, qr/finished at $lsn$/;
	is(at_paris("select error_context from braid.subscription_detail where name = '$name'"), $context, "$why: and the detail");
	my $log = slurp_file($paris->logfile, $offset);
	like($log, qr/ERROR:  subscription "$name" has stopped: /, "$why: the log has an ERROR");
	my ($logged) = $log =~ /ERROR:  subscription "$name" has stopped: .*?CONTEXT:  (.*?)(?=\n\d{4}-|\z)/s;
	$logged =~ s/\n\t/\n/g if defined $logged;
	like($logged // '', $_, "$why: its context says $_") for @patterns;
	is($status->{retry_at}, '', "$why: nobody tries again");
	return;
}

sub goes_on
{
	my ($why) = @_;
	at_paris("select braid.enable_subscription('$name')");
	caught_up($paris, $tokyo);
	ok(wait_until(sub { status($paris, $name)->{state} eq 'streaming' }, 30), "it goes on: $why");
	is(status($paris, $name)->{error_context}, '', "$why: and says nothing");
	return;
}

# A value that the type here lacks: the column is named.
my $offset = -s $paris->logfile;
at_tokyo(q[alter type kind add value 'refunded']);
my $xid = changes(q[insert into item values (1, 'refunded', 1)]);
says('an enum value', $offset, qr/during message type "INSERT" for replication target relation "public\.item" column "kind" in transaction $xid,/);
at_paris(q[alter type kind add value 'refunded']);
goes_on('an enum value');

# An UPDATE that a constraint here forbids, in the middle of others.
$offset = -s $paris->logfile;
at_tokyo(q[insert into many select i, i from generate_series(1, 300) i]);
at_paris('alter table item add constraint small check (v < 10) not valid');
$xid = changes(q[update many set v = v + 1 where id < 20; update item set v = 10 where id = 1; update many set v = v + 1 where id > 290]);
says('a constraint', $offset, qr/message type "UPDATE" for replication target relation "public\.item" in transaction $xid,/);
at_paris('alter table item drop constraint small');
goes_on('a constraint');

# Inserts that are held back and written together: theirs is named, not what comes after.
$offset = -s $paris->logfile;
at_paris('alter table many add constraint few check (id < 400)');
$xid = changes(q[insert into many select i, i from generate_series(301, 500) i; insert into other values (1, 'after')]);
says('inserts together', $offset, qr/message type "INSERT" for replication target relation "public\.many" in transaction $xid,/);
at_paris('alter table many drop constraint few');
goes_on('inserts together');

# A trigger's function keeps its line; a deletion.
$offset = -s $paris->logfile;
at_paris('create trigger note_it before insert on other for each row execute function note_it(); alter table other enable always trigger note_it');
$xid = changes(q[insert into other values (2, 'two')]);
says('a trigger', $offset, qr/PL\/pgSQL function (?:public\.)?note_it\(\) line 3 at SQL statement/, qr/message type "INSERT" for replication target relation "public\.other" in transaction $xid,/);
like(status($paris, $name)->{last_error}, qr/relation "public\.audit" does not exist/, 'the message is the trigger\'s');
at_paris('create table audit (id int)');
goes_on('a trigger');
$offset = -s $paris->logfile;
# A constraint's trigger fires for replicated rows if it is enabled for them.
at_paris(q[
	alter table child add foreign key (parent) references other deferrable initially deferred;
	do $$ declare t name; begin
		for t in select tgname from pg_trigger where tgrelid = 'child'::regclass loop execute format('alter table child enable always trigger %I', t); end loop;
	end $$;
]);
$xid = changes(q[insert into child values (1, 77)]);
says('a constraint at the end', $offset, qr/message type "COMMIT" in transaction $xid,/);
at_paris('alter table child drop constraint child_parent_fkey');
goes_on('a constraint at the end');
$offset = -s $paris->logfile;
at_paris(q[create function refuse() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$; create trigger refuse before delete on item for each row execute function refuse(); alter table item enable always trigger refuse; create trigger refuse before truncate on many execute function refuse(); alter table many enable always trigger refuse]);
$xid = changes('delete from item');
says('a deletion', $offset, qr/refuse\(\) line 1 at RAISE/, qr/message type "DELETE" for replication target relation "public\.item" in transaction $xid,/);
at_paris('drop trigger refuse on item');
goes_on('a deletion');
$offset = -s $paris->logfile;
$xid = changes('truncate many');
says('a truncation', $offset, qr/refuse\(\) line 1 at RAISE/, qr/message type "TRUNCATE" for replication target relation "public\.many" in transaction $xid,/);
at_paris('drop trigger refuse on many');
goes_on('a truncation');

# A partition that is missing here, or has other bounds than at the provider.
$offset = -s $paris->logfile;
$xid = changes('insert into sorted values (1), (20)');
says('a missing partition', $offset, qr/message type "INSERT" for replication target relation "public\.sorted" in transaction $xid,/);
is(status($paris, $name)->{error_hint}, qq[Create a partition of table "public.sorted" here that takes the row. Then run braid.enable_subscription('$name').], 'the hint says to create it');
at_paris('create table sorted_2 partition of sorted for values from (10) to (100)');
goes_on('a missing partition');
changes('insert into leaf values (20)');
is(stops('a partition with other bounds')->{error_hint}, qq[Give partition "public.leaf" here the bounds that it has at the provider. Then run braid.enable_subscription('$name').], 'the hint says to change them');
at_paris('alter table above detach partition leaf');
goes_on('a partition with other bounds');

# Parked transactions.
at_paris("select braid.alter_subscription('$name', on_error => 'park'); alter table item add constraint small check (v < 10) not valid");
$xid = changes(q[insert into item values (50, 'open', 50)]);
ok($paris->poll_query_until('postgres', 'select count(*) = 1 from braid.parked_transactions'), 'it is parked');
like(at_paris('select error_context from braid.parked_transactions'), qr/"INSERT" for replication target relation "public\.item" in transaction $xid/, 'with its context');
at_paris("select braid.retry_parked('$name')");
like(at_paris('select error_context from braid.parked_transactions'), qr/"INSERT" for replication target relation "public\.item" in transaction $xid/, 'also when it is tried again');
at_paris("alter table item drop constraint small; select braid.retry_parked('$name'); select braid.alter_subscription('$name', on_error => 'stop')");

# A copy.
at_paris('create table copied (id int primary key, v int)');
at_tokyo(q[create table copied (id int primary key, v text); insert into copied values (1, '1'), (2, 'two'), (3, '3')]);
at_paris("select braid.refresh_subscription('$name')");
ok(wait_until(sub { at_paris(q[select count(*) from braid.subscription_tables where copy_error_context is not null]) eq '1' }, 60), 'a copy fails');
like(at_paris('select copy_error_context from braid.subscription_tables where copy_error_context is not null'), qr/COPY copied, line 2, column v/, 'with its line and column');
stops('a copy');
at_paris('alter table copied alter column v type text');
goes_on('a copy');
is(at_paris('select count(*) from braid.subscription_tables where copy_error_context is not null'), 0, 'the context of a copy goes with its error');

at_paris('create table spread (id int primary key) partition by list (id); create table spread_1 partition of spread for values in (1)');
at_tokyo('create table spread (id int primary key); insert into spread values (1), (2)');
at_paris("select braid.refresh_subscription('$name')");
my $copy_hint = q[select copy_error_hint from braid.subscription_tables where relation = 'spread'::regclass];
ok(wait_until(sub { at_paris($copy_hint) ne '' }, 60), 'a copy into a table that lacks a partition fails');
is(at_paris($copy_hint), qq[Create a partition of table "public.spread" here that takes the row. Then run braid.enable_subscription('$name').], 'its hint says to create it');
stops('a copy into a table that lacks a partition');
at_paris('create table spread_2 partition of spread default');
goes_on('a copy with all partitions');

# Records from elsewhere.
my (undef, undef, $said) = $paris->psql('postgres', q[select braid.ingest('{"operation": "insert", "transaction": {"lsn": "0/1", "commit_time": "2024-01-01T00:00:00Z"}, "schema": {"namespace": "public", "table": "item", "columns": [{"name": "id", "type": "int4"}, {"name": "v", "type": "text"}]}, "after": {"id": 9, "v": "x"}}', 'shop')]);
like($said, qr/CONTEXT:  processing records of origin "shop" during message type "INSERT" for replication target relation "public\.item" column "v"/, 'braid.ingest says which column');

# The ends of workers are no failures.
$offset = -s $paris->logfile;
at_paris("select braid.disable_subscription('$name')");
ok($paris->poll_query_until('postgres', q[select count(*) = 0 from pg_stat_activity where backend_type in ('braid leader', 'braid applier')]), 'disabled');
goes_on('enabled');
unlike(slurp_file($paris->logfile, $offset), qr/FATAL|ERROR/, 'no FATAL, no ERROR when it is disabled and enabled');

# By itself: as soon as the cause is gone, with pauses that grow.
$paris->append_conf('postgresql.conf', 'braid.stopped_retry_interval = 500ms');
$paris->reload;
at_paris('alter table item add constraint small check (v < 10) not valid');
changes(q[insert into item values (60, 'open', 60)]);
my $status = stops('again');
ok(wait_until(sub { at_paris("select error_attempts >= 3 from braid.subscription_detail where name = '$name'") eq 't' }, 60), 'it is tried again while the cause is there');
ok(wait_until(sub { at_paris("select error_retry_at - error_at > interval '1.5 s' from braid.subscription_detail where name = '$name'") eq 't' }, 60), 'after pauses that grow');
isnt(at_paris("select coalesce(retry_at::text, state) from braid.subscription_status where name = '$name'"), '', 'the view says when');
at_paris('alter table item drop constraint small');
caught_up($paris, $tokyo);
ok(wait_until(sub { my $now = status($paris, $name); $now->{state} eq 'streaming' && $now->{last_error} eq '' && $now->{retry_at} eq '' }, 30), 'it goes on by itself');
is(at_paris("select error_attempts from braid.subscription_detail where name = '$name'"), 0, 'and forgets');
like(slurp_file($paris->logfile), qr/subscription "$name" goes on after an error/, 'and says so');

# A conflict that a person has to decide is not retried.
at_paris(q[select braid.set_conflict_resolution('other', 'insert_exists', 'error'); insert into other values (70, 'here')]);
changes(q[insert into other values (70, 'there')]);
$status = stops('a conflict that a person decides');
is($status->{retry_at}, '', 'nobody tries again');
at_paris("select braid.skip_transaction('$name', '$status->{error_lsn}')");
at_paris("select braid.alter_subscription('$name', disable_on_error => true)");
caught_up($paris, $tokyo);
at_paris('alter table item add constraint small check (v < 10) not valid');
changes(q[insert into item values (80, 'open', 80)]);
$status = stops('disable_on_error');
is($status->{retry_at}, '', 'nor one that is to stop on any error');
at_paris('alter table item drop constraint small');
goes_on('at the end');
is(digest($paris, $_), digest($tokyo, $_), "$_ is whole") for qw(item many);

done_testing();
