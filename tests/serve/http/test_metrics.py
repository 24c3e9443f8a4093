"""`/metrics`: what a scraper parses equals what the server says elsewhere, and every answer counts once."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Mapping

import grpc
import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from jlora.engine.engine import Engine
from jlora.replica import ReplicaState
from jlora.serve.backend import Backend
from jlora.serve.observed import Histogram
from jlora.types import TokenEvent
from tests.serve._server import SMALL, Served, request, serving, wait_until

BODY = {"prompt": "Hello", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
LABELS = {"model_name": "base", "engine": "0"}
Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(http: httpx.Client) -> Samples:
    """Every sample by its name and labels."""
    answer = http.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(parse(answer.text))
    assert len({family.name for family in families}) == len(families)
    samples = [sample for family in families for sample in family.samples]
    found = {(s.name, frozenset(s.labels.items())): s.value for s in samples}
    assert len(found) == len(samples)
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def vllm(samples: Samples, name: str, **labels: str) -> float:
    return value(samples, f"vllm:{name}", **LABELS, **labels)


def settled(served: Served, http: httpx.Client) -> tuple[ReplicaState, Samples]:
    """A scrape and the state at its time. Backups may go on while no request runs, so the state must not change."""
    served.check_idle()
    while True:
        before, samples, after = served.replica.state().result(20), scrape(http), served.replica.state().result(20)
        if (before.cache, before.stats) == (after.cache, after.stats):
            return after, samples


def test_ours_are_what_the_cache_says(served: Served, http: httpx.Client):
    http.post("/v1/completions", json={**BODY, "model": "upper"})
    state, samples = settled(served, http)
    cache, stats = state.cache, state.stats
    for tier, blocks in (("hbm", cache.hbm), ("host", cache.host)):
        kinds = {kind: value(samples, "jlora_blocks", **{"tier": tier, "class": kind}) for kind in
                 ("free", "adapters", "history_kv", "running_kv")}  # fmt: skip
        assert kinds == {kind: getattr(blocks, kind) for kind in kinds} and sum(kinds.values()) == blocks.total
    assert cache.adapter_reads > 0 and cache.adapter_read_s > 0
    tiers = {tier: value(samples, "jlora_adapters", tier=tier) for tier in ("hbm", "host", "disk", "loading")}
    assert tiers == {tier: getattr(cache, f"adapters_{tier}") for tier in tiers} and sum(tiers.values()) == 3
    assert cache.adapters_registered == 3 and value(samples, "jlora_adapters_reading") == 0
    assert value(samples, "jlora_invalid_kv_blocks") == 0 == value(samples, "jlora_compiles_total")
    for name, want in (
        ("kv_lookup_tokens", cache.kv_lookup_tokens),
        ("kv_hit_tokens", cache.kv_hit_tokens),
        ("adapter_lookups", cache.adapter_lookups),
        ("adapter_hits", cache.adapter_hits),
        ("adapter_reads", cache.adapter_reads),
        ("adapter_reads_failed", cache.adapter_reads_failed),
        ("adapter_read_seconds", cache.adapter_read_s),
        ("cold_predicted_starts", cache.cold_predicted),
        ("cold_predicted_seconds", cache.cold_predicted_s),
        ("cold_measured_seconds", cache.cold_measured_s),
        ("cold_error_seconds", cache.cold_error_s),
        ("preemptions", stats.preemptions),
        ("steps", stats.steps),
    ):
        assert value(samples, f"jlora_{name}_total") == want, name
    assert value(samples, "jlora_moved_bytes_total", direction="in") == cache.bytes_swapped_in


def test_vllms_names_have_its_labels(served: Served, http: httpx.Client):
    _, samples = settled(served, http)
    assert value(samples, "vllm:cache_config_info", block_size="16", num_gpu_blocks="700", engine="0") == 1
    assert vllm(samples, "num_requests_running") == vllm(samples, "num_requests_waiting") == 0
    assert vllm(samples, "kv_cache_usage_perc") == 0
    for name in ("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens", "num_preemptions"):
        assert vllm(samples, f"{name}_total") >= 0
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time",
                 "request_prefill_time", "request_decode_time"):  # fmt: skip
        assert vllm(samples, f"{name}_seconds_bucket", le="+Inf") == vllm(samples, f"{name}_seconds_count")


def test_the_adapters_at_work_are_named(served: Served, http: httpx.Client):
    """A state that takes some steps to come about, so it is waited for in the scrape itself."""
    names = {"running_lora_adapters": "upper,wide", "waiting_lora_adapters": "lower"}
    at_work = frozenset({"max_lora": str(SMALL["engine.max_seqs"]), **names}.items())
    streams: list[grpc.Call] = []
    found: list[Samples] = []

    def ask(model: str, n: int) -> None:  # so long that all can run to their ends without a preemption
        streams.append(served.inference.GenerateStream(request("Hello", 1100, model=model, n=n)))

    def shows() -> bool:
        if not served.stats().live_requests:  # also when all have ended before a look
            ask("upper", 4)
            ask("wide", 4)
        found.append(scrape(http))
        at = found[-1]
        counts = (vllm(at, "num_requests_running"), vllm(at, "num_requests_waiting"))
        if counts == (8, 0):
            ask("lower", 1)
        return counts == (8, 1) and ("vllm:lora_requests_info", at_work) in at

    try:
        wait_until(shows, timeout_s=60)
        assert 0 < vllm(found[-1], "kv_cache_usage_perc") < 1
        assert found[-1]["vllm:lora_requests_info", at_work] > 1e9  # when it was so
    finally:
        for stream in streams:
            stream.cancel()
    served.check_idle()


@pytest.mark.parametrize("front", ["http", "grpc", "stream"])
def test_every_answer_counts_once(served: Served, http: httpx.Client, front: str):
    served.check_idle()
    before = scrape(http)
    if front == "grpc":
        served.generate(request("Hello", 6, n=2))
    else:
        http.post("/v1/completions", json={**BODY, "n": 2, "stream": front == "stream"})
    after = scrape(http)

    def grown(name: str, **labels: str) -> float:
        return vllm(after, name, **labels) - vllm(before, name, **labels)

    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time",
                 "request_decode_time"):  # fmt: skip
        assert grown(f"{name}_seconds_count") == 1, name
    assert grown("inter_token_latency_seconds_count") == 10  # of two completions with six tokens
    parts = sum(grown(f"request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode"))
    assert parts == pytest.approx(grown("e2e_request_latency_seconds_sum"), abs=1e-3)
    assert grown("request_success_total", finished_reason="length") == 2
    assert grown("generation_tokens_total") == 12 == grown("request_generation_tokens_sum")
    assert grown("request_prompt_tokens_sum") == 3


def test_a_client_that_leaves_counts_as_aborted(served: Served, http: httpx.Client):
    served.check_idle()
    before = vllm(scrape(http), "request_success_total", finished_reason="abort")
    with httpx.stream(
        "POST", f"{served.http}/v1/completions", json={**BODY, "max_tokens": 3000, "stream": True}
    ) as left:
        lines = left.iter_lines()
        next(lines)
    served.check_idle()
    wait_until(lambda: vllm(scrape(http), "request_success_total", finished_reason="abort") == before + 1)


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text; version=1.0.0",
        # What Prometheus 2 and 3 send.
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
        "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3",
    ],
)
def test_openmetrics_for_those_who_ask(http: httpx.Client, accept: str):
    answer = http.get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.text.endswith("# EOF\n")
    assert {"jlora_blocks", "vllm:num_requests_running"} <= {family.name for family in parse_openmetrics(answer.text)}


def test_names_follow_prometheuss_rules(http: httpx.Client):
    text = http.get("/metrics").text
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        assert re.fullmatch(r"(jlora_|vllm:)[a-z0-9_]+", name), name
        assert name.endswith("_total") is (kind == "counter"), name
    if (promtool := shutil.which("promtool")) is not None:
        checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
        # promtool has a rule against the colons of vLLM's names.
        said = [line for line in (checked.stdout + checked.stderr).splitlines() if not line.startswith("vllm:")]
        assert not said, said


def test_while_the_model_loads_there_is_nothing_to_scrape():
    with serving(Backend()) as loading:
        assert httpx.get(f"{loading.http}/metrics", timeout=20).status_code == 503


def test_a_histogram_counts_by_upper_bounds_and_weights():
    seen = Histogram((0.1, 1.0))
    for amount, weight in ((0.1, 1), (0.5, 3), (7.0, 2)):
        seen.add(amount, weight)
    assert seen.buckets() == [("0.1", 1), ("1.0", 4), ("+Inf", 6)] and seen.sum == pytest.approx(15.6)


def test_a_scrape_does_not_wait_for_a_step_that_hangs(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
):
    """A hung engine is when its metrics count; the adapters are those of the last look."""
    before = value(scrape(http), "jlora_adapters", tier="host")
    hangs, go_on, step = threading.Event(), threading.Event(), Engine.step

    def hung(engine: Engine) -> list[TokenEvent]:
        hangs.set()
        go_on.wait(60)
        return step(engine)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", hung)
        stream = served.inference.GenerateStream(request("Hello", 20))
        try:
            assert hangs.wait(20)
            assert value(scrape(http), "jlora_adapters", tier="host") == before
        finally:
            go_on.set()
    assert [delta for delta in stream]
    served.check_idle()
