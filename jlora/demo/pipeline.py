"""The demo's pipeline: a chat with the base, and a check that reads along.

The check is an activated LoRA. It reuses the base's KV of everything before its invocation. The same
weights as a plain LoRA have their own KV and must compute every token since their last verdict.

An empty message of the role `invoke` asks for a verdict: the model's chat template writes it as the
check's invocation.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jlora.demo import assets
from jlora.demo.tasks import CHECKS
from jlora.serve.proto import jlora_pb2

ANSWER_S = 120.0
CHECK = "numbers"
PLAIN = f"{CHECK}-lora"  # the same weights without an invocation
# A first part without a number, then one with one.
CHAT = (
    ("good morning", "this is a story about a river", "the river was long and very cold", "a small town lay by it"),
    ("people built a bridge of stone", "then came the rain", "the bridge is 40 steps long", "it stands to this day"),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A check's verdict on the conversation so far; it must equal `want` if it is `promised`."""

    model: str
    text: str
    want: str
    promised: bool
    prompt_tokens: int
    cached_tokens: int
    ttft: float

    @property
    def right(self) -> bool:
        return not self.promised or self.text == self.want


def message(role: str, content: str) -> Any:
    """One message of a chat."""
    return jlora_pb2.ChatMessage(role=role, content=content)


def greedy(model: str, messages: Sequence[Any], max_tokens: int) -> jlora_pb2.GenerateRequest:
    """A request for the likeliest answer to a chat."""
    return jlora_pb2.GenerateRequest(
        model=model,
        chat=jlora_pb2.Chat(messages=messages),
        sampling=jlora_pb2.Sampling(temperature=0.0),
        stopping=jlora_pb2.Stopping(max_tokens=max_tokens),
    )


def invocation_messages(texts: Sequence[str], answers: Sequence[str]) -> list[Any]:
    """A conversation with the base, and the message that asks a check for its verdict."""
    pairs = zip(texts, answers, strict=True)
    talk = [m for text, answer in pairs for m in (message("user", text), message("assistant", answer))]
    return [*talk, message("invoke", "")]


def as_plain_lora(target: Path) -> Path:
    """A copy of the check's files that is a plain LoRA."""
    shutil.copytree(assets.adapter_path(CHECK), target)
    config = target / "adapter_config.json"
    tree = json.loads(config.read_text())
    del tree["alora_invocation_tokens"]
    config.write_text(json.dumps(tree))
    return target


async def converse(inference: Any) -> list[Verdict]:
    """Chats with the base, and asks the check and the plain LoRA for a verdict after each part."""
    texts: list[str] = []
    answers: list[str] = []
    verdicts = []
    for part in CHAT:
        for text in part:
            chat = invocation_messages(texts, answers)[:-1]
            reply = await inference.Generate(greedy("", [*chat, message("user", text)], 64), timeout=ANSWER_S)
            texts.append(text)
            answers.append(reply.outputs[0].text)
        for model in (CHECK, PLAIN):
            verdicts.append(await _verdict(inference, model, texts, answers))
    return verdicts


def lines(verdicts: Sequence[Verdict]) -> list[str]:
    """The verdicts as text, and the time that sharing the base's KV saved."""
    told = [
        f"  {v.model:<13} {v.text[:24]:<24} ttft {v.ttft * 1e3:6.1f} ms  "
        f"{v.cached_tokens:>4} of {v.prompt_tokens:>4} prompt tokens known"
        + ("" if v.text == v.want else f"  WRONG, should be {v.want!r}" if v.promised else "  (not true)")
        for v in verdicts
    ]
    shared, alone = verdicts[-2:]
    return [
        *told,
        f"  first token {alone.ttft / max(shared.ttft, 1e-9):.1f} times as soon as with the plain LoRA. The plain LoRA "
        "only shows its time: these weights are trained to read the base's KV, so its verdicts may be wrong.",
    ]


async def _verdict(inference: Any, model: str, texts: list[str], answers: list[str]) -> Verdict:
    reply = await inference.Generate(greedy(model, invocation_messages(texts, answers), 32), timeout=ANSWER_S)
    want, usage, text = CHECKS[CHECK].verdict(texts), reply.usage, reply.outputs[0].text
    promised = model == CHECK
    return Verdict(model, text, want, promised, usage.prompt_tokens, usage.cached_tokens, reply.timing.ttft_s)
