# A batch is one commit, but its rows have the versions of the provider's transactions. A third
# node's change that is newer than a row of the batch and older than the batch wins at every node;
# one that is older than both loses. For updates and deletes, before and after a rewrite of the
# table and a restart.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# Dead rows are what is known of deletions: nothing may remove them.
my $conf = "autovacuum = off\nbraid.appliers_per_subscription = 1\n";
my ($tokyo, $paris, $lima) = map { new_node($_, conf => $conf) } qw(tokyo paris lima);
my @nodes = ($tokyo, $paris, $lima);

on_all(q[
	create table changed (k int primary key, v text);
	create table named (a text, b numeric, v text, primary key (a, b));
	create table gone (k int primary key, v text);
	create table moved (k int primary key, v text);
	create table gate (k int primary key, v int);
	create table filler (k int primary key, v int);
], @nodes);
for my $subscriber (@nodes)
{
	for my $provider (grep { $_ != $subscriber } @nodes)
	{
		subscribe($subscriber, $provider, $subscriber == $paris ? (apply_mode => q('batch')) : (), copy_data => 'false');
	}
}

sub value { return $_[0]->safe_psql('postgres', $_[1]); }

# Wait until a node has received, applied or not, what another has committed.
sub has_received
{
	my ($subscriber, $provider) = @_;
	my $lsn = value($provider, 'select pg_current_wal_flush_lsn()');
	my $name = $subscriber->name . '_from_' . $provider->name;
	ok(wait_until(sub { value($subscriber, "select received_lsn >= '$lsn' from braid.subscription_status where name = '$name'") eq 't' }, 30),
		"$name has received all") or diag(value($subscriber, "select received_lsn, '$lsn' from braid.subscription_status where name = '$name'"));
	return;
}

sub switch
{
	my ($how, $subscriber, $provider) = @_;
	my $name = $subscriber->name . '_from_' . $provider->name;
	value($subscriber, "select braid.${how}_subscription('$name')");
	value($provider, 'select 1');
	if ($how eq 'disable')
	{
		$provider->poll_query_until('postgres', "select coalesce(not bool_or(active), true) from pg_replication_slots where slot_name like '%${\ $subscriber->name}%'")
		  or die "$name is still active";
	}
	return;
}

# Each change in a transaction of its own.
sub apart { return join "\n", map { "$_;" } @_; }

my $round = 0;
sub round
{
	my ($what, $between) = @_;
	$round++;
	my $base = $round * 100;
	my @early = map { $base + $_ } 1 .. 5;
	my @late = map { $base + $_ } 11 .. 15;
	my @never = map { $base + $_ } 21 .. 25;
	value($tokyo, apart(map { ("insert into changed values ($_, 'first')", "insert into gone values ($_, 'first')", "insert into moved values ($_, 'first')", "insert into named values ('n $_', $_.50, 'first')") } @early, @late, @never));
	value($tokyo, "insert into gate values ($round, 0)");
	converged(@nodes);

	# Nobody but tokyo sees what lima does until later, and lima does not see tokyo's.
	switch('disable', $paris, $lima);
	switch('disable', $lima, $tokyo);
	# The next transaction at paris waits for this session, so all that follows is one batch.
	my $gate = $paris->background_psql('postgres', on_error_stop => 1);
	$gate->query_safe("begin; select * from gate where k = $round for update");
	value($tokyo, "update gate set v = 1 where k = $round");
	ok(wait_until(sub { value($paris, q[select count(*) from pg_stat_activity where backend_type = 'braid applier' and wait_event_type = 'Lock']) > 0 }, 30),
		'an applier waits');
	my $change = sub {
		my ($who, @rows) = @_;
		return map { ("update changed set v = '$who' where k = $_", "update named set v = '$who' where a = 'n $_'") } @rows;
	};
	# Older than the batch's rows.
	value($lima, apart($change->('lima early', @early), map { "update gone set v = 'lima early' where k = $_" } @early));
	# The rows of the batch.
	value($tokyo, apart($change->('tokyo', @early, @late, @never), map { ("delete from gone where k = $_", "update moved set k = k + 5000 where k = $_") } @early, @late, @never));
	# Newer than they.
	value($lima, apart($change->('lima late', @late), map { ("update gone set v = 'lima late' where k = $_", "update moved set v = 'lima late' where k = $_") } @late));
	# And what makes the batch newer than that.
	value($tokyo, apart(map { "insert into filler values ($_, 0)" } $base .. $base + 20));
	has_received($paris, $tokyo);
	my $batches = value($paris, 'select count(*) from braid.batch');
	$gate->query_safe('commit');
	$gate->quit;
	caught_up($paris, $tokyo);
	cmp_ok(value($paris, 'select count(*) from braid.batch'), '>', $batches, "$what: there was a batch");
	is(value($paris, "select count(distinct xmin::text) from (select xmin from changed where v = 'tokyo' and k between $base and $base + 99 union all select xmin from filler where k between $base and $base + 99) r"), '1',
		'it holds old rows and new ones');
	is(value($paris, "select count(*) from gone where k between $base and $base + 99"), '0', 'and deletions');

	$between->();
	switch('enable', $paris, $lima);
	switch('enable', $lima, $tokyo);
	converged(@nodes);
	my $where = "k between $base and $base + 99";
	for my $node (@nodes)
	{
		my $at = $node->name;
		for my $table (qw(changed))
		{
			is(value($node, "select string_agg(distinct v, ',' order by v) from $table where $where and k in (" . join(',', @early, @never) . ')'), 'tokyo',
				"$what: an older change of a third node loses: $table, $at");
			is(value($node, "select string_agg(distinct v, ',' order by v) from $table where k in (" . join(',', @late) . ')'), 'lima late',
				"$what: a newer one wins: $table, $at");
		}
		is(value($node, "select string_agg(distinct v, ',' order by v), count(*) from named where b in (" . join(',', map { "$_.5" } @late) . ')'), 'lima late|5',
			"$what: with a key of text and number, $at");
		is(value($node, "select string_agg(k || v, ',' order by k) from gone where $where"), join(',', map { "${_}lima late" } @late),
			"$what: deletions lose and win, $at");
		is(value($node, "select string_agg(k || v, ',' order by k) from moved where k - 5000 between $base and $base + 99 or $where"),
			join(',', (map { "${_}lima late" } @late), (map { $_ + 5000 . 'first' } @early, @late, @never)), "$what: so do rows that leave their key, $at");
	}
	return;
}

round('as it is', sub { });
round('table rewritten', sub { value($paris, 'vacuum full changed'); value($paris, 'vacuum full named'); });
round('server restarted', sub { $paris->restart; });
round('rewritten and restarted', sub { value($paris, 'cluster changed using changed_pkey'); $paris->stop('immediate'); $paris->start; });
same_tables(\@nodes, qw(changed named gone moved filler));
is(value($paris, q[select count(*) from braid.subscription_status where last_error <> '']), '0', 'no error on the way');

done_testing();
