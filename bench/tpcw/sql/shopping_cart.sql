-- read item; write shopping_cart_line, shopping_cart
\set i random(1, :items)
\if :cart = 0
\set n :n + 1
\set cart :n * 10000 + :node * 1000 + :client_id
insert into shopping_cart values (:cart, now());
\else
update shopping_cart set sc_time = now() where sc_id = :cart;
\endif
insert into shopping_cart_line values (:cart, :i, 1) on conflict (scl_sc_id, scl_i_id) do update set scl_qty = shopping_cart_line.scl_qty + 1;
select i_id, i_title, i_cost, scl_qty from shopping_cart_line join item on i_id = scl_i_id where scl_sc_id = :cart;
