#!/usr/bin/env python3
"""Reads GIR frames and prints one JSON object for each record. Written from docs/PROTOCOL.md alone.

Frames come as psql prints bytea, one a line:

    psql -XAt -c "select data from pg_logical_slot_peek_binary_changes('myslot', null, null,
        'proto_version', '1', 'publication_names', 'a')" | gir_reader.py
"""

import datetime
import json
import struct
import sys
import uuid

CODECS = {"UTF8": "utf-8", "SQL_ASCII": "ascii", "LATIN1": "latin-1", "WIN1252": "cp1252", "EUC_JP": "euc_jp"}
IDENTITY = {b"d": "default", b"i": "index", b"f": "full", b"n": "nothing"}
COLUMN_FLAGS = ("identity", "primary_key", "not_null", "generated")
# Wider integers are shown as bytes: their digits take time that grows with the square, and Python
# refuses them from some size on.
WIDEST_INTEGER = 1024


class Malformed(Exception):
    """What is wrong and where. No other exception comes of a frame's bytes, whatever they are."""

    def __init__(self, what, at):
        super().__init__(f"{what} at {at}")
        self.what, self.at = what, at


class Cursor:
    """Bytes from `at` to `end` of a frame; positions in errors are the frame's."""

    def __init__(self, data, at=0, end=None):
        self.data, self.at, self.end = data, at, len(data) if end is None else end

    def take(self, count):
        left = self.end - self.at
        if count > left:
            raise Malformed(f"{count} bytes wanted, {left} left,", self.at)
        self.at += count
        return self.data[self.at - count : self.at]

    def part(self, count):
        """The next bytes, to be read as something of their own."""
        start = self.at
        self.take(count)
        return Cursor(self.data, start, self.at)

    def number(self, form):
        form = "<" + form
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def varint(self):
        start = self.at
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value >> 64 or (byte == 0 and shift):
                    raise Malformed("varint too large or not in its shortest form", start)
                return value
            shift += 7
            if shift > 63:
                raise Malformed("varint too long", start)

    def zigzag(self, bits=64):
        start = self.at
        n = self.varint()
        n = (n >> 1) ^ -(n & 1)
        if not -(1 << bits - 1) <= n < 1 << bits - 1:
            raise Malformed(f"number of more than {bits} bits", start)
        return n

    def bytes(self):
        return self.take(self.varint())

    def name(self):
        start = self.at
        try:
            name = self.bytes().decode("utf-8")
        except UnicodeDecodeError:
            raise Malformed("name that is not UTF-8", start) from None
        if "\0" in name:
            raise Malformed("name with a zero byte", start)
        return name

    def flags(self, known):
        flags = self.number("B")
        if flags & ~known:
            raise Malformed(f"unknown flags {flags:#x}", self.at - 1)
        return flags

    def choice(self, known, what):
        byte = self.take(1)
        if byte not in known:
            raise Malformed(f"unknown {what} {byte!r}", self.at - 1)
        return known[byte]

    def finish(self):
        if self.at != self.end:
            raise Malformed(f"{self.end - self.at} bytes left over", self.at)


def lsn_text(n):
    return f"{n >> 32:X}/{n & 0xFFFFFFFF:X}"


def timestamp(micros):
    """Microseconds since 1970; Python's datetime has the years 1 to 9999 only."""
    try:
        return (datetime.datetime(1970, 1, 1) + datetime.timedelta(microseconds=micros)).isoformat() + "Z"
    except OverflowError:
        return f"{micros} us since 1970"


