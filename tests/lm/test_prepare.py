"""Text to token shards: round trip, resumption, broken records, damage."""

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckda.lm.data import Sampler, TokenStore, shuffled
from ckda.lm.prepare import BrokenRecord, OtherTokens, Preparation, load_tokenizer, prepare

OPTIONS = {"tokenizer": "train:300", "held_out": 0.0, "workers": 1}


def texts_of(folder: Path, split: str = "train") -> list[str]:
    """Every document of a split, decoded from its tokens."""
    store, tokenizer = TokenStore(folder, split), load_tokenizer(str(folder))
    starts = [0, *store.ends[:-1].tolist()]
    return [
        tokenizer.decode(store.read(a, b - a - 1).tolist()) for a, b in zip(starts, store.ends.tolist(), strict=True)
    ]


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".bin", ".ends")}


def test_documents_come_back_from_every_kind_of_file(tmp_path: Path) -> None:
    from pyarrow import Table, parquet

    source = tmp_path / "in"
    source.mkdir()
    (source / "a.txt").write_text("plain words, ünïcode too\nand a second line")
    (source / "b.jsonl").write_text(json.dumps({"text": "from json"}) + "\n\n" + json.dumps({"text": "again"}) + "\n")
    (source / "c.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": "zipped"}).encode()))
    (source / "d.jsonl.xz").write_bytes(lzma.compress(json.dumps({"text": "squeezed"}).encode()))
    parquet.write_table(Table.from_pydict({"text": ["from parquet", "more"], "other": [1, 2]}), source / "e.parquet")
    (source / "ignored.png").write_bytes(b"\x89PNG")
    index = prepare([str(source)], tmp_path / "out", Preparation(**OPTIONS))
    assert texts_of(tmp_path / "out") == [
        "plain words, ünïcode too\nand a second line",
        "from json",
        "again",
        "zipped",
        "squeezed",
        "from parquet",
        "more",
    ]
    store = TokenStore(tmp_path / "out")
    assert all(int(store.read(int(end) - 1, 1)[0]) == index["end_token"] for end in store.ends)
    assert index["counts"]["broken"] == 0


def test_workers_do_not_change_the_shards(corpus: Path, tmp_path: Path) -> None:
    options = OPTIONS | {"held_out": 0.2, "piece_bytes": 3000, "shard_tokens": 2000}
    prepare([str(corpus)], tmp_path / "one", Preparation(**options))
    prepare([str(corpus)], tmp_path / "two", Preparation(**options | {"workers": 2}))
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert len(files(tmp_path / "one")) >= 6


def test_interrupted_and_resumed_gives_the_same_shards(corpus: Path, tmp_path: Path) -> None:
    options = Preparation(**OPTIONS | {"held_out": 0.2, "piece_bytes": 2000, "shard_tokens": 1200})
    prepare([str(corpus)], tmp_path / "whole", options)
    pieces: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        prepare([str(corpus)], tmp_path / "broken", options, lambda *seen: pieces.append(1), lambda: len(pieces) == 5)
    done = json.loads((tmp_path / "broken" / "progress.json").read_text())["counts"]["pieces"]
    assert done == 5
    seen: list[int] = []
    prepare([str(corpus)], tmp_path / "broken", options, lambda counts, *_: seen.append(counts["pieces"]))
    assert seen[0] == done + 1
    for split in ("train", "held_out"):
        assert texts_of(tmp_path / "broken", split) == texts_of(tmp_path / "whole", split)
    assert not (tmp_path / "broken" / "progress.json").exists()


def test_a_finished_preparation_is_not_repeated(corpus: Path, tmp_path: Path) -> None:
    options = Preparation(**OPTIONS)
    first = prepare([str(corpus)], tmp_path, options)
    calls: list[Any] = []
    assert prepare([str(corpus)], tmp_path, options, lambda *a: calls.append(a)) == first
    assert not calls
    (tmp_path / "train-00000.bin").unlink()  # what is damaged is made again
    assert prepare([str(corpus)], tmp_path, options, lambda *a: calls.append(a))["splits"] == first["splits"]
    assert calls


def test_an_unfinished_preparation_of_other_settings_is_not_replaced(corpus: Path, tmp_path: Path) -> None:
    options = OPTIONS | {"piece_bytes": 2000, "shard_tokens": 1200}
    with pytest.raises(KeyboardInterrupt):
        prepare([str(corpus)], tmp_path, Preparation(**options), stop=lambda: (tmp_path / "train-00000.bin").exists())
    before = files(tmp_path)
    assert before
    with pytest.raises(OtherTokens, match="unfinished tokens of another kind: seed is 0 there and 1 here"):
        prepare([str(corpus)], tmp_path, Preparation(**options | {"seed": 1}))
    assert files(tmp_path) == before


