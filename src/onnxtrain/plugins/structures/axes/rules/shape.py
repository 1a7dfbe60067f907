"""Operators that change the axes of whole tensors; a reshape that splits or merges axes keeps structures on one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np

from onnxtrain.graph.sizes import factors
from onnxtrain.graph.value import Dimension
from onnxtrain.plugins.structures.axes.labels import Axis, Cut, fixed
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of


@axes_of("Reshape", "Flatten")
def reshape(node: Node) -> list[Axis]:
    """y = x in another shape: axes of one size continue, the others split and merge within blocks of axes."""
    before, after = node.shape(), node.output_shape()
    taken = node.all_axes()
    found: list[Axis | None] = [None] * len(after)
    blocks = _blocks(before, after)
    merging = [_Block(taken, before, after, *block) for block in blocks if not _continues(block, before, after)]
    ways = max((len(block.pairs) for block in merging), default=1)
    chosen = node.choice(ways) if ways > 1 else 0
    for own, made in blocks:
        if _continues((own, made), before, after):
            wide = [place for place in own if before[place] != 1]
            target = [place for place in made if after[place] != 1]
            for place in made:
                found[place] = fixed("its size is 1")
            if wide and target:
                found[target[0]] = taken[wide[0]]
    for block in merging:
        for place, axis in zip(block.made, block.relate(node, chosen), strict=True):
            found[place] = axis
            if ways > 1:
                node.judge_by(axis)
    result = [fixed("it is reshaped from fixed axes") if axis is None else axis for axis in found]
    if node.operator == "Reshape":
        node.on_cut(lambda cut: _change_target(cut, node, result, after))
    return result


def _change_target(cut: Cut, node: Node, axes: Sequence[Axis], after: Sequence[Dimension]) -> None:
    target = node.constant(1)
    changes: dict[int, int | Fraction] = {}
    for place, axis in enumerate(axes):
        if axis.labels is None or (target is not None and target[place] == -1):
            continue
        if axis.repeats:  # a computed element is a multiple of the number of labels
            content = node.content(1)
            computed = content is None or not isinstance(content[place], int)
            if target is None and computed and not cut.kept(axis).all():
                changes[place] = Fraction(cut.count(axis), len(axis.labels))
        elif cut.count(axis) != after[place]:
            changes[place] = cut.count(axis)
    if changes:
        cut.set_elements(node.ir, 1, changes)


_Places = tuple[list[int], list[int]]


def _continues(block: _Places, before: Sequence[Dimension], after: Sequence[Dimension]) -> bool:
    """Return whether a block has one axis on either side, apart from axes of size 1."""
    own = [before[place] for place in block[0] if before[place] != 1]
    made = [after[place] for place in block[1] if after[place] != 1]
    return len(own) <= 1 and len(made) <= 1


def _blocks(before: Sequence[Dimension], after: Sequence[Dimension]) -> list[_Places]:
    """Split both shapes into the smallest blocks of axes with as many elements on either side."""
    front, i, j = _matched(list(before), list(after))
    back, k, m = _matched(list(before[i:])[::-1], list(after[j:])[::-1])
    found = front
    middle = (list(range(i, len(before) - k)), list(range(j, len(after) - m)))
    if middle[0] or middle[1]:
        found.append(middle)
    for own, made in reversed(back):
        found.append(
            (sorted(len(before) - 1 - place for place in own), sorted(len(after) - 1 - place for place in made))
        )
    return found


def _matched(before: list[Dimension], after: list[Dimension]) -> tuple[list[_Places], int, int]:
    """Match blocks from the front as far as the sizes are known."""
    found: list[_Places] = []
    start = (0, 0)
    i = j = 0
    left, right = _Count(), _Count()
    while True:
        if left == right and (i, j) > start:
            while i < len(before) and before[i] == 1 and (j >= len(after) or after[j] != 1):
                i += 1
            while j < len(after) and after[j] == 1 and (i >= len(before) or before[i] != 1):
                j += 1
            found.append((list(range(start[0], i)), list(range(start[1], j))))
            start, left, right = (i, j), _Count(), _Count()
        grow_left = (
            left.number <= right.number if left.symbols == right.symbols else len(left.symbols) <= len(right.symbols)
        )
        if grow_left and i < len(before) and before[i] is not None:
            left.add(before[i])
            i += 1
            if left == right and j > start[1]:
                continue
            if j < len(after) and after[j] == before[i - 1] and j == start[1] and i - 1 == start[0]:
                right.add(after[j])
                j += 1
            continue
        if j < len(after) and after[j] is not None and not (grow_left and i < len(before)):
            right.add(after[j])
            j += 1
            continue
        return found, *start


@dataclass
class _Count:
    """A number of elements: a number times symbols."""

    number: int = 1
    symbols: list[str] = field(default_factory=list)

    def add(self, size: Dimension) -> None:
        number, symbols = factors(size) or (1, [])
        self.number *= number
        self.symbols = sorted([*self.symbols, *symbols])


class _Block:
    """A block of axes that a reshape splits, merges, or both."""

    def __init__(
        self,
        taken: Sequence[Axis],
        before: Sequence[Dimension],
        after: Sequence[Dimension],
        own: list[int],
        made: list[int],
    ) -> None:
        self.axes, self.made = [taken[place] for place in own], made
        self.before, self.after = [before[place] for place in own], [after[place] for place in made]
        self.labelled = [index for index, axis in enumerate(self.axes) if axis.labels is not None]
        self._sizes = {source: self._aligned(source) for source in self.labelled}
        self.pairs = [
            (source, target)
            for source, sizes in self._sizes.items()
            if sizes is not None
            for target, size in enumerate(sizes[1])
            if size > 1
        ]
        """Each axis that has structures, and each that may get them."""

    def relate(self, node: Node, choice: int) -> list[Axis]:
        """Return the axes of the output; one of them gets the structures of one of the input."""
        found = [fixed(f"{node.describe()} keeps it") for _ in self.after]
        source, target = self.pairs[min(choice, len(self.pairs) - 1)] if self.pairs else (-1, -1)
        for index in self.labelled:
            if index != source:
                node.fix(self.axes[index], f"{node.describe()} merges it with another axis")
        sizes = self._sizes.get(source)
        if sizes is None:
            return found
        axis, (own, made) = self.axes[source], sizes
        assert axis.labels is not None
        flat = np.broadcast_to(axis.labels.reshape([-1 if i == source else 1 for i in range(len(own))]), own)
        rows = np.moveaxis(flat.reshape(made), target, 0).reshape(made[target], -1)
        repeats = not isinstance(self.after[target], int) and bool(self._open())
        found[target] = replace(axis, labels=node.unite(rows), repeats=repeats)
        return found

    def _open(self) -> list[int]:
        """Return which of its own axes have no known size."""
        return [
            index
            for index, (axis, size) in enumerate(zip(self.axes, self.before, strict=True))
            if axis.repeats or (axis.labels is None and not isinstance(size, int))
        ]

    def _aligned(self, source: int) -> tuple[list[int], list[int]] | None:
        """Return sizes on both sides in which an axis lies in equal places; ``None`` if there are none."""
        own = [
            len(axis.labels) if axis.labels is not None else size if isinstance(size, int) else 1
            for axis, size in zip(self.axes, self.before, strict=True)
        ]
        made = [size if isinstance(size, int) else 1 for size in self.after]
        open_made = [index for index, size in enumerate(self.after) if not isinstance(size, int)]
        open_own = self._open()
        if not open_own and len(open_made) == 1:
            made[open_made[0]] = max(math.prod(own) // math.prod(made), 1)
        elif open_own and open_made:
            if open_own[-1] < source or open_own == [source]:
                own[: open_own[-1]] = [1] * open_own[-1]
                last = open_made[-1]
                made[:last] = [1] * last
                made[last] = max(math.prod(own) // math.prod(made), 1)
                if last and made[last] > 1:
                    return None
            elif open_own[0] > source:
                own[open_own[0] :] = [1] * (len(own) - open_own[0])
                made[open_made[0] :] = [1] * (len(made) - open_made[0])
            else:
                return None
        return (own, made) if math.prod(own) == math.prod(made) else None


@axes_of("Transpose")
def transpose(node: Node) -> list[Axis]:
    """y = x with its axes in another order."""
    order = node.attribute("perm", list(range(node.rank()))[::-1])
    return [node.axis(0, axis) for axis in order]


@axes_of("Squeeze")
def squeeze(node: Node) -> list[Axis]:
    """y = x without axes of size 1."""
    listed = node.integers("axes", 1)
    if listed is None:
        gone = {axis for axis, size in enumerate(node.shape()) if size == 1}
    else:
        gone = {axis % node.rank() for axis in listed}
    return [node.axis(0, axis) for axis in range(node.rank()) if axis not in gone]


@axes_of("Unsqueeze")
def unsqueeze(node: Node) -> list[Axis]:
    """y = x with new axes of size 1."""
    listed = node.integers("axes", 1) or []
    rank = len(node.output_shape())
    new = {axis % rank for axis in listed}
    if len(new) + node.rank() != rank:
        return [fixed("its axes are not known") for _ in range(rank)]
    rest = iter(node.all_axes())
    return [fixed("its size is 1") if axis in new else next(rest) for axis in range(rank)]


@axes_of("Expand")
def expand(node: Node) -> list[Axis]:
    """y = x broadcast to a shape; new axes have structures of their own."""
    after = node.output_shape()
    before = (1,) * (len(after) - node.rank()) + tuple(node.shape())
    found = []
    for place, size in enumerate(after):
        own = place - (len(after) - node.rank())
        if own >= 0 and before[place] != 1:
            found.append(node.positions(0, own))
        else:
            if own >= 0:
                node.axis(0, own)
            found.append(node.new(size) if size != 1 else fixed("its size is 1"))
    node.on_cut(lambda cut: _change_sizes(cut, node, 1, found, after))
    return found


@axes_of("ConstantOfShape")
def constant_of_shape(node: Node) -> list[Axis]:
    """y = one number in a shape."""
    after = node.output_shape()
    value = node.attribute("value")
    zero = value is None or not np.any(value.numpy())
    found = [node.new(size).with_zero(zero) if size != 1 else fixed("its size is 1") for size in after]
    node.on_cut(lambda cut: _change_sizes(cut, node, 0, found, after))
    return found


def _change_sizes(cut: Cut, node: Node, index: int, axes: Sequence[Axis], after: Sequence[Dimension]) -> None:
    """Set the sizes of axes with structures in the shape that a node reads."""
    target = node.constant(index)
    offset = 0 if target is None else len(after) - target.size
    changes = {
        place - offset: cut.count(axis)
        for place, axis in enumerate(axes)
        if axis.labels is not None and cut.count(axis) != after[place]
        if place >= offset and (target is None or target[place - offset] != 1)
    }
    if changes:
        cut.set_elements(node.ir, index, changes)


@axes_of("Shape")
def shape(node: Node) -> list[Axis]:
    """y = the sizes of x, which follow x; sizes that are known are constants already."""
    for place in range(node.rank()):
        node.positions(0, place)
    return [fixed("it lists sizes") for _ in node.ir.outputs[0].shape or ()]
