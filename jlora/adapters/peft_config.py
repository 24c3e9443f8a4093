"""Reads `adapter_config.json` as PEFT does.

jlora honours an option, knows that it is harmless, or requires its default. Any other option is an
error that names it. The matching rules are those of PEFT 0.21: `check_target_module_exists` and
`get_pattern_key`. Anybody may have written the file, so what it may ask for is bounded (`MAX_*`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from jlora.adapters.patterns import Pattern, compile_pattern
from jlora.errors import InvalidArgument
from jlora.model import fields
from jlora.model.fields import Fields, Flag, Positive, Text, short
from jlora.model.hf_names import other_modules, projections
from jlora.model.spec import ModelSpec

MAX_BYTES = 1 << 18  # of the file; PEFT writes a few thousand, and 60 for each module that has its own rank
MAX_ENTRIES = 1024  # of a list or an object of modules; the largest Llama has 882 matrices
MAX_PROGRAM = 200_000  # instructions of all patterns together; a pattern of a plain name has 60
MAX_INVOCATION = 1024  # tokens; invocations are a few words, and every description of the adapter repeats them
MAX_ALPHA = 1e6

Matcher = Callable[[str], bool]
Alpha = Annotated[float, Meta(ge=-MAX_ALPHA, le=MAX_ALPHA, description=f"a number of at most {MAX_ALPHA:.0f} in size")]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Target:
    """One module that the adapter changes.

    Attributes:
        scale: alpha / r, or alpha / sqrt(r) with rsLoRA (Kalajdzievski 2023).
    """

    layer: int
    projection: str
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The honoured options, checked and applied to one base.

    Attributes:
        targets: full module name -> what the adapter does there.
        base: base_model_name_or_path, "" if absent.
    """

    targets: Mapping[str, Target]
    alora_invocation_tokens: tuple[int, ...]
    base: str


def parse(data: bytes, spec: ModelSpec, max_rank: int, where: str) -> LoraConfig:
    """Reads the bytes of an `adapter_config.json`; `where` starts every error message."""
    tree = fields.parse(data, where)
    if not isinstance(tree, dict):
        raise InvalidArgument(f"{where}: must hold a JSON object, not a {type(tree).__name__}")
    options = _Options(tree, where, [])
    options.refuse_unsupported()
    return LoraConfig(
        targets=_targets(options, spec, max_rank),
        alora_invocation_tokens=options.invocation(spec.vocab),
        base=options.read("base_model_name_or_path", Text, ""),
    )


def _targets(options: _Options, spec: ModelSpec, max_rank: int) -> dict[str, Target]:
    r, alpha = options.read("r", Positive), options.read("lora_alpha", Alpha)
    rslora = options.read("use_rslora", Flag, False)
    rank_pattern, alpha_pattern = options.patterns("rank_pattern", Positive), options.patterns("alpha_pattern", Alpha)
    modules = _chosen(options, spec)
    ranks, alphas = _first_match(rank_pattern, modules, r), _first_match(alpha_pattern, modules, alpha)
    for module, rank in ranks.items():
        if rank > max_rank:
            raise InvalidArgument(
                f"{options.where}: r = {short(rank)} for {module}: must be at most {max_rank} (adapters.max_rank)"
            )
    return {
        module: Target(layer, projection, ranks[module], alphas[module] / (math.sqrt(n) if rslora else n))
        for module, (layer, projection) in modules.items()
        for n in [ranks[module]]
    }


def _chosen(options: _Options, spec: ModelSpec) -> dict[str, tuple[int, str]]:
    """The modules that the adapter changes: full name -> (layer, projection)."""
    targets = options.targets(spec)
    excludes = _matcher(options.names_or_regex("exclude_modules", required=False))
    for module in other_modules(spec):
        if targets(module) and not excludes(module):
            raise InvalidArgument(
                f"{options.where}: target_modules matches {module!r}: must match only the projections "
                "q, k, v, o, gate, up and down"
            )
    chosen = {module: place for module, place in projections(spec).items() if targets(module) and not excludes(module)}
    if not chosen:
        raise InvalidArgument(
            f"{options.where}: target_modules without exclude_modules matches no projection of the base model"
        )
    return chosen


def _first_match(patterns: Iterable[tuple[Pattern, T]], modules: Iterable[str], default: T) -> dict[str, T]:
    """Each module's value: that of the first pattern that matches it."""
    values, left = dict.fromkeys(modules, default), list(modules)
    for pattern, value in patterns:
        found = {module for module in left if pattern.match(module)}
        values.update(dict.fromkeys(found, value))
        left = [module for module in left if module not in found]
    return values


