"""The notebook API: one Llama and its adapters in this process.

    from jlora import LLM, SamplingParams

    with LLM("path/or/hub-id", adapters={"sql": "path/to/peft"}) as llm:
        out = llm.generate(["..."], SamplingParams(max_tokens=64), adapter="sql")
        for event in llm.stream("...", adapter="sql"):
            print(event.text, end="")

The engine runs on its own thread, as behind the server. Every method may be called from several
threads at once; their requests share the engine's batches.
"""

from __future__ import annotations

import dataclasses
import numbers
import os
import queue
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tqdm.auto import tqdm

from jlora import config as configs
from jlora.config import Config
from jlora.engine.local import LocalReplica
from jlora.errors import (
    ConfigError,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    JloraError,
    NotFound,
    QueueFull,
    ResourceExhausted,
    Unavailable,
)
from jlora.model import hub
from jlora.replica import Replica
from jlora.serve.stream import Answer, joined
from jlora.serve.tokenizer import Tokenizer
from jlora.types import (
    AdapterInfo,
    CacheState,
    Delta,
    FinishReason,
    Request,
    SamplingParams,
    Timing,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from jlora.validation import validate

Prompt = str | Sequence[int]
Message = Mapping[str, str]

# By a request's place: its events, or why it was refused.
_Inbox = queue.SimpleQueue[tuple[int, "list[TokenEvent] | BaseException"]]

# Seconds without a heartbeat after which the engine counts as dead. The longest compilation is far shorter.
_STALL_S = 600.0

_CLOSED = "the model is closed; make another LLM"


@dataclass(frozen=True, slots=True)
class Completion:
    """One whole answer, with the fields of `Delta`. The text has neither the end token nor the stop string."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    index: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


class LLM:
    """A loaded model. Close it, or use it as a context manager, to free the device."""

    _open: ClassVar[weakref.WeakSet[LLM]] = weakref.WeakSet()  # of this process

    def __init__(
        self,
        model: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        progress: bool = True,
    ) -> None:
        """Loads the model and its adapters, with a progress bar. Raises JloraError if it cannot.

        Args:
            model: directory (Hugging Face or converted) or hub id; None takes `model.path` of config.
            adapters: name -> PEFT directory; added to the adapters of config.
            config: a `Config`, a TOML file, or keys: `{"model.tp": 2, "cache": {"block_tokens": 8}}`.
            progress: show progress bars for loading, and for batches that take longer than a second.
        """
        settings = _settings(model, adapters, config)
        directory = hub.resolve(settings.model.path)
        settings = configs.replace(settings, {"model.path": str(directory)})
        self.tokenizer = Tokenizer.from_dir(directory)
        self._process = os.getpid()
        self._started = self._start(settings, progress)
        self._progress = progress
        self._closed = False
        # For who does not call close(): on garbage collection or at exit, whichever comes first.
        self._stop = weakref.finalize(self, _close, self._started, self._process)
        LLM._open.add(self)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | None | Sequence[str | None] = None,
        tenant: str = "",
    ) -> list[Completion]:
        """Answers prompts (texts or token ids) in one batch; completions come in the prompts' order.

        With n > 1 a prompt's n completions follow each other. If one prompt is invalid, none runs.
        An interrupt aborts the running requests and leaves the model usable.

        Args:
            sampling, adapter: one for all prompts, or a list with one for each prompt.
            tenant: prompts of different tenants never share cached KV.

        Raises:
            InvalidArgument, OutOfRange, ResourceExhausted: a prompt or its sampling is refused.
            NotFound: no adapter of that name.
            FailedPrecondition: text for a model without a tokenizer.
            Unavailable: the model is closed.
        """
        return self._generate(self._requests(_prompt_list(prompts), sampling, adapter, tenant))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | None | Sequence[str | None] = None,
        tenant: str = "",
    ) -> list[Completion]:
        """Answers one conversation, or a list of them, through the model's chat template.

        Returns a list in both cases. Arguments and errors are those of `generate`, and FailedPrecondition
        for a model without a chat template.
        """
        several = isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], list | tuple)
        conversations: Sequence[Any] = messages if several else [messages]
        return self._generate(self._chats(conversations, sampling, adapter, tenant))

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling: SamplingParams | None = None,
        adapter: str | None = None,
        tenant: str = "",
    ) -> Generator[Delta, None, None]:
        """Answers one prompt or conversation, delta by delta; closing the iterator aborts the request.

        The call validates the request; the first `next` submits it. With n > 1 the completions'
        deltas come mixed, told apart by `index`. Arguments and errors are those of `generate` and `chat`.
        """
        chat = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        make = self._chats if chat else self._requests
        return self._stream(make([prompt], sampling, adapter, tenant))

    def load_adapter(
        self, name: str, path: str | Path, pinned: bool = False, replace: bool = False, lazy: bool = False
    ) -> AdapterInfo:
        """Loads a PEFT adapter; with `lazy` it stays on the disk until a prompt needs it.

        Raises AlreadyExists if the name is in use and `replace` is False.
        """
        directory = os.path.expanduser(str(path))
        try:
            return self._replica.load_adapter(name, directory, pinned=pinned, replace=replace, lazy=lazy).result()
        except (NotFound, DataLoss, InvalidArgument) as e:
            raise type(e)(f"{e} (from {os.path.abspath(directory)})") from e

    def unload_adapter(self, name: str) -> AdapterInfo:
        """Waits for the adapter's running requests, then frees it."""
        return self._replica.unload_adapter(name).result()

    def adapters(self) -> list[AdapterInfo]:
        return self._replica.adapters().result()

    def cache_stats(self) -> CacheState:
        """Blocks of the pool by class, and hit counters."""
        return self._replica.state().result().cache

    def close(self) -> None:
        """Stops the engine and frees the device. A second call does nothing, or finishes one that was interrupted."""
        self._closed = True
        _close(self._started, self._process)
        self._stop.detach()
        LLM._open.discard(self)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self._started.info.model!r})"

    @classmethod
    def _start(cls, settings: Config, progress: bool) -> Replica:
        try:
            return LocalReplica.start(settings, progress=progress)
        except (ConfigError, ResourceExhausted) as e:
            if not cls._open:
                raise
            raise type(e)(f"{e} (another LLM of this process is open: close() it first if it has the memory)") from e

    @property
    def _replica(self) -> Replica:
        if os.getpid() != self._process:  # its threads did not come along: a call would wait for ever
            raise FailedPrecondition(
                f"LLM: belongs to process {self._process}, and cannot be used in its forked child {os.getpid()}; "
                "start the child with multiprocessing's spawn, and make an LLM there"
            )
        if self._closed:
            raise Unavailable(_CLOSED)
        return self._started

    def _chats(self, conversations: Sequence[Any], sampling: Any, adapter: Any, tenant: str) -> list[Request]:
        if self.tokenizer is None:
            raise FailedPrecondition("messages: chat needs a tokenizer, and the model has none; send token ids")
        prompts = [self.tokenizer.chat(conversation) for conversation in conversations]
        requests = self._requests(prompts, sampling, adapter, tenant)
        return [dataclasses.replace(request, chat=True) for request in requests]

    def _requests(self, prompts: Sequence[Any], sampling: Any, adapter: Any, tenant: str) -> list[Request]:
        count = len(prompts)
        samplings = _for_each("sampling", SamplingParams() if sampling is None else sampling, count)
        adapters = _for_each("adapter", adapter, count)
        for name in {a for a in adapters if isinstance(a, str)}:
            self._replica.adapter(name).result()  # before the prompts: it is no fault of one of them
        requests: list[Request] = []
        checks: deque[Future[None]] = deque()
        try:
            for prompt, one, name in zip(prompts, samplings, adapters, strict=True):
                requests.append(self._request(prompt, one, name, tenant))
            checks.extend(map(self._replica.check, requests))  # all at once: each waits for the end of a step
            while checks:
                checks[0].result()
                checks.popleft()
        except JloraError as e:
            if count == 1:
                raise
            wrong = len(requests) - len(checks)
            raise type(e)(f"prompts[{wrong}]: {e}") from e
        finally:
            checks.clear()  # their errors hold this frame, and it holds the model
        return requests

    def _request(self, prompt: Any, sampling: SamplingParams, adapter: str | None, tenant: str) -> Request:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise FailedPrecondition("prompt: text needs a tokenizer, and the model has none; send token ids")
            if not prompt:
                raise InvalidArgument("prompt: is empty, must have at least 1 character")
            prompt = self.tokenizer.encode(prompt)
        elif isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        request = Request(f"llm-{uuid.uuid4().hex}", prompt, sampling, adapter, tenant=tenant)
        request = validate(request, self._replica.info.limits)
        if request.sampling.stop and self.tokenizer is None:
            raise FailedPrecondition("stop: strings need a tokenizer, and the model has none; use stop_token_ids")
        return request

    def _generate(self, requests: Sequence[Request]) -> list[Completion]:
        parts: list[list[Delta]] = [[] for _ in requests]
        hidden = not self._progress or len(requests) == 1
        bar = tqdm(total=len(requests), desc="generate", unit="prompt", delay=1.0, disable=hidden)
        tokens = 0
        # `closing`: an interrupt here must abort now, not when the generator is collected.
        with bar, closing(self._run(requests)) as running:
            for i, deltas, ended in running:
                parts[i] += deltas
                tokens += sum(len(delta.token_ids) for delta in deltas)
                if ended:
                    bar.set_postfix(tokens=tokens, refresh=False)
                    bar.update()
        return [_completion(whole) for deltas in parts for whole in joined(deltas)]

    def _stream(self, requests: Sequence[Request]) -> Generator[Delta, None, None]:
        with closing(self._run(requests)) as running:
            for _, deltas, _ in running:
                yield from deltas

    def _run(self, requests: Sequence[Request]) -> Generator[tuple[int, list[Delta], bool], None, None]:
        """Runs the requests, as many at once as the queue takes.

        Yields each request's place, its new deltas, and whether it has ended. Leaving the iteration early
        aborts the requests that are still live.
        """
        inbox: _Inbox = queue.SimpleQueue()
        waiting = deque(range(len(requests)))
        live: dict[int, Answer] = {}
        handles: dict[int, Future[int]] = {}
        settings = self._replica.info.config.engine
        room = settings.max_queue + settings.max_seqs  # completions
        pause_s, again = 0.01, 0.0  # when the queue was full: no earlier than `again`
        try:
            while waiting or live:
                while waiting and time.monotonic() >= again and (room >= requests[waiting[0]].sampling.n or not live):
                    i = waiting.popleft()
                    room -= requests[i].sampling.n
                    live[i] = Answer(requests[i], self.tokenizer, self._replica.info.eos_ids)
                    handles[i] = self._submit(i, requests[i], inbox)
                if not live:
                    time.sleep(pause_s)
                    continue
                i, came = self._receive(inbox)
                if isinstance(came, QueueFull):  # other threads' requests fill the queue
                    waiting.appendleft(i)
                    again = time.monotonic() + pause_s
                elif isinstance(came, BaseException):
                    raise came
                else:
                    deltas, stops = live[i].push(came)
                    for stop in stops:
                        self._replica.stop(handles[i].result(), *stop)
                    yield i, deltas, live[i].ended
                    if not live[i].ended:
                        continue
                del live[i]
                room += requests[i].sampling.n
        except Unavailable as e:
            if not self._closed:
                raise
            raise Unavailable(_CLOSED) from e
        finally:
            came = None  # an error holds this frame, and it holds the model
            handles.clear()
            for i in () if self._closed else live:
                self._replica.abort_named(requests[i].id, requests[i].tenant)

    def _submit(self, i: int, request: Request, inbox: _Inbox) -> Future[int]:
        def refused(submitted: Future[int]) -> None:
            if (error := submitted.exception()) is not None:
                inbox.put((i, error))

        submitted = self._replica.submit(request, lambda events: inbox.put((i, events)))
        submitted.add_done_callback(refused)
        return submitted

    def _receive(self, inbox: _Inbox) -> tuple[int, list[TokenEvent] | BaseException]:
        while True:
            try:
                return inbox.get(timeout=5.0)
            except queue.Empty:
                if (age := self._replica.heartbeat_age()) > _STALL_S:
                    raise Unavailable(f"the engine has not moved for {age:.0f} s") from None


