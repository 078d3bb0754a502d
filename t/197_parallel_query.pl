# A parallel query may call functions of Braid, which read what is committed at that time.

use strict;
use warnings;

use Braid;
use Test::More;

my $tokyo = new_node('tokyo');
$tokyo->safe_psql('postgres', q[create table item (id int primary key, v text); insert into item select i, 'v' from generate_series(1, 1000) i; analyze item]);
my $parallel = 'set parallel_setup_cost = 0; set parallel_tuple_cost = 0; set min_parallel_table_scan_size = 0; set enable_indexscan = off; set enable_bitmapscan = off';
my $query = q[select node, count(*) from (select id, ctid from item where v = 'v' and id % 2 = 0) i, braid.row_version('item'::regclass, i.ctid) group by node];
like($tokyo->safe_psql('postgres', "$parallel; explain $query"), qr/Gather/, 'the query is run in parallel');
is($tokyo->safe_psql('postgres', "$parallel; $query"), 'tokyo|500', 'and asks for the versions of its rows');
is($tokyo->safe_psql('postgres', "$parallel; begin isolation level repeatable read; $query; commit"), 'tokyo|500', 'also under one snapshot');

done_testing();
