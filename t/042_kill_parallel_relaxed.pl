# kill -9 of random processes of provider and subscriber for twenty seconds, in apply mode parallel
# in relaxed commit order: each transaction takes effect once.

use strict;
use warnings;

use Braid;
use Kill;
use Test::More;

kill_in_mode('parallel', 'relaxed', consolidate => [ 'false', 'true' ]);
done_testing();
