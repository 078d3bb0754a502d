# In a group, REFRESH MATERIALIZED VIEW and statements about roles are sent on request. A password
# arrives as it is stored, and is in no view, log or stream for users. Databases of one server don't
# run a statement twice. Nodes that set a password at the same time agree on one.

use strict;
use warnings;

use Braid;
use Group;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $clear = 'Open-Sesame-1001';

my ($tokyo, $paris) = group([qw(tokyo paris)], q[
	create table item (id int primary key, n int);
	insert into item select g, g from generate_series(1, 10) g;
	create materialized view counted as select count(*) as rows from item;
	create unique index on counted (rows);
]);

# Another database of tokyo's server, as a third member.
sql($tokyo, 'create database second');
my ($there, $dsn) = ($tokyo->connstr('postgres'), $tokyo->connstr('second'));
$tokyo->safe_psql('second', "create extension braid; select braid.join_group(\$d\$$there\$d\$, node_name => 'second', dsn => \$d\$$dsn\$d\$)");
$tokyo->safe_psql('second', q[select braid.wait_for_group('180 s')]);
my %place = (tokyo => [ $tokyo, 'postgres' ], paris => [ $paris, 'postgres' ], second => [ $tokyo, 'second' ]);

sub at { my ($name, $sql) = @_; my ($node, $database) = @{ $place{$name} }; return $node->safe_psql($database, $sql); }

# Each of these has what each other one of them has committed by now.
sub arrived
{
	my @names = @_ ? @_ : sort keys %place;
	for my $from (@names)
	{
		my $position = at($from, 'select braid.sync_event()');
		at($_, "select braid.wait_for_event('$from', '$position', '180 s')") for grep { $_ ne $from } @names;
	}
	return;
}

sub on { return 'set braid.replicate_roles = on; set braid.replicate_refresh = on; '; }

# Roles of the test, with all that is sent of them.
my $roles = q[
	select string_agg(line, E'\n' order by line collate "C") from (
		select concat_ws('|', rolname, rolsuper, rolinherit, rolcreaterole, rolcreatedb, rolcanlogin, rolreplication, rolbypassrls, rolconnlimit,
			rolpassword, rolvaliduntil, shobj_description(oid, 'pg_authid')) from pg_authid where rolname ~ '^r_'
		union all select 'member|' || roleid::regrole || '|' || member::regrole || '|' || admin_option from pg_auth_members where member::regrole::text ~ '^r_'
		union all select concat_ws('|', 'setting', setrole::regrole, (select datname = current_database() from pg_database d where d.oid = setdatabase), setconfig)
			from pg_db_role_setting where setrole::regrole::text ~ '^r_' and setdatabase in (0, (select oid from pg_database where datname = current_database()))) a (line)];

sub same_roles
{
	my ($what, @names) = @_;
	arrived(@names);
	my $here = at('tokyo', $roles);
	my $other = at('paris', $roles);
	is($other, $here, $what);
	return $here;
}

# Off by default. A node that joins refreshes its views by itself.
at($_, 'refresh materialized view counted') for sort keys %place;
arrived();
at('tokyo', q[insert into item values (11); refresh materialized view counted; create role r_here; drop role r_here]);
arrived();
is(at('tokyo', 'select rows from counted'), '11', 'a view is refreshed');
is(at('paris', 'select rows from counted'), '10', 'and is not elsewhere');
is(at('paris', q[select count(*) from braid.ddl_log where command_tag ~ 'REFRESH|ROLE']), '0', 'nor are roles sent');
is(at($_, q[select string_agg(setting, ' ') from pg_settings where name ~ '^braid.replicate_']), 'off off', "both are off at $_") for sort keys %place;

# Refresh: at its place among the changes, in a block, in a function, by a role that is no
# superuser.
at('tokyo', on() . q[
	begin; insert into item values (12); refresh materialized view counted; insert into item values (13); commit]);
