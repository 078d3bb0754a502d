# Three nodes that all write the same few rows, which must not overlap, or share a key when a transaction ends, while links are cut,
# processes killed and servers crash: in the end they are equal, row by row. As t/063_storm.pl, which says how one is repeated.

use strict;
use warnings;

use Storm;
use Test::More;

my $storm = Storm->new(with => [qw(unique deferred range delete)], seconds => 6);
my @kinds = ([], [ mode => 'batch' ], [ order => 'relaxed' ]);
my @seeds = defined $ENV{BRAID_TEST_SEED} ? split ' ', $ENV{BRAID_TEST_SEED} : 1 .. 3;
$storm->run($_, @{ $kinds[ $_ % @kinds ] }) for @seeds;

done_testing();
