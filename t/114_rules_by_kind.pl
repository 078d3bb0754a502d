# A rule for one kind of conflict, for each kind and each rule: its effect on a newer change, and on
# an older one. All other kinds are errors meanwhile, so that no other rule can have decided. Then
# the arguments of a function for several blocking rows, and concurrent changes of three nodes.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', conf => "braid.remember_deletions = on\n");
my @both = ($tokyo, $paris);
my @kinds = qw(update_exists update_missing update_deleted delete_missing multiple_unique_conflicts);
my @rules = qw(last_update_wins first_update_wins apply_remote keep_local);
my @tables = map { my $kind = $_; map { "${kind}__$_" } @rules, 'error' } @kinds;

sub on { my ($node, @sql) = @_; $node->safe_psql('postgres', join ";\n", @sql); return; }
sub one { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
sub here { my ($table) = @_; return one($paris, "select coalesce(string_agg(id || v, ' ' order by id), '') from $table"); }

sub history
{
	my ($table) = @_;
	return one($paris, "select coalesce(string_agg(concat_ws(' ', kind, resolution, winner), ', ' order by conflict_id), '') from braid.conflict_history where relation = '$table'::regclass");
}

on_all(join(";\n", map { "create table $_ (id int primary key, a int unique, b int unique, v text)" } @tables, 'asked_about'), @both);
# Rows that only tokyo has.
on($tokyo, map { "insert into $_ values (10, 10, 10, 'here'), (11, 11, 11, 'here')" } @tables);
subscribe($paris, $tokyo, copy_data => 'false');
on($tokyo, map { "insert into $_ select i, i, i, 'old' from unnest('{20,21,30,32}'::int[]) i" } @tables);
caught_up($paris, $tokyo);

sub hold
{
	on($paris, q[select braid.disable_subscription('paris_from_tokyo')]);
	$tokyo->poll_query_until('postgres', 'select not exists (select from pg_stat_replication)') or die;
	return;
}

sub go_on
{
	on($paris, q[select braid.enable_subscription('paris_from_tokyo')]);
	caught_up($paris, $tokyo);
	return;
}

# Changes of tokyo, twice: once before, once after those of paris.
my %tokyo = (
	update_exists => [ "update %s set id = 31, v = 'moved' where id = 30", "update %s set id = 33, v = 'moved' where id = 32" ],
	update_missing => [ "update %s set v = 'changed' where id = 10", "update %s set v = 'changed' where id = 11" ],
	update_deleted => [ "update %s set v = 'changed' where id = 20", "update %s set v = 'changed' where id = 21" ],
	delete_missing => [ 'delete from %s where id = 10', 'delete from %s where id = 11' ],
	multiple_unique_conflicts => [ "insert into %s values (42, 40, 401, 'both')", "insert into %s values (52, 50, 501, 'both')" ],
);
my %paris = (
	update_exists => "insert into %s values (31, 131, 131, 'own'), (33, 133, 133, 'own')",
	update_deleted => 'delete from %s where id in (20, 21)',
	multiple_unique_conflicts => "insert into %s values (40, 40, 400, 'own'), (41, 41, 401, 'own'), (50, 50, 500, 'own'), (51, 51, 501, 'own')",
);
# The rows at the end, if the older change (tokyo's first) and the newer one are applied, or not.
my $all = '20old 21old 30old 32old';
my %rows = (
	update_exists => sub { join ' ', '20old 21old', $_[0] ? '31moved' : '31own', $_[1] ? '33moved' : '33own' },
	update_missing => sub { join ' ', ($_[0] ? '10changed' : ()), ($_[1] ? '11changed' : ()), $all },
	update_deleted => sub { join ' ', ($_[0] ? '20changed' : ()), ($_[1] ? '21changed' : ()), '30old 32old' },
	delete_missing => sub { $all },
	multiple_unique_conflicts => sub { join ' ', $all, $_[0] ? '42both' : '40own 41own', $_[1] ? '52both' : '50own 51own' },
);
# Whether the older change comes, and the newer; where there is no version to compare with, both are
# the newer.
my %comes = (
	last_update_wins => [ 0, 1 ],
	first_update_wins => [ 1, 0 ],
	apply_remote => [ 1, 1 ],
	keep_local => [ 0, 0 ],
);

my @cases = map { my $kind = $_; map { [ $kind, $_, "${kind}__$_" ] } @rules } @kinds;
on($paris, map { ("select braid.set_conflict_resolution('$_->[2]', null, 'error')", "select braid.set_conflict_resolution('$_->[2]', '$_->[0]', '$_->[1]')") } @cases);
hold();
on($tokyo, map { sprintf $tokyo{ $_->[0] }[0], $_->[2] } @cases);
on($paris, map { sprintf $paris{ $_->[0] }, $_->[2] } grep { $paris{ $_->[0] } } @cases);
on($tokyo, map { sprintf $tokyo{ $_->[0] }[1], $_->[2] } @cases);
go_on();
for (@cases)
{
	my ($kind, $rule, $table) = @$_;
	my @comes = @{ $comes{$rule} };
	@comes = (1, 1) if $kind eq 'update_missing' && $rule ne 'keep_local';
	is(here($table), $rows{$kind}->(@comes), "$kind, $rule: the rows");
	my @winners = map { $_ && $kind ne 'delete_missing' ? 'remote' : 'local' } @comes;
	@winners = map { ($_, $_) } @winners if $kind eq 'multiple_unique_conflicts';
	my $said = history($table);
	is($said, join(', ', map { "$kind $rule $_" } @winners), "$kind, $rule: the history");
}

# An error stops the subscription, and nothing of the transaction is there, until the rule is
# another one.
for my $kind (@kinds)
{
	my $table = "${kind}__error";
	on($paris, "select braid.set_conflict_resolution('$table', '$kind', 'error')");
	on($paris, sprintf $paris{$kind}, $table) if $paris{$kind};
	on($tokyo, "begin; insert into $table values (99, 99, 99, 'with it'); " . sprintf($tokyo{$kind}[1], $table) . '; commit');
	$paris->poll_query_until('postgres', q[select state = 'error' from braid.subscription_status]) or die;
	my $status = status($paris, 'paris_from_tokyo');
	like($status->{last_error}, qr/^conflict $kind in table "public\.$table"/, "$kind: an error says which");
	unlike(here($table), qr/with it/, 'and nothing has come');
	on($paris, "select braid.set_conflict_resolution('$table', '$kind', 'keep_local')");
	go_on();
	like(here($table), qr/99with it/, 'until the rule is another one');
}

# A function gets all blocking rows.
on($paris, q[create table asked (kind text, local int, others jsonb)],
	q[create function both_leave(local asked_about, remote asked_about, before asked_about, info braid.conflict) returns asked_about language plpgsql as $$
	  begin
	    insert into public.asked values (info.kind, local.id, info.others);
	    return remote;
	  end $$],
	q[select braid.set_conflict_resolution('asked_about', 'multiple_unique_conflicts', 'function', 'both_leave')],
	q[insert into asked_about values (1, 1, 10, 'one'), (2, 2, 20, 'two'), (3, 3, 30, 'else')]);
on($tokyo, q[insert into asked_about values (4, 1, 20, 'both')]);
caught_up($paris, $tokyo);
is(here('asked_about'), '3else 4both', 'what it has returned is there, the others are not');
my $asked = one($paris, q[select kind || ' ' || local || ' ' || others::text from asked]);
my $row = sub { my ($id, $b, $v) = @_; return qq[[{"a": $id, "b": $b, "v": "$v", "id": $id}]] };
ok($asked eq 'multiple_unique_conflicts 1 ' . $row->(2, 20, 'two') || $asked eq 'multiple_unique_conflicts 2 ' . $row->(1, 10, 'one'), 'it is told of the one, and of the other') or diag($asked);

# Three nodes at one time, in any order: the last by name.
on($paris, 'create table tied (id int primary key, v text)');
my %last = (oslo => 0, quito => 0, rome => 0);
my $put = sub {
	my ($from, $operation, $id) = @_;
	my $lsn = sprintf '0/%X', ++$last{$from};
	my $images = $operation eq 'delete' ? qq["before": {"id": $id}, "before_kind": "key"] : qq["after": {"id": $id, "v": "$from"}];
	on($paris, qq[select braid.ingest('{"operation": "$operation", "transaction": {"lsn": "$lsn", "commit_time": "2024-02-29T00:00:00Z"}, "schema": {"namespace": "public", "table": "tied",
		"columns": [{"name": "id", "type": "int4", "identity": true}, {"name": "v", "type": "text"}]}, $images}', '$from')]);
	return;
};
my @orders = ([qw(oslo quito rome)], [qw(oslo rome quito)], [qw(quito oslo rome)], [qw(quito rome oslo)], [qw(rome oslo quito)], [qw(rome quito oslo)]);
my $id = 0;
for my $does ([ 'insert', 'insert', 'insert', 'rome' ], [ 'update', 'update', 'update', 'rome' ], [ 'insert', 'delete', 'update', 'rome' ], [ 'insert', 'update', 'delete', 'none' ], [ 'delete', 'insert', 'delete', 'none' ])
{
	my %what;
	@what{qw(oslo quito rome)} = @$does;
	my @seen;
	for my $order (@orders)
	{
		$id++;
		$put->($_, $what{$_}, $id) for @$order;
		push @seen, one($paris, "select coalesce((select v from tied where id = $id), 'none')");
	}
	is("@seen", join(' ', ($does->[3]) x @orders), join(', ', @$does[ 0 .. 2 ]) . ' at one time, in all orders');
}

done_testing();
