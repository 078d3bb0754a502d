-- nothing
select 1;
