"""Which GPUs and which CUDA the NVIDIA kernels run with. No jax: a device is asked, and nothing is made.

Their products are `wgmma`, instructions of compute capability 9.0 (Hopper: H100, H200) that neither
older chips (A100: 8.0) nor newer ones (B200: 10.0) have. The compilers of CUDA 12.8 to 12.9.0
miscompile causal masks of such kernels. jax gives the version that it was built with (12090: 12.9)
without the last digit, so all of 12.9 is refused, as jax's own kernels refuse it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

CAPABILITY = "9.0"
MISCOMPILING = range(12080, 13000)


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a GPU and its runtime say of themselves.

    Attributes:
        capability: such as 9.0; AMD's are names, such as gfx942; empty: it does not say.
        cuda: 1000 times the major version and 10 times the minor one; 0: it does not say.
    """

    capability: str = ""
    cuda: int = 0

    @classmethod
    def of(cls, device: Any) -> Gpu:
        """What a device of jax says; one that is no GPU says nothing."""
        version = re.search(r"\bcuda (\d+)", device.client.platform_version)
        return cls(str(getattr(device, "compute_capability", "")), int(version[1]) if version else 0)

    def refusal(self, kind: str) -> str | None:
        """Why the kernels cannot run on this GPU, of `device_kind` kind; None: they can."""
        if self.capability != CAPABILITY:
            has = self.capability or "none that jax knows"
            return f"{kind} has compute capability {has}; the kernels' products (wgmma) need {CAPABILITY}: H100, H200"
        if self.cuda in MISCOMPILING:
            version = f"{self.cuda // 1000}.{self.cuda % 1000 // 10}"
            return f"jax was built with CUDA {version}, and 12.8 to 12.9.0 miscompile causal masks; use jax[cuda13]"
        return None


def refusal_of(device: Any) -> str | None:
    """The same, asked of a device."""
    return Gpu.of(device).refusal(device.device_kind)
