# Two nodes join a group at once, and one of them is slow. The other one creates no slot there that
# would be read before the publications exist.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
my ($tokyo, $paris, $oslo) = my @nodes = map { new_server($_, init => ['--data-checksums']) } qw(tokyo paris oslo);
sql($_, 'create extension braid') for @nodes;
my %dsn = map { $_->name => $_->connstr('postgres') } @nodes;
sql($tokyo, 'create table item (id int primary key, v text); insert into item select i, $$tokyo$$ from generate_series(1, 100) i');
sql($tokyo, "select braid.create_group('shop', node_name => 'tokyo', dsn => \$d\$$dsn{tokyo}\$d\$)");
sql($tokyo, "select braid.wait_for_group('180 s')");

# Nobody can create a publication at paris.
my $holder = $paris->background_psql('postgres');
$holder->query_safe('begin; lock table pg_catalog.pg_publication in share mode');
sql($paris, "select braid.join_group(\$d\$$dsn{tokyo}\$d\$, node_name => 'paris', dsn => \$d\$$dsn{paris}\$d\$)");
ok($paris->poll_query_until('postgres', q{select exists (select from pg_locks where relation = 'pg_publication'::regclass and not granted)}), 'one that joins waits with its publications');
sql($oslo, "select braid.join_group(\$d\$$dsn{tokyo}\$d\$, node_name => 'oslo', dsn => \$d\$$dsn{oslo}\$d\$)");
ok($oslo->poll_query_until('postgres', q{select exists (select from braid.join_progress where waits_for = 'the publications of node "paris"')}), 'the next one waits for them');
is(sql($paris, q{select count(*) from pg_replication_slots where slot_name like '%oslo%'}), '0', 'and has no slot there yet');
$holder->query_safe('commit');
$holder->quit;
for my $node (@nodes)
{
	my ($status, $out, $err) = $node->psql('postgres', q{select braid.wait_for_group('180 s')});
	is($err, '', $node->name . ' is in the group') or diag(sql($node, 'table braid.join_progress'));
}
sql($_, "insert into item values (" . (1000 + length $_->name) . " + ascii('" . $_->name . "'), '" . $_->name . "')") for @nodes;
for my $node (@nodes)
{
	for my $other (grep { $_ != $node } @nodes)
	{
		my $position = sql($other, 'select braid.sync_event()');
		sql($node, "select braid.wait_for_event('" . $other->name . "', '$position', '180 s')");
	}
}
same_tables(\@nodes, 'item');
done_testing();
