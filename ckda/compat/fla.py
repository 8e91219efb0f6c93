"""flash-linear-attention's functions of KDA, GDN and DeltaProduct, with its signatures (0.6), on this library's operator.

``from ckda.compat.fla import chunk_kda`` in place of ``from fla.ops.kda import chunk_kda``: same arguments in the same order, same
results, on a CPU too. Norms are taken as FLA takes them, ``x / sqrt(|x|^2 + 1e-6)`` rounded to x's dtype. FLA hides some
arguments in ``**kwargs``; here each has its name, so that an unknown one is refused. What cannot be honoured raises and names the
argument. Accepted without effect, for they change no result: `disable_recompute`, `chunk_indices`, `cu_seqlens_cpu` (nothing here
waits for the lengths), `safe_gate` (whose bound is `lower_bound`), and what belongs to a gate inside where none is asked for.

`signed=True` is what FLA does not have: gates with signs, Complex KDA, where the gate is computed inside. The norm is then the
operator's own, with nothing under the root, so that beta = 2 stays a reflection.

Legend: B batch, T time, H query/key heads, HV value heads, K key width, V value width, N sequences.
"""

import warnings
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ckda.compat.states import check_written, on_slots, recur, state_in, state_out, with_states
from ckda.layers.gated_norm import gated_norm
from ckda.ops import complex_kda
from ckda.ops.call import Call, check_call

__all__ = [
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "fused_kda_gate",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "fused_recurrent_kda_fwd",
    "l2norm",
]

