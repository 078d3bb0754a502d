# consolidate for transactions that are not joined: many changes of a row by one transaction become
# one, in every apply mode, for transactions of every size, with the same result.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo', conf => "logical_decoding_work_mem = 64kB\nmax_prepared_transactions = 5\n");
my $paris = new_node('paris', publication => '', conf => "braid.apply_buffer_size = 1MB\nmax_prepared_transactions = 5\n");
on_all(q[
	create table hot (k int primary key, n int not null, t text);
	create table two (k int primary key, u int unique, n int not null);
	create table fired (k int primary key, n int not null);
	create table seen (id bigserial primary key, k int, n int);
	create table filler (k int primary key, t text);
	create function see() returns trigger language plpgsql as $$ begin insert into public.seen (k, n) values (new.k, new.n); return new; end $$;
], $tokyo, $paris);
$paris->safe_psql('postgres', 'create trigger see after update on fired for each row execute function see(); alter table fired enable always trigger see');
my $name = subscribe($paris, $tokyo, two_phase => 'true');
my $session = $tokyo->background_psql('postgres', on_error_stop => 1);
sub at_tokyo { return $tokyo->safe_psql('postgres', $_[0]); }
sub at_paris { return $paris->safe_psql('postgres', $_[0]); }

# Runs statements at tokyo, or a function, and returns how much each counter has grown.
sub grown
{
	my ($what, @counters) = @_;
	my $look = sub {
		caught_up($paris, $tokyo);
		my $row = '';
		# A leader that has just been asked to start again has none.
		wait_until(sub { $row = at_paris('select ' . join(", ' ', ", @counters) =~ s/^/concat(/r . ") from braid.dependency_stats d join braid.subscription_detail s on s.name = d.subscription where s.name = '$name'"); $row ne '' }, 20);
		return split / /, $row;
	};
	my @before = $look->();
	ref $what ? $what->() : at_tokyo($what);
	my @after = $look->();
	return join ' ', map { "$counters[$_] " . ($after[$_] - $before[$_]) } 0 .. $#counters;
}

# So many updates of rows 1 to the other number, as one transaction.
sub updates
{
	my ($many, $rows, $table) = @_;
	return qq[do \$\$ begin for i in 1 .. $many loop update $table set n = n + 1 where k = 1 + i % $rows; end loop; end \$\$];
}

# The same in a transaction that runs until some of it is written here, if it is written before its
# end: its process has to start for that.
sub updates_that_run
{
	my ($is_written, @arguments) = @_;
	$session->query_safe('begin');
	$session->query_safe(updates(@arguments));
	ok(!$is_written || wait_until(sub { at_paris("select count(*) from pg_locks where relation = '$arguments[2]'::regclass and mode = 'RowExclusiveLock'") > 0 }, 30), 'it is written while it runs');
	$session->query_safe('commit');
	return;
}

# Any changes of few rows, of which some fail.
sub any
{
	my ($many) = @_;
	my $sql = q[do $$
		declare
			sql text[] := string_to_array('insert into hot values (K, 0, repeat(''x'', I));update hot set n = n + I where k = K;update hot set t = repeat(''y'', 3000) where k = K;
				update hot set k = k + 40 where k = K;update hot set k = k - 40 where k = K + 40;delete from hot where k = K;
				insert into two values (K, I, 0) on conflict do nothing;update two set u = -u where k = K;update two set n = n + I where k = K;delete from two where k = K;
				update fired set n = n + 1 where k = K;insert into filler values (I, ''z'') on conflict (k) do update set t = filler.t || ''z''', ';');
		begin
			for i in 1 .. MANY loop
				begin
					execute replace(replace(sql[1 + random() * (array_length(sql, 1) - 1)], 'K', (1 + random() * 9)::int::text), 'I', (random() * 100)::int::text);
				exception when unique_violation then null;
				end;
				if i % 97 = 0 then truncate filler; end if;
			end loop;
		end $$];
	return $sql =~ s/MANY/$many/r;
}

at_tokyo('insert into hot select k, 0 from generate_series(1, 10) k; insert into two select k, k, 0 from generate_series(1, 10) k; insert into fired select k, 0 from generate_series(1, 10) k');
my $fired = 0;
for my $mode ("apply_mode => 'serial'", "apply_mode => 'parallel'", "apply_mode => 'batch'", "apply_mode => 'aggregate'")
{
	at_paris("select braid.alter_subscription('$name', $mode, consolidate => false, streaming => 'off')");
	is(grown(updates(500, 5, 'hot'), 'consolidated', 'd.retries'), 'consolidated 0 d.retries 0', "$mode, without") unless $mode =~ /aggregate/;
	at_paris("select braid.alter_subscription('$name', consolidate => true)");
	is(grown(updates(500, 5, 'hot'), 'consolidated', 's.updates', 'd.retries'), 'consolidated 495 s.updates 500 d.retries 0', "$mode: one change for each of 5 rows");
	is(grown('begin; ' . updates(500, 5, 'hot') . qq[; prepare transaction 'p'; commit prepared 'p'], 'consolidated', 's.updates', 'd.retries'), 'consolidated 495 s.updates 500 d.retries 0', "$mode: one that is prepared");
	# The local table alone decides whether changes of a row may become one: each change fires its
	# trigger, and may conflict with another row.
	is(grown(updates(300, 3, 'fired'), 'consolidated'), 'consolidated 0', "$mode: where a trigger sees them");
	$fired += 300;
	is(at_paris('select count(*) from seen'), $fired, 'each');
	is(grown(updates(300, 3, 'two'), 'consolidated'), 'consolidated 0', "$mode: where there is another unique index");
	# Larger than the buffer: what lies together in it.
	my ($large) = grown(updates(12_000, 10, 'hot'), 'consolidated', 'd.retries') =~ /^consolidated (\d+) d.retries 0$/;
	cmp_ok($large // 0, '>', 9_000, "$mode: of 12,000 changes that come while they are applied") or diag(at_paris("select last_failure from braid.subscription_detail where name = '$name'"));
	at_paris("select braid.alter_subscription('$name', streaming => 'on')");
	($large) = grown(updates(12_000, 10, 'hot'), 'consolidated', 'd.retries') =~ /^consolidated (\d+) d.retries 0$/;
	cmp_ok($large // 0, '>', 9_000, "$mode: that come in segments");
	at_paris("select braid.alter_subscription('$name', streaming => 'parallel')");
	# One after the other, none is.
	my $runs = $mode =~ /serial/ ? 0 : 1;
	($large) = grown(sub { updates_that_run($runs, 12_000, 10, 'hot') }, 'consolidated', 'd.retries', 'applied_while_running') =~ /^consolidated (\d+) d.retries 0 applied_while_running $runs$/;
	cmp_ok($large // 0, '>', 9_000, "$mode: that are applied while they run, if they are");
	at_paris("select braid.alter_subscription('$name', split_transactions_above => 700)");
	($large, my $pieces) = grown(updates(12_000, 10, 'hot'), 'consolidated', 'd.retries', 'pieces') =~ /^consolidated (\d+) d.retries 0 pieces (\d+)$/;
	cmp_ok($large // 0, '>', 9_000, "$mode: in pieces");
	is($pieces, 17, 'of 700 changes');
	same_tables([ $tokyo, $paris ], qw(hot two fired));
	at_tokyo('update fired set n = 0; truncate seen');
	for my $options ("split_transactions_above => 0, streaming => 'off'", "streaming => 'parallel'", "split_transactions_above => 33")
	{
		at_paris("select braid.alter_subscription('$name', $options)");
		at_tokyo(any($_)) for (20) x 10, (300) x 3, 1000;
		caught_up($paris, $tokyo);
		same_tables([ $tokyo, $paris ], qw(hot two fired filler));
	}
	at_paris("select braid.alter_subscription('$name', split_transactions_above => 0)");
	at_tokyo('truncate hot, two, filler; update fired set n = 0');
	at_tokyo('insert into hot select k, 0 from generate_series(1, 10) k; insert into two select k, k, 0 from generate_series(1, 10) k');
	caught_up($paris, $tokyo);
	$fired = at_paris('select count(*) from seen');
}

# A row with a version in between: each change conflicts with it and is recorded, and none has more
# values than it brought.
my %found;
for my $consolidate ('false', 'true')
{
	at_paris("select braid.alter_subscription('$name', apply_mode => 'parallel', consolidate => $consolidate)");
	at_tokyo('update hot set n = 0');
	caught_up($paris, $tokyo);
	at_paris("select braid.disable_subscription('$name')");
	at_tokyo(updates(20, 2, 'hot'));
	at_paris("update hot set n = -1, t = 'later' where k < 3");
	my $before = at_paris('select count(*) from braid.conflict_history');
	at_paris("select braid.enable_subscription('$name')");
	caught_up($paris, $tokyo);
	$found{$consolidate} = at_paris('select count(*) - ' . $before . q[ from braid.conflict_history]) . ' ' . at_paris('select k, n, t from hot where k < 3 order by k');
	at_paris("select braid.disable_subscription('$name')");
	at_tokyo('delete from hot where k < 3; insert into hot values (1, 0), (2, 0)');
	at_paris("select braid.enable_subscription('$name')");
	caught_up($paris, $tokyo);
	same_tables([ $tokyo, $paris ], 'hot');
}
is($found{true}, "20 1|-1|later\n2|-1|later", 'each change has lost');
is($found{true}, $found{false}, 'as without');
$session->quit;

done_testing();
