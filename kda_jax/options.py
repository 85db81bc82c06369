"""What a caller chooses: how to generate and how to speculate. Rules on what goes together are in ``cache_options``.

``GenerateOptions`` is a pytree whose numbers are traced, so that another temperature runs the program already
compiled. ``SpeculativeOptions`` decide the shape of the program: they are static and hashable.
"""

import dataclasses
import itertools
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax.checks import IMPLEMENTATIONS, check_choice, check_integer

METHODS = ("ngram", "custom", "draft", "dspark")
REJECTIONS = ("standard", "block", "synthetic")

Number = int | float | np.ndarray | jax.Array
_INT32_MAX = 2**31 - 1


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """How tokens are chosen and when a row ends.

    A pytree: ``temperature``, ``top_k``, ``top_p`` and the values of ``stop_tokens`` are leaves, so changing them
    compiles nothing; ``max_new_tokens``, the number of stop tokens, ``implementation``, and whether ``top_k`` and
    ``top_p`` are given at all are static.

    Attributes:
      max_new_tokens: the most tokens a row emits, at least 1.
      temperature: 0 for greedy, else what logits are divided by; finite. A scalar or one per row, ``[B]``.
      top_k: keep that many most likely tokens, at least 1; None keeps all, and so does any value that reaches the
        vocabulary's size. A scalar or ``[B]``. Of equal logits the lower token id is kept first.
      top_p: keep the fewest most likely tokens whose probability, after ``top_k``, reaches this, in ``(0, 1]``; None
        keeps all. A scalar or ``[B]``.
      stop_tokens: token ids that end a row (and are emitted); the empty tuple for none.
      implementation: of the operations; None for the best that runs here, ``"xla"`` or ``"pallas"``.

    Raises:
      ValueError: naming the field, for a value outside those ranges. Traced values are not looked at.
    """

    max_new_tokens: int
    temperature: Number = 0.0
    top_k: Number | None = None
    top_p: Number | None = None
    stop_tokens: tuple[int, ...] = ()
    implementation: str | None = None

    def __post_init__(self):
        check_integer("max_new_tokens", self.max_new_tokens, 1)
        check_choice("implementation", self.implementation, IMPLEMENTATIONS)
        rules: dict[str, tuple[type, Callable, str]] = {
            "temperature": (float, lambda x: np.isfinite(x) & (x >= 0), "finite and at least 0"),
            "top_k": (int, lambda x: (x >= 1) & (x <= _INT32_MAX), f"None or in [1, {_INT32_MAX}]"),
            "top_p": (float, lambda x: (x > 0) & (x <= 1), "None or in (0, 1]"),
        }
        for name, (kind, holds, allowed) in rules.items():
            value = getattr(self, name)
            if value is not None or name == "temperature":
                object.__setattr__(self, name, _scalar_or_rows(name, value, kind, holds, allowed))
        object.__setattr__(self, "stop_tokens", _token_ids("stop_tokens", self.stop_tokens))

    def for_batch(self, batch: int) -> "GenerateOptions":
        """The same options with one value per row: what a compiled loop over ``batch`` rows reads.

        ``temperature`` becomes fp32 ``[batch]``, ``top_k`` int32 ``[batch]`` or None, ``top_p`` fp32 ``[batch]`` or
        None, ``stop_tokens`` int32 ``[S]``. Raises ``ValueError`` naming a field that has another number of rows.
        """

        def rows(name: str, dtype: Any) -> jax.Array | None:
            value = getattr(self, name)
            if value is None:
                return None
            if np.shape(value) not in ((), (batch,)):
                raise ValueError(f"{name} must be a scalar or have shape [{batch}], got shape {list(np.shape(value))}")
            return jnp.broadcast_to(jnp.asarray(value, dtype), (batch,))

        return _rebuild(
            self.max_new_tokens,
            rows("temperature", jnp.float32),
            rows("top_k", jnp.int32),
            rows("top_p", jnp.float32),
            jnp.asarray(self.stop_tokens, jnp.int32),
            self.implementation,
        )

    def tree_flatten_with_keys(self):
        names = ("temperature", "top_k", "top_p", "stop_tokens")
        children = tuple((jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names)
        return children, (self.max_new_tokens, self.implementation)

    @classmethod
    def tree_unflatten(cls, static, children):
        max_new_tokens, implementation = static
        return _rebuild(max_new_tokens, *children, implementation)


@dataclasses.dataclass(frozen=True)
class SpeculativeOptions:
    """How drafts are made and judged. Static and hashable.

    Attributes:
      method: who drafts; ``"ngram"`` looks the last tokens up in prompt and output; ``"draft"`` is a smaller model
        (``kda_jax.load_drafter``); ``"custom"`` is a drafter of the caller's. ``"dspark"`` is not implemented.
      num_draft_tokens: drafts in a window, at least 1; the window is one longer.
      recover: True keeps one state per request and folds accepted records into it; False keeps a state for every
        position of the window (native). The tokens are the same. Trees of drafts need True.
      rejection: how sampled rows judge a draft: ``"standard"``, ``"block"``, or ``"synthetic"``, which accepts at given
        rates whatever the target says (for benchmarks: its text means nothing).
      ngram_max, ngram_min: longest and shortest suffix that ``"ngram"`` looks up.
      branches: None for one continuation. Else ``"ngram"`` drafts a tree of several: how many drafts each continuation
        adds, the best match first, ``num_draft_tokens`` in all. Trees need ``recover`` and rejection ``"standard"``.
      synthetic_rates: probability that drafts 1..i are all accepted, for each i: ``num_draft_tokens`` values in
        [0, 1] that do not increase.
      synthetic_length: in place of rates, the mean number of tokens a window emits, the extra token included, in
        ``[1, num_draft_tokens + 1]``.
      adaptive: verify only drafts that are worth their time (``kda_jax/speculate/adaptive.py``): the likeliest of all
        rows, as many as bring the most tokens per millisecond by times measured before the first step. Not for trees.

    Raises:
      ValueError: naming the field.
    """

    method: str
    num_draft_tokens: int
    recover: bool = True
    rejection: str = "standard"
    ngram_max: int = 4
    ngram_min: int = 1
    synthetic_rates: tuple[float, ...] | None = None
    synthetic_length: float | None = None
    branches: tuple[int, ...] | None = None
    adaptive: bool = False

    def __post_init__(self):
        check_choice("method", self.method, METHODS)
        if self.method == "dspark":
            raise ValueError(f"method {self.method!r} is not implemented; 'ngram', 'draft' and 'custom' are")
        check_integer("num_draft_tokens", self.num_draft_tokens, 1)
        if not isinstance(self.recover, bool):
            raise ValueError(f"recover must be True or False, got {self.recover!r}")
        if not isinstance(self.adaptive, bool):
            raise ValueError(f"adaptive must be True or False, got {self.adaptive!r}")
        check_choice("rejection", self.rejection, REJECTIONS)
        check_integer("ngram_min", self.ngram_min, 1)
        check_integer("ngram_max", self.ngram_max, self.ngram_min)
        self._check_synthetic()
        if self.branches is not None:
            self._check_branches()

    def _check_branches(self):
        branches, m = self.branches, self.num_draft_tokens
        if not isinstance(branches, tuple | list) or not branches:
            raise ValueError(f"branches must be numbers of drafts that sum to num_draft_tokens={m}, got {branches!r}")
        for count in branches:
            check_integer("branches", count, 1)
        if sum(branches) != m:
            raise ValueError(f"branches must sum to num_draft_tokens={m}, got {branches!r}")
        if self.method != "ngram":
            raise ValueError(f"branches belong to method 'ngram', got method {self.method!r}")
        self.check_tree()
        object.__setattr__(self, "branches", tuple(int(count) for count in branches))

    def check_tree(self) -> None:
        """``ValueError`` where drafts that form a tree can't be verified or judged under these options."""
        if not self.recover:
            raise ValueError("recover must be True for a tree of drafts: native verify has no form for branches")
        if self.rejection != "standard":
            raise ValueError(f"rejection must be 'standard' for a tree of drafts, got {self.rejection!r}")
        if self.adaptive:
            raise ValueError("adaptive must be False for a tree of drafts: budgets are of chains")

    def _check_synthetic(self):
        rates, length, m = self.synthetic_rates, self.synthetic_length, self.num_draft_tokens
        if self.rejection != "synthetic":
            for name in ("synthetic_rates", "synthetic_length"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} needs rejection='synthetic', got {getattr(self, name)!r} with {self.rejection!r}"
                    )
            return
        if (rates is None) == (length is None):
            raise ValueError(
                f"rejection='synthetic' needs one of synthetic_rates and synthetic_length, got {rates!r} and {length!r}"
            )
        if rates is not None:
            good = isinstance(rates, tuple | list) and all(_is_real(r) and 0 <= r <= 1 for r in rates)
            if not good or len(rates) != m or any(a < b for a, b in itertools.pairwise(rates)):
                raise ValueError(
                    f"synthetic_rates must be num_draft_tokens={m} numbers in [0, 1], not increasing, got {rates!r}"
                )
            object.__setattr__(self, "synthetic_rates", tuple(float(r) for r in rates))
        elif not (_is_real(length) and 1 <= length <= m + 1):
            raise ValueError(f"synthetic_length must be in [1, num_draft_tokens + 1 = {m + 1}], got {length!r}")

    @property
    def window(self) -> int:
        """Tokens a verify step reads: the one drafted from, then the drafts."""
        return 1 + self.num_draft_tokens

    @property
    def acceptance_rates(self) -> tuple[float, ...] | None:
        """Of synthetic acceptance: probability that drafts 1..i are all accepted, for each i; else None.

        From ``synthetic_length`` L: the geometric rates ``a, a^2, .., a^m`` with ``1 + sum = L``.
        """
        if self.synthetic_length is None:
            return self.synthetic_rates
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            total = 1 + sum(middle**i for i in range(1, self.num_draft_tokens + 1))
            low, high = (middle, high) if total < self.synthetic_length else (low, middle)
        return tuple(high**i for i in range(1, self.num_draft_tokens + 1))


