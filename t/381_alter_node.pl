# Members of a group move: they are reached by another address. One call has all members use it,
# also where the old address has cost the group its majority. A wrong address changes nothing.

use strict;
use warnings;

use Braid;
use Group;
use PostgreSQL::Test::Utils;
use Proxy;
use Test::More;

my (%node, %proxy, @old);
for my $name (qw(tokyo paris oslo))
{
	$node{$name} = new_server($name, init => ['--data-checksums']);
	$proxy{$name} = Proxy->new($node{$name});
	sql($node{$name}, 'create extension braid');
}
my ($tokyo, $paris, $oslo) = @node{qw(tokyo paris oslo)};
sub dsn_of { return $proxy{ $_[0]->name }->connstr('postgres'); }
# Returns the connection string of a new address. The old one leads nowhere any more.
sub moved
{
	my ($node) = @_;
	my $before = $proxy{ $node->name };
	push @old, $before;
	$before->link('down');
	$proxy{ $node->name } = Proxy->new($node);
	return dsn_of($node);
}
sub alter { my ($at, $node, $dsn) = @_; return refusal($at, "select braid.alter_node('" . $node->name . "', dsn => '$dsn')"); }
# One test: the call goes well. It may fail while a leader is elected, and is repeated then.
sub agreed
{
	my ($at, $node, $dsn, $what) = @_;
	my $got = '';
	wait_until(sub { $got = alter($at, $node, $dsn); $got !~ /has not agreed in time/ }, 30);
	return is($got, 'no error: ', $what);
}
# One test: the node is reached by this connection string alone, wherever strings are stored.
sub reached_by
{
	my ($at, $node, $dsn, $what) = @_;
	my $name = $node->name;
	return becomes($at, qq[
		select string_agg(distinct c.dsn, ' | ') from braid.connection c
		 where exists (select from braid.group_member m where m.node_name = '$name' and m.connection_id = c.connection_id)
		    or exists (select from braid.node n where n.node_name = '$name' and n.connection_id = c.connection_id)
		    or exists (select from braid.subscription s where s.provider_name = '$name' and s.connection_id = c.connection_id)], $dsn, $what);
}
sub goes_on
{
	my ($what, @all) = @_;
	joined(@all);
	sql($_, "insert into item (v) values ('$what')") for @all;
	have_all(@all);
	same_tables(\@all, 'item');
	return;
}

sql($tokyo, 'create table item (id serial primary key, v text)');
sql($tokyo, q[select braid.create_group('shop', node_name => 'tokyo', dsn => '] . dsn_of($tokyo) . q[')]);
sql($paris, "select braid.join_group('" . dsn_of($tokyo) . "', node_name => 'paris', dsn => '" . dsn_of($paris) . "')");
goes_on('two nodes', $tokyo, $paris);

# One of two moves: neither has a majority until the other one knows its new address.
my $before = dsn_of($paris);
my $new = moved($paris);
# Messages of paris come as before.
ok($tokyo->poll_query_until('postgres', q[select message ~ '^messages come from it, but none reaches it: .*(refused|closed|lost)' and hint ~ 'call braid.alter_node' from braid.group_nodes where name = 'paris']),
	'tokyo has lost paris, and says why') or diag(sql($tokyo, 'table braid.group_nodes'));
ok($tokyo->poll_query_until('postgres', q[select count(*) = 0 from braid.group_nodes where leads]), 'nobody leads');
sql($tokyo, q[insert into item (v) values ('while paris has moved')]);

# What is refused, with nothing changed.
like(alter($tokyo, $paris, $before), qr/ERROR:  could not connect to node "paris" by the connection string in dsn\n.*HINT:  Check that it is right/s, 'its old address');
like(alter($tokyo, $paris, dsn_of($tokyo)), qr/does not lead to node "paris"\n.*DETAIL:  It leads to this node itself\.\n.*HINT/s, 'an address of the caller');
like(alter($tokyo, $paris, dsn_of($oslo)), qr/does not lead to node "paris"\n.*It leads to database "postgres", which is not a node\./s, 'a database that is not a node');
sql($oslo, q[create database other]);
like(alter($tokyo, $paris, dsn_of($oslo) =~ s/dbname=postgres/dbname=other/r), qr/database "other", which does not have extension braid/, 'a database without Braid');
sql($oslo, q[select braid.create_node('oslo', 'dbname=nowhere')]);
like(alter($tokyo, $paris, dsn_of($oslo)), qr/does not lead to node "paris"\n.*It leads to node "oslo"\./s, 'another node');
sql($oslo, q[select braid.drop_node('oslo')]);
like(alter($tokyo, $paris, 'hots=paris'), qr/connection string is malformed/, 'a malformed string');
like(alter($tokyo, $oslo, $new), qr/group "shop" has no node "oslo"/, 'no member');
like(refusal($tokyo, 'select braid.alter_node(null, null)'), qr/node_name must not be null/, 'no name');
like(refusal($tokyo, q[select braid.alter_node('paris', null)]), qr/dsn must not be null/, 'no string');
like(refusal($tokyo, "set role braid_admin; select braid.alter_node('paris', '$new')"), qr/permission denied/, 'a role that may not');
reached_by($tokyo, $paris, $before, 'nothing was changed');

