# kill -9 of random processes of provider and subscriber for twenty seconds, in apply mode serial in
# relaxed commit order: each transaction takes effect once.

use strict;
use warnings;

use Braid;
use Kill;
use Test::More;

kill_in_mode('serial', 'relaxed');
done_testing();
