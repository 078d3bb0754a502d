# A conflict function fails, takes too long or returns an invalid row. Its transaction is parked,
# with its dependents and with the function, table, key and kind, and everything else goes on. Or
# the subscription stops, if so configured or if the function was dropped. Nothing is lost, and
# another function or rule lets the transaction be applied. Also: the rights of the function.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
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
	-- Told to end, it goes on.
	create function catching(local account, remote account, before account, info braid.conflict) returns account language plpgsql as $$
	begin
		loop
			begin
				perform pg_sleep(0.2);
			exception when query_canceled then
				local.n := local.n # 1;
			end;
		end loop;
	end
	$$;
	create function late(local account, remote account, before account, info braid.conflict) returns account language plpgsql as $$
	begin
		perform pg_sleep(20);
		return local;
	exception when query_canceled then
		return remote;
	end
	$$;
	create function rewriting(local account, remote account, before account, info braid.conflict) returns account language plpgsql
	set search_path = public as $$
	begin
		update account set v = 'inner' where id = local.id;
		return remote;
	end
	$$;
	create function removing(local account, remote account, before account, info braid.conflict) returns account language plpgsql
	set search_path = public as $$
	begin
		delete from account where id = local.id;
		return local;
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
$tokyo->safe_psql('postgres', q[insert into account select i, 0, 'here' from generate_series(1, 40) i]);
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

# Only what depends on the row waits.
sub parks
{
	my ($message, $detail, $what) = @_;
	$tokyo->safe_psql('postgres', "update account set n = n + 1 where id = 37");
	$tokyo->safe_psql('postgres', "update account set v = 'later' where id = $id");
	caught_up($paris, $tokyo);
	my $status = status(@stream);
	is($status->{parked}, '2', "$what: two are parked");
	like($status->{state}, qr/streaming|catching up/, "$what: and it runs");
	is($paris->safe_psql('postgres', "select string_agg(concat_ws(' ', state, waits_for is not null, error_sqlstate), ', ' order by parked_id) from braid.parked_transactions"),
		'failed f 38000, waiting t', "$what: the one that failed, and the one behind it");
	like($paris->safe_psql('postgres', "select error from braid.parked_transactions where state = 'failed'"), $message, "$what: it says why");
	like($paris->safe_psql('postgres', "select error_detail from braid.parked_transactions where state = 'failed'"), $detail, "$what: and where");
	like($paris->safe_psql('postgres', "select error_hint from braid.parked_transactions where state = 'failed'"), qr/Correct the function.*braid\.retry_parked/, "$what: and what to do");
	is($paris->safe_psql('postgres', "select v from account where id = $id"), 'there', "$what: nothing was written");
	is($paris->safe_psql('postgres', 'select n from account where id = 37'), $tokyo->safe_psql('postgres', 'select n from account where id = 37'), "$what: the rest flows");
	is($paris->safe_psql('postgres', "select braid.retry_parked('paris_from_tokyo')"), '0', "$what: it fails again");
	return;
}

sub is_applied
{
	my ($what) = @_;
	is($paris->safe_psql('postgres', "select braid.retry_parked('paris_from_tokyo')"), '2', "$what: both are applied");
	is($paris->safe_psql('postgres', "select v from account where id = $id"), 'later', "$what: and the row is the last one");
	is(status(@stream)->{parked}, '0', "$what: nothing is parked any more");
	return;
}

my $where = qr/Table "public\.account", key \{"id": \d+\}, conflict update_origin_differs\./;
for my $case (
	[ 'dividing', qr/^conflict function public\.dividing\(.*\) failed$/, qr/22012: division by zero\. $where/ ],
	[ 'sleeping', qr/^conflict function public\.sleeping\(.*\) was stopped$/, qr/300 ms \(braid\.conflict_function_timeout\)\. $where/ ],
	[ 'looping', qr/^conflict function public\.looping\(.*\) was stopped$/, qr/300 ms/ ],
	[ 'catching', qr/^conflict function public\.catching\(.*\) was stopped$/, qr/300 ms/ ],
	[ 'late', qr/^conflict function public\.late\(.*\) was stopped$/, qr/300 ms/ ],
	[ 'rewriting', qr/^conflict function public\.rewriting\(.*\) changed the row that it was asked about$/, qr/what it returns, null where it is to go\. $where/ ],
	[ 'removing', qr/^conflict function public\.removing\(.*\) changed the row that it was asked about$/, $where ],
	[ 'moving', qr/^conflict function public\.moving\(.*\) changed the key of a row$/, qr/must have the key/ ],
	[ 'overstepping', qr/^conflict function public\.overstepping\(.*\) failed$/, qr/42501: permission denied for table secret\. $where/ ])
{
	my ($function, $message, $detail) = @$case;
	with($function);
	parks($message, $detail, $function);
	# Another body, or another rule.
	if ($function eq 'dividing')
	{
		$paris->safe_psql('postgres', q[create or replace function dividing(local account, remote account, before account, info braid.conflict) returns account language sql as 'select $2']);
	}
	else
	{
		$paris->safe_psql('postgres', "select braid.set_conflict_resolution('account', 'update_origin_differs', null)");
	}
	is_applied($function);
}
like(slurp_file($paris->logfile), qr/WARNING:.*has parked the transaction that ends at .*: conflict function public\.dividing\(.*\) failed/, 'the log says that it is parked');

# The subscription stops if so configured.
my $dividing = q[create or replace function dividing(local account, remote account, before account, info braid.conflict) returns account language plpgsql as $$
	begin
		local.n := 1 / (local.n - local.n);
		return local;
	end
	$$];
