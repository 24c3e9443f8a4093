"""Puts an engine together from a configuration: the one place where serving's objects meet."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from dataclasses import replace as replaced
from functools import partial
from pathlib import Path

import jax
from jax.sharding import Mesh
from tqdm.auto import tqdm

from jlora import __version__, machine
from jlora.adapters.catalogue import Catalogue, Row
from jlora.adapters.registry import AdapterRegistry
from jlora.cache.catalog import make_policy
from jlora.cache.manager import CacheManager, Sizes
from jlora.cache.pool import HostPool, as_shortage
from jlora.cache.readiness import Helps
from jlora.cache.swapper import Swapper
from jlora.cache.transfer import Meter
from jlora.config import AdaptersConfig, Config, EngineConfig, replace
from jlora.engine import cold_start, compile_cache, device, one_row, sources
from jlora.engine.ahead import First
from jlora.engine.assist import Assist
from jlora.engine.batch import Buckets
from jlora.engine.built import Between, Built, Finish, Phases
from jlora.engine.cold_start import Chooser, Costs
from jlora.engine.device import Prepared
from jlora.engine.engine import Engine, Shape
from jlora.engine.host_lora import HostLora
from jlora.engine.merger import Base, Merger
from jlora.engine.merging import AdapterCost, Fixed, Merging, Times
from jlora.engine.ports import Parts
from jlora.engine.records import NewAdapter
from jlora.engine.runner import Runner
from jlora.engine.scheduler import Scheduler
from jlora.engine.share import adapter_cost
from jlora.engine.sizing import choose_host_blocks, choose_layout, free_memory, steps_bytes
from jlora.engine.sources import Reader
from jlora.engine.switching import Switching
from jlora.errors import ConfigError, DataLoss, FailedPrecondition, JloraError, NotFound, ResourceExhausted
from jlora.layout import PoolLayout
from jlora.memory import KEPT_BYTES
from jlora.model import checkpoint, hub, sharding
from jlora.model.config_json import warn_of_generation
from jlora.model.llama import Params
from jlora.model.own_chat import OwnChat
from jlora.model.spec import ModelSpec, sites_of
from jlora.ports import OsThreads, System, Threads
from jlora.replica import ReplicaInfo
from jlora.step_model import Basis, FittedSteps
from jlora.validation import Limits

log = logging.getLogger(__name__)

ASSUMED_GBPS = 10.0  # of the link, until copies have been measured
COMPILERS = 4  # programs compiled at a time; XLA uses several cores for each
START_READERS = 4  # adapters read at a time before anybody is served, on a machine with as many cores


@contextmanager
def _within_memory() -> Iterator[None]:
    """What runs here loads an engine: without memory for it, the start says so in one line."""
    try:
        yield
    except Exception as e:
        if not isinstance(as_shortage(e), MemoryError):
            raise
        reason = str(e).partition("\n")[0]
        raise ResourceExhausted(f"too little memory to load the model and its cache: {reason}") from e


@_within_memory()
def build(config: Config, progress: bool = True, system: System | None = None) -> Built:
    """Loads the model and its adapters, makes the pool, compiles the programs that serve every request.

    Raises:
        JloraError: one clear line of what cannot be had and which key to change.
    """
    if not config.model.path:
        raise ConfigError("model.path: is empty; name a directory or a hub id")
    if jax.config.jax_enable_x64:
        raise FailedPrecondition("jax_enable_x64 = True: must be False: the engine's programs count in 32 bits")
    os.environ.update(machine.gpu_share(os.environ))  # no effect where the process has used jax before
    with ExitStack() as undo, ExitStack() as failed:
        built = _built(config, progress, system or System(), undo, failed)
        failed.pop_all()
        return built


def _built(config: Config, progress: bool, system: System, undo: ExitStack, failed: ExitStack) -> Built:
    """See `build`. `undo` has what must end with it, and `failed` what ends if it fails: threads hold the pool."""
    phases = Phases()
    kept = compile_cache.use(config.serve.compile_cache)
    directory = Path(hub.resolve(config.model.path))  # once: a hub's `main` may move
    spec = checkpoint.read_spec(directory, config.model.dtype, config.model.max_model_len)
    warn_of_generation(directory)
    mesh = sharding.make_mesh(config.model.tp)
    config = _decided(config, spec.dtype, mesh.devices.flat[0].platform, kept)
    layout = choose_layout(config, spec, free_memory(mesh.devices.flat[0]))
    info = _info(config, spec, layout, mesh, checkpoint.fingerprint(directory))
    for difference in compile_cache.differences(kept, compiled_for(info, spec, layout)):
        log.warning("serve.compile_cache was compiled for another server, programs compile again: %s", difference)
    base_names = tuple(n for n in (info.model, config.model.path, spec.name) if n)
    reader = _reader(config.adapters, spec, layout, base_names, system, OwnChat(directory, system.files))
    steps = fitted_steps(config, spec, layout)
    catalogue = Catalogue(config.adapters.registry, system.threads, reader.fits)
    failed.callback(catalogue.close)
    found = sources.find(config, reader, catalogue, progress)  # before the weights: a wrong path shows at once
    registry = AdapterRegistry(config.adapters.alora_missing)
    _check_host_size(config, found, reader)
    phases.end("adapters")
    prepared = device.prepare(config, spec, layout, lambda uid: registry.by_uid(uid).projections)
    first = _begin(prepared, directory, system, undo) if config.engine.warmup else None
    read = partial(_weights, directory, prepared)
    runner, pool = prepared.complete(read(progress), system.clock)
    failed.callback(runner.close)  # a notebook keeps the error, and with it this frame
    phases.end("weights")
    host_blocks, found = _host_tier(config, found, reader)
    manager = make_manager(config, layout, host_blocks, spec, registry, system)
    host = HostPool(layout, host_blocks)
    swapper = Swapper(pool, host, config.cache.link_gbps, system)
    failed.callback(swapper.close)
    merger = _merger(config, prepared, partial(read, False), runner, system)
    switching = None if merger is None else _switching(config.engine, merger, registry, swapper)
    seeds = system.random or random.Random(config.model.seed)
    scheduler = Scheduler(manager, config.engine, spec.eos_ids, seeds, switching)
    if config.engine.cold_start in ("auto", "cpu"):
        lora = HostLora(layout, host.layer, system)
        runner.accept(Assist(prepared.ahead.programs.cut, lora, mesh, config.cache.link_gbps))
    parts = Parts(scheduler, registry, runner, swapper, system.clock, config.adapters.readers, catalogue, system.wall)
    engine = Engine(parts, Shape(spec.max_len, layout.block_bytes, config.engine.overlap), switching)
    if first is not None:
        warm_up(runner, first, progress)
    if merger is not None:
        merger.prepare()  # it measures: no program compiles beside it any more
    phases.end("programs")
    cost = partial(adapter_cost, runner, layout, config.adapters.max_rank)
    price = partial(_price, switching if config.engine.warmup else None, cost)
    finish = partial(_finish, (price, partial(_open_groups, config.engine.cold_start, steps, parts, switching, runner)))
    if not runner.left:
        finish(lambda call: call())
    _begin_with(engine, found, host_blocks, reader, config, system.threads)
    sizes = (layout.blocks - 1, host_blocks, layout.block_tokens, mesh)
    log.info("engine ready: %d blocks on the device and %d on the host, of %d tokens; %s", *sizes)
    phases.end("rest")
    log.info("started in %s", phases)
    if runner.left:
        log.info("%d parts of further programs compile while it serves", len(runner.left))
    return Built(engine, parts, runner, replaced(info, start_s=phases.seconds), reader, catalogue, finish)


def _check_host_size(config: Config, found: list[Row | NewAdapter], reader: Reader) -> None:
    """A size that is refused shows before the weights are read; it is checked again when they are there."""
    if config.cache.host_blocks or config.cache.host_gib:
        _host_blocks(config, found, reader)


def _host_tier(config: Config, found: list[Row | NewAdapter], reader: Reader) -> tuple[int, list[Row | NewAdapter]]:
    """Blocks of the host tier, and the adapters that it can hold."""
    blocks = _host_blocks(config, found, reader)
    return blocks, list(sources.held(found, blocks, sources.required(config, reader)))


def _host_blocks(config: Config, found: list[Row | NewAdapter], reader: Reader) -> int:
    required = sources.required(config, reader)
    smallest = max((item.blocks for item in found if item.name in required), default=0)
    return choose_host_blocks(config, reader.layout, [item.blocks for item in found], smallest)


def _reader(
    adapters: AdaptersConfig,
    spec: ModelSpec,
    layout: PoolLayout,
    base_names: tuple[str, ...],
    system: System,
    own_chat: OwnChat,
) -> Reader:
    """Reads the adapters that this engine serves."""
    rank, targets, files = adapters.max_rank, adapters.target_modules, system.files
    return Reader(spec, layout, rank, base_names, files, system.clock, targets, system.memory, own_chat=own_chat)


def _begin(prepared: Prepared, directory: Path, system: System, undo: ExitStack) -> First:
    """Compiles the programs that serve every request, beside what follows.

    The files are looked at first: a process that ends with an error ends when the programs under way are compiled.
    """
    checkpoint.check_files(directory, prepared.spec)
    threads = system.threads.pool("jlora-warm-up", min(os.cpu_count() or 1, COMPILERS))
    undo.callback(threads.shutdown, wait=False, cancel_futures=True)
    return prepared.ahead.begin(prepared.builder, threads)


def _weights(directory: Path, prepared: Prepared, progress: bool) -> Params:
    """The base model's, read from its files."""
    shardings = sharding.shardings(prepared.spec, prepared.mesh)
    return checkpoint.load_params(directory, prepared.spec, shardings, stacked=prepared.stacked, progress=progress)


