"""The Complex KDA layer: projections, gates, the recurrence, the gated norm of its output."""

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from ckda import transition
from ckda.layers.convolution import ShortConvolution, convolve_parts, convolve_together, has_kernel
from ckda.layers.gated_norm import HeadNorm, norm_and_project
from ckda.layers.projections import Convolutions, Projections, project_together
from ckda.ops import complex_kda, complex_kda_step
from ckda.ops.call import unit
from ckda.ops.context import Context, complex_kda_context
from ckda.ops.dispatch import is_autocast, is_plain
from ckda.ops.gate import beta_from_logit, beta_spread, evaluate_gate, init_A_log, init_dt_bias

__all__ = ["RANGES", "ComplexKDA", "LayerCache", "Transitions", "split", "under"]

#: the paper's four range settings: name -> (gate, beta_range); `kda` is KDA with its bounded gate, `ckda` Complex KDA
RANGES: dict[str, tuple[str, int]] = {
    "kda": ("sigmoid", 1),
    "kda-beta2": ("sigmoid", 2),
    "kda-signed": ("signed", 1),
    "ckda": ("signed", 2),
}


class LayerCache(NamedTuple):
    """What decoding carries from one token to the next."""

    state: Tensor  #: [B, HV, K, V]
    past: dict[str, Tensor]  #: of the short convolutions of q, k and v, [B, size - 1, D] each; empty without them


class Transitions(NamedTuple):
    """What the layer does to its state at each token: arguments of :mod:`ckda.transition`, one per value head."""

    alpha: Tensor  #: [B, T, HV, K] signed gate
    k: Tensor  #: [B, T, HV, K] unit key
    beta: Tensor  #: [B, T, HV]


