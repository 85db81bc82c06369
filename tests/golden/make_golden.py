"""Make the golden files: ``python tests/golden/make_golden.py`` (needs the parity extra).

Writes beside itself ``kimi_linear_tiny/`` (a checkpoint saved by transformers, in bfloat16, exact in it) and
``kimi_linear_tiny.npz``: for each prompt length T, ``tokens_T`` int32 [T + 32] (the prompt, then transformers' greedy
continuation), ``logits_T`` fp32 [T, vocab] over the prompt, ``gaps_T`` fp32 [32], the distance between the two largest
logits at each greedy step. All are computed by transformers in fp32, one token at a time.
"""

import pathlib
import shutil
import sys

import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import reference_model  # noqa: E402

LENGTHS = (1, 5, 63, 64, 65, 130)
NEW_TOKENS = 32
SEED = 20


def main() -> None:
    import torch

    torch.set_num_threads(1)
    model = reference_model.make_model(SEED)
    rng = np.random.default_rng(SEED)
    arrays, gap, margin, chunked = {}, np.inf, np.inf, 0.0
    for length in LENGTHS:
        prompt = rng.integers(3, model.config.vocab_size, length)
        logits, tokens = reference_model.stepwise_logits(model, prompt, NEW_TOKENS - 1)
        top = np.sort(logits[length - 1 :], axis=-1)
        arrays[f"tokens_{length}"] = tokens
        arrays[f"logits_{length}"] = logits[:length]
        arrays[f"gaps_{length}"] = top[:, -1] - top[:, -2]
        gap = min(gap, arrays[f"gaps_{length}"].min())
        margin = min(margin, reference_model.router_margins(model, tokens[:-1]).min())
        with torch.no_grad():
            whole = model(torch.tensor(prompt[None])).logits[0].numpy()
        error = np.sqrt(np.mean((whole - logits[:length]) ** 2) / np.mean(logits[:length] ** 2))
        chunked = max(chunked, float(error))
        print(length, "std", logits.std(), "distinct", len(set(tokens[length:].tolist())), "chunked", error)
    print(f"smallest logit gap {gap:.1e}, smallest router margin {margin:.1e}, chunked against stepwise {chunked:.1e}")
    if gap < 1e-3 or margin < 1e-5:
        raise SystemExit("a near tie: choose another SEED")
    folder = HERE / "kimi_linear_tiny"
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    np.savez_compressed(HERE / "kimi_linear_tiny.npz", **arrays)


if __name__ == "__main__":
    main()
