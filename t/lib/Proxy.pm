# A proxy between a subscriber and its provider that can misbehave: garbage, a stall, or the end of
# the connection, at a random place in the provider's bytes; or a link that is cut as a whole, and
# healed.
#
#   my $proxy = Proxy->new($provider);      listens on 127.0.0.1
#   $proxy->connstr('postgres')             connection string for the subscriber
#   $proxy->behave('garbage')               for connections from now on: pass, garbage, stall, cut;
#                                           'stall 1000': after that many bytes
#   $proxy->link('down')                    for all connections, at once. up; down: connections end
#                                           and are refused; hold: nothing passes; 'only on', 'only
#                                           off': down for connections of the other side. The side
#                                           is what the server that opened the connection has in
#                                           its environment as PGGEQO, which libpq sends
#   $proxy->faults                          number of connections that have misbehaved so far
#   Proxy->new($provider, lies => 1)        a proxy that can also change the stream's content
#   $proxy->lie('unknown_tag')              once, in the next message that fits (Liar.pm); 'always
#                                           unknown_tag': until lie('')
#   $proxy->lies                            lies that were applied
#   $proxy->stop

package Proxy;

use strict;
use warnings;

use IO::Select;
use IO::Socket::INET;
use IO::Socket::UNIX;
use Liar;
use POSIX ();
use PostgreSQL::Test::Utils;
use Time::HiRes qw(sleep time);