class ComplexKDA(nn.Module):
    """Complex KDA as a drop-in sequence layer, [B, T, hidden_size] -> [B, T, hidden_size].

    Args:
        hidden_size: width d of the input and the output.
        num_heads: H, heads of q and k. head_dim: K, their width. Where one is missing, H K = d. Where both are,
            K is the largest of 128, 64, 32, 16 and 8 that divides d.
        num_v_heads: HV, heads of v, a multiple of H (default: H). head_v_dim: V (default: head_dim).
        gate: "signed" (alpha in [-1, 1]), "sigmoid" (bounded, positive) or "softplus" (classic, positive).
        beta_range: 2 (beta in [0, 2]) or 1. :data:`RANGES` names the paper's four settings of these two.
        gate_init, beta_init: "standard" or "spread" (app:initialization); beta_init may be "half" with beta_range 2: the mean
            starts at 0.5, as it does with beta_range 1, by a bias.
        conv_size: taps of the short convolutions of q, k and v; 0 for none.
        activate: which of q, k and v pass through SiLU (after the convolution).
        output_gate: "lowrank", "linear" (full rank) or None.
        initial_state: "zero", "learned", or a matrix [K, V] or [HV, K, V] that stays as it is.
        backend: of :func:`ckda.complex_kda`.

    Example:
        >>> layer = ComplexKDA(32, num_heads=2, head_dim=8)
        >>> x = torch.randn(1, 10, 32)
        >>> y = layer(x)
        >>> z, cache = layer.prefill(x[:, :9])
        >>> last, cache = layer.step(x[:, 9], cache)
        >>> torch.allclose(last, y[:, 9], atol=1e-5)
        True
        >>> ComplexKDA(768).extra_repr()
        'gate=signed, beta_range=2, heads=6x128'
    """

    #: the projections of the layer's input
    _readers: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "f_proj", "b_proj", "g_proj")
    linear_gate_bias = True  #: whether the output gate "linear" has a bias, as the paper's parameter totals have it

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        head_dim: int | None = None,
        *,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        gate: str = "signed",
        beta_range: int = 2,
        gate_init: str = "standard",
        beta_init: str = "standard",
        conv_size: int = 4,
        activate: Collection[str] = ("q", "k", "v"),
        output_gate: str | None = "lowrank",
        initial_state: str | Tensor = "zero",
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ):
        super().__init__()
        self.hidden_size = hidden_size
        self.num_heads, self.head_dim = _heads(hidden_size, num_heads, head_dim)
        self.num_v_heads = self.num_heads if num_v_heads is None else num_v_heads
        self.head_v_dim = self.head_dim if head_v_dim is None else head_v_dim
        self.gate, self.beta_range, self.backend = gate, beta_range, backend
        self.gate_init, self.beta_init = gate_init, beta_init
        self.activate = frozenset(activate)
        _check_sizes(self, conv_size)
        _check_options(self, output_gate)
        HV, V, d, widths = self.num_v_heads, self.head_v_dim, hidden_size, self._widths()
        self.q_proj = nn.Linear(d, widths["q"], bias=False)
        self.k_proj = nn.Linear(d, widths["k"], bias=False)
        self.v_proj: nn.Module = nn.Linear(d, widths["v"], bias=False)
        self.convolutions = nn.ModuleDict(
            {name: ShortConvolution(width, conv_size) for name, width in widths.items()} if conv_size else {}
        )
        self._make_gates()
        self.g_proj: nn.Module | None = None
        if output_gate == "lowrank":
            self.g_proj = nn.Sequential(nn.Linear(d, V, bias=False), nn.Linear(V, HV * V))
        elif output_gate == "linear":
            self.g_proj = nn.Linear(d, HV * V, bias=self.linear_gate_bias)
        self.o_norm = HeadNorm(V, norm_eps)
        self.o_proj = nn.Linear(HV * V, d, bias=False)
        self._make_initial_state(initial_state)
        self.init_gates()

    def _widths(self) -> dict[str, int]:
        """The widths of the projections to q, k and v."""
        H, HV, K, V = self.num_heads, self.num_v_heads, self.head_dim, self.head_v_dim
        return {"q": H * K, "k": H * K, "v": HV * V}

    def _make_gates(self) -> None:
        """The projections and parameters behind g and beta."""
        d, HV, K, V = self.hidden_size, self.num_v_heads, self.head_dim, self.head_v_dim
        self.f_proj = nn.Sequential(nn.Linear(d, V, bias=False), nn.Linear(V, HV * K, bias=False))
        self.b_proj = nn.Linear(d, HV, bias=self.beta_init != "standard")
        self.A_log = nn.Parameter(torch.empty(HV))
        self.dt_bias = nn.Parameter(torch.empty(HV * K))

    def _make_initial_state(self, initial_state: str | Tensor) -> None:
        shape = (self.num_v_heads, self.head_dim, self.head_v_dim)
        self.initial_state: Tensor | None = None
        if isinstance(initial_state, Tensor):
            if tuple(initial_state.shape) not in (shape, shape[1:]):
                raise ValueError(
                    f"the shape of initial_state is {list(initial_state.shape)}; it must be [K, V] = {list(shape[1:])} "
                    f"or [HV, K, V] = {list(shape)}"
                )
            del self.initial_state
            self.register_buffer("initial_state", initial_state.expand(shape).clone())
        elif initial_state == "learned":
            self.initial_state = nn.Parameter(torch.zeros(shape))
        elif initial_state != "zero":
            raise ValueError(f"initial_state is {initial_state!r}; it must be 'zero', 'learned' or a matrix")

    @torch.no_grad()
    def init_gates(self) -> None:
        """Initialise the gates and the learning rate (app:initialization) on top of the projections' present weights.

        Call it again after re-initialising the projections: the spreads scale what is there.
        """
        if self.o_proj.weight.is_meta:  # shapes without values
            return
        spread = self.gate_init == "spread"
        self.A_log.copy_(init_A_log(self.gate, self.num_v_heads))
        self.dt_bias.copy_(init_dt_bias(self.gate, self.A_log, self.head_dim, spread=spread))
        if spread:
            self.f_proj[1].get_parameter("weight").mul_(0.1)
        if self.beta_init == "spread":
            z_std = float(self.b_proj.weight.float().std(correction=0)) * self.hidden_size**0.5
            gamma, b0 = beta_spread(z_std)
            self.b_proj.weight.mul_(gamma)
            half = torch.randperm(self.num_v_heads) < self.num_v_heads // 2
            self.b_proj.bias.copy_(torch.where(half, b0, -b0))
        elif self.beta_init == "half":
            self.b_proj.bias.fill_(-math.log(3))  # 2 sigmoid(-log 3) = 1/2

    def _projections(
        self, x: Tensor, names: Sequence[str], cu_seqlens: Tensor | None = None, context: Context | None = None
    ) -> Projections:
        """The projections of x [B, T, d], those of the names together where they can be, or else all from the rows of x.

        q, k and v, the first of the names, are convolved with them where :meth:`_convolve` would do it in one node too.
        """
        _check_shape("x", x, "B, T, d", (None, None, self.hidden_size))
        modules = [module for module in map(self._modules.get, names) if module is not None]
        made: dict[nn.Module, Tensor] = {}
        if x.requires_grad and torch.is_grad_enabled():
            if self.convolutions and context is None and has_kernel(x):
                made = project_together(x, modules, self._convolutions(x.shape[:2], cu_seqlens))
                if made:
                    return Projections(x, made, convolved=True)
            made = project_together(x, modules)
        return Projections(x if len(made) == len(modules) else _rows(x), made)

    def _project(
        self,
        x: Tensor,
        past: dict[str, Tensor] | None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        context: Context | None = None,
        project: Projections | None = None,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """q, k, v, raw gate and beta logit for x [B, T, d], heads split; and the convolutions' new past, unless past is None.

        Where attention_mask [B, T] is 0, x must be zero: then k = v = 0 before the first token, and g is set such that an
        initial state does not decay. project: the projections of x, where the caller has them.
        """
        project, lead = project or self._projections(x, ()), x.shape[:2]
        projected = {"q": project(self.q_proj), "k": project(self.k_proj), "v": project(self.v_proj)}
        out: dict[str, Any] = projected
        new_past: dict[str, Tensor] = {}
        if not project.convolved:
            out, new_past = self._convolve(projected, lead, past, cu_seqlens, context)
        gates = self._gates(project, out["q"].dtype, lead)
        if attention_mask is not None and self.initial_state is not None:
            gates["g"] = gates["g"].masked_fill(attention_mask[..., None, None] == 0, self._still())
        return out | gates, new_past

    def _convolve(
        self,
        y: dict[str, Tensor],
        lead: torch.Size,
        past: dict[str, Tensor] | None,
        cu_seqlens: Tensor | None,
        context: Context | None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Convolution and SiLU of the projections, where they have them, heads split; and the new past, unless past is None."""
        if past is None and context is None and self.convolutions and all(map(has_kernel, y.values())):
            together = convolve_together([*y.values()], *self._convolutions(lead, cu_seqlens))
            return dict(zip(y, together, strict=True)), {}
        y = {name: under(lead, x) for name, x in y.items()}
        new_past: dict[str, Tensor] = {}
        if context is not None and self.convolutions:
            y = convolve_parts(dict(self.convolutions.items()), y, self.activate, context, cu_seqlens)
        else:
            for name, convolution in self.convolutions.items():
                activate = name in self.activate
                if past is None:
                    y[name] = cast(ShortConvolution, convolution).convolve(y[name], None, cu_seqlens, activate)
                else:
                    y[name], new_past[name] = convolution(y[name], past.get(name), cu_seqlens, activate=activate)
        plain, heads = self.activate - set(self.convolutions), self._as_heads()
        return {name: split(lead, silu(x) if name in plain else x, heads[name][1]) for name, x in y.items()}, new_past

    def _convolutions(self, lead: torch.Size, cu_seqlens: Tensor | None) -> Convolutions:
        """Those of q, k and v, from rows to heads; lead: B and T."""
        heads = self._as_heads()
        weights = [cast(ShortConvolution, self.convolutions[name]).weight for name in heads]
        shapes = tuple((*lead, *sizes) for sizes in heads.values())
        return Convolutions(weights, cu_seqlens, shapes, tuple(name in self.activate for name in heads))

    def _as_heads(self) -> dict[str, tuple[int, int]]:
        """How many heads q, k and v have, and how wide these are."""
        dims = {"q": self.head_dim, "k": self.head_dim, "v": self.head_v_dim}
        return {name: (width // dims[name], dims[name]) for name, width in self._widths().items()}

    def _gates(self, project: Projections, dtype: torch.dtype, lead: torch.Size) -> dict[str, Tensor]:
        """The raw gate [B, T, HV, K] and the logit of beta [B, T, HV], in the dtype of q, k and v; lead: B and T."""
        g = split(lead, project(self.f_proj).to(dtype), self.head_dim)
        return {"g": g, "beta": under(lead, project(self.b_proj).to(dtype))}

    def _still(self) -> float:
        """What :meth:`_gates` would give as g where alpha = 1."""
        return _FAR if self.gate == "signed" else -_FAR

    def _options(self) -> dict[str, Any]:
        return {
            "gate": self.gate,
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "beta_range": self.beta_range,
            "normalize_qk": True,
        }

    def _start(self, num_sequences: int) -> Tensor | None:
        """[N, HV, K, V] or None for zero."""
        return None if self.initial_state is None else self.initial_state.expand(num_sequences, -1, -1, -1)

    def _run(
        self,
        y: dict[str, Any],
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None = None,
        output_final_state: bool = False,
        context: Context | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The recurrence on what :meth:`_project` gives: o [B, T, HV, V] and the final state."""
        if not y["v"].numel():
            return self._run_nothing(y, initial_state)
        options = y | self._options() | {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
        options |= {"output_final_state": output_final_state, "backend": self.backend}
        return complex_kda(**options) if context is None else complex_kda_context(**options, context=context)

    def _run_nothing(self, y: dict[str, Any], state: Tensor | None) -> tuple[Tensor, Tensor]:
        """:meth:`_run` where there is no sequence or no token: the state stays, every argument has the gradient zero."""
        arguments = [x for x in (y | self._options()).values() if isinstance(x, Tensor) and x is not y["v"]]
        o = y["v"] + sum(x.sum() for x in arguments)
        dtype = torch.float64 if o.dtype == torch.float64 else torch.float32
        shape = (o.shape[0], self.num_v_heads, self.head_dim, self.head_v_dim)
        return o, o.new_zeros(shape, dtype=dtype) if state is None else state

    def _run_step(self, y: dict[str, Any], state: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`_run` for one token, T = 1: o [B, HV, V] and the next state."""
        if not y["v"].numel():
            return self._run_nothing(y, state)[0].squeeze(1), state
        token: dict[str, Any] = {name: value.squeeze(1) for name, value in y.items()}
        return complex_kda_step(**token, state=state, **self._options())

    def read(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """The raw recurrent readout o [B, T, HV, V], before norm, output gate and output projection.

        Where attention_mask [B, T] is 0, x must be zero.
        """
        readers = [name for name in self._readers if name != "g_proj"]
        project = self._projections(x, readers, cu_seqlens, context)
        return self._read(x, project, cu_seqlens, attention_mask, context)

    def _read(
        self,
        x: Tensor,
        project: Projections,
        cu_seqlens: Tensor | None,
        attention_mask: Tensor | None,
        context: Context | None,
    ) -> Tensor:
        """:meth:`read`, by projections of x."""
        if cu_seqlens is not None and attention_mask is not None:
            raise ValueError(
                "cu_seqlens and attention_mask are given; packed sequences have no padding, one must be None"
            )
        y, _ = self._project(x, None, cu_seqlens, attention_mask, context, project)
        N = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        return self._run(y, self._start(N), cu_seqlens, context=context)[0]

    def write_out(self, o: Tensor, x: Tensor) -> Tensor:
        """From the readout o [..., HV, V] and the layer's input x [..., d] to its output [..., d]."""
        return self.gated_out(o, None if self.g_proj is None else self.g_proj(x))

    def gated_out(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """From the readout o [..., HV, V] and the projection behind the output gate [..., HV * V] to the output [..., d]."""
        y = norm_and_project(self.o_norm, self.o_proj, o, gate)
        return under(o.shape[:-2], self.o_proj(_rows(self.o_norm(o, gate), 2))) if y is None else y

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """x [B, T, d] -> [B, T, d].

        Args:
            cu_seqlens: [N + 1] of packed sequences, which lie end to end, B = 1.
            attention_mask: [B, T] of 1, and 0 at padding on either side of a sequence. Padding changes nothing at the
                other tokens, whatever stands in x there, and its own output is zero.
            context: the ranks that share the time axis; x and attention_mask are this rank's part then, cu_seqlens is over
                the tokens of all ranks (:func:`ckda.ops.context.complex_kda_context`).
        """
        x = _silenced(x, attention_mask)
        project = self._projections(x, self._readers, cu_seqlens, context)
        o = self._read(x, project, cu_seqlens, attention_mask, context)
        gate = None if self.g_proj is None else project(self.g_proj)
        return _silenced(self.gated_out(o, gate), attention_mask)

    def prefill(
        self, x: Tensor, cache: LayerCache | None = None, *, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, LayerCache]:
        """:meth:`forward` that starts from a cache (None: from the beginning) and returns the next one.

        Padding must be on the left then: what a cache holds is what stood last.
        """
        x = _silenced(x, attention_mask)
        if attention_mask is not None:
            _check_left(attention_mask)
        y, past = self._project(x, {} if cache is None else cache.past, None, attention_mask)
        start = self._start(x.shape[0]) if cache is None else cache.state
        o, state = self._run(y, start, output_final_state=True)
        assert state is not None
        out = _silenced(self.write_out(o, x), attention_mask)
        # copies: the convolutions' past is a view that would keep whole projections
        return out, LayerCache(state, {name: tail.clone() for name, tail in past.items()})

    def step(self, x: Tensor, cache: LayerCache, *, attention_mask: Tensor | None = None) -> tuple[Tensor, LayerCache]:
        """One token x [B, d] -> [B, d], attention_mask [B]; equals :meth:`forward` at that position."""
        _check_shape("x", x, "B, d", (None, self.hidden_size))
        x = _silenced(x, attention_mask)
        mask = None if attention_mask is None else attention_mask.unsqueeze(1)
        y, past = self._project(x.unsqueeze(1), cache.past, None, mask)
        o, state = self._run_step(y, cache.state)
        return _silenced(self.write_out(o, x), attention_mask), LayerCache(state, past)

    def transitions(self, x: Tensor) -> Transitions:
        """What the layer does to its state on x [B, T, d], for looking at."""
        y, _ = self._project(x, {})
        k = unit(y["k"]).repeat_interleave(self.num_v_heads // self.num_heads, dim=2)
        return Transitions(self._alpha(y["g"]), k, beta_from_logit(y["beta"], self.beta_range))

    def _alpha(self, g: Tensor) -> Tensor:
        """The signed gate [B, T, HV, K] from what :meth:`_gates` gives as g."""
        return evaluate_gate(self.gate, g, self.A_log, self.dt_bias).alpha()

    def matrices(self, x: Tensor) -> Tensor:
        """[B, T, HV, K, K] the transitions on x [B, T, d] as matrices."""
        return transition.dense(*self.transitions(x))

    def writes(self, x: Tensor) -> Tensor:
        """[B, T, HV, K, V] the state that each token of x [B, T, d] leaves when it comes alone: beta k v^T here."""
        y, _ = self._project(x.flatten(0, 1).unsqueeze(1), {})
        state = self._run(y, None, output_final_state=True)[1]
        assert state is not None
        return state.unflatten(0, x.shape[:2])

    def extra_repr(self) -> str:
        return f"gate={self.gate}, beta_range={self.beta_range}, heads={self.num_heads}x{self.head_dim}"


def _rows(x: Tensor, num: int = 1) -> Tensor:
    """x [..., D], D the last `num` axes, as [N, D]: a product of more axes makes a view before it and one behind it.

    Where something else than autograd looks on, or x does not lie in one piece, it keeps the axes [..., D]. So does a leaf
    under autocast, which casts a leaf once and a view of it for each product.
    """
    if x.is_contiguous() and is_plain((x,)) and not (x.requires_grad and x.is_leaf and is_autocast(x.device)):
        return x.view(-1, math.prod(x.shape[-num:]))
    return x.flatten(-num)


def under(lead: Sequence[int], y: Tensor) -> Tensor:
    """y [N, D] or [*lead, D] as [*lead, D]."""
    return y if y.dim() > len(lead) else y.view(*lead, y.shape[-1])


def split(lead: Sequence[int], y: Tensor, width: int) -> Tensor:
    """[N, heads * width] or [*lead, heads * width] -> [*lead, heads, width]; unflatten does the same in thrice the time."""
    return y.view(*lead, y.shape[-1] // width, width)


#: a raw gate so far out that alpha = 1 whatever A_log and dt_bias are; float16 holds it
_FAR = 3e4


def _check_left(attention_mask: Tensor) -> None:
    """Refuse padding right of a token. On a GPU it is not read (no synchronisation)."""
    if attention_mask.device.type != "cpu" or torch.compiler.is_compiling():
        return
    present = attention_mask != 0
    if bool((present[:, :-1] & ~present[:, 1:]).any()):
        raise ValueError(
            "attention_mask has padding right of a token; for a cache it must be on the left (forward, which has none, takes "
            "both: use_cache=False in a language model)"
        )


def _silenced(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """x [..., d] with zeros where attention_mask [...] is 0."""
    if attention_mask is None:
        return x
    _check_shape("attention_mask", attention_mask, "B, T" if x.dim() == 3 else "B", x.shape[:-1])
    return x.masked_fill((attention_mask == 0).unsqueeze(-1), 0)


def _heads(hidden_size: int, num_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """H and K, a missing one by H K = hidden_size.

    Example:
        >>> _heads(768, None, None), _heads(96, None, None), _heads(96, 4, None), _heads(96, 4, 16)
        ((6, 128), (3, 32), (4, 24), (4, 16))
    """
    _check_positive(hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim)
    if num_heads is not None and head_dim is not None:
        return num_heads, head_dim
    given = num_heads or head_dim or next((K for K in (128, 64, 32, 16, 8) if hidden_size % K == 0), None)
    if given is None:
        raise ValueError(
            f"num_heads and head_dim are None; a hidden_size of {hidden_size} needs one, for 8 does not divide it"
        )
    if hidden_size % given:
        name = "num_heads" if num_heads is not None else "head_dim"
        raise ValueError(f"{name} is {given}; alone it must divide hidden_size = {hidden_size}")
    return (given, hidden_size // given) if num_heads is not None else (hidden_size // given, given)


def _check_positive(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")


def _check_shape(name: str, x: Tensor, axes: str, wanted: Sequence[int | None]) -> None:
    """None is any size."""
    if x.dim() != len(wanted) or any(size not in (None, got) for size, got in zip(wanted, x.shape, strict=True)):
        known = [axis if size is None else size for axis, size in zip(axes.split(", "), wanted, strict=True)]
        shape = f"[{', '.join(map(str, known))}]"
        raise ValueError(f"the shape of {name} is {list(x.shape)}; it must be [{axes}] = {shape}")


def _check_sizes(layer: ComplexKDA, conv_size: int) -> None:
    _check_positive(num_v_heads=layer.num_v_heads, head_v_dim=layer.head_v_dim)
    if conv_size < 0:
        raise ValueError(f"conv_size is {conv_size}; it must be the number of taps, 0 for none")


#: what a start of beta has to do with its range
_BETA_STARTS = {"spread": "its modes are 0.5 and 1.5", "half": "with a range of 1 the mean starts at 0.5 anyway"}


def _check_options(layer: ComplexKDA, output_gate: str | None) -> None:
    if layer.num_v_heads % layer.num_heads:
        raise ValueError(f"num_v_heads is {layer.num_v_heads}; it must be a multiple of num_heads = {layer.num_heads}")
    choices: dict[str, tuple[object, tuple]] = {
        "gate": (layer.gate, ("signed", "sigmoid", "softplus")),
        "beta_range": (layer.beta_range, (1, 2)),
        "gate_init": (layer.gate_init, ("standard", "spread")),
        "beta_init": (layer.beta_init, ("standard", "spread", "half")),
        "output_gate": (output_gate, ("lowrank", "linear", None)),
    }
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")
    if not layer.activate <= {"q", "k", "v"}:
        raise ValueError(f"activate is {sorted(layer.activate)}; it may hold 'q', 'k' and 'v'")
    if layer.beta_init != "standard" and layer.beta_range != 2:
        raise ValueError(
            f"beta_init is {layer.beta_init!r}; that needs beta_range=2, for {_BETA_STARTS[layer.beta_init]}"
        )
