-- What two_nodes.sql made.
\c postgres
set client_min_messages = warning;
drop database braid_here with (force);
drop database braid_there with (force);
