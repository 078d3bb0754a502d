# Transactions many times the size of the buffer between leader and appliers, values of many
# megabytes, and subtransactions arrive once, in bounded memory. An applier may end in the middle.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo', conf => "logical_decoding_work_mem = '4MB'\n");
my $paris = new_node('paris', publication => '', conf => "braid.apply_buffer_size = '1MB'\n");
on_all(q[
	create table bulk (id int primary key, k int, v text);
	create table big (id int primary key, t text, b bytea);
	create table nested (id int primary key, v text);
	create table small (id int primary key, n int);
], $tokyo, $paris);
$tokyo->safe_psql('postgres', 'insert into small select i, 0 from generate_series(1, 20) i');
my $name = subscribe($paris, $tokyo);

# High-water marks of memory, in kB: at first, by kind of process, and since then, by process. One
# that came later is taken to have begun as others of its kind.
my (%first, %last);

sub measure
{
	for ([ $paris, 'braid leader' ], [ $paris, 'braid applier' ], [ $tokyo, 'walsender' ])
	{
		my ($node, $kind) = @$_;
		for my $pid (worker_pids($node, $kind))
		{
			open my $file, '<', "/proc/$pid/status" or next;
			my ($peak) = join('', <$file>) =~ /^VmHWM:\s+(\d+) kB/m;
			close $file;
			next unless defined $peak;
			$first{$kind} = $peak if !defined $first{$kind} || ($peak < $first{$kind} && !keys %last);
			$last{"$kind $pid"} = $peak if %last || $_[0];
		}
	}
	return;
}

# None has grown by so many MB since the start.
sub grown_less_than
{
	my ($limit, $what) = @_;
	measure(1);
	for my $process (sort keys %last)
	{
		my ($kind) = $process =~ /^(.+) \d+$/;
		my $grown = ($last{$process} - $first{$kind}) / 1024;
		cmp_ok($grown, '<', $limit, sprintf '%s: memory stays bounded, %s (%.0f MB more at its peak)', $kind, $what, $grown);
	}
	return;
}
# Appliers start when the leader has something for them.
wait_until(sub { measure(); keys %first == 3 }, 30);
is_deeply([ sort keys %first ], [ 'braid applier', 'braid leader', 'walsender' ], 'all kinds of processes are measured');

# Small transactions beside everything else.
my $dir = PostgreSQL::Test::Utils::tempdir();
append_to_file("$dir/small.sql", "\\set k random(1, 20)\nupdate small set n = n + 1 where id = :k;\n");
my $bench = start_pgbench($tokyo, '-c', 2, '-T', 5, '-R', 200, '-f', "$dir/small.sql");

# 96 MB in one transaction, of which a process that held it whole would grow by more than that. What
# grows instead comes to some 40 MB at most: the 32 MB of shared buffers, which count for each
# process that has touched them, frames of 256 kB, and at the provider the 4 MB of
# logical_decoding_work_mem.
my $limit = 72;
$tokyo->safe_psql('postgres', q[
	insert into bulk select i, i % 100, repeat(md5(i::text), 60) from generate_series(1, 50000) i;
]);
my $savepoints = 'begin; insert into nested values (0, $$outside$$);';
for my $i (1 .. 50)
{
	$savepoints .= "savepoint s$i; insert into nested select $i * 1000 + j, 'in $i' from generate_series(1, 100) j; update nested set v = 'changed in $i' where id = 0;";
	$savepoints .= "rollback to s$i;" if $i % 3 == 0;
	$savepoints .= "release s$i;" if $i % 3 == 1;
}
$tokyo->safe_psql('postgres', "$savepoints commit");
finish_pgbench($bench);
caught_up($paris, $tokyo);
grown_less_than($limit, 'many rows');
same_tables([ $tokyo, $paris ], qw(bulk nested small));
is($paris->safe_psql('postgres', 'select count(*) from nested'), 1 + 100 * 34, 'what subtransactions rolled back is not there');

# An applier ends in the middle of a large transaction.
my $before = $paris->safe_psql('postgres', "select failures from braid.subscription_detail where name = '$name'");
$tokyo->safe_psql('postgres', q[
	begin;
	insert into nested values (-1, 'with the large one');
	update bulk set v = 'changed ' || v where id <= 25000;
	commit;
]);
my $killed = 0;
wait_until(sub {
	$killed = $paris->safe_psql('postgres', q[
		select count(pg_terminate_backend(pid)) from pg_stat_activity
		where backend_type = 'braid applier' and backend_xid is not null
	]);
}, 20);
ok($killed, 'an applier that has a transaction open is terminated');
is($paris->safe_psql('postgres', 'select count(*) from nested where id = -1'), '0', 'before it has committed');
caught_up($paris, $tokyo);
measure();
same_tables([ $tokyo, $paris ], qw(bulk nested small));
isnt(status($paris, $name)->{state}, 'error', 'and that is not an error');
is($paris->safe_psql('postgres', 'select count(*) from braid.conflict_history'), '0', 'nor a conflict: nothing was applied twice');

# The same rows in one transaction after another, deleted at last.
$tokyo->safe_psql('postgres', 'delete from bulk where id > 12500');
caught_up($paris, $tokyo);
grown_less_than($limit, 'rows changed and deleted');
same_tables([ $tokyo, $paris ], qw(bulk small));

# A single row is held whole, and more than once: as the message, the record, and the values that
# are made of it. Compressible values would shrink on their way into the table, random ones do not.
$tokyo->safe_psql('postgres', q[
	insert into big
	select 1,
	       (select string_agg(md5(i::text), '') from generate_series(1, 20 * 1024 * 1024 / 32) i),
	       (select string_agg(decode(md5(i::text), 'hex'), '') from generate_series(1, 5 * 1024 * 1024 / 16) i);
	update big set b = b || '\x00'::bytea where id = 1;
]);
caught_up($paris, $tokyo);
grown_less_than(200, 'a row of 25 MB');
same_tables([ $tokyo, $paris ], qw(big));
is($paris->safe_psql('postgres', 'select length(t), length(b) from big'), (20 * 1024 * 1024) . '|' . (5 * 1024 * 1024 + 1), 'large values have their length');

done_testing();
