"""The operator as engines call it: any mixture of prompts, tokens and drafts leaves the states of one long call."""

import pytest
import torch

from ckda import complex_kda
from ckda.ops import serving

H, HV, K, V = 1, 2, 4, 3
OPTIONS = {"gate": "signed", "beta_range": 2, "normalize_qk": True}


def draw(num_tokens):
    shapes = [(H, K), (H, K), (HV, V), (HV, K), (HV,)]
    return [torch.randn(num_tokens, *shape, dtype=torch.float64) for shape in shapes]


def whole(tokens):
    """o and the state after one call on all tokens of a sequence."""
    o, state = complex_kda(*[x.unsqueeze(0) for x in tokens], output_final_state=True, **OPTIONS)
    return o[0], state[0]


def new_pool(v_first, slots=9, dtype=torch.float64):
    """With strides of its own, as a part of a larger cache."""
    shape = (V, K) if v_first else (K, V)
    return torch.randn(slots, 2, HV, *shape, dtype=dtype)[:, 1]


def state_of(pool, slot, v_first):
    return pool[slot].mT if v_first else pool[slot]


@pytest.mark.parametrize("v_first", [False, True])
def test_a_prompt_then_tokens_then_drafts(v_first):
    """Two sequences beside a padded row; of three drafts two, then one, are right."""
    words = [draw(12), draw(15)]
    pool = new_pool(v_first)
    before, found = pool.clone(), [[], []]
    prompt = [torch.cat([a[:5], b[:8]]).unsqueeze(0) for a, b in zip(*words, strict=True)]
    bounds = torch.tensor([0, 5, 13])
    options = OPTIONS | {"v_first": v_first}
    slots = torch.tensor([4, 2])
    o = serving.prefill(*prompt, pool, slots, fresh=torch.tensor([True, True]), cu_seqlens=bounds, **options)[0]
    found[0].append(o[:5])
    found[1].append(o[5:])
    at = [5, 8]
    for _ in range(2):  # a token each, and a row that is padding
        token = [torch.stack([a[at[0]], torch.full_like(a[0], 9.0), b[at[1]]]) for a, b in zip(*words, strict=True)]
        o = serving.step(*token, pool, torch.tensor([4, -1, 2]), **options)
        found[0].append(o[:1])
        found[1].append(o[2:])
        at = [t + 1 for t in at]
    table, accepted = torch.tensor([[4, 5, 6], [2, 7, 8]]), None
    for right in ([2, 1], [3, 3]):  # the rest of a call's drafts is thrown away
        draft = [torch.cat([a[at[0] : at[0] + 3], b[at[1] : at[1] + 3]]) for a, b in zip(*words, strict=True)]
        for n in range(2):
            for x in draft:
                x[3 * n + right[n] : 3 * n + 3] = 5.0
        bounds = torch.tensor([0, 3, 6])
        o = serving.verify(*draft, pool, table, cu_seqlens=bounds, accepted=accepted, **options)
        for n in range(2):
            found[n].append(o[3 * n : 3 * n + right[n]])
        accepted, at = torch.tensor(right), [t + r for t, r in zip(at, right, strict=True)]
    for n in range(2):
        expected, state = whole([x[: at[n]] for x in words[n]])
        torch.testing.assert_close(torch.cat(found[n]), expected)
        torch.testing.assert_close(state_of(pool, table[n, accepted[n] - 1], v_first), state)
    assert torch.equal(pool[[0, 1, 3]], before[[0, 1, 3]])


def test_a_batch_of_padding_leaves_the_pool():
    pool = new_pool(False)
    before, nothing = pool.clone(), torch.tensor([-1, -1])
    serving.step(*draw(2), pool, nothing, **OPTIONS)
    serving.prefill(*[x.view(2, 3, *x.shape[1:]) for x in draw(6)], pool, nothing, **OPTIONS)
    serving.verify(*draw(4), pool, torch.full((2, 2), -1), cu_seqlens=torch.tensor([0, 2, 4]), **OPTIONS)
    assert torch.equal(pool, before)


