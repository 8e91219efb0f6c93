#!/usr/bin/env python3
"""Check a certificate of `ckda theory compile`: python checker.py certificate.json

It imports nothing but Python's own library and computes with fractions alone. What it shows is at the end of each part.
"""

import json
import math
import sys
from fractions import Fraction
from itertools import pairwise


class Wrong(Exception):
    """The certificate does not show what it says."""


def need(holds, why):
    if not holds:
        raise Wrong(why)


# numbers of a field Q[x] / modulus: lists of fractions, lowest power first


class Field:
    def __init__(self, data):
        self.modulus = [Fraction(c) for c in data["modulus"]]  # highest power first, monic
        self.degree, self.root = len(self.modulus) - 1, float(data["root"])
        need(self.degree >= 1 and self.modulus[0] == 1, "the modulus of a field is not monic")
        value = 0.0
        for c in self.modulus:
            value = value * self.root + float(c)
        scale = sum(abs(float(c)) * abs(self.root) ** i for i, c in enumerate(reversed(self.modulus)))
        need(abs(value) <= 1e-9 * scale, "the root of a field is no root of its modulus")

    def number(self, coordinates):
        need(len(coordinates) == self.degree, "a number has the wrong number of coordinates")
        return [Fraction(c) for c in coordinates]

    def times(self, a, b):
        if self.degree == 1:
            return [a[0] * b[0]]
        full = [Fraction(0)] * (2 * self.degree - 1)
        for i, x in enumerate(a):
            if x:
                for j, y in enumerate(b):
                    full[i + j] += x * y
        for top in range(len(full) - 1, self.degree - 1, -1):
            if full[top]:
                for i, c in enumerate(self.modulus[1:]):
                    full[top - 1 - i] -= full[top] * c
        return full[: self.degree]

    def inverse(self, a):
        """Solve a x = 1 by elimination on the matrix of multiplication by a."""
        n = self.degree
        columns = [self.times(a, [Fraction(int(i == j)) for i in range(n)]) for j in range(n)]
        rows = [[columns[j][i] for j in range(n)] + [Fraction(int(i == 0))] for i in range(n)]
        for i in range(n):
            pivot = next((r for r in range(i, n) if rows[r][i]), -1)
            need(pivot >= 0, "a key has length zero")
            rows[i], rows[pivot] = rows[pivot], rows[i]
            rows[i] = [x / rows[i][i] for x in rows[i]]
            for r in range(n):
                if r != i and rows[r][i]:
                    rows[r] = [x - rows[r][i] * y for x, y in zip(rows[r], rows[i], strict=True)]
        return [row[n] for row in rows]

    def dot(self, u, v):
        total = [Fraction(0)] * self.degree
        for a, b in zip(u, v, strict=True):
            if any(a) and any(b):
                total = [x + y for x, y in zip(total, self.times(a, b), strict=True)]
        return total

    def value(self, a):
        return sum(float(c) * self.root**i for i, c in enumerate(a))


class Head:
    """(I - 2 k k^T) Diag(signs) for every letter; k_j = key_j / sqrt(length_j), coordinates scaled by these roots."""

    def __init__(self, data, letters):
        self.field, d = Field(data["field"]), data["dimension"]
        self.lengths = [self.field.number(n) for n in data["lengths"]]
        need(len(self.lengths) == d and all(self.field.value(n) > 0 for n in self.lengths), "a length is not positive")
        inverse = [self.field.inverse(n) for n in self.lengths]
        need(len(data["keys"]) == len(data["signs"]) == letters, "a head has not one transition per letter")
        self.signs, self.keys, self.duals = data["signs"], [], []
        for signs, key in zip(self.signs, data["keys"], strict=True):
            need(len(signs) == d == len(key) and set(signs) <= {1, -1}, "a gate is not made of d signs")
            key = [self.field.number(x) for x in key]
            dual = [self.field.times(x, n) for x, n in zip(key, inverse, strict=True)]
            two = [2 * x for x in self.field.inverse(self.field.dot(key, dual))]
            self.keys.append(key)
            self.duals.append([self.field.times(x, two) for x in dual])
        zero, one = [Fraction(0)] * self.field.degree, [Fraction(int(i == 0)) for i in range(self.field.degree)]
        self.start = tuple(tuple(map(tuple, (one if i == j else zero for i in range(d)))) for j in range(d))

    def move(self, letter, vector):
        """The transition of a letter applied to one column of the state."""
        v = [x if s > 0 else [-y for y in x] for s, x in zip(self.signs[letter], vector, strict=True)]
        along = self.field.dot(self.duals[letter], v)
        if any(along):
            keys = self.keys[letter]
            v = [
                [x - y for x, y in zip(a, self.field.times(along, k), strict=True)]
                for a, k in zip(v, keys, strict=True)
            ]
        return tuple(map(tuple, v))

    def states(self, letters, limit):
        """[state][letter] -> state, breadth first from the identity."""
        step: list = []
        moved, place, found = {}, {self.start: 0}, [self.start]
        while len(step) < len(found):
            row = []
            for letter in range(letters):
                columns = []
                for vector in found[len(step)]:
                    if (letter, vector) not in moved:
                        moved[letter, vector] = self.move(letter, vector)
                    columns.append(moved[letter, vector])
                image = tuple(columns)
                if image not in place:
                    place[image] = len(found)
                    found.append(image)
                    need(len(found) <= limit, "a head has more states than the decoder knows")
                row.append(place[image])
            step.append(row)
        return step


