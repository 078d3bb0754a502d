# A server that crashes at the same transaction each time does not go on like that. After
# braid.max_transaction_crashes times in a row the subscription stops with an error that names
# transaction and table. Other killed processes do not count.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep);

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '', conf => "braid.max_transaction_crashes = 3\n");
on_all(q[
	create table fine (id int primary key, v text);
	create table bad (id int primary key, v text);
	create table copied (id int primary key, v text);
], $tokyo, $paris);
# kill -9 of the process that calls it: the parent of the shell.
my $deadly = q[
	create table switch (is_on bool);
	insert into switch values (true);
	create function die() returns trigger language plpgsql security definer as $$
	begin
		if new.v = 'deadly' and (select is_on from public.switch) then
			copy (select 1) to program 'kill -9 $PPID';
			perform pg_sleep(10);
		end if;
		return new;
	end $$;
];
$paris->safe_psql('postgres', $deadly . q[
	create trigger die after insert or update on bad for each row execute function die();
	alter table bad enable always trigger die;
	create trigger die after insert on copied for each row execute function die();
	alter table copied enable always trigger die;
]);
my $name = subscribe($paris, $tokyo);

# How often the server of a node has restarted after a crash.
sub crashes
{
	my $log = slurp_file($paris->logfile);
	return scalar(() = $log =~ /all server processes terminated; reinitializing/g);
}

# The row of the subscription's status, as soon as it has stopped.
sub stopped
{
	my $status;
	wait_until(sub { $status = eval { status($paris, $name) }; ($status // {})->{state} && $status->{state} eq 'error' }, 60);
	return $status // {};
}

sub switch { my ($on) = @_; wait_until(sub { (attempt($paris, "update switch set is_on = $on"))[0] == 0 }, 30); return; }

my @modes = (
	[ 'by the leader or an applier', '' ],
	[ 'in a batch', q[apply_mode => 'aggregate'] ],
	[ 'in relaxed order', q[apply_mode => 'parallel', commit_order => 'relaxed'] ],
	[ 'while it runs', q[commit_order => 'source', streaming => 'parallel'] ],
);
my $id = 0;
for my $mode (@modes)
{
	my ($label, $options) = @$mode;
	if ($options)
	{
		my ($status, undef) = attempt($paris, "select braid.alter_subscription('$name', $options)");
		is($status, 0, "options are set, $label");
		$paris->safe_psql('postgres', "select braid.wait_for_subscription('$name')");
	}
	my $before = crashes();
	$tokyo->safe_psql('postgres', join ';', (map { $id++; "begin; insert into fine values ($id, 'a'); commit" } 1 .. 20),
		"begin; insert into fine values (" . ++$id . ", 'with it'); insert into bad values ($id, 'deadly'); commit",
		(map { $id++; "begin; insert into fine values ($id, 'a'); commit" } 1 .. 20));
	my $status = stopped();
	is($status->{state}, 'error', "the subscription has stopped, $label");
	like($status->{last_error}, qr{^applying transaction \d+ with its commit at \w+/\w+ has crashed the server 3 times in a row$}, "the error names the transaction, $label");
	my $detail = $paris->safe_psql('postgres', "select error_detail from braid.subscription where subscription_name = '$name'");
	is($detail, 'The last change that was begun is one of table "public.bad".', "and the table, $label");
	my $crashes = crashes() - $before;
	ok($crashes >= 3 && $crashes <= 4, "$crashes crashes, $label");
	isnt($status->{error_lsn}, '', "it can be skipped, $label");
	if ($label eq 'in a batch')
	{
		$paris->safe_psql('postgres', "select braid.skip_transaction('$name', '$status->{error_lsn}')");
	}
	else
	{
		switch('false');
		$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
	}
	ok(wait_until(sub { (attempt($paris, "select count(*) from fine where id = $id"))[1] eq '1' }, 30), "the rest is applied, $label");
	switch('true');
}
is($paris->safe_psql('postgres', 'select count(*) from fine'), $id - 1, 'all is there but what was skipped');
is($paris->safe_psql('postgres', 'select count(*) from bad'), @modes - 1, 'as of the other table');

# Others that are killed while the transaction is applied do not count, neither does what was killed
# at other transactions.
switch('false');
$paris->safe_psql('postgres', 'create table hold (id int primary key); insert into hold values (1)');
$paris->safe_psql('postgres', q[
	create function wait() returns trigger language plpgsql security definer as $$
	begin
		while exists (select from public.hold) loop
			perform pg_sleep(0.05);
		end loop;
		return new;
	end $$;
	create trigger wait after insert on bad for each row when (new.v = 'slow') execute function wait();
	alter table bad enable always trigger wait;
]);
$tokyo->safe_psql('postgres', "insert into bad values (1000, 'slow')");
for my $round (1 .. 5)
{
	ok(wait_until(sub {
		my (undef, $out) = attempt($paris, q[select count(*) from pg_stat_activity where wait_event = 'PgSleep' and backend_type like 'braid%']);
		$out eq '1'
	}, 30), "it is being applied, round $round");
	my ($pid) = worker_pids($paris, 'checkpointer');
	kill 9, $pid;
	ok(wait_until(sub { my @now = worker_pids($paris, 'checkpointer'); @now && $now[0] != $pid }, 30), "the server is back, round $round");
}
ok(wait_until(sub { (attempt($paris, 'delete from hold'))[0] == 0 }, 30), 'it may go on');
caught_up($paris, $tokyo);
streams($paris, $name, 'a transaction that was only there when others were killed goes on');

# The copy of a table.
$tokyo->safe_psql('postgres', "insert into copied values (1, 'deadly'), (2, 'b')");
caught_up($paris, $tokyo);
my $before = crashes();
switch('true');
$paris->safe_psql('postgres', "truncate copied; select braid.resync_table('$name', 'copied')");
my $status = stopped();
is($status->{last_error}, 'copying table "public.copied" has crashed the server 3 times in a row', 'a copy that crashes the server stops, too');
is(crashes() - $before, 3, 'after three times');
switch('false');
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
$paris->safe_psql('postgres', "select braid.wait_for_subscription('$name')", timeout => $PostgreSQL::Test::Utils::timeout_default);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'copied');

# Nothing is left of it.
$paris->safe_psql('postgres', "select braid.drop_subscription('$name')");
$paris->restart;
ok(wait_until(sub { !grep { /braid\.\d+\.\d+/ } glob($paris->data_dir . '/pg_stat_tmp/*') }, 30), 'no file is left of a subscription that is gone');

done_testing();