def _rebuild(max_new_tokens, temperature, top_k, top_p, stop_tokens, implementation) -> GenerateOptions:
    """Options around leaves of any kind: jax puts tracers and placeholders there, which can't be validated."""
    new = object.__new__(GenerateOptions)
    values = (max_new_tokens, temperature, top_k, top_p, stop_tokens, implementation)
    for field, value in zip(dataclasses.fields(GenerateOptions), values, strict=True):
        object.__setattr__(new, field.name, value)
    return new


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _scalar_or_rows(name: str, value: Any, kind: type, holds: Callable, allowed: str) -> Number:
    """``value`` as a Python scalar of ``kind`` or an array ``[B]``; ``ValueError`` where ``holds`` is false."""
    if isinstance(value, jax.core.Tracer):
        array = None
        shape, dtype = value.shape, value.dtype
    else:
        try:
            array = np.asarray(value)
        except (ValueError, TypeError):
            raise ValueError(f"{name} must be {allowed}, got {value!r}") from None
        shape, dtype = array.shape, array.dtype
    what = np.integer if kind is int else np.number
    if not jnp.issubdtype(dtype, what) or jnp.issubdtype(dtype, np.complexfloating):
        raise ValueError(f"{name} must be {allowed} ({kind.__name__}, or an array of one per row), got {value!r}")
    if len(shape) > 1:
        raise ValueError(f"{name} must be a scalar or have shape [B], got shape {list(shape)}")
    if array is None:
        return value
    if not np.all(holds(array)):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    if isinstance(value, jax.Array):
        return value
    return kind(array) if array.ndim == 0 else array.astype(np.int32 if kind is int else np.float32)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, jax.core.Tracer):
        return value
    try:
        ids = tuple(value)
    except TypeError:
        raise ValueError(f"{name} must be a sequence of token ids, got {value!r}") from None
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, numbers.Integral | jax.Array | np.ndarray):
            raise ValueError(f"{name} must hold token ids (integers of at least 0), got {token!r}")
        if not isinstance(token, jax.core.Tracer):
            check_integer(name, int(token), 0, _INT32_MAX)
    return tuple(token if isinstance(token, jax.core.Tracer) else int(token) for token in ids)
