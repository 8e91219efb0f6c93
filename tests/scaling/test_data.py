"""Tables in: the paper's packaged numbers, users' files, and what is refused."""

import json

import numpy as np
import pytest

from ckda.scaling import (
    Table,
    as_table,
    downstream,
    paper_fits,
    paper_table,
    parameters,
    read_table,
    reference_losses,
)
from ckda.scaling.published import ARMS
from ckda.scaling.table import parse_cell, parse_number

LADDER = {  # size: hidden size, layers, heads (tab:ladder-configs)
    "47M": (384, 12, 6),
    "124M": (576, 18, 9),
    "302M": (896, 20, 14),
    "588M": (1280, 20, 20),
    "983M": (1536, 24, 24),
    "1.7B": (2048, 24, 32),
}
WIDTHS = {  # intermediate sizes (tab:ladder-configs)
    "attention": (1536, 2304, 3584, 5120, 6144, 8192),
    "kda": (1472, 2240, 3520, 4992, 6016, 8064),
    "hybrid": (1408, 2176, 3456, 4928, 5952, 7936),
}


def _kind(arm):
    return "attention" if arm.startswith("Transformer") else "hybrid" if "attn" in arm else "kda"


def _total(kind, size):
    """Parameters of the tied model, counted matrix by matrix."""
    d, layers, heads = LADDER[size]
    inner, width = heads * 64, WIDTHS[kind][list(LADDER).index(size)]
    low_rank = d * 64 + 64 * inner
    kda = 4 * d * inner + low_rank + (low_rank + inner) + d * heads + heads + inner + 64 + 3 * 4 * inner
    mixers = {"attention": [4 * d * inner], "kda": [kda], "hybrid": [kda, kda, kda, 5 * d * inner]}[kind]
    return 50304 * d + d + sum(mixers[i % len(mixers)] + 2 * d + 3 * d * width for i in range(layers))


def test_the_papers_table_is_complete():
    table = paper_table()
    assert table.arms == ARMS
    assert len(table) == 30 * 6
    assert len(set(table.cell)) == 30
    assert sum(table.arm("CKDA").chained) == 2 + 5 + 5 + 4
    assert not table.where(table.match("1.7B/6BT")).chained.any()
    assert table.where(table.match("302M/30BT")).chained.all()
    known = {
        ("Transformer++", "47M/6BT"): 2.9844,
        ("CKDA", "302M/12BT"): 2.4550,
        ("KDA + attn 3:1", "1.7B/50BT"): 2.0971,
    }
    for (arm, cell), loss in known.items():
        arm_table = table.arm(arm)
        assert arm_table.where(arm_table.match(cell)).loss.tolist() == [loss]


def test_losses_fall_with_tokens_in_every_arm():
    """A misread digit would break the order."""
    table = paper_table()
    for arm in ARMS:
        loss = table.arm(arm).loss.reshape(6, 5)
        assert (np.diff(loss, axis=1) < 0).all()
        assert (np.diff(loss, axis=0) < 0).all()


def test_reference_column_and_downstream_averages():
    reference = reference_losses()
    assert len(reference) == 30
    assert [cell for cell, loss in reference.items() if loss is None] == ["1.7B/6BT", "1.7B/12BT", "1.7B/20BT"]
    averages = downstream()
    assert len(averages) == 180
    assert averages["Transformer++", "47M/6BT"] == 37.97
    assert averages["CKDA + attn 3:1", "983M/50BT"] == 54.25


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("size", LADDER)
def test_sizes_are_the_exact_totals_behind_the_printed_millions(arm, size):
    total = parameters()[arm, size]
    assert total == _total(_kind(arm), size)
    assert abs(total - parameters(printed=True)[arm, size]) <= 5001


def test_printed_fits_are_complete():
    fits = paper_fits()
    assert set(fits["tab:scaling-holdout-isolated"]) == set(fits["tab:scaling-holdout-pinned"]) == set(ARMS)
    assert set(fits["tab:scaling-holdout"]) == set(ARMS)
    for arm in ARMS:
        row = fits["tab:scaling-holdout-isolated"][arm]
        for name in ("E", "A", "alpha", "B", "beta", "k"):
            low, high = row[name]["interval"]
            assert low < float(row[name]["printed"]) < high
        measured = paper_table().arm(arm).loss[-1]
        assert float(fits["tab:scaling-holdout"][arm]["measured"]["printed"]) == measured
    assert fits["tab:scaling-holdout-pinned"]["CKDA"]["B"] == {"printed": "6.77e3", "interval": [2560.0, 15600.0]}


