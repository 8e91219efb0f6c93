"""The corpus: copies are dropped, files stay on one side, and the packed tokens come back bit for bit."""

import json
import random

import pytest

from ckda.lm.corpus import Document, Filter, is_held_out, pack, tokenise, unpack
from ckda.lm.data import TokenStore
from ckda.record import write_bytes, write_text


def text(seed: int, words: int = 400) -> str:
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefghij", k=draw.randint(2, 9))) for _ in range(words))


def document(body: str, path: str = "a.txt") -> Document:
    return Document("package", "prose", path, body)


def test_equal_and_near_copies_are_dropped_and_others_kept():
    first, second = text(1), text(2)
    edited = first.replace(first.split()[50], "changed", 1)
    half = " ".join(first.split()[:100]) + " " + text(3)
    sieve = Filter()
    kept = list(sieve(map(document, [first, second, first.upper() + " end", edited, f" {first}\n", half])))
    assert [d.text for d in kept] == [first, second, half]
    assert sieve.dropped == {"equal": 1, "near": 2, "short": 0}


def test_a_long_paragraph_that_stood_before_is_dropped():
    notice = text(5, 60)
    kept = list(Filter()(map(document, [f"{notice}\n\n{text(6)}", f"{notice}\n\n{text(7)}"])))
    assert kept[0].text.startswith(notice)
    assert kept[1].text == text(7)


def test_all_parts_of_a_file_are_on_one_side():
    files = [f"{i}.txt" for i in range(400)]
    held = [name for name in files if is_held_out(document("one", name), 0.25)]
    assert held == [name for name in files if is_held_out(document("two", name), 0.25)]
    assert 60 < len(held) < 140


def test_packed_tokens_come_back(tmp_path):
    splits = {"train": range(8), "held_out": range(8, 10), "out_of_domain": range(10, 12)}
    files = {}
    for name, seeds in splits.items():
        lines = [json.dumps({"text": text(seed)}) for seed in seeds]
        files[name] = write_text(tmp_path / f"{name}.jsonl", "\n".join(lines) + "\n")
    index = tokenise(files, tmp_path / "tokens", "train:300", workers=1)
    assert list(index["splits"]) == list(splits)
    stores = {name: TokenStore(tmp_path / "tokens", name) for name in splits}
    assert [len(store.ends) for store in stores.values()] == [8, 2, 2]
    size = pack(tmp_path / "tokens", tmp_path / "packed")
    assert size == sum(path.stat().st_size for path in (tmp_path / "packed").iterdir())
    with pytest.raises(ValueError, match="it must have at most 10"):
        pack(tmp_path / "tokens", tmp_path / "packed", limit=10)
    assert unpack(tmp_path / "packed", tmp_path / "again")["tokens"] == index["tokens"]
    for name in ("tokenizer.json", *(f"{split}-00000.{kind}" for split in splits for kind in ("bin", "ends"))):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "tokens" / name).read_bytes(), name
    for store in (TokenStore(tmp_path / "again", name) for name in splits):
        store.verify()
    damaged = tmp_path / "packed" / "train-00000.bin.xz"
    other = (tmp_path / "packed" / "held_out-00000.bin.xz").read_bytes()
    write_bytes(damaged, other)
    with pytest.raises(ValueError, match=r"train-00000.bin.xz is damaged"):
        unpack(tmp_path / "packed", tmp_path / "third")
