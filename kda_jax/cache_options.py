"""What is kept between steps, and the one place that says which choices go together.

``check_serving`` looks at configurations and options only, so a combination that can't work is refused before any
weight is read.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from kda_jax.checks import IMPLEMENTATIONS, check_bool, check_choice, check_integer
from kda_jax.config import ModelConfig
from kda_jax.ops._checks import choose
from kda_jax.ops._kernels import find_kernel
from kda_jax.options import SpeculativeOptions

DEFAULT_PAGE = 64


@dataclasses.dataclass(frozen=True)
class CacheOptions:
    """What a sequence keeps between steps. Static and hashable.

    Attributes:
      mode: ``"none"``: a request keeps its newest state and shares nothing. ``"align"``: it keeps a state for every
        ``block_size`` tokens, at the block's end.
      block_size: tokens of a state block; needed in mode "align", None otherwise. At least the speculative window.
      page_size: tokens of a page of MLA latents; None for ``block_size`` or, without blocks, 64. It divides
        ``block_size``.
      prefix_caching: reuse finished blocks of other requests with the same prefix; needs mode "align".
      drop_last_block: leave the last matching block out of a hit, for drafters that need its tokens computed.
      state_dtype: of the recurrent state between steps, ``"float32"`` or ``"bfloat16"``; arithmetic is fp32.
      stochastic_rounding: must be False. With recovery it could never be allowed: a state rebuilt from records and one
        stepped token by token would differ.
      num_slots, num_pages: sizes of the pools, the null one included; None for as many as ``max_requests`` can need.

    Raises:
      ValueError: naming the field.
    """

    mode: str = "none"
    block_size: int | None = None
    page_size: int | None = None
    prefix_caching: bool = False
    drop_last_block: bool = False
    state_dtype: str = "float32"
    stochastic_rounding: bool = False
    num_slots: int | None = None
    num_pages: int | None = None

    def __post_init__(self):
        check_choice("mode", self.mode, ("none", "align"))
        for name in ("prefix_caching", "drop_last_block", "stochastic_rounding"):
            check_bool(name, getattr(self, name))
        if self.mode == "align":
            if self.block_size is None:
                raise ValueError("block_size must be given in mode 'align', got None")
            check_integer("block_size", self.block_size, 1)
        else:
            if self.block_size is not None:
                raise ValueError(f"block_size belongs to mode 'align', got {self.block_size!r} with mode {self.mode!r}")
            if self.prefix_caching:
                raise ValueError(f"prefix_caching needs mode 'align', got True with mode {self.mode!r}")
        if self.drop_last_block and not self.prefix_caching:
            raise ValueError("drop_last_block needs prefix_caching=True, got True with prefix_caching=False")
        if self.page_size is not None:
            check_integer("page_size", self.page_size, 1)
            if self.block_size is not None and self.block_size % self.page_size:
                raise ValueError(f"page_size must divide block_size={self.block_size}, got {self.page_size}")
        check_choice("state_dtype", self.state_dtype, ("float32", "bfloat16"))
        if self.stochastic_rounding:
            raise ValueError("stochastic_rounding must be False, got True: states are rounded to nearest")
        for name in ("num_slots", "num_pages"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 2)

    @property
    def tokens_per_page(self) -> int:
        """``page_size`` with its default filled in."""
        return self.page_size or self.block_size or DEFAULT_PAGE


def check_serving(
    config: ModelConfig,
    cache: CacheOptions,
    speculative: SpeculativeOptions | None = None,
    *,
    recover: bool | None = None,
    mesh_shape: Mapping[str, int] | None = None,
    pipeline_stages: int = 1,
    drafter_vocab: int | None = None,
    drafter_hidden: int | None = None,
    tap_layers: Sequence[int] = (),
    implementation: str | None = None,
) -> None:
    """Refuse what can't work together; each field by itself was checked when it was made.

    Args:
      recover: asked for apart from ``speculative``; True without a speculative method is refused.
      mesh_shape: sizes of the mesh axes "data" and "model".
      pipeline_stages: parts the layers are split into. With recovery only 1: a commit reaches all layers at once.
      drafter_vocab, drafter_hidden, tap_layers: what a drafter that reads the target's hidden states was made for;
        layers count from 0.
      implementation: of the operations; a kernel must exist for the model's dtype and head sizes, and for prompts.

    Raises:
      ValueError: naming the argument, what it was and what is allowed.
    """
    if not isinstance(config, ModelConfig):
        raise ValueError(f"config must be a ModelConfig, got {type(config).__name__}")
    if not isinstance(cache, CacheOptions):
        raise ValueError(f"cache must be CacheOptions, got {type(cache).__name__}")
    if speculative is not None and not isinstance(speculative, SpeculativeOptions):
        raise ValueError(f"speculative must be SpeculativeOptions or None, got {type(speculative).__name__}")
    recovers = speculative is not None and speculative.recover
    if recover and speculative is None:
        raise ValueError("recover=True needs a speculative method, got speculative=None")
    if recover is not None and speculative is not None and recover != speculative.recover:
        raise ValueError(f"recover must be speculative.recover={speculative.recover}, got {recover}")
    if cache.mode == "align" and speculative is not None and cache.block_size < speculative.window:
        raise ValueError(
            f"block_size must be at least the window of {speculative.window} tokens (1 + num_draft_tokens), "
            f"got {cache.block_size}"
        )
    if speculative is not None and speculative.branches is not None and cache.mode == "align":
        raise ValueError(f"branches must be None in cache mode 'align', got {speculative.branches}")
    check_integer("pipeline_stages", pipeline_stages, 1)
    if pipeline_stages > 1 and recovers:
        raise ValueError(f"pipeline_stages must be 1 with recover=True, got {pipeline_stages}")
    _check_mesh(config, mesh_shape or {})
    if drafter_vocab is not None and drafter_vocab != config.vocab_size:
        raise ValueError(f"drafter_vocab must be the target's vocab_size={config.vocab_size}, got {drafter_vocab}")
    if drafter_hidden is not None and drafter_hidden != config.hidden_size:
        raise ValueError(f"drafter_hidden must be the target's hidden_size={config.hidden_size}, got {drafter_hidden}")
    layers = len(config.mixer_kinds)
    for layer in tap_layers:
        if not 0 <= layer < layers:
            raise ValueError(f"tap_layers must be in [0, {layers}), got {layer}")
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    sizes = {"K": config.kda_key_dim, "V": config.kda_value_dim, "W": 1 if speculative is None else speculative.window}
    dtypes = {"dtype": jnp.dtype(config.dtype), "state_dtype": jnp.dtype(cache.state_dtype)}
    if config.num_kda_layers:
        for operation in ("kda_decode", "kda_verify", "kda_commit"):
            find_kernel(operation, implementation, **sizes, **dtypes)
        for operation in ("conv_prefill", "kda_chunked"):  # prompts
            choose(operation, implementation)


def _check_mesh(config: ModelConfig, mesh_shape: Mapping[str, int]) -> None:
    for axis, size in mesh_shape.items():
        check_choice("mesh_shape", axis, ("data", "model"))
        check_integer(f"mesh_shape[{axis!r}]", size, 1)
    parts = mesh_shape.get("model", 1)
    for name in ("kda_num_heads", "kda_num_value_heads", "num_attention_heads"):
        heads = getattr(config, name)
        if heads and heads % parts:
            raise ValueError(f"mesh_shape['model']={parts} must divide {name}={heads}")