#: the bound of log alpha that the operator's own gates "sigmoid" and "signed" have
BOUND = -5.0


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    signed: bool = False,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """FLA's ``chunk_kda``.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V]. beta: [B, T, HV], or its logit with `use_beta_sigmoid_in_kernel`.
        g: [B, T, HV, K] log alpha, or the raw gate with `use_gate_in_kernel`: ``-exp(A_log) softplus(g + dt_bias)``, or with
            `lower_bound` ``lower_bound * sigmoid(exp(A_log) (g + dt_bias))``.
        A_log: HV numbers in any shape. dt_bias: HV * K numbers in any shape, head-major.
        initial_state: [N, HV, K, V], with `state_v_first` [N, HV, V, K]; so is the final state.
        return_intermediate_states: a third result, the states before every `chunk_size` tokens, [B, NT, HV, K, V] in q's dtype;
            without gradients. One call a chunk: for looking, not for speed.
        cp_context: a `ckda.ops.context.Context`: the time axis lies over its ranks, and `cu_seqlens` are those of all of them. Or
            FLA's, from its `build_cp_context`.
        use_graph: `cu_seqlens` may end before T, its tail repeated up to `max_num_seqs` + 1 entries; outputs after it have no
            meaning. (Nothing here waits for the lengths, so a graph can be captured either way.)
        signed: with `use_gate_in_kernel`, gates in [-1, 1]: ``tanh(exp(A_log) (g + dt_bias) / 2)``, see `ckda.complex_kda`.

    Example:
        >>> q, k, v, g, beta = (torch.randn(1, 100, 2, 8) for _ in range(5))
        >>> gates = {"A_log": torch.zeros(1, 1, 2, 1), "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}
        >>> o, state = chunk_kda(q, k, v, g, beta[..., 0].sigmoid(), **gates, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    if chunk_size not in (32, 64):
        raise ValueError(f"chunk_size is {chunk_size!r}; `chunk_size` must be either 32 or 64, FLA's choices for KDA")
    _check_ranks(q=(q, 4), k=(k, 4), v=(v, 4), g=(g, 4), beta=(beta, 3))
    _check_bound(safe_gate and use_gate_in_kernel, lower_bound)
    v_first = _v_first(state_v_first, transpose_state_layout)
    _check_lengths(cu_seqlens, cu_seqlens_cpu)
    gate = _gate(g, q, use_gate_in_kernel, lower_bound, A_log, dt_bias, signed)
    rate = _rate(beta, q, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    arguments = _arguments(q, k, v, gate, rate, scale, cu_seqlens, use_qk_l2norm_in_kernel, lower_bound)
    start = state_in(initial_state, v_first, arguments)
    if return_intermediate_states:
        _check_states(use_graph, cp_context)
    if use_graph:
        _check_graph(cu_seqlens, max_num_seqs)
    if cp_context is not None:
        o, state = _in_context(arguments, cp_context, start, output_final_state)
        return o, state_out(state, v_first)
    if use_graph and cu_seqlens is not None:
        o, state = _before_the_end(arguments, start, output_final_state)
        return o, state_out(state, v_first)
    if return_intermediate_states:
        return with_states(arguments, start, output_final_state, v_first, chunk_size)
    o, state = complex_kda(**arguments, initial_state=start, output_final_state=output_final_state)
    return o, state_out(state, v_first)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    safe_gate: bool = False,
    inplace_final_state: bool | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    transpose_state_layout: bool | None = None,
    signed: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """FLA's ``fused_recurrent_kda``, and vLLM's: with `ssm_state_indices` the states are slots of the pool `initial_state`.

    Args:
        ssm_state_indices: [N] the slot of each sequence, read before its tokens and written after them, in place; or [N, W] a
            slot a token, each of which takes the state after its token (drafts). A negative one is padding: nothing is written
            for it, and its output has no meaning.
        num_accepted_tokens: [N], with slots [N, W]: the sequence goes on from the slot of its last accepted token.
        inplace_final_state: whether the final state is written into `initial_state`; None: where slots are given.
        out: [B, T, HV, V] takes the output.
        The others are those of :func:`chunk_kda`. Gradients flow, other than in FLA, unless states are written in place.

    Example:
        >>> pool, x = torch.zeros(5, 2, 8, 8), torch.randn(1, 3, 2, 8)  # three sequences, a token each
        >>> o, _ = fused_recurrent_kda(x, x, x, -x.abs(), x[..., 0], initial_state=pool, use_qk_l2norm_in_kernel=True,
        ...                            cu_seqlens=torch.arange(4), ssm_state_indices=torch.tensor([4, 0, 2]))
        >>> pool.abs().sum((1, 2, 3)) > 0
        tensor([ True, False,  True, False,  True])
    """
    in_place = ssm_state_indices is not None if inplace_final_state is None else inplace_final_state
    return fused_recurrent_kda_fwd(
        q, k, v, g, beta, A_log, dt_bias, initial_state, scale, output_final_state, in_place, state_v_first, cu_seqlens,
        ssm_state_indices, num_accepted_tokens, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, lower_bound, out, transpose_state_layout=transpose_state_layout, signed=signed,
    )  # fmt: skip


def fused_recurrent_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    out: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
    signed: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """FLA's ``fused_recurrent_kda_fwd``: :func:`fused_recurrent_kda` with its arguments in another order, in place by default."""
    _check_ranks(q=(q, 4), k=(k, 4), v=(v, 4), g=(g, 4), beta=(beta, 3))
    v_first = _v_first(state_v_first, transpose_state_layout)
    gate = _gate(g, q, use_gate_in_kernel, lower_bound, A_log, dt_bias, signed)
    rate = _rate(beta, q, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    arguments = _arguments(q, k, v, gate, rate, scale, cu_seqlens, use_qk_l2norm_in_kernel, lower_bound)
    _check_out(out, v)
    if inplace_final_state and initial_state is None:
        raise ValueError("initial_state is None; with inplace_final_state=True it must be the states to write into")
    if ssm_state_indices is None:
        if num_accepted_tokens is not None:
            raise ValueError("num_accepted_tokens is given; it needs ssm_state_indices of shape [N, W]")
        start = state_in(initial_state, v_first, arguments)
        if inplace_final_state:
            assert initial_state is not None
            check_written(initial_state)
        o, state = recur(arguments, start, output_final_state or inplace_final_state)
        final = state_out(state, v_first)
        if inplace_final_state:
            assert initial_state is not None
            assert final is not None
            final = initial_state.copy_(final.detach())
        return _output(o, out), final
    if not inplace_final_state:
        raise ValueError(
            "inplace_final_state is False; with ssm_state_indices it must be True: slots are written in place"
        )
    assert initial_state is not None
    o = on_slots(arguments, initial_state, v_first, ssm_state_indices, num_accepted_tokens)
    return _output(o, out), initial_state


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """FLA's ``chunk_gated_delta_rule``: one gate a head, g [B, T, HV]; A_log and dt_bias of HV numbers each.

    Example:
        >>> x = torch.randn(1, 70, 2, 8)
        >>> o, state = chunk_gated_delta_rule(x, x, x, -x[..., 0].abs(), x[..., 1].sigmoid(), use_qk_l2norm_in_kernel=True)
        >>> o.shape, state
        (torch.Size([1, 70, 2, 8]), None)
    """
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"chunk_size is {chunk_size!r}; `chunk_size` must be 16, 32, or 64, FLA's choices for GDN")
    _check_ranks(q=(q, 4), k=(k, 4), v=(v, 4), g=(g, 3), beta=(beta, 3))
    v_first = _v_first(state_v_first, transpose_state_layout)
    if use_gate_in_kernel:
        g = _head_gate(g, A_log, dt_bias)
    _check_lengths(cu_seqlens, cu_seqlens_cpu)
    rate = _rate(beta, q, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    arguments = _arguments(
        q, k, v, {"g": _a_head(_fitting(g, q), k, v)}, rate, scale, cu_seqlens, use_qk_l2norm_in_kernel
    )
    start = state_in(initial_state, v_first, arguments)
    if cp_context is not None:
        o, state = _in_context(arguments, cp_context, start, output_final_state)
    else:
        o, state = complex_kda(**arguments, initial_state=start, output_final_state=output_final_state)
    return o, state_out(state, v_first)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """FLA's ``fused_recurrent_gated_delta_rule``: a gate a head `g` [B, T, HV], one a channel of k `gk`, or both; no `gv`."""
    if gv is not None:
        raise ValueError("gv is given; it must be None: a gate a channel of v is no transition of this operator")
    _check_ranks(q=(q, 4), k=(k, 4), v=(v, 4))
    if use_gate_in_kernel:
        if g is None:
            raise ValueError("g is None; with use_gate_in_kernel=True it must be the raw gate [B, T, HV]")
        g = _head_gate(g, A_log, dt_bias)
    log = torch.zeros_like(v[..., 0]) if g is None else g
    beta = torch.ones_like(v[..., 0]) if beta is None else beta
    _check_ranks(g=(log, 3), beta=(beta, 3))
    v_first = _v_first(state_v_first, transpose_state_layout)
    channels = _a_head(log, k, v)
    if gk is not None:
        _check_ranks(gk=(gk, 4))
        if gk.shape != channels.shape:
            raise ValueError(f"the shape of gk is {list(gk.shape)}; it must be [B, T, HV, K] = {list(channels.shape)}")
        channels = channels + gk
    rate = _rate(beta, q, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    arguments = _arguments(q, k, v, {"g": _fitting(channels, q)}, rate, scale, cu_seqlens, use_qk_l2norm_in_kernel)
    o, state = recur(arguments, state_in(initial_state, v_first, arguments), output_final_state)
    return o, state_out(state, v_first)


def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """FLA's ``chunk_gated_delta_product``: n = `num_householder` updates a token, k, v and beta of n T tokens; g [B, T, H] or None.

    That is the operator on n T tokens: the gate stands at a token's first update, its query at the last.

    Example:
        >>> q, k, beta = torch.randn(1, 5, 2, 8), torch.randn(1, 10, 2, 8), torch.rand(1, 10, 2)
        >>> o, _ = chunk_gated_delta_product(q, k, k, None, beta, 2, use_qk_l2norm_in_kernel=True)
        >>> o.shape
        torch.Size([1, 5, 2, 8])
    """
    if not isinstance(num_householder, int) or num_householder < 1:
        raise ValueError(f"num_householder is {num_householder!r}; it must be a whole number from 1")
    _check_ranks(q=(q, 4), k=(k, 4), v=(v, 4), beta=(beta, 3))
    n, T = num_householder, q.shape[1]
    for name, x in (("k", k), ("v", v), ("beta", beta)):
        if x.shape[1] != n * T:
            raise ValueError(f"{name} has {x.shape[1]} tokens; it must have num_householder * T = {n} * {T}")
    log = v.new_zeros(q.shape[0], T, v.shape[2]) if g is None else g
    _check_ranks(g=(log, 3))
    log = torch.stack([log, *[torch.zeros_like(log)] * (n - 1)], 2).flatten(1, 2)
    query = torch.stack([*[torch.zeros_like(q)] * (n - 1), q], 2).flatten(1, 2)
    _check_lengths(cu_seqlens, cu_seqlens_cpu)
    if cp_context is None:
        _check_end(cu_seqlens, T)
    places = cu_seqlens * n if isinstance(cu_seqlens, Tensor) else cu_seqlens
    rate = _rate(beta, q, False, False)
    arguments = _arguments(
        query, k, v, {"g": _a_head(_fitting(log, q), k, v)}, rate, scale, places, use_qk_l2norm_in_kernel
    )
    start = state_in(initial_state, False, arguments)
    if cp_context is None:
        o, state = complex_kda(**arguments, initial_state=start, output_final_state=output_final_state)
    else:
        o, state = _in_context(arguments, cp_context, start, output_final_state, n)
    return o[:, n - 1 :: n], state


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """FLA's ``fused_kda_gate``: log alpha [..., H, K] from the raw gate, as :func:`chunk_kda` computes it inside.

    Example:
        >>> fused_kda_gate(torch.zeros(1, 2), torch.zeros(1), lower_bound=-4.0)
        tensor([[-2., -2.]])
    """
    if A_log is None and lower_bound is None:
        raise ValueError("A_log is None; without lower_bound it must be given")
    for name, x in (("g", g), ("A_log", A_log), ("dt_bias", dt_bias)):
        if not (isinstance(x, Tensor) and x.is_floating_point()) and (x is not None or name == "g"):
            was = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} is {was}; it must be a floating tensor{' or None' * (name != 'g')}")
    if not isinstance(output_dtype, torch.dtype) or not output_dtype.is_floating_point:
        raise ValueError(f"output_dtype is {output_dtype!r}; it must be a floating dtype of torch")
    if g.dim() < 2:
        raise ValueError(f"the shape of g is {list(g.shape)}; it must be [..., H, K]")
    _check_bound(False, lower_bound)
    for name, x, size in (("A_log", A_log, g.shape[-2]), ("dt_bias", dt_bias, g.shape[-2:].numel())):
        if x is not None and (x.numel() != size or x.device != g.device):
            raise ValueError(
                f"{name} has {x.numel()} numbers on {x.device}; it must have {size} on {g.device}, as g asks for"
            )
    wide = torch.promote_types(g.dtype, torch.float32)
    raw, H = g.to(wide), g.shape[-2]
    raw = raw if dt_bias is None else raw + dt_bias.to(wide).view(H, -1)
    rate = 1.0 if A_log is None else A_log.to(wide).view(H, 1).exp()
    log = -rate * softplus(raw) if lower_bound is None else lower_bound * torch.sigmoid(rate * raw)
    return log.to(output_dtype)


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(|x|^2 + eps) over the last axis in x's dtype, computed in float32 at least: FLA's norm of q and k.

    On a GPU it is the kernel of :func:`ckda.layers.gated_norm.gated_norm`: with the weight 1 / sqrt(K) and eps / K they agree.

    Example:
        >>> l2norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    K = x.shape[-1]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if x.is_cuda and not torch.compiler.is_compiling():
        return gated_norm(x, None, x.new_full((K,), K**-0.5, dtype=wide), eps / K)
    y = x.to(wide)
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


# From FLA's arguments to the operator's -----------------------------------------------------------------------------------


def _check_ranks(**wanted: tuple[Any, int]) -> None:
    """Each is a tensor of that rank: what is prepared for the operator's own checks reads shapes."""
    for name, (x, rank) in wanted.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} is {type(x).__name__}; it must be a tensor of rank {rank}")
        if x.dim() != rank:
            raise ValueError(
                f"the rank of {name} is {x.dim()} (the shape of {name} is {list(x.shape)}); it must be {rank}"
            )


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: dict[str, Any],
    rate: dict[str, Any],
    scale: float | None,
    cu_seqlens: Tensor | None,
    normalize: bool,
    lower_bound: float | None = None,
) -> dict[str, Any]:
    """The arguments of :func:`ckda.complex_kda` but for the states, checked; then what is FLA's is done here: the norm, but where
    gates have signs, and a bound that the operator's own gate does not have."""
    signed = gate.get("gate") == "signed"
    rest = {"scale": scale, "cu_seqlens": cu_seqlens, "normalize_qk": normalize and signed}
    arguments = {"q": q, "k": k, "v": v} | gate | rate | rest
    check_call(Call(**arguments))
    if normalize and not signed:
        arguments |= {"q": l2norm(q), "k": l2norm(k)}
    if gate.get("gate") == "sigmoid" and lower_bound != BOUND:
        g = arguments["g"]
        wide = torch.promote_types(g.dtype, torch.float32)
        log = fused_kda_gate(g, arguments["A_log"], arguments["dt_bias"], lower_bound, wide)
        arguments |= {"g": log, "gate": None, "A_log": None, "dt_bias": None}
    return arguments


