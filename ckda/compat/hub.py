"""The operator as a folder in the layout of Hugging Face's `kernels` (0.17), from which it is loaded without this package.

python -m ckda.compat.hub FOLDER

    FOLDER/build/torch-universal/metadata.json
                                 __init__.py     complex_kda, complex_kda_step and FLA's functions (ckda.compat.fla)
                                 layers/         the functions as layers, for kernels' kernelize
                                 ops/ ...        the modules that they need, nothing else

    from kernels import get_local_kernel
    o, state = get_local_kernel(FOLDER).chunk_kda(q, k, v, g, beta)

Such a kernel is Python and Triton: one folder serves every torch, CPU and GPU. Modules are copied with their imports made relative
and their torch operators in a namespace of their own, so that this package may be loaded beside them.
"""

import ast
import re
import sys
from pathlib import Path

from ckda import __version__
from ckda.record import write_json, write_text

__all__ = ["needed_modules", "write_kernel"]

ROOT = Path(__file__).parents[1]
#: what a client finds in the kernel
FUNCTIONS = (
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "fused_kda_gate",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "fused_recurrent_kda_fwd",
)

_INIT = '''"""Complex KDA: the delta rule with signed channel-wise gates; made by ckda {version}."""

from . import layers
from .compat.fla import (
    {functions},
)
from .ops import complex_kda, complex_kda_step

__all__ = ["complex_kda", "complex_kda_step", "layers", {names}]
'''

_LAYERS = '''"""The functions as layers, by the names under which clients look them up."""

from torch import nn
'''

_LAYER = '''

class {name}(nn.Module):
    """FLA's `{name}`."""

    has_backward = True
    can_torch_compile = True

    def forward(self, *args, **kwargs):
        from ..compat import fla

        return fla.{name}(*args, **kwargs)
'''


def write_kernel(folder: str | Path) -> Path:
    """Write the folder, and say where the kernel is."""
    build = Path(folder) / "build" / "torch-universal"
    for module, path in needed_modules().items():
        parts = module.split(".")[1:]
        place = build.joinpath(*parts)
        is_package = path.name == "__init__.py"
        text = _adapted(path.read_text(), depth=len(parts) + is_package)
        write_text(place / "__init__.py" if is_package else place.with_suffix(".py"), text)
    for inner in {path.parent for path in build.rglob("*.py")} - {build}:
        if not (inner / "__init__.py").exists():
            write_text(inner / "__init__.py", "")
    names = ", ".join(f'"{name}"' for name in FUNCTIONS)
    write_text(
        build / "__init__.py", _INIT.format(version=__version__, functions=",\n    ".join(FUNCTIONS), names=names)
    )
    write_text(build / "layers" / "__init__.py", _LAYERS + "".join(_LAYER.format(name=name) for name in FUNCTIONS))
    write_json(build / "metadata.json", _metadata())
    return build


def _metadata() -> dict[str, object]:
    return {
        "id": f"_ckda_universal_{__version__.replace('.', '_')}",
        "name": "ckda",
        "version": 1,
        "license": "MIT",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }


def needed_modules(start: str = "ckda.compat.fla") -> dict[str, Path]:
    """The modules of this package that `start` imports, directly or not, itself included.

    Example:
        >>> found = needed_modules()
        >>> "ckda.ops.dispatch" in found, "ckda.models.lm" in found
        (True, False)
    """
    found: dict[str, Path] = {}
    waiting = [start, "ckda.ops"]
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        found[module] = _file(module)
        waiting += _imports(found[module])
    return dict(sorted(found.items()))


def _file(module: str) -> Path:
    place = ROOT.joinpath(*module.split(".")[1:])
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def _imports(path: Path) -> list[str]:
    """The modules of this package that a file imports: of ``from ckda.a import b`` that is ckda.a.b where it is one."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("ckda"):
            continue
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            is_module = _file(inner).exists()
            modules.append(inner if is_module else str(node.module))
    return modules


def _adapted(text: str, depth: int) -> str:
    """A module's text for its place `depth` folders below the kernel's root."""
    text = re.sub(r"(?m)^(\s*)from ckda(?:\.([\w.]+))? import", rf"\1from {'.' * depth}\2 import", text)
    return re.sub(r"torch\.ops\.ckda\b", "torch.ops.ckda_kernel", re.sub(r'"ckda::', '"ckda_kernel::', text))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m ckda.compat.hub FOLDER")
    print(write_kernel(sys.argv[1]))
