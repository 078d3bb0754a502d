#!/usr/bin/env python3
"""Reads GIR frames and prints one JSON object for each record. Written from docs/PROTOCOL.md alone.

Frames come as psql prints bytea, one a line:

    psql -XAt -c "select data from pg_logical_slot_peek_binary_changes('myslot', null, null,
        'proto_version', '1', 'publication_names', 'a')" | gir_reader.py
"""

import datetime
import decimal
import json
import struct
import sys
import uuid

CODECS = {"UTF8": "utf-8", "SQL_ASCII": "ascii", "LATIN1": "latin-1", "WIN1252": "cp1252", "EUC_JP": "euc_jp"}
IDENTITY = {b"d": "default", b"i": "index", b"f": "full", b"n": "nothing"}
COLUMN_FLAGS = ("identity", "primary_key", "not_null", "generated")


class Malformed(Exception):
    pass


class Cursor:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, count):
        if count > len(self.data) - self.at:
            raise Malformed(f"{count} bytes wanted at {self.at}, {len(self.data) - self.at} left")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form):
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def varint(self):
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value >> 64 or (byte == 0 and shift):
                    raise Malformed(f"varint before {self.at} is too large or not in its shortest form")
                return value
            shift += 7
            if shift > 63:
                raise Malformed(f"varint before {self.at} is too long")

    def zigzag(self):
        n = self.varint()
        return (n >> 1) ^ -(n & 1)

    def bytes(self):
        return self.take(self.varint())

    def name(self):
        name = self.bytes().decode("utf-8")
        if "\0" in name:
            raise Malformed(f"name before {self.at} has a zero byte")
        return name

    def lsn(self):
        n = self.number("Q")
        return f"{n >> 32:X}/{n & 0xFFFFFFFF:X}"

    def flags(self, known):
        flags = self.number("B")
        if flags & ~known:
            raise Malformed(f"unknown flags {flags:#x} before {self.at}")
        return flags

    def end(self):
        if self.at != len(self.data):
            raise Malformed(f"{len(self.data) - self.at} bytes left over")


def timestamp(micros):
    """Microseconds since 1970; Python's datetime has the years 1 to 9999 only."""
    try:
        return (datetime.datetime(1970, 1, 1) + datetime.timedelta(microseconds=micros)).isoformat() + "Z"
    except OverflowError:
        return f"{micros} us since 1970"


def numeric(data):
    count, weight, sign, scale = struct.unpack(">HhHH", data[:8])
    special = {0xC000: "NaN", 0xD000: "Infinity", 0xF000: "-Infinity"}
    if sign in special:
        return special[sign]
    if len(data) != 8 + 2 * count or sign not in (0x0000, 0x4000):
        raise Malformed("decimal")
    value = 0
    for digit in struct.unpack(f">{count}H", data[8:]):
        value = value * 10000 + digit
    with decimal.localcontext() as context:
        context.prec, context.Emax, context.Emin = 200_000, 400_000, -400_000
        number = decimal.Decimal(value).scaleb(4 * (weight - count + 1)).quantize(decimal.Decimal(1).scaleb(-scale))
        return ("-" if sign else "") + f"{number:f}"


def date_time(cursor):
    tag = cursor.number("B")
    kind = tag & 0x0F
    if tag & 0xE0 or kind > 2:
        raise Malformed(f"date and time kind {tag:#x}")
    text = ("", "infinity", "-infinity")[kind]
    if kind == 0:
        days, micros = cursor.zigzag(), cursor.varint()
        if micros > 86_400_000_000:
            raise Malformed("time of day")
        seconds, fraction = divmod(micros, 1_000_000)
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}" + (f".{fraction:06}" if fraction else "")
        try:
            text = (datetime.date(1970, 1, 1) + datetime.timedelta(days)).isoformat() + "T" + clock
        except OverflowError:
            text = f"day {days} T{clock}"
    if tag & 0x10:
        offset = cursor.zigzag()
        text += f"{'-' if offset < 0 else '+'}{abs(offset) // 3600:02}:{abs(offset) // 60 % 60:02}"
    return text


