# Versioned transactions on three nodes at once: a bank whose sum is the same in every versioned
# read, and counters that every reader sees in one order (no long fork). Then processes are killed
# meanwhile: the one that leads the group, appliers, those that give versions.

use strict;
use warnings;

use Braid;
use Group;
use PostgreSQL::Test::Utils;
use Session;
use Test::More;

my @all = group([qw(tokyo paris oslo)], q[
	create table checking (id int primary key, amount int not null);
	create table savings (id int primary key, amount int not null);
	create table x (n int not null primary key);
	create table y (n int not null primary key);
	create table seen (node text not null, x int not null, y int not null, id bigserial, primary key (node, id));
	insert into checking select i, 100 from generate_series(1, 10) i;
	insert into savings select i, 100 from generate_series(1, 10) i;
	insert into x values (0);
	insert into y values (0)], conf => "braid.version_timeout = 60s");
my ($tokyo, $paris, $oslo) = @all;

sub begins { my ($versions) = @_; return "begin isolation level repeatable read; set local braid.versions = '$versions'; "; }
sub versioned { my ($node, $versions, $sql) = @_; return sql($node, begins($versions) . "$sql; commit"); }

sql($tokyo, "select braid.version_table('$_')") for qw(checking savings x y);
for my $node (@all) { ok($node->poll_query_until('postgres', q[select count(*) = 4 from braid.versioned_table where phase = 1]), $node->name . ' knows four versioned tables'); }

my $dir = PostgreSQL::Test::Utils::tempdir();
sub script
{
	my ($name, @lines) = @_;
	append_to_file("$dir/$name.sql", join("\n", @lines) . "\n");
	return "$dir/$name.sql";
}
sub begun { my ($versions) = @_; return ('begin isolation level repeatable read;', "set local braid.versions = '$versions';"); }
my $sum = q[select sum(amount) from (select amount from checking union all select amount from savings) a];
my $transfer = script('transfer', '\set a random(1, 10)', '\set b random(1, 10)', '\set v random(1, 50)', begun('write checking, write savings'),
	'update checking set amount = amount - :v where id = :a;', 'update savings set amount = amount + :v where id = :b;', 'commit;');
my $audit = script('audit', begun('read checking, read savings'),
	"do \$\$ begin if ($sum) <> 2000 then raise 'the sum is %', ($sum); end if; end \$\$;", 'commit;');
my $count_x = script('count_x', begun('write x'), 'update x set n = n + 1;', 'commit;');
my $count_y = script('count_y', begun('write y'), 'update y set n = n + 1;', 'commit;');
my %look = map { my $name = $_->name; ($name => script("look_$name", begun('read x, read y'), "insert into seen (node, x, y) select '$name', x.n, y.n from x, y;", 'commit;')) } @all;

