# The agreement of a member fails, again and again: what it has stored does not fit the group's log.
# The member gives its membership up and says so. Its data is replicated as ever. Somebody can have
# it try again, and so does a start of its server.

use strict;
use warnings;

use Braid;
use Group;
use PostgreSQL::Test::Utils;
use Test::More;

my %node = map { $_->name => $_ } my @all = group([qw(tokyo paris oslo)], 'create table item (id serial primary key, v text)');
my $leads = q[select name from braid.group_nodes where leads];

# The log gets an entry with which a later term begins.
my $first = $node{ sql($all[0], $leads) };
$first->stop('immediate');
my ($second, $third) = grep { $_ != $first } @all;
ok($second->poll_query_until('postgres', "select count(*) = 1 from braid.group_nodes where leads and name <> '" . $first->name . "'"), 'another one leads');
restart_crashed($first);
joined(@all);
my $leader = $node{ sql($first, $leads) };
my ($broken, $other) = grep { $_ != $leader } @all;
my $name = $broken->name;
sql($leader, q[select braid.set_read_only(false)]);
ok($broken->poll_query_until('postgres', q[select count(*) > 0 from braid.group_log where kind = 'set read only']), 'all have the log');

my $offset;
# Changes what the member has stored, and has its group worker start with that.
sub damage
{
	my ($sql) = @_;
	$offset = -s $broken->logfile;
	my ($pid) = worker_pids($broken, 'braid group');
	sql($broken, "$sql; select pg_terminate_backend($pid)");
	sql($leader, 'select braid.set_read_only(false)');
	return;
}
sub gives_up
{
	my ($like, $what) = @_;
	ok($broken->poll_query_until('postgres', q[select state = 'stopped' from braid.group_nodes where is_local]), "$what: the member stops")
	  or diag(sql($broken, 'select state, message from braid.group_nodes'));
	like(sql($broken, q[select message || E'\n' || hint from braid.group_nodes where is_local]),
		qr/^this node takes no part in the group: $like.*\nData is replicated as ever\. Call braid\.retry_membership\(\), or restart the server, to try again\..*braid\.forget_group\(\)/, "$what: it says why, and what to do");
	my ($before) = wait_for_worker($broken, 'braid group', 60);
	like(refusal($broken, q[select braid.set_read_only(false)]), qr/ERROR:  this node takes no part in the group: $like.*HINT:  .*braid\.retry_membership/s, "$what: calls say so");
	like(refusal($broken, q[select braid.wait_for_group('180 s')]), qr/ERROR:  this node takes no part in the group: $like/, "$what: and so does waiting");
	sql($_, "insert into item (v) values ('$what')") for @all;
	have_all(@all);
	same_tables(\@all, 'item');
	my @now = worker_pids($broken, 'braid group');
	is("@now", $before, "$what: no process starts again and again");
	my @failures = slurp_file($broken->logfile, $offset) =~ /LOG:  braid group: (?:the group's agreement failed|what is stored)/g;
	is(scalar(@failures), 3, "$what: it was tried three times");
	is(sql($leader, q[select count(*) from braid.group_nodes where leads]), '1', "$what: the others go on");
	ok($leader->poll_query_until('postgres', "select message ~ '^no message since .*: it takes messages of this node, but none comes from it\$' from braid.group_nodes where name = '$name'"),
		"$what: and say what they see");
	return;
}
sub takes_part
{
	my ($what) = @_;
	ok($broken->poll_query_until('postgres', q[select state = 'active' and exists (select from braid.group_nodes where leads) from braid.group_nodes where is_local]), "$what: it takes part again");
	joined(@all);
	is(refusal($broken, q[select braid.set_read_only(false)]), 'no error: ', "$what: it has the group agree");
	return;
}
like(refusal($broken, 'select braid.retry_membership()'), qr/was not given up for failures\nHINT/, 'nothing is to be tried again');
like(refusal($broken, 'set role braid_admin; select braid.retry_membership()'), qr/permission denied to change the group/, 'a role that may not');

sql($broken, q[set braid.ddl_replication = off; create unlogged table changed as select max(log_index) - 1 as at from braid.group_entry]);

# An entry is missing.
sql($broken, q[set braid.ddl_replication = off; create unlogged table lost as select * from braid.group_entry where log_index = (select at from changed)]);
damage(q[delete from braid.group_entry where log_index = (select at from changed)]);
gives_up('what is stored of the group is damaged: an entry is missing', 'damage');
$offset = -s $broken->logfile;
sql($broken, 'select braid.retry_membership()');
ok($broken->poll_query_until('postgres', q[select stopped is not null from braid.group_self]), 'tried again, it fails again');
gives_up('what is stored of the group is damaged: an entry is missing', 'another time');
sql($broken, q[insert into braid.group_entry select * from lost]);
sql($broken, 'select braid.retry_membership()');
takes_part('mended, after a call');
damage(q[delete from braid.group_entry where log_index = (select at from changed)]);
gives_up('what is stored of the group is damaged: an entry is missing', 'once more');
sql($broken, q[insert into braid.group_entry select * from lost]);
$broken->restart;
takes_part('mended, after a restart');

# It is not mended: the others remove it, and it forgets the group.
damage(q[delete from braid.group_entry where log_index = (select at from changed)]);
gives_up('what is stored of the group is damaged: an entry is missing', 'for good');
sql($leader, "select braid.remove_node('$name')");
is(refusal($broken, 'select braid.forget_group()'), 'no error: ', 'it forgets the group');
sql($broken, 'select braid.drop_subscription(name, drop_slot => false) from braid.subscription_status');
joined($leader, $other);
is(sql($leader, q[select count(*) from braid.group_nodes]), '2', 'two members go on');

done_testing();
