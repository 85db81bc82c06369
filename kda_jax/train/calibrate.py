"""Temperature calibration of a trained model, by the scale of its final norm.

Logits are linear in the final norm's weight, so scaling it is dividing every logit by a temperature (Guo et al. 2017).
A small model that is sure of itself copies itself when sampled below temperature 1; the scale is chosen on the
validation files, as the largest one at which samples stay under a given share of repeated 8-grams.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kda_jax.config import ModelConfig
from kda_jax.layers.params import ModelParams
from kda_jax.train.corpus import Split
from kda_jax.train.evaluate import held_out_loss, sample_quality

SCALES = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8)
MAX_REPEATED = 0.15


def scale_logits(params: ModelParams, scale: float) -> ModelParams:
    """``params`` whose logits are ``scale`` times as large; the final norm keeps its dtype."""
    if not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale!r}")
    return dataclasses.replace(params, norm=(params.norm * scale).astype(params.norm.dtype))


def calibrate(
    params: ModelParams,
    config: ModelConfig,
    tokenizer: Any,
    prompts: Sequence[dict[str, str]],
    validation: Split,
    *,
    forward: Callable[..., Any],
    scales: Sequence[float] = SCALES,
    max_repeated: float = MAX_REPEATED,
    seed: int = 0,
) -> tuple[ModelParams, dict[str, Any]]:
    """The parameters at the first of ``scales`` whose samples of ``prompts`` repeat at most ``max_repeated``.

    Returns them with a record of every scale tried: ``repeated_8gram_share``, ``tokenise_strict``, and the validation
    ``bits_per_byte`` that the scale costs or saves. Raises ``ValueError`` when none of ``scales`` suffices.
    """
    tried = []
    for scale in scales:
        scaled = scale_logits(params, scale)
        quality, _ = sample_quality(scaled, config, tokenizer, list(prompts), seed=seed)
        record = {name: quality[name] for name in ("samples", "tokenise_strict", "repeated_8gram_share")}
        loss = held_out_loss(scaled, config, validation, forward=forward)
        tried.append({"scale": scale, **record, "validation_bits_per_byte": loss["bits_per_byte"]})
        if quality["repeated_8gram_share"] <= max_repeated:
            return scaled, {"scale": scale, "max_repeated": max_repeated, "samples": len(prompts), "tried": tried}
    raise ValueError(f"none of the scales {tuple(scales)} brings the repeated 8-grams to {max_repeated}: {tried}")
