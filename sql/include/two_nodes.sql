-- Shared by the tests of the functions: databases braid_here and braid_there with the extension;
-- braid_there is node 'there' and publishes all tables, of which t is one in both. Ends in
-- braid_here, which is for the test to make a node. :here and :there are their connection strings.
set client_min_messages = warning;
create database braid_here;
create database braid_there;
\set server 'host=' :HOST ' port=' :PORT ' user=' :USER ' connect_timeout=10 dbname='
\set here :server 'braid_here'
\set there :server 'braid_there'
\c braid_there
set client_min_messages = warning;
create extension braid;
select braid.create_node('there', :'there') \g /dev/null
create table t (id int primary key);
create publication braid for all tables;
\c braid_here
set client_min_messages = warning;
create extension braid;
create table t (id int primary key);
