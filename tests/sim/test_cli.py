"""`jlora sim`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jlora.cli import main

SHORT = ["sim", "--workload", "W3", "--rate", "4", "--seconds", "8", "--gap", "10", "--adapters", "20"]


def test_a_run_prints_the_workloads_facts_and_a_row_per_policy(capsys: pytest.CaptureFixture[str]):
    assert main([*SHORT, "--hbm-share", "0.25", "--link-gbps", "2", "--policy", "jlora", "vllm-fair:0.3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("W3 synthetic: ") and "working set" in "".join(lines)
    assert any("1 x npu, llama-2-7b" in line and "link 2 GB/s" in line for line in lines)
    head, *rows = lines[-5:-2]
    assert lines[-1].startswith("simulated in: jlora ")
    assert "TTFT ms" in head and "KV host" in head
    assert [row.split()[0] for row in rows] == ["jlora", "vllm-fair:0.3"]


def test_the_json_holds_everything_and_is_the_same_for_the_same_seed(tmp_path: Path):
    texts = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.json"
        assert main([*SHORT, "--policy", "jlora", "--chip", "h200", "--model", "llama-3-8b", "--json", str(path)]) == 0
        texts.append(path.read_bytes())
    assert texts[0] == texts[1]
    record = json.loads(texts[0])
    (run,) = record["runs"]
    assert run["setting"]["chip"] == "h200" and len(run["requests"]["rows"]) == record["facts"]["requests"]
    assert len(run["requests"]["columns"]) == len(run["requests"]["rows"][0])


def test_a_users_own_trace_and_a_closed_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "mine.csv"
    rows = [f"{i * 0.5},{40 + 30 * (i % 3)},8,sql,s{i // 3}" for i in range(9)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,adapter,session", *rows]))
    assert main(["sim", "--trace", str(path), "--policy", "jlora", "--users", "2"]) == 0
    assert "mine, 2 users: 9 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--policy", "jlra"], "nearest is 'jlora'"),
        (["--set", "serve.port=1"], "must be cache.KEY=VALUE or engine.KEY=VALUE"),
        (["--set", "cache.polcy=lru"], "nearest valid key is 'cache.policy'"),
        (["--hbm-gb", "-1"], "--hbm-gb -1: must be at least 0"),
        (["--hbm-gb", "1", "--hbm-share", "0.5"], "hbm_share"),
        (["--model", "llama-34b"], "use more --chips"),
        (["--popularity", "zpf"], "popularity 'zpf'"),
        (["--trace", "none.csv"], "none.csv"),
        (["--steps", "none.json"], "none.json"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main([*SHORT, *flags]) == 1
    out, error = capsys.readouterr()
    assert message in error and error.startswith("jlora sim: ") and error.count("\n") == 1
    assert "--policy" not in flags or out == ""  # known before a trace is drawn


def test_an_unknown_flag_names_the_nearest(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["sim", "--polcy", "lru"])
    assert ended.value.code == 2 and "--policy" in capsys.readouterr().err
