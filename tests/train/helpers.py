"""Small things for the training tests: a corpus of a few files, a tiny configuration, and a fast model."""

import jax
import jax.numpy as jnp

from kda_jax.config import ModelConfig


def tiny_config(vocab_size: int = 300, num_experts: int = 4) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        mixer_kinds=("kda", "mla"),
        ffn_kinds=("dense", "moe"),
        intermediate_size=32,
        kda_num_heads=2,
        kda_num_value_heads=2,
        kda_key_dim=8,
        kda_value_dim=4,
        num_attention_heads=2,
        qk_nope_dim=8,
        qk_rope_dim=4,
        v_head_dim=8,
        kv_lora_rank=8,
        num_experts=num_experts,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=8,
        initializer_range=0.1,
        max_length=256,
        bos_token_id=0,
        eos_token_ids=(1,),
        pad_token_id=2,
    )


def bigram_forward(params, config, tokens, lengths=None, *, return_load=False, remat=False):
    """A stand-in with the model's signature: the next token from the last one, and the router's choice for it."""
    x = params.embed[tokens]
    logits = jnp.einsum("btd,vd->btv", x, params.lm_head).astype(jnp.float32)
    if not return_load:
        return logits
    ffn = params.layers[-1].ffn
    scores = jax.nn.sigmoid(jnp.einsum("btd,ed->bte", x, ffn.router)) + ffn.router_bias[None, None]
    index = jax.lax.top_k(scores, config.num_experts_per_token)[1]
    return logits, jnp.bincount(index.reshape(-1), length=config.num_experts).astype(jnp.int32)[None]


def write_sources(folder, count: int = 80):
    """Python files that differ, enough for every split to get some."""
    for i in range(count):
        path = folder / f"pkg{i % 7}" / f"module_{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f'"""Module {i}."""\n\n\ndef function_{i}(items, limit={i}):\n    """Keep the first ones."""\n'
            f"    kept = []\n    for item in items[:limit]:\n        kept.append(item + {i})\n    return kept\n\n\n"
            f"class Holder{i}:\n    def __init__(self, value):\n        self.value = value\n\n"
            f"    def get(self):\n        return self.value * {i}\n"
        )
    return folder
