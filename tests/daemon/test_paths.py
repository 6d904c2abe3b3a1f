"""The socket's path: both ends find it by one rule, and a long one works or is refused with its length."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvstore import paths
from kvstore.errors import BadSetting, NotPermitted


@pytest.mark.parametrize(
    ("environ", "uid", "expected"),
    [
        ({"KVSTORED_SOCKET": "/a/b.sock", "XDG_RUNTIME_DIR": "/run/user/7"}, 7, "/a/b.sock"),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, 7, "/run/user/7/kvstored.sock"),
        ({}, 0, "/run/kvstored/kvstored.sock"),
        ({}, 7, "/tmp/kvstored-7/kvstored.sock"),
        ({"KVSTORED_SOCKET": ""}, 0, "/run/kvstored/kvstored.sock"),
    ],
)
def test_default_path_follows_variables_and_user(environ: dict[str, str], uid: int, expected: str) -> None:
    assert paths.default_socket_path(environ, uid) == Path(expected)


def test_client_takes_the_systems_socket_when_its_own_is_not_there(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = short_dir / "system.sock"
    system.write_text("")
    monkeypatch.setattr(paths, "SYSTEM_SOCKET", system)
    own = {"XDG_RUNTIME_DIR": str(short_dir)}
    assert paths.find_socket_path(own, 7) == system
    (short_dir / "kvstored.sock").write_text("")
    assert paths.find_socket_path(own, 7) == short_dir / "kvstored.sock"
    assert paths.find_socket_path({"KVSTORED_SOCKET": "/named"}, 7) == Path("/named")


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_socket_under_a_directory_of_any_length_connects(short_dir: Path, depth: int) -> None:
    path = short_dir.joinpath(*["d" * 120] * depth) / "kvstored.sock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        with paths.socket_address(path) as address:
            assert len(os.fsencode(address)) <= paths.SOCKET_PATH_BYTES_MAX
            server.bind(address)
        server.listen(1)
        assert path.is_socket()
        with paths.socket_address(path) as address:
            client.connect(address)
        accepted, _ = server.accept()
        accepted.close()
    path.unlink()


def test_path_that_no_address_fits_names_path_length_and_limit(short_dir: Path) -> None:
    path = short_dir / ("n" * 120)
    with pytest.raises(BadSetting) as caught, paths.socket_address(path):
        pass
    text = str(caught.value)
    assert str(path) in text
    assert f"{len(os.fsencode(path))} bytes" in text
    assert str(paths.SOCKET_PATH_BYTES_MAX) in text


def test_long_path_to_nowhere_fails_as_a_short_one_does(short_dir: Path) -> None:
    path = short_dir / ("d" * 120) / "kvstored.sock"
    with pytest.raises(FileNotFoundError), paths.socket_address(path):
        pass


@pytest.mark.parametrize("given", ["/", "/a/b\0c"])
def test_path_that_names_no_file_is_refused(given: str) -> None:
    with pytest.raises(BadSetting, match="names no file"):
        paths.check_socket_path(Path(given))


def test_private_directory_that_others_can_write_to_is_not_trusted(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real one is /tmp/kvstored-UID, which a test must not touch.
    monkeypatch.setattr(paths, "private_directory", lambda: short_dir / "mine")
    path = short_dir / "mine" / "kvstored.sock"
    paths.make_socket_directory(path)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.chmod(0o777)
    with pytest.raises(NotPermitted, match="pose as the daemon"):
        paths.make_socket_directory(path)
    path.parent.rmdir()
    path.parent.symlink_to(short_dir)
    with pytest.raises(NotPermitted, match="pose as the daemon"), paths.socket_address(path):
        pass
