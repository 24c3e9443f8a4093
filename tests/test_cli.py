"""The `jlora` command: its table of subcommands, and the clients of a running server."""

from __future__ import annotations

import argparse
import io
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jlora import __version__, cli
from jlora.model import checkpoint
from jlora.serve import client, console
from jlora.serve.client import Login
from jlora.serve.proto import jlora_pb2 as pb
from tests import _make
from tests.serve import _server
from tests.serve._server import Served, request

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of a random model "base" and one adapter "upper"."""
    root = tmp_path_factory.mktemp("cli")
    spec = _server.write_text_model(root / "base", max_len=256)
    adapter = _make.make_adapter(root / "upper", spec, seed=3)
    settings = {"engine.warmup": False, "adapters.paths.upper": str(adapter)}
    with _server.serve(root / "base", settings) as running:
        yield running


def run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.main(argv)
    said = capsys.readouterr()
    return code, said.out, said.err


# -- the table ----------------------------------------------------------------------------------


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(["--help"], capsys)
    assert code == 0 and all(name in out for name in ("serve", "generate", "chat", "convert", "bench", "demo"))
    assert run([], capsys)[0] == 2
    assert run(["--version"], capsys)[1] == f"jlora {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["generat"], "jlora: unknown command 'generat': the nearest valid one is 'generate' (see jlora --help)"),
        (["version"], "jlora: unknown command 'version': the nearest valid one is '--version' (see jlora --help)"),
        (["zzz"], "jlora: unknown command 'zzz' (see jlora --help)"),
        (
            ["cluster", "statu"],
            "jlora cluster: unknown command 'statu': the nearest valid one is 'status' (see jlora cluster --help)",
        ),
    ],
)
def test_an_unknown_command_names_the_nearest_if_one_is_near(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert run(argv, capsys) == (2, "", said + "\n")


def test_ctrl_c_while_it_imports_is_no_traceback():
    code = """
import runpy, sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "jlora.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
runpy.run_module("jlora", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "\n")


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "convert", "top"])
def test_every_command_explains_itself_and_refuses_unknown_flags(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as e:
        cli.main([command, "--help"])
    assert e.value.code == 0 and f"jlora {command}" in capsys.readouterr().out
    with pytest.raises(SystemExit) as e:
        cli.main([command, "--no-such-flag"])
    error = capsys.readouterr().err
    assert e.value.code == 2 and error.count("\n") == 1


def test_a_wrong_command_line_is_told_without_loading_jax():
    """So a typing mistake costs no seconds."""
    code = "import sys; from jlora import cli\ntry: cli.main(['serve', '--modle', 'x'])\nexcept SystemExit: pass\n"
    code += "sys.exit('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--model" in done.stderr


def test_the_command_is_there_as_a_module_too():
    done = subprocess.run([sys.executable, "-m", "jlora", "--version"], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 0 and done.stdout.decode().strip() == f"jlora {__version__}"


def test_a_reader_that_leaves_early_is_no_error():
    """As in `jlora sim | head`."""
    argv = [sys.executable, "-m", "jlora.cli", "sim", "--seconds", "5", "--rate", "2", "--policy", "jlora"]
    ran = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert ran.stdout is not None and ran.stderr is not None
    ran.stdout.close()
    said = ran.stderr.read()
    assert ran.wait(60) == 141 and "Error" not in said and "ignored" not in said


def test_an_installed_package_says_where_the_studies_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "site-packages" / "jlora" / "cli.py"))  # no benchmarks/ beside
    code, out, _ = run(["bench", "skew"], capsys)
    assert code == 2 and "no part of the package" in out and "Clone the repository" in out


def test_a_study_without_its_packages_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.delitem(sys.modules, "benchmarks.report", raising=False)
    code, _, err = run(["bench", "report"], capsys)
    assert code == 1 and err.startswith("jlora bench: needs pandas: ") and "[bench]" in err and err.count("\n") == 1


def test_convert_says_what_it_wrote_or_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _make.make_model(tmp_path / "plain")
    code, out, _ = run(["convert", str(tmp_path / "plain"), str(tmp_path / "fast")], capsys)
    assert code == 0 and str(tmp_path / "fast") in out
    code, _, err = run(["convert", str(tmp_path / "none"), str(tmp_path / "other")], capsys)
    assert code == 1 and err.startswith("jlora convert: ") and err.count("\n") == 1


