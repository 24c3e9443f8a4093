"""Keys: who calls, what a caller may do, and how much of it, over gRPC and HTTP alike."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest
from starlette.routing import Route

from jlora.config import ServeConfig
from jlora.errors import ConfigError, InvalidArgument
from jlora.serve import keyless
from jlora.serve.access import access, keys
from jlora.serve.access.access import Access
from jlora.serve.access.caller import Need
from jlora.serve.backend import Backend
from jlora.serve.http.server import application
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.status import NEEDS
from tests import port
from tests.serve._server import Served, refused, request, serve, serving, wait_until

CODE = grpc.StatusCode
LIMITED = """
[tenants.slow]
requests_per_s = 0.001
[tenants.narrow]
concurrent = 2
queued_tokens = 100
[tenants.ops]
concurrent = 1
requests_per_s = 0.001
"""
WHO: dict[str, Any] = {
    "admin": ("ops", "admin", ["*"]),
    "chief": ("chief", "admin", ["*"]),
    "acme": ("acme", "user", ["*"]),
    "acme-two": ("acme", "user", ["upper", "lo*"]),
    "other": ("other", "user", ["wide"]),
    "viewer": ("watch", "viewer", ["upper"]),
    "slow": ("slow", "user", ["*"]),
    "narrow": ("narrow", "user", ["*"]),
}


class Guarded:
    """A server with keys over the shared engine, and a client for each key."""

    def __init__(self, served: Served, file: Path, made: dict[str, str]):
        self.served = served
        self.file = file
        self.keys = made

    def meta(self, who: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.keys[who]}"),)

    def generate(self, who: str, asked: pb.GenerateRequest) -> pb.GenerateResponse:
        return self.served.inference.Generate(asked, metadata=self.meta(who), timeout=60)

    def http(self, who: str | None) -> httpx.Client:
        headers = {} if who is None else {"authorization": f"Bearer {self.keys[who]}"}
        return httpx.Client(base_url=self.served.http, headers=headers, timeout=60)

    def under_way(self, tenant: str) -> int:
        """The tenant's calls that count."""
        return port.limited(self.served.backend, tenant)