def _merger(
    config: Config, prepared: Prepared, pristine: Callable[[], Params], runner: Runner, system: System
) -> Merger | None:
    """What merges adapters into the base, where `engine.merge` asks for it."""
    if config.engine.merge == "off":
        return None
    spec, layout, mesh, stacked = prepared.spec, prepared.layout, prepared.mesh, prepared.stacked
    return Merger(Base(spec, layout, mesh, stacked, config.adapters.max_rank, pristine), runner, system.clock)


def _switching(engine: EngineConfig, merger: Merger, registry: AdapterRegistry, swapper: Swapper) -> Switching:
    """What `engine.merge` asks for."""
    if engine.merge != "auto":
        return Switching(Fixed(engine.max_seqs, engine.merge_starve_s), merger, registry, swapper, engine.merge)
    return Switching(Merging(engine.max_seqs, engine.merge_starve_s, Times(AdapterCost())), merger, registry, swapper)


def make_manager(
    config: Config, layout: PoolLayout, host_blocks: int, spec: ModelSpec, registry: AdapterRegistry, system: System
) -> CacheManager:
    """The cache that `config.cache` asks for.

    Its host tier leaves memory to the reading of the largest adapter, and to steps where they are computed there.
    """
    block_s = layout.block_bytes / (1e9 * (config.cache.link_gbps or ASSUMED_GBPS))
    policy = make_policy(config.cache, Meter(block_s, block_tokens=layout.block_tokens))
    step = steps_bytes(config, spec) if jax.default_backend() == "cpu" else 0

    def spare() -> int:
        read = sources.READING * registry.largest * layout.block_bytes
        return system.memory.beside(max(KEPT_BYTES, step + read)) // layout.block_bytes

    sizes = Sizes(layout.blocks - 1, host_blocks, layout.block_tokens, layout.blocks_for(spec.max_len), spare)
    return CacheManager(sizes, policy, system.clock, config.cache.prefix_reuse, monitor_s=config.cache.monitor_s)


