# A standby of a node: its functions report that it is one. During a failover of a provider the
# address leads to the standby before that is promoted. The subscription tries again, whatever the
# standby lacks, and goes on by itself after the promotion.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Session;
use Test::More;

plan skip_all => 'before PostgreSQL 17 slots do not fail over' if `pg_config --version` =~ /(\d+)/ && $1 < 17;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
on_all('create table item (id int primary key, v text)', $tokyo, $paris);
my $name = subscribe($paris, $tokyo);
subscribe($tokyo, $paris, copy_data => 'false');
my $slot = $paris->safe_psql('postgres', "select slot_name from braid.subscription_detail where name = '$name'");

$tokyo->safe_psql('postgres', q[select pg_create_physical_replication_slot('osaka')]);
$tokyo->backup('copy', backup_options => [ '--checkpoint', 'fast' ]);
my $osaka = PostgreSQL::Test::Cluster->new('osaka');
$osaka->init_from_backup($tokyo, 'copy', has_streaming => 1);
my $primary = $tokyo->connstr('postgres') =~ s/'/''/gr;
$osaka->append_conf('postgresql.conf', "primary_conninfo = '$primary'\nprimary_slot_name = 'osaka'\nhot_standby_feedback = on\n");
$osaka->start;

$tokyo->poll_query_until('postgres', q[select active from pg_replication_slots where slot_name = 'osaka']) or die 'no standby';

# Functions that wait, that write to tables, that write to WAL, that draw from sequences, that lock.
my $hint = qr/HINT:  Call the function at the primary, or promote this server\./;
for my $call (
	q(wait_for_subscription('tokyo_from_paris', interval '1 min')), q(wait_for_event('paris', '0/0', interval '1 min')), q(sync_event()),
	q(create_node('osaka', 'dbname=postgres')), q(create_subscription('other', 'dbname=postgres')), q(enable_subscription('tokyo_from_paris')),
	q(disable_subscription('tokyo_from_paris')), q(drop_subscription('tokyo_from_paris')), q(rename_subscription('tokyo_from_paris', 'other')),
	q(set_rate_limit('tokyo_from_paris', 1)), q(set_conflict_resolution('item', null, 'error')), q(set_column_rule('item', 'v', null)),
	q(set_missing_column_rule('item', 'ignore')), q(restore_conflict(1)), q(drop_node('tokyo')), q(create_group('g')), q(begin_upgrade('0/0')),
	q(ingest('[]', 'shop')), q(forget_source('shop')), q(replicate_ddl('create table more (id int)')))
{
	my (undef, undef, $said) = $osaka->psql('postgres', "\\set VERBOSITY verbose\nselect braid.$call");
	like($said, qr/ERROR:  25006: .*standby.*$hint/s, "$call at a standby");
}
# No function ends with an internal error.
my @calls = split /\n/, $osaka->safe_psql('postgres', q[
	select format('select braid.%I(%s)', p.proname, (select string_agg(format('null::%s', format_type(t, null)), ', ' order by i) from unnest(p.proargtypes) with ordinality a (t, i)))
	  from pg_proc p where p.pronamespace = 'braid'::regnamespace and p.prokind = 'f' and p.prorettype not in ('trigger'::regtype, 'event_trigger'::regtype)
	   and not 'record'::regtype = any (p.proargtypes) order by 1]);
cmp_ok(scalar @calls, '>', 100, 'functions');
my (undef, undef, $errors) = $osaka->psql('postgres', "\\set VERBOSITY verbose\n" . join(";\n", @calls) . ';', on_error_stop => 0);
is(join("\n", grep { /XX000/ } split /\n/, $errors), '', 'no function ends with an internal error');
# Nor where it gets arguments; and none waits for what a standby never receives.
my $arguments = q[case format_type(t, null) when 'text' then '$$tokyo_from_paris$$' when 'name' then '$$tokyo_from_paris$$' when 'text[]' then '$${item}$$'
	when 'name[]' then '$${item}$$' when 'regclass' then '$$item$$' when 'oid' then '$$item$$::regclass' when 'integer' then '1' when 'bigint' then '1' when 'boolean' then 'true'
	when 'interval' then '$$1 s$$' when 'pg_lsn' then '$$0/0$$' when 'jsonb' then '$${}$$' when 'uuid' then 'gen_random_uuid()' when 'timestamp with time zone' then 'now()'
	when 'bytea' then '$$\\x00$$' else 'null' end || '::' || format_type(t, null)];