@pytest.fixture(scope="module")
def guarded(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    made = {who: keys.new(tenant, role, adapters) for who, (tenant, role, adapters) in WHO.items()}
    entries = [entry for _, entry in made.values()]
    for who, highest in (("urgent", 3), ("demoted", -2)):
        made[who] = keys.new("acme", "user", ["*"])
        entries.append(f"{made[who][1]}max_priority = {highest}\n")
    file.write_text("".join(entries) + LIMITED)
    config = ServeConfig(heartbeat_s=60.0, keys=str(file))
    backend = Backend(served.replica, served.backend.tokenizer, access=Access(config))
    with serving(backend, config) as running:
        yield Guarded(running, file, {who: key for who, (key, _) in made.items()})


# -- who calls ----------------------------------------------------------------------------------


def test_a_call_without_a_known_key_is_refused_before_its_message_is_read(guarded: Guarded):
    known, s = guarded.keys["acme"], guarded.served
    wrong = [known[:-1] + ("A" if known[-1] != "A" else "B"), known.split("-")[1], "jlora-00000000-x", "x" * 100_0, ""]
    for key in wrong:
        with refused(CODE.UNAUTHENTICATED, "authorization"):
            s.inference.Generate(request(), metadata=(("authorization", f"Bearer {key}"),), timeout=20)
    for metadata in ((), (*guarded.meta("acme"), *guarded.meta("acme")), (("authorization", known),)):
        with refused(CODE.UNAUTHENTICATED, "Bearer KEY"):
            s.inference.Generate(request(), metadata=metadata, timeout=20)
    garbage = s.channel.unary_unary("/jlora.v1.Inference/Generate")
    with refused(CODE.UNAUTHENTICATED):
        garbage(b"\x1a\xff\xff")
    with guarded.http(None) as http:
        answer = http.post("/v1/completions", content=b"[" * 1000)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/v1/models", "/version", "/metrics", "/dashboard/events"):
            assert http.get(path).status_code == 401


def test_no_call_of_either_front_is_forgotten(guarded: Guarded):
    for service in pb.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            with refused(CODE.UNAUTHENTICATED):
                guarded.served.channel.unary_unary(f"/{service.full_name}/{method.name}")(b"", timeout=20)
    open_to_all = set()
    with guarded.http(None) as http:
        for route in application(guarded.served.backend, ServeConfig()).routes:
            assert isinstance(route, Route) and route.methods
            status = http.request(min(route.methods - {"HEAD"}), route.path).status_code
            if status != 401:
                open_to_all.add(route.path)
    page = {"/", "/dashboard/page.js", "/dashboard/page.css"}  # it has no numbers
    assert open_to_all == {"/health", "/ready", "/live"} | page


def test_metadata_is_bounded(guarded: Guarded):
    def generate(size: int) -> pb.GenerateResponse:
        metadata = (*guarded.meta("acme"), ("x-large", "y" * size))
        return guarded.served.inference.Generate(request(), metadata=metadata, timeout=20)

    assert generate(7000).usage.completion_tokens == 8
    with refused(CODE.RESOURCE_EXHAUSTED):
        generate(20_000)


def test_open_calls_without_a_key_end_when_others_come(guarded: Guarded, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keyless, "MOST", 3)
    health, reflection = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"
    for method in (f"{health}/Check", f"{health}/Watch", f"{reflection}/ServerReflectionInfo"):
        stub, silence = guarded.served.channel.stream_stream(f"/{method}"), SimpleQueue[bytes | None]()
        calls: list[Any] = [stub(iter(silence.get, None), timeout=60) for _ in range(5)]
        wait_until(lambda calls=calls: sum(call.done() for call in calls) == 2)
        assert {call.code() for call in calls if call.done()} == {CODE.RESOURCE_EXHAUSTED}
        assert guarded.served.status() == "SERVING"
        for call in calls:
            call.cancel()
            silence.put(None)
    ended = guarded.served.channel.stream_unary(f"/{health}/Check")
    with refused(CODE.INVALID_ARGUMENT, "without a message"):
        ended(iter(()), timeout=20)


def test_health_needs_no_key(guarded: Guarded):
    wait_until(lambda: guarded.served.status() == "SERVING")
    with guarded.http(None) as http:
        assert http.get("/health").status_code == http.get("/ready").status_code == 200


def test_a_known_key_is_served_by_both_fronts(guarded: Guarded):
    assert guarded.generate("acme", request()).usage.completion_tokens == 8
    with guarded.http("acme") as http:
        assert http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2}).status_code == 200
        assert http.get("/version").status_code == 200


# -- what a caller may do ------------------------------------------------------------------------


def test_only_an_admin_changes_the_server(guarded: Guarded):
    s, meta = guarded.served, guarded.meta("acme")
    calls: list[tuple[Callable[..., Any], Any]] = [
        (s.adapters.LoadAdapter, pb.LoadAdapterRequest(name="x", path="/x")),
        (s.adapters.UnloadAdapter, pb.UnloadAdapterRequest(name="upper")),
        (s.adapters.PinAdapter, pb.PinAdapterRequest(name="upper", pinned=True)),
        (s.control.FlushCache, pb.FlushCacheRequest()),
        (s.control.Drain, pb.DrainRequest()),
        (s.control.Profile, pb.ProfileRequest(steps=3)),
    ]
    for call, message in calls:
        with refused(CODE.PERMISSION_DENIED, "needs a key of the role admin"):
            call(message, metadata=meta, timeout=20)
    with guarded.http("acme") as http:
        for path in ("/v1/load_lora_adapter", "/unload_lora_adapter"):
            answer = http.post(path, json={"lora_name": "upper", "lora_path": "/x"})
            assert answer.status_code == 403, answer.text
        assert http.post("/debug/profile?steps=3", json={}).status_code == 403
    assert not s.backend.draining
    s.control.FlushCache(pb.FlushCacheRequest(), metadata=guarded.meta("admin"), timeout=20)
    with refused(CODE.NOT_FOUND):
        s.adapters.PinAdapter(pb.PinAdapterRequest(name="none"), metadata=guarded.meta("admin"), timeout=20)
    with refused(CODE.FAILED_PRECONDITION, "serve.profile_dir"):  # not for want of permission
        s.control.Profile(pb.ProfileRequest(steps=3), metadata=guarded.meta("admin"), timeout=20)
    with guarded.http("admin") as http:
        answer = http.post("/debug/profile?steps=3", json={})
        assert answer.status_code == 400 and "serve.profile_dir" in answer.text


