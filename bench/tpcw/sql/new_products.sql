-- read item, author
\set s random(0, 23)
select i_id, i_title, a_fname, a_lname from item join author on i_a_id = a_id where i_subject = 'subject ' || :s order by i_pub_date desc, i_title limit 50;
