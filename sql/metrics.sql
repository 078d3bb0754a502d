-- braid.metrics: names, types and labels, the text format, and who may read them. t/179_metrics.pl
-- has the values.
\a
\t
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/two_nodes.sql'
\set ECHO none
\i :prelude
\set ECHO all
\set superuser :USER
create role braid_regress_monitor login in role braid_monitor;
select * from braid.metric_list();
-- names follow Prometheus' conventions
select name from braid.metric_list() where name !~ '^braid_[a-z_]+$' or (type = 'counter') <> (name ~ '_total$') or type not in ('gauge', 'counter') or help !~ '\.$';

-- a database that is no node
select name, labels - 'version' - 'postgres_version' as labels from braid.metrics where name ~ '^braid_(node|deletions_rem|pending)';
-- a node whose name takes escaping
select braid.create_node('he"re\', :'here');
select braid.create_subscription('from_there', :'there', enabled => false) is not null;
select name, string_agg(distinct k, ', ' order by k) as labels
  from braid.metrics m cross join lateral jsonb_object_keys(m.labels) k where m.name !~ '^braid_(slot|wal|copy|clock)' group by name order by name collate "C";
select name, value from braid.metrics where labels ->> 'subscription' = 'from_there' and name !~ '_tables|_stops' and value is not null order by name collate "C", labels;
-- nothing but what is listed
select name from braid.metric_samples() except select name from braid.metric_list();
-- values are known, labels are texts, and no two rows are the same
select count(*) from braid.metrics where value is null or value = 'NaN';
select name, labels from braid.metrics group by 1, 2 having count(*) > 1;
select distinct jsonb_typeof(v.value) from braid.metrics m cross join lateral jsonb_each(m.labels) v;
-- the text
select line from regexp_split_to_table(braid.metrics_text(), E'\n') line where line ~ 'pending_cleanup';
select right(braid.metrics_text(), 1) = E'\n';
select line from regexp_split_to_table(rtrim(braid.metrics_text(), E'\n'), E'\n') line
 where line !~ '^# (HELP braid_[a-z_]+ [^\n]+|TYPE braid_[a-z_]+ (gauge|counter))$'
   and line !~ '^braid_[a-z_]+\{([a-z_]+="([^"\\]|\\["\\n])*",?)*\} -?([0-9.]+(e[+-]?[0-9]+)?|Inf|NaN)$';

\c braid_here braid_regress_monitor
select count(*) > 20 from braid.metrics;
select braid.metrics_text() ~ 'braid_node_info';
\c braid_here :superuser
set client_min_messages = warning;
select braid.drop_subscription('from_there', drop_slot => false);

\set postlude :abs_srcdir '/sql/include/drop_two_nodes.sql'
\set ECHO none
\i :postlude
\set ECHO all
drop role braid_regress_monitor;
