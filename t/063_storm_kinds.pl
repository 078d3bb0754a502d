# Storms as in t/063_storm.pl: on two nodes, with TRUNCATE, with prepared transactions, and with a
# conflict function.

use strict;
use warnings;

use Storm;
use Test::More;

my %storm;
# One after the other, by seed.
my @kinds = (
	sub { ($storm{two} //= Storm->new(nodes => [qw(cairo oslo)], with => [qw(plain delete key unique toast)], seconds => 6, large => 60, stream => 1))->run(@_, consolidate => 'true') },
	sub { ($storm{emptied} //= Storm->new(nodes => [qw(havana riga minsk)], with => [qw(plain delete key toast truncate same)], seconds => 6, large => 60, stream => 1))->run(@_) },
	sub { ($storm{prepared} //= Storm->new(nodes => [qw(lima sofia)], with => [qw(plain delete key bag same)], seconds => 6, prepare => 4, large => 60, stream => 1))->run(@_) },
	sub { ($storm{asked} //= Storm->new(nodes => [qw(turin porto delhi)], with => [qw(plain delete key)], seconds => 6, ask => 1))->run(@_) },
);
Storm::storms(4, @kinds);

done_testing();
