"""A link that is long: a TCP proxy that hands on every byte a fixed time after it came, in either direction, without any limit of
bandwidth. A process of its own: `python3 -m braid_bench.link LISTEN_PORT TARGET_PORT MILLISECONDS`.

What is on its way is bounded, as a window is: a side that does not read stops the one that writes.
"""

import collections
import contextlib
import select
import signal
import socket
import subprocess
import sys
import time

CHUNK = 256 * 1024
ON_ITS_WAY = 64 * 1024 * 1024


class Direction:
    """Bytes from one socket to another, each with the moment when it is due."""

    def __init__(self, source, target, delay):
        self.source, self.target, self.delay = source, target, delay
        self.queue = collections.deque()
        self.size = 0
        self.ended = False
        self.over = False

    def wants(self):
        return not self.ended and self.size < ON_ITS_WAY

    def take(self):
        try:
            chunk = self.source.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if chunk:
            self.size += len(chunk)
        else:
            self.ended = True
        self.queue.append((time.monotonic() + self.delay, memoryview(chunk)))

    def give(self, now):
        """Whether the target takes no more at the moment."""
        while self.queue and self.queue[0][0] <= now:
            due, chunk = self.queue[0]
            try:
                if not chunk:
                    self.over = True
                    self.queue.popleft()
                    self.target.shutdown(socket.SHUT_WR)
                    return False
                sent = self.target.send(chunk)
            except BlockingIOError:
                return True
            except OSError:
                self.ended = self.over = True
                self.queue.clear()
                return False
            self.size -= sent
            if sent == len(chunk):
                self.queue.popleft()
            else:
                self.queue[0] = (due, chunk[sent:])
                return True
        return False


def serve(listen_port, target_port, delay):
    listener = socket.create_server(("127.0.0.1", listen_port))
    pairs, directions = [], []
    while True:
        now = time.monotonic()
        blocked = [d for d in directions if d.give(now)]
        # Each pair of directions shares its two sockets, and goes when both are over.
        for pair in [p for p in pairs if all(d.over for d in p)]:
            pairs.remove(pair)
            pair[0].source.close()
            pair[0].target.close()
        directions = [d for pair in pairs for d in pair]
        due = [d.queue[0][0] for d in directions if d.queue and d not in blocked]
        timeout = max(min(due) - time.monotonic(), 0) if due else None
        reading = {d.source: d for d in directions if d.wants()}
        readable, _, _ = select.select([listener, *reading], [d.target for d in blocked], [], timeout)
        for ready in readable:
            if ready is not listener:
                reading[ready].take()
                continue
            near, _ = listener.accept()
            try:
                far = socket.create_connection(("127.0.0.1", target_port), 5)
            except OSError:
                near.close()
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                end.setblocking(False)
            pairs.append((Direction(near, far, delay), Direction(far, near, delay)))
            directions += pairs[-1]


@contextlib.contextmanager
def proxy(stage, listen_port, target_port, delay_ms):
    """One that runs for as long as the context; `delay_ms` there and back."""
    process = stage.start(
        [sys.executable, "-m", "braid_bench.link", listen_port, target_port, delay_ms / 2], as_server=False,
        stdin=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", listen_port), 1).close()
                break
            except OSError:
                if time.monotonic() > end or process.poll() is not None:
                    raise
                time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) / 1000)
