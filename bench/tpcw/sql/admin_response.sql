-- read author, orders, order_line; write item
\set i random(1, :items)
update item set i_cost = i_cost, i_pub_date = current_date, i_related = coalesce((select l.ol_i_id from order_line b join orders on o_id = b.ol_o_id join order_line l on l.ol_o_id = b.ol_o_id
where b.ol_i_id = :i and l.ol_i_id <> :i group by l.ol_i_id order by sum(l.ol_qty) desc, l.ol_i_id limit 1), i_related) where i_id = :i;
select a_fname, a_lname, i_title, i_related from item join author on a_id = i_a_id where i_id = :i;
