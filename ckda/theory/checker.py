#!/usr/bin/env python3
"""Check a certificate of `ckda theory compile`: python checker.py certificate.json

Fractions alone, and nothing but Python's own library; floats only tell apart what is not near. Each part says what it shows.
"""

import json
import math
import sys
from fractions import Fraction
from functools import cache


def need(holds, why):
    if not holds:
        raise ValueError(why)


def reach(start, images, most=math.inf):
    """{thing: its images} for all that is reached from the start, in the order in which it is met."""
    found, met = {}, [start]
    for thing in met:  # grows
        if thing not in found:
            found[thing] = images(thing)
            met += found[thing]
            need(len(found) <= most, "a head has more states than its decoder knows")
    return found


class Field:
    """Numbers of Q[x] / modulus: tuples of fractions, lowest power first. x stands for the root, a real number."""

    def __init__(self, data):
        *self.rest, top = map(Fraction, data["modulus"])
        self.powers = [float(data["root"]) ** i for i in range(len(self.rest) + 1)]
        terms = [float(c) * x for c, x in zip([*self.rest, top], self.powers, strict=True)]
        need(top == 1 and len(terms) > 1, "the modulus of a field is not monic")
        need(abs(sum(terms)) <= 1e-9 * sum(map(abs, terms)), "the root of a field is no root of its modulus")

    def numbers(self, rows):
        need(all(len(row) == len(self.rest) for row in rows), "a number has the wrong number of coordinates")
        return [tuple(map(Fraction, row)) for row in rows]

    def times(self, a, b):
        full = [Fraction(0)] * (2 * len(a) - 1)
        for i, x in enumerate(a):
            for j, y in enumerate(b):
                if x and y:
                    full[i + j] += x * y
        while len(full) > len(a):  # the top power is minus the rest of the modulus, moved up
            x = full.pop()
            for i, c in enumerate(self.rest, len(full) - len(a)):
                full[i] -= x * c
        return tuple(full)

    def dot(self, u, v):
        return tuple(map(sum, zip(*map(self.times, u, v), strict=True)))

    def value(self, a):
        return sum(float(c) * x for c, x in zip(a, self.powers, strict=False))


def states(head, letters):
    """[state][letter] -> state: all that a head reaches from the identity by (I - 2 k k^T) Diag(signs).

    k k^T is rate/2 key (weight key)^T: the coordinates are scaled by the roots of the weights, so that all is in one field.
    """
    field, flips = Field(head["field"]), head["signs"]
    weights, rates = field.numbers(head["weights"]), field.numbers(head["rates"])
    keys, duals, columns = [field.numbers(key) for key in head["keys"]], [], []
    zero, one, two = ((Fraction(x), *[Fraction(0)] * (len(field.rest) - 1)) for x in (0, 1, 2))
    need(
        len(keys) == letters and all(field.value(w) > 0 for w in weights), "a key is missing, or a weight not positive"
    )
    for key, rate, signs in zip(keys, rates, flips, strict=True):
        need(len(key) == len(signs) == len(weights) and set(signs) <= {1, -1}, "a gate is not made of signs")
        duals.append([field.times(rate, field.times(x, w)) for x, w in zip(key, weights, strict=True)])
        need(field.dot(duals[-1], key) == two, "a rate is not that of a reflection")

    @cache
    def number(column):
        columns.append(column)
        need(len(columns) <= head["columns"], "the columns of a head's states are more than it says")
        return len(columns) - 1

    @cache
    def move(letter, c):
        flipped = [tuple(s * y for y in x) for s, x in zip(flips[letter], columns[c], strict=True)]
        along = field.dot(duals[letter], flipped)
        steps = [field.times(along, x) for x in keys[letter]]
        return number(tuple(tuple(map(Fraction.__sub__, x, y)) for x, y in zip(flipped, steps, strict=True)))

    d = range(len(weights))
    start = tuple(number(tuple(one if i == j else zero for i in d)) for j in d)
    found = reach(start, lambda s: [tuple(move(a, c) for c in s) for a in range(letters)], len(head["decoder"]))
    real = {tuple(round(field.value(x), 6) for x in column) for column in columns}
    need(len(real) == len(columns), "two columns are the same real vector")
    place = {state: i for i, state in enumerate(found)}
    return [[place[image] for image in images] for images in found.values()]


