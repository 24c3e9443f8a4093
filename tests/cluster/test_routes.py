"""`cluster.routing`: every policy by name over a live router, the step model that some need, and sessions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import pytest

from jlora import config as configuration
from jlora.cluster import service as cluster
from jlora.cluster.cli import parse
from jlora.cluster.fleet import StaticFleet
from jlora.cluster.routing.jlora import Jlora
from jlora.cluster.routing.policy import Ask, Bookless
from jlora.cluster.routing.routes import LORASERVE, ROUTES, policy_of
from jlora.cluster.routing.session import SessionSticky
from jlora.cluster.view import Held, ReplicaView, View
from jlora.config import ROUTINGS, Config
from jlora.errors import ConfigError
from jlora.serve.backend import Backend
from jlora.serve.proto import jlora_pb2 as pb
from tests.cluster import _port as port
from tests.cluster._links import Service, answer, request, service, submit, wait_for
from tests.serve import _server
from tests.serve._server import Served
from tests.test_step_model import STEPS

BASE = Ask(adapter=None, rank=0, prompt=64)


@pytest.fixture
def steps(tmp_path: Path) -> str:
    STEPS.write(tmp_path / "steps.json")
    return str(tmp_path / "steps.json")


def config(routing: str, **values: object) -> Config:
    given = {key.replace("__", "."): value for key, value in values.items()}
    return configuration.load(None, {"cluster.routing": routing, **given})


def test_a_configuration_names_every_policy():
    assert set(ROUTINGS) == {*ROUTES, LORASERVE}
    assert isinstance(policy_of(Config()), SessionSticky)
    assert parse(["--model", "m", "--routing", "most-idle"]).cluster.routing == "most-idle"
    with pytest.raises(ConfigError, match="cluster.routing = 'idlest': must be one of sticky, jlora, "):
        config("idlest")


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_policy_routes_a_live_router(name: str, steps: str):
    with service(2, policy=policy_of(config(name, engine__step_model=steps))) as made:
        asked = [request(f"r{i}", max_tokens=4) for i in range(6)]
        clients = [submit(made, one) for one in asked]
        assert [client.wait().tokens() for client in clients] == [answer(one) for one in asked]


@pytest.mark.parametrize("name", ["jlora", "caraserve", "dlora", "loraserve"])
def test_what_predicts_needs_a_step_model_before_anything_starts(name: str, tmp_path: Path):
    static = {"cluster.fleet": "static", "cluster.addresses": "127.0.0.1:1"}
    without = config(name, **static)
    with pytest.raises(ConfigError, match=f"cluster.routing = {name!r}: needs engine.step_model"):
        cluster.run(without, StaticFleet(without.cluster))
    (tmp_path / "torn.json").write_text("{")
    with pytest.raises(ConfigError, match=f"cluster.routing = {name!r}: step model .*torn.json"):
        policy_of(config(name, engine__step_model=str(tmp_path / "torn.json")))


def test_a_fitted_router_weighs_load_cache_and_the_adapters_way(steps: str):
    policy = policy_of(config("jlora", engine__step_model=steps, cluster__slo_s=0.5))
    assert isinstance(policy, Jlora) and policy.slo_s == 0.5
    assert 0 < policy.ways.host_s and 0 < policy.ways.rank_bytes and policy.ways.path_bps < policy.ways.peer_bps
    idle, busy = ReplicaView("idle", "up"), ReplicaView("busy", "up", held=Held(running={0: 7}, context=700))
    view: View = {"busy": busy, "idle": idle}
    assert policy.choose(view, BASE) == "idle"
    twins = {name: dataclasses.replace(idle, name=name) for name in ("cold", "warm")}
    assert policy.choose(twins, dataclasses.replace(BASE, cached={"warm": 48})) == "warm"
    here = {**twins, "warm": dataclasses.replace(twins["warm"], tiers={"x@1": "HBM"})}
    assert policy.choose(here, dataclasses.replace(BASE, adapter="x@1", rank=64)) == "warm"


# -- sessions --------------------------------------------------------------------------------------


@dataclass
class First(Bookless):
    """Takes the first replica, and notes what it was asked."""

    asks: list[Ask] = field(default_factory=list)

    def choose(self, view: View, ask: Ask) -> str | None:
        self.asks.append(ask)
        return next(iter(view), None)


@dataclass
class World:
    """The fronts over a router of scripted replicas."""

    replicas: Service
    policy: First
    served: Served

    def sessions(self) -> list[str]:
        """Those of the requests since the last call."""
        asks, self.policy.asks = self.policy.asks, []
        return [ask.session for ask in asks]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    policy = First()
    with service(2, policy=policy) as made, _server.serving(Backend(made.router)) as served:
        yield World(made, policy, served)


def generate(session: str, tenant: str = "") -> pb.GenerateRequest:
    made = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), session=session, tenant=tenant)
    made.stopping.max_tokens = 2
    return made


def test_a_session_is_the_tenants_own(world: World):
    world.sessions()
    for session, tenant in (("chat", "a"), ("chat", "b"), ("", "a")):
        world.served.inference.Generate(generate(session, tenant))
    assert world.sessions() == ["a\0chat", "b\0chat", ""]


@pytest.mark.parametrize(
    ("fields", "header", "session"),
    [
        ({}, "", ""),
        ({"user": "u"}, "", "\0u"),
        ({"user": "u", "prompt_cache_key": "k"}, "", "\0k"),
        ({"user": "u", "prompt_cache_key": "k"}, "h", "\0h"),
    ],
)
def test_http_clients_say_it_by_the_names_they_know(world: World, fields: dict[str, str], header: str, session: str):
    world.sessions()
    body = {"prompt": [1, 2, 3], "max_tokens": 2, **fields}
    headers = {"x-session-id": header} if header else {}
    assert httpx.post(f"{world.served.http}/v1/completions", json=body, headers=headers).status_code == 200
    assert world.sessions() == [session]


@pytest.mark.parametrize("name", ["x-session-id", "prompt_cache_key", "user"])
def test_a_session_that_is_too_long_is_refused(world: World, name: str):
    body, headers = {"prompt": [1, 2, 3]}, {}
    (headers if name == "x-session-id" else body)[name] = "s" * 257  # pyright: ignore[reportArgumentType]
    answer = httpx.post(f"{world.served.http}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"{name}: has 257 characters, must have at most 256"
    with pytest.raises(grpc.RpcError) as e:
        world.served.inference.Generate(generate("s" * 257))
    assert e.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # pyright: ignore[reportAttributeAccessIssue]


def test_a_session_goes_where_it_has_been_and_others_do_not():
    with service(2, policy=policy_of(Config()), paused=True) as made:
        homes = {}
        for i in range(4):
            before = {replica.name: len(replica.started) for replica in made.replicas}
            submit(made, request(f"r{i}", session="s" if i % 2 == 0 else ""))
            (homes[i],) = (r.name for r in made.replicas if len(r.started) > before[r.name])
        assert homes == {0: homes[0], 1: homes[1], 2: homes[0], 3: homes[1]} and homes[0] != homes[1]


def test_the_next_turn_of_a_chat_is_known_by_its_prompt_and_answer():
    policy = First()
    with service(1, policy=policy) as made:
        asked = request("one", max_tokens=29)
        first = submit(made, asked).wait()  # 3 + 29 tokens are two blocks
        turn = dataclasses.replace(asked, id="two", prompt=(*asked.prompt, *first.tokens(), 7, 8))
        wait_for(lambda: not len(port.dispatcher(made.router).table))
        submit(made, turn).wait()
        assert [dict(ask.cached) for ask in policy.asks] == [{}, {"r0": 32}]


def test_policies_learn_how_long_answers_are():
    policy = First()
    with service(1, policy=policy) as made:
        for number, tokens in enumerate((4, 8, 9)):
            submit(made, request(f"r{number}", max_tokens=tokens)).wait()
            wait_for(lambda: not len(port.dispatcher(made.router).table))
    assert [ask.outputs for ask in policy.asks] == [0.0, 4.0, 6.0]
