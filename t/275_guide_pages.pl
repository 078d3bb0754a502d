# The SQL of each page that begins with two nodes, run as written. Its output is the one that the
# page shows.

use strict;
use warnings;

use Braid;
use Page;
use PostgreSQL::Test::Utils;
use Test::More;

my @pages = map { "guide/$_" } qw(conflicts conflict-history conflict-functions column-rules foreign-keys
  changing-columns schema-changes schema-changes-by-node roles stopped parked prepared clocks slow comparing
  security monitoring cdc);
push @pages, qw(wal2json ingest);
@pages = split /\s+/, $ENV{BRAID_PAGES} if $ENV{BRAID_PAGES};

# The database of each page keeps its replication origins, for which these are places before 18.
my $conf = "braid.orphan_check_interval = 1s\nmax_prepared_transactions = 10\nmax_replication_slots = 64\n";
my %node = map { $_ => new_server($_, conf => $conf) } qw(tokyo paris);
my %other = (tokyo => 'paris', paris => 'tokyo');
my $database;
sub sql { my ($node, $sql) = @_; return $node{$node}->safe_psql($database, $sql); }

# Each has what the other one has committed, unless a subscription has stopped.
sub have_all
{
	for my $name (sort keys %node)
	{
		my $streams = q[select count(*) = 1 from braid.subscription_status where state in ('streaming', 'catching up')];
		next if sql($name, $streams) ne 't';
		my $position = sql($other{$name}, 'select braid.sync_event()');
		my ($code, undef, $err) = $node{$name}->psql($database, "select braid.wait_for_event('$other{$name}', '$position', '100 s')");
		# A page may be about a subscription that stops.
		die "$name: $err" if $code != 0 && $err !~ /has stopped with an error/;
	}
	return;
}

for my $page (@pages)
{
	$database = 'shop_' . $page =~ s/\W/_/gr;
	on_all("create database $database", values %node);
	for my $name (sort keys %node)
	{
		my $dsn = sprintf 'host=%s port=%s dbname=%s', $node{$name}->host, $node{$name}->port, $database;
		sql($name, "create extension braid; create publication braid for all tables; select braid.create_node('$name', '$dsn')");
	}
	for my $name (sort keys %node)
	{
		my $from = $node{ $other{$name} };
		my $dsn = sprintf 'host=%s port=%s dbname=%s', $from->host, $from->port, $database;
		sql($name, "select braid.create_subscription('${name}_from_$other{$name}', '$dsn', copy_data => false)");
	}
	sql($_, "select braid.wait_for_subscription('${_}_from_$other{$_}', '100 s')") for sort keys %node;

	subtest "$page.md" => sub {
		for my $part (parts("docs/$page.md"))
		{
			have_all();
			$part->{sql} =~ s/dbname=shop/dbname=$database/g;
			run_and_compare($part, $database, \%node);
		}
	};
	# Slots and workers are for the next page.
	sql($_, "select braid.drop_subscription('${_}_from_$other{$_}')") for sort keys %node;
	ok($node{$_}->poll_query_until($database, 'select not exists (select from braid.pending_cleanup)'), "$page: $_: its slot is dropped") for sort keys %node;
}

done_testing();
