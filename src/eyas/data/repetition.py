"""When an answer counts as repetitive: its end is a loop."""

from collections.abc import Sequence

import numpy as np

PERIOD = 256
"""longest passage that is looked for, in tokens"""
TIMES = 4
"""how often it must stand there, one after the other"""
LEAST = 32
"""tokens that the loop must fill, so that short runs (a table's rule, "ha ha ha ha") do not count"""


def looped_tokens(ids: Sequence[int], stop_ids: frozenset[int] = frozenset()) -> int:
    """How many tokens at the end of an answer are a loop, 0 if none.

    An answer is repetitive when, its stop tokens aside, it ends in one passage of at most PERIOD tokens that stands
    there at least TIMES times in a row and fills at least LEAST tokens. An unfinished last repetition belongs to it.
    """
    n = len(ids)
    while n and ids[n - 1] in stop_ids:
        n -= 1
    answer = np.asarray(ids[:n], np.int64)
    for period in range(1, min(PERIOD, n // TIMES) + 1):
        if answer[-1] != answer[-1 - period]:
            continue
        different = np.flatnonzero(answer[period:] != answer[:-period])
        looped = n - period - (int(different[-1]) + 1 if len(different) else 0) + period
        if looped >= max(TIMES * period, LEAST):
            return looped
    return 0
