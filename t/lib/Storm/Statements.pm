# Transactions of the writers of a storm: a random sequence determines them, and they record what
# they did to their rows.

package Storm::Statements;

use strict;
use warnings;

# Tables in which the newest write of a key does not determine the final row.
our %has_no_model = map { $_ => 1 } qw(taken shared booked keyless alike swapped_one swapped_other appended);
# Tables with a second value that no two rows may share.
our %has_code = map { $_ => 1 } qw(taken shared booked);
# Tables with a large column that most updates leave unchanged.
our %has_big = map { $_ => 1 } qw(toasted by_mood by_pair by_list);
# Keys that are no numbers. Each entry has: the key's value for a number, the column as it is
# compared with that, and the number of a row.
our %key = (
	by_mood => [ q['m%d'::mood], 'k::mood', 'substr(%s.k::text, 2)::int' ],
	by_pair => [ q[row(%d, 'x')::pair], 'k', '(%s.k).a' ],
	by_list => [ q['{%d}'::int[]], 'k', '%s.k[1]' ],
);

sub key { my ($table, $k) = @_; return $key{$table} ? sprintf $key{$table}[0], $k : $k; }

# The condition that a row has a key.
sub at { my ($table, $k) = @_; return $key{$table} ? "$key{$table}[1] = " . key($table, $k) : "k = $k"; }

# The number that the key of a row stands for.
sub number { my ($table, $row) = @_; return $key{$table} ? sprintf $key{$table}[2], $row : "$row.k"; }

sub pick { return $_[ int rand @_ ]; }

sub one_in { return rand($_[0]) < 1; }

# Returns one of the hot keys. Which keys are hot changes, about as fast for all writers.
sub hot
{
	my ($self, $number) = @_;
	return int($number / 10) + int rand $self->{keys};
}

# The journal's image of a row; if a table's columns change, only those that stay.
sub image
{
	return "to_jsonb(w) || jsonb_build_object('big', md5(w.big))" if $has_big{ $_[0] };
	return q[jsonb_build_object('k', w.k, 'n', w.n, 'v', w.v)] if $_[0] eq 'shaped';
	return 'to_jsonb(w)';
}

# A whole row, whatever the order of its columns.
sub whole { return $_[0] eq 'shaped' ? 'to_jsonb(t)::text' : 't::text'; }

# Returns a statement that records what it did. With $to, the row had this key before.
sub written
{
	my ($self, $table, $sql, $what, $old) = @_;
	return "$sql;\n" unless $self->{journal};
	my $image = image($table);
	my $k = number($table, 'w');
	my $rows = $what eq 'delete' ? "select '$table', $k, null::jsonb, '$what' from w" : "select '$table', $k, $image, '$what' from w";
	$rows = "select '$table', $old, null::jsonb, '$what, from here' from w union all $rows" if defined $old;
	return "with w as ($sql returning *) insert into storm_journal (tbl, k, image, what) $rows;\n";
}

sub transaction
{
	my ($self, $who, $number) = @_;
	if ($self->{large} && $self->{has}{plain} && one_in($self->{large}))
	{
		my $k = $self->hot($number);
		my $from = 10_000 * ++$self->{larges};
		return "begin;\n" . $self->written('item', "update item set n = n + 1, v = '$who.$number' where k = $k", 'update')
		  . $self->written('item', "insert into item select $from + i, i, repeat('$who', 20) from generate_series(1, 2000) i", 'large')
		  . "commit;\n";
	}
	# Once, by the first node: if names are swapped again, all nodes must have swapped them before.
	return "begin;\nalter table swapped_one rename to swapping;\nalter table swapped_other rename to swapped_one;\nalter table swapping rename to swapped_other;\ncommit;\n"
	  if $self->{has}{swap} && $who eq "$self->{nodes}[0].1" && $number == 100;
	return $self->change_schema($who, $number) if $self->{has}{ddl} && $who =~ /\.1$/ && one_in(20);
	my $statements = one_in(3) ? 1 + int rand 4 : 1;
	$self->{touched_alike} = 0;
	my $text = join '', map { $self->statement($who, $number) } 1 .. $statements;
	if ($self->{prepare} && one_in($self->{prepare}))
	{
		my $gid = "storm $self->{seed} $who.$number";
		return sprintf "begin;\n%sprepare transaction '%s';\nselect pg_sleep(%.3f);\n%s prepared '%s';\n", $text, $gid, rand(0.06), one_in(4) ? 'rollback' : 'commit', $gid;
	}
	# Rolled back transactions have no effect.
	return "begin;\n${text}rollback;\n" if one_in(40);
	return $statements == 1 && $text !~ /;.*;/s ? $text : "begin;\n${text}commit;\n";
}

