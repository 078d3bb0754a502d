# Nodes that all write the same few rows, while links are cut, processes killed and servers crash.
# At the end they are equal, row by row, and each row is the one that was written last.
# t/lib/Storm.pm describes storms, and how a failed one is repeated and reduced.

use strict;
use warnings;

use Storm;
use Test::More;

my $storm = Storm->new(with => [qw(plain delete key unique toast keys bag same)], seconds => 6, large => 300);
# One after the other, by seed.
my @kinds = (
	sub { $storm->run(@_) },
	sub { $storm->run(@_, mode => 'batch', consolidate => 'true') },
	sub { $storm->run(@_, order => 'relaxed') },
	sub { $storm->run(@_, mode => 'aggregate') },
	sub { $storm->run(@_, mode => 'serial', consolidate => 'true') },
);
Storm::storms(5, @kinds);

done_testing();
