# Column lists of publications: tables of which nothing is sent, and tables with different lists in
# two publications.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo', publication => '');
my $paris = new_node('paris', publication => '');

# Tables without columns, or none that is sent.
$tokyo->safe_psql('postgres', q[
	create table bare ();
	create table bare_more ();
	create table computed (a int generated always as (1) stored);
	create table computed_here (a int);
	create table dropped (a int);
	alter table dropped drop column a;
	create table empty ();
	create publication bare for table bare, bare_more, computed, computed_here, dropped, empty;
	insert into bare select from generate_series(1, 3);
	insert into bare_more select from generate_series(1, 4);
	insert into computed select from generate_series(1, 5);
	insert into computed_here values (1), (2);
	insert into dropped select from generate_series(1, 6);
]);
$paris->safe_psql('postgres', q[
	create table bare ();
	create table bare_more (id int generated always as identity, note text not null default 'here');
	create table computed (a int generated always as (1) stored);
	create table computed_here (a int);
	create table dropped ();
	create table empty ();
]);
subscribe($paris, $tokyo, name => 'bare', publications => "'{bare}'");
is($paris->safe_psql('postgres', 'select (select count(*) from bare), (select count(*) from bare_more), (select count(*) from computed), (select count(*) from computed_here), (select count(*) from dropped), (select count(*) from empty)'),
	'3|4|5|2|6|0', 'rows without columns are copied');
is($paris->safe_psql('postgres', q[select string_agg(id || note, ' ' order by id) from bare_more]), '1here 2here 3here 4here', 'with the defaults of this node');
is($paris->safe_psql('postgres', q[select string_agg(relation::text || ' ' || rows_copied, ', ' order by relation::text) from braid.subscription_tables where subscription = 'bare']),
	'bare 3, bare_more 4, computed 5, computed_here 2, dropped 6, empty 0', 'and counted');
$tokyo->safe_psql('postgres', 'insert into bare default values; insert into bare_more default values; insert into computed default values; insert into dropped default values; insert into empty default values');
$tokyo->wait_for_catchup('bare');
is($paris->safe_psql('postgres', 'select (select count(*) from bare), (select count(*) from bare_more), (select count(*) from computed), (select count(*) from dropped), (select count(*) from empty)'),
	'4|5|6|7|1', 'and stream');
$paris->safe_psql('postgres', q[select braid.resync_table('bare', 'bare'); select braid.resync_table('bare', 'bare_more'); select braid.wait_for_subscription('bare')]);
ok($paris->poll_query_until('postgres', q[select bool_and(state = 'ready') from braid.subscription_tables where subscription = 'bare']), 'copied anew');
is($paris->safe_psql('postgres', 'select (select count(*) from bare), (select count(*) from bare_more)'), '4|5', 'and as often as there');

