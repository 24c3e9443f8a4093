"""GPUs and CUDA versions that the NVIDIA kernels support. No jax.

The kernels use `wgmma`, which only compute capability 9.0 (Hopper: H100, H200) has: not an A100
(8.0), nor a B200 (10.0). The compilers of CUDA 12.8 to 12.9.0 miscompile causal masks of such
kernels. jax reports its CUDA version without the patch level, so all of 12.9 is refused, as in jax's
own kernels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

CAPABILITY = "9.0"
MISCOMPILING = range(12080, 13000)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's capability and CUDA version.

    Attributes:
        capability: for example "9.0", or "gfx942" for AMD; empty if unknown.
        cuda: 1000 * major + 10 * minor version; 0 if unknown.
    """

    capability: str = ""
    cuda: int = 0

    @classmethod
    def of(cls, device: Any) -> Gpu:
        """The `Gpu` of a jax device; its fields are unknown for other devices."""
        version = re.search(r"\bcuda (\d+)", device.client.platform_version)
        return cls(str(getattr(device, "compute_capability", "")), int(version[1]) if version else 0)

    def refusal(self, kind: str) -> str | None:
        """Why the kernels cannot run on this GPU of `device_kind` `kind`; None if they can."""
        if self.capability != CAPABILITY:
            has = self.capability or "none that jax knows"
            return f"{kind} has compute capability {has}; the kernels' products (wgmma) need {CAPABILITY}: H100, H200"
        if self.cuda in MISCOMPILING:
            version = f"{self.cuda // 1000}.{self.cuda % 1000 // 10}"
            return f"jax was built with CUDA {version}, and 12.8 to 12.9.0 miscompile causal masks; use jax[cuda13]"
        return None


def refusal_of(device: Any) -> str | None:
    """Why the kernels cannot run on a jax device; None if they can."""
    return Gpu.of(device).refusal(device.device_kind)
