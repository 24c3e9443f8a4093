"""Named accelerators and models, and the time of a step on them. No jax.

The time of a step is the sum of three rooflines and a fixed part:

    seconds = fixed                                                       launch, collectives' latency
            + max(weights / bandwidth, token FLOPs / rate)                the seven projections
            + max(context KV / bandwidth, attention FLOPs / rate)         every sequence reads its context
            + max(adapter blocks / bandwidth, LoRA FLOPs / rate)          every adapter in the batch once

Rates are the peaks times the efficiencies of `CHIPS`. A file may bring measured coefficients instead
(docs/simulator.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from jlora.engine.cold_start import Costs, Line
from jlora.errors import ConfigError
from jlora.layout import BYTES, PoolLayout, smallest_block_tokens
from jlora.model.spec import ModelSpec, sites_of
from jlora.step_model import FittedSteps, StepModel

BLOCK_TOKENS = 32  # tokens per block on accelerators
RESERVE = 0.07  # share of the memory for activations, the runtime and fragmentation
HOP_S = 10e-6  # latency of one all-reduce between the chips of a host
GROUPS = 4  # groups of layers of a streamed copy (`jlora.model.step.layer_groups` of all models here)
ATTENTION = ("q", "k", "v", "o")  # projections of the paper's adapters (section 6.1)


@dataclass(frozen=True, slots=True)
class Chip:
    """One accelerator. Rates per second and chip, sizes in bytes.

    Attributes:
        flops: peak of dense 16-bit matrix products.
        hbm_bytes, hbm_bps: memory, and its peak bandwidth.
        link_bps: peak to the host, each way.
        peer_bps: peak to the other chips of the host, one way.
        compute, memory, link: shares of these peaks that large matrix products, streaming reads and
            pinned copies reach.
        step_s: fixed seconds of a step.
        source: source of the peaks, and the assumptions.
    """

    name: str
    flops: float
    hbm_bytes: float
    hbm_bps: float
    link_bps: float
    peer_bps: float
    compute: float
    memory: float
    link: float
    step_s: float
    source: str


PCIE3, PCIE4, PCIE5 = 15.75e9, 31.5e9, 63e9  # 16 lanes, each way

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            "npu", 256e12, 64e9, 1.6e12, PCIE4, 90e9, 0.5, 0.75, 0.65, 5e-3,
            "FASTLIBRA, Table 1 (256 TFLOPS FP16, 64 GB, PCIe 4 x16); assumed: 1.6 TB/s of HBM, three links of "
            "240 Gbit/s between cards, 5 ms per step, all shares",
        ),
        Chip(
            "a100", 312e12, 80e9, 2.039e12, PCIE4, 300e9, 0.7, 0.85, 0.8, 1e-3,
            "NVIDIA A100 80GB SXM data sheet; assumed: 1 ms per step, all shares",
        ),
        Chip(
            "a10", 125e12, 24e9, 600e9, PCIE4, 15e9, 0.6, 0.85, 0.8, 1e-3,
            "NVIDIA A10 data sheet; assumed: 1 ms per step, all shares, PCIe between cards",
        ),
        Chip(
            "h100", 989e12, 80e9, 3.35e12, PCIE5, 450e9, 0.76, 0.85, 0.8, 1e-3,
            "NVIDIA H100 SXM data sheet; shares of compute and memory as measured (752 TFLOP/s, 2.84 TB/s); assumed: "
            "the link's share, 1 ms per step",
        ),
        Chip(
            "h200", 989e12, 141e9, 4.8e12, PCIE5, 450e9, 0.8, 0.9, 0.8, 1e-3,
            "NVIDIA H200 SXM data sheet; shares of compute and memory as measured (790 TFLOP/s, 4.3 TB/s); assumed: "
            "the link's share, 1 ms per step",
        ),
        Chip(
            "v5e", 197e12, 16e9, 819e9, PCIE3, 200e9, 0.7, 0.85, 0.8, 1e-3,
            "cloud.google.com/tpu/docs/v5e; assumed: PCIe 3 x16 to the host, 1 ms per step, all shares",
        ),
        Chip(
            "v6e", 918e12, 32e9, 1.638e12, PCIE5, 400e9, 0.6, 0.85, 0.6, 1e-3,
            "cloud.google.com/tpu/docs/v6e (PCIe 5); assumed: 16 lanes, 1 ms per step, all shares",
        ),
    )
}  # fmt: skip


def _llama(name: str, vocab: int, sizes: tuple[int, int, int], heads: tuple[int, int], max_len: int) -> ModelSpec:
    """A spec from sizes (width, MLP width, layers) and heads (query, KV), which are 128 wide."""
    width, mlp, layers = sizes
    return ModelSpec(vocab, width, mlp, layers, *heads, 128, max_len, dtype="bfloat16", name=name)


# From the published config.json. The paper's "Llama-34B" is assumed to have Code Llama's shape.
MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        _llama("llama-2-7b", 32000, (4096, 11008, 32), (32, 32), 4096),
        _llama("llama-2-13b", 32000, (5120, 13824, 40), (40, 40), 4096),
        _llama("llama-34b", 32000, (8192, 22016, 48), (64, 8), 16384),
        _llama("llama-3-8b", 128256, (4096, 14336, 32), (32, 8), 8192),
        _llama("llama-3.1-8b", 128256, (4096, 14336, 32), (32, 8), 131072),
        _llama("llama-3.1-70b", 128256, (8192, 28672, 80), (64, 8), 131072),
    )
}


@dataclass(frozen=True, slots=True)
class Host:
    """A host that computes adapters' parts. `exchange_s`: latency of x and the delta, per place of a layer."""

    flops: float
    bps: float
    exchange_s: float


