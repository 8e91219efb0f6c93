#!/usr/bin/env python3
"""Check a certificate of `ckda theory compile`: python checker.py certificate.json

Fractions alone, and nothing but Python's own library; floats only tell apart what is not near. Each part says what it shows.
"""

import json
import math
import sys
from fractions import Fraction
from functools import cache
from itertools import pairwise


class Wrong(Exception):
    """The certificate does not show what it says."""


def need(holds, why):
    if not holds:
        raise Wrong(why)


class Field:
    """Numbers of Q[x] / modulus: tuples of fractions, lowest power first. x stands for the root, a real number."""

    def __init__(self, data):
        self.modulus = [Fraction(c) for c in reversed(data["modulus"])]
        self.degree, root = len(self.modulus) - 1, float(data["root"])
        need(self.degree >= 1 and self.modulus[-1] == 1, "the modulus of a field is not monic")
        terms = [float(c) * root**i for i, c in enumerate(self.modulus)]
        need(abs(sum(terms)) <= 1e-9 * sum(map(abs, terms)), "the root of a field is no root of its modulus")
        self.powers = [root**i for i in range(self.degree)]

    def number(self, coordinates):
        need(len(coordinates) == self.degree, "a number has the wrong number of coordinates")
        return tuple(Fraction(c) for c in coordinates)

    def times(self, a, b):
        full = [Fraction(0)] * (2 * self.degree - 1)
        for i, x in enumerate(a):
            for j, y in enumerate(b):
                if x and y:
                    full[i + j] += x * y
        while len(full) > self.degree:  # x^degree is minus the rest of the modulus
            top = full.pop()
            for i, c in enumerate(self.modulus[:-1], len(full) - self.degree):
                full[i] -= top * c
        return tuple(full)

    def dot(self, u, v):
        return tuple(map(sum, zip(*map(self.times, u, v), strict=True)))

    def value(self, a):
        return sum(float(c) * power for c, power in zip(a, self.powers, strict=True))


def states(head, letters):
    """[state][letter] -> state: all that a head can reach from the identity by (I - 2 k k^T) Diag(signs).

    k k^T is rate/2 key (weight key)^T: the coordinates are scaled by the roots of the weights, so that all is in one field.
    """
    field, d = Field(head["field"]), head["dimension"]
    weights = [field.number(w) for w in head["weights"]]
    need(len(weights) == d and all(field.value(w) > 0 for w in weights), "the weights are not d positive numbers")
    one, zero = ([Fraction(x)] + [Fraction(0)] * (field.degree - 1) for x in (1, 0))
    keys, duals = [[field.number(x) for x in key] for key in head["keys"]], []
    for key, rate, signs in zip(keys, head["rates"], head["signs"], strict=True):
        need(len(key) == len(signs) == d and set(signs) <= {1, -1}, "a gate is not made of d signs")
        duals.append([field.times(field.number(rate), field.times(x, w)) for x, w in zip(key, weights, strict=True)])
        need(list(field.dot(duals[-1], key)) == [2 * x for x in one], "a rate is not that of a reflection")
    need(len(keys) == letters, "a head has not one transition per letter")

    number: dict = {}  # columns of states, numbered as they are met
    columns: list = []

    def numbered(column):
        if column not in number:
            number[column] = len(columns)
            columns.append(column)
        return number[column]

    @cache
    def move(letter, c):
        flipped = [tuple(s * y for y in x) for s, x in zip(head["signs"][letter], columns[c], strict=True)]
        along = field.dot(duals[letter], flipped)
        steps = [field.times(along, x) for x in keys[letter]]
        return numbered(tuple(tuple(map(Fraction.__sub__, x, y)) for x, y in zip(flipped, steps, strict=True)))

    found = [tuple(numbered(tuple(tuple(one if i == j else zero) for i in range(d))) for j in range(d))]
    place, step = {found[0]: 0}, []
    for state in found:  # grows while new states are met
        images = [tuple(move(letter, c) for c in state) for letter in range(letters)]
        for image in images:
            if image not in place:
                place[image] = len(found)
                found.append(image)
                need(len(found) <= len(head["decoder"]), "a head has more states than the decoder knows")
        step.append([place[image] for image in images])
    real = {tuple(round(field.value(x), 6) for x in column) for column in columns}
    need(len(real) == len(columns), "two columns are the same real vector")
    return step


