"""The seconds of a step: as modelled for an accelerator, and as fitted to an engine that ran. No jax.

`StepModel` has one launch for all of a step, as a ragged kernel would. `FittedSteps` has what the engine
dispatches, a launch for decoding and one for prompts, each padded to a compiled form:

    seconds = fixed + sum over the launches of
              forms[rows]                                          the base's products: a table
            + context * context_s + pairs * pair_s                 attention
            + adapter_blocks * (block_s + padded rows * spread_s)  every adapter in the launch, beside every row
            + adapter_tokens * token_s                             adapters beside their own tokens
            + padded rows * adapters_s                             if there is any: a kernel computes whole tiles

`jlora doctor fit` writes it; `engine.step_model`, the simulator and a router read it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from jlora.errors import ConfigError
from jlora.model.spec import ModelSpec

FORMAT = "jlora-step-model-1"
FITTED = "jlora-step-model-2"

Seconds = Annotated[float, Meta(ge=0)]


class StepLoad(NamedTuple):
    """The work of a step, or of one of its launches.

    Attributes:
        prompt, decode: tokens computed of prompts, and of decoding sequences.
        context: tokens whose KV is read, once per sequence.
        pairs: (token, token of its context) products of attention.
        adapter_blocks: blocks of the distinct adapters in the batch.
        adapter_tokens: sum over tokens of the blocks of their adapter.
        rows: of the launch before it is padded: decoding sequences, or rows of `jlora.engine.plan.ROW` prompt tokens.
    """

    prompt: int
    decode: int
    context: int
    pairs: float
    adapter_blocks: int
    adapter_tokens: int
    rows: int = 0


@dataclass(frozen=True, slots=True)
class StepModel:
    """Coefficients of a step's time (see the module), all in seconds.

    Attributes:
        prompt_token_s, decode_token_s: to compute a token; for a decoding token with its logits.
        context_token_s: to read one token's KV in all layers.
        pair_s: one query token against one key token, in all layers and heads.
        adapter_block_s: to read one block of an adapter.
        adapter_token_s: to apply one block of an adapter to one token.
    """

    fixed_s: float
    weights_s: float
    prompt_token_s: float
    decode_token_s: float
    context_token_s: float
    pair_s: float
    adapter_block_s: float
    adapter_token_s: float

    def seconds(self, load: StepLoad) -> float:
        linear = max(self.weights_s, load.prompt * self.prompt_token_s + load.decode * self.decode_token_s)
        attention = max(load.context * self.context_token_s, load.pairs * self.pair_s)
        adapters = max(load.adapter_blocks * self.adapter_block_s, load.adapter_tokens * self.adapter_token_s)
        return self.fixed_s + linear + attention + adapters

    @classmethod
    def fitted(cls, path: Path, model: str, chips: int) -> StepModel:
        """Measured coefficients for a model on a number of chips. Raises ConfigError for any other file."""
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError) as e:
            raise ConfigError(f"step model {path}: {e}") from e
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise ConfigError(f"step model {path}: format must be {FORMAT!r}")
        for name, wanted in (("model", model), ("chips", chips)):
            if (told := record.get(name)) != wanted:
                raise ConfigError(f"step model {path}: {name} = {told!r}: must be {wanted!r}, as in the simulation")
        found = record.get("coefficients", {})
        names = [field.name for field in dataclasses.fields(cls)]
        for name in (*names, *found):
            value = found.get(name)
            if name not in names or not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
                raise ConfigError(
                    f"step model {path}: coefficients.{name} = {value!r}: must have exactly {', '.join(names)}, each "
                    "at least 0 seconds"
                )
        return cls(**{name: float(found[name]) for name in names})


@dataclass(frozen=True, slots=True)
class Launches:
    """Coefficients of the launches of a kind; see the module.

    Attributes:
        forms: rows of every compiled form -> seconds of the base's products.
    """

    forms: Annotated[Mapping[int, Seconds], Meta(min_length=1)]
    context_s: Seconds = 0.0
    pair_s: Seconds = 0.0
    adapters_s: Seconds = 0.0
    block_s: Seconds = 0.0
    spread_s: Seconds = 0.0
    token_s: Seconds = 0.0

    def padded(self, rows: int) -> int:
        """Rows of the smallest form that holds them; beyond the largest, the rows themselves."""
        return min((size for size in self.forms if size >= rows), default=rows)

    def seconds(self, load: StepLoad) -> float:
        """Of a launch."""
        rows = self.padded(load.rows)
        largest = max(self.forms)
        base = self.forms[rows] if rows in self.forms else self.forms[largest] * rows / largest
        adapters = load.adapter_blocks * (self.block_s + rows * self.spread_s) + load.adapter_tokens * self.token_s
        attention = load.context * self.context_s + load.pairs * self.pair_s
        return base + attention + adapters + rows * self.adapters_s * (load.adapter_blocks > 0)


@dataclass(frozen=True, slots=True)
class Help:
    """Seconds of the host's part of a cold start: a fixed part and one for each token, over all layers.

    Attributes:
        place: of the exchanges at one of the four places of a layer.
        block: of reading a block of the adapter and its products.
        parts: of what the device takes longer for the base in parts.
    """

    place: tuple[Seconds, Seconds]
    block: tuple[Seconds, Seconds]
    parts: tuple[Seconds, Seconds] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Objective:
    """What a server's operating points hold for.

    Attributes:
        slo_s: seconds that a step may take.
        context: tokens of a mean sequence.
        prompts: prompt tokens that are computed for each token of an answer.
        batch: sequences that the server runs at once, at most.
    """

    slo_s: Annotated[float, Meta(gt=0)]
    context: Annotated[int, Meta(ge=1)]
    prompts: Annotated[float, Meta(ge=0)]
    batch: Annotated[int, Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class Points:
    """LoRAServe's operating points: rank -> tokens per second, also of prompts, of a server with this rank alone."""

    of: Objective
    by_rank: Annotated[Mapping[int, Annotated[float, Meta(gt=0)]], Meta(min_length=1)]


