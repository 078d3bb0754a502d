-- braid.check: what it looks at, that no check fails, and who may run it. t/178_check.pl provokes
-- the findings.
\a
\t
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/two_nodes.sql'
\set ECHO none
\i :prelude
\set ECHO all
\set superuser :USER
\set SHOW_CONTEXT never
create role braid_regress_admin login in role braid_admin;
create role braid_regress_monitor login in role braid_monitor;
select code, needs_peer, says from braid.checks();
select fact from braid.facts();
select resource, setting from braid.room() where resource <> 'replication origins';

-- a database that is no node
select severity, subject, finding, code from braid.check() where code in ('node', 'publication', 'check_failed');
select braid.create_node('here', :'here');
create publication braid for all tables;
select severity, subject, finding, code from braid.check() where code in ('node', 'publication', 'check_failed');
-- another node, which is alike
select severity, subject, finding, code from braid.check(:'there') where code = 'check_failed' or code ~ '^peer' and code not in ('peer_room');
-- and which is not
create table only_here (id int primary key);
alter table t add column v text;
select severity, subject, finding, remedy, code from braid.check(:'there') where code = 'check_failed' or code ~ '^peer' and code not in ('peer_room');
-- the connection string leads back
select severity, subject, finding, code from braid.check(:'here') where code ~ '^peer';
-- nobody answers, and no word of the password
select count(*), count(*) filter (where c::text ~ 'topsecret') from braid.check('host=/nonexistent port=1 password=topsecret') c where code ~ '^peer';
select braid.check('host=here password=topsecret nonsense');
\echo :SQLSTATE
select braid.check(null);
\echo :SQLSTATE

-- who may
\c braid_here braid_regress_monitor
select count(*) from braid.check() where code in ('check_failed', 'node');
select braid.check('host=/nonexistent');
\echo :SQLSTATE
\c braid_here braid_regress_admin
select count(*) from braid.check() where code in ('check_failed', 'node');
-- a password is needed, as for a subscription
select severity, finding, remedy from braid.check('host=/nonexistent') where code ~ '^peer';

-- a check that fails is a finding
\c braid_here :superuser
set client_min_messages = warning;
create or replace function braid.checks(out code text, out needs_peer boolean, out says text, out query text) returns setof record language sql as
$$ values ('first', false, '', 'select ''notice'', ''a'', ''b'', ''c'''), ('broken', false, '', 'select ''error'', ''a'', (1 / 0)::text, ''c'''),
          ('many', false, '', 'select ''error'', i::text, ''b'', ''c'' from generate_series(1, 22) i') $$;
select * from braid.check() where subject !~ '^[0-9]+$';

\set postlude :abs_srcdir '/sql/include/drop_two_nodes.sql'
\set ECHO none
\i :postlude
\set ECHO all
drop role braid_regress_admin, braid_regress_monitor;