def test_a_call_that_no_table_names_needs_an_admin():
    described = [(s, m.name) for s in pb.DESCRIPTOR.services_by_name.values() for m in s.methods]
    open_to_users = {f"/{s.full_name}/{name}" for s, name in described} & NEEDS.keys()
    assert open_to_users == NEEDS.keys(), "the table names a call that does not exist"
    assert Need.ADMIN not in NEEDS.values() and Need.NOTHING not in NEEDS.values()


def test_a_key_is_for_its_adapters(guarded: Guarded):
    assert guarded.generate("acme-two", request(model="upper")).usage.completion_tokens == 8
    for model in ("wide", "base:wide", "no-such"):  # one answer, whether it exists or not
        with refused(CODE.PERMISSION_DENIED, f"'{model.removeprefix('base:')}': the key is not for it"):
            guarded.generate("acme-two", request(model=model))
    with refused(CODE.NOT_FOUND, "'lowest'", "did you mean 'lower'?"):
        guarded.generate("acme-two", request(model="lowest"))
    with refused(CODE.NOT_FOUND, "'lo-wide'") as e:  # its near name is hidden
        guarded.generate("acme-two", request(model="lo-wide"))
    assert "did you mean" not in str(e.value.details())
    meta, s = guarded.meta("acme-two"), guarded.served
    listed = s.adapters.ListAdapters(pb.ListAdaptersRequest(), metadata=meta)
    assert [adapter.name for adapter in listed.adapters] == ["lower", "upper"]
    with refused(CODE.PERMISSION_DENIED):
        s.adapters.GetAdapter(pb.GetAdapterRequest(name="wide"), metadata=meta)
    with guarded.http("acme-two") as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["base", "lower", "upper"]
        assert http.get("/v1/models/wide").status_code == 403
        assert http.post("/v1/completions", json={"prompt": "x", "model": "wide"}).status_code == 403
        assert http.post("/v1/prefetch", json={"prompt": "x", "model": "wide"}).status_code == 403


def test_a_user_sees_nothing_of_what_others_do(guarded: Guarded):
    s = guarded.served
    guarded.generate("acme", request(model="upper"))

    def look(who: str) -> tuple[pb.ServerInfo, list[pb.AdapterInfo]]:
        meta = guarded.meta(who)
        info = s.control.GetServerInfo(pb.GetServerInfoRequest(), metadata=meta, timeout=20)
        one = s.adapters.GetAdapter(pb.GetAdapterRequest(name="upper"), metadata=meta, timeout=20)
        listed = s.adapters.ListAdapters(pb.ListAdaptersRequest(), metadata=meta, timeout=20).adapters
        return info, [one, next(adapter for adapter in listed if adapter.name == "upper")]

    (info, adapters), (all_of_it, seen) = look("acme"), look("viewer")
    told = {field.name for field, _ in info.ListFields()}
    more = {field.name for field, _ in all_of_it.ListFields()} - told
    assert {"model", "blocks", "max_model_len", "config"} <= told
    assert {"steps", "recent_requests", "recent_ttft_mean_s", "longest_loop_gap_s", "merge"} <= more
    assert not {"running", "waiting", "host_s_per_step"} & told
    for user, viewer in zip(adapters, seen, strict=True):
        assert viewer.hits and viewer.last_used_s
        assert not (user.hits or user.last_used_s or user.running or user.waiting)
        assert user.rank == viewer.rank
    for who, status in (("acme", 403), ("viewer", 200), ("chief", 200)):
        with guarded.http(who) as http:
            assert http.get("/metrics").status_code == status
            with http.stream("GET", "/dashboard/events") as events:
                assert events.status_code == status
    with refused(CODE.PERMISSION_DENIED, "needs a key of the role viewer or admin"):
        s.control.GetCacheState(pb.GetCacheStateRequest(), metadata=guarded.meta("acme"), timeout=20)
    s.control.GetCacheState(pb.GetCacheStateRequest(), metadata=guarded.meta("viewer"), timeout=20)
    with refused(CODE.PERMISSION_DENIED, "needs a key of the role admin"):  # a viewer changes nothing
        s.control.FlushCache(pb.FlushCacheRequest(), metadata=guarded.meta("viewer"), timeout=20)
    with refused(CODE.PERMISSION_DENIED, "'wide': the key is not for it"):
        guarded.generate("viewer", request(model="wide"))


