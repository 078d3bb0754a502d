# A transaction whose wal2json text is larger than a message of PostgreSQL can be, in format version
# 1, through pg_recvlogical. The chunks form one object, and the walsender's memory does not grow
# with it; nor does it in version 2 and in gir-json. Columns that an update left unchanged are named
# on request.
#
# Values that compress well make little WAL and much text. Sizes are in MB. A soak takes larger
# ones, and chunks of the largest size.

use strict;
use warnings;

use Braid;
use JSON::PP;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep time);

my $soak = $ENV{BRAID_TEST_SECONDS};
my $rows = $ENV{BRAID_TEST_ROWS} // ($soak ? 3000 : 1200);
# Transactions without a change have an object too, so no others may come in between. pg_recvlogical
# answers between messages, one of which is over a gigabyte here.
my $node = new_server('tokyo', conf => "logical_decoding_work_mem = '4MB'\nautovacuum = off\nwal_sender_timeout = 0\n");
$node->safe_psql('postgres', q[
	create table small (id int primary key, v text);
	create table big (id int primary key, v text);
	create table one as select repeat('b', 1000000) as v;
	select pg_create_logical_replication_slot('feed', 'braid');
]);

sub copy_slot
{
	$node->safe_psql('postgres', q[select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = 'copied']);
	$node->safe_psql('postgres', q[select pg_copy_logical_replication_slot('feed', 'copied')]);
	return;
}

sub recvlogical_as { return ('pg_recvlogical', '-d', $node->connstr('postgres'), '-S', 'copied', '--start', '--no-loop', '-F', '0', '-f', '-', map { ('-o', $_) } @_); }
sub recvlogical { return recvlogical_as('format=wal2json', @_); }

# Returns the walsender's memory in MB: its own at present, and the largest ever with the shared
# buffers that it used.
sub memory
{
	my ($pid) = worker_pids($node, 'walsender');
	open my $file, '<', "/proc/$pid/status" or return;
	my $status = join '', <$file>;
	close $file;
	return map { $status =~ /^$_:\s+(\d+) kB/m ? $1 / 1024 : 0 } qw(RssAnon VmHWM);
}

# Reads one large transaction without keeping it. Returns its properties and the walsender's memory.
# It ends when that many bytes have come, without line ends, or when the pattern matches in the last
# 200.
sub follow
{
	my ($expected, @options) = @_;
	return follow_to($expected, qr/(?!)/, '{"kind":"insert"', recvlogical(@options));
}

