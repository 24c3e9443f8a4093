"""What reads `/metrics` besides Prometheus itself: inference gateways, vLLM's Grafana board, and our own."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import grpc
import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families as parse

from jlora.serve.tally import KNOWN, OTHER, SHOWN, Tally
from jlora.types import Usage
from tests.serve._server import SMALL, Served, request, wait_until

ROOT = Path(__file__).resolve().parents[3]
VLLM = (Path(__file__).parent / "vllm_board.txt").read_text(encoding="utf-8").splitlines()
BOARD = json.loads((ROOT / "configs/grafana/jlora.json").read_text(encoding="utf-8"))
OURS = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
ADDED = {"instance", "job"}  # labels that Prometheus itself adds
WORDS = {"histogram_quantile", "sum", "max", "rate", "increase", "topk", "by", "le"}


def families(http: httpx.Client) -> Mapping[str, Metric]:
    return {family.name: family for family in parse(http.get("/metrics").text)}


def gateway(found: Mapping[str, Metric]) -> dict[str, object]:
    """A gateway's view by the model server protocol of gateway-api-inference-extension."""

    def latest(name: str) -> float:
        family = found[name]
        assert family.type == "gauge" and family.samples
        return family.samples[0].value

    infos = [s for s in found["vllm:lora_requests_info"].samples
             if s.labels["running_lora_adapters"] or s.labels["waiting_lora_adapters"]]  # fmt: skip
    labels = max(infos, key=lambda s: s.value).labels if infos else {}  # the value is when it was so
    return {
        "waiting": int(latest("vllm:num_requests_waiting")),
        "running": int(latest("vllm:num_requests_running")),
        "kv": latest("vllm:kv_cache_usage_perc"),
        "active": {name for name in labels.get("running_lora_adapters", "").split(",") if name},
        "queued": {name for name in labels.get("waiting_lora_adapters", "").split(",") if name},
        "most": int(labels.get("max_lora", -1)),
    }


def test_a_gateway_sees_load_and_adapters(served: Served, http: httpx.Client):
    served.check_idle()
    idle = gateway(families(http))
    assert (idle["waiting"], idle["running"], idle["active"], idle["queued"]) == (0, 0, set(), set())
    streams: list[grpc.Call] = []

    def sees() -> bool:
        if not served.stats().live_requests:  # also when it has ended before a look
            streams.append(served.inference.GenerateStream(request("Hello", 2000, model="wide", n=3)))
        seen = gateway(families(http))
        kv, most = seen.pop("kv"), seen.pop("most")
        assert isinstance(kv, float) and 0 <= kv <= 1 and most in (-1, SMALL["engine.max_seqs"])
        return seen == {"waiting": 0, "running": 3, "active": {"wide"}, "queued": set()} and kv > 0

    wait_until(sees, timeout_s=60)
    for stream in streams:
        stream.cancel()
    served.check_idle()


def needs(query: str) -> list[tuple[str, dict[str, str], set[str]]]:
    """The series that a query reads: name, labels that must be equal, labels that it groups by."""
    groups = {label.strip() for found in re.findall(r"by\s*\(([^)]*)\)", query) for label in found.split(",")}
    selectors = re.findall(r"([a-z0-9_:]+)\{([^}]*)\}", query)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|by\s*\([^)]*\)", " ", query)
    assert set(re.findall(r"[a-z_:][a-z0-9_:]*", bare)) <= {name for name, _ in selectors} | WORDS, query
    made = []
    for name, matchers in selectors:
        pairs = re.findall(r'(\w+)(=~?)"([^"]*)"', matchers)
        made.append((name, {label: value for label, sign, value in pairs if sign == "="}, groups))
        assert {label for label, sign, _ in pairs if sign == "=~"} <= ADDED
    return made


@pytest.mark.parametrize("query", [*VLLM, *OURS], ids=lambda query: re.findall(r"[a-z0-9_:]+(?=\{)", query)[0])
def test_a_boards_query_finds_its_series(served: Served, http: httpx.Client, query: str):
    found = families(http)
    for name, labels, groups in needs(query.replace("$model_name", "base")):
        samples = [sample for family in found.values() for sample in family.samples if sample.name == name]
        matching = [s for s in samples if labels.items() <= s.labels.items()]
        assert matching, f"no series {name} with {labels}"
        assert all(groups <= set(sample.labels) for sample in matching), f"{name} lacks one of {groups}"
        family = next(f for f in found.values() if any(s.name == name for s in f.samples))
        if "rate(" in query or "increase(" in query:
            assert family.type in ("counter", "histogram"), f"{name} is a {family.type}"
        if "histogram_quantile" in query:
            assert name.endswith("_bucket") and "le" in groups


def test_the_board_adds_up_no_two_routers_of_a_service_unless_it_is_told_to():
    """Each router tells all replicas: Grafana takes the first instance where none is chosen and there is no "All"."""
    (instance,) = BOARD["templating"]["list"]
    assert (instance["name"], instance["includeAll"], instance["current"]) == ("instance", False, {})
    for query in OURS:
        assert query.count("{") == query.count('{instance=~"$instance"'), query


