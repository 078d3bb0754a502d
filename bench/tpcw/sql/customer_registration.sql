-- read customer
\set c random(1, :customers)
select c_id, c_fname, c_lname from customer where c_uname = 'user ' || :c;
