"""Pauses the engine for a trainer, sends it to sleep, and replaces its weights."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from specjax.async_llm import AsyncLLM
from specjax.checkpoint.files import open_file
from specjax.checks import check_choice
from specjax.device.drafters.drafter import Params
from specjax.engine.sleep import check_level
from specjax.rl.loop import PAUSES
from specjax.rl.named import read_named
from specjax.rl.online import OnlineWeights
from specjax.rl.quantising import kinds_of, plain_shapes
from specjax.rl.weights import WeightUpdate, next_version
from specjax.server.admission import Admission
from specjax.server.errors import APIError
from specjax.server.operations import Operations

# States in which the engine runs no step.
PAUSED, ASLEEP, TORN = "paused", "asleep", "without whole weights, as an update failed half-way"
POLL_SECONDS = 0.01
MAX_BYTES_PER_WEIGHT = 4
_HEADER_BYTES = 2**24  # of a safetensors file's table of tensors


def max_bytes(params: Params) -> int:
    """Return the maximum number of bytes of a whole weight update, which may come in parts."""
    num_weights = sum(leaf.size for leaf in jax.tree.leaves(plain_shapes(params)))
    return MAX_BYTES_PER_WEIGHT * num_weights + _HEADER_BYTES


@dataclass
class Gathering:
    """The arrays, by name, that have arrived so far in the parts of an unfinished weight update.

    If `is_drafter` is true, the update is for the drafter, else for the target.
    """

    is_drafter: bool
    arrays: dict[str, Any] = field(default_factory=dict)

    def add(self, part: dict[str, Any], limit: int) -> None:
        """Add a part of the new weights.

        Raises:
            ValueError: the update already has an array with a name in `part`, or would have more
                than `limit` bytes. Then nothing is added.
        """
        if twice := sorted(self.arrays.keys() & part.keys()):
            raise ValueError(f"the update has {twice[0]} already")
        if sum(one.nbytes for one in (*self.arrays.values(), *part.values())) > limit:
            raise ValueError(f"the update has more than {limit} bytes")
        self.arrays |= part


class Control:
    """Changes the engine for a trainer: pauses, sleep and new weights.

    Args:
        root: the folder that contains all folders from which new weights may be read; None to read
            no folder.

    Attributes:
        turn: a lock; requests that change the engine hold it.
        gathering: the arrays so far of an update in parts; None while no such update has started.
        operations: counts and times of updates and pauses so far.
        sleep_level: 0 while the engine is awake; see `LLM.sleep`.
    """

    def __init__(self, llm: AsyncLLM, admission: Admission, root: str | None):
        self._llm, self._admission = llm, admission
        self._root = None if root is None else Path(root).resolve()
        self.turn = asyncio.Lock()
        self.gathering: Gathering | None = None
        self.operations, self.sleep_level = Operations(), 0
        self.weights = OnlineWeights(llm, on_tear=lambda: llm.stops.add(TORN))

    @property
    def is_paused(self) -> bool:
        """Whether `pause` was called, and `resume` was not."""
        return PAUSED in self._llm.stops

    async def pause(self, mode: str) -> None:
        """Run no step until `resume`.

        Args:
            mode: what happens to unfinished requests. "abort" ends them with their tokens so far.
                "wait" finishes them before the pause. "keep" continues them after `resume`. From
                the call until `resume`, "abort" and "wait" refuse new requests with status 503.
                "keep" queues new requests, even if an earlier `pause` refused them.

        Raises:
            ValueError: `mode` is unknown. Or it is "wait", and there are unfinished requests, which
                cannot finish because the engine is already stopped.
        """
        await self._stop(PAUSED, mode)
        self.operations.pause()

    async def resume(self) -> None:
        """Undo `pause`."""
        await self._go(PAUSED)
        self.operations.resume()

    async def sleep(self, level: int, mode: str) -> None:
        """Free the device's memory until `wake_up`; see `LLM.sleep`.

        `mode` says what happens to unfinished requests; see `pause`. While the engine is asleep,
        new requests are refused with status 503 in every mode. If it fails to fall asleep, it is
        woken up.

        Raises:
            ValueError: `mode` is refused as in `pause`, or `level` is neither 1 nor 2.
        """
        check_level(level)
        was_asleep = ASLEEP in self._llm.stops
        await self._stop(ASLEEP, mode)
        try:
            await self._apply(lambda llm: llm.sleeps.begin(level))
        except BaseException:  # also a CancelledError
            if not was_asleep:
                await self.wake_up()
            raise
        self.sleep_level = max(self.sleep_level, level)

    async def wake_up(self) -> None:
        """Undo `sleep`. A paused engine stays paused."""
        await self._apply(lambda llm: llm.sleeps.end())
        self.sleep_level = 0
        await self._go(ASLEEP)

    async def abort(self, names: Sequence[str]) -> int:
        """Abort the requests whose responses have these ids, or all requests if `names` is empty.

        Return the number of aborted prompts: a request can have several.
        """

        def is_named(request_id: str) -> bool:
            return request_id in names or request_id.rpartition("-")[0] in names

        ids = await self._apply(lambda llm: list(llm.engine.unfinished_ids))
        chosen = [one for one in ids if not names or is_named(str(one))]
        return sum([await self._llm.abort(one) for one in chosen])

    async def update(
        self, weights: Any, version: int | None, *, is_drafter: bool = False
    ) -> WeightUpdate:
        """Replace the target's weights or, if `is_drafter`, the drafter's weights.

        See `OnlineWeights.update`. If an update of the target fails half-way, unfinished requests
        end with their tokens so far. New requests are refused until an update of the target
        succeeds.
        """
        target, drafter = (None, weights) if is_drafter else (weights, None)
        try:
            made = await asyncio.to_thread(self.weights.update, target, version, drafter=drafter)
        except Exception:
            if self.weights.is_torn:
                self._admission.closed.add(TORN)
                await self.abort([])
            raise
        self.operations.num_updates["drafter" if is_drafter else "target"] += 1
        if not self.weights.is_torn:
            await self._go(TORN)
        return made

    async def quantization(self) -> str | None:
        """Return the kinds of quantised numbers in the target's weights; see `Rollout`."""
        return kinds_of((await self._params()).target)

    def relabel(self, version: int) -> None:
        """Give the current weights a new version.

        Raises:
            ValueError: the version is not above the current one.
        """
        self.weights.versions.append(next_version(self.weights.version, version))

    def folder(self, given: str) -> Path:
        """Return the path of a folder of weights below `root`, with all links resolved.

        Raises:
            ValueError: `root` is None, or the folder or a file in it is not below `root`.
        """
        if self._root is None:
            raise ValueError("path: the server reads no folders; start it with --rl-weights-root")
        wrong = ValueError(f"path: {given[:200]!r} is not a folder below --rl-weights-root")
        try:
            path = (self._root / given).resolve()
            inside = [path, *(one.resolve() for one in path.rglob("*"))]
            is_folder = path.is_dir() and path != self._root
        except (OSError, RuntimeError, ValueError):  # links in a circle, names too long, null bytes
            raise wrong from None
        if not is_folder or not all(one.is_relative_to(self._root) for one in inside):
            raise wrong
        return path

    def public(self, text: str) -> str:
        """Return an error's text without the path of `root`."""
        return text if self._root is None else text.replace(f"{self._root}/", "")

    async def gather(self, weights: Any) -> None:
        """Read weights, and add them to the update that has started.

        Raises:
            ValueError: the weights cannot be read, or `Gathering.add` refuses them. Then nothing is
                added.
        """
        assert self.gathering is not None
        params = await self._params()
        part = await asyncio.to_thread(read_named, weights, params.target, "weights")
        self.gathering.add(part, max_bytes(params))

    async def read_stream(self, parts: AsyncIterator[bytes], seconds: float) -> dict[str, Any]:
        """Return the arrays of a safetensors file that arrives in parts.

        Args:
            seconds: how long to wait for a part.

        Raises:
            ValueError: the parts are not a valid safetensors file.
            APIError: the file is too large, or a part did not arrive in time.
        """
        limit = max_bytes(await self._params())
        with tempfile.TemporaryDirectory(prefix="specjax-weights-") as folder:
            path = Path(folder) / "body.safetensors"
            size = 0
            with path.open("wb") as file:
                try:
                    async for part in _timed(parts, seconds):
                        size += len(part)
                        if size > limit:
                            raise APIError(413, f"the weights have more than {limit} bytes")
                        await asyncio.to_thread(file.write, part)
                except TimeoutError:
                    raise APIError(408, "the body did not arrive in time") from None
            return await asyncio.to_thread(_read_file, path)

    async def _stop(self, why: str, mode: str) -> None:
        """Run no step until `_go`, for the reason `why`. A failure or cancellation is undone."""
        check_choice("mode", mode, PAUSES)
        if mode == "wait" and self._llm.stops and self._admission.num_samples:
            raise ValueError("mode 'wait': no step runs, so requests would never finish; resume")
        was_stopped, closed = why in self._llm.stops, self._admission.closed
        (closed.discard if mode == "keep" else closed.add)(why)
        try:
            while mode == "wait" and self._admission.num_samples:
                await asyncio.sleep(POLL_SECONDS)
            await self._apply(lambda _: self._llm.stops.add(why))
            if mode == "abort":
                await self.abort([])
        except BaseException:  # also a CancelledError
            if not was_stopped:
                await self._go(why)
            raise

    async def _go(self, why: str) -> None:
        self._admission.closed.discard(why)
        await self._apply(lambda _: self._llm.stops.discard(why))

    async def _params(self) -> Params:
        return await self._apply(lambda llm: llm.engine.params)

    async def _apply(self, function: Any) -> Any:
        return await asyncio.wrap_future(self._llm.apply(function))


async def _timed(parts: AsyncIterator[bytes], seconds: float) -> AsyncIterator[bytes]:
    """Yield the parts of a body. Raise TimeoutError if a part takes longer than `seconds`."""
    while True:
        async with asyncio.timeout(seconds):
            part = await anext(parts, None)
        if part is None:
            return
        yield part


def _read_file(path: Path) -> dict[str, Any]:
    try:
        files = open_file(path)
        return {name: files.read(name) for name in files.names()}
    except ValueError as error:
        raise ValueError(str(error).replace(str(path), "the body")) from None
