-- read item, author
\set kind random(1, 3)
\set which random(0, 999)
\if :kind = 1
select i_id, i_title, a_fname, a_lname from item join author on i_a_id = a_id where a_lname = 'last ' || :which order by i_title limit 50;
\elif :kind = 2
select i_id, i_title, a_fname, a_lname from item join author on i_a_id = a_id where i_title like '%' || :which || '%' order by i_title limit 50;
\else
select i_id, i_title, a_fname, a_lname from item join author on i_a_id = a_id where i_subject = 'subject ' || (:which % 24) order by i_title limit 50;
\endif