sub follow_to
{
	my ($expected, $end, $change, @command) = @_;
	copy_slot();
	my $start = time;
	my $pid = open my $text, '-|', @command or die "cannot run pg_recvlogical: $!";
	my %seen = (bytes => 0, lines => 0, changes => 0, rss => 0, first => '', last => '');
	my $tail = '';
	my $looked = 0;
	while (sysread $text, my $piece, 1 << 20)
	{
		$seen{first} .= substr $piece, 0, 60 if length $seen{first} < 60;
		my $lines = $piece =~ tr/\n//;
		$seen{lines} += $lines;
		$seen{bytes} += length($piece) - $lines;
		my $window = $tail . $piece;
		my $at = -1;
		$seen{changes}++ while ($at = index $window, $change, $at + 1) >= 0;
		# Shorter than the text that is looked for, so that no match counts twice.
		$tail = substr $window, 1 - length $change;
		if (time - $looked > 0.2)
		{
			$looked = time;
			my ($rss) = memory();
			$seen{rss} = $rss if ($rss // 0) > $seen{rss};
		}
		$seen{last} = length $piece < 200 ? substr($seen{last} . $piece, -200) : substr $piece, -200;
		last if $seen{bytes} >= $expected || $seen{last} =~ $end;
	}
	$seen{seconds} = time - $start;
	s/\n//g for @seen{qw(first last)};
	($seen{rss_end}, $seen{peak}) = memory();
	kill 'INT', $pid;
	close $text;
	wait_until(sub { $node->safe_psql('postgres', q[select active from pg_replication_slots where slot_name = 'copied']) eq 'f' }, 20);
	return \%seen;
}

# The output that wal2json would write, except for the line ends between chunks.
sub expected
{
	my ($table, $from, $to, $length) = @_;
	my $change = qq[{"kind":"insert","schema":"public","table":"$table","columnnames":["id","v"],"columntypes":["integer","text"],"columnvalues":[,""]}];
	my $bytes = length('{"change":[]}') + ($to - $from);
	$bytes += length($change) + length($_) + $length for $from .. $to;
	return $bytes;
}

# A small one first, whole: the walsender's memory without the large one.
$node->safe_psql('postgres', q[insert into small select i, repeat('s', 100000) from generate_series(1, 100) i]);
my $small = expected('small', 1, 100, 100_000);
my $base = follow($small, 'max-message-size=1MB');
is($base->{bytes}, $small, 'a transaction of 10 MB: all of it');
copy_slot();
my $end = $node->safe_psql('postgres', 'select pg_current_wal_insert_lsn()');
my ($out, $err) = ('', '');
IPC::Run::run([ recvlogical('max-message-size=1MB'), '-E', $end ], '>', \$out, '2>', \$err, IPC::Run::timeout(60)) or diag $err;
my $object = eval { decode_json($out) } // {};
is(scalar(@{ $object->{change} // [] }), 100, 'in pieces, with line ends between them, it is one object') or diag substr $out, 0, 300;
is($object->{change}[99]{columnvalues}[1], 's' x 100_000, 'whose values are whole');

# The large one.
$node->safe_psql('postgres', q[select pg_replication_slot_advance('feed', pg_current_wal_insert_lsn())]);
my $start = time;
# Values that are compressed already stay as they are.
$node->safe_psql('postgres', "insert into big select i, v from one, generate_series(1, $rows) i");
note(sprintf 'written in %.1f s', time - $start);
my $large = expected('big', 1, $rows, 1_000_000);
cmp_ok($large, '>', 1 << 30, 'a transaction beyond what a message can hold') unless $ENV{BRAID_TEST_ROWS};
# By default messages are as large as possible, which wal2json's readers expect.
my @ways = ([ 100 ]);
push @ways, [ 100, 'max-message-size=1MB' ], [ 100, 'max-message-size=16MB' ], [ 100, 'write-in-chunks=1' ] if $soak;
for my $way (@ways)
{
	my ($limit, @options) = @$way;
	# In chunks only line ends are added.
	my $seen = follow($large, @options);
	my $what = "@options" || 'defaults';
	is($seen->{bytes}, $large, "$what: all of it");
	is($seen->{changes}, $rows, "$what: every change once");
	like($seen->{first}, qr/^\{"change":\[\{"kind":"insert"/, "$what: starts as an object");
	like($seen->{last}, qr/"\]\}\]\}$/, "$what: and ends as one");
	cmp_ok($seen->{peak}, '<', $limit, sprintf '%s: %d messages in %.1f s; at most %.0f MB of memory, %.0f of its own', $what, $seen->{lines}, @$seen{qw(seconds peak rss)});
	cmp_ok($seen->{rss_end}, '<', $base->{rss_end} + 20, sprintf '%s: and nothing of it is kept: %.0f MB', $what, $seen->{rss_end});
}
note(sprintf 'the small one: at most %.0f MB, %.0f of its own', @$base{qw(peak rss)});

# Formats that write a message for each row hold one row at a time, however large the transaction
# is; with a smaller one.
my $fewer = $soak ? 1500 : 300;
$node->safe_psql('postgres', q[
	create table next (like big including all);
	create publication next for table next;
	select pg_replication_slot_advance('feed', pg_current_wal_insert_lsn());
]);
$node->safe_psql('postgres', "insert into next select i, v from one, generate_series(1, $fewer) i");
for my $way (
	[ 'version 2', qr/\{"action":"C"\}\s*$/, '{"action":"I"', 'format=wal2json', 'format-version=2', 'add-tables=public.next' ],
	[ 'gir-json', qr/\{"operation":"commit"[^\n]*\}\s*$/, '{"operation":"insert"', 'format=gir-json', 'publication_names=next' ])
{
	my ($format, $end, $change, @options) = @$way;
	my $seen = follow_to($fewer * 2_000_000, $end, $change, recvlogical_as(@options));
	is($seen->{changes}, $fewer, "$format: every change once");
	cmp_ok($seen->{bytes}, '>', $fewer * 1_000_000, "$format: and whole");
	cmp_ok($seen->{peak}, '<', $base->{peak} + 40, sprintf '%s: %d messages in %.1f s; at most %.0f MB of memory, %.0f of its own', $format, $seen->{lines}, @$seen{qw(seconds peak rss)});
}

# Columns that an update has left unchanged.
$node->safe_psql('postgres', q[
	select pg_replication_slot_advance('feed', pg_current_wal_insert_lsn());
	create table doc (id int primary key, title text, body text, note text);
	alter table doc alter column body set storage external;
	alter table doc alter column note set storage external;
	insert into doc values (1, 'one', repeat('body', 2000), repeat('note', 2000));
	update doc set title = 'two';
	update doc set body = repeat('more', 2000);
	update doc set title = 'three', note = 'short';
]);
sub updates
{
	my (@options) = @_;
	copy_slot();
	my $end = $node->safe_psql('postgres', 'select pg_current_wal_insert_lsn()');
	my ($out, $err) = ('', '');
	IPC::Run::run([ recvlogical(@options), '-E', $end ], '>', \$out, '2>', \$err, IPC::Run::timeout(60)) or diag $err;
	my @objects = map { eval { decode_json($_) } // { broken => $_ } } split /\n/, $out;
	return grep { ($_->{kind} // $_->{action} // '') =~ /^(update|U)$/ } map { $_->{change} ? @{ $_->{change} } : $_ } @objects;
}
my @kept = ('body,note', 'note', 'body');
my @plain = updates();
is(join(' ', map { exists $_->{columnsunchanged} ? 'named' : 'left out' } @plain), 'left out left out left out', 'version 1: left out, as by wal2json');
is_deeply([ map { join ',', @{ $_->{columnnames} } } @plain ], [ 'id,title', 'id,title,body', 'id,title,note' ], 'with only the others named');
my @marked = updates('include-unchanged-toast-marker=1');
is_deeply([ map { join ',', @{ $_->{columnsunchanged} // [] } } @marked ], \@kept, 'version 1: named when asked for');
delete $_->{columnsunchanged} for @marked;
is_deeply(\@marked, \@plain, 'and nothing else is different');
my @second = updates('format-version=2', 'include-unchanged-toast-marker=1');
is_deeply([ map { join ',', map { $_->{unchanged} ? $_->{name} : () } @{ $_->{columns} } } @second ], \@kept, 'version 2: named when asked for');
ok(!(grep { grep { $_->{unchanged} && exists $_->{value} } @{ $_->{columns} } } @second), 'without a value');
ok(!(grep { grep { exists $_->{unchanged} } @{ $_->{columns} } } updates('format-version=2')), 'version 2: not otherwise');

done_testing();
