"""The cpu tier: a real pool, mapped by clients, populated before it is used, sealed in strict mode."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import BadSetting, TierUnavailable
from kvstore.tiers import memory as memory_module
from kvstore.tiers.memory import HUGE_PAGE_BYTES, MemoryTier, chunk_bytes_for
from kvstore.tiers.slab import NOBODY
from tests.core.parts import MIB

_F_GET_SEALS = 1034


@pytest.fixture
def pool() -> Iterator[MemoryTier]:
    """Return a pool of 8 MiB of which nothing is populated yet."""
    tier = MemoryTier(8 * MIB, huge_pages="off")
    yield tier
    tier.close()


@pytest.fixture
def strict_pool() -> Iterator[MemoryTier]:
    """Return a pool that clients can only read."""
    tier = MemoryTier(4 * MIB, read_only_clients=True, huge_pages="off")
    yield tier
    tier.close()


def populate(tier: MemoryTier, start: int, length: int) -> None:
    tier.populate_blocking(start, length)
    tier.add_populated(length)


def resident_bytes(tier: MemoryTier) -> int:
    return os.fstat(tier.fd).st_blocks * 512


def test_no_slot_is_given_before_its_pages_are_real(pool: MemoryTier) -> None:
    assert pool.allocate(4096) is pool.allocate_transit(4096) is None
    assert pool.capacity_bytes == 0
    assert resident_bytes(pool) == 0
    populate(pool, 0, 4 * MIB)
    assert resident_bytes(pool) == pool.capacity_bytes == pool.populated_bytes == 4 * MIB
    end = max(offset + 4096 for offset in pool.allocate_many(4096, 10_000))
    assert end <= 4 * MIB
    pool.check_integrity()


def test_capacity_grows_as_pages_become_real(pool: MemoryTier) -> None:
    for part in range(4):
        populate(pool, part * 2 * MIB, 2 * MIB)
        assert pool.capacity_bytes == (part + 1) * 2 * MIB
    assert pool.grantable_bytes() + pool.transit_bytes == pool.size_bytes == 8 * MIB


def test_slots_in_transit_and_ordinary_ones_never_overlap(pool: MemoryTier) -> None:
    populate(pool, 0, 8 * MIB)
    ordinary = pool.allocate_many(1 * MIB, 100)
    transit = [offset for _ in range(3) if (offset := pool.allocate_transit(1 * MIB)) is not None]
    assert sorted([*transit, *ordinary]) == [at * MIB for at in range(8)]
    assert [pool.is_transit(offset) for offset in transit] == [True, True]
    assert not any(map(pool.is_transit, ordinary))
    assert pool.used_bytes == 8 * MIB
    for offset in [*transit, *ordinary]:
        pool.free(offset)
    assert pool.used_bytes == 0
    pool.check_integrity()


def test_a_pool_too_small_to_share_has_no_transit() -> None:
    tier = MemoryTier(2 * MIB, huge_pages="off")
    try:
        populate(tier, 0, 2 * MIB)
        assert tier.transit_bytes == 0
        assert tier.allocate_transit(4096) is None
        assert tier.allocate(2 * MIB) == 0
    finally:
        tier.close()


def test_rows_are_noted_for_the_slots_they_own(pool: MemoryTier) -> None:
    populate(pool, 0, 8 * MIB)
    offsets = pool.allocate_many(1 * MIB, 3)
    transit = pool.allocate_transit(1 * MIB)
    assert transit is not None
    pool.set_owners([offsets[0], offsets[2], transit], [7, 9, 11])
    (region,) = pool.clearing(offsets[0], 2 * MIB)
    assert 7 in pool.owners(region)
    assert {7, 9, NOBODY} >= set(pool.owners(region))
    assert pool.clearing(transit, 2 * MIB) == ()


def test_a_client_reads_what_the_daemon_wrote_and_the_other_way_round(pool: MemoryTier) -> None:
    populate(pool, 0, 2 * MIB)
    with mmap.mmap(pool.fd, pool.size_bytes) as client:
        view = pool.view(4096, 5)
        view[:] = b"hello"
        assert client[4096:4101] == b"hello"
        client[4096:4101] = b"world"
        assert bytes(view) == b"world"
        view.release()


def test_a_client_keeps_its_mapping_after_the_daemons_end() -> None:
    tier = MemoryTier(2 * MIB, huge_pages="off")
    tier.populate_blocking(0, 2 * MIB)
    client = mmap.mmap(tier.fd, tier.size_bytes)
    view = tier.view(0, 3)
    view[:] = b"abc"
    view.release()
    tier.close()
    assert client[:3] == b"abc"
    client.close()


# ---- strict mode


def test_in_strict_mode_a_client_can_map_the_pool_for_reading_only(strict_pool: MemoryTier) -> None:
    populate(strict_pool, 0, 4 * MIB)
    view = strict_pool.view(0, 3)
    view[:] = b"abc"
    view.release()
    with mmap.mmap(strict_pool.fd, 4 * MIB, access=mmap.ACCESS_READ) as client:
        assert client[:3] == b"abc"
    with pytest.raises(PermissionError):
        mmap.mmap(strict_pool.fd, 4 * MIB)


def test_in_strict_mode_reopening_through_proc_does_not_help(strict_pool: MemoryTier) -> None:
    fd = os.open(f"/proc/self/fd/{strict_pool.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4 * MIB)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        for length in (0, 8 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, length)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, 1033, 1)  # no further seal, nor one less
    finally:
        os.close(fd)


def test_in_strict_mode_a_reading_mapping_can_not_be_made_writable(strict_pool: MemoryTier) -> None:
    prot_read, prot_write = mmap.PROT_READ, mmap.PROT_WRITE
    with mmap.mmap(strict_pool.fd, 4 * MIB, flags=mmap.MAP_SHARED, prot=prot_read) as client:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        mappings = Path("/proc/self/maps").read_text().splitlines()
        line = next(line for line in mappings if "r--s" in line and "kvstored-pool" in line)
        start = int(line.partition("-")[0], 16)
        assert libc.mprotect(start, 4096, prot_read | prot_write) == -1
        assert ctypes.get_errno() == errno.EACCES
        assert client[:1] == b"\x00"


def test_in_trusted_mode_there_are_no_seals(pool: MemoryTier) -> None:
    assert fcntl.fcntl(pool.fd, _F_GET_SEALS) == 0


# ---- settings and what the kernel refuses


@pytest.mark.parametrize("size_bytes", [0, 1, HUGE_PAGE_BYTES - 1])
def test_less_than_a_chunk_is_refused_with_the_setting_to_change(size_bytes: int) -> None:
    with pytest.raises(BadSetting, match=f"{size_bytes}.*--cpu-size"):
        MemoryTier(size_bytes)


def test_a_size_is_rounded_down_to_whole_chunks() -> None:
    tier = MemoryTier(5 * MIB, huge_pages="off")
    assert tier.size_bytes == 4 * MIB
    tier.close()


@pytest.mark.parametrize(
    ("size_bytes", "chunk_bytes"), [(2 * MIB, 2 * MIB), (128 * MIB, 4 * MIB), (4 << 30, 64 * MIB), (1 << 40, 64 * MIB)]
)
def test_a_pool_has_32_chunks_or_more_where_it_can(size_bytes: int, chunk_bytes: int) -> None:
    assert chunk_bytes_for(size_bytes) == chunk_bytes


def test_pages_that_can_not_be_had_are_told_with_how_many_there_are() -> None:
    tier = MemoryTier(8 * MIB, huge_pages="off")
    try:
        populate(tier, 0, 4 * MIB)
        # Behind the file's end there are no pages: what a limit on memory does, without one.
        with pytest.raises(TierUnavailable, match=rf"{4 * MIB} of {8 * MIB} bytes.*lower --cpu-size"):
            tier.populate_blocking(8 * MIB, 1 << 40)
        assert tier.capacity_bytes == 4 * MIB
    finally:
        tier.close()


def test_a_limit_on_file_sizes_is_named() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, hard))
    try:
        with pytest.raises(TierUnavailable, match=r"--cpu-size.*ulimit -f"):
            MemoryTier(8 * MIB, huge_pages="off")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_huge_pages_that_are_required_but_not_to_be_had_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_shmem_huge_pages_allowed", lambda: False)
    monkeypatch.setattr(memory_module, "_free_hugetlb_bytes", lambda: 0)
    with pytest.raises(BadSetting, match="shmem_enabled"):
        MemoryTier(4 * MIB, huge_pages="require")
    tier = MemoryTier(4 * MIB, huge_pages="auto")
    assert tier.huge_pages == "none"
    tier.close()


def test_hugetlb_pages_that_vanish_at_the_last_moment_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_free_hugetlb_bytes", lambda: 1 << 40)
    monkeypatch.setattr(memory_module, "_shmem_huge_pages_allowed", lambda: False)
    create = os.memfd_create

    def refuse(name: str, flags: int) -> int:
        if flags & 4:
            raise OSError(errno.ENOSYS, "no hugetlb")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", refuse)
    tier = MemoryTier(4 * MIB)
    assert tier.huge_pages == "none"
    tier.close()
