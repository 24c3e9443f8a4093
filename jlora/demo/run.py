"""The demo: a real server on the embedded model, asked by base and adapters at once.

    python -m jlora.demo ["your own text"]

It starts `python -m jlora.serve` as its own process and streams one request to the base and to each
adapter at once. It loads one more adapter into the running server and asks again. An activated
adapter then reads along in a chat with the base. At the end it shows the cache and stops the server
with SIGTERM. The exit code is 0 if every answer equals the result of the task's Python function;
answers to your own text are marked, but do not change the exit code.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.live import Live
from rich.text import Text

from jlora.demo import assets, pipeline
from jlora.demo.tasks import TASKS, Transform, echo
from jlora.serve.proto import jlora_pb2, jlora_pb2_grpc

TEXT = "the quick world loves sweet music"
LATE = "reverse"  # the adapter that is loaded into the running server
READY = re.compile(r"jlora ready grpc=(\S+)")
START_S, STOP_S, ANSWER_S = 600.0, 60.0, 120.0

# A small server: fewer batch shapes and one compiled layer make the first start short.
SETTINGS = ("engine.max_seqs=16", "engine.max_step_tokens=256", "engine.layers=scan")


class DemoFailed(Exception):
    """The server failed; the message says how."""


@dataclass(slots=True)
class Answer:
    """One request as it streams in. `model` "" is the base; times are seconds."""

    model: str
    want: str
    text: str = ""
    finish: str = ""
    ttft: float = 0.0
    tpot: float = 0.0
    cached: int = 0

    @property
    def right(self) -> bool:
        return self.finish == "stop" and self.text == self.want


def line(answer: Answer) -> str:
    """One answer as a line of the board."""
    head = f"  {answer.model or 'base':<9} {answer.text:<44}"
    if not answer.finish:
        return head
    mark = "ok" if answer.right else f"WRONG, should be {answer.want!r}"
    return f"{head} ttft {answer.ttft * 1e3:6.1f} ms  tpot {answer.tpot * 1e3:5.1f} ms  {mark}"


def transform_of(model: str) -> Transform:
    """The text function that the base ("") or an adapter has learned."""
    return TASKS[model].transform if model else echo


async def ask(stub: Any, answer: Answer, text: str) -> None:
    """Streams one greedy chat answer into `answer`."""
    request = jlora_pb2.GenerateRequest(
        model=answer.model,
        chat=jlora_pb2.Chat(messages=[jlora_pb2.ChatMessage(role="user", content=text)]),
        sampling=jlora_pb2.Sampling(temperature=0.0),
        stopping=jlora_pb2.Stopping(max_tokens=256),
    )
    async for message in stub.GenerateStream(request, timeout=ANSWER_S):
        for output in message.outputs:
            answer.text += output.text
            answer.finish = output.finish_reason or answer.finish
        if message.HasField("timing"):
            answer.ttft, answer.tpot = message.timing.ttft_s, message.timing.tpot_s
            answer.cached = message.usage.cached_tokens


async def ask_all(channel: grpc.aio.Channel, models: Sequence[str], text: str) -> list[Answer]:
    """Sends `text` to all `models` at once and draws the answers as they arrive."""
    stub = jlora_pb2_grpc.InferenceStub(channel)
    answers = [Answer(model, transform_of(model)(text)) for model in models]
    console = Console(width=None if sys.stdout.isatty() else 200)
    with Live(console=console, get_renderable=lambda: board(answers), refresh_per_second=30):
        await asyncio.gather(*(ask(stub, answer, text) for answer in answers))
    if not console.is_terminal:
        say("")  # rich leaves the last line open there
    return answers


def board(answers: Sequence[Answer]) -> Text:
    """The answers side by side, a line each; lines longer than the screen are cut."""
    return Text("\n".join(map(line, answers)), no_wrap=True)


async def load_late(channel: grpc.aio.Channel) -> None:
    """Loads one more adapter into the running server."""
    stub = jlora_pb2_grpc.AdaptersStub(channel)
    path = str(assets.adapter_path(LATE))
    started = time.monotonic()
    info = await stub.LoadAdapter(jlora_pb2.LoadAdapterRequest(name=LATE, path=path), timeout=ANSWER_S)
    say(
        f"\nLoaded {info.name!r} into the running server in {(time.monotonic() - started) * 1e3:.0f} ms: "
        f"rank {info.rank} on {','.join(info.target_modules)}, {info.blocks} blocks, sha256 {info.digest[:12]}\n"
    )


async def read_along(channel: grpc.aio.Channel) -> list[pipeline.Verdict]:
    """Chats with the base; an activated adapter, and its weights as a plain LoRA, judge the chat."""
    adapters, inference = jlora_pb2_grpc.AdaptersStub(channel), jlora_pb2_grpc.InferenceStub(channel)
    with tempfile.TemporaryDirectory() as folder:
        for name, path in (
            (pipeline.CHECK, assets.adapter_path(pipeline.CHECK)),
            (pipeline.PLAIN, pipeline.as_plain_lora(Path(folder) / pipeline.PLAIN)),
        ):
            await adapters.LoadAdapter(jlora_pb2.LoadAdapterRequest(name=name, path=str(path)), timeout=ANSWER_S)
    say(f"\nA chat with the base; {pipeline.CHECK!r}, an activated LoRA, reads along over the base's KV:\n")
    verdicts = await pipeline.converse(inference)
    say("\n".join(pipeline.lines(verdicts)))
    return verdicts


async def show_cache(channel: grpc.aio.Channel) -> None:
    """Prints the pool's blocks by class, and its hit counters."""
    state = await jlora_pb2_grpc.ControlStub(channel).GetCacheState(jlora_pb2.GetCacheStateRequest(), timeout=ANSWER_S)
    tier = state.hbm
    say(f"\nThe pool, {tier.total} blocks that adapters and KV share:")
    for name in ("adapters", "history_kv", "running_kv", "free"):
        count = getattr(tier, name)
        say(f"  {name:<11}{count:>6}  {'#' * round(50 * count / max(1, tier.total))}")
    say(
        f"  adapter hits {state.adapter_hits}/{state.adapter_lookups}, "
        f"prompt tokens found in the cache {state.kv_hit_tokens}/{state.kv_lookup_tokens}"
    )


