# kill -9 of random processes of provider and subscriber for twenty seconds, in apply mode aggregate
# with consolidate, in relaxed commit order: each transaction takes effect once.

use strict;
use warnings;

use Braid;
use Kill;
use Test::More;

kill_in_mode('aggregate', 'relaxed', consolidate => 'true');
done_testing();