# Assumed: 32 cores of a server of 2021 with 30 GFLOP/s each at these shapes, 100 GB/s, shared-memory exchanges.
HOST = Host(1e12, 100e9, 30e-6)


@dataclass(frozen=True)
class Hardware:
    """A model on chips of one kind in one host, with tensor parallelism. Its adapters act on `projections`."""

    chip: Chip
    chips: int
    spec: ModelSpec
    block_tokens: int = BLOCK_TOKENS
    projections: tuple[str, ...] = ATTENTION

    @classmethod
    def fitted(cls, steps: FittedSteps) -> Hardware:
        """What the steps were fitted on: its pool, its link, and no peaks."""
        one = cls(
            Chip(steps.device, 0.0, 0.0, 0.0, steps.link_bps, 0.0, 0.0, 0.0, 1.0, steps.fixed_s, "fitted"),
            steps.chips,
            steps.spec,
            steps.block_tokens,
        )
        pool = (steps.device_blocks + 0.5) * one.layout.block_bytes  # half of one against rounding
        memory = (pool + one.weight_bytes) / (1 - RESERVE) / steps.chips
        return replace(one, chip=replace(one.chip, hbm_bytes=memory))

    @cached_property
    def layout(self) -> PoolLayout:
        """The pool's layout, without blocks. Raises ConfigError if the chips do not divide the heads."""
        return PoolLayout.of(self.spec, 0, smallest_block_tokens(self.spec, self.block_tokens), self.chips)

    @property
    def weight_bytes(self) -> int:
        return self.spec.parameters * BYTES[self.spec.dtype]

    @property
    def pool_bytes(self) -> int:
        """Memory left for the pool, over all chips. Raises ConfigError if the weights leave none."""
        left = int(self.chips * self.chip.hbm_bytes * (1 - RESERVE)) - self.weight_bytes
        if left < 2 * self.layout.block_bytes:
            raise ConfigError(
                f"{self.spec.name}: {self.weight_bytes / 1e9:.1f} GB of weights leave no room for the pool on "
                f"{self.chips} x {self.chip.name} with {self.chip.hbm_bytes / 1e9:.0f} GB each; use more --chips"
            )
        return left

    @property
    def link_bps(self) -> float:
        """Bytes per second between host and device, each way. Every chip copies its shard over its own link."""
        return self.chips * self.chip.link_bps * self.chip.link

    @property
    def places(self) -> int:
        """Places of a layer at which an adapter acts."""
        return len(sites_of(self.projections))

    def adapter_blocks(self, rank: int) -> int:
        """Blocks of an adapter of this rank."""
        return sum(-(-rank // self.layout.units[name].per_block) for name in self.projections)

    def costs(self, host: Host, bps: float) -> Costs:
        """Costs of a cold start, with `bps` of the link each way, for copies and exchanges alike."""
        step, layers = self.step_model(), self.spec.layers
        moved = layers * self.spec.exchanged(self.projections) * BYTES[self.spec.dtype] / bps / self.places
        block = self.layout.block_bytes
        return Costs(
            device=Line(step.fixed_s + step.weights_s, step.prompt_token_s),
            place=Line(layers * host.exchange_s, moved),
            block=Line(block / host.bps, 2 * block / BYTES[self.spec.dtype] / host.flops),
        )

    def step_model(self) -> StepModel:
        chip, spec, size = self.chip, self.spec, BYTES[self.spec.dtype]
        flops = self.chips * chip.flops * chip.compute
        bps = self.chips * chip.hbm_bps * chip.memory
        layers = spec.layers * sum(i * o for i, o in spec.projection_shapes.values())
        head = spec.vocab * spec.width
        # Two all-reduces per layer; a ring moves 2 (n - 1) / n of the data over each chip's links.
        moved = 2 * spec.layers * spec.width * size * 2 * (self.chips - 1) / self.chips
        between = moved / chip.peer_bps
        block = self.layout.block_bytes
        return StepModel(
            fixed_s=chip.step_s + (2 * spec.layers * HOP_S if self.chips > 1 else 0.0),
            weights_s=(layers + head) * size / bps,
            prompt_token_s=2 * layers / flops + between,
            decode_token_s=2 * (layers + head) / flops + between,
            context_token_s=block / self.layout.block_tokens / bps,
            pair_s=4 * spec.heads * spec.head_dim * spec.layers / flops,
            adapter_block_s=block / bps,
            adapter_token_s=2 * block / size / flops,
        )
