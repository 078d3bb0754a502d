# Rows are frozen, and PostgreSQL forgets the commit timestamps of their writers, while another
# node's older changes of the same rows are still to come. These lose all the same: nodes agree.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my @both = my ($tokyo, $paris) = map { new_node($_, conf => "autovacuum = off\nbraid.keep_commits_older_than = 0\n") } qw(tokyo paris);
sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
# Of rows from before there was anybody else, whatever comes is newer.
sub frozen { return sql($tokyo, 'select count(*) from item where pg_xact_commit_timestamp(xmin) is null') }
sub looked { return "select max(first_xid) from braid.kept_commit where commits is null" }

on_all('create table item (id int primary key, v text, u int unique); create table plain (v text); alter table plain replica identity full', @both);
my $from_paris = subscribe($tokyo, $paris, copy_data => 'false');
my $from_tokyo = subscribe($paris, $tokyo, copy_data => 'false');
sql($tokyo, q[insert into item select i, 'old', i from generate_series(1, 60) i; insert into plain values ('old')]);
sql($paris, q[insert into item select i, 'old', i from generate_series(61, 70) i]);
converged(@both);

# Tokyo gets no changes of paris any more; paris gets those of tokyo.
sql($tokyo, "select braid.disable_subscription('$from_paris')");
wait_until(sub { worker_pids($tokyo, 'braid leader') == 0 }, 20);
sql($paris, "update item set v = 'paris' where id <= 10");
sql($paris, 'delete from item where id between 11 and 20');
sql($paris, "update item set v = 'paris' where id = $_") for 21 .. 30;
sql($paris, q[insert into item values (101, 'paris', 101); update item set u = 102 where id = 31; update item set v = 'paris' where id between 61 and 65]);
sql($tokyo, q[select pg_sleep(0.1); update item set v = 'tokyo' where id <= 5 or id between 11 and 15 or id between 21 and 25]);
sql($tokyo, q[insert into item values (101, 'tokyo', 1010), (103, 'tokyo', 102)]);
sql($tokyo, q[update item set v = 'tokyo' where id between 61 and 63]);
caught_up($paris, $tokyo);
# And what paris has written after that.
sql($paris, q[select pg_sleep(0.1); update item set v = 'paris again' where id in (1, 11)]);
my $at = sql($tokyo, 'select string_agg(v.committed_at::text, chr(10) order by i.id) from item i, braid.row_version(i.tableoid, i.ctid) v');

# Long after that: so many transactions as make two blocks.
sql($tokyo, 'set synchronous_commit = off; do $$ begin for i in 1..40000 loop perform pg_current_xact_id(); commit; end loop; end $$');
my $next = sql($tokyo, 'select pg_snapshot_xmax(pg_current_snapshot())');
caught_up($paris, $tokyo);
$tokyo->restart;
ok($tokyo->poll_query_until('postgres', "select coalesce((@{[ looked() ]}), 0) > $next - 16385"), 'commit timestamps are kept') or diag(sql($tokyo, looked()));
cmp_ok(sql($tokyo, 'select coalesce(sum(length(commits)), 0) from braid.kept_commit'), '<', 6 * 60000, 'in a few bytes each');

# All that is frozen. Only template0 has kept PostgreSQL from forgetting that; autovacuum comes
# there, too, after two hundred million transactions.
sql($tokyo, "update pg_database set datallowconn = true where datname = 'template0'");
my $forgotten = wait_until(
	sub {
		# A checkpoint tells the readers of slots which transactions run, so that these hold back no
		# older ones.
		sql($tokyo, 'checkpoint');
		$tokyo->safe_psql($_, 'vacuum (freeze)') for qw(template0 template1 postgres);
		frozen() == sql($tokyo, 'select count(*) from item');
	},
	60);
ok($forgotten, 'PostgreSQL has forgotten the commit timestamps') or diag(frozen());
is(sql($tokyo, 'select string_agg(v.committed_at::text, chr(10) order by i.id) from item i, braid.row_version(i.tableoid, i.ctid) v'), $at, 'Braid has not');
is(sql($tokyo, q[select string_agg(distinct v.node, ' ' order by v.node) from item i, braid.row_version(i.tableoid, i.ctid) v]), 'paris tokyo', 'whose they are');

# The changes of paris arrive now.
sql($tokyo, "select braid.enable_subscription('$from_paris')");
converged(@both);
same_tables(\@both, qw(item plain));
is(sql($tokyo, q[select string_agg(id || ' ' || v, ', ' order by id) from item where id in (1, 2, 6, 11, 12, 16, 21, 26, 61, 64, 101, 103)]),
	'1 paris again, 2 tokyo, 6 paris, 11 paris again, 12 tokyo, 21 tokyo, 26 paris, 61 tokyo, 64 paris, 101 tokyo, 103 tokyo', 'in each row the newest');

# The record is removed when nothing older can arrive any more, and not copied if nothing is to
# arrive.
sql($tokyo, 'update braid.kept_commit set newest = extract(epoch from now() - interval \'3 h\') * 1000000 where commits is not null');
$tokyo->restart;
ok($tokyo->poll_query_until('postgres', 'select count(*) = 0 from braid.kept_commit where commits is not null'), 'what is needed no longer is removed');
sql($tokyo, "select braid.drop_subscription('$from_paris')");
sql($tokyo, 'set synchronous_commit = off; do $$ begin for i in 1..20000 loop perform pg_current_xact_id(); commit; end loop; end $$');
my $seen = sql($tokyo, looked());
$tokyo->restart;
ok($tokyo->poll_query_until('postgres', "select (@{[ looked() ]}) > $seen"), 'transactions are looked at');
is(sql($tokyo, 'select count(*) from braid.kept_commit where commits is not null'), '0', 'and none kept where nobody sends anything');

done_testing();
