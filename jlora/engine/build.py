"""Puts an engine together from a configuration: the one place where serving's objects meet."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from tqdm.auto import tqdm

from jlora.adapters.names import at_start, check_name
from jlora.adapters.packing import pack
from jlora.adapters.peft import read_peft
from jlora.adapters.registry import AdapterRegistry
from jlora.cache.catalog import make_policy
from jlora.cache.manager import CacheManager, Sizes
from jlora.cache.pool import DevicePool, HostPool
from jlora.cache.swapper import Swapper
from jlora.cache.transfer import Meter
from jlora.config import Config
from jlora.engine import device
from jlora.engine.batch import Projections
from jlora.engine.engine import Engine, NewAdapter
from jlora.engine.runner import Runner
from jlora.engine.scheduler import Scheduler
from jlora.errors import ConfigError, InvalidArgument, JloraError
from jlora.layout import BYTES, PoolLayout, smallest_block_tokens
from jlora.model import checkpoint, sharding
from jlora.model.spec import ModelSpec

log = logging.getLogger(__name__)

ASSUMED_GBPS = 10.0  # of the link, until copies have been measured


def build_engine(config: Config, progress: bool = True) -> tuple[Engine, ModelSpec]:
    """Loads the model and its adapters, makes the pool, compiles every program.

    Raises:
        JloraError: one clear line of what cannot be had and which key to change.
    """
    if not config.model.path:
        raise ConfigError("model.path: is empty; name a directory or a hub id")
    _use_compile_cache(config.serve.compile_cache)
    directory = checkpoint.resolve(config.model.path)
    spec = checkpoint.read_spec(directory, config.model.dtype, config.model.max_model_len)
    mesh = sharding.make_mesh(config.model.tp)
    layout = choose_layout(config, spec, free_memory(mesh.devices.flat[0]))
    new = _read_adapters(config, spec, layout, progress)  # before the weights: a wrong path shows at once
    registry = AdapterRegistry(config.adapters.alora_missing)
    runner, pool = build_device(config, spec, layout, lambda uid: registry.by_uid(uid).projections, progress)
    host_blocks = choose_host_blocks(config, layout, sum(len(a.packed.projections) for a in new))
    manager = make_manager(config, layout, host_blocks, streams=pool.groups > 1)
    scheduler = Scheduler(manager, config.engine, spec.eos_ids, config.model.seed)
    swapper = Swapper(pool, HostPool(layout, host_blocks), config.cache.link_gbps)
    engine = Engine(scheduler, registry, runner, swapper, layout, config.engine.overlap)
    if config.engine.warmup:
        warm_up(runner, progress)
    for adapter in new:
        engine.add_adapter(adapter)
    sizes = (layout.blocks - 1, host_blocks, layout.block_tokens)
    log.info("engine ready: %d blocks on the device and %d on the host, of %d tokens; %s", *sizes, mesh)
    return engine, spec


def build_device(
    config: Config, spec: ModelSpec, layout: PoolLayout, projections: Projections, progress: bool
) -> tuple[Runner, DevicePool]:
    """Loads the weights and makes the pool: the part of an engine that lives on the device."""
    mesh = sharding.make_mesh(config.model.tp)
    stacked = device.uses_scan(config.engine.layers, mesh.devices.flat[0].platform)
    directory = checkpoint.resolve(config.model.path)
    params = checkpoint.load_params(directory, spec, sharding.shardings(spec, mesh), stacked=stacked, progress=progress)
    return device.device_side(config, spec, layout, projections, params)


def make_manager(config: Config, layout: PoolLayout, host_blocks: int, streams: bool) -> CacheManager:
    """The cache that `config.cache` asks for, on the machine's own clock."""
    block_s = layout.block_bytes / (1e9 * (config.cache.link_gbps or ASSUMED_GBPS))
    policy = make_policy(config.cache, Meter(block_s, block_tokens=layout.block_tokens))
    sizes = Sizes(layout.blocks - 1, host_blocks, layout.block_tokens)
    cache = config.cache
    return CacheManager(sizes, policy, time.monotonic, cache.prefix_reuse, streams, cache.monitor_s)


