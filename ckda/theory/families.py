"""Families of state transitions, their parameter ranges, and what their spectra can do.

A :class:`Family` is data: named parameters with ranges, and the dense matrix they give, built from `ckda.transition`
wherever the family is a delta rule. It samples its range, and it can be searched: raw numbers in [-1, 1] map onto the
closed range, so an adversary of `ckda.theory.search` climbs over exactly the family's transitions.

The questions of tab:recurrence-spectrum and of the row "complex pairs" of tab:theory-summary are asked of a family in
`ckda.theory.spectra`.

Legend: N matrices at once, d channels of the family, n real numbers of state per value column.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ckda import transition
from ckda.theory.exact import Field, Matrix, field
from ckda.theory.search import Climb, climb

__all__ = ["FAMILIES", "Family", "Slot", "delta_product", "realify", "sfda"]

Params = Mapping[str, Tensor]


@dataclass(frozen=True)
class Slot:
    """One parameter: a number, a number per channel, or a unit key, with its closed range."""

    name: str
    low: float = 0.0
    high: float = 1.0
    shape: Literal["number", "vector", "key", "complex key"] = "number"

    def size(self, d: int) -> int:
        """How many raw numbers it takes at width d."""
        return {"number": 1, "vector": d, "key": d, "complex key": 2 * d}[self.shape]

    def decode(self, raw: Tensor) -> Tensor:
        """[N, size] raw numbers in [-1, 1] -> [N], [N, d] or a unit key [N, d]."""
        if self.shape in ("key", "complex key"):
            key = torch.where(raw.norm(dim=-1, keepdim=True) > 1e-9, raw, torch.ones_like(raw))
            key = key / key.norm(dim=-1, keepdim=True)
            return torch.complex(*key.chunk(2, -1)) if self.shape == "complex key" else key
        value = self.low + (self.high - self.low) * (raw + 1) / 2
        return value.squeeze(-1) if self.shape == "number" else value

    def rational(self, raw: np.ndarray) -> list[Fraction]:
        """The same as :meth:`decode` in rationals with 16 binary digits; keys are not normalised."""
        ticks = [Fraction(round(float(x) * 2**15), 2**15) for x in raw]
        if self.shape == "key":
            return ticks if any(ticks) else [Fraction(1)] * len(ticks)
        low, high = Fraction(self.low).limit_denominator(1000), Fraction(self.high).limit_denominator(1000)
        return [low + (high - low) * (t + 1) / 2 for t in ticks]


@dataclass(frozen=True)
class Family:
    """A family of transitions: its parameters, and the matrix on one value column.

    Example:
        >>> A = FAMILIES["CKDA"].sample(d=3, count=5)
        >>> tuple(A.shape), bool((torch.linalg.matrix_norm(A, 2) <= 1 + 1e-12).all())
        ((5, 3, 3), True)
    """

    name: str
    formula: str
    ranges: str
    slots: tuple[Slot, ...]
    matrix: Callable[[Params], Tensor]  #: named parameters -> [N, n, n] real
    exact: Callable[[Field, Mapping[str, list[Fraction]]], Matrix] | None = None  #: the same over a field

    def size(self, d: int) -> int:
        """How many raw numbers one transition of width d takes."""
        return sum(slot.size(d) for slot in self.slots)

    def decode(self, raw: np.ndarray | Tensor, d: int) -> dict[str, Tensor]:
        """[N, size(d)] raw numbers in [-1, 1] -> named parameters in their closed ranges."""
        parts = torch.as_tensor(raw, dtype=torch.float64).split([slot.size(d) for slot in self.slots], -1)
        return {slot.name: slot.decode(part) for slot, part in zip(self.slots, parts, strict=True)}

    def dense(self, raw: np.ndarray | Tensor, d: int) -> Tensor:
        """[N, size(d)] raw numbers -> [N, n, n]."""
        return self.matrix(self.decode(raw, d))

    def sample(self, d: int, count: int, seed: int = 0) -> Tensor:
        """[count, n, n] transitions, raw numbers drawn uniformly with some weight on the ends of the ranges."""
        raw = np.random.default_rng(seed).uniform(-1.2, 1.2, (count, self.size(d))).clip(-1, 1)
        return self.dense(raw, d)

    def rational(self, raw: np.ndarray, d: int) -> Matrix:
        """The transition at a nearby rational point of the range, exactly."""
        if self.exact is None:
            raise ValueError(f"{self.name} has no exact form")
        parts = np.split(raw, np.cumsum([slot.size(d) for slot in self.slots])[:-1])
        named = {slot.name: slot.rational(part) for slot, part in zip(self.slots, parts, strict=True)}
        return self.exact(field(), named)

    def search(
        self, score: Callable[[np.ndarray], np.ndarray], d: int, starts: int, steps: int, seed: int = 0
    ) -> Climb:
        """Climb a score of dense matrices [N, n, n] -> [N] over the family."""
        return climb(lambda raw: score(self.dense(raw, d).numpy()), self.size(d), starts, steps, seed)


def realify(A: Tensor) -> Tensor:
    """[..., m, m] complex -> [..., 2m, 2m] real, the same map on (real part, imaginary part).

    Example:
        >>> realify(torch.tensor([[1j]]))
        tensor([[ 0., -1.],
                [ 1.,  0.]])
    """
    return torch.cat([torch.cat([A.real, -A.imag], -1), torch.cat([A.imag, A.real], -1)], -2)


# the families

_UNIT_KEY = Slot("k", shape="key")


def _ckda(p: Params) -> Tensor:
    return transition.dense(p["alpha"], p["k"], p["beta"])


def _ckda_exact(F: Field, p: Mapping[str, list[Fraction]]) -> Matrix:
    alpha = p["alpha"] if len(p["alpha"]) > 1 else p["alpha"] * len(p["k"])
    return F.ckda(alpha, p["k"], p["beta"][0])


def _scalar_gate(p: Params) -> Tensor:
    return transition.dense(p["alpha"].unsqueeze(-1), p["k"], p["beta"])


def _delta(p: Params) -> Tensor:
    return transition.dense(torch.ones_like(p["k"]), p["k"], p["beta"])


def _delta_exact(F: Field, p: Mapping[str, list[Fraction]]) -> Matrix:
    return F.householder(p["k"], p["beta"][0])


def _erase_after_gate(p: Params) -> Tensor:
    """(I - k (e * k)^T) Diag(alpha), as GDN-2 writes it."""
    eye = torch.eye(p["k"].shape[-1], dtype=torch.float64).expand(*p["k"].shape, -1)
    return transition.apply(eye, p["alpha"], p["erase"] * p["k"], p["k"])


def _erase_beside_gate(p: Params) -> Tensor:
    """Diag(alpha) - k (e * k)^T, as RWKV-7 writes it and as tab:theory-summary heads its column."""
    return torch.diag_embed(p["alpha"]) - p["k"].unsqueeze(-1) * (p["erase"] * p["k"]).unsqueeze(-2)


def _erase_beside_gate_exact(F: Field, p: Mapping[str, list[Fraction]]) -> Matrix:
    norm2 = sum(x * x for x in p["k"])
    erase = F.matrix([[e * x / norm2 for e, x in zip(p["erase"], p["k"], strict=True)]])
    return F.diag(p["alpha"]) - F.vector(p["k"]) @ erase


def _erase_after_gate_exact(F: Field, p: Mapping[str, list[Fraction]]) -> Matrix:
    ungated = {"alpha": [Fraction(1)] * len(p["k"]), "k": p["k"], "erase": p["erase"]}
    return _erase_beside_gate_exact(F, ungated) @ F.diag(p["alpha"])


def _mdn(p: Params) -> Tensor:
    """Memory and momentum, with 0 <= beta <= 1 - alpha through beta = share (1 - alpha)."""
    alpha, mu, eta = (p[name][:, None, None] for name in ("alpha", "mu", "eta"))
    beta = p["share"][:, None, None] * (1 - alpha)
    kk = p["k"].unsqueeze(-1) * p["k"].unsqueeze(-2)
    eye = torch.eye(kk.shape[-1], dtype=kk.dtype).expand_as(kk)
    top = torch.cat([alpha * (eye - beta * eta * kk), -beta * mu * eye], -1)
    return torch.cat([top, torch.cat([alpha * eta * kk, mu * eye], -1)], -2)


def _phases(p: Params) -> Tensor:
    return torch.polar(p["alpha"], p["theta"])


def _sfda(p: Params) -> Tensor:
    m = p["k"].shape[-1]
    eye = torch.eye(m, dtype=torch.complex128).expand(*p["k"].shape, -1)
    return realify(transition.apply(eye, _phases(p), p["beta"].unsqueeze(-1) * p["k"].conj(), p["k"]))


def _complex_diagonal(p: Params) -> Tensor:
    return realify(torch.diag_embed(_phases(p)))


def _rope(p: Params) -> Tensor:
    """Rotations in the d fixed coordinate planes (channel, channel + d)."""
    return realify(torch.diag_embed(torch.polar(torch.ones_like(p["theta"]), p["theta"])))


def _selective_rope(p: Params) -> Tensor:
    return p["gate"][:, None, None] * _rope(p)


def delta_product(factors: int, gated: bool = False) -> Family:
    """(Gated) DeltaProduct_k: alpha times a product of `factors` generalised Householder matrices.

    Example:
        >>> delta_product(2).name, delta_product(3, gated=True).size(4)
        ('DeltaProduct_2', 16)
    """
    slots = tuple(s for j in range(factors) for s in (Slot(f"k{j}", shape="key"), Slot(f"beta{j}", 0, 2)))

    def matrix(p: Params) -> Tensor:
        product = _delta({"k": p["k0"], "beta": p["beta0"]})
        for j in range(1, factors):
            product = product @ _delta({"k": p[f"k{j}"], "beta": p[f"beta{j}"]})
        return p["alpha"][:, None, None] * product if gated else product

    def exact(F: Field, p: Mapping[str, list[Fraction]]) -> Matrix:
        product = F.eye(len(p["k0"])) * (p["alpha"][0] if gated else 1)
        for j in range(factors):
            product = product @ F.householder(p[f"k{j}"], p[f"beta{j}"][0])
        return product

    formula = f"{'alpha ' if gated else ''}prod_{{j<={factors}}} (I - beta_j k_j k_j^T)"
    ranges = f"{'alpha in [0, 1], ' if gated else ''}beta_j in [0, 2]"
    name = f"{'Gated ' if gated else ''}DeltaProduct_{factors}"
    return Family(name, formula, ranges, (Slot("alpha"), *slots) if gated else slots, matrix, exact)


def sfda(theta_max: float = math.pi) -> Family:
    """Semidirect Fourier Delta Attention, (I - beta k k^*) Diag(alpha e^{i theta}), |theta| <= theta_max."""
    slots = (Slot("alpha", shape="vector"), Slot("theta", -theta_max, theta_max, "vector"))
    ranges = f"beta in [0, 1], alpha in [0, 1]^m, |theta| <= {theta_max:.4g}"
    key = Slot("k", shape="complex key")
    return Family("SFDA", "(I - beta k k^*) Diag(alpha e^{i theta})", ranges, (*slots, key, Slot("beta")), _sfda)


def _channel_gate(name: str, low: float, high: float) -> Family:
    slots = (Slot("alpha", low, 1, "vector"), _UNIT_KEY, Slot("beta", 0, high))
    ranges = f"beta in [0, {high:g}], alpha in [{low:g}, 1]^d"
    return Family(name, "(I - beta k k^T) Diag(alpha)", ranges, slots, _ckda, _ckda_exact)


_TURN = Slot("theta", -math.pi, math.pi, "vector")
_ERASE = (Slot("alpha", shape="vector"), _UNIT_KEY, Slot("erase", 0, 2, "vector"))
_ERASE_RANGES = "alpha in [0, 1]^d, erase in [0, 2]^d"

#: name -> family; DeltaProduct_k and SFDA with another phase range come from :func:`delta_product`, :func:`sfda`
FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        _channel_gate("CKDA", -1, 2),
        _channel_gate("KDA", 0, 1),
        _channel_gate("KDA, beta to 2", 0, 2),
        _channel_gate("KDA, signed gate", -1, 1),
        Family("DeltaNet", "I - beta k k^T", "beta in [0, 2]", (_UNIT_KEY, Slot("beta", 0, 2)), _delta, _delta_exact),
        Family(
            "GDN",
            "alpha (I - beta k k^T)",
            "alpha in [0, 1], beta in [0, 2]",
            (Slot("alpha"), _UNIT_KEY, Slot("beta", 0, 2)),
            _scalar_gate,
            _ckda_exact,
        ),
        Family(
            "GDN, signed gate",
            "alpha (I - beta k k^T)",
            "alpha in [-1, 1], beta in [0, 2]",
            (Slot("alpha", -1, 1), _UNIT_KEY, Slot("beta", 0, 2)),
            _scalar_gate,
            _ckda_exact,
        ),
        *(delta_product(k) for k in (1, 2, 3, 4)),
        *(delta_product(k, gated=True) for k in (1, 2, 3, 4)),
        Family(
            "RWKV-7", "Diag(alpha) - k (e * k)^T", _ERASE_RANGES, _ERASE, _erase_beside_gate, _erase_beside_gate_exact
        ),
        Family(
            "GDN-2", "(I - k (e * k)^T) Diag(alpha)", _ERASE_RANGES, _ERASE, _erase_after_gate, _erase_after_gate_exact
        ),
        Family(
            "MDN",
            "[[alpha (I - beta eta k k^T), -beta mu I], [alpha eta k k^T, mu I]]",
            "alpha in [0, 1], mu in [1/e, 1], 0 <= beta <= 1 - alpha, eta in [0, 2] (closure)",
            (Slot("alpha"), Slot("mu", math.exp(-1)), Slot("share"), Slot("eta", 0, 2), _UNIT_KEY),
            _mdn,
        ),
        sfda(),
        Family(
            "complex diagonal",
            "Diag(alpha e^{i theta})",
            "alpha in [0, 1]^m, any theta",
            (Slot("alpha", shape="vector"), _TURN),
            _complex_diagonal,
        ),
        Family("RoPE", "rotations in fixed planes", "any theta", (_TURN,), _rope),
        Family(
            "Selective RoPE",
            "gate times rotations in fixed planes",
            "gate in [0, 1]",
            (Slot("gate"), _TURN),
            _selective_rope,
        ),
    )
}
