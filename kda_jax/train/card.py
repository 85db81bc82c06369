"""The README of a trained model, written from the figures of its run and from nothing else."""

from pathlib import Path
from string import Template
from typing import Any

_CARD = Template("""\
# A small Kimi-Linear model of Python source

$parameters parameters: $layers layers, $kda of Kimi Delta Attention and $mla of multi-head latent attention without
positions, $experts routed experts of which $active work on a token. Weights in bf16; a byte-level BPE of $vocab
entries. It exists so that every path of the package can be run on real text; it completes Python a little and knows
nothing.

| | |
| --- | --- |
| trained on | $source ($train_files files, $train_megabytes MB, $train_tokens tokens) |
| licence of the text | $licence |
| made by | `kda-jax train`, jax $jax |
| device | $device |
| date | $date |
| training time | $minutes minutes in all |
| weights from | step $step, after $tokens_seen tokens ($epochs passes over the text) |
| calibration | $calibration |
| held-out bits per byte | $held_out_bpb |
| held-out nats per token | $held_out_nats |

The held-out figures are over $held_out_files files ($held_out_kilobytes kB) that no step and no choice saw: files are
split by a hash of their path, $held_out_files held out and $validation_files for choosing the weights. Text is cut into
windows of $window tokens that each start without context.
$quality
The model writes what the text it learned from looks like. Do not run what it writes.
""")

_QUALITY = Template("""
$samples held-out prompts (starts of top-level functions and classes), sampled at temperature $temperature for at most
$max_new_tokens tokens:

| | |
| --- | --- |
| tokenise as Python up to their last complete line | $strict of $samples |
| the same, text cut inside a bracket or triple-quoted string excused | $lenient of $samples |
| repeated 8-grams | $repeated % |
""")


def model_card(
    metrics: dict[str, Any],
    config: Any,
    quality: dict[str, Any] | None = None,
    calibration: dict[str, Any] | None = None,
) -> str:
    """Markdown from ``metrics.json`` of a run, its ``ModelConfig`` and, where there are any, the JSON of ``evaluate``
    (whose held-out figures then count, being those of the weights as they are) and of ``calibrate``.

    Raises ``ValueError`` naming the figure that is missing.
    """
    try:
        corpus = metrics["corpus"]
        fields = {
            "parameters": f"{metrics['parameters']:,}",
            "layers": config.num_layers,
            "kda": config.num_kda_layers,
            "mla": config.num_mla_layers,
            "experts": config.num_experts,
            "active": config.num_experts_per_token,
            "vocab": config.vocab_size,
            "source": corpus["source"],
            "licence": corpus["licence"],
            "train_files": f"{corpus['train']['files']:,}",
            "train_megabytes": f"{corpus['train']['bytes'] / 1e6:.1f}",
            "train_tokens": f"{corpus['train']['tokens']:,}",
            "validation_files": corpus["validation"]["files"],
            "held_out_files": corpus["held_out"]["files"],
            "held_out_kilobytes": f"{corpus['held_out']['bytes'] / 1e3:,.0f}",
            "jax": metrics["versions"]["jax"],
            "device": metrics["device"],
            "date": metrics["date"],
            "minutes": f"{metrics['minutes']:.1f}",
            "step": f"{metrics['model_step']:,}",
            "tokens_seen": f"{metrics['model_tokens_seen']:,}",
            "epochs": f"{metrics['epochs']:.1f}",
            "held_out_bpb": f"{metrics['held_out_bits_per_byte']:.3f}",
            "held_out_nats": f"{metrics['held_out_nats_per_token']:.3f}",
            "window": metrics["evaluation_seq_len"],
            "quality": "",
            "calibration": "none",
        }
        if calibration is not None:
            fields["calibration"] = (
                f"final norm times {calibration['scale']}: the first scale whose samples of {calibration['samples']} "
                f"validation prompts had at most {100 * calibration['max_repeated']:.0f} % repeated 8-grams"
            )
        if quality is not None:
            figures = metrics | quality
            fields["held_out_bpb"] = f"{figures['held_out_bits_per_byte']:.3f}"
            fields["held_out_nats"] = f"{figures['held_out_nats_per_token']:.3f}"
            fields["quality"] = _QUALITY.substitute(
                samples=quality["samples"],
                temperature=quality["temperature"],
                max_new_tokens=quality["max_new_tokens"],
                strict=quality["tokenise_strict"],
                lenient=quality["tokenise_lenient"],
                repeated=f"{100 * quality['repeated_8gram_share']:.1f}",
            )
    except KeyError as error:
        raise ValueError(f"metrics: the figure {error} is missing") from None
    return _CARD.substitute(fields)


def write_card(folder: str | Path, *args: Any) -> Path:
    """Write ``model_card(*args)`` to ``README.md`` in ``folder``."""
    path = Path(folder) / "README.md"
    path.write_text(model_card(*args))
    return path