def test_the_alert_of_the_guide_counts_replicas_router_by_router():
    guide = (ROOT / "docs/cluster.md").read_text(encoding="utf-8")
    (alert,) = re.findall(r"`([^`]*jlora_replica_up\)[^`]*)`", guide)
    assert alert == "sum by (instance) (jlora_replica_up) < N or absent(jlora_replica_up)"
    assert "sum(jlora_" not in guide


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's prometheus")
def test_a_real_prometheus_answers_the_boards_queries(served: Served, http: httpx.Client, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    target = served.http.removeprefix("http://")
    config = {"scrape_configs": [{"job_name": "jlora", "scrape_interval": "200ms", "scrape_timeout": "200ms",
                                  "static_configs": [{"targets": [target]}]}]}  # fmt: skip
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    flags = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
             f"--web.listen-address={address}"]  # fmt: skip
    process = subprocess.Popen(["prometheus", *flags], stderr=subprocess.DEVNULL)

    def answers(query: str) -> list[object]:
        for name, value in (("$model_name", "base"), ("$__rate_interval", "1m"), ("$instance", ".*")):
            query = query.replace(name, value)
        try:
            reply = httpx.get(f"http://{address}/api/v1/query", params={"query": query}, timeout=20)
        except httpx.ConnectError:
            return []
        if reply.status_code == 503:  # it starts
            return []
        assert reply.status_code == 200, reply.text
        return reply.json()["data"]["result"]

    try:
        for query in [*VLLM, *OURS]:
            served.generate(request("Hello", 4, model="upper"))  # so that every rate has something to divide by
            wait_until(lambda q=query: answers(q), timeout_s=60)
    finally:
        process.kill()
        process.wait()


class Scraped:
    """What Prometheus makes of a tally's lines, scrape by scrape: how much all of them have grown together."""

    def __init__(self, tally: Tally):
        self._tally = tally
        self._last: dict[str, int] = {}
        self.grown = 0

    def look(self) -> None:
        lines = self._tally.lines()
        assert len(lines) <= SHOWN + 1 and len(self._tally) <= KNOWN
        for name, (requests, prompt, output) in lines.items():
            assert (prompt, output) == (3 * requests, 5 * requests)
            assert requests >= self._last.get(name, 0), name
            self.grown += requests - self._last.get(name, 0)
            self._last[name] = requests


@pytest.mark.parametrize(
    ("adapters", "skew"),
    [
        (60, 1.0),  # all have a line
        (200, 0.0),  # equally popular: they take the lines from each other
        (1000, 1.0),
        (5000, 0.7),  # more than it remembers
    ],
)
def test_a_tally_never_shows_more_than_was_asked(adapters: int, skew: float):
    draw, tally = random.Random(1), Tally()
    scraped = Scraped(tally)
    weights = list(itertools.accumulate((i + 1) ** -skew for i in range(adapters)))
    for asked, i in enumerate(draw.choices(range(adapters), cum_weights=weights, k=12_000), 1):
        tally.add(f"a{i if asked < 6000 else adapters - i}", Usage(3, 0, 5))  # others become popular
        if asked % 100 == 0:
            scraped.look()
            assert scraped.grown <= asked
    assert scraped.grown > asked / 2  # all but what lines had gained since the last look when they were lost


def test_a_tally_keeps_the_lines_of_the_most_popular():
    tally, usage = Tally(), Usage(3, 0, 5)
    scraped = Scraped(tally)
    for i in range(3 * KNOWN):
        tally.add(f"once{i}", usage)
        tally.add(f"often{i % SHOWN}", usage)
        scraped.look()
        assert scraped.grown == 2 * (i + 1)
    assert set(tally.lines()) == {OTHER, *(f"often{i}" for i in range(SHOWN))}
    tally.add(OTHER, usage)  # an adapter may have that name
    scraped.look()
    assert scraped.grown == 6 * KNOWN + 1


def test_requests_count_by_adapter(served: Served, http: httpx.Client):
    def counted() -> dict[str, float]:
        return {s.labels["adapter"]: s.value for s in families(http)["jlora_adapter_requests"].samples}

    before = counted()
    for model in ("upper", "upper", "base"):
        served.generate(request("Hello", 2, model=model))
    after = counted()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert {name: count for name, count in grown.items() if count} == {"upper": 2, "base": 1}


def test_the_time_of_steps_has_parts(served: Served, http: httpx.Client):
    served.generate(request("Hello", 20))
    parts = {s.labels["part"]: s.value for s in families(http)["jlora_step_seconds"].samples}
    assert set(parts) == {"plan", "dispatch", "read", "commit"} and all(seconds > 0 for seconds in parts.values())
    stats = served.stats()
    host = stats.plan_s + stats.dispatch_s + stats.commit_s
    assert host == pytest.approx(stats.host_step_s * stats.steps)
