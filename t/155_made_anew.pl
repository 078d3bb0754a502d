# A table takes the place of another one of its name: rebuilt, dropped and created again, swapped
# for a copy, or not a table at all. Its changes are applied, or the subscription stops and names
# the remedy; then both nodes agree.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($tokyo, $paris) = map { new_node($_, publication => '') } qw(tokyo paris);
my %form = (all => 'for all tables', schema => 'for tables in schema public', list => 'for table t');
my ($mesh, %name);

sub sql { my ($node, $text) = @_; return $node->safe_psql('postgres', $text); }
sub state_of { my ($node) = @_; return sql($node, 'select string_agg(state, $$,$$) from braid.subscription_status'); }
sub table_state { my ($node) = @_; return sql($node, q[select string_agg(state, ',') from braid.subscription_tables where relation::text = 't']); }

sub link_nodes
{
	my ($form, $both) = @_;
	for my $node ($tokyo, $paris)
	{
		sql($node, 'drop publication if exists p; drop table if exists t, t_old, t_new cascade; create table t (k int primary key, v text)');
		sql($node, "create publication p $form{$form}");
	}
	sql($tokyo, q[insert into t select k, 'first' from generate_series(1, 100) k]);
	$name{paris} = subscribe($paris, $tokyo, publications => q['{p}']);
	$name{tokyo} = subscribe($tokyo, $paris, publications => q['{p}'], copy_data => 'false') if $both;
	$mesh = $both;
}

sub unlink_nodes
{
	for my $node ($mesh ? ($tokyo, $paris) : $paris)
	{
		sql($node, "select braid.drop_subscription('$name{ $node->name }')");
	}
	for my $node ($tokyo, $paris)
	{
		ok(wait_until(sub { sql($node, 'select count(*) from pg_replication_slots where slot_name !~ $$deletions$$ and slot_name ~ $$from$$') eq '0' }, 30), 'the slots are gone');
		sql($node, 'drop publication p');
	}
}

# Until all has come. If a subscription stops, its hint is followed to the letter.
my $hints = 0;
sub settle
{
	my ($what) = @_;
	my @later;
	for my $round (1 .. 8)
	{
		my @stopped;
		my $done = wait_until(sub {
			@stopped = grep { state_of($_) eq 'error' } $mesh ? ($paris, $tokyo) : $paris;
			return @stopped || caught_up_now($paris, $tokyo) && (!$mesh || caught_up_now($tokyo, $paris));
		}, 60);
		ok($done, "$what: the nodes come to an end") or return;
		last unless @stopped;
		for my $node (@stopped)
		{
			my ($error, $hint) = split /\|/, sql($node, 'select last_error, error_hint from braid.subscription_status');
			note "$what: " . $node->name . ": $error -> $hint";
			ok($error !~ /taken the place/ || table_state($node) eq 'replaced', "$what: which the table shows");
			$hints++;
			on_all('create table if not exists t_new (k int primary key, v text)', $tokyo, $paris) if $hint =~ /Create table public\.t_new/;
			$hint =~ s/ or take it out.*?, then/, then/;
			for my $call ($hint =~ /(braid\.\w+(?:\([^)]*\))?)/g)
			{
				$call .= "('$name{ $node->name }')" unless $call =~ /\(/;
				$call =~ /compare|repair/ ? push @later, [ $node, $call ] : sql($node, "select * from $call");
			}
			isnt(state_of($node), 'error', "$what: the hint is of use") or return;
		}
	}
	$_->[0]->safe_psql('postgres', "call $_->[1]") for @later;
	same_tables([ $tokyo, $paris ], 't');
	is(table_state($_), 'ready', "$what: the table is ready") for $mesh ? ($paris, $tokyo) : $paris;
}

# All that the provider has committed is applied.
sub caught_up_now
{
	my ($subscriber, $provider) = @_;
	my $position = sql($provider, 'select braid.sync_event()');
	my ($status) = $subscriber->psql('postgres', "select braid.wait_for_event('" . $provider->name . "', '$position', '1 s')");
	return $status == 0 && sql($subscriber, q[select count(*) from braid.subscription_tables where state in ('waiting', 'copying')]) eq '0';
}

my $row = 1000;
sub write_all
{
	for my $node ($mesh ? ($tokyo, $paris) : $tokyo)
	{
		$row++;
		my $who = $node->name;
		sql($node, "insert into t values ($row, '$who'); update t set v = '$who $row' where k = $row % 50 + 1; delete from t where k = 51 + $row % 50");
	}
}

my $rebuild = q[begin; alter table t rename to t_old; create table t (k int primary key, v text); insert into t select * from t_old; drop table t_old; commit];
my $rebuild_as = q[begin; alter table t rename to t_old; create table t as select * from t_old; alter table t add primary key (k); commit; drop table t_old];
my $empty = q[drop table t; create table t (k int primary key, v text)];
my $swap = q[create table if not exists t_new (k int primary key, v text); delete from t_new; insert into t_new select * from t; begin; alter table t rename to t_old; alter table t_new rename to t; drop table t_old; commit];
my %how = (rebuilt => $rebuild, 'made of a query' => $rebuild_as, 'made anew' => $empty, swapped => $swap);

# The nodes that do it, one after the other, with changes in between.
my %orders = (
	'1 all' => [ [$paris], [ $paris, $tokyo ], [ $tokyo, $paris ] ],
	'1 schema' => [ [ $paris, $tokyo ] ],
	'1 list' => [ [ $paris, $tokyo ] ],
	'0 all' => [ [$paris], [ $tokyo, $paris ] ],
	'0 list' => [ [$paris] ],
);
for my $order (sort keys %orders)
{
	my ($both, $form) = split / /, $order;
	link_nodes($form, $both);
	for my $how (sort keys %how)
	{
		# A swap at one node stops the other one: what is to be done then is done before the next.
		for my $where ($how eq 'swapped' ? [$paris] : $orders{$order}->@*)
		{
			for my $node (@$where)
			{
				sql($node, $how{$how});
				# A publication with a list of tables needs the new table in it.
				sql($node, 'alter publication p add table t') if $form eq 'list';
				write_all();
			}
			settle(($both ? 'both ways' : 'one way') . ", $form, $how at " . join ' and ', map { $_->name } @$where);
		}
	}
	unlink_nodes();
}

# The provider has created the table again, too, and does not publish it yet: the copy stops. Both
# write meanwhile.
link_nodes('list', 1);
ok(wait_until(sub { caught_up_now($paris, $tokyo) && caught_up_now($tokyo, $paris) }, 60), 'both stream');
sql($paris, "select braid.disable_subscription('$name{paris}')");
sql($tokyo, $_) for "insert into t values (2001, 'before')", $empty, "insert into t values (2002, 'tokyo')";
sql($paris, $_) for $empty, "alter publication p add table t", "insert into t values (2003, 'paris')";
sql($paris, "select braid.enable_subscription('$name{paris}')");
ok(wait_until(sub { state_of($paris) eq 'error' }, 60), 'a table that is not published yet stops its copy');
like(sql($paris, 'select last_error from braid.subscription_status'), qr/the provider does not publish table "public.t"/, 'which the view says');
sql($paris, "insert into t values (2004, 'paris')");
sql($tokyo, $_) for 'alter publication p add table t', "insert into t values (2005, 'tokyo')";
settle('both ways, not published at first');
is(sql($paris, q[select string_agg(k::text, ',' order by k) from t]), '2002,2003,2004,2005', 'rows of both are there');
unlink_nodes();
cmp_ok($hints, '>', 0, 'some needed a hint');

done_testing();
