# A provider sends well-formed messages with invalid or misplaced records, under load, with many
# small transactions to a frame, and large ones of several frames. The subscriber reports an error
# and tries again. Nothing is lost or applied twice, and no process crashes.
#
# Not tested, because each record is valid by itself: a change that comes twice within a
# transaction, and a change or a transaction that does not come.

use strict;
use warnings;

use Braid;
use Kill;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Proxy;
use Test::More;

my $seed = $ENV{BRAID_TEST_SEED} // int(rand(1_000_000));
srand($seed);
note("seed $seed: BRAID_TEST_SEED=$seed repeats the choices");

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '');
ledger_tables($tokyo, $paris);
my $name = subscribe($paris, $tokyo);
my $proxy = Proxy->new($tokyo, seed => $seed, lies => 1);
my $dsn = $proxy->connstr('postgres');
$paris->safe_psql('postgres', "select braid.alter_subscription('$name', dsn => '$dsn')");
caught_up($paris, $tokyo);
start_load($tokyo, small => '-c 2 -R 200', large => '-c 1');

# A lie, and the subscriber's message about it.
my @lies = (
	[ signature => qr/does not start with the GIR signature/ ],
	[ unknown_tag => qr/unknown record tag/ ],
	[ cut => qr/record ends inside/ ],
	[ long_record => qr/record ends inside/ ],
	[ long_name => qr/record ends inside/ ],
	[ random => qr/from the provider/ ],
	[ again_whole => qr/\brecords?\b.*out of order/ ],
	[ again_begin => qr/\brecords?\b.*out of order/ ],
	[ again_end => qr/\brecords?\b.*out of order/ ],
	[ swap_begin => qr/\brecords?\b.*out of order/ ],
);

sub has_said
{
	my ($offset, $what) = @_;
	return slurp_file($paris->logfile, $offset) =~ $what;
}

# Tests that the next commit arrives.
sub goes_on_after
{
	my ($kind) = @_;
	my $last = $tokyo->safe_psql('postgres', 'select coalesce(max(id), 0) from ledger');
	ok(wait_until(sub { $paris->safe_psql('postgres', "select coalesce(max(id), 0) >= $last from ledger") eq 't' }, 40), "it goes on after $kind")
	  or diag($paris->safe_psql('postgres', 'table braid.subscription_detail', extra_params => ['-x']));
	return;
}

sub connect_anew
{
	$tokyo->safe_psql('postgres', 'select pg_terminate_backend(pid) from pg_stat_replication');
	return;
}

for (@lies)
{
	my ($kind, $said) = @$_;
	my $offset = -s $paris->logfile;
	my $before = () = $proxy->lies;
	$proxy->lie($kind);
	connect_anew() if $kind eq 'signature';
	ok(wait_until(sub { scalar(my @now = $proxy->lies) > $before }, 40), "told: $kind") or next;
	note(($proxy->lies)[-1]);
	ok(wait_until(sub { has_said($offset, qr/"$name" will be tried again: [^\n]*$said/) }, 20), "it is found: $kind")
	  or diag(slurp_file($paris->logfile, $offset));
	ok(has_said($offset, qr/DETAIL:  In record \d+ \([^)\n]+, at byte \d+\) of the frame that was sent at [0-9A-F]+\/[0-9A-F]+\./), "with its place: $kind")
	  or diag(slurp_file($paris->logfile, $offset));
	goes_on_after($kind);
}

# A provider that only lies is not asked without end.
my $offset = -s $paris->logfile;
$proxy->lie('always signature');
connect_anew();
ok(wait_until(sub { status($paris, $name)->{state} eq 'error' }, 60), 'it stops when all is lies');
ok(has_said($offset, qr/"$name" has stopped: [^\n]*does not start with the GIR signature/), 'and says why');
like(status($paris, $name)->{last_error}, qr/does not start with the GIR signature/, 'also in its status');
$proxy->lie('');
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
goes_on_after('all the lies');

