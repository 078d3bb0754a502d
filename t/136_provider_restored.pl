# A provider was restored to an earlier state, with its slots. Its next changes have positions that
# the subscriber has passed already, and would be left out. The subscription stops instead, and
# reports that.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '');
my @both = ($tokyo, $paris);
on_all('create table item (id int primary key, v text)', @both);
my $name = subscribe($paris, $tokyo);
$tokyo->safe_psql('postgres', q[insert into item values (1, 'kept')]);
caught_up($paris, $tokyo);

# A copy of the server's files, as of a disk.
my ($data, $kept) = ($tokyo->data_dir, $tokyo->basedir . '/kept');
$tokyo->stop;
system_or_bail('cp', '-a', $data, $kept);
$tokyo->start;
$tokyo->safe_psql('postgres', q[insert into item values (2, 'lost'); insert into item select i, 'lost' from generate_series(100, 2000) i]);
caught_up($paris, $tokyo);
$tokyo->stop;
system_or_bail('mv', $data, "$data.lost");
system_or_bail('mv', $kept, $data);
$tokyo->start;
$tokyo->safe_psql('postgres', q[insert into item values (3, 'new')]);

ok(wait_until(sub { status($paris, $name)->{state} eq 'error' }, 30), 'it stops') or diag(explain(status($paris, $name)));
my $status = status($paris, $name);
like($status->{last_error}, qr/the provider's WAL ends at [0-9A-F\/]+, before [0-9A-F\/]+, up to where its transactions are applied here/, 'and says why');
like($status->{error_hint}, qr/copy_data => false/, 'and what to do');

# The hint is followed.
$paris->safe_psql('postgres', "select braid.drop_subscription('$name')");
subscribe($paris, $tokyo, copy_data => 'false');
caught_up($paris, $tokyo);
$tokyo->safe_psql('postgres', q[insert into item values (4, 'newer')]);
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', q[select string_agg(id || ' ' || v, ', ' order by id) from item where id < 100]), '1 kept, 2 lost, 4 newer', 'what comes from then on is applied');
$paris->safe_psql('postgres', "call braid.compare('$name', 'item')");
$paris->safe_psql('postgres', "call braid.repair('$name', 'item', side => 'provider')");
same_tables(\@both, 'item');
is($tokyo->safe_psql('postgres', q[select count(*) from item]), 3, 'all that the provider has');
done_testing();
