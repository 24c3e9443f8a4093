"""Clients of a study's server: connections of their own, how calls end, and a second process to call from."""

from __future__ import annotations

import multiprocessing
from collections.abc import Awaitable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import grpc

OWN = ("grpc.use_local_subchannel_pool", 1)
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**16))  # a window that does not grow


def connection(address: str, *options: tuple[str, int]) -> grpc.aio.Channel:
    """A channel that shares its connection with no other."""
    return grpc.aio.insecure_channel(address, options=[OWN, *options])


async def status_of(call: Awaitable[Any]) -> str:
    """Awaits a call; "OK", or the status with which it failed."""
    try:
        await call
    except grpc.aio.AioRpcError as e:
        return e.code().name
    return "OK"


def second_process() -> ProcessPoolExecutor:
    """One worker in a fresh process, which neither shares this one's interpreter nor its memory."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
