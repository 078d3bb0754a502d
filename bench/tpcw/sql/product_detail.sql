-- read item, author
\set i random(1, :items)
select * from item join author on i_a_id = a_id where i_id = :i;
