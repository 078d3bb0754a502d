# A conflict function that fails, takes too long, is gone or gives what can't be: the subscription stops and says which function,
# table, key and kind, nothing is lost, and another rule lets it go on. Whose rights it has.

use strict;
use warnings;

use Braid;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
my @both = ($tokyo, $paris);
on_all(q[
	create table account (id int primary key, n int, v text);
	create table secret (v text primary key);
	create role clerk;
	grant usage on schema braid to clerk;
	grant create on schema public to clerk;
	grant insert on account to clerk;
	alter system set braid.conflict_function_timeout = '300ms';
	select pg_reload_conf();
	create function dividing(local account, remote account, before account, info braid.conflict) returns account language plpgsql as $$
	begin
		local.n := 1 / (local.n - local.n);
		return local;
	end
	$$;
	create function sleeping(local account, remote account, before account, info braid.conflict) returns account language plpgsql as $$
	begin
		perform pg_sleep(20);
		return local;
	end
	$$;
	create function looping(local account, remote account, before account, info braid.conflict) returns account language plpgsql as $$
	begin
		loop
			local.n := local.n # 1;
		end loop;
	end
	$$;
	create function moving(local account, remote account, before account, info braid.conflict) returns account language plpgsql as $$
	begin
		local.id := local.id + 1000;
		return local;
	end
	$$;
	create function overstepping(local account, remote account, before account, info braid.conflict) returns account language plpgsql
	set search_path = public as $$
	begin
		insert into secret values (current_user);
		return local;
	end
	$$;
	alter function overstepping owner to clerk;
	create function asking(local account, remote account, before account, info braid.conflict) returns account language plpgsql
	set search_path = public set datestyle = 'German' as $$
	begin
		local.v := concat_ws(' ', current_user, current_setting('session_replication_role'), current_setting('datestyle'), before is null);
		return local;
	end
	$$;
	alter function asking owner to clerk;
], @both);
subscribe($paris, $tokyo);
my @stream = ($paris, 'paris_from_tokyo');
$tokyo->safe_psql('postgres', q[insert into account select i, 0, 'here' from generate_series(1, 20) i]);
converged(@both);

my $id = 0;

# A row that both change; how the subscription fares with that function at paris.
sub with
{
	my ($function) = @_;
	$id++;
	$paris->safe_psql('postgres', "select braid.set_conflict_resolution('account', 'update_origin_differs', 'function', '$function')");
	$paris->safe_psql('postgres', "update account set v = 'there' where id = $id");
	$tokyo->safe_psql('postgres', "update account set v = 'here too' where id = $id");
	return;
}

sub stops
{
	my ($message, $detail, $what) = @_;
	ok(wait_until(sub { status(@stream)->{state} eq 'error' }, 30), "$what: it stops");
	my $status = status(@stream);
	like($status->{last_error}, $message, "$what: it says why");
	like($status->{error_hint}, qr/braid\.set_conflict_resolution.*braid\.enable_subscription/, "$what: and what to do");
	like($paris->safe_psql('postgres', 'select error_detail from braid.subscription_detail'), $detail, "$what: and where");
	is($paris->safe_psql('postgres', "select v from account where id = $id"), 'there', "$what: nothing was written");
	return;
}

sub goes_on
{
	my ($what) = @_;
	$paris->safe_psql('postgres', "select braid.set_conflict_resolution('account', 'update_origin_differs', null)");
	$paris->safe_psql('postgres', "select braid.enable_subscription('paris_from_tokyo')");
	caught_up($paris, $tokyo);
	is($paris->safe_psql('postgres', "select v from account where id = $id"), 'here too', "$what: another rule lets it go on");
	return;
}

my $where = qr/Table "public\.account", key \{"id": \d+\}, conflict update_origin_differs\./;
for my $case (
	[ 'dividing', qr/^conflict function public\.dividing\(.*\) failed$/, qr/22012: division by zero\. $where/ ],
	[ 'sleeping', qr/^conflict function public\.sleeping\(.*\) was stopped$/, qr/300 ms \(braid\.conflict_function_timeout\)\. $where/ ],
	[ 'looping', qr/^conflict function public\.looping\(.*\) was stopped$/, qr/300 ms/ ],
	[ 'moving', qr/^conflict function public\.moving\(.*\) changed the key of a row$/, qr/must have the key/ ],
	[ 'overstepping', qr/^conflict function public\.overstepping\(.*\) failed$/, qr/42501: permission denied for table secret\. $where/ ])
{
	my ($function, $message, $detail) = @$case;
	with($function);
	stops($message, $detail, $function);
	goes_on($function);
}
is($paris->safe_psql('postgres', 'select count(*) from secret'), '0', 'a function has the rights of its owner');

with('asking');
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', "select v from account where id = $id"), 'clerk replica German, DMY t', 'is that owner, with its own settings');

# Gone, or another one; only the very function counts.
$paris->safe_psql('postgres', 'create function fleeting(account, account, account, braid.conflict) returns account language sql as $$ select $1 $$');
$paris->safe_psql('postgres', "select braid.set_conflict_resolution('account', 'update_origin_differs', 'function', 'fleeting')");
$paris->safe_psql('postgres', 'drop function fleeting; create function fleeting(account, account, account, braid.conflict) returns account language sql as $$ select $1 $$');
$id++;
$paris->safe_psql('postgres', "update account set v = 'there' where id = $id");
$tokyo->safe_psql('postgres', "update account set v = 'here too' where id = $id");
stops(qr/^conflict function with OID \d+ does not exist any more$/, qr/^$/, 'a function that is gone');
goes_on('a function that is gone');

# A lock that it waits for is no failure, as long as it is to be had in time.
$paris->safe_psql('postgres', q[
	create function waiting(local account, remote account, before account, info braid.conflict) returns account language plpgsql
	set search_path = public set lock_timeout = '20ms' as $$
	begin
		perform from secret where v = 'key' for update;
		return remote;
	end
	$$;
	insert into secret values ('key');
]);
my $holder = $paris->background_psql('postgres');
$holder->query_safe(q[begin; update secret set v = v where v = 'key']);
with('waiting');
ok(wait_until(sub { $paris->safe_psql('postgres', 'select retries from braid.subscription_detail') > 0 }, 20), 'a lock: it is tried again');
isnt(status(@stream)->{state}, 'error', 'a lock: nothing stops');
$holder->query_safe('commit');
$holder->quit;
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', "select v from account where id = $id"), 'here too', 'a lock: then it is had');

# A large transaction, which is applied while it comes.
$paris->safe_psql('postgres', "alter system set braid.apply_buffer_size = '1MB'; alter system set braid.conflict_function_timeout = '10s'");
$paris->restart;
$paris->safe_psql('postgres', q[
	create function noting(local account, remote account, before account, info braid.conflict) returns account language plpgsql
	set search_path = public as $$
	begin
		insert into secret values (info.key ->> 'id');
		return remote;
	end
	$$;
	select braid.set_conflict_resolution('account', 'update_origin_differs', 'function', 'noting', replicate => true);
	update account set v = 'there' where id in (18, 20);
]);
$tokyo->safe_psql('postgres', q[
	begin;
	insert into account select i, 0, repeat('x', 100) from generate_series(1001, 31000) i;
	update account set v = 'here too' where id in (18, 20);
	commit;
]);
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', q[select string_agg(v, ' ' order by v) from secret where v ~ '^\d']), '18 20', 'a large transaction: each call once');
is($paris->safe_psql('postgres', q[select v from account where id = 18]), 'here too', 'a large transaction is applied');

done_testing();
