"""A trial of an index before it is opened: LMDB ends the process that walks into a damaged page, so another one does.

The child reads every record, which takes it to every page in use, and begins a write that it gives up, which takes it
to the free list: what it survives holds no surprise for the daemon later on. It changes nothing.
"""

from __future__ import annotations

import logging
import stat
import subprocess
import sys
from pathlib import Path

from kvstore.errors import BadRecord

_TIMEOUT_S = 60.0
_READ_BYTES_PER_S_MIN = 4 << 20
# What LMDB says in words is said again when the daemon opens it.
_CHILD = """
import collections, contextlib, resource, sys, lmdb
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
path, map_bytes = sys.argv[1], 2 * int(sys.argv[2])
with contextlib.suppress(lmdb.Error):
    with lmdb.Environment(path, lock=False, create=False, max_dbs=16, map_size=map_bytes) as environment:
        with environment.begin() as txn:
            names = list(txn.cursor().iternext(values=False))
        for name in names:
            database = environment.open_db(name, create=False)
            with environment.begin() as txn:
                collections.deque(txn.cursor(database).iternext(values=False), maxlen=0)
        with environment.begin(write=True) as txn:
            txn.put(b"trial", bytes(4096))
            txn.abort()
"""

_log = logging.getLogger(__name__)


def check(directory: Path) -> None:
    """Raise BadRecord if reading the environment in `directory` would end this process, or never end. Blocking.

    Where no child can be made nothing is raised: the trial is a precaution, not a condition.
    """
    try:
        found = (directory / "data.mdb").lstat()
        if not stat.S_ISREG(found.st_mode):
            return  # refused when it is opened
        tried = subprocess.run(
            [sys.executable, "-I", "-c", _CHILD, str(directory), str(found.st_size)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_TIMEOUT_S + found.st_blocks * 512 / _READ_BYTES_PER_S_MIN,
            check=False,
        )
    except FileNotFoundError:
        return
    except subprocess.TimeoutExpired as exc:
        raise BadRecord(_text(directory, "reading it does not end")) from exc
    except OSError as exc:
        _log.warning("ssd index could not be tried before it is opened: %s", exc)
        return
    told = " ".join(tried.stderr.decode(errors="replace").split())[-200:]
    if tried.returncode < 0:
        raise BadRecord(_text(directory, told or f"reading it ends with signal {-tried.returncode}"))
    if tried.returncode:
        _log.warning("ssd index could not be tried before it is opened: %s", told)


def _text(directory: Path, what: str) -> str:
    return (
        f"the ssd index in {directory} is damaged ({what}): remove the ssd directory's contents to start empty, "
        "or give another directory"
    )
