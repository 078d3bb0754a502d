# A history of versioned transactions is strictly serializable while everything goes wrong: links
# are cut, clocks step, and the processes that give versions, apply, decode, or hold a server
# together are killed. On three nodes, or as many as BRAID_TEST_NODES says.

use strict;
use warnings;

use Braid;
use FakeClock;
use Group;
use Kill qw(kill_seed kill_one);
use Proxy;
use Test::More;
use Time::HiRes qw(sleep);
use VersionHistory;

my @names = (qw(tokyo paris oslo lima rome))[ 0 .. ($ENV{BRAID_TEST_NODES} // 3) - 1 ];
my $transactions = $ENV{BRAID_TEST_TRANSACTIONS} // 3000;
kill_seed();

# Each node has a clock of its own, and is reached through a link of its own.
my (%clock, %proxy, @all);
sub of { my ($node, $code) = @_; local $ENV{PGGEQO} = $node eq 'tokyo' ? 'on' : 'off'; return $clock{$node} ? $clock{$node}->over($code) : $code->(); }
for my $name (@names)
{
	$clock{$name} = FakeClock->new;
	my $node = of($name, sub { new_server($name, init => ['--data-checksums'], conf => "braid.version_timeout = 20s\nbraid.max_clock_wait = 10ms\nbraid.max_transaction_crashes = 0\n") });
	$proxy{$name} = Proxy->new($node);
	sql($node, 'create extension braid');
	push @all, $node;
}
my ($first, @others) = @all;
sub dsn_of { return $proxy{ $_[0]->name }->connstr('postgres'); }
sql($first, VersionHistory::tables());
sql($first, "select braid.create_group('shop', node_name => 'tokyo', dsn => '" . dsn_of($first) . "')");
for my $node (@others)
{
	sql($node, "select braid.join_group('" . dsn_of($first) . "', node_name => '" . $node->name . "', dsn => '" . dsn_of($node) . "')");
	joined($node);
}
joined(@all);

my $clients = 2 * @all;
my $history = VersionHistory->new(\@all, clients => $clients, transactions => int($transactions / $clients) + 1, seed => int rand 1_000_000);
$history->start;

my %done;
my @faults = (
	(map { my $kind = $_; [ $kind => sub { my ($node) = @_; kill_one($node, $kind); } ] } 'braid applier', 'braid leader', 'walsender', 'braid versions', 'braid group'),
	# pg_ctl compares the time at which a server says that it has started with its own.
	[ 'postmaster' => sub { my ($node) = @_; $clock{ $node->name }->set(0) if $clock{ $node->name }; kill_one($node, 'postmaster'); } ],
	[ 'versions ends' => sub { my ($node) = @_; my $pid = look($node, "select pid from pg_stat_activity where backend_type = 'braid versions'"); kill 'TERM', $pid if $pid; } ],
	# For the others, and for what the node itself opens: it is alone.
	[ 'link' => sub { my ($node) = @_; $proxy{ $node->name }->link('down'); sleep 0.5 + rand 3; $proxy{ $node->name }->link('up'); } ],
	# Tokyo on one side, the others on the other one.
	[ 'apart' => sub { $proxy{$_}->link($_ eq 'tokyo' ? 'only on' : 'only off') for @names; sleep 0.5 + rand 5; $proxy{$_}->link('up') for @names; } ],
	[ 'held' => sub { my ($node) = @_; $proxy{ $node->name }->link('hold'); sleep 0.5 + rand 2; $proxy{ $node->name }->link('up'); } ],
	[ 'clock' => sub { my ($node) = @_; $clock{ $node->name }->set(rand(20) - 10) if $clock{ $node->name }; } ],
);
my $last = 0;
while ($history->is_running)
{
	my ($what, $do) = @{ $faults[ int rand @faults ] };
	my $node = $all[ int rand @all ];
	note($node->name . ": $what");
	of($node->name, sub { $do->($node) });
	$done{$what}++;
	# Something comes through before the next fault, most times.
	my $until = $last + 100 + int rand 300;
	wait_until(sub { !$history->is_running || ($last = $history->ended) >= $until }, rand() < 0.8 ? 60 : 1 + int rand 4);
}
$_->link('up') for values %proxy;
$_ && $_->set(0) for values %clock;
VersionHistory::say_so('faults: ' . join ', ', map { "$_ $done{$_}" } sort keys %done);
cmp_ok(scalar keys %done, '>', 3, 'there were faults of several kinds');
$history->judge(seconds => 300, share => 0.3);
done_testing();
