-- Working as a table's owner for the rest of a transaction: the rights for it, its restrictions,
-- and that it ends.
\a
\t
set client_min_messages = warning;
create extension braid;
\set superuser :USER
create role braid_regress_owner;
create role braid_regress_peer replication;
create role braid_regress_plain;
grant braid_monitor to braid_regress_peer, braid_regress_plain;
create table t (id int primary key);
alter table t owner to braid_regress_owner;
grant select on t to braid_regress_peer;
create table own (id int primary key);
create table hidden (id int primary key);
alter table hidden owner to braid_regress_owner;

-- in a read-only transaction, until that ends, however it ends
\set VERBOSITY sqlstate
select braid.read_as_owner('t'::regclass);
begin read only;
select braid.read_as_owner('t'::regclass), current_user;
reset role;
rollback;
select current_user = session_user;
begin read only;
select braid.read_as_owner('t'::regclass);
commit;
select current_user = session_user;
begin read only;
savepoint a;
select braid.read_as_owner('t'::regclass);
savepoint b;
select current_user;
set transaction read write;
rollback to a;
select current_user = session_user;
commit;
-- and not one after the other: what runs by then may be the owner's
begin read only;
select braid.read_as_owner('t'::regclass);
select braid.read_as_owner('hidden'::regclass);
rollback;

-- a role that connects for replication, and may read the table
set role braid_regress_peer;
begin read only;
select braid.read_as_owner('t'::regclass);
select current_user;
rollback;
select current_user;
begin read only;
select braid.read_as_owner('hidden'::regclass), braid.read_as_owner('own'::regclass), braid.read_as_owner(1);
select current_user;
rollback;
set role braid_regress_plain;
begin read only;
select braid.read_as_owner('t'::regclass);
rollback;
-- policies
reset role;
alter table t enable row level security;
set role braid_regress_peer;
begin read only;
select braid.read_as_owner('t'::regclass);
rollback;
reset role;
alter table t disable row level security;

-- one query, with what stands for its parameters
insert into t values (1), (2);
create function whoami() returns text language sql as $$ select current_user::text $$;
begin read only;
select * from braid.rows_as_owner('t'::regclass, 'select id, public.whoami(), %1$L::text, %2$L::text, ''100%%'' from public.t where id = %1$L::int',
    array['2', 'it''s %1$L \ $1']) as r (id int, who text, one text, two text, three text);
select current_user = session_user;
rollback;
-- an error of it is the caller's
begin read only;
select * from braid.rows_as_owner('t'::regclass, 'select 1 / 0', '{}') as r (id int);
rollback;
select current_user = session_user;

-- as another role, for superusers only, who have rights to lose
begin;
select braid.confine('braid_regress_owner'::regrole), current_user;
create temporary table kept (id int);
rollback;
select current_user = session_user;
set role braid_regress_owner;
select braid.confine('braid_regress_plain'::regrole);
reset role;
grant braid_admin to braid_regress_owner;
set role braid_regress_owner;
select braid.confine('braid_regress_plain'::regrole), current_user;
reset role;
drop function whoami();
drop table t, own, hidden;
drop extension braid;
drop owned by braid_regress_owner, braid_regress_peer, braid_regress_plain;
drop role braid_regress_owner, braid_regress_peer, braid_regress_plain;
