-- read customer, country; write shopping_cart_line, order_line, item, address, cc_xacts, orders
-- One order in twenty goes to another address. Others write no address.
\set c random(1, :customers)
\set i random(1, :items)
\set address random(1, 20)
\set n :n + 1
\set id :n * 10000 + :node * 1000 + :client_id
\if :cart = 0
\set cart :id
\endif
insert into shopping_cart_line select :cart, :i, 1 where not exists (select from shopping_cart_line where scl_sc_id = :cart);
\if :address = 1
insert into address select :id, 'street', 'city', 'zip', co_id from country where co_id = :c % 92 + 1;
\else
set local braid.release = 'address';
\endif
insert into orders select :id, :c, now(), (select sum(scl_qty * i_cost) from shopping_cart_line join item on i_id = scl_i_id where scl_sc_id = :cart) * (100 - c_discount) / 100, c_addr_id, 'pending' from customer where c_id = :c;
insert into order_line select :id, row_number() over (), scl_i_id, scl_qty, 0 from shopping_cart_line where scl_sc_id = :cart;
update item set i_stock = i_stock - scl_qty from shopping_cart_line where scl_sc_id = :cart and i_id = scl_i_id;
insert into cc_xacts select o_id, 'VISA', '1', o_total, :c % 92 + 1 from orders where o_id = :id;
delete from shopping_cart_line where scl_sc_id = :cart;
\set cart 0
