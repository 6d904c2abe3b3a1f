"""What all parts of a running daemon share: its settings, its store, who is connected, and whether it is closing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from kvstore.lease import Session
from kvstore.store import Store
from kvstored.config import Settings


@dataclass(eq=False)
class Node:
    """One life of the daemon; `boot_id` tells it from another."""

    settings: Settings
    store: Store
    boot_id: bytes
    tasks: asyncio.TaskGroup
    http: str | None = None  # where it really listens
    closing: bool = False
    sessions: set[Session] = field(default_factory=set[Session])

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine beside everything else; it is cancelled and waited for when the daemon closes."""
        return self.tasks.create_task(work)
