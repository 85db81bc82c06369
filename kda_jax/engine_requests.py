"""What the engine knows about each request, and what it reports."""

import dataclasses
from collections.abc import Hashable

import numpy as np

from kda_jax.engine_memory import Held
from kda_jax.options import GenerateOptions
from kda_jax.speculate.lookup import Lookup


@dataclasses.dataclass(frozen=True)
class Output:
    """What one step brought one request."""

    request_id: Hashable
    tokens: list[int]  # new ones
    finished: bool
    reason: str | None  # "stop", "length", "nan" (its logits were not numbers), "cancelled"; None: goes on


@dataclasses.dataclass
class EngineStats:
    """Counts since the engine was made, and bytes of its pools."""

    steps: int = 0
    generated: int = 0
    computed: int = 0  # tokens run through the model, drafts included
    preemptions: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0  # prompt tokens that were in the cache
    evictions: int = 0
    drafted: int = 0
    accepted: int = 0
    verified: int = 0  # windows, drafts or not
    state_bytes: int = 0  # slots: recurrent states and convolution histories
    latent_bytes: int = 0
    drafter_bytes: int = 0  # what a drafter on the device keeps of its requests

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the cache."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens a verified window emitted, on average."""
        return 1 + self.accepted / self.verified if self.verified else 1.0


@dataclasses.dataclass
class Request:
    id: Hashable
    number: int  # order of arrival
    tokens: list[int]  # prompt and output
    prompt: int
    options: GenerateOptions
    key_data: np.ndarray
    lookup: Lookup | None
    held: Held | None = None  # None: waiting
    seat: int | None = None  # where a drafter on the device keeps what it knows of the request
    computed: int = 0
    last_accepted: int = 1
    scheduled: int = 0  # step of its last turn
    keys: list[bytes] = dataclasses.field(default_factory=list)  # of its prompt's pages, hashed while it waits

    @property
    def emitted(self) -> int:
        return len(self.tokens) - self.prompt

    @property
    def target(self) -> int:
        """Tokens to compute before the next one is sampled from a decode: of a request that has emitted, all but the
        last, so that going on after preemption is what going on would have been."""
        return len(self.tokens) - 1 if self.emitted else self.prompt

    @property
    def prefilling(self) -> bool:
        return self.computed < self.target
