"""`jlora generate`, `jlora chat` and `jlora health`: gRPC clients of a running jlora server."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jlora.config import listed
from jlora.errors import InvalidArgument
from jlora.serve import client
from jlora.serve.client import Login, connect, told
from jlora.serve.flags import Parser
from jlora.serve.pages import walk
from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc


def generate(argv: Sequence[str]) -> int:
    """Streams one answer to stdout; returns the exit code."""
    parser = Parser("jlora generate", "Sends one prompt to a running server and streams the answer.")
    parser.add_argument("words", nargs="*", metavar="TEXT", help="the prompt; '-' or none reads stdin")
    parser.add_argument("--ids", action="store_true", help="the prompt is token ids, and token ids are printed")
    parser.add_argument("--n", type=int, metavar="N", help="completions to draw (default 1)")
    parser.add_argument("--timing", action="store_true", help="print token counts and seconds to stderr")
    _add_common(parser)
    args = parser.parse(argv)
    text = _utf8(lambda: " ".join(args.words or "-"))
    if text == "-":
        text = _utf8(sys.stdin.read).removesuffix("\n")  # `echo` ends its line
    request = _request(args)
    if args.ids:
        try:
            request.token_ids.ids.extend(int(word) for word in text.replace(",", " ").split())
        except ValueError as e:
            parser.error(f"--ids: the prompt must be 32-bit whole numbers ({e})")
    else:
        request.text = text
    with connect(args.server, Login.of(args)) as channel:
        _show(rpc.InferenceStub(channel).GenerateStream(request, timeout=args.timeout), args)
    return 0


def health(argv: Sequence[str]) -> int:
    """Whether a server answers, for probes; returns the exit code, 0 if it does."""
    parser = Parser("jlora health", "Exits with 0 if a server is ready for requests, otherwise with 1.")
    parser.add_argument("server", nargs="?", default="127.0.0.1:50051", metavar="HOST:PORT", help="default %(default)s")
    parser.add_argument(
        "--live", action="store_true", help="ask only whether its engine turns: ready, loading or draining"
    )
    parser.add_argument("--timeout", type=float, default=1.0, metavar="SECONDS", help="default %(default)s")
    client.add_flags(parser.add_argument)
    args = parser.parse(argv)
    asked = health_pb2.HealthCheckRequest(service="live" if args.live else "")
    with connect(args.server, Login.of(args)) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its package has no types
        answer = stub.Check(asked, timeout=args.timeout)
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    return int(answer.status != answer.SERVING)


def chat(argv: Sequence[str]) -> int:
    """An interactive conversation; returns the exit code: 1 if the last question got no answer."""
    parser = Parser("jlora chat", f"A conversation with a running server.\n\n{HELP}")
    parser.add_argument("--system", metavar="TEXT", default="", help="a system message to begin with")
    _add_common(parser)
    args = parser.parse(argv)
    if importlib.util.find_spec("readline"):
        importlib.import_module("readline")  # gives input() line editing
    with connect(args.server, Login.of(args)) as channel:
        conversation = Conversation(channel, args)
        print(f"{conversation.models()[0]} on {args.server}; /help lists the commands")
        while (line := _read_line()) is not None and line not in ("/quit", "/exit"):
            conversation.turn(line)
    return int(conversation.failed)


HELP = """  /model         list the base model and its adapters
  /model NAME    answer with this one from now on; the history stays
  /reset         forget the history
  /quit          leave (or Ctrl-D)"""


@dataclass
class Conversation:
    """The state of `jlora chat`: its flags, among them the model, and the conversation so far."""

    channel: grpc.Channel
    args: argparse.Namespace
    history: list[pb.ChatMessage] = field(default_factory=list)
    failed: bool = False  # the last question
    session: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self._reset()

    def models(self) -> list[str]:
        info = rpc.ControlStub(self.channel).GetServerInfo(pb.GetServerInfoRequest())
        return [info.model, *(adapter.name for adapter in walk(rpc.AdaptersStub(self.channel)))]

    def turn(self, line: str) -> None:
        """One line of the user. A server that does not answer it may answer the next."""
        try:
            self._obey(line)
        except grpc.RpcError as e:
            print(f"jlora chat: {told(self.args.server, e)}", file=sys.stderr)
        except KeyboardInterrupt:
            print("\n(stopped)")

    def _obey(self, line: str) -> None:
        match line.split(maxsplit=1):
            case []:
                pass
            case ["/reset", *_]:
                self._reset()
            case ["/model"]:
                print("\n".join(self.models()))
            case ["/model", name]:
                self._switch(name)
            case _ if line.startswith("/"):
                print(HELP)
            case _:
                self._answer(line)

    def _switch(self, name: str) -> None:
        known = self.models()
        if name in known or name.removeprefix(f"{known[0]}:") in known:
            self.args.model = name
        else:
            print(f"no model {name!r}; there is {listed(difflib.get_close_matches(name, known, n=3) or known)}")

    def _answer(self, line: str) -> None:
        """Streams the answer. A refused or interrupted turn does not enter the history."""
        asked = [*self.history, pb.ChatMessage(role="user", content=line)]
        request = _request(self.args)
        request.chat.messages.extend(asked)
        request.session = self.session
        call = rpc.InferenceStub(self.channel).GenerateStream(request, timeout=self.args.timeout)
        self.failed = False
        try:
            text = _show(call, self.args)
        except grpc.RpcError:
            self.failed = True
            raise
        finally:
            call.cancel()  # after an interrupt it still runs
        self.history = [*asked, pb.ChatMessage(role="assistant", content=text)]

    def _reset(self) -> None:
        system = self.args.system
        self.history = [pb.ChatMessage(role="system", content=system)] if system else []


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--server", default="127.0.0.1:50051", metavar="HOST:PORT", help="where it listens (default %(default)s)")
    client.add_flags(add)
    add("--model", default="", metavar="NAME", help="base or adapter name, or base:adapter (default: the base)")
    add("--tenant", default="", metavar="NAME", help="share cached KV only with requests of this tenant")
    add("--max-tokens", type=int, metavar="N", help="tokens of output at most (default: up to the context)")
    add("--temperature", type=float, metavar="X", help="0 is greedy (default 1)")
    add("--top-k", type=int, metavar="K", help="keep the k most likely tokens (default: all)")
    add("--top-p", type=float, metavar="P", help="keep the likeliest tokens that reach this probability (default 1)")
    add("--seed", type=int, metavar="N", help="same seed, same tokens (default: a fresh one)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end at this text; may be repeated")
    add("--timeout", type=float, metavar="S", help="give up after so many seconds (default: never)")


def _request(args: argparse.Namespace) -> pb.GenerateRequest:
    sampling = {name: getattr(args, name, None) for name in ("temperature", "top_k", "top_p", "seed", "n")}
    try:  # protobuf takes None as unset
        return pb.GenerateRequest(
            model=args.model,
            tenant=args.tenant,
            sampling=pb.Sampling(**sampling),
            stopping=pb.Stopping(max_tokens=args.max_tokens, stop=args.stop),
        )
    except UnicodeError as e:
        raise InvalidArgument(f"a flag must be UTF-8 text: {e}") from e
    except ValueError as e:  # protobuf refuses numbers beyond 32 bits
        raise InvalidArgument(f"a number is out of range: {e}") from e


def _show(call: Iterator[pb.GenerateResponse], args: argparse.Namespace) -> str:
    """Prints the answer as it arrives and returns it; several completions are printed in turn at the end."""
    ids, many = getattr(args, "ids", False), (getattr(args, "n", None) or 1) > 1
    parts: dict[int, list[str]] = {}
    last = pb.GenerateResponse()
    for last in call:
        for output in last.outputs:
            piece = "".join(f"{token} " for token in output.token_ids) if ids else output.text
            parts.setdefault(output.index, []).append(piece)
            if not many:
                print(piece, end="", flush=True)
    for index in sorted(parts) if many else ():
        print(f"[{index}] {''.join(parts[index])}")
    if not many:
        print(flush=True)
    if getattr(args, "timing", False):
        usage, timing = last.usage, last.timing
        print(
            f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.completion_tokens} out; "
            f"ttft {timing.ttft_s * 1e3:.1f} ms, tpot {timing.tpot_s * 1e3:.2f} ms",
            file=sys.stderr,
        )
    return "".join(parts.get(0, ()))


def _read_line() -> str | None:
    """The user's next line; None at the end of input. A terminal has a prompt, editing and history."""
    terminal = sys.stdin.isatty()
    try:
        return _utf8(lambda: input("> " if terminal else "")).strip()
    except (EOFError, KeyboardInterrupt):
        print(end="\n" if terminal else "")
        return None


def _utf8(read: Callable[[], str]) -> str:
    """What it reads. Python keeps bytes of a command line that are no text as surrogates, which no message can hold."""
    try:
        text = read()
        text.encode()
    except UnicodeError as e:
        raise InvalidArgument(f"the prompt must be UTF-8 text: {e}") from e
    return text