sub new
{
	my ($class, $provider, %opt) = @_;
	my $listener = IO::Socket::INET->new(Listen => 16, LocalAddr => '127.0.0.1', LocalPort => 0, ReuseAddr => 1)
	  or die "cannot listen: $!";
	my $dir = PostgreSQL::Test::Utils::tempdir();
	my $self = bless { port => $listener->sockport, dir => $dir, name => $provider->name }, $class;
	$self->behave('pass');
	$self->link('up');
	$self->lie('');
	my $socket = $provider->host . '/.s.PGSQL.' . $provider->port;
	# The child may get the signal before it can handle it.
	local $SIG{USR1} = 'IGNORE';
	my $pid = fork // die "cannot fork: $!";
	if ($pid == 0)
	{
		# Not a test: ends without running END blocks.
		eval { serve($listener, $socket, $dir, $opt{seed} // 1, $opt{within} // 60_000, $opt{lies}); 1 } or print STDERR "# proxy: $@";
		POSIX::_exit(0);
	}
	$self->{pid} = $pid;
	return $self;
}

sub connstr { return "host=127.0.0.1 port=$_[0]{port} dbname=$_[1] sslmode=disable gssencmode=disable"; }

sub behave
{
	my ($self, $how) = @_;
	$self->tell('how', $how);
	return;
}

sub link
{
	my ($self, $state) = @_;
	unlink "$self->{dir}/heard";
	$self->tell('link', $state);
	return unless $self->{pid};
	kill 'USR1', $self->{pid};
	# Returns once nothing that is written from now on gets through a link that is down.
	for (1 .. 400)
	{
		last if -e "$self->{dir}/heard" && PostgreSQL::Test::Utils::slurp_file("$self->{dir}/heard") eq $state;
		select undef, undef, undef, 0.005;
	}
	return;
}

sub lie
{
	my ($self, $lie) = @_;
	$self->tell('lie', $lie);
	kill 'USR1', $self->{pid} if $self->{pid};
	return;
}

sub lies
{
	my ($self) = @_;
	my @lies = -e "$self->{dir}/lies" ? split /\n/, PostgreSQL::Test::Utils::slurp_file("$self->{dir}/lies") : ();
	return @lies;
}

sub tell
{
	my ($self, $what, $text) = @_;
	# Renamed into place, so that it is read whole.
	open my $file, '>', "$self->{dir}/$what.new" or die $!;
	print $file $text;
	close $file;
	rename "$self->{dir}/$what.new", "$self->{dir}/$what" or die $!;
	return;
}

sub faults
{
	my ($self) = @_;
	return -e "$self->{dir}/faults" ? -s "$self->{dir}/faults" : 0;
}

sub stop
{
	my ($self) = @_;
	return unless $self->{pid};
	kill 'TERM', $self->{pid};
	waitpid $self->{pid}, 0;
	$self->{pid} = undef;
	return;
}

sub DESTROY { local $?; $_[0]->stop; return; }

# One process serves all connections. Each is a pair, with the number of bytes until it misbehaves.
sub serve
{
	my ($listener, $socket, $dir, $seed, $within, $lies) = @_;
	srand $seed;
	$SIG{PIPE} = 'IGNORE';
	$SIG{TERM} = sub { POSIX::_exit(0) };
	my ($told, $link, $lie) = (1, 'up', '');
	$SIG{USR1} = sub { $told = 1 };
	my $select = IO::Select->new($listener);
	my %pair;
	my $close = sub {
		my ($pair) = @_;
		for my $end (@$pair{qw(client server)}) { delete $pair{$end}; $select->remove($end); close $end; }
	};
	my $held = IO::Select->new($listener);
	# A test that was killed can't end this process.
	my $test = getppid();
	while (getppid() == $test)
	{
		if ($told)
		{
			$told = 0;
			$link = PostgreSQL::Test::Utils::slurp_file("$dir/link");
			$lie = PostgreSQL::Test::Utils::slurp_file("$dir/lie");
			my %each = map { $_ => $_ } values %pair;
			$close->($_) for grep { is_cut($link, $_) } values %each;
			open my $file, '>', "$dir/heard" or die $!;
			print $file $link;
			close $file;
		}
		for my $end (($link eq 'hold' ? $held : $select)->can_read(0.05))
		{
			if ($end == $listener)
			{
				my $client = $listener->accept or next;
				if ($link eq 'down') { close $client; next; }
				my $server = IO::Socket::UNIX->new(Peer => $socket) or do { close $client; next };
				my ($how, $left) = split / /, PostgreSQL::Test::Utils::slurp_file("$dir/how");
				my $new = { client => $client, server => $server, how => $how, left => $left // int(rand $within), more => 300_000 };
				$new->{liar} = Liar->new if $lies;
				$pair{$_} = $new for $client, $server;
				$select->add($client, $server);
				next;
			}
			my $pair = $pair{$end} or next;
			my $n = sysread $end, my $bytes, 16384;
			if (!$n) { $close->($pair); next; }
			next if $pair->{stalled};
			my $to_client = $end == $pair->{server};
			# The first packet tells the side.
			if (!$to_client && !defined $pair->{side})
			{
				$pair->{side} = $bytes =~ /\0geqo\0(on|off)\0/ ? $1 : '';
				if (is_cut($link, $pair)) { $close->($pair); next; }
			}
			if ($to_client && $pair->{liar})
			{
				$bytes = $pair->{liar}->pass($bytes, \$lie);
				my $said = $pair->{liar}->said;
				if (defined $said) { open my $file, '>>', "$dir/lies" or die $!; print $file "$said\n"; close $file; }
				$n = length $bytes or next;
			}
			my $fault = 0;
			if ($to_client && $pair->{how} ne 'pass')
			{
				$fault = $n > $pair->{left};
				$pair->{left} -= $n unless $fault;
			}
			if ($fault)
			{
				if (!$pair->{known}++) { open my $file, '>>', "$dir/faults" or die $!; print $file '.'; close $file; }
				my $good = $pair->{left};
				$pair->{left} = 0;
				$bytes = substr $bytes, 0, $good if $pair->{how} ne 'garbage';
				substr($bytes, $good) = join '', map { chr int rand 256 } 1 .. length($bytes) - $good if $pair->{how} eq 'garbage';
			}
			my $other = $to_client ? $pair->{client} : $pair->{server};
			write_all($other, $bytes) or do { $close->($pair); next };
			next unless $fault;
			if ($pair->{how} eq 'cut') { $close->($pair); }
			# The connection stays, and nothing passes in either direction any more, until the
			# client gives it up. A server with a full socket can't even end.
			elsif ($pair->{how} eq 'stall') { $pair->{stalled} = 1; $select->remove($pair->{server}); }
			elsif (($pair->{more} -= length $bytes) < 0) { $close->($pair); }
		}
	}
}

# Whether the link's state forbids a connection. One that has sent nothing yet is allowed.
sub is_cut
{
	my ($link, $pair) = @_;
	return 1 if $link eq 'down';
	return $link =~ /^only (\w+)/ && defined $pair->{side} && $pair->{side} ne $1;
}

sub write_all
{
	my ($to, $bytes) = @_;
	my $at = 0;
	while ($at < length $bytes)
	{
		my $n = syswrite $to, $bytes, length($bytes) - $at, $at;
		return 0 unless defined $n;
		$at += $n;
	}
	return 1;
}

1;
