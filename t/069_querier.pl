# An update does not carry large columns that it left unchanged. If another node than the update's
# wrote the local row last, the values are fetched from the node that has them. Otherwise no node is
# asked.

use strict;
use warnings;

use Braid;
use Proxy;
use Test::More;

my @names = qw(tokyo paris quito);
my %node = map { $_ => new_node($_, conf => "wal_receiver_timeout = 3s\nbraid.querier_timeout = 2s\nlogical_decoding_work_mem = 64kB\n") } @names;
my ($tokyo, $paris, $quito) = @node{@names};
on_all(q[
	create table doc (id int primary key, n int, v text, big text);
	alter table doc alter column big set storage external;
	create table kind (a int, b text, n int, raw bytea, j jsonb, list numeric[], gone int, primary key (b, a));
	alter table kind alter column raw set storage external, alter column list set storage external;
	alter table kind drop column gone;
	create table whole (id int primary key, n int, big text);
	alter table whole alter column big set storage external, replica identity full;
	create table two (id int primary key, n int, one text, other text);
	alter table two alter column one set storage external, alter column other set storage external;
	create table part (id int primary key, n int, big text) partition by range (id);
	create table part_low partition of part for values from (0) to (1000);
	create table part_high partition of part for values from (1000) to (10000);
	alter table part_low alter column big set storage external;
	alter table part_high alter column big set storage external;
], values %node);
# $link{subscriber}{provider}: the link of the subscription, which also carries the questions.
my %link;
for my $to (@names)
{
	for my $from (grep { $_ ne $to } @names)
	{
		$link{$to}{$from} = Proxy->new($node{$from});
		subscribe($node{$to}, $node{$from}, copy_data => 'false', dsn => $link{$to}{$from}->connstr('postgres'));
	}
}

