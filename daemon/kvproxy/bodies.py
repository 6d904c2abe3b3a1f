"""Request bodies: what the plan needs to know of one, the copy for P, and what D gets.

A body is cut into its members, each of which stays the bytes that the client sent; no value is decoded and written
again on the way to a worker. So numbers keep their digits, text its escapes, and what this version doesn't know
passes.

Invariants
1. D gets the client's bytes. The one thing ever added is the member `kv_transfer_params`, spliced in before the last
   brace (where the client sent one itself, its object with ours merged into it replaces it).
2. P's copy asks for one token, at once, and for nothing that is said of the answer.
3. A body that is no JSON object is nobody's fault here: it is marked unreadable, and D answers it.
4. Nothing that a body holds is logged.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from kvproxy.types import Shape

TRANSFER = "kv_transfer_params"
_BYTES_A_TOKEN = 4  # of English text, roughly
_TOKENS_IF_SILENT = {"completions": 16, "chat": None}
_SESSION_CHARS_MAX = 256

# What P's copy goes without: how the answer is cut, chosen, constrained and shown. None of it changes the KV.
_DROPPED_FOR_P = frozenset({
    "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "use_beam_search",
    "length_penalty", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "echo", "logprobs",
    "top_logprobs", "prompt_logprobs", "suffix", "response_format", "structured_outputs", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern",
    "logits_processors", "seed", "return_token_ids", "return_tokens_as_token_ids", "return_hidden_states",
})  # fmt: skip
# What makes the engine hash other tokens than /tokenize returns, or other keys beside them than we know.
_HIDES_TOKENS = ("truncate_prompt_tokens", "prompt_embeds", "documents", "mm_processor_kwargs")


class Kind(enum.StrEnum):
    """Which endpoint a body was sent to."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/completions" if self is Kind.COMPLETIONS else "/v1/chat/completions"


Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request body, read as far as the proxy reads it.

    Attributes
    ----------
    members : mapping
        The body's members, each as the client's bytes; empty if it can't be read.
    prompts : sequence
        The prompts of a completion. Empty for a chat.
    hashable : bool
        Whether the engine's block hashes can be told from the prompts' tokens.
    """

    kind: Kind
    raw: bytes
    shape: Shape
    model: str = ""
    session: str = ""
    cache_salt: str = ""
    hashable: bool = False
    prompts: Sequence[Prompt] = ()
    members: Mapping[str, msgspec.Raw] = field(default_factory=dict[str, msgspec.Raw])


class _Part(msgspec.Struct):
    type: str = "text"
    text: str = ""


class _Message(msgspec.Struct):
    content: str | list[_Part | str] | None = None


_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_messages = msgspec.json.Decoder(list[_Message])


def read(kind: Kind, raw: bytes, *, is_plain: bool = True) -> Ask:
    """Return what a body says. `is_plain`: it is JSON by its headers, and not compressed."""
    if is_plain:
        try:
            return _read(kind, raw, _members.decode(raw))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
    return Ask(kind, raw, Shape(readable=False, prompt_tokens=_tokens_of(len(raw))))


def for_prefill(ask: Ask, transfer: Mapping[str, Any] | None = None) -> bytes:
    """Return the body for P: the same prompt, one token, no stream; `transfer` goes into its kv_transfer_params."""
    members = {name: value for name, value in ask.members.items() if name not in _DROPPED_FOR_P}
    members["stream"] = msgspec.Raw(b"false")
    members["max_tokens"] = msgspec.Raw(b"1")
    if ask.kind is Kind.CHAT:
        members["max_completion_tokens"] = msgspec.Raw(b"1")
    if bytes(members.get("tool_choice", b"null")) not in (b"null", b'"none"', b'"auto"'):
        # A forced call that is cut after one token is no call. With none the prompt has the tools all the same.
        members["tool_choice"] = msgspec.Raw(b'"none"')
    if transfer:
        members[TRANSFER] = _merged(members.get(TRANSFER), transfer)
    return msgspec.json.encode(members)


def for_decode(ask: Ask, transfer: Mapping[str, Any] | None) -> bytes:
    """Return the body for D: the client's bytes, with `transfer` in kv_transfer_params if there is any."""
    if not transfer or not ask.shape.readable:
        return ask.raw
    given = ask.members.get(TRANSFER)
    if given is not None:
        return msgspec.json.encode({**ask.members, TRANSFER: _merged(given, transfer)})
    body = ask.raw.rstrip(b" \t\r\n")
    assert body.endswith(b"}"), "an object ends so"
    comma = b"," if ask.members else b""
    return body[:-1] + comma + msgspec.json.encode(TRANSFER) + b":" + msgspec.json.encode(transfer) + b"}"


