-- A server that restricts output plugins must list ours: said when a node is created there, and when it is subscribed to.
-- Minor releases without the setting end here: that is output_plugin_1.out.
\a
\t
select count(*) = 0 as unrestricted from pg_settings where name = 'output_plugin_libraries' \gset
\if :unrestricted
\quit
\endif
set client_min_messages = warning;
create database braid_here;
create database braid_there;
\set server 'host=' :HOST ' port=' :PORT ' user=' :USER ' connect_timeout=10 dbname='
\set here :server 'braid_here'
\set there :server 'braid_there'
\c braid_there
set client_min_messages = warning;
create extension braid;
select braid.create_node('there', :'there');
create publication braid for all tables;
\c braid_here
set client_min_messages = warning;
create extension braid;
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
set output_plugin_libraries = test_decoding, braid;
select braid.create_node('here', :'here');
reset output_plugin_libraries;
alter database braid_there set output_plugin_libraries = pgoutput, braided;
select braid.create_subscription('s', :'there');
\echo :SQLSTATE
alter database braid_there set output_plugin_libraries = pgoutput, "braid";
begin;
select braid.create_subscription('s', :'there', enabled => false) is not null;
rollback;

\c postgres
set client_min_messages = warning;
drop database braid_here with (force);
drop database braid_there with (force);
