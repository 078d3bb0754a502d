# gir-tail follows a slot: in each format, killed and continued, with a restart of the server, and
# up to a position. A reader in another language, written from the protocol's document alone, reads
# the same from the same bytes.

use strict;
use warnings;

use Braid;
use IPC::Run ();
use JSON::PP ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep time);

my $gir_tail = $ENV{GIR_TAIL} or die "GIR_TAIL names the program";
my $node = new_node('tokyo', conf => "max_prepared_transactions = 5\nlogical_decoding_work_mem = 64kB\n");
our $dsn = $node->connstr('postgres');
my $dir = $node->basedir;
$node->safe_psql('postgres', q[
	create table items (id int primary key, note text);
	create table large (id int primary key, v text, pad text);
	alter table large alter pad set storage plain;
	create publication running for table large (id, v), table items;
	create table kinds (id int primary key, b bool, i8 int8, f8 float8, f4 float4, n numeric, v varchar(9), by bytea, d date, ts timestamp, tz timestamptz, u uuid, j jsonb, e int[]);
]);

# Run to its end.
sub tail
{
	my (@arguments) = @_;
	my ($out, $err) = ('', '');
	my $done = IPC::Run::run([ $gir_tail, '-d', $dsn, @arguments ], '>', \$out, '2>', \$err, IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
	return ($done ? 0 : $? >> 8, $out, $err);
}

sub lsn { return $node->safe_psql('postgres', 'select pg_current_wal_insert_lsn()'); }

sub lines
{
	my ($file) = @_;
	return -e $file ? split(/\n/, slurp_file($file)) : ();
}

# Errors, in words.
my ($status, $out, $err) = tail('--slot', 'nobody', '-p', 'braid');
is($status, 1, 'a slot that does not exist ends it');
like($err, qr/^gir-tail: replication slot "nobody" does not exist$/m, 'and is named');
($status, $out, $err) = tail('--publication', 'braid');
is($status, 2, 'no slot is a fault of usage');
like($err, qr/give --slot/, 'and the option is named');
{
	local $main::dsn = 'host=/nowhere';
	($status, $out, $err) = tail('--slot', 's', '-p', 'braid', '--no-loop');
	is($status, 1, 'no server and no loop ends it');
	like($err, qr/^gir-tail: .*\/nowhere/m, 'and says where there is none');
}

# Text, up to a position; the slot is made on the way.
($status, $out, $err) = tail('--slot', 'text', '--create-slot', '-p', 'braid', '--until-lsn', lsn());
is($status, 0, "a slot is made: $err");
$node->safe_psql('postgres', "insert into items values (1, 'one'); update items set note = E'two\\nlines'; delete from items;");
my $until = lsn();
$node->safe_psql('postgres', "insert into items values (2, 'later')");
my $text;
($status, $text, $err) = tail('--slot', 'text', '--create-slot', '-p', 'braid', '--until-lsn', $until);
is($status, 0, 'it ends at a position');
like($text, qr/^STREAM version=1 node='tokyo'/, 'text starts with the stream');
is(scalar(() = $text =~ /^(INSERT|UPDATE|DELETE) /mg), 3, 'the records up to there are written');
like($text, qr/^UPDATE 0 public.items .* after\(id=1, note='two\\x0alines'\)$/m, 'one line each');
unlike($text, qr/later/, 'nothing beyond the position');
($status, $text) = tail('--slot', 'text', '-p', 'braid', '--until-lsn', lsn());
is(join('', grep { /^(INSERT|UPDATE|DELETE)/ } split(/^/, $text)) =~ tr/\n//, 1, 'the next run goes on there');
like($text, qr/later/, 'with what came since');

# JSON: the output of the SQL function, and the records of the binary format.
$node->safe_psql('postgres', q[
	select pg_create_logical_replication_slot('json', 'braid');
	insert into kinds values (1, true, 9007199254740993, 0.1, 0.1, 1.50, 'it''s "é"', '\xdead', '2024-02-29', '2024-02-29 12:30:00.5', '2024-02-29 12:30:00+05:30', null, null, null),
		(2, false, -1, 'NaN', '-Infinity', 'NaN', '', '', '0044-03-15 BC', 'infinity', '-infinity', null, null, null);
	begin; insert into items values (3, 'x'); update items set id = 4 where id = 3; truncate items; select pg_logical_emit_message(true, 'p', 'hello'); commit;
]);
my $server = $node->safe_psql('postgres', q[select data from pg_logical_slot_peek_changes('json', null, null, 'format', 'gir-json', 'publication_names', 'braid', 'messages', 'on')]);
my $frames = $node->safe_psql('postgres', q[select data from pg_logical_slot_peek_binary_changes('json', null, null, 'proto_version', '1', 'publication_names', 'braid', 'messages', 'on')]);
my $file = "$dir/json";
($status, $out, $err) = tail('--slot', 'json', '-p', 'braid', '--messages', '--format', 'json', '--file', $file, '--until-lsn', lsn());
is($status, 0, "JSON lines: $err");
is(join("\n", lines($file)), $server, 'the server and gir-tail write the same JSON');
my @objects = lines($file);
is((grep { /^\{"operation":"(\w+)".*\}$/ } @objects), scalar(@objects), 'each line is an object');

# The reader in Python, on the server's bytes.
my $python = '';
$err = '';
IPC::Run::run([ 'python3', "$ENV{TESTDIR}/docs/examples/gir_reader.py" ], '<', \$frames, '>', \$python, '2>', \$err);
is($err, '', 'the Python reader takes the bytes');
my @kinds = $python =~ /"record": "(\w+)"/g;
my @expected = map { /^\{"operation":"(\w+)"/ } @objects;
is_deeply(\@kinds, \@expected, 'it finds the same records');
like($python, qr/"after": \{"id": 1, "b": 1, "i8": 9007199254740993, "f8": "0\.1", "f4": "0\.100000001", "n": "1\.50", "v": "it's \\"é\\"", "by": \{"binary": "dead"\}, "d": "2024-02-29T00:00:00", "ts": "2024-02-29T12:30:00\.500000", "tz": "2024-02-29T07:00:00Z", "u": null/,
	'and the same values');
like($python, qr/"b": 0, "i8": -1, "f8": "nan", "f4": "-inf", "n": "NaN", "v": "", "by": \{"binary": ""\}, "d": "day -735160 T00:00:00", "ts": "infinity", "tz": "-infinity\+00:00"/,
	'also at the edges');
like($python, qr/"before": \{"id": 3, "note": \{"none": true\}\}, "before_kind": "key"/, 'and what is not available');
my $broken = substr($frames, 0, 80);
IPC::Run::run([ 'python3', "$ENV{TESTDIR}/docs/examples/gir_reader.py" ], '<', \$broken, '>', \$out, '2>', \$err);
like($err, qr/^Malformed: \d+ bytes wanted, \d+ left, at \d+ of frame 1$/, 'it says where bytes end that are cut');
for my $bad ([ "\\x4\n", 'an odd digit' ], [ "\xff\n", 'no text' ])
{
	IPC::Run::run([ 'python3', "$ENV{TESTDIR}/docs/examples/gir_reader.py" ], '<', \$bad->[0], '>', \$out, '2>', \$err);
	like($err, qr/^Malformed: bytea that is not in hexadecimal digits at 0 of frame 1$/, "and $bad->[1]");
}
# The same of transactions in segments, and of prepared ones: what is large in them is not
# published.
my $rows_of = sub { return "insert into large select i, 'v', repeat('p', 7000) from generate_series($_[0], $_[0] + 11) i;" };
my @uncommitted = ('messages', 'on', 'streaming', 'on', 'two_phase', 'on', 'publication_names', 'running');
my $uncommitted = join(', ', map { "'$_'" } @uncommitted);
$node->safe_psql('postgres', "select pg_create_logical_replication_slot('uncommitted', 'braid', false, true)");
$node->safe_psql('postgres', $_) for
	"begin; @{[ $rows_of->(1) ]} savepoint a; @{[ $rows_of->(21) ]} rollback to a; select pg_logical_emit_message(true, 'p', 'hello'); @{[ $rows_of->(41) ]} truncate items; commit;",
	"begin; @{[ $rows_of->(61) ]} prepare transaction 'one'; insert into items values (90, 'between'); commit prepared 'one'",
	"begin; insert into items values (91, 'x'); prepare transaction 'two'; rollback prepared 'two'";
my $both = $node->safe_psql('postgres', "select data from pg_logical_slot_peek_binary_changes('uncommitted', null, null, 'proto_version', '1', $uncommitted)");
@expected = map { /^\{"operation":"(\w+)"/ } split(/\n/, $node->safe_psql('postgres', "select data from pg_logical_slot_peek_changes('uncommitted', null, null, 'format', 'gir-json', $uncommitted)"));
IPC::Run::run([ 'python3', "$ENV{TESTDIR}/docs/examples/gir_reader.py" ], '<', \$both, '>', \$python, '2>', \$err);
is($err, '', 'the Python reader takes what has not committed');
@kinds = $python =~ /"record": "(\w+)"/g;
is_deeply(\@kinds, \@expected, 'and finds the same records');
my %kinds = map { $_ => 1 } @kinds;
is(join(' ', grep { !$kinds{$_} } qw(segment_start segment_end subtransaction abort streamed_commit begin_prepared prepare streamed_prepare commit_prepared rollback_prepared)),
	'', 'of every kind');
$node->safe_psql('postgres', q[select pg_drop_replication_slot('uncommitted')]);

# Frames of every kind of value and record, and changes of their bytes.
my $mutated = '';
ok(IPC::Run::run([ 'python3', "$ENV{TESTDIR}/t/gir_reader_mutations.py" ], '<', \"$frames\n\n$both", '>', \$mutated, '2>', \$err), "all bytes that are changed are refused or read: $mutated$err");
note($mutated);

# Killed again and again under load, the server restarted once: each row at least once, none
# missing.
my $rows = $ENV{BRAID_TEST_ROWS} // 3000;
$file = "$dir/killed";
$node->safe_psql('postgres', q[select pg_create_logical_replication_slot('killed', 'braid'); truncate items]);
my $writer_err = '';
# Not through standard input, which is written only while the test waits for the program.
my $writer = IPC::Run::start([ 'psql', '-XAtq', '-v', 'ON_ERROR_STOP=1', '-d', $dsn, '-c',
	"do \$\$ begin for i in 1 .. $rows loop insert into items values (i, repeat('x', i % 700)); if i % 3 = 0 then commit; end if; if i % 60 = 0 then perform pg_sleep(0.1); end if; end loop; end \$\$" ],
	'<', \'',
	'2>', \$writer_err);
my ($tail, $kills) = (undef, 0);
my @command = ($gir_tail, '-d', $dsn, '--slot', 'killed', '-p', 'braid', '--format', 'json', '--file', $file, '-s', '1');
my $log = "$dir/gir_tail.log";
for my $round (1 .. 8)
{
	my $before = -s $file // 0;
	$tail = IPC::Run::start(\@command, '2>>', $log);
	wait_until(sub { (-s $file // 0) > $before + 5000 || $node->safe_psql('postgres', 'select count(*) from items') == $rows }, 30);
	sleep(rand(0.3));
	$tail->signal('KILL');
	eval { $tail->finish };
	$kills++;
}
$writer->finish;
is($writer_err, '', 'the writer wrote');
$tail = IPC::Run::start(\@command, '2>>', $log);
my $half = lsn();
ok(wait_until(sub { $node->safe_psql('postgres', "select confirmed_flush_lsn >= '$half' from pg_replication_slots where slot_name = 'killed'") eq 't' }, 60), 'it has caught up');
# The server is restarted: the program connects again by itself.
$node->restart;
$node->safe_psql('postgres', "insert into items values ($rows + 1, 'after the restart')");
ok(wait_until(sub { slurp_file($file) =~ /after the restart/ }, 60), 'it goes on after a restart of the server');
like(slurp_file($log), qr/connecting again in 0\.5 s/, 'and says that it had to connect again');
$tail->signal('TERM');
$tail->finish;
is($tail->full_result(0), 0, 'SIGTERM ends it in order');
my %seen;
my $bad = 0;
for my $line (lines($file))
{
	$bad++ unless $line =~ /^\{"operation":"\w+",.*\}$/;
	$seen{$1}++ if $line =~ /^\{"operation":"insert".*"after":\{"id":(\d+),/;
}
is($bad, 0, 'no line is torn');
is(scalar(keys %seen), $rows + 1, "all rows are there after $kills kills");
note(sprintf('%d of them more than once', scalar grep { $_ > 1 } values %seen));
is($node->safe_psql('postgres', "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), confirmed_flush_lsn) < 1000000 from pg_replication_slots where slot_name = 'killed'"), 't', 'the slot has moved on');

# wal2json's form, in both of its versions.
for my $version (1, 2)
{
	$node->safe_psql('postgres', qq[select pg_create_logical_replication_slot('wal2json$version', 'braid'); insert into items values (20000$version, 'w'), (30000$version, 'w')]);
	my $wanted = $node->safe_psql('postgres', "select data from pg_logical_slot_peek_changes('wal2json$version', null, null, 'format', 'wal2json', 'format-version', '$version')");
	($status, $out, $err) = tail('--slot', "wal2json$version", '--format', 'wal2json', '-o', "format-version=$version", '--until-lsn', lsn());
	is($status, 0, "wal2json $version: $err");
	chomp $out;
	is($out, $wanted, 'what the server writes');
	($status, $out, $err) = tail('--slot', "wal2json$version", '--format', 'wal2json', '-o', "format-version=$version", '--until-lsn', lsn());
	is($out, '', 'and once');
}

# Confirmed records are in the file, however the program ends: SIGTERM, kill -9, a lost connection,
# a position to end at.
sub confirmed
{
	my ($slot) = @_;
	my $lsn = lsn();
	return wait_until(sub { $node->safe_psql('postgres', "select confirmed_flush_lsn >= '$lsn' from pg_replication_slots where slot_name = '$slot'") eq 't' }, 60);
}

sub free
{
	my ($slot) = @_;
	return wait_until(sub { $node->safe_psql('postgres', "select not active from pg_replication_slots where slot_name = '$slot'") eq 't' }, 60);
}

# Objects of a file, put together from their chunks.
sub objects
{
	my ($text) = @_;
	my $parser = JSON::PP->new->utf8;
	return eval { $parser->incr_parse($text) };
}

my $next_id = 1_000_000;
my %forms = (
	v1 => { arguments => [ '--format', 'wal2json' ], lines => 1 },
	v1_pretty => { arguments => [ '--format', 'wal2json', '-o', 'pretty-print=on' ] },
	v1_chunks => { arguments => [ '--format', 'wal2json', '-o', 'write-in-chunks=on' ] },
	v1_pieces => { arguments => [ '--format', 'wal2json', '-o', 'max-message-size=8kB' ] },
	v2 => { arguments => [ '--format', 'wal2json', '-o', 'format-version=2' ], lines => 1, boundaries => 1 },
	v2_rows => { arguments => [ '--format', 'wal2json', '-o', 'format-version=2', '-o', 'include-transaction=off' ], lines => 1 },
	json => { arguments => [ '--format', 'json', '-p', 'braid', '--messages' ], lines => 1 },
	text => { arguments => [ '-p', 'braid', '--messages' ], text => 1 },
);
for my $name (sort keys %forms)
{
	my $form = $forms{$name};
	my $slot = "kept_$name";
	my $file = "$dir/$slot";
	my @command = ($gir_tail, '-d', $dsn, '--slot', $slot, '--file', $file, '-s', '1', @{ $form->{arguments} });
	$node->safe_psql('postgres', "select pg_create_logical_replication_slot('$slot', 'braid')");
	my (@rows, @notes);
	# A transaction of so many rows, and behind it a message that is part of none.
	my $write = sub {
		my ($count) = @_;
		my $first = $next_id;
		$next_id += $count;
		push @rows, $first .. $next_id - 1;
		push @notes, "note-$first.";
		$node->safe_psql('postgres', "insert into items select i, repeat('k', 90) from generate_series($first, $next_id - 1) i; select pg_logical_emit_message(false, 'p', 'note-$first.')");
	};
	my $check = sub {
		my ($ending) = @_;
		my $text = slurp_file($file);
		my %there = map { $_ => 1 } $text =~ /\b(\d{7})\b/g;
		is(scalar(grep { !$there{$_} } @rows), 0, "$name, $ending: all rows are there");
		is(scalar(grep { index($text, $_) < 0 } @notes), 0, "$name, $ending: all messages are there");
		return if $form->{text};
		ok(scalar(objects($text)), "$name, $ending: it is JSON");
		is(scalar(grep { !defined objects($_) } lines($file)), 0, "$name, $ending: in each line") if $form->{lines};
		is(scalar(() = $text =~ /"action":"B"/g), scalar(() = $text =~ /"action":"C"/g), "$name, $ending: no transaction is torn") if $form->{boundaries};
	};

	my $tail = IPC::Run::start(\@command, '2>>', $log);
	$write->($_) for (1, 300, 1);
	ok(confirmed($slot), "$name: it is confirmed");
	$tail->signal('TERM');
	$tail->finish;
	$check->('SIGTERM');

	ok(free($slot), "$name: nobody follows the slot");
	$tail = IPC::Run::start(\@command, '2>>', $log);
	$write->($_) for (1, 300, 1);
	ok(confirmed($slot), "$name: it is confirmed");
	$tail->signal('KILL');
	eval { $tail->finish };
	$check->('kill -9');

	ok(free($slot), "$name: nobody follows the slot");
	$tail = IPC::Run::start(\@command, '2>>', $log);
	$write->($_) for (1, 300, 1);
	ok(confirmed($slot), "$name: it is confirmed");
	my $size = -s $file;
	$node->safe_psql('postgres', "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = '$slot'");
	# A large transaction, which another lost connection tears.
	$write->(6000);
	ok(wait_until(sub { -s $file > $size + 200000 }, 60), "$name: it has connected again");
	$node->safe_psql('postgres', "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = '$slot'");
	$write->(1);
	ok(confirmed($slot), "$name: it is confirmed");
	$node->safe_psql('postgres', "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = '$slot'");
	sleep(0.3);
	$check->('lost connection');
	$tail->signal('TERM');
	$tail->finish;

	ok(free($slot), "$name: nobody follows the slot");
	$write->($_) for (1, 300, 1);
	my ($status, $out, $err) = tail('--slot', $slot, '--file', $file, @{ $form->{arguments} }, '--until-lsn', lsn());
	is($status, 0, "$name: it ends at a position: $err");
	$check->('until a position');
	$node->safe_psql('postgres', "select pg_drop_replication_slot('$slot')");
}

# Transactions that still run, and such as are prepared, come as text and as JSON, and what is
# confirmed of them is kept, however the program ends.
my %of = (
	text => { insert => qr/^INSERT .*id=(\d+),/, streamed => qr/^STREAMED xid=\d+ BEGIN .* COMMIT /, segment => qr/^SEGMENT/,
		prepared => qr/^BEGIN PREPARED 'one' .*\n(?:SCHEMA .*\n)?INSERT .*\nPREPARE .*\n\z/m, committed => qr/^COMMIT PREPARED 'one'/ },
	json => { insert => qr/^\{"operation":"insert".*"after":\{"id":(\d+),/, streamed => qr/^\{"operation":"streamed_commit",/, segment => qr/^\{"operation":"segment_start"/,
		prepared => qr/^\{"operation":"begin_prepared",.*"gid":"one"\}\n(?:\{"operation":"schema".*\n)?\{"operation":"insert",.*"prepared":"one",.*\n\{"operation":"prepare",.*\n\z/m,
		committed => qr/^\{"operation":"commit_prepared",.*"gid":"one"\}$/ },
);
my $next = 2_000_000;
for my $format (sort keys %of)
{
	my $like = $of{$format};
	my $slot = "running_$format";
	my $file = "$dir/$slot";
	$node->safe_psql('postgres', "select pg_create_logical_replication_slot('$slot', 'braid')");
	my @command = ($gir_tail, '-d', $dsn, '--slot', $slot, '-p', 'braid', '--format', $format, '--file', $file, '-s', '1', '-o', 'streaming=on', '-o', 'two_phase=on', $format eq 'json' ? ('-o', 'schema=once') : ());
	my $tail;
	my $follow = sub { ok(free($slot), "$format: nobody follows the slot"); $tail = IPC::Run::start(\@command, '2>>', $log); };
	my $end = sub { my ($signal) = @_; $tail->signal($signal); eval { $tail->finish }; };
	my @rows;
	my $large = sub
	{
		my ($end) = @_;
		my $first = $next + 1;
		$next += 1000;
		push @rows, $first .. $next if $end eq 'commit';
		return "begin; insert into items select i, repeat('r', 100) from generate_series($first, $next) i; $end;";
	};
	my $missing = sub { my %there = map { $_ =~ $like->{insert} ? ($1 => 1) : () } lines($file); return scalar grep { !$there{$_} } @rows; };

	$follow->();
	$node->safe_psql('postgres', $large->('rollback') . $large->('commit'));
	ok(confirmed($slot), "$format: a transaction that came in segments is confirmed");
	$end->('TERM');
	like((lines($file))[-1], $like->{streamed}, "$format: and its commit is kept");
	is($missing->(), 0, "$format: with all of its rows");
	ok((grep { $_ =~ $like->{segment} } lines($file)) > 1, "$format: which came in segments");

	# Confirmed while another transaction is in progress, killed, continued.
	$follow->();
	my $open = $node->background_psql('postgres');
	my $running = $large->('commit') =~ s/ commit;$//r;
	$open->query_safe($running);
	$node->safe_psql('postgres', $large->('commit'));
	ok(confirmed($slot), "$format: what commits beside a running transaction is confirmed");
	$end->('KILL');
	$open->query_safe('commit');
	$open->quit;
	$follow->();
	ok(confirmed($slot), "$format: so is that");
	$end->('KILL');
	is($missing->(), 0, "$format: all rows of both are there after kill -9");

	# Killed in the middle, several times; and a lost connection.
	for my $round (1 .. 2)
	{
		my $before = -s $file;
		$follow->();
		$node->safe_psql('postgres', $large->('commit'));
		wait_until(sub { -s $file > $before + 20000 * $round }, 30);
		$node->safe_psql('postgres', "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = '$slot'") if $round == 2;
		$end->('KILL');
	}
	$follow->();
	ok(confirmed($slot), "$format: it catches up");
	$end->('TERM');
	is($missing->(), 0, "$format: and nothing is lost");

	$follow->();
	my $id = ++$next;
	$node->safe_psql('postgres', "begin; insert into items values ($id, 'prepared'); prepare transaction 'one'");
	ok(confirmed($slot), "$format: a prepared transaction is confirmed");
	$end->('KILL');
	like(slurp_file($file), $like->{prepared}, "$format: and kept");
	$follow->();
	$node->safe_psql('postgres', q[commit prepared 'one']);
	ok(confirmed($slot), "$format: so is what became of it");
	$end->('TERM');
	like((lines($file))[-1], $like->{committed}, "$format: which is kept");
	is(scalar(grep { $_ =~ $like->{insert} && $1 == $id } lines($file)), 1, "$format: and does not come again");

	# Nothing past a position to end at.
	my $until = lsn();
	ok(free($slot), "$format: nobody follows the slot");
	$node->safe_psql('postgres', $large->('commit'));
	my ($status, $out, $err) = tail(@command[ 3 .. $#command ], '--until-lsn', $until);
	is($status, 0, "$format: it ends at a position: $err");
	unlike((lines($file))[-1], $like->{streamed}, "$format: before what commits later");
	($status, $out, $err) = tail(@command[ 3 .. $#command ], '--until-lsn', lsn());
	is($missing->(), 0, "$format: which comes next");
	is(scalar(grep { !/^\{"operation":"\w+".*\}$/ } lines($file)), 0, "$format: in whole lines") if $format eq 'json';
	$node->safe_psql('postgres', "select pg_drop_replication_slot('$slot')");
}

# Large values that were not changed are fetched on the way.
$node->safe_psql('postgres', q[
	create table big (id int primary key, n int, doc text); alter table big alter doc set storage external;
	insert into big values (1, 1, repeat('v', 5000));
	select pg_create_logical_replication_slot('fetch', 'braid');
	update big set n = 2;
]);
($status, $out, $err) = tail('--slot', 'fetch', '-p', 'braid', '--format', 'json', '-o', 'include-unchanged-toast=fetch', '--until-lsn', lsn());
like($out, qr/"after":\{"id":1,"n":2,"doc":\{"fetched":"v{5000}"\}\}/, "a walsender fetches too: $err");
ok(wait_until(sub { $node->safe_psql('postgres', q[select count(*) from pg_stat_activity where backend_type = 'braid fetcher']) == 0 }, 20), 'and leaves no worker behind');

# pg_recvlogical writes the same JSON as gir-tail.
$node->safe_psql('postgres', q[select pg_create_logical_replication_slot('recv', 'braid'); insert into items values (100001, 'recv')]);
my $end = lsn();
$node->safe_psql('postgres', 'select pg_switch_wal()');
my $recv = "$dir/recv";
command_ok([ 'pg_recvlogical', '-d', $dsn, '--slot', 'recv', '--start', '-f', $recv, '--no-loop', '-E', $end, '-o', 'format=gir-json', '-o', 'publication_names=braid' ], 'pg_recvlogical streams gir-json');
is(scalar(grep { /"operation":"insert".*"id":100001/ } lines($recv)), 1, 'and gets the row');

# Dropping.
($status, $out, $err) = tail('--slot', 'recv', '--drop-slot');
is($status, 0, "a slot is dropped: $err");
is($node->safe_psql('postgres', q[select count(*) from pg_replication_slots where slot_name = 'recv']), '0', 'and gone');

done_testing();
