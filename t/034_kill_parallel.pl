# kill -9 of random processes of provider and subscriber for a minute, in apply mode parallel: each transaction takes effect once.

use strict;
use warnings;

use Braid;
use Kill;
use Test::More;

kill_in_mode('parallel', 'source', parallel_apply => 'auto');
done_testing();
