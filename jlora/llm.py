"""The notebook API: one Llama and its adapters in this process.

    from jlora import LLM, SamplingParams

    with LLM("path/or/hub-id", adapters={"sql": "path/to/peft"}) as llm:
        out = llm.generate(["..."], SamplingParams(max_tokens=64), adapter="sql")
        for event in llm.stream("...", adapter="sql"):
            print(event.text, end="")

The engine runs on a thread of its own, as it does behind the server; this class is one more
front: it encodes prompts, validates, submits, and turns token events into text. All methods may
be called from several threads at once, and share the engine's batches.
"""

from __future__ import annotations

import dataclasses
import numbers
import queue
import time
import uuid
import weakref
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from jlora import config as configs
from jlora.config import Config
from jlora.engine.service import Service
from jlora.errors import FailedPrecondition, InvalidArgument, JloraError, QueueFull, Unavailable
from jlora.model import checkpoint
from jlora.serve.output import TextStream
from jlora.serve.tokenizer import Tokenizer
from jlora.types import (
    AdapterInfo,
    CacheState,
    FinishReason,
    Request,
    SamplingParams,
    Timing,
    TokenEvent,
    TokenLogprob,
    Usage,
)

Prompt = str | Sequence[int]
Message = Mapping[str, str]

# An engine loop that has not gone round for so long is dead; the longest compilation is far shorter.
_STALL_S = 600.0


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer.

    Attributes:
        text: without the end token and the stop string (see `SamplingParams.include_stop`); empty
            if the model has no tokenizer.
        token_ids: all output tokens, the end token included.
        logprobs: one per output token, if asked for.
        finish_reason: "stop", "length" or "abort".
        index: which of the prompt's n completions.
        prompt_logprobs: one per prompt token, the first None, if asked for; on index 0 only.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    index: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One step of an answer: a token and the text that it settled, which may be empty.

    The last event of each completion has finish_reason, usage and timing; after a stop string
    or an abort it has no token.
    """

    index: int
    text: str
    token_id: int | None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timing: Timing | None = None


class LLM:
    """A loaded model. Close it, or use it as a context manager, to free the device."""

    def __init__(
        self,
        model: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        progress: bool = True,
    ) -> None:
        """Loads the model and its adapters, with a progress bar.

        Args:
            model: directory (Hugging Face or converted) or hub id; None takes `model.path` of config.
            adapters: name -> PEFT directory, added to those of config.
            config: a `Config`, a TOML file, or keys: `{"model.tp": 2, "cache": {"block_tokens": 8}}`.
            progress: show bars for loading and for batches that take longer than a second.

        Raises:
            JloraError: with one line that says what to change.
        """
        settings = _settings(model, adapters, config)
        directory = checkpoint.resolve(settings.model.path)
        self.tokenizer = Tokenizer.from_dir(directory)
        self._service = Service.start(settings, progress=progress)
        self._progress = progress
        # Stops the engine on close(), on garbage collection, or at exit, whichever is first; once.
        self._stop = weakref.finalize(self, self._service.stop)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | None | Sequence[str | None] = None,
    ) -> list[Completion]:
        """Answers prompts (texts or token ids), all in one batch, in their order.

        `sampling` and `adapter` are for all prompts, or lists with one for each. With n > 1 a
        prompt's n completions follow each other. Nothing runs unless every prompt is valid;
        an interrupt aborts what runs and leaves the model usable.

        Raises:
            InvalidArgument, OutOfRange, ResourceExhausted: a prompt or its sampling is refused.
            NotFound: no such adapter.
            FailedPrecondition: text for a model without a tokenizer.
            Unavailable: closed.
        """
        return self._generate(self._requests(_prompt_list(prompts), sampling, adapter))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | None | Sequence[str | None] = None,
    ) -> list[Completion]:
        """Answers one conversation, or a list of them, through the model's chat template.

        A list of completions in any case, as in `generate`, also for the errors; FailedPrecondition
        if the model has no chat template.
        """
        return self._generate(self._requests([self._chat_ids(c) for c in _conversations(messages)], sampling, adapter))

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, adapter: str | None = None
    ) -> Generator[StreamEvent, None, None]:
        """Answers one prompt, token by token; closing the iterator aborts the request.

        The request is checked by this call, errors as in `generate`, and runs from the first
        event on. With n > 1 the completions' events come mixed; `index` tells them apart.
        """
        return self._stream(self._requests([prompt], sampling, adapter))

    def load_adapter(self, name: str, path: str | Path, pinned: bool = False, replace: bool = False) -> AdapterInfo:
        """Loads a PEFT adapter; AlreadyExists if the name is in use and not to be replaced."""
        return self._service.load_adapter(name, str(path), pinned=pinned, replace=replace)

    def unload_adapter(self, name: str) -> AdapterInfo:
        """Waits for the adapter's running requests, then frees it."""
        return self._service.unload_adapter(name)

    def adapters(self) -> list[AdapterInfo]:
        """Every loaded adapter."""
        return self._service.adapters()

    def cache_stats(self) -> CacheState:
        """Blocks of the pool by class, and hit counters."""
        return self._service.cache_state()

    def close(self) -> None:
        """Stops the engine and frees the device; again does nothing."""
        self._stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self._service.model_name!r})"

    def _chat_ids(self, messages: Sequence[Message]) -> list[int]:
        if self.tokenizer is None:
            raise FailedPrecondition("messages: chat needs a tokenizer, and the model has none; send token ids")
        return self.tokenizer.chat(messages)

    def _requests(self, prompts: Sequence[Any], sampling: Any, adapter: Any) -> list[Request]:
        """A valid request for each prompt, or an error that says which prompt is wrong."""
        count = len(prompts)
        samplings = _for_each("sampling", SamplingParams() if sampling is None else sampling, count, SamplingParams)
        adapters = _for_each("adapter", adapter, count, str | None)
        for name in {a for a in adapters if isinstance(a, str)}:
            self._service.adapter(name)  # raises NotFound
        requests = []
        for i, (prompt, one, name) in enumerate(zip(prompts, samplings, adapters, strict=True)):
            try:
                requests.append(self._request(prompt, one, name))
            except JloraError as e:
                if count == 1:
                    raise
                raise type(e)(f"prompts[{i}]: {e}") from e
        return requests

    def _request(self, prompt: Any, sampling: SamplingParams, adapter: str | None) -> Request:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise FailedPrecondition("prompt: text needs a tokenizer, and the model has none; send token ids")
            if not prompt:
                raise InvalidArgument("prompt: is empty, must have at least 1 character")
            prompt = self.tokenizer.encode(prompt)
        elif isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        request = self._service.check(Request(f"llm-{uuid.uuid4().hex}", prompt, sampling, adapter))
        if request.sampling.stop and self.tokenizer is None:
            raise FailedPrecondition("stop: strings need a tokenizer, and the model has none; use stop_token_ids")
        return request

    def _generate(self, requests: Sequence[Request]) -> list[Completion]:
        answers = [[_Answer(i) for i in range(r.sampling.n)] for r in requests]
        bar = tqdm(
            total=len(requests),
            desc="generate",
            unit="prompt",
            delay=1.0,
            disable=not self._progress or len(requests) == 1,
        )
        left, tokens = [r.sampling.n for r in requests], 0
        # `closing`: an interrupt here must abort now, not when the generator is collected.
        with bar, closing(self._run(requests)) as events:
            for i, event in events:
                answers[i][event.index].add(event)
                tokens += event.token_id is not None
                left[i] -= event.finish_reason is not None
                if event.finish_reason is not None and left[i] == 0:
                    bar.set_postfix(tokens=tokens, refresh=False)
                    bar.update()
        return [answer.completion() for prompt in answers for answer in prompt]

    def _stream(self, requests: Sequence[Request]) -> Generator[StreamEvent, None, None]:
        with closing(self._run(requests)) as events:
            for _, event in events:
                yield event

    def _run(self, requests: Sequence[Request]) -> Generator[tuple[int, StreamEvent], None, None]:
        """Runs the requests, as many at once as the queue takes; yields (request's place, event).

        Whatever ends the iteration early aborts the requests that are still live.
        """
        inbox: queue.SimpleQueue[tuple[int, list[TokenEvent]]] = queue.SimpleQueue()
        waiting = deque(enumerate(requests))
        live: dict[int, _LiveRequest] = {}
        try:
            while waiting or live:
                while waiting and self._admit(*waiting[0], live, inbox):
                    waiting.popleft()
                if not live:  # the queue is full of other threads' requests
                    time.sleep(0.01)
                    continue
                i, events = self._receive(inbox)
                for event in events:
                    shown = live[i].read(event)
                    if shown is not None:
                        yield i, shown
                if not live[i].open:
                    del live[i]
        finally:
            with suppress(Unavailable):  # an engine that is gone has aborted them itself
                for request in live.values():
                    self._service.abort(request.id, request.handle)

    def _admit(self, i: int, request: Request, live: dict[int, _LiveRequest], inbox: queue.SimpleQueue) -> bool:
        """Submits a request unless the queue is full."""
        answer = _LiveRequest(self._service, self.tokenizer, request)
        try:
            answer.handle = self._service.submit(request, lambda events: inbox.put((i, events)))
        except QueueFull:
            return False
        live[i] = answer
        return True

    def _receive(self, inbox: queue.SimpleQueue[tuple[int, list[TokenEvent]]]) -> tuple[int, list[TokenEvent]]:
        """The next events; Unavailable, not a wait for ever, if the engine has died."""
        while True:
            try:
                return inbox.get(timeout=5.0)
            except queue.Empty:
                if (age := self._service.heartbeat_age()) > _STALL_S:
                    raise Unavailable(f"the engine has not moved for {age:.0f} s") from None


