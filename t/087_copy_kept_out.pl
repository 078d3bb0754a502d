# A copy brings rows that a unique key of this node alone keeps out. The subscription stops and
# reports it, whether others write meanwhile or not. No row is left out silently.

use strict;
use warnings;

use Braid;
use Test::More;

my ($tokyo, $paris, $oslo) = map { new_node($_, conf => "braid.retry_interval = 50ms\nbraid.retry_interval_max = 100ms\n") } qw(tokyo paris oslo);
on_all('create table account (id int primary key, code int)', $tokyo, $paris, $oslo);
$oslo->safe_psql('postgres', q[
	alter table account add unique (code);
	create function hold() returns trigger language plpgsql as $$ begin perform pg_advisory_xact_lock_shared(1); return new; end $$;
	create trigger hold before insert on account for each row when (new.id = 0) execute function hold();
	alter table account enable replica trigger hold;
]);
$tokyo->safe_psql('postgres', 'insert into account values (0, 0), (1, 1), (2, 1)');
subscribe($oslo, $paris, copy_data => 'false');

my $name = subscribe($oslo, $tokyo, wait => 0);
sub stops
{
	my ($what, $pattern) = @_;
	ok(wait_until(sub { status($oslo, $name)->{state} eq 'error' }, 60), "$what: it stops") or diag(status($oslo, $name)->{state});
	like(status($oslo, $name)->{last_error}, $pattern, "$what: and says why");
	return;
}
stops('alone', qr/duplicate key value violates unique constraint "account_code_key"/);
is($oslo->safe_psql('postgres', 'select count(*) from account'), 0, 'nothing was copied');

my $holder = $oslo->background_psql('postgres');
$holder->query_safe('select pg_advisory_lock(1)');
$oslo->safe_psql('postgres', "select braid.enable_subscription('$name')");
$oslo->poll_query_until('postgres', "select count(*) = 1 from pg_stat_activity where backend_type = 'braid copy' and wait_event = 'advisory'") or die;
$paris->safe_psql('postgres', 'insert into account values (9, 9)');
caught_up($oslo, $paris);
$holder->query_safe('select pg_advisory_unlock(1)');
$holder->quit;
stops('beside another row', qr/rows in table "public.account" conflict with 1 of the provider's rows/);
is($oslo->safe_psql('postgres', 'select string_agg(id::text, $$ $$) from account'), '9', 'nothing was copied then either');

# Without the key the table is copied again.
$oslo->safe_psql('postgres', qq[
	alter table account drop constraint account_code_key;
	select braid.resync_table('$name', 'account', truncate_first => true);
	select braid.enable_subscription('$name');
]);
$oslo->safe_psql('postgres', "select braid.wait_for_subscription('$name')", timeout => $PostgreSQL::Test::Utils::timeout_default);
is($oslo->safe_psql('postgres', 'select string_agg(id::text, $$ $$ order by id) from account'), '0 1 2', 'and has what the provider has');

$_->stop for $tokyo, $paris, $oslo;
done_testing();
