# The format wal2json compared with wal2json itself: two slots over the same WAL, whose output must
# be the same, byte for byte. Tables, types, values, identities, transactions and options are
# generated. BRAID_SEED repeats a run, BRAID_WAL2JSON_ROUNDS=n makes a longer one. If wal2json 2.5
# writes invalid JSON, the output of its later versions is expected.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";
use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $libraries = `pg_config --pkglibdir`;
chomp $libraries;
plan skip_all => "wal2json is not installed in $libraries" unless -e "$libraries/wal2json.so";

my $seed = $ENV{BRAID_SEED} // (time ^ $$) % 1_000_000;
note "BRAID_SEED=$seed";
srand $seed;
my $rounds = $ENV{BRAID_WAL2JSON_ROUNDS} // 2;

sub pick { return $_[ int rand @_ ]; }
sub chance { return rand() < $_[0]; }

my $conf = "max_replication_slots = 20\nmax_wal_senders = 20\nlogical_decoding_work_mem = 64kB\n";
# Nothing may commit between the reads of the two slots.
$conf .= "autovacuum = off\n";
$conf .= "output_plugin_libraries = 'braid, wal2json'\n"
  if slurp_file($ENV{BRAID_NODE_CONF}) =~ /output_plugin_libraries/;
my $node = new_server('node', conf => $conf);

$node->safe_psql('postgres', <<'SQL');
create schema "s 1"; create schema "S,2";
create type public.mood as enum ('sad', 'o"k', 'hap\py');
create type "s 1"."Odd "" type" as (a int, b text);
create type public."Mixed" as enum ('a', 'B c');
create type "s 1".plain as enum ('p');
create domain public.dom_text as varchar(20) default 'dt';
create domain public.dom_int as int not null default 3;
create domain public.dom_dom as public.dom_text;
create domain public.dom_num as numeric(8, 3);
create domain public.dom_bool as bool;
create domain public.dom_bytea as bytea;
create domain public.dom_bigint as bigint;
create domain public.dom_oid as oid;
create domain public.dom_float as float8;
select pg_replication_origin_create('origin a'); select pg_replication_origin_create('origin b');
SQL