sub run { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
sub links { my ($state, @which) = @_; $_->link($state) for @which ? @which : map { values %$_ } values %link; return; }
sub questions { my ($node) = @_; return run($node, 'select sum(questions) from braid.subscription_detail'); }
sub big { my ($seed) = @_; return "repeat(md5('$seed'), 100)"; }

# Apart: what is done by each node while nothing gets through; then all is delivered, and the nodes
# are equal.
sub apart
{
	my ($what, $table, @done) = @_;
	links('down');
	while (my ($node, $sql) = splice @done, 0, 2) { run($node, $sql); }
	links('up');
	converged(values %node) for 1 .. 2;
	same_tables([values %node], $table);
	return;
}

run($tokyo, 'insert into doc select i, 0, $$start$$, ' . big('start') . ' from generate_series(1, 300) i');
converged(values %node);
my %asked = map { $_ => questions($node{$_}) } @names;
is("@asked{@names}", '0 0 0', 'nobody is asked about inserts');

# Rows that the writer wrote itself are complete.
run($tokyo, q[update doc set n = n + 1 where id <= 200]);
run($tokyo, q[begin; update doc set big = repeat('x', 9000), n = n + 1 where id <= 20; update doc set v = 'again' where id <= 20; commit]);
converged(values %node);
same_tables([values %node], 'doc');
is(join(' ', map { questions($_) } @node{@names}), '0 0 0', 'nobody is asked about updates of a row that came from their node');

# The row was changed here: the large column is fetched, once for a row.
apart('older large value', 'doc', $tokyo, 'update doc set big = ' . big('tokyo') . ' where id = 1', $paris, 'update doc set n = 100 where id = 1');
is(run($tokyo, 'select n, v from doc where id = 1'), '100|again', 'the later update has won');
is(run($tokyo, q[select big = repeat('x', 9000) from doc where id = 1]), 't', 'with the large value that its node had');
cmp_ok(questions($tokyo), '>=', 1, 'the node that had another one has asked');
is(questions($paris), 0, 'the winner has not');
apart('newer large value', 'doc', $paris, 'update doc set n = 200 where id = 2', $tokyo, 'update doc set big = ' . big('tokyo') . ' where id = 2');
is(run($paris, q[select n, big = ] . big('tokyo') . q[ from doc where id = 2]), '2|t', 'a newer large value brings its own row');
apart('both ways at once', 'doc', $paris, 'update doc set n = 300 where id between 30 and 40', $tokyo, 'update doc set big = ' . big('tokyo') . ' where id between 30 and 35',
	$quito, q[update doc set v = 'quito' where id between 33 and 40]);

# A value that was written at a third node arrives later than the update of a node that had it
# already.
links('down', $link{paris}{quito});
run($quito, 'update doc set big = ' . big('quito') . ' where id = 50; insert into doc values (1000, 0, $$new$$, ' . big('new') . ')');
caught_up($tokyo, $quito);
run($tokyo, q[update doc set n = 50 where id in (50, 1000)]);
caught_up($paris, $tokyo);
is(run($paris, 'select n, big = ' . big('new') . ' from doc where id = 1000'), '50|t', 'an update of a row that is not here yet is completed');
links('up', $link{paris}{quito});
converged(values %node);
same_tables([values %node], 'doc');
is(run($paris, 'select big = ' . big('quito') . ' from doc where id = 50'), 't', 'a large value that comes late is taken where the winner had it');
run($tokyo, 'update doc set n = 51 where id = 50');
converged(values %node);
same_tables([values %node], 'doc');

# Two of them, one after the other.
run($tokyo, 'insert into two select i, 0, ' . big('one') . ', ' . big('other') . ' from generate_series(1, 3) i');
converged(values %node);
links('down', $link{paris}{quito});
run($quito, "update two set one = repeat('1', 9000) where id < 3; update two set other = repeat('2', 9000) where id > 1");
caught_up($tokyo, $quito);
run($tokyo, 'update two set n = 1');
caught_up($paris, $tokyo);
links('up', $link{paris}{quito});
converged(values %node);
same_tables([values %node], 'two');
is(run($paris, q[select string_agg(left(one, 1) || left(other, 1), ' ' order by id) from two where n = 1 and id = 2]), '12', 'several large values that come late');

# The other way round: the update's node had not seen it.
links('down', $link{paris}{quito}, $link{tokyo}{quito});
run($quito, 'update doc set big = ' . big('unseen') . ' where id = 60');
run($tokyo, 'update doc set n = 60 where id = 60');
links('up', $link{paris}{quito}, $link{tokyo}{quito});
converged(values %node) for 1 .. 2;
same_tables([values %node], 'doc');
is(run($paris, 'select big = ' . big('start') . ' from doc where id = 60'), 't', 'and left where it had not');

# A value that the winner had from a third node, and that its update left unchanged, arrives late;
# with several columns, some are in the update.
links('down', $link{paris}{quito}, $link{tokyo}{paris});
run($quito, 'update doc set big = ' . big('quito') . q[ where id = 62; update two set one = repeat('3', 9000), other = repeat('4', 9000)]);
caught_up($tokyo, $quito);
run($paris, q[update doc set n = 62 where id = 62; update two set n = 2 where id = 1; update two set n = 2, one = repeat('5', 9000) where id = 2; update two set n = 2, other = repeat('6', 9000) where id = 3]);
caught_up($quito, $paris);
run($quito, q[update doc set v = 'third' where id = 62; update two set n = 3]);
caught_up($tokyo, $quito);
is(run($tokyo, 'select n, v, big = ' . big('quito') . ' from doc where id = 62'), '62|third|t', 'what another node has left alone is taken where it had it');
links('up', $link{paris}{quito}, $link{tokyo}{paris});
converged(values %node) for 1 .. 2;
same_tables([values %node], qw(doc two));
is(run($tokyo, 'select n, v, big = ' . big('start') . ' from doc where id = 62'), '62|third|t', 'an update that comes late tells of large values that it has left alone');

# Deleted there meanwhile: the deletion follows in the stream.
apart('deleted', 'doc', $tokyo, 'update doc set big = ' . big('tokyo') . ' where id = 70', $paris, 'update doc set n = 70 where id = 70', $paris, 'delete from doc where id = 70');
is(run($tokyo, 'select count(*) from doc where id = 70'), '0', 'a row that is gone at the winner goes');
apart('moved', 'doc', $tokyo, 'update doc set big = ' . big('tokyo') . ' where id = 80', $paris, 'update doc set id = 2080 where id = 80',
	$paris, 'update doc set id = 3080 where id = 2080', $paris, 'begin; update doc set id = 4080 where id = 3080; update doc set id = 5080 where id = 4080; commit');
is(run($tokyo, 'select big = ' . big('start') . ' from doc where id = 5080'), 't', 'a row that has moved on is completed where it is');
apart('updated and moved', 'doc', $tokyo, 'update doc set big = ' . big('tokyo') . ' where id = 81', $paris, 'update doc set n = 81 where id = 81',
	$paris, 'update doc set id = 2081 where id = 81');
is(run($tokyo, 'select big = ' . big('start') . ' from doc where id = 2081'), 't', 'also one that was changed before it moved');
apart('swapped', 'doc', $tokyo, 'update doc set big = ' . big('tokyo') . ' || id where id in (82, 83)',
	$paris, 'begin; update doc set id = 9000 where id = 82; update doc set id = 82 where id = 83; update doc set id = 83 where id = 9000; commit');
apart('a key that is used again', 'doc', $tokyo, 'update doc set big = ' . big('tokyo') . ' || id where id in (84, 85)', map { ($paris, $_) }
	'update doc set n = 84 where id = 84', 'update doc set id = 9084 where id = 84', 'update doc set id = 84 where id = 85', 'update doc set n = n + 1 where id in (84, 9084)');
is(run($tokyo, 'select string_agg(id::text, $$ $$ order by id) from doc where id in (84, 85, 9084) and big = ' . big('start')), '84 9084', 'each row has its own large value');
apart('deleted here', 'doc', $tokyo, 'delete from doc where id = 90', $paris, 'update doc set n = 90 where id = 90');
is(run($tokyo, 'select n, big = ' . big('start') . ' from doc where id = 90'), '90|t', 'an update brings back a row that was deleted before it, whole');

# All types; a key of two columns.
run($paris, q[insert into kind select i, 'k''\\' || i, 0, decode(repeat(md5('a'), 200), 'hex'), jsonb_build_object('a', repeat(md5('b'), 200), 'ü', 1),
	(select array_agg(x::numeric / 7) from generate_series(1, 500) x) from generate_series(1, 5) i]);
converged(values %node);
apart('types', 'kind', $tokyo, q[update kind set raw = raw || '\x00ff', j = j || '{"tokyo": 1}', list = list || 'NaN'::numeric], $paris, 'update kind set n = n + 1');
is(run($tokyo, q[select count(*) from kind where n = 1 and not j ? 'tokyo' and raw = decode(repeat(md5('a'), 200), 'hex') and not 'NaN' = any (list)]), 5, 'values of all types come as they are');

# With the whole old row in WAL there is nothing to ask.
run($paris, 'insert into whole select i, 0, ' . big('start') . ' from generate_series(1, 3) i');
converged(values %node);
my $before = questions($tokyo);
apart('whole', 'whole', $tokyo, 'update whole set big = ' . big('tokyo'), $paris, 'update whole set n = 1');
is(questions($tokyo), $before, 'nobody is asked with replica identity full');

# From one partition to another.
run($paris, 'insert into part select i, 0, ' . big('start') . ' from generate_series(1, 5) i');
converged(values %node);
apart('partitions', 'part', $tokyo, 'update part set big = ' . big('tokyo'), $paris, 'update part set id = 2000 + id where id <= 3', $paris, 'update part set n = 1 where id = 4');

# A table that is locked exclusively at the provider: the transaction is applied again.
links('down');
run($tokyo, 'update doc set big = ' . big('tokyo') . ' where id = 100');
run($paris, 'update doc set n = 100 where id = 100');
my $locker = $paris->background_psql('postgres');
$locker->query_safe('begin; lock table doc in access exclusive mode');
links('up');
ok($tokyo->poll_query_until('postgres', q[select retries > 0 from braid.subscription_detail where name = 'tokyo_from_paris']), 'an update waits for a table that is locked at the provider');
is(run($tokyo, 'select n from doc where id = 100'), '1', 'and is not completed by something else');
$locker->query_safe('commit');
$locker->quit;
converged(values %node);
same_tables([values %node], 'doc');

# A provider that ends in the middle, and one that does not answer.
links('down');
run($tokyo, 'update doc set big = ' . big('tokyo') . ' where id between 101 and 110');
run($paris, 'update doc set n = 100 where id between 101 and 110');
$locker = $paris->background_psql('postgres');
$locker->query_safe('begin; lock table doc in access exclusive mode');
links('up');
$tokyo->poll_query_until('postgres', q[select count(*) > 0 from braid.apply_workers where wait_event = 'BraidApplierQuerier']);
$paris->stop('immediate');
eval { $locker->quit };
restart_crashed($paris);
converged(values %node);
same_tables([values %node], 'doc');

# While the question is under way, the row that is not here comes and goes by this node's own doing.
links('down');
run($tokyo, 'delete from doc where id = 190');
run($paris, 'update doc set n = 100 where id = 190');
$locker = $paris->background_psql('postgres');
$locker->query_safe('begin; lock table doc in access exclusive mode');
links('up');
$tokyo->poll_query_until('postgres', q[select count(*) > 0 from braid.apply_workers where wait_event = 'BraidApplierQuerier']);
run($tokyo, q[insert into doc values (190, 1, 'new'); delete from doc where id = 190;]);
$locker->query_safe('commit');
$locker->quit;
converged(values %node) for 1 .. 2;
same_tables([values %node], 'doc');
is(run($tokyo, 'select count(*) from doc where id = 190'), '0', 'a deletion that came during a question counts');

# The provider shows a commit to others only when this subscription has confirmed it.
run($tokyo, q[alter system set synchronous_standby_names = 'paris_from_tokyo']);
$tokyo->reload;
links('down');
run($paris, 'update doc set big = ' . big('paris') . ' where id in (180, 181)');
my $waiting = $tokyo->background_psql('postgres');
$waiting->query_until(qr/sent/, "\\echo sent\nbegin; update doc set n = 180 where id = 180; update doc set id = 6181 where id = 181; commit;\n");
$tokyo->poll_query_until('postgres', q[select count(*) > 0 from pg_stat_activity where wait_event = 'SyncRep']);
links('up');
ok($tokyo->poll_query_until('postgres', q[select count(*) = 0 from pg_stat_activity where wait_event = 'SyncRep']), 'a commit that waits for the subscriber does not keep it from knowing');
$waiting->quit;
run($tokyo, q[alter system reset synchronous_standby_names]);
$tokyo->reload;
converged(values %node);
same_tables([values %node], 'doc');
is(run($paris, q[select string_agg(id || ' ' || (big = repeat('x', 9000) or big = ] . big('start') . q[), ',' order by id) from doc where id in (180, 6181)]), '180 true,6181 true', 'what it had before it did');

# A transaction that is sent while it is in progress, and one that is committed in chunks.
for my $split (0, 40)
{
	run($tokyo, "select braid.alter_subscription('tokyo_from_paris', streaming => 'on', split_transactions_above => $split)");
	apart("large, split $split", 'doc', $tokyo, 'update doc set big = ' . big("tokyo $split") . ' where id between 190 and 290',
		$paris, q[update doc set n = n + 1, v = repeat('v', 1500) where id between 190 and 290], $quito, 'update doc set big = ' . big("quito $split") . ' where id between 190 and 240');
}
run($tokyo, q[select braid.alter_subscription('tokyo_from_paris', split_transactions_above => 0)]);

# The node whose row has won is away when a large value comes late. The value waits for that node,
# or until a person disables the subscription.
for my $how ('back', 'disabled')
{
	my $row = $how eq 'back' ? 170 : 171;
	links('down', $link{paris}{quito});
	run($quito, 'update doc set big = ' . big("late $how") . " where id = $row");
	caught_up($tokyo, $quito);
	run($tokyo, "update doc set n = n + 1 where id = $row");
	caught_up($paris, $tokyo);
	links('down', $link{paris}{tokyo});
	my $retries = run($paris, q[select retries from braid.subscription_detail where name = 'paris_from_quito']);
	links('up', $link{paris}{quito});
	ok($paris->poll_query_until('postgres', qq[select retries > $retries from braid.subscription_detail where name = 'paris_from_quito']), "$how: it waits for the node that knows");
	run($quito, 'insert into doc values (' . ($how eq 'back' ? 7000 : 7001) . ')');
	if ($how eq 'back')
	{
		links('up');
		converged(values %node);
		same_tables([values %node], 'doc');
	}
	else
	{
		disable($paris, 'paris_from_tokyo');
		caught_up($paris, $quito);
		is(run($paris, 'select count(*) from doc where id = 7001'), '1', 'what comes after it comes');
		links('up');
		run($paris, q[select braid.enable_subscription('paris_from_tokyo')]);
		run($tokyo, 'update doc set big = ' . big('after') . " where id = $row");
		converged(values %node);
		same_tables([values %node], 'doc');
	}
}

# If the role may not read the table at the asked node, the error says so.
run($paris, 'create role reader login replication; grant braid_monitor to reader; grant usage on schema public to reader');
run($tokyo, "select braid.alter_subscription('tokyo_from_paris', dsn => '" . $link{tokyo}{paris}->connstr('postgres') . " user=reader')");
converged(values %node);
links('down');
run($tokyo, 'update doc set big = ' . big('tokyo') . ' where id = 160');
run($paris, 'update doc set n = 160 where id = 160');
links('up');
ok(wait_until(sub { status($tokyo, 'tokyo_from_paris')->{state} eq 'error' }, 30), 'without the right to read it stops');
like(status($tokyo, 'tokyo_from_paris')->{last_error}, qr/could not ask node "paris" for large values of table "public.doc": permission denied/, 'and says why');
run($paris, 'grant select on doc to reader');
run($tokyo, q[select braid.enable_subscription('tokyo_from_paris')]);
converged(values %node);
same_tables([values %node], 'doc');

# In all ways to apply.
my $id = 110;
for my $how ([ 'batch', 'source' ], [ 'aggregate', 'source' ], [ 'parallel', 'relaxed' ], [ 'serial', 'source' ])
{
	my ($mode, $order) = @$how;
	for my $to (@names)
	{
		run($node{$to}, "select braid.alter_subscription('${to}_from_$_', apply_mode => '$mode', commit_order => '$order')") for grep { $_ ne $to } @names;
	}
	my ($first, $last) = ($id + 1, $id + 10);
	$id = $last;
	apart("$mode $order", 'doc', $tokyo, 'update doc set big = ' . big($mode) . " where id between $first and $last",
		$paris, join('; ', map { "update doc set n = n + 1 where id = $_" } ($first .. $last) x 2),
		$quito, "update doc set v = 'quito' where id between $first + 5 and $last", $tokyo, "update doc set n = 0 where id between $first + 3 and $first + 6");
}

done_testing();
