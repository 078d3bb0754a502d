# split_transactions_above: larger transactions are committed in chunks. Each chunk is as large as
# allowed, has the version of its transaction, and takes effect once, whatever interrupts it.
# Nothing overtakes it, and the views show the progress.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo', publication => '', conf => "logical_decoding_work_mem = 64kB\n");
my $paris = new_node('paris', conf => "braid.apply_buffer_size = 1MB\n");
my $oslo = new_node('oslo', publication => '', conf => "braid.apply_buffer_size = 1MB\n");
my @nodes = ($tokyo, $paris, $oslo);
on_all(q[
	create table bulk (id int primary key, n int not null default 0, v text);
	create table keyed (id int primary key, k int unique, v text);
	create table gone (id int primary key);
	create table wide (id int primary key, n int, t text);
	create table extra (id int primary key, v text);
	create table small (id int primary key, n int);
], @nodes);
$tokyo->safe_psql('postgres', q[
	create publication braid for table bulk, keyed, gone, wide, small;
	insert into bulk select i from generate_series(1, 1000) i;
	insert into gone select i from generate_series(1, 50) i;
	alter table wide alter t set storage external;
	insert into wide select i, 0, repeat(md5(i::text), 100) from generate_series(1, 50) i;
	insert into small select i, 0 from generate_series(1, 10) i;
]);
my $name = subscribe($paris, $tokyo, split_transactions_above => 100);
my $chain = subscribe($oslo, $paris, origin => "'any'", split_transactions_above => 70);

sub detail
{
	my ($column) = @_;
	return $paris->safe_psql('postgres', "select $column from braid.subscription_detail where name = '$name'");
}

sub pieces
{
	my ($node) = @_;
	return $node->safe_psql('postgres', 'select coalesce(sum(pieces), 0) from braid.dependency_stats');
}

# How many transactions of this node's wrote the rows, and with which commit timestamps.
sub written_by
{
	my ($node, $table, $where) = @_;
	return $node->safe_psql('postgres', "select count(distinct xmin::text), string_agg(distinct pg_xact_commit_timestamp(xmin)::text, ',') from $table where $where");
}

