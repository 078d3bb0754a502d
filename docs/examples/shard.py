#!/usr/bin/env python3
"""Computes the shard of a row of a routed table, and checks itself. Written from docs/routing-hash.md alone.

    shard.py SHARDS SPREAD TENANT_TYPE TENANT RECORD_TYPE RECORD      prints the shard
    shard.py --check FILE                                             checks the test vectors of FILE

    shard.py 64 8 bigint 42 uuid 0190a6e2-7c5b-7d3e-9a40-1f2e3d4c5b6a
"""

import datetime
import json
import re
import sys
import uuid

EPOCH = datetime.datetime(2000, 1, 1)
INFINITE = ("infinity", "-infinity")


def number(text):
    if text in ("NaN", "Infinity", "-Infinity"):
        return b"n" + text.encode()
    match = re.fullmatch(r"(-?)0*([0-9]*)(?:\.([0-9]+))?", text, re.ASCII)
    if not match or not re.match(r"-?[0-9]", text, re.ASCII):
        raise ValueError(f"not a number: {text}")
    sign, whole, fraction = match.group(1), match.group(2) or "0", (match.group(3) or "").rstrip("0")
    digits = whole + ("." + fraction if fraction else "")
    return b"n" + ("0" if digits == "0" else sign + digits).encode()


def moment(letter):
    def canonical(text):
        if text in INFINITE:
            return letter + text.encode()
        return letter + str((datetime.datetime.fromisoformat(text) - EPOCH) // datetime.timedelta(microseconds=1)).encode()
    return canonical


def instant(text):
    if text in INFINITE:
        return b"z" + text.encode()
    utc = datetime.datetime.fromisoformat(text).astimezone(datetime.timezone.utc)
    return moment(b"z")(utc.replace(tzinfo=None).isoformat())


def text(value):
    return b"s" + value.encode()


CANONICAL = {
    "smallint": number, "integer": number, "bigint": number, "numeric": number,
    "text": text, "varchar": text, "name": text, "char": lambda value: text(value.rstrip(" ")),
    "uuid": lambda value: b"u" + uuid.UUID(value).bytes,
    "boolean": lambda value: {"true": b"bt", "false": b"bf"}[value],
    "date": moment(b"d"), "timestamp": moment(b"d"), "timestamptz": instant,
    "bytea": lambda value: b"x" + bytes.fromhex(value.removeprefix("\\x")),
}


def hash64(data):
    """FNV-1a with 64 bits, then the finalizer of MurmurHash3."""
    mask = (1 << 64) - 1
    h = 0xcbf29ce484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001b3 & mask
    h = (h ^ h >> 33) * 0xff51afd7ed558ccd & mask
    h = (h ^ h >> 33) * 0xc4ceb9fe1a85ec53 & mask
    return h ^ h >> 33


def h1(tenant):
    return hash64(b"T" + tenant)


def h2(record):
    return hash64(b"R" + record)


def shard(tenant, record, spread, shards):
    return (h1(tenant) + h2(record) % spread) % shards


def check(path):
    with open(path, encoding="utf-8") as file:
        vectors = json.load(file)
    wrong = []
    for vector in vectors["values"]:
        canonical = CANONICAL[vector["type"]](vector["value"])
        found = (canonical.hex(), f"{h1(canonical):016x}", f"{h2(canonical):016x}")
        if found != (vector["canonical"], vector["h1"], vector["h2"]):
            wrong.append((vector, found))
    for vector in vectors["rows"]:
        tenant = CANONICAL[vector["tenant_type"]](vector["tenant"])
        record = CANONICAL[vector["record_type"]](vector["record"])
        found = shard(tenant, record, vector["spread"], vector["shards"])
        if found != vector["shard"]:
            wrong.append((vector, found))
    for vector, found in wrong:
        print(f"{vector}: found {found}", file=sys.stderr)
    print(f"{len(vectors['values']) + len(vectors['rows'])} vectors, {len(wrong)} wrong")
    return 1 if wrong else 0


def main(arguments):
    if len(arguments) == 2 and arguments[0] == "--check":
        return check(arguments[1])
    if len(arguments) != 6:
        print(__doc__, file=sys.stderr)
        return 2
    shards, spread, tenant_type, tenant, record_type, record = arguments
    print(shard(CANONICAL[tenant_type](tenant), CANONICAL[record_type](record), int(spread), int(shards)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
