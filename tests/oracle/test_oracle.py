"""jlora answers what transformers and PEFT answer, through the real gRPC server.

`golden/` holds checkpoints, adapters and answers that `make_golden.py` wrote with PyTorch. Where
PyTorch is installed, `live` makes others with another seed; `JLORA_ORACLE=live` makes a missing
PyTorch a failure. Every answer is compared in float32: greedy tokens equal, logprobs (of the
output, of the prompt, and the most likely ones) within 1e-4.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jlora.serve.proto import jlora_pb2 as pb
from tests.oracle._server import serve
from tests.serve._server import Served

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-4
LIVE_SEED = 7
FEW_BLOCKS, MOST_ROUNDS = 24, 20

Answer = Mapping[str, Any]

# Without warm-up only the shapes in use are compiled, which is most of the time here.
BASIC = {"cache.block_tokens": 8, "engine.max_seqs": 4, "engine.layers": "unroll", "engine.warmup": False}

# Adapters come to the device when requests need them, over a slow link.
HELP = {"engine.cold_start": "cpu", "cache.link_gbps": 1e-3, "cache.monitor_s": 60, "cache.hbm_blocks": 100}

# Every way to run the same model: chunk sizes, layers scanned or unrolled, sharded, short of blocks.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "chunk 512": {**BASIC, "engine.max_step_tokens": 512},
    "chunk 8, scan": {**BASIC, "engine.max_step_tokens": 8, "engine.layers": "scan"},
    "chunk 16, no overlap": {**BASIC, "engine.max_step_tokens": 16, "engine.overlap": False},
    "chunk 16, warm": {**BASIC, "engine.max_step_tokens": 16, "engine.warmup": True},
    "tp 2": {**BASIC, "engine.max_step_tokens": 16, "model.tp": 2},
    "tp 2, scan": {**BASIC, "engine.max_step_tokens": 512, "model.tp": 2, "engine.layers": "scan"},
    "the host helps": {**BASIC, "engine.max_step_tokens": 16, **HELP},
    "merged": {**BASIC, "engine.max_step_tokens": 16, "engine.merge": "linear", "engine.merge_starve_s": 0.05},
    "tp 4": {**BASIC, "engine.max_step_tokens": 16, "model.tp": 4},
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same cases with other random weights, made now by transformers and PEFT."""
    missing = [name for name in ("torch", "transformers", "peft") if importlib.util.find_spec(name) is None]
    if missing:
        if os.environ.get("JLORA_ORACLE") == "live":
            pytest.fail(f"JLORA_ORACLE=live, but {', '.join(missing)} is not installed")
        pytest.skip(f"needs {', '.join(missing)}; the golden files stand in")
    out = tmp_path_factory.mktemp("oracle")
    command = [sys.executable, "-m", "tests.oracle.make_golden", "--out", str(out), "--seed", str(LIVE_SEED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def answers(case: Path) -> list[Answer]:
    """What every request of the case must return."""
    return json.loads((case / "answers.json").read_text())


@contextmanager
def serving(case: Path, settings: Mapping[str, Any]) -> Iterator[Served]:
    """A gRPC server on this case's model and all its adapters."""
    adapters = {f"adapters.paths.{path.name}": str(path) for path in sorted((case / "adapters").iterdir())}
    model = {"model.path": str(case / "model"), "model.name": case.name, "model.dtype": "float32"}
    with serve({**model, **adapters, **settings}) as client:
        yield client


def request(answer: Answer, **fields: Any) -> pb.GenerateRequest:
    """The call that must return `answer`."""
    return pb.GenerateRequest(
        model=answer["adapter"] or "",
        token_ids=pb.TokenIds(ids=answer["prompt"]),
        sampling=pb.Sampling(temperature=0.0),
        stopping=pb.Stopping(max_tokens=len(answer["tokens"]), ignore_eos=True),
        logprobs=len(answer["top"][0]),
        prompt_logprobs=0,
        **fields,
    )


def check(got: pb.GenerateResponse, want: Answer) -> None:
    """Tokens equal, every logprob within TOLERANCE."""
    what = check_output(got, want)
    assert [t.token_id for t in got.prompt_logprobs[1:]] == want["prompt"][1:], what
    close([t.logprob for t in got.prompt_logprobs[1:]], want["prompt_logprobs"], what)
    assert len(got.prompt_logprobs) == len(want["prompt"])


def check_output(got: pb.GenerateResponse, want: Answer) -> str:
    """The same without the prompt's logprobs; a description of the request."""
    what = f"adapter {want['adapter']}, prompt of {len(want['prompt'])} tokens"
    (output,) = got.outputs
    assert list(output.token_ids) == want["tokens"], what
    assert output.finish_reason == "length"
    assert [t.token_id for t in output.logprobs] == want["tokens"], what
    close([t.logprob for t in output.logprobs], want["logprobs"], what)
    for given, expected in zip(output.logprobs, want["top"], strict=True):
        close([t.logprob for t in given.top], [logprob for _, logprob in expected], what)
        assert given.top[0].token_id == expected[0][0], what
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(want["prompt"]), len(want["tokens"]))
    return what


def close(got: list[float], want: list[float], what: str) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE, err_msg=what)


