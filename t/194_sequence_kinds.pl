# Kinds of sequences in a group: steps, both kinds of values that contain a time, values that follow
# those of other nodes, and sequences that are not shared. Refused settings. Values that contain a
# time rise through clocks that step back, kills and restarts.

use strict;
use warnings;

use Braid;
use FakeClock;
use PostgreSQL::Test::Utils;
use Test::More;

sub sql { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
sub refusal
{
	my ($node, $sql) = @_;
	my ($status, $out, $err) = $node->psql('postgres', "\\set VERBOSITY verbose\n$sql");
	return $status == 0 ? "no error: $out" : $err;
}
sub dsn { my ($node) = @_; return $node->connstr('postgres'); }
sub empty_server { my ($name) = @_; my $node = new_server($name, init => ['--data-checksums']); sql($node, 'create extension braid'); return $node; }
sub caught_up_all
{
	my (@all) = @_;
	for my $node (@all)
	{
		for my $other (grep { $_ != $node } @all)
		{
			my $position = sql($other, 'select braid.sync_event()');
			sql($node, "select braid.wait_for_event('" . $other->name . "', '$position', '180 s')");
		}
	}
	return;
}
sub sees
{
	my ($node, $sequence, $condition, $what) = @_;
	ok($node->poll_query_until('postgres', "select coalesce((select $condition from braid.sequences where sequence = to_regclass('$sequence')), false)"), $node->name . ": $what")
	  or diag(sql($node, 'table braid.sequences') . "\n" . sql($node, 'table braid.sequence'));
	return;
}

my $clock = FakeClock->new;
my $tokyo = $clock ? $clock->over(sub { empty_server('tokyo') }) : empty_server('tokyo');
my ($paris, $oslo) = map { empty_server($_) } qw(paris oslo);
sql($tokyo, 'create table item (id bigserial primary key, v text); create table plain (id serial primary key, v text); create table fixed (id bigint generated always as identity primary key)');
like(refusal($tokyo, q{select braid.set_sequence('item_id_seq', 'range')}), qr/not a member of a group.*HINT/s, 'outside of a group');
like(refusal($tokyo, q{select braid.snowflake('item_id_seq')}), qr/55000.*no node number.*HINT/s, 'no values without a node number');
sql($tokyo, "select braid.create_group('shop', node_name => 'tokyo', dsn => \$d\$" . dsn($tokyo) . "\$d\$); ");
sql($tokyo, q{select braid.wait_for_group('180 s')});
for my $node ($paris, $oslo)
{
	my ($there, $here) = (dsn($tokyo), dsn($node));
	sql($node, "select braid.join_group(\$d\$$there\$d\$, node_name => '" . $node->name . "', dsn => \$d\$$here\$d\$)");
	sql($node, q{select braid.wait_for_group('180 s')});
}
my @all = ($tokyo, $paris, $oslo);
sql($_, q{select braid.wait_for_group('180 s')}) for @all;

# Refused calls.
like(refusal($tokyo, q{select braid.set_sequence('item_id_seq', 'wild')}), qr/22023.*unknown kind "wild".*HINT/s, 'no such kind');
like(refusal($tokyo, q{select braid.set_sequence('item_id_seq', 'local', 5)}), qr/22023.*local has no size.*HINT/s, 'a size of a kind that has none');
like(refusal($tokyo, q{select braid.set_sequence('item_id_seq', 'range', 0)}), qr/22023.*out of range.*HINT/s, 'a size that is none');
like(refusal($tokyo, q{select braid.set_sequence('item', 'range')}), qr/42809.*is not a sequence.*HINT/s, 'a table');
like(refusal($tokyo, q{select braid.set_sequence('fixed_id_seq', 'snowflake')}), qr/55000.*identity column.*HINT.*DROP IDENTITY/s, 'an identity column');
like(refusal($tokyo, q{select braid.set_sequence('plain_id_seq', 'snowflake53')}), qr/55000.*not of type bigint.*HINT/s, 'a column that is too narrow');
like(refusal($tokyo, q{select braid.set_sequence('item_id_seq', 'step', 2)}), qr/55000.*number 3.*room for 2.*HINT/s, 'steps that are too small');
like(refusal($tokyo, q{select braid.set_sequence_default('snowflake')}), qr/22023.*HINT/s, 'a default that needs a column');
like(refusal($tokyo, q{alter sequence item_id_seq no maxvalue}), qr/55000.*keeps to numbers of this node.*HINT/s, 'bounds stay');
like(refusal($tokyo, q{alter table fixed alter column id set increment by 5}), qr/55000.*keeps to numbers of this node.*HINT/s, 'of an identity column, too');
sql($tokyo, q{create role someone; grant braid_admin to someone});
like(refusal($tokyo, q{set role someone; select braid.set_sequence('item_id_seq', 'range')}), qr/42501.*HINT/s, 'not a superuser');
# The next value of a sequence stays on its node.
sql($paris, 'insert into plain (v) values (1), (2); delete from plain; alter sequence plain_id_seq restart; insert into plain (v) values (3)');
is(sql($paris, 'select id from plain'), '20000001', 'RESTART begins the block anew');
caught_up_all(@all);
becomes($_, q{select count(*) from braid.subscription_status where state <> 'streaming'}, '0', 'and stops nobody: ' . $_->name) for @all;

# Steps.
sql($_, 'insert into item (v) select 1 from generate_series(1, 10)') for @all;
sql($tokyo, q{select braid.set_sequence('item_id_seq', 'step', 8)});
sees($_, 'item_id_seq', "kind = 'step' and state = 'ready'", 'is in steps') for @all;
sql($_, 'insert into item (v) select 1 from generate_series(1, 100)') for @all;
caught_up_all(@all);
is(sql($_, 'select count(*), count(distinct id) from item'), '330|330', 'no value twice: ' . $_->name) for @all;
is(sql($tokyo, q{select string_agg(distinct (id % 8)::text, ',') from item where id > 3000000000}), '1,2,3', 'each node has steps of its own');
is(sql($tokyo, q{select increment_by from pg_sequences where sequencename = 'item_id_seq'}), '8', 'nextval is native');

# The default of what is created.
sql($oslo, q{select braid.set_sequence_default('step')});
ok($paris->poll_query_until('postgres', q{select exists (select from braid.group_option where value = 'step')}), 'the default is known');
sql($paris, 'create table stepping (id serial primary key)');
caught_up_all(@all);
sql($_, 'insert into stepping select from generate_series(1, 50)') for @all;
caught_up_all(@all);
is(sql($_, 'select count(*), min(id), max(id) from stepping'), '150|1|3139', 'created in steps of 64: ' . $_->name) for @all;
sql($tokyo, q{select braid.set_sequence_default('range')});

# Back to blocks, beyond all that was used.
sql($paris, q{select braid.set_sequence('item_id_seq', 'range')});
sees($_, 'item_id_seq', "kind = 'range' and state = 'ready'", 'has blocks again') for @all;
sql($_, 'insert into item (v) select 1 from generate_series(1, 100)') for @all;
caught_up_all(@all);
is(sql($_, 'select count(*), count(distinct id) from item'), '630|630', 'no value twice: ' . $_->name) for @all;

# A type that is made larger has more numbers.
sql($tokyo, 'alter table plain alter column id type bigint; alter sequence plain_id_seq as bigint');
caught_up_all(@all);
sql($tokyo, q{select braid.set_sequence('plain_id_seq', 'range')});
sees($_, 'plain_id_seq', 'block_to - block_from = 999999999', 'blocks of the larger type') for @all;

# Values that hold a time.
sql($_, 'create role writer login') for @all;
for my $case ([ 'snowflake', 'wide' ], [ 'snowflake53', 'safe' ])
{
	my ($kind, $table) = @$case;
	sql($paris, "create table $table (id bigserial primary key, node text)");
	caught_up_all(@all);
	sql($paris, "select braid.set_sequence('${table}_id_seq', '$kind')");
	caught_up_all(@all);
	sees($_, "${table}_id_seq", "kind = '$kind' and state = 'ready'", "is $kind") for @all;
	is(sql($_, "select pg_get_expr(adbin, adrelid) from pg_attrdef where adrelid = '$table'::regclass"), "braid.$kind('${table}_id_seq'::regclass)", 'the default draws by the function on ' . $_->name) for @all;
	sql($paris, "grant insert on $table to writer; grant usage on sequence ${table}_id_seq to writer");
	caught_up_all(@all);
	sql($_, "set role writer; insert into $table (node) select '" . $_->name . "' from generate_series(1, 5000)") for @all;
	caught_up_all(@all);
	is(sql($_, "select count(*), count(distinct id) from $table"), '15000|15000', 'no value twice: ' . $_->name) for @all;
	is(sql($tokyo, "select string_agg(distinct node || ' ' || braid.${kind}_node(id), ',') from $table"), 'oslo 3,paris 2,tokyo 1', 'a value tells its node');
	is(sql($tokyo, "select bool_and(abs(extract(epoch from braid.${kind}_time(id) - now())) < 60) from $table"), 't', 'and its time');
	is(sql($tokyo, "select max(id) < 2 ^ 53 from $table"), 't', 'a double holds it') if $kind eq 'snowflake53';
	sql($paris, "revoke usage on sequence ${table}_id_seq from writer");
	like(refusal($paris, "set role writer; insert into $table (node) values ('x')"), qr/42501.*permission denied for sequence.*HINT/s, 'not without USAGE');
	sql($tokyo, "create unlogged table sample_$table (at bigserial, v bigint)");
	my $last = 0;
	for my $round (1 .. 4)
	{
		my ($least, $most) = split /\|/, sql($tokyo, "select min(v), max(v) from (select braid.$kind('${table}_id_seq') as v from generate_series(1, 3000)) s");
		cmp_ok($least, '>', $last, "$kind rises in round $round");
		$last = $most;
		# pg_ctl takes a server for started only if its clock is right.
		$clock->set(0) if $clock;
		if ($round < 3)
		{
			$round % 2 ? $tokyo->stop('immediate') : $tokyo->stop('fast');
			$clock ? $clock->over(sub { $tokyo->start }) : $tokyo->start;
		}
		$clock->set(-30 * $round) if $clock;
	}
	$clock->set(0) if $clock;
	sql($tokyo, "drop table sample_$table");
}
# A sequence goes back to native values: those are beyond the ones that were used natively.
sql($paris, q{select braid.set_sequence('wide_id_seq', 'local')});
is(sql($paris, q{select pg_get_expr(adbin, adrelid) from pg_attrdef where adrelid = 'wide'::regclass}), q{nextval('wide_id_seq'::regclass)}, 'the default is native again');

# The agreement about a dropped sequence does not count for the next one of its name.
sql($oslo, 'drop table safe');
caught_up_all(@all);
sql($paris, 'create table safe (id bigserial primary key, node text)');
caught_up_all(@all);
sees($_, 'safe_id_seq', "kind = 'range'", 'its sequence has the kind of new ones') for @all;
sql($_, "insert into safe (node) select '" . $_->name . "' from generate_series(1, 50)") for @all;
caught_up_all(@all);
is(sql($_, 'select count(*), count(distinct id) from safe'), '150|150', 'a table that is made anew: ' . $_->name) for @all;

# Values travel in the stream, and are ahead after a failover.
sql($tokyo, 'create sequence invoice');
ok($_->poll_query_until('postgres', q{select exists (select from braid.sequences where sequence = to_regclass('invoice'))}), 'known to ' . $_->name) for @all;
sql($tokyo, q{select braid.set_sequence('invoice', 'follow')});
sees($_, 'invoice', "kind = 'follow' and state = 'ready'", 'follows') for @all;
my $used = sql($tokyo, q{select max(v) from (select nextval('invoice') as v from generate_series(1, 5000)) s});
ok($_->poll_query_until('postgres', "select coalesce(pg_sequence_last_value('invoice') >= $used, false)"), 'has come to ' . $_->name) for $paris, $oslo;
$used = sql($tokyo, q{select nextval('invoice')});
$tokyo->stop('immediate');
cmp_ok(sql($paris, q{select nextval('invoice')}), '>', $used, 'the next node goes on ahead of it');
my $there = sql($paris, q{select nextval('invoice')});
$clock ? $clock->over(sub { $tokyo->start }) : $tokyo->start;
ok($tokyo->poll_query_until('postgres', "select pg_sequence_last_value('invoice') >= $there"), 'the first one follows when it is back');
my $settled = sql($tokyo, q{select last_value from invoice});
# Values of another sequence go to paris and back again. Both are reported in the order in which
# they are used.
sql($tokyo, 'create sequence marker');
ok($_->poll_query_until('postgres', q{select exists (select from braid.sequences where sequence = to_regclass('marker'))}), 'the marker is known to ' . $_->name) for @all;
sql($tokyo, q{select braid.set_sequence('marker', 'follow')});
sees($_, 'marker', "kind = 'follow' and state = 'ready'", 'follows the marker') for @all;
for my $way ([ $tokyo, $paris ], [ $paris, $tokyo ])
{
	my ($from, $to) = @$way;
	my $at = sql($from, q{select max(v) from (select nextval('marker') as v from generate_series(1, 5000)) s});
	ok($to->poll_query_until('postgres', "select coalesce(pg_sequence_last_value('marker') >= $at, false)"), 'the marker has come to ' . $to->name);
}
is(sql($tokyo, q{select last_value from invoice}), $settled, 'nobody follows himself');

# A transaction that has drawn keeps a sequence from following for as long as it lasts, and no
# longer.
my $holder = $tokyo->background_psql('postgres');
$holder->query_safe(q{begin; select nextval('invoice')});
$there = sql($paris, q{select max(v) from (select nextval('invoice') as v from generate_series(1, 50000)) s});
sees($tokyo, 'invoice', "state = 'waits'", 'waits for the transaction');
cmp_ok(sql($tokyo, q{select last_value from invoice}), '<', $there, 'and stays until then');
$holder->query_safe('commit');
$holder->quit;
sees($tokyo, 'invoice', "state = 'ready'", 'has followed');
cmp_ok(sql($tokyo, q{select nextval('invoice')}), '>', $there, 'goes on after the transaction');

# Values may come before the statement that creates the sequence.
sql($tokyo, q{select braid.set_sequence_default('follow')});
ok($_->poll_query_until('postgres', q{select exists (select from braid.group_option where value = 'follow' and option_name = 'sequence_kind')}), 'the default is known to ' . $_->name) for $tokyo, $paris;
sql($oslo, q{select braid.disable_subscription('oslo_from_tokyo')});
ok($tokyo->poll_query_until('postgres', q{select not exists (select from pg_stat_replication where application_name = 'oslo_from_tokyo')}), 'oslo does not read from tokyo');
sql($tokyo, 'create sequence late');
sees($paris, 'late', "kind = 'follow' and state = 'ready'", 'follows');
$there = sql($paris, q{select max(v) from (select nextval('late') as v from generate_series(1, 5000)) s});
ok($tokyo->poll_query_until('postgres', "select coalesce(pg_sequence_last_value('late') >= $there, false)"), 'has come to tokyo');
my $position = sql($paris, 'select braid.sync_event()');
sql($oslo, "select braid.wait_for_event('paris', '$position', '180 s')");
is(sql($oslo, q{select to_regclass('late') is null}), 't', 'which oslo does not have');
sql($oslo, q{select braid.enable_subscription('oslo_from_tokyo')});
sees($oslo, 'late', "kind = 'follow' and state = 'ready'", 'has it');
ok($oslo->poll_query_until('postgres', "select coalesce(pg_sequence_last_value('late') >= $there, false)"), 'which goes on after the values that came before');

done_testing();
