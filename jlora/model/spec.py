"""The shapes and constants of a Llama. No jax."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")

# The projections of each place of a layer at which adapters act: those that take the same input.
SITES = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))

CONVERTED = "jlora_model.json"  # the file of a converted model that has its `ModelSpec`

# Projections whose input is sharded under tensor parallelism, and whose output is summed.
ROW_PARALLEL = ("o", "down")

# What adapters of a server may act on (`adapters.target_modules`).
TARGETS = {"all": PROJECTIONS, "attention": ("q", "k", "v", "o")}


def sites_of(projections: Collection[str]) -> list[tuple[str, ...]]:
    """The sites at which an adapter on these projections acts."""
    return [names for names in SITES if not set(names).isdisjoint(projections)]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """`linear` divides positions by `factor`; `llama3` is the wavelength rule of Llama 3.1."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and constants of one base model.

    Attributes:
        vocab, width, mlp, layers, heads, kv_heads, head_dim: V, D, F, L, N, K, H.
        max_len: longest context in tokens.
        eos_ids: tokens that end an answer; bos_id: the first token, None if the model has none.
        dtype: "float32" or "bfloat16", of weights, pool and activations.
    """

    vocab: int
    width: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_len: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied: bool = False
    dtype: str = "float32"
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    name: str = "model"

    @property
    def projection_shapes(self) -> Mapping[str, tuple[int, int]]:
        """Projection -> (input width, output width)."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q": (self.width, q),
            "k": (self.width, kv),
            "v": (self.width, kv),
            "o": (q, self.width),
            "gate": (self.width, self.mlp),
            "up": (self.width, self.mlp),
            "down": (self.mlp, self.width),
        }

    def exchanged(self, projections: Collection[str]) -> int:
        """Numbers per token and layer between device and host, if the host helps an adapter on these projections.

        Each of the adapter's sites sends its input and receives an addition to all of its products.
        """
        shapes = self.projection_shapes
        return sum(shapes[names[0]][0] + sum(shapes[name][1] for name in names) for names in sites_of(projections))

    @property
    def parameters(self) -> int:
        per_layer = sum(i * o for i, o in self.projection_shapes.values()) + 2 * self.width
        return self.layers * per_layer + self.width + self.vocab * self.width * (1 if self.tied else 2)
