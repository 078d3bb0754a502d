# join_group refuses a database that can't join, with a hint, before it contacts the group. Nothing
# is left behind on either side.

use strict;
use warnings;

use Braid;
use File::Basename qw(dirname);
use File::Path qw(make_path);
use Group;
use PostgreSQL::Test::Utils;
use Test::More;

# Each server finds services in a file of its own: one string leads from each to another server.
my $services = PostgreSQL::Test::Utils::tempdir();
my ($tokyo, $paris) = map { local $ENV{PGSERVICEFILE} = "$services/$_"; new_server($_, init => ['--data-checksums']) } qw(tokyo paris);
sub service { my ($at, $of) = @_; append_to_file("$services/" . $at->name, "[own]\nhost=" . $of->host . "\nport=" . $of->port . "\n"); return; }
service($paris, $paris);
sql($_, 'create extension braid') for $tokyo, $paris;
sql($tokyo, q[
	create table item (id int primary key, v text not null);
	create table hidden (id int primary key);
	create role replicator login]);
my $there = $tokyo->connstr('postgres');
my $by_role = "$there user=replicator";
my $before = q[select (select count(*) from braid.node), (select count(*) from braid.group_self), (select count(*) from braid.subscription)];
like(refusal($tokyo, "select braid.create_group('shop', node_name => 'tokyo', dsn => \$d\$" . $paris->connstr('postgres') . '$d$)'),
	qr/ERROR:  the connection string in dsn does not lead to this database\n.*DETAIL:  It leads to database "postgres" of another server\.\n.*HINT:/s, 'a group is not created by the address of another server');
is(sql($tokyo, $before), '0|0|0', 'nothing is left');
sql($tokyo, "select braid.create_group('shop', node_name => 'tokyo', dsn => \$d\$$by_role\$d\$)");

my $log = q[select string_agg(kind || ' ' || subject, ', ' order by log_index) from braid.group_log];
my $agreed = sql($tokyo, $log);
my $state = q[select concat_ws('|', (select count(*) from braid.node), (select count(*) from braid.group_self), (select count(*) from braid.group_member),
	(select count(*) from braid.subscription), (select count(*) from braid.connection), (select count(*) from braid.join_step), (select count(*) from pg_publication),
	(select count(*) from pg_replication_slots), (select count(*) from pg_roles where rolreplication and not rolsuper))];
my $at_source = q[select (select count(*) from pg_replication_slots), (select count(*) from braid.group_nodes), (select count(*) from braid.connection)];
my $source_before = sql($tokyo, $at_source);