def choose_layout(config: Config, spec: ModelSpec, free_bytes: int) -> PoolLayout:
    """The pool's layout: as configured, else what the memory and the workload's limits allow.

    Args:
        free_bytes: memory of one device before the weights are loaded, or of the host on CPU.
    Raises:
        ConfigError: weights and pool do not fit; says how much is needed and what would help.
    """
    cache, tp = config.cache, config.model.tp
    on_cpu = jax.default_backend() == "cpu"
    block_tokens = cache.block_tokens or smallest_block_tokens(spec, 16 if on_cpu else 32)
    one = device.fitted(PoolLayout.of(spec, 1, block_tokens, tp), config.engine.kernels)
    per_block = one.block_bytes // (1 if on_cpu else tp)
    weights = spec.parameters * BYTES[spec.dtype] // (1 if on_cpu else tp)
    room = free_bytes - weights
    if cache.hbm_blocks:
        blocks = cache.hbm_blocks
    else:
        fair = int(room * cache.hbm_fraction) if not on_cpu else room // 4
        # Enough for every slot's longest context and as much again for adapters and history.
        useful = 2 * config.engine.max_seqs * one.blocks_for(spec.max_len)
        blocks = min(fair // per_block, useful)
    if blocks < 2 or blocks * per_block > room:
        need = (weights + max(blocks, 2) * per_block) / 2**30
        raise ConfigError(
            f"model does not fit: weights {weights / 2**30:.2f} GiB and a pool of {max(blocks, 2)} blocks need "
            f"{need:.2f} GiB of the {free_bytes / 2**30:.2f} GiB free; "
            + _remedy(config, spec, room // per_block, on_cpu)
        )
    return replace(one, blocks=blocks + 1)  # block 0 is padding's


def _remedy(config: Config, spec: ModelSpec, fit: int, on_cpu: bool) -> str:
    """What to change when the model does not fit; `fit`: blocks that the memory beside the weights holds."""
    fit = fit if on_cpu else int(fit * config.cache.hbm_fraction)  # a step needs memory of its own
    if fit >= 2 and config.cache.hbm_blocks:
        return f"lower cache.hbm_blocks to at most {fit}"
    if fit >= 2:  # too few of them are the cache's share
        return f"set cache.hbm_blocks, to at most {fit}"
    smaller = ["choose a smaller model.path"]
    smaller += ["set model.dtype to bfloat16"] if spec.dtype == "float32" else []
    smaller += [] if on_cpu else ["raise model.tp"]  # on CPU all devices share one memory
    return "the weights leave no room for a pool: " + ", or ".join(smaller)


def choose_host_blocks(config: Config, layout: PoolLayout, adapters: int) -> int:
    """Blocks of the host tier: as configured, else what memory allows, as far as it is useful.

    Args:
        adapters: blocks of the adapters loaded at start; their master copies live there.
    Raises:
        ConfigError: the adapters do not fit, or the tier is larger than the memory.
    """
    cache = config.cache
    room = min(_available(), _cgroup_limit()) // layout.block_bytes
    asked = int(cache.host_gib * 2**30) // layout.block_bytes
    if cache.host_gib and not asked:
        raise ConfigError(
            f"cache.host_gib = {cache.host_gib}: holds not even one block of {layout.block_bytes} bytes; "
            "raise it, or set it to 0 for a size that fits the machine"
        )
    useful = 2 * adapters + 8 * layout.blocks  # as many adapters again, and a long history
    blocks = cache.host_blocks or asked or min(room // 4, useful)
    if blocks > room:
        raise ConfigError(
            f"the host tier of {blocks} blocks needs {blocks * layout.block_bytes / 2**30:.2f} GiB, and "
            f"{room * layout.block_bytes / 2**30:.2f} GiB are available; lower cache.host_blocks or cache.host_gib"
        )
    if blocks < adapters:
        raise ConfigError(
            f"the adapters need {adapters} blocks of host memory ({layout.block_bytes} bytes each), and the host tier "
            f"has {blocks}; raise cache.host_blocks or cache.host_gib"
        )
    return blocks


def free_memory(device: Any) -> int:
    """Bytes that this process may still take: of the accelerator, or of the host on CPU."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return min(_available(), _cgroup_limit())


def _available() -> int:
    """Bytes that the machine can give without swapping (Linux; elsewhere its free pages)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _cgroup_limit() -> int:
    """Bytes that a container's limit leaves; 2^63 where there is none."""
    root = Path("/sys/fs/cgroup")
    try:
        return int((root / "memory.max").read_text()) - int((root / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2 here, or "max"
        return 2**63


def _use_compile_cache(where: str) -> None:
    """Compiled programs persist across starts, so that only the first one waits for XLA."""
    if not where:
        return
    home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    jax.config.update("jax_compilation_cache_dir", str(home / "jlora" / "xla") if where == "auto" else where)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def warm_up(runner: Runner, progress: bool) -> None:
    """Compiles every program."""
    with tqdm(total=runner.programs, desc="compiling", disable=not progress, leave=False) as bar:
        for name in runner.warm_up():
            bar.set_postfix_str(name)
            bar.update()


def _read_adapters(config: Config, spec: ModelSpec, layout: PoolLayout, progress: bool) -> list[NewAdapter]:
    paths = at_start(config.adapters.paths, config.adapters.dir)
    names: Iterable[str] = tqdm(paths, desc="adapters", disable=not progress or len(paths) < 2, leave=False)
    found = []
    for name in names:
        try:
            found.append(read_adapter(name, paths[name], config, spec, layout))
        except JloraError as e:
            raise type(e)(f"adapter {name}: {e} (from {paths[name]})") from e
    return found


def read_adapter(name: str, path: str, config: Config, spec: ModelSpec, layout: PoolLayout) -> NewAdapter:
    """Reads, checks and packs an adapter; touches no engine, so it may take its time on any thread.

    Raises:
        JloraError: the name is not one for an adapter, or see `read_peft` and `pack`.
    """
    if check_name(name) == (config.model.name or spec.name):
        raise InvalidArgument(f"name = {name!r}: is the base model's own name")
    started = time.monotonic()
    base_names = tuple(n for n in (config.model.name, config.model.path, spec.name) if n)
    adapter = read_peft(path, spec, config.adapters.max_rank, base_names)
    packed = pack(adapter, layout)
    return NewAdapter(name, adapter, packed, time.monotonic() - started)
