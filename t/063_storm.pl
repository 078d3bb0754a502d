# Nodes that all write the same few rows, while links are cut, processes killed and servers crash: in the end they are equal, row by
# row, and each row is the one that was written last. t/lib/Storm.pm says what a storm is made of, and how one that failed is repeated
# and reduced.

use strict;
use warnings;

use Storm;
use Test::More;

my %storm;
# One after the other, by seed.
my @kinds = (
	sub { ($storm{three} //= Storm->new(with => [qw(plain delete key unique toast bag same)], seconds => 6, large => 300))->run(@_) },
	sub { ($storm{three} //= Storm->new(with => [qw(plain delete key unique toast bag same)], seconds => 6, large => 300))->run(@_, mode => 'batch', consolidate => 'true') },
	sub { ($storm{three} //= Storm->new(with => [qw(plain delete key unique toast bag same)], seconds => 6, large => 300))->run(@_, order => 'relaxed') },
	sub { ($storm{three} //= Storm->new(with => [qw(plain delete key unique toast bag same)], seconds => 6, large => 300))->run(@_, mode => 'aggregate') },
	sub { ($storm{three} //= Storm->new(with => [qw(plain delete key unique toast bag same)], seconds => 6, large => 300))->run(@_, mode => 'serial', consolidate => 'true') },
	sub { ($storm{two} //= Storm->new(nodes => [qw(cairo oslo)], with => [qw(plain delete key unique toast)], seconds => 6, large => 60, stream => 1))->run(@_, consolidate => 'true') },
	sub { ($storm{emptied} //= Storm->new(nodes => [qw(havana riga minsk)], with => [qw(plain delete key toast truncate same)], seconds => 6, large => 60, stream => 1))->run(@_) },
	sub { ($storm{prepared} //= Storm->new(nodes => [qw(lima sofia)], with => [qw(plain delete key bag same)], seconds => 6, prepare => 4, large => 60, stream => 1))->run(@_) },
	sub { ($storm{asked} //= Storm->new(nodes => [qw(turin porto delhi)], with => [qw(plain delete key)], seconds => 6, ask => 1))->run(@_) },
);
Storm::storms(9, @kinds);

done_testing();
