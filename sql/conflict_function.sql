-- Conflict functions: which are taken, and what braid.check_conflict_function finds.
\a
\t
set client_min_messages = warning;
create extension braid;
create table account (id int primary key, n int, tags text[]);
alter table account replica identity full;
create table split (id int primary key, n int) partition by range (id);
create function union_tags(local account, remote account, before account, info braid.conflict) returns account language sql immutable as $$
    select row(coalesce((local).id, (remote).id), greatest((local).n, (remote).n),
        array(select distinct t from unnest((local).tags || (remote).tags) t order by t))::public.account
$$;
create function largest(split, split, split, braid.conflict) returns split language sql stable as
    $$ select case when ($1).n >= ($2).n then $1 else $2 end $$;

select braid.set_conflict_resolution('account', null, 'function', 'union_tags');
select braid.set_conflict_resolution('split', 'insert_exists', 'function', 'largest', replicate => true);
select * from braid.conflict_resolutions;
-- If WAL has only the key, it is not known what a delete's writer saw.
select braid.set_conflict_resolution('split', 'delete_origin_differs', 'function', 'largest');
-- Another rule, none, the function again.
select braid.set_conflict_resolution('account', null, 'keep_local');
select braid.set_conflict_resolution('split', 'insert_exists', null);
select * from braid.conflict_resolutions;
select relation, kind, resolution, function_id is not null, has_asked from braid.conflict_rule order by rule_id;
select braid.set_conflict_resolution('account', null, 'function', 'union_tags');
select * from braid.conflict_resolutions;

-- What is refused.
select braid.set_conflict_resolution('account', null, 'function');
select braid.set_conflict_resolution('account', null, 'keep_local', 'union_tags');
select braid.set_conflict_resolution(null, null, 'function', 'union_tags');
select braid.set_conflict_resolution('split', 'insert_exists', 'function', 'union_tags');
select braid.set_conflict_resolution('split', 'insert_exists', 'function', 'now');
create function strict_one(split, split, split, braid.conflict) returns split language sql strict as $$ select $1 $$;
select braid.set_conflict_resolution('split', 'insert_exists', 'function', 'strict_one');
create function many(split, split, split, braid.conflict) returns setof split language sql as $$ select $1 $$;
select braid.set_conflict_resolution('split', 'insert_exists', 'function', 'many');
select braid.set_conflict_resolution('split', 'insert_exists', 'function', 4000000000::oid::regproc);
create role clerk in role braid_admin;
revoke execute on function largest from public;
set role clerk;
select braid.set_conflict_resolution('split', 'insert_exists', 'function', 'largest');
reset role;
drop role clerk;

-- A function that is gone shows as its number; braid.conflict is needed by functions.
drop function largest;
select function is null, function::text ~ '^\d+$', volatility from braid.conflict_resolutions where relation = 'split'::regclass;
drop type braid.conflict;

-- Trying a function.
select * from braid.check_conflict_function('account', 'union_tags');
insert into account values (1, 1, '{a}'), (2, 5, '{a,b}'), (3, 3, '{c}'), (4, 9, '{}');
create table plain (like account including all);
insert into plain select * from account;
create function plain_union(local plain, remote plain, before plain, info braid.conflict) returns plain language sql immutable as $$
    select row((local).id, greatest((local).n, (remote).n), array(select distinct t from unnest((local).tags || (remote).tags) t order by t))::public.plain
$$;
select * from braid.check_conflict_function('plain', 'plain_union');
-- Not the same from both sides; not the same in any order; not the same at all.
create function keep(plain, plain, plain, braid.conflict) returns plain language sql as $$ select $1 $$;
select law, count(*) > 0 from braid.check_conflict_function('plain', 'keep') group by law order by law;
create function mean(local plain, remote plain, before plain, info braid.conflict) returns plain language plpgsql as $$
begin
    local.n := (local.n + remote.n) / 2;
    local.tags := '{}';
    return local;
end
$$;
select law, count(*) > 0 from braid.check_conflict_function('plain', 'mean') group by law order by law;
create function dice(local plain, remote plain, before plain, info braid.conflict) returns plain language plpgsql as $$
begin
    insert into public.plain select 100 + count(*), 0, '{}' from public.plain;
    local.n := random() * 1000000;
    return local;
end
$$;
select law, count(*) > 0 from braid.check_conflict_function('plain', 'dice', 3) group by law order by law;
select count(*) from plain;
-- By the versions: the newer one, from whichever side it is seen.
create function newer(local plain, remote plain, before plain, info braid.conflict) returns plain language plpgsql as $$
begin
    return case when info.local_timestamp > info.remote_timestamp then local else remote end;
end
$$;
select * from braid.check_conflict_function('plain', 'newer');
-- With the row before.
create function delta(local account, remote account, before account, info braid.conflict) returns account language plpgsql as $$
begin
    local.n := local.n + remote.n - coalesce(before.n, 0);
    local.tags := '{}';
    return local;
end
$$;
select law, kind, count(*) > 0 from braid.check_conflict_function('account', 'delta') group by law, kind order by law, kind;
select * from braid.check_conflict_function('account', 'plain_union');

drop table account, split, plain cascade;
drop extension braid cascade;