def fitted_steps(config: Config, spec: ModelSpec, layout: PoolLayout) -> FittedSteps | None:
    """What `engine.step_model` names; warns if other programs ran then. Raises ConfigError if it does not fit."""
    path = config.engine.step_model
    if not path:
        return None
    steps = FittedSteps.read(Path(path))
    name = device.name_of(jax.devices()[0])
    steps.check(Basis(spec, name, config.model.tp, layout.block_tokens, config.cache.link_gbps))
    for key, then, now in steps.differences({"jax": jax.__version__, **programs_of(config, spec, layout)}):
        log.warning("step model %s: %s = %s, here it is %s; its times may differ: fit again", path, key, then, now)
    return steps


def programs_of(config: Config, spec: ModelSpec, layout: PoolLayout) -> dict[str, str | int]:
    """What decides how long programs take, beside model, device and pool; of each op its implementation."""
    engine = config.engine
    chosen = device.choose_ops(config, spec, layout, tuple(Buckets.of(engine).shapes))
    scans = device.uses_scan(engine.layers, jax.devices()[0].platform)
    return {
        **{choice.op: choice.implementation for choice in chosen.choices},
        "engine.layers": "scan" if scans else "unroll",
        "engine.max_seqs": engine.max_seqs,
        "engine.max_step_tokens": engine.max_step_tokens,
        "adapters.target_modules": config.adapters.target_modules,
        "model.max_model_len": spec.max_len,
    }


