"""Clients before and after ckda.compat.accelerate(): the operator alone, and a whole model.

python benchmarks/clients.py kimi [--out results/compat]    transformers' Kimi-Linear on the CPU, against its torch path
python benchmarks/clients.py gpu [--fla CHECKOUT] [--limit 300] [--parts A,B] [--one-config] [--out results/compat]
                                                            models of 340M parameters on a GPU, against FLA's kernels
python benchmarks/clients.py gpu --smoke [--out FOLDER]     the same way with tiny models on a CPU, in seconds

`gpu` has parts that stand alone, in this order; one that fails is recorded with its reason and the next begins:

    fla kda         FLA's KDA model: the operator on its layer's own arguments, an update of the model, KDA's share of it
    kimi_linear     the same for transformers' Kimi-Linear, which takes FLA's kernels where FLA is there
    fla agreement   logits, loss and gradients of FLA's model before and after, against float32
    fla tokens      what FLA's model generates before and after
    fla gdn         the gated delta rule; FLA 0.6 refuses its backward pass on Hopper with Triton 3.6

The record, clients_gpu.json, is written after every part. The same command goes on where it stopped: what succeeded stays, what
failed is tried again. At --limit seconds the part at work is ended. FLA tries every configuration of its kernels for a shape; the
processes of --jobs compile them side by side before that, and each is timed for some 20 ms instead of 100. With --one-config
it takes the first configuration of each, which is enough for agreement and tokens, not for times; they go to
clients_gpu_untuned.json.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckda.bench.tuning import share_configurations
from ckda.compat import accelerate
from ckda.compat import fla as ours
from ckda.record import environment, read_json, write_json


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


# Models of 340M parameters on a GPU ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A client's model, and where it looks its operator up."""

    client: str  #: of ckda.compat.clients.CLIENTS
    build: Callable[[int, torch.dtype], Any]  #: number of layers, dtype -> model on the device
    layers: int
    mixers: int  #: how many of the layers have KDA
    vocabulary: int
    module: str
    function: str

    def tokens(self, shape: tuple[int, int], device: str) -> Tensor:
        return torch.randint(self.vocabulary, shape, device=device, generator=torch.Generator(device).manual_seed(0))


def sized(smoke: bool) -> dict[str, Any]:
    """The size of the models: 24 layers of 1024 with 8 heads of 128, or tiny."""
    full = {"layers": 24, "hidden": 1024, "heads": 8, "head": 128, "inner": 2816, "vocabulary": 32000}
    return full if not smoke else {"layers": 4, "hidden": 32, "heads": 2, "head": 16, "inner": 48, "vocabulary": 61}


def fla_subject(smoke: bool) -> Subject:
    size = sized(smoke)
    build = partial(fla_model, size, "cpu" if smoke else "cuda")
    return Subject("fla.kda", build, size["layers"], size["layers"], size["vocabulary"], "fla.layers.kda", "chunk_kda")


def fla_model(size: dict[str, Any], device: str, layers: int, dtype: torch.dtype) -> Any:
    """FLA's KDA with its bounded gate."""
    from fla.models.kda import KDAConfig, KDAForCausalLM

    torch.manual_seed(0)
    config = KDAConfig(
        hidden_size=size["hidden"], num_heads=size["heads"], head_dim=size["head"], num_hidden_layers=layers,
        intermediate_size=size["inner"], safe_gate=True, lower_bound=-5.0, vocab_size=size["vocabulary"],
        bos_token_id=None, eos_token_id=None, use_cache=True,
    )  # fmt: skip
    model = KDAForCausalLM(config).to(device, dtype)
    for block in model.model.layers:
        block.attn.A_log.data, block.attn.dt_bias.data = block.attn.A_log.data.float(), block.attn.dt_bias.data.float()
    return model


def kimi_subject(smoke: bool) -> Subject:
    size = sized(smoke)
    build = partial(kimi_model, size, "cpu" if smoke else "cuda")
    module = "transformers.models.kimi_linear.modeling_kimi_linear"
    mixers = kinds(size["layers"]).count("linear_attention")
    return Subject(
        "kimi_linear", build, size["layers"], mixers, size["vocabulary"], module, "chunk_kimi_delta_attention"
    )


def kinds(layers: int) -> list[str]:
    """Three layers of KDA to one of attention, as in Kimi-Linear."""
    return ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]


