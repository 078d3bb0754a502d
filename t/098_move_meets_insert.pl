# A row gets another key, at a node that does not have the row yet, while its insert arrives there
# by another stream: it must not stay under its old key.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($tokyo, $paris, $quito) = map { new_node($_) } qw(tokyo paris quito);
my @all = ($tokyo, $paris, $quito);
on_all('create table moving (k int primary key, v text); create table gate (id int primary key)', @all);
for my $subscriber (@all)
{
	for my $provider (@all) { subscribe($subscriber, $provider, copy_data => 'false') unless $subscriber == $provider; }
}
# Quito's transaction is not finished at paris while a session there holds the lock.
$paris->safe_psql('postgres', q[
	create function wait_at_gate() returns trigger language plpgsql as $$ begin perform pg_advisory_xact_lock(1); return new; end $$;
	create trigger wait_at_gate before insert on gate for each row execute function wait_at_gate();
	alter table gate enable always trigger wait_at_gate;
]);
sub at_paris { return $paris->safe_psql('postgres', $_[0]); }
sub rows { my ($node) = @_; return $node->safe_psql('postgres', q[select string_agg(k || ' ' || v, ', ' order by k) from moving]); }

for my $mode (qw(serial parallel batch aggregate))
{
	at_paris(qq[truncate moving]);
	converged(@all);
	at_paris(qq[select braid.alter_subscription('paris_from_quito', apply_mode => '$mode'); select braid.alter_subscription('paris_from_tokyo', apply_mode => '$mode')]);
	disable($paris, 'paris_from_tokyo');
	my $keeper = $paris->background_psql('postgres');
	$keeper->query_safe('select pg_advisory_lock(1)');
	$tokyo->safe_psql('postgres', q[insert into moving values (1, 'one'), (2, 'two')]);
	caught_up($quito, $tokyo);
	my $gate = at_paris('select coalesce(max(id), 0) + 1 from gate');
	$quito->safe_psql('postgres', qq[begin; update moving set k = 8, v = 'moved' where k = 1; insert into gate values ($gate); commit]);
	ok(wait_until(sub { at_paris(q[select count(*) from pg_locks where locktype = 'advisory' and not granted]) eq '1' }, 20), "$mode: the move is in hand at paris");
	my $retries = sub { at_paris(q[select sum(retries) from braid.subscription_detail where name = 'paris_from_tokyo']) };
	my $before = $retries->();
	at_paris(q[select braid.enable_subscription('paris_from_tokyo')]);
	ok(wait_until(sub { at_paris('select count(*) from moving where k = 1') ne '0' || $retries->() > $before }, 20), "$mode: the insertion was tried");
	is(at_paris('select count(*) from moving where k = 1'), 0, "$mode: the row is not let in under its old key");
	$keeper->query_safe('select pg_advisory_unlock(1)');
	$keeper->quit;
	converged(@all);
	is(rows($_), '2 two, 8 moved', "$mode: the rows at " . $_->name) for @all;
}

done_testing();
