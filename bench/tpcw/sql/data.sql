-- Rows by the ratios of TPC-W. ITEMS and CUSTOMERS stand for numbers. New rows get ids above these.
select setseed(0.5);
insert into country select i, 'country ' || i, 1 + i / 100.0 from generate_series(1, 92) i;
insert into author select i, 'first ' || i, 'last ' || i % 1000, repeat('bio ', 30) from generate_series(1, ITEMS / 4) i;
insert into item select i, 'title ' || md5(i::text), 1 + (random() * (ITEMS / 4 - 1))::int, date '2000-01-01' + (random() * 9000)::int, 'subject ' || i % 24,
    (10 + random() * 90)::numeric(10, 2), 1000000, 1 + (random() * (ITEMS - 1))::int, 'img/' || i from generate_series(1, ITEMS) i;
insert into address select i, 'street ' || i, 'city ' || i % 500, 'zip ' || i % 9000, 1 + i % 92 from generate_series(1, 2 * CUSTOMERS) i;
insert into customer select i, 'user ' || i, 'first ' || i, 'last ' || i, 2 * i, (random() * 50)::int, now(), repeat('data ', 40) from generate_series(1, CUSTOMERS) i;
insert into orders select i, 1 + (random() * (CUSTOMERS - 1))::int, now() - interval '1 day', 0, 2 * i, 'shipped' from generate_series(1, CUSTOMERS * 9 / 10) i;
insert into order_line select o, l, 1 + (random() * (ITEMS - 1))::int, 1 + (random() * 9)::int, 0 from generate_series(1, CUSTOMERS * 9 / 10) o, generate_series(1, 3) l;
insert into cc_xacts select i, 'VISA', i::text, 0, 1 + i % 92 from generate_series(1, CUSTOMERS * 9 / 10) i;
