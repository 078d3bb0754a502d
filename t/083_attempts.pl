# Number of attempts at a transaction that can't be applied: no limit for errors that pass by
# themselves, three for a violated constraint, however often it has failed before for something
# else.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '');
on_all('create table item (id int primary key, n int not null)', $tokyo, $paris);
# Fails with one SQLSTATE of the list after the other, then no more.
$paris->safe_psql('postgres', q[
	create sequence attempt;
	create table failing (sqlstates text[]);
	insert into failing values ('{}');
	create function fail() returns trigger language plpgsql as $$
	declare state text;
	begin
		select sqlstates[nextval('public.attempt')] into state from public.failing;
		if state is not null then
			raise exception 'attempt %', currval('public.attempt') using errcode = state;
		end if;
		return new;
	end $$;
	create trigger fail before insert on item for each row execute function fail();
	alter table item enable always trigger fail;
]);
my $name = subscribe($paris, $tokyo);

my $id = 0;
sub fails_with
{
	my (@states) = @_;
	my $list = join ',', @states;
	$paris->safe_psql('postgres', "alter sequence attempt restart; update failing set sqlstates = '{$list}'");
	$id++;
	$tokyo->safe_psql('postgres', "insert into item values ($id, 0)");
	return;
}

sub comes
{
	my ($what) = @_;
	ok(wait_until(sub { $paris->safe_psql('postgres', "select count(*) from item where id = $id") == 1 }, 30), $what)
		or diag(explain(status($paris, $name)));
	return;
}

fails_with(('40001') x 12);
comes('one that fails for what passes is tried on');
fails_with('23505', '23P01');
comes('two violations of constraints are not the end');
fails_with(('40001') x 5, '23505', ('55P03') x 3, '23505');
comes('nor are they after failures of another kind');
is($paris->safe_psql('postgres', "select failures from braid.subscription_detail where name = '$name'"), '0', 'without a restart');

fails_with('40001', ('23505') x 3);
ok(wait_until(sub { status($paris, $name)->{state} eq 'error' }, 30), 'the third one is');
like(status($paris, $name)->{last_error}, qr/attempt 4/, 'said as it was');
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
comes('and it goes on from there');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'item');

done_testing();
