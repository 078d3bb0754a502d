# An idle group writes no WAL, although its members exchange messages five times a second, and each
# has streams from and to the other.

use strict;
use warnings;

use Braid;
use Group qw(group sql joined have_all);
use Test::More;
use Time::HiRes qw(sleep time);

# Rows of pg_catalog that autovacuum touches are no affair of the group.
my $conf = "autovacuum = off\n";
my ($tokyo, $paris) = my @data = group([qw(tokyo paris)], q[create table item (id serial primary key, v text)], conf => $conf);
my $observer = new_server('observer', init => ['--data-checksums'], conf => $conf);
sql($observer, 'create extension braid');
my ($there, $here) = map { $_->connstr('postgres') } $tokyo, $observer;
sql($observer, "select braid.add_witness(\$d\$$there\$d\$, node_name => 'observer', dsn => \$d\$$here\$d\$)");
my @all = (@data, $observer);
joined(@all);
sql($tokyo, q[insert into item (v) values ('last')]);
have_all(@data);

# An agreement does write WAL, as this measurement shows.
my $before = sql($observer, 'select pg_current_wal_insert_lsn()');
sql($tokyo, 'select braid.set_read_only(false)');
ok(wait_until(sub { sql($observer, "select pg_current_wal_insert_lsn() > '$before'") eq 't' }, 60), 'an entry is written by all');

# Checkpoints, and the snapshots of running transactions after it, end by themselves.
my $stretch = 8;
my $positions = sub { join ' ', map { sql($_, 'select pg_current_wal_insert_lsn()') } @all };
my ($last, $since, $end) = ($positions->(), time, time + 90);
while (time < $end && time - $since < $stretch)
{
	sleep 0.5;
	my $now = $positions->();
	($last, $since) = ($now, time) if $now ne $last;
}
cmp_ok(time - $since, '>=', $stretch, "no WAL in $stretch seconds");
is(sql($_, q[select count(*) from braid.group_nodes where not is_local and reachable and heard_at > now() - interval '3 s']), '2', $_->name . ' hears the others meanwhile') for @all;
done_testing();