def _rate(beta: Tensor, q: Tensor, logit: bool, to_two: bool) -> dict[str, Any]:
    """beta and beta_range of the operator."""
    if to_two and not logit:
        raise ValueError("allow_neg_eigval is True; it must come with use_beta_sigmoid_in_kernel=True, as in FLA")
    return {"beta": _fitting(beta, q), "beta_range": (2 if to_two else 1) if logit else None}


def _gate(
    g: Tensor,
    q: Tensor,
    inside: bool,
    lower_bound: float | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    signed: bool,
) -> dict[str, Any]:
    """g, gate, A_log and dt_bias of the operator; "sigmoid" stands for any bound."""
    if not inside:
        if signed:
            raise ValueError("signed is True; it must come with use_gate_in_kernel=True: the gate makes the signs")
        return {"g": _fitting(g, q)}
    _check_bound(False, lower_bound)
    named = {"g": _fitting(g, q), "A_log": _in_a_row("A_log", A_log, q), "dt_bias": _in_a_row("dt_bias", dt_bias, q)}
    if signed:
        if lower_bound not in (None, BOUND):
            raise ValueError(f"lower_bound is {lower_bound}; with signed=True it must be {BOUND:g} or None")
        return named | {"gate": "signed"}
    if lower_bound is None and A_log is None:
        raise ValueError("A_log is None; with use_gate_in_kernel=True and no lower_bound it must be given")
    return named | {"gate": "softplus" if lower_bound is None else "sigmoid"}