# A transaction that changes rows in the order of their keys, so that it is known which chunk has
# which rows.
sub in_order
{
	my ($first, $last, $set, $before) = @_;
	$tokyo->safe_psql('postgres', sprintf 'do $$ begin %s for i in %d..%d loop update bulk set %s where id = i; end loop; end $$', $before // '', $first, $last, $set);
	return;
}

sub stopped
{
	my ($what) = @_;
	ok(wait_until(sub { status($paris, $name)->{state} eq 'error' }, 30), "stopped: $what");
	return status($paris, $name);
}
is(detail('split_transactions_above'), '100', 'the option is shown');

# As many changes as allowed are one chunk, one more makes another.
$tokyo->safe_psql('postgres', 'insert into bulk select i from generate_series(2001, 2100) i');
$tokyo->safe_psql('postgres', 'insert into bulk select i from generate_series(3001, 3101) i');
$tokyo->safe_psql('postgres', 'insert into bulk select i from generate_series(4001, 5000) i');
caught_up($paris, $tokyo);
for ([ 'id between 2001 and 2100', 1 ], [ 'id between 3001 and 3101', 2 ], [ 'id between 4001 and 5000', 10 ])
{
	my ($where, $count) = @$_;
	my ($time) = written_by($tokyo, 'bulk', $where) =~ /\|(.*)/;
	is(written_by($paris, 'bulk', $where), "$count|$time", "$where: $count local transactions with the source's time");
}
is(pieces($paris), 1 + 9, 'pieces are counted, but for the last');
is($paris->safe_psql('postgres', 'select count(*) from braid.split_progress'), '0', 'nothing is left of them');
is(detail('half_applied_lsn is null and half_applied_changes is null'), 't', 'nor shown');

# Everything that a transaction can do with its own rows, across chunks; and a chain, in which
# versions decide.
$tokyo->safe_psql('postgres', q[
	begin;
	update bulk set n = n + 1 where id <= 250;
	insert into keyed select i, i, 'a' from generate_series(1, 300) i;
	update keyed set id = id + 10000 where id <= 150;
	savepoint s;
	delete from keyed;
	rollback to s;
	update keyed set v = 'b' where id > 100;
	delete from keyed where id % 3 = 0;
	insert into keyed select i, 1000 + i, 'again' from generate_series(1, 120) i;
	truncate gone;
	insert into gone select i from generate_series(1, 130) i;
	delete from gone where id <= 20;
	update wide set n = 1;
	update wide set n = 2, t = t || 'x' where id <= 10;
	update wide set n = n + 1;
	update bulk set n = n + 1 where id <= 250;
	update bulk set id = -id where id <= 120;
	update bulk set n = n + 1 where id < 0;
	commit;
]);
$tokyo->safe_psql('postgres', 'update small set n = n + 1');
caught_up($paris, $tokyo);
caught_up($oslo, $paris);
my @tables = qw(bulk keyed gone wide small);
same_tables(\@nodes, @tables);
is($_->safe_psql('postgres', 'select count(*) from braid.conflict_history'), '0', 'without a conflict on ' . $_->name) for $paris, $oslo;
cmp_ok(pieces($oslo), '>', 20, 'pieces at the end of the chain too');

# A lock holds it back in the sixth chunk: earlier chunks are visible and reported, later ones are
# not applied.
my $lock = $paris->background_psql('postgres');
$lock->query_safe('begin; select from bulk where id = 750 for update');
in_order(201, 1000, 'n = n + 1000');
my $before = end_of_commits($tokyo);
$tokyo->safe_psql('postgres', 'update small set n = n + 1');
my $half = sub { detail('half_applied_changes') eq $_[0] };
ok(wait_until(sub { $half->(500) }, 20), 'five pieces are committed');
is($paris->safe_psql('postgres', 'select count(*) from bulk where n >= 1000'), '500', 'and seen');
becomes($paris, "select count(*) from braid.apply_workers where state = 'waiting for a dependency' and commit_lsn > '$before'", '1', 'an applier has the next transaction, and waits');
is($paris->safe_psql('postgres', 'select max(n) from small'), '1', 'so it is not applied');
is(detail('applied_lsn <= half_applied_lsn'), 't', 'nothing of it is confirmed');
is($tokyo->safe_psql('postgres', "select replay_lsn < pg_current_wal_lsn() from pg_stat_replication where application_name = '$name'"), 't', 'at the provider either');
for (q[publications => '{braid}'], q[origin => 'any'])
{
	my (undef, undef, $error) = $paris->psql('postgres', "select braid.alter_subscription('$name', $_)");
	like($error, qr/while a part of a transaction is applied/, "refused: $_");
}
$tokyo->safe_psql('postgres', 'alter publication braid set table bulk where (id > 900), keyed, gone, wide, small');

# Whatever else is changed, and whichever process dies: it goes on where it was.
for my $change (q[apply_mode => 'batch'], q[commit_order => 'relaxed'], q[streaming => 'on'], q[split_transactions_above => 30])
{
	my $starts = () = slurp_file($paris->logfile) =~ /after 5[0-9]0 changes/g;
	$paris->safe_psql('postgres', "select braid.alter_subscription('$name', $change)");
	ok(wait_until(sub { (() = slurp_file($paris->logfile) =~ /after 5[0-9]0 changes/g) > $starts }, 20), "goes on after $change");
}
ok(wait_until(sub { $half->(530) }, 20), 'in other pieces');
ok(kill_process($paris, wait_for_worker($paris, 'braid applier')), 'the server is back');
eval { $lock->quit };
$lock = $paris->background_psql('postgres');
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select count(*) from bulk where id between 201 and 1000 and n between 1000 and 1999'), '800', 'each row was changed once');
same_tables([ $tokyo, $paris ], @tables);
is($paris->safe_psql('postgres', 'select count(*) from braid.split_progress'), '0', 'it is done');

# Switched off by 0: the rest is one chunk.
$tokyo->safe_psql('postgres', 'alter publication braid set table bulk, keyed, gone, wide, small');
$lock->query_safe('begin; select from bulk where id = 950 for update');
in_order(901, 1000, 'n = n + 1');
ok(wait_until(sub { $half->(30) }, 20), 'a first piece is committed');
$paris->safe_psql('postgres', "select braid.alter_subscription('$name', split_transactions_above => 0, apply_mode => 'parallel', commit_order => 'source')");
is(detail('split_transactions_above is null'), 't', '0 is off');
ok(wait_until(sub { slurp_file($paris->logfile) =~ /after 30 changes/ }, 20), 'it goes on');
$lock->query_safe('commit');
caught_up($paris, $tokyo);
is((split /\|/, written_by($paris, 'bulk', 'id between 901 and 1000'))[0], '2', 'and the rest is one transaction');
same_tables([ $tokyo, $paris ], @tables);
$paris->safe_psql('postgres', "select braid.alter_subscription('$name', split_transactions_above => 100)");

# A table that is left out first and copied then: its changes count all the same.
$tokyo->safe_psql('postgres', 'alter publication braid add table extra');
$lock->query_safe('begin; select from bulk where id = 950 for update');
in_order(801, 1000, 'n = n + 1', "insert into extra select i, 'of the transaction' from generate_series(1, 140) i;");
ok(wait_until(sub { $half->(200) }, 20), 'what is left out is counted');
$paris->safe_psql('postgres', "select braid.refresh_subscription('$name')");
ok(wait_until(sub { $paris->safe_psql('postgres', 'select count(*) from extra') == 140 }, 30), 'the table is copied meanwhile');
$paris->safe_psql('postgres', "select braid.alter_subscription('$name', apply_mode => 'aggregate')");
ok(wait_until(sub { slurp_file($paris->logfile) =~ /after 200 changes/ }, 20), 'the transaction goes on after what was counted');
$lock->query_safe('commit');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], @tables, 'extra');

