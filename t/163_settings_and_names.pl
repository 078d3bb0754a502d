# Changes arrive unchanged with any settings of a role or a database of the provider, and any
# characters in names.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_server('tokyo', conf => "max_worker_processes = 40\n");
my $paris = new_server('paris');
my @both = ($tokyo, $paris);
my @settings = (
	[ 'standard_conforming_strings', 'off' ], [ 'escape_string_warning', 'on' ], [ 'backslash_quote', 'off' ], [ 'quote_all_identifiers', 'on' ],
	[ 'transform_null_equals', 'on' ], [ 'array_nulls', 'off' ], [ 'xmloption', 'document' ], [ 'datestyle', q['SQL, DMY'] ], [ 'intervalstyle', 'sql_standard' ],
	[ 'bytea_output', 'escape' ], [ 'extra_float_digits', '-15' ], [ 'default_transaction_read_only', 'on' ], [ 'default_transaction_isolation', 'serializable' ],
	[ 'default_transaction_deferrable', 'on' ], [ 'statement_timeout', '1' ], [ 'lock_timeout', '1' ], [ 'idle_in_transaction_session_timeout', '1' ], [ 'timezone', q['Asia/Tokyo'] ],
	[ 'check_function_bodies', 'off' ], [ 'default_toast_compression', 'pglz' ], [ 'enable_seqscan', 'off' ], [ 'client_min_messages', 'error' ]);
# 19 has standard string literals alone.
@settings = grep { $_->[0] !~ /^(?:standard_conforming_strings|escape_string_warning)$/ } @settings
  if $tokyo->safe_psql('postgres', "select current_setting('server_version_num')::int >= 190000") eq 't';
# Names with whatever they may have; of node, subscription, publication and table.
my ($node, $name, $publication) = (q[to\\kyo "q" 'x' %s é], q[from\\tokyo 'it' "is"], q[pub\\lic, "q" 'x' %d]);
my $long = 'n' x 63;
on_all('create extension braid; create table item (id int primary key, v text, b bytea, at timestamptz, f float8, i interval)', @both);
my $dsn = $tokyo->connstr('postgres');
$tokyo->safe_psql('postgres', "select braid.create_node(\$n\$$node\$n\$, \$d\$$dsn\$d\$); create publication \"" . $publication =~ s/"/""/gr . '" for all tables');
$paris->safe_psql('postgres', "select braid.create_node('$long', \$d\$" . $paris->connstr('postgres') . "\$d\$); create publication braid for all tables");
for my $setting (@settings)
{
	my ($what, $value) = @$setting;
	$_->safe_psql('template1', "alter database postgres set $what = $value") for @both;
}
$_->restart for @both;
$ENV{PGOPTIONS} = join ' ', map { "-c $_" } 'standard_conforming_strings=on', 'default_transaction_read_only=off', 'default_transaction_isolation=read\\ committed', 'statement_timeout=0', 'lock_timeout=0',
  'idle_in_transaction_session_timeout=0', 'quote_all_identifiers=off', 'datestyle=ISO', 'intervalstyle=postgres', 'timezone=UTC', 'bytea_output=hex', 'extra_float_digits=1', 'default_transaction_deferrable=off';

my $row = q[values (%d, E'a\\\\b ''c'' "d"', '\\x005c27', '2026-02-03 04:05:06.789012+09', 1.0/3, '1 mon -2 days 03:04:05')];
$tokyo->safe_psql('postgres', 'insert into item ' . sprintf($row, 1));
$paris->safe_psql('postgres', "select braid.create_subscription(\$n\$$name\$n\$, \$d\$$dsn\$d\$, publications => array[\$n\$$publication\$n\$])");
$paris->safe_psql('postgres', "select braid.wait_for_subscription(\$n\$$name\$n\$, '180 s')");
$tokyo->safe_psql('postgres', 'insert into item ' . sprintf($row, 2));
$tokyo->safe_psql('postgres', q[update item set v = 'changed \\ ''' where id = 1]);
ok(wait_until(sub { $paris->safe_psql('postgres', q[select count(*) from item]) == 2 && digest($tokyo, 'item') eq digest($paris, 'item') }, 30), 'it is copied and streamed')
  or diag $paris->safe_psql('postgres', 'select * from braid.subscription_status');
same_tables(\@both, 'item');
is($paris->safe_psql('postgres', q[select provider from braid.subscription_status]), $node, 'the provider goes by its name');
is($paris->safe_psql('postgres', q[select node from item i, braid.row_version('item'::regclass, i.ctid) where id = 2]), $node, 'and so do its rows');
$paris->safe_psql('postgres', "select braid.disable_subscription(\$n\$$name\$n\$)");
$tokyo->safe_psql('postgres', 'insert into item ' . sprintf($row, 3));
$paris->safe_psql('postgres', "select braid.enable_subscription(\$n\$$name\$n\$)");
ok(wait_until(sub { $paris->safe_psql('postgres', q[select count(*) from item]) == 3 }, 30), 'it goes on after a rest');
$paris->safe_psql('postgres', "call braid.compare(\$n\$$name\$n\$, 'item')");
is($paris->safe_psql('postgres', q[select count(*) from braid.differences]), 0, 'it is compared');

# A node of 63 bytes as the provider.
$tokyo->safe_psql('postgres', "select braid.create_subscription('back', \$d\$" . $paris->connstr('postgres') . "\$d\$, copy_data => false)");
$tokyo->safe_psql('postgres', q[select braid.wait_for_subscription('back', '180 s')]);
$paris->safe_psql('postgres', 'insert into item ' . sprintf($row, 4));
ok(wait_until(sub { $tokyo->safe_psql('postgres', q[select count(*) from item where id = 4]) == 1 }, 30), 'from a node of 63 bytes');

# Sessions under these settings call the functions.
delete $ENV{PGOPTIONS};
$_->safe_psql('template1', 'alter database postgres reset statement_timeout') for @both;
is($tokyo->safe_psql('postgres', q[select output_plugin_allowed from braid.node_info()]), 't', 'a node tells that its plugin is allowed');

# The error names what is wrong with a connection string, and shows nothing of a password.
for my $case (
	[ 'hots=localhost dbname=x', qr/connection string is malformed: there is no option "hots"/ ],
	[ 'password=secret hunter=two', qr/connection string is malformed\n/ ],
	[ 'password=secret word', qr/connection string is malformed\n/ ])
{
	my ($dsn, $expected) = @$case;
	my (undef, undef, $err) = $paris->psql('postgres', "set default_transaction_read_only = off; select braid.create_subscription('x', '$dsn')");
	like($err, $expected, "error for $dsn");
	unlike($err, qr/secret|hunter|two/, "no secret of $dsn");
}

# Without commit timestamps nothing is applied, and the view shows it at once.
$paris->append_conf('postgresql.conf', "track_commit_timestamp = off\n");
$paris->restart;
my $error;
ok(wait_until(sub { $error = $paris->safe_psql('postgres', q[select state || ' ' || last_error || ' ' || error_hint from braid.subscription_status]); ($error // '') =~ /track_commit_timestamp must be on/ }, 30), 'a leader without commit timestamps says so') or diag $error;
done_testing();