class Stream:
    def __init__(self):
        self.charset, self.schemas, self.open = None, {}, False

    def text(self, data):
        try:
            return data.decode(CODECS.get(self.charset, "ascii"))
        except UnicodeDecodeError:
            return {"bytes": data.hex()}

    def value(self, cursor):
        tag = cursor.number("B")
        if tag == 0:
            return None
        if tag == 1:
            return {"none": True}
        if tag == 2:
            return cursor.zigzag()
        if tag == 3:
            return int.from_bytes(cursor.bytes(), "little", signed=True)
        if tag == 4:
            return repr(cursor.number("d"))
        if tag == 5:
            return f"{cursor.number('f'):.9g}"
        if tag == 6:
            return numeric(cursor.bytes())
        if tag == 7:
            return timestamp(cursor.number("q"))
        if tag == 8:
            return date_time(cursor)
        if tag == 9:
            return self.text(cursor.bytes())
        if tag == 10:
            return {"binary": cursor.bytes().hex()}
        if tag == 11:
            return {"text": self.text(cursor.bytes())}
        raise Malformed(f"unknown value tag {tag}")

    def image(self, cursor, schema):
        count = cursor.number("H")
        if count != len(schema["columns"]):
            raise Malformed(f"image of {count} columns")
        return {column["name"]: self.value(cursor) for column in schema["columns"]}

    def schema(self, number):
        if number not in self.schemas:
            raise Malformed(f"schema {number} was not announced")
        return self.schemas[number]

    def record(self, tag, c):
        if (self.charset is None) != (tag == b"H"):
            raise Malformed("a stream starts with its header, which does not come again")
        if tag == b"H":
            if c.take(4) != b"GIR\n" or c.number("H") != 1:
                raise Malformed("not GIR, version 1")
            out = {"record": "stream", "node_id": str(uuid.UUID(bytes=bytes(c.take(16)))), "system_identifier": c.number("Q"),
                   "server_version": c.number("I"), "node": c.name(), "database": c.name()}
            self.charset = out["charset"] = c.name()
        elif tag == b"S":
            number, oid, identity = c.number("I"), c.number("I"), c.take(1)
            out = {"record": "schema", "number": number, "oid": oid, "identity": IDENTITY[identity],
                   "namespace": c.name(), "table": c.name(), "columns": []}
            for _ in range(c.number("H")):
                flags, type_oid, modifier = c.flags(15), c.number("I"), c.number("i")
                column = {"name": c.name(), "type_namespace": c.name(), "type": c.name(), "type_oid": type_oid, "type_modifier": modifier}
                column["flags"] = [name for bit, name in enumerate(COLUMN_FLAGS) if flags >> bit & 1]
                out["columns"].append(column)
            out["keys"] = []
            for _ in range(c.number("B")):
                nulls_equal = bool(c.flags(1))
                columns = [(out["columns"][c.number("H")]["name"], c.name()) for _ in range(c.number("H"))]
                out["keys"].append({"nulls_equal": nulls_equal, "columns": columns})
            self.schemas[number] = out
        elif tag == b"B":
            if self.open:
                raise Malformed("transaction inside another")
            self.open = True
            out = {"record": "begin", "lsn": c.lsn(), "commit_time": timestamp(c.number("q")), "xid": c.number("I"),
                   "origin": c.name(), "origin_lsn": c.lsn()}
        elif tag == b"C":
            if not self.open:
                raise Malformed("end without a begin")
            self.open = False
            out = {"record": "commit", "lsn": c.lsn(), "end_lsn": c.lsn(), "commit_time": timestamp(c.number("q"))}
        elif tag in (b"I", b"U", b"D"):
            schema, flags = self.schema(c.number("I")), c.flags(7)
            keys = [f"{c.number('Q'):016x}" for _ in range(c.number("B"))]
            kind = flags & 3
            if kind == 3 or (tag == b"I" and kind) or (tag == b"D" and not kind):
                raise Malformed(f"before image of kind {kind}")
            out = {"record": {b"I": "insert", b"U": "update", b"D": "delete"}[tag],
                   "table": f"{schema['namespace']}.{schema['table']}", "keys": len(keys), "barrier": bool(flags & 4)}
            if kind:
                out["before"] = self.image(c, schema)
                out["before_kind"] = ("key", "row")[kind - 1]
            if tag != b"D":
                out["after"] = self.image(c, schema)
        elif tag == b"T":
            flags = c.flags(3)
            tables = [self.schema(c.number("I")) for _ in range(c.number("H"))]
            out = {"record": "truncate", "cascade": bool(flags & 1), "restart_identity": bool(flags & 2),
                   "tables": [f"{table['namespace']}.{table['table']}" for table in tables]}
        elif tag == b"M":
            out = {"record": "message", "transactional": bool(c.flags(1)), "lsn": c.lsn(), "prefix": c.name(), "content": c.bytes().hex()}
        else:
            raise Malformed(f"unknown record tag {tag!r}")
        c.end()
        return out

    def frame(self, data):
        cursor = Cursor(data)
        while cursor.at < len(data):
            tag, length = cursor.take(1), cursor.number("I")
            yield self.record(tag, Cursor(cursor.take(length)))


def main():
    stream = Stream()
    for line in sys.stdin:
        for record in stream.frame(bytes.fromhex(line.strip().removeprefix("\\x"))):
            print(json.dumps(record, ensure_ascii=False))


if __name__ == "__main__":
    main()
