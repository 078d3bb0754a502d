# Sessions that tests keep open. PostgreSQL::Test::Cluster starts a psql and a backend for each
# piece of SQL, and these take most of the processor time of a test. With this module a node's
# psql() speaks the protocol itself, and the next call finds the session still open.
#
# A call sees no difference: if a call has changed the session (SET, temporary tables, advisory
# locks, a transaction left open), the session ends with that call. A call that needs psql itself
# still gets it: backslash commands, COPY, arguments for psql, other users and timeouts.

package Session;

use strict;
use warnings;

use Errno qw(EINTR);
use IO::Select;
use IO::Socket::UNIX;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Socket qw(MSG_NOSIGNAL SOCK_STREAM);
use Test::More;
use Time::HiRes qw(sleep time);

# Open sessions, by the node's name and the database. Each process of a test has its own.
my %open;
my $owner = $$;

# Variables that a psql would take from its environment.
my @environment = qw(PGUSER PGPASSWORD PGPASSFILE PGOPTIONS PGCLIENTENCODING PGSERVICE PGTZ PGDATESTYLE PGSSLMODE);

# Names of functions whose effect outlives a statement in a session. A slot does if decoding fails
# and the error is caught.
my $leaves = qr/\b(?:temp|temporary|set_config|setseed|pg_(?:try_)?advisory_lock\w*|pg_replication_origin_session_\w+|pg_logical_slot_\w+|dblink_connect\w*|with\s+hold)\b/i;
# SQL after which new sessions have other settings, or that requires a database without sessions.
my $for_new_sessions = qr/\b(?:database|alter\s+(?:role|user|system)|pg_reload_conf|tablespace)\b/i;
# A session reports its statistics when it ends, or seconds later.
my $statistics = qr/\bpg_stat(?:io)?_(?!activity|replication|clear_snapshot|wal_receiver|progress)/i;

{
	no warnings 'redefine';
	my $psql = \&PostgreSQL::Test::Cluster::psql;
	*PostgreSQL::Test::Cluster::psql = sub {
		my ($node, $dbname, $sql, %params) = @_;
		my @ran = run($node, $dbname, $sql, %params);
		return $psql->(@_) if !@ran;
		my ($status, $out, $err) = @ran;
		if (ref $params{stdout}) { ${ $params{stdout} } = $out; }
		elsif (!wantarray && $out ne '') { print $out, "\n"; }
		if (ref $params{stderr}) { ${ $params{stderr} } = $err; }
		elsif (!wantarray && $err ne '') { print STDERR $err, "\n"; }
		if ($status != 0 && $params{on_error_die})
		{
			die "connection error: '$err'\nwhile running '$sql'" if $status == 2;
			die "error running SQL: '$err'\nwhile running '$sql'";
		}
		return wantarray ? ($status, $out, $err) : $status;
	};

	# The class would run a psql for each check, ten times a second.
	*PostgreSQL::Test::Cluster::poll_query_until = sub {
		my ($node, $dbname, $query, $expected) = @_;
		$expected //= 't';
		my $is_over = patience($PostgreSQL::Test::Utils::timeout_default);
		my $pause = 0.01;
		while (1)
		{
			my ($status, $out, $err) = $node->psql($dbname, $query, on_error_stop => 0);
			return 1 if $out eq $expected && $err eq '';
			if ($is_over->())
			{
				diag "poll_query_until timed out executing this query:\n$query\nexpecting this output:\n$expected\n"
				  . "last actual query output:\n$out\nwith stderr:\n$err";
				return 0;
			}
			sleep $pause;
			$pause = $pause * 1.5 > 0.1 ? 0.1 : $pause * 1.5;
		}
	};

	# A smart shutdown waits for sessions. A server that reloads its configuration passes it on to
	# sessions later.
	for my $method (qw(stop restart kill9 reload promote teardown_node clean_node))
	{
		my $original = PostgreSQL::Test::Cluster->can($method);
		no strict 'refs';
		*{"PostgreSQL::Test::Cluster::$method"} = sub { close_all($_[0]); return $original->(@_); };
	}
}

