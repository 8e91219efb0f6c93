"""Compile kernel launches for a GPU that is not there, and read registers, spills and shared memory from the result.

python -m ckda.ops.triton.compile --capability 90
"""

import argparse
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from ckda.ops.call import Call
from ckda.ops.triton import SMALL_HEAD, chunk, hopper, recurrent
from ckda.ops.triton.launch import Launch

__all__ = ["Resources", "compile_launch", "main", "resources"]

_POINTER = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Resources(NamedTuple):
    """What one program of a kernel takes."""

    registers: int  #: a thread
    spills: int  #: bytes of local memory a thread
    shared: int  #: bytes
    warps: int
    start: float  #: the largest constant that a product is added to
    barriers: int  #: places in its text where its warps wait for each other


def _argument(value: Any) -> str:
    """The type of a run-time argument, in Triton's spelling."""
    if isinstance(value, Tensor):
        return _POINTER[value.dtype]
    if hasattr(value, "block_shape"):  # tiles
        return f"tensordesc<{_POINTER[value.base.dtype][1:]}{list(value.block_shape)},{value.layout!r}>"
    if isinstance(value, float):
        return "fp32"
    return "i32"


def _source(kernel: Any) -> type[ASTSource]:
    """How Triton reads a kernel of its own dialect, or of Gluon."""
    if not kernel.is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def compile_launch(launch: Launch, capability: int) -> CompiledKernel:
    """The kernel of one launch for compute capability 80, 89, 90, 100, ..."""
    kernel = launch.kernel
    fixed = {p.name for p in kernel.params if p.is_constexpr}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = launch.arguments[name]
        if name in fixed or value is None:
            signature[name] = "constexpr"
            constants[(index,)] = value
        else:
            signature[name] = _argument(value)
            if isinstance(value, Tensor):
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = _source(kernel)(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)


def _largest_start(ttgir: str) -> float:
    """Of the constants that are accumulators of a product: the compiler makes them of numbers added to one.

    Hopper's accumulators have fewer bits than float32, so a large one loses the last digits of the product.

    Example:
        >>> _largest_start("%c = arith.constant dense<0x4B400000> : tensor<64x32xf32, #mma>\\n%d = tt.dot %a, %b, %c, x")
        12582912.0
    """
    constants = dict(re.findall(r"(%\w+) = arith\.constant dense<([^>]+)> : tensor<[\dx]+xf32", ttgir))
    starts = [constants.get(name, "0") for name in re.findall(r"(?:tt\.dot|warp_group_dot) %\S+, %\S+, (%\w+)", ttgir)]
    values = [struct.unpack(">f", bytes.fromhex(x[2:]))[0] if x.startswith("0x") else float(x) for x in starts]
    return max(map(abs, values), default=0.0)


def _cuobjdump() -> str | None:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(path) if path.exists() else None


def resources(compiled: CompiledKernel) -> Resources:
    """Registers and local memory as the assembler reports them; -1 where the tool that reads them is missing."""
    registers = spills = -1
    tool = _cuobjdump()
    if tool is not None:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
        text = usage.stdout + usage.stderr
        registers = max(map(int, re.findall(r"REG:(\d+)", text)))
        spills = max(map(int, re.findall(r"STACK:(\d+)", text)))
    metadata = compiled.metadata
    start, barriers = _largest_start(compiled.asm["ttgir"]), len(re.findall(r"bar\.sync\s+0\b", compiled.asm["ptx"]))
    return Resources(registers, spills, metadata.shared, metadata.num_warps, start, barriers)


def example(
    K: int = 128,
    V: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    gate: str | None = "signed",
    packed: bool = False,
    T: int = 128,
    gate_dtype: torch.dtype | None = None,
    beta_range: int | None = 2,
    group: int = 1,
    bias: bool = True,
    backend: str = "auto",
) -> Call:
    """A call of that kind, on the CPU: only its shapes and dtypes are read."""
    x, v = torch.empty(1, T, 2, K, dtype=dtype), torch.empty(1, T, 2, V, dtype=dtype)
    return Call(
        q=x[:, :, ::group],
        k=x[:, :, ::group],
        v=v,
        g=x.to(gate_dtype or dtype),
        beta=x[..., 0],
        sign=x.to(torch.int8) if gate is None else None,
        A_log=None if gate is None else torch.empty(2),
        dt_bias=None if gate is None or not bias else torch.empty(2 * K),
        cu_seqlens=torch.tensor([0, T]) if packed else None,
        gate=gate,
        beta_range=beta_range,
        normalize_qk=True,
        output_final_state=True,
        backend=backend,
    )


#: the calls whose kernels are compiled
EXAMPLES: dict[str, dict[str, Any]] = {
    "bf16 128x128": {},
    "bf16 64x64, groups": {"K": 64, "V": 64, "group": 2},
    "bf16 256x256": {"K": 256, "V": 256},
    "bf16 256x256 softplus": {"K": 256, "V": 256, "gate": "softplus", "backend": "triton-hopper"},
    "fp16 128x128": {"dtype": torch.float16},
    "fp32 128x128": {"dtype": torch.float32},
    "fp32 16x16": {"K": 16, "V": 16, "dtype": torch.float32, "bias": False},
    "bf16 128x128 softplus": {"gate": "softplus"},
    "bf16 128x128 given, packed": {"gate": None, "packed": True},
}


def launches(call: Call, capability: int) -> list[Launch]:
    """Those of every form that serves such a call on such a GPU, and of one step; Hopper's alone where they are named."""
    of_hopper: list[Launch] = []
    if capability == 90 and hopper.tried() and hopper.unfit(call) is None:
        all_launches = chunk.launches(call._replace(backend="triton-hopper"))
        of_hopper = [x for x in all_launches if x.kernel.fn.__module__.startswith(hopper.__name__)]
    if call.backend == "triton-hopper":
        return of_hopper
    found = chunk.launches(call) + of_hopper
    small = max(call.q.shape[-1], call.v.shape[-1]) <= SMALL_HEAD
    return found + (recurrent.launches(call) if small else recurrent.step_launches(call))


def rows(capability: int, names: list[str]) -> Iterator[tuple[str, str, Resources]]:
    """(example, kernel, resources) of every launch."""
    for name in names:
        for launch in launches(example(**EXAMPLES[name]), capability):
            yield name, launch.kernel.__name__, resources(compile_launch(launch, capability))


def main() -> None:
    """Print a table of what each kernel takes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", type=int, default=90, help="of the GPU, e.g. 80, 89, 90, 100 (default: 90)")
    parser.add_argument("--example", action="append", choices=[*EXAMPLES], help="one of the calls (default: all)")
    arguments = parser.parse_args()
    print(f"{'call':28}{'kernel':20}{'registers':>10}{'spills':>8}{'shared':>8}{'warps':>6}{'barriers':>9}")
    for name, kernel, x in rows(arguments.capability, arguments.example or [*EXAMPLES]):
        print(f"{name:28}{kernel:20}{x.registers:10}{x.spills:8}{x.shared:8}{x.warps:6}{x.barriers:9}")


if __name__ == "__main__":
    main()
