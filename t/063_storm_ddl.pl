# A storm as in t/063_storm.pl, with schema changes on every node.

use strict;
use warnings;

use Storm;
use Test::More;

my $storm = Storm->new(nodes => [qw(cuzco malmo fargo)], with => [qw(plain delete ddl swap)], seconds => 6, large => 60, stream => 1);
Storm::storms(1, sub { $storm->run(@_) });

done_testing();