class Basis(NamedTuple):
    """What step times hold for; see the fields of `FittedSteps`."""

    spec: ModelSpec
    device: str
    chips: int
    block_tokens: int
    link_gbps: float


@dataclass(frozen=True, slots=True)
class FittedSteps:
    """Step times of one engine on one machine, as they were measured.

    Attributes:
        device: name of the processor or accelerator; chips: in tensor parallel.
        spec: of the model.
        block_tokens, device_blocks: of the pool.
        row_tokens: tokens in a row of a prompt.
        rank_blocks: blocks of an adapter on q, k, v and o for each rank.
        link_bps: bytes per second from the host to the device, as measured; link_gbps: `cache.link_gbps` then.
        jax: its version.
        help: the host's part of cold starts.
        points: for LoRAServe's placement; None: an older file.
        programs: what decided the programs that were timed (`jlora.engine.build.programs_of`); empty: an older file.
        facts: errors of the fit, date, versions: for readers.
    """

    format: Literal["jlora-step-model-2"]
    device: str
    chips: int
    spec: ModelSpec
    block_tokens: Annotated[int, Meta(ge=1)]
    device_blocks: Annotated[int, Meta(ge=1)]
    row_tokens: Annotated[int, Meta(ge=1)]
    rank_blocks: Annotated[float, Meta(gt=0)]
    link_bps: Annotated[float, Meta(gt=0)]
    link_gbps: Annotated[float, Meta(ge=0)]
    jax: str
    fixed_s: Seconds
    decode: Launches
    prompt: Launches
    help: Help
    points: Points | None = None
    programs: Mapping[str, str | int] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def wrote(cls, path: Path) -> bool:
        """Whether a file says that it is one of these."""
        try:
            return bool(json.loads(path.read_text())["format"] == FITTED)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    @classmethod
    def read(cls, path: Path) -> FittedSteps:
        """Reads a file of `jlora doctor fit`. Raises ConfigError for any other."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as e:
            raise ConfigError(f"step model {path}: {e}; `jlora doctor fit --model DIR` writes one") from e

    def write(self, path: Path) -> None:
        """Writes the file."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")  # NaN becomes null

    def check(self, here: Basis) -> None:
        """Raises ConfigError if it was fitted to another model, machine, pool or link than `here`.

        Names, contexts and end tokens may differ: no step takes longer for them, unless a context asks for another
        kernel, which `differences` tells.
        """
        free = {name: getattr(here.spec, name) for name in ("name", "max_len", "eos_ids")}
        spec = dataclasses.asdict(dataclasses.replace(self.spec, **free))
        pairs = [(f"spec.{name}", spec[name], wanted) for name, wanted in dataclasses.asdict(here.spec).items()]
        pairs += [(name, getattr(self, name), getattr(here, name)) for name in here._fields[1:]]
        for name, told, wanted in pairs:
            if told != wanted:
                raise ConfigError(
                    f"step model of {self.spec.name}: {name} = {told}: must be {wanted}, as here; fit again with "
                    "`jlora doctor fit --model DIR`"
                )

    def differences(self, here: Mapping[str, str | int]) -> list[tuple[str, str | int, str | int]]:
        """Names, what they were and what they are: of jax and of `programs`, where the file tells them."""
        then = {"jax": self.jax, **self.programs}
        return [(name, then[name], now) for name, now in here.items() if then.get(name, now) != now]

    def seconds(self, *launches: StepLoad) -> float:
        """Of a step."""
        return self.fixed_s + sum(self._of(load).seconds(load) for load in launches)

    def step_s(self, ranks: Mapping[int, int], context: int = 0, prompt: int = 0) -> float:
        """Of a step in which requests decode, by the ranks of their adapters (0: the base); CaraServe's Dec.

        Every request counts with an adapter of its own. Together they read `context` tokens; `prompt` more tokens
        are computed in a launch of their own.
        """
        count, blocks = self._batch(ranks)
        decode = [StepLoad(0, count, context, context, blocks, blocks, count)] if count else []
        rows = -(-prompt // self.row_tokens)
        beside = [StepLoad(prompt, 0, prompt, prompt * (prompt + 1) / 2, 0, 0, rows)] if prompt else []
        return self.seconds(*decode, *beside)

    def prefill_s(self, ranks: Mapping[int, int], tokens: int) -> float:
        """Of a step that computes prompts of equal lengths, `tokens` in all; CaraServe's Pre.

        For no prompts, of the smallest launch.
        """
        count, blocks = self._batch(ranks)
        if not count:
            return self.fixed_s + min(self.prompt.forms.values())
        each, rows = tokens / count, -(-tokens // self.row_tokens)
        pairs, adapter_tokens = tokens * (each + 1) / 2, math.ceil(blocks * each)
        return self.seconds(StepLoad(tokens, 0, tokens, pairs, blocks, adapter_tokens, rows))

    def _batch(self, ranks: Mapping[int, int]) -> tuple[int, int]:
        """Requests, and blocks of their adapters."""
        return sum(ranks.values()), sum(self.blocks(rank) * count for rank, count in ranks.items())

    def blocks(self, rank: int) -> int:
        """Of an adapter on q, k, v and o."""
        return math.ceil(rank * self.rank_blocks)

    @property
    def weights_s(self) -> float:
        """Of reading the weights once, at most: the smallest step."""
        return min(self.decode.forms.values())

    @property
    def prompt_token_s(self) -> float:
        """Of a prompt token in a full launch."""
        rows = max(self.prompt.forms)
        return self.prompt.forms[rows] / (rows * self.row_tokens)

    def _of(self, load: StepLoad) -> Launches:
        return self.prompt if load.prompt else self.decode
