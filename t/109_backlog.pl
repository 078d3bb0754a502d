# A walsender with much to read looks at its socket only now and then. It still notices everything
# that comes meanwhile: a reader that ends, one that stops reading for a while, a termination, the
# confirmation of a synchronous standby. Nothing is lost or sent twice.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";
use Braid;
use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep time);

my $transactions = 12_000;
my $provider = new_node('provider', conf => "wal_sender_timeout = 5s\n");
my $subscriber = new_node('subscriber');
# Every hundredth row has a WAL record of nearly a page, so records are of all sizes.
my $table = 'create table t (id int primary key, v text)';
$provider->safe_psql('postgres', $table);
$provider->safe_psql('postgres', 'alter table t alter v set storage plain');
$provider->safe_psql('postgres', q[
	create procedure burst(first int, last int) language plpgsql as $$
	begin for i in first..last loop
		insert into t values (i, case when i % 100 = 0 then repeat('x', 7900) else 'row ' || i end); commit;
	end loop; end $$;
]);
$subscriber->safe_psql('postgres', $table);

# Commit so many further transactions; returns the position in their middle and behind them.
my $last = 0;
sub backlog
{
	my ($count) = @_;
	my @positions;
	for my $half (1, 2)
	{
		my $first = $last + 1;
		$last += $count / 2;
		$provider->safe_psql('postgres', "set synchronous_commit = off; call burst($first, $last)");
		push @positions, $provider->safe_psql('postgres', 'select pg_current_wal_insert_lsn()');
	}
	$provider->safe_psql('postgres', 'checkpoint');
	return @positions;
}

my $directory = $PostgreSQL::Test::Utils::tmp_check;
sub reader
{
	my ($slot, $file, @options) = @_;
	return [ 'pg_recvlogical', '-d', $provider->connstr('postgres'), '-S', $slot, '--start', '--no-loop', '-f', "$directory/$file", '--fsync-interval=1', '--status-interval=1', @options ];
}
sub ids
{
	my ($file) = @_;
	return map { $_ } slurp_file("$directory/$file") =~ /(?:"name":"id","type":"integer","value":|"id":)(\d+)/g;
}

my %format = (version2 => [ '-o', 'format-version=2' ], json => [ '-o', 'format=gir-json', '-o', 'proto_version=1', '-o', 'publication_names=braid', '-o', 'schema=once' ]);
$provider->safe_psql('postgres', "select pg_create_logical_replication_slot('$_', 'braid')") for sort keys %format;
my ($middle, $end) = backlog($transactions);
for my $slot (sort keys %format)
{
	# The reader's last word comes while there is much to read.
	command_ok(reader($slot, "$slot.1", '--endpos', $middle, @{ $format{$slot} }), "$slot: a reader that wants no more in the middle of a backlog is let go");
	my @first = ids("$slot.1");
	cmp_ok(scalar(@first), '<', $transactions, "$slot: in the middle");
	cmp_ok(scalar(@first), '>=', $transactions / 2, "$slot: with what it wanted");

	# One that does not read for a while, with all buffers full.
	my $handle = IPC::Run::start(reader($slot, "$slot.2", '--endpos', $end, @{ $format{$slot} }), '>', '/dev/null', '2>', "$directory/$slot.err");
	$handle->signal('STOP');
	sleep 1;
	$handle->signal('CONT');
	ok($handle->finish, "$slot: a reader that stood still for a while goes on") or diag(slurp_file("$directory/$slot.err"));
	my (%seen, @again);
	for my $id (@first, ids("$slot.2")) { push @again, $id if $seen{$id}++ }
	is(scalar(grep { !$seen{$_} } 1 .. $last), 0, "$slot: every row has come");
	is("@again", '', "$slot: what was confirmed does not come again");
}

# An order to end, as soon as it reads.
my $handle = IPC::Run::start(reader('version2', 'ended', '-o', 'format-version=2'), '>', '/dev/null', '2>', '/dev/null');
backlog($transactions / 2);
my $walsender = "select active_pid from pg_replication_slots where slot_name = 'version2' and active";
$provider->poll_query_until('postgres', "select exists ($walsender)") or die 'no walsender';
my $began = time;
$provider->safe_psql('postgres', "select pg_terminate_backend(pid) from pg_stat_replication where pid = ($walsender)");
$provider->poll_query_until('postgres', "select not exists ($walsender)");
cmp_ok(time - $began, '<', 10, 'a walsender that is told to end does, with much to read');
$handle->finish;
$provider->safe_psql('postgres', "select pg_drop_replication_slot('$_')") for sort keys %format;

# A subscription that has a backlog, and whose word a commit waits for.
subscribe($subscriber, $provider, name => 'feed');
$subscriber->safe_psql('postgres', q[select braid.disable_subscription('feed')]);
$provider->poll_query_until('postgres', 'select not exists (select from pg_replication_slots where active)');
backlog($transactions);
$subscriber->safe_psql('postgres', q[select braid.enable_subscription('feed')]);
$provider->append_conf('postgresql.conf', "synchronous_standby_names = 'feed'");
$provider->reload;
for my $one (1 .. 5)
{
	$last++;
	$provider->safe_psql('postgres', "insert into t values ($last, 'waits')", timeout => 60);
}
is($subscriber->safe_psql('postgres', "select count(*) from t where v = 'waits'"), 5, 'a commit that waited for a synchronous standby is there, and all before it');
is($subscriber->safe_psql('postgres', 'select count(*), min(id), max(id) from t'), "$last|1|$last", 'the whole backlog');
same_tables([ $provider, $subscriber ], 't');
is($subscriber->safe_psql('postgres', 'select coalesce(sum(conflicts), 0) from braid.conflict_stats'), 0, 'no row came twice');

done_testing();
