"""Adapters over HTTP, as vLLM's and SGLang's users load them while the server runs."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests import _make
from tests.serve._server import Served, request


@pytest.fixture
def path(served: Served, tmp_path: Path) -> Path:
    """An adapter on the server's disk."""
    _make.make_adapter(tmp_path / "new", served.spec, seed=77, r=4, targets=("q", "v"))
    return tmp_path / "new"


@pytest.fixture(autouse=True)
def as_before(served: Served) -> Iterator[None]:
    """Unloads what a test has loaded."""
    before = {info.name for info in served.replica.adapters().result(20)}
    yield
    for info in served.replica.adapters().result(20):
        if info.name not in before:
            served.replica.unload_adapter(info.name).result(20)
    served.check_idle()


def load(http: httpx.Client, name: str, path: Path, prefix: str = "/v1", **fields: Any) -> httpx.Response:
    return http.post(f"{prefix}/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **fields})


def unload(http: httpx.Client, name: str, prefix: str = "/v1") -> httpx.Response:
    return http.post(f"{prefix}/unload_lora_adapter", json={"lora_name": name})


def text(client: openai.OpenAI, model: str) -> str:
    made = client.completions.create(
        model=model, prompt="Hello", max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    return made.choices[0].text


@pytest.mark.parametrize("prefix", ["/v1", ""])
def test_load_ask_list_unload(http: httpx.Client, client: openai.OpenAI, served: Served, path: Path, prefix: str):
    answer = load(http, "new", path, prefix)
    assert answer.status_code == 200 and answer.json()["success"] is True
    entry = answer.json()["adapter"]
    assert (entry["id"], entry["parent"], entry["adapter"]["rank"]) == ("new", "base", 4)
    assert str(path) not in http.get("/v1/models").text
    assert "new" in {model.id for model in client.models.list()}
    assert text(client, "new") == served.generate(request("Hello", 12, model="new")).outputs[0].text
    assert text(client, "new") != text(client, "base")
    assert unload(http, "new", prefix).status_code == 200
    assert "new" not in {model.id for model in client.models.list()}
    with pytest.raises(openai.NotFoundError):
        text(client, "new")


def test_a_name_in_use_is_409_and_in_place_replaces(
    http: httpx.Client, client: openai.OpenAI, served: Served, path: Path, tmp_path: Path
):
    first = load(http, "new", path).json()["adapter"]["adapter"]
    before = text(client, "new")
    assert load(http, "new", path).status_code == 409
    assert load(http, "base", path).json()["error"]["param"] == "lora_name"
    _make.make_adapter(tmp_path / "other", served.spec, seed=78, r=8, targets=("q", "v", "down"))
    second = load(http, "new", tmp_path / "other", load_inplace=True).json()["adapter"]["adapter"]
    assert second["uid"] != first["uid"] and second["digest"] != first["digest"] and second["rank"] == 8
    assert text(client, "new") != before


def test_invalid_files_are_refused_and_disturb_nobody(
    http: httpx.Client, client: openai.OpenAI, path: Path, tmp_path: Path
):
    want = text(client, "upper")
    texts: list[str] = []
    asking = threading.Thread(target=lambda: texts.extend(text(client, "upper") for _ in range(5)))
    asking.start()
    shutil.copytree(path, tmp_path / "broken")
    weights = tmp_path / "broken" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (tmp_path / "empty").mkdir()
    for where, status in ((tmp_path / "broken", 400), (tmp_path / "empty", 404), (tmp_path / "nowhere", 404)):
        error = load(http, "bad", where)
        assert error.status_code == status, error.text
        assert str(tmp_path) not in error.text
    asking.join(60)
    assert texts == [want] * 5
    assert "bad" not in {model.id for model in client.models.list()}


def test_the_base_that_a_gateways_sidecar_names_is_a_label(
    http: httpx.Client, path: Path, caplog: pytest.LogCaptureFixture
):
    for label, warnings in ((None, 0), ("", 0), ("base", 0), ("meta-llama/\nLlama", 1)):
        with caplog.at_level(logging.WARNING, "jlora"):
            caplog.clear()
            assert load(http, "new", path, load_inplace=True, base_model_name=label).status_code == 200
            said = [record.getMessage() for record in caplog.records]
        assert len(said) == warnings, said
    assert "base_model_name = 'meta-llama/\\nLlama' is not the base 'base'" in said[0]
    assert load(http, "new", path, load_inplace=True, base_model_name=5).status_code == 400


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"lora_path": "x"}, "lora_name: is missing"),
        ({"lora_name": "x"}, "lora_path: is missing"),
        ({"lora_name": "x", "lora_path": ""}, "lora_path: is empty"),
        ({"lora_name": "x", "lora_path": "x" * 4097}, "at most 4096 characters, got 4097"),
        ({"lora_name": "../x", "lora_path": "x"}, "lora_name = '../x'"),
        ({"lora_name": 5, "lora_path": "x"}, "lora_name: expected str"),
        ({"lora_name": "x", "lora_path": "x", "load_inplace": "yes"}, "load_inplace: expected bool"),
        ({"lora_name": "x", "lora_path": "x", "lora_id": 1}, "lora_id: is not a field"),
    ],
)
def test_bad_bodies_are_named(http: httpx.Client, body: dict[str, Any], said: str):
    answer = http.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text


