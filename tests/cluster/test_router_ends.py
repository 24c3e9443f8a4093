"""Tasks and threads of a router: the end of any of them is the router's failure, never a silent lack."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jlora.cluster.remote_directory import RemoteDirectory
from jlora.ports import OsThreads
from jlora.serve.client import Login
from tests.cluster import _port as port
from tests.cluster._links import Service, service, wait_for


@pytest.fixture
def one() -> Iterator[Service]:
    with service(1) as made:
        yield made


def test_a_task_that_fails_or_ends_is_the_routers_failure(one: Service):
    async def ends() -> None:
        pass

    async def start() -> None:
        port.task(one.router, "balance", ends())

    one.loop.run(start())
    assert "the task 'balance' has ended" in str(one.router.failure.result(20))


def test_a_link_that_ends_by_itself_is_the_routers_failure(one: Service):
    (link,) = port.dispatcher(one.router).links.values()

    async def end() -> None:
        port.cancel(link)

    one.loop.run(end())
    assert "the link to replica r0 has ended by itself" in str(one.router.failure.result(20))


def test_closing_is_no_failure():
    with service(1) as made:
        router = made.router
    assert not router.failure.done()


def test_the_end_of_a_directorys_thread_is_told(monkeypatch: pytest.MonkeyPatch):
    def fails(self: RemoteDirectory) -> None:
        raise SystemExit(1)

    monkeypatch.setattr(*port.follows_by(), fails)
    threads, ended = OsThreads(), []
    threads.watch(lambda name, error: ended.append(name))
    directory = RemoteDirectory("127.0.0.1:1", "r", Login(), threads)
    directory.start()
    wait_for(lambda: ended)
    assert ended == ["jlora-directory"]
    directory.close()
