# Transactions many times the size of the buffer between leader and appliers, values of many megabytes, subtransactions: all
# of it arrives once, in bounded memory, also when an applier ends in the middle.

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

# High-water marks of memory, in kB, by process; of processes of their own kind that came later, too.
my (%first, %last);

sub measure
{
	for my $kind ('braid leader', 'braid applier')
	{
		for my $pid (worker_pids($paris, $kind))
		{
			open my $file, '<', "/proc/$pid/status" or next;
			my ($peak) = join('', <$file>) =~ /^VmHWM:\s+(\d+) kB/m;
			close $file;
			next unless defined $peak;
			$first{"$kind $pid"} //= $peak;
			$last{"$kind $pid"} = $peak;
		}
	}
	return;
}
measure();
is(scalar(keys %first), 3, 'a leader and two appliers are measured');

# Small transactions beside everything else.
my $dir = PostgreSQL::Test::Utils::tempdir();
append_to_file("$dir/small.sql", "\\set k random(1, 20)\nupdate small set n = n + 1 where id = :k;\n");
my $bench = start_pgbench($tokyo, '-c', 2, '-T', 5, '-R', 200, '-f', "$dir/small.sql");

$tokyo->safe_psql('postgres', q[
	insert into bulk select i, i % 100, repeat('v', 50) || i from generate_series(1, 200000) i;
]);
# Compressible values would shrink on their way into the table, random ones do not.
$tokyo->safe_psql('postgres', q[
	insert into big
	select 1,
	       (select string_agg(md5(i::text), '') from generate_series(1, 20 * 1024 * 1024 / 32) i),
	       (select string_agg(decode(md5(i::text), 'hex'), '') from generate_series(1, 5 * 1024 * 1024 / 16) i);
	update big set b = b || '\x00'::bytea where id = 1;
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
measure();
same_tables([ $tokyo, $paris ], qw(bulk big nested small));
is($paris->safe_psql('postgres', 'select length(t), length(b) from big'), (20 * 1024 * 1024) . '|' . (5 * 1024 * 1024 + 1), 'large values have their length');
is($paris->safe_psql('postgres', 'select count(*) from nested'), 1 + 100 * 34, 'what subtransactions rolled back is not there');

# An applier ends in the middle of a large transaction.
my $before = $paris->safe_psql('postgres', "select failures from braid.subscription_detail where name = '$name'");
$tokyo->safe_psql('postgres', q[
	begin;
	insert into nested values (-1, 'with the large one');
	update bulk set v = 'changed ' || id where id <= 100000;
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
same_tables([ $tokyo, $paris ], qw(bulk big nested small));
isnt(status($paris, $name)->{state}, 'error', 'and that is not an error');
is($paris->safe_psql('postgres', 'select count(*) from braid.conflict_history'), '0', 'nor a conflict: nothing was applied twice');

# The same rows in one transaction after another, deleted at last.
$tokyo->safe_psql('postgres', 'delete from bulk where id > 50000');
caught_up($paris, $tokyo);
measure();
same_tables([ $tokyo, $paris ], qw(bulk small));

for my $process (sort keys %first)
{
	my $grown = ($last{$process} - $first{$process}) / 1024;
	cmp_ok($grown, '<', 200, sprintf('%s: memory stays bounded (%.0f MB more at its peak)', $process =~ s/ \d+$//r, $grown));
}

done_testing();