def _read(kind: Kind, raw: bytes, members: Mapping[str, msgspec.Raw]) -> Ask:
    prompts, prompt_tokens, longest, is_text = (_prompts if kind is Kind.COMPLETIONS else _chat)(members)
    n = _count(members, "n") or 1
    max_tokens = _count(members, "max_tokens")
    if kind is Kind.CHAT and (newer := _count(members, "max_completion_tokens")) is not None:
        max_tokens = newer
    shape = Shape(
        readable=True,
        prompt_tokens=prompt_tokens,
        longest_tokens=longest,
        n=max(n, _count(members, "best_of") or 1),
        beams=_value(members, "use_beam_search") is True,
        max_tokens=_TOKENS_IF_SILENT[kind] if max_tokens is None else max_tokens,
        needs_whole_prompt=_value(members, "prompt_logprobs") is not None
        or (_value(members, "echo") is True and type(_value(members, "logprobs")) is int),
    )
    salt = _text(members, "cache_salt")
    return Ask(
        kind,
        raw,
        shape,
        model=_text(members, "model"),
        session=(_text(members, "prompt_cache_key") or _text(members, "user"))[:_SESSION_CHARS_MAX],
        cache_salt=salt,
        hashable=is_text and all(_value(members, name) is None for name in _HIDES_TOKENS),
        prompts=prompts,
        members=members,
    )


def _prompts(members: Mapping[str, msgspec.Raw]) -> tuple[Sequence[Prompt], int, int, bool]:
    """Return the prompts of a completion, their tokens, those of the longest, and whether all could be read."""
    given = _value(members, "prompt")
    listed: list[Any] = list(cast("Iterable[Any]", given)) if isinstance(given, list) else [given]
    if isinstance(given, list) and listed and all(type(token) is int for token in listed):
        listed = [listed]
    prompts: list[Prompt] = []
    for one in listed:
        if isinstance(one, str):
            prompts.append(one)
        elif isinstance(one, list) and all(type(token) is int for token in cast("list[object]", one)):
            prompts.append(tuple(cast("list[int]", one)))
        else:
            return (), _tokens_of(len(members.get("prompt", b""))), 0, False
    lengths = [_tokens_of(len(one.encode())) if isinstance(one, str) else len(one) for one in prompts]
    return prompts, sum(lengths), max(lengths, default=0), True


def _chat(members: Mapping[str, msgspec.Raw]) -> tuple[Sequence[Prompt], int, int, bool]:
    """Return what `_prompts` does, for a chat: its prompt is known to the worker's template alone."""
    tokens = _tokens_of(len(members.get("tools", b"")))
    try:
        messages = _messages.decode(members.get("messages", b""))
    except msgspec.MsgspecError:
        tokens += _tokens_of(len(members.get("messages", b"")))
        return (), tokens, tokens, False
    is_text = True
    for message in messages:
        for part in message.content if isinstance(message.content, list) else [message.content or ""]:
            text = part if isinstance(part, str) else part.text
            is_text = is_text and (isinstance(part, str) or part.type == "text")
            tokens += _tokens_of(len(text.encode()))
    return (), tokens, tokens, is_text


def _tokens_of(size_bytes: int) -> int:
    return -(-size_bytes // _BYTES_A_TOKEN)


def _value(members: Mapping[str, msgspec.Raw], name: str) -> Any:
    raw = members.get(name)
    return None if raw is None else msgspec.json.decode(raw)


def _count(members: Mapping[str, msgspec.Raw], name: str) -> int | None:
    value = _value(members, name)
    return value if type(value) is int and value >= 0 else None


def _text(members: Mapping[str, msgspec.Raw], name: str) -> str:
    value = _value(members, name)
    return value if isinstance(value, str) else ""


def _merged(given: msgspec.Raw | None, transfer: Mapping[str, Any]) -> msgspec.Raw:
    """Return the client's object with `transfer` over it; what is no object gives way."""
    theirs: dict[str, Any] = {}
    if given is not None:
        try:
            theirs.update(_members.decode(given))
        except msgspec.MsgspecError:
            pass
    return msgspec.Raw(msgspec.json.encode({**theirs, **transfer}))
