"""The operator on words over a small alphabet: what a token contributes depends on its symbol alone.

Then q, k, v, g and beta are tables with a row a symbol, and nothing of a token has to be made but its state: norms and gates are
evaluated on the tables, the recurrence looks rows up, and the gradients of a symbol's tokens are summed. Same function as
:func:`ckda.complex_kda` on the looked-up rows, but for rounding.

Legend: R replicas (of a vmap; 1 without), n symbols, B words, T letters, H heads, K and V their widths.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckda.layers.complex_kda import ComplexKDA
from ckda.layers.gated_delta import GatedDeltaNet
from ckda.ops.call import Call, Prepared, Raw, prepare, prepare_backward
from ckda.ops.triton import HAS_TRITON, SHORT, SMALL_HEAD

__all__ = [
    "MOST_ROWS",
    "complex_kda_words",
    "fold_mapped",
    "is_by_symbol",
    "read_words",
    "rows_of",
    "serves",
    "sum_by_symbol",
    "torch_backward",
    "torch_forward",
    "write_out_words",
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


class _Part(NamedTuple):
    """Some words of one replica, as the loops over their letters read them: every operation runs along words, then heads."""

    replica: int
    words: slice
    is_symbol: Tensor  #: [T, n, b] one where a word has this symbol there, else zero
    looked_up: Tables  #: [T, D, H, b] each, D the width of the table (1 of rho)


_STATE_NUMBERS = 1 << 18  # of a part, all its words and heads together: a megabyte, a core's own cache


def _parts(x: Tables, tokens: Tensor) -> Iterator[_Part]:
    """Tables looked up as products with zeros and ones, which leave the numbers as they are and lie as the loops want them."""
    (R, B, _), n = tokens.shape, x.q.shape[1]
    wide = [y if y.dim() == 3 else y.unsqueeze(-1) for y in x]
    sizes = [y.shape[-1] for y in wide]
    H = len(x.q) // R
    table = torch.cat([y.unflatten(0, (R, H)).permute(0, 3, 1, 2) for y in wide], 1).flatten(1, 2)  # [R, D * H, n]
    symbols = torch.arange(n, device=tokens.device)[:, None]
    size = max(1, _STATE_NUMBERS // (H * sizes[0] * sizes[3]))
    for r in range(R):
        for first in range(0, B, size):
            words = slice(first, min(B, first + size))
            is_symbol = (tokens[r, words].T.unsqueeze(1) == symbols).to(table.dtype)
            found = torch.matmul(table[r], is_symbol).unflatten(1, (-1, H))
            yield _Part(r, words, is_symbol, Tables(*found.split(sizes, 1)))


def torch_forward(x: Tables, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """tokens [R, B, T] -> o and r [R, B, T, H, V] in plain operations; r is v less what the state predicts."""
    (R, B, T), H, V = tokens.shape, len(x.q) // len(tokens), x.v.shape[-1]
    o, r = (x.q.new_empty(R, T, V, H, B) for _ in range(2))
    for part in _parts(x, tokens):
        S: Any = 0.0  # [K, V, H, b]
        for t, (q, k, alpha, v, rho) in enumerate(zip(*part.looked_up, strict=True)):
            S = alpha.unsqueeze(1) * S
            r_t = v - (S * k.unsqueeze(1)).sum(0)
            S = torch.addcmul(S, k.unsqueeze(1), rho * r_t)
            r[part.replica, t, ..., part.words] = r_t
            o[part.replica, t, ..., part.words] = (S * q.unsqueeze(1)).sum(0)
    return o.permute(0, 4, 1, 3, 2), r.permute(0, 4, 1, 3, 2)


def torch_backward(do: Tensor, r: Tensor, x: Tables, tokens: Tensor) -> Tensor:
    """[R, n, W]: for each symbol, side by side, the gradients of q, k, log|alpha|, v and rho; W as in :func:`width`."""
    (R, _, _), n, H = tokens.shape, x.q.shape[1], len(x.q) // len(tokens)
    K, V = x.q.shape[-1], x.v.shape[-1]
    sums = do.new_zeros(R, (3 * K + V + 1) * H, n)
    for part in _parts(x, tokens):
        do_part, r_part = (y[part.replica, part.words].permute(1, 3, 2, 0).contiguous() for y in (do, r))
        gradients = _part_backward(part.looked_up, do_part, r_part)
        sums[part.replica] += torch.bmm(gradients.flatten(1, 2), part.is_symbol.mT).sum(0)
    by_table = sums.unflatten(1, (-1, H)).permute(0, 3, 2, 1).split([K, K, K, V, 1], -1)  # [R, n, H, D] each
    flat = torch.cat([y.flatten(2) for y in by_table], -1)
    return torch.nn.functional.pad(flat, (0, width(H, K, V) - flat.shape[-1]))


def _part_backward(x: Tables, do: Tensor, r: Tensor) -> Tensor:
    """do and r [T, V, H, b] -> [T, 3 K + V + 1, H, b] of the letters' q, k, log|alpha|, v and rho."""
    (T, K, H, b), V = x.q.shape, do.shape[1]
    u = x.rho * r
    states = do.new_empty(T + 1, K, V, H, b)  # before each letter, and after the last
    states[0] = 0
    for t in range(T):
        torch.mul(states[t], x.alpha[t].unsqueeze(1), out=states[t + 1])
        states[t + 1].addcmul_(x.k[t].unsqueeze(1), u[t])
    gradients = do.new_empty(T, 3 * K + V + 1, H, b)
    E, scratch = torch.zeros_like(states[0]), torch.empty_like(states[0])
    for t in reversed(range(T)):
        dq, dk, dlog, dv, drho = gradients[t].split([K, K, K, V, 1])
        k, alpha, before = x.k[t].unsqueeze(1), x.alpha[t], states[t]
        dq.copy_(torch.mul(states[t + 1], do[t], out=scratch).sum(1))
        E.addcmul_(x.q[t].unsqueeze(1), do[t])
        du = torch.mul(E, k, out=scratch).sum(0)
        torch.mul(du, x.rho[t], out=dv)
        drho.copy_((du * r[t]).sum(0, keepdim=True))
        dk.copy_(torch.mul(E, u[t], out=scratch).sum(1))
        dk.addcmul_(alpha, torch.mul(before, dv, out=scratch).sum(1), value=-1)
        E.addcmul_(k, dv, value=-1)
        E *= alpha.unsqueeze(1)
        dlog.copy_(torch.mul(E, before, out=scratch).sum(1))
    return gradients