# Returns a function that says whether a number of seconds is over, to be called after each check of
# a condition. At most five seconds count between two checks: if the machine was stopped, or its
# clock was set, nothing has happened meanwhile.
sub patience
{
	my ($left) = @_;
	my $before = time;
	return sub {
		my $passed = time - $before;
		$before += $passed;
		$left -= $passed > 5 ? 5 : $passed;
		return $left < 0;
	};
}

# The last SQL of this process and its result, for messages about a condition that did not become
# true.
my ($last_sql, $last_gave) = ('nothing', '');
sub last_seen
{
	my $sql = join ' ', split ' ', $last_sql;
	return sprintf '%s -> %s', length $sql > 300 ? substr($sql, 0, 300) . '...' : $sql, length $last_gave > 500 ? substr($last_gave, 0, 500) . '...' : $last_gave;
}

# Returns the status that psql would have, output and messages; nothing if psql is needed.
sub run
{
	my ($node, $dbname, $sql, %params) = @_;
	return if grep { defined $params{$_} } qw(extra_params timeout timed_out replication connstr);
	return if grep { defined $ENV{$_} } @environment;
	my @statements = statements($sql) or return;
	my $stop = $params{on_error_stop} // 1;
	close_all($node) if $sql =~ /$for_new_sessions|$statistics/;
	my $session = session($node, $dbname // 'postgres') or return;
	my ($status, $out, $err) = (0, '', '');
	for my $statement (@statements)
	{
		my ($failed, $rows, $messages) = query($session, $statement->{text}, $statement->{line});
		$out .= $rows;
		$err .= $messages;
		if (!defined $session->{transaction}) { $status = 2; last; }
		if ($failed && $stop) { $status = 3; last; }
	}
	chomp $out;
	chomp $err;
	($last_sql, $last_gave) = ($sql, $err eq '' ? $out : $err);
	if (!defined $session->{transaction}) { delete $open{ key($node, $dbname // 'postgres') }; }
	elsif ($session->{transaction} ne 'I' || $sql =~ $leaves || grep { $_->{leaves} } @statements) { close_one($node, $dbname // 'postgres'); }
	close_all($node) if $sql =~ $for_new_sessions;
	await_end($session) if $sql =~ /\bbraid\.disable_subscription\b/ && defined $session->{transaction} && $session->{transaction} eq 'I';
	return ($status, $out, $err);
}

# Waits until the processes of a disabled subscription have ended, a moment after the call, so that
# the next step of a test does not affect them. If a test keeps them from ending, gives up after
# some seconds.
sub await_end
{
	my ($session) = @_;
	my $end = time + 5;
	while (time < $end)
	{
		my ($failed, $rows) = query($session, q[select exists (
			select from braid.apply_workers w join braid.subscription_status s on s.name = w.subscription where s.state = 'disabled' and w.pid is not null)], 1);
		return if $failed || $rows eq "f\n" || !defined $session->{transaction};
		sleep 0.02;
	}
	return;
}

# Splits statements as psql does; returns none if one of them is for psql.
sub statements
{
	my ($sql) = @_;
	$sql = '' if !defined $sql;
	if (!utf8::downgrade($sql, 1)) { utf8::encode($sql); }
	return if $sql =~ /\bbegin\s+atomic\b/i;
	my @statements;
	my ($text, $depth, $line, $began) = ('', 0, 1, undef);
	my $finish = sub {
		if (defined $began)
		{
			my ($word) = $text =~ /^\W*(\w+)/;
			$word = lc($word // '');
			return 0 if $word eq 'copy';
			my $leaves = $word =~ /^(?:reset|listen|load|declare|discard)$/
			  || $word eq 'set' && $text !~ /^\W*set\s+(?:local|transaction|constraints)\b/i
			  || $word eq 'prepare' && $text !~ /^\W*prepare\s+transaction\b/i
			  || $word =~ /^(?:do|call)$/ && $text =~ /\bset\b/i;
			push @statements, { text => $text, line => $line, leaves => $leaves };
		}
		($text, $began) = ('', undef);
		return 1;
	};
	pos($sql) = 0;
	while (pos($sql) < length $sql)
	{
		my $piece;
		if ($sql =~ m{\G(?:--[^\n]*|\s+|/\*(?:[^*/]+|\*(?!/)|/(?!\*))*\*/)}gc)
		{
			$text .= $& if defined $began;
			$line += ($& =~ tr/\n//);
			next;
		}
		elsif ($sql =~ /\G(?:[eE]'(?:[^'\\]|''|\\.)*'|'(?:[^']|'')*'|"(?:[^"]|"")*")/gcs) { $piece = $&; }
		elsif ($sql =~ /\G(\$(?:[A-Za-z_\x80-\xff][\w\x80-\xff]*)?\$).*?\1/gcs) { $piece = $&; }
		elsif ($sql =~ /\G(\$(?:[A-Za-z_\x80-\xff][\w\x80-\xff]*)?\$)/gc) { return; }
		elsif ($sql =~ /\G[\w\x80-\xff]+/gc) { $piece = $&; }
		elsif ($sql =~ /\G(?:\\|:['"{]|['"])/gc) { return; }
		elsif ($sql =~ /\G;/gc)
		{
			if ($depth == 0) { $finish->() or return; next; }
			$piece = ';';
		}
		else { $sql =~ /\G./gcs; $piece = $&; $depth += $piece eq '(' ? 1 : $piece eq ')' ? -1 : 0; }
		$began //= 1;
		$text .= $piece;
		$line += ($piece =~ tr/\n//);
	}
	$finish->() or return;
	return @statements;
}

sub key { my ($node, $dbname) = @_; return $node->name . "\0$dbname"; }

# Returns an open session, or a new one if there is none or the server has ended it.
sub session
{
	my ($node, $dbname) = @_;
	if ($owner != $$) { %open = (); $owner = $$; }
	my $key = key($node, $dbname);
	my $session = $open{$key};
	# An idle session has nothing to send, except that it ends.
	if ($session && ($session->{port} ne $node->port || IO::Select->new($session->{socket})->can_read(0) && !still_open($session)))
	{
		delete $open{$key};
		undef $session;
	}
	return $session if $session;
	return $open{$key} = connect_to($node, $dbname);
}

# Reads messages of an idle session: notices and changed settings.
sub still_open
{
	my ($session) = @_;
	while (IO::Select->new($session->{socket})->can_read(0))
	{
		my ($type) = message($session);
		return 0 if !defined $type || $type eq 'E';
	}
	return 1;
}

# Connects; returns nothing on failure, as psql can report the reason. Further arguments are startup
# parameters.
sub connect_to
{
	my ($node, $dbname, %more) = @_;
	return if $node->host !~ m{^/};
	my $socket = IO::Socket::UNIX->new(Type => SOCK_STREAM, Peer => $node->host . '/.s.PGSQL.' . $node->port) or return;
	my $session = { socket => $socket, buffer => '', port => $node->port };
	my %startup = (user => scalar getpwuid($<), database => $dbname, application_name => $ENV{PGAPPNAME} // 'psql', %more);
	my $body = pack('N', 196608) . join('', map { "$_\0$startup{$_}\0" } sort keys %startup) . "\0";
	put($session, pack('N', 4 + length $body) . $body) or return;
	while (1)
	{
		my ($type, $data) = message($session);
		return if !defined $type || $type eq 'E' || $type eq 'R' && unpack('N', $data) != 0;
		last if $type eq 'Z';
	}
	$session->{transaction} = 'I';
	return $session;
}

sub put
{
	my ($session, $bytes) = @_;
	while (length $bytes)
	{
		my $sent = send($session->{socket}, $bytes, MSG_NOSIGNAL);
		if (!defined $sent) { next if $! == EINTR; return 0; }
		substr($bytes, 0, $sent, '');
	}
	return 1;
}

# Returns type and contents of one message; nothing if the connection is gone.
sub message
{
	my ($session) = @_;
	while (1)
	{
		if (length $session->{buffer} >= 5)
		{
			my $length = unpack 'N', substr $session->{buffer}, 1, 4;
			if (length $session->{buffer} > $length)
			{
				my $whole = substr $session->{buffer}, 0, $length + 1, '';
				return (substr($whole, 0, 1), substr($whole, 5));
			}
		}
		my $got = sysread $session->{socket}, $session->{buffer}, 1 << 16, length $session->{buffer};
		if (!defined $got) { next if $! == EINTR; return; }
		return if $got == 0;
	}
}

# Returns whether a statement failed, its rows, and messages as psql prints them.
sub query
{
	my ($session, $text, $line) = @_;
	ask($session, $text);
	return answer($session, $text, $line);
}

# Sends a statement, and does not wait for its result.
sub ask
{
	my ($session, $text) = @_;
	return put($session, 'Q' . pack('N', 5 + length $text) . "$text\0");
}

# Waits for the result of a statement that was sent; returns it as query does.
sub answer
{
	my ($session, $text, $line) = @_;
	my ($failed, $out, $err) = (0, '', '');
	my $prefix = "psql:<stdin>:$line: ";
	while (1)
	{
		my ($type, $data) = message($session);
		if (!defined $type)
		{
			undef $session->{transaction};
			$err .= "${prefix}server closed the connection unexpectedly\n\tThis probably means the server terminated abnormally\n"
			  . "\tbefore or while processing the request.\n${prefix}error: connection to server was lost\n";
			return (1, $out, $err);
		}
		if ($type eq 'Z') { $session->{transaction} = $data; return ($failed, $out, $err); }
		elsif ($type eq 'D')
		{
			my ($columns, $at, @values) = (unpack('n', $data), 2);
			for (1 .. $columns)
			{
				my $length = unpack 'l>', substr $data, $at, 4;
				$at += 4;
				push @values, $length < 0 ? '' : substr $data, $at, $length;
				$at += $length if $length > 0;
			}
			$out .= join('|', @values) . "\n";
		}
		elsif ($type eq 'E' || $type eq 'N')
		{
			$failed = 1 if $type eq 'E';
			$err .= $prefix . report($data, $type eq 'E', $text);
		}
		# A COPY that a function or a comment hid.
		elsif ($type eq 'G') { put($session, 'f' . pack('N', 5) . "\0"); }
	}
}

sub report
{
	my ($data, $is_error, $text) = @_;
	my %field = map { substr($_, 0, 1) => substr($_, 1) } grep { length } split /\0/, $data;
	my $said = "$field{S}:  $field{M}\n";
	if ($field{P})
	{
		my $before = substr $text, 0, $field{P} - 1;
		my $number = 1 + ($before =~ tr/\n//);
		my ($line) = substr($text, length($before) - length(($before =~ /([^\n]*)\z/)[0])) =~ /^([^\n]*)/;
		my $start = "LINE $number: ";
		$said .= "$start$line\n" . ' ' x (length($start) + length(($before =~ /([^\n]*)\z/)[0])) . "^\n";
	}
	$said .= "DETAIL:  $field{D}\n" if defined $field{D};
	$said .= "HINT:  $field{H}\n" if defined $field{H};
	$said .= "QUERY:  $field{q}\n" if defined $field{q};
	$said .= "CONTEXT:  $field{W}\n" if defined $field{W} && $is_error;
	return $said;
}

sub close_one
{
	my ($node, $dbname) = @_;
	my $session = delete $open{ key($node, $dbname) } or return;
	return if $owner != $$;
	put($session, 'X' . pack('N', 4));
	close $session->{socket};
	return;
}

# Closes every session of a node.
sub close_all
{
	my ($node) = @_;
	for (keys %open)
	{
		my ($name, $dbname) = split /\0/;
		close_one($node, $dbname) if $name eq $node->name;
	}
	return;
}

1;
