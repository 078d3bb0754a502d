"""Differences that are meant: what Braid documents and native does otherwise."""

from dataclasses import dataclass
from typing import Callable


@dataclass(frozen=True)
class Known:
    """One difference: where it is documented, and whether it explains what was found."""

    name: str
    reference: str
    explains: Callable


def _native_stops_with(text):
    def explains(native, braid):
        return native.state == "stopped" and text in native.error and braid.state == "goes on"

    return explains


KNOWN = [
    Known(
        "Native finds no row of REPLICA IDENTITY FULL whose type has no equality, and stops; Braid compares the bytes.",
        "docs/REFERENCE.md, conflicts: delete_missing, update_missing",
        _native_stops_with("could not identify an equality operator"),
    ),
]


def explanation(native, braid):
    """The known difference that explains these outcomes, or None."""
    return next((known for known in KNOWN if known.explains(native, braid)), None)
