# Keys that are equal but not identical (1.0 and 1.00, 'Ada' and 'ADA' under such a collation or
# type, 0.0 and -0.0): a row that was deleted under one form does not come back by an older change
# with another form, even if VACUUM has removed its dead versions meanwhile.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
my $oslo = new_node('oslo');
my @all = ($tokyo, $paris, $oslo);

# A table, its definition, two values of its key that are equal, one that is not, the key's columns,
# and further properties of the table.
my @cases = (
	[ 'numbers', 'k numeric primary key', '1.0', '1.00', '1.01' ],
	[ 'floats', 'k float8 primary key', q['0'::float8], q['-0'::float8], '1e-300' ],
	[ 'blanks', 'k bpchar primary key', q['ada'], q['ada  '], q[' ada'] ],
	[ 'several', 'a int, k numeric, primary key (k, a)', '7.10, 1', '7.1, 1', '7.1, 2', 'k, a' ],
	[ 'arrays', 'k numeric[] primary key', '\'{1.0,2}\'', '\'{1.00,2.0}\'', '\'{1.0}\'' ],
	[ 'ranges', 'k numrange primary key', '\'[1.0,2)\'', '\'[1.00,2.0)\'', '\'[1.0,2]\'' ],
	[ 'documents', 'k jsonb primary key', '\'{"a": 1.0}\'', '\'{"a": 1.00}\'', '\'{"a": 2}\'' ],
	[ 'spans', 'k interval primary key', q['1 day'], q['24 hours'], q['25 hours'] ],
	[ 'positives', 'k positive primary key', '1.0', '1.00', '1.01' ],
	[ 'pairs', 'k pair primary key', q['(1.0,x)'::pair], q['(1.00,x)'::pair], q['(1.0,y)'::pair] ],
	[ 'exact', 'k text primary key', q['Ada'], q['Ada'], q['ADA'] ],
);
on_all(q[create domain positive as numeric check (value > 0); create type pair as (n numeric, t text)], @all);

