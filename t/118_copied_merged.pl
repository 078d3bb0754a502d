# A copied row that was merged keeps its merge marker. The writer of its version has not seen the
# other half. So that writer's next change, or one from before the copy, is given to the function,
# and does not replace the row. The node that has copied the row ends as the others do.

use strict;
use warnings;

use Braid;
use Mesh;
use Test::More;

# A set of letters, each of which stays.
my $schema = q[
	create table label (id int primary key, tags text not null);
	create function merge_label(local label, remote label, before label, info braid.conflict) returns label language sql stable as $$
		select row((local).id, (select string_agg(distinct tag, '' order by tag)
			from pg_catalog.regexp_split_to_table((local).tags || (remote).tags, '') tag))::public.label
	$$;
	select braid.set_conflict_resolution('label', kind, 'function', 'merge_label') from unnest('{insert_exists,update_origin_differs}'::text[]) kind;
];
my ($tokyo, $paris) = map { new_node($_) } qw(tokyo paris);
on_all($schema, $tokyo, $paris);
my ($paris_from_tokyo) = mesh($tokyo, $paris);
sql($tokyo, q[insert into label select i, 'a' from generate_series(1, 5) i]);
converged($tokyo, $paris);

sub add
{
	my ($node, $tag, @ids) = @_;
	sql($node, sprintf q[update label set tags = tags || '%s' where id in (%s)], $tag, join ', ', @ids);
	return;
}
sub tags { my ($node, $where) = @_; return sql($node, q[select string_agg(id || tags, ' ' order by id) from label where ] . ($where // 'true')); }
sub marked { my ($node) = @_; return sql($node, q[select string_agg(id::text, ' ' order by id) from label l, braid.row_version(l.tableoid, l.ctid) v where v.merged]); }

# Paris has not seen what tokyo writes, and has the newer version.
cut($paris_from_tokyo);
add($tokyo, 't', 1, 2, 4);
add($paris, 'p', 1, 3, 4);
caught_up($tokyo, $paris);
# Merged by a transaction that is older than anything that can still come.
sql($tokyo, q[select braid.ingest(jsonb_build_object('operation', 'update',
	'transaction', '{"lsn": "0/10", "commit_time": "2024-02-29T00:00:00Z"}'::jsonb, 'after', '{"id": 3, "tags": "s"}'::jsonb,
	'schema', '{"namespace": "public", "table": "label", "columns": [{"name": "id", "type": "int4", "identity": true}, {"name": "tags", "type": "text"}]}'::jsonb), 'shop')]);
is(tags($tokyo), '1apt 2at 3aps 4apt 5a', 'rows are merged');

my $oslo = new_node('oslo');
sql($oslo, $schema);
my $oslo_from_paris = subscribe($oslo, $paris, copy_data => 'false');
cut([ $oslo, $oslo_from_paris, $paris ]);
# This comes to oslo after the copy, which has it: its version is the merged row's.
add($paris, 'p', 2);
caught_up($tokyo, $paris);
is(tags($tokyo, 'id = 2'), '2apt', 'one more');
subscribe($oslo, $tokyo);
is(tags($oslo), '1apt 2apt 3aps 4apt 5a', 'the copy');
add($paris, 'q', 1, 2, 3);
heal([ $oslo, $oslo_from_paris, $paris ]);
caught_up($tokyo, $paris);
is(tags($tokyo), '1apqt 2apqt 3apqs 4apt 5a', 'at tokyo, paris has not taken away what it had not seen');
is(tags($oslo), '1apqt 2apqt 3apqs 4apt 5a', 'nor where the rows were copied');

# A copy of the copy.
my $lima = new_node('lima');
sql($lima, $schema);
subscribe($lima, $paris, copy_data => 'false');
subscribe($lima, $oslo);
add($paris, 'q', 4);
caught_up($_, $paris) for $tokyo, $oslo, $lima;
is(tags($lima, 'id = 4'), '4apqt', 'nor where they were copied once more');

# Paris gets the rest at last.
heal($paris_from_tokyo);
converged($tokyo, $paris);
is(tags($_, 'id <> 3'), '1apqt 2apqt 4apqt 5a', $_->name . ' has all of it') for $tokyo, $paris, $oslo, $lima;

# The marks.
my $again = new_node('porto');
sql($again, $schema);
sql($tokyo, q[insert into label values (6, 'a')]);
converged($tokyo, $paris);
cut($paris_from_tokyo);
add($tokyo, 't', 6);
add($paris, 'p', 6);
caught_up($tokyo, $paris);
my $is_there = q[select braid.has_merged_rows(xmin) from label where id = %s];
is(sql($tokyo, sprintf($is_there, 6)) . sql($tokyo, sprintf($is_there, 5)), 'tf', 'who has merged rows');
subscribe($again, $paris, copy_data => 'false');
subscribe($again, $tokyo);
is(marked($again), marked($tokyo), 'marks are copied');
like(marked($again), qr/\b6\b/, 'of what was merged just now');
is(sql($again, sprintf($is_there, 5)), 't', 'any copied row may have one');

# Merge markers are kept for longer than other versions.
sub age
{
	my ($hours) = @_;
	sql($again, "update braid.copied_version set version_at = version_at - $hours * 3600 * 1000000::bigint");
	sql($again, "update braid.copied_table set newest = newest - $hours * 3600 * 1000000::bigint");
	$again->restart;
	return;
}
my $kept = q[select count(*) filter (where not merged), count(*) filter (where merged) > 0, exists (select from braid.copied_table) from braid.copied_version];
like(sql($again, $kept), qr/^[1-9]\d*\|t\|t$/, 'both kinds are there');
age(3);
ok($again->poll_query_until('postgres', $kept, '0|t|t'), 'those of merged rows stay');
like(marked($again), qr/\b6\b/, 'and count');
age(31 * 24);
ok($again->poll_query_until('postgres', $kept, '0|f|f'), 'for 30 days');

done_testing();
