-- read customer, item
\set c random(1, :customers)
\set i random(1, :items)
select c_fname, c_lname from customer where c_id = :c;
select r.i_id, r.i_thumbnail from item i join item r on r.i_id in (i.i_related, i.i_related % :items + 1, (i.i_related + 6) % :items + 1) where i.i_id = :i;
