# A reader of JSON over the replication protocol. A commit arrives at once if nothing follows it;
# under load the output is in order and complete. Nothing is lost if the reader is stopped at any
# time and comes back.

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

my $node = new_server('node');
$node->safe_psql('postgres', q[
	create table t (id int primary key, v text);
	create procedure burst(first int, last int) language plpgsql as $$
	begin for i in first..last loop insert into t values (i, 'row ' || i); commit; end loop; end $$;
]);
$node->safe_psql('postgres', q[select pg_create_logical_replication_slot('feed', 'braid')]);
my $file = "$PostgreSQL::Test::Utils::tmp_check/feed.json";

sub start_reader
{
	my (@options) = @_;
	return IPC::Run::start([ 'pg_recvlogical', '-d', $node->connstr('postgres'), '-S', 'feed', '--start', '-f', $file, '--fsync-interval=0', map { ('-o', $_) } @options ],
		'>', '/dev/null', '2>', '/dev/null');
}

# Seconds until the file has a row, or undef.
sub arrives
{
	my ($pattern, $seconds) = @_;
	my $start = time;
	while (time - $start < $seconds)
	{
		return time - $start if -e $file && slurp_file($file) =~ $pattern;
		sleep 0.02;
	}
	return;
}

sub ids { my $text = slurp_file($file); return map { $_ } $text =~ /"name":"id","type":"integer","value":(\d+)/g; }

my $reader = start_reader('format-version=2');
my $last = 0;
for my $size (1, 1, 2, 50, 500, 1, 3000, 1)
{
	my $first = $last + 1;
	$last += $size;
	$node->safe_psql('postgres', "call burst($first, $last)");
	my $took = arrives(qr/"value":$last\}.*\n\{"action":"C"\}\n\z/, 20);
	ok(defined $took, "a burst of $size arrives, the last of it too, with nothing behind it" . (defined $took ? sprintf ' (%.2f s)', $took : ''));
}
is(join(' ', ids()), join(' ', 1 .. $last), 'every row once, in the order of commits');
my $wrong = grep { !/^\{"action":"(B|C)"\}$|^\{"action":"I","schema":"public","table":"t","columns":\[.*\]\}$/ } split /\n/, slurp_file($file);
is($wrong, 0, 'every message is an object of its own');
$node->safe_psql('postgres', q[select pg_logical_emit_message(false, 'alone', 'now', flush => true)]) if $node->safe_psql('postgres', 'show server_version_num') >= 170000;

# A large transaction among small ones.
$node->safe_psql('postgres', "call burst(" . ($last + 1) . ", " . ($last + 20) . ")");
$node->safe_psql('postgres', "insert into t select i, repeat('x', 100) from generate_series(" . ($last + 21) . ", " . ($last + 5000) . ") i");
$node->safe_psql('postgres', "call burst(" . ($last + 5001) . ", " . ($last + 5020) . ")");
$last += 5020;
ok(defined arrives(qr/"value":$last\}.*\n\{"action":"C"\}\n\z/, 30), 'a large transaction between small ones');

# Stopped in the middle of things, several times: at least once, and none left out.
for my $round (1 .. 4)
{
	my $first = $last + 1;
	$last += 2000;
	my $psql = IPC::Run::start([ 'psql', '-X', '-q', '-d', $node->connstr('postgres'), '-c', "call burst($first, $last)" ], '>', '/dev/null', '2>', '/dev/null');
	sleep 0.05 * $round;
	$reader->signal($round % 2 ? 'KILL' : 'INT');
	$reader->finish;
	$psql->finish;
	$node->poll_query_until('postgres', "select not active from pg_replication_slots where slot_name = 'feed'");
	$reader = start_reader('format-version=2');
}
ok(defined arrives(qr/"value":$last\}/, 30), 'a reader that was killed and came again has caught up');
my %seen = map { $_ => 1 } ids();
is(scalar(grep { !$seen{$_} } 1 .. $last), 0, 'and has every row');

# Version 1 on the same connection settings, and the walsender ends well with what it held.
$reader->signal('INT');
$reader->finish;
$node->poll_query_until('postgres', "select not active from pg_replication_slots where slot_name = 'feed'");
unlink $file;
$reader = start_reader('format=wal2json', 'include-xids=1');
$node->safe_psql('postgres', "call burst(" . ($last + 1) . ", " . ($last + 200) . ")");
$last += 200;
ok(defined arrives(qr/\[$last,"row $last"\]\}\]\}\n\z/, 20), 'version 1 too');
$node->safe_psql('postgres', "call burst(" . ($last + 1) . ", " . ($last + 3000) . ")");
$last += 3000;
$node->stop('fast');
# The reader would try to connect again without end.
$reader->signal('INT');
$reader->finish;
like(slurp_file($file), qr/\[$last,"row $last"\]\}\]\}\n\z/, 'a server that stops sends what there is before it ends');

done_testing();
