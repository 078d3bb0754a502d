# Three nodes: one sees a row together with the row that it loses to. Others never do, because the
# winner got another key before the loser came. All end with the same rows.

use strict;
use warnings;

use Braid;
use Test::More;

my @nodes = map { new_node($_) } qw(tokyo paris quito);
my ($tokyo, $paris, $quito) = @nodes;
on_all('create table account (id int primary key, email text unique, v text)', @nodes);
for my $to (@nodes)
{
	subscribe($to, $_) for grep { $_ != $to } @nodes;
}

sub stream { my ($to, $from) = @_; return $to->name . '_from_' . $from->name; }
sub stop
{
	my ($to, $from) = @_;
	my $name = stream($to, $from);
	$to->safe_psql('postgres', "select braid.disable_subscription('$name')");
	$from->poll_query_until('postgres', "select not exists (select from pg_stat_replication where application_name = '$name')") or die;
	return;
}
sub go_on { my ($to, $from) = @_; $to->safe_psql('postgres', "select braid.enable_subscription('" . stream($to, $from) . "')"); return; }
sub rows { return $_[0]->safe_psql('postgres', q[select coalesce(string_agg(a::text, ' ' order by id), '') from account a]); }

sub all_have
{
	my ($expected, $what) = @_;
	converged(@nodes) for 1 .. 3;
	is(rows($_), $expected, "$what: " . $_->name) for @nodes;
	return;
}

# Quito gets the loser last, when the winner has had another key for long.
converged(@nodes);
stop($quito, $tokyo);
stop($tokyo, $paris);
stop($paris, $tokyo);
$tokyo->safe_psql('postgres', q[insert into account values (1, 'a', 'loser')]);
$paris->safe_psql('postgres', q[insert into account values (2, 'a', 'winner')]);
$paris->safe_psql('postgres', q[update account set email = 'b' where id = 2]);
$quito->poll_query_until('postgres', q[select exists (select from account where id = 2 and email = 'b')]) or die;
go_on($quito, $tokyo);
$quito->poll_query_until('postgres', q[select exists (select from account where id = 1)]) or die;
is(rows($quito), '(1,a,loser) (2,b,winner)', 'here the two do not meet');
go_on($tokyo, $paris);
go_on($paris, $tokyo);
all_have('(2,b,winner)', 'whoever saw them meet has told the others');

# The same, and a third row takes what the winner had: by then the loser is dead, whatever came
# first.
on_all('truncate account', $tokyo);
all_have('', 'empty');
stop($quito, $tokyo);
stop($tokyo, $paris);
$tokyo->safe_psql('postgres', q[insert into account values (1, 'a', 'first')]);
$paris->poll_query_until('postgres', q[select exists (select from account where id = 1)]) or die;
stop($paris, $tokyo);
$tokyo->safe_psql('postgres', q[update account set v = 'first, again' where id = 1]);
$paris->safe_psql('postgres', q[update account set email = 'c' where id = 1]);
$paris->safe_psql('postgres', q[insert into account values (3, 'a', 'third')]);
go_on($_->[0], $_->[1]) for [ $quito, $tokyo ], [ $tokyo, $paris ], [ $paris, $tokyo ];
all_have('(1,c,first) (3,a,third)', 'an older state of a row takes nothing from a newer row');

# Two rows that lose to each other on two nodes: neither node takes both away.
on_all('truncate account', $tokyo);
all_have('', 'empty again');
my @links = ([ $tokyo, $paris ], [ $paris, $tokyo ], [ $tokyo, $quito ]);
stop($_->[0], $_->[1]) for @links;
$tokyo->safe_psql('postgres', q[insert into account values (1, 'a', 'one')]);
$paris->safe_psql('postgres', q[insert into account values (2, 'a', 'two')]);
$quito->poll_query_until('postgres', q[select exists (select from account where id = 2)]) or die;
$tokyo->safe_psql('postgres', q[update account set v = 'one, newest' where id = 1]);
go_on($_->[0], $_->[1]) for @links;
all_have('(1,a,"one, newest")', 'the newest stays');

done_testing();
