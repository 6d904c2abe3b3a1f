"""What a block is: its namespace (everything that changes its bytes), its hash, its shape and size.

Invariants
1. Two namespaces have the same digest only if every field that changes a block's bytes is equal. The encoding is
   typed and length-prefixed, so no two different values share one encoding.
2. A missing or an unknown field is refused, never defaulted, when a namespace arrives as bytes.
3. Python's own `hash()` takes no part in any identity: digests are the same in every process and on every machine.
4. A namespace splits into a group (all fields but the slice) and a slice. Slices of one group describe parts of one
   block, so shapes are written for the whole model and narrowed by the slice.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NewType

from kvstore.errors import BadKey, BadNamespace

BlockHash = NewType("BlockHash", bytes)

BLOCK_HASH_BYTES = 32
BLOCK_BYTES_MAX = 1 << 30
_NUMBER_MAX = (1 << 63) - 1  # what the canonical encoding has room for
_DIGEST_DOMAIN = b"kvstored/namespace/1"
_FOREIGN_HASH_DOMAIN = b"kvstored/foreign-block-hash/1"
_AXES = frozenset({"layer", "kv", "token", "head", "dim"})
_DTYPE_BITS = {
    "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "uint8": 8, "int4": 4, "uint4": 4,
    "float8_e4m3": 8, "float8_e5m2": 8, "float4_e2m1": 4,
}  # fmt: skip


def block_hash(raw: bytes) -> BlockHash:
    """Return the 32-byte block hash for an engine's own chained hash of 8 to 64 bytes.

    A hash of 32 bytes is taken as it is; another length is mapped by SHA-256 under a domain of its own.
    """
    if len(raw) == BLOCK_HASH_BYTES:
        return BlockHash(bytes(raw))
    if not 8 <= len(raw) <= 64:
        raise BadKey(
            f"a block hash has 8 to 64 bytes, not {len(raw)}: give the engine's chained hash or use kvstore.prefix"
        )
    return BlockHash(hashlib.sha256(_FOREIGN_HASH_DOMAIN + bytes([len(raw)]) + raw).digest())


@dataclass(frozen=True, slots=True)
class BlockKey:
    """A block's full identity: the namespace's digest and the block hash."""

    namespace: bytes
    hash: BlockHash

    def __post_init__(self) -> None:
        for name, part in (("namespace digest", self.namespace), ("block hash", self.hash)):
            if len(part) != 32:
                raise BadKey(f"the {name} of a block key has 32 bytes, not {len(part)}")


@dataclass(frozen=True, slots=True)
class Component:
    """One tensor inside a block, shaped for the whole model.

    `axes` names each axis of `shape`, outermost first, out of layer, kv, token, head and dim. A component without a
    head axis (MLA's latent) is the same on every rank that holds its layers.
    """

    name: str
    dtype: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape) or len(set(self.axes)) != len(self.axes) or not self.axes:
            raise BadNamespace(
                f"component {self.name!r}: axes {self.axes} and shape {self.shape} must name the same axes once each"
            )
        if unknown := set(self.axes) - _AXES:
            raise BadNamespace(f"component {self.name!r}: unknown axes {sorted(unknown)}; known are {sorted(_AXES)}")
        if any(extent <= 0 for extent in self.shape):
            raise BadNamespace(f"component {self.name!r}: every extent of shape {self.shape} must be positive")
        if self.dtype not in _DTYPE_BITS:
            raise BadNamespace(
                f"component {self.name!r}: unknown dtype {self.dtype!r}; known are {', '.join(sorted(_DTYPE_BITS))}"
            )

    def extent(self, axis: str, default: int = 1) -> int:
        """Return the length of `axis`, or `default` where the component does not have it."""
        return self.shape[self.axes.index(axis)] if axis in self.axes else default

    def narrowed(self, layers: range, heads: range) -> Component:
        """Return this component cut down to some layers and heads."""
        cut = {"layer": len(layers), "head": len(heads)}
        shape = tuple(cut.get(axis, extent) for axis, extent in zip(self.axes, self.shape, strict=True))
        return replace(self, shape=shape)

    @property
    def size_bytes(self) -> int:
        bits = math.prod(self.shape) * _DTYPE_BITS[self.dtype]
        if bits % 8:
            raise BadNamespace(f"component {self.name!r} of shape {self.shape} does not fill whole bytes")
        return bits // 8


@dataclass(frozen=True, slots=True)
class Slice:
    """The half-open ranges of layers and kv heads that one rank holds."""

    layers: tuple[int, int]
    heads: tuple[int, int]

    @staticmethod
    def of_rank(
        *, layers: int, heads: int, tp_size: int = 1, tp_rank: int = 0, pp_size: int = 1, pp_rank: int = 0
    ) -> Slice:
        """Return what rank (`tp_rank`, `pp_rank`) holds when layers and heads are dealt out evenly and contiguously.

        With fewer heads than ranks, neighbouring ranks hold the same head, as tensor-parallel engines replicate it.
        """
        if not (0 <= tp_rank < tp_size and 0 <= pp_rank < pp_size):
            raise BadNamespace(f"rank tp {tp_rank}/{tp_size}, pp {pp_rank}/{pp_size} does not exist")
        if (heads % tp_size if heads >= tp_size else tp_size % heads) or layers % pp_size:
            raise BadNamespace(
                f"{heads} heads over tp {tp_size} or {layers} layers over pp {pp_size} do not divide evenly: "
                "give the slice explicitly"
            )
        per_stage = layers // pp_size
        first_head = tp_rank * heads // tp_size
        held = max(1, heads // tp_size)
        return Slice((pp_rank * per_stage, (pp_rank + 1) * per_stage), (first_head, first_head + held))


@dataclass(frozen=True)
class Namespace:
    """Everything that changes a block's bytes. Its tenant is added by the daemon, from the caller's credential.

    Parameters
    ----------
    model, revision : str
        Which weights: a name and the revision (commit, version, or a digest of the weights).
    dtype : str
        What the engine computes and stores KV in, with its quantisation, e.g. "bfloat16" or "fp8:per-tensor".
    components : tuple of Component
        The tensors inside a block, in the order of their bytes, shaped for the whole model.
    block_tokens : int
        Tokens in a block.
    slice : Slice
        The layers and heads held by this rank.
    adapter : str
        Adapter and its version, "" for none.
    salt : bytes
        Separates users or experiments that must not share blocks.

    Attributes
    ----------
    held : tuple of Component
        The components as this slice holds them, in the order of their bytes in a block.
    block_bytes : int
        Bytes of one block of this slice.
    digest : bytes
        The 32 bytes that stand for this namespace.
    group_digest : bytes
        The 32 bytes shared by all slices of the same blocks.
    """

    model: str
    revision: str
    dtype: str
    components: tuple[Component, ...]
    block_tokens: int
    slice: Slice
    adapter: str = ""
    salt: bytes = field(default=b"", repr=False)
    # What follows from the fields above, computed once: a lazy property of Python 3.11 takes a lock that a forked child
    # can find held for ever.
    held: tuple[Component, ...] = field(init=False, repr=False, compare=False)
    block_bytes: int = field(init=False, repr=False, compare=False)
    digest: bytes = field(init=False, repr=False, compare=False)
    group_digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.model or not self.revision or not self.dtype:
            raise BadNamespace(
                "model, revision and dtype must not be empty: blocks of different weights would be mixed up"
            )
        if not self.components:
            raise BadNamespace("a namespace needs at least one component: describe the tensors inside a block")
        if self.block_tokens <= 0:
            raise BadNamespace(f"block_tokens must be positive, not {self.block_tokens}")
        if max(self.block_tokens, *self.slice.layers, *self.slice.heads) > _NUMBER_MAX:
            raise BadNamespace(f"block_tokens and the ends of the slice are at most {_NUMBER_MAX}")
        for component in self.components:
            self._check_fits(component)
        self._derive()
        if self.block_bytes > BLOCK_BYTES_MAX:
            raise BadNamespace(f"a block of {self.block_bytes} bytes is over the limit of {BLOCK_BYTES_MAX} bytes")

    def _derive(self) -> None:
        layers, heads = range(*self.slice.layers), range(*self.slice.heads)
        held = tuple(component.narrowed(layers, heads) for component in self.components)
        grouped = [pair for pair in self._fields() if pair[0] != "slice"]
        derived = {
            "held": held,
            "block_bytes": sum(component.size_bytes for component in held),
            "digest": hashlib.sha256(self.encode()).digest(),
            "group_digest": hashlib.sha256(_DIGEST_DOMAIN + b"/group" + _encode(grouped)).digest(),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def _check_fits(self, component: Component) -> None:
        if component.extent("token", self.block_tokens) != self.block_tokens:
            raise BadNamespace(f"component {component.name!r} does not hold block_tokens={self.block_tokens} tokens")
        for axis, (first, end) in (("layer", self.slice.layers), ("head", self.slice.heads)):
            if not 0 <= first < end or (axis in component.axes and end > component.extent(axis)):
                raise BadNamespace(
                    f"slice {axis}s [{first}, {end}) is not inside component {component.name!r}'s "
                    f"{component.extent(axis)} {axis}s"
                )

    def with_slice(self, part: Slice) -> Namespace:
        """Return the namespace of another slice of the same group."""
        return replace(self, slice=part)

    def encode(self) -> bytes:
        """Return the canonical encoding: what `digest` is taken over and what the daemon is told."""
        return _DIGEST_DOMAIN + _encode(self._fields())

    @staticmethod
    def decode(encoded: bytes) -> Namespace:
        """Return the namespace that `encoded` stands for; anything missing, unknown or left over is refused."""
        if not encoded.startswith(_DIGEST_DOMAIN):
            raise BadNamespace("not the encoding of a namespace, or one of another version of this project")
        try:
            value, end = _decode(encoded, len(_DIGEST_DOMAIN))
        except (IndexError, struct.error, UnicodeDecodeError, RecursionError) as exc:
            raise BadNamespace("the encoding of a namespace is cut off or malformed") from exc
        if end != len(encoded):
            raise BadNamespace("bytes are left over behind the encoding of a namespace")
        namespace = Namespace.from_mapping(_as_mapping(value))
        if namespace.encode() != encoded:
            raise BadNamespace("the encoding of a namespace is not the canonical one")
        return namespace

    @staticmethod
    def from_mapping(fields: Mapping[str, Any]) -> Namespace:
        """Return the namespace with exactly these fields, as nested plain lists, strings, numbers and bytes."""
        expected = {"model", "revision", "dtype", "components", "block_tokens", "slice", "adapter", "salt"}
        if missing := expected - set(fields):
            raise BadNamespace(f"namespace lacks {sorted(missing)}: each of them changes a block's bytes")
        if unknown := set(fields) - expected:
            raise BadNamespace(f"namespace has unknown fields {sorted(unknown)}; is the client newer than the daemon?")
        try:
            components = tuple(
                Component(_text(name), _text(dtype), tuple(map(_text, axes)), tuple(map(_number, shape)))
                for name, dtype, axes, shape in fields["components"]
            )
            layers, heads = fields["slice"]
            part = Slice((_number(layers[0]), _number(layers[1])), (_number(heads[0]), _number(heads[1])))
            return Namespace(
                model=_text(fields["model"]),
                revision=_text(fields["revision"]),
                dtype=_text(fields["dtype"]),
                components=components,
                block_tokens=_number(fields["block_tokens"]),
                slice=part,
                adapter=_text(fields["adapter"]),
                salt=_raw(fields["salt"]),
            )
        except (TypeError, ValueError, IndexError) as exc:
            raise BadNamespace(f"a field of the namespace has the wrong type: {exc}") from exc

    def _fields(self) -> list[tuple[str, Any]]:
        components = [[c.name, c.dtype, list(c.axes), list(c.shape)] for c in self.components]
        return [
            ("model", self.model),
            ("revision", self.revision),
            ("dtype", self.dtype),
            ("components", components),
            ("block_tokens", self.block_tokens),
            ("slice", [list(self.slice.layers), list(self.slice.heads)]),
            ("adapter", self.adapter),
            ("salt", self.salt),
        ]


# The canonical encoding: one type byte, a little-endian u32 length (or a little-endian i64 value), the content.


def _encode(value: Any) -> bytes:
    if isinstance(value, str):
        try:
            raw = value.encode()
        except UnicodeEncodeError as exc:
            raise BadNamespace(f"a text of the namespace is no valid Unicode: {exc}") from exc
        return b"s" + struct.pack("<I", len(raw)) + raw
    if isinstance(value, bytes):
        return b"b" + struct.pack("<I", len(value)) + value
    if isinstance(value, int) and not isinstance(value, bool):
        return b"i" + struct.pack("<q", value)
    if isinstance(value, (list, tuple)):
        items = _items(value)
        return b"l" + struct.pack("<I", len(items)) + b"".join(map(_encode, items))
    raise BadNamespace(f"a namespace holds text, bytes, integers and lists, not {type(value).__name__}")


def _decode(raw: bytes, at: int, depth: int = 0) -> tuple[Any, int]:
    kind = raw[at : at + 1]
    if kind == b"i":
        return struct.unpack_from("<q", raw, at + 1)[0], at + 9
    (length,) = struct.unpack_from("<I", raw, at + 1)
    at += 5
    if kind == b"l":
        if depth > 4 or length > 4096:
            raise BadNamespace("the encoding of a namespace is nested too deeply or has too many items")
        items: list[Any] = []
        for _ in range(length):
            item, at = _decode(raw, at, depth + 1)
            items.append(item)
        return items, at
    content = raw[at : at + length]
    if len(content) != length or kind not in (b"s", b"b"):
        raise BadNamespace("the encoding of a namespace is cut off or malformed")
    return (content.decode() if kind == b"s" else content), at + length


def _as_mapping(value: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for pair in _items(value):
        entry = _items(pair)
        if len(entry) != 2:
            raise BadNamespace("the encoding of a namespace is not a list of fields")
        name, content = entry
        if not isinstance(name, str) or name in fields:
            raise BadNamespace(f"field {name!r} of the namespace is not a name or is given twice")
        fields[name] = content
    return fields


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not an integer")
    return value


def _raw(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"{value!r} is not bytes")
    return value
