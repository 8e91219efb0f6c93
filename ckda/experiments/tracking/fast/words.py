"""The operator on words over a small alphabet: what a token contributes depends on its symbol alone.

Then q, k, v, g and beta are tables with a row a symbol, and nothing of a token has to be made but its state: norms and gates are
evaluated on the tables, the recurrence looks rows up, and the gradients of a symbol's tokens are summed. Same function as
:func:`ckda.complex_kda` on the looked-up rows, but for rounding.

Legend: R replicas (of a vmap; 1 without), n symbols, B words, T letters, H heads, K and V their widths.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckda.ops.call import Call, Prepared, Raw, prepare, prepare_backward
from ckda.ops.triton import HAS_TRITON

__all__ = [
    "MOST_ROWS",
    "complex_kda_words",
    "fold_mapped",
    "rows_of",
    "sum_by_symbol",
    "torch_backward",
    "torch_forward",
]

MOST_ROWS = 128  # of a table: for more symbols the kernels that make one have too few registers
_PIECES = 64  # at most: the tokens of a replica are cut into so many, whose sums fill the device


def _by_kernel(*tables: Tensor | None) -> bool:
    """Whether the kernels serve these tables: on a GPU, in float32."""
    return HAS_TRITON and all(x is None or (x.is_cuda and x.dtype == torch.float32) for x in tables)


def _kernels() -> Any:
    from ckda.experiments.tracking.fast import words_kernels

    return words_kernels


# Tables looked up -----------------------------------------------------------------------------------------------------


def sum_by_symbol(rows: Tensor, tokens: Tensor, num_symbols: int) -> Tensor:
    """rows [R, N, D] and their symbols [R, N] -> [R, n, D]: the sum over each symbol's rows, always in the same order.

    Example:
        >>> sum_by_symbol(torch.tensor([[[1.0], [2.0], [4.0]]]), torch.tensor([[2, 0, 2]]), 3).flatten().tolist()
        [2.0, 0.0, 5.0]
    """
    return torch.ops.ckda.sum_by_symbol(rows, tokens, num_symbols)


def torch_sum_by_symbol(rows: Tensor, tokens: Tensor, num_symbols: int) -> Tensor:
    """:func:`sum_by_symbol` as a product with ones and zeros, in pieces that fill a device."""
    R, N, D = rows.shape
    pieces = _PIECES
    while N % pieces:
        pieces //= 2
    is_symbol = (tokens.unsqueeze(-1) == torch.arange(num_symbols, device=tokens.device)).to(rows.dtype)
    left, right = (x.reshape(R * pieces, N // pieces, -1) for x in (is_symbol, rows))
    return torch.bmm(left.mT, right).view(R, pieces, num_symbols, D).sum(1)


@torch.library.custom_op("ckda::sum_by_symbol", mutates_args=())
def _sum_by_symbol(rows: Tensor, tokens: Tensor, num_symbols: int) -> Tensor:
    if rows.is_cuda and rows.dtype == torch.float32 and num_symbols <= _kernels().MOST_SYMBOLS:
        return _kernels().sum_by_symbol(rows, tokens, num_symbols)
    return torch_sum_by_symbol(rows, tokens, num_symbols)


@_sum_by_symbol.register_fake
def _(rows: Tensor, tokens: Tensor, num_symbols: int) -> Tensor:
    return rows.new_empty(len(rows), num_symbols, rows.shape[-1])


def rows_of(table: Tensor, tokens: Tensor) -> Tensor:
    """table [n, D], tokens [...] -> [..., D]; as an embedding, but for a gradient that needs no sorting.

    Example:
        >>> rows_of(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 0, 1])).tolist()
        [[3.0, 4.0], [1.0, 2.0], [3.0, 4.0]]
    """
    return _Rows.apply(table.unsqueeze(0), tokens.unsqueeze(0)).squeeze(0)


class _Rows(torch.autograd.Function):
    """table [R, n, D], tokens [R, ...] -> [R, ..., D]; a mapped axis becomes part of R."""

    @staticmethod
    def forward(table: Tensor, tokens: Tensor) -> Tensor:
        R, n, _ = table.shape
        first = torch.arange(0, R * n, n, device=tokens.device).view(R, *(1,) * (tokens.dim() - 1))
        return torch.nn.functional.embedding(tokens + first, table.flatten(0, 1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        table, tokens = inputs
        ctx.save_for_backward(tokens)
        ctx.num_symbols = table.shape[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        return sum_by_symbol(grads[0].flatten(1, -2), tokens.flatten(1), ctx.num_symbols), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *arguments: Tensor) -> tuple[Tensor, int]:
        rows = _Rows.apply(*fold_mapped(info.batch_size, in_dims, arguments))
        return rows.unflatten(0, (info.batch_size, -1)), 0


def fold_mapped(size: int, in_dims: tuple, arguments: tuple) -> list[Any]:
    """The arguments of a call that vmap maps, the mapped axis joined to their first; what is no tensor stays."""

    def fold(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    return [fold(x, dim) for x, dim in zip(arguments, in_dims, strict=True)]


# The recurrence -------------------------------------------------------------------------------------------------------


class Tables(NamedTuple):
    """What the recurrence reads, by symbol: see :class:`ckda.ops.call.Prepared`."""

    q: Tensor  #: [R * H, n, K] scaled unit query
    k: Tensor  #: [R * H, n, K] unit key
    alpha: Tensor  #: [R * H, n, K] signed gate
    v: Tensor  #: [R * H, n, V]
    rho: Tensor  #: [R * H, n] beta / |k|^2


def torch_forward(x: Tables, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """tokens [R, B, T] -> o and r [R, B, T, H, V] in plain operations; r is v less what the state predicts."""
    q, k, alpha, v, rho = (_looked_up(table, tokens) for table in x)
    S = q.new_zeros(*q.shape[:-3], *q.shape[-2:], v.shape[-1])  # [R, B, H, K, V]
    o, r = torch.empty_like(v), torch.empty_like(v)
    for t in range(tokens.shape[-1]):
        S = alpha[:, :, t].unsqueeze(-1) * S
        r[:, :, t] = v[:, :, t] - (S * k[:, :, t].unsqueeze(-1)).sum(-2)
        u = rho[:, :, t].unsqueeze(-1) * r[:, :, t]
        S = S + k[:, :, t].unsqueeze(-1) * u.unsqueeze(-2)
        o[:, :, t] = (S * q[:, :, t].unsqueeze(-1)).sum(-2)
    return o, r


def torch_backward(do: Tensor, r: Tensor, x: Tables, tokens: Tensor) -> Tensor:
    """[R, B * T, W]: for each token, side by side, the gradients of q, k, log|alpha|, v and rho; W as in :func:`width`."""
    q, k, alpha, v, rho = (_looked_up(table, tokens) for table in x)
    T, (K, V) = tokens.shape[-1], (q.shape[-1], v.shape[-1])
    u = rho.unsqueeze(-1) * r
    before = [q.new_zeros(*q.shape[:2], *q.shape[3:], V)]  # [R, B, H, K, V]
    for t in range(T - 1):
        before.append(alpha[:, :, t].unsqueeze(-1) * before[-1] + k[:, :, t].unsqueeze(-1) * u[:, :, t].unsqueeze(-2))
    dq, dk, dlog, dv, drho = (torch.empty_like(y) for y in (q, q, q, v, rho))
    E = torch.zeros_like(before[0])
    for t in reversed(range(T)):
        k_t, u_t, do_t = k[:, :, t].unsqueeze(-1), u[:, :, t].unsqueeze(-2), do[:, :, t].unsqueeze(-2)
        D = alpha[:, :, t].unsqueeze(-1) * before[t]
        E = E + q[:, :, t].unsqueeze(-1) * do_t
        du = (E * k_t).sum(-2)
        dv[:, :, t] = rho[:, :, t].unsqueeze(-1) * du
        drho[:, :, t] = (du * r[:, :, t]).sum(-1)
        dr = dv[:, :, t].unsqueeze(-2)
        dq[:, :, t] = ((D + k_t * u_t) * do_t).sum(-1)
        dk[:, :, t] = (E * u_t).sum(-1) - (D * dr).sum(-1)
        E = E - k_t * dr
        dlog[:, :, t] = (E * D).sum(-1)
        E = E * alpha[:, :, t].unsqueeze(-1)
    parts = [y.flatten(3) if y.dim() == 5 else y for y in (dq, dk, dlog, dv, drho)]
    rows = torch.cat(parts, -1).flatten(1, 2)
    return torch.nn.functional.pad(rows, (0, width(q.shape[3], K, V) - rows.shape[-1]))


def width(H: int, K: int, V: int) -> int:
    """Numbers in a token's row of gradients, H (3 K + V + 1), rounded up to whole cache lines of 16."""
    return -(-H * (3 * K + V + 1) // 16) * 16


def _looked_up(table: Tensor, tokens: Tensor) -> Tensor:
    """[R * H, n, ...] -> [R, B, T, H, ...]."""
    R = len(tokens)
    by_replica = table.unflatten(0, (R, -1)).transpose(1, 2)  # [R, n, H, ...]
    return torch.stack([rows[symbols] for rows, symbols in zip(by_replica, tokens, strict=True)])


@torch.library.custom_op("ckda::words", mutates_args=())
def _forward(q: Tensor, k: Tensor, alpha: Tensor, v: Tensor, rho: Tensor, tokens: Tensor) -> list[Tensor]:
    """[o, r]."""
    x = Tables(q, k, alpha, v, rho)
    return list((_kernels().forward if _by_kernel(*x) else torch_forward)(x, tokens))


@_forward.register_fake
def _(q: Tensor, k: Tensor, alpha: Tensor, v: Tensor, rho: Tensor, tokens: Tensor) -> list[Tensor]:
    return [v.new_empty(*tokens.shape, len(v) // len(tokens), v.shape[-1]) for _ in range(2)]


@torch.library.custom_op("ckda::words_backward", mutates_args=())
def _backward(
    do: Tensor, r: Tensor, q: Tensor, k: Tensor, alpha: Tensor, v: Tensor, rho: Tensor, tokens: Tensor
) -> Tensor:
    x = Tables(q, k, alpha, v, rho)
    return (_kernels().backward if _by_kernel(do, r, *x) else torch_backward)(do, r, x, tokens)


@_backward.register_fake
def _(do: Tensor, r: Tensor, q: Tensor, k: Tensor, alpha: Tensor, v: Tensor, rho: Tensor, tokens: Tensor) -> Tensor:
    R, B, T, H, V = do.shape
    return do.new_empty(R, B * T, width(H, q.shape[-1], V))


# Norms and gates by symbol ----------------------------------------------------------------------------------------------


class Options(NamedTuple):
    """As :func:`ckda.complex_kda` has them."""

    gate: str | None
    beta_range: int | None
    normalize_qk: bool
    scale: float


class RawTables(NamedTuple):
    """The arguments of the operator, by symbol."""

    q: Tensor  #: [R, n, H, K]
    k: Tensor  #: [R, n, H, K]
    v: Tensor  #: [R, n, H, V]
    g: Tensor  #: [R, n, H, K]
    beta: Tensor  #: [R, n, H]
    A_log: Tensor | None  #: [R, H]
    dt_bias: Tensor | None  #: [R, H * K]


def _heads_first(x: Tensor) -> Tensor:
    """[R, n, H, D] -> [1, R * H, n, D]."""
    return x.transpose(1, 2).flatten(0, 1).unsqueeze(0)


def _symbols_first(x: Any, R: int) -> Tensor:
    """[1, R * H, n, D] -> [R, n, H, D]."""
    return x.squeeze(0).unflatten(0, (R, -1)).transpose(1, 2).contiguous()


def _as_call(x: RawTables, options: Options) -> tuple[Call, Raw]:
    """The tables as one sequence of n tokens with R * H heads."""
    q, k, v, g, beta = map(_heads_first, (x.q, x.k, x.v, x.g, x.beta.unsqueeze(-1)))
    raw = Raw(q, k, v, g, beta, None, None, None)
    call = Call(
        q=raw.q,
        k=raw.k,
        v=raw.v,
        g=raw.g,
        beta=raw.beta,
        sign=None,
        A_log=None if x.A_log is None else x.A_log.flatten(),
        dt_bias=None if x.dt_bias is None else x.dt_bias.flatten(),
        erase=None,
        write=None,
        initial_state=None,
        cu_seqlens=None,
        output_final_state=False,
        **options._asdict(),
    )
    return call, raw


def torch_tables(raw: RawTables, options: Options) -> list[Tensor]:
    """:class:`Tables` from the raw ones in plain operations."""
    x, _ = prepare(*_as_call(raw, options))
    rho = (x.rate / x.norm2).to(x.k.dtype).squeeze(-1)
    return [y.squeeze(0).clone(memory_format=torch.contiguous_format) for y in (x.q, x.k, x.alpha, x.w, rho)]


def torch_tables_backward(sums: Tensor, raw: RawTables, options: Options) -> list[Tensor | None]:
    """Gradients of the raw tables from those that :func:`torch_backward` gives, summed by symbol: [R, n, W]."""
    (R, _, H, K), V = raw.q.shape, raw.v.shape[-1]
    call, lines = _as_call(raw, options)
    x, norms = prepare(call, lines)
    parts = sums[..., : H * (3 * K + V + 1)].split([H * K, H * K, H * K, H * V, H], -1)
    dq, dk, dlog, dv, drho = (_heads_first(part.unflatten(-1, (H, -1))) for part in parts)
    dx = Prepared(dq, dk, dk, dv, dlog, (drho / x.norm2).to(dq.dtype), x.norm2)
    found, dA_log, ddt_bias = prepare_backward(call, lines, x, norms, dx)
    dbeta = _symbols_first(found.beta, R).squeeze(-1)
    by_head = [None if y is None else y.view(R, -1) for y in (dA_log, ddt_bias)]
    return [*(_symbols_first(y, R) for y in (found.q, found.k, found.v, found.g)), dbeta, *by_head]


_RAW = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias"
_OPTIONS = "str? gate, int? beta_range, bool normalize_qk, float scale"


def _tables_by_kernel(raw: RawTables) -> bool:
    return _by_kernel(*raw) and raw.q.shape[1] <= MOST_ROWS


@torch.library.custom_op("ckda::words_tables", mutates_args=(), schema=f"({_RAW}, {_OPTIONS}) -> Tensor[]")
def _make_tables(*arguments: Any) -> list[Tensor]:
    raw, options = RawTables(*arguments[:7]), Options(*arguments[7:])
    return (_kernels().tables if _tables_by_kernel(raw) else torch_tables)(raw, options)


@_make_tables.register_fake
def _(*arguments: Any) -> list[Tensor]:
    q, v = arguments[0], arguments[2]
    R, n, H, K = q.shape
    return [q.new_empty(R * H, n, *width) for width in ((K,), (K,), (K,), (v.shape[-1],), ())]


@torch.library.custom_op(
    "ckda::words_tables_backward", mutates_args=(), schema=f"(Tensor sums, {_RAW}, {_OPTIONS}) -> Tensor[]"
)
def _make_tables_backward(sums: Tensor, *arguments: Any) -> list[Tensor]:
    """The gradients that are not None."""
    raw, options = RawTables(*arguments[:7]), Options(*arguments[7:])
    run = _kernels().tables_backward if _tables_by_kernel(raw) else torch_tables_backward
    return [x for x in run(sums, raw, options) if x is not None]


@_make_tables_backward.register_fake
def _(sums: Tensor, *arguments: Any) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in arguments[:7] if x is not None]


# The operator ---------------------------------------------------------------------------------------------------------


def complex_kda_words(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    tokens: Tensor,
    *,
    gate: str | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    beta_range: int | None = None,
    normalize_qk: bool = False,
) -> Tensor:
    """:func:`ckda.complex_kda` on the rows of tables, from a zero state; under vmap one larger call.

    Args:
        q, k, g: [n, H, K]. v: [n, H, V]. beta: [n, H]. tokens: [B, T] of 0 ... n - 1.
        gate, A_log, dt_bias, beta_range, normalize_qk: as there.

    Returns:
        o [B, T, H, V].

    Example:
        >>> from ckda import complex_kda
        >>> q, k, v, g = torch.randn(4, 5, 2, 8)
        >>> tokens = torch.randint(5, (3, 7))
        >>> o = complex_kda_words(q, k, v, g, g[..., 0], tokens, gate="signed", beta_range=2, normalize_qk=True)
        >>> rows = [x[tokens] for x in (q, k, v, g, g[..., 0])]
        >>> torch.allclose(o, complex_kda(*rows, gate="signed", beta_range=2, normalize_qk=True)[0], atol=1e-5)
        True
    """
    options = Options(gate, beta_range, normalize_qk, q.shape[-1] ** -0.5)
    tensors = (q, k, v, g, beta, A_log, dt_bias, tokens)
    return _Words.apply(*(None if x is None else x.unsqueeze(0) for x in tensors), options)[0].squeeze(0)


class _Words(torch.autograd.Function):
    """:func:`complex_kda_words` with an axis R in front of everything; a mapped axis becomes part of it.

    Besides o it returns what the backward pass reads: r and the tables.
    """

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        *tensors, tokens, options = arguments
        tables = torch.ops.ckda.words_tables(*tensors, *options)
        return *torch.ops.ckda.words(*tables, tokens), *tables

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        *tensors, ctx.options = inputs
        ctx.save_for_backward(*tensors, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        if grads[0] is None:
            return (None,) * 9
        *tensors, tokens = ctx.saved_tensors[:8]
        r, *tables = ctx.saved_tensors[8:]
        rows = torch.ops.ckda.words_backward(grads[0].contiguous(), r, *tables, tokens)
        sums = sum_by_symbol(rows, tokens.flatten(1), tables[0].shape[1])
        found = iter(torch.ops.ckda.words_tables_backward(sums, *tensors, *ctx.options))
        return *(None if x is None else next(found) for x in tensors), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *arguments: Any) -> tuple[tuple, tuple]:
        size = info.batch_size
        dims = (*in_dims[:8], None)  # the options are a tuple, and are not mapped
        o, *rest = _Words.apply(*fold_mapped(size, dims, arguments))
        return (o.unflatten(0, (size, -1)), *rest), (0, *(None for _ in rest))
