"""Differences that are meant: what Braid documents and native does otherwise."""

import re
from dataclasses import dataclass
from typing import Callable


@dataclass(frozen=True)
class Known:
    """One difference: where it is documented, and whether it explains what was found."""

    name: str
    reference: str
    explains: Callable


def _native_stops_with(text):
    def explains(native, _braid):
        return native.state == "stopped" and text in native.error

    return explains


def _is_conflict(error):
    """From 18 on native names the conflict."""
    return "duplicate key value violates unique" in error or re.search("conflict=(insert|update)_exists|conflict=multiple_unique_conflicts", error)


def _conflict(native, braid):
    return native.state == "stopped" and native.copied and _is_conflict(native.error) and braid.state == "goes on"


def _copied_twice(native, braid):
    return (
        native.state == "stopped"
        and not native.copied
        # By the partition's name a row has no value for an identity that only the subscriber's root
        # has.
        and ("duplicate key value violates unique" in native.error or 'null value in column "more"' in native.error)
        and braid.state == "goes on"
    )


KNOWN = [
    Known(
        "Native of 15 copies the rows of a partition that is published by itself, and as part of its root, twice.",
        "t/153_publications.pl; src/backend/catalog/pg_publication.c, filter_partitions, since 16",
        _copied_twice,
    ),
    Known(
        "Native stops at a row that is there already, as after a delete that is not published; Braid resolves the conflict.",
        "docs/guide/conflicts.md: insert_exists, update_exists",
        _conflict,
    ),
    Known(
        "Native finds no row of REPLICA IDENTITY FULL whose type has no equality, and stops.",
        "docs/guide/conflicts.md: delete_missing, update_missing",
        _native_stops_with("could not identify an equality operator"),
    ),
    Known(
        "Native with binary = true stops at a type without a binary form; Braid sends such a value as text.",
        "docs/reference/output-formats.md",
        _native_stops_with("put function available for type"),
    ),
    Known(
        "Native with binary = true stops at a value whose type has another size here; Braid takes its text.",
        "docs/reference/output-formats.md",
        _native_stops_with("insufficient data left in message"),
    ),
    Known(
        "Native with binary = true stops at a value whose type has a larger size there than here; Braid takes its text.",
        "docs/reference/output-formats.md",
        _native_stops_with("incorrect binary data format in logical replication column"),
    ),
    Known(
        "Native with binary = true stops at an empty int2vector or oidvector, which PostgreSQL's own input does not take back.",
        "src/backend/utils/adt/int.c, int2vectorrecv",
        _native_stops_with("vector data"),
    ),
    Known(
        "Native with binary = true does not copy a table without columns.",
        "src/backend/commands/copyfromparse.c",
        _native_stops_with("row field count is 0"),
    ),
    Known(
        "Native wants the owner of a partitioned table to have rights to its partitions; Braid, as SQL does, to the table that is named.",
        "docs/reference/subscription-options.md: run_as_owner",
        _native_stops_with("permission denied for table"),
    ),
]

# Errors that Braid never stops with, though native does.
NEVER = ["could not identify an equality operator"]


def explanation(native, braid):
    """The known difference that explains these outcomes, or None."""
    return next((known for known in KNOWN if known.explains(native, braid)), None)