# A row blocks a row of a later chunk under another unique key. That chunk is tried again, earlier
# ones are not.
$paris->safe_psql('postgres', q[insert into keyed values (-5, 20300, 'in the way')]);
$tokyo->safe_psql('postgres', q[insert into keyed select i, i, 'new' from generate_series(20001, 20400) i]);
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select count(*) from keyed where id > 20000'), '400', 'all of a transaction with a unique conflict is there');
same_tables([ $tokyo, $paris ], 'keyed');
is((split /\|/, written_by($paris, 'keyed', 'id between 20001 and 20200'))[0], '2', 'two pieces were not touched');

# A later chunk fails.
$paris->safe_psql('postgres', 'alter table bulk add constraint low check (n < 100000 or id <> 350)');
my $failing = sub {
	in_order(201, 600, 'n = n + 200000');
	my $status = stopped('a later piece');
	like($status->{last_error}, qr/low/, 'the error is said');
	like(detail('error_detail'), qr/The first 100 changes of the transaction are committed here\./, 'and how far it came');
	is(detail('half_applied_changes'), '100', 'the view too');
	return $status;
};
$failing->();
isnt($paris->psql('postgres', "select braid.alter_subscription('$name', publications => '{braid}')"), 0, 'publications stay as they are');
$paris->safe_psql('postgres', "alter table bulk drop constraint low; select braid.enable_subscription('$name')");
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'bulk');
$tokyo->safe_psql('postgres', 'update bulk set n = 0 where id between 201 and 600');
caught_up($paris, $tokyo);
$paris->safe_psql('postgres', 'alter table bulk add constraint low check (n < 100000 or id <> 350)');
my $status = $failing->();
$tokyo->safe_psql('postgres', 'update small set n = n + 1');
$paris->safe_psql('postgres', "select braid.skip_transaction('$name', '$status->{error_lsn}')");
caught_up($paris, $tokyo);
like(slurp_file($paris->logfile), qr/has skipped all but the first 100 changes of the transaction/, 'what skipping left is in the log');
is($paris->safe_psql('postgres', 'select count(*) from bulk where n >= 200000'), '100', 'the first piece stays, the rest is left out');
same_tables([ $tokyo, $paris ], 'small');
is($paris->safe_psql('postgres', 'select count(*) from braid.split_progress'), '0', 'it is over');
$paris->safe_psql('postgres', "alter table bulk drop constraint low; update bulk set n = 200000 where id between 201 and 600");
$tokyo->safe_psql('postgres', 'update bulk set n = 7 where id between 201 and 600');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], @tables);

