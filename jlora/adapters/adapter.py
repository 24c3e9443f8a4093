"""A LoRA adapter in host memory: read and checked, not yet packed for the device.

    delta(x) = x · Aᵀ · B        with A [R, in] and B [R, out], alpha/r already folded into B

for each (layer, projection) that the adapter changes. `jlora.adapters.peft` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One adapter's content. Two adapters are equal if and only if their digests are equal.

    Attributes:
        digest: sha256 (hex) of the configuration and weight files' bytes.
        rank: the largest rank of any module.
        ranks: module, as "layers.0.self_attn.q_proj" -> its rank.
        target_modules: the projections (q, k, v, o, gate, up, down) present in any layer.
        weights: (layer, projection) -> A [r, in], B [r, out]; float32, C-contiguous, finite.
            The scale (alpha/r, or alpha/sqrt(r) with rsLoRA) is folded into B.
        header: sha256 (hex) of the configuration and of the weight file's header; see `Scan`.
        stamp: the identities of both files when they were read.
        base: what the adapter calls its base; "" if it does not say.
        alora_invocation_tokens: an activated LoRA acts from these token ids on, themselves included.
            () for an ordinary LoRA.
    """

    digest: str
    rank: int
    ranks: Mapping[str, int]
    target_modules: tuple[str, ...]
    weights: Mapping[tuple[int, str], tuple[np.ndarray, np.ndarray]]
    alora_invocation_tokens: tuple[int, ...] = ()
    header: str = ""
    stamp: tuple[int, ...] = ()
    base: str = ""


@dataclass(frozen=True, slots=True)
class Scan:
    """What an adapter's files say without their weights: cheap to know, and all that a registration needs.

    Attributes:
        header: sha256 (hex) of the configuration and of the weight file's header. Two versions with equal
            headers have the same ranks, modules and size, and perhaps other weights.
        stamp: the identities of both files when they were read.
        base: what the adapter calls its base; "" if it does not say.
        ranks, target_modules, alora_invocation_tokens: as of `Adapter`.
        sizes: projection -> its largest rank.
    """

    header: str
    stamp: tuple[int, ...]
    base: str
    ranks: Mapping[str, int]
    target_modules: tuple[str, ...]
    alora_invocation_tokens: tuple[int, ...]
    sizes: Mapping[str, int]
