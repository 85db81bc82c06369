"""How many requests fit a memory budget, with a state per position and with records. Exact bytes, no weights.

A native request owns ``window`` slots (each a recurrent state and its convolution history) in every KDA layer, a
recovering one a single slot, and records for the rows of a step. MLA latents are in whole pages and are the same for
both. With tensor parallelism whatever has heads or channels is split over the ranks; latents are on every rank.
"""

import dataclasses

from rich.console import Group
from rich.table import Table

from kda_jax.accounting import format_bytes
from kda_jax.cache_layout import CacheLayout, CacheSizes
from kda_jax.checks import check_integer

GiB = 1 << 30

# published sizes of Kimi-K3's text model: 69 KDA and 24 MLA layers
KIMI_K3 = CacheSizes(
    kda_layers=69, heads=96, value_heads=96, key_dim=128, value_dim=128, conv_width=4, mla_layers=24, latent_dim=576
)
# published for Kimi-K3 with 8 ranks and an equal budget a rank; its context and page layout are not public
PUBLISHED_GAIN = 10.97
PUBLISHED_BUDGET = int(46.48 * GiB)
PUBLISHED_RANKS = 8


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Bytes on one rank.

    Attributes:
      sizes: of the model; dtype: of activations, states are fp32.
      window: tokens of a verify, 1 + drafts. context: tokens of a request.
      ranks: of tensor parallelism; it divides the heads.
      page_size: tokens of a latent page.

    Raises:
      ValueError: naming the field.
    """

    sizes: CacheSizes
    window: int
    context: int
    ranks: int = 1
    page_size: int = 64
    dtype: str = "bfloat16"

    def __post_init__(self):
        for name in ("window", "context", "ranks", "page_size"):
            check_integer(name, getattr(self, name), 1)
        for name in ("heads", "value_heads"):
            if getattr(self.sizes, name) % self.ranks:
                raise ValueError(f"ranks must divide the model's {getattr(self.sizes, name)} {name}, got {self.ranks}")

    @property
    def layout(self) -> CacheLayout:
        sizes = self.sizes._replace(
            heads=self.sizes.heads // self.ranks, value_heads=self.sizes.value_heads // self.ranks
        )
        return CacheLayout.from_sizes(sizes, window=self.window, dtype=self.dtype)

    @property
    def slot(self) -> int:
        """A recurrent state and a convolution history in every KDA layer."""
        return self.layout.state("state").nbytes + self.layout.state("conv").nbytes

    @property
    def latents(self) -> int:
        """Whole pages for the context and the window on top of it."""
        pages = -(-(self.context + self.window - 1) // self.page_size)
        return pages * self.page_size * self.layout.state("latents").nbytes

    @property
    def native(self) -> int:
        """Of one request: a slot for every position of the window, latents, the step's convolution inputs."""
        return self.window * self.slot + self.latents + self.layout.state("conv_inputs").nbytes

    @property
    def recover(self) -> int:
        """Of one request: one slot, latents, the step's records."""
        return self.slot + self.latents + sum(state.nbytes for state in self.layout.workspace)

    @property
    def recover_deferred(self) -> int:
        """``recover`` where a commit is put off into the next step's verify: two steps' records are there at once."""
        return self.recover + sum(state.nbytes for state in self.layout.workspace)

    @property
    def gain(self) -> float:
        """Percent more requests in the same memory."""
        return 100 * (self.native / self.recover - 1)

    @property
    def gain_deferred(self) -> float:
        """``gain`` with ``recover_deferred``."""
        return 100 * (self.native / self.recover_deferred - 1)

    def alternatives(self, sequences: int) -> int:
        """Bytes of recurrent states that ``sequences`` native requests hold for drafts only."""
        return sequences * (self.window - 1) * self.layout.state("state").nbytes


def format_capacity(capacity: Capacity, *, budget: int, sequences: int, name: str) -> Group:
    """Tables for a terminal."""
    waste = Table("held for drafts only", "bytes", title=f"{name}: native states of {sequences} requests")
    drafts = capacity.window - 1
    waste.add_row(f"{sequences} requests x {drafts} drafts", f"{capacity.alternatives(sequences):,}")

    title = f"requests of {capacity.context:,} tokens in {format_bytes(budget)}"
    fits = Table("", "native", "recover", "recover, commit deferred", title=title)
    whole = (capacity.native, capacity.recover, capacity.recover_deferred)
    slots = (capacity.window * capacity.slot, capacity.slot, capacity.slot)
    fits.add_row("one request", *map(format_bytes, whole))
    fits.add_row("  of it slots", *map(format_bytes, slots))
    fits.add_row("  of it latents", *[format_bytes(capacity.latents)] * 3)
    work = [total - slot - capacity.latents for total, slot in zip(whole, slots, strict=True)]
    fits.add_row("  of it workspace", *map(format_bytes, work))
    fits.add_section()
    fits.add_row("requests", *(f"{budget // total:,}" for total in whole))
    fits.add_row("gain", "", f"{capacity.gain:+.2f} %", f"{capacity.gain_deferred:+.2f} %")
    for table in (waste, fits):
        for column in table.columns[1:]:
            column.justify = "right"
    assumed = (
        f"Assumed: {capacity.ranks} tensor-parallel rank{'s'[: capacity.ranks > 1]}, bytes per rank; states, histories "
        f"and records split by head, latents on every rank in pages of {capacity.page_size} tokens; window of "
        f"{capacity.window}; {capacity.dtype} activations, fp32 states and corrections; every request verifies in the "
        "same step. Weights, activations and allocator overhead are not counted."
    )
    return Group(waste, fits, assumed)


def format_kimi_k3(rank: Capacity, *, budget: int, sequences: int) -> Group:
    """The cache of Kimi-K3, in all and on one ``rank``, beside the published gain. Its weights can't be loaded yet."""
    whole = dataclasses.replace(rank, ranks=1)
    total = Table("state of a sequence, all ranks", "bytes", title="kimi_k3: cache only, weights are not supported yet")
    total.columns[1].justify = "right"
    for state in ("state", "conv"):
        total.add_row(
            {"state": "recurrent (fp32)", "conv": "convolution histories"}[state],
            format_bytes(whole.layout.state(state).nbytes),
        )
    total.add_row("MLA latents, per token", format_bytes(whole.layout.state("latents").nbytes))
    drafts = f"held for drafts only, natively: {sequences} requests x {rank.window - 1} drafts"
    total.add_row(drafts, f"{whole.alternatives(sequences):,}")
    published = (
        f"Published for this model: {PUBLISHED_GAIN:+.2f} % at {PUBLISHED_BUDGET / GiB:.2f} GiB a rank, "
        f"{PUBLISHED_RANKS} ranks; its context length and page layout are not public. Ours, above, is at "
        f"{rank.context:,} tokens, {rank.ranks} ranks."
    )
    return Group(total, format_capacity(rank, budget=budget, sequences=sequences, name="kimi_k3, one rank"), published)