@calls = split /\n/, $osaka->safe_psql('postgres', qq[
	select format('%s braid.%I(%s)', case p.prokind when 'p' then 'call' else 'select' end, p.proname, (select string_agg($arguments, ', ' order by i) from unnest(p.proargtypes) with ordinality a (t, i)))
	  from pg_proc p where p.pronamespace = 'braid'::regnamespace and p.prokind in ('f', 'p') and p.prorettype not in ('trigger'::regtype, 'event_trigger'::regtype)
	   and not 'record'::regtype = any (p.proargtypes) order by 1]);
like("@calls", qr/call braid\.compare\(.*select braid\.group_route_clear\(/, 'functions and procedures');
(undef, undef, $errors) = $osaka->psql('postgres', "\\set VERBOSITY verbose\nset statement_timeout = '15 s';\n" . join(";\n", @calls) . ';', on_error_stop => 0);
is(join("\n", grep { /XX000|57014/ } split /\n/, $errors), '', 'with arguments neither, and each ends soon');

# The address of the provider, which a failover moves.
sub lead_to
{
	my ($provider) = @_;
	my $dsn = $provider->connstr('postgres') =~ s/'/''/gr;
	$paris->safe_psql('postgres', "select braid.alter_subscription('$name', dsn => '$dsn')");
	return;
}

sub retrying
{
	my ($like, $why) = @_;
	my $status;
	ok(wait_until(sub { $status = status($paris, $name); $status->{state} eq 'retrying' && $status->{last_error} =~ /$like/ || $status->{state} eq 'error' }, 30), "$why: an error");
	is($status->{state}, 'retrying', "$why: retried") or diag(explain($status));
	like($status->{last_error}, $like, "$why: which one");
	like($status->{error_hint}, qr/leads to a standby.*goes on by itself once that server is promoted/, "$why: the hint says what is waited for");
	unlike($status->{error_hint}, qr/drop the subscription/i, "$why: and not to drop the subscription");
	return;
}

lead_to($osaka);
retrying(qr/replication slot "$slot" does not exist/, 'the standby does not have the slot');
lead_to($tokyo);
streams($paris, $name, 'the address leads to the primary again');

# The slot is to fail over. What the primary writes meanwhile lets the standby take it over.
disable($paris, $name);
$tokyo->poll_query_until('postgres', "select not active from pg_replication_slots where slot_name = '$slot'") or die 'the slot is not let go';
my $walsender = Session::connect_to($tokyo, 'postgres', replication => 'database') or die 'no connection';
my ($failed, undef, $said) = Session::query($walsender, qq(ALTER_REPLICATION_SLOT "$slot" (FAILOVER true)), 1);
ok(!$failed, 'the slot fails over') or diag($said);
close $walsender->{socket};
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
streams($paris, $name, 'streams from the slot');
$tokyo->safe_psql('postgres', q[insert into item select i, 'before' from generate_series(1, 10) i]);
caught_up($paris, $tokyo);
# Nothing that takes a number of a transaction: the standby would be ahead of the slot again.
ok(wait_until(sub {
	$tokyo->safe_psql('postgres', 'select pg_log_standby_snapshot(); select braid.sync_event()');
	caught_up($paris, $tokyo);
	$osaka->psql('postgres', 'select pg_sync_replication_slots()');
	$osaka->safe_psql('postgres', "select synced and not temporary from pg_replication_slots where slot_name = '$slot'") eq 't';
}, 60), 'the standby has the slot');
lead_to($osaka);
retrying(qr/cannot use replication slot "$slot" for logical decoding/, 'the standby does not let it be read');
is($paris->safe_psql('postgres', "select last_failure_sqlstate from braid.subscription_detail where name = '$name'"), '55000', 'with an error that is final elsewhere');

# The failover. Nobody does anything at the subscriber.
$tokyo->safe_psql('postgres', q[insert into item values (1000, 'last')]);
$tokyo->stop('fast');
retrying(qr/cannot use replication slot "$slot" for logical decoding/, 'the primary is gone');
$osaka->promote;
streams($paris, $name, 'streams from the promoted server by itself');
$osaka->safe_psql('postgres', q[insert into item values (1001, 'after')]);
becomes($paris, q[select string_agg(v, ' ' order by id) from item where id >= 1000], 'last after', 'nothing is missing');
is($paris->safe_psql('postgres', 'select count(*) from item where id < 1000'), 10, 'of what was before either');
same_tables([ $osaka, $paris ], 'item');
$osaka->stop('fast');

done_testing();
