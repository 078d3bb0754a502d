# A row loses to another one on a node that then can't announce the deletion: the applier is ended
# in between, or fails. The others get it all the same, and soon, though they never see the two rows
# together.

use strict;
use warnings;

use Braid;
use Test::More;
use Time::HiRes qw(time);

my @nodes = my ($tokyo, $paris) = map { new_node($_) } qw(tokyo paris);
on_all('create table account (id int primary key, email text unique, v text)', @nodes);
my $to_tokyo = subscribe($tokyo, $paris);
subscribe($paris, $tokyo);
sub rows { return $_[0]->safe_psql('postgres', q[select coalesce(string_agg(a::text, ' ' order by id), '') from account a]); }
sub untold { return $paris->safe_psql('postgres', 'select count(*) from braid.displacement'); }

# Paris announces a deletion by deleting a row of this table.
$paris->safe_psql('postgres', q[
	create function hold() returns trigger language plpgsql as $$ begin perform pg_advisory_xact_lock(1); return old; end $$;
	create function refuse() returns trigger language plpgsql as $$ begin raise exception 'not now' using errcode = 'lock_not_available'; end $$;
	create trigger hold before delete on braid.displacement for each row execute function hold();
	create trigger refuse before delete on braid.displacement for each row execute function refuse();
	alter table braid.displacement disable trigger all;
]);

# Paris has the loser, and what it lost to comes from tokyo, where that has another key before the
# loser is there.
sub meet
{
	my ($email) = @_;
	$tokyo->safe_psql('postgres', "select braid.disable_subscription('$to_tokyo')");
	$paris->poll_query_until('postgres', "select not exists (select from pg_stat_replication where application_name = '$to_tokyo')") or die;
	$paris->safe_psql('postgres', qq[insert into account values (1, '$email', 'loser')]);
	$tokyo->safe_psql('postgres', qq[insert into account values (2, '$email', 'winner')]);
	$tokyo->safe_psql('postgres', q[update account set email = 'free' where id = 2]);
	return;
}

sub tokyo_hears
{
	my ($what) = @_;
	$tokyo->safe_psql('postgres', "select braid.enable_subscription('$to_tokyo')");
	my $since = time;
	# The loser comes first.
	caught_up($tokyo, $paris);
	ok(wait_until(sub { rows($tokyo) eq '(2,free,winner)' }, 90), "$what: tokyo hears of the row that has left")
	  or diag(rows($tokyo));
	cmp_ok(time - $since, '<', 25, "$what: soon");
	caught_up($paris, $tokyo);
	is(rows($paris), '(2,free,winner)', "$what: as it is in paris");
	is(untold(), 0, "$what: nothing is left to be told");
	return;
}

# The manager has looked at everything that it looks at when it is new.
sleep 6;

$paris->safe_psql('postgres', 'alter table braid.displacement enable always trigger hold');
my $holder = $paris->background_psql('postgres');
$holder->query_safe('select pg_advisory_lock(1)');
meet('a');
my $waiting = q[select pid from pg_stat_activity where backend_type = 'braid applier' and wait_event = 'advisory'];
ok(wait_until(sub { $paris->safe_psql('postgres', $waiting) ne '' }, 30), 'an applier is about to tell');
is(untold(), 1, 'and the row has left');
my $pid = $paris->safe_psql('postgres', $waiting);
$paris->safe_psql('postgres', "select pg_terminate_backend($pid)");
ok(wait_until(sub { $paris->safe_psql('postgres', "select count(*) from pg_stat_activity where pid = $pid") eq '0' }, 30), 'it is ended');
$holder->query_safe('select pg_advisory_unlock(1)');
$holder->quit;
tokyo_hears('ended');

on_all('truncate account', $tokyo);
caught_up($paris, $tokyo);
$paris->safe_psql('postgres', 'alter table braid.displacement disable trigger hold, enable always trigger refuse');
meet('b');
ok(wait_until(sub { untold() eq '1' }, 30), 'the row has left, and telling fails');
caught_up($paris, $tokyo);
$paris->safe_psql('postgres', 'alter table braid.displacement disable trigger refuse');
tokyo_hears('failed');

$_->stop for @nodes;
done_testing();
