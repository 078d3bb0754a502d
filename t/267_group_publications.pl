# A joining node gets the group's publications as they are at the member that it is copied from:
# tables, schemas, columns, row filters and options. So its own changes reach the others by the same
# rules. A publication that differs is refused.

use strict;
use warnings;

use Braid;
use Group;
use Test::More;

my $setup = q[
	create schema shelf; create schema "Odd.schema";
	create table item (id int primary key, v text, secret text);
	create table stock (id int, n int, primary key (id, n));
	create table shelf.place (id int primary key);
	create table "Odd.schema"."a, b" (id int primary key, "C ""d""" text, e text);
	create table outside (id int primary key);
	create publication braid for table item (id, v), stock where (n > 0 and n <> 13), "Odd.schema"."a, b" ("C ""d""", id)
		with (publish = 'insert, update, delete', publish_via_partition_root = true);
	create publication other for table outside with (publish = 'insert');
	create publication shelves for tables in schema shelf with (publish = 'insert, truncate')];
my ($tokyo, $paris) = map { new_server($_, init => ['--data-checksums']) } qw(tokyo paris);
sql($_, 'create extension braid') for $tokyo, $paris;
sql($tokyo, $setup);
my ($there, $here) = map { $_->connstr('postgres') } $tokyo, $paris;
sql($tokyo, "select braid.create_group('shop', node_name => 'tokyo', dsn => \$d\$$there\$d\$, publications => '{braid,other,shelves}')");
sql($tokyo, q[insert into item values (1, 'one', 'tokyo')]);

# Existing publications must be the same.
sql($paris, 'create publication other for all tables');
like(refusal($paris, "select braid.join_group(\$d\$$there\$d\$, node_name => 'paris', dsn => \$d\$$here\$d\$)"),
	qr/ERROR:  publication "other" differs from that of node "tokyo"\n.*DETAIL:  Here: create publication other for all tables .*There: create publication other for table only public\.outside .*\n.*HINT:  Drop it here/s,
	'another publication of the name is refused');
sql($paris, 'drop publication other');
join_group($paris, $tokyo);
joined($tokyo, $paris);

my $published = q[
	select string_agg(concat_ws('|', p.pubname, p.pubinsert, p.pubupdate, p.pubdelete, p.pubtruncate, p.pubviaroot, t.schemaname, t.tablename, t.attnames, t.rowfilter), chr(10)
			order by p.pubname, t.schemaname, t.tablename)
	  from pg_publication p join pg_publication_tables t using (pubname)];
my $expected = sql($tokyo, $published);
like($expected, qr/braid\|t\|t\|t\|f\|t\|Odd\.schema\|a, b\|.*n > 0.*other\|t\|f\|f\|f\|f\|public\|outside.*shelves\|t\|f\|f\|t\|f\|shelf\|place/s, 'what tokyo publishes');
is(sql($paris, $published), $expected, 'paris publishes the same');
is(sql($paris, 'select string_agg(nspname, $$,$$) from pg_publication_namespace m join pg_namespace n on n.oid = m.pnnspid'), 'shelf', 'a schema as such');

# The rules hold from each to the other.
sql($paris, q[insert into item values (2, 'two', 'paris'); insert into stock values (1, 1), (2, 0), (3, 13); insert into shelf.place values (1); insert into outside values (1)]);
sql($tokyo, q[insert into stock values (4, 4), (5, 0); insert into outside values (2)]);
have_all($tokyo, $paris);
is(sql($tokyo, q[select string_agg(concat_ws(' ', id, v, secret), ', ' order by id) from item]), '1 one tokyo, 2 two', 'columns that are not published stay');
is(sql($paris, q[select string_agg(concat_ws(' ', id, v, secret), ', ' order by id) from item]), '1 one, 2 two paris', 'on both sides');
is(sql($tokyo, q[select string_agg(id::text, ',' order by id) from stock]), '1,4,5', 'so do rows that the filter leaves out');
is(sql($paris, q[select string_agg(id::text, ',' order by id) from stock]), '1,2,3,4', 'on both sides');
is(sql($_, 'select (select count(*) from shelf.place), (select count(*) from outside)'), '1|2', 'all that is published came: ' . $_->name) for $tokyo, $paris;

done_testing();
