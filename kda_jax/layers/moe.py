"""Feed-forward blocks: the gated MLP, and the mixture of experts with a sigmoid router."""

import jax
import jax.numpy as jnp
from einops import rearrange

from kda_jax.config import ModelConfig
from kda_jax.layers.linear import linear, matmul_precision
from kda_jax.layers.params import MLPParams, MoEParams

DENSE_EXPERTS = 16  # up to this many experts, running all of them on every token beats fetching or sorting
DENSE_TOKENS = 64


def mlp(params: MLPParams, x):
    """``down(silu(gate x) * (up x))``: [..., D] -> [..., D]."""
    return linear(jax.nn.silu(linear(x, params.gate_proj)) * linear(x, params.up_proj), params.down_proj)


def route(params: MoEParams, x, config: ModelConfig):
    """Choose experts for tokens ``x`` [n, D]: indices int32 [n, k] and weights fp32 [n, k] (DeepSeek-V3's router).

    Scores are ``sigmoid`` of fp32 logits; the correction bias steers the selection only, unless
    ``router_weight_uses_bias`` asks for the released remote code's weights.
    """
    logits = jnp.einsum(
        "nd,ed->ne", x.astype(jnp.float32), params.router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    scores = jax.nn.sigmoid(logits)
    biased = scores + jax.lax.stop_gradient(params.router_bias)[None]
    selection = biased
    if config.num_expert_group > 1:
        groups = rearrange(biased, "n (g e) -> n g e", g=config.num_expert_group)
        group_scores = jnp.sum(jax.lax.top_k(groups, 2)[0], axis=-1)
        kept = jax.lax.top_k(group_scores, config.topk_group)[1]
        kept = jnp.any(kept[:, :, None] == jnp.arange(config.num_expert_group)[None, None], axis=1)
        selection = rearrange(jnp.where(kept[:, :, None], groups, -jnp.inf), "n g e -> n (g e)")
    index = jax.lax.top_k(selection, config.num_experts_per_token)[1]
    weights = jnp.take_along_axis(biased if config.router_weight_uses_bias else scores, index, axis=1)
    if config.moe_renormalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return index, weights * config.routed_scaling_factor


def _experts_gathered(params: MoEParams, x, index, weights):
    """Few tokens: fetch each chosen expert's matrices. [n, D] -> fp32 [n, D]."""
    precision, dtype = matmul_precision(x.dtype), x.dtype
    w1, w3, w2 = (w[index].astype(dtype) for w in (params.w1, params.w3, params.w2))
    gate = jnp.einsum("nd,nkid->nki", x, w1, precision=precision)
    hidden = jax.nn.silu(gate) * jnp.einsum("nd,nkid->nki", x, w3, precision=precision)
    out = jnp.einsum("nki,nkdi->nkd", hidden, w2, precision=precision, preferred_element_type=jnp.float32)
    return jnp.sum(out * weights[..., None], axis=1)


def _experts_dense(params: MoEParams, x, index, weights):
    """Few experts: run all of them and weigh with zeros. [n, D] -> fp32 [n, D]."""
    experts = params.w1.shape[0]
    chosen = index[..., None] == jnp.arange(experts)[None, None]
    weights = jnp.sum(jnp.where(chosen, weights[..., None], 0), axis=1)  # [n, E]
    gate, up = (linear(x, rearrange(w, "e i d -> (e i) d")) for w in (params.w1, params.w3))
    hidden = rearrange(jax.nn.silu(gate) * up, "n (e i) -> n e i", e=experts)
    hidden = (hidden.astype(jnp.float32) * weights[..., None]).astype(x.dtype)
    # for few tokens expert by expert: w2 then need not be transposed
    product = "nei,edi->end" if x.shape[0] <= DENSE_TOKENS else "nei,edi->nd"
    out = jnp.einsum(
        product,
        hidden,
        params.w2.astype(x.dtype),
        precision=matmul_precision(x.dtype),
        preferred_element_type=jnp.float32,
    )
    return out if out.ndim == 2 else jnp.sum(out, axis=0)


def _experts_grouped(params: MoEParams, x, index, weights):
    """The general case: tokens sorted by expert, one grouped product a matrix. [n, D] -> fp32 [n, D]."""
    precision, dtype = matmul_precision(x.dtype), x.dtype
    n, k = index.shape
    flat = index.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=params.w1.shape[0]).astype(jnp.int32)
    tokens = x[order // k]

    def grouped(a, w, **kwargs):
        w = jnp.swapaxes(w.astype(dtype), 1, 2)
        return jax.lax.ragged_dot(a, w, sizes, precision=precision, **kwargs)

    hidden = jax.nn.silu(grouped(tokens, params.w1)) * grouped(tokens, params.w3)
    out = grouped(hidden, params.w2, preferred_element_type=jnp.float32) * weights.reshape(-1)[order][:, None]
    return jnp.zeros((n, x.shape[1]), jnp.float32).at[order // k].add(out)


def moe(params: MoEParams, x, config: ModelConfig):
    """Routed and shared experts: [B, T, D] -> ([B, T, D], expert indices int32 [B, T, k]).

    Routed outputs are combined in fp32 and rounded once; the shared expert is added unweighted.
    """
    B, T, _ = x.shape
    tokens = rearrange(x, "b t d -> (b t) d")
    index, weights = route(params, tokens, config)
    if config.num_experts <= DENSE_EXPERTS:
        experts = _experts_dense
    elif B * T * config.num_experts_per_token <= config.num_experts:
        experts = _experts_gathered
    else:
        experts = _experts_grouped
    out = rearrange(experts(params, tokens, index, weights).astype(x.dtype), "(b t) d -> b t d", b=B)
    if params.shared is not None:
        out = out + mlp(params.shared, x)
    return out, rearrange(index, "(b t) k -> b t k", b=B)