def numeric(cursor):
    start = cursor.at
    count, weight, sign, scale = struct.unpack(">HhHH", cursor.take(8))
    digits = struct.unpack(f">{count}H", cursor.take(2 * count))
    cursor.finish()
    special = {0xC000: "NaN", 0xD000: "Infinity", 0xF000: "-Infinity"}
    if sign in special and not count:
        return special[sign]
    if sign not in (0x0000, 0x4000) or scale > 16383 or any(digit > 9999 for digit in digits):
        raise Malformed("decimal out of range", start)
    # The point stands behind so many of the digits, or before so many zeros that are not there.
    point = 4 * (weight + 1)
    text = "".join(f"{digit:04}" for digit in digits)
    whole = text[: max(point, 0)].ljust(max(point, 0), "0").lstrip("0")
    fraction = text[point:] if point >= 0 else "0" * min(-point, scale) + text
    fraction = fraction[:scale].ljust(scale, "0")
    minus = "-" if sign and (whole + fraction).strip("0") else ""
    return minus + (whole or "0") + ("." if scale else "") + fraction


def date_time(cursor):
    start = cursor.at
    tag = cursor.number("B")
    kind = tag & 0x0F
    if tag & 0xE0 or kind > 2:
        raise Malformed(f"date and time of kind {tag:#x}", start)
    text = ("", "infinity", "-infinity")[kind]
    if kind == 0:
        days, micros = cursor.zigzag(32), cursor.varint()
        if micros > 86_400_000_000:
            raise Malformed("time of day after 24:00", start)
        seconds, fraction = divmod(micros, 1_000_000)
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}" + (f".{fraction:06}" if fraction else "")
        try:
            text = (datetime.date(1970, 1, 1) + datetime.timedelta(days)).isoformat() + "T" + clock
        except OverflowError:
            text = f"day {days} T{clock}"
    if tag & 0x10:
        offset = cursor.zigzag(32)
        text += f"{'-' if offset < 0 else '+'}{abs(offset) // 3600:02}:{abs(offset) // 60 % 60:02}"
    return text