def check_group(data):
    """By induction over the letters: whatever the word, the decoded element is the running product."""
    rows, letters = _group_rows(data["group"]), len(data["letters"])
    known = [[0] * letters]
    for head in reversed(data["heads"]):
        decoder = [dict(zip(row[::2], row[1::2], strict=True)) for row in head["decoder"]]
        step = Head(head, letters).states(letters, len(decoder))
        after = head["step"]
        need(all(len(row) == letters and all(0 <= x < len(after) for x in row) for row in after), "a step is no table")
        need(decoder[0].get(0) == 0, "the decoder does not start at the identity")
        seen, frontier = {(0, 0)}, [(0, 0)]
        while frontier:
            s, e = frontier.pop()
            for letter in range(letters):
                pair = (step[s][letter], known[e][letter])
                wanted = after[decoder[s][e]][letter]
                need(decoder[pair[0]].get(pair[1]) == wanted, f"state {pair} is not decoded to {wanted}")
                if pair not in seen:
                    seen.add(pair)
                    frontier.append(pair)
        known = after
    answer = data["answer"]
    need(answer[0] == data["group"]["identity"], "the answer before the first letter is not the identity")
    for e, row in enumerate(known):
        for letter, after in enumerate(row):
            need(answer[after] == rows[letter][answer[e]], f"letter {letter} does not multiply element {answer[e]}")
    return f"{data['name']}: the running product of any word over {letters} letters is decoded by {len(data['heads'])} heads"


def follow(data, word):
    """The decoded element after every letter of a word, by exact arithmetic on the states of the heads."""
    decoders, letters = [], len(data["letters"])
    for head in data["heads"]:
        step = Head(head, letters).states(letters, len(head["decoder"]))
        decoders.append((step, [dict(zip(row[::2], row[1::2], strict=True)) for row in head["decoder"]]))
    states, answers = [0] * len(decoders), []
    for letter in word:
        states = [step[s][letter] for s, (step, _) in zip(states, decoders, strict=True)]
        known = 0
        for s, (_, decoder) in reversed(list(zip(states, decoders, strict=True))):
            known = decoder[s][known]
        answers.append(data["answer"][known])
    return answers


def _group_rows(group):
    """[letter][x] the product letter x, recomputed where the elements are permutations or matrices."""
    rows, elements, n = group["rows"], group["elements"], group["order"]
    need(all(sorted(row) == list(range(n)) for row in rows), "a letter does not permute the elements")
    need([row[group["identity"]] for row in rows] == group["letters"], "letter times identity is not the letter")
    for a, row in zip(group["letters"], rows, strict=True):
        for x, y in enumerate(row):
            if group["as"] == "permutations":
                product = [elements[a][i] for i in elements[x]]
            elif group["as"] == "matrices":
                m, p = math.isqrt(len(elements[a])), group["modulo"]
                A, X = elements[a], elements[x]
                product = [sum(A[i * m + k] * X[k * m + j] for k in range(m)) % p for i in range(m) for j in range(m)]
            else:
                continue
            need(list(elements[y]) == product, f"the table is wrong at letter {a} times element {x}")
    return rows


# automata: the clock turns by pi/m, the buffer keeps 2m tokens, the accumulator applies one factor a step


def apply(factor, column):
    """(I - gamma u u^T) Diag(gate) applied to a column of numbers."""
    column = [x * Fraction(factor["gate"].get(str(i), 1)) for i, x in enumerate(column)]
    key = {int(i): Fraction(x) for i, x in factor["key"].items()}
    along = sum(x * column[i] for i, x in key.items()) * Fraction(factor["gamma"])
    return [x - along * key.get(i, 0) for i, x in enumerate(column)]


def check_clock(data):
    m, (a, b) = data["block"], map(Fraction, data["query"])
    readouts = sorted(float(a) * math.cos(math.pi * i / m) + float(b) * math.sin(math.pi * i / m) for i in range(2 * m))
    need(min(y - x for x, y in pairwise(readouts)) > 1e-9, "two positions of the clock look alike")