arrived();
is(at($_, 'select rows || \' \' || (select count(*) from item) from counted'), '12 13', "$_ refreshes at the same place") for sort keys %place;
at('tokyo', on() . q[
	begin; insert into item values (14); savepoint s; refresh materialized view counted; rollback to s; commit;
	do $$ begin execute 'refresh materialized view concurrently counted'; end $$]);
arrived();
is(at('paris', 'select rows from counted'), '14', 'CONCURRENTLY, in a block');
is(at('paris', q[select count(*) from braid.ddl_log where command_tag = 'REFRESH MATERIALIZED VIEW']), '2', 'what is rolled back is not sent');
at('tokyo', on() . 'refresh materialized view counted with no data');
arrived();
is(at('paris', q[select relispopulated from pg_class where relname = 'counted']), 'f', 'WITH NO DATA');
at('tokyo', on() . q[
	create role r_owner; grant select on item to r_owner; grant create on schema public to r_owner;
	set role r_owner;
	create materialized view of_owner as select id from item; create unique index on of_owner (id);
	reset role; insert into item values (15); set role r_owner;
	refresh materialized view of_owner;
	reset role; insert into item values (16); set role r_owner;
	refresh materialized view concurrently of_owner]);
arrived();
is(at($_, 'select max(id) || \' \' || (select relowner::regrole from pg_class where relname = \'of_owner\') from of_owner'), '16 r_owner', "a role's own view at $_")
  for sort keys %place;

# Slots for users, from before the first password on.
my @formats = (
	[ 'gir_json', q['format', 'gir-json', 'publication_names', (select string_agg(pubname, ',') from pg_publication), 'ddl', 'on'] ],
	[ 'wal2json_one', q['format', 'wal2json', 'add-tables', '*.*,braid.*'] ],
	[ 'wal2json_two', q['format', 'wal2json', 'format-version', '2', 'add-tables', '*.*,braid.*'] ]);
at('tokyo', "select pg_create_logical_replication_slot('$_', 'braid')") for (map { $_->[0] } @formats), 'gir_binary';

# Every kind of statement.
my @statements = (
	"create role r_app login password '$clear' connection limit 7 valid until '2040-01-01 00:00+00'",
	"create user r_user encrypted password E'Open\\x2dSesame-1001' createdb",
	'create group r_group',
	'create role "r_Odd "" näme" in role r_group',
	'create role r_head role r_app admin r_user',
	'alter role r_app nologin createrole', 'alter role r_app login nocreaterole',
	'alter user r_user nocreatedb',
	"alter role r_user password null",
	"alter role r_user with password \$x\$$clear\$x\$ /* $clear */ inherit",
	'alter group r_group add user r_user', 'alter group r_group drop user r_user',
	'grant r_group to r_app, r_user', 'grant r_group to r_app with admin option', 'revoke admin option for r_group from r_app', 'revoke r_group from r_user',
	'grant pg_read_all_data to r_app',
	q[alter role r_app set work_mem = '5MB'], q[alter role r_app set search_path = '$user', item, "a b"],
	q[set maintenance_work_mem = '77MB'; alter role r_app set maintenance_work_mem from current],
	q[alter role r_user set work_mem = '5MB'], q[alter role r_user reset work_mem],
	q[comment on role r_app is 'an application'],
	'alter role r_head rename to r_leader',
	'create role r_first; create role r_second', 'drop role if exists r_first, r_nobody', 'drop role r_second',
	'set role r_app; alter role current_user set statement_timeout = 0; reset role',
	"do \$\$ begin execute 'comment on role r_user is ''two''; alter role r_user password ''$clear'' createdb; comment on role r_user is null'; end \$\$",
	"set session authorization r_app; alter role session_user set lock_timeout = '9s'; alter user current_user password '$clear'; reset session authorization");
