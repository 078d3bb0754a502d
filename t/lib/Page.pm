# The SQL of a document, typed as it stands there. Each block of it is divided into parts, and each part begins with a comment that names its
# nodes: "-- on tokyo", "-- on tokyo, paris and oslo". Host names such as tokyo.example stand for the nodes of the test.
#
#   my @parts = parts('docs/group.md')                  of the whole page
#   my @parts = parts('README.md', 'Three nodes')       of the section with this heading
#   run_part($part, 'shop', \%node)                     runs it in this database of each of its nodes; returns what each printed, by name
#
# A part is { heading, nodes => [names], sql }.

package Page;

use strict;
use warnings;

use Exporter 'import';
use PostgreSQL::Test::Utils;
use Test::More;

our @EXPORT = qw(parts run_part);

sub parts
{
	my ($file, $wanted) = @_;
	my (@parts, $heading);
	# Headings within a block are comments of a shell, and no headings.
	for my $piece (split /^(```.*?^```$)/ms, slurp_file("$ENV{TESTDIR}/$file"))
	{
		if ($piece !~ /^```/)
		{
			$heading = $1 while $piece =~ /^##+ (.*)$/mg;
			next;
		}
		next unless $piece =~ /^```sql\n(.*)^```$/ms;
		my $block = $1;
		next if defined $wanted && (!defined $heading || $heading ne $wanted);
		$block =~ /^-- on / or die "$file: a block of \"" . ($heading // '') . "\" does not say on which nodes it is run";
		for my $sql (split /^(?=-- on )/m, $block)
		{
			my ($nodes) = $sql =~ /^-- on (.*)$/m;
			push @parts, { heading => $heading, nodes => [ split /,\s*|\s+and\s+/, $nodes ], sql => $sql };
		}
	}
	@parts or die "$file: there is no SQL" . (defined $wanted ? " under \"$wanted\"" : '');
	return @parts;
}

sub run_part
{
	my ($part, $database, $node) = @_;
	my %printed;
	for my $name (@{ $part->{nodes} })
	{
		defined $node->{$name} or die "there is no node \"$name\": $part->{sql}";
		my $sql = $part->{sql} =~ s/host=(\w+)\.example/'host=' . $node->{$1}->host . ' port=' . $node->{$1}->port/ger;
		note("$name: $sql");
		$printed{$name} = $node->{$name}->safe_psql($database, $sql);
	}
	return %printed;
}

1;
