"""A case from a seed."""

import random

from .case import Case
from .schemas import Schema
from .statements import Statements


def generate(seed, major):
    """The case of this seed, always equal for one major version."""
    rng = random.Random(seed)
    case = Case(seed)
    case.native_options = {"streaming": rng.choice(["on", "off"]), "binary": rng.choice(["false", "false", "true"])}
    case.braid_options = {
        "apply_mode": rng.choice(["'parallel'", "'parallel'", "'serial'", "'batch'"]),
        "streaming": rng.choice(["'parallel'", "'on'", "'off'"]),
        # PostgreSQL 15 knows nothing else.
        "run_as_owner": "true" if major < 16 else rng.choice(["true", "true", "false"]),
    }
    if major >= 16:
        case.native_options["run_as_owner"] = case.braid_options["run_as_owner"]
    tables = Schema(rng, case, major).build()
    Statements(rng, case, tables).build()
    return case
