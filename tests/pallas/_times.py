"""`python -m tests.pallas._times`: seconds of tracing, lowering and compiling the forwards of Llama-3-8B.

Needs both compilers; a line of JSON for each program. The layers are unrolled for an H200 and scanned for a v6e,
as the engine has them there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial

from jlora.pallas.cases import LLAMA3_8B
from tests.pallas import _aot, test_aot_tpu, test_gpu_step
from tests.pallas._aot import Compiled

SHAPES = ((64, 1), (16, 32), (2, 1), (1, 32))
POOL_GIB = 8


def programs() -> Iterator[tuple[dict[str, str], Callable[[], Compiled]]]:
    """What each program is, and a function that compiles it."""
    for shape in SHAPES:
        form = f"{shape[0]}x{shape[1]}"
        for kernels in ("xla", "pallas"):
            called = partial(test_gpu_step.compiled_step, LLAMA3_8B, POOL_GIB, shape, kernels=kernels)
            yield {"chip": "H200", "kernels": kernels, "form": form}, called
        mesh = partial(_aot.tpu_mesh, "v6e", 1)
        yield (
            {"chip": "v6e", "kernels": "pallas", "form": form},
            lambda shape=shape, mesh=mesh: test_aot_tpu.compiled_step(LLAMA3_8B, mesh(), POOL_GIB, shape),
        )


def main() -> None:
    for what, called in programs():
        traced_s, lowered_s, compiled_s = (round(seconds, 2) for seconds in called().stages)
        print(json.dumps({**what, "trace_s": traced_s, "lower_s": lowered_s, "compile_s": compiled_s}), flush=True)


if __name__ == "__main__":
    main()