for my $statement (@statements)
{
	at('tokyo', on() . $statement);
	same_roles($statement =~ s/\Q$clear\E/.../gr);
}
my $here = same_roles('all of them');
like($here, qr/r_app\|f\|t\|f\|f\|t\|f\|f\|7\|SCRAM-SHA-256/, 'with a stored password');
is(at('paris', q[select string_agg(distinct state, ' ') from braid.ddl_log where command_tag ~ 'ROLE' and state <> 'sent']), 'applied', 'each was run');
is(at('second', q[select string_agg(distinct state || ': ' || reason, ' ') from braid.ddl_log where command_tag ~ 'ROLE' and state <> 'sent']),
	'done already: a database of this server has run it', 'but not by a database of the same server');
is(at('paris', q[select statement from braid.ddl_log where statement ~ 'create role r_app']),
	q[create role r_app login /* password left out */ connection limit 7 valid until '2040-01-01 00:00+00'], 'only what was written');
is(at('paris', q[select tables::text from braid.ddl_log where statement ~ 'create role r_app']), q[{"role \"r_app\"","password of role \"r_app\""}], 'and what it is about');
is(at('paris', q[select count(*) from braid.ddl_log where statement ~* 'session_user']), '0', "the session's user is named");

# Settings for a database: for that of each node, whatever its name is.
at('tokyo', on() . q[alter role r_app in database postgres set work_mem = '6MB'; alter role r_app in database template1 set work_mem = '9MB']);
same_roles('settings for this database');
is(at('second', q[select setconfig from pg_db_role_setting s join pg_database d on d.oid = s.setdatabase where datname = 'second']), '{work_mem=6MB}', 'of another name');
is(at('paris', q[select count(*) from pg_db_role_setting s join pg_database d on d.oid = s.setdatabase where datname = 'template1']), '0', 'for other databases they stay');
at('second', on() . q[alter role r_app in database second reset work_mem; alter role r_user nologin]);
same_roles('from a database of another name');
is(at($_, q[select count(*) from pg_db_role_setting s join pg_database d on d.oid = s.setdatabase where datname = current_database()]), '0', "reset at $_") for sort keys %place;

at('tokyo', on() . q[alter role all set application_name = 'everybody'; alter role all in database postgres set lock_timeout = '8s']);
arrived();
is(at($_, q[select string_agg(setconfig::text, ' ' order by setdatabase) from pg_db_role_setting where setrole = 0 and
	setdatabase in (0, (select oid from pg_database where datname = current_database()))]), '{application_name=everybody} {lock_timeout=8s}', "of all roles at $_") for sort keys %place;

# Objects that roles own.
at('tokyo', on() . q[create role r_leaves; create role r_stays; create table left_over (id int primary key); alter table left_over owner to r_leaves;
	grant select on item to r_leaves; reassign owned by r_leaves to r_stays; drop owned by r_leaves]);
# The other database of the server has to have run it, too.
arrived();
at('tokyo', on() . 'drop role r_leaves');
same_roles('REASSIGN OWNED and DROP OWNED');
is(at($_, q[select relowner::regrole from pg_class where relname = 'left_over']), 'r_stays', "an owner at $_") for sort keys %place;

# Rolled back, and by extension of a block.
at('tokyo', on() . q[begin; create role r_gone; rollback; begin; create role r_kept; savepoint s; create role r_gone; rollback to s; commit;
	do $$ begin execute 'create role r_in_block password ''Open-Sesame-1001'''; end $$]);
same_roles('roll back, savepoints, blocks');
is(at('paris', q[select string_agg(rolname, ' ' order by rolname) from pg_authid where rolname ~ '^r_(gone|kept|in_block)']), 'r_in_block r_kept', 'what was committed');

# md5: the name is its salt.
at('tokyo', on() . q[set password_encryption = md5; create role r_old password 'Open-Sesame-1001']);
like(same_roles('md5'), qr/r_old\|.*\|md5[0-9a-f]{32}/, 'as it is stored');
at('tokyo', on() . 'alter role r_old rename to r_new');
unlike(same_roles('a new name'), qr/md5/, 'clears it');

