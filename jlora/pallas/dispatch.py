"""Chooses the implementation of each op, once at start.

- `auto` takes the platform's kernels if they serve the model, and XLA (the reference) otherwise. It warns where a chip
  that has kernels computes without them.
- `pallas` takes the kernels, or raises with the reason. On NVIDIA, XLA still serves a group of
  projections whose units the kernels cannot read, unless that is every group.
- `xla` takes the reference.

`choose` checks every shape that a launch can have, so that no step fails later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from jlora.errors import ConfigError
from jlora.layout import BYTES, PoolLayout
from jlora.pallas.gpu_support import Gpu
from jlora.pallas.ops import GROUPS, Ops
from jlora.pallas.reference import CPU, XLA
from jlora.pallas.tiles import AttentionShape, Chip, LoraShape, chip_of

log = logging.getLogger(__name__)

SCALAR_SHARE = 0.5  # of a chip's scalar memory for one kernel's tables


@dataclass(frozen=True, slots=True)
class Site:
    """Platform and shapes for which to choose the ops."""

    platform: str  # jax's name of the backend: cpu, tpu, gpu
    kind: str  # `device_kind` of its devices
    layout: PoolLayout
    heads: int  # N, over all shards
    shapes: tuple[tuple[int, int], ...]  # (rows, tokens per row) of every launch
    width: int  # W, pages of the longest context
    rank: int = 256  # the largest of an adapter
    gpu: Gpu = Gpu()

    @property
    def has_kernels(self) -> bool:
        """Whether kernels are made for these devices, whatever model they serve."""
        if self.platform == "gpu":
            return not self.gpu.refusal(self.kind)
        return self.platform == "tpu" and chip_of(self.kind) is not None


@dataclass(frozen=True, slots=True)
class Choice:
    """One op's implementation and why."""

    op: str
    implementation: str
    reason: str


@dataclass(frozen=True, slots=True)
class Chosen:
    """The result of `choose`."""

    ops: Ops
    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        return "; ".join(f"{c.op}: {c.implementation} ({c.reason})" for c in self.choices)


# A platform's implementation of one op: name, maker (None: the reference), reason.
Offer = tuple[str, Callable[[], object] | None, str]

SERVES = "serves "  # begins the reason of kernels that serve all of an op
IN_PLACE = "XLA updates the donated pool in place and moves the same bytes"


def choose(site: Site, kernels: str = "auto") -> Chosen:
    """Chooses every op's implementation and logs it.

    Raises:
        ConfigError: `kernels` is pallas and the platform's kernels cannot serve an op.
    """
    offers: dict[str, Offer] = {} if kernels == "xla" else _offers(site)
    ops, choices = XLA, []
    for op in ("attention", "lora"):
        name, make, reason = offers.get(op, ("xla", None, "engine.kernels = xla"))
        if kernels == "pallas" and name == "xla":
            raise ConfigError(f"engine.kernels = 'pallas': no {op} kernel: {reason}; set it to auto or xla")
        if make is not None:
            ops = replace(ops, **{op: make()})
        choices.append(Choice(op, name, reason))
        if kernels == "auto" and site.has_kernels and not reason.startswith(SERVES):
            log.warning("engine.kernels = auto: %s on %s goes without its kernel, slower: %s", op, site.kind, reason)
    choices += [Choice(op, "xla", IN_PLACE) for op in ("write_kv", "write_blocks", "write_layers", "read_blocks")]
    chosen = Chosen(ops, tuple(choices))
    log.info("ops on %s (%s): %s", site.platform, site.kind, ", ".join(f"{c.op} {c.implementation}" for c in choices))
    log.debug("%s", chosen)
    return chosen


def _offers(site: Site) -> dict[str, Offer]:
    if site.platform == "tpu":
        return _tpu(site)
    if site.platform == "cpu":
        reason = "on a CPU the reference is the fast path"
        return {"attention": _xla(reason), "lora": ("xla", lambda: CPU.lora, f"{reason}, by tiles of tokens")}
    if site.platform != "gpu":
        reason = f"there are no kernels for {site.platform}"
    elif not (reason := site.gpu.refusal(site.kind)):
        return _gpu(site)
    return {"attention": _xla(reason), "lora": _xla(reason)}


def _xla(reason: str) -> Offer:
    return "xla", None, reason


