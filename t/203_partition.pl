# A network partition of a group of five nodes, two to three: both sides write, change the schema
# and use sequences. Three agree on what needs a majority, under a leader of theirs; two report whom
# they wait for. When the partition ends, all are equal, and the two can agree again.

use strict;
use warnings;

use Braid;
use Ddl ();
use Group;
use PostgreSQL::Test::Utils;
use Proxy;
use Test::More;

my %side = (tokyo => 'on', paris => 'on', oslo => 'off', lima => 'off', rome => 'off');
my (%node, %proxy);
for my $name (qw(tokyo paris oslo lima rome))
{
	# By this a link knows from where it is used.
	local $ENV{PGGEQO} = $side{$name};
	$node{$name} = new_server($name, init => ['--data-checksums']);
	$proxy{$name} = Proxy->new($node{$name});
	sql($node{$name}, 'create extension braid');
}
my ($tokyo, $paris, $oslo, $lima, $rome) = my @all = @node{qw(tokyo paris oslo lima rome)};
my @two = ($tokyo, $paris);
my @three = ($oslo, $lima, $rome);
sub dsn_of { return $proxy{ $_[0]->name }->connstr('postgres'); }

sql($tokyo, q[create table item (id serial primary key, v text, n int not null default 0); insert into item (v) select 'first' from generate_series(1, 50)]);
sql($tokyo, q[select braid.create_group('shop', node_name => 'tokyo', dsn => '] . dsn_of($tokyo) . q[')]);
for my $pair ([ $paris, $oslo ], [ $lima, $rome ])
{
	sql($_, "select braid.join_group('" . dsn_of($tokyo) . "', node_name => '" . $_->name . "', dsn => '" . dsn_of($_) . "')") for @$pair;
	joined(@$pair);
}
joined(@all);
have_all(@all);

# Rows of all, of which each node writes its own and the same ones as the others.
my $load = q[
	\set id random(1, 50)
	insert into item (v) values ('node');
	update item set n = n + 1, v = 'node' where id = :id;
];
sub write_at
{
	my ($seconds, @nodes) = @_;
	my @running = map {
		my $file = $_->basedir . '/load.sql';
		unlink $file;
		append_to_file($file, $load =~ s/node/$_->name/ger);
		IPC::Run::start([ 'pgbench', '-n', '-R', 40, '-T', $seconds, '-f', $file, $_->connstr('postgres') ], '>', '/dev/null', '2>', $_->basedir . '/load.err')
	} @nodes;
	return @running;
}
my @running = write_at(8, @all);

# Apart.
$proxy{$_}->link("only $side{$_}") for sort keys %proxy;
my $view = q[select message from braid.group_nodes where is_local];
for my $node (@two)
{
	ok(wait_until(sub { sql($node, $view) =~ /^no majority: waiting for members oslo, lima, rome$/ }, 60), $node->name . ' says whom it waits for')
	  or diag(sql($node, $view));
}
my $leader = q[select coalesce(string_agg(name, ' '), 'none') from braid.group_nodes where leads];
for my $node (@three)
{
	ok(wait_until(sub { sql($node, $leader) =~ /^(oslo|lima|rome)$/ }, 60), $node->name . ' has a leader among the three') or diag(sql($node, $leader));
}
like(refusal($paris, q[select braid.set_read_only(true, 'lima')]), qr/the group has not agreed in time.*waiting for members oslo, lima, rome.*takes effect if a majority is there later/s, 'two can not agree');
sql($oslo, q[select braid.set_read_only(true, 'rome')]);
ok(wait_until(sub { sql($rome, q[select read_only from braid.group_nodes where is_local]) eq 't' }, 30), 'three can');
like(refusal($rome, q[insert into item (v) values ('no')]), qr/This node of a group is read only/, 'what they have agreed counts at a third one');
sql($lima, q[select braid.set_read_only(false, 'rome')]);
ok(wait_until(sub { attempt($rome, q[insert into item (v) values ('again')]); (attempt($rome, q[insert into item (v) values ('again')]))[0] == 0 }, 30), 'and again');
sql($tokyo, 'alter table item add of_two int default 2');
sql($lima, 'alter table item add of_three int default 3; create index of_three on item (of_three)');
sql($_, q[insert into item (v) select 'apart' from generate_series(1, 100)]) for @all;
have_all(@two);
have_all(@three);
my $columns = q[select string_agg(attname, ' ' order by attname) from pg_attribute where attrelid = 'item'::regclass and attnum > 0];
is(sql($_, $columns), 'id n of_two v', 'two have theirs: ' . $_->name) for @two;
is(sql($_, $columns), 'id n of_three v', 'three have theirs: ' . $_->name) for @three;
$_->finish for @running;

# Together.
$proxy{$_}->link('up') for sort keys %proxy;
have_all(@all) for 1 .. 2;
is(sql($_, $columns), 'id n of_three of_two v', 'all have all columns: ' . $_->name) for @all;
same_tables(\@all, '(select id, v, n, of_two, of_three from item)');
is(sql($tokyo, q[select count(*) from item where v = 'apart']), '500', 'and all rows');
is(sql($_, q[select count(*) from braid.conflict_history where kind = 'insert_exists']), '0', 'no two nodes had one number: ' . $_->name) for @all;
# The request of the two was withdrawn with its answer, or takes effect: either way all know the
# same.
my $read_only = q[select string_agg(name || ' ' || read_only, ', ' order by name) from braid.group_nodes];
ok(wait_until(sub { my %seen = map { sql($_, $read_only) => 1 } @all; keys %seen == 1 }, 60), 'all know the same of the group');
sql($paris, q[select braid.set_read_only(false, 'lima')]);
ok(wait_until(sub { sql($tokyo, $read_only) !~ /true/ }, 60), 'and the two agree with the others');
Ddl::all_stream(@all);
done_testing();
