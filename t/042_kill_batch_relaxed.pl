# kill -9 of random processes of provider and subscriber for twenty seconds, in apply mode batch,
# for half of the time with consolidate, in relaxed commit order: each transaction takes effect
# once.

use strict;
use warnings;

use Braid;
use Kill;
use Test::More;

kill_in_mode('batch', 'relaxed', consolidate => [ 'false', 'true' ]);
done_testing();
