"""Futures that the replica's threads hand to each other, and what may happen to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from jlora.errors import Unavailable

S = TypeVar("S")
T = TypeVar("T")


class BetweenSteps(Protocol):
    """Runs a command on the engine's thread, between two steps."""

    def __call__(self, command: Callable[[], T]) -> Future[T]: ...


class Commands:
    """Commands for another thread, first in, first out; any thread may call.

    One that its caller cancels leaves at once: it may hold a long prompt.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[Future, Callable[[], object]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, command: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._waiting[future] = command
        future.add_done_callback(self._drop)
        return future

    def take(self) -> tuple[Future, Callable[[], object]] | None:
        """The first one, for `settle`; None if there is none."""
        try:
            return self._waiting.popitem(last=False)
        except KeyError:
            return None

    def _drop(self, ended: Future) -> None:
        if ended.cancelled():
            self._waiting.pop(ended, None)


@dataclass(slots=True)
class Wait:
    """A future that a look on the engine's thread answers once it finds something."""

    look: Callable[[], object | None]
    future: Future

    def answered(self) -> bool:
        try:
            found = self.look()
        except Exception as e:
            self.future.set_exception(e)
            return True
        if found is not None:
            self.future.set_result(found)
        return found is not None


def done(result: T) -> Future[T]:
    """A future that has its result."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


def failed(error: Exception) -> Future[Any]:
    """A future that has failed."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def running() -> Future[Any]:
    """A future that its caller can no longer cancel."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def settle(future: Future, command: Callable[[], object]) -> Exception | None:
    """Runs a command into its future, unless its caller has cancelled it; what it has failed with.

    What ends a thread (SystemExit and its like) is raised again: it ends the replica, and the caller is
    told what all others are.
    """
    if not future.set_running_or_notify_cancel():
        return None
    try:
        result = command()
    except Exception as e:
        future.set_exception(e)
        return e
    except BaseException as e:
        future.set_exception(Unavailable(f"the engine ends: {type(e).__name__}: {e}"))
        raise
    else:
        future.set_result(result)
        return None
    finally:
        del future, command  # the error's traceback holds this frame: a cycle


def chained(first: Future[S], then: Callable[[S], Future[T]]) -> Future[T]:
    """The result of `then`, which starts when `first` has its own."""
    whole = running()

    def go_on(ended: Future[S]) -> None:
        if (error := failure_of(ended)) is not None:
            whole.set_exception(error)
            return
        try:
            follow(then(ended.result()), whole)
        except Exception as e:
            whole.set_exception(e)

    first.add_done_callback(go_on)
    return whole


def error_of(error: BaseException) -> Exception:
    """The error as its receiver may raise it: SystemExit and its like would end the receiver's thread, too."""
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


def follow(source: Future, target: Future) -> None:
    """Gives `target` the result of `source` when it is there."""

    def copy(ended: Future) -> None:
        if (error := failure_of(ended)) is not None:
            target.set_exception(error)
        else:
            target.set_result(ended.result())

    source.add_done_callback(copy)


def failure_of(ended: Future) -> Exception | None:
    """What a future that has ended failed with, an Exception in any case; None if it has a result.

    Who passes it on does not raise it: its traceback would hold the frame, and the frame the next future, a cycle.
    """
    if ended.cancelled():
        return Unavailable("the server has stopped")
    return None if (error := ended.exception()) is None else error_of(error)


def result_of(ended: Future[T]) -> T:
    """The result of a future that has ended; raises `failure_of` it."""
    if (error := failure_of(ended)) is not None:
        raise error
    return ended.result()
