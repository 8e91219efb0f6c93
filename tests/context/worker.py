"""One rank of four: operator, layers and language model over two and four ranks against one device. Returns errors."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed

from ckda.compat import fla
from ckda.layers.mixers import build_mixer
from ckda.lm.parallel import World, join
from ckda.lm.recipe import Recipe
from ckda.lm.tiny import tiny_tokens
from ckda.lm.train import Options, Trainer
from ckda.models import ComplexKDAConfig, ComplexKDAForCausalLM
from ckda.models.loss import next_token_labels
from ckda.ops import context as room
from ckda.ops.context import Context, complex_kda_context, exchanged_bytes
from tests.context.ranks import fork
from tests.ops.common import Call, Results, compare, make_call, run

TIMED = ("q", "k", "v", "g", "beta", "sign", "erase", "write")
CASES: dict[str, dict[str, Any]] = {
    "signed gate, states, grouped heads": {"HV": 4, "A_log": True, "dt_bias": True, "initial": True},
    "given gates": {"gate": None, "beta_range": None, "normalize_qk": False},
    "erase and write": {"separate": True, "K": 5, "V": 2, "initial": True},
    "softplus gate, one token a piece": {"gate": "softplus", "T": 8, "B": 3},
    "packed": {"B": 1, "cu_seqlens": [0, 0, 3, 19, 22, 30, 72], "T": 72, "initial": True, "HV": 4},
    "packed at the bounds": {"B": 1, "cu_seqlens": [0, 9, 9, 36, 54, 72, 72], "T": 72},
    "one packed sequence": {"B": 1, "cu_seqlens": [0, 72], "T": 72, "initial": True, "gate": None, "beta_range": None},
    "nothing is forgotten": {"gate": None, "beta_range": None, "initial": True, "lasting": True},
    "wide heads in two calls": {"B": 1, "H": 1, "K": 130, "V": 129, "T": 16, "initial": True},
}


def build(lasting: bool = False, **sizes: Any) -> Call:
    """A call; `lasting`: every transition is orthogonal, so that the first token counts as much as the last."""
    call = make_call(**sizes)
    if lasting:
        call |= {"g": torch.zeros_like(call["g"]), "beta": torch.full_like(call["beta"], 2.0)}
    return call


def spread(context: Context, **options: Any) -> Callable[[Call], tuple[Tensor, Tensor]]:
    """The operator as a function of a whole call: this rank's part of the gradients, everybody's values."""

    def over_ranks(call: Call) -> tuple[Tensor, Tensor]:
        part = {n: context.part(x) if n in TIMED and x is not None else x for n, x in call.items()}
        o, state = complex_kda_context(**part, context=context, output_final_state=True, **options)
        assert state is not None
        whole = context.whole(o)
        pieces = dict(zip(context.pieces, o.chunk(context.per_rank, 1), strict=True))
        own = [pieces.get(p, x) for p, x in enumerate(whole.chunk(context.num_pieces, 1))]
        # each rank's loss counts its own outputs; the state, which all have, counts once
        return torch.cat(own, 1), state if context.rank == context.size - 1 else state.detach()

    return over_ranks


def summed(results: Results, context: Context) -> Results:
    """The gradients are sums over the ranks: of all of them in one message."""
    names = [n for n in results if n[0] == "d"]
    total = context.sum(torch.cat([results[n].flatten() for n in names]))
    parts = total.split([results[n].numel() for n in names])
    return results | {n: part.view_as(results[n]).to(results[n].dtype) for n, part in zip(names, parts, strict=True)}


def error(ours: Results, exact: Results) -> dict[str, float]:
    """The largest difference, in units of the largest entry."""
    return {n: float((ours[n] - x).abs().max() / x.abs().max().clamp_min(1e-30)) for n, x in exact.items()}


def exact_cases(contexts: dict[str, Context]) -> dict[str, Any]:
    out = {}
    for name, sizes in CASES.items():
        call = build(**{"T": 48} | sizes)
        exact = run(call, "reference" if sizes.get("K", 0) < 100 else "chunked")
        for where, context in contexts.items():
            ours = summed(run(call, spread(context)), context)
            out[f"{name}; {where}"] = error(ours, exact)
    return out


def backends(context: Context) -> dict[str, Any]:
    """By the recurrence as backend, and for outputs alone."""
    call = make_call(T=24, initial=True)
    alone = summed(run(call, spread(context), outputs="o"), context)
    named = summed(run(call, spread(context, backend="reference")), context)
    return {"outputs alone": error(alone, run(call, outputs="o")), "reference": error(named, run(call))}


def float32_excess(context: Context) -> float:
    """The worst of outputs and gradients against the 2x rule's limit."""
    call = make_call(T=64, K=8, V=8, initial=True, dtype=torch.float32)
    x = compare(call, lambda c: spread(context)(c))
    ours = summed(x.results, context)
    worst = 0.0
    for name, exact in x.oracle.items():
        size = float(exact.abs().max())
        plain = float((x.plain[name] - exact).abs().max())
        worst = max(
            worst, float((ours[name] - exact).abs().max()) / (plain + torch.finfo(torch.float32).eps * size / 2)
        )
    return worst


