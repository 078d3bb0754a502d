-- A server that restricts output plugins must list ours: reported when a node is created on it, and
-- when it is subscribed to. The test ends here for minor releases without the setting:
-- output_plugin_1.out.
\a
\t
select count(*) = 0 as unrestricted from pg_settings where name = 'output_plugin_libraries' \gset
\if :unrestricted
\quit
\endif
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/two_nodes.sql'
\set ECHO none
\i :prelude
\set ECHO all
set output_plugin_libraries = pgoutput, test_decoding;
select braid.create_node('here', :'here');
\echo :SQLSTATE
set output_plugin_libraries = '';
select braid.create_node('here', :'here');
\echo :SQLSTATE
set output_plugin_libraries = braided, unbraid;
select braid.create_node('here', :'here');
\echo :SQLSTATE
set output_plugin_libraries = '/somewhere/braid';
select braid.create_node('here', :'here');
\echo :SQLSTATE
-- a list in single quotes is one name
set output_plugin_libraries = 'pgoutput, test_decoding, braid';
select braid.create_node('here', :'here');
\echo :SQLSTATE
set output_plugin_libraries = test_decoding, braid;
select braid.create_node('here', :'here');
reset output_plugin_libraries;
alter database braid_there set output_plugin_libraries = pgoutput, braided;
select braid.create_subscription('s', :'there');
\echo :SQLSTATE
alter database braid_there set output_plugin_libraries = 'pgoutput, braid';
select braid.create_subscription('s', :'there');
\echo :SQLSTATE
alter database braid_there set output_plugin_libraries = pgoutput, "braid";
begin;
select braid.create_subscription('s', :'there', enabled => false) is not null;
rollback;

\set postlude :abs_srcdir '/sql/include/drop_two_nodes.sql'
\set ECHO none
\i :postlude