async def talk(address: str, text: str) -> tuple[list[Answer], list[pipeline.Verdict]]:
    """Runs every part of the demo against a running server; returns every answer and verdict."""
    early = ["", *(name for name in TASKS if name != LATE)]
    async with grpc.aio.insecure_channel(address) as channel:
        say(f"\nOne text, {len(early)} requests at once: {text!r}\n")
        answers = await ask_all(channel, early, text)
        await load_late(channel)
        again = await ask_all(channel, [LATE, *early], text)
        say(f"  (asked again: {sum(a.cached for a in again)} prompt tokens came from the cache)")
        verdicts = await read_along(channel)
        await show_cache(channel)
    return answers + again, verdicts


@asynccontextmanager
async def server(names: Sequence[str]) -> AsyncIterator[str]:
    """Runs a server of the embedded model and these adapters; yields its address and stops it by SIGTERM.

    Raises:
        DemoFailed: the server did not become ready, or did not stop cleanly.
    """
    adapters = [f"--adapter={name}={assets.adapter_path(name)}" for name in names]
    command = [sys.executable, "-m", "jlora.serve", "--model", str(assets.MODEL), "--served-model-name", "jlora-demo"]
    command += ["--port", "0", *adapters, "--set", *SETTINGS]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        yield await asyncio.wait_for(_ready(process), START_S)
        if process.returncode is not None:
            raise DemoFailed(f"the server stopped by itself with exit code {process.returncode}")
        process.send_signal(signal.SIGTERM)
        code = await asyncio.wait_for(process.wait(), STOP_S)
        if code != 0:
            raise DemoFailed(f"the server's exit code after SIGTERM was {code}")
        say("\nThe server drained and stopped.")
    except TimeoutError as e:
        raise DemoFailed(f"the server was not ready in {START_S:.0f} s or did not stop in {STOP_S:.0f} s") from e
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _ready(process: asyncio.subprocess.Process) -> str:
    """Reads the server's output up to its ready line; its progress bars go to stderr directly."""
    stdout = process.stdout
    if stdout is None:
        raise DemoFailed("the server has no output to read")
    while raw := await stdout.readline():
        text = raw.decode(errors="replace").rstrip()
        say(text)
        if match := READY.search(text):
            return match[1]
    raise DemoFailed(f"the server stopped with exit code {await process.wait()} before it was ready")


def say(text: str) -> None:
    """Prints at once, so that lines keep their order with the server's output."""
    print(text, flush=True)


async def _demo(text: str) -> tuple[list[Answer], list[pipeline.Verdict]]:
    say(f"Starting jlora on its embedded model ({assets.MODEL}) ...")
    async with server([name for name in TASKS if name != LATE]) as address:
        return await talk(address, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="jlora demo", description="Serve the embedded model and ask it.")
    parser.add_argument("text", nargs="?", default=TEXT, help=f"what to ask (default: {TEXT!r})")
    text = parser.parse_args(argv).text
    try:
        answers, verdicts = asyncio.run(_demo(text))
    except DemoFailed as e:
        print(f"jlora demo: {e}", file=sys.stderr)
        return 1
    except grpc.aio.AioRpcError as e:
        print(f"jlora demo: the server answered {e.code().name}: {e.details()}", file=sys.stderr)
        return 1
    right, count = sum(answer.right for answer in answers), len(answers)
    misjudged = [verdict for verdict in verdicts if not verdict.right]
    if (right < count and text == TEXT) or misjudged:
        print(f"jlora demo: wrong answers: {count - right}, wrong verdicts: {len(misjudged)}", file=sys.stderr)
        return 1
    say(f"{right} of {count} answers equal the result of the task's function.")
    return 0
