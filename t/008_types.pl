# Every built-in type, and types made by users and extensions, arrive with the very same value,
# between nodes that differ in encoding, DateStyle, TimeZone, IntervalStyle, bytea_output, float
# digits and locale.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo', init => [ '--encoding=UTF8', '--locale=C' ], conf => q[
DateStyle = 'SQL, DMY'
IntervalStyle = sql_standard
TimeZone = 'Asia/Tokyo'
bytea_output = escape
extra_float_digits = 0
xmloption = document
]);
my $paris = new_node('paris', init => [ '--encoding=LATIN1', '--locale=C' ], conf => q[
DateStyle = 'German, YMD'
IntervalStyle = iso_8601
TimeZone = 'America/New_York'
bytea_output = hex
extra_float_digits = 1
xmloption = content
]);
my @nodes = ($tokyo, $paris);

# type => values; the text between is SQL. Each type gets a table of its own, of a scalar and an
# array column.
my %values = (
	'boolean' => q{true; false},
	'smallint' => q{-32768; 0; 32767},
	'integer' => q{-2147483648; 2147483647},
	'bigint' => q{-9223372036854775808; 9223372036854775807},
	'numeric' => q{'NaN'; 'Infinity'; '-Infinity'; 0.00; 123456789012345678901234567890.123456789012345678901234567890; 1e-1000; 1e1000},
	'numeric(20,4)' => q{1.5; -0.0001},
	'real' => q{'NaN'; '-Infinity'; 1.1; 3.4028235e38; 1.4e-45; '-0'},
	'double precision' => q{'NaN'; 'Infinity'; 0.1; 1.7976931348623157e308; 5e-324; '-0'},
	'money' => q{-12.34; 92233720368547758.07},
	'char(5)' => q{'ab'; ''},
	'varchar(10)' => q{'grün'; ''},
	'text' => q{'déjà vu'; ''; E'tab\tnew\nline\\\\'; repeat('long é', 5000)},
	'name' => q{'a name'},
	'"char"' => q{'x'; ''},
	'bytea' => q{'\x00ff27225c'; ''},
	'timestamp' => q{'2026-03-29 02:30:00.123456'; 'infinity'; '-infinity'; '4713-01-01 00:00:00 BC'; '294276-12-31 23:59:59.999999'},
	'timestamptz' => q{'2026-03-29 02:30:00.123456+00'; 'infinity'; '0044-03-15 12:00:00+00 BC'},
	'timestamptz(0)' => q{'2026-10-25 01:30:00+02'},
	'date' => q{'2026-04-05'; '04-05-0001 BC'; 'infinity'; '5874897-12-31'},
	'time' => q{'23:59:59.999999'; '24:00:00'},
	'timetz' => q{'12:00:00.5+05:30'; '24:00:00-15:59'},
	'interval' => q{'1 year -2 months 3 days -04:05:06.789'; '178000000 years'; '-1 day +00:00:01'},
	'uuid' => q{'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'},
	'json' => q{'{"b": 1, "a": [1,  2], "b": "é"}'},
	'jsonb' => q{'{"b": 1.10, "a": [null, true, "é"]}'; '1e400'},
	'jsonpath' => q{'$.a[*] ? (@ > 1)'},
	'xml' => q{'<a>é</a>'},
	'inet' => q{'192.168.0.1/24'; '::1'},
	'cidr' => q{'10.0.0.0/8'},
	'macaddr' => q{'08:00:2b:01:02:03'},
	'macaddr8' => q{'08:00:2b:01:02:03:04:05'},
	'bit(5)' => q{B'10101'},
	'bit varying' => q{B''; B'1'; B'101010101010101010101'},
	'point' => q{'(1.1,-2.2)'; '(NaN,Infinity)'},
	'line' => q{'{1,2,3}'},
	'lseg' => q{'[(0,0),(1.5,2)]'},
	'box' => q{'(1,1),(0,0)'},
	'path' => q{'((0,0),(1,1),(2,0))'; '[(0,0),(1,1)]'},
	'polygon' => q{'((0,0),(1,1),(2,0))'},
	'circle' => q{'<(1,2),3.3>'},
	'tsvector' => q{$$'a':1A 'cat':2,3B$$},
	'tsquery' => q{$$'fat' & ('rat' | !'cat':*)$$},
	'int4range' => q{'[1,10)'; 'empty'; '(,)'},
	'int8range' => q{'[1,)'},
	'numrange' => q{'(1.5,2.50]'},
	'tsrange' => q{'[2026-01-01 00:00,2026-01-02 00:00)'},
	'tstzrange' => q{'[2026-01-01 00:00+00,)'},
	'daterange' => q{'[2026-01-01,2026-02-01)'},
	'int4multirange' => q{'{[1,3),[5,8)}'; '{}'},
	'nummultirange' => q{'{[1.1,2.2]}'},
	'tstzmultirange' => q{'{[2026-01-01 00:00+00,2026-01-02 00:00+00)}'},
	'datemultirange' => q{'{[2026-01-01,2026-02-01)}'},
	'oid' => q{4294967295},
	'pg_lsn' => q{'16/B374D848'},
	'tid' => q{'(4294967295,65535)'},
	'xid' => q{'4294967295'},
	'xid8' => q{'18446744073709551615'},
	'txid_snapshot' => q{'10:20:10,14,15'},
	'pg_snapshot' => q{'10:20:10,14,15'},
	# By name, since their numbers are each server's own.
	'regclass' => q{'mood_carrier'},
	'regtype' => q{'mood'},
	'regproc' => q{'now'},
	'regprocedure' => q{'abs(int)'},
	'regoper' => q{'||/'},
	'regoperator' => q{'+(int,int)'},
	'regnamespace' => q{'public'},
	'regrole' => q{'pg_monitor'},
	'regcollation' => q{'"C"'},
	'regconfig' => q{'simple'},
	'regdictionary' => q{'simple'},
	'int8multirange' => q{'{[1,3),[5,)}'},
	'tsmultirange' => q{'{[2026-01-01 00:00,2026-01-02 00:00)}'},
	'cid' => q{'4294967295'},
	'oidvector' => q{'1 4294967295'; ''},
	'int2vector' => q{'1 -32768'},
	'refcursor' => q{'a "cursor"'},
	'aclitem' => q{'pg_monitor=r*w/pg_monitor'},
	'mood' => q{'sad'; 'happy'},
	'positive' => q{1; 2147483647},
	'pair' => q{row(1, 'x, "y" (z)'); row(null, null); row(2, 'é')},
	'float_span' => q{'[1.5,2.5)'},
	'float_span_multi' => q{'{[1.5,2.5),[3,4]}'},
	'carrier' => q{row('happy', array[row(1, 'in an array')::pair, null], '[0.1,0.2]')},
);
my $types = q[
	create type mood as enum ('sad', 'ok', 'happy');
	create domain positive as int check (value > 0);
	create type pair as (a int, b text);
	create type float_span as range (subtype = float8, multirange_type_name = float_span_multi);
	create type carrier as (m mood, p pair[], s float_span);
	create table mood_carrier (m mood);
];
# Numbers of types differ between the nodes, and the order of an enum's labels in the catalog as
# well.
$paris->safe_psql('postgres', q[create type shift_one as enum ('x'); create type shift_two as enum ('y'); create type shift_three as (a int)]);
on_all($types, @nodes);

