# The lag is never shown as smaller than it is known to be, and as unknown if it is: while a rate
# limit delays the stream, on a link that is silent, behind a lock. An idle provider sends something
# every few seconds.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Proxy;
use Test::More;
use Time::HiRes qw(sleep time);

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '');
on_all('create table item (id int primary key generated always as identity, v text)', $tokyo, $paris);
my $proxy = Proxy->new($tokyo);
my $name = subscribe($paris, $tokyo, dsn => $proxy->connstr('postgres'));
sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
# Bytes, seconds, and how many seconds ago that was known; '' for null.
sub lag
{
	my %lag;
	@lag{qw(bytes seconds age)} = split /\|/,
	  sql($paris, 'select lag_bytes, extract(epoch from lag_time), extract(epoch from clock_timestamp() - lag_measured_at) from braid.subscription_status'), -1;
	note(join ' ', map { "$_=$lag{$_}" } sort keys %lag);
	return \%lag;
}
# As the provider has it.
sub behind { return sql($tokyo, 'select pg_current_wal_flush_lsn() - replay_lsn from pg_stat_replication'); }
sub write_items { return sql($tokyo, "do \$\$ begin for i in 1 .. $_[0] loop insert into item (v) values (repeat('x', 500)); commit; end loop; end \$\$"); }
sub none { return wait_until(sub { my $lag = lag(); $lag->{bytes} eq '0' && $lag->{seconds} == 0 }, 20); }
my $asking = q[select count(*) from pg_stat_activity where application_name like '% lag'];

write_items(1);
caught_up($paris, $tokyo);
ok(none(), 'nothing is left to apply');
for (1 .. 6)
{
	sleep 1;
	my $lag = lag();
	ok($lag->{bytes} eq '0' && $lag->{seconds} == 0 && $lag->{age} < 5, 'nor is it while nothing happens, which is known');
}
is(sql($tokyo, $asking), '0', 'without another connection');

# With the rate limit, the provider's bytes are left unread.
sql($paris, "select braid.set_rate_limit('$name', rows_per_second => 20)");
my $start = time;
write_items(2000);
ok(wait_until(sub { lag()->{bytes} > behind() / 2 }, 15), 'what is held back is lag');
for my $round (1 .. 3)
{
	sleep 1;
	my $at = behind();
	my $lag = lag();
	cmp_ok($lag->{bytes}, '>', $at * 0.9, 'as much as the provider sees');
	cmp_ok($lag->{age}, '<', 5, 'known a moment ago');
	cmp_ok($lag->{seconds}, '>', 0.5 * (time - $start) - 1, 'and as old');
}
is(sql($tokyo, $asking), '1', 'the leader asks by another connection');
sql($paris, "select braid.set_rate_limit('$name')");
caught_up($paris, $tokyo);
ok(none(), 'none when all is applied');
ok(wait_until(sub { sql($tokyo, $asking) eq '0' }, 10), 'and the other connection is closed');

# Behind a lock.
my $session = $paris->background_psql('postgres', on_error_die => 1);
$session->query_safe('begin; lock table item');
write_items(1000);
my $written = behind();
ok(wait_until(sub { lag()->{bytes} > $written * 0.9 }, 15), 'what waits for a lock is lag');
sleep 6;
cmp_ok(lag()->{age}, '<', 5, 'which is known');
$session->query_safe('commit');
$session->quit;
caught_up($paris, $tokyo);
ok(none(), 'none when it is applied');

# A link that passes nothing on, long before wal_receiver_timeout.
$proxy->link('hold');
my $silent = time;
write_items(100);
my @early = map { sleep 1; lag() } 1 .. 3;
sleep 4;
my $lag = lag();
isnt($lag->{bytes}, '0', 'of a provider that is not heard nobody knows that nothing is missing');
cmp_ok($lag->{seconds}, '>', time - $silent - 3, 'the age of what is here is counted from when it was heard');
cmp_ok($lag->{age}, '>', 5, 'and when that was is shown');
is(sql($paris, q[select state from braid.subscription_status]), 'streaming', 'long before it is given up');
sleep 3;
cmp_ok(lag()->{seconds} - $lag->{seconds}, '>', 2.5, 'it grows');
$proxy->link('up');
caught_up($paris, $tokyo);
ok(none(), 'none when it is heard again');

# One that is stopped.
sql($paris, "select braid.disable_subscription('$name')");
ok(wait_until(sub { lag()->{bytes} eq '' }, 15), 'unknown while it is disabled');
cmp_ok(lag()->{seconds}, '>', 4, 'as is how old what is here may become');
$proxy->stop;

done_testing();
