"""Clients before and after ckda.compat.accelerate(): the operator alone, and a whole model.

python benchmarks/clients.py kimi [--out results/compat]           transformers' Kimi-Linear on the CPU, against its torch path
python benchmarks/clients.py fla CHECKOUT [--out results/compat]   FLA's KDA model of 340M parameters on a GPU, against its kernels

Each first checks that the results agree, then times forward+backward of the operator on the layer's own arguments, and an update
(on the CPU forward+backward) of the model. FLA tries every configuration of its kernels for a shape; the processes of --jobs
compile them side by side before that, and each is timed for some 20 ms instead of 100. The record is {client}.json.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckda.compat import accelerate
from ckda.compat import fla as ours
from ckda.record import environment, write_json


def timed(run: Callable[[], Any], repeats: int, device: str) -> tuple[float, float]:
    """The seconds of the fastest run, and the least seconds of processor time of a run, after one that is not counted.

    Others may use the machine: the second says what the first would be on an idle one, up to how well two threads share work.
    """
    times, used = [], []
    for _ in range(repeats + 1):
        synchronize(device)
        start, processor = time.perf_counter(), time.process_time()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
        used.append(time.process_time() - processor)
    return min(times[1:]), min(used[1:])


def before_after(before: tuple[float, float], after: tuple[float, float]) -> dict[str, float]:
    return {
        "before": before[0],
        "after": after[0],
        "ratio": before[0] / after[0],
        "processor_before": before[1],
        "processor_after": after[1],
        "processor_ratio": before[1] / after[1],
    }


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def error(found: Tensor, truth: Tensor) -> float:
    """The relative distance."""
    return float((found.detach().double() - truth.detach().double()).norm() / truth.detach().double().norm())


def forward_backward(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Logits, loss and all gradients as one vector."""
    model.zero_grad()
    result = model(tokens, labels=tokens)
    result.loss.backward()
    gradients = [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
    found = {"loss": result.loss.detach().clone(), "gradients": torch.cat(gradients)}
    return found if result.logits is None else found | {"logits": result.logits.detach()}


def captured(module: Any, name: str, run: Callable[[], Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with which the first layer calls its operator, as leaves."""
    kept: list[Any] = []
    original = getattr(module, name)

    def spy(*args: Any, **keywords: Any) -> Any:
        if not kept:
            kept.append((args, keywords))
        return original(*args, **keywords)

    setattr(module, name, spy)
    run()
    setattr(module, name, original)
    args, keywords = kept[0]
    return [leaf(x) for x in args], {key: leaf(x) for key, x in keywords.items()}


def leaf(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def call(function: Callable, args: list[Any], keywords: dict[str, Any]) -> Callable[[], Any]:
    """Forward and backward of the operator on captured arguments."""
    leaves = [x for x in (*args, *keywords.values()) if isinstance(x, Tensor) and x.requires_grad]
    seed: list[Tensor] = []

    def run() -> tuple[Tensor, tuple[Tensor, ...]]:
        o = function(*args, **keywords)[0]
        if not seed:
            generator = torch.Generator(o.device).manual_seed(0)
            seed.append(torch.randn(o.shape, dtype=o.dtype, device=o.device, generator=generator))
        return o, torch.autograd.grad(o, leaves, seed[0])

    return run


def compare_operators(before: Callable, after: Callable, args: list, keywords: dict, repeats: int, device: str) -> dict:
    """Seconds of each, and how far their outputs and gradients are apart."""
    runs = [call(function, args, keywords) for function in (before, after)]
    (o, gradients), (o_ours, gradients_ours) = (run() for run in runs)
    apart = {"o": error(o_ours, o)} | {
        f"gradient {i}": error(a, b) for i, (a, b) in enumerate(zip(gradients_ours, gradients, strict=True))
    }
    seconds = [timed(run, repeats, device) for run in runs]
    return before_after(*seconds) | {"apart": apart}


# transformers' Kimi-Linear on the CPU ---------------------------------------------------------------------------------------


def kimi(args: argparse.Namespace) -> dict[str, Any]:
    from transformers import KimiLinearConfig, KimiLinearForCausalLM
    from transformers.models.kimi_linear import modeling_kimi_linear as module

    torch.set_num_threads(2)
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "mlp_layer_types": ["dense"] * 4,
        "linear_num_heads": 4, "linear_head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
        "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    model = KimiLinearForCausalLM(KimiLinearConfig(**sizes))
    tokens = torch.randint(512, (1, args.tokens))
    with torch.no_grad():
        prompt = tokens[:, :100]
        before_tokens = model.generate(prompt, max_new_tokens=16, do_sample=False)
        with accelerate("kimi_linear", quiet=True):
            same_tokens = bool(torch.equal(before_tokens, model.generate(prompt, max_new_tokens=16, do_sample=False)))
    name = "chunk_kimi_delta_attention"
    arguments = captured(module, name, lambda: model(tokens))
    operator = compare_operators(getattr(module, name), ours.chunk_kda, *arguments, args.repeats, "cpu")
    theirs = forward_backward(model, tokens)
    before = timed(lambda: forward_backward(model, tokens), args.repeats, "cpu")
    with accelerate("kimi_linear", quiet=True):
        found = forward_backward(model, tokens)
        after = timed(lambda: forward_backward(model, tokens), args.repeats, "cpu")
    return {
        "client": "transformers kimi_linear, its torch path",
        "tokens": [1, args.tokens],
        "sizes": sizes,
        "same_tokens": same_tokens,
        "apart": {key: error(found[key], x) for key, x in theirs.items()},
        "operator": operator,
        "model": before_after(before, after),
    }


# FLA's KDA model on a GPU ---------------------------------------------------------------------------------------------------


def fla_model(layers: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """FLA's KDA of 340M parameters (24 layers of 1024, 8 heads of 128) with its bounded gate."""
    from fla.models.kda import KDAConfig, KDAForCausalLM

    torch.manual_seed(0)
    config = KDAConfig(
        hidden_size=1024, num_heads=8, head_dim=128, num_hidden_layers=layers, safe_gate=True, lower_bound=-5.0,
        vocab_size=32000, bos_token_id=None, eos_token_id=None, use_cache=True,
    )  # fmt: skip
    model = KDAForCausalLM(config).to("cuda", dtype)
    for block in model.model.layers:
        block.attn.A_log.data, block.attn.dt_bias.data = block.attn.A_log.data.float(), block.attn.dt_bias.data.float()
    return model


def quick_tuning(part: int, parts: int) -> None:
    """This process's share of every kernel's configurations, each timed briefly."""
    import triton
    from triton.runtime.autotuner import Autotuner

    make = Autotuner.__init__

    def made(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **options: Any) -> None:
        make(self, fn, arg_names, configs[part % len(configs) :: parts] if configs else configs, *rest, **options)
        self._do_bench = lambda run, quantiles: triton.testing.do_bench(run, warmup=5, rep=20, quantiles=quantiles)

    Autotuner.__init__ = made


def tune(args: argparse.Namespace) -> None:
    """Compile FLA's configurations in parallel; Triton keeps what it compiled on the disk."""
    again = [sys.executable, __file__, *sys.argv[1:]]
    jobs = [subprocess.Popen([*again, "--part", str(i)], stdout=subprocess.DEVNULL) for i in range(args.jobs)]
    for job in jobs:
        job.wait()


def one_update(model: Any, tokens: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()


def generated(prompt: Tensor) -> dict[str, Any]:
    """Greedy tokens of the model in float32, before and after; null with the reason where this FLA cannot generate here."""
    model = fla_model(4, torch.float32).eval()
    found = []
    with torch.no_grad():
        try:
            found.append(model.generate(prompt, max_new_tokens=16, do_sample=False))
        except Exception as problem:
            return {"same_tokens": None, "why": f"FLA's own model does not generate: {problem!r}"}
        with accelerate("fla.kda", quiet=True):
            found.append(model.generate(prompt, max_new_tokens=16, do_sample=False))
    return {"same_tokens": bool(torch.equal(*found))}


def gated_delta_rule(shape: tuple[int, int]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of the gated delta rule as GDN layers of the same size give them."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(*shape, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    g = -torch.rand(*shape, 8, device="cuda")
    beta = torch.rand(*shape, 8, device="cuda", dtype=torch.bfloat16)
    return [q, k, v, g.requires_grad_(), beta.requires_grad_()], {"use_qk_l2norm_in_kernel": True}


def agreement(tokens: Tensor) -> dict[str, Any]:
    """How far each is from the same model in float32 on our kernels."""
    errors: dict[str, dict[str, float]] = {}
    model = fla_model(8).train()
    found = {}
    for name, context in (("before", nullcontext()), ("after", accelerate("fla.kda", quiet=True))):
        with context:
            found[name] = forward_backward(model, tokens)
    with accelerate("fla.kda", quiet=True):
        truth = forward_backward(model.float(), tokens)
    for name, values in found.items():
        errors[name] = {key: error(values[key], truth[key]) for key in values}
    return errors


def fla(args: argparse.Namespace) -> dict[str, Any]:
    sys.path.insert(0, str(args.checkout))
    shape = (args.batch, args.length)
    tokens = torch.randint(32000, shape, device="cuda")
    start = time.monotonic()
    if args.part is not None:
        quick_tuning(args.part, args.jobs)
        model = fla_model(1).train()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        one_update(model, tokens, optimizer)
        from fla.layers import gated_deltanet

        call(gated_deltanet.chunk_gated_delta_rule, *gated_delta_rule(shape))()
        os._exit(0)
    if args.jobs > 1:
        tune(args)
    quick_tuning(0, 1)
    from fla.layers import gated_deltanet
    from fla.layers import kda as layer

    model = fla_model(args.layers).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    arguments = captured(layer, "chunk_kda", lambda: model(tokens, use_cache=False))
    run_theirs = call(layer.chunk_kda, *arguments)
    run_theirs()
    tuned = time.monotonic() - start
    record: dict[str, Any] = {
        "client": "fla KDAForCausalLM, its kernels",
        "tokens": list(shape),
        "layers": args.layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds_of_tuning": round(tuned, 1),
        "operator": compare_operators(layer.chunk_kda, ours.chunk_kda, *arguments, args.repeats, "cuda"),
    }
    theirs = gated_deltanet.chunk_gated_delta_rule
    record["gated delta rule"] = compare_operators(
        theirs, ours.chunk_gated_delta_rule, *gated_delta_rule(shape), args.repeats, "cuda"
    )
    before = timed(lambda: one_update(model, tokens, optimizer), args.repeats, "cuda")
    with accelerate("fla.kda", quiet=True):
        after = timed(lambda: one_update(model, tokens, optimizer), args.repeats, "cuda")
    record["model"] = before_after(before, after) | {
        "tokens_per_second": [tokens.numel() / before[0], tokens.numel() / after[0]]
    }
    record |= {"errors": agreement(tokens[:1, :512])} | generated(tokens[:1, :32])
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="client", required=True)
    cpu = commands.add_parser("kimi")
    cpu.add_argument("--tokens", type=int, default=1024)
    gpu = commands.add_parser("fla")
    gpu.add_argument("checkout", type=lambda text: Path(text).resolve())
    gpu.add_argument("--batch", type=int, default=8)
    gpu.add_argument("--length", type=int, default=2048)
    gpu.add_argument("--layers", type=int, default=24)
    gpu.add_argument("--jobs", type=int, default=8)
    gpu.add_argument("--part", type=int, help=argparse.SUPPRESS)
    for one in (cpu, gpu):
        one.add_argument("--repeats", type=int, default=5)
        one.add_argument("--out", type=Path)
    args = parser.parse_args()
    record = {"kimi": kimi, "fla": fla}[args.client](args)
    if args.out is not None:
        device = "cuda" if args.client == "fla" else "cpu"
        print(write_json(args.out / f"{args.client}.json", record | {"environment": environment(device)}))
    for part in ("operator", "gated delta rule", "model"):
        found = record.get(part)
        if found is None:
            continue
        print(
            f"{part:18} {found['before']:.4f} s -> {found['after']:.4f} s, {found['ratio']:.2f} times as fast "
            f"({found['processor_ratio']:.2f} by processor time)"
        )
    print({key: record[key] for key in ("same_tokens", "apart", "errors") if key in record})
    return 0


if __name__ == "__main__":
    sys.exit(main())