def test_a_key_has_a_highest_priority(guarded: Guarded):
    with refused(CODE.PERMISSION_DENIED, "priority = 1: must be at most 0; the key's max_priority is 0"):
        guarded.generate("acme", request(priority=1))
    for who, priority in (("acme", -5), ("acme", 0), ("urgent", 3), ("chief", 2**31 - 1)):
        assert guarded.generate(who, request(priority=priority)).usage.completion_tokens == 8
    with refused(CODE.PERMISSION_DENIED, "priority = 4: must be at most 3"):
        guarded.generate("urgent", request(priority=4))
    body = {"prompt": [5, 6, 7], "max_tokens": 1}
    assert guarded.generate("demoted", request()).usage.completion_tokens == 8
    with guarded.http("demoted") as http:
        assert http.post("/v1/completions", json=body).status_code == 200
        assert http.post("/v1/completions", json={**body, "priority": 1}).status_code == 403  # -1 in gRPC
    with guarded.http("urgent") as http:
        assert http.post("/v1/completions", json={**body, "priority": -3}).status_code == 200
        answer = http.post("/v1/completions", json={**body, "priority": -4})
        assert answer.status_code == 403 and "priority = -4: must be at least -3 (lower" in answer.text


def test_one_tenant_does_not_fill_the_queue_for_all(guarded: Guarded):
    s, room = guarded.served, guarded.served.backend.room
    streams: list[Any] = []
    for _ in range(room.most):
        asked = request(max_tokens=3500, ignore_eos=True)
        streams.append(s.inference.GenerateStream(asked, metadata=guarded.meta("acme"), timeout=60))
    wait_until(lambda: sum(stream.done() for stream in streams) == room.most // 2)
    ended = [stream for stream in streams if stream.done()]
    assert {stream.code() for stream in ended} == {CODE.RESOURCE_EXHAUSTED}
    assert "tenant 'acme' has 40 completions that run or wait" in ended[0].details()
    assert s.stats().live_requests == room.most // 2
    assert guarded.generate("other", request()).usage.completion_tokens == 8
    with guarded.http("acme") as http:
        answer = http.post("/v1/completions", json={"prompt": "Hello"})
        assert answer.status_code == 429 and answer.headers["retry-after"]
    with guarded.http("other") as http:
        assert http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2}).status_code == 200
    for stream in streams:
        stream.cancel()
    s.check_idle()


def test_a_key_says_whose_a_request_is(guarded: Guarded):
    with refused(CODE.PERMISSION_DENIED, "tenant = 'other'"):
        guarded.generate("acme", request(tenant="other"))
    prompt = list(range(5, 5 + 64))
    first = guarded.generate("acme", request(prompt, tenant="acme"))
    again = guarded.generate("acme-two", request(prompt))
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 48)
    assert guarded.generate("other", request(prompt)).usage.cached_tokens == 0
    assert guarded.generate("other", request(prompt)).usage.cached_tokens == 48
    body = {"prompt": prompt, "max_tokens": 1, "cache_salt": "acme"}  # mixed into the tenant's own salt
    for cached in (0, 48):
        with guarded.http("acme") as http:
            details = http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == cached
    for salt in ("acme", "other"):
        assert guarded.generate("other", request(prompt, cache_salt=salt)).usage.cached_tokens == 0


def test_a_tenant_aborts_its_own_requests_and_an_admin_any(guarded: Guarded):
    def abort(who: str, name: str, tenant: str = "") -> bool:
        message = pb.AbortRequest(request_id=name, tenant=tenant)
        return guarded.served.control.Abort(message, metadata=guarded.meta(who), timeout=20).aborted

    for who, tenant in (("acme-two", ""), ("admin", "acme")):
        meta = guarded.meta("acme")
        stream = guarded.served.inference.GenerateStream(request(max_tokens=3500, request_id="r"), metadata=meta)
        next(stream)
        assert not abort("other", "r") and not abort("admin", "r")
        with refused(CODE.PERMISSION_DENIED, "tenant"):
            abort("other", "r", "acme")
        assert abort(who, "r", tenant)
        *_, last = stream
        assert last.outputs[0].finish_reason == "abort"
    guarded.served.check_idle()