def check_head(head, before):
    """What is known before, and the state, give what is known after: [known][letter] -> known, as the decoder says."""
    step, decoder, after = states(head, len(before[0])), [dict(row) for row in head["decoder"]], head["step"]

    def images(pair):  # of a state and what is known before
        pairs, known = list(zip(step[pair[0]], before[pair[1]], strict=True)), decoder[pair[0]][pair[1]]
        need([decoder[s].get(e) for s, e in pairs] == after[known], f"{pair} is wrongly decoded")
        return pairs

    need(decoder[0].get(0) == 0, "the decoder does not start at the identity")
    need(all(x in range(len(after)) for row in after for x in row), "a step leads nowhere")
    reach((0, 0), images)
    return after


def check_group(data):
    """By induction over the letters: whatever the word, the heads, decoded the last first, give the running product."""
    known, rows, answer = [[0] * len(data["letters"])], data["group"]["rows"], data["answer"]
    for head in reversed(data["heads"]):
        known = check_head(head, known)
    check_table(data["group"])
    need(answer[0] == data["group"]["identity"], "the answer before the first letter is not the identity")
    for x, images in zip(answer, known, strict=True):
        need([answer[y] for y in images] == [row[x] for row in rows], f"the letters do not multiply element {x}")
    check_example(data, answer[0], lambda a, x: rows[a][x], lambda x: x)
    return f"the running product of any word over {len(rows)} letters is decoded by {len(data['heads'])} heads"


def check_table(group):
    """The rows of the table that belong to letters, computed again where the elements are permutations or matrices."""
    elements, n = group["elements"], range(math.isqrt(len(group["elements"][0])))

    def times(g, x):
        if group["as"] == "permutations":
            return [g[i] for i in x]
        return [sum(g[i * len(n) + k] * x[k * len(n) + j] for k in n) % group["modulo"] for i in n for j in n]

    for a, row in zip(group["letters"], group["rows"], strict=True):
        need(sorted(row) == list(range(len(elements))), "a letter does not permute the elements")
        need(row[group["identity"]] == a, "letter times identity is not the letter")
        if group["as"] != "table":
            need([elements[y] for y in row] == [times(elements[a], x) for x in elements], f"the row of {a} is wrong")


def check_example(data, now, step, read):
    """The machine that is certified answers as the example says, by direct simulation."""
    for letter, answer in zip(data["example"]["word"], data["example"]["answers"], strict=True):
        now = step(letter, now)
        need(read(now) == answer, f"the example has {answer} in the place of {read(now)}")


def check_clock(data):
    """Automata take blocks of m letters, which a turn by pi/m counts: its 2m places look different along the query."""
    m, (a, b) = data["block"], (float(Fraction(x)) for x in data["query"])
    seen = sorted(a * math.cos(math.pi * i / m) + b * math.sin(math.pi * i / m) for i in range(2 * m))
    need(min(map(float.__sub__, seen[1:], seen)) > 1e-9, "two places of the clock look alike")


