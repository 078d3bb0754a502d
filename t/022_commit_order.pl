# Invariant I5: while several appliers work through a backlog, a reader on the subscriber always
# sees a prefix of what the provider committed, never a later transaction without an earlier one.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '');
$paris->append_conf('postgresql.conf', 'braid.appliers_per_subscription = 4');
$paris->reload;
# Independent keys in two tables, so that nothing but the order of commits keeps them together.
on_all('create table first (id int primary key, filler text); create table second (id int primary key)', $tokyo, $paris);
my $name = subscribe($paris, $tokyo);
disable($paris, $name);
my $rows = 4000;
$tokyo->safe_psql('postgres', qq[
	set synchronous_commit = off;
	do \$\$ begin
		for i in 1..$rows loop
			-- Work of uneven size: a later transaction is often done sooner.
			insert into first values (i, repeat('x', (i % 7) * 300)); commit;
			insert into second values (i); commit;
		end loop;
	end \$\$
]);

# One statement, one snapshot; in one session, which looks as often as it can.
$paris->safe_psql('postgres', qq[
	create table seen (first bigint, first_max int, second bigint, second_max int);
	select braid.enable_subscription('$name');
	do \$\$
	declare
		until constant timestamptz := clock_timestamp() + interval '170 s';
		done bigint;
	begin
		loop
			insert into seen select (select count(*) from first), (select coalesce(max(id), 0) from first),
			       (select count(*) from second), (select coalesce(max(id), 0) from second)
				returning second into done;
			commit;
			exit when done = $rows or clock_timestamp() > until;
		end loop;
	end \$\$
]);
my ($looks, $middle, $done, $wrong) = split /\|/, $paris->safe_psql('postgres', qq[
	select count(*), count(*) filter (where second between 1 and $rows - 1), bool_or(second = $rows),
	       count(*) filter (where first <> first_max or second <> second_max or first not in (second, second + 1)) from seen]);
is($done, 't', 'the backlog was applied');
cmp_ok($middle, '>', 3, "$middle of $looks looks were in the middle of it");
is($wrong, '0', 'each saw a prefix of what was committed');
same_tables([ $tokyo, $paris ], 'first', 'second');

done_testing();
