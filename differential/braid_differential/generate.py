"""A case from a seed."""

import random

from .case import Case
from .schemas import Schema
from .statements import Statements


def generate(seed, major):
    """The case of this seed, always equal for one major version."""
    rng = random.Random(seed)
    case = Case(seed)
    tables = Schema(rng, case, major).build()
    Statements(rng, case, tables).build()
    case.native_options = {"streaming": rng.choice(["on", "off"]), "binary": rng.choice(["false", "false", "true"])}
    case.braid_options = {
        "apply_mode": rng.choice(["'parallel'", "'parallel'", "'serial'", "'batch'"]),
        "streaming": rng.choice(["'parallel'", "'on'", "'off'"]),
    }
    if major >= 16:
        owner = rng.choice(["true", "false"])
        case.native_options["run_as_owner"] = owner
        case.braid_options["run_as_owner"] = owner
    else:
        # PostgreSQL 15 knows nothing else.
        case.braid_options["run_as_owner"] = "true"
    return case
