# A history of versioned transactions from three nodes is strictly serializable: lists that
# transactions append to and read, while processes are ended. check-history of crates/histories
# judges it. Each client makes the same transactions in each run.

use strict;
use warnings;

use Braid;
use Group;
use Test::More;
use VersionHistory;

my @all = group([qw(tokyo paris oslo)], VersionHistory::tables(), conf => 'braid.version_timeout = 20s');
my $history = VersionHistory->new(\@all, clients => 6, transactions => 40);
$history->start;
# Meanwhile: processes that give versions end, and one that applies is killed.
for my $round (1 .. 4)
{
	ok(wait_until(sub { $history->ended >= 240 * $round / 5 }, 180), "transactions end, part $round");
	my ($kind, $signal) = $round == 3 ? ('braid applier', 'KILL') : ('braid versions', 'TERM');
	my $node = $all[ $round % 3 ];
	my $pid = look($node, "select pid from pg_stat_activity where backend_type = '$kind' limit 1");
	kill $signal, $pid if $pid;
}
$history->judge;
done_testing();
