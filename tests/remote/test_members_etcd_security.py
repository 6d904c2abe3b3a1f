"""etcd with TLS and with users; addresses of etcd; servers that are no etcd; and nothing secret in any text."""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import BadSetting, NotPermitted, RemoteProtocolError, UnavailableError
from kvstored.remote.etcd import Etcd
from kvstored.remote.etcd_place import PASSWORD_VARIABLE, USER_VARIABLE, EtcdPlace
from tests.remote.etcd_server import EtcdServer, etcd_running, free_port

SECRET = "tell-nobody-7734"
LOGIN = {USER_VARIABLE: "root", PASSWORD_VARIABLE: SECRET}


@pytest.fixture(scope="module")
def directory(private_temp_dir: Path) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="etcd-", dir=private_temp_dir))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def certificates(directory: Path) -> Path:
    """Return a directory with an authority, a certificate of 127.0.0.1 from it, and an authority that nobody trusts."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: it makes the certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    for name in ("ca", "other"):
        openssl(
            *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN=kvstored test {name}"),
            *("-keyout", f"{name}.key", "-out", f"{name}.pem"),
        )
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=node", "-keyout", "node.key", "-out", "node.csr")
    # The gateway is a client of its own server, with the server's certificate: hence both usages.
    (directory / "node.ext").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    openssl(
        *("x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"),
        *("-extfile", "node.ext", "-out", "node.pem"),
    )
    return directory


@pytest.fixture(scope="module")
def etcd_with_tls(certificates: Path) -> Iterator[EtcdServer]:
    """Return an etcd that speaks TLS and asks its clients for certificates."""
    flags = [
        *("--cert-file", str(certificates / "node.pem"), "--key-file", str(certificates / "node.key")),
        *("--client-cert-auth", "--trusted-ca-file", str(certificates / "ca.pem")),
    ]
    with etcd_running(certificates / "tls", flags) as server:
        yield server


@pytest.fixture(scope="module")
def etcd_with_users(directory: Path) -> Iterator[EtcdServer]:
    """Return an etcd whose only user is root."""
    with etcd_running(directory / "users") as server:

        async def set_up() -> None:
            async with Etcd(server.place("setup")) as etcd:
                ask = etcd._ask  # pyright: ignore[reportPrivateUsage]
                await ask("auth/user/add", {"name": "root", "password": SECRET})
                await ask("auth/role/add", {"name": "root"})
                await ask("auth/user/grant", {"user": "root", "role": "root"})
                await ask("auth/enable", {})

        asyncio.run(set_up())
        yield server


async def round_trip(place: EtcdPlace) -> bytes:
    """Write a key, read it back, and see a change of it."""
    async with Etcd(place) as etcd:
        revision = await etcd.write(f"{place.prefix}members/x", b"1")
        async for changes in etcd.watch(place.prefix, revision, silent_s=10):
            if changes:
                entry = changes[0].entry
                assert entry is not None
                assert (await etcd.read(place.prefix)).entries[0].value == entry.value
                return entry.value
    raise AssertionError("nothing was seen")


def with_certificates(server: EtcdServer, certificates: Path, ca: str = "ca", own: bool = True) -> EtcdPlace:
    options = f"?ca={certificates / ca}.pem"
    if own:
        options += f"&cert={certificates / 'node.pem'}&key={certificates / 'node.key'}"
    return server.place("secure", options=options)


def test_tls_with_certificates_of_both_sides(etcd_with_tls: EtcdServer, certificates: Path) -> None:
    assert asyncio.run(round_trip(with_certificates(etcd_with_tls, certificates))) == b"1"


@pytest.mark.parametrize(("ca", "own"), [("other", True), ("ca", False)])
def test_a_wrong_authority_or_no_certificate_is_an_error_by_the_deadline(
    etcd_with_tls: EtcdServer, certificates: Path, ca: str, own: bool
) -> None:
    with pytest.raises(UnavailableError, match=r"no etcd server answers|lost"):
        asyncio.run(round_trip(with_certificates(etcd_with_tls, certificates, ca, own)))


def test_plain_text_to_a_server_that_wants_tls_is_an_error_with_words(etcd_with_tls: EtcdServer) -> None:
    with pytest.raises((UnavailableError, RemoteProtocolError)):
        asyncio.run(round_trip(EtcdPlace.read(f"etcd://127.0.0.1:{etcd_with_tls.port}", {})))


def test_certificates_that_cannot_be_read_are_named(certificates: Path) -> None:
    place = EtcdPlace.read(f"etcds://127.0.0.1:1?ca={certificates / 'missing.pem'}", {})
    with pytest.raises(BadSetting, match=r"missing\.pem"):
        place.tls_context()


def test_a_user_with_a_password_may_and_its_token_is_renewed(etcd_with_users: EtcdServer) -> None:
    async def main() -> None:
        place = etcd_with_users.place("users", LOGIN)
        assert await round_trip(place) == b"1"
        async with Etcd(place) as etcd:
            await etcd.read(place.prefix)
            etcd._token = "no-longer-valid.1"  # pyright: ignore[reportPrivateUsage]
            assert (await etcd.read(place.prefix)).entries
            etcd._token = "no-longer-valid.2"  # pyright: ignore[reportPrivateUsage]
            with pytest.raises(UnavailableError):
                async for _ in etcd.watch(place.prefix, 1, silent_s=10):
                    pass
            async for _ in etcd.watch(place.prefix, 1, silent_s=10):
                break  # it has logged in again
            lease = await etcd.grant(60)
            assert await etcd.keep_alive(lease) == 60
            await etcd.revoke(lease)
            assert await etcd.keep_alive(lease) == 0
            await etcd.revoke(lease)

    asyncio.run(main())


@pytest.mark.parametrize("environ", [{}, {**LOGIN, PASSWORD_VARIABLE: SECRET + "x"}, {**LOGIN, USER_VARIABLE: "eve"}])
def test_without_the_right_password_the_error_says_so_and_not_what_it_was(
    etcd_with_users: EtcdServer, environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    place = etcd_with_users.place("users", environ)
    with pytest.raises(NotPermitted, match="etcd refuses this user") as caught:
        asyncio.run(round_trip(place))
    assert SECRET not in f"{caught.value} {caught.value!r} {place!r} {place} {caplog.text}"


def test_a_server_that_is_no_etcd_is_told_apart() -> None:
    async def main() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\nConnection: close\r\n\r\nnot found")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            number = server.sockets[0].getsockname()[1]
            async with Etcd(EtcdPlace.read(f"etcd://127.0.0.1:{number}", {})) as etcd:
                with pytest.raises(RemoteProtocolError, match="no etcd with a JSON gateway"):
                    await etcd.read("/kvstored/")

    asyncio.run(main())


def test_an_endpoint_that_is_down_is_passed_over(etcd_with_users: EtcdServer) -> None:
    url = f"etcd://127.0.0.1:{free_port()},127.0.0.1:{etcd_with_users.port}/failover"
    assert asyncio.run(round_trip(EtcdPlace.read(url, LOGIN))) == b"1"


@pytest.mark.parametrize(
    ("url", "endpoints", "cluster"),
    [
        ("etcd://host", ("host:2379",), "default"),
        ("etcd://10.0.0.1:1,10.0.0.2/prod", ("10.0.0.1:1", "10.0.0.2:2379"), "prod"),
        ("etcds://[fd00::1]:2379,[fd00::2]/a.b-c", ("[fd00::1]:2379", "[fd00::2]:2379"), "a.b-c"),
    ],
)
def test_addresses_are_read(url: str, endpoints: tuple[str, ...], cluster: str) -> None:
    place = EtcdPlace.read(url, {})
    assert (place.endpoints, place.cluster, place.tls) == (endpoints, cluster, url.startswith("etcds"))
    assert place.prefix == f"/kvstored/{cluster}/"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://host", "no address of an etcd"),
        ("etcd://", "no address of an etcd"),
        ("etcd://host:99999", "no port up to 65535"),
        ("etcd://host,,other", "no host"),
        ("etcd://host/a/b", "no name of a cluster"),
        ("etcd://host?ca=x", "write etcds://"),
        ("etcds://host?cert=x", "give both"),
        ("etcds://host?tls=yes", "options"),
    ],
)
def test_bad_addresses_are_refused_with_what_to_write(url: str, words: str) -> None:
    with pytest.raises(BadSetting, match=words):
        EtcdPlace.read(url, {})


def test_a_password_on_the_command_line_is_refused_and_not_repeated() -> None:
    with pytest.raises(BadSetting, match=PASSWORD_VARIABLE) as caught:
        EtcdPlace.read(f"etcd://root:{SECRET}@host:2379", {})
    assert SECRET not in str(caught.value)
    with pytest.raises(BadSetting, match="set both or none"):
        EtcdPlace.read("etcd://host", {USER_VARIABLE: "root"})
