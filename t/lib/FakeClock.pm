# A clock of its own for a server, which can be set while it runs. Every process that reads the time
# gets the machine's time plus an offset.
#
#   my $clock = FakeClock->new;                         undef without a C compiler
#   my $node = $clock->over(sub { new_node('tokyo') }); servers that the code starts have the clock
#   $clock->set(-3.5)                                   offset in seconds, from now on
#   $clock->sleep(3600)                                 as if the machine had slept that long: only
#                                                       the clock that counts sleep moves

package FakeClock;

use strict;
use warnings;

use PostgreSQL::Test::Utils;

my $source = <<'C';
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Microseconds: of the time of day, and for which the machine has slept. */
static volatile long long *moved;
static int (*read_clock)(clockid_t, struct timespec *);

__attribute__((constructor)) static void find(void)
{
	const char *path = getenv("BRAID_FAKE_CLOCK");
	int fd = path ? open(path, O_RDONLY) : -1;
	void *at = fd < 0 ? MAP_FAILED : mmap(0, 2 * sizeof *moved, PROT_READ, MAP_SHARED, fd, 0);
	if (fd >= 0)
		close(fd);
	if (at != MAP_FAILED)
		moved = at;
}

int clock_gettime(clockid_t clock, struct timespec *time)
{
	int status;
	long long nanos;

	if (!read_clock)
		*(void **) &read_clock = dlsym(RTLD_NEXT, "clock_gettime");
	status = read_clock(clock, time);
	if (clock == CLOCK_BOOTTIME && status == 0 && moved)
	{
		nanos = time->tv_nsec + moved[1] % 1000000 * 1000;
		time->tv_sec += moved[1] / 1000000 + nanos / 1000000000;
		time->tv_nsec = nanos % 1000000000;
	}
	return status;
}

/* GetCurrentTimestamp of PostgreSQL calls this. */
int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
	struct timespec time;
	long long micros;

	(void) zone;
	clock_gettime(CLOCK_REALTIME, &time);
	micros = time.tv_sec * 1000000LL + time.tv_nsec / 1000 + (moved ? *moved : 0);
	now->tv_sec = micros / 1000000;
	now->tv_usec = micros % 1000000;
	return 0;
}
C

sub new
{
	my ($class) = @_;
	my $dir = PostgreSQL::Test::Utils::tempdir();
	my $self = bless { library => "$dir/clock.so", file => "$dir/clock" }, $class;
	PostgreSQL::Test::Utils::append_to_file("$dir/clock.c", $source);
	return unless PostgreSQL::Test::Utils::run_log([ 'cc', '-shared', '-fPIC', '-o', $self->{library}, "$dir/clock.c", '-ldl' ]);
	PostgreSQL::Test::Utils::append_to_file($self->{file}, pack 'qq', 0, 0);
	return $self;
}

sub set { my ($self, $seconds) = @_; return $self->put(0, $seconds); }

sub sleep { my ($self, $seconds) = @_; return $self->put(1, $seconds); }

sub put
{
	my ($self, $place, $seconds) = @_;
	# Never shorter than the mapping.
	open my $file, '+<', $self->{file} or die "cannot open $self->{file}: $!";
	seek $file, 8 * $place, 0;
	syswrite $file, pack 'q', $seconds * 1_000_000;
	close $file;
	return;
}

sub over
{
	my ($self, $start) = @_;
	local $ENV{LD_PRELOAD} = $self->{library};
	local $ENV{BRAID_FAKE_CLOCK} = $self->{file};
	return $start->();
}

1;
