# A table is copied from one node while another one's rows arrive, and two of them are equal under a
# further unique key. The copy is made again until both nodes have received each other's changes,
# and one of the two rows is deleted on all of them, without help.

use strict;
use warnings;

use Braid;
use Test::More;

my ($tokyo, $paris, $oslo) = map { new_node($_, conf => "braid.retry_interval = 500ms\nbraid.retry_interval_max = 5s\n") } qw(tokyo paris oslo);
my @nodes = ($tokyo, $paris, $oslo);
sub sql { return $_[0]->safe_psql('postgres', $_[1]) }
on_all('create table account (id int primary key, code int unique)', @nodes);
sql($oslo, q[
	create function hold() returns trigger language plpgsql as $$ begin perform pg_advisory_xact_lock_shared(1); return new; end $$;
	create trigger hold before insert on account for each row when (new.id = 0) execute function hold();
	alter table account enable replica trigger hold;
]);
subscribe($tokyo, $paris, copy_data => 'false');
subscribe($paris, $tokyo, copy_data => 'false');
subscribe($oslo, $paris, copy_data => 'false');
subscribe($_, $oslo, copy_data => 'false') for $tokyo, $paris;

# While cut off from each other, tokyo and paris give a code to two rows. The later one is once a
# row of tokyo, once a row of paris.
my @cut = ([ $tokyo, 'tokyo_from_paris' ], [ $paris, 'paris_from_tokyo' ]);
disable($_->[0], $_->[1]) for @cut;
sql($tokyo, 'insert into account values (0, 0), (1, 5)');
my $holder = $oslo->background_psql('postgres');
$holder->query_safe('select pg_advisory_lock(1)');
my $name = subscribe($oslo, $tokyo, wait => 0);
ok(wait_until(sub { sql($oslo, "select count(*) from pg_stat_activity where backend_type = 'braid copy' and wait_event = 'advisory'") eq '1' }, 60), 'the table is being copied');
sql($paris, 'insert into account values (2, 5), (3, 6)');
sql($tokyo, 'insert into account values (4, 6)');
caught_up($oslo, $paris);
$holder->query_safe('select pg_advisory_unlock(1)');
$holder->quit;
ok(wait_until(sub { sql($oslo, q[select count(*) from braid.subscription_tables where copy_error like '%conflict with % of the provider''s rows%']) eq '1' }, 60), 'rows are kept out');
isnt(status($oslo, $name)->{state}, 'error', 'which does not stop the subscription');
like(sql($oslo, 'select copy_error_hint from braid.subscription_tables where copy_error is not null'), qr/copied again by itself/, 'and says what will become of it');

sql($_->[0], "select braid.enable_subscription('$_->[1]')") for @cut;
ok(wait_until(sub { sql($oslo, "select state from braid.subscription_table where relation = 'account'::regclass and subscription_id = (select subscription_id from braid.subscription where subscription_name = '$name')") eq 'ready' }, 60), 'once they meet, it is copied')
  or diag(sql($oslo, 'select * from braid.subscription_tables'));
converged(@nodes);
converged(@nodes);
same_tables(\@nodes, 'account');
is(sql($_, q[select string_agg(id || ':' || code, ' ' order by id) from account]), '0:0 2:5 4:6', 'of each two the later one is left at ' . $_->name) for @nodes;

$_->stop for @nodes;
done_testing();
