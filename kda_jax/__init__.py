"""Kimi Delta Attention in JAX, with exact speculative decoding whose memory does not grow with the drafts."""
