"""Small random Kimi-Linear models made by transformers, for the golden files and the live comparison.

Needs torch and transformers, which are imported on use. Every parameter gets values that show a mistake: norm weights
away from 1, correction biases away from 0, decays from -1e-3 to about -50 a step. Sizes differ wherever transformers
allows it (its value heads have the size of its key heads).
"""

import numpy as np

SIZES = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "linear_head_dim": 32,
    "linear_num_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 512,
}


def make_model(seed: int, **changes):
    """A ``KimiLinearForCausalLM`` in fp32 eval mode whose every parameter is exact in bfloat16."""
    import torch
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    model = KimiLinearForCausalLM(KimiLinearConfig(**{**SIZES, **changes})).eval()
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            values = torch.from_numpy(np.asarray(_draw(rng, name, tuple(tensor.shape)), np.float32))
            tensor.copy_(values.to(torch.bfloat16).to(torch.float32))
    return model


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith("A_log"):
        return np.log(rng.uniform(1, 16, shape))
    if name.endswith("dt_bias"):
        dt = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shape))
        return np.where(rng.random(shape) < 0.1, rng.uniform(0, 3, shape), dt + np.log(-np.expm1(-dt)))
    if name.endswith("e_score_correction_bias"):
        return 0.2 * rng.standard_normal(shape)
    if "norm" in name:
        return 1 + 0.3 * rng.standard_normal(shape)
    if "embed_tokens" in name:
        return rng.standard_normal(shape)
    if "conv1d" in name:
        return 0.5 * rng.standard_normal(shape)
    return rng.standard_normal(shape) * 1.2 / np.sqrt(shape[-1])


def stepwise_logits(model, tokens: np.ndarray, steps: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Feed ``tokens`` [T] one at a time through the cache, then ``steps`` greedy tokens.

    Returns the logits fp32 [T + steps, vocab] and all tokens [T + steps + 1]. One token at a time transformers uses
    the recurrent form, which is exact at strong decay; its chunked form subtracts cumulative decays, which is not.
    """
    import torch

    cache, logits, sequence = None, [], [int(t) for t in tokens]
    with torch.no_grad():
        for position in range(len(tokens) + steps):
            out = model(torch.tensor([[sequence[position]]]), cache=cache, use_cache=True)
            cache = out.cache
            logits.append(out.logits[0, -1].numpy())
            if position + 1 == len(sequence):
                sequence.append(int(logits[-1].argmax()))
    return np.stack(logits), np.asarray(sequence, np.int32)


def router_margins(model, tokens: np.ndarray) -> np.ndarray:
    """For each MoE layer and position, by how much the last expert chosen beats the first one that was not."""
    import torch

    margins = []

    def hook(router, inputs, outputs):
        scores = torch.sigmoid(outputs[0]) + router.e_score_correction_bias
        top = scores.sort(dim=-1, descending=True).values
        margins.append((top[:, router.top_k - 1] - top[:, router.top_k]).numpy())

    handles = [layer.mlp.gate.register_forward_hook(hook) for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    with torch.no_grad():
        model(torch.tensor(tokens[None].astype(np.int64)))
    for handle in handles:
        handle.remove()
    return np.stack(margins)