def kimi_model(size: dict[str, Any], device: str, layers: int, dtype: torch.dtype) -> Any:
    """Kimi-Linear's stack with dense MLPs."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    torch.manual_seed(0)
    heads, head = size["heads"], size["head"]
    config = KimiLinearConfig(
        vocab_size=size["vocabulary"], hidden_size=size["hidden"], intermediate_size=size["inner"],
        num_hidden_layers=layers, layer_types=kinds(layers), mlp_layer_types=["dense"] * layers,
        linear_num_heads=heads, linear_head_dim=head, num_attention_heads=heads, num_key_value_heads=heads,
        kv_lora_rank=2 * head, qk_rope_head_dim=head // 2, qk_nope_head_dim=head, v_head_dim=head,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return KimiLinearForCausalLM(config).to(device, dtype)


def without_operator(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
    """In the operator's place: a sum, through which every argument has a gradient. What an update takes with it is the rest."""
    return v * beta.unsqueeze(-1).to(v.dtype) + q + k + g.to(v.dtype), None


@contextmanager
def replaced(module: Any, name: str, function: Callable) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)


def one_update(model: Any, tokens: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()


def measured(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    """The operator alone, an update of the model, and KDA's share of it, before and after."""
    module = sys.modules.get(subject.module) or __import__(subject.module, fromlist=["_"])
    device, tokens = args.device, subject.tokens((args.batch, args.length), args.device)
    model = subject.build(subject.layers, args.dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    run = partial(one_update, model, tokens, optimizer)
    arguments = captured(module, subject.function, lambda: model(tokens, use_cache=False))
    before = getattr(module, subject.function)
    operator = compare_operators(before, ours.chunk_kda, *arguments, args.repeats, device)
    times = {"before": timed(run, args.repeats, device)}
    with replaced(module, subject.function, without_operator):
        rest = {"before": timed(run, args.repeats, device)[0]}
    with accelerate(subject.client, quiet=True) as accelerated:
        times["after"] = timed(run, args.repeats, device)
        with replaced(module, subject.function, without_operator):  # the convolution may be another
            rest["after"] = timed(run, args.repeats, device)[0]
    in_update = {name: times[name][0] - rest[name] for name in times}
    return {
        "tokens": list(tokens.shape),
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": {"all": subject.layers, "of KDA": subject.mixers},
        "before is": f"{before.__module__}.{before.__name__}",
        "replaced": [f"{one.module}.{one.name}" for one in accelerated.replaced],
        "operator": operator,
        "update": before_after(times["before"], times["after"])
        | {"tokens_per_second": [tokens.numel() / times[name][0] for name in times]},
        "operator in the update": {
            "update without it": rest["before"],
            "update without it, after": rest["after"],
            **in_update,
            "ratio": in_update["before"] / in_update["after"],
            "share before": in_update["before"] / times["before"][0],
            "share after": in_update["after"] / times["after"][0],
            "share by the operator alone, before": subject.mixers * operator["before"] / times["before"][0],
            "share by the operator alone, after": subject.mixers * operator["after"] / times["after"][0],
        },
    }


def contexts(client: str) -> dict[str, Callable[[], Any]]:
    """Without and with our kernels; to be called when its turn comes, for `accelerate` acts at once."""
    return {"before": nullcontext, "after": partial(accelerate, client, quiet=True)}


def agreement(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    """How far each is from the same model in float32 on our kernels, and from the other; whose operator each took."""
    tokens = subject.tokens((1, min(512, args.length)), args.device)
    model = subject.build(min(8, subject.layers), args.dtype).train()
    module = __import__(subject.module, fromlist=["_"])
    found, by = {}, {}
    for name, context in contexts(subject.client).items():
        with context():
            found[name] = results(model, tokens)
            by[name] = f"{(taken := getattr(module, subject.function)).__module__}.{taken.__name__}"
    with accelerate(subject.client, quiet=True):
        truth = results(model.float(), tokens)
    far = {name: {key: error(values[key], truth[key]) for key in truth} for name, values in found.items()}
    return {"by": by} | far | {"apart": {key: error(found["after"][key], found["before"][key]) for key in truth}}


def results(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Logits, loss and gradients; FLA's models give no logits beside a loss."""
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
    return forward_backward(model, tokens) | {"logits": logits}


def generated(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    """Greedy tokens of the model in float32, before and after."""
    model, prompt = subject.build(4, torch.float32).eval(), subject.tokens((1, 32), args.device)
    found = []
    with torch.no_grad():
        for context in contexts(subject.client).values():
            with context():
                found.append(model.generate(prompt, max_new_tokens=16, do_sample=False))
    return {"same_tokens": bool(torch.equal(*found))}


def gated_delta_rule(args: argparse.Namespace) -> dict[str, Any]:
    """The gated delta rule as GDN layers of the same size call it."""
    from fla.layers import gated_deltanet

    return compare_operators(
        gated_deltanet.chunk_gated_delta_rule,
        ours.chunk_gated_delta_rule,
        *gdn_arguments(args),
        args.repeats,
        args.device,
    )


def gdn_arguments(args: argparse.Namespace) -> tuple[list[Any], dict[str, Any]]:
    torch.manual_seed(1)
    size = sized(args.smoke)
    shape, device = (args.batch, args.length, size["heads"]), args.device
    q, k, v = (torch.randn(*shape, size["head"], device=device, dtype=args.dtype) for _ in range(3))
    g, beta = -torch.rand(*shape, device=device), torch.rand(*shape, device=device, dtype=args.dtype)
    return [x.requires_grad_() for x in (q, k, v, g, beta)], {"use_qk_l2norm_in_kernel": True}


#: the parts by name, in their order
PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "fla kda": lambda args: measured(fla_subject(args.smoke), args),
    "kimi_linear": lambda args: measured(kimi_subject(args.smoke), args),
    "fla agreement": lambda args: agreement(fla_subject(args.smoke), args),
    "fla tokens": lambda args: generated(fla_subject(args.smoke), args),
    "fla gdn": gated_delta_rule,
}
TIMED = ("fla kda", "kimi_linear", "fla gdn")


# Tuning, limits, and what is kept -------------------------------------------------------------------------------------------


ONE_CONFIG = 1 << 20  #: so many processes share a kernel's configurations that the first has one


def tune(args: argparse.Namespace) -> None:
    """Compile FLA's configurations in parallel; Triton keeps what it compiled on the disk."""
    again = [sys.executable, __file__, *sys.argv[1:]]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    jobs = [subprocess.Popen([*again, "--tune", str(i)], **quiet) for i in range(args.jobs)]
    try:
        for job in jobs:
            job.wait()
    finally:
        for job in jobs:
            job.kill()


def compile_share(args: argparse.Namespace) -> None:
    """What one process of :func:`tune` does: an update of a layer of each client, with its share of configurations."""
    share_configurations(args.tune, args.jobs)
    subjects = {"fla kda": fla_subject, "kimi_linear": kimi_subject}
    for subject in (make(args.smoke) for part, make in subjects.items() if part in args.parts):
        model = subject.build(1, args.dtype).train()
        optimizer = torch.optim.AdamW(model.parameters(), fused=args.device == "cuda")
        one_update(model, subject.tokens((args.batch, args.length), args.device), optimizer)
    if "fla gdn" in args.parts:
        from fla.layers import gated_deltanet

        call(gated_deltanet.chunk_gated_delta_rule, *gdn_arguments(args))()


class OutOfTime(Exception):
    """The limit of seconds was reached."""


def ring(*_: Any) -> None:
    raise OutOfTime


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What a record must share with a call that goes on from it."""
    return {"smoke": args.smoke, "batch": args.batch, "length": args.length, "size": sized(args.smoke)}


def kept(path: Path | None, args: argparse.Namespace) -> dict[str, Any]:
    """The parts that succeeded before, or none."""
    if path is None or not path.exists():
        return {}
    record = read_json(path)
    if record["settings"] != settings(args):
        sys.exit(f"clients.py gpu: {path} holds other settings, {record['settings']}; name another --out")
    return {name: part for name, part in record["parts"].items() if "failed" not in part}


def reason(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}".strip().splitlines()[0][:400]


def gpu(args: argparse.Namespace) -> dict[str, Any]:
    """All parts, each written as soon as it is there."""
    name = "clients_smoke" if args.smoke else "clients_gpu_untuned" if args.one_config else "clients_gpu"
    path = None if args.out is None else args.out / f"{name}.json"
    parts, start = kept(path, args), time.monotonic()
    record = {"settings": settings(args), "parts": parts}
    waiting = [name for name in args.parts if name not in parts]
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, args.limit)
    try:
        if args.jobs > 1 and not (args.smoke or args.one_config) and any(name.startswith("fla") for name in waiting):
            tune(args)
            record["seconds_of_compiling"] = round(time.monotonic() - start, 1)
        if args.device == "cuda":
            share_configurations(0, ONE_CONFIG if args.one_config else 1)
        for name in waiting:
            begun = time.monotonic()
            try:
                parts[name] = PARTS[name](args)
            except OutOfTime:
                parts[name] = {"failed": f"the limit of {args.limit:g} seconds was reached"}
                raise
            except Exception as problem:
                parts[name] = {"failed": reason(problem)}
            parts[name]["seconds"] = round(time.monotonic() - begun, 1)
            save(path, record, args.device)
            tell(name, parts[name])
    except OutOfTime:
        print(f"stopped at the limit of {args.limit:g} seconds; the same command goes on")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    save(path, record, args.device)
    return record


def save(path: Path | None, record: dict[str, Any], device: str) -> None:
    if path is not None:
        write_json(path, record | {"environment": environment(device)})


def tell(name: str, part: dict[str, Any]) -> None:
    """One line a part."""
    if "failed" in part:
        print(f"{name:14} failed: {part['failed']}", flush=True)
    elif "update" in part:
        inside = part["operator in the update"]
        share = f"share {inside['share before']:.0%} -> {inside['share after']:.0%}"
        alone, update = part["operator"]["ratio"], part["update"]["ratio"]
        times = (
            f"operator {alone:.2f}, in the update {inside['ratio']:.2f} ({share}), update {update:.2f} times as fast"
        )
        print(f"{name:14} {times}", flush=True)
    else:
        print(f"{name:14} {part}", flush=True)


def main() -> int:
    args = parse(sys.argv[1:])
    if args.client == "kimi":
        record = kimi(args)
        if args.out is not None:
            print(write_json(args.out / "kimi.json", record | {"environment": environment("cpu")}))
        for part in ("operator", "model"):
            found = record[part]
            times = f"{found['before']:.4f} s -> {found['after']:.4f} s, {found['ratio']:.2f} times as fast"
            print(f"{part:18} {times} ({found['processor_ratio']:.2f} by processor time)")
        print({key: record[key] for key in ("same_tokens", "apart")})
        return 0
    if args.fla is not None:
        sys.path.insert(0, str(args.fla))
    if args.tune is not None:
        try:
            compile_share(args)
        finally:
            os._exit(0)  # some of FLA's threads do not end by themselves
    record = gpu(args)
    return int(all("failed" in part for part in record["parts"].values()))


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="client", required=True)
    cpu = commands.add_parser("kimi")
    cpu.add_argument("--tokens", type=int, default=1024)
    big = commands.add_parser("gpu")
    big.add_argument("--fla", type=lambda text: Path(text).resolve(), help="a checkout of flash-linear-attention")
    big.add_argument("--parts", default=",".join(PARTS), help="which parts, with commas between")
    big.add_argument("--batch", type=int)
    big.add_argument("--length", type=int)
    big.add_argument("--jobs", type=int, default=8, help="processes that compile FLA's kernels")
    big.add_argument("--limit", type=float, default=300.0, help="seconds after which it stops")
    big.add_argument("--one-config", action="store_true", help="FLA's kernels untuned: no times of theirs")
    big.add_argument("--smoke", action="store_true")
    big.add_argument("--tune", type=int, help=argparse.SUPPRESS)
    for one in (cpu, big):
        one.add_argument("--repeats", type=int, default=5)
        one.add_argument("--out", type=Path)
    args = parser.parse_args(words)
    if args.client == "gpu":
        args.parts = [name.strip() for name in args.parts.split(",")]
        unknown = [name for name in args.parts if name not in PARTS]
        if unknown:
            parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
        args.batch, args.length = args.batch or (2 if args.smoke else 8), args.length or (96 if args.smoke else 2048)
        args.device, args.dtype = ("cpu", torch.float32) if args.smoke else ("cuda", torch.bfloat16)
        if args.one_config and set(args.parts) & set(TIMED):
            parser.error(f"--one-config times nothing: name --parts without {', '.join(TIMED)}")
        if not args.smoke and not torch.cuda.is_available():
            parser.error("there is no GPU; --smoke goes the same way on a CPU")
    return args


if __name__ == "__main__":
    sys.exit(main())
