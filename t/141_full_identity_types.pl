# REPLICA IDENTITY FULL with types that have no equality, and with values that have several byte
# forms: the row is found, in whichever form it came. A missing row is a conflict (delete_missing,
# update_missing), not an error.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');

# A column's type and two values of it.
my %type = (
	json => [ q['{"a": 1, "a": 2}'], q['{"a" : 1}'] ],
	xml => [ q['<a>1</a>'], q['<b/>'] ],
	point => [ q['(1,2)'], q['(-0,NaN)'] ],
	polygon => [ q['((0,0),(1,1),(2,0))'], q['((0,0),(1,1),(2,1))'] ],
	line => [ q['{1,2,3}'], q['{1,-1,0}'] ],
	path => [ q['((0,0),(1,1))'], q['[(0,0),(1,1)]'] ],
	tsquery => [ q['cat & (dog:* | !bird)'], q['a <-> b & c'] ],
	tsvector => [ q['cat:1A dog:2'], q['a b c'] ],
	jsonpath => [ q['$.a[*] ? (@ > 1)'], q['strict $.b'] ],
	aclitem => [ q['=r/postgres'], q['postgres=a/postgres'] ],
	pg_lsn => [ q['0/1'], q['0/2'] ],
	xid => [ q['7'], q['8'] ],
	'json[]' => [ q[array['{"a":1}', null]::json[]], q['{}'] ],
	'point[]' => [ q[array['(1,2)']::point[]], q[array['(1,2)', '(3,4)']::point[]] ],
	'tsquery[]' => [ q[array['cat & dog', 'a | b & !c']::tsquery[]], q[array['x']::tsquery[]] ],
	pair => [ q[row('{"a":1}', '(1,2)', 'cat & dog')::pair], q[row(null, '(0,0)', 'b & c & a')::pair] ],
	'pair[]' => [ q[array[row('{"a":1}', '(1,2)', 'cat & dog')::pair]], q[array[row('[]', null, null)::pair]] ],
	document => [ q['{"d":1}'], q['{"d":2}'] ],
	sought => [ q['cat & (dog | bird)'], q['cat'] ],
	mood => [ q['glad'], q['sad'] ],
	'mood[]' => [ q['{glad,NULL,sad}'], q['[2:2]={sad}'] ],
	cheerful => [ q['glad'], q['glad'] ],
	'cheerful[]' => [ q['{glad}'], q['{}'] ],
	nested => [ q[row('glad', row(null, '(1,2)', 'cat & dog'), '{sad}', '[glad,glad]', 'a', '2024-01-01Z')::nested], q[row(null, null, null, 'empty', null, null)::nested] ],
	moods => [ q{'[sad,glad)'}, q{'(,glad]'} ],
	mood_spans => [ q{'{[sad,sad]}'}, q['{}'] ],
	'cardinal[]' => [ q['{1,2}'], q['{NULL}'] ],
	numrange => [ q{'[1.0,2)'}, q['empty'] ],
	int4multirange => [ q{'{[1,3),[5,7)}'}, q['{}'] ],
	numeric => [ q[1.0], q[1.00] ],
	'int[]' => [ q['{1,2,NULL}'], q['[2:3]={1,2}'] ],
);
# A server may be built without XML.
delete $type{xml} if $tokyo->psql('postgres', q[select '<a/>'::xml]) != 0;
my @types = sort keys %type;
sub table { my ($of) = @_; return 'of_' . $of =~ s/\W+/_list/r; }
# Types have other OIDs there.
$paris->safe_psql('postgres', 'create type earlier as (a int); create type sooner as enum (); create table before (a int)');

on_all(q[
	create type pair as (j json, p point, q tsquery);
	create domain document as json check (value::text <> '');
	create domain sought as tsquery;
	create type mood as enum ('sad', 'glad');
	create domain cheerful as mood check (value = 'glad');
	create type moods as range (subtype = mood, multirange_type_name = mood_spans);
	create type nested as (m mood, p pair, l mood[], r moods, t text, at timestamptz);
	create domain cardinal as information_schema.cardinal_number;
] . join('', map { my $table = table($_); "create table $table (n int, v $_, z text); alter table $table replica identity full;\n" } @types), $tokyo, $paris);
# Rows that are copied, as text, and others that are streamed, in binary form.
$tokyo->safe_psql('postgres', join '', map { my $table = table($_); my ($one, $other) = @{ $type{$_} };
	"insert into $table values (1, $one, 'copied'), (2, $other, 'copied'), (3, $one, 'copied'), (4, null, 'copied'), (5, $other, null);\n" } @types);
my $name = subscribe($paris, $tokyo);
$tokyo->safe_psql('postgres', join '', map { my $table = table($_); my ($one, $other) = @{ $type{$_} };
	"insert into $table values (11, $one, 'streamed'), (12, $other, 'streamed'), (13, $one, 'streamed'), (14, null, 'streamed'), (15, $other, null);\n" } @types);
for my $of (@types)
{
	my $table = table($of);
	my ($one, $other) = @{ $type{$of} };
	$tokyo->safe_psql('postgres', qq[
		update $table set v = $other where n in (1, 11);
		update $table set z = 'changed' where n in (2, 4, 12, 14);
		delete from $table where n in (3, 13, 5, 15);
	]);
}
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], map { table($_) } @types);
# A row without a key has one hash at all nodes, whatever the OIDs there.
isnt($_->[0], $_->[1], 'OIDs differ') for [ map { $_->safe_psql('postgres', q[select 'mood'::regtype::oid]) } $tokyo, $paris ];
for my $of (@types)
{
	my $hashes = 'select n, v.key_hash from ' . table($of) . ' t, braid.row_version(t.tableoid, t.ctid) v order by n';
	my ($there, $here) = map { $_->safe_psql('postgres', $hashes) } $tokyo, $paris;
	is($here, $there, "rows with $of have one hash");
}
is($paris->safe_psql('postgres', 'select relation, kind, count(*) from braid.conflict_history group by 1, 2'), '', 'and no row was missing');

# A missing row is a conflict.
$paris->safe_psql('postgres', join '', map { 'set session_replication_role = replica; delete from ' . table($_) . ' where n in (1, 2);' } @types);
for my $of (@types)
{
	my $table = table($of);
	$tokyo->safe_psql('postgres', "delete from $table where n = 1; update $table set z = 'gone' where n = 2; insert into $table values (99, null, 'goes on')");
}
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', q[select kind, count(distinct relation) from braid.conflict_history where kind in ('delete_missing', 'update_missing', 'update_deleted') group by 1 order by 1]),
	'delete_missing|' . @types . "\nupdate_missing|" . @types, 'a row that is not here is a conflict, whatever its type');
streams($paris, $name, 'and the subscription goes on');

done_testing();
