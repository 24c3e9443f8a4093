"""The sizes of the two tiers: as configured, or else what the memory and the workload's limits allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from jlora.config import Config
from jlora.engine import device
from jlora.errors import ConfigError
from jlora.layout import BYTES, PoolLayout, smallest_block_tokens
from jlora.machine import available_bytes
from jlora.model.spec import ModelSpec
from jlora.pallas.gpu_support import lora_refusals


def choose_layout(config: Config, spec: ModelSpec, free_bytes: int) -> PoolLayout:
    """The pool's layout.

    On an accelerator, what `cache.hbm_fraction` leaves of the memory beside the weights is for the steps: XLA's
    temporaries (a prompt's hidden states and logits), the slots' state, copies on their way and pieces being merged.
    That is 8.7 GiB of an H100 with Llama 3 8B, and never less than `steps_bytes`. CUDA's context and loaded programs,
    and NCCL's buffers, have what jax leaves (`machine.gpu_share`), 6.3 GiB there.

    Args:
        free_bytes: memory of one device before the weights are loaded, or of the host on CPU.
    Raises:
        ConfigError: weights and pool do not fit; says how much is needed and what would help.
    """
    cache, tp = config.cache, config.model.tp
    on_cpu = jax.default_backend() == "cpu"
    one = _one_block(config, spec)
    per_block = one.block_bytes // (1 if on_cpu else tp)
    weights = spec.parameters * BYTES[spec.dtype] // (1 if on_cpu else tp)
    room = free_bytes - weights
    steps = 0 if on_cpu else steps_bytes(config, spec)
    share = room if on_cpu else min(int(room * cache.hbm_fraction), room - steps)
    if cache.hbm_blocks:
        blocks = cache.hbm_blocks
    else:
        fair = room // 4 if on_cpu else share
        # Enough for every slot's longest context and as much again for adapters and history.
        useful = 2 * config.engine.max_seqs * one.blocks_for(spec.max_len)
        blocks = min(_steady(fair // per_block, 5 if on_cpu else 8), useful)
    if blocks < 2 or blocks * per_block > room:
        need = (weights + steps + max(blocks, 2) * per_block) / 2**30
        computing = f", steps {steps / 2**30:.2f} GiB" if steps else ""
        raise ConfigError(
            f"model does not fit: weights {weights / 2**30:.2f} GiB{computing} and a pool of {max(blocks, 2)} blocks "
            f"need {need:.2f} GiB of the {free_bytes / 2**30:.2f} GiB free; "
            + _remedy(config, spec, share // per_block, on_cpu)
        )
    return replace(one, blocks=blocks + 1)  # block 0 is padding's


def _one_block(config: Config, spec: ModelSpec) -> PoolLayout:
    """The layout of a pool of one block.

    On a GPU its tokens are the first of 32 and 64 with which the kernels can read every adapter: a rank of
    Llama 3 70B's MLP fills more than half of a block of 32.
    """

    def layout(block_tokens: int) -> PoolLayout:
        return device.fitted(PoolLayout.of(spec, 1, block_tokens, config.model.tp), config.engine.kernels)

    backend = jax.default_backend()
    if config.cache.block_tokens:
        return layout(config.cache.block_tokens)
    if backend != "gpu":
        return layout(smallest_block_tokens(spec, 16 if backend == "cpu" else 32))
    found = [layout(smallest_block_tokens(spec, size)) for size in (32, 64)]
    return next((one for one in found if not lora_refusals(one)), found[0])


def steps_bytes(config: Config, spec: ModelSpec) -> int:
    """Bytes that steps need on an accelerator beside weights and pool.

    Of each slot and token of the vocabulary, 4 bytes at a time: 2 of the slots' state and 9.1 of the sampler's
    temporaries, as the compiler for a v5e counts them with Llama 3 8B. Beside them gate and up of a prompt in float32:
    the forward's temporaries there. It has 375 and 56 MiB.
    """
    engine = config.engine
    return 4 * (12 * engine.max_seqs * spec.vocab + 2 * engine.max_step_tokens * spec.mlp // config.model.tp)


def _steady(blocks: int, bits: int) -> int:
    """Rounded down to so many bits: programs compile again for another size, and free memory differs between starts.

    8 bits lose less than 1 %, which is more than drivers and cards of one kind differ by; a host's memory needs 5.
    """
    shift = max(0, blocks.bit_length() - bits)
    return blocks >> shift << shift


def _remedy(config: Config, spec: ModelSpec, fit: int, on_cpu: bool) -> str:
    """What to change when the model does not fit; `fit`: blocks for which there is room beside weights and steps."""
    if fit >= 2 and config.cache.hbm_blocks:
        return f"lower cache.hbm_blocks to at most {fit}"
    if fit >= 2:  # too few of them are the cache's share
        return f"set cache.hbm_blocks, to at most {fit}"
    smaller = ["choose a smaller model.path"]
    smaller += ["set model.dtype to bfloat16"] if spec.dtype == "float32" else []
    smaller += [] if on_cpu else ["raise model.tp"]  # on CPU all devices share one memory
    return "the weights leave no room for a pool: " + ", or ".join(smaller)


def choose_host_blocks(config: Config, layout: PoolLayout, adapters: Sequence[int], smallest: int = 0) -> int:
    """Blocks of the host tier.

    Args:
        adapters: blocks of each adapter that is known at start; those that are in memory have a copy there.
        smallest: blocks that it must have, for the largest adapter that is required.
    Raises:
        ConfigError: the required adapters do not fit, or the tier is larger than the memory.
    """
    cache = config.cache
    room = available_bytes() // layout.block_bytes
    asked = int(cache.host_gib * 2**30) // layout.block_bytes
    if cache.host_gib and not asked:
        raise ConfigError(
            f"cache.host_gib = {cache.host_gib}: holds not even one block of {layout.block_bytes} bytes; "
            "raise it, or set it to 0 for a size that fits the machine"
        )
    useful = 2 * sum(adapters) + 8 * layout.blocks  # as many adapters again, and a long history
    # On a CPU the pool and what a step computes are in the same memory. Beside an accelerator the host has nothing
    # else that is large: the process itself, a few adapters while they are read, a piece of the weights as it loads.
    fair = room // (4 if jax.default_backend() == "cpu" else 2)
    blocks = cache.host_blocks or asked or min(fair, useful)
    if blocks > room:
        raise ConfigError(
            f"the host tier of {blocks} blocks needs {blocks * layout.block_bytes / 2**30:.2f} GiB, and "
            f"{room * layout.block_bytes / 2**30:.2f} GiB are available; lower cache.host_blocks or cache.host_gib"
        )
    if blocks < smallest:
        raise ConfigError(
            f"the largest adapter needs {smallest} blocks of host memory ({layout.block_bytes} bytes each), and the "
            f"host tier has {blocks}; raise cache.host_blocks or cache.host_gib"
        )
    return blocks


def free_memory(device: Any) -> int:
    """Bytes that this process may still take: of the accelerator, or of the host on CPU."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return available_bytes()