@dataclass(frozen=True, slots=True)
class _Options(Fields):
    """Reads one configuration; `programs` collects the sizes of its patterns."""

    programs: list[int]

    def refuse_unsupported(self) -> None:
        self.require(_FIXED)
        for key, value in self.tree.items():
            if key in _FIXED or key in _HARMLESS or key in _HONOURED:
                continue
            if value is None or value is False or (isinstance(value, (str, list, dict)) and not value):
                continue
            raise self.bad(key, value, "not supported; must be absent, null, false or empty")

    def invocation(self, vocab: int) -> tuple[int, ...]:
        key = "alora_invocation_tokens"
        if not isinstance(self.tree.get(key), list | None):
            raise self.bad(key, self.tree[key], "must be a list of token ids, or null")
        if len(self.tree.get(key) or ()) > MAX_INVOCATION:
            raise self.bad(key, self.tree[key], f"must be at most {MAX_INVOCATION} tokens, got {len(self.tree[key])}")
        return self.token_ids(key, vocab) or ()

    def names_or_regex(self, key: str, required: bool = True) -> frozenset[str] | _Regex:
        value = self.tree.get(key)
        self._few(key, value)
        if isinstance(value, str) and value:
            return _Regex(value, self._regex(key, value, value))
        if isinstance(value, list) and all(isinstance(v, str) and v for v in value) and (value or not required):
            return frozenset(value)
        if value in (None, "") and not required:
            return frozenset()
        raise self.bad(key, value, "must be a list of module names, or a regular expression")

    def patterns(self, key: str, kind: Any) -> tuple[tuple[Pattern, Any], ...]:
        value = self.tree.get(key) or {}
        self._few(key, value)
        if not isinstance(value, dict):
            raise self.bad(key, value, "must be an object {module pattern: value}")
        return tuple(
            (self._regex(key, name, rf"(.*\.)?({name})$"), self.convert(f"{key}[{short(name)}]", each, kind))
            for name, each in value.items()
        )

    def targets(self, spec: ModelSpec) -> Matcher:
        layers = self.indices("layers_to_transform")
        patterns = self.layer_patterns()
        named = self.names_or_regex("target_modules")
        if layers is None and self.tree.get("layers_pattern"):
            raise self.bad("layers_pattern", self.tree["layers_pattern"], "needs layers_to_transform")
        if isinstance(named, _Regex):
            if layers is not None:
                raise self.bad("layers_to_transform", list(layers), "cannot be used when target_modules is a string")
            if named.text.lower() == "all-linear":
                return frozenset(projections(spec)).__contains__
            return _matcher(named)
        return _in_layers(named, frozenset(layers), patterns) if layers else _matcher(named)

    def layer_patterns(self) -> tuple[Pattern, ...]:
        """`layers_pattern` as PEFT compiles it: each pattern finds the layer's index in a module's name."""
        value = self.tree.get("layers_pattern") or []
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise self.bad("layers_pattern", value, "must be a name or a list of names")
        self._few("layers_pattern", names)
        if not names:
            return (compile_pattern(r".*?\.[^.]*\.(?P<idx>\d+)\."),)
        return tuple(self._regex("layers_pattern", n, rf"(?:^|.*?\.){n}\.(?P<idx>\d+)\.") for n in names)

    def _few(self, key: str, value: Any) -> None:
        if isinstance(value, list | dict) and len(value) > MAX_ENTRIES:
            raise self.bad(key, value, f"must have at most {MAX_ENTRIES} entries, got {len(value)}")

    def _regex(self, key: str, shown: str, pattern: str) -> Pattern:
        try:
            compiled = compile_pattern(pattern)
        except ValueError as e:
            raise self.bad(key, shown, f"must be a regular expression that RE2 reads as Python does ({e})") from e
        self.programs.append(compiled.programsize)
        if sum(self.programs) > MAX_PROGRAM:
            raise self.bad(key, shown, f"the patterns together compile to over {MAX_PROGRAM} instructions")
        return compiled


@dataclass(frozen=True, slots=True)
class _Regex:
    text: str
    compiled: Pattern


def _matcher(names: frozenset[str] | _Regex) -> Matcher:
    """A regular expression must match the whole name; a listed name must equal it or be its suffix."""
    if isinstance(names, _Regex):
        return lambda module: names.compiled.fullmatch(module) is not None
    return lambda module: any(end in names for end in _ends(module))


def _ends(module: str) -> Iterator[str]:
    """The name and what follows each of its dots."""
    while True:
        yield module
        _, dot, module = module.partition(".")
        if not dot:
            return


def _in_layers(names: frozenset[str], layers: Collection[int], patterns: tuple[Pattern, ...]) -> Matcher:
    """A suffix matches in the given layers only; a full module name matches anywhere."""
    by_name = _matcher(names)

    def matches(module: str) -> bool:
        if module in names or not by_name(module):
            return module in names
        found = next((m for m in (p.match(module) for p in patterns) if m), None)
        index = found and found[b"idx"]  # None: a branch of the pattern without it
        return index is not None and int(index) in layers

    return matches


# Options that do not change what a trained adapter computes. They steer training, name a program, belong to
# an option that is refused, or (fan_in_fan_out) concern layers that a Llama does not have.
_HARMLESS = frozenset(
    "auto_mapping ephemeral_gpu_offload eva_config fan_in_fan_out inference_mode lora_dropout megatron_core "
    "parent_library peft_version qalora_group_size revision runtime_config".split()
)

_HONOURED = frozenset(
    "r lora_alpha use_rslora rank_pattern alpha_pattern target_modules exclude_modules layers_to_transform "
    "layers_pattern alora_invocation_tokens base_model_name_or_path".split()
)

# Options whose default is not null, false or empty -> allowed values.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    # The others (pissa, olora, corda, loftq, lora_ga) train against a changed base.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
}
