# braid.metrics of two nodes under load: counters rise, lag and errors show, unknown values are
# absent. The metrics that monitoring/ needs are there.

use strict;
use warnings;

use Braid;
use JSON::PP ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo', conf => "max_slot_wal_keep_size = 1GB\n");
my $paris = new_node('paris');
on_all('create table item (k int primary key, v text); create sequence number', $tokyo, $paris);
sub at { my ($node, $sql) = @_; return $node->safe_psql('postgres', $sql); }
$tokyo->safe_psql('postgres', q[insert into item select -i, 'copied' from generate_series(1, 300) i]);

# The value of a metric: "" if it is not there. Remembers all names that were ever there.
my %seen;
sub value
{
	my ($node, $name, %labels) = @_;
	my $where = join '', map { " and labels ->> '$_' = '$labels{$_}'" } sort keys %labels;
	return at($node, "select value from braid.metrics where name = '$name'$where");
}
sub remember { $seen{$_} = 1 for map { split /\n/, at($_, 'select distinct name from braid.metrics') } $tokyo, $paris; return; }

# A copy that is slow shows how far it is.
my $name = subscribe($paris, $tokyo, wait => 0, enabled => 'false');
is(value($paris, 'braid_subscription_in_state', state => 'disabled'), '1', 'a disabled subscription');
is(value($paris, 'braid_subscription_transactions_total') . value($paris, 'braid_subscription_lag_seconds'), '', 'of which nothing is known');
at($paris, "select braid.set_rate_limit('$name', rows_per_second => 20); select braid.enable_subscription('$name')");
ok(wait_until(sub { (value($paris, 'braid_copy_rows', table => 'public.item') || 0) > 0 }, 30), 'rows that are copied');
is(value($paris, 'braid_table_states', state => 'copying'), '1', 'of a table that is being copied');
remember();
at($paris, "select braid.set_rate_limit('$name')");
at($paris, "select braid.wait_for_subscription('$name', '180 s')");
is(value($paris, 'braid_copy_rows'), '', 'once it is ready, there is no copy');
is(value($paris, 'braid_table_states', state => 'ready'), '1', 'but a table');
subscribe($tokyo, $paris, copy_data => 'false');