# Calls join_group in a database, with its arguments; tests the error, and that nothing has changed.
sub refused
{
	my ($words, $name, %opt) = @_;
	my ($node, $database) = ($opt{node} // $paris, $opt{database} // 'postgres');
	my $was = $node->safe_psql($database, $state);
	my $member = $opt{member} // $there;
	my $dsn = !exists $opt{dsn} ? '$d$' . $node->connstr($database) . '$d$' : defined $opt{dsn} ? "\$d\$$opt{dsn}\$d\$" : 'null';
	my $newcomer = $opt{name} // 'newcomer';
	my $mode = $opt{mode} // 'empty';
	my $role = $opt{role} ? "set role $opt{role};" : '';
	my ($status, $out, $err) = $node->psql($database, "$role select braid.join_group(\$d\$$member\$d\$, node_name => '$newcomer', dsn => $dsn, mode => '$mode')");
	unlike($err, qr/NOTICE:  role .* was given/, '... without a word of rights that are not given');
	like($err, qr/ERROR:  $words/s, $name);
	like($err, qr/^HINT:  \S/m, '... with what to do');
	is($node->safe_psql($database, $state), $was, '... and leaves nothing');
	is(sql($tokyo, $at_source), $source_before, '... nor at the member');
	is(sql($tokyo, $log), $agreed, '... which has agreed on nothing');
	return;
}

# Connection strings
refused('the connection string in member_dsn leads back to this database', 'a member that is the caller', member => $paris->connstr('postgres'));
refused('the connection string in dsn does not lead to this database\n.*DETAIL:  It leads to database "postgres" of another server', 'the address of the member in the place of its own', dsn => $there);
refused('the connection string in dsn does not lead to this database\n.*DETAIL:  It leads to database "template1" of this server', 'another database of the server', dsn => $paris->connstr('template1'));
refused('node "tokyo" refuses: it cannot connect to node "newcomer" by the connection string in dsn\n.*DETAIL:  .*not found', 'an address that the member does not know', dsn => 'service=own dbname=postgres password=secret4711');
like(slurp_file($tokyo->logfile), qr/cannot connect to node "newcomer"/, 'the member logs it');
unlike(slurp_file($_->logfile), qr/secret4711|@{[unpack 'H*', 'secret4711']}/i, '... without the password: ' . $_->name) for $tokyo, $paris;
service($tokyo, $tokyo);
refused('node "tokyo" refuses: from there the connection string in dsn does not lead to node "newcomer"\n.*DETAIL:  It leads to database "postgres" of another server', 'an address that leads from the member to the member', dsn => 'service=own dbname=postgres');
refused('dsn must not be null\n.*HINT:  Give the connection string by which other members reach', 'no address', dsn => undef);
refused('could not connect to the member\n', 'a member that is not there', member => 'host=127.0.0.1 port=1 dbname=postgres');
refused('the member\'s database "template1" does not have extension braid', 'another database of the member', member => $tokyo->connstr('template1'));
sql($tokyo, 'create database plain');
$tokyo->safe_psql('plain', 'create extension braid');
refused('the database at member_dsn is not a member of a group', 'a database that is no node', member => $tokyo->connstr('plain'));

refused('connection string is malformed: there is no option "hots"', 'an option that is none', member => 'hots=127.0.0.1');
refused('the group has a node "tokyo" already', 'a name that is taken', name => 'tokyo');

# Versions
my $version = sql($tokyo, 'select braid_version from braid.group_nodes');
sql($tokyo, q[update braid.group_member set braid_version = '99.1.2']);
refused("Braid \Q$version\E is too old for this group\n.*DETAIL:  Its members have Braid 99\\.1\\.2 or newer\\.", 'a version that may not know what the group has agreed on');
sql($tokyo, "update braid.group_member set braid_version = '$version'");

# Roles
sql($paris, 'create role clerk; grant braid_admin to clerk');
refused('permission denied to change the group', 'a role that is no superuser', role => 'clerk');
sql($tokyo, 'create role weak login; grant braid_monitor to weak');
refused('role "weak" may not replicate from the provider', 'a role that may not replicate', member => "$there user=weak");
sql($tokyo, 'revoke pg_read_all_data from replicator; grant select on item to replicator');
refused('role "replicator" may not copy tables of node "tokyo"\n.*DETAIL:  Tables: public\.hidden\.', 'a table that the role of the group can\'t read');
sql($tokyo, 'grant pg_read_all_data to replicator; alter table hidden enable row level security');
refused('row-level security hides rows of node "tokyo" from role "replicator"\n.*DETAIL:  Tables: public\.hidden\.', 'rows that are hidden from it');
sql($tokyo, 'alter table hidden disable row level security; alter role replicator noreplication');
refused('role "replicator" may not replicate from the provider', 'the role of the group may not replicate');
sql($tokyo, 'alter role replicator replication');

# The schema
sql($paris, 'create table item (id int primary key, v varchar(10))');
refused('tables of node "tokyo" are not in this database\n.*DETAIL:  Tables: public\.hidden\.', 'a table that is missing', mode => 'schema');
sql($paris, 'create table hidden (id int primary key)');
refused('tables differ from those of node "tokyo"\n.*DETAIL:  Table public\.item has here: .*character varying\(10\).*; there: .*text', 'a column of another type', mode => 'schema');
refused('this database has tables already', 'tables in an empty database');
sql($paris, q[drop table item, hidden; create table item (id int primary key, v text not null); create table hidden (id int primary key); insert into hidden values (1)]);
refused('table (public\.)?hidden has rows', 'rows of its own', mode => 'schema');
sql($paris, 'drop table item, hidden');

# Encodings
sql($paris, "create database latin encoding 'LATIN1' locale 'C' template template0");
sql($paris, "create database ascii encoding 'SQL_ASCII' locale 'C' template template0");
for my $database (qw(latin ascii))
{
	$paris->safe_psql($database, 'create extension braid');
	my $encoding = $database eq 'latin' ? 'LATIN1' : 'SQL_ASCII';
	refused("rows of node \"tokyo\" cannot be converted from encoding UTF8 to $encoding", "a database in $encoding", database => $database);
}

# pg_dump: a server whose programs are elsewhere.
# Programs find the other directories by the way from one to the other.
my $elsewhere = PostgreSQL::Test::Utils::tempdir();
chomp(my ($bin, $lib, $share) = map { scalar `pg_config --$_` } qw(bindir pkglibdir sharedir));
make_path(dirname($elsewhere . $_)) for $bin, $lib, $share;
system_or_bail('cp', '-a', $bin, $elsewhere . $bin);
symlink $_, $elsewhere . $_ or die $! for $lib, $share;
my $programs = dirname($elsewhere . $bin);
unlink "$programs/bin/pg_dump" or die $!;
my $bare = new_server('bare', init => ['--data-checksums'], install_path => $programs);
sql($bare, 'create extension braid');
refused('could not run pg_dump: .*\n.*DETAIL:  It is looked for as \S+/bin/pg_dump\.\n.*HINT:  Install PostgreSQL\'s client programs', 'no pg_dump', node => $bare);
append_to_file("$programs/bin/pg_dump", "#!/bin/sh\necho 'pg_dump (PostgreSQL) 14.9 (Debian 14.9-1)'\n");
chmod 0755, "$programs/bin/pg_dump";
refused('pg_dump 14 cannot read the schema of PostgreSQL \d+\n.*HINT:  pg_dump reads servers of its own version and older', 'an older pg_dump', node => $bare);
unlink "$programs/bin/pg_dump";
append_to_file("$programs/bin/pg_dump", "#!/bin/sh\necho hello\n");
chmod 0755, "$programs/bin/pg_dump";
refused('could not determine the version of pg_dump', 'another program of that name', node => $bare);

# Roles that the schema names
refused('roles that the schema of node "tokyo" names are missing here\n.*DETAIL:  Roles: replicator\.\n.*HINT:  Create them', 'a role with rights on a table');
sql($paris, 'create role replicator');

# All that was refused is no hindrance.
sql($paris, "select braid.join_group(\$d\$$there\$d\$, node_name => 'newcomer', dsn => \$d\$" . $paris->connstr('postgres') . '$d$)');
joined($tokyo, $paris);

done_testing();
