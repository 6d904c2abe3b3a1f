"""Pages come back as they were, to the bit: every layout, in place and as flat tensors, whole batches and parts."""

from __future__ import annotations

import itertools
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.daemon_fixture import Daemon
from tests.engines.sglang import pools
from tests.engines.sglang.conftest import Attach, make_backend
from tests.engines.sglang.pools import MHA_LAYOUTS, MLA_LAYOUTS, Shape

SHAPES = {
    **{f"mha-{layout}": Shape(layout) for layout in MHA_LAYOUTS},
    **{f"mla-{layout}": Shape(layout, heads=0, dim=16) for layout in MLA_LAYOUTS},
}
_salts = (f"pages-{number}" for number in itertools.count())


@pytest.mark.parametrize("name", SHAPES)
def test_pages_written_in_place_come_back_in_other_places(name: str, attach: Attach) -> None:
    source, target = pools.make(SHAPES[name]), pools.make(SHAPES[name])
    salt = next(_salts)
    written, read = attach(source, salt=salt), attach(target, salt=salt)
    keys = pools.keys([name, *range(4)])
    pools.wipe(target)
    pools.fill(source, [6, 1, 0, 3, 5], keys)
    assert written.batch_set_v1(keys, pools.slots(source, [6, 1, 0, 3, 5])) == [True] * 5
    assert read.batch_exists(keys) == 5
    assert read.batch_get_v1(keys, pools.slots(target, [2, 7, 4, 0, 1])) == [True] * 5
    assert all(pools.holds(target, page, key) for page, key in zip([2, 7, 4, 0, 1], keys, strict=True))
    untouched = torch.full_like(target.get_data_page(3 * target.page_size).view(torch.uint8), 0xA5)
    assert torch.equal(target.get_data_page(3 * target.page_size).contiguous().view(torch.uint8), untouched)


@pytest.mark.parametrize("name", SHAPES)
def test_flat_pages_and_pages_in_place_are_the_same_blocks(name: str, attach: Attach) -> None:
    pool = pools.make(SHAPES[name])
    salt = next(_salts)
    flat, in_place = attach(pool, salt=salt, interface_v1=0), attach(pool, salt=salt)
    first, second = pools.keys([(name, 1), (name, 2)])
    pools.fill(pool, [0, 1], [first, second])
    assert flat.set(first, pool.get_data_page(0))
    assert in_place.batch_set_v1([second], pools.slots(pool, [1])) == [True]
    pools.wipe(pool)
    assert in_place.batch_get_v1([first], pools.slots(pool, [4])) == [True]
    assert pools.holds(pool, 4, first)
    page = flat.get(second, pool.get_dummy_flat_data_page())
    pool.set_from_flat_data_page(5 * pool.page_size, page)
    assert pools.holds(pool, 5, second)


def test_layer_first_and_page_first_direct_share_their_blocks(attach: Attach) -> None:
    one, other = pools.make(Shape("layer_first")), pools.make(Shape("page_first_direct"))
    salt = next(_salts)
    keys = pools.keys(["shared", 1])
    pools.fill(one, [2, 3], keys)
    assert all(attach(one, salt=salt).batch_set_v1(keys, pools.slots(one, [2, 3])))
    assert attach(other, salt=salt).batch_get_v1(keys, pools.slots(other, [0, 1])) == [True, True]
    assert pools.holds(other, 0, keys[0])
    assert pools.holds(other, 1, keys[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32])
def test_every_dtype_comes_back(dtype: torch.dtype, attach: Attach) -> None:
    pool = pools.make(Shape("page_first", dtype=dtype))
    backend = attach(pool, salt=next(_salts), kv_cache_dtype=str(dtype))
    keys = pools.keys([str(dtype)])
    pools.fill(pool, [1], keys)
    assert backend.batch_set_v1(keys, pools.slots(pool, [1])) == [True]
    pools.wipe(pool)
    assert backend.batch_get_v1(keys, pools.slots(pool, [6])) == [True]
    assert pools.holds(pool, 6, keys[0])


