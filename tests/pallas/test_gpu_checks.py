"""The first-run checklist runs, in miniature, and sees what is wrong."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jlora.doctor import checklist
from jlora.doctor.checklist import LARGE, Sizes, checks
from jlora.pallas import reference
from jlora.pallas.cases import TINY
from jlora.pallas.gpu_decode import DecodeTiles
from jlora.pallas.gpu_ops import runtime_refusal
from jlora.pallas.gpu_prefill import PrefillTiles
from tests.pallas import _gpu

pytestmark = pytest.mark.skipif(runtime_refusal() is not None, reason=str(runtime_refusal()))


SMALL = Sizes(
    specs=(replace(TINY, width=256, mlp=256, heads=2, kv_heads=1, dtype="bfloat16"),),
    block_tokens=(32,),
    lengths=(100,),
    prompts=(70,),
    repeats=2,
    steps=2,
    decode=(DecodeTiles(blocks=4),),
    prefill=(PrefillTiles(),),
)
# One of each kind; the list has more shapes of the same, which `test_gpu_attention` and `test_gpu_lora` have too.
KINDS = ("decode: 2 runs", "few units", "no adapter", "in place")


@pytest.mark.parametrize("check", [c for c in checks(SMALL) if any(k in c.name for k in KINDS)], ids=lambda c: c.name)
def test_checks_pass_in_the_interpreter(check: checklist.Check):
    with _gpu.interpreted():
        finding = check.run()
    assert finding.passed, finding.seen


def test_no_check_has_the_name_of_another():
    for sizes in (SMALL, LARGE):
        names = [check.name for check in checks(sizes)]
        assert len(set(names)) == len(names) >= 11


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch):
    """A kernel off by more than rounding explains: the first check must say so, and passes the right one."""
    right = reference.attention
    for error, passes in ((0.0, True), (0.1, False)):
        wrong = lambda *args, error=error: right(*args) + jnp.bfloat16(error)  # noqa: E731
        monkeypatch.setattr(checklist, "attention_op", lambda tiles, wrong=wrong: wrong)
        assert checks(SMALL)[0].run().passed is passes
