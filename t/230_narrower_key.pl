# A subscriber finds rows by a key with only some columns of the provider's replica identity: the
# provider's key got another column, or each local partition has a key of its own. Rows are the same
# in every apply mode, without a conflict. Two rows of the provider that are one row here are a
# conflict, and neither is lost silently. If both nodes write, a warning names the keys, once.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '');
sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }

# Columns in another order, and an index over more than one of them.
on_all(q[
	create table grown (c text, b int, n int, a int primary key, doc text);
	create table triple (x numeric, y text, z int, n int, doc text);
	alter table grown alter doc set storage external;
	alter table triple alter doc set storage external;
], $tokyo, $paris);
sql($tokyo, 'alter table triple add primary key (z, x, y)');
sql($paris, 'create unique index on triple (y, z)');
# By leaves, and from an ordinary table.
my $parts = q[
	create table NAME (id int not null, at date not null, n int, doc text) partition by range (at);
	create table NAME_1 partition of NAME for values from (minvalue) to ('2020-01-01');
	create table NAME_2 partition of NAME for values from ('2020-01-01') to (maxvalue);
	alter table NAME_1 alter doc set storage external;
	alter table NAME_2 alter doc set storage external;
];
sub parts { my ($name, $more) = @_; return ($parts . $more) =~ s/NAME/$name/gr; }
my $of_leaves = 'alter table NAME_1 add primary key (id); alter table NAME_2 add primary key (id);';
sql($tokyo, parts('leaves', 'alter table NAME add primary key (id, at)'));
sql($paris, parts($_, $of_leaves)) for qw(leaves flat);
sql($tokyo, q[
	create table flat (id int, at date, n int, doc text, primary key (at, id));
	alter table flat alter doc set storage external;
]);

my $large = q[(select string_agg(md5((i * j)::text), '') from generate_series(1, 150) j)];
my %columns = (
	grown => qq[(a, b, c, n, doc) select i, i % 3, 'c', 0, $large],
	triple => qq[(x, y, z, n, doc) select i / 10.0, 'y' || i, i % 3, 0, $large],
	map { $_ => qq[select i, date '2019-12-01' + i % 60, 0, $large] } qw(leaves flat),
);
my @tables = sort keys %columns;
sql($tokyo, "insert into $_ $columns{$_} from generate_series(1, 20) i") for @tables;
my $name = subscribe($paris, $tokyo, apply_mode => q('serial'));
same_tables([ $tokyo, $paris ], @tables);

# The key grows while changes stream.
sql($tokyo, q[
	update grown set n = 1 where a = 1;
	alter table grown drop constraint grown_pkey, add primary key (b, a);
	update grown set n = 2 where a = 2;
]);
caught_up($paris, $tokyo);
streams($paris, $name, 'the subscription goes on after the key has changed');
same_tables([ $tokyo, $paris ], 'grown');

# Each column of each table; new rows begin at a number. Statements in braces are one transaction.
sub changes
{
	my ($from) = @_;
	my $rows = sprintf 'generate_series(%d, %d) i', $from, $from + 39;
	my $insert = join '', map { "insert into $_ $columns{$_} from $rows;\n" } @tables;
	return qq[
		$insert
		update grown set n = n + 1;
		update grown set c = 'changed' where a % 2 = 0;
		update grown set b = b + 10 where a % 3 = 0;
		update grown set a = a + 100000 where a = $from + 5;
		update grown set (a, b, n) = (a + 200000, b + 1, 7) where a = $from + 6;
		update grown set doc = reverse(doc) where a % 5 = 0;
		delete from grown where a = $from + 7;
		{ delete from grown where a = $from + 8; insert into grown (a, b, c) values ($from + 8, 77, 'again'); update grown set b = 78 where a = $from + 8; }
		{ update grown set b = b + 100 where a = $from + 9; update grown set b = b - 100, n = 5 where a = $from + 9; }
		update triple set n = n + 1;
		update triple set x = x + 0.00 where n % 2 = 0;
		update triple set x = -x where n % 5 = 0;
		update triple set z = z + 10, y = y || '!' where n % 3 = 0;
		update triple set doc = 'short' where z % 5 = 0;
		delete from triple where y like 'y' || $from + 7 || '%';
	] . join '', map { qq[
		update $_ set n = n + 1;
		update $_ set at = at + 1 where id % 2 = 0;
		update $_ set at = at + 60 where id = $from + 5;
		update $_ set id = id + 100000 where id = $from + 6;
		update $_ set doc = null where id % 7 = 0;
		delete from $_ where id = $from + 7;
	] } qw(leaves flat);
}
sub one_by_one { return $_[0] =~ s/\{/begin;/gr =~ s/\}/commit;/gr; }
sub as_one { return 'begin;' . $_[0] =~ s/[{}]//gr . 'commit'; }

# Transactions in a row about one row here, whose hashes at the provider have nothing in common.
my $one_row = q[
	do $$
	begin
		for i in 1 .. 25 loop
			update grown set b = b + 1 where a = 1; commit;
			delete from grown where a = 2; commit;
			insert into grown (a, b, n, doc) values (2, i, i, repeat('x', 3000)); commit;
			update grown set b = -i, n = i where a = 2; commit;
			update triple set x = i where y like 'y1%' and abs(z) % 10 = 1; commit;
			update flat set at = at + 1 where id = 1; commit;
		end loop;
	end $$;
];
my $from = 100;
for my $mode (qw(serial parallel batch aggregate))
{
	alter_running($paris, $name, "apply_mode => '$mode', consolidate => " . ($mode eq 'batch' ? 'true' : 'false')) unless $mode eq 'serial';
	sql($tokyo, one_by_one(changes($from)));
	sql($tokyo, $one_row);
	sql($tokyo, as_one(changes($from + 50)));
	caught_up($paris, $tokyo);
	note($mode);
	same_tables([ $tokyo, $paris ], @tables);
	$from += 100;
}
my $conflicts = 'select count(*) from braid.conflict_history';
is(sql($paris, $conflicts), '0', 'none of this is a conflict')
  or diag(sql($paris, 'select relation, kind, winner, reason, key, count(*) from braid.conflict_history group by 1, 2, 3, 4, 5 limit 20'));

# Two rows there, one here. The newer one takes the place of the older one, which the history has.
sql($tokyo, q[insert into grown (a, b, c) values (-1, 1, 'one')]);
sql($tokyo, q[insert into grown (a, b, c) values (-1, 2, 'two')]);
caught_up($paris, $tokyo);
is(sql($paris, 'select a, b, c from grown where a = -1'), '-1|2|two', 'of two rows under one key the newer one stays');
is(sql($paris, q[select kind, winner, local_row->>'b', remote_row->>'b', constraint_name from braid.conflict_history]),
	'insert_exists|remote|1|2|grown_pkey', 'the history has both');
sql($tokyo, q[delete from grown where (a, b) = (-1, 1)]);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'grown');
is(sql($paris, $conflicts . q[ where kind = 'delete_missing']), '1', 'a delete of the row that has left does not take the other one');