def width(H: int, K: int, V: int) -> int:
    """Numbers in a token's row of gradients, H (3 K + V + 1), rounded up to whole cache lines of 16."""
    return -(-H * (3 * K + V + 1) // 16) * 16


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
    """The sums [R, n, W] over each symbol's tokens."""
    x = Tables(q, k, alpha, v, rho)
    if not _by_kernel(do, r, *x):
        return torch_backward(do, r, x, tokens)
    rows = _kernels().backward(do.contiguous(), r, x, tokens)  # [R, B * T, W]
    return sum_by_symbol(rows, tokens.flatten(1), q.shape[1])


@_backward.register_fake
def _(do: Tensor, r: Tensor, q: Tensor, k: Tensor, alpha: Tensor, v: Tensor, rho: Tensor, tokens: Tensor) -> Tensor:
    R, _, _, H, V = do.shape
    return do.new_empty(R, q.shape[1], width(H, q.shape[-1], V))


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
    """Gradients of the raw tables from those that :func:`torch_backward` gives, [R, n, W]."""
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
        sums = torch.ops.ckda.words_backward(grads[0], r, *tables, tokens)
        found = iter(torch.ops.ckda.words_tables_backward(sums, *tensors, *ctx.options))
        return *(None if x is None else next(found) for x in tensors), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *arguments: Any) -> tuple[tuple, tuple]:
        size = info.batch_size
        dims = (*in_dims[:8], None)  # the options are a tuple, and are not mapped
        o, *rest = _Words.apply(*fold_mapped(size, dims, arguments))
        return (o.unflatten(0, (size, -1)), *rest), (0, *(None for _ in rest))


# A mixer of trackers on words -------------------------------------------------------------------------------------------


def is_by_symbol(mixer: Any) -> bool:
    """Whether what a token gives to the recurrence is a function of its symbol alone, and the state begins at zero."""
    return (
        type(mixer) in (ComplexKDA, GatedDeltaNet)
        and not mixer.convolutions
        and mixer.initial_state is None
        and mixer.num_heads == mixer.num_v_heads
    )


def serves(mixer: Any, tokens: Tensor, num_symbols: int) -> bool:
    """Whether :func:`read_words` serves tokens [B, T] of so many symbols: in float32, on a GPU what its kernels hold."""
    named, here = ("triton", HAS_TRITON) if tokens.is_cuda else ("chunked", True)
    return (
        here
        and is_by_symbol(mixer)
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(tokens.device.type)
        and mixer.backend in ("auto", named)
        and mixer.o_proj.weight.dtype == torch.float32
        and num_symbols <= MOST_ROWS
        and max(mixer.head_dim, mixer.head_v_dim) <= SMALL_HEAD
        and tokens.shape[-1] <= SHORT
    )


def read_words(mixer: Any, table: Tensor, tokens: Tensor) -> Tensor:
    """``mixer.read`` of the rows table [n, d] at tokens [B, T]: everything before the recurrence is done once a symbol."""
    y, _ = mixer._project(table.unsqueeze(0), {})
    return complex_kda_words(**{name: x.squeeze(0) for name, x in y.items()}, tokens=tokens, **mixer._options())


def write_out_words(mixer: Any, o: Tensor, table: Tensor, tokens: Tensor) -> Tensor:
    """``mixer.write_out`` for the rows of a table."""
    return mixer.gated_out(o, None if mixer.g_proj is None else rows_of(mixer.g_proj(table), tokens))
