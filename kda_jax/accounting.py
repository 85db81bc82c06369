"""What a configuration costs, without any weights: layers, parameters, bytes of weights and of state per request."""

import dataclasses
import math

import jax
from rich.console import Group
from rich.table import Table

from kda_jax.cache_layout import CacheLayout, CacheSizes
from kda_jax.checks import check_integer
from kda_jax.config import ModelConfig
from kda_jax.layers.params import KDAParams, LayerParams, MLPParams, abstract_params


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the model, summed over its layers."""

    name: str
    total: int  # parameters
    active: int  # parameters that one token passes through
    nbytes: int  # of all its weights, as they are held


@dataclasses.dataclass(frozen=True)
class Window:
    """Bytes one request needs in the KDA layers to verify ``size`` tokens: the last sampled one and its drafts.

    Natively a slot is kept for each of them, so that any prefix can be accepted: a recurrent state, and the history of
    the short convolutions that every slot has. With recovery one checkpoint is kept and each token leaves a record: the
    correction, the key and the raw gate of each head. The input of the short convolutions is recorded for each token
    either way. The one history that a request has anyhow is not counted here.
    """

    size: int
    native_states: int
    native_histories: int  # of the slots beyond the first
    recover_states: int
    recover_records: int
    conv_inputs: int

    @property
    def native(self) -> int:
        return self.native_states + self.native_histories + self.conv_inputs

    @property
    def recover(self) -> int:
        return self.recover_states + self.recover_records + self.conv_inputs


@dataclasses.dataclass(frozen=True)
class Account:
    """The numbers of ``kda-jax inspect``."""

    num_kda_layers: int
    num_mla_layers: int
    num_dense_layers: int
    num_moe_layers: int
    dtype: str
    parts: tuple[Part, ...]
    recurrent_bytes: int  # per request: fp32 states of the KDA layers
    conv_bytes: int  # per request: histories of the short convolutions
    latent_bytes_per_token: int  # per request and token: latents of the MLA layers
    window: Window

    @property
    def total_parameters(self) -> int:
        return sum(part.total for part in self.parts)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through, the whole embedding and head included."""
        return sum(part.active for part in self.parts)

    @property
    def weight_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def state_bytes(self, tokens: int, *, recover: bool = True) -> int:
        """Bytes one request of ``tokens`` tokens keeps and needs while a window is verified and then committed.

        A commit put off to the next step keeps that window's records, ``window.recover_records`` and
        ``window.conv_inputs``, a second time while the next is verified.
        """
        window = self.window.recover if recover else self.window.native
        return window + self.conv_bytes + tokens * self.latent_bytes_per_token


def account(config: ModelConfig, *, window: int = 8) -> Account:
    """Count ``config``. ``window`` is tokens per verify step, ``1 + num_draft_tokens``; at least 1.

    State is counted in the activation dtype ``config.dtype``, recurrent states and corrections in fp32.
    """
    check_integer("window", window, 1)
    layout = CacheLayout.from_sizes(CacheSizes.from_config(config), window=window, dtype=config.dtype)
    nbytes = {part.name: part.nbytes for part in layout.states}
    state, history = nbytes["state"], nbytes["conv"]
    return Account(
        num_kda_layers=config.num_kda_layers,
        num_mla_layers=config.num_mla_layers,
        num_dense_layers=config.ffn_kinds.count("dense"),
        num_moe_layers=config.ffn_kinds.count("moe"),
        dtype=config.dtype,
        parts=_parts(config),
        recurrent_bytes=state,
        conv_bytes=history,
        latent_bytes_per_token=nbytes["latents"],
        window=Window(
            size=window,
            native_states=window * state,
            native_histories=(window - 1) * history,
            recover_states=state,
            recover_records=nbytes["correction"] + nbytes["key"] + nbytes["raw_gate"],
            conv_inputs=nbytes["conv_inputs"],
        ),
    )


def _parts(config: ModelConfig) -> tuple[Part, ...]:
    params = abstract_params(config, config.dtype)
    groups: dict[str, list] = {"embedding": [params.embed], "head": [params.lm_head], "norms": [params.norm]}
    for layer in params.layers:
        for name, leaves in _layer_parts(layer).items():
            groups.setdefault(name, []).extend(jax.tree.leaves(leaves))
    parts = []
    for name, leaves in groups.items():
        total = sum(math.prod(leaf.shape) for leaf in leaves)
        # every expert has the same size, so the share is exact
        active = total * config.num_experts_per_token // config.num_experts if name == "routed experts" else total
        nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        parts.append(Part(name, total, active, nbytes))
    return tuple(parts)


def _layer_parts(layer: LayerParams) -> dict[str, list]:
    mixer, ffn = layer.mixer, layer.ffn
    parts = {
        "norms": [layer.input_norm, layer.post_norm],
        "KDA layers" if isinstance(mixer, KDAParams) else "MLA layers": [mixer],
    }
    if isinstance(ffn, MLPParams):
        return parts | {"dense MLPs": [ffn]}
    parts |= {"routed experts": [ffn.w1, ffn.w2, ffn.w3], "routers": [ffn.router, ffn.router_bias]}
    return parts if ffn.shared is None else parts | {"shared experts": [ffn.shared]}


def format_count(number: int) -> str:
    """``number`` to three digits or more: 963, 12.3 K, 4.56 M, 49.12 B."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return str(number)


def format_bytes(number: int) -> str:
    """``number`` of bytes in binary units: 8,064 B, 1.4 MiB."""
    if number < 16 * 1024:
        return f"{number:,} B"
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    raise AssertionError(number)


def format_report(numbers: Account, *, name: str = "model") -> Group:
    """Tables for a terminal: ``rich.print(format_report(account(config)))``."""
    layers = Table("kind", "layers", title=f"{name}: layers")
    for kind, count in (
        ("KDA", numbers.num_kda_layers),
        ("MLA", numbers.num_mla_layers),
        ("dense MLP", numbers.num_dense_layers),
        ("MoE", numbers.num_moe_layers),
    ):
        layers.add_row(kind, str(count))

    parameters = Table("part", "total", "active", "bytes", title=f"parameters ({numbers.dtype})")
    for part in numbers.parts:
        parameters.add_row(part.name, format_count(part.total), format_count(part.active), format_bytes(part.nbytes))
    parameters.add_section()
    sums = format_count(numbers.total_parameters), format_count(numbers.active_parameters)
    parameters.add_row("sum", *sums, format_bytes(numbers.weight_bytes))

    state = Table("state", "bytes", title="state per request")
    state.add_row("recurrent (fp32)", format_bytes(numbers.recurrent_bytes))
    state.add_row("convolution histories", format_bytes(numbers.conv_bytes))
    state.add_row("MLA latents, per token", format_bytes(numbers.latent_bytes_per_token))

    window = numbers.window
    verify = Table("", "native", "recover", title=f"verifying a window of {window.size}, per request")
    verify.add_row("recurrent states", format_bytes(window.native_states), format_bytes(window.recover_states))
    verify.add_row("convolution histories of more slots", format_bytes(window.native_histories), format_bytes(0))
    verify.add_row("records", format_bytes(0), format_bytes(window.recover_records))
    verify.add_row("convolution inputs", format_bytes(window.conv_inputs), format_bytes(window.conv_inputs))
    verify.add_section()
    verify.add_row("sum", format_bytes(window.native), format_bytes(window.recover))

    for table in (layers, parameters, state, verify):
        for column in table.columns[1:]:
            column.justify = "right"
    return Group(layers, parameters, state, verify)