# Different column lists.
$tokyo->safe_psql('postgres', q[
	create table t (a int primary key, b int, c int);
	create table u (a int primary key, b int);
	create publication whole for table t;
	create publication part for table t (a, b);
	create publication same for table t (a, b);
	create publication every for table t (a, b, c);
	create publication rows for table t (a, b) where (a > 0);
	create publication other for table u (a);
]);
$paris->safe_psql('postgres', 'create table t (a int primary key, b int, c int); create table u (a int primary key, b int)');
my $dsn = $tokyo->connstr('postgres') =~ s/'/''/gr;
sub refused
{
	my ($sql, $what) = @_;
	my (undef, undef, $error) = $paris->psql('postgres', "\\set VERBOSITY verbose\n$sql");
	like($error, qr/ERROR:  0A000: cannot use different column lists for table "public.t" in different publications\n.*HINT:  Give the table the same column list/s, $what);
	return;
}
refused("select braid.create_subscription('lists', '$dsn', publications => '{whole,part}')", 'refused at creation');
refused("select braid.create_subscription('lists', '$dsn', publications => '{part,whole}', copy_data => false)", 'and without a copy');
refused("select braid.create_subscription('lists', '$dsn', publications => '{other,every,rows}')", 'of three');
is($tokyo->safe_psql('postgres', q[select count(*) from pg_replication_slots where slot_name like '%lists%']), '0', 'nothing is left of it');
subscribe($paris, $tokyo, name => 'lists', publications => "'{part,same,rows,other}'");
refused("select braid.alter_subscription('lists', publications => '{part,whole}')", 'refused by alter_subscription');
is($paris->safe_psql('postgres', q[select publications from braid.subscription where subscription_name = 'lists']), '{part,same,rows,other}', 'which has changed nothing');
ok(alter_running($paris, 'lists', q[publications => '{whole,every}']), 'it goes on with others');
$tokyo->safe_psql('postgres', 'insert into t values (1, 1, 1)');
$tokyo->wait_for_catchup('lists');
is($paris->safe_psql('postgres', 'select * from t'), '1|1|1', 'all columns are the same list as none');
$tokyo->safe_psql('postgres', 'alter publication every set table t (a, b); insert into t values (2, 2, 2)');
ok(wait_until(sub { (status($paris, 'lists')->{last_error} // '') =~ /different column lists for table "public.t"/ }, 30), 'a publication that changes later stops it');
like(status($paris, 'lists')->{error_hint} // '', qr/^Give the table the same column list in all publications/, 'and the view says what to do');
refused(q[select * from braid.refresh_subscription('lists')], 'so does refresh_subscription');
like(status($paris, 'lists')->{error_hint} // '', qr/braid.alter_subscription/, 'and how what was written meanwhile is passed');
$tokyo->safe_psql('postgres', 'alter publication every set table t');
$paris->safe_psql('postgres', q[select braid.alter_subscription('lists', publications => '{whole}'); select braid.enable_subscription('lists')]);
$tokyo->wait_for_catchup('lists');
is($paris->safe_psql('postgres', 'select * from t order by a'), "1|1|1\n2|2|2", 'which it is');
$paris->safe_psql('postgres', q[select braid.alter_subscription('lists', publications => '{whole,every,other}')]);
$tokyo->wait_for_catchup('lists');

# The leader that the change of publications has started counts below.
streams($paris, 'lists', 'it goes on with more publications');
# The catalog changes while a leader starts: it has read the tables, and waits for something else.
my $blocker = $paris->background_psql('postgres', on_error_stop => 1);
$blocker->query_safe('begin; lock table braid.split_progress in access exclusive mode');
my @before = worker_pids($paris, 'braid leader');
$paris->safe_psql('postgres', q[select braid.disable_subscription('lists')]);
ok(wait_until(sub { worker_pids($paris, 'braid leader') < @before }, 20), 'the leader ends');
$tokyo->safe_psql('postgres', 'create table late (k int primary key); alter publication other add table late; insert into late values (1)');
$paris->safe_psql('postgres', 'create table late (k int primary key)');
$paris->safe_psql('postgres', q[select braid.enable_subscription('lists')]);
ok($paris->poll_query_until('postgres', q[select count(*) > 0 from pg_stat_activity where backend_type = 'braid leader' and wait_event_type = 'Lock']), 'another one starts');
$tokyo->safe_psql('postgres', 'alter publication whole add table late');
is($paris->safe_psql('postgres', q[select relation::regclass, action from braid.refresh_subscription('lists')]), 'late|added', 'a table comes meanwhile');
# The manager's own refresh every ten seconds must not help.
my ($manager) = worker_pids($paris, 'braid manager');
sleep 2;
kill 'STOP', $manager;
$blocker->query_safe('commit');
$blocker->quit;
my $noticed = wait_until(sub { $paris->safe_psql('postgres', q[select state from braid.subscription_tables where subscription = 'lists' and relation = 'late'::regclass]) eq 'ready' }, 30);
kill 'CONT', $manager;
ok($noticed, 'and is noticed');

# A partition by itself in one publication, its root in another one: each row comes once, as the
# root's.
my $twice = 'create table root (k int, v int) partition by list (k); create table leaf partition of root for values in (1) partition by list (v);
	create table leaf_1 partition of leaf for values in (1); create table leaf_2 partition of root for values in (2);';
$tokyo->safe_psql('postgres', "$twice insert into root values (1, 1), (2, 2); create publication roots for table root with (publish_via_partition_root = true);
	create publication leaves for table leaf_1, leaf_2 (k) with (publish_via_partition_root = true); create publication leaf for table leaf_1");
$paris->safe_psql('postgres', "$twice");
subscribe($paris, $tokyo, name => 'twice', publications => "'{leaves,roots,leaf}'");
$tokyo->safe_psql('postgres', 'insert into root values (1, 1), (2, 3)');
$tokyo->wait_for_catchup('twice');
is($paris->safe_psql('postgres', q[select string_agg(relation::text, ' ') from braid.subscription_tables where subscription = 'twice']), 'root', 'the root alone is a table of it');
is($paris->safe_psql('postgres', 'select string_agg(k || $$.$$ || v, $$ $$ order by k, v) from root'), '1.1 1.1 2.2 2.3', 'each row comes once');
$tokyo->safe_psql('postgres', 'alter publication roots drop table root');
$paris->safe_psql('postgres', q[select braid.refresh_subscription('twice', copy_data => false); select braid.wait_for_subscription('twice')]);
is($paris->safe_psql('postgres', q[select string_agg(relation::text || ' ' || state, ', ' order by relation::text) from braid.subscription_tables where subscription = 'twice']),
	'leaf_1 ready, leaf_2 ready, root left out', 'without the root they stand for themselves');

# A new leader adds a table that another process is about to add.
on_all('create table joint (k int primary key)', $tokyo, $paris);
$tokyo->safe_psql('postgres', 'alter publication leaves add table joint');
my $leader = $paris->background_psql('postgres');
$leader->query_safe(q[begin; insert into braid.subscription_table (subscription_id, relation, schema_name, table_name, state)
	select subscription_id, 'joint'::regclass, 'public', 'joint', 'ready' from braid.subscription where subscription_name = 'twice']);
my $asker = $paris->background_psql('postgres', on_error_stop => 0);
$asker->query_until(qr/asked/, "\\echo asked\nselect count(*) from braid.refresh_subscription('twice', copy_data => false) where action = 'added';\n");
ok($paris->poll_query_until('postgres', q[select count(*) = 1 from pg_stat_activity where wait_event_type = 'Lock' and query like '%where action%' and pid <> pg_backend_pid()]), 'the one waits for the other');
$leader->query_safe('commit');
$leader->quit;
like($asker->query(q[select 'then']), qr/^0\nthen$/, 'and finds it there');
is($asker->{stderr}, '', 'without an error');
$asker->quit;

done_testing();
