-- read item, order_line, author
\set s random(0, 23)
select i_id, i_title, a_fname, a_lname, sold
from (select ol_i_id, sum(ol_qty) as sold from (select ol_i_id, ol_qty from order_line order by ol_o_id desc limit 10000) latest group by ol_i_id) best
join item on i_id = ol_i_id join author on a_id = i_a_id where i_subject = 'subject ' || :s order by sold desc limit 50;