def check_dfa(data):
    """Every map that a block of m letters can make has a program of at most m factors whose product it is."""
    check_clock(data)
    delta, m, n, top = data["delta"], data["block"], len(data["delta"]), Fraction(data["beta"])
    letters = [tuple(row[a] for row in delta) for a in range(len(data["alphabet"]))]
    need(all(0 <= x < n for f in letters for x in f) and 0 <= data["start"] < n, "delta leaves the states")
    programs = {tuple(item["map"]): item["factors"] for item in data["programs"]}
    maps = {tuple(range(n))}
    for _ in range(m):
        maps = {tuple(f[x] for x in g) for g in maps for f in letters}
    for f in maps:
        need(f in programs and len(programs[f]) <= m, f"the map {f} of a block has no program of {m} factors")
        for factor in programs[f]:
            beta = Fraction(factor["gamma"]) * sum(Fraction(x) ** 2 for x in factor["key"].values())
            need(0 <= beta <= top, f"a learning rate of {beta} is beyond {top}")
            need(all(abs(Fraction(x)) <= 1 for x in factor["gate"].values()), "a gate is outside [-1, 1]")
        for j in range(n):
            column = [Fraction(int(i == j)) for i in range(n)]
            for factor in programs[f]:
                column = apply(factor, column)
            need(column == [int(i == f[j]) for i in range(n)], f"the program of {f} is wrong at state {j}")
    return f"{data['name']}: all {len(maps)} maps of blocks of {m} letters are the products of their factors"


def check_wfa(data):
    """The program multiplies to [[M, 0, 0], [M, 0, 0], [0, 0, 0]] for every M: its entries are kept as symbols."""
    check_clock(data)
    n, m = len(data["initial"]), data["block"]
    need(len(data["program"]) <= m, "the program is longer than a block")
    for matrix in data["matrices"].values():
        need(len(matrix) == n and all(len(row) == n for row in matrix), "a matrix has the wrong size")
        [[Fraction(x) for x in row] for row in matrix]
    for j in range(2 * n + 1):
        column = [{(): Fraction(1)} if i == j else {} for i in range(2 * n + 1)]  # polynomials: entries -> coefficient
        for factor in data["program"]:
            column = _apply_symbols(factor, column)
        for i, found in enumerate(column):
            wanted = {((i % n, j),): 1} if j < n and i < 2 * n else {}
            need(found == wanted, f"the program is wrong at row {i}, column {j}")
    return f"{data['name']}: the program of {len(data['program'])} factors applies any rational {n} x {n} matrix"


def _apply_symbols(factor, column):
    if "scale" in factor:  # x_t becomes M_ij x_t: learning rate 1 + |M_ij|, the gate -1 where M_ij > 0
        t, entry = factor["scale"], tuple(factor["entry"])
        return [{(*k, entry): x for k, x in p.items()} if i == t else p for i, p in enumerate(column)]
    column = [{k: x * Fraction(factor["gate"].get(str(i), 1)) for k, x in p.items()} for i, p in enumerate(column)]
    along: dict = {}
    for i, u in factor["key"].items():
        for k, x in column[int(i)].items():
            along[k] = along.get(k, 0) + x * Fraction(u) * Fraction(factor["gamma"])
    for i, u in factor["key"].items():
        for k, x in along.items():
            column[int(i)][k] = column[int(i)].get(k, 0) - x * Fraction(u)
    return [{k: x for k, x in p.items() if x} for p in column]


def check_example(data):
    """The machine that is certified gives the answers of the example, by direct simulation."""
    word, answers = data["example"]["word"], data["example"]["answers"]
    if data["kind"] == "group":
        now, step = data["group"]["identity"], lambda a, x: data["group"]["rows"][a][x]
        read = lambda x: x  # noqa: E731
    elif data["kind"] == "dfa":
        now, step = data["start"], lambda a, x: data["delta"][x][a]
        read = lambda x: [x, x in data["accept"]]  # noqa: E731
    else:
        matrices = [[[Fraction(x) for x in row] for row in data["matrices"][a]] for a in data["alphabet"]]
        now = [Fraction(x) for x in data["initial"]]
        step = lambda a, p: [sum(x * y for x, y in zip(row, p, strict=True)) for row in matrices[a]]  # noqa: E731
        read = lambda p: str(sum(Fraction(x) * y for x, y in zip(data["final"], p, strict=True)))  # noqa: E731
    for t, (letter, answer) in enumerate(zip(word, answers, strict=True)):
        now = step(letter, now)
        need(read(now) == answer, f"the example is wrong after {t + 1} letters")


def check(data):
    """A sentence that says what the certificate shows; Wrong where it does not."""
    need(data.get("format") == "ckda-certificate-1", "not a certificate of this kind")
    check_example(data)
    return {"group": check_group, "dfa": check_dfa, "wfa": check_wfa}[data["kind"]](data)


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
