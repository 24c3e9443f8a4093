"""The configuration: frozen dataclasses, one per section of a TOML file.

    config = load("configs/demo.toml", {"cache.block_tokens": 16})

A field's annotation is its type and its limits, by which msgspec reads TOML values and command-line strings.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jlora.errors import ConfigError

# Every cache policy by name: jlora's own, the paper's, its ablations, and the baselines.
POLICIES = (
    "jlora", "fastlibra", "fastlibra-wom", "fastlibra-wos", "fastlibra-wol", "lru", "vllm", "vllm-fair", "slora",
)  # fmt: skip
# Every routing policy by name (`jlora.cluster.routing.routes`).
ROUTINGS = (
    "sticky", "jlora", "caraserve", "dlora", "loraserve", "least-loaded", "most-idle", "first-fit", "round-robin",
    "random",
)  # fmt: skip


def _one_of(*words: str) -> Meta:
    return Meta(pattern=rf"^({'|'.join(words)})\Z", description=f"one of {', '.join(words)}")


Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0, lt=2**20)]
PathName = Annotated[str, Meta(description="a path")]  # a leading ~ is the home directory
Paths = Annotated[tuple[str, ...], Meta(description=f"a list of paths, in one string with {os.pathsep!r} between them")]
PathTable = Annotated[Mapping[str, str], Meta(description="a table of name = path")]
Addresses = Annotated[tuple[str, ...], Meta(description="a list of HOST:PORT, in one string with ',' between them")]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The base model and its layout on the devices. `max_model_len` 0 means the model's own."""

    path: str = ""
    name: str = ""
    dtype: Annotated[str, _one_of("auto", "float32", "bfloat16")] = "auto"
    tp: Positive = 1
    max_model_len: Count = 0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0