def _in_a_row(name: str, x: Tensor | None, q: Tensor) -> Tensor | None:
    """A_log or dt_bias, of any shape, as the operator takes it."""
    if x is None:
        return None
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is {type(x).__name__}; it must be a tensor or None")
    return _fitting(x.reshape(-1), q)


def _check_lengths(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> None:
    if cu_seqlens is None and cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu is given without cu_seqlens; it is only a copy of it")


def _check_end(cu_seqlens: Any, T: int) -> None:
    """In the user's numbers; all else is checked with those of the operator."""
    readable = isinstance(cu_seqlens, Tensor) and cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()
    if readable and cu_seqlens.numel() and cu_seqlens.flatten()[-1] != T:
        raise ValueError(
            f"cu_seqlens ends at {cu_seqlens.flatten()[-1]}; it must end at T = {T}: it counts tokens, not updates"
        )


def _check_states(use_graph: bool, cp_context: Any) -> None:
    if use_graph:
        raise ValueError(
            "return_intermediate_states is True; it must be False with use_graph=True: it reads the lengths"
        )
    if cp_context is not None:
        raise ValueError(
            "return_intermediate_states is True; it must be False with cp_context: states lie on other ranks"
        )


def _check_graph(cu_seqlens: Tensor | None, max_num_seqs: int | None) -> None:
    if max_num_seqs is not None and not isinstance(max_num_seqs, int):
        raise ValueError(f"max_num_seqs is {max_num_seqs!r}; it must be a whole number, or None")
    if cu_seqlens is not None and max_num_seqs is not None and cu_seqlens.numel() - 1 != max_num_seqs:
        raise ValueError(
            f"cu_seqlens has {cu_seqlens.numel()} entries; it must have max_num_seqs + 1 = {max_num_seqs + 1}"
        )


def _before_the_end(arguments: dict[str, Any], start: Tensor | None, final: bool) -> tuple[Tensor, Tensor | None]:
    """The operator on packed sequences that may end before T: what is left is one more sequence, whose state is dropped."""
    cu_seqlens = arguments["cu_seqlens"]
    longer = torch.cat([cu_seqlens, cu_seqlens.new_full((1,), arguments["v"].shape[1])])
    if start is not None:
        start = torch.cat([start, start.new_zeros(1, *start.shape[1:])])
    o, state = complex_kda(**arguments | {"cu_seqlens": longer}, initial_state=start, output_final_state=final)
    return o, None if state is None else state[:-1]


def _fitting(x: Tensor, q: Tensor) -> Tensor:
    """x in a dtype that the operator takes beside q: q's own, or a wider one; what is no floating number it refuses."""
    return (
        x
        if x.dtype in (q.dtype, torch.float32) or not x.is_floating_point()
        else x.to(torch.promote_types(q.dtype, torch.float32))
    )


def _check_bound(safe: bool, lower_bound: float | None) -> None:
    if lower_bound is not None and (not isinstance(lower_bound, int | float) or not lower_bound < 0):
        raise ValueError(f"lower_bound is {lower_bound!r}; it must be a number below 0, or None")
    if safe and (lower_bound is None or not BOUND <= lower_bound < 0):
        raise ValueError(f"lower_bound is {lower_bound}; with safe_gate=True it must be from {BOUND:g} to 0, as in FLA")


def _head_gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """log alpha [B, T, HV] of GDN from the raw gate."""
    if A_log is None:
        raise ValueError("A_log is None; with use_gate_in_kernel=True it must be given")
    wide = torch.promote_types(g.dtype, torch.float32)
    return fused_kda_gate(g.unsqueeze(-1), A_log, dt_bias, output_dtype=wide).squeeze(-1)


def _a_head(g: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One gate a head, [B, T, HV], as the operator takes it: the same for each of the K channels."""
    if tuple(g.shape) != tuple(v.shape[:3]):
        raise ValueError(f"the shape of g is {list(g.shape)}; it must be [B, T, HV] = {list(v.shape[:3])}")
    return g.unsqueeze(-1).expand(*g.shape, k.shape[-1])


def _v_first(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError("state_v_first and transpose_state_layout are given; the second is the old name of the first")
    warnings.warn("transpose_state_layout is deprecated; it is now state_v_first", DeprecationWarning, stacklevel=3)
    return transpose_state_layout


def _check_out(out: Tensor | None, v: Tensor) -> None:
    if out is None:
        return
    _check_ranks(out=(out, 4))
    if out.shape != v.shape:
        raise ValueError(f"the shape of out is {list(out.shape)}; it must be that of v, {list(v.shape)}")
    if not out.is_floating_point() or out.device != v.device:
        raise ValueError(f"out is {out.dtype} on {out.device}; it must be a floating tensor on {v.device}, as v is")
    if out.requires_grad and out.is_leaf and torch.is_grad_enabled():
        raise ValueError("out requires a gradient; it must not, for it is written in place")


def _output(o: Tensor, out: Tensor | None) -> Tensor:
    return o if out is None else out.copy_(o)


def _in_context(arguments: dict[str, Any], cp_context: Any, start: Tensor | None, final: bool, times: int = 1) -> Any:
    """The operator over the ranks of our context or of FLA's, whose tokens count `times` each."""
    try:
        context = import_module("ckda.ops.context")
    except ImportError as missing:  # in a folder of Hugging Face's kernels
        raise NotImplementedError("cp_context is given; it needs the package ckda, which is not installed") from missing
    if type(cp_context).__name__ == "FLACPContext":
        if start is not None or final:
            raise ValueError(
                "cp_context is FLA's, which has no initial_state and no output_final_state; ckda.ops.context.Context has both"
            )
        v, from_fla = arguments["v"], import_module("ckda.compat.ranks").from_fla
        cp_context, cu_seqlens = from_fla(cp_context, v.shape[1] // times, v.device)
        arguments = arguments | {"cu_seqlens": cu_seqlens * times}
    if not isinstance(cp_context, context.Context):
        raise ValueError(
            f"cp_context is of type {type(cp_context).__name__}; it must be None, FLA's FLACPContext, or a "
            "ckda.ops.context.Context, with which cu_seqlens are those of all ranks"
        )
    return context.complex_kda_context(**arguments, context=cp_context, initial_state=start, output_final_state=final)