ROWS = [{"N": 1e8, "D": 1e9, "loss": 3.2, "group": "a"}, {"N": 1e9, "D": 1e9, "loss": 2.9, "group": "b"}]


def test_csv_json_jsonl_columns_and_frames_give_one_table(tmp_path):
    csv, listed, wrapped, lines = (tmp_path / n for n in ("a.csv", "b.json", "c.json", "d.jsonl"))
    csv.write_text("num_params,tokens,val_loss,arm\n1e8,1e9,3.2,a\n1e9,1e9,2.9,b\n")
    listed.write_text(json.dumps(ROWS))
    wrapped.write_text(json.dumps({"runs": ROWS}))
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    class Frame:  # what the API needs of a DataFrame
        columns = ("N", "D", "loss", "group")

        def to_dict(self, kind):
            assert kind == "records"
            return ROWS

    columns = {key: [row[key] for row in ROWS] for key in ROWS[0]}
    for source in (csv, listed, wrapped, lines, Frame(), columns, ROWS):
        table = as_table(source)
        assert table.N.tolist() == [1e8, 1e9]
        assert table.loss.tolist() == [3.2, 2.9]
        assert table.arms == ("a", "b")
        assert table.cell == ("100M/1BT", "1B/1BT")


def test_a_training_log_gives_its_last_validation(tmp_path):
    log = tmp_path / "run.jsonl"
    lines = [
        {"step": 0, "config": {"num_parameters": 5e7, "arm": "CKDA"}},
        {"step": 10, "tokens": 1e8, "loss": 4.0},
        {"step": 20, "tokens": 2e8, "loss": 3.5, "val_loss": 3.6},
        {"step": 30, "tokens": 3e8, "loss": 3.1, "val_loss": 3.3},
        {"step": 31, "tokens": 3.1e8, "loss": 3.0},
    ]
    log.write_text("\n".join(map(json.dumps, lines)))
    table = read_table([log])
    assert (table.N.tolist(), table.D.tolist(), table.loss.tolist(), table.arms) == ([5e7], [3e8], [3.3], ("CKDA",))
    many = tmp_path / "two.json"
    many.write_text(
        json.dumps({"config": {"num_parameters": 9e7, "arm": "CKDA"}, "result": {"tokens": 1e9, "val_loss": 3.0}})
    )
    assert len(read_table([log, many]).arm("CKDA")) == 2


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("loss", float("nan"), "row 2: loss is nan"),
        ("loss", float("inf"), "row 2: loss is inf"),
        ("loss", -1.0, "row 2: loss is -1"),
        ("N", 0.0, "row 2: N is 0"),
        ("D", -5.0, "row 2: D is -5"),
        ("D", "many", "D is 'many', not a number"),
        ("loss", None, "loss is None, not a number"),
        ("chained", "perhaps", "chained is 'perhaps'"),
    ],
)
def test_impossible_values_are_refused(column, value, message):
    rows = [dict(ROWS[0]), {**ROWS[1], column: value}]
    with pytest.raises(ValueError, match=message):
        as_table(rows)


def test_files_that_are_no_tables_are_refused(tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("{not json")
    other = tmp_path / "x.txt"
    other.write_text("")
    missing = tmp_path / "missing.csv"
    without = tmp_path / "without.csv"
    without.write_text("N,loss\n1,2\n")
    empty = tmp_path / "empty.csv"
    empty.write_text("N,D,loss\n")
    cases = [
        (bad, "bad.json is not json"),
        (other, "unknown kind"),
        (missing, "cannot read"),
        (without, "no column for D"),
        (empty, "no rows"),
    ]
    for path, message in cases:
        with pytest.raises(ValueError, match=message):
            read_table([path])
    with pytest.raises(ValueError, match="differ in length"):
        Table.of(N=[1.0], D=[1.0, 2.0], loss=[1.0])


def test_cells_are_found_by_name_or_by_size():
    table = paper_table()
    assert table.match("1.7B/50BT").sum() == 6
    plain = Table.of(table.N, table.D, table.loss, table.group)
    assert plain.match("1.71B/50B").sum() == 6
    with pytest.raises(ValueError, match="held-out cell '3B/50BT' does not exist; the table has: 47M/6BT"):
        table.match("3B/50BT")
    assert parse_cell("7B/1T") == parse_cell("7e9/1TT") == (7e9, 1e12)
    for text in ("7B", "x/1T", "7B/", "-7B/1T"):
        with pytest.raises(ValueError, match=r"expected SIZE/TOKENS|is not a number|positive"):
            parse_cell(text)
    for text in ("inf", "nan", "1e999", "0", ""):
        with pytest.raises(ValueError, match=r"is not a number|positive"):
            parse_number(text)
