"""Starts the ranks of a distributed test: one process that imports what they need, and forks them."""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def launch(script: Path) -> list[Any]:
    """What each rank of `script` returned; `script` calls :func:`fork`."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def fork(main: Callable[[], Any], ranks: int) -> None:
    """Run `main` as that many ranks with torchrun's environment, and print what they returned as a list in JSON."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    forking = multiprocessing.get_context("fork")
    results = forking.SimpleQueue()

    def one(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        try:
            results.put((rank, main(), None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))

    processes = [forking.Process(target=one, args=(rank,), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    returned: dict[int, Any] = {}
    for _ in processes:
        rank, result, trouble = results.get()
        if trouble is not None:
            sys.exit(f"rank {rank}: {trouble}")  # the others, which may wait for it, end with this process
        returned[rank] = result
    print(json.dumps([returned[rank] for rank in range(ranks)]))