# The server may be built without libxml.
delete $values{xml} unless ($tokyo->psql('postgres', q[select '<a/>'::xml]))[0] == 0 && ($paris->psql('postgres', q[select '<a/>'::xml]))[0] == 0;

# Types of newer majors.
my %newer = ('oid8' => q{'18446744073709551615'; '0'}, 'regdatabase' => q{'template1'});
for my $type (keys %newer)
{
	my $is_there = "select to_regtype('$type') is not null";
	$values{$type} = $newer{$type} if $tokyo->safe_psql('postgres', $is_there) eq 't' && $paris->safe_psql('postgres', $is_there) eq 't';
}
# The number of a database differs between the nodes.
$paris->safe_psql('postgres', $_) for 'create database made_anew template template1', q(alter database template1 is_template false),
	'drop database template1', 'alter database made_anew rename to template1';

my @extensions;
for my $extension (qw(hstore citext ltree))
{
	my $available = "select count(*) from pg_available_extensions where name = '$extension'";
	next unless $tokyo->safe_psql('postgres', $available) && $paris->safe_psql('postgres', $available);
	on_all("create extension $extension", @nodes);
	push @extensions, $extension;
}
$values{hstore} = q['a=>1, "b c"=>NULL, "é"=>"x\"y"'] if grep { $_ eq 'hstore' } @extensions;
$values{citext} = q['MiXed é'] if grep { $_ eq 'citext' } @extensions;
$values{ltree} = q['Top.Science.Astronomy'] if grep { $_ eq 'ltree' } @extensions;

my (@tables, $ddl, %table_of);
for my $type (sort keys %values)
{
	my $table = sprintf 'type_%02d', scalar @tables;
	push @tables, $table;
	$table_of{$type} = $table;
	$ddl .= "create table $table (id int primary key, v $type, a $type\[\], n $type);\n";
}
on_all($ddl, @nodes);
# The same values in tables whose columns are text on the other node.
sub as_text { my ($type) = @_; return $table_of{$type} =~ s/^type/text/r; }
$tokyo->safe_psql('postgres', join '', map { "create table @{[ as_text($_) ]} (id int primary key, v $_, a $_\[\]);" } sort keys %values);
$paris->safe_psql('postgres', join '', map { "create table @{[ as_text($_) ]} (id int primary key, v text, a text);" } sort keys %values);

