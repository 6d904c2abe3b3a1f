"""Waiting for what can't be stopped: cancellation is delivered only when nothing runs any more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")


async def finished(future: asyncio.Future[_T]) -> _T:
    """Return the future's result; cancellation is delivered only after it is done."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        raise cancelled
    return future.result()


async def all_finished(calls: Sequence[Future[Any]]) -> None:
    """Wait for calls in threads; cancellation is delivered when those that had begun have ended, too."""
    waiting = [asyncio.wrap_future(call) for call in calls]
    try:
        if waiting:
            await asyncio.wait(waiting)
    except asyncio.CancelledError:
        for call in calls:
            call.cancel()
        while pending := [future for future in waiting if not future.done()]:
            try:
                await asyncio.wait(pending)
            except asyncio.CancelledError:
                continue
        raise