agreed($tokyo, $paris, $new, 'tokyo learns the new address');
reached_by($_, $paris, $new, $_->name . ' uses it everywhere') for $tokyo, $paris;
is(sql($tokyo, q[select kind || ': ' || subject || ': ' || result from braid.group_log order by log_index desc limit 1]), 'set connection: paris: done', 'the group has agreed on it');
goes_on('paris has moved', $tokyo, $paris);
is(sql($tokyo, "select count(*) from braid.connection where dsn = '$before'"), '0', 'the old string is forgotten');
is(sql($tokyo, q[select coalesce(message, 'none') from braid.group_nodes where name = 'paris']), 'none', 'paris can be reached');

# A third node that moves says so itself: the others can't reach it, and it hears nothing of them.
sql($oslo, "select braid.join_group('" . dsn_of($tokyo) . "', node_name => 'oslo', dsn => '" . dsn_of($oslo) . "')");
goes_on('three nodes', $tokyo, $paris, $oslo);
# A subscription by hand has a string of its own.
my $own = dsn_of($oslo) . ' application_name=mine';
sql($paris, "select braid.alter_subscription('paris_from_oslo', dsn => '$own')");
$before = dsn_of($oslo);
$new = moved($oslo);
becomes($tokyo, q[select message ~ 'none reaches it' from braid.group_nodes where name = 'oslo'], 't', 'tokyo has lost oslo');
like(alter($oslo, $oslo, $before), qr/could not connect|could not have the group agree/, 'its old address leads nowhere');
like(alter($oslo, $oslo, dsn_of($tokyo)), qr/does not lead to this database/, 'the address of another one');
agreed($oslo, $oslo, $new, 'oslo says where it is');
becomes($_, q[select c.dsn = '] . $new . q[' from braid.group_member m join braid.connection c using (connection_id) where m.node_name = 'oslo'], 't', $_->name . ' knows it') for $tokyo, $paris, $oslo;
is(sql($paris, q[select c.dsn from braid.subscription s join braid.connection c using (connection_id) where s.provider_name = 'oslo']), $own, 'a string of its own stays');
sql($paris, "select braid.alter_subscription('paris_from_oslo', dsn => '$new')");
goes_on('oslo has moved', $tokyo, $paris, $oslo);

# All move at once. Each call gives one node a way to another one; with the last one all agree.
my %at = map { $_->name => moved($_) } $tokyo, $paris, $oslo;
becomes($_, q[select message like 'no majority%' from braid.group_nodes where is_local], 't', $_->name . ' is alone') for $tokyo, $paris, $oslo;
like(alter($tokyo, $paris, $at{paris}), qr/ERROR:  the group has not agreed in time\n.*DETAIL:  .*HINT:  /s, 'one way is no majority');
agreed($paris, $tokyo, $at{tokyo}, 'both ways are one');
agreed($tokyo, $paris, $at{paris}, 'and the first call goes well');
agreed($tokyo, $oslo, $at{oslo}, 'the third one is reached');
# It has no way to the others, so it can't confirm what comes: it needs one, too.
becomes($oslo, q[select hint ~ 'braid.alter_node' from braid.group_nodes where name = 'tokyo'], 't', 'it says what to do');
agreed($oslo, $tokyo, $at{tokyo}, 'and has a way to one of them');
goes_on('all have moved', $tokyo, $paris, $oslo);
for my $at ($tokyo, $paris, $oslo)
{
	reached_by($at, $_, $at{ $_->name }, $at->name . ' reaches ' . $_->name . ' at its new address') for $tokyo, $paris, $oslo;
}
# After a restart each goes by what is stored.
$_->restart for $tokyo, $paris, $oslo;
goes_on('after a restart', $tokyo, $paris, $oslo);

$_->stop for @old, values %proxy;
done_testing();
