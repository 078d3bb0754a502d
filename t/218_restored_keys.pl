# Foreign-key rule `restore`: the row to which these values refer is restored, for keys of any type;
# and no other row, such as one whose jsonb key only contains the value.

use strict;
use warnings;

use Braid;
use Test::More;

# Tokyo has the images of rows that paris deletes. Paris has none: it gives a row up two of its
# intervals, and two seconds, after everything has arrived. So its interval is longer than tokyo
# needs on a busy machine.
my ($tokyo, $paris) = my @nodes = map { new_node($_->[0], conf => "braid.orphan_check_interval = $_->[1]\n") } [ 'tokyo', '200ms' ], [ 'paris', '20s' ];
sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }

# The type of the referenced column and of the one that refers to it; keys that are referred to, and
# others.
my %keys = (
	jsonb => [ 'jsonb', 'jsonb', [ '{"a": 1}', '"x"', '1.50', '[1]', 'null', '{}' ], [ '{"a": 1, "b": 2}', '"1"', '1', '[1, 2]', '[]', '{"a": {}}' ] ],
	composite => [ 'pair', 'pair', [ '(1,"a b")', '(,)' ], [ '(1,)' ] ],
	composite_domain => [ 'some_pair', 'some_pair', ['(1,"a b")'], ['(2,)'] ],
	array => [ 'int[]', 'int[]', [ '{1,2}', '[0:1]={1,NULL}' ], [ '{1,2,3}', '{}', '{1,NULL}' ] ],
	enum => [ 'mood', 'mood', ['sad'], ['ok'] ],
	range => [ 'int4range', 'int4range', [ '[1,5)', 'empty' ], ['[1,6)'] ],
	floating => [ 'float8', 'float8', [ '-0', 'NaN' ], ['0.1'] ],
	name => [ 'regclass', 'regclass', ['pg_class'], ['pg_type'] ],
	padded => [ 'char(5)', 'char(3)', ['ab'], ['abc'] ],
	number => [ 'numeric', 'int', ['7'], ['7.5'] ],
	narrow => [ 'int', 'bigint', ['7'], ['8'] ],
	moment => [ 'timestamp', 'date', ['2024-02-29'], ['2024-02-29 12:00'] ],
	bits => [ 'bit(3)', 'bit(3)', ['101'], ['100'] ],
	address => [ 'inet', 'inet', ['10.0.0.1/24'], ['10.0.0.1'] ],
);
my @all = sort keys %keys;
sub literals { my ($keys) = @_; return map { "\$key\$$_\$key\$" } @$keys; }

on_all(join("\n", q[
	create type pair as (a int, b text);
	create domain some_pair as pair;
	create type mood as enum ('sad', 'ok');
	create table p_two (doc jsonb, n int, v text, primary key (doc, n));
	create table c_two (id int primary key, n int, doc jsonb, foreign key (doc, n) references p_two);
], map { qq[
	create table p_$_ (k $keys{$_}[0] primary key, v text);
	create table c_$_ (id int generated always as identity primary key, k $keys{$_}[1] references p_$_);
] } @all), @nodes);
subscribe($tokyo, $paris, copy_data => 'false');
subscribe($paris, $tokyo, copy_data => 'false');
on_all(join("\n", map { "select braid.set_foreign_key_rule('c_$_', null, 'restore');" } @all, 'two'), @nodes);

sql($tokyo, join "\n", q[insert into p_two values ('{"a": 1}', 1, 'two'), ('{"a": 1, "b": 1}', 1, 'no'), ('{"a": 1}', 2, 'no');], map {
	my (undef, undef, $wanted, $others) = @{ $keys{$_} };
	"insert into p_$_ values " . join(', ', map { "($_, 'back')" } literals($wanted)) . ';'
	  . "insert into p_$_ values " . join(', ', map { "($_, 'no')" } literals($others)) . ';'
} @all);
converged(@nodes);

# The referenced rows are deleted, and referred to at the other node.
disable($tokyo, 'tokyo_from_paris');
disable($paris, 'paris_from_tokyo');
sql($paris, join ';', map { "delete from p_$_" } @all, 'two');
sql($tokyo, join "\n", q[insert into c_two values (1, 1, '{"a": 1}');], map { "insert into c_$_ (k) values " . join(', ', map { "($_)" } literals($keys{$_}[2])) . ';' } @all);
sql($tokyo, q[select braid.enable_subscription('tokyo_from_paris')]);
sql($paris, q[select braid.enable_subscription('paris_from_tokyo')]);
converged(@nodes);
for my $node (@nodes)
{
	becomes($node, q[select coalesce(string_agg(distinct referencing::text, ' '), 'none') from braid.orphans()], 'none', 'what is referred to is back at ' . $node->name);
}
converged(@nodes);
same_tables(\@nodes, map { ("p_$_", "c_$_") } @all, 'two');
for my $name (@all)
{
	is(sql($tokyo, "select count(*) || ' ' || string_agg(distinct v, ',') from p_$name"), @{ $keys{$name}[2] } . ' back', "$name: the rows that are referred to, and no other");
}
is(sql($tokyo, q[select string_agg(p::text, ' ') from p_two p]), q[("{""a"": 1}",1,two)], 'a key of two columns');
my $given_up = q[select count(*) from braid.conflict_history where kind = 'foreign_key' and resolution <> 'restore'];
is(join(' ', map { sql($_, $given_up) } @nodes), '0 0', 'no row was given up');

$_->stop for @nodes;
done_testing();
