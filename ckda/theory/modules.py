"""Compiled machines as torch modules: a group as one `ComplexKDA` layer with a built decoder, automata over `complex_kda`.

A module is built from a plain config and its tensors (safetensors), so that a machine runs without the theory's exact
arithmetic. Words are whole numbers [B, T], letters by number; the answer after every letter comes back.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ckda.layers import ComplexKDA
from ckda.ops import complex_kda

__all__ = ["ActionMachine", "AutomatonMachine", "Blocks", "GroupMachine", "WeightedMachine", "build"]

CHUNK = 4096  #: tokens decoded at a time


class GroupMachine(nn.Module):
    """One layer of Complex KDA that tracks a group, one head per stage, and a decoder to its elements.

    The input is one-hot in the letters. alpha = +-1 and beta = 2 exactly: the gates' logits are far out. The value is
    zero, the state starts at the identity, and a head's normed output S^T q lies on a sphere, where the decoder takes
    the nearest of the outputs that can occur, given what the heads after it have told.

    Args:
        config: letters, dimensions, head_dim, head_v_dim, hidden_size, pairs and known (entries of each head's decoder).
    """

    def __init__(self, config: dict[str, Any], backend: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.letters, self.dimensions = len(config["letters"]), list(config["dimensions"])
        H, K, V = len(self.dimensions), config["head_dim"], config["head_v_dim"]
        self.layer = ComplexKDA(
            config["hidden_size"],
            H,
            K,
            head_v_dim=V,
            conv_size=0,
            activate=(),
            output_gate=None,
            initial_state=torch.eye(K, V),
            norm_eps=1e-12,
            backend=backend,
        )
        for h, (pairs, known) in enumerate(zip(config["pairs"], config["known"], strict=True)):
            self.register_buffer(f"outputs{h}", torch.zeros(pairs, self.dimensions[h]))
            self.register_buffer(f"labels{h}", torch.zeros(pairs, dtype=torch.int64))
            self.register_buffer(f"start{h}", torch.zeros(known + 1, dtype=torch.int64))
        self.answer: Tensor
        self.register_buffer("answer", torch.zeros(config["answers"], dtype=torch.int64))

    def embed(self, word: Tensor) -> Tensor:
        """[B, T] letters -> [B, T, hidden_size] one-hot."""
        dtype = self.layer.o_proj.weight.dtype
        return nn.functional.one_hot(word, self.config["hidden_size"]).to(dtype)

    def forward(self, word: Tensor) -> Tensor:
        """[B, T] letters -> [B, T] elements, the running product after every letter."""
        return self.decode(self.layer(self.embed(word)))

    def decode(self, y: Tensor) -> Tensor:
        """[..., hidden_size] outputs of the layer -> [...] elements."""
        H, V = len(self.dimensions), self.config["head_v_dim"]
        rows = y.detach()[..., : H * V].reshape(-1, H, V)
        return torch.cat([self._decode(part) for part in rows.split(CHUNK)]).view(y.shape[:-1])

    def _decode(self, rows: Tensor) -> Tensor:
        known = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        for h in reversed(range(len(self.dimensions))):
            outputs, labels, start = (getattr(self, f"{name}{h}") for name in ("outputs", "labels", "start"))
            head, after = rows[:, h, : self.dimensions[h]].to(outputs.dtype), torch.zeros_like(known)
            for e in known.unique().tolist():
                low, high = int(start[e]), int(start[e + 1])
                mine = (known == e).nonzero()[:, 0]
                if high > low:
                    nearest = (head[mine] @ outputs[low:high].T).argmax(-1)
                    after[mine] = labels[low:high][nearest]
            known = after
        return self.answer[known]


def _nearest(values: Tensor, known: Tensor) -> Tensor:
    """[T] numbers -> the index of the nearest of the known ones."""
    return (values[:, None] - known).abs().argmin(-1)


class Blocks(nn.Module):
    """What DFAs and WFAs share: the clock, the buffer of 2m tokens, and the split of what it holds into blocks of m."""

    clock_key: Tensor
    readouts: Tensor
    start_state: Tensor

    def __init__(self, config: dict[str, Any], backend: str = "reference") -> None:
        super().__init__()
        self.config, self.m, self.n, self.backend = config, config["block"], config["states"], backend
        self.letters = len(config["letters"])
        self.register_buffer("clock_key", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("readouts", torch.zeros(2 * self.m, dtype=torch.float64))
        columns = config.get("columns", 1)
        self.register_buffer("start_state", torch.zeros(config["width"], columns, dtype=torch.float64))

    def _run(self, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, start: Tensor) -> Tensor:
        """One call of the operator: q [T, H, K], k [T, K] and so on -> [T, H, V]; the heads differ in the query alone."""
        H, dtype = q.shape[1], self.clock_key.dtype

        def heads(x: Tensor) -> Tensor:
            return x[None, :, None].expand(-1, -1, H, *x.shape[1:]).to(dtype).contiguous()

        sign = torch.where(alpha < 0, -1, 1).to(torch.int8)
        o, _ = complex_kda(
            q[None].to(dtype),
            heads(k),
            heads(v),
            heads(alpha.abs().log()),
            heads(beta),
            sign=heads(sign).to(torch.int8),
            scale=1.0,
            initial_state=start.to(dtype)[None, None].expand(1, H, -1, -1).contiguous(),
            backend=self.backend,
        )
        return o[0]

    def positions(self, length: int) -> Tensor:
        """[T] t mod 2m, counted by the clock (lem:wfamincount)."""
        one = torch.ones(length, 1, dtype=self.clock_key.dtype, device=self.clock_key.device)
        query = torch.tensor([0.6, 0.8], dtype=one.dtype, device=one.device)
        alpha = torch.tensor([1.0, -1.0], dtype=one.dtype, device=one.device)
        start = torch.tensor([[1.0], [0.0]], dtype=one.dtype, device=one.device)
        o = self._run((one * query)[:, None], one * self.clock_key, 0 * one, one * alpha, 2 * one[:, 0], start)
        return _nearest(o[:, 0, 0], self.readouts)

    def codes(self, word: Tensor, position: Tensor) -> Tensor:
        """[T, 2m] letter + 1 by slot, 0 where nothing was written, as the buffer gives them."""
        size = 2 * self.m
        slot = nn.functional.one_hot(position, size).to(self.clock_key.dtype)
        ones = torch.ones_like(slot)
        o = self._run(
            ones[:, None], slot, slot * (word + 1)[:, None], ones, ones[:, 0], torch.zeros_like(slot[:1]).T @ slot[:1]
        )
        return o[:, 0].round().long()

    def blocks(self, word: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T] steps of the block done, [T, m] letters of the block before, [T, m] of this one; -1 where there is none."""
        position = self.positions(len(word))
        codes, m = self.codes(word, position), self.m
        done = (position - 1) % m + 1
        steps = torch.arange(m, device=word.device)
        this = torch.gather(codes, 1, (position[:, None] - done[:, None] + 1 + steps) % (2 * m)) - 1
        before = torch.gather(codes, 1, (position[:, None] - done[:, None] + 1 - m + steps) % (2 * m)) - 1
        return done, before, torch.where(steps < done[:, None], this, -1)


class AutomatonMachine(Blocks):
    """A DFA by three layers (thm:multilayer): clock, buffer, accumulator. The lookups between them are its buffers.

    Args:
        config: letters, states, width, block, maps (of words), blocks (maps that blocks of m letters make).
    """

    compose: Tensor
    which: Tensor
    rows: Tensor
    keys: Tensor
    rates: Tensor
    gates: Tensor
    completions: Tensor
    heads = 2  #: of the accumulator: the state's number, and whether it accepts

    def __init__(self, config: dict[str, Any], backend: str = "reference") -> None:
        super().__init__(config, backend)
        M, B, n, m = config["maps"], config["blocks"], self.n, self.m
        self.register_buffer("compose", torch.zeros(self.letters, M, dtype=torch.int64))
        self.register_buffer("which", torch.zeros(M, dtype=torch.int64))
        shapes = {"rows": (M, self.heads, n), "keys": (B, m, n), "rates": (B, m), "gates": (B, m, n)}
        shapes["completions"] = (B, m + 1, n, n)
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))

    def forward(self, word: Tensor) -> Tensor:
        """[B, T] letters -> [B, T, 2]: the state after every letter, and whether it accepts (0 or 1)."""
        return torch.stack([self._follow(row)[..., 0] for row in word])

    def _fold(self, letters: Tensor) -> Tensor:
        """[T, m] letters -> [T] the number of their map; -1 is skipped."""
        found = torch.zeros(len(letters), dtype=torch.int64, device=letters.device)
        for column in letters.T:
            found = torch.where(column < 0, found, self.compose[column.clamp_min(0), found])
        return found

    def _follow(self, word: Tensor) -> Tensor:
        """[T] letters -> [T, heads, columns] whole numbers."""
        done, before, this = self.blocks(word)
        first = (before < 0).any(1)
        block, rows = self.which[self._fold(before)], self.rows[self._fold(this)]
        r = done - 1
        one = torch.ones_like(self.rates[block, r])
        alpha = torch.where(first[:, None], one[:, None], self.gates[block, r])
        beta = torch.where(first, 0 * one, self.rates[block, r])
        query = torch.where(first[:, None, None], rows, rows @ self.completions[block, done])
        value = torch.zeros(len(word), self.start_state.shape[1], dtype=one.dtype, device=one.device)
        return self._run(query, self.keys[block, r], value, alpha, beta, self.start_state).round().long()