for my $option (q[on_error => 'stop_always'], q[on_error => 'stop', disable_on_error => true])
{
	$paris->safe_psql('postgres', $dividing);
	$paris->safe_psql('postgres', "select braid.alter_subscription('paris_from_tokyo', $option)");
	with('dividing');
	stops(qr/^conflict function public\.dividing\(.*\) failed$/, $where, $option);
	is(status(@stream)->{parked}, '0', "$option: nothing is parked");
	goes_on($option);
}
$paris->safe_psql('postgres', q[select braid.alter_subscription('paris_from_tokyo', on_error => 'stop', disable_on_error => false)]);

# So it does for whatever else fails, also with the same SQLSTATE.
$paris->safe_psql('postgres', q[
	create function refuse() returns trigger language plpgsql as $$ begin raise exception 'conflict function x failed' using errcode = '38000'; end $$;
	create trigger refuse before update on account for each row execute function refuse();
	alter table account enable always trigger refuse;
]);
$tokyo->safe_psql('postgres', q[update account set n = n + 1 where id = 36]);
ok(wait_until(sub { status(@stream)->{state} eq 'error' }, 30), 'a trigger that fails stops it');
is(status(@stream)->{parked}, '0', 'and nothing is parked');
$paris->safe_psql('postgres', q[drop trigger refuse on account; select braid.enable_subscription('paris_from_tokyo')]);
caught_up($paris, $tokyo);

# In batches, and in a transaction that is committed in chunks: committed chunks stay, and the rest
# is parked.
$paris->safe_psql('postgres', $dividing);
for my $option (q[apply_mode => 'batch'], q[apply_mode => 'parallel', split_transactions_above => 2])
{
	$paris->safe_psql('postgres', "select braid.alter_subscription('paris_from_tokyo', $option)");
	$id++;
	$paris->safe_psql('postgres', "select braid.set_conflict_resolution('account', 'update_origin_differs', 'function', 'dividing'); update account set v = 'there' where id = $id");
	$tokyo->safe_psql('postgres', "begin; insert into account values (${id}01, 0), (${id}02, 0); update account set v = 'here too' where id = $id; commit");
	$tokyo->safe_psql('postgres', "update account set v = \$q\$$option\$q\$ where id = 37");
	caught_up($paris, $tokyo);
	my $split = $option =~ /split/;
	is($paris->safe_psql('postgres', 'select state, from_change, changes from braid.parked_transactions'), $split ? 'failed|3|1' : 'failed|1|3', "$option: it is parked");
	is($paris->safe_psql('postgres', "select count(*) from account where id > ${id}00 and id < ${id}99"), $split ? '2' : '0', "$option: what is committed of it stays");
	is($paris->safe_psql('postgres', 'select v from account where id = 37'), $option, "$option: the rest flows");
	$paris->safe_psql('postgres', "select braid.set_conflict_resolution('account', 'update_origin_differs', null)");
	is($paris->safe_psql('postgres', "select braid.retry_parked('paris_from_tokyo')"), '1', "$option: then it is applied");
	is($paris->safe_psql('postgres', "select count(*), (select v from account where id = $id) from account where id > ${id}00 and id < ${id}99"), '2|here too', "$option: as a whole");
}
$paris->safe_psql('postgres', q[select braid.alter_subscription('paris_from_tokyo', split_transactions_above => 0)]);
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

# A lock that it waits for is no failure, as long as it is to be had in time. From here on no
# function is to take too long, on a busy machine either.
$paris->safe_psql('postgres', "alter system set braid.conflict_function_timeout = '10s'");
$paris->reload;
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
$paris->safe_psql('postgres', "alter system set braid.apply_buffer_size = '1MB'");
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
	update account set v = 'there' where id in (38, 40);
]);
$tokyo->safe_psql('postgres', q[
	begin;
	insert into account select i, 0, repeat('x', 100) from generate_series(5001, 35000) i;
	update account set v = 'here too' where id in (38, 40);
	commit;
]);
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', q[select string_agg(v, ' ' order by v) from secret where v ~ '^\d']), '38 40', 'a large transaction: each call once');
is($paris->safe_psql('postgres', q[select v from account where id = 38]), 'here too', 'a large transaction is applied');

# One for which it fails is set aside when it comes again; also where it was applied while it ran.
$paris->safe_psql('postgres', $dividing);
my $row = 40000;
for my $memory ('64MB', '64kB')
{
	$tokyo->safe_psql('postgres', $_) for "alter system set logical_decoding_work_mem = '$memory'", 'select pg_reload_conf()';
	$paris->safe_psql('postgres', "select braid.set_conflict_resolution('account', 'update_origin_differs', 'function', 'dividing'); update account set v = 'there' where id = 39");
	$tokyo->safe_psql('postgres', "begin; insert into account select i, 0, repeat('x', 100) from generate_series($row + 1, $row + 20000) i; update account set v = 'large $memory' where id = 39; commit");
	$tokyo->safe_psql('postgres', "insert into secret values ('$memory')");
	caught_up($paris, $tokyo);
	is($paris->safe_psql('postgres', 'select state, error_sqlstate, changes from braid.parked_transactions'), 'failed|38000|20001', "$memory: a large one is parked");
	is($paris->safe_psql('postgres', "select count(*) from secret where v = '$memory'"), '1', "$memory: the rest flows");
	$paris->safe_psql('postgres', "select braid.set_conflict_resolution('account', 'update_origin_differs', null)");
	is($paris->safe_psql('postgres', "select braid.retry_parked('paris_from_tokyo')"), '1', "$memory: then it is applied");
	is($paris->safe_psql('postgres', "select v, (select count(*) from account where id > $row) from account where id = 39"), "large $memory|20000", "$memory: as a whole");
	$row += 20000;
}

done_testing();
