-- The tables of TPC-W, with the columns that its interactions use.
create table country (co_id int primary key, co_name text not null, co_exchange numeric not null);
create table author (a_id int primary key, a_fname text not null, a_lname text not null, a_bio text not null);
create index on author (a_lname);
create table item (i_id int primary key, i_title text not null, i_a_id int not null, i_pub_date date not null, i_subject text not null,
    i_cost numeric not null, i_stock int not null, i_related int not null, i_thumbnail text not null);
create index on item (i_subject, i_pub_date desc);
create index on item (i_a_id);
create table address (addr_id bigint primary key, addr_street text not null, addr_city text not null, addr_zip text not null, addr_co_id int not null);
create table customer (c_id bigint primary key, c_uname text not null, c_fname text not null, c_lname text not null, c_addr_id bigint not null,
    c_discount numeric not null, c_login timestamptz not null, c_data text not null);
create index on customer (c_uname);
create table orders (o_id bigint primary key, o_c_id bigint not null, o_date timestamptz not null, o_total numeric not null, o_ship_addr_id bigint not null,
    o_status text not null);
create index on orders (o_c_id);
create table order_line (ol_o_id bigint, ol_id int, ol_i_id int not null, ol_qty int not null, ol_discount numeric not null, primary key (ol_o_id, ol_id));
create index on order_line (ol_i_id);
create table cc_xacts (cx_o_id bigint primary key, cx_type text not null, cx_num text not null, cx_amount numeric not null, cx_co_id int not null);
create table shopping_cart (sc_id bigint primary key, sc_time timestamptz not null);
create table shopping_cart_line (scl_sc_id bigint, scl_i_id int, scl_qty int not null, primary key (scl_sc_id, scl_i_id));
