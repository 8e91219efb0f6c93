"""flash-linear-attention's functions on our operator: each option against the recurrence in float64, and what is refused."""

import importlib
import inspect
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import softplus

from ckda.compat import fla

B, T, H, HV, K, V = 2, 70, 2, 4, 8, 6


def norm(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def recurrence(q, k, v, g, beta, *, scale=None, initial_state=None):
    """o and the states after each token, [B, T + 1, HV, K, V], by the formula; g is log alpha."""
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    S = q.new_zeros(q.shape[0], *v.shape[2:3], q.shape[-1], v.shape[-1]) if initial_state is None else initial_state
    states, outputs = [S], []
    for t in range(q.shape[1]):
        S = g[:, t].exp().unsqueeze(-1) * S
        error = v[:, t] - (S * k[:, t].unsqueeze(-1)).sum(-2)
        S = S + k[:, t].unsqueeze(-1) * (beta[:, t].unsqueeze(-1) * error).unsqueeze(-2)
        outputs.append(scale * (S * q[:, t].unsqueeze(-1)).sum(-2))
        states.append(S)
    return torch.stack(outputs, 1), torch.stack(states, 1)


def draw(batch=B, time=T, dtype=torch.float64):
    """q, k, v, raw g, logit of beta; small keys, for which 1e-6 under the root shows."""
    q, k = (torch.randn(batch, time, H, K, dtype=dtype) * 2e-3 for _ in range(2))
    v, g = torch.randn(batch, time, HV, V, dtype=dtype), torch.randn(batch, time, HV, K, dtype=dtype)
    return q, k, v, g, torch.randn(batch, time, HV, dtype=dtype)


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


#: the gates of FLA: options -> log alpha of the raw gate, rate exp(A_log) and bias
GATES = {
    "softplus": ({}, lambda g, rate, bias: -rate * softplus(g + bias)),
    "bounded": ({"safe_gate": True, "lower_bound": -5.0}, lambda g, rate, bias: -5 * (rate * (g + bias)).sigmoid()),
    "bound -3": ({"lower_bound": -3.0}, lambda g, rate, bias: -3 * (rate * (g + bias)).sigmoid()),
}


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("shape", [(HV,), (1, 1, HV, 1), (HV, 1)])
@pytest.mark.parametrize("function", [fla.chunk_kda, fla.fused_recurrent_kda])
def test_gates_norms_and_rates_inside_with_gradients(name, shape, function):
    options, formula = GATES[name]
    q, k, v, g, beta = (x.requires_grad_() for x in draw())
    A_log, dt_bias = torch.randn(HV, dtype=torch.float64), torch.randn(HV * K, dtype=torch.float64)
    state = torch.randn(B, HV, K, V, dtype=torch.float64)
    leaves = [q, k, v, g, beta, *(x.requires_grad_() for x in (A_log, dt_bias, state))]
    o, final = function(
        q, k, v, g, beta, A_log=A_log.view(shape), dt_bias=dt_bias, initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
        **options,
    )  # fmt: skip
    log = formula(g, A_log.exp().view(HV, 1), dt_bias.view(HV, K))
    expected, states = recurrence(norm(q), norm(k), v, log, 2 * beta.sigmoid(), initial_state=state)
    assert_close(o, expected)
    assert_close(final, states[:, -1])
    do, dstate = torch.randn_like(o), torch.randn_like(final)
    ours = torch.autograd.grad((o * do).sum() + (final * dstate).sum(), leaves)
    theirs = torch.autograd.grad((expected * do).sum() + (states[:, -1] * dstate).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("v_first", [False, True])
def test_given_gates_packed_sequences_and_layouts(v_first):
    q, k, v, g, beta = draw(1)
    q, k, log, beta = norm(q), norm(k), -g.abs(), beta.sigmoid()
    cu_seqlens = torch.tensor([0, 1, 1, 40, T])
    start = torch.randn(4, HV, K, V, dtype=torch.float64)
    given = start.mT.contiguous() if v_first else start
    options = {"scale": 0.7, "output_final_state": True, "state_v_first": v_first, "cu_seqlens": cu_seqlens}
    chunked = fla.chunk_kda(q, k, v, log, beta, initial_state=given, cu_seqlens_cpu=cu_seqlens, **options)
    recurrent = fla.fused_recurrent_kda(q, k, v, log, beta, initial_state=given, **options)
    for n, (a, b) in enumerate(pairwise(cu_seqlens.tolist())):
        if a == b:
            continue
        part = [x[:, a:b] for x in (q, k, v, log, beta)]
        expected, states = recurrence(*part, scale=0.7, initial_state=start[n : n + 1])
        for o, final in (chunked, recurrent):
            assert_close(o[:, a:b], expected)
            assert_close(final[n].mT if v_first else final[n], states[0, -1])


@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize("v_first", [False, True])
def test_states_between_chunks(chunk_size, v_first):
    q, k, v, g, beta = draw()
    options = {"return_intermediate_states": True, "chunk_size": chunk_size, "state_v_first": v_first}
    expected, states = recurrence(norm(q), norm(k), v, -g.abs(), beta)
    with torch.inference_mode():
        o, final, h = fla.chunk_kda(q, k, v, -g.abs(), beta, use_qk_l2norm_in_kernel=True, **options)
    assert final is None
    assert_close(o, expected)
    assert_close(h.mT if v_first else h, states[:, 0:T:chunk_size])
    packed = [x[:1] for x in (q, k, v, -g.abs(), beta)]
    cu_seqlens = torch.tensor([0, 0, 33, T])
    with torch.inference_mode():
        _, final, h = fla.chunk_kda(
            *packed, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=True, output_final_state=True, **options
        )
    _, second = recurrence(norm(q[:1, 33:]), norm(k[:1, 33:]), v[:1, 33:], -g[:1, 33:].abs(), beta[:1, 33:])
    wanted = torch.cat([states[0, 0:33:chunk_size], second[0, 0 : T - 33 : chunk_size]])
    assert_close((h.mT if v_first else h)[0], wanted)
    assert_close((final.mT if v_first else final)[2], second[0, -1])


@pytest.mark.parametrize("v_first", [False, True])
def test_decoding_in_slots_of_a_pool(v_first):
    """As vLLM calls it: a token a sequence, states by slot, written in place; other slots untouched."""
    N = 3
    q, k, v, g, beta = draw(1, N)
    pool = torch.randn(7, HV, K, V, dtype=torch.float64)
    slots = torch.tensor([5, 0, 3], dtype=torch.int32)
    used = (pool.mT.contiguous() if v_first else pool).clone()
    out = torch.empty_like(v)
    o, returned = fla.fused_recurrent_kda(
        q, k, v, -g.abs(), beta, initial_state=used, use_qk_l2norm_in_kernel=True, safe_gate=False, state_v_first=v_first,
        cu_seqlens=torch.arange(N + 1), ssm_state_indices=slots, out=out,
    )  # fmt: skip
    assert returned is used
    assert o is out
    after = used.mT if v_first else used
    for n, slot in enumerate(slots.tolist()):
        part = (
            norm(q[:, n : n + 1]),
            norm(k[:, n : n + 1]),
            v[:, n : n + 1],
            -g[:, n : n + 1].abs(),
            beta[:, n : n + 1],
        )
        expected, states = recurrence(*part, initial_state=pool[slot : slot + 1])
        assert_close(o[:, n : n + 1], expected)
        assert_close(after[slot], states[0, -1])
    rest = [1, 2, 4, 6]
    assert torch.equal(after[rest], pool[rest])


def test_drafts_go_on_from_the_last_accepted_token():
    lengths, slots = [3, 1, 2], torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    cu_seqlens = torch.tensor([0, 3, 4, 6])
    q, k, v, g, beta = draw(1, 6)
    pool = torch.randn(10, HV, K, V, dtype=torch.float64)
    used, accepted = pool.clone(), torch.tensor([2, 1, 3])
    o, _ = fla.fused_recurrent_kda_fwd(
        q, k, v, -g.abs(), beta, initial_state=used, cu_seqlens=cu_seqlens, ssm_state_indices=slots,
        num_accepted_tokens=accepted, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    untouched = torch.ones(10, dtype=torch.bool)
    for n, length in enumerate(lengths):
        a, b = cu_seqlens[n], cu_seqlens[n + 1]
        start = pool[slots[n, accepted[n] - 1]].unsqueeze(0)
        part = (norm(q[:, a:b]), norm(k[:, a:b]), v[:, a:b], -g[:, a:b].abs(), beta[:, a:b])
        expected, states = recurrence(*part, initial_state=start)
        assert_close(o[:, a:b], expected)
        assert_close(used[slots[n, :length]], states[0, 1:])
        untouched[slots[n, :length]] = False
    assert torch.equal(used[untouched], pool[untouched])


def test_padding_reads_and_writes_nothing():
    """A padded batch of decoding as engines record it: slot -1, and `cu_seqlens` that stays where it is."""
    q, k, v, g, beta = draw(1, 4)
    pool = torch.randn(5, HV, K, V, dtype=torch.float64)
    call = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": torch.tensor([0, 1, 2, 2, 2])}
    for slots in ([3, 0, -1, -1], [3, 0, 1, 1]):  # the second: sequences without a token
        used = pool.clone()
        o, _ = fla.fused_recurrent_kda(
            q, k, v, -g.abs(), beta, initial_state=used, ssm_state_indices=torch.tensor(slots), **call
        )
        for n, slot in enumerate([3, 0]):
            part = [x[:, n : n + 1] for x in (norm(q), norm(k), v, -g.abs(), beta)]
            expected, states = recurrence(*part, initial_state=pool[slot : slot + 1])
            assert_close(o[:, n : n + 1], expected)
            assert_close(used[slot], states[0, -1])
        assert torch.equal(used[[1, 2, 4]], pool[[1, 2, 4]])


def test_an_empty_sequence_before_others_takes_no_token():
    """As many rows as sequences, but the first sequence has none and the last row is padding."""
    q, k, v, g, beta = draw(1, 3)
    pool = torch.randn(4, HV, K, V, dtype=torch.float64)
    used, bounds, slots = pool.clone(), torch.tensor([0, 0, 1, 2]), torch.tensor([3, 0, 2])
    o, _ = fla.fused_recurrent_kda(
        q, k, v, -g.abs(), beta, initial_state=used, cu_seqlens=bounds, ssm_state_indices=slots
    )
    for row, slot in ((0, 0), (1, 2)):
        part = [x[:, row : row + 1] for x in (q, k, v, -g.abs(), beta)]
        expected, states = recurrence(*part, initial_state=pool[slot : slot + 1])
        assert_close(o[:, row : row + 1], expected)
        assert_close(used[slot], states[0, -1])
    assert torch.equal(used[[1, 3]], pool[[1, 3]])


def test_packed_sequences_that_end_before_the_last_token():
    """use_graph: lengths change under a recorded graph, the number of tokens does not."""
    q, k, v, g, beta = draw(1)
    start = torch.randn(3, HV, K, V, dtype=torch.float64)
    options = {"initial_state": start, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    o, final = fla.chunk_kda(
        q, k, v, -g.abs(), beta, cu_seqlens=torch.tensor([0, 9, 40, 40]), use_graph=True, max_num_seqs=3, **options
    )
    first = [x[:, :40] for x in (q, k, v, -g.abs(), beta)]
    expected = fla.chunk_kda(*first, cu_seqlens=torch.tensor([0, 9, 40, 40]), **options)
    assert_close(o[:, :40], expected[0])
    assert_close(final, expected[1])
    with pytest.raises(ValueError, match="max_num_seqs is '3'; it must be a whole number, or None"):
        fla.chunk_kda(q, k, v, -g.abs(), beta, cu_seqlens=torch.tensor([0, T]), use_graph=True, max_num_seqs="3")
    with pytest.raises(ValueError, match=r"cu_seqlens has 4 entries; it must have max_num_seqs \+ 1 = 6"):
        fla.chunk_kda(q, k, v, -g.abs(), beta, cu_seqlens=torch.tensor([0, 9, 40, 40]), use_graph=True, max_num_seqs=5)


def test_several_tokens_with_one_slot_a_sequence_leave_the_last_state():
    q, k, v, g, beta = draw(1, 5)
    pool = torch.randn(4, HV, K, V, dtype=torch.float64)
    used, cu_seqlens = pool.clone(), torch.tensor([0, 2, 5])
    fla.fused_recurrent_kda(
        q, k, v, -g.abs(), beta, initial_state=used, cu_seqlens=cu_seqlens, ssm_state_indices=torch.tensor([3, 1])
    )
    _, states = recurrence(q[:, 2:], k[:, 2:], v[:, 2:], -g[:, 2:].abs(), beta[:, 2:], initial_state=pool[1:2])
    assert_close(used[1], states[0, -1])
    assert torch.equal(used[[0, 2]], pool[[0, 2]])


def test_in_place_without_slots():
    q, k, v, g, beta = draw(B, 1)
    start = torch.randn(B, HV, K, V, dtype=torch.float64)
    used = start.clone()
    o, final = fla.fused_recurrent_kda_fwd(q, k, v, -g.abs(), beta, initial_state=used)
    expected, states = recurrence(q, k, v, -g.abs(), beta, initial_state=start)
    assert final is used
    assert_close(o, expected)
    assert_close(used, states[:, -1])


def test_signed_gates_are_the_operators_own():
    from ckda import complex_kda

    q, k, v, g, beta = draw()
    A_log = torch.randn(HV, dtype=torch.float64)
    options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    for function in (fla.chunk_kda, fla.fused_recurrent_kda):
        o, _ = function(q, k, v, g, beta, A_log=A_log, allow_neg_eigval=True, signed=True, **options)
        assert_close(o, complex_kda(q, k, v, g, beta, gate="signed", A_log=A_log, beta_range=2, normalize_qk=True)[0])


@pytest.mark.parametrize("inside", [False, True])
def test_gated_delta_rule(inside):
    q, k, v, g, beta = draw()
    g, A_log, dt_bias = g[..., 0], torch.randn(HV, dtype=torch.float64), torch.randn(HV, dtype=torch.float64)
    log = -A_log.exp() * softplus(g + dt_bias) if inside else -g.abs()
    gates = {"A_log": A_log, "dt_bias": dt_bias, "use_gate_in_kernel": True} if inside else {}
    start = torch.randn(B, HV, V, K, dtype=torch.float64)
    options = gates | {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "state_v_first": True}
    raw = g if inside else log
    chunked = fla.chunk_gated_delta_rule(q, k, v, raw, beta, initial_state=start, **options)
    recurrent = fla.fused_recurrent_gated_delta_rule(q, k, v, raw, beta=beta, initial_state=start, **options)
    expected, states = recurrence(norm(q), norm(k), v, log.unsqueeze(-1), beta, initial_state=start.mT)
    for o, final in (chunked, recurrent):
        assert_close(o, expected)
        assert_close(final, states[:, -1].mT)


def test_gated_delta_rule_of_channels_and_without_gates():
    q, k, v, g, beta = draw()
    o, _ = fla.fused_recurrent_gated_delta_rule(norm(q), norm(k), v, -g[..., 0].abs(), -g.abs(), beta=beta)
    assert_close(o, recurrence(norm(q), norm(k), v, -g[..., :1].abs() - g.abs(), beta)[0])
    o, _ = fla.fused_recurrent_gated_delta_rule(norm(q), norm(k), v)
    assert_close(o, recurrence(norm(q), norm(k), v, torch.zeros_like(g), torch.ones_like(beta))[0])


@pytest.mark.parametrize("gated", [False, True])
def test_delta_product(gated):
    n, time = 3, 11
    q = norm(torch.randn(1, time, H, K, dtype=torch.float64))
    k, v = torch.randn(1, n * time, H, K, dtype=torch.float64), torch.randn(1, n * time, H, V, dtype=torch.float64)
    beta, g = torch.rand(1, n * time, H, dtype=torch.float64) * 2, -torch.rand(1, time, H, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 4, time])
    o, final = fla.chunk_gated_delta_product(
        q,
        k,
        v,
        g if gated else None,
        beta,
        n,
        use_qk_l2norm_in_kernel=True,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
    )
    log = torch.zeros(1, n * time, H, K, dtype=torch.float64)
    if gated:
        log[:, ::n] = g.unsqueeze(-1)
    for i, (a, b) in enumerate([(0, 4), (4, time)]):
        part = slice(n * a, n * b)
        _, states = recurrence(norm(k)[:, part], norm(k)[:, part], v[:, part], log[:, part], beta[:, part])
        expected = K**-0.5 * (states[:, n::n] * norm(q)[:, a:b].unsqueeze(-1)).sum(-2)
        assert_close(o[:, a:b], expected)
        assert_close(final[i], states[0, -1])


def test_the_gate_alone():
    _, _, _, g, _ = draw()
    A_log, dt_bias = torch.randn(HV, dtype=torch.float64), torch.randn(HV * K, dtype=torch.float64)
    rate, raw = A_log.exp().view(HV, 1), g + dt_bias.view(HV, K)
    wide = torch.float64
    assert_close(fla.fused_kda_gate(g, A_log.view(1, 1, HV, 1), dt_bias, output_dtype=wide), -rate * softplus(raw))
    assert_close(fla.fused_kda_gate(g, A_log, dt_bias, -3.0, wide), -3 * (rate * raw).sigmoid())
    assert fla.fused_kda_gate(g, lower_bound=-5.0).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_the_norm_as_fla_does(dtype):
    q, k, v, g, beta = draw(dtype=torch.float32)
    q, k, v = (x.to(dtype) for x in (q * 1000, k * 1000, v))
    o, _ = fla.chunk_kda(q, k, v, -g.abs(), beta.to(dtype), use_qk_l2norm_in_kernel=True)
    wide = [norm(x.double()).to(dtype).double() for x in (q, k)]
    expected, _ = recurrence(*wide, v.double(), -g.abs().double(), beta.to(dtype).double())
    assert o.dtype == dtype
    torch.testing.assert_close(o.double(), expected, rtol=2e-2, atol=2e-2)


#: fla 0.6's parameters in their order
SIGNATURES = {
    "chunk_kda": "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel "
    "use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound disable_recompute return_intermediate_states "
    "state_v_first cu_seqlens cu_seqlens_cpu cp_context use_graph max_num_seqs",
    "fused_recurrent_kda": "q k v g beta A_log dt_bias scale initial_state output_final_state use_qk_l2norm_in_kernel "
    "use_gate_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval lower_bound state_v_first cu_seqlens",
    "fused_recurrent_kda_fwd": "q k v g beta A_log dt_bias initial_state scale output_final_state inplace_final_state "
    "state_v_first cu_seqlens ssm_state_indices num_accepted_tokens use_qk_l2norm_in_kernel use_gate_in_kernel "
    "use_beta_sigmoid_in_kernel allow_neg_eigval lower_bound out",
    "chunk_gated_delta_rule": "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel "
    "use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context",
    "fused_recurrent_gated_delta_rule": "q k v g gk gv beta scale initial_state output_final_state "
    "use_qk_l2norm_in_kernel use_gate_in_kernel A_log dt_bias use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens",
    "chunk_gated_delta_product": "q k v g beta num_householder scale initial_state output_final_state "
    "use_qk_l2norm_in_kernel cu_seqlens cu_seqlens_cpu cp_context",
    "fused_kda_gate": "g A_log dt_bias lower_bound output_dtype",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_positional_parameters_are_flas(name):
    parameters = inspect.signature(getattr(fla, name)).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == SIGNATURES[name].split()


_DATA = dict(zip(("q", "k", "v", "g", "beta"), draw(), strict=True))
_STATE = torch.zeros(B, HV, K, V, dtype=torch.float64)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (fla.chunk_kda, {"head_first": True}, "head_first"),
        (fla.chunk_kda, {"initial_state": _STATE.mT}, r"initial_state is .*state_v_first=True"),
        (fla.chunk_kda, {"initial_state": _STATE, "state_v_first": True}, r"V, K\].*state_v_first=False"),
        (fla.chunk_kda, {"initial_state": _STATE[:1]}, r"the shape of initial_state is \[1, 4, 8, 6\]; it must be"),
        (fla.chunk_kda, {"chunk_size": 16}, "`chunk_size` must be either 32 or 64"),
        (fla.chunk_kda, {"allow_neg_eigval": True}, "use_beta_sigmoid_in_kernel"),
        (fla.chunk_kda, {"use_gate_in_kernel": True}, "A_log is None"),
        (fla.chunk_kda, {"use_gate_in_kernel": True, "safe_gate": True}, "lower_bound is None"),
        (fla.chunk_kda, {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -6.0}, "lower_bound is -6.0"),
        (fla.chunk_kda, {"signed": True}, "use_gate_in_kernel"),
        (fla.chunk_kda, {"signed": True, "use_gate_in_kernel": True, "lower_bound": -3.0}, "lower_bound is -3.0"),
        (fla.chunk_kda, {"cu_seqlens_cpu": torch.tensor([0, T])}, "cu_seqlens_cpu"),
        (fla.chunk_kda, {"cp_context": object()}, "cp_context"),
        (fla.chunk_kda, {"return_intermediate_states": True}, "return_intermediate_states"),
        (fla.chunk_kda, {"beta": _DATA["v"]}, "the shape of beta"),
        (fla.chunk_kda, {"state_v_first": True, "transpose_state_layout": True}, "transpose_state_layout"),
        (fla.fused_recurrent_kda, {"inplace_final_state": True}, "initial_state is None"),
        (fla.fused_recurrent_kda, {"num_accepted_tokens": torch.ones(B)}, "num_accepted_tokens"),
        (fla.fused_recurrent_kda, {"initial_state": _STATE, "ssm_state_indices": torch.zeros(5)}, "ssm_state_indices"),
        (fla.fused_recurrent_kda, {"initial_state": _STATE, "ssm_state_indices": torch.tensor([0, 2])}, "the entry 2"),
        (
            fla.fused_recurrent_kda,
            {"initial_state": _STATE, "ssm_state_indices": torch.zeros(B, 3, dtype=torch.long)},
            "slots has 3 slots a sequence; the longest has 70",
        ),
        (
            fla.fused_recurrent_kda,
            {"initial_state": _STATE.clone().requires_grad_(), "ssm_state_indices": torch.tensor([0, 1])},
            "initial_state requires a gradient",
        ),
        (fla.chunk_kda, {"use_graph": True, "return_intermediate_states": True}, "use_graph"),
        (
            fla.fused_recurrent_kda,
            {"initial_state": _STATE, "ssm_state_indices": torch.tensor([0, 1]), "inplace_final_state": False},
            "inplace_final_state",
        ),
        (fla.fused_recurrent_kda, {"out": torch.zeros(1)}, "the shape of out"),
        (fla.fused_recurrent_gated_delta_rule, {"g": None, "gv": _DATA["v"]}, "gv is given"),
        (fla.chunk_gated_delta_rule, {}, "the shape of g"),
        (fla.chunk_gated_delta_product, {"num_householder": 2}, "num_householder"),
    ],
)
def test_what_is_refused_is_named(function, options, message):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        function(**_DATA | options)


_INSIDE = {"use_gate_in_kernel": True, "A_log": torch.zeros(HV)}
_SLOTS = {"initial_state": _STATE, "ssm_state_indices": torch.tensor([[0], [1]]), "cu_seqlens": None}
_TOKEN = dict(zip(("q", "k", "v", "g", "beta"), draw(time=1), strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q": None}, "q is NoneType; it must be a tensor of rank 4"),
        ({"g": _DATA["g"][..., 0]}, r"the rank of g is 3 .*; it must be 4"),
        ({"g": _DATA["g"].long()}, "the dtype of g is torch.int64; it must be"),
        ({"beta": 0.5}, "beta is float; it must be a tensor"),
        ({"beta": _DATA["beta"].long()}, "the dtype of beta is torch.int64"),
        ({"k": _DATA["k"].to("meta"), "use_qk_l2norm_in_kernel": True}, "the device of k is meta"),
        (
            {name: x[:, :0] for name, x in _DATA.items()},
            r"the shape of q is \[2, 0, 2, 8\]; it must be .* no axis empty",
        ),
        ({"cu_seqlens": [0, T]}, "cu_seqlens is list; it must be a tensor or None"),
        (_INSIDE | {"A_log": 1.0}, "A_log is float; it must be a tensor or None"),
        (_INSIDE | {"A_log": torch.zeros(3)}, r"the shape of A_log is \[3\]; it must be \[HV\] = \[4\]"),
        (_INSIDE | {"A_log": torch.zeros(3), "lower_bound": -3.0}, r"the shape of A_log is \[3\]"),
        (_INSIDE | {"dt_bias": torch.zeros(HV), "lower_bound": -3.0}, r"the shape of dt_bias is \[4\]"),
        (_INSIDE | {"g": _DATA["g"][:, :, :2], "lower_bound": -3.0}, r"the shape of g is \[2, 70, 2, 8\]"),
        (_INSIDE | {"lower_bound": 1.0}, "lower_bound is 1.0; it must be a number below 0"),
        (_INSIDE | {"lower_bound": "-5"}, "lower_bound is '-5'; it must be a number below 0"),
        ({"initial_state": _STATE.long()}, "initial_state is torch.int64; it must be a floating tensor"),
        ({"initial_state": [1]}, "initial_state is list; it must be a floating tensor"),
        ({"initial_state": _STATE.to("meta")}, "the device of initial_state is meta"),
    ],
)
@pytest.mark.parametrize("function", [fla.chunk_kda, fla.fused_recurrent_kda])
def test_bad_input_is_a_sentence_in_both_functions(function, options, message):
    with pytest.raises(ValueError, match=message):
        function(**_DATA | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ssm_state_indices": [0, 1]}, "ssm_state_indices is list; it must be a tensor"),
        ({"ssm_state_indices": torch.tensor(0)}, r"the shape of ssm_state_indices is \[\]"),
        ({"ssm_state_indices": torch.tensor([[True], [False]])}, "slots is torch.bool; it must be a tensor of whole"),
        ({"initial_state": torch.zeros(())}, r"the shape of initial_state is \[\]; it must be \[N, HV, K, V\]"),
        (
            {"initial_state": _STATE.mT},
            r"the shape of initial_state is \[2, 4, 6, 8\]; it must be .* = \[2, 4, 8, 6\]: this is the layout of",
        ),
        ({"num_accepted_tokens": torch.tensor([0, 1])}, r"accepted is \[0, 1\]; its entries must be from 1"),
        ({"num_accepted_tokens": torch.tensor([1])}, r"accepted is torch.int64 \[1\]; it must be whole numbers"),
        ({"g": _TOKEN["g"][:, :, :2]}, "the shape of g is"),
        ({"initial_state": _STATE.long()}, "initial_state is torch.int64"),
        (
            {"out": torch.zeros(B, 1, HV, V, dtype=torch.int64)},
            "out is torch.int64 on cpu; it must be a floating tensor",
        ),
        ({"out": torch.zeros(B, 1, HV, V, requires_grad=True)}, "out requires a gradient"),
    ],
)
def test_bad_input_leaves_the_pool(options, message):
    """What is refused is refused before a state is written."""
    pool = _STATE.clone()
    with pytest.raises(ValueError, match=message):
        fla.fused_recurrent_kda(**_TOKEN | _SLOTS | {"initial_state": pool} | options)
    assert not pool.any()


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (fla.chunk_gated_delta_rule, {"g": None}, "g is NoneType; it must be a tensor of rank 3"),
        (fla.chunk_gated_delta_rule, _INSIDE | {"A_log": torch.zeros(3)}, "A_log has 3 numbers on cpu; it must have 4"),
        (fla.fused_recurrent_gated_delta_rule, {"gk": _DATA["g"][:, :3]}, r"the shape of gk is .* \[2, 70, 4, 8\]"),
        (fla.fused_recurrent_gated_delta_rule, {"v": None}, "v is NoneType"),
        (fla.chunk_gated_delta_product, {"num_householder": 2.0}, "num_householder is 2.0; it must be a whole number"),
        (fla.chunk_gated_delta_product, {"num_householder": 1, "k": None}, "k is NoneType"),
        (fla.chunk_gated_delta_product, {"num_householder": 1, "g": 0.0}, "g is float"),
        (
            fla.chunk_gated_delta_product,
            {name: x[:1] for name, x in _DATA.items()}
            | {"num_householder": 2, "q": _DATA["q"][:1, :35], "g": None, "cu_seqlens": torch.tensor([0, T])},
            "cu_seqlens ends at 70; it must end at T = 35",
        ),
    ],
)
def test_bad_input_of_one_gate_a_head(function, options, message):
    with pytest.raises(ValueError, match=message):
        function(**_DATA | {"g": -_DATA["g"][..., 0].abs()} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"A_log": torch.zeros(3)}, "A_log has 3 numbers on cpu; it must have 4"),
        ({"A_log": torch.zeros(4), "dt_bias": torch.zeros(4)}, "dt_bias has 4 numbers on cpu; it must have 32"),
        ({"A_log": torch.zeros(4), "lower_bound": 3.0}, "lower_bound is 3.0; it must be a number below 0"),
        ({"g": None, "A_log": torch.zeros(4)}, "g is NoneType; it must be a floating tensor"),
        ({"A_log": 3.0}, "A_log is float; it must be a floating tensor or None"),
        (
            {"A_log": torch.zeros(4), "output_dtype": "float32"},
            "output_dtype is 'float32'; it must be a floating dtype",
        ),
        ({"g": torch.zeros(3), "A_log": torch.zeros(1)}, r"the shape of g is \[3\]; it must be \[..., H, K\]"),
    ],
)
def test_bad_input_of_the_gate_alone(options, message):
    with pytest.raises(ValueError, match=message):
        fla.fused_kda_gate(**{"g": _DATA["g"]} | options)