# Larger than the buffer: applied as it comes, and again from the provider when something is in its
# way.
for my $streaming (qw(off on))
{
	$paris->safe_psql('postgres', "select braid.alter_subscription('$name', streaming => '$streaming', split_transactions_above => 700)");
	my $base = $streaming eq 'on' ? 100000 : 200000;
	$paris->safe_psql('postgres', "insert into keyed values (-6, $base + 4000, 'in the way')");
	$tokyo->safe_psql('postgres', qq[
		begin;
		insert into keyed select i, i, repeat('large', 40) from generate_series($base + 1, $base + 6000) i;
		savepoint s;
		delete from keyed where id > $base;
		rollback to s;
		update keyed set v = v || 'r' where id between $base + 3001 and $base + 6000;
		delete from keyed where id between $base + 5001 and $base + 6000;
		commit;
	]);
	$tokyo->safe_psql('postgres', 'update small set n = n + 1');
	caught_up($paris, $tokyo);
	same_tables([ $tokyo, $paris ], 'keyed', 'small');
	is((split /\|/, written_by($paris, 'keyed', "id between $base + 1 and $base + 2800"))[0], '4', "pieces of one that does not fit, streaming $streaming");
}
my $large = $paris->safe_psql('postgres', 'select large from braid.dependency_stats');
cmp_ok($large, '>', 0, 'they did not fit');
caught_up($oslo, $paris);
same_tables([ $paris, $oslo ], @tables);

# Changes that come in another form than before are not skipped by their number.
$lock->query_safe('begin; select from bulk where id = 950 for update');
$paris->safe_psql('postgres', "select braid.alter_subscription('$name', split_transactions_above => 20)");
my $doubtful = sub {
	my ($column) = @_;
	in_order(901, 1000, 'n = n + 1');
	ok(wait_until(sub { $half->(40) }, 20), 'two pieces are committed');
	$paris->safe_psql('postgres', "update braid.split_progress set $column = $column - 1; select braid.alter_subscription('$name', apply_mode => case apply_mode when 'batch' then 'parallel' else 'batch' end) from braid.subscription");
	my $stop = stopped("another $column");
	$lock->query_safe('commit; begin; select from bulk where id = 950 for update');
	return $stop;
};
for (qw(digest commit_lsn))
{
	$status = $doubtful->($_);
	like($status->{last_error}, $_ eq 'digest' ? qr/came otherwise than before/ : qr/is no longer available/, "the error is said, $_");
	$paris->safe_psql('postgres', "update braid.split_progress set $_ = $_ + 1; select braid.enable_subscription('$name')");
	$lock->query_safe('commit');
	caught_up($paris, $tokyo);
	same_tables([ $tokyo, $paris ], 'bulk');
	$lock->query_safe('begin; select from bulk where id = 950 for update');
}
$status = $doubtful->('commit_lsn');
$lock->query_safe('commit');
$paris->safe_psql('postgres', "select braid.skip_transaction('$name', '$status->{error_lsn}')");
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select count(*) from braid.split_progress'), '0', 'the row of what does not come is gone');
$lock->quit;

done_testing();
