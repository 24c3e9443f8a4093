"""Reads `adapter_config.json` as PEFT does.

jlora honours an option, knows that it is harmless, or requires its default. Any other option is an
error that names it. The matching rules are those of PEFT 0.21: `check_target_module_exists` and
`get_pattern_key`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from jlora.errors import InvalidArgument
from jlora.model import fields
from jlora.model.fields import Fields, Flag, Number, Positive, Text, short
from jlora.model.hf_names import other_modules, projections
from jlora.model.spec import ModelSpec

Matcher = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The honoured options, checked.

    Attributes:
        r, alpha, rslora: rank; numerator of the scale; whether the scale divides by sqrt(r).
        rank_pattern, alpha_pattern: (pattern, value) in the file's order; the first match applies.
        targets, excludes: predicates of a full module name.
        base: base_model_name_or_path, "" if absent.
    """

    r: int
    alpha: float
    rslora: bool
    rank_pattern: tuple[tuple[re.Pattern[str], int], ...]
    alpha_pattern: tuple[tuple[re.Pattern[str], float], ...]
    targets: Matcher
    excludes: Matcher
    alora_invocation_tokens: tuple[int, ...]
    base: str

    def rank(self, module: str) -> int:
        return next((rank for pattern, rank in self.rank_pattern if pattern.match(module)), self.r)

    def scale(self, module: str) -> float:
        """alpha_m / r_m, or alpha_m / sqrt(r_m) with rsLoRA (Kalajdzievski 2023)."""
        alpha = next((alpha for pattern, alpha in self.alpha_pattern if pattern.match(module)), self.alpha)
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def parse(data: bytes, spec: ModelSpec, where: str) -> LoraConfig:
    """Reads the bytes of an `adapter_config.json`; `where` starts every error message."""
    tree = fields.parse(data, where)
    if not isinstance(tree, dict):
        raise InvalidArgument(f"{where}: must hold a JSON object, not a {type(tree).__name__}")
    options = _Options(tree, where)
    options.refuse_unsupported()
    return LoraConfig(
        r=options.read("r", Positive),
        alpha=options.read("lora_alpha", Number),
        rslora=options.read("use_rslora", Flag, False),
        rank_pattern=options.patterns("rank_pattern", Positive),
        alpha_pattern=options.patterns("alpha_pattern", Number),
        targets=options.targets(spec),
        excludes=_matcher(options.names_or_regex("exclude_modules", required=False)),
        alora_invocation_tokens=options.invocation(spec.vocab),
        base=options.read("base_model_name_or_path", Text, ""),
    )


def target_modules(config: LoraConfig, spec: ModelSpec, where: str) -> dict[str, tuple[int, str]]:
    """The modules that the adapter changes: full name -> (layer, projection)."""
    for module in other_modules(spec):
        if config.targets(module) and not config.excludes(module):
            raise InvalidArgument(
                f"{where}: target_modules matches {module!r}: must match only the projections "
                "q, k, v, o, gate, up and down"
            )
    known = projections(spec)
    chosen = {
        module: place for module, place in known.items() if config.targets(module) and not config.excludes(module)
    }
    if not chosen:
        raise InvalidArgument(
            f"{where}: target_modules without exclude_modules matches no projection of the base model"
        )
    return chosen


class _Options(Fields):
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
        return self.token_ids(key, vocab) or ()

    def names_or_regex(self, key: str, required: bool = True) -> frozenset[str] | re.Pattern[str]:
        value = self.tree.get(key)
        if isinstance(value, str) and value:
            return self._regex(key, value, value)
        if isinstance(value, list) and all(isinstance(v, str) and v for v in value) and (value or not required):
            return frozenset(value)
        if value in (None, "") and not required:
            return frozenset()
        raise self.bad(key, value, "must be a list of module names, or a regular expression")

    def patterns(self, key: str, kind: Any) -> tuple[tuple[re.Pattern[str], Any], ...]:
        value = self.tree.get(key) or {}
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
        if isinstance(named, re.Pattern):
            if layers is not None:
                raise self.bad("layers_to_transform", list(layers), "cannot be used when target_modules is a string")
            if named.pattern.lower() == "all-linear":
                return frozenset(projections(spec)).__contains__
            return _matcher(named)
        return _in_layers(named, frozenset(layers), patterns) if layers else _matcher(named)

    def layer_patterns(self) -> tuple[re.Pattern[str], ...]:
        """`layers_pattern` as PEFT compiles it: each pattern finds the layer's index in a module's name."""
        value = self.tree.get("layers_pattern") or []
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise self.bad("layers_pattern", value, "must be a name or a list of names")
        if not names:
            return (re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\."),)
        return tuple(self._regex("layers_pattern", n, rf"(?:^|.*?\.){n}\.(?P<idx>\d+)\.") for n in names)

    def _regex(self, key: str, shown: str, pattern: str) -> re.Pattern[str]:
        try:
            return re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as e:
            raise self.bad(key, shown, f"must be a regular expression ({e})") from e


def _matcher(names: frozenset[str] | re.Pattern[str]) -> Matcher:
    """A regular expression must match the whole name; a listed name must equal it or be its suffix."""
    if isinstance(names, re.Pattern):
        return lambda module: names.fullmatch(module) is not None
    return lambda module: module in names or any(module.endswith(f".{name}") for name in names)


def _in_layers(names: frozenset[str], layers: Collection[int], patterns: tuple[re.Pattern[str], ...]) -> Matcher:
    """A suffix matches in the given layers only; a full module name matches anywhere."""
    by_name = _matcher(names)

    def matches(module: str) -> bool:
        if module in names or not by_name(module):
            return module in names
        found = next((m for m in (p.match(module) for p in patterns) if m), None)
        return found is not None and int(found["idx"]) in layers

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
