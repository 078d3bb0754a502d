# Versioned transactions on two nodes: each sees all writes before its own, at whichever node they
# were made. A node that is away is waited for, and named; the one that gives versions may be
# killed.

use strict;
use warnings;

use Braid;
use Group;
use PostgreSQL::Test::Utils;
use Session;
use Test::More;

my ($tokyo, $paris) = group([qw(tokyo paris)], q[
	create table stock (id int primary key, amount int not null);
	create table accounts (id int primary key, amount int not null);
	create table plain (id int primary key, amount int not null);
	insert into stock values (1, 100), (2, 100);
	insert into accounts values (1, 10);
	insert into plain values (1, 1)], conf => 'braid.version_timeout = 60s');
my @both = ($tokyo, $paris);

sub begins { my ($versions) = @_; return "begin isolation level repeatable read; set local braid.versions = '$versions'; "; }
sub versioned { my ($node, $versions, $sql) = @_; return sql($node, begins($versions) . "$sql; commit"); }

# All that was written before is on both when the tables begin to count, also what is just being
# written.
sql($paris, 'update stock set amount = 101 where id = 1');
my $open = Session::connect_to($paris, 'postgres');
Session::query($open, 'begin', 1);
Session::query($open, 'update stock set amount = 102 where id = 1', 1);
my $asking = Session::connect_to($tokyo, 'postgres');
Session::ask($asking, q[select braid.version_table('stock')]);
ok($paris->poll_query_until('postgres', q[select phase = 0 from braid.versioned_table]), 'a table begins to be versioned') or diag(sql($paris, 'table braid.versioned_table'));
like(refusal($paris, 'update stock set amount = 0 where id = 2'), qr/table stock is about to be versioned/, 'nobody writes it meanwhile');
like(refusal($tokyo, begins('write stock')), qr/table stock is about to be versioned/, 'not in a versioned transaction either');
# Tokyo can't apply what paris has written, as long as somebody has the row locked there. So the
# table does not count yet.
my $locking = Session::connect_to($tokyo, 'postgres');
Session::query($locking, 'begin', 1);
Session::query($locking, 'select from stock where id = 1 for update', 1);
Session::query($open, 'commit', 1);
ok($paris->poll_query_until('postgres', q[select string_agg(subject, ', ') from braid.group_logged where kind = 'drain table'], 'versioned table 1: first writes, at paris'), 'paris has what was written to the table')
  or diag(sql($paris, 'select * from braid.group_logged'));
is(sql($paris, 'select phase from braid.versioned_table'), '0', 'the table does not count before tokyo has it, too');
Session::query($locking, 'rollback', 1);
my ($failed, $out, $err) = Session::answer($asking, '', 1);
is($err, '', 'it counts once all have what was written');
is(sql($_, 'select amount from stock where id = 1'), '102', $_->name . ' has it') for $tokyo;
sql($paris, q[select braid.version_table('accounts')]);
ok($_->poll_query_until('postgres', q[select count(*) = 2 from braid.versioned_table where phase = 1]), $_->name . ' knows both') for @both;

like(refusal($_, 'update stock set amount = 0'), qr/can only be written in a versioned transaction/, $_->name . ' refuses an undeclared write') for @both;
like(refusal($_, begins('read stock') . 'select amount from accounts'), qr/versioned table accounts was not declared/, $_->name . ' refuses an undeclared read') for @both;

# One after the other, each at another node: each sees the one before.
is(versioned($tokyo, 'write stock', 'update stock set amount = 1 where id = 1'), '', 'tokyo writes');
is(versioned($paris, 'read stock', 'select amount from stock where id = 1'), '1', 'paris reads it');
for my $round (1 .. 10)
{
	versioned($_, 'write stock', 'update stock set amount = amount + 1 where id = 1') for @both;
}
is(versioned($_, 'read stock', 'select amount from stock where id = 1'), '21', $_->name . ' has all of twenty') for @both;
is(sql($_, 'select count(*) > 0 from braid.table_versions where reached > 0'), 't', $_->name . ' shows how far it is') for @both;

# Write skew: either order is right, both from before is not.
sub session { my ($node) = @_; my $session = Session::connect_to($node, 'postgres'); die 'no connection' if !$session; return $session; }
sub shown { my ($failed, $out, $err) = @_; chomp $out; return $failed ? $err : $out; }
sub run { my ($session, $sql) = @_; return shown(Session::query($session, $sql, 1)); }
my ($one, $two) = map { session($_) } @both;
versioned($tokyo, 'write stock, write accounts', 'update stock set amount = 100 where id = 1; update accounts set amount = 10 where id = 1');
run($one, 'begin isolation level repeatable read');
is(run($one, q[set local braid.versions = 'read accounts, write stock']), '', 'tokyo begins');
run($two, 'begin isolation level repeatable read');
Session::ask($two, q[set local braid.versions = 'read stock, write accounts']);
ok($paris->poll_query_until('postgres', 'select count(*) = 1 from braid.table_versions where waits_for is not null'), 'paris waits') or diag(sql($paris, 'table braid.table_versions'));
is(sql($paris, q[select string_agg(distinct waits_for_node || ', ' || coalesce(waits_for_pid::text, 'no process here'), '; ') from braid.table_versions where waits_for is not null]),
	'tokyo, no process here', 'paris says for which node');
