# kill -9 of random processes of provider and subscriber for twenty seconds, in apply mode batch,
# half of it joining changes of one row, in relaxed commit order: each transaction takes effect
# once.

use strict;
use warnings;

use Braid;
use Kill;
use Test::More;

kill_in_mode('batch', 'relaxed', consolidate => [ 'false', 'true' ]);
done_testing();