# Counters rise.
my @counted = map { [ $_->[0], { @$_[ 1 .. $#$_ ] } ] } [ 'braid_subscription_transactions_total' ], [ 'braid_subscription_changes_total', operation => 'insert' ],
  [ 'braid_subscription_received_bytes_total' ];
my @before = map { value($paris, $_->[0], $_->[1]->%*) } @counted;
my $decoded = value($tokyo, 'braid_slot_decoded_bytes_total', slot => 'braid_paris_paris_from_tokyo') || 0;
my $script = $tokyo->basedir . '/load.sql';
append_to_file($script, "insert into item values (nextval('number'), 'load');\n");
finish_pgbench(start_pgbench($tokyo, '-c', 2, '-t', 200, '-f', $script));
caught_up($paris, $tokyo);
for my $i (0 .. $#counted)
{
	my ($metric, $labels) = $counted[$i]->@*;
	my $wanted = $metric =~ /bytes/ ? 4000 : 400;
	ok(wait_until(sub { value($paris, $metric, %$labels) >= $before[$i] + $wanted }, 20), "$metric rises") or diag "$before[$i], " . value($paris, $metric, %$labels);
}
ok(wait_until(sub { value($tokyo, 'braid_slot_decoded_bytes_total', slot => 'braid_paris_paris_from_tokyo') > $decoded }, 20), 'so do those of the slot');
is(value($tokyo, 'braid_slot_active', slot => 'braid_paris_paris_from_tokyo'), '1', 'which has a reader');

# The rate of WAL, and how long a slot may wait.
is(value($_->[0], $_->[1]) eq '' ? 'absent' : value($_->[0], $_->[1]) > 0 ? 'there' : 'wrong', 'there', "$_->[1]") for [ $tokyo, 'braid_wal_free_bytes' ], [ $tokyo, 'braid_wal_position_bytes' ];
at($tokyo, q[select pg_logical_emit_message(false, 'x', 'y'); select pg_switch_wal(); select pg_logical_emit_message(false, 'x', 'y')]) for 1 .. 2;
ok(wait_until(sub { value($tokyo, 'braid_wal_bytes_per_second') > 0 }, 20), 'the rate of WAL');
is(at($tokyo, q[
	with m as materialized (select * from braid.metrics)
	select s.value between 0.5 * least(w.safe_wal_size, f.value) / r.value and 2 * least(w.safe_wal_size, f.value) / r.value
	  from m s join pg_replication_slots w on w.slot_name = s.labels ->> 'slot', m r, m f
	 where s.name = 'braid_slot_seconds_to_full' and r.name = 'braid_wal_bytes_per_second' and f.name = 'braid_wal_free_bytes' and w.slot_name = 'braid_paris_paris_from_tokyo'
]), 't', 'and with it the time until a slot is lost');

# Lag.
my $holder = $paris->background_psql('postgres');
$holder->query_safe('begin; lock table item in exclusive mode');
at($tokyo, q[insert into item values (-1000, 'held up')]);
ok(wait_until(sub { value($paris, 'braid_subscription_lag_seconds') > 0.5 && value($paris, 'braid_subscription_lag_bytes') > 0 }, 20), 'lag in seconds, and in bytes');
my $position = value($paris, 'braid_subscription_applied_position_bytes');
cmp_ok($position, '<', value($paris, 'braid_subscription_provider_position_bytes'), 'the position does not move');
remember();
$holder->query_safe('rollback');
$holder->quit;
ok(wait_until(sub { value($paris, 'braid_subscription_lag_seconds') eq '0' }, 20), 'and none');

# A conflict, an error, a parked transaction.
at($paris, q[insert into item values (-2000, 'paris')]);
caught_up($tokyo, $paris);
at($tokyo, q[update item set v = 'tokyo' where k = -2000]);
at($paris, q[update item set v = 'again' where k = -2000]);
ok(wait_until(sub { at($_, q[insert into item values (-3000, 'x') on conflict (k) do update set v = 'both']) for $tokyo, $paris;
	return value($paris, 'braid_conflicts_total') ne '' || value($tokyo, 'braid_conflicts_total') ne '' }, 30), 'a conflict is counted');
at($paris, q[alter table item add constraint v check (v <> 'bad')]);
at($tokyo, q[insert into item values (-4000, 'bad')]);
ok(wait_until(sub { value($paris, 'braid_subscription_in_state', state => 'error') eq '1' }, 20), 'a subscription that has stopped');
is(value($paris, 'braid_subscription_in_state', state => 'streaming'), '0', 'does not stream');
cmp_ok(value($paris, 'braid_subscription_error_timestamp_seconds'), '>', 1e9, 'since when');
at($paris, "select braid.alter_subscription('$name', on_error => 'park'); select braid.enable_subscription('$name')");
ok(wait_until(sub { value($paris, 'braid_subscription_parked_transactions') eq '1' }, 20), 'a parked transaction');
cmp_ok(value($paris, 'braid_subscription_parked_bytes'), '>', 0, 'and its size');
at($paris, "alter table item drop constraint v; select braid.retry_parked('$name')");
ok(wait_until(sub { value($paris, 'braid_subscription_parked_transactions') eq '0' }, 20), 'is applied later');
remember();

# The text: each family in one place, with HELP and TYPE before it, and no sample twice. It has the
# view's values.
for my $node ($tokyo, $paris)
{
	# A family such as the lag of a slot comes and goes: the names are those before the text and
	# after it.
	my $names = sub { join ' ', sort split /\n/, at($node, 'select distinct name from braid.metrics') };
	my ($text, $is_in_view);
	wait_until(sub { $is_in_view = $names->(); $text = at($node, 'select braid.metrics_text()') . "\n"; $is_in_view eq $names->() }, 20);
	my (%type, %help, %sample, $family, @wrong);
	for (split /\n/, $text)
	{
		if (/^# HELP (\w+) (.+)$/) { push @wrong, $_ if $help{$1}++; $family = $1; }
		elsif (/^# TYPE (\w+) (gauge|counter)$/) { push @wrong, $_ if $1 ne $family || $type{$1}; $type{$1} = $2; }
		elsif (/^(\w+)\{((?:[a-z_]+="(?:[^"\\]|\\[\\"n])*",?)*)\} (\S+)$/)
		{
			push @wrong, $_ if $1 ne $family || !$type{$1} || $sample{"$1 $2"}++ || $3 !~ /^[+-]?(?:\d+\.?\d*(?:e[+-]?\d+)?|Inf)$/;
		}
		else { push @wrong, $_; }
	}
	is(join("\n", @wrong), '', $node->name . ': the text is well-formed');
	is(join(' ', sort keys %type), $is_in_view, 'and has what the view has');
	if (!system('command -v promtool >/dev/null 2>&1'))
	{
		my $complaint = '';
		IPC::Run::run([ 'promtool', 'check', 'metrics' ], '<', \$text, '&>', \$complaint);
		is($complaint, '', 'promtool finds nothing');
	}
}

# monitoring/: what alerts and the dashboard use was there; the exporters' queries run, and have all
# metrics.
my %listed = map { split /\|/ } split /\n/, at($tokyo, 'select name, type from braid.metric_list()');
my $files = "$ENV{TESTDIR}/monitoring";
my $alerts = slurp_file("$files/alerts.yaml");
my @rules = split /^      - /m, $alerts;
shift @rules;
cmp_ok(scalar @rules, '>', 10, 'alert rules');
my %used;
for (@rules)
{
	my ($alert, $expr) = /^alert: (Braid\w+)\n        expr: '([^'\n]+)'\n        for: \d+[mh]\n        labels:\n          severity: (?:warning|critical)\n        annotations:\n          summary: '[^'\n]+'\n          description: '[^'\n]+'\n\z/;
	ok($alert, 'a rule is as it has to be') or diag $_;
	is($expr =~ tr/(// - $expr =~ tr/)//, 0, "$alert: parentheses");
	$used{$1} = 1 while $expr =~ /\b(braid_\w+)/g;
}
my $board = JSON::PP::decode_json(slurp_file("$files/grafana.json"));
for my $expr (map { $_->{expr} } map { $_->{targets}->@* } $board->{panels}->@*) { $used{$1} = 1 while $expr =~ /\b(braid_\w+)/g; }
is(join(' ', grep { !$seen{$_} } sort keys %used), '', 'all metrics that alerts and dashboard use were there');
for my $exporter ('postgres_exporter', 'sql_exporter')
{
	my $text = slurp_file("$files/$exporter.yaml");
	my %named;
	if ($exporter eq 'sql_exporter') { %named = $text =~ /^  - metric_name: (\w+)\n    type: (\w+)\n/mg; }
	else
	{
		my $prefix;
		for (split /\n/, $text) { if (/^(braid\w*):/) { $prefix = $1 } elsif (/^    - (\w+):/) { $named{$prefix}{$1} = '' } }
		my %flat;
		my $column;
		for (split /\n/, $text)
		{
			if (/^(braid\w*):/) { $prefix = $1 } elsif (/^    - (\w+):/) { $column = $1 }
			elsif (/usage: "(GAUGE|COUNTER)"/) { $flat{"${prefix}_$column"} = lc $1 }
		}
		%named = %flat;
	}
	is_deeply(\%named, \%listed, "$exporter has all metrics, with their types");
	my @queries = $text =~ /query: \|\n((?: {4,}.*\n)+)/g;
	cmp_ok(scalar @queries, '>', 10, 'its queries');
	my @failed = grep { my ($code) = $paris->psql('postgres', "set role braid_monitor; $_"); $code != 0 } @queries;
	is(join("\n", @failed), '', 'run with braid_monitor alone');
}

# docs/reference/metrics.md has a row for each.
my $page = slurp_file("$ENV{TESTDIR}/docs/reference/metrics.md");
my @rows = split /\n/, at($tokyo, q[select format('| `%s` | %s | %s |', name, type, help) from braid.metric_list()]);
is(join("\n", grep { index($page, "$_\n") < 0 } @rows), '', 'docs/reference/metrics.md has each metric');

done_testing();