def test_a_batch_is_read_to_the_first_page_that_is_not_there(attach: Attach) -> None:
    pool = pools.make(Shape("page_first"))
    backend = attach(pool, salt=next(_salts))
    keys = pools.keys(range(5))
    pools.fill(pool, [0, 1, 3], [keys[0], keys[1], keys[3]])
    assert backend.batch_set_v1([keys[0], keys[1], keys[3]], pools.slots(pool, [0, 1, 3])) == [True] * 3
    assert backend.batch_exists(keys) == 2
    assert [backend.exists(key) for key in keys] == [True, True, False, True, False]
    assert backend.batch_get_v1(keys, pools.slots(pool, range(5))) == [True, True, False, False, False]
    flat = backend.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
    assert [page is not None for page in flat] == [True, True, False, True, False], "each page for itself"
    assert torch.equal(flat[3].view(torch.uint8), pools.content(pool, keys[3]).view(torch.uint8))


def test_no_keys_are_no_pages(attach: Attach) -> None:
    pool = pools.make(Shape("page_first"))
    backend = attach(pool, salt=next(_salts))
    none = pools.slots(pool, [])
    assert backend.batch_get_v1([], none) == []
    assert backend.batch_set_v1([], none) == []
    assert backend.batch_exists([]) == 0
    assert backend.batch_set([], [])


def test_keys_that_spell_no_digest_are_kept_apart(attach: Attach) -> None:
    pool = pools.make(Shape("page_first"))
    backend = attach(pool, salt=next(_salts))
    keys = ["", "a", "ab", "aB", "zz", "é", "0" * 63, "0" * 66]
    for key in keys:
        assert backend.set(key, pools.content(pool, key))
    for key in keys:
        found = backend.get(key, pool.get_dummy_flat_data_page())
        assert torch.equal(found.view(torch.uint8), pools.content(pool, key).view(torch.uint8))


def test_a_page_that_is_there_is_not_written_again(attach: Attach) -> None:
    pool = pools.make(Shape("page_first"))
    backend = attach(pool, salt=next(_salts))
    keys = pools.keys(["once"])
    assert backend.set(keys[0], pools.content(pool, keys[0]))
    assert backend.set(keys[0], pools.content(pool, "another"))
    assert torch.equal(
        backend.get(keys[0], pool.get_dummy_flat_data_page()).view(torch.uint8),
        pools.content(pool, keys[0]).view(torch.uint8),
    )


@given(data=st.data())
def test_any_batches_in_any_places_come_back(data: st.DataObject, session_daemon: Daemon) -> None:
    name = data.draw(st.sampled_from(sorted(SHAPES)))
    pool = pools.make(SHAPES[name])
    example = next(_salts)  # nothing of the example before is there
    places = st.lists(st.integers(0, 7), unique=True, min_size=1, max_size=8)
    names = st.lists(st.integers(0, 12), unique=True, min_size=1, max_size=8)
    stored: set[str] = set()
    with closing(make_backend(pool, session_daemon.socket, salt=name)) as backend:
        for _ in range(data.draw(st.integers(1, 3))):
            some, keys = data.draw(places), pools.keys([(example, number) for number in data.draw(names)])
            pairs = list(zip(some, keys, strict=False))
            some, keys = [place for place, _ in pairs], [key for _, key in pairs]
            pools.fill(pool, some, keys)
            assert all(backend.batch_set_v1(keys, pools.slots(pool, some)))
            stored |= set(keys)
        pairs = list(zip(data.draw(places), pools.keys([(example, n) for n in data.draw(names)]), strict=False))
        some, keys = [place for place, _ in pairs], [key for _, key in pairs]
        pools.wipe(pool)
        leading = len(list(itertools.takewhile(stored.__contains__, keys)))
        assert backend.batch_exists(keys) == leading
        got = backend.batch_get_v1(keys, pools.slots(pool, some))
        assert got == [position < leading for position in range(len(keys))]
        assert all(pools.holds(pool, place, key) for place, key in pairs[:leading])