# The password works at the other node, and no other does.
my $hba = $paris->data_dir . '/pg_hba.conf';
my $rules = slurp_file($hba);
unlink $hba;
append_to_file($hba, "local all r_app scram-sha-256\n$rules");
$paris->reload;
sub login
{
	local $ENV{PGPASSWORD} = shift;
	my ($status, $out, $err) = $paris->psql('postgres', 'select current_user', extra_params => [ '-U', 'r_app' ]);
	return $status == 0 ? $out : $err;
}
is(login($clear), 'r_app', 'login with the password');
like(login('Open-Sesame'), qr/password authentication failed/, 'and not with another');

# Where it can't be read.
my @stored = split /\n/, at('tokyo', q[select rolpassword from pg_authid where rolpassword is not null and rolname ~ '^r_']);
cmp_ok(scalar @stored, '>=', 3, 'passwords are stored');
my @secrets = map { ($_, unpack('H*', $_)) } $clear, @stored;
sub has_none
{
	my ($what, $text, @but) = @_;
	my @found = grep { my $secret = $_; index(lc $text, lc $secret) >= 0 && !grep { $_ eq $secret } @but } @secrets;
	is(scalar @found, 0, "no password in $what") or diag("@found");
	return;
}
for my $format (@formats)
{
	my $out = at('tokyo', "select string_agg(data, E'\\n') from pg_logical_slot_peek_changes('$format->[0]', null, null, $format->[1])");
	cmp_ok(length $out, '>', 1000, "there is something in $format->[0]");
	has_none($format->[0], $out);
}
my $json = at('tokyo', "select string_agg(data, E'\\n') from pg_logical_slot_peek_changes('gir_json', null, null, $formats[0][1])");
my $sent = unpack 'H*', 'create role r_app login /* password left out */ connection limit 7';
like($json, qr/"braid\.ddl".*$sent/, 'the statement is among the messages for users');
my $binary = at('tokyo', q[select string_agg(encode(data, 'hex'), '') from pg_logical_slot_peek_binary_changes('gir_binary', null, null, 'proto_version', '1', 'publication_names',
	(select string_agg(pubname, ',') from pg_publication), 'ddl', 'on')]);
like($binary, qr/$sent/, 'and among those for nodes');
unlike($binary, qr/${\unpack('H*', $clear)}/i, 'which have no clear text');
like($binary, qr/${\unpack('H*', $stored[0])}/i, 'but what is stored');
for my $name (sort keys %place)
{
	has_none("braid.ddl_log of $name", at($name, q[select string_agg(l::text, E'\n') from braid.ddl_log l]));
	has_none("tables of $name", at($name, q[select concat((select string_agg(t::text, '') from braid.ddl_message t), (select string_agg(t::text, '') from braid.ddl_intent t),
		(select string_agg(t::text, '') from pg_stat_activity t where pid <> pg_backend_pid()))]));
}
at('tokyo', "select pg_drop_replication_slot('$_')") for (map { $_->[0] } @formats), 'gir_binary';

# Two nodes do the same at once.
sub apart { for my $name (qw(tokyo paris)) { at($name, "select braid.disable_subscription(name) from braid.subscription_status"); } return; }
sub together { for my $name (qw(tokyo paris)) { at($name, "select braid.enable_subscription(name) from braid.subscription_status"); } return; }
apart();
at('tokyo', on() . "create role r_both login password '$clear'; create role r_plain; alter role r_app set work_mem = '8MB'; alter role r_user password 'first'; alter role r_stays createdb");
at('paris', on() . "create role r_both login password '$clear'; create role r_plain; alter role r_app set work_mem = '8MB'; alter role r_user password 'second'; alter role r_stays login");
my $last = at('paris', q[select rolpassword from pg_authid where rolname = 'r_user']);
together();
$here = same_roles('both did the same');
like($here, qr/r_stays\|f\|t\|f\|t\|t\|/, 'what they did differently is merged');
is(at('tokyo', q[select rolpassword from pg_authid where rolname = 'r_user']), $last, 'the later password stays');
is(at('paris', q[select string_agg(state || ': ' || reason, ', ' order by recorded_at) from braid.ddl_log where statement ~ 'r_(both|plain|user /\*)' and node = 'tokyo' and recorded_at >
	(select min(recorded_at) from braid.ddl_log where statement ~ 'r_both')]),
	'done already: the roles have what the statement brings, done already: the roles have what the statement brings, done already: a later statement has set the password', 'and the reasons are told');

