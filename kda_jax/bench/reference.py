"""transformers' Kimi-Linear as a decoder to compare with (the ``parity`` extra)."""

import functools
import tempfile
from collections.abc import Callable

import numpy as np
import torch
import transformers

from kda_jax.checkpoint import Model, save


def decoders(
    model: Model, max_new_tokens: int
) -> tuple[dict[str, Callable[[np.ndarray], np.ndarray]], dict[str, str | int]]:
    """Greedy ``KimiLinearForCausalLM.generate`` with its cache, on the CPU, weights and dtype those of ``model``.

    No token ends it. With torch's own number of threads and, if that is another, with one: on a busy machine many
    threads can be much slower than one. Also the versions, for the report.
    """
    with tempfile.TemporaryDirectory() as folder:
        save(model, folder)
        loaded = transformers.KimiLinearForCausalLM.from_pretrained(folder, dtype=getattr(torch, model.config.dtype))
    loaded.eval()
    loaded.generation_config.eos_token_id = None

    def decode(prompt: np.ndarray, threads: int) -> np.ndarray:
        torch.set_num_threads(threads)
        tokens = torch.tensor(prompt[None].astype(np.int64))
        with torch.inference_mode():
            out = loaded.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                use_cache=True,
            )
        return out[0, len(prompt) :].numpy().astype(np.int32)

    found = {
        f"transformers, {threads} torch thread{'s' * (threads > 1)}": functools.partial(decode, threads=threads)
        for threads in dict.fromkeys((torch.get_num_threads(), 1))
    }
    return found, {"torch": torch.__version__, "transformers": transformers.__version__}