#: name -> options; each once with a batch, once packed
LAYERS: dict[str, dict[str, Any]] = {
    "ckda": {"conv_size": 4, "initial_state": "learned"},
    "ckda-separate": {"conv_size": 2, "activate": ("q", "k")},
    "gdn": {"conv_size": 0},
    "deltaproduct2": {"conv_size": 3},
    "kda-factor": {"conv_size": 2},
}


def gradients(module: torch.nn.Module) -> Results:
    return {"d" + name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in module.named_parameters()}


def layer_cases(contexts: dict[str, Context]) -> dict[str, Any]:
    """Outputs, and the gradients of the input and of every parameter."""
    out = {}
    for name, options in LAYERS.items():
        for cu in (None, torch.tensor([0, 5, 18, 18, 19, 40])):
            torch.manual_seed(3)
            layer = build_mixer(name, 12, 2, 4, **options).double()
            x, dy = torch.randn(2, 1 if cu is not None else 2, 40, 12, dtype=torch.float64)
            results = []
            for context in (None, *contexts.values()):
                layer.zero_grad()
                own = (x if context is None else context.part(x)).clone().requires_grad_()
                y = layer(own, cu_seqlens=cu, context=context)
                y.backward(dy if context is None else context.part(dy))
                assert own.grad is not None
                if context is None:
                    results.append({"y": y.detach(), "x": own.grad} | gradients(layer))
                else:
                    spread = {"y": context.whole(y), "x": context.whole(own.grad)}
                    results.append(spread | summed(gradients(layer), context))
            for where, ours in zip(contexts, results[1:], strict=True):
                out[f"{name}{', packed' * (cu is not None)}; {where}"] = error(ours, results[0])
    return out


class FLACPContext:
    """What FLA's `build_cp_context` says of this rank's part: its own sequences, and how many parts before it share the first."""

    def __init__(self, context: Context, bounds: list[int]):
        L = bounds[-1] // context.num_pieces
        local, earlier = [0], []
        for at, piece in enumerate(context.pieces):
            inside = sorted({min(max(x, piece * L), (piece + 1) * L) - piece * L for x in bounds})
            local += [x + at * L for x in inside if x]
            earlier.append(piece - max(x for x in bounds if x <= piece * L) // L)
        self.group = context.group or distributed.group.WORLD
        self.cu_seqlens = torch.tensor(local, dtype=torch.int32)
        self.layout, self.pre_num_ranks_by_part = "contiguous", None
        if context.zigzag:
            self.layout, self.pre_num_ranks_by_part = "zigzag", tuple(earlier)
        self.pre_num_ranks = earlier[0]


def fla_cases(contexts: dict[str, Context]) -> dict[str, Any]:
    """FLA's functions over ranks, with our context and with its own; the real one where FLA is installed."""
    out, bounds = {}, [0, 3, 12, 24, 41, 48]
    call = make_call(B=1, T=48, H=2, HV=2)
    tokens = {name: call[name] for name in ("q", "k", "v", "g", "beta")}
    tokens["g"], tokens["beta"] = -tokens["g"].abs(), tokens["beta"].sigmoid()
    product = {"q": tokens["q"][:, :24], "k": tokens["k"], "v": tokens["v"], "beta": tokens["beta"]}
    packed, whole = torch.tensor(bounds), torch.tensor([0, 5, 12, 24])
    exact = fla.chunk_kda(**tokens, cu_seqlens=packed, use_qk_l2norm_in_kernel=True)[0]
    gate = tokens["g"][:, :24, :, 0]
    twice = fla.chunk_gated_delta_product(**product, g=gate, num_householder=2, cu_seqlens=whole)[0]
    for where, context in contexts.items():
        part = {name: context.part(x) for name, x in tokens.items()}
        for kind, cp, cu in (("ours", context, packed), ("FLA's", theirs(context, bounds), None)):
            o, _ = fla.chunk_kda(**part, cu_seqlens=cu, cp_context=cp, use_qk_l2norm_in_kernel=True)
            out[f"chunk_kda, {kind}; {where}"] = error({"o": context.whole(o)}, {"o": exact})
        half = {name: context.part(x) for name, x in (product | {"g": gate}).items()}
        for kind, cp, cu in (("ours", context, whole), ("FLA's", theirs(context, whole.tolist()), None)):
            o, _ = fla.chunk_gated_delta_product(**half, num_householder=2, cu_seqlens=cu, cp_context=cp)
            out[f"delta product, {kind}; {where}"] = error({"o": context.whole(o)}, {"o": twice})
    return out


def theirs(context: Context, bounds: list[int]) -> Any:
    try:
        from fla.ops.cp.context import build_cp_context
    except ImportError:
        return FLACPContext(context, bounds)
    group, layout = context.group or distributed.group.WORLD, "zigzag" if context.zigzag else "contiguous"
    return build_cp_context(torch.tensor(bounds), group, layout=layout)


def small_model(**options: Any) -> ComplexKDAForCausalLM:
    sizes = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 4}
    return ComplexKDAForCausalLM(ComplexKDAConfig(**{"vocab_size": 17} | sizes | options))