@dataclass(frozen=True, slots=True)
class AdaptersConfig:
    """The adapters to serve: `paths` by name, and every subdirectory of `dir`, also those that come later.

    They are read at start as far as the host tier has room for them; the others, or with `lazy` all, when a
    request needs them, at most `readers` at once (at start also up to four, with as many cores). `registry` is a
    SQLite file that remembers them; "" keeps nothing beyond the process.

    `target_modules`: "attention" refuses adapters of gate, up and down, so that steps have no products for them.
    `roots`: adapters are read from these directories and nowhere else; none: from every directory.
    `alora_missing` decides about a prompt that does not invoke its activated LoRA: "error" refuses it,
    "base" lets the base answer.
    """

    paths: PathTable = field(default_factory=dict)
    dir: PathName = ""
    roots: Paths = ()
    registry: PathName = ""
    lazy: bool = False
    readers: Annotated[int, Meta(ge=1, le=64)] = 2
    max_rank: Positive = 256
    target_modules: Annotated[str, _one_of("all", "attention")] = "all"
    alora_missing: Annotated[str, _one_of("error", "base")] = "error"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The two tiers and the policy between them. A size of 0 is chosen from memory and model.

    Attributes:
        policy: decides which blocks leave the device first (see `POLICIES` and docs/architecture.md).
        share: the adapters' share of the device's blocks, for a policy that splits them (vllm-fair).
        block_tokens: tokens per block (0: by platform).
        hbm_blocks: blocks on the device (0: from hbm_fraction).
        hbm_fraction: share of the device memory left after the weights (on CPU at most a quarter of it).
        host_blocks: blocks in host memory (0: from host_gib); they hold the adapters' master copies.
        host_gib: size of the host tier (0: of the available memory half, on CPU a quarter, as far as it is useful).
        prefix_reuse: keep finished requests' KV for later prompts.
        upper, lower: shares of the device in use between which fastlibra keeps it (paper, section 5.3).
        monitor_s: seconds between two rounds of the monitor.
        tau_s: time scale of fastlibra's sigmoid in seconds (0: the median reuse interval; 1: as printed).
        link_gbps: limits copies to this many gigabytes per second each way (0: no limit).
    """

    policy: Annotated[str, _one_of(*POLICIES)] = "jlora"
    share: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    block_tokens: Annotated[int, Meta(ge=0, le=1024)] = 0
    hbm_blocks: Count = 0
    hbm_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.85
    host_blocks: Count = 0
    host_gib: Annotated[float, Meta(ge=0, lt=2**20)] = 0.0
    prefix_reuse: bool = True
    upper: Annotated[float, Meta(gt=0, le=1)] = 0.95
    lower: Annotated[float, Meta(ge=0, le=1)] = 0.70
    monitor_s: Annotated[float, Meta(gt=0, le=60)] = 0.1
    tau_s: Annotated[float, Meta(ge=0, lt=1e6)] = 0.0
    link_gbps: Annotated[float, Meta(ge=0, lt=1e6)] = 0.0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The step. `max_step_tokens` bounds the prompt tokens computed in one step.

    `kernels`: "auto" takes the platform's where they serve the model, "pallas" insists on them, "xla" avoids them.
    `one_row`: whether one decoding sequence runs alone or padded to two rows; "auto" measures which is faster.
    Replicas that must draw the same tokens to the last bit set it alike.
    `cold_start`: what a request does while its adapter is on its way to the device. "wait": waits for all of it.
    "stream": runs behind the copy, layer by layer, if the copy needs less time than the step. "cpu": runs at
    once, and the host computes the adapter's part until its layers have come. "auto": for each request, the one
    of these that is predicted to bring its first token soonest.
    `step_model`: a file of `jlora doctor fit` for this machine and model, from which "auto" predicts; "" measures a
    few launches at start.
    `merge`: "off"; "auto" merges the most asked-for adapter into the base's weights where that is measured to
    pay; or the name of an adapter to merge. Requests for others wait for a merged
    adapter for at most `merge_starve_s` seconds; then they may still wait for slots.
    """

    max_seqs: Annotated[int, Meta(ge=1, le=1024)] = 64
    max_step_tokens: Positive = 512
    max_queue: Positive = 4096
    overlap: bool = True
    layers: Annotated[str, _one_of("auto", "scan", "unroll")] = "auto"
    kernels: Annotated[str, _one_of("auto", "pallas", "xla")] = "auto"
    one_row: Annotated[str, _one_of("auto", "on", "off")] = "auto"
    step_model: PathName = ""
    cold_start: Annotated[str, _one_of("auto", "wait", "stream", "cpu")] = "stream"
    merge: str = "off"
    merge_starve_s: Annotated[float, Meta(gt=0, lt=1e6)] = 2.0
    warmup: bool = True


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Where to listen, and when to stop.

    Attributes:
        host, port: the gRPC address; port 0 takes a free one.
        http_port: of OpenAI's HTTP on the same host; 0 takes a free one, -1 serves none.
        drain_s: seconds that running requests may take after SIGTERM.
        heartbeat_s: seconds without a round of the engine's loop after which health turns
            NOT_SERVING; must exceed the longest step.
        stall_s: seconds before a call ends whose message is incomplete, or a stream whose client does not
            read, or reads so slowly that it falls behind by as much.
        coalesce_s: seconds between two messages of a stream, or up to a quarter less: streams that wait share timers.
            Its first token and its end go at once. 0 sends what each step brings; 0.02 saves most of the server's time
            per token where steps are short.
        max_request_mib: the largest message that a client may send, after decompression.
        keys: the file of API keys; "" serves whoever reaches a port.
        tls_cert, tls_key: PEM files of the certificate of both ports and its key; "" uses no TLS.
        tls_client_ca: PEM file of the authority that signs clients' certificates; "" asks for none.
        insecure: without keys, listen also where other machines reach the ports.
        compile_cache: directory of compiled programs ("auto": in the user's cache; "": none).
        profile_dir: directory for traces that clients ask for by `Control.Profile` ("": none).
        otlp_endpoint: collector for OpenTelemetry's spans, "http://HOST:4317" ("": none); needs the extra jlora[otel].
        log_level: warning, info, or debug, which logs every decision of the cache (evictions, copies,
            hints, refusals). The log goes to stderr.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 50051
    http_port: Annotated[int, Meta(ge=-1, le=65535)] = -1
    drain_s: Annotated[float, Meta(ge=0)] = 30.0
    heartbeat_s: Annotated[float, Meta(gt=0)] = 10.0
    stall_s: Annotated[float, Meta(gt=0)] = 30.0
    coalesce_s: Annotated[float, Meta(ge=0, le=10)] = 0.0
    max_request_mib: Annotated[float, Meta(gt=0, lt=2048)] = 4.0
    keys: PathName = ""
    insecure: bool = False
    tls_cert: PathName = ""
    tls_key: PathName = ""
    tls_client_ca: PathName = ""
    compile_cache: PathName = "auto"
    profile_dir: PathName = ""
    otlp_endpoint: str = ""
    log_level: Annotated[str, _one_of("debug", "info", "warning")] = "info"


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """A service of many replicas behind one router: `jlora cluster`. `jlora serve` ignores this section.

    Attributes:
        name: of the service; several may share one Ray cluster.
        replica: the name of this process's replica, which its fleet sets; "" takes the machine's name.
        replicas: how many to start; a static fleet has as many as its addresses resolve to.
        fleet: who runs the replicas: "local" (processes of this machine), "ray", or "static" (they run already).
        addresses: of a static fleet. A host name stands for every address that it resolves to, asked again and again.
        controller: address of the router whose process has the adapters' registry; "": this one has it. Further
            routers name it.
        token_file: holds the secret that routers and replicas share; "" makes one for each start.
        tls_name: a name that the certificates of all routers and replicas have; "": each has its address.
        resources: what Ray sets aside for each replica, by its own names (CPU, GPU, TPU, ...).
        env: environment variables of each replica, such as JAX_PLATFORMS.
        ray_address: of Ray's head; "" starts a Ray of this process's own on this machine.
        ray_token_file: Ray's own secret; "" makes one for a Ray of our own, and is an error otherwise.
        place_s: seconds that Ray may take to answer, and then to find room for all replicas.
        start_timeout_s: seconds that a replica may take to load.
        suspect_s: seconds without a message after which a replica's requests go on elsewhere; the router
            waits longer where steps take long.
        routing: chooses a replica for each request (see `ROUTINGS`). "jlora", "caraserve", "dlora" and "loraserve"
            predict from `engine.step_model`; "loraserve" also places adapters.
        placement: brings adapters to replicas before requests come: "off", "loraserve" (by their demand; from
            `engine.step_model`) or "dlora" (the preload that stands bursts best).
        placement_s: seconds between two placements of the adapters.
        slo_s: seconds that a decode step may take, for routing that predicts; 0: no limit.
        balance: moves requests between replicas: "off", or "dlora" (from those that are behind to the idlest).
        balance_s: between two plans of moves.
    """

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z", description="a plain name")] = "jlora"
    replica: str = ""
    replicas: Annotated[int, Meta(ge=1, le=1024)] = 1
    fleet: Annotated[str, _one_of("local", "ray", "static")] = "local"
    addresses: Addresses = ()
    controller: str = ""
    token_file: PathName = ""
    tls_name: str = ""
    resources: Annotated[Mapping[str, Amount], Meta(description="a table of NAME = amount")] = field(
        default_factory=dict
    )
    env: Annotated[Mapping[str, str], Meta(description='a table of NAME = "value"')] = field(default_factory=dict)
    ray_address: str = ""
    ray_token_file: PathName = ""
    place_s: Annotated[float, Meta(gt=0, lt=1e6)] = 60.0
    start_timeout_s: Annotated[float, Meta(gt=0, lt=1e6)] = 600.0
    suspect_s: Annotated[float, Meta(gt=0, lt=1e6)] = 0.5
    routing: Annotated[str, _one_of(*ROUTINGS)] = "sticky"
    placement: Annotated[str, _one_of("off", "loraserve", "dlora")] = "off"
    placement_s: Annotated[float, Meta(gt=0, lt=1e6)] = 60.0
    slo_s: Annotated[float, Meta(ge=0, lt=1e6)] = 0.0
    balance: Annotated[str, _one_of("off", "dlora")] = "off"
    balance_s: Annotated[float, Meta(gt=0, lt=1e6)] = 1.0


@dataclass(frozen=True, slots=True)
class Config:
    """All sections."""

    model: ModelConfig = ModelConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    cache: CacheConfig = CacheConfig()
    engine: EngineConfig = EngineConfig()
    serve: ServeConfig = ServeConfig()
    cluster: ClusterConfig = ClusterConfig()


_SECTIONS: Mapping[str, type] = {f.name: type(f.default) for f in dataclasses.fields(Config)}
_TABLES = ("adapters.paths", "cluster.resources", "cluster.env")
LISTED = 8  # names in a message
# Other names of keys.
_ALSO = {
    "serve.max_message_mib": "serve.max_request_mib",
    "cluster.route": "cluster.routing",
    "cluster.place": "cluster.placement",
    "cluster.step_s": "cluster.placement_s",
    "cluster.slo_tpot_s": "cluster.slo_s",
}


def load(source: str | Path | Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Reads a TOML file, or a mapping of the same form, and applies `section.key` overrides.

    Raises ConfigError for an unreadable file, an unknown key, or a value out of range.
    """
    tree = source if isinstance(source, Mapping) else _read_toml(source) if source is not None else {}
    values: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and (value or name in _SECTIONS) and "." not in name:
            values |= {f"{name}.{key}": one for key, one in value.items()}
        else:
            values[name] = value
    return replace(Config(), {**values, **(overrides or {})})


def replace(config: Config, overrides: Mapping[str, Any]) -> Config:
    """A checked copy of `config` with `section.key` values replaced; errors as in `load`."""
    for dotted, value in overrides.items():
        section, key, entry = _split(dotted)
        old = getattr(config, section)
        if entry:
            value = {**getattr(old, key), entry: value}
        new = dataclasses.replace(old, **{key: _read(dotted, value, _hints(type(old))[key])})
        config = dataclasses.replace(config, **{section: new})
    return _checked(config)


def keys() -> list[str]:
    """Every `section.key`, in order."""
    return [f"{name}.{f.name}" for name, section in _SECTIONS.items() for f in dataclasses.fields(section)]


def nearest(word: str, options: Iterable[str]) -> str:
    """The shortest option that `word` begins, or the one most like it, for messages about unknown names; "" if none."""
    known = list(options)
    begun = min((option for option in known if word and option.startswith(word)), key=len, default="")
    return begun or next(iter(difflib.get_close_matches(word, known, n=1)), "")


def unknown(what: str, word: str, options: Iterable[str]) -> str:
    """A message about an unknown name, with the valid one that it may mean."""
    near = nearest(word, options)
    return f"unknown {what} {word!r}" + (f": the nearest valid one is {near!r}" if near else "")


def listed(names: Sequence[str]) -> str:
    """Names for a message: the first ones, and how many more there are."""
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "") if names else "none"


def one_of(word: str, options: Iterable[str]) -> str:
    """Of a message about an unknown name: what is valid, and which of it the word may mean."""
    known = list(options)
    near = difflib.get_close_matches(word, known, n=1)
    return f"must be one of {', '.join(known)}" + (f"; the nearest is {near[0]!r}" if near else "")


def _read_toml(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(os.path.expanduser(path)).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise ConfigError(f"config file {path}: {getattr(e, 'strerror', e)}") from e


def _split(dotted: str) -> tuple[str, str, str]:
    """Section, key, and the entry of one of `_TABLES` (adapters.paths.NAME)."""
    section, _, rest = _ALSO.get(dotted, dotted).partition(".")
    key, _, entry = rest.partition(".")
    valid = keys()
    if f"{section}.{key}" in valid and (not entry or f"{section}.{key}" in _TABLES):
        return section, key, entry
    if section in _SECTIONS and not rest:
        near = next(k for k in valid if k.startswith(f"{section}."))
    elif rest:
        near = nearest(dotted, valid)
    else:  # the section is missing: compare with the keys alone
        by_name = {k.partition(".")[2]: k for k in reversed(valid)}
        near = by_name.get(nearest(dotted, by_name), "")
    raise ConfigError(f"unknown key {dotted!r}" + (f": the nearest valid key is {near!r}" if near else ""))


# What msgspec's messages call a type, for users.
_KINDS = {"int": "a whole number", "float": "a number", "str": "a string", "bool": "true or false"}
_WORDS = {"yes": True, "on": True, "no": False, "off": False}

_hints = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))


def _read(dotted: str, value: Any, hint: Any) -> Any:
    if hint is bool and isinstance(value, str):
        value = _WORDS.get(value.lower(), value)
    if hint == Paths and isinstance(value, str):
        value = [path for path in value.split(os.pathsep) if path]
    if hint == Addresses and isinstance(value, str):
        value = [address for address in value.split(",") if address]
    try:
        return _expanded(msgspec.convert(value, hint, strict=False), hint)
    except msgspec.ValidationError as e:
        found = re.match(r"Expected `(\w+)`([^,]*)", str(e))  # a number beyond float's range has a message of its own
        kind, bound = found.groups() if found else ("float", f" ({e})")
        described = next((meta.description for meta in typing.get_args(hint)[1:] if meta.description), None)
        shown = repr(value) if kind == "str" else repr(value).strip("'")
        raise ConfigError(f"{dotted} = {shown}: must be {described or _KINDS[kind] + bound}") from e


def _expanded(value: Any, hint: Any) -> Any:
    """The value with the home directory for `~`, if it is of a path or of several. No shell expands NAME=~/path."""
    if hint == PathName:
        return os.path.expanduser(value)
    if hint == Paths:
        return tuple(map(os.path.expanduser, value))
    if hint == PathTable:
        return {name: os.path.expanduser(path) for name, path in value.items()}
    return value


def _checked(config: Config) -> Config:
    c, s, f, longest = config.cache, config.serve, config.cluster, config.model.max_model_len
    merge = config.engine.merge
    rules: list[tuple[str, Any, bool, str]] = [
        ("model.max_model_len", longest, longest != 1, "0 or at least 2"),
        ("cache.hbm_blocks", c.hbm_blocks, c.hbm_blocks != 1, "0 or at least 2"),
        ("cache.lower", c.lower, c.lower <= c.upper, "at most cache.upper"),
        ("cache.host_gib", c.host_gib, not (c.host_gib and c.host_blocks), "0 when cache.host_blocks is set"),
        ("serve.tls_key", s.tls_key, bool(s.tls_key) == bool(s.tls_cert), "set together with serve.tls_cert"),
        (
            "serve.tls_client_ca",
            s.tls_client_ca,
            not s.tls_client_ca or bool(s.tls_cert),
            "set with serve.tls_cert",
        ),
        (
            "cluster.addresses",
            list(f.addresses),
            not f.addresses or f.fleet == "static",
            "empty unless fleet is static",
        ),
        *(("cluster.addresses", a, is_address(a), "HOST:PORT") for a in f.addresses),
        ("cluster.ray_address", f.ray_address, not f.ray_address or f.fleet == "ray", "empty unless fleet is ray"),
        (
            "cluster.placement",
            f.placement,
            bool(f.controller) or (f.placement, f.routing) != ("dlora", "loraserve"),
            "off or loraserve when cluster.routing is loraserve",
        ),
        (
            "serve.otlp_endpoint",
            s.otlp_endpoint,
            not s.otlp_endpoint or _is_endpoint(s.otlp_endpoint),
            "http://HOST:PORT or https://HOST:PORT",
        ),
        (
            "engine.merge",
            merge,
            merge in ("off", "auto") or merge.lower() not in ("", "off", "auto", "true", "false"),
            "off, auto or the name of an adapter",
        ),
        ("cache.link_gbps", c.link_gbps, not 0 < c.link_gbps < 1e-4, "0, or at least 1e-4 GB/s"),
    ]
    for key, value, ok, limit in rules:
        if not ok:
            raise ConfigError(f"{key} = {value!r}: must be {limit}")
    return config


def is_address(text: str) -> bool:
    """Whether it is HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536


def _is_endpoint(text: str) -> bool:
    scheme, _, address = text.partition("://")
    host = address.rpartition(":")[0]
    named = re.fullmatch(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+", host)
    return scheme in ("http", "https") and named is not None and is_address(address.removesuffix("/"))
