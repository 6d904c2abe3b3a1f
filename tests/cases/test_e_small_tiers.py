"""Cases E, on: tiers that are small for what is put into them, and many who put at once, in many sizes."""

from __future__ import annotations

import contextlib
import random
import subprocess
import threading
from pathlib import Path

import pytest

from kvclient import Client
from kvstore import wire
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, MIB, eventually, running
from tests.rawclient import keys, namespace, payload

SIZES = (4 * KIB, 64 * KIB, 256 * KIB, 1 * MIB)


@pytest.mark.parametrize("mode", ["trusted", "strict"])
@pytest.mark.parametrize("cpu", ["4MiB", "8MiB", "16MiB"])
def test_e03_a_batch_of_who_is_alone_is_stored_without_a_gap_however_small_the_tier(
    short_dir: Path, cpu: str, mode: str
) -> None:
    """A block that finds no room makes all behind it useless, so limits of what may be open at once are not felt."""
    extra = ("--mode", "strict", "--arena-size", "4MiB") if mode == "strict" else ()
    with running(short_dir, *extra, cpu=cpu, ssd=None) as daemon, daemon.client() as look, Client(daemon.socket) as own:
        for size in SIZES:
            look.report(wire.DropNamespace(look.next_id(), None))
            eventually(lambda: look.tier("cpu")["used_bytes"] == 0, "memory is empty")
            capacity_bytes = eventually(lambda: look.tier("cpu")["capacity_bytes"])
            space = namespace(size, f"of {size}")
            hashes = keys(capacity_bytes * 5 // 8 // size)
            blocks = own.namespace(space)
            stored = blocks.store(hashes, [payload(space.digest, key, size) for key in hashes])
            assert set(stored.outcomes) == {Outcome.SEALED}, f"blocks of {size}"
            buffers = [bytearray(size) for _ in hashes]
            assert blocks.fetch(hashes, buffers).hits == len(hashes)
            assert all(buffer == payload(space.digest, key, size) for key, buffer in zip(hashes, buffers, strict=True))
        look.check()


def test_e01_many_writers_of_many_sizes_stay_below_the_cap_by_du_at_every_moment(short_dir: Path) -> None:
    """What `du -s` says, directories and all, while sizes take segments from each other and namespaces are dropped."""
    cap = 32 * MIB
    with running(short_dir, cpu="16MiB", ssd="32MiB") as daemon:
        over, seen, faults = threading.Event(), [0], list[BaseException]()

        def sample() -> None:
            while not over.is_set():
                for kind in ((), ("--apparent-size",)):
                    command = ["du", "-s", "-B1", *kind, str(daemon.ssd_dir)]
                    # A file that goes while du looks at it is told by du as an error, beside the sum.
                    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
                    with contextlib.suppress(IndexError):
                        seen.append(int(told.split()[0]))

        def write(number: int) -> None:
            rng = random.Random(number)
            try:
                with daemon.client() as client:
                    for turn in range(40):
                        space = namespace(rng.choice((*SIZES, 256, 16 * KIB, 200 * KIB)), f"of {number % 2}")
                        ns = client.open(space)
                        client.put(ns, keys(8, f"{number} {turn}"), durable=True, wait_s=2)
                        if turn % 13 == 12:
                            client.report(wire.DropNamespace(client.next_id(), space.digest))
                        assert set(client.get(ns, keys(8, f"{number} {turn}"))) <= {
                            Outcome.HIT, Outcome.ABSENT, Outcome.DEADLINE
                        }  # fmt: skip
            except BaseException as exc:  # noqa: BLE001 - told below, in the test's own thread
                faults.append(exc)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        sampling = threading.Thread(target=sample)
        for thread in (sampling, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        over.set()
        sampling.join()
        assert not faults, faults
        assert cap // 2 < max(seen) <= cap
        with daemon.client() as client:
            client.check(verify=True)
            assert client.tier("ssd")["state"] == "ready"
