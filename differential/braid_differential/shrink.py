"""Makes a case that shows a difference small: delta debugging over its units."""

import time


def shrink(case, shows, seconds=120, clock=time.monotonic):
    """The smallest case found within so many seconds for which `shows` still holds."""
    end = clock() + seconds
    # Whole tables first: what needs them goes along.
    for unit in [unit for unit in case.units() if unit.startswith("s.") and unit.count(".") == 1]:
        if clock() > end:
            return case
        if unit in case.units() and shows(smaller := case.without([unit])):
            case = smaller
    size = max(1, len(case.units()) // 2)
    while True:
        shrunk = False
        start = 0
        while start < len(case.units()):
            if clock() > end:
                return case
            units = case.units()
            # From the end: later statements need earlier ones.
            gone = units[max(0, len(units) - start - size) : len(units) - start]
            smaller = case.without(gone)
            if shows(smaller):
                case, shrunk = smaller, True
            else:
                start += size
        if size == 1 and not shrunk:
            return case
        if size > 1 or not shrunk:
            size = max(1, size // 2)
