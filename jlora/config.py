"""The configuration: frozen dataclasses, one per section of a TOML file.

    config = load("configs/demo.toml", {"cache.block_tokens": 16})

Unknown keys are errors that name the nearest valid key. Values given on the command line are
strings and are read by the field's type.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jlora.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Where the base model is and how it is laid out. `max_model_len` 0 = the model's own."""

    path: str = ""
    name: str = ""
    dtype: str = "auto"
    tp: int = 1
    max_model_len: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class AdaptersConfig:
    """Adapters to load at start: `paths` by name, and every subdirectory of `dir`.

    `alora_missing`: a prompt that does not invoke its activated LoRA is an "error", or answered by the "base".
    """

    paths: Mapping[str, str] = field(default_factory=dict)
    dir: str = ""
    max_rank: int = 256
    alora_missing: str = "error"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The two tiers and what decides between them. 0 means: chosen from memory and model.

    Attributes:
        policy: what leaves the device first (see `POLICIES` and docs/architecture.md).
        share: of the device's blocks for adapters, with a policy that splits them (vllm-fair).
        block_tokens: tokens per block (0: by platform).
        hbm_blocks: blocks on the device (0: from hbm_fraction).
        hbm_fraction: share of the device memory left after the weights (on CPU at most a quarter of it).
        host_blocks: blocks in host memory (0: from host_gib); adapters have their master copies here.
        host_gib: size of the host tier (0: a quarter of the memory available, as far as it is useful).
        prefix_reuse: keep finished requests' KV for later prompts.
        upper, lower: shares of the device in use between which fastlibra keeps it (paper, section 5.3).
        monitor_s: seconds between two rounds of the monitor.
        tau_s: time scale of fastlibra's sigmoid in seconds (0: the median reuse interval; 1: as printed).
        link_gbps: slows copies down to so many gigabytes per second each way (0: as fast as it is).
    """

    policy: str = "jlora"
    share: float = 0.2
    block_tokens: int = 0
    hbm_blocks: int = 0
    hbm_fraction: float = 0.85
    host_blocks: int = 0
    host_gib: float = 0.0
    prefix_reuse: bool = True
    upper: float = 0.95
    lower: float = 0.70
    monitor_s: float = 0.1
    tau_s: float = 0.0
    link_gbps: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The step. `max_step_tokens` bounds the prompt tokens computed in one step.

    `kernels`: auto (the platform's where they serve the model), pallas (or an error), xla.
    """

    max_seqs: int = 64
    max_step_tokens: int = 512
    max_queue: int = 4096
    overlap: bool = True
    layers: str = "auto"
    kernels: str = "auto"
    warmup: bool = True


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Where to listen, and when to stop.

    Attributes:
        host, port: the gRPC address; port 0 takes a free one.
        drain_s: seconds that SIGTERM lets running requests go on.
        heartbeat_s: seconds without a round of the engine loop after which health says
            NOT_SERVING; must exceed the longest step.
        compile_cache: directory of compiled programs ("auto": below the user's cache; "": none).
        log_level: what is logged to stderr: warning, info, or debug, which tells every decision of the
            cache (evictions, copies, hints, refusals).
    """

    host: str = "127.0.0.1"
    port: int = 50051
    drain_s: float = 30.0
    heartbeat_s: float = 10.0
    compile_cache: str = "auto"
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class Config:
    """All sections; see each section's class."""

    model: ModelConfig = ModelConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    cache: CacheConfig = CacheConfig()
    engine: EngineConfig = EngineConfig()
    serve: ServeConfig = ServeConfig()


# Every cache policy by name: jlora's own, the paper's, its ablations, and the baselines.
POLICIES = (
    "jlora", "fastlibra", "fastlibra-wom", "fastlibra-wos", "fastlibra-wol", "lru", "vllm", "vllm-fair", "slora",
)  # fmt: skip

LEVELS = ("debug", "info", "warning")

_SECTIONS: Mapping[str, type] = {f.name: type(f.default) for f in dataclasses.fields(Config)}


def load(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Reads a TOML file, applies `section.key` overrides, checks every value.

    Raises:
        ConfigError: the file is unreadable, a key is unknown, or a value is out of range.
    """
    tree: dict[str, Any] = _read_toml(path) if path is not None else {}
    for dotted, value in (overrides or {}).items():
        section, _, key = dotted.partition(".")
        _check_key(section, key, dotted)
        values = tree.setdefault(section, {})
        head, _, rest = key.partition(".")
        if rest:  # one entry of a table: adapters.paths.NAME
            values[head] = {**_table(values.get(head, {})), rest: value}
        else:
            values[key] = value
    return validate(_build(tree))


def _read_toml(path: str | Path) -> dict[str, Any]:
    """The file's tables, each of them a section."""
    try:
        tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"config file {path}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"config file {path}: {e}") from e
    for section, values in tree.items():
        if not isinstance(values, dict):
            _check_key(section, "", section)
    return tree


def replace(config: Config, overrides: Mapping[str, Any]) -> Config:
    """A copy of `config` with `section.key` values replaced, checked again."""
    for dotted, value in overrides.items():
        section, _, key = dotted.partition(".")
        _check_key(section, key, dotted)
        old = getattr(config, section)
        new = dataclasses.replace(old, **{key: _coerce(type(old), key, value, dotted)})
        config = dataclasses.replace(config, **{section: new})
    return validate(config)


def keys() -> list[str]:
    """Every `section.key`, in order."""
    return [f"{name}.{f.name}" for name, section in _SECTIONS.items() for f in dataclasses.fields(section)]


def nearest(word: str, options: typing.Iterable[str]) -> str:
    """The option most like `word`, for messages about unknown names."""
    return difflib.get_close_matches(word, list(options), n=1, cutoff=0.0)[0]


def validate(config: Config) -> Config:
    """Returns `config` if every value is in range, else raises ConfigError naming the key."""
    c, e, m, missing = config.cache, config.engine, config.model, config.adapters.alora_missing
    rules: list[tuple[str, Any, bool, str]] = [
        ("model.tp", m.tp, m.tp >= 1, "at least 1"),
        ("model.dtype", m.dtype, m.dtype in ("auto", "float32", "bfloat16"), "auto, float32 or bfloat16"),
        ("model.max_model_len", m.max_model_len, m.max_model_len == 0 or m.max_model_len >= 2, "0 or at least 2"),
        ("model.seed", m.seed, 0 <= m.seed < 2**63, "in [0, 2^63)"),
        ("adapters.max_rank", config.adapters.max_rank, config.adapters.max_rank >= 1, "at least 1"),
        ("adapters.alora_missing", missing, missing in ("error", "base"), "error or base"),
        ("cache.block_tokens", c.block_tokens, 0 <= c.block_tokens <= 1024, "in [0, 1024]"),
        ("cache.hbm_blocks", c.hbm_blocks, c.hbm_blocks == 0 or c.hbm_blocks >= 2, "0 or at least 2"),
        ("cache.hbm_fraction", c.hbm_fraction, 0 < c.hbm_fraction <= 1, "in (0, 1]"),
        ("cache.policy", c.policy, c.policy in POLICIES, f"one of {', '.join(POLICIES)}"),
        ("cache.share", c.share, 0 < c.share < 1, "in (0, 1)"),
        ("cache.host_blocks", c.host_blocks, c.host_blocks >= 0, "0 or more"),
        ("cache.host_gib", c.host_gib, 0 <= c.host_gib < 2**20, "0 or more GiB"),
        ("cache.upper", c.upper, 0 < c.upper <= 1, "in (0, 1]"),
        ("cache.lower", c.lower, 0 <= c.lower <= c.upper, "in [0, cache.upper]"),
        ("cache.monitor_s", c.monitor_s, 0 < c.monitor_s <= 60, "in (0, 60] seconds"),
        ("cache.tau_s", c.tau_s, 0 <= c.tau_s < 1e6, "0 or more seconds"),
        ("cache.host_gib", c.host_gib, not (c.host_gib and c.host_blocks), "0 when cache.host_blocks is set"),
        ("cache.link_gbps", c.link_gbps, c.link_gbps == 0 or 1e-4 <= c.link_gbps < 1e6, "0, or in [1e-4, 1e6) GB/s"),
        ("engine.max_seqs", e.max_seqs, 1 <= e.max_seqs <= 1024, "in [1, 1024]"),
        ("engine.max_step_tokens", e.max_step_tokens, e.max_step_tokens >= 1, "at least 1"),
        ("engine.max_queue", e.max_queue, e.max_queue >= 1, "at least 1"),
        ("engine.layers", e.layers, e.layers in ("auto", "scan", "unroll"), "auto, scan or unroll"),
        ("engine.kernels", e.kernels, e.kernels in ("auto", "pallas", "xla"), "auto, pallas or xla"),
        ("serve.port", config.serve.port, 0 <= config.serve.port <= 65535, "in [0, 65535]"),
        ("serve.drain_s", config.serve.drain_s, config.serve.drain_s >= 0, "at least 0 seconds"),
        ("serve.log_level", config.serve.log_level, config.serve.log_level in LEVELS, f"one of {', '.join(LEVELS)}"),
        ("serve.heartbeat_s", config.serve.heartbeat_s, config.serve.heartbeat_s > 0, "more than 0 seconds"),
    ]
    for key, value, ok, limit in rules:
        if not ok:
            raise ConfigError(f"{key} = {value!r}: must be {limit}")
    return config


def _check_key(section: str, key: str, dotted: str) -> None:
    """Raises ConfigError with the nearest valid key unless `section.key` (or `adapters.paths.NAME`) is one."""
    if section in _SECTIONS:
        head, _, rest = key.partition(".")
        if head in {f.name for f in dataclasses.fields(_SECTIONS[section])} and (not rest or head == "paths"):
            return
    valid = keys()
    if dotted in _SECTIONS:
        near = next(k for k in valid if k.startswith(f"{dotted}."))
    elif "." in dotted:
        near = nearest(dotted, valid)
    else:  # the section was left out: compare with the second parts
        near = next(k for k in valid if k.partition(".")[2] == nearest(dotted, [k.partition(".")[2] for k in valid]))
    raise ConfigError(f"unknown key {dotted!r}: the nearest valid key is {near!r}")


def _build(tree: Mapping[str, Any]) -> Config:
    sections = {}
    for section, values in tree.items():
        for key in values:
            _check_key(section, key, f"{section}.{key}")
        cls = _SECTIONS[section]
        sections[section] = cls(**{k: _coerce(cls, k, v, f"{section}.{k}") for k, v in values.items()})
    return Config(**sections)


def _coerce(cls: type, key: str, value: Any, dotted: str) -> Any:
    """Reads `value` (a TOML value or a command-line string) as the field's type."""
    want = typing.get_type_hints(cls)[key]
    read, wanted = _READERS[typing.get_origin(want) or want]
    try:
        return read(value)
    except (ValueError, TypeError, OverflowError) as e:
        raise ConfigError(f"{dotted} = {value!r}: must be {wanted}") from e


def _bool(value: Any) -> bool:
    table = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    word = str(value).lower()
    if word not in table:
        raise ValueError(value)
    return table[word]


def _int(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
        raise ValueError(value)
    return int(value)


def _float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError(value)
    return float(value)


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _table(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(x, str) for pair in value.items() for x in pair):
        raise ConfigError(f"adapters.paths = {value!r}: must be a table of name = path")
    return dict(value)


_READERS: Mapping[type, tuple[Callable[[Any], Any], str]] = {
    bool: (_bool, "true or false"),
    int: (_int, "a whole number"),
    float: (_float, "a number"),
    str: (_str, "a string"),
    Mapping: (_table, "a table"),
}
