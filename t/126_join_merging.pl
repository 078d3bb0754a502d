# A node joins others that merge concurrent writes: columns that add up, columns that are registers
# of their own, rows that a function makes of two. All write while it is copied, and each change
# counts once on each node. The same holds when a node copies a table again.

use strict;
use warnings;

use Braid;
use Mesh;
use PostgreSQL::Test::Utils;
use Test::More;

my $schema = q[
	create table stock (id int primary key, n int not null default 0, by_tokyo text, by_paris text);
	alter table stock replica identity full;
	create table label (id int primary key, tags text[] not null);
	create function merge_label(local label, remote label, before label, info braid.conflict) returns label language sql stable as $$
		select row(coalesce((local).id, (remote).id), array(select distinct t from unnest((local).tags || (remote).tags) t order by t))::public.label
	$$;
];
my $rules = q[
	select braid.set_column_rule('stock', 'n', 'delta');
	select braid.set_column_rule('stock', c, 'last_update_wins') from unnest('{by_tokyo,by_paris}'::name[]) c;
	select braid.set_conflict_resolution('label', kind, 'function', 'merge_label') from unnest('{insert_exists,update_origin_differs}'::text[]) kind;
];
my ($tokyo, $paris) = map { new_node($_) } qw(tokyo paris);
on_all($schema, $tokyo, $paris);
mesh($tokyo, $paris);
on_all($rules, $tokyo, $paris);
sql($tokyo, q[insert into stock select i from generate_series(1, 20) i; insert into label select i, '{}' from generate_series(1, 20) i]);
converged($tokyo, $paris);

# Each session counts its own additions; a tag is added once.
sub writes
{
	my ($node, $seconds) = @_;
	my $name = $node->name;
	my $script = "$PostgreSQL::Test::Utils::tmp_check/$name.sql";
	unless (-e $script)
	{
		sql($node, 'create sequence if not exists added');
		my $column = $name eq 'paris' ? 'by_paris' : 'by_tokyo';
		append_to_file($script, <<"SQL");
\\set id random(1, 20)
update stock set n = n + 1, $column = nextval('added') where id = :id;
update label set tags = array(select distinct t from unnest(tags || '$name'::text || ('$name' || :id % 3)) t order by t) where id = 21 - :id;
SQL
	}
	return start_pgbench($node, '-c', '2', '-T', $seconds, '-R', '80', '-f', $script);
}
my $added = 0;
my $sums = q[select sum(n) from stock];
my $state = q[select md5(string_agg(s::text, ' ' order by id)) || md5((select string_agg(l::text, ' ' order by id) from label l)) from stock s];

# Oslo joins. The stream of paris runs as soon as the copy of tokyo has begun.
my @writers = map { writes($_, 8) } $tokyo, $paris;
my $oslo = new_node('oslo');
on_all($schema . 'create sequence added start 1000000', $oslo);
on_all($rules, $oslo);
sql($paris, q[select pg_create_logical_replication_slot('oslo_from_paris', 'braid')]);
my $oslo_from_paris = subscribe($oslo, $paris, slot_name => q['oslo_from_paris'], create_slot => 'false', copy_data => 'false', enabled => 'false', wait => 0);
my $position = sql($paris, 'select braid.sync_event()');
sql($tokyo, "select braid.wait_for_event('paris', '$position')");
my $oslo_from_tokyo = subscribe($oslo, $tokyo, wait => 0);
ok(wait_until(sub { sql($oslo, q[select count(*) from braid.subscription_tables where subscription = 'oslo_from_tokyo' and state <> 'waiting']) == 2 }, 30), 'the copy begins');
sql($oslo, "select braid.enable_subscription('$oslo_from_paris')");
sql($oslo, "select braid.wait_for_subscription('$oslo_from_tokyo')");
cmp_ok(sql($oslo, $sums), '>', 0, 'the copy has some of the additions');
is(sql($oslo, q[select count(*) from braid.subscription_tables where subscription = 'oslo_from_tokyo' and state = 'ready']), 2, 'both tables are copied');
subscribe($_, $oslo, copy_data => 'false') for $tokyo, $paris;
$added += finish_pgbench($_) for @writers;
converged($tokyo, $paris, $oslo);
is(sql($_, $sums), $added, $_->name . ' has all additions, each once') for $tokyo, $paris, $oslo;
is(sql($_, $state), sql($tokyo, $state), $_->name . ' has the same rows') for $paris, $oslo;
cmp_ok(sql($oslo, q[select count(*) from label where tags @> '{tokyo,paris}']), '>', 10, 'rows were merged');

# Oslo copies the tables again, while all three write.
@writers = map { writes($_, 8) } $tokyo, $paris, $oslo;
for my $table (qw(stock label stock))
{
	sql($oslo, "select braid.resync_table('$oslo_from_tokyo', '$table')");
	sql($oslo, "select braid.wait_for_subscription('$oslo_from_tokyo')");
}
$added += finish_pgbench($_) for @writers;
converged($tokyo, $paris, $oslo);
is(sql($_, $sums), $added, $_->name . ' has all additions, each once, after a table was copied anew') for $tokyo, $paris, $oslo;
is(sql($_, $state), sql($tokyo, $state), $_->name . ' has the same rows') for $paris, $oslo;

done_testing();
