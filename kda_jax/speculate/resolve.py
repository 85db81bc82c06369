"""Which drafter runs: from options and what the caller passed to the object inside the compiled step."""

from typing import Any

from kda_jax.config import ModelConfig
from kda_jax.options import SpeculativeOptions
from kda_jax.speculate.draft_model import DraftModel
from kda_jax.speculate.ngram import NgramDrafter


def resolve_drafter(
    config: ModelConfig, speculative: SpeculativeOptions | None, drafter: Any, implementation: str | None
) -> tuple[Any, Any]:
    """(static drafter, its parameters) for a target of ``config``, (None, None) without speculation.

    ``drafter`` is what ``generate`` and the engine take. ``ValueError`` where it doesn't fit the options.
    """
    if speculative is None:
        if drafter is not None:
            raise ValueError("drafter is given without speculative options; pass speculative=SpeculativeOptions(...)")
        return None, None
    if not isinstance(speculative, SpeculativeOptions):
        raise ValueError(f"speculative must be SpeculativeOptions or None, got {type(speculative).__name__}")
    if speculative.method == "ngram":
        if drafter is not None:
            raise ValueError("drafter must be None for method 'ngram'; a drafter of your own goes with method 'custom'")
        return NgramDrafter.from_options(speculative), None
    if drafter is None:
        raise ValueError(f"drafter must be given for method {speculative.method!r}")
    if speculative.method == "draft":
        if not isinstance(drafter, DraftModel):
            raise ValueError(
                f"drafter must be a DraftModel for method 'draft' (kda_jax.load_drafter makes one), got {drafter!r}"
            )
        return drafter.drafter(config, speculative.num_draft_tokens, implementation)
    drafter, params = drafter if isinstance(drafter, tuple) else (drafter, None)
    if not (callable(drafter) and callable(getattr(drafter, "start", None)) and hasattr(drafter, "num_draft_tokens")):
        raise ValueError(
            f"drafter must be callable with num_draft_tokens and start (kda_jax.speculate.drafter), got {drafter!r}"
        )
    if drafter.num_draft_tokens != speculative.num_draft_tokens:
        raise ValueError(
            f"drafter.num_draft_tokens must be speculative.num_draft_tokens={speculative.num_draft_tokens}, "
            f"got {drafter.num_draft_tokens}"
        )
    return drafter, params
