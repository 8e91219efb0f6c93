"""Exact arithmetic: real algebraic number fields, and small matrices over them.

A :class:`Field` is a sympy domain (QQ or an algebraic field) with its real embedding: numbers are sympy domain elements
and their signs are decided, not rounded. A :class:`Matrix` keeps rational coordinates in a flint matrix and multiplies
through the regular representation of its left factor, which is built once (40 microseconds) and kept: a product of 4 x 4
matrices over Q(sqrt 5) then takes 5 microseconds, against 490 in sympy's DomainMatrix over the same field.

Example:
    >>> F = field(sympy.sqrt(5))
    >>> phi = (F.root(5) + 1) / 2
    >>> F.sign(phi**2 - phi - 1), F.sign(phi - F("8/5"))
    (0, 1)
    >>> A = F.ckda([-1, 1], [1, phi])
    >>> A.is_orthogonal(), A.eigenvalue_count()
    (True, EigenvalueCount(real=0, pairs=1, unit_pairs=1))
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from math import gcd
from typing import Any, NamedTuple

import flint
import numpy as np
import sympy
import torch
from sympy.polys.densearith import dup_quo_ground
from sympy.polys.densebasic import dup_degree, dup_LC
from sympy.polys.densetools import dup_eval
from sympy.polys.euclidtools import dup_gcd
from sympy.polys.rootisolation import dup_sturm
from sympy.polys.sqfreetools import dup_sqf_list

__all__ = ["EigenvalueCount", "Field", "Matrix", "Number", "field", "householder_key", "real_cyclotomic"]

Number = Any  #: an element of a Field: a sympy domain element (ANP, or a rational of flint)


@lru_cache(maxsize=64)
def field(*generators: sympy.Expr) -> "Field":
    """The real field Q(generators); without generators, Q itself.

    Example:
        >>> field().degree, field(sympy.sqrt(2), sympy.sqrt(5)).degree
        (1, 4)
    """
    return Field(sympy.QQ.algebraic_field(*generators) if generators else sympy.QQ)


def real_cyclotomic(n: int) -> "Field":
    """The field Q(cos(2 pi / n)); it also holds sin(2 pi j / n) where 4 divides n.

    Example:
        >>> F = real_cyclotomic(7)
        >>> F.degree, bool(np.isclose(F.float(F.cos(2, 7)), np.cos(4 * np.pi / 7)))
        (3, True)
    """
    cos = sympy.cos(2 * sympy.pi / n)
    return field() if cos.is_Rational else field(cos)


class EigenvalueCount(NamedTuple):
    """Eigenvalues with algebraic multiplicity: real ones, non-real conjugate pairs, those pairs on the unit circle."""

    real: int
    pairs: int
    unit_pairs: int


class Field:
    """A real number field: a sympy domain and the real root that its generator stands for."""

    def __init__(self, domain: Any) -> None:
        self.domain = domain
        modulus = (
            [flint.fmpq(c) for c in domain.mod.to_list()] if domain.is_Algebraic else [flint.fmpq(1), flint.fmpq(0)]
        )
        self.modulus = [c / modulus[0] for c in modulus]  # monic, highest power first
        self.degree = len(modulus) - 1
        self._approx = float(domain.ext.as_expr().evalf(30)) if domain.is_Algebraic else 0.0
        self._powers: dict[int, list[flint.fmpq_mat]] = {}

    def __repr__(self) -> str:
        return f"Field({self.domain})"

    # numbers

    def __call__(self, x: Any) -> Number:
        """The element x: an int, Fraction, rational string, sympy expression or an element already."""
        if isinstance(x, str):
            x = Fraction(x)
        if isinstance(x, Fraction):
            return self.domain.convert(sympy.QQ(x.numerator, x.denominator))
        if isinstance(x, sympy.Basic):
            return self.domain.from_sympy(x)
        if isinstance(x, (float, np.floating)):
            raise TypeError(f"{x!r} is a float: exact fields take ints, Fractions, sympy expressions or elements")
        return self.domain.convert(int(x) if isinstance(x, np.integer) else x)

    def root(self, n: int) -> Number:
        """The square root of n, which must lie in the field."""
        return self(sympy.sqrt(n))

    def cos(self, j: int, n: int) -> Number:
        """cos(2 pi j / n), by Chebyshev's recurrence from cos(2 pi / n), which must lie in the field."""
        before, now = self(1), self(sympy.cos(2 * sympy.pi / n))
        step = now
        for _ in range(j % n):
            before, now = now, 2 * step * now - before
        return before

    def sin(self, j: int, n: int) -> Number:
        """sin(2 pi j / n) = cos(2 pi (n - 4 j) / (4 n))."""
        common = gcd(n - 4 * j, 4 * n)
        return self.cos((n - 4 * j) // common, 4 * n // common)

    def coordinates(self, x: Number) -> list[flint.fmpq]:
        """Rational coordinates of x in 1, t, t^2, ... for the generator t."""
        if not self.domain.is_Algebraic:
            return [x]
        low_first = [flint.fmpq(c) for c in reversed(x.to_list())]
        return low_first + [flint.fmpq(0)] * (self.degree - len(low_first))

    def element(self, coordinates: Sequence[flint.fmpq]) -> Number:
        """Inverse of :meth:`coordinates`."""
        if not self.domain.is_Algebraic:
            return coordinates[0]
        return self.domain(list(reversed(list(coordinates))))

    def sign(self, x: Number) -> int:
        """Sign of x in the real embedding, decided: zero algebraically, else by enclosures of rising precision."""
        c = self.coordinates(x)
        if not any(c):
            return 0
        for precision in (64, 256, 1024, 4096, 16384):
            value = self._enclose(c, precision)
            if value > 0 or value < 0:
                return 1 if value > 0 else -1
        raise ArithmeticError(f"the sign of {x} needs more than 16384 bits")

    def less(self, x: Number, y: Number) -> bool:
        """x < y in the real embedding."""
        return self.sign(self(x) - self(y)) < 0

    def float(self, x: Number) -> float:
        """The nearest float64 (from an enclosure of 192 bits)."""
        return float(self._enclose(self.coordinates(x), 192).mid())

    def sympy(self, x: Number) -> sympy.Expr:
        """x as a sympy expression."""
        return self.domain.to_sympy(x)

    def _enclose(self, coordinates: Sequence[flint.fmpq], precision: int) -> flint.arb:
        with flint.ctx.workprec(precision):
            t, value = self._generator(precision), flint.arb(0)
            for c in reversed(coordinates):
                value = value * t + flint.arb(c)
            return value

    @lru_cache(maxsize=8)  # noqa: B019  (fields are few and live as long as the program)
    def _generator(self, precision: int) -> flint.arb:
        denominator = int(np.lcm.reduce([int(c.q) for c in self.modulus]))
        poly = flint.fmpz_poly([int(c * denominator) for c in reversed(self.modulus)])
        with flint.ctx.workprec(precision + 32):
            found: Any = poly.complex_roots()
            roots = [root.real for root, _ in found if root.imag == 0]
            return min(roots, key=lambda r: abs(float(r.mid()) - self._approx))

    # matrices

    def matrix(self, rows: Iterable[Iterable[Any]]) -> "Matrix":
        """The matrix with these rows of numbers.

        Example:
            >>> field().matrix([[1, "1/2"], [0, 1]]).det()
            1
        """
        table = [[self.coordinates(self(x)) for x in row] for row in rows]
        flat = [table[i][j][l] for i in range(len(table)) for l in range(self.degree) for j in range(len(table[0]))]
        return Matrix(self, flint.fmpq_mat(len(table) * self.degree, len(table[0]), flat))

    def vector(self, entries: Iterable[Any]) -> "Matrix":
        """A column."""
        return self.matrix([[x] for x in entries])

    def diag(self, entries: Iterable[Any]) -> "Matrix":
        """Diag(entries)."""
        d = [self(x) for x in entries]
        return self.matrix([[x if i == j else 0 for j in range(len(d))] for i, x in enumerate(d)])

    def eye(self, n: int) -> "Matrix":
        """The identity."""
        return self.diag([1] * n)

    def zeros(self, rows: int, columns: int) -> "Matrix":
        """The zero matrix."""
        return Matrix(self, flint.fmpq_mat(rows * self.degree, columns))

    def permutation(self, images: Sequence[int]) -> "Matrix":
        """The matrix P with P e_j = e_{images[j]}.

        Example:
            >>> field().permutation([1, 2, 0]).eigenvalue_count()
            EigenvalueCount(real=1, pairs=1, unit_pairs=1)
        """
        n = len(images)
        return self.matrix([[int(images[j] == i) for j in range(n)] for i in range(n)])

    def householder(self, k: Any, beta: Any = 2) -> "Matrix":
        """I - beta k k^T / (k^T k): a generalised Householder matrix without square roots; k any nonzero vector.

        Example:
            >>> field().householder([1, 1]).tolist()
            [[0, -1], [-1, 0]]
        """
        k = k if isinstance(k, Matrix) else self.vector(k)
        norm2 = (k.T @ k)[0, 0]
        if not norm2:
            raise ValueError("householder: the key is zero")
        return self.eye(k.shape[0]) - (k @ k.T) * (self(beta) / norm2)

    def ckda(self, alpha: Iterable[Any], k: Any, beta: Any = 2) -> "Matrix":
        """The CKDA transition (I - beta k k^T / (k^T k)) Diag(alpha): `ckda.transition.dense` at the unit key k/|k|.

        Example:
            >>> field().ckda([-1, 1], [1, 2]).tolist()
            [[-3/5, -4/5], [4/5, -3/5]]
        """
        return self.householder(k, beta) @ self.diag(alpha)

    def rotation(self, j: int, n: int) -> "Matrix":
        """The planar rotation by 2 pi j / n; its cosine and sine must lie in the field."""
        c, s = self.cos(j, n), self.sin(j, n)
        return self.matrix([[c, -s], [s, c]])

    def _companion_powers(self, rows: int) -> "list[flint.fmpq_mat]":
        """I_rows (x) C^l for l < degree, C multiplication by the generator in coordinates."""
        if rows not in self._powers:
            m, size = self.degree, rows * self.degree
            step = flint.fmpq_mat(size, size)
            for i in range(rows):
                for l in range(m):
                    if l + 1 < m:
                        step[i * m + l + 1, i * m + l] = 1
                    step[i * m + l, i * m + m - 1] = -self.modulus[m - l]
            powers = [flint.fmpq_mat(size, size, [int(i == j) for i in range(size) for j in range(size)])]
            for _ in range(m - 1):
                powers.append(step * powers[-1])
            self._powers[rows] = powers
        return self._powers[rows]

    # polynomials (dense lists, highest power first)

    def count_real_roots(self, poly: Sequence[Number], inf: Any = None, sup: Any = None) -> int:
        """Real roots with multiplicity, in the open interval (inf, sup) where given: square-free parts, then Sturm.

        Example:
            >>> field().count_real_roots([1, 0, -2, 0, 1])  # (x^2 - 1)^2
            4
        """
        poly = _strip([self(c) for c in poly])
        _, parts = dup_sqf_list(poly, self.domain)
        return sum(multiplicity * self._count_distinct(part, inf, sup) for part, multiplicity in parts)

    def _count_distinct(self, part: list[Number], inf: Any, sup: Any) -> int:
        for end in (inf, sup):  # a root at an end is not inside
            if end is not None and not dup_eval(part, self(end), self.domain):
                part = _divide_root(part, self(end), self.domain)
        if dup_degree(part) < 1:
            return 0
        sturm = dup_sturm(part, self.domain)
        low = [self._sign_at(p, inf, -1) for p in sturm]
        high = [self._sign_at(p, sup, +1) for p in sturm]
        return _variations(low) - _variations(high)

    def _sign_at(self, poly: list[Number], end: Any, infinity: int) -> int:
        if end is not None:
            return self.sign(dup_eval(poly, self(end), self.domain))
        return self.sign(dup_LC(poly, self.domain)) * (infinity if dup_degree(poly) % 2 else 1)

    def count_unit_pairs(self, poly: Sequence[Number]) -> int:
        """Non-real conjugate pairs of roots on the unit circle, with multiplicity.

        The roots shared with the reversed polynomial come in pairs z, 1/z; in x = z + 1/z those on the circle are the
        roots in (-2, 2).

        Example:
            >>> field().count_unit_pairs([1, 0, 0, 0, 0, -1])  # x^5 - 1
            2
        """
        poly = _strip([self(c) for c in poly])
        _, parts = dup_sqf_list(poly, self.domain)
        return sum(multiplicity * self._unit_pairs_distinct(part) for part, multiplicity in parts)

    def _unit_pairs_distinct(self, part: list[Number]) -> int:
        K = self.domain
        for root in (self(0), self(1), self(-1)):
            if dup_degree(part) >= 1 and not dup_eval(part, root, K):
                part = _divide_root(part, root, K)
        common = dup_gcd(part, list(reversed(part)), K) if dup_degree(part) >= 1 else [self(1)]
        if dup_degree(common) < 1:
            return 0
        return self._count_distinct(self._in_z_plus_inverse(common), -2, 2)

    def _in_z_plus_inverse(self, palindrome: list[Number]) -> list[Number]:
        """h with h(z + 1/z) = z^-m palindrome(z), of degree 2m and leading coefficient one."""
        m = dup_degree(palindrome) // 2
        h, before, now = [self(0)] * (m + 1), [self(2)], [self(1), self(0)]  # V_0 = 2, V_1 = x: z^j + z^-j = V_j
        h[m] = palindrome[m]
        for j in range(1, m + 1):
            padded = [self(0)] * (m - j) + now
            h = [a + palindrome[m - j] * b for a, b in zip(h, padded, strict=True)]
            doubled = [*now, self(0)]
            shifted = [self(0)] * (len(doubled) - len(before)) + before
            before, now = now, [a - b for a, b in zip(doubled, shifted, strict=True)]
        return _strip(h)


def _strip(poly: list[Number]) -> list[Number]:
    """Without leading zeros."""
    first = next((i for i, c in enumerate(poly) if c), len(poly))
    return poly[first:]


def _divide_root(poly: list[Number], root: Number, K: Any) -> list[Number]:
    """poly / (x - root), the division being exact."""
    quotient = [poly[0]]
    for c in poly[1:-1]:
        quotient.append(c + root * quotient[-1])
    return dup_quo_ground(quotient, quotient[0], K)


def _variations(signs: Sequence[int]) -> int:
    nonzero = [s for s in signs if s]
    return sum(a != b for a, b in pairwise(nonzero))


class Matrix:
    """An immutable matrix over a :class:`Field`, with the operators one expects, hashable and comparable.

    Build them with `Field.matrix` and its kin; `A[i, j]` is a number of the field.
    """

    __slots__ = ("__dict__", "_coords", "field")

    def __init__(self, field: Field, coords: flint.fmpq_mat) -> None:
        self.field = field
        self._coords = coords  # [rows * degree, columns]: the coordinates of entry (i, j) run down from row i * degree

    @property
    def shape(self) -> tuple[int, int]:
        return self._coords.nrows() // self.field.degree, self._coords.ncols()

    @cached_property
    def _regular(self) -> flint.fmpq_mat:
        """[rows * degree, columns * degree]: every entry replaced by its matrix of multiplication."""
        rows, columns = self.shape
        m, powers = self.field.degree, self.field._companion_powers(rows)
        if m == 1:
            return self._coords
        images = [power * self._coords for power in powers]
        flat = [images[l][i, j] for i in range(rows * m) for j in range(columns) for l in range(m)]
        return flint.fmpq_mat(rows * m, columns * m, flat)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """A hashable value, equal for equal matrices: the common denominator and the numerators."""
        numerators, denominator = self._coords.numer_denom()
        return self.shape, denominator, tuple(numerators.entries())

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Matrix) and self.field is other.field and self._coords == other._coords

    def __repr__(self) -> str:
        return f"Matrix({[[str(self.field.sympy(x)) for x in row] for row in self.tolist()]})"

    def __getitem__(self, at: tuple[int, int]) -> Number:
        i, j = at
        m = self.field.degree
        i, j = i % self.shape[0], j % self.shape[1]
        return self.field.element([self._coords[i * m + l, j] for l in range(m)])

    def __matmul__(self, other: "Matrix") -> "Matrix":
        if self.field is not other.field:
            raise ValueError(f"a product of matrices over {self.field} and {other.field}")
        return Matrix(self.field, self._regular * other._coords)

    def __add__(self, other: "Matrix") -> "Matrix":
        return Matrix(self.field, self._coords + other._coords)

    def __sub__(self, other: "Matrix") -> "Matrix":
        return Matrix(self.field, self._coords - other._coords)

    def __neg__(self) -> "Matrix":
        return Matrix(self.field, -self._coords)

    def __mul__(self, scalar: Any) -> "Matrix":
        scalar = self.field(scalar)
        if not self.field.domain.is_Algebraic:
            return Matrix(self.field, self._coords * scalar)
        c, powers = self.field.coordinates(scalar), self.field._companion_powers(self.shape[0])
        factor = powers[0] * c[0]
        for power, x in zip(powers[1:], c[1:], strict=True):
            factor = factor + power * x
        return Matrix(self.field, factor * self._coords)

    __rmul__ = __mul__

    def __pow__(self, exponent: int) -> "Matrix":
        if exponent < 0:
            return self.inverse() ** -exponent
        result, base = self.field.eye(self.shape[0]), self
        while exponent:
            result, base, exponent = (result @ base if exponent % 2 else result), base @ base, exponent // 2
        return result

    @cached_property
    def T(self) -> "Matrix":
        rows, columns = self.shape
        m = self.field.degree
        flat = [self._coords[i * m + l, j] for j in range(columns) for l in range(m) for i in range(rows)]
        return Matrix(self.field, flint.fmpq_mat(columns * m, rows, flat))

    def tolist(self) -> list[list[Number]]:
        """Rows of numbers of the field."""
        return [[self[i, j] for j in range(self.shape[1])] for i in range(self.shape[0])]

    def column(self, j: int) -> "Matrix":
        """Column j as a vector."""
        rows = self._coords.nrows()
        return Matrix(self.field, flint.fmpq_mat(rows, 1, [self._coords[i, j] for i in range(rows)]))

    def stack(self, *others: "Matrix") -> "Matrix":
        """This matrix with the columns of the others to its right."""
        tables = (m.tolist() for m in (self, *others))
        return self.field.matrix(chain.from_iterable(rows) for rows in zip(*tables, strict=True))

    def is_zero(self) -> bool:
        return not any(self._coords.entries())

    def is_identity(self) -> bool:
        return self == self.field.eye(self.shape[0])

    def is_symmetric(self) -> bool:
        return self == self.T

    def is_orthogonal(self) -> bool:
        return (self.T @ self).is_identity()

    def trace(self) -> Number:
        return sum((self[i, i] for i in range(self.shape[0])), self.field(0))

    def det(self) -> Number:
        return self.charpoly()[-1] * (-1) ** self.shape[0]

    def rank(self) -> int:
        return int(self._regular.rank()) // self.field.degree

    def inverse(self) -> "Matrix":
        """The inverse; ZeroDivisionError where there is none."""
        inverse, m = self._regular.inv(), self.field.degree
        size, n = inverse.nrows(), self.shape[0]
        flat = [inverse[i, j * m] for i in range(size) for j in range(n)]
        return Matrix(self.field, flint.fmpq_mat(size, n, flat))

    def charpoly(self) -> list[Number]:
        """Coefficients of det(x I - A), highest power first (Faddeev-LeVerrier).

        Example:
            >>> field().matrix([[0, -1], [1, 0]]).charpoly()
            [1, 0, 1]
        """
        n, eye = self.shape[0], self.field.eye(self.shape[0])
        coefficients, product = [self.field(1)], eye
        for step in range(1, n + 1):
            product = self @ product
            coefficients.append(-product.trace() / step)
            product = product + eye * coefficients[-1]
        return coefficients

    def eigenvalue_count(self) -> EigenvalueCount:
        """How many eigenvalues are real, how many non-real pairs there are, and how many of those on the unit circle.

        Example:
            >>> field().diag([1, 2, 2]).eigenvalue_count()
            EigenvalueCount(real=3, pairs=0, unit_pairs=0)
        """
        poly = self.charpoly()
        real = self.field.count_real_roots(poly)
        return EigenvalueCount(real, (self.shape[0] - real) // 2, self.field.count_unit_pairs(poly))

    def is_positive_semidefinite(self) -> bool:
        """For a symmetric matrix: no negative eigenvalue, by Descartes' rule, exact since all roots are real."""
        signs = [self.field.sign(c) for c in self.charpoly()]
        return _variations([s * (-1) ** i for i, s in enumerate(signs)]) == 0

    def is_contraction(self) -> bool:
        """Spectral norm at most one, decided: I - A^T A is positive semidefinite."""
        return (self.field.eye(self.shape[1]) - self.T @ self).is_positive_semidefinite()

    def float(self) -> np.ndarray:
        """[rows, columns] float64."""
        return np.array([[self.field.float(x) for x in row] for row in self.tolist()])

    def tensor(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """[rows, columns], each entry the nearest float64, then cast."""
        return torch.from_numpy(self.float()).to(dtype)


def householder_key(A: Matrix) -> Matrix | None:
    """A (not normalised) k with A = I - beta k k^T / (k^T k) for some beta, or None where A is no such matrix or I.

    Example:
        >>> householder_key(field().householder([1, 2, 0])).tolist()
        [[2/5], [4/5], [0]]
    """
    gap = A.field.eye(A.shape[0]) - A
    if not gap.is_symmetric() or gap.rank() != 1:
        return None
    return next(gap.column(j) for j in range(A.shape[0]) if not gap.column(j).is_zero())
