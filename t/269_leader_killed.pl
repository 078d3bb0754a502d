# Members of a group are killed under streams of proposals from all of them: the leader's group
# worker, the leader's whole server, all servers at once, and a leader that has no majority any
# more. Each answer is recorded outside of the servers. No entry is lost whose proposer has had its
# answer, none counts twice, and all members have one order of all entries.

use strict;
use warnings;

use Braid;
use Group;
use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;

my $most = 150;
my $dir = PostgreSQL::Test::Utils::tempdir();
my @nodes = group([qw(tokyo paris oslo)], qq[
	create table item (id bigint primary key);
	do \$\$ begin
		for i in 1..$most loop
			execute format('create sequence s_tokyo_%s', i);
			execute format('create sequence s_paris_%s', i);
			execute format('create sequence s_oslo_%s', i);
		end loop;
	end \$\$],
	# A write that is not flushed before its answer is lost with the server.
	conf => "wal_writer_delay = 10s\n");
my %node = map { $_->name => $_ } @nodes;
for my $node (@nodes)
{
	ok($node->poll_query_until('postgres', 'select count(*) = ' . 3 * $most . q[ from braid.sequence s join pg_class c on c.oid = s.relation where c.relname ~ '^s_']), $node->name . ' knows its sequences')
	  or diag(sql($node, 'select count(*) from braid.sequence'));
}

# All have the kind already that is proposed below: an entry that changes nothing is on disk only
# since the log is.
for my $node (@nodes)
{
	my $name = $node->name;
	sql($node, "select count(braid.set_sequence(('s_${name}_' || i)::regclass, 'local')) from generate_series(1, $most) i");
}

# Each member proposes one entry after the other, each with a name of its own. A server that is down
# is waited for.
sub stream
{
	my ($node) = @_;
	my ($name, $connection) = ($node->name, $node->connstr('postgres'));
	my $script = qq[
		for i in \$(seq 1 $most); do
			until pg_isready -q -d "$connection"; do [ -e $dir/stop ] && break; sleep 0.05; done
			[ -e $dir/stop ] && break
			psql -XqAt -d "$connection" -c "select braid.set_sequence('s_${name}_\$i', 'local')" >/dev/null 2>>$dir/$name.err && echo \$i >>$dir/$name.answered
			sleep 0.5
		done];
	return IPC::Run::start([ 'bash', '-c', $script ], '<', \undef);
}
sub answered
{
	my ($name) = @_;
	return -e "$dir/$name.answered" ? split /\n/, slurp_file("$dir/$name.answered") : ();
}
# So many more are answered to each of these.
sub goes_on
{
	my ($more, @names) = @_;
	my %before = map { my @all = answered($_); $_ => scalar @all } @names;
	my $what = "the group answers to @names";
	ok(wait_until(sub { !grep { my @all = answered($_); @all < $before{$_} + $more } @names }, 120), $what)
	  or diag(map { "$_: " . scalar(answered($_)) . "\n" . (-e "$dir/$_.err" ? slurp_file("$dir/$_.err") : '') } @names);
	return;
}
sub leader
{
	my (@of) = @_;
	my $found;
	wait_until(sub {
			for my $node (@of)
			{
				$found = look($node, 'select name from braid.group_nodes where leads');
				return 1 if $found && grep { $_->name eq $found } @of;
			}
			return 0;
		}, 120);
	return $found;
}

# The process of a member that takes part in the agreement.
sub worker
{
	my ($name) = @_;
	return sql($node{$name}, q[select pid from pg_stat_activity where backend_type = 'braid group']);
}

append_to_file("$dir/$_.err", '') for keys %node;
my $first = 1 + sql($nodes[0], 'select max(log_index) from braid.group_log');
my @streams = map { stream($_) } @nodes;
goes_on(5, sort keys %node);

my $led = leader(@nodes);
ok(kill_process($node{$led}, worker($led)), "the group worker of $led, which leads, is killed");
goes_on(5, sort keys %node);

my $second = leader(@nodes);
my @others = grep { $_ ne $second } sort keys %node;
$node{$second}->kill9;
my $third = leader(map { $node{$_} } @others);
isnt($third, $second, "the server of $second, which leads, is killed: another one leads");
goes_on(5, @others);
restart_crashed($node{$second});
goes_on(3, sort keys %node);

for my $round (1, 2)
{
	$_->kill9 for @nodes;
	restart_crashed($_) for @nodes;
	goes_on(5, sort keys %node);
}

# A leader that nobody hears answers nobody. What it has appended alone is gone once another one
# leads.
my $deaf = leader(@nodes);
my @stopped = map { worker($_) } grep { $_ ne $deaf } sort keys %node;
kill 'STOP', @stopped;
# One that is under way may come to its end.
my $before = 1 + (my @before = answered($deaf));
my $late = qr/the group has not agreed in time/;
my $said = () = slurp_file("$dir/$deaf.err") =~ /$late/g;
ok(wait_until(sub { my $now = () = slurp_file("$dir/$deaf.err") =~ /$late/g; $now > $said }, 120), "a proposal at $deaf, which leads and has no majority");
cmp_ok(scalar(my @now = answered($deaf)), '<=', $before, 'has no answer');
$node{$deaf}->kill9;
kill 'CONT', @stopped;
goes_on(5, grep { $_ ne $deaf } sort keys %node);
restart_crashed($node{$deaf});
goes_on(3, sort keys %node);

append_to_file("$dir/stop", '');
$_->finish for @streams;

# Each has all entries, in one order.
my $end = q[select coalesce(max(log_index), 0) from braid.group_log];
sql($nodes[0], q[select braid.set_sequence_default('range')]);
my ($last) = sort { $b <=> $a } map { sql($_, $end) } @nodes;
ok($_->poll_query_until('postgres', "select ($end) >= $last"), $_->name . ' has the whole log') for @nodes;
# A member begins with what was agreed before it joined, without those entries.
$first = (sort { $b <=> $a } $first, map { sql($_, 'select min(log_index) from braid.group_log') } @nodes)[0];
my $entries = "select log_index, term, proposed_by, kind, subject, result from braid.group_log where log_index between $first and $last order by log_index";
my %log = map { $_->name => sql($_, $entries) } @nodes;
is($log{$_}, $log{tokyo}, "in the order of tokyo: $_") for qw(paris oslo);
my %answered = map { $_ => [ answered($_) ] } sort keys %node;
cmp_ok(scalar @{ $answered{$_} }, '>=', 20, "$_ has had answers") for sort keys %answered;
for my $of (sort keys %log)
{
	my (%times, %refused);
	for (split /\n/, $log{$of})
	{
		my (undef, undef, undef, $kind, $subject, $result) = split /\|/, $_, 6;
		next unless $kind eq 'set option' && $subject =~ /(s_\w+?_\d+)\b/;
		$times{$1}++;
		$refused{$1}++ if $result ne 'done';
	}
	is(join(' ', map { my $name = $_; grep { !$times{$_} } map { "s_${name}_$_" } @{ $answered{$name} } } sort keys %answered), '', "no entry that was answered is missing in the log of $of");
	is(join(' ', grep { $times{$_} > 1 } sort keys %times), '', 'none is there twice');
	is(join(' ', sort keys %refused), '', 'none was refused');
}
is(sql($_, q[select state from braid.group_nodes where is_local]), 'active', 'the group believes ' . $_->name) for @nodes;
sql($nodes[0], 'insert into item values (1)');
have_all(@nodes);
same_tables(\@nodes, 'item');

done_testing();