def test_an_unknown_field_is_named_as_the_client_wrote_it(http: httpx.Client):
    error = http.post("/v1/load_lora_adapter", json={"name": "x", "lora_path": "x"}).json()["error"]
    assert error["message"] == "name: is not a field of this request; the nearest field is lora_name"
    assert error["param"] == "name"


def test_an_adapter_left_on_the_disk_is_read_by_its_first_request(
    http: httpx.Client, client: openai.OpenAI, path: Path
):
    assert load(http, "new", path, lazy=True).json()["adapter"]["adapter"]["tier"] == "DISK"
    assert client.models.retrieve("new").model_extra["adapter"]["tier"] == "DISK"
    lazy = text(client, "new")
    assert client.models.retrieve("new").model_extra["adapter"]["tier"] == "HBM"
    load(http, "again", path)
    assert lazy == text(client, "again") != text(client, "base")


def test_unloading_what_is_not_there_is_404(http: httpx.Client):
    answer = unload(http, "uper")
    assert answer.status_code == 404 and "upper" in answer.json()["error"]["message"]


def test_many_adapters_at_once(http: httpx.Client, client: openai.OpenAI, served: Served, path: Path):
    names = [f"many{i}" for i in range(12)]
    answers: list[int] = []
    threads = [threading.Thread(target=lambda n=n: answers.append(load(http, n, path).status_code)) for n in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [200] * 12
    listed = [model.id for model in client.models.list()]
    assert listed == ["base", *sorted([*names, "upper", "lower", "wide"])]
    assert {text(client, name) for name in names} == {text(client, "many0")}


def test_prefetch_brings_the_adapter_and_tells_what_is_cached(http: httpx.Client, client: openai.OpenAI):
    prompt = [9, *range(100, 180)]
    client.completions.create(model="upper", prompt=prompt, max_tokens=1)
    found = http.post("/v1/prefetch", json={"model": "upper", "prompt": prompt}).json()
    assert found == {"adapter_resident": True, "cached_tokens": 80, "coming_bytes": 0}
    salted = http.post("/v1/prefetch", json={"model": "upper", "prompt": prompt, "cache_salt": "x"}).json()
    assert salted["cached_tokens"] == 0
    chat = {"model": "upper", "messages": [{"role": "user", "content": "Hello"}]}
    assert http.post("/v1/prefetch", json=chat).json()["adapter_resident"] is True
    assert http.post("/v1/prefetch", json={"model": "upper"}).status_code == 400
    assert http.post("/v1/prefetch", json={"model": "nothing", "prompt": prompt}).status_code == 404
