"""KV of Hugging Face transformers models in the store: save a prompt's blocks, load the longest stored prefix.

    prefixes = PrefixCache(Client(), model)
    loaded = prefixes.load(input_ids)                # a DynamicCache that holds the first loaded.tokens tokens
    output = model.generate(input_ids, cache=loaded.cache)
    prefixes.save(output, loaded.cache)

or `prefixes.generate(input_ids, max_new_tokens=32)` for all of it. This module and kvclient._transformers_model alone
import torch and transformers.

A block holds the keys of all layers, then the values of all layers, each `(layers, kv_heads, tokens, head_dim)`: the
order of the cache's own tensors, with heads outside tokens, so that a part of the heads is made of whole runs of bytes.

Invariants
1. Only KV that depends on nothing but the weights and the tokens up to its own is stored. A model of another kind
   (sliding windows, recurrent states, RoPE that depends on the length, attention to later tokens) is refused when its
   PrefixCache is made, by looking at what it really caches; a prompt with images or sound in it is refused, too.
2. Two models share blocks only if their weights and their configuration are equal, bit by bit; or else by the word of
   whoever gives a `revision`.
3. At least one token of a prompt is left to compute: a loaded prefix never covers all of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers.cache_utils import DynamicCache

from kvclient._buffers import Segment, aligned_buffer
from kvclient._transformers_model import (
    KVShape,
    Tensors,
    cache_argument,
    config_digest,
    fill,
    measured,
    name_of,
    placeholders,
    weights_digest,
)
from kvclient.client import Client
from kvclient.results import StoreResult
from kvstore import prefix
from kvstore.block import Namespace
from kvstore.errors import KVStoreError, UsageError

# What is copied between the cache's tensors and blocks at a time; kept for the next time.
STAGING_BYTES = 128 << 20
# Blocks that are gathered together, as soon as one of them turns out to be wanted.
_GATHERED_TOGETHER = 16


@dataclass(frozen=True, slots=True)
class LoadedPrefix:
    """What `load` found.

    `cache` holds the KV of the prompt's first `tokens` tokens and is the caller's: give it to the model, which computes
    the rest. `failure` says why nothing could be asked of the daemon, if so.
    """

    cache: DynamicCache
    tokens: int
    failure: KVStoreError | None = None


class PrefixCache:
    """Saves and loads the KV of one model's prompts, one prompt at a time. Safe to use from several threads.

    Parameters
    ----------
    client : Client
        Remains the caller's. Its deadline and strictness hold for all calls.
    model : transformers.PreTrainedModel
        A decoder whose layers all attend to all earlier tokens, in eval mode. Two tokens are computed with it to see
        what it caches.
    block_tokens : int
        Tokens in a block. Only full blocks are stored.
    revision : str, optional
        Names the weights. By default they are digested, at 1 to 2 GB/s a core; whoever knows what they are (a commit
        of a hub, say) saves the time.
    adapter : str
        Name and version of a fine-tuning adapter that is active.
    salt : bytes
        Separates users that must not share blocks.
    ttl_s : float, optional
        Seconds that blocks live. Else the daemon's default.

    Raises
    ------
    UsageError
        The model's KV can't be cut into blocks that others could use.
    """

    def __init__(
        self,
        client: Client,
        model: Any,
        *,
        block_tokens: int = 16,
        revision: str | None = None,
        adapter: str = "",
        salt: bytes = b"",
        ttl_s: float | None = None,
    ) -> None:
        self._model = model
        self._shape = measured(model, adapter)
        config: dict[str, Any] = model.config.to_dict()
        revision = f"{revision or weights_digest(model)}/{config_digest(config)}"
        self.namespace = self._shape.namespace(name_of(model), revision, block_tokens, adapter, salt)
        self._blocks = client.namespace(self.namespace, ttl_s=ttl_s)
        self._placeholders = frozenset(placeholders(config))
        self._cache_argument = cache_argument(model)
        self._staging = Staging(self._shape, self.namespace)

    def load(self, input_ids: Any, *, wait_s: float = 0.0, max_ms: float | None = None) -> LoadedPrefix:
        """Return a fresh cache with the longest stored prefix of a prompt.

        Parameters
        ----------
        input_ids : sequence of int, or tensor
            The prompt's tokens, in a tensor of shape (tokens,) or (1, tokens).
        wait_s : float
            How long to wait for blocks that another process is still computing.
        max_ms : float, optional
            What can't be loaded within this time counts as a miss: how long computing it would take.
        """
        tokens = self._tokens(input_ids)
        size = self.namespace.block_tokens
        hashes = self.hashes(tokens)[: max(0, len(tokens) - 1) // size]
        destination: list[Tensors] = []
        found, failure = 0, None
        began_at = time.monotonic()
        for window in self._staging.windows(len(hashes)):
            wanted = hashes[window.start : window.stop]
            into = self._staging.buffer(len(wanted))
            gone_s = time.monotonic() - began_at
            left_s = max(0.0, wait_s - gone_s)
            left_ms = None if max_ms is None else max(0.0, max_ms - gone_s * 1e3)
            result = self._blocks.fetch(wanted, into, run=True, wait_s=left_s, max_ms=left_ms)
            if result.hits and not destination:
                destination = self._shape.empty(len(hashes) * size)
            self._staging.scatter(destination, window.start, result.hits)
            found += result.hits
            failure = result.failure
            if result.hits < len(wanted):
                break
        cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        if found:
            fill(cache, [(keys[:, :, : found * size], values[:, :, : found * size]) for keys, values in destination])
        return LoadedPrefix(cache, found * size, failure)

    def save(self, input_ids: Any, cache: DynamicCache, *, durable: bool = False) -> StoreResult:
        """Store the full blocks of a prompt that `cache` holds; returns what became of each.

        Blocks that are in the store already are not copied.

        Parameters
        ----------
        input_ids : sequence of int, or tensor
            The tokens that the cache was computed from. Further ones do no harm: the last generated token is not in it.
        cache : DynamicCache
            What the model was given, or has returned.
        durable : bool
            Return only when the blocks are on the ssd tier for good.
        """
        tensors = self._shape.tensors_of(cache)
        tokens = self._tokens(input_ids)[: tensors[0][0].shape[2] if tensors else 0]
        hashes = self.hashes(tokens)
        raw, failure = b"", None
        for window in self._staging.windows(len(hashes)):
            wanted = hashes[window.start : window.stop]
            sources = _GatheredLate(self._staging, tensors, window)
            result = self._blocks.store(wanted, sources, durable=durable)
            raw += result.raw
            if result.failure is not None:
                failure = result.failure
                raw += result.raw[-1:] * (len(hashes) - len(raw))
                break
        return StoreResult(raw, failure)

    def generate(self, input_ids: Any, *, wait_s: float = 0.0, max_ms: float | None = None, **arguments: Any) -> Any:
        """Return what `model.generate` returns for one prompt: load, generate, save.

        Parameters
        ----------
        input_ids, wait_s, max_ms
            As in `load`.
        **arguments
            Further arguments of the model's `generate`.
        """
        self._check_generate(arguments)
        loaded = self.load(input_ids, wait_s=wait_s, max_ms=max_ms)
        prompt = torch.tensor([self._tokens(input_ids)], device=self._model.device)
        arguments[self._cache_argument] = loaded.cache
        arguments.setdefault("attention_mask", torch.ones_like(prompt))
        output = self._model.generate(prompt, **arguments)
        sequences: torch.Tensor = output if isinstance(output, torch.Tensor) else output.sequences
        self.save(sequences, loaded.cache)
        return output

    def hashes(self, input_ids: Any) -> list[bytes]:
        """Return the block hashes of a prompt's full blocks."""
        return list[bytes](prefix.chain(self.namespace.digest, self._tokens(input_ids), self.namespace.block_tokens))

    def _tokens(self, input_ids: Any) -> list[int]:
        if isinstance(input_ids, torch.Tensor):
            if input_ids.dim() == 2 and input_ids.shape[0] == 1:
                input_ids = input_ids[0]
            if input_ids.dim() != 1:
                raise UsageError(
                    f"input_ids of shape {tuple(input_ids.shape)}: give one prompt at a time, without padding"
                )
            tokens = cast("list[int]", cast("Any", input_ids).tolist())
        else:
            tokens = list(cast("Sequence[int]", input_ids))
        if self._placeholders and (strange := self._placeholders.intersection(tokens)):
            raise UsageError(
                f"the prompt holds placeholders {sorted(strange)} of images, video or sound, on which its KV depends "
                "and its token ids do not: compute it without the store"
            )
        return tokens

    def _check_generate(self, arguments: dict[str, Any]) -> None:
        settings = arguments.get("generation_config") or self._model.generation_config
        for name in ("num_beams", "num_return_sequences"):
            if (arguments.get(name) or getattr(settings, name, None) or 1) > 1:
                raise UsageError(f"{name} is over 1: generate one sequence a prompt, or use load and save around it")
        if taken := {"cache", "past_key_values", "inputs_embeds", "use_cache"} & set(arguments):
            raise UsageError(f"{', '.join(sorted(taken))} can't be given here: use load and save around model.generate")
        mask = arguments.get("attention_mask")
        if mask is not None and not bool(torch.as_tensor(mask).all()):
            raise UsageError("attention_mask hides tokens, so the KV is not the prompt's: give it without padding")