def decoder_of(head):
    """[state]{known before: known after}."""
    return [dict(zip(row[::2], row[1::2], strict=True)) for row in head["decoder"]]


def check_group(data):
    """By induction over the letters: whatever the word, the heads, decoded the last first, give the running product."""
    letters, known = len(data["letters"]), [[0] * len(data["letters"])]
    for head in reversed(data["heads"]):
        step, decoder, after = states(head, letters), decoder_of(head), head["step"]
        need(all(0 <= x < len(after) for row in after for x in row), "a step leads nowhere")
        need(decoder[0].get(0) == 0, "the decoder does not start at the identity")
        met = [(0, 0)]
        seen = set(met)
        for s, e in met:  # grows while new pairs (state, known before) are met
            for letter in range(letters):
                pair, wanted = (step[s][letter], known[e][letter]), after[decoder[s][e]][letter]
                need(decoder[pair[0]].get(pair[1]) == wanted, f"the pair {pair} is not decoded to {wanted}")
                if pair not in seen:
                    seen.add(pair)
                    met.append(pair)
        known = after
    group, answer = data["group"], data["answer"]
    check_table(group)
    need(answer[0] == group["identity"], "the answer before the first letter is not the identity")
    for e, row in enumerate(known):
        products = [group["rows"][letter][answer[e]] for letter in range(letters)]
        need([answer[x] for x in row] == products, f"the letters do not multiply element {answer[e]}")
    check_example(data, group["identity"], lambda a, x: group["rows"][a][x], lambda x: x)
    return f"{data['name']}: the running product of any word over {letters} letters is decoded by {len(data['heads'])} heads"


def check_table(group):
    """The rows of the table that belong to letters, computed again where the elements are permutations or matrices."""

    def times(a, x):
        if group["as"] == "permutations":
            return [a[i] for i in x]
        m, p = math.isqrt(len(a)), group["modulo"]
        return [sum(a[i * m + k] * x[k * m + j] for k in range(m)) % p for i in range(m) for j in range(m)]

    elements = group["elements"]
    for a, row in zip(group["letters"], group["rows"], strict=True):
        need(sorted(row) == list(range(group["order"])), "a letter does not permute the elements")
        need(row[group["identity"]] == a, "letter times identity is not the letter")
        if group["as"] != "table":
            need(
                [elements[y] for y in row] == [times(elements[a], x) for x in elements],
                f"the row of letter {a} is wrong",
            )


def check_example(data, now, step, read):
    """The machine that is certified answers as the example says, by direct simulation."""
    for t, (letter, answer) in enumerate(zip(data["example"]["word"], data["example"]["answers"], strict=True)):
        now = step(letter, now)
        need(read(now) == answer, f"the example is wrong after {t + 1} letters")


# automata: the clock turns by pi/m, the buffer keeps 2m letters, the accumulator applies one factor a step


def check_clock(data):
    """The 2m positions of the clock have different readouts along the query."""
    m, (a, b) = data["block"], (float(Fraction(x)) for x in data["query"])
    readouts = sorted(a * math.cos(math.pi * i / m) + b * math.sin(math.pi * i / m) for i in range(2 * m))
    need(min(y - x for x, y in pairwise(readouts)) > 1e-9, "two positions of the clock look alike")


def product(program, column, size):
    """The factors (I - gamma u u^T) Diag(gate), first to last, applied to a unit vector of polynomials.

    A polynomial is {symbols: coefficient}. A scale multiplies one coordinate by the symbol of a matrix entry: it is the
    factor with learning rate 1 + |entry| and the gate -1 where the entry is positive.
    """
    vector = [{(): Fraction(1)} if i == column else {} for i in range(size)]
    for factor in program:
        if "scale" in factor:
            t, entry = factor["scale"], tuple(factor["entry"])
            vector[t] = {(*symbols, entry): x for symbols, x in vector[t].items()}
            continue
        for i, gate in factor["gate"].items():
            vector[int(i)] = {symbols: x * Fraction(gate) for symbols, x in vector[int(i)].items()}
        key = {int(i): Fraction(x) for i, x in factor["key"].items()}
        for symbols in {s for i in key for s in vector[i]}:
            along = Fraction(factor["gamma"]) * sum(u * vector[i].get(symbols, 0) for i, u in key.items())
            for i, u in key.items():
                vector[i][symbols] = vector[i].get(symbols, 0) - along * u
    return [{symbols: x for symbols, x in polynomial.items() if x} for polynomial in vector]