# An update of the one that has left. It is newer than its leaving, as this node has seen to that by
# then.
sql($tokyo, q[insert into grown (a, b, c) values (-2, 1, 'one'); insert into grown (a, b, c) values (-2, 2, 'two')]);
caught_up($paris, $tokyo);
sql($tokyo, q[update grown set c = 'newest' where (a, b) = (-2, 1)]);
caught_up($paris, $tokyo);
is(sql($paris, 'select a, b, c from grown where a = -2'), '-2|1|newest', 'an update makes it the newest row, and it comes back');
is(sql($paris, q[select count(*) from braid.conflict_history where kind = 'insert_exists' and local_row->>'a' = '-2']), '2', 'the history has what it takes the place of');
sql($tokyo, q[delete from grown where a = -2]);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'grown');

# Or the subscription stops.
sql($paris, q[select braid.set_conflict_resolution('grown', 'insert_exists', 'error')]);
sql($tokyo, q[insert into grown (a, b, c) values (-3, 1, 'one'); insert into grown (a, b, c) values (-3, 2, 'two')]);
becomes($paris, "select state from braid.subscription_status where name = '$name'", 'error', 'with the resolution "error" the subscription stops');
sql($paris, q[select braid.set_conflict_resolution('grown', 'insert_exists', null)]);
sql($paris, "select braid.enable_subscription('$name')");
sql($tokyo, q[delete from grown where (a, b) = (-3, 1)]);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], @tables);

# Only one node writes until here.
my $warning = qr/WARNING:  rows of table "public\.(\w+)" are found by index "(\w+)", which has only some columns of the provider's replica identity/;
is(() = slurp_file($paris->logfile) =~ /$warning/g, 0, 'where one node writes there is no warning');
sql($paris, "create publication braid for table grown, flat with (publish = 'insert', publish_via_partition_root)");
subscribe($tokyo, $paris, copy_data => 'false');
becomes($paris, 'select remembered from braid.deletion_activity()', 't', 'both nodes write');
sql($tokyo, 'update grown set n = n + 1; update flat set n = n + 1; update triple set n = n + 1') for 1 .. 5;
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], @tables);
my @named = slurp_file($paris->logfile) =~ /$warning/g;
is("@{[ sort @named ]}", "@{[ sort qw(flat flat_1_pkey grown grown_pkey triple triple_y_z_idx) ]}", 'where both write there is one for each table')
  or diag("@named");

# A deletion of this node is known, whose row has no other column than the index's; what is older
# than it does not bring the row back.
disable($paris, $name);
sql($tokyo, 'update grown set n = 99 where a = 3');
sql($paris, 'delete from grown where a = 3');
sql($paris, "select braid.enable_subscription('$name')");
caught_up($paris, $tokyo);
is(sql($paris, 'select count(*) from grown where a = 3'), '0', 'a row that a session has deleted stays away');
is(sql($paris, q[select kind, winner from braid.conflict_history order by conflict_id desc limit 1]), 'update_deleted|local', 'from an update that is older');

done_testing();
