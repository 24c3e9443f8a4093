"""Configuration: every key can be set, every wrong one is named with the nearest valid key."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from jlora import config as configuration
from jlora.adapters.names import at_start, check_name
from jlora.config import Config, keys, load, replace
from jlora.errors import ConfigError, InvalidArgument
from jlora.ports import DiskFiles
from jlora.serve import flags
from tests.adapters._closed import Closed

ROOT = Path(__file__).resolve().parents[1]


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_defaults_hold_and_every_key_is_listed_once():
    assert load() == Config()
    assert len(set(keys())) == len(keys())
    assert {"model.path", "cache.hbm_blocks", "engine.max_seqs", "serve.port"} <= set(keys())


def test_file_then_overrides_in_that_order(tmp_path: Path):
    path = toml(tmp_path, '[model]\npath = "m"\ntp = 2\n[adapters.paths]\nsql = "a"\n[engine]\noverlap = false\n')
    config = load(path, {"model.tp": "4", "adapters.paths.fr-1.2": "b"})
    assert (config.model.path, config.model.tp, config.engine.overlap) == ("m", 4, False)
    assert config.adapters.paths == {"sql": "a", "fr-1.2": "b"}


def test_a_mapping_is_read_as_a_file_is(tmp_path: Path):
    path = toml(tmp_path, '[model]\ntp = 2\n[cache]\nblock_tokens = 8\n[adapters.paths]\na = "x"\n')
    nested = {"model": {"tp": 2}, "cache": {"block_tokens": 8}, "adapters": {"paths": {"a": "x"}}}
    dotted = {"model.tp": 2, "cache.block_tokens": 8, "adapters.paths": {"a": "x"}}
    assert load(nested) == load(dotted) == load(path) != Config()


def test_command_line_strings_are_read_by_type():
    config = load(None, {"engine.warmup": "off", "cache.hbm_fraction": "0.5", "serve.port": "0", "model.seed": "7"})
    assert config.engine.warmup is False and config.cache.hbm_fraction == 0.5
    assert config.serve.port == 0 and config.model.seed == 7


@pytest.mark.parametrize(
    ("dotted", "near"),
    [
        ("cache.blok_tokens", "cache.block_tokens"),
        ("cach.hbm_blocks", "cache.hbm_blocks"),
        ("block_tokens", "cache.block_tokens"),
        ("engine.max_seq", "engine.max_seqs"),
        ("model.path.x", "model.path"),
        ("serve", "serve.host"),
    ],
)
def test_unknown_key_names_the_nearest_valid_one(dotted: str, near: str):
    with pytest.raises(ConfigError) as e:
        load(None, {dotted: "1"})
    assert repr(dotted) in str(e.value)
    assert repr(near) in str(e.value)


def test_unknown_key_in_a_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="'engine.max_seqs'"):
        load(toml(tmp_path, "[engine]\nmax_sequences = 3\n"))
    with pytest.raises(ConfigError, match="unknown key 'tp'"):
        load(toml(tmp_path, "tp = 3\n"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.tp", "0"),
        ("model.tp", "two"),
        ("model.tp", "1.5"),
        ("model.tp", True),
        ("model.tp", float("inf")),
        ("model.dtype", "float16"),
        ("model.dtype", 16),
        ("model.max_model_len", "1"),
        ("model.seed", "-1"),
        ("cache.hbm_fraction", "nan"),
        ("cache.hbm_fraction", "1.01"),
        ("cache.hbm_blocks", "1"),
        ("engine.max_seqs", "0"),
        ("engine.overlap", "maybe"),
        ("serve.port", "65536"),
        ("serve.port", "-1"),
        ("serve.drain_s", "nan"),
        ("serve.heartbeat_s", "0"),
        ("serve.log_level", "loud"),
        ("adapters.paths", "x"),
        ("adapters.paths", {"x": 1}),
        ("adapters.alora_missing", "maybe"),
        ("engine.merge", "AUTO"),
        ("engine.merge", "true"),
        ("engine.merge", ""),
    ],
)
def test_bad_value_names_key_and_value(key: str, value: object):
    with pytest.raises(ConfigError) as e:
        load(None, {key: value})
    assert key in str(e.value) and str(value) in str(e.value)
    with pytest.raises(ConfigError):
        replace(Config(), {key: value})


def test_unreadable_files_are_one_line(tmp_path: Path):
    for path in (tmp_path / "none.toml", tmp_path, toml(tmp_path, "a = = 1")):
        with pytest.raises(ConfigError) as e:
            load(path)
        assert str(path) in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.stem)
def test_files_that_we_ship_are_valid(path: Path):
    assert load(path).model.path


def test_flags_are_names_of_keys(tmp_path: Path):
    argv = ["--model", "m", "--lora-modules", "a=x", "b=y=z", "--adapter", "c=w", "--max-lora-rank", "8"]
    argv += ["--max-model-len", "99", "--tensor-parallel-size", "2", "--dtype", "float32", "--seed", "3"]
    argv += ["--served-model-name", "base", "--host", "::1", "--port", "0", "--set", "engine.max_seqs=5", "model.tp=1"]
    config = flags.parse(argv)
    assert config.adapters.paths == {"a": "x", "b": "y=z", "c": "w"} and config.adapters.max_rank == 8
    assert (config.model.path, config.model.name, config.model.max_model_len) == ("m", "base", 99)
    assert (config.model.tp, config.model.dtype, config.model.seed) == (2, "float32", 3)  # a flag wins over --set
    assert (config.serve.host, config.serve.port, config.engine.max_seqs) == ("::1", 0, 5)
    path = toml(tmp_path, '[model]\npath = "file"\ntp = 8\n')
    assert flags.parse(["--config", str(path), "--tp", "1"]).model == configuration.ModelConfig(path="file", tp=1)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--modle", "x"], "unknown flag '--modle': the nearest valid one is '--model'"),
        (["--model", "x", "--adaptor=a=b"], "the nearest valid one is '--adapter'"),
        (["--tens", "2"], "the nearest valid one is '--tensor-parallel-size'"),  # which it begins
        (["--model", "x", "--qqqqq"], "unknown flag '--qqqqq' (see jlora serve --help)"),
        (["--model", "x", "--engine.max_seqs=4"], "unknown flag '--engine.max_seqs': give --set engine.max_seqs=VALUE"),
        (["--model", "x", "--max-seqs", "4"], "unknown flag '--max-seqs': give --set engine.max_seqs=VALUE"),
        (["--model", "x", "--set", "q.q=4"], "unknown key 'q.q' (see"),
        (["--model", "x", "--set", "qqqqq=4"], "unknown key 'qqqqq' (see"),
        (["--mod", "x"], "--model"),  # abbreviations are not guessed
        (["--model", "x", "stray"], "unexpected argument 'stray'"),
        (["--model", "x", "--set", "engine.max_sqs=4"], "the nearest valid key is 'engine.max_seqs'"),
        (["--model", "x", "--set", "engine.max_seqs"], "must be section.key=value"),
        (["--model", "x", "--adapter", "a"], "must be NAME=PATH"),
        (["--model", "x", "--adapter", "a=1", "a=2"], "--adapter a: is given twice"),
        (["--model", "x", "--adapter", "../a=1"], "name = '../a'"),
        (["--model", "x", "--port", "70000"], "serve.port = 70000"),
        (["--model", "x", "--adapter-dir", "no/such/dir"], "adapters.dir = 'no/such/dir'"),
        ([], "model.path is not set: give --model"),
    ],
)
def test_wrong_command_line_is_one_line_and_exit_code_2(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as e:
        flags.parse(argv)
    error = capsys.readouterr().err
    assert e.value.code == 2
    assert said in error and error.count("\n") == 1


def test_adapter_dir_takes_every_subdirectory_with_a_config(tmp_path: Path):
    for name in ("b", "a", "not-one"):
        (tmp_path / name).mkdir()
    for name in ("b", "a"):
        (tmp_path / name / "adapter_config.json").write_text("{}")
    (tmp_path / "file").write_text("")
    config = flags.parse(["--model", "m", "--adapter-dir", str(tmp_path), "--adapter", "c=x"])
    found = at_start(config.adapters.paths, config.adapters.dir, DiskFiles())
    assert found == {"c": "x", "a": str(tmp_path / "a"), "b": str(tmp_path / "b")}
    with pytest.raises(ConfigError, match="adapter 'a' is in adapters.paths and in adapters.dir"):
        at_start({"a": "x"}, str(tmp_path), DiskFiles())


def test_some_keys_have_another_name():
    config = load({"cluster": {"route": "random", "slo_tpot_s": 0.1}}, {"serve.max_message_mib": 8})
    assert (config.cluster.routing, config.cluster.slo_s, config.serve.max_request_mib) == ("random", 0.1, 8)
    with pytest.raises(ConfigError, match="cluster.route = 'none'"):
        load({"cluster": {"route": "none"}})


def test_adapter_dir_leaves_out_a_subdirectory_that_this_user_may_not_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("a", "lost+found"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(os, "stat", closed := Closed(str(tmp_path / "lost+found")))
    assert at_start({}, str(tmp_path), DiskFiles()) == {"a": str(tmp_path / "a")}
    assert closed.asked


@pytest.mark.parametrize("name", ["a", "A1", "sql-v1.2_x", "7", "x" * 128, "a.b"])
def test_good_adapter_names(name: str):
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a..b", ".a", "-a", "_a", "a b", "a/b", "a:b", "a\n", "é", "a\x00", "x" * 129]
)
def test_bad_adapter_names_are_refused(name: str):
    with pytest.raises(InvalidArgument, match="name = "):
        check_name(name)


def test_cluster_keys_are_read_from_strings_and_tables():
    flags = {"cluster.fleet": "static", "cluster.addresses": "10.0.0.1:50051,replicas:50051"}
    assert load(None, flags).cluster.addresses == ("10.0.0.1:50051", "replicas:50051")
    config = load({"cluster": {"resources": {"CPU": 1}}}, {"cluster.resources.TPU": "4", "cluster.env.A": "b"})
    assert config.cluster.resources == {"CPU": 1, "TPU": 4} and config.cluster.env == {"A": "b"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cluster.replicas", "0"),
        ("cluster.fleet", "kubernetes"),
        ("cluster.resources.GPU", "-1"),
        ("cluster.name", "../x"),
        ("cluster.addresses", "here:1"),  # the fleet is not static
        ("cluster.ray_address", "here:1"),  # it is not on Ray
    ],
)
def test_bad_cluster_value_names_the_key(key: str, value: str):
    with pytest.raises(ConfigError, match=key.removesuffix(".GPU")):
        load(None, {key: value})


@pytest.mark.parametrize("address", ["here", ":50051", "here:0", "here:http"])
def test_an_address_is_host_and_port(address: str):
    with pytest.raises(ConfigError, match=f"cluster.addresses = {address!r}: must be HOST:PORT"):
        load(None, {"cluster.fleet": "static", "cluster.addresses": address})


@pytest.mark.parametrize(
    "endpoint",
    ["http://[bad", "localhost:4317", "http://h:99999", "http://h", "grpc://h:4317", "http://:4317", "http://a b:1",
     "http://h:4317/v1/traces"],
)  # fmt: skip
def test_a_collector_is_an_address_or_one_error(endpoint: str):
    said = f"serve.otlp_endpoint = {endpoint!r}: must be http://HOST:PORT or https://HOST:PORT"
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        load({"serve": {"otlp_endpoint": endpoint}})


@pytest.mark.parametrize("endpoint", ["", "http://localhost:4317", "https://otel.example:4317/", "http://[::1]:4317"])
def test_a_collectors_address_is_read(endpoint: str):
    assert load({"serve": {"otlp_endpoint": endpoint}}).serve.otlp_endpoint == endpoint


def test_a_tilde_is_the_home_directory_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    files = ("keys", "tls_cert", "tls_key", "tls_client_ca", "compile_cache", "profile_dir")
    single = ["adapters.dir", "adapters.registry", "engine.step_model", *(f"serve.{name}" for name in files)]
    single += ["cluster.token_file", "cluster.ray_token_file"]
    made = load(None, {**dict.fromkeys(single, "~/x"), "adapters.roots": ["~/a", "/b"], "adapters.paths.sql": "~/s"})
    for section, _, key in (dotted.partition(".") for dotted in single):
        assert getattr(getattr(made, section), key) == f"{tmp_path}/x"
    assert made.adapters.roots == (f"{tmp_path}/a", "/b") and made.adapters.paths == {"sql": f"{tmp_path}/s"}
    assert load(None, {"serve.compile_cache": "auto", "model.name": "~/x"}).model.name == "~/x"
    toml(tmp_path, '[model]\nname = "n"\n')
    assert load("~/config.toml").model.name == "n"