# Under which values are written and compared, floats by all their digits.
my $same_settings = q[set client_encoding = utf8; set datestyle = iso; set intervalstyle = postgres; set timezone = utc;
	set bytea_output = hex; set extra_float_digits = 3; set lc_monetary = 'C';];
my $fill = sub {
	my ($node, $from) = @_;
	my $sql = $same_settings;
	for my $type (sort keys %values)
	{
		my $id = $from;
		for my $value (split /; /, $values{$type})
		{
			$sql .= "insert into $table_of{$type} values ($id, $value, array[null, $value, $value]::$type\[\], null);\n";
			$id++;
		}
		# As the session writes it: the settings are those that the text form is compared under.
		# Names of what is not in every search path are not the same text everywhere.
		$sql .= "insert into @{[ as_text($type) ]} select id, v, a from $table_of{$type} where id >= $from;\n" if $node == $tokyo;
		$sql .= "insert into @{[ as_text($type) ]} select id, format('%s', v), format('%s', a) from $table_of{$type} where id >= $from;\n" if $node == $paris && $type !~ /^reg(class|type)$/;
	}
	return $sql;
};
# The same rows by copy, by insert, and after an update; written as UTF-8 whatever the node's
# encoding.
my $as_utf8 = "set client_encoding = utf8;\n";
$tokyo->safe_psql('postgres', $fill->($tokyo, 1));
subscribe($paris, $tokyo);
subscribe($tokyo, $paris, copy_data => 'false');
$tokyo->safe_psql('postgres', $fill->($tokyo, 101));
$paris->safe_psql('postgres', $fill->($paris, 201));
converged(@nodes);
$paris->safe_psql('postgres',
	join '', map { "update $table_of{$_} set n = v, a = array[v, v]::$_\[\] where id between 101 and 200;" } sort keys %values);
$tokyo->safe_psql('postgres', join '', map { "update $_ set n = v, v = null where id between 201 and 300;" } @tables);
converged(@nodes);

# All types that PostgreSQL comes with, except those whose values can't be written (its own
# statistics and the like) and rows of its catalogs.
my %listed = map { $_ => 1 } map { $tokyo->safe_psql('postgres', "select split_part(format_type('$_'::regtype, null), '(', 1)") } keys %values;
my @there = split /\n/, $tokyo->safe_psql('postgres', q[
	select format_type(oid, null) from pg_type t
	where oid < 16384 and typtype in ('b', 'r', 'm') and typcategory <> 'A' and typnamespace = 'pg_catalog'::regnamespace
	  and typname not in ('pg_node_tree', 'pg_ndistinct', 'pg_dependencies', 'pg_mcv_list', 'pg_brin_bloom_summary', 'pg_brin_minmax_multi_summary', 'gtsvector')
]);
push @there, 'oidvector', 'int2vector';
cmp_ok(scalar @there, '>', 70, 'there are many built-in types');
is(join(', ', grep { !$listed{$_} && $_ ne 'xml' } @there), '', 'each of them is among these');

for my $type (sort keys %values)
{
	my $query = "$same_settings select * from $table_of{$type} order by id";
	my ($here, $there) = map { $_->safe_psql('postgres', $query) } @nodes;
	is($there, $here, "$type arrives as it was");
}
my $n = () = join('; ', values %values) =~ /; /g;
is($paris->safe_psql('postgres', join(' + ', 'select 0', map { "(select count(*) from $_)" } @tables)), 3 * ($n + 1), 'every row is there');

# Where the columns are text here, they have the type's text form; and what is written here becomes
# the type's there.
for my $type (sort keys %values)
{
	my $query = "$same_settings set search_path = ''; select id, format('%s', v), format('%s', a) from public.@{[ as_text($type) ]} order by id";
	my ($here, $there) = map { $_->safe_psql('postgres', $query) } @nodes;
	is($there, $here, "$type goes into a column of type text, and comes from one");
}

# A character that the other encoding lacks is an error with a message, not a question mark.
$tokyo->safe_psql('postgres', $as_utf8 . "insert into $table_of{text} values (999, '日本', null, null)");
ok(wait_until(sub { status($paris, 'paris_from_tokyo')->{state} eq 'error' }, 20), 'a character without equivalent stops the subscription');
like(status($paris, 'paris_from_tokyo')->{last_error}, qr/encoding|character/, 'with a message about it');

done_testing();