def check_blocks(data):
    """Every map that a block of m letters can make has a program of at most m factors whose product it is."""
    check_clock(data)
    delta, m, n, top = data["delta"], data["block"], len(data["delta"]), Fraction(data["beta"])
    letters, maps = [tuple(row[a] for row in delta) for a in range(len(data["alphabet"]))], {tuple(range(n))}
    need(letters and all(0 <= x < n for f in letters for x in f), "delta leaves the states")
    for _ in range(m):
        maps = {tuple(f[x] for x in g) for g in maps for f in letters}
    programs = {tuple(item["map"]): item["factors"] for item in data["programs"]}
    for f in maps:
        need(f in programs and len(programs[f]) <= m, f"the map {f} of a block has no program of {m} factors")
        for factor in programs[f]:
            beta = Fraction(factor["gamma"]) * sum(Fraction(x) ** 2 for x in factor["key"].values())
            need(0 <= beta <= top, f"a learning rate of {beta} is beyond {top}")
            need(all(abs(Fraction(x)) <= 1 for x in factor["gate"].values()), "a gate is outside [-1, 1]")
        for j in range(n):
            wanted = [{(): 1} if i == f[j] else {} for i in range(n)]
            need(product(programs[f], j, n) == wanted, f"the program of {f} is wrong at state {j}")
    return f"{data['name']}: all {len(maps)} maps of blocks of {m} letters are the products of their factors"


def check_dfa(data):
    """The accumulator's column is the unit vector of the state."""
    need(0 <= data["start"] < len(data["delta"]), "the start is no state")
    check_example(data, data["start"], lambda a, x: data["delta"][x][a], lambda x: [x, x in data["accept"]])
    return check_blocks(data)


def check_action(data):
    """A group of permutations: the states are its points, and column j is the unit vector of where point j went."""
    points, elements = list(range(len(data["delta"]))), data["elements"]
    need(
        all(sorted(x) == points for x in elements) and len(set(map(tuple, elements))) == len(elements),
        "not permutations",
    )
    check_example(data, points, lambda a, images: [data["delta"][x][a] for x in images], elements.index)
    return check_blocks(data)


def check_wfa(data):
    """The program multiplies to [[M, 0, 0], [M, 0, 0], [0, 0, 0]] for every M: its entries are kept as symbols."""
    check_clock(data)
    n, program = len(data["initial"]), data["program"]
    need(len(program) <= data["block"], "the program is longer than a block")
    for j in range(2 * n + 1):
        wanted = [{((i % n, j),): 1} if j < n and i < 2 * n else {} for i in range(2 * n + 1)]
        need(product(program, j, 2 * n + 1) == wanted, f"the program is wrong in column {j}")
    matrices = [[[Fraction(x) for x in row] for row in data["matrices"][a]] for a in data["alphabet"]]
    initial, final = ([Fraction(x) for x in data[name]] for name in ("initial", "final"))
    need(all(len(M) == n == len(row) for M in matrices for row in M), "a matrix has the wrong size")

    def dot(u, v):
        return sum(x * y for x, y in zip(u, v, strict=True))

    check_example(data, initial, lambda a, p: [dot(row, p) for row in matrices[a]], lambda p: str(dot(final, p)))
    return f"{data['name']}: the program of {len(program)} factors applies any rational {n} x {n} matrix"


CHECKS = {"group": check_group, "action": check_action, "dfa": check_dfa, "wfa": check_wfa}


def check(data):
    """A sentence that says what the certificate shows; Wrong where it does not."""
    need(data.get("format") == "ckda-certificate-2", "not a certificate of this kind")
    return CHECKS[data["kind"]](data)


def main(path):
    try:
        with open(path) as file:
            print("accepted:", check(json.load(file)))
        return 0
    except (Wrong, ValueError, KeyError, IndexError, TypeError, AttributeError, ZeroDivisionError) as error:
        print(f"rejected: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