# Different changes: a conflict, which a person has to decide.
apart();
at('tokyo', on() . 'alter role r_plain connection limit 5');
at('paris', on() . 'alter role r_plain connection limit 6');
together();
for my $name (sort keys %place)
{
	ok(wait_until(sub { at($name, q[select count(*) from braid.subscription_status where last_error ~ 'role "r_plain" does not have the attributes here']) eq '1' }, 60), "$name stops")
	  or diag(at($name, 'select state, last_error from braid.subscription_status'));
}
like(at('paris', q[select error_detail from braid.subscription]), qr/connection limit 5.*last statement about the role here, of node "paris", is: .*connection limit 6/s, 'with both statements');
at('paris', 'alter role r_plain connection limit 5; select braid.enable_subscription(name) from braid.subscription_status where last_error is not null');
at('tokyo', 'alter role r_plain connection limit 6');
at($_, 'select braid.enable_subscription(name) from braid.subscription_status where last_error is not null') for qw(tokyo second);
arrived();
at('tokyo', 'alter role r_plain connection limit 5');
same_roles('after somebody has decided');

# A role may not do there what it may do here.
at('tokyo', on() . 'create role r_boss createrole createdb');
arrived();
at('paris', 'alter role r_boss nocreaterole');
my $from = -s $paris->logfile;
at('tokyo', on() . "set role r_boss; create role r_refused password '$clear'");
ok(wait_until(sub { at('paris', q[select count(*) from braid.subscription_status where last_error ~ 'permission denied to create role']) eq '1' }, 60), 'a statement that the role may not do here stops')
  or diag(at('paris', 'select state, last_error from braid.subscription_status'));
like(at('paris', q[select string_agg(coalesce(error_context, ''), '') from braid.subscription_status]), qr/create role r_refused \/\* password left out \*\//, 'and is named');
push @secrets, map { ($_, unpack('H*', $_)) } split /\n/, at('tokyo', q[select rolpassword from pg_authid where rolname ~ '^r_' and rolpassword is not null]);
has_none('the state of the subscription', at('paris', q[select string_agg(s::text || l::text, '') from braid.subscription_status s, braid.ddl_log l where l.state = 'failed']));
at('paris', 'alter role r_boss createrole; select braid.enable_subscription(name) from braid.subscription_status where last_error is not null');
same_roles('once it may');

# A transaction that is set aside is shown without the password, and applied with it.
at('paris', q[alter role r_boss nocreaterole; select braid.alter_subscription('paris_from_tokyo', on_error => 'park')]);
at('tokyo', on() . "set role r_boss; create role r_parked password '$clear'");
push @secrets, map { ($_, unpack('H*', $_)) } at('tokyo', q[select rolpassword from pg_authid where rolname = 'r_parked']);
ok(wait_until(sub { at('paris', 'select count(*) from braid.parked_transactions') eq '1' }, 60), 'it is parked');
my $parked = at('paris', q[select string_agg(record::text, E'\n') from braid.parked_changes]);
$sent = unpack 'H*', 'create role r_parked /* password left out */';
like($parked, qr/$sent/, 'and shown');
has_none('braid.parked_changes', $parked);
at('paris', q[alter role r_boss createrole; select braid.retry_parked('paris_from_tokyo')]);
ok(wait_until(sub { at('paris', 'select count(*) from braid.parked_transactions') eq '0' }, 60), 'it is tried again');
same_roles('with its password');

# Logs: nothing has written a statement to paris' log that failed there or not, nor to tokyo's.
has_none('the log of ' . $_->name, slurp_file($_->logfile)) for $tokyo, $paris;

done_testing();
