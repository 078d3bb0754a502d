# kill -9 of random processes of provider and subscriber for twenty seconds, in apply mode
# aggregate: each transaction takes effect once.

use strict;
use warnings;

use Braid;
use Kill;
use Test::More;

kill_in_mode('aggregate', 'source');
done_testing();