class Staging(threading.local):
    """Memory between the cache's tensors and the store, where blocks are whole; each thread has its own.

    Cutting a block out of all layers straight into the pool would take a copy for each run of a few KiB. Gathered here,
    a window of blocks takes one strided copy a tensor, by as many threads as torch has, and one copy a block.
    """

    def __init__(self, shape: KVShape, namespace: Namespace) -> None:
        self._shape = shape
        self._namespace = namespace
        self._block_bytes = namespace.block_bytes
        self._blocks_max = max(1, STAGING_BYTES // self._block_bytes)
        self._memory = memoryview(b"")

    def windows(self, count: int) -> Iterator[range]:
        """Yield the positions of `count` blocks, in order, cut so that the memory is never over its limit."""
        for start in range(0, count, self._blocks_max):
            yield range(start, min(count, start + self._blocks_max))

    def buffer(self, count: int) -> memoryview:
        """Return room for `count` blocks; it is the same memory each time."""
        if self._memory.nbytes < count * self._block_bytes:
            self._memory = aligned_buffer(count * self._block_bytes)
        return self._memory[: count * self._block_bytes]

    def gather(self, tensors: list[Tensors], first: int, at: range) -> None:
        """Copy the blocks from number `first` on out of the tensors, to the places `at`."""
        packed = self._packed(at)
        whole = packed.to(tensors[0][0].device)
        for layer, layer_tensors in enumerate(tensors):
            for blocks, tensor in zip(self._by_layer(whole, layer), layer_tensors, strict=True):
                blocks.copy_(self._cut(tensor, first, len(at)))
        if whole is not packed:
            packed.copy_(whole)

    def scatter(self, tensors: list[Tensors], first: int, count: int) -> None:
        """Copy the first `count` blocks of the buffer into the tensors, from block number `first` on."""
        if not count:
            return
        whole = self._packed(range(count)).to(tensors[0][0].device)
        for layer, layer_tensors in enumerate(tensors):
            for blocks, tensor in zip(self._by_layer(whole, layer), layer_tensors, strict=True):
                self._cut(tensor, first, count).copy_(blocks)

    def segment(self, place: int) -> Segment:
        """Return where the block at `place` of the buffer is."""
        return self._packed(range(place, place + 1)).data_ptr(), self._block_bytes

    def _packed(self, at: range) -> torch.Tensor:
        """Return the blocks at some places as (blocks, elements)."""
        memory = self._memory[at.start * self._block_bytes : at.stop * self._block_bytes]
        return torch.frombuffer(memory, dtype=self._shape.dtype).view(len(at), -1)

    def _by_layer(self, packed: torch.Tensor, layer: int) -> Iterator[torch.Tensor]:
        """Yield a layer's keys, then its values, as (blocks, heads, tokens, dim)."""
        start = 0
        for component in self._namespace.held:
            end = start + component.size_bytes // packed.element_size()
            yield packed[:, start:end].view(-1, *component.shape)[:, layer]
            start = end

    def _cut(self, tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """Return a part of a layer's keys or values as (blocks, heads, tokens, dim)."""
        size = self._namespace.block_tokens
        part = tensor[0, :, first * size : (first + count) * size]
        return part.view(part.shape[0], count, size, part.shape[2]).transpose(0, 1)


class _GatheredLate:
    """A window of blocks that is gathered when the client asks where they are: those already stored never are."""

    def __init__(self, staging: Staging, tensors: list[Tensors], window: range) -> None:
        self.count = len(window)
        self._staging = staging
        self._tensors = tensors
        self._window = window
        self._gathered: set[int] = set()
        staging.buffer(self.count)

    def segments(self, position: int) -> Sequence[Segment]:
        """Return where a block's bytes are."""
        start = position - position % _GATHERED_TOGETHER
        if start not in self._gathered:
            self._gathered.add(start)
            at = range(start, min(self.count, start + _GATHERED_TOGETHER))
            self._staging.gather(self._tensors, self._window.start + start, at)
        return (self._staging.segment(position),)
