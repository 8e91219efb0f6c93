"""Complex KDA on one page of plain torch: the recurrence, and the same a chunk of tokens at a time. Read this first.

One sequence, one head, no options. ckda/ops/reference.py is the recurrence with all of them; ckda/ops/chunked.py and
the kernels are the chunk form made fast. Axes: T tokens, C of a chunk, K channels of keys, V channels of values.

    q, k [T, K]   query and key (the key of length one)      g    [T, K]   log|alpha|; -inf is alpha = 0
    v    [T, V]   value                                      sign [T, K]   of alpha, +1 or -1
    beta [T]      learning rate, from 0 to 2                 S    [K, V]   state; S^T q reads what is stored at q
"""

import torch
from torch import Tensor

__all__ = ["by_chunks", "recurrence"]


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, sign: Tensor, beta: Tensor, S: Tensor
) -> tuple[Tensor, Tensor]:
    """The outputs o [T, V] and the last state, token by token (eq:linrnn):

        S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T,    o_t = S_t^T q_t.

    Negative gates and beta near 2 make the transition a rotation (eq:kda_alpha_rotation).
    """
    alpha, outputs = sign * g.exp(), []
    for t in range(len(q)):
        S = alpha[t, :, None] * S  # forget, and flip the channels with a negative gate
        error = v[t] - S.T @ k[t]  # how far what is stored at this key is from the value
        S = S + beta[t] * torch.outer(k[t], error)
        outputs.append(S.T @ q[t])
    return torch.stack(outputs), S


def by_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, sign: Tensor, beta: Tensor, S: Tensor, C: int = 16
) -> tuple[Tensor, Tensor]:
    """:func:`recurrence` by a few matrix products for every C tokens; the last chunk may be shorter."""
    outputs = []
    for start in range(0, len(q), C):
        i = slice(start, start + C)
        o, S = _one_chunk(q[i], k[i], v[i], g[i], sign[i], beta[i], S)
        outputs.append(o)
    return torch.cat(outputs), S


def _one_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, sign: Tensor, beta: Tensor, S: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [C, V] of one chunk that begins with the state S, and the state after it.

    With P_i the product of the chunk's signs up to token i, the keys P_i k_i, queries P_i q_i and states P_i S_i obey
    the recurrence without signs (lem:gauge). There, with Gamma_i the product of |alpha| up to i and u_i = beta_i error_i,

        S_i = Gamma_i S + sum_{j <= i} (Gamma_i / Gamma_j) k_j u_j^T.

    Put into the error of token i, v_i - (|alpha_i| S_{i-1})^T k_i, this is a triangular system for all u of the chunk:

        u_i + beta_i sum_{j < i} k_i^T (Gamma_i / Gamma_j) k_j u_j = beta_i (v_i - S^T Gamma_i k_i).
    """
    P = sign.cumprod(0)
    q, k = P * q, P * k
    log_Gamma = g.clamp(min=-1000.0).cumsum(0)  # e^-1000 is zero too, and infinities cannot be subtracted
    Gamma = log_Gamma.exp()
    later = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)  # [i, j]: j > i
    difference = log_Gamma[:, None] - log_Gamma[None, :]
    quotient = difference.masked_fill(later[..., None], -torch.inf).exp()  # [i, j, K]: Gamma_i / Gamma_j, or 0

    overlaps = torch.einsum("ik,ijk,jk->ij", k, quotient, k).tril(-1)  # of keys with the decayed keys before them
    scores = torch.einsum("ik,ijk,jk->ij", q, quotient, k)  # of queries with the decayed keys up to them
    system = torch.eye(len(q), dtype=q.dtype, device=q.device) + beta[:, None] * overlaps
    u = torch.linalg.solve_triangular(system, beta[:, None] * (v - (Gamma * k) @ S), upper=False)

    o = (Gamma * q) @ S + scores @ u
    S = Gamma[-1, :, None] * S + (quotient[-1] * k).T @ u
    return o, P[-1, :, None] * S
