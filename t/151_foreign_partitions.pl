# A local partition is a foreign table: the initial copy, the stream and a truncate stop with the
# same error before they write to it, and go on once an ordinary table is in its place.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo', publication => '');
my $paris = new_node('paris', publication => '');
on_all(q[
	create table copied (k int, v text) partition by list (k);
	create table copied_1 partition of copied for values in (1);
	create table streamed (k int, v text) partition by range (k);
	create table streamed_1 partition of streamed for values from (0) to (10);
	alter table copied replica identity full;
	alter table copied_1 replica identity full;
	alter table streamed replica identity full;
	alter table streamed_1 replica identity full;
], $tokyo, $paris);
$tokyo->safe_psql('postgres', q[
	create publication copied for table copied with (publish_via_partition_root = true);
	create publication streamed for table streamed with (publish_via_partition_root = true);
	create table copied_2 partition of copied for values in (2);
	create table streamed_2 partition of streamed for values from (10) to (20);
	alter table copied_2 replica identity full;
	alter table streamed_2 replica identity full;
	insert into copied values (1, 'one'), (2, 'two');
]);
# Where contrib is there, the foreign tables take what is written to them.
my $has_contrib = $paris->safe_psql('postgres', q[select count(*) from pg_available_extensions where name = 'postgres_fdw']);
my ($host, $port) = ($paris->host, $paris->port);
$paris->safe_psql('postgres', $has_contrib ? qq[
	create extension postgres_fdw;
	create server elsewhere foreign data wrapper postgres_fdw options (host '$host', port '$port', dbname 'postgres');
	create user mapping for public server elsewhere options (user 'postgres');
] : q[
	create foreign data wrapper none;
	create server elsewhere foreign data wrapper none;
]);
my $options = $has_contrib ? q[options (table_name 'far')] : '';
$paris->safe_psql('postgres', qq[
	create table far (k int, v text);
	create table copied_2 partition of copied for values in (2, 3) partition by list (k);
	create foreign table copied_far partition of copied_2 for values in (2) server elsewhere $options;
	create foreign table streamed_far partition of streamed for values from (10) to (20) server elsewhere $options;
]);

sub stops
{
	my ($name, $message, $what) = @_;
	ok(wait_until(sub { (status($paris, $name)->{last_error} // '') =~ /foreign table/ }, 30), "$what stops");
	my $status = status($paris, $name);
	is($status->{last_error}, $message, "$what says why");
	like($status->{error_hint}, qr/^Detach the partition, or put an ordinary table in its place/, "$what says what to do");
	is($paris->safe_psql('postgres', 'select count(*) from far'), '0', "$what has written nothing");
	return;
}

# The copy: refused at once, and where the partition comes later.
my ($status, undef, $error) = $paris->psql('postgres', q[select braid.create_subscription('copied', '] . $tokyo->connstr('postgres') =~ s/'/''/gr . q[', publications => '{copied}')]);
like($error, qr/ERROR:  partition "public.copied_far" is a foreign table here\n.*HINT:  Detach/s, 'a subscription that is to copy is refused');
$paris->safe_psql('postgres', 'alter table copied_2 detach partition copied_far');
subscribe($paris, $tokyo, name => 'copied', publications => "'{copied}'", wait => 0, enabled => 'false');
$paris->safe_psql('postgres', q[alter table copied_2 attach partition copied_far for values in (2); select braid.enable_subscription('copied')]);
stops('copied', 'partition "public.copied_far" is a foreign table here', 'the copy');
is($paris->safe_psql('postgres', 'select count(*) from copied_1'), '0', 'nor elsewhere');
$paris->safe_psql('postgres', q[
	alter table copied_2 detach partition copied_far;
	create table copied_2a partition of copied_2 for values in (2);
	select braid.enable_subscription('copied');
	select braid.wait_for_subscription('copied');
]);
is($paris->safe_psql('postgres', 'select k, v from copied order by k'), "1|one\n2|two", 'the copy goes on');

# The stream: rows of other partitions come, whatever the mode.
subscribe($paris, $tokyo, name => 'streamed', publications => "'{streamed}'", copy_data => 'false');
for my $mode (qw(parallel batch aggregate serial))
{
	$paris->safe_psql('postgres', "select braid.alter_subscription('streamed', apply_mode => '$mode')");
	$tokyo->safe_psql('postgres', q[insert into streamed values (1, 'one')]);
	$tokyo->wait_for_catchup('streamed');
	is($paris->safe_psql('postgres', 'select v from streamed_1'), 'one', "$mode: a row of another partition");
	$tokyo->safe_psql('postgres', q[begin; insert into streamed values (2, 'two'); insert into streamed values (11, 'far'); commit]);
	stops('streamed', 'partition "public.streamed_far" is a foreign table here', "$mode: an insert");
	is($paris->safe_psql('postgres', 'select k from streamed_1'), '1', "$mode: nothing of its transaction is here");
	$paris->safe_psql('postgres', q[
		alter table streamed detach partition streamed_far;
		create table streamed_2 partition of streamed for values from (10) to (20);
		select braid.enable_subscription('streamed');
	]);
	$tokyo->wait_for_catchup('streamed');
	is($paris->safe_psql('postgres', 'select k from streamed order by k'), "1\n2\n11", "$mode: the stream goes on");
	# A row that moves there, and a truncate.
	$tokyo->safe_psql('postgres', 'delete from streamed where k > 2');
	$tokyo->wait_for_catchup('streamed');
	$paris->safe_psql('postgres', q[drop table streamed_2; alter table streamed attach partition streamed_far for values from (10) to (20)]);
	$tokyo->safe_psql('postgres', 'update streamed set k = 12 where k = 2');
	stops('streamed', 'partition "public.streamed_far" is a foreign table here', "$mode: an update");
	$paris->safe_psql('postgres', q[
		alter table streamed detach partition streamed_far;
		create table streamed_2 partition of streamed for values from (10) to (20);
		select braid.enable_subscription('streamed');
	]);
	$tokyo->wait_for_catchup('streamed');
	$tokyo->safe_psql('postgres', 'delete from streamed where k > 2');
	$tokyo->wait_for_catchup('streamed');
	$paris->safe_psql('postgres', q[drop table streamed_2; alter table streamed attach partition streamed_far for values from (10) to (20)]);
	$tokyo->safe_psql('postgres', 'truncate streamed');
	stops('streamed', 'partition "public.streamed_far" is a foreign table here', "$mode: a truncate");
	$paris->safe_psql('postgres', q[
		alter table streamed detach partition streamed_far;
		select braid.enable_subscription('streamed');
	]);
	$tokyo->wait_for_catchup('streamed');
	is($paris->safe_psql('postgres', 'select count(*) from streamed'), '0', "$mode: the truncate goes on");
	$paris->safe_psql('postgres', 'alter table streamed attach partition streamed_far for values from (10) to (20)');
}

done_testing();
