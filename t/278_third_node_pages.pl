# The SQL of the pages about a third node without a group, run as written: its output is the one
# that the pages show.

use strict;
use warnings;

use Braid;
use Page;
use PostgreSQL::Test::Utils;
use Test::More;

my %node = map { $_ => new_server($_) } qw(tokyo paris oslo);
my %other = (tokyo => 'paris', paris => 'tokyo');
my $database;
sub sql { my ($node, $sql) = @_; return $node{$node}->safe_psql($database, $sql); }
sub dsn { my ($name) = @_; return sprintf 'host=%s port=%s dbname=%s', $node{$name}->host, $node{$name}->port, $database; }

# Each has what its enabled subscriptions bring, by whichever node that was committed.
sub have_all
{
	my $subscriptions = q[select provider from braid.subscription_status where state in ('streaming', 'catching up')];
	# A change may pass through one node.
	for my $hop (1, 2)
	{
		for my $name (sort keys %node)
		{
			next if sql($name, q[select to_regclass('braid.subscription_status') is null]) eq 't';
			for my $provider (split /\n/, sql($name, $subscriptions))
			{
				my $position = sql($provider, 'select braid.sync_event()');
				sql($name, "select braid.wait_for_event('$provider', '$position', '100 s')");
			}
		}
	}
	return;
}

for my $page (qw(joining chains))
{
	$database = "shop_$page";
	on_all("create database $database", values %node);
	sql($_, "create extension braid; create publication braid for all tables; select braid.create_node('$_', '" . dsn($_) . "')") for sort keys %other;
	sql($_, "select braid.create_subscription('${_}_from_$other{$_}', '" . dsn($other{$_}) . "', copy_data => false)") for sort keys %other;
	sql($_, "select braid.wait_for_subscription('${_}_from_$other{$_}', '100 s')") for sort keys %other;
	my $position = '';
	for my $part (parts("docs/guide/$page.md"))
	{
		have_all();
		$part->{sql} =~ s/dbname=shop/dbname=$database/g;
		$part->{sql} =~ s/'0\/3A01B8C8'/'$position'/;
		my %printed = run_and_compare($part, $database, \%node);
		$position = $1 if join("\n", values %printed) =~ /^([0-9A-F]+\/[0-9A-F]+)$/m;
	}
}

done_testing();
