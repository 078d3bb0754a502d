# kill -9 of random processes of provider and subscriber for half a minute, in apply mode serial: each transaction takes effect once.

use strict;
use warnings;

use Braid;
use Kill;
use Test::More;

kill_in_mode('serial', 'source', consolidate => [ 'false', 'true' ]);
done_testing();
