# Large messages leave a walsender's memory as it was: a transaction in wal2json's version 1, which
# is one message by default, and one large row in each of the formats. The message is whole, also
# with TLS. No partial message counts as whole: the client is killed in the middle or does not read
# on, or the walsender is terminated or cancelled.
#
# Values that compress well make little WAL and much text. Sizes are in MB.

use strict;
use warnings;

use Braid;
use IO::Select;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep time);

my $node = new_server('tokyo', conf => "logical_decoding_work_mem = '4MB'\nautovacuum = off\nlog_replication_commands = on\n");
$node->safe_psql('postgres', q[
	create table word (id int, v text);
	create table many (id int, v text);
	create table huge (id int, v text);
	create table one as select repeat('Q', 1000000) as v;
	create table hundreds as select repeat('Q', 200000000) as v;
	create publication everything for table word, many, huge;
]);

# A server that takes TLS, if it was built with it and there is a tool that makes a certificate.
my $has_tls = $node->safe_psql('postgres', 'select count(*) from pg_settings where name = $$ssl_library$$ and setting <> $$$$') eq '1'
  && system('openssl req -new -x509 -days 2 -nodes -subj /CN=tokyo -out ' . $node->data_dir . '/server.crt -keyout ' . $node->data_dir . '/server.key >/dev/null 2>&1') == 0;
if ($has_tls)
{
	chmod 0600, $node->data_dir . '/server.key';
	$node->append_conf('postgresql.conf', "ssl = on\nlisten_addresses = '127.0.0.1'\n");
	$node->append_conf('pg_hba.conf', "hostssl all all 127.0.0.1/32 trust\nhostssl replication all 127.0.0.1/32 trust\n");
	$node->restart;
}

# How a connection over TLS is made.
my $tls = $node->connstr('postgres') =~ s/host=\S+/host=127.0.0.1 sslmode=require/r;

sub new_slot
{
	$node->safe_psql('postgres', q[select pg_drop_replication_slot(slot_name) from pg_replication_slots]);
	$node->safe_psql('postgres', q[select slot_name from pg_create_logical_replication_slot('feed', 'braid')]);
	return;
}

# Memory of the walsender in MB: its own at present, and at most the largest that it had of its own
# since the earlier numbers, if given.
sub memory
{
	my ($before) = @_;
	my ($pid) = worker_pids($node, 'walsender');
	open my $file, '<', "/proc/$pid/status" or return;
	my $status = join '', <$file>;
	close $file;
	my ($own, $peak, $shared, $mapped) = map { $status =~ /^$_:\s+(\d+) kB/m ? $1 / 1024 : 0 } qw(RssAnon VmHWM RssShmem RssFile);
	return { own => $own, other => $shared + $mapped, peak => $before ? $peak - $before->{other} : $own };
}

# A reader in the background: its process and what it has read.
sub start_reader
{
	my ($connection, @options) = @_;
	my $pid = open my $text, '-|', 'pg_recvlogical', '-d', $connection, '-S', 'feed', '--start', '--no-loop', '-F', '0', '-f', '-', map { ('-o', $_) } @options
	  or die "cannot run pg_recvlogical: $!";
	return { pid => $pid, text => $text, tail => '', bytes => 0, letters => 0, lines => 0 };
}

# Read on until this has come, or to the end.
sub read_to
{
	my ($reader, $pattern) = @_;
	my $end = time + 120;
	my $select = IO::Select->new($reader->{text});
	until ($reader->{tail} =~ $pattern)
	{
		return 0 if time > $end;
		next unless $select->can_read(1);
		sysread $reader->{text}, my $piece, 1 << 20 or return 0;
		my $lines = $piece =~ tr/\n//;
		$reader->{lines} += $lines;
		$reader->{bytes} += length($piece) - $lines;
		$reader->{letters} += $piece =~ tr/Q//;
		$reader->{tail} = substr $reader->{tail} . $piece, -400;
	}
	return 1;
}

sub stop_reader
{
	my ($reader, $signal) = @_;
	kill $signal // 'INT', $reader->{pid};
	close $reader->{text};
	ok(wait_until(sub { $node->safe_psql('postgres', q[select active from pg_replication_slots where slot_name = 'feed']) eq 'f' }, 60), 'the walsender ends');
	return;
}

sub say_word { return $node->safe_psql('postgres', "insert into word values (0, 'word $_[0] is all')"); }

