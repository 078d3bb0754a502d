# A subscription that is disabled stops at once, whatever its processes are doing.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Proxy;
use Test::More;
use Time::HiRes qw(sleep time);

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
on_all('create table item (k int primary key, v text); create table large (k int primary key, v text); create table gate (k int primary key)', $tokyo, $paris);
my $proxy = Proxy->new($tokyo);
my $name = subscribe($paris, $tokyo, copy_data => 'false', dsn => $proxy->connstr('postgres'));
sub at_paris { return $paris->safe_psql('postgres', $_[0]); }
my $watcher = $paris->background_psql('postgres');
my $workers = q[select count(*) from pg_stat_activity where backend_type in ('braid leader', 'braid applier', 'braid copy')];
my $waiting = q[select count(*) from pg_stat_activity where backend_type in ('braid applier', 'braid copy') and wait_event_type = 'Lock'];

# Seconds from the commit of the command until the last of its processes has ended: the best of
# three, because the machine may be busy. It takes a fraction of a second. `busy` brings the
# subscription into the state in which it is stopped, `calm` ends that state.
sub stops
{
	my ($what, $busy, $calm) = @_;
	my $best = 1e9;
	for my $try (1 .. 3)
	{
		my $keeper = $busy->($try);
		at_paris("select braid.disable_subscription('$name')");
		my $from = time;
		sleep 0.02 while $watcher->query_safe($workers) ne '0' && time < $from + 60;
		my $took = time - $from;
		$best = $took if $took < $best;
		$calm->($keeper) if $calm;
		at_paris("select braid.enable_subscription('$name')");
		last if $best < 10;
	}
	cmp_ok($best, '<', 10, sprintf '%s: stops in %.2f s', $what, $best);
	return;
}

my $streaming = sub { wait_until(sub { (status($paris, $name)->{state} // '') eq 'streaming' }, 20) or die 'it does not stream'; return };
stops('with nothing to do', $streaming);

my $row = 0;
stops('while changes arrive', sub {
	$streaming->();
	$row += 2000;
	$tokyo->safe_psql('postgres', 'insert into item values ' . join(', ', map { "($_, 'row')" } $row - 1999 .. $row));
	return;
});

# A session has a row that is to be changed.
my $locked = sub {
	my ($table) = @_;
	my $keeper = $paris->background_psql('postgres');
	$keeper->query_safe("begin; lock table $table in exclusive mode");
	return $keeper;
};
my $let_go = sub { my ($keeper) = @_; $keeper->query_safe('rollback'); $keeper->quit; return };
stops('in a lock wait', sub {
	$streaming->();
	caught_up($paris, $tokyo);
	my $keeper = $locked->('item');
	$tokyo->safe_psql('postgres', "insert into item values (-$_[0], 'waits')");
	wait_until(sub { at_paris($waiting) ne '0' }, 20) or die 'nothing waits';
	return $keeper;
}, $let_go);

# The first rows of a copy wait in a trigger.
$tokyo->safe_psql('postgres', q[insert into large select i, repeat('x', 1000) from generate_series(1, 5000) i]);
$streaming->();
caught_up($paris, $tokyo);
at_paris(q[
	create function wait_at_gate() returns trigger language plpgsql as $$ begin perform pg_advisory_xact_lock_shared(1); return new; end $$;
	create trigger wait_at_gate before insert on large for each row execute function wait_at_gate();
	alter table large enable always trigger wait_at_gate;
]);
stops('during a copy', sub {
	$streaming->();
	my $keeper = $paris->background_psql('postgres');
	$keeper->query_safe('begin; select pg_advisory_xact_lock(1)');
	at_paris("select braid.resync_table('$name', 'large', truncate_first => true)");
	wait_until(sub { at_paris($waiting) ne '0' }, 20) or die 'no copy waits';
	return $keeper;
}, $let_go);
ok(wait_until(sub { at_paris(q[select count(*) from large]) eq '5000' && at_paris(q[select state from braid.subscription_tables where relation = 'large'::regclass]) eq 'ready' }, 30),
	'the copy that was stopped is made again by itself');

# The provider's host accepts connections, and sends nothing.
stops('while it connects to a host that is silent', sub {
	$streaming->();
	$proxy->link('down');
	wait_until(sub { (status($paris, $name)->{state} // '') ne 'streaming' }, 20) or die 'it still streams';
	$proxy->link('hold');
	wait_until(sub { at_paris($workers) ne '0' }, 20) or die 'it does not connect';
	sleep 0.3;
	return;
}, sub { $proxy->link('up'); return });
$streaming->();
caught_up($paris, $tokyo);
is(digest($paris, $_), digest($tokyo, $_), "$_ is whole") for qw(item large);
$watcher->quit;

done_testing();
