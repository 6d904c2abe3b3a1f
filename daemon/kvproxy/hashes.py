"""The block hashes that vLLM computes, computed without vLLM.

A block's hash is the digest of (hash of the block before, tuple of token ids, extra keys or None), the first block's
parent being the digest of a seed (vllm/v1/core/kv_cache_utils.py). What is digested are the bytes of that tuple as
CBOR (sha256_cbor) or as a pickle of protocol 5 (sha256, vLLM's default); both are written here, and nothing is ever
read back. tests/kvproxy/test_hashes.py has vectors of a real vLLM.

Invariants
1. Equal tokens, seed and salt give the bytes that vLLM gives, or nothing: what can't be written so raises ValueError.
2. Only full blocks have a hash.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256

# vLLM's seed where PYTHONHASHSEED is not set. Before 0.29 it was random then, so nobody could tell hashes.
SEED = "vllm-none-hash"
_FRAME_BYTES_MAX = 64 << 10


def chain(
    tokens: Sequence[int], block_tokens: int, *, algorithm: str = "sha256", seed: str = SEED, cache_salt: str = ""
) -> Iterator[bytes]:
    """Yield the hash of each full block of `tokens`, computed as it is asked for.

    Raises
    ------
    ValueError
        A token id is negative or above 2^31, the salt is too long, or there is no such algorithm.
    """
    encode = _ENCODINGS.get(algorithm)
    if encode is None:
        raise ValueError(f"there is no hash {algorithm!r}: it is one of {', '.join(_ENCODINGS)}")
    if tokens and not 0 <= min(tokens) <= max(tokens) < 1 << 31:
        raise ValueError("a token id is below 0 or above 2^31")
    parent = sha256(encode(seed)).digest()
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        salt = (("cache_salt", cache_salt),) if cache_salt and end == block_tokens else None
        parent = sha256(encode((parent, tuple(tokens[end - block_tokens : end]), salt))).digest()
        yield parent


Value = str | tuple["bytes", tuple[int, ...], "tuple[tuple[str, str]] | None"]


def _as_cbor(value: Value) -> bytes:
    if isinstance(value, str):
        return _cbor_text(value)
    parent, tokens, extra = value
    parts = [b"\x83", _cbor_head(0x40, len(parent)), parent, _cbor_head(0x80, len(tokens))]
    parts += [_cbor_head(0x00, token) for token in tokens]
    if extra is None:
        parts.append(b"\xf6")
    else:
        parts += [b"\x81\x82", _cbor_text(extra[0][0]), _cbor_text(extra[0][1])]
    return b"".join(parts)


def _cbor_text(text: str) -> bytes:
    raw = text.encode()
    return _cbor_head(0x60, len(raw)) + raw


def _cbor_head(major: int, count: int) -> bytes:
    """Return the shortest head (RFC 8949, section 4.2.1)."""
    if count < 24:
        return bytes((major | count,))
    if count < 1 << 8:
        return bytes((major | 24, count))
    if count < 1 << 16:
        return struct.pack(">BH", major | 25, count)
    return struct.pack(">BI", major | 26, count)


def _as_pickle(value: Value) -> bytes:
    """Return the pickle of protocol 5 that CPython's C encoder writes: a frame, each new object memoised."""
    if isinstance(value, str):
        body = _pickle_text(value)
    else:
        parent, tokens, extra = value
        parts = [b"C", bytes((len(parent),)), parent, b"\x94", _pickle_tokens(tokens)]
        if extra is None:
            parts.append(b"N")
        else:
            parts += [_pickle_text(extra[0][0]), _pickle_text(extra[0][1]), b"\x86\x94", b"\x85\x94"]
        body = b"".join([*parts, b"\x87\x94"])
    body += b"."
    if len(body) > _FRAME_BYTES_MAX:
        raise ValueError("the block is too large to be told how it is framed")
    return b"\x80\x05" + (b"\x95" + struct.pack("<Q", len(body)) if len(body) >= 4 else b"") + body


def _pickle_text(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > 255:
        return b"X" + struct.pack("<I", len(raw)) + raw + b"\x94"
    return b"\x8c" + bytes((len(raw),)) + raw + b"\x94"


def _pickle_tokens(tokens: tuple[int, ...]) -> bytes:
    items = b"".join(map(_pickle_int, tokens))
    if len(tokens) == 0:
        return b")"
    if len(tokens) <= 3:
        return items + (b"\x85", b"\x86", b"\x87")[len(tokens) - 1] + b"\x94"
    return b"(" + items + b"t\x94"


def _pickle_int(number: int) -> bytes:
    if number < 1 << 8:
        return b"K" + bytes((number,))
    if number < 1 << 16:
        return b"M" + struct.pack("<H", number)
    return b"J" + struct.pack("<i", number)


_ENCODINGS: dict[str, Callable[[Value], bytes]] = {"sha256": _as_pickle, "sha256_cbor": _as_cbor}
