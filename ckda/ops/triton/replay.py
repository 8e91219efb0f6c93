"""What a kind of call launches, kept: the same kernels on other tensors, without preparing them again.

Preparing launches costs the host more than launching: dictionaries of arguments, descriptors of tiles, looking up what was
compiled. All of it but the addresses follows from shapes, dtypes and options. So the first call of a kind is run as it comes, and
its launches are kept as a :class:`Tape`: arguments with holes, and which tensor's address fills each. What was filled in for a
set of addresses is kept too: the memory of one training step is that of the next.

Whatever lies between the kernels is one allocation a call, made afresh from torch's allocator: calls may overlap on several
streams and in several threads, and inside a recorded graph.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ckda.ops.triton.launch import Launch, are_tidy, enter_context

__all__ = ["Kept", "Tape", "kept_for", "record", "rerun"]

MAX_FILLED = 128  #: sets of addresses that a tape remembers
ALIGNMENT = 512  #: bytes, of what lies between the kernels: torch's allocator gives the same

#: what calls of one kind share: their tapes by name
Kept = dict[str, "Tape"]


class Step(NamedTuple):
    """One launch."""

    launch: Callable[..., None]  #: Triton's C function
    grid: tuple[int, int, int]
    fixed: tuple  #: the compiled function and its properties
    arguments: list[Any]  #: as the function takes them, with holes
    pointers: tuple[tuple[int, int, int], ...]  #: (place, slot, offset): an address that fills a hole
    tiles: tuple[tuple[int, int, int, Callable[[int], Any]], ...]  #: the same for descriptors of tiles

    def filled(self, stream: int, addresses: Sequence[int]) -> tuple[Callable[..., None], tuple]:
        """The function and its arguments."""
        arguments = self.arguments.copy()
        for place, slot, offset in self.pointers:
            arguments[place] = addresses[slot] + offset
        for place, slot, offset, describe in self.tiles:
            arguments[place] = describe(addresses[slot] + offset)
        return self.launch, (*self.grid, stream, *self.fixed, *arguments)


#: a tensor to be made: like which of those given, for that takes the host half the time, or of what shape and dtype; or none
Kind = int | tuple[list[int], torch.dtype] | None


def _make(kind: Kind, given: Sequence[Any], device: torch.device) -> Tensor | None:
    if kind is None:
        return None
    if isinstance(kind, int):
        return torch.empty_like(given[kind])
    return torch.empty(kind[0], dtype=kind[1], device=device)


def _kind(made: Tensor | None, given: Sequence[Tensor | None]) -> Kind:
    if made is None:
        return None
    for i, x in enumerate(given):
        if x is not None and (x.shape, x.dtype, x.device) == (made.shape, made.dtype, made.device):
            return i
    return list(made.shape), made.dtype


class Tape:
    """The launches of one kind of call. Slots are the tensors given, those made and returned, and spare memory between kernels."""

    __slots__ = ("device", "filled", "made", "spare", "steps")

    def __init__(
        self,
        device: torch.device,
        made: Sequence[Kind],
        spare: int,  # bytes
        steps: Sequence[Step],
    ) -> None:
        self.device, self.made, self.spare, self.steps = device, tuple(made), spare, tuple(steps)
        self.filled: dict[tuple[int, ...], list[tuple[Callable[..., None], tuple]]] = {}

    def run(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Launch all on these tensors, which must be tidy (:func:`ckda.ops.triton.launch.are_tidy`); what was made."""
        device = self.device
        made = [_make(kind, given, device) for kind in self.made]
        addresses = [x.data_ptr() for x in (*given, *made) if x is not None]
        if self.spare:
            spare = torch.empty(self.spare, dtype=torch.uint8, device=device)
            addresses.append(spare.data_ptr())
        key = (torch._C._cuda_getCurrentRawStream(device.index), *addresses)
        launches = self.filled.get(key)
        if launches is None:
            launches = self._fill(key)
        for launch, arguments in launches:
            launch(*arguments)
        return made

    def _fill(self, key: tuple[int, ...]) -> list[tuple[Callable[..., None], tuple]]:
        if len(self.filled) >= MAX_FILLED:
            self.filled.clear()
        enter_context(self.device.index)
        stream, *addresses = key
        launches = self.filled[key] = [step.filled(stream, addresses) for step in self.steps]
        return launches


