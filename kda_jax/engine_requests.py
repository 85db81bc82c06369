"""What the engine knows about each request, and what it reports."""

import dataclasses
from collections.abc import Hashable, Sequence

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
    confidence: np.ndarray | None = None  # fp32 [m]: what the drafter said of its last drafts
    judged: float = 0.0  # drafts judged and drafts that stood, older ones fading
    stood: float = 0.0
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


def checked_prompt(
    prompt_tokens: Sequence[int], options: GenerateOptions, *, vocab: int, max_length: int, implementation: str | None
) -> list[int]:
    """The tokens of a request that an engine of these limits can serve; ``ValueError`` as ``Engine.submit``."""
    if not isinstance(options, GenerateOptions):
        raise ValueError(f"options must be GenerateOptions, got {type(options).__name__}")
    tokens = np.asarray(prompt_tokens)
    if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind not in "iu":
        raise ValueError(f"prompt_tokens must be a non-empty sequence of token ids, got {prompt_tokens!r:.80}")
    if tokens.min() < 0 or tokens.max() >= vocab:
        bad = tokens[(tokens < 0) | (tokens >= vocab)][0]
        raise ValueError(f"prompt_tokens must be in [0, vocab_size={vocab}), got {bad}")
    for token in options.stop_tokens:
        if not 0 <= token < vocab:
            raise ValueError(f"stop_tokens must be in [0, vocab_size={vocab}), got {token}")
    for name in ("temperature", "top_k", "top_p"):
        if np.ndim(getattr(options, name)):
            raise ValueError(f"{name} must be a scalar in a request's options, got {getattr(options, name)!r}")
    if options.implementation not in (None, implementation):
        raise ValueError(
            f"options.implementation must be None or the engine's {implementation!r}, got {options.implementation!r}"
        )
    if len(tokens) + options.max_new_tokens > max_length:
        raise ValueError(
            f"prompt_tokens and max_new_tokens must be at most max_length={max_length} tokens together, got "
            f"{len(tokens)} + {options.max_new_tokens}"
        )
    return tokens.tolist()
