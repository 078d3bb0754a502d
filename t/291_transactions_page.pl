# The SQL of docs/transactions.md, run as written, and the results that the page states.

use strict;
use warnings;

use Braid;
use Page;
use PostgreSQL::Test::Utils;
use Test::More;

my %node = (tokyo => new_server('tokyo', init => ['--data-checksums']));
$node{tokyo}->safe_psql('postgres', 'create database shop');
$node{tokyo}->safe_psql('postgres', 'create role replicator login superuser');
sub sql { my ($sql) = @_; return $node{tokyo}->safe_psql('shop', $sql); }

my %after = (
	'Use it' => sub {
		my ($printed) = @_;
		return if $printed =~ /wait_for_group/;
		is(sql('select string_agg(relation::text, chr(32) order by table_number) from braid.table_versions'), 'stock accounts', 'two tables are versioned');
	},
	'What is declared' => sub { is($_[0], 'read accounts, write stock', 'the declaration of the example'); },
	'What waits for what' => sub { like($_[0], qr/^stock\|1\|1\|{7}tokyo\naccounts\|0\|0\|{7}tokyo$/, 'a row for each table'); },
	'Early release' => sub { is(sql('select amount from stock'), '91', 'both examples have written'); },
	'Single reads' => sub { is($_[0], '91', 'a single read'); },
	'What it refuses' => sub { is(sql(q[select to_regclass('stock') is null]), 't', 'the tables are dropped'); },
);
my %seen;
for my $part (parts('docs/transactions.md'))
{
	my %printed = run_part($part, 'shop', \%node);
	my $check = $after{ $part->{heading} } or die "nothing is known of \"$part->{heading}\"";
	$check->($printed{tokyo});
	$seen{ $part->{heading} } = 1;
}
is(join(', ', sort keys %seen), join(', ', sort keys %after), 'each section has run');
done_testing();
