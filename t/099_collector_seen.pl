# Tombstones are read while the collector writes them: they must not look rolled back.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($tokyo, $paris, $quito) = map { new_node($_) } qw(tokyo paris quito);
my @all = ($tokyo, $paris, $quito);
on_all('create table item (k int primary key, v text)', @all);
for my $subscriber (@all)
{
	for my $provider (@all) { subscribe($subscriber, $provider, copy_data => 'false') unless $subscriber == $provider; }
}
my $rows = 100_000;
$tokyo->safe_psql('postgres', "insert into item select i, 'row' from generate_series(1, $rows) i");
converged(@all);
# Again and again, while the collector writes, and other transactions end that began after its own.
my $look = 'begin; select pg_current_xact_id(); commit; select count(*) from braid.tombstone;';
my $end = time + 60;
$tokyo->safe_psql('postgres', 'delete from item');
my $looks = 0;
my $count = 0;
while ($count < $rows && time < $end)
{
	($count) = $tokyo->safe_psql('postgres', $look) =~ /(\d+)$/;
	$looks++ if $count < $rows;
}
is($count, $rows, 'each deletion is remembered');
cmp_ok($looks, '>', 0, 'and was looked for before it was');
done_testing();