stop_load();
caught_up($paris, $tokyo);
each_once([ $tokyo, $paris ]);
is($paris->safe_psql('postgres', 'select count(*) from braid.conflict_history'), '0', 'and nothing met what was there already');

# A keepalive with an end of WAL that will never be reached: views go on working, and a new
# connection corrects it.
my $told = () = $proxy->lies;
$proxy->lie('far_end');
ok(wait_until(sub { scalar(my @now = $proxy->lies) > $told }, 40), 'told: far_end');
my $lag = sub { return $paris->safe_psql('postgres', "select lag_bytes from braid.subscription_status where name = '$name'") };
ok(wait_until(sub { $lag->() eq '9223372036854775807' }, 20), 'the lag is shown, as large as a number can be') or diag($lag->());
connect_anew();
ok(wait_until(sub { $lag->() eq '0' }, 40), 'and as it is after the connection was made anew') or diag($lag->());

# WAL is gone which a walsender was reading: the next one may do without. Where that comes again and
# again, it stops.
$offset = -s $paris->logfile;
# For keepalives that come soon.
$tokyo->safe_psql('postgres', $_) for q[alter system set wal_sender_timeout = '2s'], 'select pg_reload_conf()';
$proxy->lie('removed');
ok(wait_until(sub { has_said($offset, qr/"$name" will be tried again: the provider reported: requested WAL segment/) }, 40), 'told: removed');
goes_on_after('removed');
$proxy->lie('always removed');
ok(wait_until(sub { status($paris, $name)->{state} eq 'error' }, 60), 'always removed: it stops');
$proxy->lie('');
like(status($paris, $name)->{error_hint}, qr/max_slot_wal_keep_size/, 'with a hint');
my $attempts = () = slurp_file($paris->logfile, $offset) =~ /will be tried again: the provider reported: requested WAL segment/g;
cmp_ok($attempts, '>=', 2, 'after some attempts');
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
goes_on_after('an end of that');
$tokyo->safe_psql('postgres', $_) for 'alter system reset wal_sender_timeout', 'select pg_reload_conf()';

# A transaction that comes after a later one is not requested again once that is applied. The
# subscription stops at once, and the missing transaction can be found.
on_all('create table late (k int primary key)', $tokyo, $paris);
$tokyo->safe_psql('postgres', 'insert into late values (0)');
caught_up($paris, $tokyo);
my $before = () = $proxy->lies;
$offset = -s $paris->logfile;
$proxy->lie('swap_whole');
# The proxy may get the lie after it has passed on a transaction that was written right after.
my $key = 0;
my $insert = sub { $key++; $tokyo->safe_psql('postgres', "insert into late values ($key)") };
ok(wait_until(sub { $insert->(); scalar(my @now = $proxy->lies) > $before }, 40), 'a transaction is held back');
$insert->();
ok(wait_until(sub { status($paris, $name)->{state} eq 'error' }, 40), 'a transaction that comes late stops the subscription');
like(status($paris, $name)->{last_error}, qr{the provider sent the transaction at [0-9A-F]+/[0-9A-F]+ after one that ends at [0-9A-F]+/[0-9A-F]+}, 'it says which');
like(slurp_file($paris->logfile, $offset), qr/HINT:  [^\n]*braid\.compare/, 'and what to do');
unlike(slurp_file($paris->logfile, $offset), qr/will be tried again/, 'it was not tried again');
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
caught_up($paris, $tokyo);
$paris->safe_psql('postgres', "call braid.compare('$name', 'late'); call braid.repair('$name', 'late')");
is($paris->safe_psql('postgres', 'select k from late order by k'), join("\n", 0 .. $key), 'found and mended');

for my $node ($tokyo, $paris)
{
	unlike(slurp_file($node->logfile), qr/terminated by signal|PANIC/, 'nobody has crashed at ' . $node->name);
}
$proxy->stop;
done_testing();
