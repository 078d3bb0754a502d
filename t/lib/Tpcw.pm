# TPC-W on nodes of a group: tables, rows, and the fourteen interactions as scripts of pgbench. SQL
# and mixes are in bench/tpcw.
#
#   my $shop = Tpcw->new(\@nodes, items => 1000, customers => 2000)
#                            has the tables at all nodes, and versions them
#   $shop->run('shopping', clients => 4, seconds => 5, mode => 'versioned')
#                            clients at each node. Returns interactions a second, the mean latency
#                            in ms, how many failed, and how many there were by interaction
#   $shop->check             tests what must hold after any run, and that all nodes are the same
#   $shop->script($interaction, $mode)
#                            the text of a script
#
# Modes: "plain" declares nothing, "versioned" declares tables as the first line of a script says.
# With "single", what reads one table calls braid.read_current. With "no release", nothing is
# released early.

package Tpcw;

use strict;
use warnings;

use Braid;
use Group;
use IPC::Run ();
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $dir = -d 'tpcw' ? 'tpcw' : 'bench/tpcw';
our @tables = qw(country author item address customer orders order_line cc_xacts shopping_cart shopping_cart_line);
my @mixes = qw(browsing shopping ordering);
my $count = 0;

# Names of the interactions, with their shares in a mix.
sub shares
{
	my ($mix) = @_;
	my ($column) = grep { $mixes[$_] eq $mix } 0 .. 2;
	my %shares;
	for (split /\n/, slurp_file("$dir/mixes"))
	{
		next if /^#/;
		my ($name, @shares) = split;
		$shares{$name} = $shares[$column];
	}
	return %shares;
}

sub new
{
	my ($class, $nodes, %opt) = @_;
	my $self = bless { items => 1000, customers => 2000, versioned => 1, dir => PostgreSQL::Test::Utils::tempdir(), nodes => $nodes, %opt }, $class;
	my $data = slurp_file("$dir/sql/data.sql");
	$data =~ s/ITEMS/$self->{items}/g;
	$data =~ s/CUSTOMERS/$self->{customers}/g;
	sql($nodes->[0], $data);
	have_all(@$nodes) if @$nodes > 1;
	sql($_, 'vacuum analyze') for @$nodes;
	return $self if !$self->{versioned};
	sql($nodes->[0], "select braid.version_table('$_')") for @tables;
	my $all = @tables;
	ok($_->poll_query_until('postgres', "select count(*) = $all from braid.table_versions where reached is not null"), $_->name . ' has the versioned tables') for @$nodes;
	return $self;
}

# The tables, for a group that is made.
sub tables { return slurp_file("$dir/sql/schema.sql"); }

sub script
{
	my ($self, $interaction, $mode) = @_;
	my $text = slurp_file("$dir/sql/$interaction.sql");
	my ($declares) = $text =~ /\A-- (.*)\n/;
	my ($reads) = $declares =~ /read ([^;]+)/;
	my ($writes) = $declares =~ /write ([^;]+)/;
	my @declared = ((map { "read $_" } split /, /, $reads // ''), (map { "write $_" } split /, /, $writes // ''));
	$text =~ s/^--.*\n//mg;
	$text =~ s/^set local braid\.release.*\n//mg if $mode eq 'plain' || $mode eq 'no release';
	return $text if !@declared;
	if ($mode eq 'single' && !defined $writes && $reads !~ /,/)
	{
		return "call braid.read_current('$reads');\n$text";
	}
	my $begin = 'begin isolation level repeatable read';
	$begin .= ' \; set local braid.versions = ' . q['] . join(', ', @declared) . q['] if $mode ne 'plain';
	return "$begin;\n${text}commit;\n";
}

# Options of pgbench for a number of clients.
sub options
{
	my ($self, $node, $mode, %shares) = @_;
	my @files;
	for my $interaction (sort keys %shares)
	{
		my $file = "$self->{dir}/$interaction.$mode";
		$file =~ tr/ /_/;
		append_to_file($file, $self->script($interaction, $mode)) if !-e $file;
		push @files, '-f', "$file\@$shares{$interaction}" if $shares{$interaction};
	}
	my ($place) = grep { $self->{nodes}[$_] == $node } 0 .. $#{ $self->{nodes} };
	# Ids are unique: they come from the time, the node and the client, and count up.
	my $first = int(time * 1000) + 10_000_000 * $count++;
	return ('-n', '-M', 'simple', (map { ('-D', $_) } "node=$place", "n=$first", 'cart=0', "items=$self->{items}", "customers=$self->{customers}"), @files, $node->connstr('postgres'));
}

sub run
{
	my ($self, $mix, %opt) = @_;
	my @running;
	for my $node (@{ $self->{nodes} })
	{
		my ($in, $out, $err) = ('', '', '');
		my @command = ('pgbench', '-c', $opt{clients}, '-T', $opt{seconds}, $self->options($node, $opt{mode} // 'versioned', shares($mix)));
		push @running, { run => IPC::Run::start(\@command, '<', \$in, '>', \$out, '2>', \$err), out => \$out, err => \$err };
	}
	my ($rate, $latency, $failed, %done) = (0, 0, 0);
	for my $one (@running)
	{
		$one->{run}->finish;
		my ($out, $err) = (${ $one->{out} }, ${ $one->{err} });
		my ($tps) = $out =~ /^tps = ([\d.]+)/m or die "pgbench: $out $err";
		my ($mean) = $out =~ /^latency average = ([\d.]+)/m;
		$rate += $tps;
		$latency += $mean * $tps;
		if ($err =~ /aborted|ERROR/) { $failed++; diag($err); }
		while ($out =~ m{^SQL script \d+: \S*/(\w+?)\.\w+\n - weight.*\n - (\d+) transactions}mg) { $done{$1} += $2; }
	}
	return ($rate, $latency / $rate, $failed, \%done);
}

sub check
{
	my ($self) = @_;
	my @nodes = @{ $self->{nodes} };
	have_all(@nodes) if @nodes > 1;
	my $expected = join "\n", map { "$_|0" } 'stock', 'orders without lines', 'lines without an order', 'payments', 'bought and in a cart';
	is(sql($_, slurp_file("$dir/sql/check.sql")), $expected, $_->name . ' is consistent') for @nodes;
	for my $table (@tables)
	{
		my $digest = "select md5(string_agg(t::text, ',' order by t::text)) from $table t";
		my $first = sql($nodes[0], $digest);
		is(sql($_, $digest), $first, $_->name . " has the same $table") for @nodes[ 1 .. $#nodes ];
	}
	return;
}

1;
