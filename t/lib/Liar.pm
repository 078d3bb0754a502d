# Falsifies a provider's stream on one connection: well-formed messages of PostgreSQL's protocol
# with a frame (docs/PROTOCOL.md) that the provider has not sent, or not at this place, or a
# keepalive that is wrong. For a proxy that passes the bytes. Each lie is applied once, to the next
# message that fits.
#
#   my $liar = Liar->new;
#   $bytes = $liar->pass($bytes, \$lie)     what to send instead; $lie is empty once it was applied
#   $liar->said                             the lie that was applied; forgets it

package Liar;

use strict;
use warnings;

# 'd', length, 'w', two positions and a time: the bytes before a frame.
use constant BEFORE_FRAME => 5 + 25;

# Each lie takes a frame and its records, and returns the frames to send instead; none if it does
# not fit this frame.
my %lie = (
	# Another stream, from its first bytes on.
	signature => sub {
		my ($frame, @records) = @_;
		return if $records[0]{tag} ne 'H';
		substr($frame, 5, 4) = 'JSON';
		return $frame;
	},
	# A record with an unknown tag.
	unknown_tag => sub {
		my ($frame, @records) = @_;
		my $record = $records[ int rand @records ];
		substr($frame, $record->{at}, 1) = '?';
		return $frame;
	},
	# A frame without its end. Not cut after a whole record: that would be another valid frame.
	cut => sub {
		my ($frame, @records) = @_;
		my $record = $records[ int rand @records ];
		return substr $frame, 0, $record->{at} + 1 + int rand($record->{size} - 1);
	},
	# A record, or a name in it, that claims to be longer than memory.
	long_record => sub {
		my ($frame, @records) = @_;
		my $record = $records[ int rand @records ];
		substr($frame, $record->{at} + 1, 4) = pack 'V', 0xfffffff0;
		return $frame;
	},
	long_name => sub {
		my ($frame, @records) = @_;
		my ($begin) = grep { $_->{tag} eq 'B' } @records or return;
		# The origin, after two positions and an xid: empty, one byte.
		substr($frame, $begin->{at} + 5 + 20, 1) = "\xf0\xff\xff\xff\x0f";
		substr($frame, $begin->{at} + 1, 4) = pack 'V', $begin->{size} - 5 + 4;
		return $frame;
	},
	random => sub {
		my ($frame) = @_;
		return join '', map { chr int rand 256 } 1 .. 5 + rand 500;
	},
	# Transactions that have come already.
	again_whole => sub { return is_whole(@_) ? ($_[0]) x 2 : (); },
	# The first frame of a transaction of several frames; its last frame.
	again_begin => sub { return is_begun(@_) ? ($_[0]) x 2 : (); },
	again_end => sub { return is_ended(@_) ? ($_[0]) x 2 : (); },
);

# Lies about keepalives.
my %keepalive = (
	# An end of WAL that WAL will never reach.
	far_end => sub { my ($message) = @_; substr($message, 6, 8) = "\xff" x 8; return $message; },
	# An error in place of the keepalive.
	removed => sub {
		my $fields = join "\0", 'SERROR', 'VERROR', 'C58P01', 'Mrequested WAL segment 000000010000000000000005 has already been removed', '', '';
		return 'E' . pack('N', 4 + length $fields) . $fields . 'Z' . pack('N', 5) . 'I';
	},
);

# Lies for which a frame has to wait for the next one.
my %waits = (swap_begin => \&is_begun, swap_whole => \&is_whole);

# The frame has whole transactions, and perhaps a position.
sub is_whole { my ($frame, @records) = @_; return $records[0]{tag} eq 'B' && !is_begun(@_); }

# The frame ends within a transaction.
sub is_begun { my ($frame, @records) = @_; my ($last) = grep { /[BC]/ } map { $_->{tag} } reverse @records; return ($last // '') eq 'B'; }

# The frame starts within a transaction.
sub is_ended { my ($frame, @records) = @_; my ($first) = grep { /[BC]/ } map { $_->{tag} } @records; return ($first // '') eq 'C'; }

sub new { return bless { buffer => '', copy => 0, held => undef, said => undef }, $_[0]; }

sub said
{
	my ($self) = @_;
	my $said = $self->{said};
	$self->{said} = undef;
	return $said;
}

sub pass
{
	my ($self, $bytes, $lie) = @_;
	$self->{buffer} .= $bytes;
	my ($out, $at) = ('', 0);
	while (length($self->{buffer}) >= $at + 5)
	{
		my ($type, $length) = unpack 'aN', substr $self->{buffer}, $at, 5;
		last if length($self->{buffer}) < $at + 1 + $length;
		my $message = substr $self->{buffer}, $at, 1 + $length;
		$at += 1 + $length;
		# CopyBothResponse: the stream follows.
		$self->{copy} = 1 if $type eq 'W';
		my $is_frame = $self->{copy} && $type eq 'd' && length $message > BEFORE_FRAME && substr($message, 5, 1) eq 'w';
		my $is_keepalive = $self->{copy} && $type eq 'd' && substr($message, 5, 1) eq 'k';
		$out .= $is_frame ? $self->frame($message, $lie) : $is_keepalive ? $self->keepalive($message, $lie) : $message;
	}
	substr($self->{buffer}, 0, $at) = '';
	return $out;
}

# Returns the message to send in place of a keepalive.
sub keepalive
{
	my ($self, $message, $lie) = @_;
	my ($always, $kind) = $$lie =~ /^(always )?(\w+)/ or return $message;
	my $change = $keepalive{$kind} or return $message;
	$self->{said} = $kind;
	$$lie = '' unless $always;
	return $change->($message);
}

# Returns the message to send in place of one with a frame.
sub frame
{
	my ($self, $message, $lie) = @_;
	if (defined $self->{held})
	{
		my $first = $self->{held};
		$self->{held} = undef;
		return $message . $first;
	}
	my ($always, $kind) = $$lie =~ /^(always )?(\w+)/ or return $message;
	return $message if $keepalive{$kind};
	my $frame = substr $message, BEFORE_FRAME;
	my @records = records($frame);
	my @instead;
	if ($waits{$kind})
	{
		return $message if !$waits{$kind}->($frame, @records);
		$self->{held} = $message;
	}
	else
	{
		@instead = $lie{$kind}->($frame, @records) or return $message;
	}
	$self->{said} = "$kind: " . length($frame) . ' bytes, ' . substr join('', map { $_->{tag} } @records), 0, 40;
	$$lie = '' unless $always;
	my $header = substr $message, 5, BEFORE_FRAME - 5;
	return join '', map { 'd' . pack('N', 4 + length($header) + length $_) . $header . $_ } @instead;
}

# Returns tag, place and size of each record of a frame.
sub records
{
	my ($frame) = @_;
	my ($at, @records) = (0);
	while ($at < length $frame)
	{
		my ($tag, $length) = unpack 'aV', substr $frame, $at, 5;
		push @records, { tag => $tag, at => $at, size => 5 + $length };
		$at += 5 + $length;
	}
	return @records;
}

1;