def _close(replica: Replica, process: int) -> None:
    if os.getpid() != process:  # a fork's copy: the device and the files are the parent's
        return
    if threading.current_thread().name.startswith("jlora-"):  # a garbage collection runs on any thread
        threading.Thread(target=replica.close, name="jlora-close").start()  # none can wait for its own end
    else:
        replica.close()


def _completion(whole: Delta) -> Completion:
    return Completion(**{f.name: getattr(whole, f.name) for f in dataclasses.fields(Completion)})


def _settings(
    model: str | Path | None,
    adapters: Mapping[str, str | Path] | None,
    config: Config | Mapping[str, Any] | str | Path | None,
) -> Config:
    if not isinstance(config, Config):
        config = configs.load(config)
    changes: dict[str, Any] = {}
    if model is not None:
        changes["model.path"] = str(model)
    if adapters and not isinstance(adapters, Mapping):
        raise InvalidArgument(f"adapters: must be a dict, name -> directory, got {type(adapters).__name__}")
    if adapters:
        changes["adapters.paths"] = {**config.adapters.paths, **{name: str(p) for name, p in adapters.items()}}
    return configs.replace(config, changes)


def _prompt_list(prompts: Any) -> Sequence[Any]:
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidArgument(f"prompts: must be text, token ids or a list of them, got {type(prompts).__name__}")
    if prompts and all(isinstance(x, numbers.Number) for x in prompts):
        return [prompts]
    return prompts


def _for_each(field: str, value: Any, count: int) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise InvalidArgument(f"{field}: has {len(value)} entries, must have one for each of {count} prompts")
    return value
