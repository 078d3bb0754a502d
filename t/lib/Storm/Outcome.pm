# Checks the outcome of a storm: the nodes are equal and have the rows that were written last.
# Reports what is known of rows that are wrong.

package Storm::Outcome;

use strict;
use warnings;

use Braid;
use Test::More;

# Printed when the test has failed: earlier output may be cut off.
sub tell { my ($self, $what) = @_; push @{ $self->{told} }, $what; return; }

sub told { my ($self) = @_; diag($_) for @{ delete $self->{told} // [] }; return; }

# Returns how many rows differ between the nodes, or from the rows that the journals say were
# written last.
sub compare
{
	my ($self) = @_;
	my @nodes = @{ $self->{members} };
	my $differences = 0;
	my $untold = join ' ', grep { !/ 0$/ } map { $_->name . ' ' . $_->safe_psql('postgres', 'select count(*) from braid.displacement') } @nodes;
	$self->tell("losers that other nodes are yet to be told of: $untold") if $untold ne '';
	my @made = $self->{has}{ddl} ? split /\n/, $nodes[0]->safe_psql('postgres', q[select relname from pg_class where relname like 'made%' and relkind = 'r' order by 1]) : ();
	for my $table (@made)
	{
		my %digests = map { (eval { digest($_, $table) } // 'it is not there') => 1 } @nodes;
		next if keys %digests == 1;
		$self->tell("$table differs: " . join ', ', keys %digests);
		$differences++;
	}
	for my $table (@{ $self->{tables} })
	{
		my $whole = Storm::Statements::whole($table);
		my %digests = map { digest($_, "(select $whole from $table t)") => 1 } @nodes;
		my $has_model = $self->{journal} && !$Storm::Statements::has_no_model{$table};
		next if keys %digests == 1 && !$has_model;
		my $image = Storm::Statements::image($table) =~ s/\bw\b/t/gr;
		my %rows;
		my $number = Storm::Statements::number($table, 't');
		for my $node (@nodes)
		{
			for (split /\n/, $node->safe_psql('postgres', "select $number, md5($whole), ($image)::text from $table t order by 1, 2"))
			{
				# Without a key, several rows.
				my ($k, $whole, $text) = split /\|/, $_, 3;
				my $of = $rows{$k}{ $node->name } //= { whole => '', image => '' };
				$of->{whole} .= $whole;
				$of->{image} .= $text;
			}
		}
		my $model = $has_model ? $self->last_written($table) : {};
		my @wrong;
		for my $k (sort { no warnings 'numeric'; $a <=> $b || $a cmp $b } keys %{ { %rows, %$model } })
		{
			my %wholes = map { ($rows{$k}{ $_->name }{whole} // '') => 1 } @nodes;
			my $expected = $model->{$k}{image} // '';
			my $as_written = !$has_model || !grep { ($rows{$k}{ $_->name }{image} // '') ne $expected } @nodes;
			next if keys %wholes == 1 && $as_written;
			push @wrong, [ $k, keys %wholes == 1 ? 'is the same everywhere, and not what was written last' : 'differs' ];
		}
		$self->tell("$table: " . scalar(@wrong) . ' rows are wrong, ' . scalar(grep { $_->[1] eq 'differs' } @wrong) . ' of them not the same everywhere') if @wrong;
		$self->report($table, @$_) for @wrong[ 0 .. ($#wrong > 2 ? 2 : $#wrong) ];
		$differences += @wrong;
	}
	return $differences;
}

# Returns how many nodes have another schema than the first.
sub compare_schemas
{
	my ($self) = @_;
	my @shapes = map { $_->safe_psql('postgres', q[
		select string_agg(c.relname || E'\n' || array_to_string(braid.table_shape(c.oid), E'\n'), E'\n\n' order by c.relname)
		  from pg_class c where relnamespace = 'public'::regnamespace and relkind = 'r'
	]) } @{ $self->{members} };
	my @others = grep { $shapes[$_] ne $shapes[0] } 1 .. $#shapes;
	$self->tell("--- the schema of $self->{nodes}[0]\n$shapes[0]") if @others;
	$self->tell("--- the schema of $self->{nodes}[$_]\n$shapes[$_]") for @others;
	return scalar @others;
}

# Returns by key the row that the transaction with the largest version left.
sub last_written
{
	my ($self, $table) = @_;
	my %last;
	for my $node (@{ $self->{members} })
	{
		for my $line (split /\n/, $node->safe_psql('postgres', qq[
			select distinct on (k) coalesce(k::text, 'all'), to_char(pg_xact_commit_timestamp(xmin), 'YYYYMMDDHH24MISSUS'), lpad(id::text, 12), coalesce(image::text, '')
			from storm_journal where tbl = '$table' order by k, pg_xact_commit_timestamp(xmin) desc, id desc
		]))
		{
			my ($k, $at, $id, $image) = split /\|/, $line, 4;
			my $version = "$at " . $node->name . " $id";
			$last{$k} = { version => $version, image => $image } if !$last{$k} || $version gt $last{$k}{version};
		}
	}
	# A truncate is the deletion of every row.
	if (my $truncate = delete $last{all})
	{
		$_->{image} = '' for grep { $_->{version} lt $truncate->{version} } values %last;
	}
	return \%last;
}

# Prints what is known of a key that is wrong.
sub report
{
	my ($self, $table, $k, $what, $depth) = @_;
	$self->tell("--- $table, k = $k: $what");
	my $image = Storm::Statements::image($table) =~ s/\bw\b/t/gr;
	my $clock = sub { "to_char($_[0], 'HH24:MI:SS.US')" };
	my @written;
	for my $node (@{ $self->{members} })
	{
		my $name = $node->name;
		my $row = $node->safe_psql('postgres', qq[
			select ($image)::text || '  version ' || coalesce(] . $clock->('c.timestamp') . qq[, 'none') || ' ' ||
			  coalesce((select node_name from braid.origin where origin_id = c.roident), case c.roident when 0 then '$name' else 'origin ' || c.roident end) || ', xmin ' || t.xmin::text
			from $table t left join lateral pg_xact_commit_timestamp_origin(t.xmin) c on true where ] . Storm::Statements::number($table, 't') . qq[ = $k
		]);
		$self->tell(sprintf '%s has: %s', $name, $row eq '' ? 'no row' : $row);
		push @written, map { [ split /\|/, $_, 2 ] } split /\n/, $node->safe_psql('postgres', qq[
			select ] . $clock->('pg_xact_commit_timestamp(xmin)') . qq[, '$name' || ' xid ' || xmin::text || ' ' || what || ': ' || coalesce(image::text, 'gone')
			from storm_journal where tbl = '$table' and (k = $k or k is null) order by id
		]);
	}
	@written = sort { $a->[0] cmp $b->[0] } @written;
	splice @written, 0, @written - 10 if @written > 10;
	$self->tell("written: $_->[0] $_->[1]") for @written;
	my %others;
	for my $node (@{ $self->{members} })
	{
		my $short = sub { "coalesce(($_[0] || case when $_[0] ? 'big' then jsonb_build_object('big', md5($_[0] ->> 'big')) else '{}' end)::text, '')" };
		my @met = split /\n/, $node->safe_psql('postgres', qq[
			select kind || ' ' || winner || ' (' || reason || ') local ' || coalesce(] . $clock->('local_timestamp') . qq[ || ' ' || local_origin, 'none') || ' ' || ] . $short->('local_row') . q[ ||
			  ' remote ' || coalesce(] . $clock->('remote_timestamp') . qq[, '') || ' ' || remote_origin || ' xid ' || remote_xid::text || ' ' || ] . $short->('remote_row') . qq[
			from braid.conflict_history
			where relation = '$table'::regclass and '$k' in (key ->> 'k', local_row ->> 'k', remote_row ->> 'k') order by conflict_id
		]);
		splice @met, 0, @met - 8 if @met > 8;
		$self->tell($node->name . " met: $_") for @met;
		# Rows that conflicted with it under another unique key.
		for (map { /"k": (\d+)/g } @met) { $others{$_} = 1 if $_ != $k; }
	}
	return if $depth;
	$self->report($table, $_, 'was in its way', 1) for (sort { $b <=> $a } keys %others)[ 0 .. (keys %others > 2 ? 1 : keys(%others) - 1) ];
	return;
}

1;
