# The initial copy is interrupted half way, in several ways. It is made again by itself. Rows that
# are written meanwhile are neither lost nor doubled, also in a table without a key. The views show
# its progress.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
my $rows = 4000;
on_all(q[
	create table large (k int primary key, v text);
	create table loose (a int, b text);
	alter table loose replica identity full;
], $tokyo, $paris);
$tokyo->safe_psql('postgres', qq[
	insert into large select i, repeat('x', 500) from generate_series(1, $rows) i;
	insert into loose select i % 50, 'row' from generate_series(1, 500) i;
]);
sub at_paris { return $paris->safe_psql('postgres', $_[0]); }
# Half of the rows come, and then the copy waits for as long as a session holds the lock.
at_paris(qq[
	create function wait_at_gate() returns trigger language plpgsql as \$\$ begin
		if new.k = $rows / 2 then perform pg_advisory_xact_lock_shared(1); end if;
		return new;
	end \$\$;
	create trigger wait_at_gate before insert on large for each row execute function wait_at_gate();
	alter table large enable always trigger wait_at_gate;
]);
sub keep
{
	my $keeper = $paris->background_psql('postgres');
	$keeper->query_safe('begin; select pg_advisory_xact_lock(1)');
	return $keeper;
}
my $copies = q[select count(*) from pg_stat_activity where backend_type = 'braid copy' and wait_event_type = 'Lock'];
sub is_half_way { return wait_until(sub { my ($status, $n) = attempt($paris, $copies); $status == 0 && $n eq '1' }, 30); }

my $keeper = keep();
my $name = subscribe($paris, $tokyo, wait => 0);
my $number = 0;
my $write = sub {
	$number++;
	$tokyo->safe_psql('postgres', qq[
		insert into large values (@{[ $rows + $number ]}, 'written meanwhile');
		update large set v = 'changed $number' where k in ($number, $rows - $number);
		delete from large where k = @{[ $rows / 2 + $number ]};
		insert into loose values ($number, 'written meanwhile'), ($number, 'written meanwhile');
		update loose set b = 'changed' where ctid = (select min(ctid) from loose where a = $number);
		delete from loose where ctid = (select max(ctid) from loose where a = 20 + $number and b = 'row');
	]);
};
my @faults = (
	[ 'its process is asked to end', sub { kill 'TERM', worker_pids($paris, 'braid copy') } ],
	[ 'its process is killed', sub { kill_process($paris, worker_pids($paris, 'braid copy')) } ],
	[ 'the leader is asked to end', sub { kill 'TERM', worker_pids($paris, 'braid leader') } ],
	[ 'its walsender is ended', sub { $tokyo->safe_psql('postgres', q[select pg_terminate_backend(pid) from pg_stat_activity where application_name like '% copy']) } ],
	[ 'the subscriber crashes', sub { $paris->kill9; restart_crashed($paris) } ],
	[ 'the provider crashes', sub { $tokyo->kill9; restart_crashed($tokyo) } ],
);
for my $fault (@faults)
{
	my ($what, $do) = @$fault;
	ok(is_half_way(), "$what: the copy is half way");
	my ($copied, $total, $bytes, $of) = split /\|/,
	  at_paris(q[select rows_copied, rows_total, bytes_copied, bytes_total from braid.subscription_tables where relation = 'large'::regclass and state = 'copying']);
	ok(($copied // 0) < $total && $total >= $rows - @faults, "$what: $copied rows of $total") or diag("$copied of $total");
	ok(($bytes // 0) < $of, "$what: $bytes bytes of $of");
	$write->();
	$do->();
	# A server that went down took the session along.
	eval { $keeper->query('rollback'); $keeper->quit; 1 } or $keeper->{run}->kill_kill;
	ok(wait_until(sub { (attempt($paris, 'select 1'))[0] == 0 }, 30), "$what: the subscriber answers");
	$write->();
	ok(wait_until(sub { my ($status, $n) = attempt($paris, q[select count(*) from braid.subscription_tables where state <> 'ready']); $status == 0 && $n eq '0' }, 60),
		"$what: it is made again") or diag(explain(status($paris, $name)));
	caught_up($paris, $tokyo);
	is(digest($paris, $_), digest($tokyo, $_), "$what: $_ is whole") for qw(large loose);
	last if $fault == $faults[-1];
	$keeper = keep();
	at_paris("select braid.resync_table('$name', 'large', truncate_first => true); select braid.resync_table('$name', 'loose', truncate_first => true)");
}

done_testing();
