"""The admin port over a real socket: who may do what, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvproxy.admin import TOKEN_CHARS_MIN, WORKERS_MAX, application, read_token
from kvproxy.settings import TOKEN_VARIABLE
from kvproxy.types import Endpoint, Role
from kvproxy.workers import Fleet
from kvstore.clock import ManualClock
from kvstore.errors import BadSetting

TOKEN = "a-token-of-some-length"
P = {"role": "prefill", "url": "http://10.0.0.1:8000"}


class Admin:
    """The admin port, and somebody who knows the token."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession, url: str) -> None:
        self.fleet = fleet
        self.url = url
        self.session = session

    async def ask(
        self, method: str, path: str, body: object = None, *, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        sent = {"Authorization": f"Bearer {TOKEN}"} if headers is None else headers
        async with self.session.request(method, self.url + path, json=body, headers=sent) as response:
            assert response.content_type == "application/json"
            told: dict[str, Any] = await response.json()
            return response.status, told


@asynccontextmanager
async def served() -> AsyncGenerator[Admin, None]:
    fleet = Fleet(ManualClock().monotonic_s, dict.fromkeys(Role, 1000.0))
    runner = web.AppRunner(application(fleet, TOKEN), access_log=None, shutdown_timeout=1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession() as session:
            yield Admin(fleet, session, f"http://{host}:{port}")
    finally:
        await runner.cleanup()


def with_admin(steps: Callable[[Admin], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), served() as admin:
            await steps(admin)

    asyncio.run(run())


def test_workers_come_drain_return_and_go() -> None:
    async def steps(admin: Admin) -> None:
        status, told = await admin.ask("POST", "/workers", {**P, "node": "node-7"})
        assert (status, told["worker"]["url"], told["worker"]["node"]) == (201, P["url"], "node-7")
        status, told = await admin.ask("GET", "/workers")
        assert status == 200
        assert [worker["state"] for worker in told["workers"]] == ["closed"]
        status, told = await admin.ask("POST", "/workers/drain", P)
        assert (status, told["worker"]["state"]) == (200, "draining")
        assert admin.fleet.usable(Role.PREFILL, {}) == []
        assert (await admin.ask("POST", "/workers", P))[0] == 201
        assert [view.key for view in admin.fleet.usable(Role.PREFILL, {})] == [P["url"]]
        status, told = await admin.ask("DELETE", "/workers", P)
        assert (status, told) == (200, {"requests": 0})
        assert admin.fleet.report() == []

    with_admin(steps)


def test_nothing_is_said_and_nothing_done_without_the_token() -> None:
    async def steps(admin: Admin) -> None:
        admin.fleet.add(Endpoint(P["url"], Role.PREFILL, "n"))
        wrong: list[dict[str, str]] = [
            {},
            {"Authorization": ""},
            {"Authorization": TOKEN},
            {"Authorization": f"Basic {TOKEN}"},
            {"Authorization": f"Bearer {TOKEN}x"},
            {"Authorization": f"Bearer {TOKEN[:-1]}"},
            {"Authorization": "Bearer " + "x" * 4000},
            {"Authorization": "Bearer t\u00f6k\u00e9n"},
            {"X-Authorization": f"Bearer {TOKEN}"},
        ]
        for headers in wrong:
            for method, path in [
                ("GET", "/workers"), ("POST", "/workers"), ("DELETE", "/workers"), ("POST", "/workers/drain"),
                ("GET", "/"), ("GET", "/metrics"), ("PUT", "/workers"),
            ]:  # fmt: skip
                status, told = await admin.ask(method, path, P, headers=headers)
                assert status == 401, (method, path, headers)
                assert "10.0.0.1" not in str(told)
        assert [worker["state"] for worker in admin.fleet.report()] == ["closed"]

    with_admin(steps)


@pytest.mark.parametrize(
    "body",
    [
        None, [], "text", {}, {"role": "prefill"}, {"url": "http://h:1"}, {"role": "both", "url": "http://h:1"},
        {"role": "prefill", "url": 7}, {"role": "prefill", "url": "h:1"}, {"role": "prefill", "url": "ftp://h:1"},
        {"role": "prefill", "url": "http://user:pw@h:1"}, {"role": "prefill", "url": "http://h:1", "weight": 2},
        {"role": "prefill", "url": "http://h:1?x=1"}, {"role": "prefill", "url": ""},
    ],
    ids=repr,
)  # fmt: skip
def test_a_body_that_is_not_understood_is_refused_and_changes_nothing(body: object) -> None:
    async def steps(admin: Admin) -> None:
        status, told = await admin.ask("POST", "/workers", body)
        assert status == 400
        assert told["error"]["message"]
        assert admin.fleet.report() == []

    with_admin(steps)


def test_what_is_not_json_and_what_is_too_large_is_refused() -> None:
    async def steps(admin: Admin) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        for sent, expected in ((b"{", 400), (b"\xff\xfe", 400), (b" " * 100_000, 413)):
            async with admin.session.post(f"{admin.url}/workers", data=sent, headers=headers) as response:
                assert response.status == expected
                assert (await response.json())["error"]["message"]

    with_admin(steps)


def test_unknown_workers_paths_and_methods_are_told_as_such() -> None:
    async def steps(admin: Admin) -> None:
        for method, path in (("POST", "/workers/drain"), ("DELETE", "/workers")):
            status, told = await admin.ask(method, path, P)
            assert status == 404
            assert P["url"] in told["error"]["message"]
        assert (await admin.ask("GET", "/metrics"))[0] == 404
        assert (await admin.ask("PUT", "/workers", P))[0] == 405
        assert (await admin.ask("POST", "/workers", P))[0] == 201
        status, told = await admin.ask("POST", "/workers", P)
        assert status == 409
        assert "already" in told["error"]["message"]

    with_admin(steps)


def test_the_number_of_workers_is_bounded() -> None:
    async def steps(admin: Admin) -> None:
        for number in range(WORKERS_MAX):
            admin.fleet.add(Endpoint(f"http://h{number}", Role.PREFILL, "n"))
        assert (await admin.ask("POST", "/workers", P))[0] == 409
        assert (await admin.ask("POST", "/workers", {**P, "role": "decode"}))[0] == 201

    with_admin(steps)


# ---- the token


def test_the_token_comes_from_the_file_else_from_the_variable(short_dir: Path) -> None:
    file = short_dir / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    assert read_token(file, {TOKEN_VARIABLE: "another-token-of-some-length"}) == TOKEN
    assert read_token(None, {TOKEN_VARIABLE: TOKEN}) == TOKEN
    assert read_token(None, {TOKEN_VARIABLE: " "}) is None
    assert read_token(None, {}) is None


def test_a_token_that_others_may_read_or_that_is_no_secret_is_refused(short_dir: Path) -> None:
    file = short_dir / "token"
    file.write_text(TOKEN)
    for mode in (0o644, 0o604, 0o602, 0o620):
        file.chmod(mode)
        with pytest.raises(BadSetting, match="chmod 600"):
            read_token(file, {})
    file.chmod(0o640)
    assert read_token(file, {}) == TOKEN
    for text in ("", "x" * (TOKEN_CHARS_MIN - 1), "two words of a phrase", "x" * 20 + "\u00e9", "x" * 20 + "\x00"):
        file.write_text(text)
        with pytest.raises(BadSetting, match="openssl rand"):
            read_token(file, {})
    with pytest.raises(BadSetting, match="can't be read"):
        read_token(short_dir / "absent", {})
