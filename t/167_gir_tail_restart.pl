# gir-tail writes each row once if it can know that it has written it: over a clean restart of the
# server, which forgets what was confirmed, and over lost connections. Positions of another server,
# or of an earlier time, don't count. A slot that a run has created without using it is dropped.

use strict;
use warnings;

use Braid;
use IPC::Run ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep);

my $gir_tail = $ENV{GIR_TAIL} or die "GIR_TAIL names the program";
my $node = new_node('tokyo');
my $dsn = $node->connstr('postgres');
my $dir = $node->basedir;
sub sql { my ($sql) = @_; return $node->safe_psql('postgres', $sql); }
sub lsn { return sql('select pg_current_wal_insert_lsn()'); }
sql('create table item (id int primary key, v text)');

sub confirmed
{
	my ($slot) = @_;
	my $lsn = lsn();
	return wait_until(sub { sql("select confirmed_flush_lsn >= '$lsn' from pg_replication_slots where slot_name = '$slot'") eq 't' }, 60);
}

my $next = 1_900_000_000;
my %form = (
	text => [ '-p', 'braid' ],
	json => [ '--format', 'json', '-p', 'braid' ],
	v1 => [ '--format', 'wal2json' ],
	v2 => [ '--format', 'wal2json', '-o', 'format-version=2' ],
);
my %tail;
sub write_rows
{
	my ($count) = @_;
	my $first = $next + 1;
	$next += $count;
	sql("insert into item select i, 'v' from generate_series($first, $next) i");
	return;
}
for my $form (sort keys %form)
{
	sql("select pg_create_logical_replication_slot('$form', 'braid')");
	$tail{$form} = IPC::Run::start([ $gir_tail, '-v', '-d', $dsn, '--slot', $form, '--file', "$dir/$form", '-s', '1', @{ $form{$form} } ], '2>>', "$dir/$form.log");
}
sub once
{
	my ($what) = @_;
	for my $form (sort keys %form)
	{
		ok(confirmed($form), "$form, $what: it is confirmed");
		my %seen;
		$seen{$_}++ for slurp_file("$dir/$form") =~ /\b(19000\d{5})\b/g;
		is(scalar(keys %seen), $next - 1_900_000_000, "$form, $what: each row is there");
		is(scalar(grep { $_ > 1 } values %seen), 0, "$form, $what: once");
	}
	return;
}

write_rows(50) for 1 .. 3;
once('at first');
$node->restart;
write_rows(10);
once('after a restart');
# The checkpoint of the next one forgets nothing; a crash does, whatever was saved.
sql('checkpoint');
write_rows(10);
once('after a checkpoint');
$node->stop('immediate');
$node->start;
write_rows(10);
once('after a crash');
sql('select pg_terminate_backend(active_pid) from pg_replication_slots where active');
write_rows(10);
once('after a lost connection');
like(slurp_file("$dir/text.log"), qr/streaming from \S+/, 'it says where it goes on');
for my $form (sort keys %form)
{
	$tail{$form}->signal('TERM');
	$tail{$form}->finish;
	is($tail{$form}->full_result(0), 0, "$form: SIGTERM ends it in order");
}

# A slot is created, and the run fails.
sub fails
{
	my ($like, $what, @arguments) = @_;
	my $err = '';
	my $done = IPC::Run::run([ $gir_tail, '-d', $dsn, '--slot', 'made', '--create-slot', @arguments ], '>', \my $out, '2>', \$err, IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
	ok(!$done, "$what: it fails");
	like($err, $like, "$what: and says why");
	return;
}
sub slots { return sql(q[select count(*) from pg_replication_slots where slot_name = 'made']); }
for my $case ([ qr/nonsense/, 'an option that is none', '-p', 'braid', '-o', 'nonsense=1' ],
	[ qr/could not write/, 'a file that is none', '-p', 'braid', '--file', "$dir/no/file" ],
	[ qr/no publication was named/, 'no publications' ])
{
	fails(@$case);
	is(slots(), '0', "$case->[1]: no slot is left");
}
# The publication is looked for with the first change.
my $err = '';
my $run = IPC::Run::start([ $gir_tail, '-d', $dsn, '--slot', 'made', '--create-slot', '-p', 'missing' ], '>', \my $out, '2>', \$err, IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
ok(wait_until(sub { sql(q[select active from pg_replication_slots where slot_name = 'made']) eq 't' || $err ne '' }, 30), 'it streams');
write_rows(1);
eval { $run->finish };
like($err, qr/"missing" does not exist/, 'a publication that is not there ends it');
like($err, qr/"made" was dropped again/, 'which says that the slot is gone');
is(slots(), '0', 'and it is');
# A slot that was there stays, and one that something came from.
sql(q[select pg_create_logical_replication_slot('made', 'braid')]);
fails(qr/nonsense/, 'a slot that was there', '-p', 'braid', '-o', 'nonsense=1');
is(slots(), '1', 'it stays');
sql(q[select pg_drop_replication_slot('made')]);
write_rows(1);
ok(IPC::Run::run([ $gir_tail, '-d', $dsn, '--slot', 'made', '--create-slot', '-p', 'braid', '--until-lsn', lsn() ], '>', \$out, '2>', \$err), "a run that ends at a position: $err");
is(slots(), '1', 'leaves its slot');

done_testing();
