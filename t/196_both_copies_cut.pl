# Two nodes copy a table from each other, and both copies are cut off before either has a snapshot
# of the other node: the connections break, or both servers are killed. Rows that a unique key keeps
# apart are written on both meanwhile. Both subscriptions go on by themselves, and the newer rows
# stay on both. The table is new on both nodes, or it was streamed and is created again on both.

use strict;
use warnings;

use Braid;
use Proxy;
use Test::More;

my ($tokyo, $paris) = map { new_node($_, conf => "braid.retry_interval = 200ms\nbraid.retry_interval_max = 2s\n") } qw(tokyo paris);
my @both = ($tokyo, $paris);
sub sql { return $_[0]->safe_psql('postgres', $_[1]) }
sub each_table { my ($table, $condition) = @_; return "select coalesce(bool_and($condition), false) from braid.subscription_table where relation = to_regclass('$table')"; }

my @proxies = map { Proxy->new($_) } @both;
my %name = (
	paris => subscribe($paris, $tokyo, copy_data => 'false', dsn => $proxies[0]->connstr('postgres')),
	tokyo => subscribe($tokyo, $paris, copy_data => 'false', dsn => $proxies[1]->connstr('postgres')),
);

# A table that was dropped and created again is copied, not streamed on.
sub create { my ($table) = @_; return "create table $table (id int primary key, code int unique, v text)"; }

sub make_anew
{
	my ($table) = @_;
	sql($_, "select braid.refresh_subscription('$name{ $_->name }')") for @both;
	$_->poll_query_until('postgres', each_table($table, q[state = 'ready'])) or die for @both;
	sql($tokyo, "insert into $table select k, k, 'first' from generate_series(100, 120) k");
	converged(@both);
	sql($_, "drop table $table; " . create($table)) for @both;
	return;
}

# A copy that has begun, and waits for the snapshot: a transaction is under way at the provider.
sub hold_copies
{
	my ($table, $start) = @_;
	my @under_way = map { $_->background_psql('postgres') } @both;
	$_->query_safe('begin; select pg_current_xact_id()') for @under_way;
	$start->($_) for @both;
	for my $node (@both)
	{
		my ($other) = grep { $_ != $node } @both;
		$node->poll_query_until('postgres', each_table($table, q[state = 'copying' and copy_began_at is not null])) or die;
		# If the table was created again, the copy first waits until the rows that were written here
		# have arrived there.
		$other->poll_query_until('postgres', q[select count(*) = 1 from pg_stat_activity where backend_type = 'walsender' and application_name ~ ' copy$']) or die;
		is(sql($node, each_table($table, 'copy_lsn is null')), 't', "$table: the copy has no position: " . $node->name);
	}
	return @under_way;
}

my %row = (tokyo => 1000, paris => 2000);
for my $how (qw(fresh anew))
{
	for my $cut (qw(connections servers))
	{
		my $table = "${how}_$cut";
		on_all(create($table), @both);
		make_anew($table) if $how eq 'anew';
		my @under_way = hold_copies($table, sub {
			my ($node) = @_;
			my $row = ++$row{ $node->name };
			sql($node, $how eq 'anew' ? "insert into $table values ($row, $row, 'held')" : "select braid.refresh_subscription('$name{ $node->name }')");
		});
		$_->link('down') for @proxies;
		if ($cut eq 'servers')
		{
			$_->stop('immediate') for @both;
			# Sessions of a server that was killed can't be left.
			$_->{run}->kill_kill for @under_way;
			$_->start for @both;
		}
		else
		{
			$_->quit for @under_way;
		}
		sql($tokyo, "insert into $table values (1, 1, 'older'), (10, 10, 'tokyo')");
		sql($paris, "insert into $table values (2, 1, 'newer'), (3, 2, 'older'), (20, 20, 'paris')");
		sql($tokyo, "insert into $table values (4, 2, 'newer')");
		is(sql($_, each_table($table, q[state <> 'ready' and coalesce(copy_lsn, '0/0') = '0/0'])), 't', "$table: there is no copy yet: " . $_->name) for @both;
		$_->link('up') for @proxies;
		for my $node (@both)
		{
			ok(wait_until(sub {
				my $now = status($node, $name{ $node->name })->{state};
				return $now eq 'error' || $now eq 'streaming' && sql($node, each_table($table, q[state = 'ready'])) eq 't';
			}, 120), "$table: the copy comes to an end: " . $node->name);
			streams($node, $name{ $node->name }, "$table: by itself: " . $node->name) or die explain(status($node, $name{ $node->name }));
		}
		converged(@both) for 1 .. 2;
		is(sql($_, "select string_agg(id || ':' || v, ' ' order by id) from $table where id < 100"), '2:newer 4:newer 10:tokyo 20:paris', "$table: the newer rows stay: " . $_->name) for @both;
		same_tables(\@both, $table);
		# Losing rows are deleted on both, and later changes go both ways.
		sql($tokyo, "insert into $table values (1, 101, 'again'); update $table set v = 'changed' where id = 20");
		sql($paris, "update $table set v = 'changed' where id = 10");
		converged(@both);
		is(sql($_, "select string_agg(id || ':' || v, ' ' order by id) from $table where id < 100"), '1:again 2:newer 4:newer 10:changed 20:changed', "$table: it goes on: " . $_->name) for @both;
	}
}

# A copy that has failed, until a person cures the cause, keeps the rows that are written here
# meanwhile.
on_all('create table mended (id int primary key, v text)', @both);
sql($tokyo, "alter table mended add check (v <> 'wrong')");
disable($paris, $name{paris});
my $under_way = $paris->background_psql('postgres');
$under_way->query_safe('begin; select pg_current_xact_id()');
sql($tokyo, "select braid.refresh_subscription('$name{tokyo}')");
$tokyo->poll_query_until('postgres', each_table('mended', q[state = 'copying'])) or die;
sql($paris, q[insert into mended values (1, 'wrong'), (2, 'paris')]);
$under_way->quit;
ok(wait_until(sub { status($tokyo, $name{tokyo})->{state} eq 'error' }, 60), 'a row that may not be here stops the copy');
sql($tokyo, q[insert into mended values (3, 'tokyo')]);
is(sql($tokyo, q[select copy_error_sqlstate from braid.subscription_table where relation = 'mended'::regclass]), '23514', 'as the view says');
sql($paris, q[update mended set v = 'right' where id = 1]);
# The changes that were held back have the row as it was.
sql($tokyo, 'alter table mended drop constraint mended_v_check');
sql($tokyo, "select braid.enable_subscription('$name{tokyo}')");
ok(wait_until(sub { sql($tokyo, each_table('mended', q[state = 'ready'])) eq 't' }, 60), 'once the row is right the copy goes on');
caught_up($tokyo, $paris);
is(sql($tokyo, q[select string_agg(id || ':' || v, ' ' order by id) from mended]), '1:right 2:paris 3:tokyo', 'beside what was written here') or diag(explain(status($tokyo, $name{tokyo})));

done_testing();