def test_the_states_between_chunks_are_refused_over_ranks():
    with pytest.raises(ValueError, match="return_intermediate_states is True; it must be False with cp_context"):
        fla.chunk_kda(**_DATA, return_intermediate_states=True, cp_context=object())


@pytest.mark.parametrize("bounds", [[0, 40], [0, 50, 40, T]])
def test_the_states_between_chunks_check_the_lengths(bounds):
    with torch.inference_mode(), pytest.raises(ValueError, match="cu_seqlens is "):
        fla.chunk_kda(
            **{name: x[:1] for name, x in _DATA.items()},
            return_intermediate_states=True,
            cu_seqlens=torch.tensor(bounds),
        )


def test_the_old_name_of_a_layout_warns():
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        _, state = fla.chunk_kda(**_DATA, transpose_state_layout=True, output_final_state=True)
    assert state.shape == (B, HV, V, K)


def test_our_context_is_taken_over_its_ranks(tmp_path):
    """One rank here; several are tested with the context itself."""
    from torch import distributed

    from ckda.ops.context import Context

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "state_v_first": True}
        found = fla.chunk_kda(**_DATA, cp_context=Context(), **options)
        one = {name: x[:, :, :H] for name, x in _DATA.items()}
        one["g"] = -one["g"][..., 0].abs()[:, :35]
        one["q"] = one["q"][:, :35]
        product = [fla.chunk_gated_delta_product(**one, num_householder=2, cp_context=x)[0] for x in (Context(), None)]
    finally:
        distributed.destroy_process_group()
    for a, b in zip(found, fla.chunk_kda(**_DATA, **options), strict=True):
        assert_close(a, b)
    assert_close(*product)