# One that has ICU has collations that are not deterministic.
my $has_icu = $tokyo->safe_psql('postgres', q[select count(*) > 0 from pg_collation where collprovider = 'i']) eq 't';
if ($has_icu)
{
	on_all(q[
		create collation folded (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
		create type folded_pair as (t text collate folded, n int);
		create domain name_of_one as text collate folded;
	], @all);
	push @cases,
	  [ 'names', 'k text collate folded primary key', q['Ada'], q['ADA'], q['Adam'] ],
	  # By the index's equality, not the column's.
	  [ 'indexed', 'k text not null', q['Ada'], q['ADA'], q['Adam'], 'k', 'create unique index indexed_key on indexed (k collate folded); alter table indexed replica identity using index indexed_key' ],
	  [ 'lists', 'k text[] collate folded primary key', q['{Ada,b}'], q['{ADA,B}'], q['{Ada}'] ],
	  [ 'folded_pairs', 'k folded_pair primary key', q['(Ada,1)'::folded_pair], q['(ADA,1)'::folded_pair], q['(Ada,2)'::folded_pair] ],
	  [ 'domains', 'k name_of_one primary key', q['Ada'], q['ADA'], q['Adam'] ],
	  [ 'whole', 'k text collate folded primary key', q['Ada'], q['ADA'], q['Adam'], 'k', 'alter table whole replica identity full' ];
}
my $has_citext = $tokyo->safe_psql('postgres', q[select count(*) from pg_available_extensions where name = 'citext']);
if ($has_citext)
{
	on_all('create extension citext', @all);
	push @cases, [ 'citexts', 'k citext primary key', q['Ada'], q['ADA'], q['Adam'] ];
}
diag('no ICU here') if !$has_icu;
diag('no citext here') if !$has_citext;
on_all("create table $_->[0] ($_->[1], v text); " . ($_->[6] // ''), @all) for @cases;

for my $subscriber (@all)
{
	subscribe($subscriber, $_) for grep { $_ != $subscriber } @all;
}
ok(wait_until(sub { $_->safe_psql('postgres', q[select xmin is not null from pg_replication_slots where slot_name like 'braid_deletions_%']) eq 't' }, 30),
	$_->name . ' keeps dead rows until they are collected') for @all;

sub on { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }

sub switch
{
	my ($how, $subscriber, $provider) = @_;
	on($subscriber, "select braid.${how}_subscription('" . $subscriber->name . '_from_' . $provider->name . "')");
	return if $how ne 'disable';
	$provider->poll_query_until('postgres', q[select not coalesce(bool_or(active), false) from pg_replication_slots where slot_name like '%] . $subscriber->name . q[%' and slot_name not like 'braid_deletions_%']);
	return;
}

sub vacuumed
{
	my ($node, @tables) = @_;
	my $gone = wait_until(sub {
		my (undef, undef, $said) = $node->psql('postgres', join ';', map { "vacuum (verbose, index_cleanup on, truncate off) $_" } @tables);
		return $said =~ /are dead but not yet removable/ && $said !~ /[1-9]\d* are dead but not yet removable/;
	}, 30);
	ok($gone, 'dead rows are removed at ' . $node->name) if !$gone;
	return;
}

sub everywhere
{
	my ($table, $expected, $what) = @_;
	is(join(' / ', map { on($_, "select coalesce(string_agg(v, ' ' order by v), '') from $table") } @all), join(' / ', ($expected) x @all), "$table: $what");
	return;
}
my @tables = map { $_->[0] } @cases;
my %is = map {
	my ($table, undef, $one, $other, $third, $columns) = @$_;
	$columns //= 'k';
	my $is_one = $columns =~ /,/ ? "($columns) = ($one)" : $table eq 'indexed' ? "k collate folded = $one" : "$columns = $one";
	($table => { one => $one, other => $other, third => $third, columns => $columns, is_one => $is_one });
} @cases;

# Insert, update, and update of the key's form, each older than the deletion, and late.
sub put { my ($table, $which, $v) = @_; my $t = $is{$table}; return "insert into $table ($t->{columns}, v) values ($t->{$which}, '$v')"; }
sub form { my ($table, $which) = @_; my $t = $is{$table}; return $t->{columns} =~ /,/ ? "($t->{columns}) = ($t->{$which})" : "$t->{columns} = $t->{$which}"; }

my $each = sub { my ($node, $sql) = @_; on($node, join ';', map { $sql->($_) } @tables); };

# The form of a key changes, without concurrent changes.
$each->($tokyo, sub { put($_[0], 'one', 'first') });
converged(@all);
$each->($paris, sub { my $t = shift; "update $t set " . form($t, 'other') . ", v = 'second'" });
converged(@all);
everywhere($_, 'second', 'another form of the same key') for @tables;
same_tables(\@all, @tables);
$each->($oslo, sub { my $t = shift; "delete from $t where $is{$t}{is_one}" });
converged(@all);
everywhere($_, '', 'deleted by another form') for @tables;

# Runs changes at tokyo and at the other two while they are cut off from each other; dead rows are
# removed before they meet.
sub apart
{
	my ($work) = @_;
	my @cut = ([ $paris, $tokyo ], [ $tokyo, $paris ], [ $oslo, $tokyo ]);
	switch('disable', @$_) for @cut;
	$work->();
	caught_up($oslo, $paris);
	vacuumed($_, @tables) for $paris, $oslo;
	switch('enable', @$_) for @cut;
	converged(@all);
	return;
}

# Paris deletes the row that it has under one form. Tokyo has written the other form before, and
# that arrives later.
$each->($tokyo, sub { my $t = shift; put($t, 'one', 'first') . '; ' . put($t, 'third', 'third') });
converged(@all);
apart(sub {
	$each->($tokyo, sub { my $t = shift; "update $t set " . form($t, 'other') . ", v = 'late' where $is{$t}{is_one}" });
	$each->($paris, sub { my $t = shift; "delete from $t where $is{$t}{is_one}" });
});
everywhere($_, 'third', 'an older update of the key to another form does not bring it back') for @tables;

# The same with an insert: both insert while they are apart, and one deletes its own.
$each->($tokyo, sub { my $t = shift; "delete from $t" });
converged(@all);
apart(sub {
	$each->($tokyo, sub { my $t = shift; put($t, 'other', 'late') . '; ' . put($t, 'third', 'third') });
	$each->($paris, sub { my $t = shift; put($t, 'one', 'short') . "; delete from $t where $is{$t}{is_one}" });
});
everywhere($_, 'third', 'nor does an older insert') for @tables;

# Newer rows are written, with any form of the key.
apart(sub {
	$each->($paris, sub { my $t = shift; put($t, 'one', 'short') . "; delete from $t where $is{$t}{is_one}" });
	$each->($tokyo, sub { my $t = shift; put($t, 'other', 'newer') });
});
everywhere($_, 'newer third', 'a newer insert comes') for @tables;
same_tables(\@all, @tables);

# Each deletion is remembered once, or also under the stored bytes where another node may have
# another idea of what is equal.
my $hashes = sub {
	my ($table) = @_;
	return on($paris, "select count(v.key_hash) = count(*), count(v.other_hash) = count(*) from $table t, braid.row_version(t.tableoid, t.ctid) v");
};
is(join(' ', grep { $hashes->($_) eq 't|t' } @tables), join(' ', grep { /^(?:pairs|names|indexed|lists|folded_pairs|domains|whole|citexts)$/ } @tables), 'keys whose hashes hang on the node have two');

# A fourth node gets a deletion by a copy, and the older insert afterwards.
$each->($tokyo, sub { my $t = shift; "delete from $t" });
converged(@all);
my $lima = new_node('lima');
on($lima, q[create domain positive as numeric check (value > 0); create type pair as (n numeric, t text)]);
on($lima, q[
	create collation folded (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
	create type folded_pair as (t text collate folded, n int);
	create domain name_of_one as text collate folded;
]) if $has_icu;
on($lima, 'create extension citext') if $has_citext;
on($lima, "create table $_->[0] ($_->[1], v text); " . ($_->[6] // '')) for @cases;
subscribe($lima, $paris, copy_data => 'false');
switch('disable', $lima, $paris);
switch('disable', $paris, $tokyo);
switch('disable', $tokyo, $paris);
$each->($paris, sub { my $t = shift; put($t, 'other', 'late') . '; ' . put($t, 'third', 'third') });
$each->($tokyo, sub { my $t = shift; put($t, 'one', 'short') . "; delete from $t where $is{$t}{is_one}" });
vacuumed($tokyo, @tables);
subscribe($lima, $tokyo);
switch('enable', $lima, $paris);
switch('enable', $paris, $tokyo);
switch('enable', $tokyo, $paris);
push @all, $lima;
converged(@all);
everywhere($_, 'third', 'a deletion that came with a copy') for @tables;

done_testing();
