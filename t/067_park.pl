# on_error => 'park': a transaction that can't be applied is set aside with what depends on it, everything else flows on; it survives a restart, is applied
# later, in order and under its own version, or given up.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '', conf => "braid.appliers_per_subscription = 4\n");

on_all('create table item (id int primary key, v text); create table other (id int primary key, v text)', $tokyo, $paris);
my $name = subscribe($paris, $tokyo, on_error => "'park'");

# SQL's answer at the subscriber.
sub here { return $paris->safe_psql('postgres', shift) }

# Parked transactions: state, and the place in the list of the one that each waits for.
sub parked
{
	return here(q[with p as (select *, row_number() over (order by parked_id) as n from braid.parked_transactions where state <> 'skipped')
		select string_agg(state || coalesce(' ' || (select q.n from p q where q.parked_id = p.waits_for), ''), ', ' order by parked_id) from p]);
}

sub ids { return split /\n/, here(q[select parked_id from braid.parked_transactions where state <> 'skipped' order by parked_id]) }

sub retry
{
	my ($id) = @_;
	my ($out, $err) = ('', '');
	my $status = $paris->psql('postgres', "select braid.retry_parked('$name'" . (defined $id ? ", $id" : '') . ')', stdout => \$out, stderr => \$err);
	return ($status == 0 ? $out : 'error', $err);
}

sub versions_are_the_sources
{
	my ($table, $why) = @_;
	my $sql = "select id || ' ' || pg_xact_commit_timestamp(xmin) from $table order by id";
	is(here($sql), $tokyo->safe_psql('postgres', $sql), "$why: rows of $table have the source's timestamps");
	return;
}

foreach my $mode (q[apply_mode => 'parallel'], q[apply_mode => 'serial'], q[apply_mode => 'parallel', commit_order => 'relaxed'], q[apply_mode => 'batch', commit_order => 'source'],
	q[apply_mode => 'aggregate'], q[apply_mode => 'batch', commit_order => 'relaxed', consolidate => true])
{
	here("select braid.alter_subscription('$name', $mode)");
	$tokyo->safe_psql('postgres', 'truncate item, other');
	caught_up($paris, $tokyo);

	# A constraint that is only here.
	here(q[alter table item add constraint short check (length(v) < 10)]);
	$tokyo->safe_psql('postgres', $_)
	  for q[insert into item select i, 'v' || i from generate_series(1, 5) i],
	  q[begin; update item set v = 'much too long' where id = 1; insert into other values (1, 'with it'); commit],
	  q[insert into other values (2, 'alone')],
	  q[update other set v = 'after' where id = 1],
	  q[update item set v = 'short' where id = 1],
	  q[begin; update item set v = 'fine' where id = 2; update other set v = 'fine' where id = 2; commit],
	  q[begin; update item set v = 'both' where id in (1, 3); commit],
	  q[update item set v = 'three' where id = 3],
	  q[update item set v = 'four' where id = 4];
	caught_up($paris, $tokyo);
	is(parked(), 'failed, waiting 1, waiting 1, waiting 3, waiting 4', "$mode: one fails, four wait");
	is(here(q[select string_agg(id || v, ',' order by id) from item]), '1v1,2fine,3v3,4four,5v5', "$mode: what is independent is there");
	is(here(q[select string_agg(id || v, ',' order by id) from other]), '2fine', "$mode: and nothing of what is parked");
	is(status($paris, $name)->{state}, 'streaming', "$mode: the subscription runs");
	is(status($paris, $name)->{parked}, '5', "$mode: and says how many are parked");

	# The cause is still there.
	my ($done, $said) = retry();
	is($done, '0', "$mode: nothing can be applied yet");
	like($said, qr/WARNING.*still has 5 parked/s, "$mode: and the session is told");

	here('alter table item drop constraint short');
	is((retry())[0], '5', "$mode: all are applied");
	caught_up($paris, $tokyo);
	same_tables([ $tokyo, $paris ], qw(item other));
	versions_are_the_sources($_, $mode) for qw(item other);
	is(here('select count(*) from braid.parked_transaction') . here('select count(*) from braid.parked_record'), '00', "$mode: nothing is left");
}

done_testing();
