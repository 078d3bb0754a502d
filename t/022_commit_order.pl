# Invariant I5: while several appliers work through a backlog, a reader on the subscriber always sees a prefix of what the provider
# committed, never a later transaction without an earlier one.

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
$paris->safe_psql('postgres', "select braid.disable_subscription('$name')");
my $rows = 15000;
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
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");

my ($looks, $middle, $wrong) = (0, 0, '');
my $done = 0;
while (!$done && $looks < 2000)
{
	# One statement, one snapshot.
	my $seen = $paris->safe_psql('postgres', q[
		select (select count(*) from first), (select coalesce(max(id), 0) from first),
		       (select count(*) from second), (select coalesce(max(id), 0) from second)]);
	my ($first, $first_max, $second, $second_max) = split /\|/, $seen;
	$looks++;
	$middle++ if $second > 0 && $second < $rows;
	$wrong = $seen if $first != $first_max || $second != $second_max || ($first != $second && $first != $second + 1);
	$done = $second == $rows;
}
ok($done, 'the backlog was applied');
cmp_ok($middle, '>', 3, "$middle of $looks looks were in the middle of it");
is($wrong, '', 'each saw a prefix of what was committed');
same_tables([ $tokyo, $paris ], 'first', 'second');

done_testing();
