# Versioned transactions in every apply mode and commit order, small and large, streamed and not:
# each sees all before it, at whichever node. Plain transactions run beside them.

use strict;
use warnings;

use Braid;
use Group;
use IPC::Run ();
use PostgreSQL::Test::Utils;
use Test::More;

my @both = my ($tokyo, $paris) = group([qw(tokyo paris)], q[
	create table counter (k int primary key, n int not null);
	create table ledger (n int primary key, who text not null, before int);
	create table bulk (n int, i int, t text, primary key (n, i));
	create table plain (k int primary key, n int not null);
	insert into counter values (1, 0);
	insert into plain select k, 0 from generate_series(1, 100) k],
	conf => "braid.version_timeout = 120s\nlogical_decoding_work_mem = 64kB\nbraid.apply_buffer_size = 1MB\nbraid.appliers_per_subscription = 4\n");
sql($tokyo, "select braid.version_table('$_')") for qw(counter ledger bulk);
ok($_->poll_query_until('postgres', q[select count(*) = 3 from braid.versioned_table where phase = 1]), $_->name . ' knows the tables') for @both;

# One number for each transaction of both nodes. Two of one number would not both fit into the
# ledger; a number that was missed would be a hole in it, and in what each says was there before.
my $small = q[
begin isolation level repeatable read;
set local braid.versions = 'write counter, write ledger';
update counter set n = n + 1 where k = 1;
insert into ledger select c.n, 'node', (select max(n) from ledger) from counter c where k = 1;
commit;
];
my $large = q[
begin isolation level repeatable read;
set local braid.versions = 'write counter, write ledger, write bulk';
update counter set n = n + 1 where k = 1;
insert into ledger select c.n, 'node', (select max(n) from ledger) from counter c where k = 1;
savepoint one;
insert into bulk select -c.n, i, repeat('never', 20) from counter c, generate_series(1, 50) i where k = 1;
rollback to one;
insert into bulk select c.n, i, repeat('x', 200) from counter c, generate_series(1, 1500) i where k = 1;
delete from bulk where n = (select max(n) - 6 from bulk);
commit;
];
my $plain = q[
\set k random(1, 50)
update plain set n = n + 1 where k = :k + own;
];
my $streamed = q[select sum(stream_txns), sum(spill_txns) from pg_stat_replication_slots];
my $done = 0;
sub load
{
	my ($node, $name, $script, $count, $clients) = @_;
	my $own = $node == $paris ? 50 : 0;
	my $file = $node->basedir . "/$name.sql";
	unlink $file;
	append_to_file($file, $script =~ s/'node'/"'" . $node->name . "'"/egr =~ s/own/$own/r);
	my ($out, $err) = ('', '');
	return { node => $node, out => \$out, err => \$err, name => $name, count => $count * $clients,
		run => IPC::Run::start([ 'pgbench', '-n', '-c', $clients, '-t', $count, '-f', $file, $node->connstr('postgres') ], '>', \$out, '2>', \$err) };
}
for my $options (
	[ 'serial', apply_mode => 'serial', commit_order => 'source', streaming => 'on' ],
	[ 'parallel', apply_mode => 'parallel', commit_order => 'source', streaming => 'parallel' ],
	[ 'parallel, large ones as a whole', apply_mode => 'parallel', commit_order => 'source', streaming => 'off' ],
	[ 'relaxed', apply_mode => 'parallel', commit_order => 'relaxed', streaming => 'parallel' ],
	[ 'batch', apply_mode => 'batch', commit_order => 'source', streaming => 'parallel' ],
	[ 'batch, relaxed', apply_mode => 'batch', commit_order => 'relaxed', streaming => 'on' ],
	[ 'aggregate', apply_mode => 'aggregate', commit_order => 'source', streaming => 'parallel' ])
{
	my ($label, @set) = @$options;
	my %set = @set;
	for my $node (@both)
	{
		my $name = sql($node, 'select subscription_name from braid.subscription');
		sql($node, "select braid.alter_subscription('$name', " . join(', ', map { "$_ => '$set{$_}'" } sort keys %set) . ')');
		ok($node->poll_query_until('postgres', "select state in ('streaming', 'catching up') from braid.subscription_status"), "$label: " . $node->name . ' streams') or diag(sql($node, 'table braid.subscription_status'));
	}
	my @before = map { sql($_, $streamed) } @both;
	my @running = map { (load($_, 'small', $small, 30, 2), load($_, 'large', $large, 5, 1), load($_, 'plain', $plain, 200, 2)) } @both;
	for my $load (@running)
	{
		ok($load->{run}->finish, "$label: " . $load->{node}->name . ": no $load->{name} transaction failed") or diag(${ $load->{err} });
		like(${ $load->{out} }, qr{actually processed: $load->{count}/$load->{count}}, "$label: all $load->{name} ones of " . $load->{node}->name . ' have ended');
	}
	$done += 2 * (60 + 5);
	have_all(@both);
	for my $i (0, 1)
	{
		my $node = $both[$i];
		is(sql($node, q[select n, (select count(*) from ledger), (select max(n) from ledger) from counter]), "$done|$done|$done", "$label: " . $node->name . ' has each number once');
		is(sql($node, q[select count(*) from ledger where before is distinct from nullif(n - 1, 0)]), '0', "$label: each transaction of " . $node->name . ' has seen the one before');
		is(sql($node, q[select count(*) from bulk where n < 0 or t <> repeat('x', 200)]), '0', "$label: nothing that was rolled back came to " . $node->name);
		is(sql($node, q[select count(*) from braid.conflict_history where relation::text <> 'plain']), '0', "$label: no conflict of versioned tables at " . $node->name);
		my ($streams, $spilled) = map { my $now = $_; $now } split /\|/, sql($node, $streamed);
		my ($had_streams, $had_spilled) = split /\|/, $before[$i];
		cmp_ok($streams + $spilled, '>', $had_streams + $had_spilled, "$label: large ones were streamed or spilled at " . $node->name);
	}
	same_tables(\@both, qw(counter ledger bulk plain));
}
done_testing();