class FLACPContext:
    """As FLA had it before 0.6: no layout, for all parts were contiguous."""

    pre_num_ranks = 0

    def __init__(self, group, cu_seqlens):
        self.group, self.cu_seqlens = group, cu_seqlens


def test_flas_context_of_before_its_layouts_and_what_is_wrong_with_one(tmp_path):
    from torch import distributed

    one = {name: x[:1] for name, x in _DATA.items()} | {"g": -_DATA["g"][:1].abs()}
    bounds = torch.tensor([0, 30, T], dtype=torch.int32)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = distributed.group.WORLD
        o, _ = fla.chunk_kda(**one, cp_context=FLACPContext(group, bounds))
        for context, message in (
            (FLACPContext(None, bounds), "cp_context has no group"),
            (FLACPContext(group, None), "cp_context has no cu_seqlens"),
            (FLACPContext(group, bounds[:2]), "cp_context is for 30 tokens on this rank; q has 70"),
        ):
            with pytest.raises(ValueError, match=message):
                fla.chunk_kda(**one, cp_context=context)
    finally:
        distributed.destroy_process_group()
    assert_close(o, fla.chunk_kda(**one, cu_seqlens=bounds)[0])


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_installed_fla_has_these_parameters(name):
    """Not FLA as we remember it: what is installed is asked, where it is."""
    pytest.importorskip("fla.ops.kda", reason="fla-core is not installed")
    theirs = next(
        getattr(module, name)
        for module in map(
            importlib.import_module,
            ("fla.ops.kda", "fla.ops.kda.fused_recurrent", "fla.ops.kda.gate", "fla.ops.gated_delta_rule",
             "fla.ops.gated_delta_product"),
        )
        if hasattr(module, name)
    )  # fmt: skip
    parameters = inspect.signature(theirs).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == SIGNATURES[name].split()
    ours = inspect.signature(getattr(fla, name)).parameters
    assert {p.name: p.default for p in parameters if p.name in ours} == {
        p.name: ours[p.name].default for p in parameters if p.name in ours
    }


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("lower_bound", [None, -5.0, -2.0])
def test_flas_own_recurrent_kernel(inside, v_first, lower_bound):
    """Where FLA is installed: its Triton kernel in the interpreter, on states by slot, with drafts and an empty sequence."""
    pytest.importorskip("fla.ops.kda", reason="fla-core is not installed")
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    q, k, v, g, beta = draw(1, 6, torch.float32)
    A_log, dt_bias = torch.randn(HV), torch.randn(HV * K)
    options = {"cu_seqlens": torch.tensor([0, 3, 3, 4, 6]), "state_v_first": v_first, "use_qk_l2norm_in_kernel": True}
    options |= {"ssm_state_indices": torch.arange(12).view(4, 3), "num_accepted_tokens": torch.tensor([2, 1, 1, 3])}
    if inside:
        options |= {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound, "use_gate_in_kernel": True}
        options |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    else:
        g, beta = -g.abs(), beta.sigmoid()
    pool = torch.randn(14, HV, *((V, K) if v_first else (K, V)))
    results = []
    for function in (fused_recurrent_kda_fwd, fla.fused_recurrent_kda_fwd):
        used = pool.clone()
        results.append((function(q, k, v, g, beta, initial_state=used, **options)[0], used))
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
