"""Kimi Delta Attention in JAX, with exact speculative decoding whose memory does not grow with the drafts."""

from kda_jax import ops
from kda_jax.cache_options import CacheOptions
from kda_jax.checkpoint import Model, load, save
from kda_jax.config import ModelConfig
from kda_jax.engine import Engine
from kda_jax.generation import GenerateResult, GenerateStats, StreamChunk, generate, logits, stream
from kda_jax.options import GenerateOptions, SpeculativeOptions
from kda_jax.speculate.draft_model import DraftModel, load_drafter
from kda_jax.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = [
    "CacheOptions",
    "DraftModel",
    "Engine",
    "GenerateOptions",
    "GenerateResult",
    "GenerateStats",
    "Model",
    "ModelConfig",
    "SpeculativeOptions",
    "StreamChunk",
    "Tokenizer",
    "generate",
    "load",
    "load_drafter",
    "logits",
    "ops",
    "save",
    "stream",
]
