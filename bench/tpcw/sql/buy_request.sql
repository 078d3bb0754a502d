-- read shopping_cart_line, country, item; write customer, address
-- One customer in five is a new one. Others write no address.
\set c random(1, :customers)
\set is_new random(1, 5)
\if :is_new = 1
\set n :n + 1
\set id :n * 10000 + :node * 1000 + :client_id
insert into address select :id, 'street', 'city', 'zip', co_id from country where co_id = :c % 92 + 1;
insert into customer values (:id, 'user ' || :id, 'first', 'last', :id, 10, now(), repeat('data ', 40));
\else
set local braid.release = 'address';
update customer set c_login = now() where c_id = :c;
\endif
select i_id, i_title, i_cost, scl_qty from shopping_cart_line join item on i_id = scl_i_id where scl_sc_id = :cart;
