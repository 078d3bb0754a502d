"""Facts about the machine and what was installed, for whoever compares results."""

import os
import pathlib
import platform
import statistics
import subprocess
import time

from .processes import read


def first(path, key):
    for line in (read(path) or b"").decode(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def flush_ms(directory):
    """Mean time of a write of 8 kB and its flush, which is what a commit waits for."""
    path = pathlib.Path(directory, "flush")
    taken = []
    with open(path, "wb", buffering=0) as file:
        file.write(bytes(1 << 20))
        os.fdatasync(file)
        for n in range(200):
            file.seek(n % 128 * 8192)
            began = time.perf_counter()
            file.write(b"x" * 8192)
            os.fdatasync(file)
            taken.append((time.perf_counter() - began) * 1000)
    path.unlink()
    return round(statistics.mean(taken), 3)


def revision():
    top = pathlib.Path(__file__).parents[2]

    def git(*arguments):
        try:
            return subprocess.run(["git", "-C", top, *arguments], capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    commit = git("rev-parse", "--short=12", "HEAD")
    return commit and commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def facts(directory, version):
    memory = first("/proc/meminfo", "MemTotal")
    return {
        "cpu": first("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "memory_gb": round(int(memory.split()[0]) / 2**20, 1) if memory else None,
        "kernel": platform.release(),
        "flush_ms": flush_ms(directory),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "niceness": os.nice(0),
        "postgresql": version.split()[0],
        "braid": revision(),
    }


def stolen():
    """Jiffies that the machine's host took away, and all jiffies, so far."""
    fields = [int(x) for x in read("/proc/stat").splitlines()[0].split()[1:]]
    return fields[7] if len(fields) > 7 else 0, sum(fields[:8])
