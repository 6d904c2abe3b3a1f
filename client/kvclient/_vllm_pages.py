"""Moves blocks between an engine's pages and the store: straight to host memory, to devices over pinned memory.

Theory of operation. Host pages are gathered and scattered by `PagedKV`, with no copy in between. Device pages are
gathered to one contiguous piece a block in pinned host memory, on a stream of their own and behind whatever the engine
had queued, and the client copies from there. Loads go the other way. A layerwise store gathers each layer as soon as
its hook is called, to the same kind of memory, whatever the kind of pages.

Invariants
1. A block's bytes are the same on all of these ways.
2. When `fetch` returns, nothing writes to the pages any more; when `Source.store` returns, nothing reads them.
3. Staging memory is at most `STAGING_BYTES` a thread, and the same for all layerwise stores together.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from kvclient._buffers import aligned_buffer
from kvclient._vllm_errors import Unsupported
from kvclient._vllm_layout import Layout
from kvclient.client import NamespaceHandle
from kvclient.paged import PagedKV
from kvclient.results import FetchResult, StoreResult
from kvstore.wire import Outcome

STAGING_BYTES = 256 << 20
_ABSENT = bytes([Outcome.ABSENT])


class Source(Protocol):
    """Blocks that are to be stored, wherever they are now."""

    def store(self, handle: NamespaceHandle, hashes: Sequence[bytes], deadline_s: float) -> StoreResult: ...


class Pages:
    """The pages of one rank, a tensor a layer."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], layout: Layout) -> None:
        self._tensors = [tensors[name] for name in layout.layers]
        self._layout = layout
        self._places = {name: place for place, name in enumerate(layout.layers)}
        self._views = [
            tensor.permute(layout.page_axis, *order) for tensor, order in zip(self._tensors, layout.orders, strict=True)
        ]
        sizes = [view[0].numel() * view.element_size() * layout.pages_per_block for view in self._views]
        self._bounds = list(itertools.accumulate(sizes, initial=0))
        self._device = self._tensors[0].device
        self.on_host = self._device.type == "cpu"
        if self._device.type not in ("cpu", "cuda"):
            raise Unsupported(f"its KV is in the memory of a {self._device.type}, neither the host's nor a GPU's")
        self._own = threading.local()
        self._lock = threading.Lock()
        self._layerwise_bytes = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self._bounds[-1]

    def fetch(
        self,
        handle: NamespaceHandle,
        hashes: Sequence[bytes],
        pages: Sequence[int],
        *,
        ready: torch.cuda.Event | None,
        deadline_s: float,
    ) -> FetchResult:
        """Load blocks into pages, behind what was queued at `ready`.

        The daemon has counted them when they were looked up.
        """
        if self.on_host:
            return handle.fetch(hashes, self._paged(pages), count=False, deadline_s=deadline_s)
        raw, failure, window = b"", None, self._window
        for start in range(0, len(hashes), window):
            part = pages[start : start + window]
            memory = self._staging(len(part))
            result = handle.fetch(
                hashes[start : start + window], _buffers(memory), count=False, deadline_s=deadline_s
            )
            raw, failure = raw + result.raw, result.failure
            self._scatter(memory[: result.hits], part[: result.hits], ready)
            if result.hits < len(part):
                break
        return FetchResult(raw.ljust(len(hashes), _ABSENT), failure)

    def source(self, pages: Sequence[int]) -> Source:
        """Return pages as they are behind what the engine has queued so far; to be called on the engine's thread."""
        if self.on_host:
            return _HostPages(self._paged(pages))
        return _DevicePages(self, list(pages), self.queued())

    def layerwise(self, pages: Sequence[int]) -> LayerwiseSource | None:
        """Return what takes pages layer by layer; None if there is no memory for that now."""
        size = len(pages) * self.block_bytes
        with self._lock:
            if self._layerwise_bytes + size > STAGING_BYTES:
                return None
            self._layerwise_bytes += size
        source = LayerwiseSource(self, list(pages), self._memory(len(pages)))
        weakref.finalize(source, self._give_back, size)  # stored, dropped or never used: it ends with its owner
        return source

    def gather(self, memory: torch.Tensor, pages: Sequence[int], place: int) -> None:
        """Copy one layer of some pages to their blocks in staging memory."""
        self._layer_of(memory, place).copy_(self._views[place][self._index(pages)], non_blocking=True)

    def queued(self) -> torch.cuda.Event | None:
        """Return the end of what the engine's thread has queued so far on the device; None without one."""
        if self.on_host:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def place_of(self, layer: str) -> int | None:
        """Return a layer's place in a block; None if it has no tensor of its own."""
        return self._places.get(layer)

    @property
    def layer_count(self) -> int:
        """How many layers have tensors of their own."""
        return len(self._views)

    def store_from_device(
        self,
        handle: NamespaceHandle,
        hashes: Sequence[bytes],
        pages: Sequence[int],
        ready: torch.cuda.Event | None,
        deadline_s: float,
    ) -> StoreResult:
        """Store device pages, once the engine's work up to `ready` is done."""
        raw, failure, window = b"", None, self._window
        stream = self._stream()
        if ready is not None:
            stream.wait_event(ready)
        for start in range(0, len(hashes), window):
            part = pages[start : start + window]
            memory = self._staging(len(part))
            with torch.cuda.stream(stream):
                for place in range(self.layer_count):
                    self.gather(memory, part, place)
            stream.synchronize()
            result = handle.store(hashes[start : start + window], _buffers(memory), deadline_s=deadline_s)
            raw, failure = raw + result.raw, failure or result.failure
        return StoreResult(raw, failure)

    def _give_back(self, size_bytes: int) -> None:
        with self._lock:
            self._layerwise_bytes -= size_bytes

    def _paged(self, pages: Sequence[int]) -> PagedKV:
        count, axis = self._layout.pages_per_block, self._layout.page_axis
        if count == 1:
            return PagedKV(self._tensors, pages, page_axis=axis)
        return PagedKV(self._tensors, [range(page * count, (page + 1) * count) for page in pages], page_axis=axis)

    @property
    def _window(self) -> int:
        return max(1, STAGING_BYTES // self.block_bytes)

    def _memory(self, count: int) -> torch.Tensor:
        """Return host memory for some blocks, as (blocks, bytes)."""
        if self.on_host:
            memory = torch.frombuffer(aligned_buffer(count * self.block_bytes), dtype=torch.uint8)
        else:
            memory = torch.empty(count * self.block_bytes, dtype=torch.uint8, pin_memory=True)
        return memory.view(count, self.block_bytes)

    def _staging(self, count: int) -> torch.Tensor:
        """Return this thread's own staging memory for some blocks."""
        memory: torch.Tensor | None = getattr(self._own, "memory", None)
        if memory is None or len(memory) < count:
            memory = self._own.memory = self._memory(count)
        return memory[:count]

    def _stream(self) -> torch.cuda.Stream:
        stream: torch.cuda.Stream | None = getattr(self._own, "stream", None)
        if stream is None:
            stream = self._own.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return stream

    def _scatter(self, memory: torch.Tensor, pages: Sequence[int], ready: torch.cuda.Event | None) -> None:
        if not pages:
            return
        stream = self._stream()
        if ready is not None:
            stream.wait_event(ready)
        with torch.cuda.stream(stream):
            whole = memory.to(self._device, non_blocking=True)
            index = self._index(pages)
            for place, view in enumerate(self._views):
                view[index] = self._layer_of(whole, place)
        stream.synchronize()

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        """Return the numbers of blocks' pages in the tensors, as (blocks, pages a block)."""
        count = self._layout.pages_per_block
        numbers = [range(page * count, (page + 1) * count) for page in pages]
        return torch.tensor([list(some) for some in numbers], device=self._device)

    def _layer_of(self, memory: torch.Tensor, place: int) -> torch.Tensor:
        """Return a layer's part of blocks in staging memory, as (blocks, pages a block, axes of a page)."""
        view = self._views[place]
        part = memory[:, self._bounds[place] : self._bounds[place + 1]].view(view.dtype)
        return part.view(len(memory), self._layout.pages_per_block, *view.shape[1:])


class _HostPages:
    def __init__(self, pages: PagedKV) -> None:
        self._pages = pages

    def store(self, handle: NamespaceHandle, hashes: Sequence[bytes], deadline_s: float) -> StoreResult:
        return handle.store(hashes, self._pages, deadline_s=deadline_s)


class _DevicePages:
    def __init__(self, pages: Pages, numbers: list[int], ready: torch.cuda.Event | None) -> None:
        self._pages = pages
        self._numbers = numbers
        self._ready = ready

    def store(self, handle: NamespaceHandle, hashes: Sequence[bytes], deadline_s: float) -> StoreResult:
        return self._pages.store_from_device(handle, hashes, self._numbers, self._ready, deadline_s)


class LayerwiseSource:
    """Blocks that are copied aside layer by layer, on the engine's thread, and stored from there."""

    def __init__(self, pages: Pages, numbers: list[int], memory: torch.Tensor) -> None:
        self._pages = pages
        self._numbers = numbers
        self.memory = memory
        self._left = set(range(pages.layer_count))
        self._copied: torch.cuda.Event | None = None

    def take(self, layer: str) -> None:
        """Copy one layer."""
        place = self._pages.place_of(layer)
        if place in self._left:
            self._left.discard(place)
            self._pages.gather(self.memory, self._numbers, place)

    def finish(self) -> None:
        """Copy the layers whose hook was not called."""
        for place in sorted(self._left):
            self._pages.gather(self.memory, self._numbers, place)
        self._left.clear()
        self._copied = self._pages.queued()

    def store(self, handle: NamespaceHandle, hashes: Sequence[bytes], deadline_s: float) -> StoreResult:
        if self._copied is not None:
            self._copied.synchronize()
        return handle.store(hashes, _buffers(self.memory), deadline_s=deadline_s)


def _buffers(memory: torch.Tensor) -> list[torch.Tensor]:
    """Return each block of staging memory as a buffer."""
    return list(memory.unbind())
