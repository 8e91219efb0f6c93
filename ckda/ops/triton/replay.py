"""What a kind of call launches, kept: the same kernels on other tensors, without preparing them again.

Preparing the launches of a forward and a backward pass costs the host about half a millisecond: dictionaries of arguments,
descriptors of tiles, looking up what was compiled. All of it but the addresses follows from shapes, dtypes and options. So the
first call of a kind is run as it comes, and its launches are kept as a :class:`Tape`: arguments with holes, and which tensor's
address fills each.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ckda.ops.call import Call
from ckda.ops.triton.launch import Launch

__all__ = ["Tape", "find", "forget", "record"]

MAX_TAPES, MAX_TILES = 256, 64
_TAPES: dict[tuple, "Tape | None"] = {}
_NUM_TENSORS = Call._fields.index("gate")


class Step(NamedTuple):
    """One launch."""

    launch: Callable[..., None]  #: Triton's C function
    grid: tuple[int, int, int]
    fixed: tuple  #: the compiled function and its properties
    arguments: list[Any]  #: as the function takes them, with holes
    pointers: tuple[tuple[int, int, int], ...]  #: (place, slot, offset): an address that fills a hole
    tiles: tuple[
        tuple[int, int, int, Callable[[int], Any], dict[int, Any]], ...
    ]  #: the same for descriptors, with those made


class Tape(NamedTuple):
    """The launches of one kind of call. Slots are the tensors given, those made and returned, and spare memory between kernels."""

    device: torch.device
    made: tuple[tuple[torch.Size, torch.dtype] | None, ...]
    spare: tuple[int, ...]  #: bytes
    steps: tuple[Step, ...]

    def run(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Launch all on these tensors; what was made."""
        made = [None if x is None else torch.empty(x[0], dtype=x[1], device=self.device) for x in self.made]
        spare = [torch.empty(n, dtype=torch.uint8, device=self.device) for n in self.spare]
        addresses = [0 if x is None else x.data_ptr() for x in (*given, *made, *spare)]
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        for launch, grid, fixed, arguments, pointers, tiles in self.steps:
            filled = arguments.copy()
            for place, slot, offset in pointers:
                filled[place] = addresses[slot] + offset
            for place, slot, offset, describe, known in tiles:
                address = addresses[slot] + offset
                tile = known.get(address)
                if tile is None:
                    if len(known) >= MAX_TILES:
                        known.clear()
                    tile = known[address] = describe(address)
                filled[place] = tile
            launch(*grid, stream, *fixed, *filled)
        return made


def _kind(x: Tensor | None) -> Any:
    return None if x is None else (x.shape, x.dtype)


def _is_watched() -> bool:
    """Whether somebody wants to be told of launches."""
    hooks = (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook)
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


def find(name: str, call: Call, given: Sequence[Tensor | None]) -> tuple[tuple | None, Tape | None]:
    """The key of such a call, None where its launches cannot be kept, and its tape if there is one.

    They are kept for contiguous tensors at whole multiples of 16 bytes on the current CUDA device, with float32 states.
    """
    device = call.q.device
    if device.type != "cuda" or device.index != torch.cuda.current_device():
        return None, None
    if triton.knobs.runtime.interpret or _is_watched():
        return None, None
    for x in given:
        if x is not None and (not x.is_contiguous() or x.data_ptr() % 16):
            return None, None
    if call.initial_state is not None and call.initial_state.dtype != torch.float32:
        return None, None
    key = (name, device.index, *map(_kind, given), *call[_NUM_TENSORS:])
    return key, _TAPES.get(key)


def forget() -> None:
    """Drop all tapes."""
    _TAPES.clear()


class _NotKept(Exception):
    """A launch that a tape cannot repeat."""