def check_case(case: Path, settings: Mapping[str, Any]) -> None:
    """All requests at once, mixed in one batch; then one of each adapter alone."""
    wanted = answers(case)
    with serving(case, settings) as client:
        calls = [client.inference.Generate.future(request(want)) for want in wanted]
        for call, want in zip(calls, wanted, strict=True):
            check(call.result(), want)
        alone = {want["adapter"]: want for want in wanted}  # the longest prompt of each
        for i, want in enumerate(alone.values()):
            check(client.inference.Generate(request(want, bypass_prefix_cache=i % 2 == 0)), want)
        client.check_idle()
        if "engine.merge" in settings:
            assert client.stats().merge.switches > 0
        if settings.get("engine.cold_start") == "cpu":
            assert "cpu" in {call.result().timing.cold_start for call in calls}
        if settings["engine.warmup"]:
            assert client.stats().compiles_after_warmup == 0


@pytest.mark.slow
@pytest.mark.parametrize("settings", [name for name in SETTINGS if name != "tp 4"])
def test_every_kind_of_adapter_in_every_setting(settings: str):
    check_case(GOLDEN / "gqa", SETTINGS[settings])


# Each shape once; the models made now run the same programs, so they compile nothing anew.
SHAPES = {
    "mha": "tp 4",
    "tied_llama3": "chunk 512",
    "odd_vocab_mqa": "chunk 16, no overlap",
    "linear_rope": "chunk 8, scan",
    "mistral": "tp 2",
    "alora": "chunk 16, no overlap",
}


BRIEF = "alora"  # it stands for the others where time is short


@pytest.mark.parametrize(
    ("case", "settings"),
    [pytest.param(*shape, marks=[] if shape[0] == BRIEF else pytest.mark.slow) for shape in SHAPES.items()],
)
def test_every_shape_of_model(case: str, settings: str):
    check_case(GOLDEN / case, SETTINGS[settings])


@pytest.mark.parametrize(("case", "settings"), {"gqa": "tp 2, scan", **SHAPES}.items())
def test_models_made_now(live: Path, case: str, settings: str):
    check_case(live / case, SETTINGS[settings])


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["chunk 512", "chunk 8, scan", "chunk 16, warm", "tp 2"])
def test_activated_loras_in_every_setting(settings: str):
    """Beside a plain LoRA and the base in one batch; chunks of 8 and 16 end inside some invocations."""
    check_case(GOLDEN / "alora", SETTINGS[settings])


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [200, FEW_BLOCKS])
def test_answers_from_base_kv_that_activated_loras_share_are_equal(blocks: int):
    """Two rounds over the same texts, one request after the other: base, then each adapter, then again."""
    case, known = GOLDEN / "alora", 0
    with serving(case, {**SETTINGS["chunk 16, no overlap"], "cache.hbm_blocks": blocks}) as client:
        for want in answers(case) * 2:
            asked = request(want)
            asked.ClearField("prompt_logprobs")  # these need the whole prompt computed
            got = client.inference.Generate(asked)
            check_output(got, want)
            known += got.usage.cached_tokens
        state = client.control.GetCacheState(pb.GetCacheStateRequest())
        assert known == state.kv_hit_tokens > state.kv_base_hit_tokens > 0
        client.check_idle()


def check_preempted(case: Path, settings: str) -> None:
    """A pool that holds few of the sequences that want to run, and not all adapters; until somebody is preempted."""
    wanted = answers(case) * 2
    with serving(case, {**SETTINGS[settings], "cache.hbm_blocks": FEW_BLOCKS}) as client:
        for _ in range(MOST_ROUNDS):
            calls = [client.inference.Generate.future(request(want)) for want in wanted]
            for call, want in zip(calls, wanted, strict=True):
                check(call.result(), want)
            if client.stats().preemptions:
                break  # it depends on who comes first, and so on the machine, whether anybody is
        assert client.stats().preemptions > 0
        client.check_idle()


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["chunk 16, no overlap", "tp 2"])
def test_preemption_does_not_change_an_answer(settings: str):
    check_preempted(GOLDEN / "gqa", settings)


@pytest.mark.parametrize("settings", ["chunk 16, no overlap", "tp 2"])
def test_preemption_does_not_change_an_answer_of_models_made_now(live: Path, settings: str):
    check_preempted(live / "gqa", settings)
