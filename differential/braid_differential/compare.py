"""Compares two outcomes."""

import re

from .known import NEVER, explanation
from .runner import CRASHED, GOES_ON, STOPPED, STUCK


def difference(outcomes):
    """(signature, description) of what differs, or None. Cases that shrink keep the signature."""
    native, braid = outcomes["native"], outcomes["braid"]
    if braid.state == CRASHED:
        return "crash", f"the server crashed: {braid.error}"
    if braid.state == STUCK or any(text in braid.error for text in NEVER):
        return f"braid {braid.state}: {_kind(braid.error)}", f"native {native.state} ({native.error}), braid {braid.state} ({braid.error})"
    if explanation(native, braid):
        return None
    if native.state != braid.state:
        error = _kind(braid.error or native.error)
        return f"native {native.state}, braid {braid.state}: {error}", f"native {native.state} ({native.error}), braid {braid.state} ({braid.error})"
    if native.state == GOES_ON:
        return _rows(native, braid)
    # While tables are copied side by side, it depends on timing which error comes first, and what
    # is here then.
    if not (native.copied and braid.copied):
        return None
    if _kind(native.error) != _kind(braid.error):
        return f"native: {_kind(native.error)}, braid: {_kind(braid.error)}", f"native stopped ({native.error}), braid stopped ({braid.error})"
    return _rows(native, braid)


def has_no_oracle(outcomes):
    """Whether native stopped at a page that it could not read, which says nothing of the case. Seen once on 18, in a TRUNCATE beside other work."""
    native, braid = outcomes["native"], outcomes["braid"]
    return native.state == STOPPED and "could not read blocks" in native.error and braid.state == GOES_ON


def _rows(native, braid):
    lines, kinds = [], set()
    for table, rows in native.rows.items():
        only_native, only_braid = rows - braid.rows[table], braid.rows[table] - rows
        if only_native or only_braid:
            kinds.add("audit" if table == "s.audit" else "rows")
            lines += [f"{table}: only native: {row[:300]} ({count})" for row, count in list(only_native.items())[:5]]
            lines += [f"{table}: only braid:  {row[:300]} ({count})" for row, count in list(only_braid.items())[:5]]
    if not lines:
        return None
    return f"{native.state}: {' and '.join(sorted(kinds))} differ", "\n".join(lines)


def _kind(error):
    """An error without what names it holds, so that a smaller case shows the same."""
    return re.sub(r"\"[^\"]*\"|\d+", "_", error.split("\n")[0])