def test_convert_makes_its_target_before_it_reads_a_weight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    _make.make_model(tmp_path / "plain")
    (tmp_path / "file").write_text("")
    read: list[object] = []
    monkeypatch.setattr(checkpoint, "load_params", lambda *args, **_: read.append(args))
    code, _, err = run(["convert", str(tmp_path / "plain"), str(tmp_path / "file" / "fast")], capsys)
    assert (code, err.count("\n")) == (1, 1) and "Not a directory" in err and "file/fast" in err
    assert not read


# -- generate -----------------------------------------------------------------------------------


def test_generate_streams_the_answer(served: Served, capsys: pytest.CaptureFixture[str]):
    flags = ["--server", served.address, "--max-tokens", "12", "--temperature", "0"]
    for model in ("", "upper", "base:upper"):
        code, out, _ = run(["generate", *flags, "--model", model, "Hello"], capsys)
        expected = served.generate(request("Hello", 12, model=model, ignore_eos=None)).outputs[0].text
        assert (code, out) == (0, expected + "\n")
    code, out, err = run(["generate", *flags, "--tenant", "a", "--timing", "--ids", "5, 6 7"], capsys)
    expected = served.generate(request((5, 6, 7), 12, ignore_eos=None)).outputs[0].token_ids
    assert [int(word) for word in out.split()] == list(expected)
    assert "3 prompt tokens" in err and "ttft" in err