def hint_of(e: pytest.ExceptionInfo[grpc.RpcError]) -> dict[str, str]:
    """What a refusal says beside its message."""
    return {item.key: str(item.value) for item in e.value.trailing_metadata()}


# -- how much ------------------------------------------------------------------------------------


def test_a_tenants_rate_is_limited_with_a_hint(guarded: Guarded):
    assert guarded.generate("slow", request()).usage.completion_tokens == 8
    with refused(CODE.RESOURCE_EXHAUSTED, "tenant 'slow' asks too often", "requests_per_s = 0.001") as e:
        guarded.generate("slow", request())
    hint = hint_of(e)
    assert 900 <= int(hint["retry-after"]) <= 1000
    assert int(hint["grpc-retry-pushback-ms"]) > 900_000
    with guarded.http("slow") as http:
        answer = http.post("/v1/completions", json={"prompt": "Hello"})
    assert answer.status_code == 429 and 900 <= int(answer.headers["retry-after"]) <= 1000
    assert guarded.generate("acme", request()).usage.completion_tokens == 8


def test_a_tenants_requests_at_once_are_limited(guarded: Guarded):
    with refused(CODE.RESOURCE_EXHAUSTED, "n: asks for 3 completions, limit concurrent = 2"):
        guarded.generate("narrow", request(n=3, temperature=1.0))
    with refused(CODE.RESOURCE_EXHAUSTED, "prompt: has 101 tokens, limit queued_tokens = 100"):
        guarded.generate("narrow", request([5] * 101))
    with guarded.http("narrow") as http:  # each fits, and both together never do
        answer = http.post("/v1/completions", json={"prompt": [[5] * 60, [6] * 60]})
        assert answer.status_code == 400 and "prompt: has 120 tokens" in answer.text
    stub, meta = guarded.served.inference, guarded.meta("narrow")
    running = [stub.GenerateStream(request([5] * 60, max_tokens=3500), metadata=meta) for _ in range(1)]
    next(running[0])  # its prompt is queued no longer
    assert guarded.generate("narrow", request([5] * 60)).usage.completion_tokens == 8
    running.append(stub.GenerateStream(request([5] * 60, max_tokens=3500), metadata=meta))
    next(running[1])
    with refused(CODE.RESOURCE_EXHAUSTED, "tenant 'narrow' has 2 requests under way, limit concurrent = 2") as e:
        guarded.generate("narrow", request())
    assert hint_of(e)["retry-after"] == "1"
    with guarded.http("narrow") as http:
        assert http.get("/v1/models").status_code == 200  # such calls count by themselves
        assert http.post("/v1/completions", json={"prompt": "Hello"}).status_code == 429
    for stream in running:
        stream.cancel()
    guarded.served.check_idle()
    wait_until(lambda: not guarded.served.backend.gate.held.completions)
    assert guarded.generate("narrow", request(n=2, temperature=1.0)).usage.completion_tokens == 16


def test_requests_whose_bodies_do_not_arrive_count(guarded: Guarded, caplog: pytest.LogCaptureFixture):
    url, gate = urlsplit(guarded.served.http), guarded.served.backend.gate
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {guarded.keys['narrow']}\r\n"
    head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(4):
            raw = stack.enter_context(socket.create_connection((url.hostname, url.port), timeout=20))
            raw.sendall(head.encode())
        wait_until(lambda: gate.held.bytes == 2 * 4 << 20)  # a call before that could take the place of one of them
        with refused(CODE.RESOURCE_EXHAUSTED, "tenant 'narrow' has 2 requests under way"):
            guarded.generate("narrow", request())
    wait_until(lambda: not gate.held.bytes)
    assert guarded.generate("narrow", request()).usage.completion_tokens == 8
    assert not caplog.records, "a client that leaves is no event"