def test_broken_records_are_counted_and_fatal_if_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = json.dumps({"text": "good one"}).encode()
    lines = [
        good,
        b'{"text": "cut',
        b'{"words": "x"}',
        b'{"text": 3}',
        b'{"text": "  "}',
        b'{"text": "\xff\xfe"}',
        good,
    ]
    source = tmp_path / "a.jsonl"
    source.write_bytes(b"\n".join(lines) + b"\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(good * 50)[:-20])
    index = prepare([str(source), str(tmp_path / "b.jsonl.gz")], tmp_path / "out", Preparation(**OPTIONS))
    assert index["counts"]["broken"] == 6
    assert index["counts"]["documents"] == 2
    rows = [json.loads(line) for line in (tmp_path / "out" / "broken.jsonl").read_text().splitlines()]
    assert [row["place"] for row in rows[:2]] == ["a.jsonl:2", "a.jsonl:3"]
    assert "no field 'text'" in rows[1]["why"]
    assert "skipped a.jsonl:2" in capsys.readouterr().err
    with pytest.raises(BrokenRecord, match=r"a\.jsonl:2"):
        prepare([str(source)], tmp_path / "strict", Preparation(**OPTIONS | {"strict": True}))


def test_copies_of_a_text_are_on_one_side_of_the_split(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"document number {i % 20}"}) for i in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", Preparation(**OPTIONS | {"held_out": 0.4}))
    train, held_out = set(texts_of(tmp_path / "out")), set(texts_of(tmp_path / "out", "held_out"))
    assert train
    assert held_out
    assert not train & held_out


def test_damage_is_found(tokens: Path, tmp_path: Path) -> None:
    for path in tokens.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    TokenStore(tmp_path).verify()
    data = bytearray((tmp_path / "train-00000.bin").read_bytes())
    data[10] ^= 1
    (tmp_path / "train-00000.bin").write_bytes(data)
    with pytest.raises(ValueError, match=r"train-00000\.bin is damaged"):
        TokenStore(tmp_path).verify()
    (tmp_path / "train-00000.bin").write_bytes(data[:-2])
    with pytest.raises(ValueError, match="should have"):
        TokenStore(tmp_path)
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(ValueError, match="no index of tokens"):
        TokenStore(tmp_path)


def test_what_cannot_be_prepared_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        prepare([str(tmp_path / "none")], tmp_path / "out", Preparation(**OPTIONS))
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="no document"):
        prepare([str(tmp_path / "empty.txt")], tmp_path / "out", Preparation(**OPTIONS))
    with pytest.raises(ValueError, match="is not there"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="held_out is 1"):
        Preparation(tokenizer="x", held_out=1)


@given(num=st.integers(1, 700), seed=st.integers(0, 2**40))
def test_the_order_is_a_permutation(num: int, seed: int) -> None:
    assert sorted(shuffled(np.arange(num), num, seed).tolist()) == list(range(num))


def test_orders_of_epochs_and_seeds_differ(tokens: Path) -> None:
    data = Sampler(TokenStore(tokens), 16, seed=0)
    first, second = data.windows(np.arange(len(data))), data.windows(np.arange(len(data)) + len(data))
    assert sorted(first) == sorted(second) == list(range(len(data)))
    assert (first != second).any()
    assert (first != Sampler(TokenStore(tokens), 16, seed=1).windows(np.arange(len(data)))).any()
    assert (np.diff(first) != 1).mean() > 0.9


def test_reading_crosses_shards(tokens: Path) -> None:
    store = TokenStore(tokens)
    assert len(store.shards) > 1
    whole = np.concatenate([np.fromfile(tokens / shard["file"], store.dtype) for shard in store.shards])
    edge = store.shards[0]["tokens"]
    np.testing.assert_array_equal(store.read(edge - 5, 10), whole[edge - 5 : edge + 5])
    with pytest.raises(ValueError, match="were asked for"):
        store.read(len(store) - 1, 2)


def test_a_hugging_face_dataset_is_streamed(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "data").mkdir()
    rows = [{"body": "first document"}, {"body": None}, {"body": "third"}]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = Preparation(**OPTIONS | {"field": "body"})
    index = prepare([f"hf:{tmp_path / 'data'}:train"], tmp_path / "out", options)
    assert texts_of(tmp_path / "out") == ["first document", "third"]
    assert index["counts"]["broken"] == 1