def test_generate_reads_stdin_and_draws_n(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    code, out, _ = run(["generate", "--server", served.address, "--n", "3", "--seed", "1", "--max-tokens", "4"], capsys)
    assert code == 0 and all(f"[{i}] " in out for i in range(3))


def test_generate_complains_in_one_line(served: Served, capsys: pytest.CaptureFixture[str]):
    at = ["generate", "--server", served.address]
    code, _, err = run([*at, "--model", "uper", "Hello"], capsys)
    assert code == 1 and err.startswith("jlora generate: NOT_FOUND: ") and "upper" in err and err.count("\n") == 1
    code, _, err = run([*at, "--temperature", "-1", "Hello"], capsys)
    assert code == 1 and "INVALID_ARGUMENT" in err and "temperature" in err
    code, _, err = run([*at, "--top-k", str(2**40), "Hello"], capsys)
    assert code == 1 and "out of range" in err
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    code, _, err = run(["generate", "--server", nobody, "Hello"], capsys)
    assert code == 1 and f"no server answers at {nobody}" in err and "jlora serve" in err
    assert "of its gRPC port (50051 by default)" in err
    for address in ("localhost", "localhost:"):
        code, _, err = run(["generate", "--server", address, "Hello"], capsys)
        assert code == 1 and err.count("\n") == 1
        assert err.startswith(f"jlora generate: {address}: must be HOST:PORT of the server's gRPC port")


@pytest.mark.parametrize("flags", [["a\udcff"], ["--stop", "\udcff", "a"], ["-"], []])
def test_what_is_no_utf8_is_refused_in_one_line(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8"))
    code, _, err = run(["generate", "--server", "127.0.0.1:1", *flags], capsys)
    assert code == 1 and "must be UTF-8 text" in err and err.count("\n") == 1
    assert err.startswith("jlora generate: " + ("a flag" if "--stop" in flags else "the prompt"))


def test_a_key_may_end_its_line(monkeypatch: pytest.MonkeyPatch):
    """As one that a shell has read from a file with Windows' line ends."""
    flags = argparse.ArgumentParser()
    client.add_flags(flags.add_argument)
    monkeypatch.setenv(client.KEY_VARIABLE, "abc\r\n")
    assert Login.of(flags.parse_args([])).key == "abc"
    assert Login.of(flags.parse_args(["--key", "xyz\n"])).key == "xyz"


def test_a_prompt_may_be_several_words_among_the_flags(served: Served, capsys: pytest.CaptureFixture[str]):
    flags = ["--server", served.address, "--max-tokens", "6", "--temperature", "0"]
    expected = served.generate(request("the cat the cat", 6, ignore_eos=None)).outputs[0].text
    assert run(["generate", "the", "cat", *flags, "the", "cat"], capsys) == (0, expected + "\n", "")


@pytest.mark.parametrize(
    "argv", [["generate", "--model", "a", "--model=b", "x"], ["serve", "--tp", "1", "--tensor-parallel-size", "2"]]
)
def test_a_flag_given_twice_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as e:
        cli.main(argv)
    assert e.value.code == 2 and "is given twice" in capsys.readouterr().err


# -- chat ---------------------------------------------------------------------------------------


def test_chat_keeps_the_history_and_switches_models(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    lines = ["/model", "Hello", "/model uper", "/model upper", "again", "/reset", "/what", "Hello", "/quit", "unread"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    code, out, err = run(["chat", "--server", served.address, "--temperature", "0", "--max-tokens", "6"], capsys)
    assert (code, err) == (0, "")

    def answer(model: str, *turns: str) -> str:
        roles = ("user", "assistant") * len(turns)
        messages = [pb.ChatMessage(role=r, content=t) for r, t in zip(roles, turns, strict=False)]
        return served.generate(request(pb.Chat(messages=messages), 6, model=model, ignore_eos=None)).outputs[0].text

    first = answer("", "Hello")
    said = [first, answer("upper", "Hello", first, "again"), answer("upper", "Hello")]
    greeting, unknown = f"base on {served.address}; /help lists the commands", "no model 'uper'; there is upper"
    assert out == "\n".join([greeting, "base", "upper", said[0], unknown, said[1], console.HELP, said[2], ""])


def test_chat_says_how_many_models_it_does_not_list(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(console.Conversation, "models", lambda _: [f"m{i}" for i in range(9)])
    monkeypatch.setattr(sys, "stdin", io.StringIO("/model nope\n"))
    _, out, _ = run(["chat", "--server", served.address], capsys)
    assert "no model 'nope'; there is m0, m1, m2, m3, m4, m5, m6, m7 and 1 more\n" in out


def test_chat_survives_a_refused_turn(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("word " * 300 + "\nHello\n"))
    code, out, err = run(["chat", "--server", served.address, "--max-tokens", "5", "--temperature", "0"], capsys)
    assert code == 0 and "OUT_OF_RANGE" in err
    asked = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hello")])
    assert served.generate(request(asked, 5, ignore_eos=None)).outputs[0].text in out


def test_chat_tells_a_script_that_the_last_turn_failed(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n" + "word " * 300 + "\n"))
    code, _, err = run(["chat", "--server", served.address, "--max-tokens", "5"], capsys)
    assert code == 1 and "OUT_OF_RANGE" in err
    code, _, err = run(["chat", "--server", "127.0.0.1:1"], capsys)
    assert code == 1 and "no server answers at 127.0.0.1:1" in err


def test_chat_goes_on_after_a_command_that_got_no_answer(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    class Restarting(console.Conversation):
        asked = 0

        def models(self) -> list[str]:
            self.asked += 1
            if self.asked == 2:
                with Login().channel("127.0.0.1:1") as nobody:
                    return console.Conversation(nobody, self.args).models()
            if self.asked == 3:
                raise KeyboardInterrupt
            return super().models()

    monkeypatch.setattr(console, "Conversation", Restarting)
    monkeypatch.setattr(sys, "stdin", io.StringIO("/model\n/model upper\n/model\n"))
    code, out, err = run(["chat", "--server", served.address], capsys)
    assert code == 0 and out.endswith("\n(stopped)\nbase\nupper\n")
    assert err.startswith("jlora chat: no server answers at ") and err.count("\n") == 1


# -- the example --------------------------------------------------------------------------------


def test_the_example_asks_every_model(served: Served):
    done = subprocess.run(
        [sys.executable, "examples/grpc_client.py", "--server", served.address, "--max-tokens", "6", "Hello"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for model in ("base", "upper"):
        expected = served.generate(request("Hello", 6, model=model, ignore_eos=None)).outputs[0].text
        assert f"{model:>16}: {expected!r}" in done.stdout