def _spans(slots: Sequence[Tensor | None]) -> list[tuple[int, int, int]]:
    """(first address, end, slot) of every tensor that has memory; none may overlap, or a hole had two sources."""
    spans = [
        (x.data_ptr(), x.data_ptr() + x.numel() * x.element_size(), i) for i, x in enumerate(slots) if x is not None
    ]
    spans = sorted(span for span in spans if span[1] > span[0])
    if any(a[1] > b[0] for a, b in pairwise(spans)):
        raise _NotKept
    return spans


class _Slots:
    """Where addresses belong; memory that nobody named is spare."""

    def __init__(self, named: Sequence[Tensor | None]) -> None:
        self.spans, self.num = _spans(named), len(named)
        self.spare: list[int] = []  #: bytes
        self.spare_spans: list[tuple[int, int, int]] = []

    def find(self, x: Tensor) -> tuple[int, int] | None:
        """The slot and the offset of a tensor in it, None for no memory."""
        address = x.data_ptr()
        if address == 0:
            return None
        for first, end, slot in (*self.spans, *self.spare_spans):
            if first <= address < end:
                return slot, address - first
        storage = x.untyped_storage()
        slot = self.num + len(self.spare)
        self.spare.append(storage.nbytes())
        self.spare_spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), slot))
        return slot, address - storage.data_ptr()


def _describe(tile: Any, meta: dict[str, Any]) -> Callable[[int], Any]:
    """From an address to Triton's descriptor of such tiles."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    fill = triton.runtime.driver.active.utils.fill_tma_descriptor
    kind = (meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"])
    shape, strides = list(tile.shape), list(tile.strides)
    return lambda address: fill(address, *kind, shape, strides, 0)


def _unwrapped(launcher: Any) -> tuple[Callable[..., None], list[Any]]:
    """Triton's C function, and what describes the tiles among its arguments: it hides both in a closure."""
    if not hasattr(launcher, "__closure__") or launcher.__closure__ is None:
        return launcher, []
    cells = dict(zip(launcher.__code__.co_freevars, launcher.__closure__, strict=True))
    if "launcher" not in cells or "tensordesc_meta" not in cells:
        raise _NotKept
    return cells["launcher"].cell_contents, list(cells["tensordesc_meta"].cell_contents)


def _step(launch: Launch, compiled: Any, slots: _Slots) -> Step:
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:
        raise _NotKept
    function, metas = _unwrapped(run.launch)
    arguments: list[Any] = []
    pointers: list[tuple[int, int, int]] = []
    tiles: list[tuple[int, int, int, Callable[[int], Any], dict[int, Any]]] = []
    for name in launch.kernel.arg_names:
        value = launch.arguments[name]
        if isinstance(value, Tensor):
            found = slots.find(value)
            if found is not None:
                pointers.append((len(arguments), *found))
            arguments.append(0)
        elif hasattr(value, "block_shape"):
            found, meta = slots.find(value.base), metas.pop(0)
            if found is None or meta is None:
                raise _NotKept
            tiles.append((len(arguments), *found, _describe(value, meta), {}))
            arguments += [None, *value.shape, *value.strides]
        else:
            arguments.append(value)
    fixed = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata)
    x, y, z, *_ = (*launch.grid, 1, 1)
    return Step(function, (x, y, z), (*fixed, None, None, None), arguments, tuple(pointers), tuple(tiles))


def record(
    key: tuple | None,
    launches: Sequence[tuple[Launch, Any]],  # with what Triton compiled for each
    given: Sequence[Tensor | None],
    made: Sequence[Tensor | None],
) -> None:
    """Keep launches that were just run on these tensors, for calls of the same key."""
    if key is None or key in _TAPES or any(compiled is None for _, compiled in launches):
        return
    if len(_TAPES) >= MAX_TAPES:  # lengths without end
        _TAPES.clear()
    try:
        slots = _Slots((*given, *made))
        steps = tuple(_step(launch, compiled, slots) for launch, compiled in launches)
    except (_NotKept, AttributeError):
        return
    device = next(x.device for x in given if x is not None)
    _TAPES[key] = Tape(device, tuple(map(_kind, made)), tuple(slots.spare), steps)
