-- read customer, order_line, country, item, address, cc_xacts, orders
\set c random(1, :customers)
select o_id, o_date, o_total, o_status, addr_street, co_name, cx_type from orders join customer on c_id = o_c_id join address on addr_id = c_addr_id join country on co_id = addr_co_id
join cc_xacts on cx_o_id = o_id where o_c_id = :c order by o_date desc limit 1;
select ol_i_id, i_title, ol_qty from order_line join item on i_id = ol_i_id where ol_o_id = (select max(o_id) from orders where o_c_id = :c);
