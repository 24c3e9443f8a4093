"""A llama.cpp server with LoRA adapters of the user's: the other side of R2.

What is used of its HTTP interface (tools/server/README.md of llama.cpp, read in November 2026; run with
ggml 0.25.3, commit 0c1e570):

    llama-server -m BASE.gguf --lora A.gguf --lora B.gguf --lora-init-without-apply -np SLOTS ...
    GET  /health           200 once the model is loaded
    GET  /props            build_info
    GET  /lora-adapters    [{"id": 0, "path": "A.gguf", "scale": 1.0}, ...]
    POST /completion       {"prompt": [token ids], "lora": [{"id": 0, "scale": 1.0}, ...], "n_predict": N,
                            "return_tokens": true, ...} -> {"tokens": [...], "timings": {...}, ...}

Requests with different adapters are not batched together there. KV and attention are float32
(`-ctk f32 -ctv f32 -fa off`), as on our side; the prompt cache is off on both; end tokens are banned on both.
"""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models

from benchmarks.jobs import Job, Workload
from jlora.errors import ConfigError

HOST = "127.0.0.1"
START_S = 300.0
REQUEST_S = 3600.0
GREEDY: Mapping[str, Any] = {"temperature": 0.0, "samplers": ["temperature"], "repeat_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class Files:
    """The same weights as GGUF: the base, and each adapter by name."""

    model: Path
    adapters: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class Peer:
    """Where the user's llama.cpp is.

    Attributes:
        server: the llama-server program.
        convert: a program that makes GGUF files, called as `convert model DIR OUT.gguf` and
            `convert adapter DIR OUT.gguf MODEL_DIR`.
        threads: it may use.
    """

    server: str
    convert: str = ""
    threads: int = 1

    def files(self, workload: Workload, work: Path) -> Files:
        """The GGUF files, converted unless they are there. Raises ConfigError if they cannot be made."""
        if not self.convert:
            raise ConfigError("--llama-server: give a program that makes GGUF files by --llama-convert")
        source = work / "with-tokenizer"
        write_tokenizer(workload, source)
        model = self._made(work / "model.gguf", "model", source)
        adapters = workload.adapters.items()
        return Files(model, {n: self._made(work / f"{n}.gguf", "adapter", Path(path), source) for n, path in adapters})

    def _made(self, out: Path, kind: str, source: Path, *more: Path) -> Path:
        """Runs the user's program, unless its output is there."""
        if not out.exists():
            words = [self.convert, kind, *(str(path.resolve()) for path in (source, out, *more))]
            try:
                done = subprocess.run(words, capture_output=True, text=True)
            except OSError as e:
                raise ConfigError(f"--llama-convert {self.convert}: {e.strerror}") from e
            if done.returncode or not out.exists():
                last = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
                raise ConfigError(f"--llama-convert {kind} {source.name}: ended with code {done.returncode}: {last}")
        return out


class LlamaServer:
    """A llama.cpp server of our own on a free port; ready once this is made.

    Args:
        slots: requests at once; context: tokens of each.

    Raises:
        RuntimeError: it ended or did not answer; its log is named.
    """

    def __init__(self, peer: Peer, files: Files, slots: int, context: int, log: Path):
        self._port = _free_port()
        self._log = log
        self._ids = {name: i for i, name in enumerate(files.adapters)}  # in the order of the flags
        words = [peer.server, "-m", str(files.model), "--lora-init-without-apply"]
        words += [word for path in files.adapters.values() for word in ("--lora", str(path))]
        words += ["-fa", "off"]  # its flash attention rounds to float16, whatever the cache holds
        words += ["-np", str(slots), "-c", str(slots * context), "-ctk", "f32", "-ctv", "f32"]
        words += ["-t", str(peer.threads), "-tb", str(peer.threads), "--host", HOST, "--port", str(self._port)]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            try:
                self._process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
            except OSError as e:
                raise RuntimeError(f"--llama-server {peer.server}: {e.strerror}") from e
        try:
            self._wait()
            self._check()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> LlamaServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def connect(self) -> Connection:
        """A connection of its own for one client, which must close it."""
        return Connection(self._port, self._ids)

    def version(self) -> str:
        """What it says of its build."""
        with self.connect() as connection:
            return str(connection.get("/props").get("build_info", "unknown"))

    def gap(self, prompt: Sequence[int], adapter: str | None, a: int, b: int) -> float:
        """How far apart it rates two tokens after a prompt (natural log); infinite if one is far from the best."""
        with self.connect() as connection:
            answer = connection.complete(prompt, adapter, 1, n_probs=10)
        top = {entry["id"]: entry["logprob"] for entry in answer["completion_probabilities"][0]["top_logprobs"]}
        return abs(top[a] - top[b]) if a in top and b in top else float("inf")

    def stop(self) -> None:
        """Ends it."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)

    def _wait(self) -> None:
        """Until it has loaded the model."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if (code := self._process.poll()) is not None:
                raise RuntimeError(f"llama-server ended with code {code} before it was ready: see {self._log}")
            if _is_healthy(self._port):
                return
            time.sleep(0.2)
        raise RuntimeError(f"llama-server was not ready within {START_S:.0f} s: see {self._log}")

    def _check(self) -> None:
        """That it has our adapters under the ids that we will use."""
        with self.connect() as connection:
            listed = connection.get("/lora-adapters")
        if [entry["id"] for entry in listed] != list(self._ids.values()):
            raise RuntimeError(f"llama-server lists other adapters than the {len(self._ids)} it was given: {listed}")


class Connection:
    """One client's connection, kept open from request to request."""

    def __init__(self, port: int, ids: Mapping[str, int]):
        self._http = http.client.HTTPConnection(HOST, port, timeout=REQUEST_S)
        self._ids = ids

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def answer(self, job: Job) -> list[int]:
        """Output token ids of a job. It may say a token more to end a character: that is cut."""
        found = self.complete(job.prompt, job.adapter, job.max_tokens)
        return list(found["tokens"][: job.max_tokens])

    def complete(self, prompt: Sequence[int], adapter: str | None, tokens: int, **more: Any) -> dict[str, Any]:
        """One /completion, greedy, nothing reused, end tokens banned.

        Raises:
            RuntimeError: it answered with an error.
        """
        # an empty list would mean all adapters at once, at the scales they were loaded with
        lora = [{"id": i, "scale": float(name == adapter)} for name, i in self._ids.items()]
        body = {
            **GREEDY,
            "prompt": list(prompt),
            "n_predict": tokens,
            "lora": lora,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            **more,
        }
        return self._ask("POST", "/completion", body)

    def get(self, path: str) -> Any:
        """A GET's JSON."""
        return self._ask("GET", path, None)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        content = None if body is None else json.dumps(body)
        self._http.request(method, path, content, {"Content-Type": "application/json"})
        response = self._http.getresponse()
        text = response.read().decode()
        if response.status != 200:
            raise RuntimeError(f"llama-server: {method} {path}: {response.status}: {text[:200]}")
        return json.loads(text)


def write_tokenizer(workload: Workload, directory: Path) -> None:
    """The model's files with a tokenizer beside them: GGUF has no model without one.

    Its pieces mean nothing; only ids are sent. Byte-fallback BPE, as Llama-2's.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in workload.model.iterdir():
        if not (directory / path.name).exists():
            shutil.copy(path, directory / path.name)
    special = ("<unk>", "<s>", "</s>")
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [f"\u2581t{i}" for i in range(len(pieces), workload.plan.spec.vocab)]
    vocab = {piece: i for i, piece in enumerate(pieces[: workload.plan.spec.vocab])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def _is_healthy(port: int) -> bool:
    """Whether /health says so; nobody listening yet is a no."""
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
