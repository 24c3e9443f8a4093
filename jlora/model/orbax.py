"""Converted models: an Orbax checkpoint of the parameter pytree beside a small `jlora_model.json`.

jlora_model.json      written last, so its presence means complete
params/               Orbax StandardCheckpointer, layers as a list
tokenizer.json ...    copied from the source
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import msgspec

from jlora.errors import AlreadyExists, DataLoss, FailedPrecondition
from jlora.model.config_json import read_json
from jlora.model.hf_names import tensor_slots
from jlora.model.llama import Params, abstract
from jlora.model.place import Listed
from jlora.model.spec import CONVERTED, ModelSpec

PARAMS = "params"
FORMAT = 1
COPIED = (  # of the tokenizer, and what `generate` would take
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def is_converted(directory: Path) -> bool:
    """Whether `save` finished writing here."""
    return (directory / CONVERTED).is_file()


def make_target(target: Path, needed: int) -> None:
    """Makes the directory.

    Raises AlreadyExists if it has files, FailedPrecondition if it cannot be made or its disk lacks the needed bytes.
    """
    try:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise AlreadyExists(f"target {target.name!r}: exists and is not an empty directory")
        target.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target).free
    except OSError as e:
        raise FailedPrecondition(f"target {str(target)!r}: cannot be made ({e.strerror})") from e
    if free < needed:
        raise FailedPrecondition(
            f"target {str(target)!r}: the weights take {needed / 1e6:.1f} MB, its disk has {free / 1e6:.1f} MB free"
        )


def clear(target: Path) -> None:
    """Takes out what `save` has begun, so that another try finds the directory of `make_target` empty."""
    for entry in target.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def save(source: Path, target: Path, spec: ModelSpec, params: Params) -> None:
    """Writes into the directory of `make_target`; the tokenizer files come from `source`."""
    import orbax.checkpoint as ocp  # only here and below: it takes a second, and most models are not converted

    # Weights hardly compress, and decompressing them doubles the time to load.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        checkpointer.save(target.absolute() / PARAMS, params)
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    meta = {"format": FORMAT, "spec": dataclasses.asdict(spec)}
    (target / CONVERTED).write_text(json.dumps(meta, indent=2) + "\n")


def read_spec(directory: Path) -> ModelSpec:
    """The converted spec. Raises DataLoss if the file is damaged or of another format."""
    meta = read_json(directory / CONVERTED)
    if meta.get("format") != FORMAT:
        raise DataLoss(f"{CONVERTED}: format = {meta.get('format')!r}: must be {FORMAT}; convert the model again")
    try:
        return msgspec.convert(meta["spec"], ModelSpec)
    except (KeyError, msgspec.ValidationError) as e:
        raise DataLoss(f"{CONVERTED}: spec is damaged ({e})") from e


def load_into(into: Listed, directory: Path, spec: ModelSpec, shardings: Params) -> None:
    """Restores every weight to its devices, then adds them to `into` one by one."""
    import orbax.checkpoint as ocp

    shapes = abstract(spec)[0]
    wanted = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, spec.dtype, sharding=s), shapes, shardings)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            params = checkpointer.restore(directory.absolute() / PARAMS, wanted)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise DataLoss(f"converted model {directory.name!r}: {PARAMS} is damaged ({type(e).__name__})") from e
    # One kind of matrix after the other, so that stacking holds only one kind twice.
    for slot in sorted(tensor_slots(spec).values(), key=lambda slot: slot.leaf):
        into.adopt(slot, slot.home(params).pop(slot.leaf))