def product(program, column, size):
    """The factors (I - gamma u u^T) Diag(gate), first to last, applied to a unit vector of polynomials.

    A polynomial is {symbols: coefficient}. A scale multiplies one coordinate by the symbol of a matrix entry: it is the
    factor with learning rate 1 + |entry| and the gate -1 where the entry is positive.
    """
    vector = [{(): Fraction(i == column)} for i in range(size)]
    for factor in program:
        if "scale" in factor:
            t, entry = factor["scale"], tuple(factor["entry"])
            vector[t] = {(*symbols, entry): x for symbols, x in vector[t].items() if x}
            continue
        key, gate = ({i: Fraction(x) for i, x in factor[name]} for name in ("key", "gate"))
        for symbols in {s for i in {**key, **gate} for s in vector[i]}:
            moved = {i: vector[i].get(symbols, 0) * gate.get(i, 1) for i in {**key, **gate}}
            along = Fraction(factor["gamma"]) * sum(u * moved[i] for i, u in key.items())
            for i, x in moved.items():
                vector[i][symbols] = x - along * key.get(i, 0)
    return [{symbols: x for symbols, x in polynomial.items() if x} for polynomial in vector]


def check_automaton(data):
    """Every map that a block of m letters makes has a program of at most m factors whose product it is.

    So the accumulator holds the unit vector of a DFA's state, or for a group those of where its points went.
    """
    delta, m, n, dfa = data["delta"], data["block"], range(len(data["delta"])), data["kind"] == "dfa"
    check_clock(data)
    need(all(x in n for row in delta for x in row), "delta leaves the states")
    maps, programs = {tuple(n)}, {tuple(item["map"]): item["factors"] for item in data["programs"]}
    for _ in range(m):
        maps = {tuple(f[x] for x in g) for g in maps for f in zip(*delta, strict=True)}
    for f in maps:
        need(f in programs and len(programs[f]) <= m, f"the map {f} of a block has no program of {m} factors")
        for factor in programs[f]:
            beta = Fraction(factor["gamma"]) * sum(Fraction(x) ** 2 for _, x in factor["key"])
            need(0 <= beta <= Fraction(data["beta"]), f"a learning rate of {beta} is beyond {data['beta']}")
            need(all(abs(Fraction(x)) <= 1 for _, x in factor["gate"]), "a gate is outside [-1, 1]")
        for j in n:
            wanted = [{(): 1} if i == f[j] else {} for i in n]
            need(product(programs[f], j, len(n)) == wanted, f"the program of {f} is wrong at state {j}")
    start, accept, elements = [data["start"]] if dfa else list(n), data.get("accept"), data.get("elements")
    read = (lambda at: [*at, at[0] in accept]) if dfa else elements.index
    check_example(data, start, lambda a, at: [delta[x][a] for x in at], read)
    return f"all {len(maps)} maps of blocks of {m} letters are the products of their factors"


def check_wfa(data):
    """The program multiplies to [[M, 0, 0], [M, 0, 0], [0, 0, 0]] for every M: its entries are kept as symbols."""
    n, program, matrices = len(data["initial"]), data["program"], [data["matrices"][a] for a in data["alphabet"]]
    check_clock(data)
    need(len(program) <= data["block"], "the program is longer than a block")
    need(all(len(M) == len(row) == n for M in matrices for row in M), "a matrix has the wrong size")
    for j in range(2 * n + 1):
        wanted = [{((i % n, j),): 1} if j < n and i < 2 * n else {} for i in range(2 * n + 1)]
        need(product(program, j, 2 * n + 1) == wanted, f"the program is wrong in column {j}")

    def dot(u, v):
        return sum(Fraction(x) * Fraction(y) for x, y in zip(u, v, strict=True))

    final, step = data["final"], lambda a, p: [dot(row, p) for row in matrices[a]]
    check_example(data, data["initial"], step, lambda p: str(dot(final, p)))
    return f"the program of {len(program)} factors applies any rational {n} x {n} matrix"


def check(data):
    """A sentence that says what the certificate shows; an error where it does not."""
    need(data.get("format") == "ckda-certificate-3", "not a certificate of this kind")
    checks = {"group": check_group, "action": check_automaton, "dfa": check_automaton, "wfa": check_wfa}
    return f"{data['name']}: {checks[data['kind']](data)}"


if __name__ == "__main__":
    try:
        with open(sys.argv[1]) as file:
            print("accepted:", check(json.load(file)))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        print("rejected:", error)
        sys.exit(1)
