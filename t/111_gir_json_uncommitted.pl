# gir-json of transactions that are in progress, or prepared: whichever object's position a client
# confirms last, transactions that had not ended by then come again, whole. Also a server whose
# encoding is not UTF8, which converts text outside of transactions too.

use strict;
use warnings;

use Braid;
use IPC::Run ();
use JSON::PP qw(decode_json);
use PostgreSQL::Test::Utils;
use Test::More;

my $conf = "max_prepared_transactions = 5\nlogical_decoding_work_mem = 64kB\nmax_replication_slots = 130\n";
my $slots = 120;
my $node = new_server('tokyo', conf => $conf);
sub sql { return $node->safe_psql('postgres', $_[0]); }
my $options = q['format', 'gir-json', 'publication_names', 'feed', 'schema', 'once', 'messages', 'on', 'streaming', 'on', 'two_phase', 'on'];
# The rows that make transactions large are not published.
sql(q[
	create table large (id int primary key, v text, pad text);
	alter table large alter pad set storage plain;
	create table small (id int primary key, v text);
	create publication feed for table large (id, v), table small;
]);
sql("select pg_create_logical_replication_slot('at_' || i, 'braid', false, true) from generate_series(1, $slots) i");
my $large = sub { my ($first, $count) = @_; return "insert into large select i, 'v', repeat('p', 7000) from generate_series($first, $first + $count - 1) i;" };
sql($_) for
	"begin; @{[ $large->(101, 8) ]} savepoint a; @{[ $large->(201, 5) ]} rollback to a; select pg_logical_emit_message(true, 'p', 'within'); @{[ $large->(301, 4) ]} insert into small values (1, 'own'); commit",
	q[begin; insert into small values (2, 'one'); select pg_logical_emit_message(true, 'p', 'prepared'); prepare transaction 'one'],
	q[insert into small values (3, 'between'); select pg_logical_emit_message(false, 'p', 'outside')],
	q[commit prepared 'one'],
	"begin; @{[ $large->(401, 11) ]} prepare transaction 'two'; insert into small values (4, 'between')",
	q[commit prepared 'two'],
	q[begin; insert into small values (5, 'three'); prepare transaction 'three'],
	q[insert into small values (6, 'between')],
	q[rollback prepared 'three'],
	"begin; @{[ $large->(501, 10) ]} rollback; begin; @{[ $large->(601, 10) ]} commit; insert into small values (7, 'last')";

# The objects of a stream, each with the position of its message.
sub stream
{
	my ($text) = @_;
	return map { my ($at, $json) = split(/\|/, $_, 2); { at => number($at), %{ decode_json($json) } } } split(/\n/, $text);
}

sub number { my ($high, $low) = split('/', $_[0]); return hex($high) << 32 | hex($low); }

