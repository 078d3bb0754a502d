# PostgreSQL's own regression database, created at one node of a group. The other node ends with the
# same schema, as pg_dump writes it. The results are those of a server without the library, except
# for those listed here and in docs/guide/schema-limits.md.

# By itself, the tests that change schemas most are run; with GROUP_REGRESSION=all PostgreSQL's
# parallel_schedule (make group-regression).

# PostgreSQL's tests run twice. On a busy machine that alone takes longer than other files may take.
# Time limit: 2700 s.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $DATABASE = 'regression';
my $tests = $ENV{POSTGRES_TESTS} or die 'POSTGRES_TESTS: scripts/postgres-tests prints it';
plan(skip_all => "the sources of this major are not at hand, which PostgreSQL's tests come with") if $tests eq 'none';
my $all = ($ENV{GROUP_REGRESSION} // '') eq 'all';

# Parallel groups of tests, each of which needs those before it only.
my @schedule = (
	'test_setup',
	'create_function_c create_misc create_operator create_procedure create_table create_type create_schema',
	'create_view index_including create_aggregate create_function_sql create_cast constraints inherit typed_table drop_if_exists create_am',
	'select_into namespace prepared_xacts init_privs security_label matview replica_identity object_address drop_operator identity generated',
	'create_table_like generated_virtual alter_generic alter_operator stats_ext dependency temp domain',
	'alter_table sequence rowtypes reloptions hash_part compression foreign_data',
	'event_trigger',
	'fast_default');

# Differences between the results at a node and those of a server without the library, by test: rows
# of the result.
my %DIFFERENT = (
	# The publication of the group, below each table.
	'' => qr/^(Publications:|    "braid")$/,
	# Objects of the node, as for scripts/check-postgres.
	opr_sanity => qr/^ +[0-9]+ \| \w+$/,
	type_sanity => qr/^ +([0-9]+ \| (versions|merged|records) +\| +17 \| bytea|attrelid \|.*)$/,
	publication => qr/^ (braid +\|.*|)$/,
	event_trigger => qr/^ braid_guard_drop +\|/,
	# A statement about a table locks it as ALTER TABLE does, so that no other one changes its
	# shape; and tables of the node.
	alter_table =>
	  qr/^ +(\S+ +\| ShareUpdateExclusiveLock|(ddl|former|given|group|join|node|sequence)(_\w+)? +\| (AccessShare|RowExclusive)Lock|relation +\| +(max_lockmode|mode) +)$/,);

# Statements that the other node can't run, as they are about foreign or temporary tables.
my @STOPS = map { qr/for statement "\Q$_\E"/ } ('CREATE TABLE use_ft1_column_type (x ft1)', 'CREATE TABLE ct3() INHERITS(ft2)', 'CREATE TABLE vistest (LIKE testeoc)');

sub query { my ($node, $sql) = @_; return $node->safe_psql($DATABASE, $sql); }

# The schedule of this run, as a file.
sub schedule_file
{
	return "$tests/regress/parallel_schedule" if $all;
	my $file = "$PostgreSQL::Test::Utils::tmp_check/schedule";
	open my $to, '>', $file or die "$file: $!";
	# PostgreSQL 18 has two tests for what was "generated" before. They make the same roles, so
	# they are not run together.
	my $has = sub { my ($test) = @_; return -e "$tests/regress/sql/$test.sql" };
	for my $group (@schedule)
	{
		print $to "test: " . join(' ', grep { $has->($_) } map { $has->($_) ? $_ : "${_}_stored" } split / /, $group) . "\n";
	}
	close $to;
	return $file;
}

# Statements that make the roles of the tests, with their rights: roles are each node's own. They
# stay when the tests drop theirs.
sub roles
{
	# DROP OWNED takes a role's rights on the database as well, and those that are granted there do
	# not come here.
	my (@made, @more) = ("grant create on database $DATABASE to public");
	for my $file (glob "$tests/regress/sql/*.sql")
	{
		my $text = slurp_file($file);
		$text =~ s/^\\[^\n]*//mg;
		$text =~ s/--[^\n]*//g;
		for my $statement (split /;/, $text)
		{
			$statement =~ s/\s+/ /g;
			$statement =~ s/^ | $//g;
			push @made, $statement if $statement =~ /^create (role|user|group) (?!mapping)/i;
			push @made, "create role $1" if $statement =~ /^alter (?:role|user) \w+ rename to (\w+)$/i;
			push @more, $statement if $statement =~ /^(alter (role|user) \w+ (with )?superuser$|grant \w[\w, ]* to [\w, ]+( with admin option)?$)/i;
		}
	}
	return join '', map { "$_;\n" } @made, @more;
}

sub make_database
{
	my ($node) = @_;
	$node->safe_psql('postgres', "create database $DATABASE template template0");
	$node->safe_psql('postgres', "alter database $DATABASE set $_ to 'C'") for qw(lc_messages lc_monetary lc_numeric lc_time);
	$node->safe_psql('postgres', "alter database $DATABASE set bytea_output to 'hex'; alter database $DATABASE set timezone_abbreviations to 'Default'");
	return;
}

# Runs the tests in a server's database. Returns the directory of their results.
sub run_tests
{
	my ($node) = @_;
	my $to = "$PostgreSQL::Test::Utils::tmp_check/results-" . $node->name;
	mkdir $to or die "$to: $!";
	my ($host, $port) = ($node->host, $node->port);
	IPC::Run::run(
		[   $ENV{PG_REGRESS}, '--use-existing', "--dbname=$DATABASE", "--host=$host", "--port=$port", '--user=' . $node->safe_psql('postgres', 'select current_user'),
			"--bindir=" . bindir(), "--inputdir=$tests/regress", "--outputdir=$to", "--dlpath=$tests/lib", '--max-concurrent-tests=20', '--schedule=' . schedule_file() ],
		'>', "$to/pg_regress.out", '2>&1');
	return "$to/results";
}

sub bindir { my ($out) = run_command([ 'pg_config', '--bindir' ]); return $out; }

# A result without what is known to differ, and without what follows from that: numbers of rows, and
# the width of columns.
sub known
{
	my ($file, $test) = @_;
	my @patterns = grep { defined } @DIFFERENT{ '', $test };
	my $by_rows = @patterns > 1;
	my @lines;
	for my $line (split /\n/, slurp_file($file))
	{
		next if grep { $line =~ $_ } @patterns;
		if ($by_rows)
		{
			next if $line =~ /^\([0-9]+ rows?\)$/;
			$line =~ s/ +/ /g;
			$line =~ s/-+/-/g;
			$line =~ s/ $//;
		}
		push @lines, $line;
	}
	return join "\n", @lines;
}

sub schema
{
	my ($node) = @_;
	my ($out, $err) = run_command([ 'pg_dump', '-s', '-d', $node->connstr($DATABASE) ]);
	is($err, '', 'pg_dump of ' . $node->name);
	# Objects that connect a node with others stay on it.
	return [ grep { !/^(\\(un)?restrict|--|$|(CREATE|ALTER) (PUBLICATION|FOREIGN DATA WRAPPER|SERVER) )/ } split /\n/, $out ];
}

my @init = ('--data-checksums', '--no-locale', '--encoding=UTF8');
my $conf = "max_prepared_transactions = 2\nlog_autovacuum_min_duration = 0\n";
# Views that read others have to find them filled.
my $sends = "braid.replicate_refresh = on\n";

# The results of a server without the library.
my $plain = PostgreSQL::Test::Cluster->new('plain');
$plain->init(allows_streaming => 'logical', extra => \@init);
$plain->append_conf('postgresql.conf', join '', grep { !/^(shared_preload_libraries|output_plugin_libraries)/ } map { "$_\n" } split /\n/, slurp_file($ENV{BRAID_NODE_CONF}));
$plain->append_conf('postgresql.conf', "shared_buffers = 32MB\nmax_connections = 60\nmax_wal_size = 1GB\nlog_statement = none\n$conf");
$plain->start;
make_database($plain);
my $expected = run_tests($plain);
$plain->stop('fast');

# A group that sends statements and no rows: of tables without a key no row could be changed, which
# most tests do.
my ($tokyo, $paris) = my @nodes = map { new_server($_, init => \@init, conf => $conf . $sends) } qw(tokyo paris);
make_database($_) for @nodes;
# Some roles are made by several tests.
$paris->psql($DATABASE, roles(), on_error_stop => 0);
query($_, "create extension braid; create publication braid for all tables with (publish = '')") for @nodes;
query($tokyo, 'select braid.create_group($$shop$$, node_name => $$tokyo$$, dsn => $d$' . $tokyo->connstr($DATABASE) . '$d$)');
query($paris, 'select braid.join_group($d$' . $tokyo->connstr($DATABASE) . '$d$, node_name => $$paris$$, dsn => $d$' . $paris->connstr($DATABASE) . '$d$)');
query($_, "select braid.wait_for_group('180 s')") for @nodes;
# Sequences with numbers of each node's would have other bounds.
query($tokyo, "select braid.set_sequence_default('local')");

my $began = time;
my $found = run_tests($tokyo);
note('the tests took ' . (time - $began) . ' s');

# Results.
my @ran = map { m{([^/]+)\.out$} } glob "$expected/*.out";
cmp_ok(scalar @ran, '>=', $all ? 200 : 40, 'so many tests were run');
my @differ;
for my $test (@ran)
{
	my ($with, $without) = map { -e "$_/$test.out" ? known("$_/$test.out", $test) : '' } $found, $expected;
	next if $with eq $without;
	push @differ, $test;
	diag("$test: " . (run_command([ 'diff', '-u', "$expected/$test.out", "$found/$test.out" ]))[0]);
}
is("@differ", '', 'results are those of a server without the library');

# The other node has run all, and has stopped only where a statement is about what is not there.
my $position = query($tokyo, 'select braid.sync_event()');
$began = time;
my (@stopped, @known);
wait_until(
	sub {
		my ($done, $lsn, $error) = split /\|/, query($paris, "select coalesce(applied_lsn >= '$position', false), case when state = 'error' then error_lsn end, case when state = 'error' then last_error end from braid.subscription_status"), 3;
		return $done eq 't' if $lsn eq '';
		my $context = query($paris, 'select error_context from braid.subscription_status');
		my $is_known = grep { $context =~ $_ } @STOPS;
		push @{ $is_known ? \@known : \@stopped }, "$error: $context";
		query($paris, "select braid.skip_transaction('paris_from_tokyo', '$lsn')");
		return 0;
	},
	$all ? 1200 : 600) or diag('the other node has not caught up');
note("it has stopped at: $_") for @known;
note('the other node was there after ' . (time - $began) . ' s');
is(join("\n", @stopped), '', 'each statement is run at the other node, but for those that are known');
ok(wait_until(sub { query($paris, q[select count(*) from braid.ddl_log where state in ('waiting', 'running')]) eq '0' }, 60), 'what it runs by itself, too')
  or diag(query($paris, q[select state, statement, reason from braid.ddl_log where state in ('waiting', 'running')]));
is(query($paris, q[select string_agg(concat_ws(' ', state, statement, reason), E'\n') from braid.ddl_log where state = 'failed' and attempts is not null]), '', 'none of those has failed');
cmp_ok(query($paris, q[select count(*) from braid.ddl_log where state = 'applied']), '>', $all ? 4000 : 1500, 'so many statements');

my ($here, $there) = map { schema($_) } @nodes;
my %lines;
$lines{$_}++ for @$here;
$lines{$_}-- for @$there;
is(join("\n", map { $lines{$_} ? ($lines{$_} > 0 ? "- $_" : "+ $_") : () } sort keys %lines), '', 'both nodes have one schema');
ok("@$here" eq "@$there", 'in one order');
cmp_ok(scalar @$here, '>', $all ? 9000 : 2000, 'of so many lines');

for my $node (@nodes)
{
	my $log = slurp_file($node->logfile);
	is(join("\n", $log =~ /^.*(?:TRAP:|PANIC:|terminated by signal|panicked at|resource was not closed|refcount leak|reference leak).*$/mg), '', 'nothing of ' . $node->name . ' has crashed');
}

done_testing();