_KEPT: dict[tuple, Kept] = {}
MAX_KEPT = 1024  # lengths without end


def kept_for(name: str, given: Sequence[Tensor | None], *options: Any) -> Kept:
    """What is kept for functions of such tensors; nothing for those that are not tidy."""
    if not are_tidy(given):
        return {}
    key = (name, *[None if x is None else (x.shape, x.dtype, x.device) for x in given], *options)
    kept = _KEPT.get(key)
    if kept is None:
        if len(_KEPT) >= MAX_KEPT:
            _KEPT.clear()
        kept = _KEPT[key] = {}
    return kept


def _is_watched() -> bool:
    """Whether somebody wants to be told of launches."""
    runtime = triton.knobs.runtime
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


def rerun(kept: Kept, name: str, given: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """What such a call makes, by the launches that were kept of another; None where there are none, or not for now."""
    tape = kept.get(name)
    if tape is None or tape.device.index != torch._C._cuda_getDevice() or _is_watched():
        return None
    return tape.run(given)


class _NotKept(Exception):
    """A launch that a tape cannot repeat."""


def _spans(slots: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """(first address, end, slot) of every tensor that has memory; none may overlap, or a hole had two sources."""
    spans = [(x.data_ptr(), x.data_ptr() + x.numel() * x.element_size(), i) for i, x in enumerate(slots)]
    spans = sorted(span for span in spans if span[1] > span[0])
    if any(a[1] > b[0] for a, b in pairwise(spans)):
        raise _NotKept
    return spans


class _Slots:
    """Where addresses belong; memory that nobody named is spare, and all of it one slot behind the others."""

    def __init__(self, named: Sequence[Tensor]) -> None:
        self.spans, self.num = _spans(named), len(named)
        self.spare = 0  #: bytes
        self.spare_spans: list[tuple[int, int, int]] = []  #: (first address, end, place within the slot)

    def find(self, x: Tensor) -> tuple[int, int] | None:
        """The slot and the offset of a tensor in it, None for no memory."""
        address = x.data_ptr()
        if address == 0:
            return None
        for first, end, slot in self.spans:
            if first <= address < end:
                return slot, address - first
        for first, end, place in self.spare_spans:
            if first <= address < end:
                return self.num, place + address - first
        storage, place = x.untyped_storage(), self.spare
        first, size = storage.data_ptr(), storage.nbytes()
        self.spare_spans.append((first, first + size, place))
        self.spare += -(-size // ALIGNMENT) * ALIGNMENT
        return self.num, place + address - first


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
    tiles: list[tuple[int, int, int, Callable[[int], Any]]] = []
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
            tiles.append((len(arguments), *found, _describe(value, meta)))
            arguments += [None, *value.shape, *value.strides]
        else:
            arguments.append(value)
    fixed = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata)
    x, y, z, *_ = (*launch.grid, 1, 1)
    return Step(function, (x, y, z), (*fixed, None, None, None), arguments, tuple(pointers), tuple(tiles))


def record(
    kept: Kept,
    name: str,
    launches: Sequence[tuple[Launch, Any]],  # with what Triton compiled for each
    given: Sequence[Tensor | None],
    made: Sequence[Tensor | None],
) -> None:
    """Keep launches that were just run on these tensors, for calls of the same kind.

    Every tensor that they read and did not write themselves must be among those given: nothing else is there another time.
    """
    if name in kept or any(compiled is None for _, compiled in launches) or not are_tidy(given):
        return
    named = [x for x in (*given, *made) if x is not None]
    try:
        slots = _Slots(named)
        steps = [_step(launch, compiled, slots) for launch, compiled in launches]
    except (_NotKept, AttributeError):
        return
    kept[name] = Tape(named[0].device, [_kind(x, given) for x in made], slots.spare, steps)
