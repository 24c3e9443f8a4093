"""The demo: a real server on the embedded model, asked by base and adapters at once.

    python -m jlora.demo ["your own text"]

The exit code is 0 if every answer equals the result of the task's Python function; answers to your
own text are marked, but do not change the exit code.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.live import Live
from rich.text import Text

from jlora.demo import assets, pipeline
from jlora.demo.tasks import TASKS, Transform, echo
from jlora.errors import JloraError
from jlora.loadgen.server import ServerProcess, flags_of
from jlora.serve import top
from jlora.serve.client import Login
from jlora.serve.proto import jlora_pb2, jlora_pb2_grpc

TEXT = "the quick world loves sweet music"
LATE = "reverse"  # the adapter that is loaded into the running server

# A small server: fewer batch shapes and one compiled layer make the first start short.
SETTINGS = {"engine.max_seqs": 16, "engine.max_step_tokens": 256, "engine.layers": "scan"}


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
    return TASKS[model] if model else echo


async def ask(stub: Any, answer: Answer, chat: Sequence[Any]) -> None:
    """Streams one greedy answer to a chat's messages into `answer`."""
    request = pipeline.greedy(answer.model, chat, 256)
    async for message in stub.GenerateStream(request, timeout=pipeline.ANSWER_S):
        for output in message.outputs:
            answer.text += output.text
            answer.finish = output.finish_reason or answer.finish
        if message.HasField("timing"):
            answer.ttft, answer.tpot = message.timing.ttft_s, message.timing.tpot_s
            answer.cached = message.usage.cached_tokens


async def ask_all(channel: grpc.aio.Channel, models: Sequence[str], text: str) -> list[Answer]:
    """Sends `text` to all `models` at once and draws the answers, a line each, as they arrive."""
    stub = jlora_pb2_grpc.InferenceStub(channel)
    answers = [Answer(model, transform_of(model)(text)) for model in models]
    chat = [pipeline.message("user", text)]
    console = Console(width=None if sys.stdout.isatty() else 200)

    def board() -> Text:
        return Text("\n".join(map(line, answers)), no_wrap=True)

    with Live(console=console, get_renderable=board, refresh_per_second=30):
        await asyncio.gather(*(ask(stub, answer, chat) for answer in answers))
    if not console.is_terminal:
        say("")  # rich leaves the last line open there
    return answers


async def load(channel: grpc.aio.Channel, name: str, path: Path) -> jlora_pb2.AdapterInfo:
    """Loads one more adapter into the running server."""
    request = jlora_pb2.LoadAdapterRequest(name=name, path=str(path))
    return await jlora_pb2_grpc.AdaptersStub(channel).LoadAdapter(request, timeout=pipeline.ANSWER_S)


async def load_late(channel: grpc.aio.Channel) -> None:
    """Loads `LATE`, and says how long that took."""
    started = time.monotonic()
    info = await load(channel, LATE, assets.adapter_path(LATE))
    say(
        f"\nLoaded {info.name!r} into the running server in {(time.monotonic() - started) * 1e3:.0f} ms: "
        f"rank {info.rank} on {','.join(info.target_modules)}, {info.blocks} blocks, sha256 {info.digest[:12]}\n"
    )


async def read_along(channel: grpc.aio.Channel) -> list[pipeline.Verdict]:
    """Chats with the base; an activated adapter, and its weights as a plain LoRA, judge the chat."""
    with tempfile.TemporaryDirectory() as folder:
        await load(channel, pipeline.CHECK, assets.adapter_path(pipeline.CHECK))
        await load(channel, pipeline.PLAIN, pipeline.as_plain_lora(Path(folder) / pipeline.PLAIN))
    say(f"\nA chat with the base; {pipeline.CHECK!r}, an activated LoRA, reads along over the base's KV:\n")
    verdicts = await pipeline.converse(jlora_pb2_grpc.InferenceStub(channel))
    say("\n".join(pipeline.lines(verdicts)))
    return verdicts


async def talk(address: str, text: str) -> tuple[list[Answer], list[pipeline.Verdict]]:
    """Asks a running server everything; returns every answer and verdict."""
    early = ["", *(name for name in TASKS if name != LATE)]
    async with Login().aio(address) as channel:
        say(f"\nOne text, {len(early)} requests at once: {text!r}\n")
        answers = await ask_all(channel, early, text)
        await load_late(channel)
        again = await ask_all(channel, [LATE, *early], text)
        say(f"  (asked again: {sum(a.cached for a in again)} prompt tokens came from the cache)")
        return answers + again, await read_along(channel)


def server(names: Sequence[str]) -> ServerProcess:
    """A server of the embedded model and these adapters."""
    adapters = {name: str(assets.adapter_path(name)) for name in names}
    model = ["--model", str(assets.MODEL), "--served-model-name", "jlora-demo", "--http-port", "0"]
    return ServerProcess([*model, *flags_of(adapters, SETTINGS)])


def say(text: str) -> None:
    """Prints at once, so that lines keep their order with the server's output."""
    print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="jlora demo", description="Serve the embedded model and ask it.")
    parser.add_argument("text", nargs="?", default=TEXT, help=f"what to ask (default: {TEXT!r})")
    text = parser.parse_args(argv).text
    try:
        say(f"Starting jlora on its embedded model ({assets.MODEL}) ...")
        with server([name for name in TASKS if name != LATE]) as process:
            say(f"It is ready at {process.address}, and its dashboard at http://{process.http}/ while the demo runs.")
            answers, verdicts = asyncio.run(talk(process.address, text))
            say("\nThe pool, which adapters and KV share, as `jlora top` shows it:\n")
            top.main([process.address, "--once"])
        say("\nThe server drained and stopped.")
    except (JloraError, RuntimeError) as e:
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
