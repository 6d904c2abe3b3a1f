"""How a block of one slice is put together from stored blocks of other slices: parts of them, or several side by side.

Theory of operation. A block holds its components one behind the other, each an array over its axes, narrowed to the
slice's layers and heads. The borders of all slices at hand cut the target's layers and heads into cells; each cell of
each component is taken from the first slice that holds it. A cell is a box in two arrays, so it is copied by runs that
are contiguous in both. Where heads lie inside tokens the runs would be so short that recomputing is no slower; then
there is no plan.

Invariants
1. A plan covers every byte of the target exactly once.
2. Slices of one group only: components, block tokens and everything else that changes bytes are equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.block import Component, Namespace

Move = tuple[int, int, int]  # offset in the source's block, offset in the target's, bytes

_MOVES_FEW = 64
_MOVE_BYTES_MIN = 2048


@dataclass(frozen=True, slots=True)
class Plan:
    """For each source that is needed (its place among those given): what to move from its block to the target's."""

    moves: dict[int, list[Move]]


def plan(target: Namespace, sources: Sequence[Namespace]) -> Plan | None:
    """Return how to make a block of `target` out of blocks of `sources`; None if that can't or should not be done."""
    moves: dict[int, list[Move]] = {}
    for number, component in enumerate(target.components):
        layers = _cells("layer", component, target.slice.layers, [source.slice.layers for source in sources])
        heads = _cells("head", component, target.slice.heads, [source.slice.heads for source in sources])
        for layer_cell, head_cell in itertools.product(layers, heads):
            found = _holder(component, layer_cell, head_cell, sources)
            boxed = None if found is None else _box(number, layer_cell, head_cell, sources[found], target)
            if found is None or boxed is None:
                return None
            moves.setdefault(found, []).extend(boxed)
    count = sum(map(len, moves.values()))
    if count > _MOVES_FEW and target.block_bytes < count * _MOVE_BYTES_MIN:
        return None
    return Plan(moves)


Range = tuple[int, int]


def _cells(axis: str, component: Component, wanted: Range, held: Sequence[Range]) -> list[Range]:
    """Return the parts of `wanted` between the borders of what is held; all of it where there is no such axis."""
    if axis not in component.axes:
        return [wanted]
    first, end = wanted
    borders = sorted({first, end, *(border for part in held for border in part if first < border < end)})
    return list(itertools.pairwise(borders))


def _holder(component: Component, layers: Range, heads: Range, sources: Sequence[Namespace]) -> int | None:
    """Return the first source that holds a cell of a component."""
    for place, source in enumerate(sources):
        has_layers = "layer" not in component.axes or _inside(layers, source.slice.layers)
        has_heads = "head" not in component.axes or _inside(heads, source.slice.heads)
        if has_layers and has_heads:
            return place
    return None


def _inside(inner: Range, outer: Range) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _box(number: int, layers: Range, heads: Range, source: Namespace, target: Namespace) -> list[Move] | None:
    """Return the runs of one cell of component `number`; None if they are no whole bytes."""
    origin, destination = source.held[number], target.held[number]
    item_bits = destination.size_bytes * 8 // math.prod(destination.shape)
    starts: list[tuple[int, int]] = []  # in source and target, for each axis
    extents: list[int] = []
    for axis, extent in zip(destination.axes, destination.shape, strict=True):
        if axis in ("layer", "head"):
            cell = layers if axis == "layer" else heads
            held = (source.slice.layers, target.slice.layers) if axis == "layer" else (
                source.slice.heads, target.slice.heads
            )  # fmt: skip
            starts.append((cell[0] - held[0][0], cell[0] - held[1][0]))
            extents.append(cell[1] - cell[0])
        else:
            starts.append((0, 0))
            extents.append(extent)
    # From the innermost axis outwards: as long as both arrays are taken whole, a run goes on.
    inner = len(extents) - 1
    while inner > 0 and extents[inner] == origin.shape[inner] == destination.shape[inner]:
        inner -= 1
    run_bits = math.prod(extents[inner:]) * item_bits
    bases = [sum(part.size_bytes for part in space.held[:number]) * 8 for space in (source, target)]
    strides = [[math.prod(array.shape[axis + 1 :]) * item_bits for axis in range(len(extents))]
               for array in (origin, destination)]  # fmt: skip
    moves: list[Move] = []
    for index in itertools.product(*(range(extent) for extent in extents[:inner]), [0]):
        at = [
            base + sum((starts[axis][side] + index[axis]) * strides[side][axis] for axis in range(inner + 1))
            for side, base in enumerate(bases)
        ]
        if at[0] % 8 or at[1] % 8 or run_bits % 8:
            return None
        moves.append((at[0] // 8, at[1] // 8, run_bits // 8))
    return moves
