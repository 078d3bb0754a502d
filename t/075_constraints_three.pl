# Three nodes, ranges that overlap and keys that are checked at a transaction's end. Some rows
# conflict on one node, others on another, in another order. All nodes end with the same rows, of
# which no two conflict.

use strict;
use warnings;

use Braid;
use Test::More;

my @nodes = map { new_node($_) } qw(tokyo paris quito);
my ($tokyo, $paris, $quito) = @nodes;
on_all(q[
	create table stay (id int primary key, during int4range, v text, exclude using gist (during with &&));
	create table turn (id int primary key, place int unique deferrable initially deferred, v text);
], @nodes);
for my $to (@nodes)
{
	subscribe($to, $_) for grep { $_ != $to } @nodes;
}
my @links = ([ $tokyo, $paris ], [ $tokyo, $quito ], [ $paris, $tokyo ], [ $paris, $quito ], [ $quito, $tokyo ], [ $quito, $paris ]);

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
sub settle { converged(@nodes) for 1 .. 4; return; }
sub rows { my ($node, $table) = @_; return $node->safe_psql('postgres', qq[select coalesce(string_agg(id || ':' || v, ' ' order by id), '') from $table t]); }

sub all_agree
{
	my ($what) = @_;
	settle();
	same_tables(\@nodes, 'stay', 'turn');
	is($tokyo->safe_psql('postgres', q{select count(*) from stay a, stay b where a.id < b.id and a.during && b.during}), 0, "$what: none overlap");
	is($tokyo->safe_psql('postgres', q{select count(*) - count(distinct place) from turn}), 0, "$what: no two have one place");
	return;
}

# The oldest row conflicts with the middle one, and that with the newest, which does not conflict
# with the oldest. The links are healed in every order.
my $id = 0;
for my $round (0 .. 5)
{
	settle();
	stop(@$_) for @links;
	my $from = 100 * $round;
	my ($oldest, $middle, $newest) = map { $id + $_ } 1 .. 3;
	my @ranges = map { my $start = $from + $_; 'int4range(' . $start . ',' . ($start + 10) . ')' } (0, 5, 10);
	my @writers = @nodes[ map { ($_ + $round) % 3 } 0 .. 2 ];
	$writers[0]->safe_psql('postgres', "insert into stay values ($oldest, $ranges[0], 'oldest')");
	$writers[1]->safe_psql('postgres', "insert into stay values ($middle, $ranges[1], 'middle')");
	$writers[2]->safe_psql('postgres', "insert into stay values ($newest, $ranges[2], 'newest')");
	$writers[0]->safe_psql('postgres', "insert into turn values ($oldest, $from, 'oldest')");
	$writers[1]->safe_psql('postgres', "insert into turn values ($middle, $from, 'middle')");
	$writers[2]->safe_psql('postgres', "insert into turn values ($newest, $from, 'newest')");
	for my $link (map { $links[ ($_ + $round) % 6 ] } 0 .. 5)
	{
		go_on(@$link);
		caught_up(@$link);
	}
	all_agree("round $round");
	like(rows($quito, 'stay'), qr/\b$newest:newest/, "round $round: the newest range is there");
	unlike(rows($quito, 'stay'), qr/\b$middle:middle/, "round $round: the one that meets it is not");
	like(rows($quito, 'turn'), qr/\b$newest:newest/, "round $round: the newest has the place");
	unlike(rows($quito, 'turn'), qr/\b(?:$oldest|$middle):/, "round $round: and it alone");
	$id += 3;
}

# Quito gets the loser last, when the winner has long been elsewhere.
on_all('truncate stay, turn', $tokyo);
settle();
stop($quito, $tokyo);
stop($tokyo, $paris);
stop($paris, $tokyo);
$tokyo->safe_psql('postgres', q{insert into stay values (1, '[0,10)', 'loser'); insert into turn values (1, 1, 'loser')});
$paris->safe_psql('postgres', q{insert into stay values (2, '[5,15)', 'winner'); insert into turn values (2, 1, 'winner')});
$paris->safe_psql('postgres', q{update stay set during = '[10,15)' where id = 2; update turn set place = 2 where id = 2});
$quito->poll_query_until('postgres', q{select exists (select from turn where id = 2 and place = 2)}) or die;
go_on($quito, $tokyo);
$quito->poll_query_until('postgres', q{select exists (select from turn where id = 1)}) or die;
is(rows($quito, 'stay') . ' ' . rows($quito, 'turn'), '1:loser 2:winner 1:loser 2:winner', 'here they do not meet');
go_on($tokyo, $paris);
go_on($paris, $tokyo);
all_agree('told');
is(rows($_, 'stay') . ' ' . rows($_, 'turn'), '2:winner 2:winner', 'whoever saw them meet has told the others: ' . $_->name) for @nodes;

# Rows swap places while another node takes one of the two.
$tokyo->safe_psql('postgres', q{insert into turn values (11, 11, 'one'), (12, 12, 'two'), (13, 13, 'three')});
settle();
stop(@$_) for @links;
$tokyo->safe_psql('postgres', q{update turn set place = 23 - place, v = v || ', swapped' where id in (11, 12)});
$paris->safe_psql('postgres', q{update turn set place = 14 where id = 12; insert into turn values (14, 12, 'four')});
$quito->safe_psql('postgres', q{update turn set v = 'two, newest' where id = 12});
for my $link (reverse @links)
{
	go_on(@$link);
	caught_up(@$link);
}
all_agree('a swap that meets others');

done_testing();