# Returns whole transactions, and the records about them: the index of the object that ends each,
# its kind, and the rows. A transaction in segments comes like any other once the server has seen
# its end. Part of one that was rolled back after PREPARE may come.
sub ends
{
	my (@objects) = @_;
	my (@ends, @open, %running);
	my $gid = '';
	for my $i (0 .. $#objects)
	{
		my $o = $objects[$i];
		my $operation = $o->{operation};
		my $xid = $o->{transaction} ? $o->{transaction}{xid} : $o->{xid};
		$gid = $o->{gid} if $o->{gid};
		if ($operation eq 'insert')
		{
			push @{ $o->{running} ? $running{ $o->{running}{xid} } : \@open }, [ $o->{after}{id}, $o->{running} ? $o->{running}{subxid} : 0 ];
		}
		elsif ($operation eq 'abort')
		{
			$running{$xid} = [ grep { $xid != $o->{subxid} && $_->[1] != $o->{subxid} } @{ $running{$xid} // [] } ];
		}
		elsif ($operation =~ /^(?:streamed_)?(commit|prepare|commit_prepared|rollback_prepared)$/)
		{
			my $what = $1;
			my @rows = $operation =~ /^streamed/ ? @{ delete $running{$xid} } : $what =~ /_prepared$/ ? () : splice(@open);
			@rows = () if $what eq 'prepare' && $gid eq 'three';
			my $lsn = $o->{lsn} // $o->{transaction}{lsn};
			push @ends, { index => $i, record => number($lsn), end => number($o->{end_lsn}), what => join(' ', $what, $lsn, 'rows', sort map { $_->[0] } @rows) };
		}
	}
	return @ends;
}

# An object that a client has confirmed, and that does not end a transaction, lies before the record
# that does: that transaction is not skipped.
sub early
{
	my (@objects) = @_;
	my @found;
	for my $end (ends(@objects))
	{
		my @late = grep { $objects[$_]{at} > $end->{record} } 0 .. $end->{index} - 1;
		push @found, "$end->{what}: " . join(', ', map { $objects[$_]{operation} } @late) if @late;
		push @found, "$end->{what}: not at its end" if $objects[ $end->{index} ]{at} != $end->{end};
	}
	return join('; ', @found);
}

my @all = stream(sql("select lsn, data from pg_logical_slot_peek_changes('at_$slots', null, null, $options)"));
my %kinds = map { $_->{operation} => 1 } @all;
is(join(' ', sort keys %kinds),
	'abort begin begin_prepared commit commit_prepared insert message prepare rollback_prepared schema segment_end segment_start stream streamed_commit streamed_prepare subtransaction',
	'all kinds of objects come');
my @ends = ends(@all);
is(scalar(@ends), 12, 'all that ended has an end');
is(early(@all), '', 'no position is beyond a transaction that has not ended');
is($ends[0]{what} =~ s/^commit \S+ //r, 'rows 1 101 102 103 104 105 106 107 108 301 302 303 304', 'the rows of one that came in segments, without what was rolled back in it');
cmp_ok(scalar(@all), '<', $slots, 'there is a slot for each object');
is_deeply([ map { $_->{prepared} // () } grep { $_->{operation} eq 'message' } @all ], ['one'], 'messages say what they are part of');

# Each position is confirmed by a slot of its own; then its output is read.
my $script = join("\n", map { sprintf(q[select pg_replication_slot_advance('at_%d', '%X/%X') \g /dev/null
	select %d as at, lsn, data from pg_logical_slot_peek_changes('at_%1$d', null, null, %s);], $_ + 1, $all[$_]{at} >> 32, $all[$_]{at} & 0xffffffff, $_, $options) } 0 .. $#all);
my %again;
for my $line (split(/\n/, sql($script)))
{
	my ($at, $rest) = split(/\|/, $line, 2);
	push @{ $again{$at} }, $rest;
}
my (@lost, @twice, @early);
for my $i (0 .. $#all)
{
	my @objects = stream(join("\n", @{ $again{$i} // [] }));
	my %there = map { $_->{what} => 1 } ends(@objects);
	push @lost, map { "$i ($all[$i]{operation}): $_->{what}" } grep { $_->{index} > $i && !$there{ $_->{what} } } @ends;
	push @twice, map { "$i ($all[$i]{operation}): $_->{what}" } grep { $_->{index} <= $i && $there{ $_->{what} } && $all[$i]{operation} !~ /^(segment|insert|message|subtrans|schema|begin|abort)/ } @ends;
	my $early = early(@objects);
	push @early, "$i: $early" if $early ne '';
}
is(join("\n", @lost), '', 'whatever is confirmed, all that had not ended comes again, whole');
is(join("\n", @twice), '', 'and nothing of which the end is confirmed');
is(join("\n", @early), '', 'in each of these streams too');
$node->stop;

# Text is converted when a segment ends, also if it ends because its subtransaction is found to be
# rolled back, outside of any transaction.
$node = new_server('paris', conf => $conf, init => [ '--encoding=LATIN1', '--locale=C' ]);
sql(q[
	set client_encoding = 'UTF8';
	create table "café" (id int primary key, v text);
	create table other (id int primary key, v text);
	alter table "café" alter v set storage plain;
	alter table other alter v set storage plain;
	create publication feed for all tables;
	select pg_create_logical_replication_slot('feed', 'braid', false, true);
]);
sql(q[
	set client_encoding = 'UTF8';
	begin;
	insert into "café" select i, repeat('é', 2000) from generate_series(1, 20) i;
	savepoint a;
	insert into other select i, repeat('à', 2000) from generate_series(1, 60) i;
	rollback to a;
	insert into "café" select i, repeat('ü', 2000) from generate_series(21, 80) i;
	commit;
]);
sql(q[set client_encoding = 'UTF8'; begin; insert into "café" values (81, 'ß'); prepare transaction 'é'; commit prepared 'é']);
my $end = sql('select pg_current_wal_insert_lsn()');
sql('select pg_switch_wal()');
my ($out, $err) = ('', '');
my @given = map { ('-o', $_) } 'format=gir-json', 'publication_names=feed', 'schema=once', 'streaming=on', 'two_phase=on';
ok(IPC::Run::run([ 'pg_recvlogical', '-d', $node->connstr('postgres'), '-S', 'feed', '--start', '-f', '-', '--no-loop', '-E', $end, @given ], '>', \$out, '2>', \$err,
	IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default)), "a walsender converts: $err");
unlike($out, qr/[^\x00-\x7f]/, 'to ASCII');
my @objects = map { decode_json($_) } split(/\n/, $out);
my ($whole) = map { $_->{what} } ends(@objects);
is(($whole // '') =~ s/^commit \S+ rows //r, join(' ', sort 1 .. 80), 'all rows are there, and no others');
is(scalar(grep { $_->{operation} eq 'insert' && $_->{after}{v} =~ /^(\x{e9}{2000}|\x{fc}{2000}|\x{e0}{2000}|\x{df})$/ } @objects), scalar(grep { $_->{operation} eq 'insert' } @objects), 'with their characters');
cmp_ok(scalar(grep { $_->{operation} eq 'segment_start' } @objects), '>', 2, 'in segments');
is((grep { $_->{operation} eq 'commit_prepared' } @objects)[0]{gid}, "\x{e9}", 'a name is converted too');

done_testing();
