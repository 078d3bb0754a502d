# kill -9 of random processes of provider and subscriber for twenty seconds, in apply mode batch,
# for half of the time with consolidate: each transaction takes effect once.

use strict;
use warnings;

use Braid;
use Kill;
use Test::More;

kill_in_mode('batch', 'source', consolidate => [ 'false', 'true' ]);
done_testing();