class _LiveRequest:
    """A submitted request: its token events in, `StreamEvent` out."""

    def __init__(self, service: Service, tokenizer: Tokenizer | None, request: Request) -> None:
        self.id = request.id
        self.handle: int | None = None
        self.open = request.sampling.n  # completions that have not ended
        self._service = service
        self._texts: list[TextStream] = []
        if tokenizer is not None:
            eos = service.spec.eos_ids
            self._texts = [TextStream(tokenizer, request.sampling, eos) for _ in range(request.sampling.n)]

    def read(self, event: TokenEvent) -> StreamEvent | None:
        """What the event shows; None for a token that came after a stop string.

        Raises:
            Unavailable: the engine has stopped, or failed, before the answer's end.
        """
        if event.finish_reason is not None and event.usage is None:
            raise Unavailable("the engine stopped before the answer ended; its log says why")
        self.open -= event.finish_reason is not None
        if not self._texts:
            return _shown(event, "", event.finish_reason)
        text = self._texts[event.index]
        late = text.stopped
        delta = text.push(event)
        if delta.stopped:
            self._service.stop_completion(self.id, event.index, text.completion_tokens, self.handle)
        if not late:
            return _shown(event, delta.text, delta.finish_reason)
        if event.finish_reason is None:
            return None
        usage = event.usage and dataclasses.replace(event.usage, completion_tokens=text.completion_tokens)
        end = dataclasses.replace(event, token_id=None, logprob=None, prompt_logprobs=None, usage=usage)
        return _shown(end, "", delta.finish_reason)