def model_cases(contexts: dict[str, Context]) -> dict[str, Any]:
    """The loss of language models and the gradients of their weights."""
    out = {}
    attention = {"hybrid": "attention", "hybrid_every": 2, "sliding_window": 9}
    stacks: dict[str, Any] = {
        "recurrent": {},
        "recurrent, recomputed": {},
        "hybrid": attention,
        "hybrid, gated": attention | {"hybrid": "gated-attention"},
        "hybrid, window": attention | {"hybrid": "sliding-attention"},
    }
    for name, options in stacks.items():
        torch.manual_seed(4)
        model = small_model(**options).double().train()
        tokens, cu = torch.randint(17, (1, 40)), torch.tensor([0, 7, 23, 40])
        labels = next_token_labels(tokens, cu)
        loss = model(tokens, labels=tokens, cu_seqlens=cu).loss
        loss.backward()
        exact = {"loss": loss.detach()} | gradients(model)
        if "recomputed" in name:
            model.gradient_checkpointing_enable()
        for where, context in contexts.items():
            model.zero_grad()
            part = {"shift_labels": context.part(labels), "num_items_in_batch": int((labels != -100).sum())}
            loss = model(context.part(tokens), context=context, cu_seqlens=cu, **part).loss
            loss.backward()
            ours = {"loss": context.sum(loss.detach())} | summed(gradients(model), context)
            out[f"{name}; {where}"] = error(ours, exact)
    return out


def training_cases() -> dict[str, Any]:
    """A short run, two pairs that share time, weights over all four by FSDP2, against one rank: all that the log holds."""
    out = {}
    folder = Path(os.environ["CONTEXT_FOLDER"])  # made before the ranks were
    world, alone = join("cpu"), World(0, 1, torch.device("cpu"))
    for documents in ("joined", "separate"):
        recipe = Recipe(
            steps=3,
            length=16,
            batch=4,
            warmup=1,
            lr=1e-2,
            dtype="fp32",
            documents=documents,
            log_every=1,
            eval_tokens=96,
        )
        results = []
        for name, ranks in (("one", alone), ("four", world)):
            how = Options(parallel="fsdp", context=2) if ranks is world else Options()
            where = folder / f"{documents}-{name}-{world.rank if ranks is alone else 0}"
            trainer = Trainer(lambda: small_model(vocab_size=512), folder / "tokens", recipe, where, ranks, how)
            outcome = trainer.run()
            columns = ("loss", "grad_norm", "held_out_loss")
            rows = {
                name: [getattr(row, name) for row in outcome.rows if getattr(row, name) is not None] for name in columns
            }
            # later norms are of weights that AdamW has moved by the sign of gradients, also where these are zero but for rounding
            rows["grad_norm"] = rows["grad_norm"][:1]
            results.append({name: torch.tensor(values, dtype=torch.float64) for name, values in rows.items()})
        if world.main:
            out[documents] = error(results[1], results[0])
    return out