class Stream:
    def __init__(self):
        self.charset, self.schemas = None, {}
        # Tag of the record that opened what is open, with the LSN of the transaction or the id of
        # the one whose segment it is.
        self.open = None
        # End of the last transaction, and those that came in segments and have not ended.
        self.end, self.running = 0, set()

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
            integer = cursor.bytes()
            if len(integer) > WIDEST_INTEGER:
                return {"big_integer_bytes": integer.hex()}
            return int.from_bytes(integer, "little", signed=True)
        if tag == 4:
            return repr(cursor.number("d"))
        if tag == 5:
            return f"{cursor.number('f'):.9g}"
        if tag == 6:
            return numeric(cursor.part(cursor.varint()))
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
        raise Malformed(f"unknown value tag {tag}", cursor.at - 1)

    def image(self, cursor, schema):
        start = cursor.at
        count = cursor.number("H")
        if count != len(schema["columns"]):
            raise Malformed(f"image of {count} columns, where its schema has {len(schema['columns'])},", start)
        return {column["name"]: self.value(cursor) for column in schema["columns"]}

    def known_schema(self, cursor):
        start = cursor.at
        number = cursor.number("I")
        if number not in self.schemas:
            raise Malformed(f"schema {number}, which was not announced,", start)
        return self.schemas[number]

    def stream_header(self, c):
        start = c.at
        if c.take(4) != b"GIR\n" or c.number("H") != 1:
            raise Malformed("not GIR, version 1,", start)
        out = {"record": "stream", "node_id": str(uuid.UUID(bytes=bytes(c.take(16)))), "system_identifier": c.number("Q"),
               "server_version": c.number("I"), "node": c.name(), "database": c.name()}
        self.charset = out["charset"] = c.name()
        return out

    def schema(self, c):
        start = c.at
        number = c.number("I")
        if number != len(self.schemas):
            raise Malformed(f"schema {number} where {len(self.schemas)} comes next", start)
        out = {"record": "schema", "number": number, "oid": c.number("I"), "identity": c.choice(IDENTITY, "replica identity"),
               "namespace": c.name(), "table": c.name(), "columns": []}
        for _ in range(c.number("H")):
            flags, type_oid, modifier = c.flags(15), c.number("I"), c.number("i")
            column = {"name": c.name(), "type_namespace": c.name(), "type": c.name(), "type_oid": type_oid, "type_modifier": modifier}
            column["flags"] = [name for bit, name in enumerate(COLUMN_FLAGS) if flags >> bit & 1]
            out["columns"].append(column)
        out["keys"] = [self.key(c, out["columns"]) for _ in range(c.number("B"))]
        self.schemas[number] = out
        return out

    def key(self, c, known):
        nulls_equal, columns = bool(c.flags(1)), []
        for _ in range(c.number("H")):
            index = c.number("H")
            if index >= len(known):
                raise Malformed(f"key with column {index} of {len(known)}", c.at - 2)
            columns.append((known[index]["name"], c.name()))
        return {"nulls_equal": nulls_equal, "columns": columns}

    def transaction(self, c):
        """The fields that Begin has, of a transaction that comes, or has ended, after those before it."""
        start, lsn = c.at, c.number("Q")
        if lsn < self.end:
            raise Malformed(f"transaction of {lsn_text(lsn)} after one that ends at {lsn_text(self.end)}", start)
        return lsn, {"lsn": lsn_text(lsn), "commit_time": timestamp(c.number("q")), "xid": c.number("I"), "origin": c.name(), "origin_lsn": lsn_text(c.number("Q"))}

    def begin(self, c):
        lsn, fields = self.transaction(c)
        self.open = (b"B", lsn)
        return {"record": "begin", **fields}

    def close(self, record, tag, time, c):
        start, lsn = c.at, c.number("Q")
        if self.open != (tag, lsn):
            raise Malformed(f"end of the transaction {lsn_text(lsn)}, which is not open,", start)
        self.open, self.end = None, c.number("Q")
        return {"record": record, "lsn": lsn_text(lsn), "end_lsn": lsn_text(self.end), time: timestamp(c.number("q"))}

    def commit(self, c):
        return self.close("commit", b"B", "commit_time", c)

    def segment_start(self, c):
        start, first, xid = c.at, bool(c.flags(1)), c.number("I")
        if first == (xid in self.running):
            raise Malformed(f"segment of transaction {xid}, which is {'not ' * (not first)}the first,", start)
        self.open = (b"G", xid)
        self.running.add(xid)
        return {"record": "segment_start", "xid": xid, "first": first}

    def segment_end(self, c):
        self.open = None
        return {"record": "segment_end"}

    def subtransaction(self, c):
        return {"record": "subtransaction", "xid": c.number("I")}

    def streamed(self, xid, ends, at):
        """Something is said of a transaction that came in segments."""
        if xid not in self.running:
            raise Malformed(f"transaction {xid}, of which no segment came,", at)
        if ends:
            self.running.remove(xid)

    def abort(self, c):
        start, xid, subxid = c.at, c.number("I"), c.number("I")
        self.streamed(xid, xid == subxid, start)
        return {"record": "abort", "xid": xid, "subxid": subxid}

    def streamed_commit(self, c):
        start = c.at
        _, fields = self.transaction(c)
        self.streamed(fields["xid"], True, start)
        self.end = c.number("Q")
        return {"record": "streamed_commit", **fields, "end_lsn": lsn_text(self.end)}

    def begin_prepared(self, c):
        lsn, fields = self.transaction(c)
        self.open = (b"P", lsn)
        return {"record": "begin_prepared", **fields, "end_lsn": lsn_text(c.number("Q")), "gid": c.name()}

    def prepare(self, c):
        return self.close("prepare", b"P", "prepare_time", c)

    def streamed_prepare(self, c):
        start = c.at
        out = self.finished("streamed_prepare", c)
        self.streamed(out["xid"], True, start)
        return out

    def commit_prepared(self, c):
        out = self.finished("commit_prepared", c)
        # It may have come in segments once more since its Prepare was confirmed.
        self.running.discard(out["xid"])
        return out

    def rollback_prepared(self, c):
        out = self.finished("rollback_prepared", c)
        self.running.discard(out["xid"])
        return {**out, "prepare_end_lsn": lsn_text(c.number("Q")), "prepare_time": timestamp(c.number("q"))}

    def finished(self, record, c):
        _, fields = self.transaction(c)
        self.end = c.number("Q")
        return {"record": record, **fields, "end_lsn": lsn_text(self.end), "gid": c.name()}

    def change(self, tag, c):
        schema, flags = self.known_schema(c), c.flags(7)
        kind = flags & 3
        if kind == 3 or (tag == b"I" and kind) or (tag == b"D" and not kind):
            raise Malformed(f"before image of kind {kind}", c.at - 1)
        keys = [c.number("Q") for _ in range(c.number("B"))]
        out = {"record": {b"I": "insert", b"U": "update", b"D": "delete"}[tag],
               "table": f"{schema['namespace']}.{schema['table']}", "keys": len(keys), "barrier": bool(flags & 4)}
        if kind:
            out["before"] = self.image(c, schema)
            out["before_kind"] = ("key", "row")[kind - 1]
        if tag != b"D":
            out["after"] = self.image(c, schema)
        return out

    def truncate(self, c):
        flags = c.flags(3)
        tables = [self.known_schema(c) for _ in range(c.number("H"))]
        return {"record": "truncate", "cascade": bool(flags & 1), "restart_identity": bool(flags & 2),
                "tables": [f"{table['namespace']}.{table['table']}" for table in tables]}

    def message(self, c):
        start, transactional = c.at, bool(c.flags(1))
        if transactional and self.open is None:
            raise Malformed("transactional message outside of a transaction", start)
        return {"record": "message", "transactional": transactional, "lsn": lsn_text(c.number("Q")), "prefix": c.name(), "content": c.bytes().hex()}

    def record(self, tag, c, start):
        if (self.charset is None) != (tag == b"H"):
            raise Malformed("a stream starts with its header, which does not come again: another record", start)
        if tag in b"IUDT" and self.open is None:
            raise Malformed("change outside of a transaction", start)
        if tag in b"EX" and (self.open is None or self.open[0] != b"G"):
            raise Malformed("record of a segment outside of one", start)
        if tag in b"BGAFPJKR" and self.open is not None:
            raise Malformed("transaction inside another, or in a segment,", start)
        if tag in b"IUD":
            out = self.change(tag, c)
        else:
            readers = {b"H": self.stream_header, b"S": self.schema, b"B": self.begin, b"C": self.commit, b"T": self.truncate, b"M": self.message,
                       b"G": self.segment_start, b"E": self.segment_end, b"X": self.subtransaction, b"A": self.abort, b"F": self.streamed_commit,
                       b"P": self.begin_prepared, b"Q": self.prepare, b"J": self.streamed_prepare, b"K": self.commit_prepared, b"R": self.rollback_prepared}
            if tag not in readers:
                raise Malformed(f"unknown record tag {tag!r}", start)
            out = readers[tag](c)
        c.finish()
        return out

    def frame(self, data):
        """The records of a frame. After Malformed the stream can't be read on."""
        cursor = Cursor(bytes(data))
        while cursor.at < cursor.end:
            start = cursor.at
            tag, length = cursor.take(1), cursor.number("I")
            yield self.record(tag, cursor.part(length), start)


def main():
    sys.stdout.reconfigure(encoding="utf-8")
    stream = Stream()
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            try:
                frame = bytes.fromhex(line.decode("ascii").strip().removeprefix("\\x"))
            except ValueError:
                raise Malformed("bytea that is not in hexadecimal digits", 0) from None
            for record in stream.frame(frame):
                print(json.dumps(record, ensure_ascii=False))
        except Malformed as error:
            sys.exit(f"Malformed: {error} of frame {number}")


if __name__ == "__main__":
    main()