class ActionMachine(AutomatonMachine):
    """A group of permutations by the same three layers: the accumulator starts at the identity and holds them all.

    Args:
        config: as for a DFA whose states are the points; columns (their number), elements.
    """

    elements: Tensor
    heads = 1  #: the number of the point where each point went

    def __init__(self, config: dict[str, Any], backend: str = "reference") -> None:
        super().__init__(config, backend)
        self.register_buffer("elements", torch.zeros(len(config["elements"]), self.n, dtype=torch.int64))

    def forward(self, word: Tensor) -> Tensor:
        """[B, T] letters -> [B, T] elements, the running product after every letter; -1 where it is none."""
        return torch.stack([torch.cat([*map(self._element, self._follow(row)[:, 0].split(CHUNK))]) for row in word])

    def _element(self, images: Tensor) -> Tensor:
        same = (images[:, None] == self.elements).all(-1)
        return torch.where(same.any(-1), same.int().argmax(-1), -1)


class WeightedMachine(Blocks):
    """A WFA over Q by three layers (thm:multilayer). The parameters of a block are computed from its matrix.

    Args:
        config: letters, states, width = 2n + 1, block = 7n^2 + 3n, scales [[step, coordinate, row, column], ...].
    """

    matrices: Tensor
    final: Tensor
    keys: Tensor
    rates: Tensor
    gates: Tensor

    def __init__(self, config: dict[str, Any], backend: str = "reference") -> None:
        super().__init__(config, backend)
        n, m, w = self.n, self.m, config["width"]
        shapes = {"matrices": (self.letters, n, n), "final": (n,), "keys": (m, w), "rates": (m,), "gates": (m, w)}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))

    def forward(self, word: Tensor) -> Tensor:
        """[B, T] letters -> [B, T] the weight after every letter."""
        return torch.stack([self._follow(row) for row in word])

    def _fold(self, letters: Tensor) -> Tensor:
        """[N, m] letters -> [N, n, n] the product of their matrices, the last to the left; -1 is skipped."""
        eye = torch.eye(self.n, dtype=self.matrices.dtype, device=letters.device).expand(len(letters), -1, -1)
        found = eye
        for column in letters.T:
            step = torch.where((column < 0)[:, None, None], eye, self.matrices[column.clamp_min(0)])
            found = step @ found
        return found

    def _program(self, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N, n, n] -> rates [N, m], gates [N, m, w] and completions [N, m + 1, n, w]: rows of the factors to come."""
        N, w = len(M), self.config["width"]
        rates, gates = self.rates.expand(N, -1).clone(), self.gates.expand(N, -1, -1).clone()
        for r, t, i, j in self.config["scales"]:
            rates[:, r] = 1 + M[:, i, j].abs()
            gates[:, r, t] = torch.where(M[:, i, j] > 0, -1.0, 1.0).to(gates.dtype)
        row = torch.eye(self.n, w, dtype=M.dtype, device=M.device).expand(N, -1, -1)
        completions = [row]
        for r in reversed(range(self.m)):
            along = row @ self.keys[r]
            row = (row - (along * rates[:, r, None])[..., None] * self.keys[r]) * gates[:, r, None]
            completions.append(row)
        return rates, gates, torch.stack(completions[::-1], 1)

    def _follow(self, word: Tensor) -> Tensor:
        done, before, this = self.blocks(word)
        first = (before < 0).any(1)
        kinds, block = before.unique(dim=0, return_inverse=True)
        rates, gates, completions = self._program(self._fold(kinds))
        rows = (self.final @ self._fold(this))[:, None]
        r, w = done - 1, self.config["width"]
        alpha = torch.where(first[:, None], torch.ones_like(gates[block, r]), gates[block, r])
        beta = torch.where(first, torch.zeros_like(rates[block, r]), rates[block, r])
        plain = nn.functional.pad(rows, (0, w - self.n))
        query = torch.where(first[:, None, None], plain, rows @ completions[block, done])
        value = torch.zeros(len(word), 1, dtype=rows.dtype, device=rows.device)
        return self._run(query, self.keys[r], value, alpha, beta, self.start_state)[:, 0, 0]


MACHINES: dict[str, type[nn.Module]] = {
    "group": GroupMachine,
    "action": ActionMachine,
    "dfa": AutomatonMachine,
    "wfa": WeightedMachine,
}


def build(config: dict[str, Any], tensors: dict[str, Tensor], backend: str | None = None) -> nn.Module:
    """The module of a config with these tensors."""
    module = MACHINES[config["kind"]](config, **({} if backend is None else {"backend": backend}))
    module.load_state_dict(tensors)
    return module.eval().requires_grad_(False)


def group_tensors(
    machine: GroupMachine, keys: Sequence[Tensor], signs: Sequence[Tensor], queries: Sequence[Tensor], logit: float
) -> None:
    """Write keys [L, d], signs [L, d] and queries [d] of every head into the layer's projections."""
    layer, H = machine.layer, len(machine.dimensions)
    K, V, L = machine.config["head_dim"], machine.config["head_v_dim"], machine.letters
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        sign = torch.ones(H * K, L, dtype=torch.float64)
        for h, d in enumerate(machine.dimensions):
            layer.q_proj.weight[h * K : h * K + d, :L] = queries[h].to(layer.q_proj.weight)[:, None]
            layer.k_proj.weight[h * K : h * K + d, :L] = keys[h].T.to(layer.k_proj.weight)
            sign[h * K : h * K + d] = signs[h].T
        left, right = sign_factors(sign)
        layer.f_proj[0].get_parameter("weight")[: len(right), :L] = right.to(layer.k_proj.weight)
        layer.f_proj[1].get_parameter("weight")[:, : len(right)] = logit * left.to(layer.k_proj.weight)
        layer.b_proj.weight[:, :L] = logit
        layer.o_norm.weight.fill_(1.0)
        layer.o_proj.weight[: H * V] = torch.eye(H * V)


def sign_factors(sign: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix of signs as left @ right with as few columns as its rank: right are rows of the matrix itself."""
    chosen: list[int] = []
    for i in range(len(sign)):
        if torch.linalg.matrix_rank(sign[[*chosen, i]]) > len(chosen):
            chosen.append(i)
    right = sign[chosen]
    return torch.linalg.lstsq(right.T, sign.T).solution.T, right