def bytes_sent(context: Context) -> dict[str, list[int]]:
    """What the rank gave to each all_gather, forward and then backward, and what is stated."""
    sent: list[int] = []
    gather = distributed.all_gather

    def counted(parts: Any, x: Tensor, **options: Any) -> Any:
        sent.append(x.nbytes)
        return gather(parts, x, **options)

    B, HV, K, V = 2, 4, 4, 3
    call = make_call(B, 16, 2, HV, K, V)
    part = {n: context.part(x).requires_grad_(n != "sign") if n in TIMED else x for n, x in call.items()}
    with mock.patch.object(room, "_check"), mock.patch.object(room.distributed, "all_gather", counted):
        o, _ = complex_kda_context(**part, context=context)
        o.sum().backward()
    per_piece = [exchanged_bytes(HV, K, V, 8), exchanged_bytes(HV, K, V, 8, backward=True)]
    return {"sent": sent, "stated": [B * context.per_rank * x for x in per_piece]}


def not_finite(context: Context) -> list[bool]:
    """An infinite token of one packed sequence reaches its own later tokens, and no other sequence."""
    call = make_call(1, 32, cu_seqlens=[0, 12, 20, 32])
    call["v"][0, 13] = torch.inf
    o, _ = spread(context)(call)
    return [bool(x.isfinite().all()) for x in (o[:, :13], o[:, 13:20], o[:, 20:])]


def refusals(context: Context, outside: Context) -> dict[str, str]:
    """The sentence each bad input gets, on every rank."""

    def sentence(run: Callable[[], Any]) -> str:
        try:
            run()
        except ValueError as refusal:
            return str(refusal)
        return "nothing"

    def said(context: Context, **changes: Any) -> str:
        call = make_call(T=8) | changes
        return sentence(lambda: complex_kda_context(**call, context=context))

    short = make_call(T=8 - 2 * (context.rank == 1))
    packed = make_call(B=1, T=8)
    zigzag = Context(context.group, True)
    transposed = torch.zeros(2, 2, 3, 4, dtype=torch.float64)
    layer, model = build_mixer("ckda", 8, 1, 8, conv_size=4), small_model()
    one = context.rank == 1
    state, bounds = transposed.mT.contiguous(), torch.tensor([0, 8 + one, 32])
    hybrid = small_model(hybrid="gated-attention", hybrid_every=2)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    return {
        "parts": said(context, **short),
        "odd": said(zigzag, **make_call(T=7)),
        "layout": said(context, initial_state=transposed),
        "one rank's layout": said(
            context, initial_state=transposed if context.rank == 1 else transposed.mT.contiguous()
        ),
        "cu_seqlens": said(context, **packed, cu_seqlens=torch.tensor([0, 8])),
        "one rank's state": said(context, initial_state=state if one else None),
        "one rank's final state": said(context, output_final_state=one),
        "other bounds": said(context, **packed, cu_seqlens=bounds),
        "other gate": said(context, gate="sigmoid" if one else "signed"),
        "one rank's q": said(context, **{"q": None} if one else {}),
        "keyword": said(context, head_first=True),
        "context": sentence(lambda: complex_kda_context(**make_call(T=8), context=context.group)),
        "outside": sentence(lambda: outside.size),
        "short piece": sentence(lambda: layer(torch.zeros(1, 2, 8), context=context)),
        "attention": sentence(lambda: hybrid(tokens, attention_mask=torch.ones_like(tokens), context=context)),
        "labels": sentence(lambda: model(tokens, labels=tokens, context=context)),
    }


def main() -> dict[str, Any]:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    pairs = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    pair = pairs[distributed.get_rank() // 2]
    contexts = {
        "2 ranks": Context(pair),
        "2 ranks zig-zag": Context(pair, True),
        "4 ranks": Context(),
        "4 ranks zig-zag": Context(zigzag=True),
    }
    four = contexts["4 ranks zig-zag"]
    two_kinds = {name: contexts[name] for name in ("2 ranks", "4 ranks zig-zag")}
    result = {
        "operator": exact_cases(contexts) | backends(contexts["4 ranks"]),
        "layers": layer_cases(two_kinds),
        "model": model_cases(two_kinds),
        "fla": fla_cases(contexts),
        "training": training_cases(),
        "float32": float32_excess(four),
        "bytes": bytes_sent(four),
        "finite": not_finite(four),
        "refusals": refusals(contexts["4 ranks"], Context(pairs[distributed.get_rank() < 2])),
    }
    distributed.destroy_process_group()
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        os.environ["CONTEXT_FOLDER"] = made
        tiny_tokens(Path(made) / "tokens")
        fork(main, 4)