is(sql($_, q[select count(distinct sequencer), min(sequencer) in ('tokyo', 'paris') from braid.table_versions]), '1|t', $_->name . ' names who gives numbers') for @both;
is(run($one, 'update stock set amount = amount - (select amount from accounts where id = 1) where id = 1'), '', 'tokyo writes');
is(run($one, 'commit'), '', 'and commits');
is(shown(Session::answer($two, '', 1)), '', 'paris goes on');
run($two, 'update accounts set amount = amount - (select amount from stock where id = 1) where id = 1');
is(run($two, 'commit'), '', 'and commits');
is(versioned($_, 'read stock, read accounts', 'select s.amount, a.amount from stock s, accounts a where s.id = 1'), '90|-80', $_->name . ' has one after the other') for @both;

# Rolled back at one node: the other goes on.
run($one, 'begin isolation level repeatable read');
run($one, q[set local braid.versions = 'write stock']);
run($one, 'update stock set amount = 0');
run($two, 'begin isolation level repeatable read');
Session::ask($two, q[set local braid.versions = 'write stock']);
ok($paris->poll_query_until('postgres', 'select count(*) = 1 from braid.table_versions where waits_for is not null'), 'paris waits');
run($one, 'rollback');
is(shown(Session::answer($two, '', 1)), '', 'paris goes on past a void number');
run($two, 'rollback');

# A transaction that writes none of what it has declared, and one that releases it early.
versioned($tokyo, 'write stock, write accounts', 'update accounts set amount = 7');
is(versioned($paris, 'write stock', 'select amount from stock where id = 1'), '90', 'one that has written nothing of a table does not hold it up');
versioned($tokyo, 'write stock, write accounts', q[update accounts set amount = 8; set local braid.release = 'stock']);
is(versioned($paris, 'read stock, read accounts', 'select s.amount, a.amount from stock s, accounts a where s.id = 1'), '90|8', 'nor does one that releases it');

# Both at once, many times: nothing is lost.
my $script = PostgreSQL::Test::Utils::tempdir() . '/add.sql';
append_to_file($script, begins('write stock') . "\nupdate stock set amount = amount + 1 where id = 2;\ncommit;\n");
my $before = versioned($tokyo, 'read stock', 'select amount from stock where id = 2');
my @running = map {
	my $command = [ 'pgbench', '-n', '-c', 3, '-t', 20, '-f', $script, '-h', $_->host, '-p', $_->port, 'postgres' ];
	my ($in, $out, $err) = ('', '', '');
	{ run => IPC::Run::start($command, '<', \$in, '>', \$out, '2>', \$err), err => \$err }
} @both;
for (@running) { ok($_->{run}->finish, 'pgbench runs') or diag(${ $_->{err} }); }
is(versioned($_, 'read stock', 'select amount from stock where id = 2'), $before + 120, $_->name . ' has all of 120') for @both;

# The node that gives versions is away: the other one waits, and says for whom.
sql($_, q[alter system set braid.version_timeout = '9s']) for @both;
sql($_, 'select pg_reload_conf()') for @both;
my $gives = sql($tokyo, 'select holder_id = (select member_id from braid.group_self) from braid.version_cut order by term desc limit 1') eq 't' ? $tokyo : $paris;
my ($other) = grep { $_ != $gives } @both;
$gives->stop('immediate');
my $late = refusal($other, begins('write stock') . 'update stock set amount = amount + 1 where id = 2; commit');
like($late, qr/55P03|timeout expired while waiting for versions/, 'the other node waits');
my $name = $gives->name;
like($late, qr/DETAIL:  Versions wait for these nodes: "$name"\./, 'and says for whom');
is(sql($other, 'select amount from stock where id = 2'), $before + 120, 'reading outside is as ever');
$gives->start;
my $select = begins('read stock') . 'select true; commit';
ok($_->poll_query_until('postgres', $select, 't'), $_->name . ' goes on once it is back') for @both;

# The one that gives versions is killed.
my $amount = versioned($tokyo, 'read stock', 'select amount from stock where id = 2');
for my $round (1 .. 3)
{
	for my $node (@both)
	{
		my $pid = sql($node, q[select pid from pg_stat_activity where backend_type = 'braid versions']);
		kill 'TERM', $pid if $pid;
		my $done = 0;
		for my $try (1 .. 30)
		{
			my ($status) = $node->psql('postgres', begins('write stock') . 'update stock set amount = amount + 1 where id = 2; commit', on_error_stop => 1);
			if ($status == 0) { $done = 1; last }
		}
		ok($done, $node->name . ' goes on after its versions process was ended');
		$amount++;
	}
}
is(versioned($_, 'read stock', 'select amount from stock where id = 2'), $amount, $_->name . ' has each once') for @both;

# Back to an ordinary table.
sql($tokyo, q[select braid.unversion_table('stock')]);
ok($_->poll_query_until('postgres', q[select count(*) = 1 from braid.versioned_table]), $_->name . ' has one versioned table left') for @both;
sql($paris, 'update stock set amount = 5 where id = 1');
have_all(@both);
is(sql($tokyo, 'select amount from stock where id = 1'), '5', 'an ordinary table is written as ever');

$_->stop for @both;
done_testing();