sub statement
{
	my ($self, $who, $number) = @_;
	my $table = pick(@{ $self->{tables} });
	my ($k, $v) = ($self->hot($number), "'$who.$number'");
	my $has = $self->{has};
	my $is = at($table, $k);
	# One change of these tables per transaction: the order in which it adds and removes the same
	# row is not known.
	return '' if $table eq 'alike' && $self->{touched_alike}++;
	if ($has->{truncate} && one_in(150))
	{
		return "truncate $table;\n" . ($self->{journal} ? "insert into storm_journal (tbl, what) values ('$table', 'truncate');\n" : '');
	}
	return $self->alike($k % 3, pick(qw(a b))) if $table eq 'alike';
	return "insert into appended values ('$who.$number.' || pg_current_xact_id(), $number) on conflict do nothing;\n" if $table eq 'appended';
	if ($has->{delete} && one_in(5))
	{
		return $self->written($table, "delete from $table where $is", 'delete') if one_in(2) || $table eq 'keyless';
		return $self->written($table, "delete from $table where $is", 'delete') . $self->insert($table, $k, $number, $v);
	}
	if ($table eq 'keyless')
	{
		my $unlike = "md5('$who.$number.' || " . int(rand 1_000_000) . ')';
		return $self->written($table, "insert into keyless values ($k, $number, $unlike)", 'insert') if one_in(3);
		return $self->written($table, "update keyless set n = n + 1, v = md5(v || $v) where k = $k", 'update');
	}
	return $self->insert($table, $k, $number, $v) if one_in(3);
	if ($table eq 'moving' && one_in(2))
	{
		my $to = $self->hot($number);
		return $self->swap($k, $to, $v) if one_in(4) && $to != $k;
		return $self->move($k, $to, $v) if $to != $k;
	}
	if ($has_big{$table} && one_in(3))
	{
		my $small = one_in(2) ? ', n = n + 1' : '';
		return $self->written($table, "update $table set big = repeat(md5($v), 100), v = $v$small where $is", "big$small");
	}
	return $self->change_hands($k, $self->hot($number), $v) if $table eq 'shared' && one_in(4);
	if ($has_code{$table} && one_in(2))
	{
		my $code = $self->hot($number);
		return $self->written($table, "update $table set code = $code, v = $v where k = $k", 'code');
	}
	$is = 'k between ' . $k . ' and ' . ($k + 2) if !$key{$table} && one_in(8);
	return $self->written($table, "update $table set n = n + 1, v = $v where $is", 'update');
}

