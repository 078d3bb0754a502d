# The balancer at work, on four nodes with two copies of each row. Clients write for tenants whose
# sizes follow Zipf's law. In the middle a tenant becomes very hot, and the balancer spreads it.
#
# Clients of two kinds route their rows as an application would. Those of pgbench ask braid.route
# where a row goes. The guessing client writes where it wrote last for the tenant, and follows the
# hint of SQLSTATE RT001. Neither may meet another error, or wait for the rule. Afterwards each row
# is where reads look for it, with both copies, and no row has moved.

use strict;
use warnings;

use Braid;
use Group;
use IPC::Run;
use List::Util qw(max min sum);
use PostgreSQL::Test::Utils;
use Session;
use Test::More;
use Time::HiRes qw(time);

my ($hot, $shards) = (5000, 32);
my $conf = "braid.balancer_least_writes = 50\nautovacuum = off\n";
my ($tokyo) = my @all = group([qw(tokyo paris oslo lima)], q{
	create table orders (tenant_id bigint not null, order_id uuid not null, created_at timestamptz not null default now(), writer text not null, n bigint not null,
		primary key (tenant_id, order_id, created_at));
}, conf => $conf);
my %named = map { $_->name => $_ } @all;
my %at_port = map { $_->port => $_ } @all;
sql($tokyo, "select braid.route_table('orders', 'tenant_id', 'order_id', 'created_at', shards => $shards, copies => 2, umbrella => true)");
my %set_of = map { split /\|/ } split /\n/, sql($tokyo, 'select distinct n, node_set from braid.shards, unnest(nodes) n');
is(join(' ', sort values %set_of), '1 1 2 2', 'two sets of two nodes') or BAIL_OUT('the test goes by these sets');
sql($tokyo, q[select braid.set_balancer('orders', 'on')]);

# A client of pgbench knows the set of its node, and writes the rows that braid.route says belong to
# it; the others are for clients of the other set. It numbers its rows, so a lost one is missed.
my $scratch = PostgreSQL::Test::Utils::tempdir();
my %bench;
sub start_clients
{
	my ($kind, $seconds, $rate, $tenant) = @_;
	for my $node (@all)
	{
		my $name = "$kind-" . $node->name;
		append_to_file("$scratch/$name.sql", <<"SQL");
\\set tenant $tenant
select gen_random_uuid() as id, clock_timestamp() as created \\gset
select (node_set = :own)::int as is_mine from braid.route('orders', :tenant::text, :id::text, :created::timestamptz) \\gset
\\if :is_mine
\\set n :n + 1
insert into orders values (:tenant, :id::uuid, :created::timestamptz, '$name ' || :client_id, :n);
\\endif
SQL
		my ($out, $err) = ('', '');
		my @command = ('pgbench', '-n', '-M', 'prepared', '-c', 2, '-T', $seconds, '-R', $rate, '-D', 'n=0', '-D', 'own=' . $set_of{ $node->name },
			'-f', "$scratch/$name.sql", '-l', "--log-prefix=$scratch/$name", '-h', $node->host, '-p', $node->port, 'postgres');
		$bench{$name} = { out => \$out, err => \$err, run => IPC::Run::start(\@command, '<', \undef, '>', \$out, '2>', \$err) };
	}
	return;
}