my $rows = 320;
my $many = "insert into many select i, v from one, generate_series(1, $rows) i";
# Where only its middle counts, and how large its text is in version 1.
my $fewer = 40;
my $few = "insert into many select i, v from one, generate_series(1, $fewer) i";
my $change = '{"kind":"insert","schema":"public","table":"many","columnnames":["id","v"],"columntypes":["integer","text"],"columnvalues":[,""]}';
my $few_bytes = length('{"change":[]}') + $fewer - 1;
$few_bytes += length($change) + length($_) + 1_000_000 for 1 .. $fewer;
my $few_end = qr/QQ"\]\}\]\}\n/;

# Reads a large row or transaction between two small ones, in each way. A row is in memory as a
# whole, in some copies, so only the memory that remains afterwards counts.
my $row = 'insert into huge select 1, v from hundreds';
my @gir = ('proto_version=1', 'publication_names=everything');
my @ways = (
	[ 'one message of many rows', $node->connstr('postgres'), $many, $rows * 1_000_000, 100, 'format=wal2json' ],
	[ 'a row in version 2', $node->connstr('postgres'), $row, 200_000_000, undef, 'format=wal2json', 'format-version=2' ],
	[ 'a row in chunks', $node->connstr('postgres'), $row, 200_000_000, undef, 'format=wal2json', 'write-in-chunks=1' ],
	[ 'a row in gir-json', $node->connstr('postgres'), $row, 200_000_000, undef, 'format=gir-json', @gir[1..1] ],
	[ 'a row in gir', $node->connstr('postgres'), $row, 200_000_000, undef, 'format=gir', @gir ]);
push @ways, [ 'one message with TLS', $tls, $few, $fewer * 1_000_000, 30, 'format=wal2json' ] if $has_tls;
for my $way (@ways)
{
	my ($name, $connection, $sql, $letters, $most, @options) = @$way;
	new_slot();
	my $start = time;
	my $reader = start_reader($connection, @options);
	say_word('first');
	ok(read_to($reader, qr/word first is all/), "$name: before it");
	my $before = memory();
	$reader->{letters} = $reader->{bytes} = 0;
	$node->safe_psql('postgres', $sql);
	say_word('second');
	ok(read_to($reader, qr/word second is all/), "$name: and after it");
	my $extra = $reader->{letters} - $letters;
	ok($extra >= 0 && $extra < ($name =~ /gir$/ ? 100 : 1), "$name: all of it") or diag "$extra letters more";
	my $after;
	ok(wait_until(sub { $after = memory($before); $after->{own} < $before->{own} + 20 }, 20), sprintf '%s: memory is as before: %.0f MB, then %.0f', $name, $before->{own}, $after->{own});
	my $grown = $after->{peak} - $before->{own};
	if ($most) { cmp_ok($grown, '<', $most, sprintf '%s: and was so all the time: %.0f MB more at most', $name, $grown); }
	note(sprintf '%s: %.1f s, %.0f MB more at most', $name, time - $start, $grown);
	stop_reader($reader);
}

# A large transaction while the reader does not read, so that the walsender is amid its message.
sub start_amid
{
	my ($connection) = @_;
	new_slot();
	my $reader = start_reader($connection, 'format=wal2json');
	say_word('first');
	read_to($reader, qr/word first is all/);
	read_to($reader, qr/\n\z/);
	kill 'STOP', $reader->{pid};
	$reader->{tail} = '';
	$reader->{bytes} = 0;
	$node->safe_psql('postgres', $few);
	return $reader;
}

sub wait_until_amid
{
	my $amid = "select count(*) from pg_stat_activity where wait_event ilike 'WalSender%WriteData'";
	ok(wait_until(sub { $node->safe_psql('postgres', $amid) eq '1' }, 60), 'the walsender waits for a reader that does not read');
	return;
}

sub read_whole
{
	my ($what) = @_;
	my $reader = start_reader($node->connstr('postgres'), 'format=wal2json');
	ok(read_to($reader, $few_end), "$what: it comes again");
	# Of the word before, if it was not confirmed, too.
	my $word = length '{"change":[{"kind":"insert","schema":"public","table":"word","columnnames":["id","v"],"columntypes":["integer","text"],"columnvalues":[0,"word first is all"]}]}';
	ok($reader->{bytes} == $few_bytes || $reader->{bytes} == $few_bytes + $word, "$what: and whole") or diag "$reader->{bytes} bytes";
	stop_reader($reader);
	return;
}

{
	my $reader = start_amid($node->connstr('postgres'));
	wait_until_amid();
	stop_reader($reader, 'KILL');
	read_whole('a reader that was killed amid a message');
}