# Returns a transaction that changes the schema. Some columns get the name of a dropped one, of
# which rows may be on their way. Only one node rewrites a table: two such statements at once would
# be a conflict that a person has to decide.
sub change_schema
{
	my ($self, $who, $number) = @_;
	my ($me) = $who =~ /^(\w+)\./;
	my $last = $self->{nodes}[-1];
	my $made = "made_${me}_" . int rand 3;
	my $index = "by_${me}_" . int rand 2;
	my $own = "from pg_attribute where attrelid = 'shaped'::regclass and attnum > 0 and not attisdropped and attname like '${me}_%'";
	my $each = sub { my ($condition, $text) = @_; return "do \$\$ declare c name := (select min(attname) $own having $condition); begin if c is not null then execute format($text); end if; end \$\$;\n"; };
	my @kinds = (
		(sub { "alter table shaped add column ${me}_$number int default $number;\n" }) x 3,
		sub { $each->('count(*) > 2', "'alter table shaped drop column %I', c") },
		sub { $each->('count(*) > 0', "'alter table shaped rename column %I to ${me}_$number', c") },
		sub { $each->('count(*) > 0', "'alter table shaped drop column %1\$I; alter table shaped add column %1\$I int default $number', c") },
		sub { "create index if not exists $index on shaped (n);\n" },
		sub { "drop index if exists $index;\n" },
		sub { "begin;\ncreate table if not exists $made (k int primary key, v text);\ninsert into $made values ($number, '$who') on conflict do nothing;\ncommit;\n" },
		sub { "begin;\ndrop table if exists $made;\ncreate table $made (k int primary key, v text, w text default $number);\ninsert into $made values ($number, '$who') on conflict do nothing;\ncommit;\n" },
		sub { "drop table if exists $made;\n" },
	);
	push @kinds, sub { 'alter table ' . pick(qw(appended shaped)) . ' alter column n type ' . pick(qw(bigint int numeric)) . ";\n" } if $me eq $last;
	return pick(@kinds)->();
}

# Changes rows that are identical to others: one is added, removed, or updated.
sub alike
{
	my ($self, $k, $v) = @_;
	return $self->written('alike', "insert into alike values ($k, '$v')", 'insert') if one_in(2);
	my $order = one_in(2) ? 'desc' : 'asc';
	my $one = "ctid = (select ctid from alike where k = $k and v = '$v' order by ctid $order limit 1)";
	return $self->written('alike', "delete from alike where $one", 'delete') if one_in(2);
	return $self->written('alike', "update alike set v = translate(v, 'ab', 'ba') where $one", 'update');
}

sub insert
{
	my ($self, $table, $k, $number, $v) = @_;
	my %more = (taken => [ 'code', $self->hot($number) ]);
	$more{$table} = [ 'code', $self->hot($number) ] if $has_code{$table} && !$more{$table};
	$more{$table} = [ 'big', "repeat(md5($v), 100)" ] if $has_big{$table};
	my ($column, $value) = $more{$table} ? map { ", $_" } @{ $more{$table} } : ('', '');
	# Not both arms of one statement: any row with the second unique key may be the blocking one.
	my $conflict = !$has_code{$table} && one_in(3) ? '(k) do update set n = excluded.n, v = excluded.v' : 'do nothing';
	# A deferrable key can't be used in ON CONFLICT.
	$conflict = "(k) $conflict" if $table eq 'shared';
	return $self->written($table, "insert into $table (k, n, v$column) values (" . key($table, $k) . ", $number, $v$value) on conflict $conflict", $conflict =~ /update/ ? 'upsert' : 'insert');
}

# Two rows swap values that no two rows may share when the transaction ends.
sub change_hands
{
	my ($self, $one, $other, $v) = @_;
	my $both = "k in ($one, $other)";
	return $self->written('shared', "update shared s set code = (select code from shared o where o.k = $one + $other - s.k), v = $v "
		  . "where $both and 2 = (select count(*) from shared where $both)", "codes of $one and $other");
}

# Moves a row to a free key; now and then to a used one, which fails.
sub move
{
	my ($self, $k, $to, $v) = @_;
	my $free = one_in(10) ? '' : " and not exists (select from moving where k = $to)";
	return $self->written('moving', "update moving set k = $to, n = n + 1, v = $v where k = $k$free", "moved $k to $to", $k);
}

# Two rows swap their keys, by way of a key that no other row uses.
sub swap
{
	my ($self, $one, $other, $v) = @_;
	my $by = 1_000_000 + $one;
	my $there = "exists (select from moving where k = $by)";
	return $self->written('moving', "update moving set k = $by where k = $one and exists (select from moving where k = $other)", "swap $one and $other", $one)
	  . $self->written('moving', "update moving set k = $one, n = n + 1, v = $v where k = $other and $there", "swap $one and $other", $other)
	  . $self->written('moving', "update moving set k = $other, n = n + 1, v = $v where k = $by and not exists (select from moving where k = $other)", "swap $one and $other", $by);
}

1;
