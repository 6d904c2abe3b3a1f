"""How an operator names things: namespaces by digest or model, blocks by hash or by the tokens of a prompt.

Invariant: a name stands for one namespace or for none. What could mean two is refused with the candidates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO, cast

from kvctl.printing import plain
from kvctl.reports import NamespaceReport
from kvstore.block import BlockHash, block_hash
from kvstore.errors import BadKey, BadNamespace, UsageError
from kvstore.prefix import chain
from kvstore.units import parse_whole

SHORT_DIGEST = 12


def resolve(namespaces: Sequence[NamespaceReport], name: str) -> NamespaceReport:
    """Return the namespace whose digest starts with `name`, or whose model (or model@revision) it is.

    Raises
    ------
    BadNamespace
        Nothing or more than one thing has that name; the text lists what there is to choose from.
    """
    is_hex = re.fullmatch(r"[0-9a-fA-F]{1,64}", name) is not None
    found = [
        namespace
        for namespace in namespaces
        if name in (namespace.model, namespace.title, f"{namespace.model}@{namespace.revision}")
        or (is_hex and namespace.digest.startswith(name.lower()))
    ]
    # Tenants that store the same namespace share its digest.
    if len({namespace.digest for namespace in found}) == 1:
        return found[0]
    if found:
        raise BadNamespace(
            f"{name!r} names {len(found)} namespaces: give more of the digest of one of them\n{_listed(found)}"
        )
    if not namespaces:
        raise BadNamespace(f"there is no namespace {name!r}, nor any other: nothing has been stored or looked up yet")
    raise BadNamespace(
        f"there is no namespace {name!r}: give the start of a digest, or a model\n{_listed(namespaces)}"
    )


def labels(namespaces: Sequence[NamespaceReport]) -> list[str]:
    """Return the model of each namespace, with what tells it from the others of that model."""
    return [plain(" ".join([one.title, *_differing(one, namespaces)])) for one in namespaces]


def _differing(one: NamespaceReport, namespaces: Sequence[NamespaceReport]) -> Iterator[str]:
    same_title = [other.details for other in namespaces if other.title == one.title]
    for part, others in zip(one.details, zip(*same_title, strict=True), strict=True):
        if part and len(set(others)) > 1:
            yield part


def _listed(namespaces: Sequence[NamespaceReport], limit: int = 20) -> str:
    shown = namespaces[:limit]
    lines = [f"  {one.digest[:SHORT_DIGEST]}  {label}" for one, label in zip(shown, labels(shown), strict=True)]
    if len(namespaces) > limit:
        lines.append(f"  and {len(namespaces) - limit} more: kvctl namespaces lists them")
    return "\n".join(lines)


def hashes_from_words(words: Sequence[str], stdin: TextIO) -> list[BlockHash]:
    """Return the block hashes that `words` write in hex; "-" stands for those on standard input."""
    found: list[BlockHash] = []
    for word in words:
        found += [_hash_of(part) for part in (stdin.read().split() if word == "-" else (word,))]
    return found


def _hash_of(word: str) -> BlockHash:
    try:
        return block_hash(bytes.fromhex(word.removeprefix("0x")))
    except ValueError as exc:
        raise BadKey(f"{word!r} is not a block hash: write 8 to 64 bytes in hex, as kvctl keys prints them") from exc


def hashes_of_tokens(namespace: NamespaceReport, source: str, stdin: TextIO) -> tuple[list[BlockHash], int]:
    """Return the hashes of the full blocks of the token ids in `source`, and how many tokens there are.

    `source` is a file, or "-" for standard input. It holds a JSON list, or numbers with blanks, commas or line ends
    between them. The hashes are those of `kvstore.prefix`: an engine that brings hashes of its own has stored its
    blocks under others.
    """
    if not namespace.block_tokens:
        raise UsageError(f"namespace {namespace.digest[:SHORT_DIGEST]} does not say its block size: give hashes")
    tokens = list(_tokens_in(_text_of(source, stdin), source))
    return chain(bytes.fromhex(namespace.digest), tokens, namespace.block_tokens), len(tokens)


def _text_of(source: str, stdin: TextIO) -> str:
    try:
        return stdin.read() if source == "-" else Path(source).read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"can't read token ids from {source}: {exc}; give a text file, or - for stdin") from exc


def _tokens_in(text: str, source: str) -> Iterator[int]:
    if text.lstrip().startswith("["):
        try:
            listed = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise UsageError(f"{source} begins like a JSON list and is none ({exc}): write [1, 2, 3]") from exc
        for item in cast("list[object]", listed):
            if not isinstance(item, int) or isinstance(item, bool):
                raise BadKey(f"{source} holds {item!r} where a token id belongs: write a flat list of integers")
            yield item
        return
    for word in text.replace(",", " ").split():
        token = parse_whole(word)
        if token is None:
            raise BadKey(f"{source} holds {word!r} where a token id belongs: write integers, blanks between them")
        yield token