def test_drafts_of_different_lengths_and_none():
    """Sequences with two, no and one token; the first begins from its slot, a padded one is not advanced."""
    tokens, pool = draw(4), new_pool(False)
    before, table = pool.clone(), torch.tensor([[0, 1], [2, 3], [4, 5], [-1, -1]])
    o = serving.verify(*tokens, pool, table, cu_seqlens=torch.tensor([0, 2, 2, 3, 4]), **OPTIONS)
    for slot, a, b in ((0, 0, 2), (4, 2, 3)):
        part = [x[a:b].unsqueeze(0) for x in tokens]
        expected, state = complex_kda(
            *part, initial_state=before[slot : slot + 1].contiguous(), output_final_state=True, **OPTIONS
        )
        torch.testing.assert_close(o[a:b], expected[0])
        torch.testing.assert_close(pool[table[slot // 2, b - a - 1]], state[0])
    assert torch.equal(pool[[2, 3, 5, 6, 7, 8]], before[[2, 3, 5, 6, 7, 8]])


@pytest.mark.parametrize("separate", [False, True])
def test_options_with_a_row_a_token_go_with_their_tokens(separate):
    """Signs given beside log|alpha|, and separate gates: a padded row does not disturb the others."""
    q, k, v, g, beta = draw(4)
    sign = torch.randint(0, 2, g.shape, dtype=torch.int8) * 2 - 1
    given = {"sign": sign} | ({"erase": torch.rand_like(g), "write": torch.rand_like(v)} if separate else {})
    tokens = [q, k, v, -g.abs(), None if separate else beta.sigmoid()]
    pool = new_pool(False)

    def expected(a, b, slot):
        part = [None if x is None else x[None, a:b] for x in tokens]
        options = {name: x[None, a:b] for name, x in given.items()}
        return complex_kda(*part, **options, initial_state=pool[slot : slot + 1].contiguous(), output_final_state=True)

    used = pool.clone()
    o = serving.step(*tokens, used, torch.tensor([-1, 3, 5, -1]), **given)
    for row, slot in ((1, 3), (2, 5)):
        o_row, state = expected(row, row + 1, slot)
        torch.testing.assert_close(o[row], o_row[0, 0])
        torch.testing.assert_close(used[slot], state[0])
    used, table = pool.clone(), torch.tensor([[0, 1, 2], [6, 7, 8]])
    o = serving.verify(*tokens, used, table, cu_seqlens=torch.tensor([0, 3, 4]), **given)
    o_first, state = expected(0, 3, 0)
    torch.testing.assert_close(o[:3], o_first[0])
    torch.testing.assert_close(used[2], state[0])
    whole = [None if x is None else x.unsqueeze(0) for x in tokens]
    o, state, _ = serving.states_every(*whole, 3, **{name: x.unsqueeze(0) for name, x in given.items()})
    expected_o, expected_state = complex_kda(
        *whole, **{name: x.unsqueeze(0) for name, x in given.items()}, output_final_state=True
    )
    torch.testing.assert_close(o, expected_o)
    torch.testing.assert_close(state, expected_state)


def test_a_pool_of_bfloat16_is_rounded_once_a_call():
    tokens, pool = [x.float() for x in draw(1)], new_pool(False, dtype=torch.bfloat16)
    start = pool[3:4].float().contiguous()
    serving.step(*tokens, pool, torch.tensor([3]), **OPTIONS)
    _, state = complex_kda(*[x.unsqueeze(0) for x in tokens], initial_state=start, output_final_state=True, **OPTIONS)
    assert torch.equal(pool[3], state[0].bfloat16())


def test_states_every():
    tokens = [x.unsqueeze(0) for x in draw(11)]
    o, state, states = serving.states_every(*tokens, 4, cu_seqlens=torch.tensor([0, 6, 6, 11]), **OPTIONS)
    found = [
        whole([x[0, a:b] for x in tokens])[1] if b > a else torch.zeros(HV, K, V)
        for a, b in [(0, 0), (0, 4), (6, 6), (6, 10)]
    ]
    torch.testing.assert_close(states[0], torch.stack(found).double())
    torch.testing.assert_close(o[0, 6:], whole([x[0, 6:] for x in tokens])[0])
    torch.testing.assert_close(state[2], whole([x[0, 6:] for x in tokens])[1])
    assert not state[1].any()


def test_bad_input():
    tokens, pool = draw(2), new_pool(False)
    with pytest.raises(ValueError, match=r"the shape of pool is \[9, 2, 4, 3\]; it must be \[S, HV, V, K\]"):
        serving.step(*tokens, pool, torch.tensor([0, 1]), v_first=True)
    with pytest.raises(ValueError, match=r"the shape of slots is \[3\]; it must be \[2\]"):
        serving.step(*tokens, pool, torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="slots has the entry 9; it must be below the number of slots, 9"):
        serving.step(*tokens, pool, torch.tensor([0, 9]))
    with pytest.raises(ValueError, match="slots has 1 slots a sequence; the longest has 2 tokens"):
        serving.verify(*tokens, pool, torch.tensor([[0]]), cu_seqlens=torch.tensor([0, 2]))
    drafts = {"slots": torch.tensor([[0, 1]]), "cu_seqlens": torch.tensor([0, 2])}
    for changed, message in (
        ({"accepted": torch.tensor([0])}, "accepted is .0.; its entries must be from 1 to the number of slots, 2"),
        ({"accepted": torch.tensor([1, 1])}, r"accepted is torch.int64 \[2\]; it must be whole numbers \[N\] = \[1\]"),
        (
            {"cu_seqlens": torch.tensor([0, 3])},
            r"cu_seqlens is \[0, 3\]; it must be non-decreasing from 0 to at most 2",
        ),
        ({"slots": torch.tensor([[0.0, 1.0]])}, "slots is torch.float32; it must be a tensor of whole numbers"),
        ({"slots": torch.tensor([[True, False]])}, "slots is torch.bool; it must be a tensor of whole numbers"),
        ({"cu_seqlens": [0, 2]}, "cu_seqlens is list; it must be a tensor of whole numbers"),
        ({"head_first": True}, "there is no option 'head_first' here; there are sign, A_log, "),
        ({"state": pool[:1]}, "there is no option 'state' here"),
        ({"slots": [[0, 1]]}, "slots is list; it must be a tensor"),
        ({"pool": pool.long()}, "pool is torch.int64 on cpu; it must be floating numbers"),
        ({"pool": pool[:0]}, r"pool is of shape \[0, 2, 4, 3\]; it must be a tensor with at least one row"),
        ({"g": tokens[3][:1]}, "the shape of g is .*; its first axis must be that of q, 2"),
    ):
        call = dict(zip(("q", "k", "v", "g", "beta"), tokens, strict=True)) | {"pool": pool} | drafts | changed
        with pytest.raises(ValueError, match=message):
            serving.verify(**call)
    whole = [x.unsqueeze(0) for x in tokens]
    with pytest.raises(ValueError, match=r"fresh is torch.int64 \[1\]; it must be torch.bool \[N\] = \[1\]"):
        serving.prefill(*whole, pool, torch.tensor([0]), fresh=torch.tensor([1]))
    for changed, message in (
        ({"fresh": [True]}, r"fresh is list; it must be torch.bool \[N\] = \[1\]"),
        ({"cu_seqlens": [0, 2]}, "cu_seqlens is list; it must be a tensor of whole numbers"),
        ({"initial_state": pool[:1]}, "there is no option 'initial_state' here"),
    ):
        with pytest.raises(ValueError, match=message):
            serving.prefill(*whole, pool, torch.tensor([0]), **changed)
    with pytest.raises(ValueError, match="q is NoneType; it must be a tensor"):
        serving.prefill(None, *whole[1:], pool, torch.tensor([0]))
    with pytest.raises(ValueError, match=r"num_tokens is 1\.5; it must be a whole number from 1"):
        serving.states_every(*whole, 1.5)
    with pytest.raises(ValueError, match=r"cu_seqlens is \[0, ..., 1\]; it must be \[0, ..., T = 2\]"):
        serving.states_every(*whole, 4, cu_seqlens=torch.tensor([0, 1]))