def test_calls_whose_messages_do_not_arrive_count(guarded: Guarded):
    meta, silence = guarded.meta("narrow"), SimpleQueue[bytes | None]()
    for method in ("Control/GetServerInfo", "Inference/Tokenize", "Inference/GenerateStream"):
        stub = guarded.served.channel.stream_stream(f"/jlora.v1.{method}")
        calls: list[Any] = [stub(iter(silence.get, None), metadata=meta, timeout=60) for _ in range(3)]
        wait_until(lambda calls=calls: any(call.done() for call in calls))
        ended = [call for call in calls if call.done()]
        assert [call.code() for call in ended] == [CODE.RESOURCE_EXHAUSTED]
        assert "under way, limit concurrent = 2" in str(ended[0].details())
        for call in calls:
            call.cancel()
            silence.put(None)
        wait_until(lambda: not guarded.under_way("narrow"))


def test_what_ends_work_passes_its_tenants_limits(guarded: Guarded):
    s, meta, silence = guarded.served, guarded.meta("narrow"), SimpleQueue[bytes | None]()
    streams = [s.inference.GenerateStream(request(max_tokens=3500, request_id=f"r{i}"), metadata=meta) for i in (1, 2)]
    for stream in streams:
        next(stream)
    assert s.control.Abort(pb.AbortRequest(request_id="r1"), metadata=meta, timeout=20).aborted
    abort = s.channel.stream_stream("/jlora.v1.Control/Abort")
    calls = [abort(iter(silence.get, None), metadata=guarded.meta("admin")) for _ in range(3)]  # none has arrived
    message = pb.AbortRequest(request_id="r2", tenant="narrow")
    assert s.control.Abort(message, metadata=guarded.meta("admin"), timeout=20).aborted
    for _ in range(3):
        assert not s.control.Abort(pb.AbortRequest(request_id="r"), metadata=guarded.meta("slow"), timeout=20).aborted
        s.control.FlushCache(pb.FlushCacheRequest(), metadata=guarded.meta("admin"), timeout=20)
    for call in calls:
        call.cancel()
        silence.put(None)
    for stream in streams:
        *_, last = stream
        assert last.outputs[0].finish_reason == "abort"
    s.check_idle()


def test_what_an_admin_does_is_logged(guarded: Guarded, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", logger=access.__name__):
        guarded.served.control.FlushCache(pb.FlushCacheRequest(), metadata=guarded.meta("admin"), timeout=20)
    id = guarded.keys["admin"].split("-")[1]
    assert f"key {id} of tenant ops calls /jlora.v1.Control/FlushCache" in caplog.text
    assert guarded.keys["admin"] not in caplog.text


# -- what may be read ----------------------------------------------------------------------------


def test_adapters_come_from_the_roots_only(text_model: Path, tmp_path: Path):
    adapters = text_model.parent / "adapters"
    settings = {
        "engine.warmup": False,
        "adapters.roots": str(adapters),
        "adapters.paths.one": str(adapters / "upper"),
        "adapters.dir": str(adapters),
    }
    with serve(text_model, settings) as own, httpx.Client(base_url=own.http, timeout=60) as http:
        assert {"one", "upper"} < {adapter.name for adapter in own.replica.adapters().result(20)}
        assert own.adapters.LoadAdapter(pb.LoadAdapterRequest(name="a", path=f"{adapters}/lower")).rank == 2
        for path in (str(text_model), f"{adapters}/../base", "/"):
            with refused(CODE.INVALID_ARGUMENT, "path: is not in a directory of adapters.roots"):
                own.adapters.LoadAdapter(pb.LoadAdapterRequest(name="b", path=path))
            answer = http.post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": path})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "lora_path"
    shutil.copytree(adapters / "upper", tmp_path / "out")
    (empty := tmp_path / "empty").mkdir()
    for outside in (
        {"adapters.paths.x": str(text_model)},
        {"adapters.dir": str(tmp_path)},
        {"adapters.dir": str(empty)},  # what comes there later would not be read
    ):
        with pytest.raises(InvalidArgument, match=r"adapters\.roots"):
            with serve(text_model, {**settings, **outside}):
                pass
    with pytest.raises(ConfigError, match=r"adapters\.dir = .*none': No such file"):
        with serve(text_model, {**settings, "adapters.dir": str(tmp_path / "none")}):
            pass
