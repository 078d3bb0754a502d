# The collector of deletions finds a row that can't be read, of a table without a key whose file is
# damaged. It logs that once and goes on, because all other deletions and dead rows wait for it.

use strict;
use warnings;

use Braid;
use Mesh;
use Test::More;

my ($tokyo, $paris) = my @nodes = map { new_node($_, conf => "max_prepared_transactions = 2\nautovacuum = off\n") } qw(tokyo paris);
on_all(q[
	create table bag (v text, big text);
	alter table bag alter column big set storage external;
	alter table bag replica identity full;
	create table item (id int primary key, v text);
	insert into item values (1, 'one');
], $tokyo);
on_all(q[create table bag (v text, big text); alter table bag replica identity full; create table item (id int primary key, v text)], $paris);
subscribe($paris, $tokyo);
subscribe($tokyo, $paris, copy_data => 'false');
ok(wait_until(sub { scalar worker_pids($tokyo, 'braid collector') }, 20), 'tokyo collects deletions');

sql($tokyo, q[insert into bag values ('small', 'x'), ('large', repeat(md5('large'), 1000)), ('small', 'y')]);
converged(@nodes);
# The removal is collected when it commits; until then the rest of the row is lost.
sql($tokyo, q[begin; delete from bag; prepare transaction 'removal']);
my $file = $tokyo->data_dir . '/' . sql($tokyo, q[select pg_relation_filepath(reltoastrelid) from pg_class where relname = 'bag']);
$tokyo->stop('fast');
truncate($file, 0) or die "$file: $!";
$tokyo->start;
sql($tokyo, q[commit prepared 'removal'; delete from item]);
ok($tokyo->poll_query_until('postgres', q[select count(*) = 1 from braid.tombstone where relation = 'item'::regclass and origin_id = 0]), 'deletions are collected beside it');
is(sql($tokyo, 'select count(*) from braid.taken_row'), 2, 'and what can be read of what was taken out');
ok($tokyo->log_contains(qr/WARNING:.*could not read a deleted row of a table without a key: .*missing chunk|WARNING:.*could not read a deleted row of a table without a key: could not read block/), 'the log says what can not');
ok($tokyo->poll_query_until('postgres', q[select coalesce(collected_lsn >= pg_current_wal_flush_lsn(), false) from braid.deletion_activity()]), 'it goes on');
converged(@nodes);
is(sql($paris, 'select count(*) from bag'), 0, 'paris has all of it');

done_testing();
