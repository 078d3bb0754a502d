# The SQL of docs/group.md, run as written, from the first node to one that comes back after it was
# removed. Nodes are stopped where the page says so, and the outcome is the one that the page shows.

use strict;
use warnings;

use Braid;
use Page;
use PostgreSQL::Test::Utils;
use Test::More;

my %node = map { $_ => new_server($_, init => ['--data-checksums']) } qw(tokyo paris oslo observer);
on_all('create database shop', values %node);
sub sql { my ($node, $sql) = @_; return $node{$node}->safe_psql('shop', $sql); }
sub becomes_so { my ($node, $query, $name) = @_; ok($node{$node}->poll_query_until('shop', $query), $name) or diag(sql($node, 'table braid.group_nodes')); return; }

# Each of these has what each other one has committed by now.
my @live;
sub have_all
{
	for my $one (@live)
	{
		for my $other (grep { $_ ne $one } @live)
		{
			my $position = sql($other, 'select braid.sync_event()');
			sql($one, "select braid.wait_for_event('$other', '$position', '180 s')");
		}
	}
	return;
}
sub all_have
{
	my ($query, $value, $name) = @_;
	have_all();
	is(sql($_, $query), $value, "$name: $_") for @live;
	return;
}

my $members = q[select string_agg(name || ' ' || role || ' ' || state, ', ' order by node_number) from braid.group_nodes];
my %before = (
	'Without a majority' => sub {
		@live = ('tokyo');
		$node{$_}->stop('fast') for qw(paris observer);
		becomes_so('tokyo', q[select count(*) = 2 from braid.group_nodes where not reachable], 'both are away');
	},
	'A lost node' => sub {
		$node{observer}->start;
		becomes_so('tokyo', q[select message ~ 'leads' from braid.group_nodes where is_local], 'the witness makes a majority');
	},
	'A removed node that comes back' => sub {
		$node{paris}->start;
		becomes_so('paris', q[select state = 'stopped' from braid.group_nodes where is_local], 'paris hears that it was removed');
	},
);
my %after = (
	'Create' => sub {
		@live = ('tokyo');
		sql('tokyo', q[select braid.wait_for_group('180 s')]);
		is(sql('tokyo', $members), 'tokyo data active', 'a group of one');
	},
	'Join' => sub {
		@live = qw(tokyo paris oslo);
		sql($_, q[select braid.wait_for_group('180 s')]) for @live;
		all_have($members, 'tokyo data active, paris data active, oslo data active', 'three members');
		all_have('select count(*) from customer', '2', 'the rows came along');
		is(sql('oslo', q[select bool_and(state = 'done') from braid.join_progress]), 't', 'all steps are done');
	},
	'Write on all nodes' => sub {
		all_have('select count(*), count(distinct id) from orders', '3|3', 'no two values are the same');
	},
	'Leave' => sub {
		@live = qw(tokyo paris);
		becomes_so('oslo', 'select not exists (select from braid.group_self)', 'oslo has left');
		is(sql('oslo', 'select count(*) from orders'), '3', 'its rows stay');
		becomes_so($_, 'select count(*) = 2 from braid.group_nodes', "$_ knows") for @live;
	},
	'Two nodes and a witness' => sub {
		is(sql($_, $members), 'tokyo data active, paris data active, observer witness active', "$_ knows the witness") for @live;
		is(sql('observer', q[select to_regclass('orders') is null]), 't', 'which has no data');
	},
	'Without a majority' => sub {
		becomes_so('tokyo', q[select message = 'no majority: waiting for members paris, observer' from braid.group_nodes where is_local], 'the view says whom the group waits for');
		my ($status, $out, $err) = $node{tokyo}->psql('shop', q[select braid.set_read_only()]);
		like($err, qr/the group has not agreed in time.*waiting for members paris, observer.*HINT/s, 'so does a call that needs a majority');
		sql('tokyo', 'create table alone (id serial primary key); insert into alone select from generate_series(1, 10)');
		is(sql('tokyo', 'select max(id) from alone'), '10', 'the schema and sequences work');
	},
	'A lost node' => sub {
		becomes_so('tokyo', q[select bool_and(state = 'done') and count(*) = 1 from braid.recovery where removed = 'paris'], 'what paris had is settled');
		# A request from before, without a majority, takes effect, unless its answer came first.
		sql('tokyo', 'select braid.set_read_only(false)');
		becomes_so('tokyo', q[select not read_only from braid.group_nodes where is_local], 'tokyo takes writes');
		is(sql('tokyo', $members), 'tokyo data active, observer witness active', 'it is removed');
		is(sql('tokyo', q[select count(*) from pg_replication_slots where slot_name like '%paris%']), '0', 'its slot is dropped');
		is(sql('tokyo', 'select count(*) from orders'), '4', 'rows are there');
	},
	'A removed node that comes back' => sub {
		is(sql('paris', 'select (select count(*) from braid.group_nodes), (select count(*) from braid.subscription)'), '0|0', 'it has forgotten the group');
		is(sql('paris', 'select count(*) from orders'), '3', 'and has its rows');
	},
);
my ($heading, %seen) = ('');
for my $part (parts('docs/group.md'), { heading => '' })
{
	if ($part->{heading} ne $heading)
	{
		($after{$heading} // sub { })->();
		$heading = $part->{heading};
		$seen{$heading} = 1;
		($before{$heading} // sub { })->();
	}
	next unless defined $part->{sql};
	have_all();
	my %printed = run_part($part, 'shop', \%node);
	like($printed{paris}, qr/removed from the group.*join/s, 'the page says what it is told') if $part->{sql} =~ /select message, hint/;
}
is(join(', ', grep { !$seen{$_} } sort keys %before, keys %after), '', 'the page has each section that is looked at');

done_testing();