def _finish(last: Iterable[Finish], between: Between) -> None:
    """See `Built.finish`."""
    for each in last:
        each(between)


def _price(switching: Switching | None, costs: Callable[[Between], AdapterCost], between: Between) -> None:
    """What merging can gain: until this is known, "auto" takes it for nothing."""
    if switching is not None:
        switching.policy.times.cost = costs(between)


def _open_groups(
    way: str,
    steps: FittedSteps | None,
    parts: Parts,
    switching: Switching | None,
    runner: Runner,
    between: Between,
) -> None:
    """From now on copies come in groups of layers, and the host helps."""
    manager = parts.scheduler.manager
    if not between(lambda: runner.takes_groups):
        return
    if runner.pool.groups > 1 and way != "wait":
        between(manager.stream)
    if way in ("auto", "cpu"):
        chooser = _chooser(steps, runner, parts, between) if way == "auto" else None
        helps = chooser or (lambda adapter, left_s, tokens: True)
        decide = helps if switching is None else _apart(helps, switching)
        between(lambda: manager.leases.gate.decide_by(decide, chooser and chooser.predict))


def _chooser(steps: FittedSteps | None, runner: Runner, parts: Parts, between: Between) -> Chooser:
    """Decides by measured costs where the host computes the part of adapters that are on their way."""

    def rehearse(tokens: int, blocks: int | None) -> float:
        return between(lambda: runner.rehearse(tokens, blocks))

    def places(uid: int) -> int:
        return len(sites_of(parts.registry.by_uid(uid).projections))

    costs = Costs.fitted(steps) if steps else cold_start.measure(rehearse, runner.largest)
    log.info("cold starts: %s", "fitted step model" if steps else costs)
    return Chooser(costs, parts.scheduler.manager.policy.meter, runner.pool.groups, places)


def _apart(helps: Helps, switching: Switching) -> Helps:
    """The host never helps a merged adapter: parts of it may be in the weights already."""
    return lambda adapter, left_s, tokens: not switching.holds(adapter.uid) and helps(adapter, left_s, tokens)


def warm_up(runner: Runner, first: First, progress: bool) -> None:
    """Waits for the programs that serve every request; the runner names those that are left."""
    for copies in first.copies:
        copies.result()
    log.info("%d programs compile before it serves", runner.needed)
    names = tqdm(runner.warm_up(first), desc="compiling", total=runner.needed, disable=not progress, leave=False)
    for name in names:
        log.debug("compiled %s", name)


def compile_rest(built: Built, progress: bool = False) -> Built:
    """Compiles at once what `build` has left: before a measurement, or for `jlora compile`."""
    rest = built.runner.left
    with OsThreads().pool("jlora-compile", min(os.cpu_count() or 1, COMPILERS)) as threads:
        compiled = threads.map(built.runner.compile, rest)
        for left in tqdm(rest, desc="compiling the rest", disable=not progress, leave=False):
            next(compiled)
            built.runner.admit(left)
    if rest:
        built.finish(lambda call: call())
    return built


