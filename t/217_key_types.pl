# Keys of every type with a comparison of its own: domains over enums, composites, names of objects,
# arrays, unusual operator classes and collations. Questions to a server about a row by its key get
# the row: for large values, comparing, repairing, restoring rows that lost a conflict, and the
# check of rows that a copy has left out. An error does not count as an answer.

use strict;
use warnings;

use Braid;
use Test::More;

my ($tokyo, $paris) = my @nodes = map { new_node($_) } qw(tokyo paris);
sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }

# A type, and two values of it.
my %types = (
	enum => [ 'mood', 'sad', 'ok' ],
	domain => [ 'some_mood', 'sad', 'ok' ],
	nested => [ 'own_mood', 'sad', 'ok' ],
	composite => [ 'pair', '(1,"a b")', '(2,)' ],
	composite_domain => [ 'some_pair', '(1,"a b")', '(2,)' ],
	in_composite => [ 'held', '(sad,"{1,2}")', '(ok,{})' ],
	class => [ 'regclass', 'public.there', 'pg_class' ],
	class_domain => [ 'some_class', 'public.there', 'pg_class' ],
	type => [ 'regtype', 'mood', 'integer' ],
	procedure => [ 'regprocedure', 'fold_compare(text,text)', 'lower(text)' ],
	array => [ 'int[]', '{1,2}', '[0:1]={1,NULL}' ],
	array_domain => [ 'some_list', '{1,2}', '{}' ],
	mood_array => [ 'mood[]', '{sad,ok}', '{}' ],
	jsonb => [ 'jsonb', '{"a": 1}', '"a"' ],
	range => [ 'int4range', '[1,5)', 'empty' ],
	multirange => [ 'int4multirange', '{[1,2),[5,7)}', '{}' ],
	padded => [ 'char(5)', 'ab', 'c' ],
	short => [ 'varchar(10)', q[it's \\], 'c' ],
	single => [ '"char"', 'a', '' ],
	name => [ 'name', 'a', 'B' ],
	nocase => [ 'text collate nocase', 'Ab', 'c' ],
	number => [ 'numeric', '1.50', '-Infinity' ],
	floating => [ 'double precision', '0.1', '-0' ],
	bytes => [ 'bytea', '\\x00ff', '\\x' ],
	bits => [ 'bit varying', '101', '' ],
	interval => [ 'interval', '1 mon 24:00:00', '-1 day' ],
	moment => [ 'timestamptz', '2024-02-29 12:30:00.5+05:30', 'infinity' ],
	address => [ 'inet', '10.0.0.1/24', '::1' ],
	position => [ 'pg_lsn', '1/AB', '0/0' ],
	search => [ 'tsvector', q['a':1 'b'], '' ],
	range_domain => [ 'some_range', '[1,5)', 'empty' ],
	multirange_domain => [ 'some_multirange', '{[1,2),[5,7)}', '{}' ],
	own_range => [ 'mood_range', '[sad,ok)', '[ok,]' ],
	own_multirange => [ 'mood_multirange', '{[sad,ok)}', '{}' ],
	deep => [ 'some_deep', '("(sad,\"{1,2}\")","[1,5)")', '(,empty)' ],
	deep_array => [ 'some_deep[]', '{"(,\"[1,5)\")"}', '{}' ],
	# So large that they are out of line as well.
	large_text => [ 'text', 'a' x 2600, 'b' x 2600 ],
	large_array => [ 'mood[]', '{' . join(',', ('sad') x 600) . '}', '{' . join(',', ('ok') x 600) . '}' ],
	large_composite => [ 'pair', '(1,' . 'x' x 2500 . ')', '(2,' . 'y' x 2500 . ')' ],
	large_jsonb => [ 'jsonb', '"' . 'a' x 2500 . '"', '["' . 'b' x 2500 . '"]' ],
);
my @all = sort keys %types;
sub literal { my ($text) = @_; return "\$key\$$text\$key\$"; }

my $set_up = q[
	create type mood as enum ('sad', 'ok');
	create domain some_mood as mood;
	create domain own_mood as some_mood check (value is not null);
	create type pair as (a int, b text);
	create domain some_pair as pair;
	create type held as (m mood, l int[]);
	create domain some_class as regclass;
	create domain some_list as int[];
	create domain some_range as int4range;
	create domain some_multirange as int4multirange;
	create type mood_range as range (subtype = mood);
	create type deep as (h held, r some_range);
	create domain some_deep as deep;
	create collation nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
	create table there (id int primary key);
	create schema folded;
	create function fold_compare(text, text) returns int language sql immutable strict return pg_catalog.bttextcmp(lower($1), lower($2));
	create function folded.lt(text, text) returns bool language sql immutable strict return public.fold_compare($1, $2) < 0;
	create function folded.le(text, text) returns bool language sql immutable strict return public.fold_compare($1, $2) <= 0;
	create function folded.eq(text, text) returns bool language sql immutable strict return public.fold_compare($1, $2) = 0;
	create function folded.ge(text, text) returns bool language sql immutable strict return public.fold_compare($1, $2) >= 0;
	create function folded.gt(text, text) returns bool language sql immutable strict return public.fold_compare($1, $2) > 0;
	create operator folded.<< (leftarg = text, rightarg = text, function = folded.lt);
	create operator folded.<<= (leftarg = text, rightarg = text, function = folded.le);
	create operator folded.== (leftarg = text, rightarg = text, function = folded.eq, commutator = operator(folded.==));
	create operator folded.>>= (leftarg = text, rightarg = text, function = folded.ge);
	create operator folded.>> (leftarg = text, rightarg = text, function = folded.gt);
	create operator class folded.ops for type text using btree as operator 1 folded.<<, operator 2 folded.<<=, operator 3 folded.==,
		operator 4 folded.>>=, operator 5 folded.>>, function 1 public.fold_compare(text, text);
	create table t_folded (k text not null, n int, big text);
	create unique index t_folded_key on t_folded (k folded.ops);
	alter table t_folded replica identity using index t_folded_key;
	create table t_two (k some_mood, l pair, n int, big text, primary key (k, l));
	create table t_whole (k some_mood primary key, n int, big text);
	alter table t_whole replica identity full;
] . join "\n", map { "create table t_$_ (k $types{$_}[0] primary key, n int, big text);" } @all;
my @tables = ((map { "t_$_" } @all), qw(t_folded t_two t_whole));
on_all($set_up . join("\n", (map { "alter table $_ alter column big set storage external;" } @tables),
	map { "alter table t_$_ alter column k set storage external;" } grep { /^large/ } @all), @nodes);
# Of tables that are made apart.
$types{folded} = [ 'text', 'Ab', 'c' ];
$types{whole} = [ 'some_mood', 'sad', 'ok' ];
# The first of each table, or the second.
sub where
{
	my ($table, $which) = @_;
	return $which == 1 ? 'k::mood = $$sad$$' : 'k::mood = $$ok$$' if $table eq 't_two';
	my ($type, @values) = @{ $types{ $table =~ s/^t_//r } };
	return 'k::text = ' . literal($values[ $which - 1 ]) . '::' . $type =~ s/ collate nocase//r . '::text';
}
sub each_table { my ($sql) = @_; return join "\n", map { my $table = $_; $sql->($table) . ';' } @tables; }
sub big { my ($letter) = @_; return "repeat('$letter', 5000)"; }

subscribe($tokyo, $paris, copy_data => 'false');
subscribe($paris, $tokyo, copy_data => 'false');
my @links = ([ $paris, 'paris_from_tokyo' ], [ $tokyo, 'tokyo_from_paris' ]);
sub cut { disable(@$_) for @links; return; }
sub heal { sql($_->[0], "select braid.enable_subscription('$_->[1]')") for @links; converged(@nodes) for 1 .. 2; return; }

sql($tokyo, each_table(sub {
	my ($table) = @_;
	my $big = big('a');
	return "insert into $table values ('sad', '(1,x)', 0, $big), ('ok', '(2,)', 0, $big)" if $table eq 't_two';
	my ($name) = $table =~ /^t_(.*)/;
	return "insert into $table values " . join ', ', map { '(' . literal($types{$name}[$_]) . ", 0, $big)" } 1, 2;
}));
converged(@nodes);
same_tables(\@nodes, @tables);

# One row gets another large value, one is deleted. Later the other node changes both, and leaves
# the large value unchanged.
cut();
sql($paris, each_table(sub { "update $_[0] set big = " . big('b') . ' where ' . where($_[0], 1) }));
sql($paris, each_table(sub { "delete from $_[0] where " . where($_[0], 2) }));
sql($tokyo, each_table(sub { "update $_[0] set n = n + 1" }));
heal();
streams(@$_, "$_->[1] goes on") for @links;
same_tables(\@nodes, @tables);
my $count = join ' + ', map { "(select count(*) from $_ where n = 1 and big = " . big('a') . ')' } @tables;
is(sql($_, "select $count"), 2 * @tables, 'each row is what its last writer made of it, at ' . $_->name) for @nodes;
cmp_ok(sql($paris, 'select questions from braid.subscription_detail'), '>=', 2 * @tables - 2, 'paris has asked');

# Rows that lost are restored.
my $lost = q[select conflict_id from braid.conflict_history where kind = 'update_origin_differs' and winner = 'remote'];
is(sql($paris, qq[
	with lost as materialized ($lost)
	select count(*) || ' ' || string_agg(distinct r.action, ' ') from lost, braid.restore_conflict(lost.conflict_id) r]), @tables . ' update', 'all that lost is put back');
converged(@nodes);
same_tables(\@nodes, @tables);
is(sql($tokyo, 'select ' . join ' + ', map { "(select count(*) from $_ where big = " . big('b') . ')' } @tables), scalar @tables, 'and goes to the other node');

# Rows that differ are found and repaired.
sub compare { my ($node, $name, $table) = @_; return (split /\|/, sql($node, "call braid.compare('$name', '$table')"))[1]; }
my @some = map { "t_$_" } qw(domain nested composite composite_domain in_composite class procedure array jsonb padded nocase floating folded two);
write_by_hand($paris, join ';', map { "update $_ set n = 7 where " . where($_, 1) } @some);
write_by_hand($paris, join ';', map { "delete from $_ where " . where($_, 2) } @some);
my %compared = map { $_ => eval { compare($paris, 'paris_from_tokyo', $_) } // "$@" } @some;
is(join(' ', grep { $compared{$_} ne '2' } @some), '', 'both differences of each table are found') or diag(explain(\%compared));
my %repaired = map { $_ => eval { sql($paris, "call braid.repair('paris_from_tokyo', '$_', side => 'provider')") =~ s/^\d+\|//r } // "$@" } @some;
is(join(' ', grep { $repaired{$_} ne '2|0' } @some), '', 'and repaired') or diag(explain(\%repaired));
same_tables(\@nodes, @some);

# Keys are passed as they are shown. A key that only contains the passed one is another one.
write_by_hand($paris, q[insert into t_jsonb values ('{"a": 1, "b": 2}', 9, null)]);
write_by_hand($paris, q[update t_jsonb set n = 8 where k = '{"a": 1}']);
is((split /\|/, sql($paris, q[call braid.compare('paris_from_tokyo', 't_jsonb', keys => '[{"k": {"a": 1}}, {"k": "a"}]')]))[1], 1, 'rows with keys that are given are compared');
is(compare($paris, 'paris_from_tokyo', 't_jsonb'), 2, 'two rows differ');
is(sql($paris, q[call braid.repair('paris_from_tokyo', 't_jsonb', side => 'provider', keys => '{"k": {"a": 1}}')]) =~ s/^\d+\|//r, '1|0', 'one of them has the key');

# Labels and names that one node alone has.
sql($tokyo, q[alter type mood add value 'new']);
sql($tokyo, q[create table only_there (id int)]);
my @own = (q[t_domain where k::mood = 'new'], q[t_class where k = 'public.only_there'::regclass]);
write_by_hand($tokyo, q[insert into t_domain values ('new', 1, null); insert into t_class values ('public.only_there', 1, null)]);
is(compare($paris, 'paris_from_tokyo', $_), 1, "$_: a key that can't be read here is a difference") for qw(t_domain t_class);
is(compare($tokyo, 'tokyo_from_paris', $_), 1, "$_: nor there") for qw(t_domain t_class);
write_by_hand($tokyo, "delete from $_") for @own;

# The object of a question is gone: a table whose name is a key was dropped, or a table or a column
# of it was; or a column has another type. These are answers. A key's value that can't be read, or a
# type that can't be compared as before, is no answer.
my @first = map { "$_ where " . where($_, 1) } qw(t_class t_enum t_number t_floating);
disable(@{ $links[0] });
write_by_hand($paris, join ';', map { s/ where /' set big = ' . big('d') . ' where '/er } map { "update $_" } @first);
sql($tokyo, join ';', map { s/ where / set n = 100 where /r } map { "update $_" } @first);
sql($tokyo, $_) for 'drop table there', 'drop table t_enum', 'alter table t_number alter column k type text', 'alter table t_floating rename column big to large';
sql($paris, q[select braid.enable_subscription('paris_from_tokyo')]);
caught_up($paris, $tokyo);
streams(@{ $links[0] }, 'the subscription goes on');
is(join(' ', map { sql($paris, "select n || left(big, 1) from $_") } @first), '100d 100d 100b 100d', 'values are those of the other node where it has them, else those that are here');

$_->stop for @nodes;
done_testing();