class _Answer:
    """Gathers one completion's events."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self._last: StreamEvent | None = None

    def add(self, event: StreamEvent) -> None:
        self._texts.append(event.text)
        if event.token_id is not None:
            self._tokens.append(event.token_id)
        if event.logprob is not None:
            self._logprobs.append(event.logprob)
        self._prompt_logprobs = event.prompt_logprobs or self._prompt_logprobs
        self._last = event

    def completion(self) -> Completion:
        last = self._last
        assert last is not None and last.finish_reason and last.usage and last.timing, "a completion without an end"
        return Completion(
            text="".join(self._texts),
            token_ids=tuple(self._tokens),
            logprobs=tuple(self._logprobs) if self._logprobs else None,
            finish_reason=last.finish_reason,
            usage=last.usage,
            timing=last.timing,
            index=self._index,
            prompt_logprobs=self._prompt_logprobs,
        )


def _shown(event: TokenEvent, text: str, finish_reason: FinishReason | None) -> StreamEvent:
    return StreamEvent(
        index=event.index,
        text=text,
        token_id=event.token_id,
        logprob=event.logprob,
        prompt_logprobs=event.prompt_logprobs,
        finish_reason=finish_reason,
        usage=event.usage,
        timing=event.timing,
    )


def _settings(
    model: str | Path | None,
    adapters: Mapping[str, str | Path] | None,
    config: Config | Mapping[str, Any] | str | Path | None,
) -> Config:
    """One checked configuration out of what the constructor takes."""
    if isinstance(config, Mapping):
        config = configs.load(None, _dotted(config))
    elif not isinstance(config, Config):
        config = configs.load(config)
    changes: dict[str, Any] = {}
    if model is not None:
        changes["model.path"] = str(model)
    if adapters:
        changes["adapters.paths"] = {**config.adapters.paths, **{name: str(p) for name, p in adapters.items()}}
    return configs.replace(config, changes)


def _dotted(tree: Mapping[str, Any]) -> dict[str, Any]:
    """`{"cache": {"block_tokens": 8}}` as `{"cache.block_tokens": 8}`; keys with a dot stay."""
    sections = {f.name for f in dataclasses.fields(Config)}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if key in sections and isinstance(value, Mapping):
            flat |= {f"{key}.{k}": v for k, v in value.items()}
        else:
            flat[key] = value
    return flat


def _prompt_list(prompts: Any) -> Sequence[Any]:
    """One prompt, text or ids, as a list of one."""
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidArgument(f"prompts: must be text, token ids or a list of them, got {type(prompts).__name__}")
    if prompts and all(isinstance(x, numbers.Number) for x in prompts):
        return [prompts]
    return prompts


def _conversations(messages: Any) -> Sequence[Any]:
    """One conversation as a list of one."""
    several = isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], list | tuple)
    return messages if several else [messages]


def _for_each(field: str, value: Any, count: int, kind: Any) -> Sequence[Any]:
    """`value` for every prompt, or the list that it is if it has one for each."""
    if isinstance(value, kind):
        return [value] * count
    if not isinstance(value, list | tuple):
        raise InvalidArgument(f"{field}: must be one for all prompts or a list, got {type(value).__name__}")
    if len(value) != count:
        raise InvalidArgument(f"{field}: has {len(value)} entries, must have one for each of the {count} prompts")
    for i, one in enumerate(value):
        if not isinstance(one, kind):
            raise InvalidArgument(f"{field}[{i}]: must not be {type(one).__name__}")
    return value
