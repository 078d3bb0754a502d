#!/usr/bin/env python3
"""Changes the bytes of real frames at random and reads them with docs/examples/gir_reader.py: nothing but Malformed may come of it.

    psql -XAt -c "select data from pg_logical_slot_peek_binary_changes(..)" | gir_reader_mutations.py [SEED]

Frames come one a line, as for the reader, with an empty line between streams; the example of docs/PROTOCOL.md is always among them. The
seed is printed.
"""

import json
import pathlib
import random
import re
import sys
import time

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
sys.path.insert(0, str(DOCS / "examples"))
sys.dont_write_bytecode = True
import gir_reader  # noqa: E402

SECONDS = 8


def example():
    """The records of the worked example, as one frame."""
    text = (DOCS / "PROTOCOL.md").read_text().split("## A worked example")[1].split("With `two_phase`")[0]
    return bytes.fromhex("".join(re.findall(r"```hex\n(.*?)```", text, re.DOTALL)))


def records(frame):
    """Where the records of a frame start, and its end."""
    starts = [0]
    while starts[-1] < len(frame):
        starts.append(starts[-1] + 5 + int.from_bytes(frame[starts[-1] + 1 : starts[-1] + 5], "little"))
    return starts


def changed(frame, others, rng):
    frame = bytearray(frame)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(frame) + 1)
        choice = rng.randrange(9)
        if choice == 0:
            frame[at : at + 4] = b"\xff" * len(frame[at : at + 4])
        elif choice == 1:
            frame[at : at + 1] = bytes([rng.choice((0, 1, 2, 9, 0x7F, 0x80, 0xFF, rng.randrange(256)))])
        elif choice == 2 and at < len(frame):
            frame[at] ^= 1 << rng.randrange(8)
        elif choice == 3:
            del frame[at : at + rng.randint(1, 4)]
        elif choice == 4:
            del frame[at:]
        elif choice == 5:
            other = rng.choice(others)
            start = rng.randrange(len(other))
            frame[at:at] = other[start : start + rng.randrange(40)]
        elif choice == 6:
            start = rng.randrange(len(frame) + 1)
            frame[at:at] = frame[start : start + rng.randrange(40)]
        else:
            # Inside of a record whose length is right: bytes get past the first checks.
            starts = records(frame)
            which = rng.randrange(len(starts))
            body = starts[which] + 5
            if which + 1 < len(starts) and body < starts[which + 1] <= len(frame):
                if choice == 7:
                    frame[rng.randrange(body, starts[which + 1])] = rng.randrange(256)
                else:
                    count = rng.randint(1, 12)
                    at = rng.randrange(body, starts[which + 1])
                    frame[at:at] = rng.randbytes(count)
                    length = starts[which + 1] - body + count
                    frame[body - 4 : body] = length.to_bytes(4, "little")
    return bytes(frame)


def read(frames):
    """Texts of all records, and what was refused."""
    stream, lines = gir_reader.Stream(), []
    try:
        for frame in frames:
            lines += [json.dumps(record) for record in stream.frame(frame)]
    except gir_reader.Malformed as error:
        assert 0 <= error.at <= len(frame) and str(error).endswith(f" at {error.at}"), error
        return lines, error
    return lines, None


def main():
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else time.time_ns() % 1_000_000_007
    print(f"seed {seed}")
    rng = random.Random(seed)
    real = [text.split() for text in sys.stdin.read().split("\n\n")]
    streams = [[example()], *([bytes.fromhex(line.removeprefix("\\x")) for line in lines] for lines in real if lines)]
    for frames in streams:
        lines, error = read(frames)
        assert error is None and lines, error
    others = [frame for frames in streams for frame in frames]
    refused = accepted = 0
    kinds = set()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        frames = list(rng.choice(streams))
        # The first frame has the header, and most of the schemas.
        index = rng.randrange(len(frames))
        frames[index] = changed(frames[index], others, rng)
        try:
            _, error = read(frames)
        except Exception:
            print("not refused as it should be:", [frame.hex() for frame in frames[: index + 1]], file=sys.stderr)
            raise
        if error is None:
            accepted += 1
        else:
            refused += 1
            kinds.add(re.sub(r"b?['\"].*['\"]|0x\w+|[0-9A-F]+/[0-9A-F]+|\d+", "N", str(error)))
    assert refused and accepted
    print(f"{refused} refused in {len(kinds)} ways, {accepted} read")
    if "-v" in sys.argv:
        print(*sorted(kinds), sep="\n")


if __name__ == "__main__":
    main()
