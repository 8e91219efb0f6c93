"""How much faster the chunk form is than the recurrence on a CPU, as ratios inside one run; and its memory against T.

python benchmarks/operator_cpu.py [--out results/bench] [--repeats 7] [--threads 2]
"""

import argparse
import statistics
import subprocess
import sys
import time

import torch

from ckda import complex_kda, transition
from ckda.ops.gate import beta_from_logit, evaluate_gate
from ckda.record import environment, write_json

#: name -> (B, T, H, K = V); the ratio each must reach
SHAPES = {"B2 T2048 H4 D64": ((2, 2048, 4, 64), 25.0), "B64 T32 H12 D16 (demo)": ((64, 32, 12, 16), 4.0)}


def arguments(B: int, T: int, H: int, D: int) -> tuple[dict, dict]:
    """Inputs as a freshly initialised CKDA layer would give them: unit-variance projections, long-memory gates."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {name: draw(B, T, H, D) for name in "qkvg"} | {"beta": draw(B, T, H)}
    tensors["g"] = tensors["g"] * 0.1 + torch.where(draw(H, D) > 0, 6.0, -6.0)
    options = {"gate": "signed", "beta_range": 2, "normalize_qk": True}
    return {name: x.requires_grad_() for name, x in tensors.items()}, options


def indexed_loop(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """The recurrence as one would first write it, indexing each token; autograd then pays for T slices of T tokens."""
    gate, beta = evaluate_gate("signed", g), beta_from_logit(beta, 2)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    alpha, scale = gate.alpha(), q.shape[-1] ** -0.5
    S, outputs = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]), []
    for t in range(q.shape[1]):
        rate = beta[:, t, :, None]
        S = transition.apply(S, alpha[:, t], rate * k[:, t], k[:, t], rate * v[:, t])
        outputs.append(scale * (q[:, t].unsqueeze(-2) @ S).squeeze(-2))
    return torch.stack(outputs, 1)


def run_once(tensors: dict, options: dict, backend: str, do: torch.Tensor) -> float:
    """Seconds of one forward and backward pass."""
    began = time.perf_counter()
    o = indexed_loop(**tensors) if backend == "indexed loop" else complex_kda(**tensors, **options, backend=backend)[0]
    torch.autograd.grad(o, list(tensors.values()), do)
    return time.perf_counter() - began


def compare(shape: tuple[int, int, int, int], repeats: int) -> dict:
    """Times of both backends, taken in turn so that a busy machine hits both alike."""
    tensors, options = arguments(*shape)
    do = torch.randn(tensors["v"].shape, generator=torch.Generator().manual_seed(1))
    seconds: dict[str, list[float]] = {"indexed loop": [], "reference": [], "chunked": []}
    for round_ in range(repeats + 1):
        for backend, times in seconds.items():
            for _ in range(3 if backend == "chunked" else 1):
                elapsed = run_once(tensors, options, backend, do)
                if round_:
                    times.append(elapsed)
    result = {backend: quantiles(times) for backend, times in seconds.items()}
    for loop in ("indexed loop", "reference"):
        result[f"ratio to {loop}"] = result[loop]["p50"] / result["chunked"]["p50"]
    return result


def quantiles(times: list[float]) -> dict:
    """p20, p50 and p80 in seconds."""
    cuts = statistics.quantiles(times, n=10)
    return {"p20": cuts[1], "p50": statistics.median(times), "p80": cuts[7], "n": len(times)}


def peak_memory(T: int) -> int | None:
    """Bytes that one forward and backward pass at this T adds to a fresh process at its peak; None but on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); import operator_cpu as b, torch\n"
        "def status(key): return next(int(x.split()[1]) for x in open('/proc/self/status') if x.startswith(key)) * 1024\n"
        "torch.set_num_threads(2); t, o = b.arguments(2, 64, 4, 64); b.run_once(t, o, 'chunked', torch.randn_like(t['v']))\n"
        "open('/proc/self/clear_refs', 'w').write('5')  # the peak counts from here\n"
        f"before = status('VmRSS'); t, o = b.arguments(2, {T}, 4, 64)\n"
        "b.run_once(t, o, 'chunked', torch.randn_like(t['v'])); print(status('VmHWM') - before)"
    )
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="results/bench")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result: dict = {"what": "chunked against reference on a CPU", "environment": environment("cpu"), "shapes": {}}
    for name, (shape, target) in SHAPES.items():
        row = compare(shape, options.repeats) | {"target": target}
        result["shapes"][name] = row
        print(
            f"{name:24s} chunked {row['chunked']['p50'] * 1e3:6.1f} ms, {row['ratio to reference']:.1f} times faster than the "
            f"reference, than an indexed loop {row['ratio to indexed loop']:.1f} times (target {target:g})"
        )
    memory = {T: peak_memory(T) for T in (2048, 8192)}
    ratio = memory[8192] / memory[2048] if memory[2048] and memory[8192] else None
    result["memory"] = {"bytes": memory, "ratio": ratio, "target": 4.4}
    print(f"peak memory at T = 8192 over T = 2048: {ratio if ratio is None else round(ratio, 2)} (target at most 4.4)")
    write_json(f"{options.out}/operator_cpu.json", result)


if __name__ == "__main__":
    main()
