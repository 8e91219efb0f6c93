"""The operator: one front door, several backends that must agree (ckda/ops/dispatch.py lists them and chooses)."""

from typing import Any

import torch
from torch import Tensor

from ckda.ops.call import Call, check_call, check_step, check_values
from ckda.ops.dispatch import BACKENDS, Choice, apply, choose, choose_step, find_step, full_precision

__all__ = ["BACKENDS", "complex_kda", "complex_kda_step", "validate", "which_backend"]


def complex_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    *,
    sign: Tensor | None = None,
    gate: str | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    beta_range: int | None = None,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    normalize_qk: bool = False,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Complex KDA: ``S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T``, ``o_t = scale S_t^T q_t``.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V], HV a multiple of H; value head j reads q/k head j // (HV // H).
        g: [B, T, HV, K] log|alpha|, or the raw projection where `gate` is named. -inf is alpha = 0 (gate=None only).
        beta: [B, T, HV] learning rate, or its logit where `beta_range` is named; its range is never checked.
        sign: int8 [B, T, HV, K] of +1/-1, only with gate=None; None: all +1.
        gate: None | "signed" | "sigmoid" | "softplus", see :func:`ckda.ops.gate.evaluate_gate`.
        A_log, dt_bias: [HV] and [HV * K] (head-major), each optional, only with a named gate.
        beta_range: None | 1 | 2: beta = range * sigmoid(beta).
        erase, write: [B, T, HV, K] and [B, T, HV, V] instead of beta (beta=None), as in GDN-2 and RWKV-7:
            ``S_t = (I - k (erase * k)^T) Diag(alpha) S_{t-1} + k (write * v)^T``.
        normalize_qk: L2-normalise q and k inside; beta is then divided by |k|^2 of the key as rounded, so that beta = 2
            stays a reflection. Without it the recurrence is taken literally on the k given.
        scale: None is K ** -0.5; multiplies o only, never the state.
        initial_state: [N, HV, K, V], N the batch or the number of packed sequences.
        cu_seqlens: int32/int64 [N + 1], 0 ... T non-decreasing: packed sequences, B == 1; empty members are legal.
        backend: "auto" | "reference" | "chunked" | "triton" | "fla", or a form of the Triton kernels by name, "triton-hopper" |
            "triton-portable" | "triton-recurrent". :func:`which_backend` says what runs, and why.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final state [N, HV, K, V] (float64 if the inputs are, else float32) or None.
        Gradients flow to every floating argument and through the final state.

    Example:
        >>> k = torch.tensor([1.0, 1.0]).view(1, 1, 1, 2).expand(1, 4, 1, 2)  # the same key four times
        >>> sign = torch.tensor([-1, 1], dtype=torch.int8).expand(1, 4, 1, 2)
        >>> zero, two = torch.zeros(1, 4, 1, 2), torch.full((1, 4, 1), 2.0)
        >>> o, state = complex_kda(k, k, zero, zero, two, sign=sign, normalize_qk=True,
        ...                        initial_state=torch.eye(2).view(1, 1, 2, 2), output_final_state=True)
        >>> torch.allclose(state[0, 0], torch.eye(2), atol=1e-6)  # four quarter turns
        True
    """
    call = Call(  # in the order of its fields; Call(**locals()) would say the same, but torch.compile of torch 2.11 stops there
        q, k, v, g, beta, sign, A_log, dt_bias, erase, write, initial_state, cu_seqlens,
        gate, beta_range, normalize_qk, scale, output_final_state, backend,
    )  # fmt: skip
    o, state = apply(call)
    return o, state if output_final_state else None


def which_backend(*args: Any, step: bool = False, **options: Any) -> Choice:
    """What :func:`complex_kda` with these arguments would run, and why; with step=True, what :func:`complex_kda_step` would.

    Example:
        >>> x = torch.zeros(1, 8, 2, 4)
        >>> print(which_backend(x, x, x, x, x[..., 0], backend="reference"))
        reference: named by the caller
    """
    if step:
        call = _one_token(*args, **options)
        check_step(call)
        return choose_step(call)
    call = Call(*args, **options)
    check_call(call)
    return choose(call)


def validate(*args: Any, **options: Any) -> None:
    """All checks of :func:`complex_kda`, the values of cu_seqlens and sign included, on any device (it synchronises).

    Example:
        >>> x = torch.zeros(1, 8, 2, 4)
        >>> validate(x, x, x, x, x[..., 0], cu_seqlens=torch.tensor([0, 9, 8]))
        Traceback (most recent call last):
        ValueError: cu_seqlens is [0, 9, 8]; it must be non-decreasing
    """
    call = Call(*args, **options)
    check_call(call)
    check_values(call)


_NOT_IN_A_STEP = ("initial_state", "output_final_state", "cu_seqlens")


def _one_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    state: Tensor,
    inplace: bool = False,
    **options: Any,
) -> Call:
    """The arguments of :func:`complex_kda_step` as a call, without the time axis."""
    for name in _NOT_IN_A_STEP:
        if name in options:
            raise ValueError(
                f"{name} is given to complex_kda_step; it must not be: one token goes from `state` to the next"
            )
    if inplace and torch.is_grad_enabled() and isinstance(state, Tensor) and state.requires_grad:
        raise ValueError("state requires a gradient; it must not with inplace=True")
    return Call(q, k, v, g, beta, initial_state=state, output_final_state=True, **options)


def complex_kda_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    state: Tensor,
    *,
    inplace: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """One token of :func:`complex_kda`, for decoding.

    Args:
        q, k: [B, H, K]. v: [B, HV, V]. g: [B, HV, K]. beta: [B, HV].
        state: [B, HV, K, V].
        inplace: write the next state into `state` (no gradients then).
        options: sign, erase and write, without the time axis too; gate, A_log, dt_bias, beta_range, normalize_qk and scale as
            in :func:`complex_kda`; backend: "auto", "triton" (the kernel of "triton-recurrent") or "reference".

    Returns:
        o [B, HV, V] in v's dtype, and the next state.

    Example:
        >>> x, state = torch.randn(1, 2, 4), torch.zeros(1, 2, 4, 4)
        >>> o, state = complex_kda_step(x, x, x, -x.abs(), x[..., 0], state)
        >>> o.shape, state.shape
        (torch.Size([1, 2, 4]), torch.Size([1, 2, 4, 4]))
    """
    call = _one_token(q, k, v, g, beta, state, inplace, **options)
    route = find_step(call)
    with full_precision(q.device):
        return route.backend.forward(call, inplace, *route.backend.kept(route.kept))
