"""What a router believes of prefix caches: an activated LoRA's context is the base's."""

from __future__ import annotations

from jlora.cluster.prefixes import Prefixes, shared

CONTEXT, INVOCATION = tuple(range(10, 30)), (7, 8)


def test_an_activated_lora_finds_the_kv_that_the_base_has_left():
    prefixes = Prefixes(4)
    prefixes.sent("r0", prefixes.chain(*shared(CONTEXT, None, ())))
    activated, version = shared((*CONTEXT, *INVOCATION), "judge@1", INVOCATION)
    assert prefixes.cached(prefixes.chain(activated, version)) == {"r0": 20}
    plain = prefixes.chain(*shared((*CONTEXT, *INVOCATION), "upper@1", ()))
    assert prefixes.cached(plain) == {}


def test_a_prompt_that_does_not_invoke_the_adapter_is_its_own():
    assert shared(CONTEXT, "judge@1", INVOCATION) == (CONTEXT, "judge@1")
