# braid.compare and braid.repair use the versions of rows, not those of the commits that brought
# them: for rows that were applied in batches, that an older change has added to, and that were
# copied. Called at either node, they decide alike, and the row keeps the version that won.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep);

my $conf = "braid.appliers_per_subscription = 1\n";
my ($tokyo, $paris, $lima, $oslo) = my @nodes = map { new_node($_, conf => $conf, publication => 'for all tables with (publish_via_partition_root)') } qw(tokyo paris lima oslo);
on_all(q[
	create role clerk;
	create table item (id int primary key, v text);
	create table parts (id int primary key, v text) partition by range (id);
	create table parts_all partition of parts default;
	create table gate (k int primary key, v int);
	create table filler (k int primary key, v int);
	create table sum (id int primary key, n int, v text);
	alter table sum replica identity full;
	alter table parts owner to clerk;
	alter table parts_all owner to clerk;
], @nodes);
my %mode = (paris => 'batch', lima => 'aggregate');
for my $node ($paris, $lima)
{
	subscribe($node, $tokyo, apply_mode => "'$mode{ $node->name }'");
	subscribe($tokyo, $node, copy_data => 'false');
}

sub on { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }

sub compare { my ($node, $from, $table) = @_; return (split /\|/, on($node, "call braid.compare('${\ $node->name}_from_${\ $from->name}', '$table')"))[1]; }
sub repair
{
	my ($node, $from, $table) = @_;
	my (undef, @counts) = split /\|/, on($node, "call braid.repair('${\ $node->name}_from_${\ $from->name}', '$table')");
	return "@counts";
}
sub version { my ($node, $table, $id) = @_; return on($node, "select t.v, v.committed_at, v.node from $table t, braid.row_version(t.tableoid, t.ctid) v where id = $id"); }
sub moment { sleep 0.02; my $at = on($tokyo, 'select clock_timestamp()'); sleep 0.02; return $at; }

on($tokyo, 'insert into gate values (1, 0)');
converged($tokyo, $paris, $lima);
for my $node ($paris, $lima)
{
	my $name = $node->name;
	for my $table (qw(item parts))
	{
		my ($early, $late, $older) = map { $_ + ($name eq 'paris' ? 0 : 100) } 1, 2, 3;
		on($tokyo, "insert into $table values ($_, 'first')") for $early, $late, $older;
		converged($tokyo, $paris, $lima);
		# The next transaction waits for this session, so all that follows is one batch.
		my $gate = $node->background_psql('postgres', on_error_stop => 1);
		$gate->query_safe('begin; select from gate where k = 1 for update');
		on($tokyo, 'update gate set v = v + 1');
		ok(wait_until(sub { on($node, q[select count(*) from pg_stat_activity where backend_type = 'braid applier' and wait_event_type = 'Lock']) > 0 }, 30), 'an applier waits');
		my $before = moment();
		on($tokyo, "update $table set v = 'early' where id in ($early, $older)");
		my $between = moment();
		on($tokyo, "update $table set v = 'late' where id = $late");
		on($tokyo, join ' ', map { "insert into filler select coalesce(max(k), 0) + 1, 0 from filler;" } 1 .. 20);
		my $lsn = on($tokyo, 'select pg_current_wal_flush_lsn()');
		ok(wait_until(sub { on($node, "select received_lsn >= '$lsn' from braid.subscription_status where name = '${name}_from_tokyo'") eq 't' }, 30), 'all is received');
		$gate->query_safe('commit');
		$gate->quit;
		converged($tokyo, $paris, $lima);
		is(on($node, "select count(distinct xmin::text), bool_and(pg_xact_commit_timestamp(xmin) > '$between') from $table where id in ($early, $late, $older)"), '1|t', "$name: $table has one batch, which is later than some of its rows");
		my $true = version($tokyo, $table, $older);
		is(version($node, $table, $older), $true, 'these have the version of the change that wrote them');

		# One is newer than the row of the batch and older than the batch, the other is older than
		# both.
		write_by_hand($tokyo, "update $table set v = 'newer' where id = $early", "'$between'");
		write_by_hand($tokyo, "update $table set v = 'older' where id = $older", "'$before'");
		is(compare($node, $tokyo, $table), 2, "$name: two rows differ");
		is(on($node, "select string_agg(key->>'id' || ' ' || (local_timestamp between '$before' and '$between')::text || ' ' || (provider_timestamp > local_timestamp)::text, ', ' order by key->>'id') from braid.differences where relation = '$table'::regclass"),
			"$early true true, $older true false", 'with their versions');
		is(compare($tokyo, $node, $table), 2, 'tokyo sees the same');
		is(on($tokyo, "select string_agg(key->>'id' || ' ' || (provider_timestamp between '$before' and '$between')::text || ' ' || (provider_timestamp > local_timestamp)::text, ', ' order by key->>'id') from braid.differences where relation = '$table'::regclass and subscription = 'tokyo_from_$name'"),
			"$early true false, $older true true", 'from its side');
		my $newer = version($tokyo, $table, $early);
		is(repair($node, $tokyo, $table), '1 1', "$name takes what is newer at tokyo");
		is(version($node, $table, $early), $newer, 'with its version');
		is(repair($tokyo, $node, $table), '1 1', "and tokyo what is newer at $name");
		is(version($tokyo, $table, $older), $true, 'with the version that it has had');
		is(compare($node, $tokyo, $table), 0, 'nothing differs any more');
		is(on($_, "select v from $table where id = $early"), 'newer', 'the newer one at ' . $_->name) for $tokyo, $node;
		# The third node has not been in need of it; it gets the same.
		my ($other) = grep { $_ != $node } $paris, $lima;
		compare($other, $tokyo, $table);
		is(repair($other, $tokyo, $table), '1 0', $other->name . ' too');
		converged($tokyo, $paris, $lima);
		same_tables([ $tokyo, $paris, $lima ], $table);
	}
}

