"""Finds results of kernels that depend on the order of programs, or of threads in a program.

A GPU does not define these orders. Kernels run on the NumPy stand-in of Triton, which runs whole
programs one after the other. It is a fault if a program writes an element that another program
reads or writes, even if the results are right in this order. The threads of a program are ordered
only by barriers. So it is a fault if an element is read and then written, written and then read, or
written twice, without a barrier between.

One case needs no barrier: kernels that update an array in place read a tile, and then write exactly
the same tile. If the tile has at least as many elements as there are threads, each thread writes
the elements that it has read. In smaller tiles, several threads have copies of an element, and a
slow thread might read it after another thread's write. It is not checked whether the new elements
are computed from the old ones.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from support.triton_stand_in import Pointer, Tensor, tensor

# What a number, an integer and a boolean are in memory that is not written. A maximum ignores NaN.
POISON: dict[str, tuple[float, int, bool]] = {
    "forward": (77.0, 77, True),
    "reverse": (np.nan, -(2**31), False),
    "random": (-1e4, 1, True),
}
ORDERS = tuple(POISON)


class _Touched:
    """The times at which each element of an array was read or written.

    The time advances with every program and every barrier.
    """

    def __init__(self, size: int, is_new: bool):
        self.is_new = is_new
        self.first_read, self.last_read, self.last_write, self.tile = np.zeros((4, size), np.int32)


class RaceChecker:
    """Runs programs in one of ORDERS, and records faults. Each order has other initial memory.

    Attributes:
        faults: the number of faults, by kernel and description.
        launched: the largest number of programs of each kernel.
    """

    def __init__(self) -> None:
        self.current_order = ORDERS[0]
        self.faults: Counter[tuple[str, str]] = Counter()
        self.launched: Counter[str] = Counter()
        self._rng = np.random.default_rng(0)

    def begin(
        self, name: str, num_threads: int, updated: list[np.ndarray], new: list[np.ndarray]
    ) -> None:
        """Begin a launch. Its outputs are the operands `updated`, and the new arrays `new`."""
        self._name, self._num_threads = name, num_threads
        self._arrays = {id(x): _Touched(x.size, False) for x in updated}
        self._arrays |= {id(x): _Touched(x.size, True) for x in new}
        self._tiles: dict[Any, int] = {}
        self._now = self._start = 0

    def order(self, places: list[tuple[int, ...]]) -> Sequence[tuple[int, ...]]:
        """Return the programs' places in the grid, in the order in which the programs will run."""
        self.launched[self._name] = max(self.launched[self._name], len(places))
        if self.current_order == "random":
            return [places[i] for i in self._rng.permutation(len(places))]
        return places if self.current_order == "forward" else places[::-1]

    def poison(self, dtype: np.dtype) -> Any:
        """Return the value of memory that has not been written."""
        number, integer, truth = POISON[self.current_order]
        bits = 8 * dtype.itemsize - 1  # without the sign
        integers = {"i": max(integer, -(2**bits)), "u": integer % 2**32}
        return ({"b": truth} | integers).get(dtype.kind, number)

    def begin_program(self) -> None:
        self._now += 1
        self._start = self._now

    def barrier(self) -> None:
        self._now += 1

    def load(self, pointer: Pointer, mask: Any = True, other: Any = 0) -> Tensor:
        mask = self._inside(pointer, mask)
        if (touched := self._arrays.get(id(pointer.array))) is not None:
            at, now = pointer.places(mask), self._now
            written = touched.last_write[at]
            self._count((0 < written) & (written < self._start), "reads what another one writes")
            self._count(written == now, "reads what it wrote, with no barrier between")
            if touched.is_new:
                self._count(written == 0, "reads what it never wrote")
            tile, is_again = self._tile(pointer, mask, at), touched.last_read[at] == now
            touched.tile[at] = np.where(is_again & (touched.tile[at] != tile), 0, tile)
            touched.last_read[at] = now
            touched.first_read[at] = np.where(
                touched.first_read[at] > 0, touched.first_read[at], now
            )
        loaded = np.full(pointer.offset.shape, other, pointer.array.dtype)
        loaded[mask] = pointer.array[pointer.places(mask)]
        return tensor(loaded)

    def store(self, pointer: Pointer, value: Any, mask: Any = True) -> None:
        mask = self._inside(pointer, mask)
        touched = self._arrays.get(id(pointer.array))
        at = pointer.places(mask)
        if touched is None:
            self._count(np.ones(at.shape), "writes an operand that is no output")
            return
        read, written, now = touched.first_read[at], touched.last_write[at], self._now
        self._count((0 < written) & (written < self._start), "writes what another one writes")
        self._count((0 < read) & (read < self._start), "writes what another one reads")
        tile = self._tile(pointer, mask, at)
        is_own = (touched.tile[at] == tile) & (tile > 0)
        is_fresh = touched.last_read[at] == now
        self._count(is_fresh & ~is_own, "writes what it read, with no barrier between")
        self._count(written == now, "writes twice, with no barrier between")
        self._check_lanes(at, np.broadcast_to(value, mask.shape)[mask])
        touched.last_write[at] = now
        assert value.dtype == pointer.array.dtype
        pointer.array[at] = np.broadcast_to(value, mask.shape)[mask]

    def _inside(self, pointer: Pointer, mask: Any) -> np.ndarray:
        """Return the mask without lanes that point outside the array. Such lanes are a fault."""
        offset = np.asarray(pointer.offset)
        mask = np.broadcast_to(mask, offset.shape)
        is_inside = (offset >= 0) & (offset < pointer.array.size)
        self._count(mask & ~is_inside, "is out of bounds")
        return mask & is_inside

    def _tile(self, pointer: Pointer, mask: np.ndarray, at: np.ndarray) -> int:
        """Return a number that identifies these places in this order.

        It is 0 if several threads may have the same element.
        """
        if pointer.offset.size < self._num_threads or len(np.unique(at)) < at.size:
            return 0
        key = id(pointer.array), pointer.offset.shape, pointer.offset.tobytes(), mask.tobytes()
        return self._tiles.setdefault(key, len(self._tiles) + 1)

    def _check_lanes(self, at: np.ndarray, values: np.ndarray) -> None:
        """Check that lanes that write the same element write the same bits."""
        order = np.argsort(at, kind="stable")
        at, bits = at[order], np.ascontiguousarray(values[order]).view(f"u{values.itemsize}")
        is_other = (at[1:] == at[:-1]) & (bits[1:] != bits[:-1])
        self._count(is_other, "writes different values to an element at once")

    def _count(self, is_fault: np.ndarray, sentence: str) -> None:
        if number := int(np.count_nonzero(is_fault)):
            self.faults[self._name, sentence] += number