# Each type with expressions for its values.
my $words = q[E'a"b\\\\c/d\b\f\n\r\t\x01\x1f\x7f', 'é€ü', '', ' ', 'x''y', '<&>', '{"a": [1, null]}'];
my %types = (
	'int' => [ 0, 1, -1, 2147483647, -2147483648, 42 ],
	'smallint' => [ 0, 32767, -32768 ],
	'bigint' => [ 0, '9223372036854775807', "'-9223372036854775808'", 100 ],
	'oid' => [ 0, 4294967295, 1 ],
	'xid' => [ "'1'", "'4294967295'" ],
	'xid8' => ["'18446744073709551615'"],
	'cid' => ["'3'"],
	'tid' => ["'(1,2)'"],
	'bool' => [ 'true', 'false' ],
	'real' => [ "'NaN'", "'Infinity'", "'-Infinity'", 1.5, '1e20', '1e-20', 0, "'-0'", 3.4028235e38, 0.1, 123456.7, 16777216 ],
	'float8' => [ "'NaN'", "'Infinity'", "'-Infinity'", 1.5, '1e300', '1e-300', "'-0'", 0.1, '1e15', '1e16', '123456789012345678', '1e23', '5e-324', 0.3 ],
	'numeric' => [ "'NaN'", "'Infinity'", "'-Infinity'", 0, '0.00', '-1.50', '1e30', '1e-30', '12345678901234567890.123456789', '10000', '99999999.0001', '-0.0001' ],
	'numeric(10,2)' => [ 0, 1.5, -99999999.99, "'NaN'" ],
	'money' => [ 12.5, -1 ],
	'text' => [ split(/, (?=E?')/, $words), "repeat('x', 3000)" ],
	'varchar(30)' => [ "'abc'", "E'tab\\t'" ],
	'varchar' => ["'v'"],
	'char(7)' => [ "'a'", "'é'" ],
	'"char"' => [ "'c'", "''", qq['"'] ],
	'name' => [ "'n'", "'quo\"te'" ],
	'bytea' => [ "'\\x'", "'\\x00ff5c22'", "'\\xdeadbeef'" ],
	'date' => [ "'2024-02-29'", "'infinity'", "'-infinity'", "'0044-03-15 BC'", "'5874897-12-31'", "'0001-01-01'", "'4713-01-01 BC'" ],
	'time' => [ "'12:34:56.789'", "'24:00:00'", "'00:00:00.000001'" ],
	'time(2)' => ["'12:34:56.789'"],
	'timetz' => [ "'12:34:56.789+05:30'", "'01:02:03-11'" ],
	'timestamp' => [ "'2024-02-29 12:34:56.789'", "'infinity'", "'-infinity'", "'0044-03-15 01:02:03 BC'", "'294276-12-31 23:59:59.999999'", "'2000-01-01'", "'1999-12-31 23:59:59.999999'" ],
	'timestamp(3)' => ["'2024-02-29 12:34:56.789123'"],
	'timestamptz' => [ "'2024-02-29 12:34:56.789+02'", "'infinity'", "'-infinity'", "'0044-03-15 01:02:03+00 BC'", "'1883-11-18 12:00:00+00'", "'2024-07-01 00:00:00+00'", "'1890-01-01 00:00:00+00'" ],
	'interval' => [ "'1 day 02:03:04.5'", "'-1 mon'", "'0'", "'1 year -2 days 3 seconds'" ],
	'interval day to second(2)' => ["'1 day 02:03:04.567'"],
	'uuid' => [ "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'", "'00000000-0000-0000-0000-0000000000ff'" ],
	'json' => [ q['{"a" : "b\\\\"}'], "'[1,  2]'", "'null'" ],
	'jsonb' => [ q['{"a" : "b\\\\", "c": 1e3}'], "'[1,  2]'" ],
	'jsonpath' => ["'\$.a[*] ? (\@ > 1)'"],
	'xml' => [ "'<a b=\"c\"/>'", "'text'" ],
	'inet' => [ "'10.0.0.1/8'", "'::1'" ],
	'cidr' => ["'10.0.0.0/8'"],
	'macaddr' => ["'08:00:2b:01:02:03'"],
	'bit(5)' => ["B'10101'"],
	'varbit' => [ "B''", "B'1'" ],
	'point' => ["'(1.5,-2)'"],
	'box' => ["'(1,2),(3,4)'"],
	'tsvector' => [ "'a b:1A'", "''" ],
	'tsquery' => ["'a & b'"],
	'int4range' => [ "'[1,5)'", "'empty'" ],
	'tstzrange' => ["'[2024-01-01 00:00:00+00,)'"],
	'int4multirange' => ["'{[1,2),[5,7)}'"],
	'pg_lsn' => ["'16/B374D848'"],
	'regclass' => [ "'pg_class'", "'0'" ],
	'regtype' => ["'public.mood'"],
	'oidvector' => ["'1 2 3'"],
	'int2vector' => ["'1 2'"],
	'int[]' => [ "'{1,null,3}'", "'{}'", "'[0:1]={1,2}'", "'{{1,2},{3,4}}'" ],
	'text[]' => [ q['{a,"b c","d\\"e",null}'], "'{}'" ],
	'bool[]' => ["'{t,f}'"],
	'numeric(5,1)[]' => ["'{1.5,NaN}'"],
	'bytea[]' => [ q['{"\\\\xff"}'] ],
	'timestamptz[]' => ["'{2024-01-01 00:00:00+00}'"],
	'public.mood' => [ "'sad'", q['o"k'], q['hap\\py'] ],
	'public.mood[]' => [ q['{sad,"o\\"k"}'] ],
	'"s 1"."Odd "" type"' => [ q[row(1, 'x "y"')], 'row(null, null)' ],
	'"s 1"."Odd "" type"[]' => [ q['{"(1,x)",null}'], "'{}'" ],
	'"Mixed"' => [ "'a'", "'B c'" ],
	'"Mixed"[]' => [ q['{a,"B c"}'], "'{}'" ],
	'"s 1".plain' => ["'p'"],
	'"s 1".plain[]' => ["'{p,p}'"],
	'public.dom_text' => [ "'dt'", qq['q"'] ],
	'public.dom_int' => [ 1, -5 ],
	'public.dom_dom' => ["'dd'"],
	'public.dom_num' => [ 1.5, "'NaN'" ],
	'public.dom_bool' => [ 'true', 'false' ],
	'public.dom_bytea' => ["'\\x00ff'"],
	'public.dom_bigint' => [77],
	'public.dom_oid' => [88],
	'public.dom_float' => [ 1.25, "'Infinity'" ],
	'public.dom_text[]' => ["'{a,b}'"],
);
my @types = sort keys %types;
my @key_types = ('int', 'bigint', 'text', 'uuid', 'timestamptz', 'numeric', 'varchar(30)', 'public.mood', 'date', 'bool', 'oid', 'char(7)', 'public.dom_int', 'bytea', '"Mixed"', '"Mixed"[]');

my @column_names = ('a', 'b c', 'C"q', 'd\\e', 'naïve', 'select', "tab\tbed", 'f', 'g', 'h', 'i', 'j', 'k', 'l', 'm');
sub quoted { my ($name) = @_; $name =~ s/"/""/g; return qq["$name"]; }

# Returns a value. The caller makes lists of several integer columns' values distinct if they must
# be.
sub value { my ($type) = @_; return 'cast(' . pick(@{ $types{$type} }) . " as $type)"; }
sub nullable { my ($column) = @_; return $column->{not_null} || chance(0.75) ? value($column->{type}) : 'null'; }

my $made = 0;
my (@tables, @sql);

sub make_table
{
	my $number = $made++;
	my $schema = pick('public', 'public', 's 1', 'S,2');
	my $name = pick('t', 'T', 'dotted.name', 'star*', "quo\"te", "back\\slash", 'é', 'com,ma') . $number;
	my $full = quoted($schema) . '.' . quoted($name);
	my $identity = pick('default', 'default', 'default', 'none', 'full', 'full with key', 'index', 'index with key', 'nothing', 'key as index', 'deferred');
	my @columns = ({ name => 'id', type => 'int', not_null => 1 });
	my $count = 1 + int rand 12;
	for my $index (1 .. $count)
	{
		my $type = pick(@types);
		push @columns, {
			name => $column_names[ $index - 1 ],
			type => $type,
			not_null => chance(0.2) || $type eq 'public.dom_int',
			default => chance(0.25) ? value($type) : undef,
		};
	}
	my @key = ('id');
	if (chance(0.3))
	{
		my $type = pick(@key_types);
		push @columns, { name => 'key2', type => $type, not_null => 1 };
		push @key, 'key2';
	}
	my @definitions = map {
		quoted($_->{name}) . " $_->{type}"
		  . ($_->{not_null} ? ' not null' : '')
		  . (defined $_->{default} ? " default $_->{default}" : '')
	} @columns;
	push @definitions, 'dropped text';
	push @definitions, 'generated int generated always as (id * 2) stored' if chance(0.2);
	push @definitions, 'serial serial' if chance(0.2);
	push @definitions, q[cased int default case when 1 = 1 then 2 else 3 end] if chance(0.1);
	@definitions = sort { rand() <=> 0.5 } @definitions if chance(0.3);
	my $keys = join ', ', map { quoted($_) } @key;
	my $has_key = $identity =~ /^(default|nothing|full with key|index with key|key as index|deferred)$/;
	push @definitions, "constraint " . quoted("key$number") . " primary key ($keys)" . ($identity eq 'deferred' ? ' deferrable' : '')
	  if $has_key;
	my $tree = chance(0.15) ? 'partitioned' : chance(0.15) ? 'inherited' : '';
	push @sql, "create table $full (" . join(', ', @definitions) . ')' . ($tree eq 'partitioned' ? ' partition by range (id)' : '');
	push @sql, "alter table $full drop column dropped";
	push @sql, "alter table $full replica identity full" if $identity =~ /^full/;
	push @sql, "alter table $full replica identity nothing" if $identity eq 'nothing';
	push @sql, "alter table $full replica identity using index " . quoted("key$number") if $identity eq 'key as index';
	push @sql, "create unique index " . quoted("index$number") . " on $full ($keys)", "alter table $full replica identity using index " . quoted("index$number")
	  if $identity =~ /^index/;
	for my $column (@columns)
	{
		push @sql, "alter table $full alter column " . quoted($column->{name}) . " set storage external"
		  if $column->{type} =~ /^(text|bytea|json)$/ && chance(0.5);
	}
	# A table below another one has its columns in another order, and an identity of its own. Rows
	# move between partitions.
	my @below;
	if ($tree)
	{
		@below = ("${name}low", "${name}rest");
		my ($low, $rest) = map { quoted($schema) . '.' . quoted($_) } @below;
		push @sql, $tree eq 'partitioned'
		  ? ("create table $low partition of $full for values from (minvalue) to (4)", "create table $rest partition of $full default")
		  : ("create table $low (more int) inherits ($full)", "create table $rest (like $full including all)", "alter table $rest inherit $full");
		push @sql, "alter table " . pick($low, $rest) . ' replica identity ' . pick('full', 'nothing') if chance(0.5);
	}
	return { schema => $schema, name => $name, full => $full, columns => \@columns, next => 1, keyed => $has_key, tree => $tree, below => \@below };
}

sub change
{
	my ($table) = @_;
	my @columns = @{ $table->{columns} };
	my $what = pick('insert', 'insert', 'insert', 'update', 'update', 'update', 'delete', 'large');
	my $from = 1 + int rand $table->{next};
	my $some = "where id between $from and " . ($from + int rand 2);
	if ($what eq 'insert' || $table->{next} < 3)
	{
		my @rows;
		for (1 .. 1 + int rand 3)
		{
			my $id = $table->{next}++;
			push @rows, '(' . join(', ', map { $_->{name} eq 'id' ? $id : $_->{default} && chance(0.3) ? 'default' : nullable($_) } @columns) . ')';
		}
		# Partitions get their rows through the partitioned table, children directly.
		my $into = $table->{tree} eq 'inherited' ? pick($table->{full}, map { quoted($table->{schema}) . '.' . quoted($_) } @{ $table->{below} }) : $table->{full};
		return "insert into $into (" . join(', ', map { quoted($_->{name}) } @columns) . ') values ' . join(', ', @rows);
	}
	return "delete from $table->{full} $some" if $what eq 'delete';
	if ($what eq 'large')
	{
		my ($text) = grep { $_->{type} =~ /^(text|varchar)$/ } @columns;
		return "update $table->{full} set " . quoted($text->{name}) . " = repeat(md5(random()::text), 300) $some" if $text;
	}
	my @set;
	for my $column (@columns)
	{
		if ($column->{name} eq 'id')
		{
			push @set, 'id = id + 1000000' if chance(0.1);
		}
		elsif (chance(0.3))
		{
			push @set, quoted($column->{name}) . ' = ' . nullable($column);
		}
	}
	@set = ('id = id') unless @set;
	return "update $table->{full} set " . join(', ', @set) . " $some";
}

sub emit
{
	my $prefix = pick('p', 'a b', 'a,b', 'quo"te', '', 'wal2json');
	my $content = pick("'c'", "E'line\\n\"q\"\\\\'", "''", "'é'", "'\\x00ff'::bytea", "'\\x410042'::bytea");
	my $transactional = $_[0] ? 'true' : 'false';
	return "select pg_logical_emit_message($transactional, '$prefix', $content)";
}

sub alter
{
	my ($table) = @_;
	my @columns = @{ $table->{columns} };
	my $what = int rand 7;
	if ($what == 0)
	{
		my $type = pick('int', 'text', 'public.mood', 'numeric(10,2)', 'timestamptz', 'bytea', 'bool');
		my $column = { name => "new$made" . int(rand 1_000_000), type => $type, not_null => 0 };
		push @columns, $column;
		$table->{columns} = \@columns;
		my $default = chance(0.5) ? ' default ' . value($type) : '';
		$default = '' if $default =~ /["\\]|mood/;
		return "alter table $table->{full} add column " . quoted($column->{name}) . " $type$default";
	}
	if ($what == 1 && @columns > 3)
	{
		my $index = 1 + int rand $#columns;
		return "select 1" if $columns[$index]{name} eq 'key2';
		my ($column) = splice @columns, $index, 1;
		$table->{columns} = \@columns;
		return "alter table $table->{full} drop column " . quoted($column->{name});
	}
	if ($what == 2)
	{
		my $column = $columns[-1];
		return "select 1" if $column->{name} =~ /^(id|key2)$/;
		my $new = $column->{name} . 'r';
		my $old = quoted($column->{name});
		$column->{name} = $new;
		return "alter table $table->{full} rename column $old to " . quoted($new);
	}
	if ($what == 3)
	{
		my $new = $table->{name} . 'r';
		my $sql = "alter table $table->{full} rename to " . quoted($new);
		@$table{ 'name', 'full' } = ($new, quoted($table->{schema}) . '.' . quoted($new));
		return $sql;
	}
	return "alter table $table->{full} replica identity " . pick('default', 'full', 'nothing') if $what == 4;
	return "truncate $table->{full}" if $what == 5;
	my $other = pick(@tables);
	return $other == $table ? "truncate $table->{full} restart identity cascade" : "truncate $table->{full}, $other->{full}";
}

sub transaction
{
	my @body;
	for (1 .. 1 + int rand(chance(0.1) ? 60 : 5))
	{
		my $table = pick(@tables);
		my $statement = chance(0.04) ? alter($table) : chance(0.08) ? emit(chance(0.7)) : change($table);
		# A statement may fail (a duplicate key, a null), but the failure must not undo the others.
		push @body, "savepoint s", $statement, chance(0.05) ? "rollback to s" : "release s";
	}
	return ('begin', @body, chance(0.05) ? 'rollback' : 'commit');
}

# Runs statements one at a time. Failures are expected, and are rolled back to the savepoint.
sub run_all
{
	my (@statements) = @_;
	my $script = "\\set ON_ERROR_ROLLBACK on\n" . join('', map { "$_;\n" } @statements);
	my ($out, $err) = ('', '');
	$node->psql('postgres', $script, stdout => \$out, stderr => \$err, on_error_stop => 0, on_error_die => 0);
	return $err;
}

# Returns the output of a slot, warnings included. The binary functions give the same bytes.
sub ask
{
	my ($function, $slot, $until, $settings, @options) = @_;
	my $list = join '', map { ', $o$' . $_ . '$o$' } @options;
	my $data = $function =~ /binary/ ? q[convert_from(data, 'UTF8') as data] : 'data';
	my ($out, $err) = ('', '');
	$node->psql(
		'postgres', "$settings; select lsn, xid, $data from pg_logical_slot_${function}_changes(\$o\$$slot\$o\$, $until$list)",
		stdout => \$out, stderr => \$err, on_error_stop => 0, on_error_die => 0,
		extra_params => [ '-v', 'VERBOSITY=verbose' ]);
	# Not compared: the place in the source, the callback, and Braid's own hint.
	$err =~ s/^(LOCATION|CONTEXT|HINT): .*\n?//mg;
	$err =~ s/^psql:<stdin>:\d+: //mg;
	return ($out, $err);
}

sub peek
{
	my ($slot, $settings, @options) = @_;
	return ask(pick('peek', 'peek_binary'), $slot, 'null, null', $settings, @options);
}

# wal2json 2.5 puts a comma before a message that is not transactional, if the transaction before
# had several changes. It writes names of types that start with a quote unchanged (except for
# arrays, if not in the list of a primary key).
sub repaired
{
	my ($text) = @_;
	$text =~ s/(?<=[\[,:])( ?)"Mixed"\[\]/$1"\\"Mixed\\"[]"/g;
	$text =~ s/(?<=[\[,:])( ?)"s 1"\.plain(?=[\],\}])/$1"\\"s 1\\".plain"/g;
	$text =~ s/(?<=[\[,:])( ?)"s 1"\."Odd "" type"/$1"\\"s 1\\".\\"Odd \\"\\" type\\""/g;
	$text =~ s/(?<=[\[,:])( ?)"Odd "" type"/$1"\\"Odd \\"\\" type\\""/g;
	$text =~ s/("change": ?\[\n?\t*),(\{\s*"kind": ?"message",\s*"transactional": ?false)/$1$2/g;
	return $text;
}

my $records = 0;
my $shown = 0;

sub first_difference
{
	my ($theirs, $ours) = @_;
	return if $shown++ >= 6;
	my @theirs = split /\n/, $theirs;
	my @ours = split /\n/, $ours;
	for my $line (0 .. ($#theirs > $#ours ? $#theirs : $#ours))
	{
		my ($one, $two) = ($theirs[$line] // '(nothing)', $ours[$line] // '(nothing)');
		next if $one eq $two;
		my $at = 0;
		$at++ while $at < length $one && $at < length $two && substr($one, $at, 1) eq substr($two, $at, 1);
		$at = $at > 200 ? $at - 200 : 0;
		diag "line ", $line + 1, "\nwal2json: ", substr($one, $at, 500), "\nbraid:    ", substr($two, $at, 500);
		return;
	}
}

sub same
{
	my ($name, $settings, @options) = @_;
	my ($theirs, $warned) = peek('theirs', $settings, @options);
	my ($ours, $warning) = peek('ours', $settings, 'format', 'wal2json', @options);
	$theirs = repaired($theirs);
	my $count = () = $theirs =~ /\n/g;
	$records += $count;
	my $equal = $theirs eq $ours && $warned eq $warning;
	ok($equal, "$name: $count lines") or do {
		first_difference($theirs, $ours);
		first_difference($warned, $warning);
	};
	return;
}

my @switches = qw(include-xids include-timestamp include-schemas include-types include-typmod include-type-oids include-domain-data-type
  include-column-positions include-origin include-not-null include-default include-pk pretty-print write-in-chunks include-lsn include-transaction);

sub table_list
{
	my @members;
	for (1 .. 1 + int rand 4)
	{
		my $table = pick(@tables);
		my ($schema, $name) = map { my $part = $_; $part =~ s/([ '",.*\\])/\\$1/g; $part } $table->{schema}, pick($table->{name}, @{ $table->{below} });
		push @members, pick("$schema.$name", "$schema.$name", "*.$name", "$schema.*", 'public.nothing');
	}
	return join pick(',', ', '), @members;
}

sub some_options
{
	my @options = ('format-version', pick(1, 2));
	for my $switch (@switches)
	{
		push @options, $switch, pick('1', '0', 'true', 'off', 'yes') if chance(0.3);
	}
	push @options, list_option() while chance(0.6);
	return @options if chance(0.5);
	# Options in any order, some of them twice, with another value.
	my @pairs = map { [ splice @options, 0, 2 ] } 1 .. @options / 2;
	for my $pair (@pairs[ 0 .. $#pairs ])
	{
		push @pairs, [ $pair->[0], $pair->[0] eq 'format-version' ? pick(1, 2) : pick('0', '1') ] if $pair->[0] =~ /^(include|pretty|write|format)/ && chance(0.2);
	}
	return map { @$_ } sort { rand() <=> 0.5 } @pairs;
}

# An option that is a list. If it is given several times, the lists may add up or not.
sub list_option
{
	my $option = pick('actions', 'filter-tables', 'filter-tables', 'add-tables', 'filter-origins', 'filter-msg-prefixes', 'add-msg-prefixes');
	return ($option, pick('insert', 'update, delete', 'truncate', "insert,\x0btruncate", '')) if $option eq 'actions';
	return ($option, chance(0.05) ? '' : table_list()) if $option =~ /tables/;
	return ($option, pick('1', '2', '1,2', '3', '2,', ' , 1', 'x', '', '++1', '+1', '4294967297', '-4294967294', '18446744073709551617', "\x0b1\x0b,\f2")) if $option eq 'filter-origins';
	return ($option, pick('p', 'wal2json, p', 'a\\ b', '', 'nothing', "\x0bp\x0b"));
}

# Options for pg_recvlogical, some of which have no value.
sub arguments
{
	my (@options) = @_;
	my @arguments;
	while (my ($name, $value) = splice @options, 0, 2)
	{
		push @arguments, '-o', defined $value ? "$name=$value" : $name;
	}
	return @arguments;
}

# Returns all output up to a position, through the replication protocol, as pg_recvlogical writes
# it.
sub received
{
	my ($slot, $end, @options) = @_;
	$node->safe_psql('postgres', "select pg_copy_logical_replication_slot('$slot', 'copied')");
	my $file = "$PostgreSQL::Test::Utils::tmp_check/$slot.json";
	unlink $file;
	my @format = $slot eq 'ours' ? ('-o', 'format=wal2json') : ();
	my ($out, $err) = ('', '');
	IPC::Run::run([ 'pg_recvlogical', '-d', $node->connstr('postgres'), '-S', 'copied', '--start', '--no-loop', '-E', $end, '-f', $file, @format, arguments(@options) ],
		'>', \$out, '2>', \$err, IPC::Run::timeout(120));
	$node->poll_query_until('postgres', "select not active from pg_replication_slots where slot_name = 'copied'");
	$node->safe_psql('postgres', "select pg_drop_replication_slot('copied')");
	return (-e $file ? slurp_file($file) : '', $err);
}

sub same_received
{
	my ($end, @options) = @_;
	my (%text, %warned);
	($text{$_}, $warned{$_}) = received($_, $end, @options) for 'theirs', 'ours';
	$text{theirs} = repaired($text{theirs});
	my $count = () = $text{theirs} =~ /\n/g;
	$records += $count;
	# Equal errors are not expected here.
	my $equal = $text{theirs} eq $text{ours} && $warned{theirs} eq $warned{ours} && $warned{ours} !~ /error:/;
	ok($equal, 'pg_recvlogical ' . join(' ', arguments(@options)) . ": $count lines") or do {
		first_difference($text{theirs}, $text{ours});
		first_difference($warned{theirs}, $warned{ours});
	};
	return;
}

# Output that was read in parts is removed from the slot; both slots are then at the same position.
sub same_taken
{
	my ($function, @options) = @_;
	my (%text, %positions);
	# The background writer writes WAL too: both read the same.
	my $end = $node->safe_psql('postgres', 'select pg_current_wal_flush_lsn()');
	for my $slot ('theirs', 'ours')
	{
		$node->safe_psql('postgres', "select pg_copy_logical_replication_slot('$slot', 'copied')");
		my @format = $slot eq 'ours' ? (format => 'wal2json') : ();
		for (1 .. 100)
		{
			my ($piece) = ask($function, 'copied', "'$end', 150", 'set search_path = public', @format, @options);
			last if $piece eq '';
			$text{$slot} .= "$piece\n";
			push @{ $positions{$slot} }, $node->safe_psql('postgres', q[select confirmed_flush_lsn from pg_replication_slots where slot_name = 'copied']);
		}
		$node->safe_psql('postgres', "select pg_drop_replication_slot('copied')");
	}
	$text{theirs} = repaired($text{theirs});
	my $count = () = $text{theirs} =~ /\n/g;
	$records += $count;
	ok($text{theirs} eq $text{ours}, "$function, @options: $count lines in " . scalar(@{ $positions{theirs} }) . ' pieces') or first_difference($text{theirs}, $text{ours});
	is("@{ $positions{ours} }", "@{ $positions{theirs} }", 'the slots move alike');
	return;
}

my @settings = (
	'set search_path = public', 'set search_path = pg_catalog', q[set search_path = "s 1", public],
	q[set datestyle = 'SQL, DMY'], q[set datestyle = 'German'], q[set datestyle = 'Postgres, MDY'],
	q[set timezone = 'America/New_York'], q[set timezone = 'Asia/Kolkata'], q[set timezone = 'Europe/London'],
	q[set intervalstyle = 'iso_8601'], q[set intervalstyle = 'sql_standard'], 'set extra_float_digits = 0', 'set extra_float_digits = -3',
);

for my $round (1 .. $rounds)
{
	@sql = ();
	push @tables, map { make_table() } 1 .. 12;
	my $err = run_all(@sql);
	is($err, '', "round $round: tables") or BAIL_OUT('the generator is wrong');
	# wal2json 2.5 does not escape defaults.
	$node->safe_psql('postgres', q[
		do $$ declare command text; begin
			for command in select format('alter table %s alter column %I drop default', adrelid::regclass, attname)
				from pg_attrdef join pg_attribute on attrelid = adrelid and attnum = adnum
				where pg_get_expr(adbin, adrelid) ~ '["\\\\[:cntrl:]]' and adrelid::regclass::text !~ '^pg_' loop
				execute command;
			end loop;
		end $$]);
	$node->safe_psql('postgres', "select pg_drop_replication_slot(slot_name) from pg_replication_slots");
	$node->safe_psql('postgres', "select pg_create_logical_replication_slot('theirs', 'wal2json'), pg_create_logical_replication_slot('ours', 'braid')");
	my @work;
	for (1 .. 120)
	{
		if (chance(0.05))
		{
			push @work, "select pg_replication_origin_session_setup('origin " . pick('a', 'b') . "')", transaction(), "select pg_replication_origin_session_reset()";
		}
		else
		{
			push @work, transaction();
		}
	}
	# A record that is larger than the chunks in which output is collected.
	push @work, 'create table large' . $round . ' (id int primary key, v text)',
	  'insert into large' . $round . q[ select i, 'row ' || i from generate_series(1, 3000) i];
	run_all(@work);

	same('version 1', 'set search_path = public');
	same('version 2', 'set search_path = public', 'format-version', 2);
	for my $version (1, 2)
	{
		same("version $version, $_", 'set search_path = public', 'format-version', $version, $_, /schemas|types|typmod|transaction/ ? 0 : 1) for @switches;
	}
	for (1 .. 25)
	{
		my @options = some_options();
		my $settings = join '; ', map { pick(@settings) } 1 .. 2;
		same("@options ($settings)", $settings, @options);
	}

	same_taken('get', 'format-version', 2, 'filter-tables', table_list());
	same_taken('get_binary', 'pretty-print', 1, 'include-lsn', 1);

	my $end = $node->safe_psql('postgres', 'select pg_current_wal_insert_lsn()');
	$node->safe_psql('postgres', 'select pg_switch_wal()');
	for my $options (
		[], [ 'format-version' => 2 ], [ 'pretty-print' => 1 ], [ 'write-in-chunks' => 1 ],
		[ 'write-in-chunks' => 1, 'pretty-print' => 1, 'include-xids' => 1 ],
		[ 'format-version' => undef ], [ 'add-tables' => undef ], [ 'include-lsn' => undef, 'include-timestamp' => undef, 'include-pk' => undef ])
	{
		same_received($end, @$options);
	}
	next if $round < $rounds;
	# Options that are given again, with another value, an empty one, or none.
	for my $options (
		(map { [ 'format-version' => 2, $_ => table_list(), $_ => pick(table_list(), '') ], [ $_ => table_list(), $_ => table_list(), $_ => undef ] } 'filter-tables', 'add-tables'),
		(map { [ 'format-version' => 2, $_ => 'p', $_ => pick('a\\ b', 'wal2json', '') ], [ 'format-version' => 2, $_ => 'p', $_ => undef ] } 'filter-msg-prefixes', 'add-msg-prefixes'),
		[ 'filter-origins' => 1, 'filter-origins' => pick(2, '') ], [ 'filter-origins' => '1,2', 'filter-origins' => undef ],
		[ 'actions' => 'insert', 'actions' => undef ], [ 'actions' => 'insert', 'actions' => 'update' ],
		[ 'pretty-print' => 1, 'pretty-print' => 0 ], [ 'format-version' => 1, 'format-version' => undef ], [ 'write-in-chunks' => undef, 'write-in-chunks' => 0 ])
	{
		same_received($end, @$options);
	}
	same_received($end, 'format-version' => pick(1, 2), $_ => 0, $_ => undef) for @switches;
}
cmp_ok($records, '>', 5_000, "records compared: $records");

# Wrong options: message and SQLSTATE. (Options that only one of them knows are left out:
# numeric-data-types-as-string came after 2.5.)
my @wrong = ([ 'foo', 'bar' ], [ 'foo', '' ], [ 'include-unchanged-toast', '1' ], [ 'Include-Xids', '1' ], [ 'include-xids', '1', 'foo', 'x', 'include-lsn', 'bad' ]);
push @wrong, [ $_, 'bad' ], [ $_, '' ], [ $_, 'o' ], [ $_, ' on' ] for @switches;
push @wrong, [ 'format-version', $_ ] for '', 'x', '0', '3', '-1', '1x', '4294967298', '99999999999999999999', '2.4', '.5', '010', '0x', '1e1', '  ', 'nan', '1 2';
push @wrong, [ 'actions', $_ ] for 'x', 'insert,x', 'insert,', ',', 'insert update', 'INSERT', '\\insert', 'message';
for my $option ('filter-tables', 'add-tables')
{
	push @wrong, [ $option, $_ ] for 't', 'a.b,', ',a.b', 'a.b,,c.d', 'a .b', 'a. b', 'a\\.b', 'a.b c.d', 'a.b,c', ',', 'a.b;c.d e', "a\tb.c";
}
for my $option ('filter-msg-prefixes', 'add-msg-prefixes')
{
	push @wrong, [ $option, $_ ] for 'a b', 'a,', ',a', 'a,,b';
}
push @wrong, [ 'filter-origins', $_ ] for 'a b', '1 2', '1, 2 3';
push @wrong, [ 'format-version', '3', 'foo', 'x' ], [ 'foo', 'x', 'format-version', '3' ], [ 'format-version', '0', 'include-xids', 'bad' ];
my @different;
for my $options (@wrong)
{
	my (undef, $theirs) = peek('theirs', 'select 1', @$options);
	my (undef, $ours) = peek('ours', 'select 1', 'format', 'wal2json', @$options);
	s/^(WARNING: .*\n)+//mg for $theirs, $ours;
	push @different, "@$options\n  $theirs  $ours" if $theirs ne $ours || ($theirs eq '' && "@$options" !~ /2\.4/);
}
is(join("\n", @different), '', scalar(@wrong) . ' wrong options are refused alike');

# And through the replication protocol, where options can be without a value.
@wrong = (
	[ 'foo' => undef ], [ 'foo' => 'bar' ], [ 'include-unchanged-toast' => undef ], [ 'format-version' => '3' ], [ 'format-version' => '0' ], [ 'format-version' => '' ],
	[ 'actions' => 'insert,x' ], [ 'actions' => 'insert update' ], [ 'filter-origins' => '1 2' ], [ 'filter-msg-prefixes' => 'a,' ], [ 'add-msg-prefixes' => 'a b' ],
	[ 'filter-tables' => 't' ], [ 'add-tables' => 'a.b,' ], [ 'filter-tables' => 't', 'filter-tables' => undef ], [ 'filter-tables' => undef, 'filter-tables' => 't' ],
	[ 'include-xids' => undef, 'foo' => undef, 'include-lsn' => 'bad' ], map { [ $_ => pick('bad', '', '2') ] } @switches);
@different = ();
for my $options (@wrong)
{
	my ($theirs, $ours) = map { my (undef, $err) = received($_, '0/0', @$options); $err =~ /(ERROR: .*)/ ? $1 : "no error: $err" } 'theirs', 'ours';
	push @different, join(' ', arguments(@$options)) . "\n  $theirs\n  $ours" if $theirs ne $ours || $theirs !~ /^ERROR/;
}
is(join("\n", @different), '', scalar(@wrong) . ' wrong options are refused alike by pg_recvlogical');

done_testing();