# The guessing client: a session with each node, and for each tenant the node that it wrote to last.
my %session = map { $_->name => Session::connect_to($_, 'postgres') } @all;
my (%last, @guessed, @errors);
my ($followed, $number) = (0, 0);
sub execute
{
	my ($session, $text) = @_;
	my %error;
	Session::ask($session, $text);
	while (my ($type, $data) = Session::message($session))
	{
		return %error if $type eq 'Z';
		%error = map { substr($_, 0, 1) => substr($_, 1) } grep { length } split /\0/, $data if $type eq 'E';
	}
	return (C => '', M => 'the connection is lost');
}
sub guess
{
	my ($tenant) = @_;
	my ($began, $node) = (time, $last{$tenant} // $tokyo);
	my $id = join '-', map { sprintf '%0' . $_ . 'x', int(rand(16**$_)) } 8, 4, 4, 4, 12;
	my %error = (M => 'no attempt');
	$number++;
	# Between two attempts a rule can come.
	for (1 .. 3)
	{
		%error = execute($session{ $node->name }, "insert into orders (tenant_id, order_id, writer, n) values ($tenant, '$id', 'guess', $number)");
		my ($port) = %error && $error{C} eq 'RT001' ? $error{H} =~ /^Write it there: .*?\bport='?(\d+)/ : ();
		last if !$port;
		$node = $at_port{$port};
		$followed++;
	}
	if (%error) { push @errors, "$error{C} $error{M}"; }
	else { push @guessed, [ $began, time - $began ]; }
	$last{$tenant} = $node;
	return;
}

# Writes guessed rows until a time. Half of them are of the hot tenant, once there is one.
my ($hot_from, $is_decided);
sub write_until
{
	my ($end) = @_;
	while (time < $end)
	{
		guess($hot_from && $number % 2 ? $hot : 1 + int(1000**rand()));
		Time::HiRes::sleep(0.005);
		next if !$hot_from || $is_decided || $number % 20;
		$is_decided = time if sql($tokyo, "select count(*) from braid.balancer_decisions where tenant = '$hot'") ne '0';
	}
	return;
}

# The load. The first rows wait until the group has closed times.
my $began = time;
guess($_) for 1 .. 50;
start_clients('zipf', 110, 50, 'random_zipfian(1, 1000, 1.1)');
write_until($began + 10);
my %waits = map { $_->name => sql($_, 'select waits from braid.routing_activity') } @all;
write_until($began + 40);
is(sql($tokyo, "select count(*) from braid.routing_rules where '$hot' = any (tenants)"), '0', 'no rule for the tenant that is to be hot');
$hot_from = time;
start_clients('hot', 70, 40, $hot);
write_until($began + 105);
for my $name (sort keys %bench)
{
	my $bench = $bench{$name};
	my $is_well = $bench->{run}->finish;
	my ($done) = ${ $bench->{out} } =~ /number of transactions actually processed: (\d+)/;
	ok($is_well && $done && ${ $bench->{out} } =~ /number of failed transactions: 0 /, "no client of $name met an error: " . ($done // 0) . ' transactions') or diag(${ $bench->{err} });
}
is(join('; ', @errors), '', "the guessing client met none: $number rows");
cmp_ok($followed, '>', 10, 'and has followed hints');
is(sql($_, 'select waits from braid.routing_activity'), $waits{ $_->name }, $_->name . ': no row has waited') for @all;

# What the balancer has done.
is(sql($_, "select mode || ' ' || basis || ' ' || spread_before from braid.balancer_decisions where tenant = '$hot' order by decided_at limit 1"), 'on writes 1', $_->name . ': the balancer has decided') for @all;
my ($spread, $counts_after) = split /\|/, sql($tokyo, "select spread, extract(epoch from counts_after) from braid.routing_rules where '$hot' = any (tenants) order by counts_after limit 1");
cmp_ok($spread, '>', 1, "the tenant is spread over $spread shards");
cmp_ok($counts_after - $hot_from, '<', 20, sprintf('its rule counts after %.1f s', $counts_after - $hot_from));

# Times of statements, from before the hot tenant and from then on: the longest, and that of 99 of
# 100. pgbench's include the time that its schedule was late by, which is no wait of a statement.
my @times = (@guessed);
for my $file (glob "$scratch/*")
{
	next if $file !~ /\.\d+(?:\.\d+)?$/;
	push @times, map { my @field = split / /; [ $field[4] + $field[5] / 1e6 - $field[2] / 1e6, ($field[2] - $field[6]) / 1e6 ] } split /\n/, slurp_file($file);
}
sub shown { my @sorted = sort { $a <=> $b } @_; return ($sorted[-1], $sorted[ @sorted * 0.99 ], scalar @sorted); }
my ($longest_before, $usual_before, $count_before) = shown(map { $_->[1] } grep { $_->[0] > $began + 10 && $_->[0] < $hot_from } @times);
my ($longest, $usual, $count) = shown(map { $_->[1] } grep { $_->[0] >= $hot_from } @times);
note(sprintf('before: %d transactions, 99 %% within %.1f ms, longest %.0f ms; from the hot tenant on: %d, %.1f ms, %.0f ms',
		$count_before, $usual_before * 1000, $longest_before * 1000, $count, $usual * 1000, $longest * 1000));
cmp_ok($longest, '<', 2 * $longest_before + 0.5, 'no client waited longer than usual');

# Copies are equal, and no row that was accepted is lost.
have_all(@all) for 1 .. 2;
my %member;
push @{ $member{ $set_of{ $_->name } } }, $_ for @all;
same_tables($_, 'orders') for values %member;
my (%row, %writer);
for my $set (sort keys %member)
{
	for (split /\n/, sql($member{$set}[0], 'select order_id, tenant_id, writer, n, extract(epoch from created_at) from orders'))
	{
		my ($id, $tenant, $writer, $n, $created) = split /\|/;
		push @{ $row{$id} }, { set => $set, tenant => $tenant, created => $created };
		$writer{$writer}{$n}++;
	}
}
my @all_rows = map { @$_ } values %row;
is(scalar(grep { @$_ != 1 } values %row), 0, 'each row is on one set: ' . keys %row);
for my $name (sort keys %writer)
{
	my $rows = $writer{$name};
	my $last = $name eq 'guess' ? $number : max(keys %$rows);
	is(join(' ', grep { ($rows->{$_} // 0) != 1 } 1 .. $last), '', "all rows of $name: $last");
}
is(scalar(keys %writer), 17, 'all clients have written');

# Rows of before the rule have not moved; later ones are on both sets.
my @old = grep { $_->{tenant} == $hot && $_->{created} <= $counts_after } @all_rows;
my @new = grep { $_->{tenant} == $hot && $_->{created} > $counts_after } @all_rows;
my %on;
$on{ $_->{set} }++ for @old;
is(scalar(keys %on), 1, 'older rows of the hot tenant are on one set: ' . @old);
my $share = (grep { $_->{set} eq '1' } @new) / (@new || 1);
cmp_ok(abs($share - 0.5), '<', 0.1, sprintf('%.0f %% of %d newer ones are on the first set', 100 * $share, scalar @new));

# The nodes of route_query have all rows of each tenant, whichever node of a set is asked.
my %count;
$count{ $_->{tenant} }{ $_->{set} }++ for @all_rows;
for my $node (@all)
{
	my $name = $node->name;
	my %asked;
	push @{ $asked{ (split /\|/)[0] } }, (split /\|/)[1]
	  for split /\n/, sql($node, 'select tenant, q.node_set from unnest(array[' . join(',', sort keys %count) . "]::text[]) tenant cross join lateral braid.route_query('orders', tenant) q");
	my @missed = grep { my $tenant = $_; my %is = map { $_ => 1 } @{ $asked{$tenant} // [] }; grep { !$is{$_} } keys %{ $count{$tenant} } } keys %count;
	is(join(' ', @missed), '', "$name asks the nodes of all rows: " . keys(%count) . ' tenants');
	cmp_ok(scalar(grep { @$_ == 1 } values %asked), '>', keys(%count) / 2, "$name asks one set for most tenants");
}
my %of_tenant = map { my $tenant = $_; $tenant => sum(values %{ $count{$tenant} }) } keys %count;
for my $node (@all)
{
	my $name = $node->name;
	my %umbrella = map { split /\|/ } split /\n/, sql($node, 'select tenant_id, count(*) from everywhere.orders group by 1');
	is_deeply(\%umbrella, \%of_tenant, "$name finds all rows through the umbrella");
	is(sql($node, "select count(*), count(distinct order_id) from everywhere.orders where tenant_id = $_"), "$of_tenant{$_}|$of_tenant{$_}", "$name finds those of tenant $_") for $hot, 1;
}

done_testing;
