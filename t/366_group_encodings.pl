# A node in UTF8 joins a group of a node in LATIN1: it is warned, has all rows, and a text that
# LATIN1 does not have stops the other node's subscription, as the warning said.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

# Whatever a node's encoding; this file is UTF-8.
$ENV{PGCLIENTENCODING} = 'UTF8';
my $tokyo = new_server('tokyo', init => [ '--encoding=LATIN1', '--locale=C', '--data-checksums' ]);
my $paris = new_server('paris', init => [ '--encoding=UTF8', '--locale=C', '--data-checksums' ]);
sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
my %dsn = map { $_->name => $_->connstr('postgres') } $tokyo, $paris;

sql($_, 'create extension braid') for $tokyo, $paris;
sql($tokyo, q[create table item (id int primary key, v text); insert into item values (1, 'café')]);
sql($tokyo, qq[select braid.create_group('shop', node_name => 'tokyo', dsn => \$d\$$dsn{tokyo}\$d\$)]);
my ($status, undef, $err) = $paris->psql('postgres', qq[select braid.join_group(\$d\$$dsn{tokyo}\$d\$, node_name => 'paris', dsn => \$d\$$dsn{paris}\$d\$)]);
is($status, 0, 'the node joins');
like($err, qr/WARNING:  node "tokyo" has encoding LATIN1, this one UTF8\nDETAIL:  A text that is written here and that LATIN1 does not have stops the subscriptions of such nodes\.\nHINT:  Write only texts that LATIN1 has\./,
	'and is warned');
for my $node ($tokyo, $paris)
{
	my (undef, undef, $why) = $node->psql('postgres', q[select braid.wait_for_group('180 s')]);
	is($why, '', $node->name . ' is in the group');
}
sql($paris, q[insert into item values (2, 'thé')]);
sql($tokyo, q[insert into item values (3, 'maté')]);
my $rows = q[select string_agg(v, ' ' order by id) from item];
becomes($_, $rows, 'café thé maté', 'rows in both directions: ' . $_->name) for $tokyo, $paris;

sql($paris, q[insert into item values (4, '茶')]);
becomes($tokyo, q[select state from braid.subscription_status], 'error', 'a text that LATIN1 does not have');
like(sql($tokyo, q[select last_error from braid.subscription_status]), qr/has no equivalent in encoding "LATIN1"/, 'stops the subscription');
sql($tokyo, q[insert into item values (5, 'eau')]);
becomes($paris, $rows, 'café thé maté 茶 eau', 'the other direction goes on');

done_testing();
