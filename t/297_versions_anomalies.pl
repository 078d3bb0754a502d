# The anomalies of isolation levels that Hermitage lists, each between transactions at different
# nodes. Every outcome must be one of a serial order, and none of the transactions fails.

use strict;
use warnings;

use Braid;
use Group;
use Session;
use Test::More;

my @both = my ($tokyo, $paris) = group([qw(tokyo paris)], 'create table one (id int primary key, value int not null); create table two (id int primary key, value int not null)',
	conf => 'braid.version_timeout = 120s');
sql($tokyo, "select braid.version_table('$_')") for qw(one two);
ok($_->poll_query_until('postgres', q[select count(*) = 2 from braid.versioned_table where phase = 1]), $_->name . ' knows the tables') for @both;

sub versioned { my ($node, $versions, $sql) = @_; return sql($node, "begin isolation level repeatable read; set local braid.versions = '$versions'; $sql; commit"); }

# Runs the steps in their order: a transaction's name, and its statement. A transaction that waits
# does the rest of its statements once it goes on. Returns what each has read, by its name.
sub interleaved
{
	my ($label, $declared, @steps) = @_;
	versioned($tokyo, 'write one, write two', 'delete from one; delete from two; insert into one values (1, 10); insert into two values (1, 20)');
	have_all(@both);
	my (%session, %todo, %read, %waits);
	my $finish = sub {
		my ($name) = @_;
		my ($failed, $out, $err) = Session::answer($session{$name}, '', 1);
		is($err, '', "$label: $name does not fail");
		push @{ $read{$name} }, split /\n/, $out;
		$waits{$name} = 0;
		return;
	};
	my $do = sub {
		my ($name, $sql) = @_;
		Session::ask($session{$name}, $sql);
		# What needs no other transaction is answered at once, as a rule; the order of the rest
		# makes no difference to what is right.
		$waits{$name} = 1;
		wait_until(sub { !IO::Select->new($session{$name}{socket})->can_read(0) ? 0 : 1 }, 1) and $finish->($name);
		return;
	};
	# Tokyo, paris, tokyo.
	for my $name (sort keys %$declared)
	{
		$session{$name} = Session::connect_to($name eq 'T2' ? $paris : $tokyo, 'postgres') or die 'no connection';
	}
	my $go_on = sub {
		for my $name (sort keys %todo)
		{
			while (@{ $todo{$name} })
			{
				if ($waits{$name})
				{
					last if !IO::Select->new($session{$name}{socket})->can_read(0);
					$finish->($name);
				}
				$do->($name, shift @{ $todo{$name} });
			}
		}
		return;
	};
	while (my ($name, $sql) = splice @steps, 0, 2)
	{
		push @{ $todo{$name} }, "begin isolation level repeatable read; set local braid.versions = '$declared->{$name}'" if !$todo{$name};
		push @{ $todo{$name} }, $sql;
		$go_on->();
	}
	ok(wait_until(sub { $go_on->(); return !grep { @{ $todo{$_} } } keys %todo }, 120), "$label: all go on");
	for my $name (grep { $waits{$_} } sort keys %waits) { $finish->($name); }
	have_all(@both);
	$read{$_} = join ' ', @{ $read{$_} // [] } for keys %todo;
	$read{end} = sql($tokyo, 'select (select string_agg(value::text, $$,$$ order by id) from one) || $$ $$ || (select string_agg(value::text, $$,$$ order by id) from two)');
	same_tables(\@both, qw(one two));
	return %read;
}

# The outcome must be one of these: what each transaction has read, and the rows at the end.
sub is_serial
{
	my ($label, $read, @orders) = @_;
	my $seen = join '; ', map { "$_: $read->{$_}" } sort keys %$read;
	ok((grep { $_ eq $seen } @orders), "$label: as in a serial order") or diag("seen: $seen\nserial: ", join "\n        ", @orders);
	return;
}
my %write = (T1 => 'write one, write two', T2 => 'write one, write two');
my ($first, $second) = ('select value from one where id = 1', 'select value from two where id = 1');
sub set { my ($table, $value) = @_; return "update $table set value = $value where id = 1"; }

my %read = interleaved('dirty writes (G0)', \%write,
	T1 => set('one', 11), T2 => set('one', 12), T1 => set('two', 21), T1 => 'commit', T2 => set('two', 22), T2 => 'commit');
is_serial('dirty writes (G0)', \%read, 'T1: ; T2: ; end: 12 22', 'T1: ; T2: ; end: 11 21');

%read = interleaved('aborted reads (G1a)', { T1 => 'write one', T2 => 'read one' },
	T1 => set('one', 101), T2 => $first, T1 => 'rollback', T2 => $first, T2 => 'commit');
is_serial('aborted reads (G1a)', \%read, 'T1: ; T2: 10 10; end: 10 20');

%read = interleaved('intermediate reads (G1b)', { T1 => 'write one', T2 => 'read one' },
	T1 => set('one', 101), T2 => $first, T1 => set('one', 11), T1 => 'commit', T2 => $first, T2 => 'commit');
is_serial('intermediate reads (G1b)', \%read, 'T1: ; T2: 11 11; end: 11 20', 'T1: ; T2: 10 10; end: 11 20');

%read = interleaved('circular flow (G1c)', { T1 => 'write one, read two', T2 => 'read one, write two' },
	T1 => set('one', 11), T2 => set('two', 22), T1 => $second, T2 => $first, T1 => 'commit', T2 => 'commit');
is_serial('circular flow (G1c)', \%read, 'T1: 20; T2: 11; end: 11 22', 'T1: 22; T2: 10; end: 11 22');

%read = interleaved('observed transaction vanishes (OTV)', { %write, T3 => 'read one, read two' },
	T1 => set('one', 11), T1 => set('two', 19), T2 => set('one', 12), T1 => 'commit', T3 => $first, T2 => set('two', 18), T3 => $second, T2 => 'commit', T3 => $second, T3 => $first, T3 => 'commit');
my @otv = map { my $end = $_; map { "T1: ; T2: ; T3: $_; end: $end" } '10 20 20 10', '11 19 19 11', '12 18 18 12' } '12 18', '11 19';
is_serial('observed transaction vanishes (OTV)', \%read, @otv);

%read = interleaved('predicate-many-preceders (PMP)', { T1 => 'read one', T2 => 'write one' },
	T1 => 'select count(*) from one where value = 30', T2 => 'insert into one values (2, 30)', T2 => 'commit', T1 => 'select count(*) from one where value % 3 = 0', T1 => 'commit');
is_serial('predicate-many-preceders (PMP)', \%read, 'T1: 0 0; T2: ; end: 10,30 20', 'T1: 1 1; T2: ; end: 10,30 20');

%read = interleaved('lost update (P4)', { T1 => 'write one', T2 => 'write one' },
	T1 => $first, T2 => $first, T1 => set('one', 'value + 1'), T2 => set('one', 'value + 1'), T1 => 'commit', T2 => 'commit');
is_serial('lost update (P4)', \%read, 'T1: 10; T2: 11; end: 12 20', 'T1: 11; T2: 10; end: 12 20');

%read = interleaved('read skew (G-single)', { T1 => 'read one, read two', T2 => 'write one, write two' },
	T1 => $first, T2 => $first, T2 => $second, T2 => set('one', 12), T2 => set('two', 18), T2 => 'commit', T1 => $second, T1 => 'commit');
is_serial('read skew (G-single)', \%read, 'T1: 10 20; T2: 10 20; end: 12 18', 'T1: 12 18; T2: 10 20; end: 12 18');

%read = interleaved('read skew with a write (G-single)', { T1 => 'read one, write two', T2 => 'write one, write two' },
	T1 => $first, T2 => set('one', 12), T2 => set('two', 18), T2 => 'commit', T1 => 'delete from two where value = 20 returning value', T1 => 'commit');
is_serial('read skew with a write (G-single)', \%read, 'T1: 10 20; T2: ; end: ', 'T1: 12; T2: ; end: 12 18');

%read = interleaved('write skew (G2-item)', { T1 => 'write one, read two', T2 => 'read one, write two' },
	T1 => $first, T1 => $second, T2 => $first, T2 => $second, T1 => set('one', 11), T2 => set('two', 21), T1 => 'commit', T2 => 'commit');
is_serial('write skew (G2-item)', \%read, 'T1: 10 20; T2: 11 20; end: 11 21', 'T1: 10 21; T2: 10 20; end: 11 21');

%read = interleaved('anti-dependency cycle (G2)', { T1 => 'write one', T2 => 'write one' },
	T1 => 'select count(*) from one where value % 3 = 0', T2 => 'select count(*) from one where value % 3 = 0',
	T1 => 'insert into one values (3, 30)', T2 => 'insert into one values (4, 42)', T1 => 'commit', T2 => 'commit');
is_serial('anti-dependency cycle (G2)', \%read, 'T1: 0; T2: 1; end: 10,30,42 20', 'T1: 1; T2: 0; end: 10,30,42 20');

%read = interleaved('long fork', { T1 => 'write one', T2 => 'write two', T3 => 'read one, read two' },
	T1 => set('one', 11), T2 => set('two', 21), T2 => 'commit', T3 => $first, T1 => 'commit', T3 => $second, T3 => 'commit');
is_serial('long fork', \%read, map { "T1: ; T2: ; T3: $_; end: 11 21" } '10 20', '11 20', '10 21', '11 21');
done_testing();
