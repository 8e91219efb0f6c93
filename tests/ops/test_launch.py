"""Kernels that are compiled side by side: each is launched by its own C function."""

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
from triton.runtime.build import compile_module_from_src  # noqa: E402

from ckda.ops.triton.launch import _load  # noqa: E402

SOURCE = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) {
  if (!PyImport_ImportModule("triton.backends.nvidia.driver")) return NULL;
  PyObject* made = PyModule_Create(&module);
  PyModule_AddFunctions(made, methods);
  return made;
}
"""
NUM = 6  # different functions; every one launches several kernels
ROUNDS = 30


class _Driver:
    """Triton's driver as far as it is asked here: its own loader of what a C compiler made, without a GPU."""

    @staticmethod
    def launcher_cls(number: int, metadata: Any) -> Any:
        return compile_module_from_src(SOURCE % number, "__triton_launcher").launch


class _Kernel:
    metadata = None

    def __init__(self, src: int) -> None:
        self.src, self.function = src, None

    @property
    def run(self) -> Any:
        self.function = self.function or _Driver.launcher_cls(self.src, self.metadata)
        return self.function


def _compile(name: str, source: str, folder: str, *_: Any) -> str:
    """As Triton does it, but a source that was compiled before is not compiled again."""
    text, library = Path(source).read_text(), Path(folder) / f"{name}.so"
    if text not in COMPILED:
        include = f"-I{sysconfig.get_paths()['include']}"
        subprocess.run(["gcc", source, "-shared", "-fPIC", include, "-o", library], check=True)
        COMPILED[text] = library.read_bytes()
    library.write_bytes(COMPILED[text])
    return str(library)


COMPILED: dict[str, bytes] = {}


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_kernels_loaded_together_have_their_own_functions(
    often: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", _Driver())
    monkeypatch.setattr(triton.knobs.build, "impl", _compile)
    for i in range(ROUNDS):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / str(i)))
        kernels = [_Kernel(i % NUM) for i in range(4 * NUM)]
        with ThreadPoolExecutor(len(kernels)) as threads:
            _load(kernels, threads, device=-1)
        assert [kernel.run() for kernel in kernels] == [kernel.src for kernel in kernels]


def test_kernels_that_were_loaded_are_not_loaded_again() -> None:
    class Loaded:
        _run = object()

    with ThreadPoolExecutor(1) as threads:
        _load([Loaded(), Loaded()], threads, device=-1)  # asks nothing of them
