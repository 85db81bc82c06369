"""The n-gram drafter's answer for one text, on the host: the same drafts as ``ngram.propose``."""


class Lookup:
    """Remembers where each short run of tokens of a growing text ended last, so that a draft costs no search.

    ``propose`` follows ``kda_jax.speculate.ngram.propose``: the longest suffix of ``ngram_max`` down to ``ngram_min``
    tokens that ended earlier, the latest place, and a copy of what followed that goes on into its own drafts.
    """

    def __init__(self, ngram_max: int, ngram_min: int):
        self.sizes = range(ngram_max, ngram_min - 1, -1)
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: list[int]) -> None:
        """Append ``tokens``. A run is entered once a token follows it, so that the text's own end is no match."""
        for token in tokens:
            last = len(self.tokens) - 1
            for size in self.sizes:
                if last + 1 >= size:
                    self._ends[tuple(self.tokens[last + 1 - size : last + 1])] = last
            self.tokens.append(token)

    def propose(self, count: int) -> list[int]:
        """``count`` drafts, or none."""
        for size in self.sizes:
            if len(self.tokens) < size:
                continue
            end = self._ends.get(tuple(self.tokens[-size:]))
            if end is not None:
                start, known = end + 1, len(self.tokens)
                return [self.tokens[start + i % (known - start)] for i in range(count)]
        return []
