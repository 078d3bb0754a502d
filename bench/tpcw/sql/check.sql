-- What must hold after any run, each with the number of rows that break it.
select 'stock' as rule, count(*) from (
    select i_id from item left join order_line on ol_i_id = i_id and ol_o_id > 1000000000 group by i_id having 1000000 - coalesce(sum(ol_qty), 0) <> i_stock) wrong
union all
select 'orders without lines', count(*) from orders where o_id > 1000000000 and not exists (select from order_line where ol_o_id = o_id)
union all
select 'lines without an order', count(*) from order_line where not exists (select from orders where o_id = ol_o_id)
union all
select 'payments', count(*) from orders left join cc_xacts on cx_o_id = o_id where cx_amount is distinct from o_total
union all
select 'bought and in a cart', count(*) from shopping_cart_line join orders on o_id = scl_sc_id;
