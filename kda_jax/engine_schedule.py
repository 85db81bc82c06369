"""Which requests take part in the next step, and with how many tokens."""

from collections.abc import Hashable
from typing import NamedTuple

from kda_jax.engine_memory import Memory
from kda_jax.engine_requests import EngineStats, Request


class Work(NamedTuple):
    """One row of the next step."""

    request: Request
    query: int  # tokens
    drafts: list[int] | None  # None: a prompt chunk; zeros where the drafter runs inside the step


class Scheduler:
    """Decoding requests first, those that waited longest before others; then prompts, in order of arrival.

    A request's drafts are never cut for the budget: it gets its whole window, or waits a step. Where memory runs out,
    the youngest requests give theirs back, and start over from their text when there is room.
    """

    def __init__(self, memory: Memory, stats: EngineStats, *, max_requests: int, max_tokens: int, num_draft: int):
        self.memory, self.stats = memory, stats
        self.max_requests, self.max_tokens, self.num_draft = max_requests, max_tokens, num_draft
        self.free_seats = list(range(max_requests))[::-1]
        self.requests: dict[Hashable, Request] = {}

    def schedule(self) -> list[Work]:
        """The rows of the next step, in order of arrival."""
        budget, work, taken, admitted = self.max_tokens, [], set(), False
        running = sorted((r for r in self.requests.values() if r.held is not None), key=lambda r: r.number)
        decoding = sorted((r for r in running if not r.prefilling), key=lambda r: (r.scheduled, r.number))
        for request in [*decoding, *(r for r in running if r.prefilling)]:
            if request.held is None:  # sent back for an older one in this very loop
                continue
            drafts = None if request.prefilling else self._drafts(request)
            query = min(self._chunk(request), budget) if drafts is None else 1 + len(drafts)
            if query < 1 or query > budget:
                continue
            if self._make_room(request, query, taken):
                work.append(Work(request, query, drafts))
                taken.add(request.id)
                budget -= query
        for request in sorted((r for r in self.requests.values() if r.held is None), key=lambda r: r.number):
            held = sum(r.held is not None for r in self.requests.values())
            if budget < 1 or held >= self.max_requests:
                break
            self._admit(request)
            if not request.prefilling:  # all of it was in the cache: it decodes from the next step on
                admitted = True
                continue
            query = min(self._chunk(request), budget)
            if not self.memory.reserve(request.held, request.computed, query):
                self.leave(request)
                break
            self._count_hit(request)
            work.append(Work(request, query, None))
            budget -= query
        if not work and admitted:
            return self.schedule()
        for request, _, _ in work:
            request.scheduled = self.stats.steps + 1
        return sorted(work, key=lambda item: item.request.number)

    def _chunk(self, request: Request) -> int:
        """Prompt tokens to compute next: to the end, in mode "align" to the end of the block."""
        left = request.target - request.computed
        block = self.memory.block_size
        return left if block is None else min(left, block - request.computed % block)

    def _drafts(self, request: Request) -> list[int]:
        room = max(request.options.max_new_tokens - request.emitted - 1, 0)
        drafts = [0] * self.num_draft if request.lookup is None else request.lookup.propose(self.num_draft)
        return drafts[:room]

    def _count_hit(self, request: Request) -> None:
        if not request.emitted:
            self.stats.hit_tokens += request.computed

    def _admit(self, request: Request) -> None:
        """Give a waiting request its memory's bookkeeping, and what the cache has of its text."""
        held = self.memory.new()
        keys = request.keys or self.memory.keys_of(request.tokens, self._most_hit(request))
        hit = self.memory.hit(held, keys)
        request.keys = []
        request.held, request.computed, request.last_accepted = held, hit, 1

    def look_ahead(self) -> None:
        """Hash the prompts that are next in line."""
        waiting = sorted((r for r in self.requests.values() if r.held is None), key=lambda r: r.number)
        for request in waiting[: self.max_requests]:
            if not request.keys:
                request.keys = self.memory.keys_of(request.tokens, self._most_hit(request))

    def _most_hit(self, request: Request) -> int:
        return self.memory.most_hit(request.target + (1 if request.emitted else 0))

    def _make_room(self, request: Request, query: int, taken: set) -> bool:
        """Reserve a row's memory, sending the youngest other requests back to waiting where there is too little."""
        while not self.memory.reserve(request.held, request.computed, query):
            younger = [
                r
                for r in self.requests.values()
                if r.held is not None and r.number > request.number and r.id not in taken
            ]
            if not younger:
                return False
            self.leave(max(younger, key=lambda r: r.number))
            self.stats.preemptions += 1
        return True

    def leave(self, request: Request) -> None:
        """Take the memory of a request back. A commit pending for it is written by the next step before anything else,
        so the slots may be handed out at once."""
        if request.held is not None:
            self.memory.release(request.held)
        if request.seat is not None:
            self.free_seats.append(request.seat)
        request.held, request.seat, request.computed, request.last_accepted = None, None, 0, 1
