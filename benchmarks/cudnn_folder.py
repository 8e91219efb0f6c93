"""Unpack NVIDIA's KDA kernels for Hopper into a folder that `ckda bench --cudnn FOLDER` reads; nothing is installed.

    python benchmarks/cudnn_folder.py .carry/cud            # downloads two wheels with pip
    python benchmarks/cudnn_folder.py .carry/cud A.whl B.whl  # or takes those that are here

Run it where there is a network; the folder (some 30 MB) may then be carried to a machine with a GPU and none. The package's own
start imports all of cuDNN, which is not needed: two small modules stand in for it.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ckda.record import write_text

WHEELS = ("nvidia-cudnn-frontend==1.32.0", "cuda-bindings>=13,<14")
WANTED = (
    "cudnn/linear_attention/cake/compiler.py",
    "cudnn/linear_attention/hopper/cuda_host.py",
    "cudnn/linear_attention/hopper/cuda_bwd_host.py",
    "cudnn/linear_attention/hopper/cuda_kernels/",
    "cuda/",
)
EMPTY = (
    "cudnn",
    "cudnn/frost",
    "cudnn/linear_attention",
    "cudnn/linear_attention/cake",
    "cudnn/linear_attention/hopper",
)
STAND_INS = {
    "cudnn/frost/device.py": '''"""Stands in for the package's own, which imports all of cuDNN."""

from contextlib import nullcontext

import torch


def compute_capability(device):
    return torch.cuda.get_device_capability(device)


def device_context(device):
    return nullcontext()
''',
    "cudnn/_device.py": '''"""Stands in for the package's own, which imports all of cuDNN."""

from cuda.bindings import driver


def _device_handle(device):
    driver.cuInit(0)
    return driver.cuDeviceGet(device)[1]
''',
}


def download(folder: Path, python: str) -> list[Path]:
    """The two wheels for that version of Python on Linux."""
    target = ["--python-version", python, "--platform", "manylinux_2_28_x86_64", "--only-binary=:all:"]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", *target, "-d", str(folder), *WHEELS], check=True
    )
    return sorted(folder.glob("*.whl"))


def unpack(wheels: list[Path], folder: Path) -> None:
    """The wanted files of the wheels, and what stands in for the others."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith(WANTED)])
    for name in EMPTY:
        write_text(folder / name / "__init__.py", "")
    for name, text in STAND_INS.items():
        write_text(folder / name, text)


def main() -> None:
    """Download where no wheels are given, and unpack."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("wheels", type=Path, nargs="*")
    parser.add_argument("--python", default="3.12", help="the version that will read the folder (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as here:
        unpack(arguments.wheels or download(Path(here), arguments.python), arguments.folder)
    print(arguments.folder)


if __name__ == "__main__":
    main()
