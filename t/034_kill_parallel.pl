# kill -9 of random processes of provider and subscriber for twenty seconds, in apply mode parallel:
# each transaction takes effect once. For half of the time the leader chooses between one applier
# and all, for the other half all are used.

use strict;
use warnings;

use Braid;
use Kill;
use Test::More;

kill_in_mode('parallel', 'source', parallel_apply => [ 'auto', 'always' ]);
done_testing();