# An older change has added to a row, and is the last to have written it.
on_all(q[select braid.set_column_rule('sum', 'n', 'delta')], $tokyo, $paris);
on($tokyo, q[insert into sum values (1, 0, 'first')]);
converged($tokyo, $paris, $lima);
disable($paris, 'paris_from_tokyo');
on($tokyo, q[update sum set n = n + 1, v = 'loses' where id = 1]);
my $between = moment();
on($paris, q[update sum set n = n + 10, v = 'wins' where id = 1]);
on($paris, q[select braid.enable_subscription('paris_from_tokyo')]);
converged($tokyo, $paris);
is(on($paris, q[select n || v from sum]), '11wins', 'added up');
is(on($paris, "select pg_xact_commit_timestamp(xmin) < '$between' from sum"), 't', 'by the older one');
write_by_hand($tokyo, q[update sum set v = 'by hand'], "'$between'");
compare($paris, $tokyo, 'sum');
is(repair($paris, $tokyo, 'sum'), '0 1', 'the row that was made of two is the newer one');
compare($tokyo, $paris, 'sum');
is(repair($tokyo, $paris, 'sum'), '1 0', 'everywhere');
is(version($tokyo, 'sum', 1), version($paris, 'sum', 1), 'with its version');

# Oslo gets changes of paris already, so its copy from tokyo comes with versions.
subscribe($oslo, $paris, copy_data => 'false');
subscribe($oslo, $tokyo);
subscribe($tokyo, $oslo, copy_data => 'false');
converged(@nodes);
is(version($oslo, $_, 1), version($tokyo, $_, 1), "$_: a copied row has the version that it had") for qw(item parts);
for my $table (qw(item parts))
{
	my $true = version($oslo, $table, 2);
	write_by_hand($tokyo, "update $table set v = 'older' where id = 2", q[now() - interval '50 minutes']);
	write_by_hand($tokyo, "update $table set v = 'newest' where id = 1", 'now()');
	is(compare($oslo, $tokyo, $table), 2, "$table: two rows differ from copied ones");
	is(repair($oslo, $tokyo, $table), '1 1', 'oslo takes the newer one');
	is(version($oslo, $table, 1), version($tokyo, $table, 1), 'with its version');
	is(compare($tokyo, $oslo, $table), 1, 'the other is to be repaired at tokyo');
	is(repair($tokyo, $oslo, $table), '1 0', 'and is');
	is(version($tokyo, $table, 2), $true, 'with the version that it has had');
	same_tables([ $tokyo, $oslo ], $table);
}

done_testing();
