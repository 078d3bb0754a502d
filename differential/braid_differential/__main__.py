"""Runs cases until the time is over; prints what differs, made small."""

import argparse
import random
import re
import sys
import time

from .compare import difference, has_no_oracle
from .generate import generate
from .runner import GOES_ON, Runner
from .server import Server
from .shrink import shrink


def main():
    """The exit status is 1 if anything differs."""
    parser = argparse.ArgumentParser(prog="differential/run", description=__doc__)
    parser.add_argument("--seconds", type=int, default=120, help="for how long new cases are begun (default 120)")
    parser.add_argument("--seed", type=int, help="the first seed (default: one at random); the others follow it")
    parser.add_argument("--cases", type=int, help="how many cases at most")
    parser.add_argument("--shrink-seconds", type=int, default=90, help="how long one case is made smaller (default 90; 0: not)")
    parser.add_argument("--faults", type=int, default=3, help="stop after so many cases that differ (default 3)")
    parser.add_argument("--until", metavar="REGEX", help="succeed at the first case whose difference this describes, fail without one")
    parser.add_argument("--major", type=int, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--show", action="store_true", help="print the cases instead of running them")
    parser.add_argument("--verbose", action="store_true", help="a line for each case, with how both ended")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    if options.show:
        print(generate(seed, options.major).script())
        return 0
    server = Server()
    server.make()
    try:
        return _run(options, seed, Runner(server))
    finally:
        server.stop()


def _run(options, seed, runner):
    print(f"differential: first seed {seed}", flush=True)
    end = time.monotonic() + options.seconds
    wanted = re.compile(options.until, re.DOTALL) if options.until else None
    ran, faults, went_on = 0, 0, 0
    while time.monotonic() < end and faults < options.faults and (options.cases is None or ran < options.cases):
        case = generate(seed, options.major)
        began = time.monotonic()
        outcomes = runner.run(case)
        for _attempt in range(2):
            if not has_no_oracle(outcomes):
                break
            print(f"again: seed {seed}: native failed by itself: {outcomes['native'].error}", flush=True)
            outcomes = runner.run(case)
        found = difference(outcomes)
        native, braid = outcomes["native"], outcomes["braid"]
        ran += 1
        went_on += native.state == GOES_ON
        if options.verbose:
            print(f"native {native.state} {native.error}, braid {braid.state} {braid.error} ({time.monotonic() - began:.1f} s)", flush=True)
        if found and wanted and wanted.search("\n".join(found)):
            print(f"found: seed {seed}, {found[0]}, after {time.monotonic() - end + options.seconds:.0f} s and {ran} cases\n{found[1]}", flush=True)
            return 0
        if found:
            faults += 1
            _report(options, case, found, runner)
        else:
            print(f"ok - seed {seed}: {native.state}", flush=True)
        seed += 1
    print(f"{ran} cases, of which {went_on} went on to their end; {faults} differ", flush=True)
    return 1 if faults or wanted else 0


def _report(options, case, found, runner):
    signature, description = found
    print(f"not ok - seed {case.seed}: {signature}\n{description}", flush=True)
    # Each look at one that is stuck takes a minute.
    if not options.shrink_seconds or "stuck" in signature:
        print(case.script(), flush=True)
        return
    last = [description]

    def shows(smaller):
        again = difference(runner.run(smaller))
        if again and again[0] == signature:
            last[0] = again[1]
            return True
        return False

    small = shrink(case, shows, options.shrink_seconds)
    print(f"--- {len(small.units())} of {len(case.units())} units are left of seed {case.seed}; again: differential/run --seed {case.seed} --cases 1")
    print(small.script())
    print(f"--- what differs\n{last[0]}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