# In each way of ending it: no other message comes within the large one.
my $pid = q[(select pid from pg_stat_activity where backend_type = 'walsender')];
for my $way (
	[ 'a walsender that was told to stop', "select pg_cancel_backend($pid)", qr/FATAL: .*canceling statement due to user request/ ],
	[ 'a walsender that was ended', "select pg_terminate_backend($pid)", qr/FATAL: .*terminating connection due to administrator command/ ])
{
	my ($name, $sql, $logged) = @$way;
	my $offset = -s $node->logfile;
	my $reader = start_amid($node->connstr('postgres'));
	wait_until_amid();
	$node->safe_psql('postgres', $sql);
	ok($node->wait_for_log($logged, $offset), "$name: it ends");
	kill 'CONT', $reader->{pid};
	ok(!read_to($reader, qr/Q/), "$name: what the reader has is not taken for a message");
	is($reader->{bytes}, 0, "$name: nothing of it is");
	stop_reader($reader);
	read_whole($name);
}

# A reader that does not read is ended by the timeout.
{
	my $offset = -s $node->logfile;
	my $reader = start_amid($node->connstr('postgres') . " options='-c wal_sender_timeout=2s'");
	ok($node->wait_for_log(qr/terminating walsender process due to replication timeout/, $offset), 'a reader that does not read is ended by wal_sender_timeout');
	stop_reader($reader, 'KILL');
}

# One that reads again in time has all of it, and what came after.
{
	my $reader = start_amid($node->connstr('postgres'));
	wait_until_amid();
	say_word('second');
	kill 'CONT', $reader->{pid};
	ok(read_to($reader, qr/word second is all/), 'a reader that stopped for a while');
	is($reader->{letters}, $fewer * 1_000_000, 'has all of the message');
	stop_reader($reader);
}

# Temporary files that are too small for it.
{
	new_slot();
	$node->safe_psql('postgres', $few);
	my $end = $node->safe_psql('postgres', 'select pg_current_wal_insert_lsn()');
	my @read = ('pg_recvlogical', '-d', $node->connstr('postgres') . " options='-c temp_file_limit=20MB'", '-S', 'feed', '--start', '--no-loop', '-E', $end, '-f', '-', '-o', 'format=wal2json');
	my ($out, $err) = ('', '');
	IPC::Run::run(\@read, '>', \$out, '2>', \$err, IPC::Run::timeout(60));
	like($err, qr/a message to the client does not fit into temporary files/, 'beyond temp_file_limit there is an error');
	like(slurp_file($node->logfile), qr/HINT: .*max-message-size/, 'which says what helps');
	my $files = "select count(*) from pg_ls_tmpdir()";
	ok($node->poll_query_until('postgres', $files, '0'), 'and no file is left');
	IPC::Run::run([ @read, '-o', 'max-message-size=8MB' ], '>', \$out, '2>', \$err, IPC::Run::timeout(60));
	is(scalar($out =~ tr/Q//), $fewer * 1_000_000, 'as does a smaller size of messages');
}

# A table whose shape changes all the time, and one whose shape was announced long before: more
# shapes than a stream remembers numbers of.
{
	my $shapes = 4500;
	new_slot();
	$node->safe_psql('postgres', qq[
		create table changing (id int, c0 int);
		create table lasting (id int, v text);
		alter publication everything add table changing, lasting;
		insert into lasting values (0, 'before');
		do \$\$ begin
			for i in 1 .. $shapes loop
				execute format('alter table changing rename c%s to c%s', i - 1, i);
				insert into changing values (i, i);
				if i % 100 = 0 then insert into lasting values (i, 'meanwhile'); end if;
				commit;
			end loop;
		end \$\$;
	]);
	for my $schema (qw(each once))
	{
		my $read = "pg_logical_slot_peek_changes('feed', null, null, 'format', 'gir-json', 'publication_names', 'everything', 'schema', '$schema')";
		my $seen = $node->safe_psql('postgres', qq[
			select count(*) filter (where o->>'operation' = 'schema'),
				count(*) filter (where o->'schema'->>'table' = 'changing' and o->'after'->('c' || (o->'after'->>'id')) = o->'after'->'id'),
				count(*) filter (where o->'schema'->>'table' = 'lasting' and o->'after'->>'v' in ('before', 'meanwhile')),
				count(distinct o->'schema'->>'number') filter (where o->'schema'->>'table' = 'lasting')
			from (select data::jsonb as o from $read) x]);
		is($seen, join('|', $shapes + 1, $shapes, $shapes / 100 + 1, 1), "schema $schema: many shapes, and one that lasts");
	}
}

done_testing();
