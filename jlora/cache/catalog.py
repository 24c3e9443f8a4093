"""Cache policies by name (`cache.policy`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jlora.cache.baselines import Slora, Vllm, VllmFair
from jlora.cache.fastlibra import Fastlibra, Knobs, Wol, Wom, Wos
from jlora.cache.policies import Jlora, Policy
from jlora.cache.transfer import Meter
from jlora.config import CacheConfig


def make_policy(config: CacheConfig, meter: Meter) -> Policy:
    """The policy that `config.policy` names."""
    knobs = Knobs(config.upper, config.lower, config.tau_s)
    makers: Mapping[str, Callable[[], Policy]] = {
        "jlora": lambda: Jlora(meter),
        "fastlibra": lambda: Fastlibra(meter, knobs),
        "fastlibra-wom": lambda: Wom(meter, knobs),
        "fastlibra-wos": lambda: Wos(meter, knobs),
        "fastlibra-wol": lambda: Wol(meter, knobs),
        "lru": lambda: Policy(meter),
        "vllm": lambda: Vllm(meter),
        "vllm-fair": lambda: VllmFair(meter, config.share),
        "slora": lambda: Slora(meter),
    }
    return makers[config.policy]()