sub pgbench
{
	my ($node, $transactions, @scripts) = @_;
	my ($in, $out, $err) = ('', '', '');
	my @command = ('pgbench', '-n', '-c', 1, '-t', $transactions, (map { ('-f', $_) } @scripts), '-h', $node->host, '-p', $node->port, 'postgres');
	# Clients that wait for ever fail, rather than the whole test by its time.
	my $limit = IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default);
	return { run => IPC::Run::start(\@command, '<', \$in, '>', \$out, '2>', \$err, $limit), err => \$err, name => $node->name };
}
# Whether all have succeeded. Ends those that have not ended in time.
sub all_run
{
	my ($what, @running) = @_;
	my $all = 1;
	for (@running)
	{
		my $done = eval { $_->{run}->finish };
		my $why = $@;
		$_->{run}->kill_kill if !defined $done;
		ok($done, "$what at $_->{name}") or diag("${ $_->{err} }$why");
		$all &&= $done;
	}
	return $all;
}
# Without a check that has failed already, all after it only waits.
sub give_up
{
	diag(look($_, 'table braid.table_versions') // $_->name . ' does not answer') for @all;
	$_->stop('immediate') for @all;
	done_testing();
	exit 1;
}

all_run('transfers and audits', (map { pgbench($_, 40, $transfer, $audit) } @all), (map { pgbench($_, 40, $audit) } @all)) or give_up();
is(versioned($_, 'read checking, read savings', $sum), '2000', $_->name . ' has the sum') for @all;
my $digest = q[select md5(string_agg(t, ',' order by t)) from (select 'c' || c::text from checking c union all select 's' || s::text from savings s) a (t)];
my $first = versioned($tokyo, 'read checking, read savings', $digest);
is(versioned($_, 'read checking, read savings', $digest), $first, $_->name . ' has the same rows') for $paris, $oslo;

all_run('counters', pgbench($tokyo, 60, $count_x), pgbench($paris, 60, $count_y), map { pgbench($_, 60, $look{ $_->name }) } @all) or give_up();
have_all(@all);
is(versioned($_, 'read x, read y', 'select x.n, y.n from x, y'), '60|60', $_->name . ' has counted') for @all;
is(sql($oslo, 'select count(*) from seen'), '180', 'all have looked');
is(sql($oslo, 'select count(*) from seen a join seen b on a.x < b.x and a.y > b.y'), '0', 'all have seen the counters in one order')
  or diag(sql($oslo, 'select distinct a.node, a.x, a.y, b.node, b.x, b.y from seen a join seen b on a.x < b.x and a.y > b.y limit 10'));
is(sql($_, q[select count(*) from braid.conflict_history where relation::text in ('checking', 'savings', 'x', 'y')]), '0', $_->name . ' had no conflicts') for @all;

# Processes are killed, each at a node in turn. A crash of an applier is one of its server.
my %wanted = (x => 60, y => 60);
my @kinds = (q[backend_type = 'braid versions'], q[backend_type = 'braid applier' order by random()], q[backend_type = 'braid group']);
for my $round (0 .. 5)
{
	my $victim = $all[ $round % 3 ];
	my $kind = $kinds[ $round % @kinds ];
	my $signal = $kind =~ /applier/ ? 'KILL' : 'TERM';
	my $pid = look($victim, "select pid from pg_stat_activity where $kind limit 1");
	kill $signal, $pid if $pid;
	for my $node (@all)
	{
		for my $table (qw(x y))
		{
			my $done = 0;
			for my $try (1 .. 60)
			{
				my $want = $wanted{$table} + 1;
				# A commit may have come through although its answer is lost.
				my ($status) = attempt($node, q[set braid.version_timeout = '5s'; ] . begins("write $table") . "update $table set n = $want where n = $want - 1; commit");
				if ($status == 0) { $done = 1; last }
				select undef, undef, undef, 0.1;
			}
			ok($done, $node->name . " counts $table after a kill of: $kind") or give_up();
			$wanted{$table}++;
		}
	}
}
for my $node (@all)
{
	my $so = begins('read x, read y') . "select x.n = $wanted{x} and y.n = $wanted{y} from x, y; commit";
	ok($node->poll_query_until('postgres', $so), $node->name . ' has each once') or diag(look($node, 'select x.n, y.n from x, y') // '', " wanted $wanted{x}, $wanted{y}");
}

# A node is gone for good, in the middle of a write: it is removed, and the others go on.
my $open = Session::connect_to($oslo, 'postgres');
Session::query($open, 'begin isolation level repeatable read', 1);
Session::query($open, q[set local braid.versions = 'write x, write y'], 1);
Session::query($open, 'update x set n = 0', 1);
$oslo->stop('immediate');
sql($tokyo, q[select braid.remove_node('oslo')]);
for my $node ($tokyo, $paris)
{
	for my $table (qw(x y))
	{
		ok($node->poll_query_until('postgres', begins("write $table") . "update $table set n = n + 1; select true; commit"), $node->name . " goes on with $table without oslo")
		  or diag(look($node, 'table braid.table_versions'));
		$wanted{$table}++;
	}
}
is(versioned($_, 'read x, read y', 'select x.n, y.n from x, y'), "$wanted{x}|$wanted{y}", $_->name . ' has each once') for $tokyo, $paris;

$_->stop for $tokyo, $paris;
done_testing();