def _begin_with(
    engine: Engine, found: list[Row | NewAdapter], host_blocks: int, reader: Reader, config: Config, threads: Threads
) -> None:
    """Registers the adapters that were found, and reads as many as the host tier has room for."""
    engine.adapters.begin_with(found)
    _read_in(engine, sources.eager(found, host_blocks, config), reader, config, threads)
    if found:
        in_memory, block_bytes = engine.adapters.in_memory, reader.layout.block_bytes
        log.info("%s", sources.told(found, in_memory, host_blocks, block_bytes, config))
    if config.engine.merge not in ("off", "auto"):
        _warn_of_merge(engine, config.engine.merge)


def _warn_of_merge(engine: Engine, name: str) -> None:
    """Says so if the adapter that `engine.merge` names is not there yet, or is never merged."""
    try:
        engine.adapters.get(name)
    except NotFound as e:
        log.warning("engine.merge: %s; nothing is merged until it is loaded", e)
    else:
        if engine.adapters.invocation(name):
            log.warning("engine.merge: adapter %r is an activated LoRA, which is never merged", name)


def _read_in(
    engine: Engine, found: Iterable[Row | NewAdapter], reader: Reader, config: Config, threads: Threads
) -> None:
    """Reads adapters into the host tier: several at a time, and put there in their order.

    One that has changed since an earlier process read it stays on the disk, and so does one that cannot be read and
    is not required: only its own requests fail. So does one for which memory is short: a request reads it later.
    """
    required = sources.required(config, reader)
    most = max(config.adapters.readers, min(machine.threads(), START_READERS))
    with threads.pool("jlora-start", most) as pool:
        for item, reading in sources.read_ahead(found, reader, pool, most):
            try:
                new = reading.result()
            except JloraError as e:
                if item.name in required:
                    raise type(e)(f"adapter {item.name}: {e} (from {item.path})") from e
                log.error("adapter %s stays on the disk: %s", item.name, e)
                continue
            except MemoryError as e:
                log.warning("adapter %s stays on the disk until a request needs it: %s", item.name, e)
                continue
            try:
                sources.check_version(item, new.digest, new.header)
            except DataLoss as e:
                log.error("%s", e)
            else:
                engine.adapters.read_in(new, isinstance(item, Row) and item.pinned)


def compiled_for(info: ReplicaInfo, spec: ModelSpec, layout: PoolLayout) -> dict[str, object]:
    """What decides whether compiled programs fit: versions, devices, and every size and constant of the programs."""
    engine, chip = info.config.engine, jax.devices()[0]
    decides = ("max_seqs", "max_step_tokens", "kernels", "layers", "one_row", "cold_start")
    model = {name: value for name, value in asdict(spec).items() if name not in ("name", "eos_ids", "bos_id")}
    return {
        "jlora": __version__,
        "jax": jax.__version__,
        "jaxlib": machine.version("jaxlib"),
        "runtime": " ".join(chip.client.platform_version.split()),  # of a GPU: CUDA
        "device": machine.describe()["processor"] if chip.platform == "cpu" else chip.device_kind,
        "tp": info.config.model.tp,
        **model,
        "blocks": layout.blocks - 1,
        "block_tokens": layout.block_tokens,
        "max_rank": info.config.adapters.max_rank,
        "target_modules": info.config.adapters.target_modules,
        **{f"engine.{name}": getattr(engine, name) for name in decides},
        "merges": engine.merge != "off",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }


def _decided(config: Config, dtype: str, platform: str, kept: Path | None) -> Config:
    """The configuration with what "auto" means on this machine, which `ReplicaInfo` then says."""
    if config.engine.one_row != "auto":
        return config
    on = platform == "cpu" and one_row.is_faster(dtype, kept)  # an accelerator pads rows anyway
    return replace(config, {"engine.one_row": "on" if on else "off"})


def _info(config: Config, spec: ModelSpec, layout: PoolLayout, mesh: Mesh, base: str) -> ReplicaInfo:
    limits = Limits(spec.vocab, spec.max_len, (layout.blocks - 1) * layout.block_tokens)
    devices = list(mesh.devices.flat)
    return ReplicaInfo(
        model=config.model.name or spec.name,
        dtype=spec.dtype,
        limits=limits,
        eos_ids=tuple(spec.eos_ids),
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        platform=devices[0].platform,
        devices=tuple(f"{d.device_kind} {d.id}" for d in devices),
        config=config,
        base=base,
    )
