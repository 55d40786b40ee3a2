"""Several sources as one stream, in which each has its share."""

from collections.abc import Iterator

from eyas.data.sources import Row


class Mix:
    """Iterates (number of the source, row). The next row comes from the source that lags furthest behind its weight.

    Every row counts as taken; `give_back` says that one was of no use, so that shares are of usable conversations.
    """

    def __init__(self, sources: list[Iterator[Row]], weights: list[float]) -> None:
        self._weights = weights
        self._open = dict(enumerate(sources))
        self._taken = [0] * len(sources)

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        while self._open:
            number = min(self._open, key=lambda i: ((self._taken[i] + 0.5) / self._weights[i], i))
            row = next(self._open[number], None)
            if row is None:
                del self._open[number]
            else:
                self._taken[number] += 1
                yield number, row

    def give_back(self, number: int) -> None:
        self._taken[number] -= 1
