"""What a body says, the copy for P, and D's own bytes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.bodies import Kind, for_decode, for_prefill, read
from kvproxy.types import Shape

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "It was the best of times"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello there"}]}
ASKS_FOR_MORE: dict[str, Any] = {
    "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 500, "max_completion_tokens": 400,
    "min_tokens": 7, "n": 3, "best_of": 4, "stop": ["\n"], "stop_token_ids": [1], "logprobs": 5, "top_logprobs": 5,
    "echo": True, "prompt_logprobs": 1, "ignore_eos": True, "use_beam_search": True, "seed": 4, "suffix": "x",
    "response_format": {"type": "json_object"}, "include_stop_str_in_output": True, "return_token_ids": True,
}  # fmt: skip


def raw(body: Any) -> bytes:
    return json.dumps(body).encode()


# ---- the copy for P


@pytest.mark.parametrize(("kind", "body"), [(Kind.COMPLETIONS, COMPLETION), (Kind.CHAT, CHAT)])
def test_p_is_asked_for_one_token_at_once_and_nothing_else_of_the_answer(kind: Kind, body: dict[str, Any]) -> None:
    copy = json.loads(for_prefill(read(kind, raw({**body, **ASKS_FOR_MORE}))))
    limits = {"max_tokens": 1} if kind is Kind.COMPLETIONS else {"max_tokens": 1, "max_completion_tokens": 1}
    assert copy == {**body, "stream": False, **limits}


@pytest.mark.parametrize("written", [b'"\xff"', b"1e999", b"null"])
def test_a_choice_of_tools_that_nobody_can_read_stops_nothing(written: bytes) -> None:
    body = b'{"messages": [], "tool_choice": ' + written + b"}"
    copy = json.loads(for_prefill(read(Kind.CHAT, body)))
    assert copy["tool_choice"] == (None if written == b"null" else "none")


def test_what_is_not_known_passes_to_p_as_it_was_written() -> None:
    body = b'{"prompt": "x", "new": {"a": 1e400, "b": 0.10, "c": 12345678901234567890123}, "x":[1 , 2]}'
    copy = for_prefill(read(Kind.COMPLETIONS, body))
    assert b'{"a": 1e400, "b": 0.10, "c": 12345678901234567890123}' in copy
    assert b"[1 , 2]" in copy


@pytest.mark.parametrize(
    ("choice", "becomes"),
    [
        ("none", "none"),
        ("auto", "auto"),
        ("required", "none"),
        ({"type": "function", "function": {"name": "f"}}, "none"),
    ],
)
def test_tools_stay_in_p_s_prompt_and_no_call_is_forced_there(choice: Any, becomes: str) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    copy = json.loads(for_prefill(read(Kind.CHAT, raw({**CHAT, "tools": tools, "tool_choice": choice}))))
    assert copy["tools"] == tools
    assert copy["tool_choice"] == becomes


# ---- D's bytes


BODIES = (b' {"prompt":"x" ,\n"max_tokens":3}\n', b"{}", b'{"a":1,"a":2}', '{"prompt":"é\\u00e9"}'.encode())


@pytest.mark.parametrize("body", BODIES)
def test_d_gets_the_client_s_bytes(body: bytes) -> None:
    assert for_decode(read(Kind.COMPLETIONS, body), None) == body
    assert for_decode(read(Kind.COMPLETIONS, body), {}) == body


@pytest.mark.parametrize("body", BODIES)
def test_what_d_is_told_of_p_is_added_behind_the_client_s_bytes(body: bytes) -> None:
    told = for_decode(read(Kind.COMPLETIONS, body), {"remote_host": "p", "remote_block_ids": [1, 2]})
    assert told.startswith(body.rstrip()[:-1])
    expected = {**json.loads(body), "kv_transfer_params": {"remote_host": "p", "remote_block_ids": [1, 2]}}
    assert json.loads(told) == expected


def test_a_client_s_own_transfer_parameters_are_kept_beside_ours() -> None:
    body = raw({**COMPLETION, "kv_transfer_params": {"tenant": "a", "remote_host": "mine"}})
    told = json.loads(for_decode(read(Kind.COMPLETIONS, body), {"remote_host": "p"}))
    assert told == {**COMPLETION, "kv_transfer_params": {"tenant": "a", "remote_host": "p"}}


LEAVES = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e300, 1e300) | st.text(max_size=8)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=6))
def test_any_object_comes_out_as_it_went_in_but_for_what_was_added(body: dict[str, Any]) -> None:
    told = json.loads(for_decode(read(Kind.CHAT, raw(body)), {"k": 1}))
    theirs = body.get("kv_transfer_params")
    assert told.pop("kv_transfer_params") == {**(theirs if isinstance(theirs, dict) else {}), "k": 1}
    body.pop("kv_transfer_params", None)
    assert told == body


# ---- what it says


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[1]", b'"text"', b"null", b"\xff\xfe", b'{"prompt": NaN}', b'{"prompt": "x"} trailing',
        b"[" * 100_000, b'{"prompt":' + b"[" * 100_000, b'{"prompt": "\\ud800"}',
    ],
)  # fmt: skip
def test_what_is_no_object_is_left_to_d_untouched(body: bytes) -> None:
    ask = read(Kind.COMPLETIONS, body)
    assert not ask.shape.readable
    assert for_decode(ask, {"k": 1}) == body


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_left_to_d(body: bytes) -> None:
    for kind in Kind:
        ask = read(kind, body)
        if ask.shape.readable:
            assert isinstance(json.loads(for_prefill(ask)), dict)
        else:
            assert for_decode(ask, {"k": 1}) == body


def test_a_compressed_body_is_left_to_d() -> None:
    assert not read(Kind.CHAT, raw(CHAT), is_plain=False).shape.readable


@pytest.mark.parametrize(
    ("prompt", "prompts", "tokens", "longest"),
    [
        ("x" * 40, ["x" * 40], 10, 10),
        ([5, 6, 7], [(5, 6, 7)], 3, 3),
        (["x" * 8, "y" * 4], ["x" * 8, "y" * 4], 3, 2),
        ([[1, 2, 3], [4]], [(1, 2, 3), (4,)], 4, 3),
        (["x" * 8, [1, 2, 3]], ["x" * 8, (1, 2, 3)], 5, 3),
    ],
)
def test_prompts_are_text_or_ids_one_or_many(prompt: Any, prompts: list[Any], tokens: int, longest: int) -> None:
    ask = read(Kind.COMPLETIONS, raw({"prompt": prompt}))
    assert list(ask.prompts) == prompts
    assert (ask.shape.prompt_tokens, ask.shape.longest_tokens) == (tokens, longest)
    assert ask.hashable


@pytest.mark.parametrize("prompt", [None, 5, {"a": 1}, [True, False], [["x"]], [[1], None], [1.5], ["x", 3]])
def test_prompts_that_are_neither_are_not_hashed(prompt: Any) -> None:
    ask = read(Kind.COMPLETIONS, raw({"prompt": prompt}))
    assert ask.shape.readable
    assert not ask.hashable
    assert not ask.prompts


def test_a_chat_s_text_is_counted_and_only_text_is_hashed() -> None:
    parts = [{"type": "text", "text": "y" * 40}]
    ask = read(
        Kind.CHAT, raw({"messages": [{"role": "system", "content": "x" * 40}, {"role": "user", "content": parts}]})
    )
    assert ask.shape.prompt_tokens == 20
    assert ask.hashable
    image = {"type": "image_url", "image_url": {"url": "data:" + "A" * 4000}}
    ask = read(Kind.CHAT, raw({"messages": [{"role": "user", "content": [*parts, image]}]}))
    assert ask.shape.prompt_tokens == 10
    assert not ask.hashable


@pytest.mark.parametrize("name", ["truncate_prompt_tokens", "prompt_embeds", "documents", "mm_processor_kwargs"])
def test_what_changes_the_tokens_behind_our_back_is_not_hashed(name: str) -> None:
    assert not read(Kind.COMPLETIONS, raw({**COMPLETION, name: 1})).hashable


@pytest.mark.parametrize(
    ("kind", "body", "shape"),
    [
        (Kind.COMPLETIONS, {}, {"max_tokens": 16}),  # OpenAI's default
        (Kind.CHAT, {}, {"max_tokens": None}),
        (Kind.COMPLETIONS, {"max_tokens": 1}, {"max_tokens": 1}),
        (Kind.CHAT, {"max_tokens": 9, "max_completion_tokens": 1}, {"max_tokens": 1}),
        (Kind.COMPLETIONS, {"max_tokens": "1"}, {"max_tokens": 16}),
        (Kind.COMPLETIONS, {"n": 4, "use_beam_search": True}, {"n": 4, "beams": True, "max_tokens": 16}),
        (Kind.COMPLETIONS, {"best_of": 3}, {"n": 3, "max_tokens": 16}),
        (Kind.COMPLETIONS, {"n": -1}, {"max_tokens": 16}),
        (Kind.COMPLETIONS, {"echo": True, "logprobs": 0}, {"needs_whole_prompt": True, "max_tokens": 16}),
        (Kind.COMPLETIONS, {"echo": True}, {"max_tokens": 16}),
        (Kind.COMPLETIONS, {"logprobs": 3}, {"max_tokens": 16}),
        (Kind.CHAT, {"prompt_logprobs": 0}, {"needs_whole_prompt": True}),
    ],
)
def test_the_shape_is_what_the_request_asks_for(kind: Kind, body: dict[str, Any], shape: dict[str, Any]) -> None:
    base = COMPLETION if kind is Kind.COMPLETIONS else CHAT
    found = read(kind, raw({**base, **body})).shape
    plain = read(kind, raw(base)).shape
    expected = Shape(True, plain.prompt_tokens, plain.longest_tokens, **shape)
    assert found == expected


def test_a_session_is_the_prompt_cache_key_else_the_user() -> None:
    assert read(Kind.CHAT, raw({**CHAT, "user": "u", "prompt_cache_key": "k"})).session == "k"
    assert read(Kind.CHAT, raw({**CHAT, "user": "u" * 1000})).session == "u" * 256
    assert read(Kind.CHAT, raw({**CHAT, "user": 7})).session == ""


def test_a_salt_is_kept_for_the_hashes() -> None:
    assert read(Kind.CHAT, raw({**CHAT, "cache_salt": "s"})).cache_salt == "s"


def test_members_are_the_client_s_bytes() -> None:
    members = read(Kind.COMPLETIONS, b'{"prompt": "a\\u0062", "temperature": 0.70}').members
    assert {name: bytes(value) for name, value in members.items()} == {"prompt": b'"a\\u0062"', "temperature": b"0.70"}
    assert all(isinstance(value, msgspec.Raw) for value in members.values())
