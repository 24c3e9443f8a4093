"""Computed first tokens of cold starts: Llama-3-8B on an H200, by link, rank and prompt.

Nothing is measured. `jlora.engine.cold_start.predict` takes costs that follow from bytes, operations and the
assumptions below. An exchange and a copy share the link's rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jlora.engine.cold_start import Cold, Costs, Line, predict
from jlora.model.cut import SITES
from jlora.pallas.cases import LLAMA3_8B
from jlora.sim.hardware import CHIPS

LAUNCH_S, TRANSFER_S = 10e-6, 20e-6  # of a program, of a transfer
HOST_FLOPS, HOST_BPS = 1e12, 200e9  # of 32 cores in float32, and their memory
NUMBER = 2  # bytes, bfloat16
LINKS, RANKS, PROMPTS = (0.5, 2.0, 10.0, 50.0), (16, 64, 256), (16, 64, 256, 1024)


@dataclass(frozen=True, slots=True)
class Bytes:
    """Of one token's exchanges and of one rank, over all layers of projections at some places of a layer."""

    exchange: int
    rank: int

    @classmethod
    def of(cls, places: int) -> Bytes:
        """The first `places` of q, k and v; o; gate and up; down."""
        shapes, sites = LLAMA3_8B.projection_shapes, SITES[:places]
        out = sum(shapes[names[0]][0] for names in sites)
        back = sum(shapes[name][1] for names in sites for name in names)
        rank = sum(sum(shapes[name]) for names in sites for name in names)
        return cls(NUMBER * LLAMA3_8B.layers * (out + back), NUMBER * LLAMA3_8B.layers * rank)


def costs(gbps: float, places: int) -> Costs:
    """Of one prompt; a block stands for one rank."""
    chip, layers, held = CHIPS["h200"], LLAMA3_8B.layers, Bytes.of(places)
    weights_s = NUMBER * LLAMA3_8B.parameters / (chip.hbm_bps * chip.memory)
    device = Line(weights_s + 5 * layers * LAUNCH_S, 2 * LLAMA3_8B.parameters / (chip.flops * chip.compute))
    place = Line(2 * layers * TRANSFER_S, held.exchange / places / (gbps * 1e9))
    return Costs(device, place, Line(held.rank / HOST_BPS, held.rank / NUMBER * 2 / HOST_FLOPS))


def table(places: int, ahead: int = 0) -> Iterator[dict[str, float]]:
    """Milliseconds to the first token by way of starting; `ahead`: copies of the same size that come before."""
    for gbps in LINKS:
        for rank in RANKS:
            for tokens in PROMPTS:
                copy_s = Bytes.of(places).rank * rank / (gbps * 1e9)
                cold = Cold(tokens, rank, places, (1 + ahead) * copy_s, copy_s, 4)
                found = predict(cold, costs(gbps, places))
                yield {"gbps": gbps, "rank": rank, "tokens": tokens, **{way: 1e3 * s for way, s in found.items()}}
