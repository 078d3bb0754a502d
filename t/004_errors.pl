# A transaction that can't be applied stops the subscription. The subscription says why, holds its
# place, and can be continued, or the transaction be left out.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '');

on_all('create table item (id int primary key, name text, note text)', $tokyo, $paris);
on_all('create table plain (id int primary key, v text)', $tokyo, $paris);
my $name = subscribe($paris, $tokyo);

sub stopped
{
	my ($why) = @_;
	ok(wait_until(sub { status($paris, $name)->{state} eq 'error' }, 30), "the subscription stops: $why")
	  or diag(status($paris, $name)->{state});
	return status($paris, $name);
}

# A column that the subscriber lacks.
$paris->safe_psql('postgres', 'alter table item drop column note');
$tokyo->safe_psql('postgres', q[insert into item values (1, 'one', 'first')]);
my $status = stopped('a column is missing');
like($status->{last_error}, qr/note/, 'the message names the column');
like($status->{error_hint}, qr/add|column/i, 'there is a hint');
like($status->{error_lsn}, qr{^[0-9A-F]+/[0-9A-F]+$}, 'and the position of the transaction');

# The subscription holds its place: later transactions wait too, and nothing was applied in part.
$tokyo->safe_psql('postgres', q[insert into plain values (1, 'after')]);
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
$status = stopped('the cause is still there');
is($paris->safe_psql('postgres', 'select (select count(*) from item), (select count(*) from plain)'), '0|0', 'nothing went past it');

# Mended and continued.
$paris->safe_psql('postgres', 'alter table item add column note text');
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], qw(item plain));
is(status($paris, $name)->{last_error}, '', 'no error is shown any more');

# A missing table.
on_all('create table late (id int primary key)', $tokyo, $paris);
$paris->safe_psql('postgres', "select braid.refresh_subscription('$name')");
$paris->safe_psql('postgres', "select braid.wait_for_subscription('$name')");
$paris->safe_psql('postgres', 'drop table late');
$tokyo->safe_psql('postgres', 'insert into late values (1)');
$status = stopped('a table is missing');
like($status->{last_error}, qr/late/, 'the message names the table');
like($status->{error_hint}, qr/create|publish/i, 'and the hint says what to do');
$paris->safe_psql('postgres', 'create table late (id int primary key)');
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'late');

# A row that the subscriber's own constraint refuses, among others that are fine; then the explicit
# way past.
$paris->safe_psql('postgres', q[alter table plain add constraint short check (length(v) < 10)]);
$tokyo->safe_psql('postgres', q[begin; insert into plain values (2, 'fine'); insert into plain values (3, 'not fine at all'); commit]);
$tokyo->safe_psql('postgres', q[insert into plain values (4, 'next')]);
$status = stopped('a check constraint is violated');
like($status->{last_error}, qr/short/, 'the message names the constraint');
like($status->{error_hint}, qr/enable_subscription.*skip_transaction/, 'and the hint has the ways on');
isnt($paris->psql('postgres', "select braid.skip_transaction('$name', '0/1')"), 0, 'another position is refused');
$paris->safe_psql('postgres', "select braid.skip_transaction('$name', '$status->{error_lsn}')");
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')") if status($paris, $name)->{state} eq 'error';
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', q[select string_agg(id::text, ',' order by id) from plain]), '1,4', 'that transaction is left out as a whole, the next is there');

# A passing error (here a trigger that reports a missing lock) is retried without a message for the
# user.
$paris->safe_psql('postgres', q[
	alter table plain drop constraint short;
	create table hold (id int);
	insert into hold values (1);
	create function held() returns trigger language plpgsql as $$ begin
		if exists (select from public.hold) then raise lock_not_available using message = 'held'; end if;
		return new;
	end $$;
	create trigger held before insert on item for each row execute function held();
	alter table item enable always trigger held;
]);
my $retries = q[select coalesce(sum(retries), 0) from braid.apply_workers];
my $before = $paris->safe_psql('postgres', $retries);
$tokyo->safe_psql('postgres', q[insert into item values (2, 'two', 'second')]);
ok(wait_until(sub { $paris->safe_psql('postgres', $retries) > $before }, 30), 'it is tried again');
isnt(status($paris, $name)->{state}, 'error', 'a lock that is held is no reason to stop');
is($paris->safe_psql('postgres', 'select count(*) from item where id = 2'), '0', 'nothing of it is there');
$paris->safe_psql('postgres', 'delete from hold');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'item');

done_testing();