def _gpu(site: Site) -> dict[str, Offer]:
    """Mosaic GPU kernels, for a layout from `gpu_support.fit_units`. XLA serves the groups that they cannot read."""
    from jlora.pallas import gpu_ops, gpu_support

    layout = site.layout
    tiles = gpu_ops.tiles_of(site.kind, layout, site.heads)
    slots = max((rows for rows, chunk in site.shapes if chunk == 1), default=1)  # none: a check of attention alone
    limits = gpu_ops.Limits(slots, site.rank, max(chunk for _, chunk in site.shapes))
    refused = gpu_support.lora_refusals(layout)
    left = "; ".join(f"{group} stays with XLA: {why}" for group, why in refused.items())
    gap = gpu_ops.runtime_refusal()
    attention_gap = gap or gpu_support.attention_refusal(layout)
    if site.width > gpu_support.LISTED:
        most = gpu_support.LISTED
        attention_gap = f"contexts of {site.width} pages exceed the {most} that fit in shared memory; "
        attention_gap += f"lower model.max_model_len to at most {most * layout.block_tokens}"
    lora_gap = gap or (left if len(refused) == len(GROUPS) else "")
    serves = SERVES + site.kind
    attention: Offer = ("pallas-gpu", lambda: gpu_ops.attention_op(tiles), serves)
    lora: Offer = ("pallas-gpu", lambda: gpu_ops.lora_op(layout, limits, XLA.lora, tiles), left or serves)
    return {
        "attention": _xla(attention_gap) if attention_gap else attention,
        "lora": _xla(lora_gap) if lora_gap else lora,
    }


def _tpu(site: Site) -> dict[str, Offer]:
    """Mosaic kernels: our LoRA, and jax's ragged paged attention."""
    chip = chip_of(site.kind)
    if chip is None:
        unknown = _xla(f"jlora/pallas/tiles.json does not know the chip {site.kind!r}")
        return {"attention": unknown, "lora": unknown}
    # Imported here, so that other platforms do not load the TPU compiler's front end.
    from jlora.pallas.tpu_attention import TpuAttention
    from jlora.pallas.tpu_lora import TpuLora

    serves = SERVES + chip.name
    attention: Offer = ("pallas-tpu", lambda: TpuAttention(chip), serves)
    lora: Offer = ("pallas-tpu", lambda: TpuLora(chip), serves)
    return {
        "attention": _xla(gap) if (gap := _attention_gap(site, chip)) else attention,
        "lora": _xla(gap) if (gap := _lora_gap(site, chip)) else lora,
    }


def _attention_gap(site: Site, chip: Chip) -> str:
    """Why jax's ragged paged attention cannot serve this site; empty if it can."""
    from jlora.pallas import tpu_attention

    layout = site.layout
    gap = _pool_gap(layout)
    room = int(SCALAR_SHARE * chip.smem_bytes)
    rows, chunk = min(site.shapes, key=lambda shape: tpu_attention.widest(*shape, room))
    tables = tpu_attention.smem_bytes(rows, chunk, site.width)
    if gap or tables > room:
        most = tpu_attention.widest(rows, chunk, room) * layout.block_tokens
        help_ = _lower(most, "engine.max_seqs" if chunk == 1 else "engine.max_step_tokens")
        return gap or f"page tables of {tables // 1024} KiB exceed the scalar memory; {help_}"
    for rows, chunk in site.shapes:
        if gap := _reason(chip.attention, AttentionShape.of(layout, site.heads, rows, chunk)):
            return gap
    return ""


def _lower(tokens: int, other: str) -> str:
    """What helps: a shorter context, if one of `tokens` is left, or less of the other key."""
    shorter = f", or model.max_model_len to at most {tokens}" if tokens else ""
    return f"lower {other}{shorter}"


def _lora_gap(site: Site, chip: Chip) -> str:
    """Why our LoRA kernel cannot serve this site; empty if it can."""
    layout = site.layout
    if gap := _pool_gap(layout):
        return gap
    lists = 8 * layout.blocks
    if lists > SCALAR_SHARE * chip.smem_bytes:
        return f"lists of {layout.blocks} blocks exceed the scalar memory; lower cache.hbm_blocks"
    for tokens in {rows * chunk for rows, chunk in site.shapes}:
        for group in GROUPS:
            if gap := _reason(chip.lora, LoraShape.of(layout, group, tokens)):
                return gap
    return ""


def _pool_gap(layout: PoolLayout) -> str:
    """Why slots of the pool are not whole tiles of the vector memory; empty if they are."""
    if layout.head_dim != 128:
        return f"head_dim = {layout.head_dim}: the TPU kernels need 128, a row of the vector memory"
    rows = 2 * layout.kv_heads // layout.tp // (4 // BYTES[layout.dtype])
    if rows not in (1, 2, 4) and rows % 8:
        return f"{layout.kv_heads // layout.tp} key-value heads per device: a slot must fill 1, 2, 4 or 8 n rows"
    return ""


def _reason(look_up: Callable, shape: object) -> str:
    try:
        look_up(shape)
    except ConfigError as e:
        return str(e)
    return ""
