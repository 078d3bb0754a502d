# Three nodes that all write the same few rows, which must not overlap, or share a key when a
# transaction ends, while links are cut, processes killed and servers crash. At the end they are
# equal, row by row. See t/063_storm.pl.

use strict;
use warnings;

use Storm;
use Test::More;

my $storm = Storm->new(with => [qw(unique deferred range delete)], seconds => 6);
Storm::storms(3, map { my $options = $_; sub { $storm->run(@_, @$options) } } [], [ mode => 'batch' ], [ order => 'relaxed' ]);

done_testing();
