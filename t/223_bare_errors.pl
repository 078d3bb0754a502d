# Error messages in cases where PostgreSQL's own error would not help: two sessions that use one
# name, and a provider that is silent.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Proxy;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
my $dsn = dsn_of($tokyo);
on_all('create table item (id int primary key)', $tokyo, $paris);

sub dsn_of { my ($node) = @_; return $node->connstr('postgres') =~ s/'/''/gr; }
sub creates { my ($name, $to) = @_; return qq[select braid.create_subscription('$name', '@{[ $to // $dsn ]}', copy_data => false, enabled => false, create_slot => true)]; }

# Waits until a session waits for a lock.
sub blocked
{
	return $paris->poll_query_until('postgres', q[select count(*) = 1 from pg_stat_activity where wait_event_type = 'Lock' and backend_type = 'client backend']);
}

# One session takes a name and has not committed yet, the other one wants it too.
sub both
{
	my ($one, $other, $like, $what) = @_;
	my $first = $paris->background_psql('postgres', on_error_stop => 0);
	my $second = $paris->background_psql('postgres', on_error_stop => 0);
	$first->query_safe("begin; $one");
	$second->query_until(qr/asked/, "\\set VERBOSITY verbose\n\\set SHOW_CONTEXT always\n\\echo asked\n$other;\n");
	ok(blocked(), "$what: the second one waits");
	$first->query_safe('commit');
	$second->query('select 1');
	like($second->{stderr}, $like, "$what: what it is told");
	unlike($second->{stderr}, qr/SQL statement|insert into|update braid/i, "$what: and nothing of Braid's own statements");
	$_->quit for $first, $second;
	return;
}

both(creates('one'), creates('one'), qr/ERROR:  42710: subscription "one" already exists\nHINT:/, 'two create a subscription');
$paris->safe_psql('postgres', creates('two'));
both(q[select braid.rename_subscription('one', 'three')], q[select braid.rename_subscription('two', 'three')],
	qr/ERROR:  42710: subscription "three" already exists\nHINT:/, 'two rename subscriptions');
both(q[select braid.rename_subscription('two', 'four')], creates('four'), qr/ERROR:  42710: subscription "four" already exists\nHINT:/, 'one renames, one creates');
$paris->safe_psql('postgres', 'create table other (id int references item)');
both(q[select braid.set_missing_column_rule('item', 'ignore')], q[select braid.set_missing_column_rule('item', 'error')], qr/^$/, 'two set a rule for columns');
is($paris->safe_psql('postgres', q[select rule from braid.missing_column_rules where relation = 'item'::regclass]), 'error', 'the later one counts');
both(q[select braid.set_foreign_key_rule('other', null, 'record')], q[select braid.set_foreign_key_rule('other', null, 'delete')], qr/^$/, 'two set a rule for foreign keys');
is($paris->safe_psql('postgres', q[select rule from braid.foreign_key_rules where relation = 'other'::regclass]), 'delete', 'the later one counts');

# A transaction with an older snapshot does not see what has the name.
my $old = $paris->background_psql('postgres', on_error_stop => 0);
$old->query_safe('begin isolation level repeatable read; select count(*) from braid.nodes');
$paris->safe_psql('postgres', creates('five'));
$old->query("\\set VERBOSITY verbose\n\\set SHOW_CONTEXT always\n" . q[select braid.rename_subscription('three', 'five')]);
like($old->{stderr}, qr/ERROR:  42710: another session has created an object of the same name\nHINT:/, 'an older snapshot: what it is told');
unlike($old->{stderr}, qr/SQL statement|update braid/i, 'an older snapshot: nothing of the statement');
$old->quit;

# Nor does it change what another session has changed since.
for my $call (
	creates('six'), q[select braid.disable_subscription('five')], q[select braid.alter_subscription('five', apply_mode => 'batch')], q[select braid.set_rate_limit('five', 1)],
	q[select braid.set_conflict_resolution('item', null, 'error')], q[select braid.set_foreign_key_rule('other', null, null)], q[select braid.drop_subscription('five')])
{
	my $older = $paris->background_psql('postgres', on_error_stop => 0);
	$older->query_safe('begin isolation level repeatable read; select count(*) from braid.nodes');
	$paris->safe_psql('postgres', $call);
	$older->query("\\set VERBOSITY verbose\n\\set SHOW_CONTEXT always\n$call");
	like($older->{stderr}, qr/ERROR:  (40001: another session has changed the same object at the same time\nDETAIL:.*\nHINT|42710: )/, "an older snapshot, $call: what it is told");
	unlike($older->{stderr}, qr/SQL statement|update braid/i, "an older snapshot, $call: nothing of the statement");
	$older->quit;
}
$paris->safe_psql('postgres', "select braid.drop_subscription(name) from braid.subscription_status");

# Subscriptions of a silent provider that are dropped together wait for it once.
my $proxy = Proxy->new($tokyo);
my $silent = $proxy->connstr('postgres') . ' connect_timeout=2';
$paris->safe_psql('postgres', creates("from_silent_$_", $silent)) for 1 .. 4;
$paris->safe_psql('postgres', "update braid.subscription set phase = 'stream'");
$proxy->link('hold');
my ($status, undef, $said) = $paris->psql('postgres', 'select braid.drop_subscription(name) from braid.subscription_status');
is($status, 0, 'all are dropped');
my @warnings = $said =~ /WARNING:  could not reach node "tokyo" to drop replication slot "[^"]+"\n(DETAIL:  .*)/g;
is(scalar @warnings, 4, 'a warning for each') or diag($said);
is(scalar(grep { /was silent when it was last asked in this transaction/ } @warnings), 3, 'and one wait for all') or diag($said);
$proxy->stop;

done_testing();
