# Three nodes that all write the same few rows, while links are cut, processes killed and servers crash: in the end they are equal, row
# by row. t/lib/Storm.pm says what a storm is made of, and how one that failed is repeated and reduced.

use strict;
use warnings;

use Storm;
use Test::More;
use Time::HiRes qw(time);

my $storm = Storm->new(with => [qw(plain)]);
my @seeds = (1 .. 5);
@seeds = split ' ', $ENV{BRAID_TEST_SEED} if defined $ENV{BRAID_TEST_SEED};
if (my $seconds = $ENV{BRAID_TEST_SECONDS})
{
	# A soak: new seeds for as long as it goes.
	my $end = time + $seconds;
	my $seed = $ENV{BRAID_TEST_SEED} // int(rand(1_000_000));
	while (time < $end) { $storm->run($seed++) or last; }
}
else
{
	$storm->run($_) for @seeds;
}

done_testing();
