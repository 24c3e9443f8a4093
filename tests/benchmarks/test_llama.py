"""R2's other side: the client, the process and the comparison, against a server of the documented JSON."""

from __future__ import annotations

import json
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.__main__ import main
from benchmarks.jobs import Job, Workload, prepare
from benchmarks.peers.llama import R2_QUICK, by_adapter, play
from benchmarks.peers.llama_server import Files, LlamaServer, Peer, write_tokenizer
from benchmarks.peers.ours import InProcess, configure
from jlora.errors import ConfigError
from tests.benchmarks import _llama_server

SMALL = ["--set", "engine.max_seqs=4", "--set", "engine.max_step_tokens=16"]


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture(scope="module")
def server_program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A `llama-server` that can be started."""
    script = Path(_llama_server.__file__).resolve()
    path = tmp_path_factory.mktemp("bin") / "llama-server"
    return program(path, f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')


def answered(directory: Path, answers: list[dict]) -> Files:
    """GGUF files that the stand-in takes, and what it will answer."""
    directory.mkdir(exist_ok=True)
    files = {name: directory / f"{name}.gguf" for name in ("base", "sql", "de")}
    for path in files.values():
        path.write_text("")
    (directory / _llama_server.ANSWERS).write_text(json.dumps(answers))
    return Files(files.pop("base"), files)


@pytest.fixture
def llama(server_program: str, tmp_path: Path) -> Iterator[LlamaServer]:
    files = answered(
        tmp_path,
        [
            {"prompt": [5, 6], "lora": None, "tokens": [1, 2, 3]},
            {"prompt": [5, 6], "lora": 1, "tokens": [4, 5, 6]},
        ],
    )
    server = LlamaServer(Peer(server_program, threads=1), files, slots=2, context=64, log=tmp_path / "log")
    yield server
    server.stop()


def test_a_request_names_its_adapter_by_the_id_of_its_flag(llama: LlamaServer):
    with llama.connect() as connection:
        assert connection.answer(Job(0, (5, 6), 2, None)) == [1, 2]
        assert connection.answer(Job(1, (5, 6), 2, "de")) == [4, 5]  # one more came, and was cut
    assert llama.version() == "b1-test"


def test_an_error_is_told_with_its_status(llama: LlamaServer):
    with llama.connect() as connection, pytest.raises(RuntimeError, match="POST /completion: 400: .*unknown"):
        connection.answer(Job(0, (9, 9), 2, "sql"))


def test_tokens_that_it_rates_alike_are_a_tie(llama: LlamaServer):
    assert llama.gap([5, 6], None, 7, 8) == pytest.approx(5e-4)
    assert llama.gap([5, 6], None, 7, 9) == pytest.approx(2.0)
    assert llama.gap([5, 6], None, 7, 1000) == float("inf")


def test_a_server_that_ends_names_its_log(server_program: str, tmp_path: Path):
    files = Files(tmp_path / "missing.gguf", {})
    with pytest.raises(RuntimeError, match=r"ended with code 1 before it was ready: see .*log"):
        LlamaServer(Peer(server_program), files, 1, 64, tmp_path / "log")
    assert "failed to open GGUF" in (tmp_path / "log").read_text()
    with pytest.raises(RuntimeError, match="no-such-server"):
        LlamaServer(Peer("no-such-server"), files, 1, 64, tmp_path / "log")


def test_clients_ask_at_once_and_each_one_thing_after_the_other():
    running, most, order = 0, 0, []
    lock, together = threading.Lock(), threading.Barrier(2, timeout=20)

    class Slow:
        def __enter__(self) -> Slow:
            return self

        def __exit__(self, *_: object) -> None:
            order.append("closed")

        def answer(self, job: Job) -> list[int]:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            together.wait()  # both clients are here at the same time, or this breaks
            with lock:
                running -= 1
            return [job.id]

    jobs = [Job(i, (3,), 1, "ab"[i % 2]) for i in range(6)]
    clients = by_adapter(jobs)
    assert [[job.id for job in client] for client in clients] == [[0, 2, 4], [1, 3, 5]]
    done = play(Slow, clients)
    assert done.tokens == {i: [i] for i in range(6)} and most == 2 and order == ["closed"] * 2 and done.seconds > 0


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return prepare(R2_QUICK, tmp_path_factory.mktemp("r2") / "workload")


def test_the_model_gets_a_tokenizer_of_its_own_size(workload: Workload, tmp_path: Path):
    write_tokenizer(workload, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == R2_QUICK.spec.vocab
    assert [tokenizer.token_to_id(piece) for piece in ("<s>", "</s>", "<0x00>")] == [1, 2, 3]
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["byte_fallback"]
    assert (tmp_path / "model.safetensors").exists()
    assert not (workload.model / "tokenizer.json").exists()


def test_files_are_made_by_the_users_program(workload: Workload, tmp_path: Path):
    names = R2_QUICK.names
    with pytest.raises(ConfigError, match="--llama-convert"):
        Peer("x").files(workload, tmp_path)
    script = program(tmp_path / "convert", '#!/bin/sh\nls "$2" > "$3"; echo "$1 $4" >> "$3"\n')
    files = Peer("x", convert=script).files(workload, tmp_path / "gguf")
    assert list(files.adapters) == names
    assert "tokenizer.json" in files.model.read_text()
    made = files.adapters[names[0]].read_text()
    assert "adapter_model.safetensors" in made and "with-tokenizer" in made
    failing = program(tmp_path / "failing", "#!/bin/sh\necho first >&2; echo no such model >&2; exit 3\n")
    with pytest.raises(ConfigError, match="model with-tokenizer: ended with code 3: no such model"):
        Peer("x", convert=failing).files(workload, tmp_path / "other")


@pytest.mark.slow
def test_both_servers_are_measured_in_turn_and_equal_outputs_counted(server_program: str, tmp_path: Path):
    work, out = tmp_path / "work", tmp_path / "out"
    folder = work / "quick" / "r2"
    workload = prepare(R2_QUICK, folder / "workload")
    with InProcess(configure(workload, "float32", {"engine.max_seqs": 4, "engine.max_step_tokens": 16})) as engine:
        tokens = engine.run(workload.jobs).tokens
    names = R2_QUICK.names
    answers = [
        {"prompt": j.prompt, "lora": names.index(j.adapter or ""), "tokens": tokens[j.id]} for j in workload.jobs
    ]
    answers[-1]["tokens"] = [t + 1 if t < 511 else 3 for t in answers[-1]["tokens"]]  # one is wrong
    files = folder / "gguf"
    files.mkdir(parents=True)
    (files / _llama_server.ANSWERS).write_text(json.dumps(answers))
    convert = program(tmp_path / "convert", '#!/bin/sh\ncp "$2/config.json" "$3" 2>/dev/null || touch "$3"\n')
    argv = ["llama", "--quick", "--out", str(out), "--work", str(work), "--llama-server", server_program]
    assert main([*argv, "--llama-convert", convert, *SMALL]) == 0
    _, *lines = map(json.loads, (out / "llama-float32.jsonl").read_text().splitlines())
    once = {line["side"]: line for line in lines if line["cell"] == "once"}
    found = {
        case: [once[f"outputs {case}"][k] for k in ("requests", "equal", "different")] for case in ("clients", "alone")
    }
    assert found == {"clients": [6, 5, 1], "alone": [3, 3, 0]} and once["versions"]["llama.cpp"] == "b1-test"
    rounds = [line for line in lines if line["cell"] == "rounds"]
    assert len(rounds) == 8 and all(line["seconds"] > 0 for line in rounds)


@pytest.mark.slow
def test_jlora_is_measured_alone_without_llama(tmp_path: Path):
    argv = ["llama", "--quick", "--rounds", "1", "--work", str(tmp_path), "--out", str(tmp_path / "out"), *SMALL]
    assert main(argv) == 0
    _, *lines = map(json.loads, (tmp_path / "out" / "llama-float32.jsonl").read_text().splitlines())
    assert [line["side"] for line in lines] == ["jlora clients", "jlora alone"]
