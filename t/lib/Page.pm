# The SQL of a document, typed as it stands there. Each block of it is divided into parts, and each
# part begins with a comment that names its nodes: "-- on tokyo", "-- on tokyo, paris and oslo".
# Host names such as tokyo.example stand for the nodes of the test.
#
#   my @parts = parts('docs/group.md')              all parts of the page
#   my @parts = parts('README.md', 'Three nodes')   the parts of the section with this heading
#   run_part($part, 'shop', \%node)                 runs it in this database of each of its nodes,
#                                                   and returns what each printed, by name
#   run_and_compare($part, 'shop', \%node)          runs it, and compares the output with the page
#
# A part is { heading, nodes => [names], sql, shows }. The block ```text that follows a block of SQL
# shows what its last part prints on each of its nodes: the result of the last query, as psql aligns
# it, or messages (ERROR, WARNING, NOTICE, DETAIL, HINT). A cell "…" stands for any text, "x…" for
# any that begins with x.

package Page;

use strict;
use warnings;

use Exporter 'import';
use PostgreSQL::Test::Utils;
use Test::More;

our @EXPORT = qw(parts run_part run_and_compare);

sub parts
{
	my ($file, $wanted) = @_;
	my (@parts, $heading, $after_sql);
	# Headings within a block are comments of a shell, and no headings.
	for my $piece (split /^(```.*?^```$)/ms, slurp_file("$ENV{TESTDIR}/$file"))
	{
		if ($piece !~ /^```/)
		{
			$heading = $1 while $piece =~ /^##+ (.*)$/mg;
			# Only what follows at once belongs to the block.
			$after_sql &&= $piece =~ /^\s*$/;
			next;
		}
		if ($piece =~ /^```text\n(.*)^```$/ms && $after_sql)
		{
			$parts[-1]{shows} = $1;
			$after_sql = 0;
			next;
		}
		next unless $piece =~ /^```sql\n(.*)^```$/ms;
		my $block = $1;
		next if defined $wanted && (!defined $heading || $heading ne $wanted);
		$block =~ /^-- on / or die "$file: a block of \"" . ($heading // '') . "\" does not say on which nodes it is run";
		for my $sql (split /^(?=-- on )/m, $block)
		{
			my ($nodes) = $sql =~ /^-- on (.*)$/m;
			$after_sql = 1;
			push @parts, { heading => $heading, nodes => [ split /,\s*|\s+and\s+/, $nodes ], sql => $sql };
		}
	}
	@parts or die "$file: there is no SQL" . (defined $wanted ? " under \"$wanted\"" : '');
	return @parts;
}

# The SQL of a part, with the host names of a node of the test.
sub _sql_for
{
	my ($part, $name, $node) = @_;
	defined $node->{$name} or die "there is no node \"$name\": $part->{sql}";
	my $sql = $part->{sql} =~ s/host=(\w+)\.example/'host=' . $node->{$1}->host . ' port=' . $node->{$1}->port/ger;
	note("$name: $sql");
	return $sql;
}

sub run_part
{
	my ($part, $database, $node) = @_;
	my %printed;
	for my $name (@{ $part->{nodes} })
	{
		$printed{$name} = $node->{$name}->safe_psql($database, _sql_for($part, $name, $node));
	}
	return %printed;
}

# What psql shows, as rows of cells: with or without the alignment.
sub _rows
{
	my ($text) = @_;
	return map { [ map { s/^\s+|\s+$//gr } split /\|/, $_, -1 ] }
	  grep { !/^\s*$|^[-+\s]+$|^\(\d+ rows?\)$/ } split /\n/, $text;
}

sub _cell_pattern
{
	my ($cell) = @_;
	return join '.*', map { quotemeta } split /…/, $cell, -1;
}

# Whether the last rows that were printed are those that the page shows.
sub _same_rows
{
	my ($shown, $printed) = @_;
	return 0 if @$printed < @$shown;
	my @last = @$printed[ @$printed - @$shown .. $#$printed ];
	for my $i (0 .. $#$shown)
	{
		my ($want, $have) = ($shown->[$i], $last[$i]);
		return 0 if @$want != @$have;
		for my $j (0 .. $#$want)
		{
			my $pattern = _cell_pattern($want->[$j]);
			return 0 if $have->[$j] !~ /^$pattern$/s;
		}
	}
	return 1;
}

sub run_and_compare
{
	my ($part, $database, $node) = @_;
	my %printed;
	my $shows = $part->{shows} // '';
	my $where = $part->{heading} // 'beginning';
	for my $name (@{ $part->{nodes} })
	{
		my $sql = "\\pset tuples_only off\n\\pset footer off\n" . _sql_for($part, $name, $node);
		my ($code, $out, $err) = $node->{$name}->psql($database, $sql, on_error_stop => 1);
		my @messages = $shows =~ /^((?:ERROR|WARNING|NOTICE|DETAIL|HINT):.*)$/mg;
		my $fails = grep { /^ERROR/ } @messages;
		is($code == 0 ? '' : $err, $fails ? $err || 'an error' : '', "$where: $name: " . ($fails ? 'fails' : 'runs'));
		if (@messages)
		{
			my $said = $err =~ s/^psql:[^:]*:\d+: //mgr;
			s/ +/ /g for $said, @messages;
			my @missing = grep { my $pattern = _cell_pattern($_); $said !~ /^$pattern$/m } @messages;
			is(join("\n", @missing), '', "$where: $name: says what the page shows") or diag($err);
		}
		elsif (length $shows)
		{
			my @shown = _rows($shows);
			my @rows = _rows($out);
			ok(_same_rows(\@shown, \@rows), "$where: $name: prints what the page shows")
			  or diag("shown:\n$shows\nprinted:\n$out");
		}
		$printed{$name} = $out;
	}
	return %printed;
}

1;
