"""The suite: matched sizes, the command from end to end, and what the repository keeps of it."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from ckda.cli import main
from ckda.experiments.regular.model import ARMS, _count, build_model, matched_size
from ckda.experiments.regular.report import print_result, suite_figure, table, timed_alike
from ckda.experiments.regular.run import SuiteConfig, SuiteRun, average, collect, pairs
from ckda.experiments.regular.tasks import PUBLISHED_FOUR, TASKS

KEPT = Path(__file__).parents[3] / "results/regular"


@pytest.mark.parametrize("task", TASKS)
def test_arms_have_as_many_parameters_within_a_tenth(task):
    wanted = _count("ckda", task, matched_size("ckda", task))
    for _, arm in pairs(SuiteConfig(tasks=(task,))):
        assert abs(_count(arm, task, matched_size(arm, task)) / wanted - 1) < 0.1, arm


@pytest.mark.parametrize(("arm", "task"), [("ckda", "arithmetic"), ("ckda-2-factors", "S5"), ("gru", "brackets")])
def test_a_word_in_pieces_is_the_word(arm, task):
    torch.manual_seed(0)
    model = build_model(arm, task).double()
    x, _ = TASKS[task].batch(2, 12, torch.Generator().manual_seed(0))
    first, cache = model.prefill(x[:, :5])
    rest, _ = model.prefill(x[:, 5:], cache)
    torch.testing.assert_close(torch.cat([first, rest], 1), model(x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("arm", ["ckda", "deltaproduct2", "gru", "transformer"])
def test_a_trace_changes_nothing_and_has_every_readout(arm):
    torch.manual_seed(0)
    model, task = build_model(arm, "arithmetic").double(), TASKS["arithmetic"]
    x, y = task.batch(3, 16, torch.Generator().manual_seed(0))
    logits, seen = model(x, trace=True)
    torch.testing.assert_close(logits, model(x), rtol=1e-9, atol=1e-11)
    assert seen["o"].shape[:2] == x.shape
    assert seen["o"].shape[2] == 2 * (matched_size(arm, "arithmetic") if arm in ("ckda", "deltaproduct2") else 1)
    assert task.penalty("closure", {"x": x[None], "o": seen["o"][None]}, y[None]).item() > 0


@pytest.mark.parametrize("task", ["arithmetic", "parity"])
def test_a_first_layer_by_symbol_is_the_layer(task):
    """In float32, where each symbol is projected once, as where every token is: readouts and gradients."""
    torch.manual_seed(0)
    model = build_model("ckda", task)
    x, _ = TASKS[task].batch(3, 16, torch.Generator().manual_seed(0))
    found = []
    for model.by_symbol in (True, False):
        logits, seen = model(x, trace=True)
        torch.testing.assert_close(logits, model(x), rtol=1e-4, atol=1e-5)
        parameters = [p for p in model.parameters() if p.requires_grad]
        found.append((logits, seen["o"], *torch.autograd.grad(logits.square().sum(), parameters)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * b.abs().max().item())


def term(word):
    """The product at the end of a word, with the sign before it; after + and - 1 and -1."""
    start = max((t for t, letter in enumerate(word) if letter in (5, 6)), default=-1)
    text = "".join("01234+-*"[letter] for letter in word[max(start, 0) :])
    return eval(f"{text}1" if word[-1] > 4 else text) % 5


def test_the_closure_penalty_is_zero_where_readouts_are_functions_of_what_they_mean():
    """Arithmetic, first layer: of letter and product; second layer: after + and - of letter and answer."""
    task = TASKS["arithmetic"]
    x, y = task.batch(8, 40, torch.Generator().manual_seed(0))
    x, y = x[None], y[None]
    letters = x[:, :, 1:]
    settled = task.settled(letters)
    assert set(letters[settled].tolist()) == {5, 6}
    first, second = (task.meaning(layer, letters, y) for layer in range(2))
    assert torch.equal(second >= 0, settled)
    asked = [[letter * 5 + term(word[: t + 1]) for t, letter in enumerate(word)] for word in letters[0].tolist()]
    assert first.tolist() == [asked]
    assert len(first.unique()) == 5 * 5 - 4 + 1 + 1 + 5, "0 makes every product 0; + and - leave 1 and -1"
    table = torch.randn(64, 2, 3)  # of one head a layer
    o = torch.randn(1, 8, 41, 2, 3)
    for layer, label in enumerate((first, second)):
        o[:, :, 1:, layer] = torch.where((label >= 0)[..., None], table[label.clamp_min(0), layer], o[:, :, 1:, layer])
    assert task.penalty("closure", {"x": x, "o": o}, y).item() < 1e-12
    assert task.penalty("closure", {"x": x, "o": o.flip(-2)}, y).item() > 1e-3
    grown = o * torch.linspace(1, 2, 41).view(1, 1, -1, 1, 1)
    assert task.penalty("closure", {"x": x, "o": grown}, y).item() > 1e-3
    with pytest.raises(ValueError, match="there is 'closure'"):
        task.penalty("turns", {"x": x, "o": o}, y)


def test_the_command_trains_scores_and_goes_on(tmp_path, capsys):
    command = [
        "track",
        "parity",
        "recall",
        "--suite",
        "regular",
        "--smoke",
        "--seeds",
        "2",
        "--mixer",
        "ckda,transformer",
    ]
    command += ["--device", "cpu", "--out", str(tmp_path)]
    assert main(command) == 0
    runs = json.loads((tmp_path / "suite.json").read_text())["runs"]
    assert set(runs) == {f"{task}-{arm}+smoke" for task in ("parity", "recall") for arm in ("ckda", "transformer")}
    for one in runs.values():
        assert all(len(values) == 2 and all(-1.1 <= v <= 1 for v in values) for values in one["scores"].values())
    stamp = (tmp_path / "runs/parity-ckda+smoke.json").stat().st_mtime_ns
    assert main(command) == 0
    assert (tmp_path / "runs/parity-ckda+smoke.json").stat().st_mtime_ns == stamp
    assert (tmp_path / "suite.png").stat().st_size > 0
    assert "ms an update" in (tmp_path / "table.md").read_text()


def test_a_record_without_its_weights_is_not_trained_again(tmp_path):
    words = [
        "track",
        "parity",
        "--suite",
        "regular",
        "--mixer",
        "ckda",
        "--smoke",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    assert main([*words, "--seeds", "2"]) == 0
    files = [tmp_path / f"runs/parity-ckda+smoke.{end}" for end in ("json", "pt")]
    before = files[0].read_bytes()
    files[1].unlink()
    assert main([*words, "--seeds", "2"]) == 0
    assert not files[1].exists()
    assert main([*words, "--seeds", "1"]) == 2
    assert files[0].read_bytes() == before


def test_an_unknown_task_is_named(tmp_path, capsys):
    assert main(["track", "majority", "--suite", "regular", "--out", str(tmp_path)]) == 2
    assert "task majority: there is none; there are parity" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--recipe", "paper"],
            "--recipe: no effect with --suite regular, which reads --out, .*--mixer, .*--steps, --batch",
        ),
        (["--lengths", "8", "--words", "256"], "--lengths, --words: no effect with --suite regular, which"),
        (["--momentum", "0.9", "--lr-muon", "1", "--lr-adamw", "1"], "--momentum, --lr-muon, --lr-adamw: no effect"),
        (["--from", "x.pt", "--by-token"], "--from, --by-token: no effect"),
        (
            ["--smoke", "--steps", "8", "--batch", "2"],
            "--steps, --batch: no effect with --suite regular --smoke, which",
        ),
        (["--trained-at", "abc"], "--trained-at: no effect with --suite regular, which reads .*--collect"),
        (
            ["--collect", "x", "--mixer", "gru"],
            "--mixer: no effect .*--collect, which reads --out, --json, --trained-at$",
        ),
        (
            ["--mixer", "gru,rwkv7"],
            "--suite regular --mixer rwkv7: there is none; there are ckda, kda, .*deltaproduct4$",
        ),
    ],
)
def test_what_a_suite_does_not_read_is_refused(words, told, tmp_path, assert_refused):
    assert_refused(
        ["track", "parity", "--suite", "regular", "--device", "cpu", "--out", str(tmp_path / "out"), *words], told
    )
    assert not (tmp_path / "out").exists()


def test_help_names_the_arms_of_the_suite(capsys):
    with pytest.raises(SystemExit):
        main(["track", "--help"])
    assert f"arms of --suite regular: {', '.join(ARMS)}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("columns", "all_of_them"), [(80, False), (300, True)])
def test_a_narrow_terminal_has_the_scores_too(columns, all_of_them, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    result = collect([KEPT])
    head, rows = table(result)
    wanted = head[2:] if all_of_them else ["seeds with it", "mean, 40 to 256", "mean, 2048"]
    print_result(result, KEPT)
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith(" parity")]
    for line, row in zip(lines, rows[:5], strict=True):
        assert line.split()[-len(wanted) :] == [row[head.index(name)] for name in wanted]
    assert (f"All columns: {KEPT / 'table.md'}" in printed) != all_of_them


def test_averages_are_those_of_the_four_published_tasks():
    result = collect([KEPT])
    for arm in ("ckda", "gru"):
        by_task = [result.runs[f"{task}-{arm}"].main for task in PUBLISHED_FOUR]
        assert average(result, arm) == pytest.approx(
            {
                "mean": 25 * sum(sum(scores) / len(scores) for scores in by_task),
                "best": 25 * sum(max(scores) for scores in by_task),
            }
        )


def test_kept_records_are_read_drawn_and_tabled():
    result = collect([KEPT])
    panels = [title for axes in suite_figure(result).axes if (title := axes.get_title())]
    there = {one.task for one in result.runs.values()}
    assert panels == [*(name for name in TASKS if name in there), "cost on S5 (GPU)"]
    head, rows = table(result)
    assert all(len(row) == len(head) for row in rows)
    text = (KEPT / "table.md").read_text()
    assert all(f"| {' | '.join(row)} |" in text for row in rows)
    for name, one in result.runs.items():
        assert SuiteRun.from_json(asdict(one)) == one
        assert name.startswith(f"{one.task}-{one.arm}")
        assert one.arm in ARMS
        assert len(one.seeds) == 5


def test_milliseconds_are_compared_on_one_kind_of_device():
    result = collect([KEPT])
    timed = timed_alike(result)
    assert {one.environment["device"] for one in timed} == {"cuda (NVIDIA H200)"}
    assert {one.task for one in timed} == {"S5"}
    assert {one.arm for one in timed} == set(ARMS)
    assert timed_alike(replace(result, runs={})) == []


def test_the_readme_has_the_table_and_its_counts():
    text, result = (KEPT / "README.md").read_text(), collect([KEPT])
    assert (KEPT / "table.md").read_text() in text
    told = " ".join(text.split())
    mean = average(result, "ckda")
    assert f"Complex KDA has {mean['mean']:.1f} on average" in told
    for name, words in {
        "cycle-deltaproduct2": "cycle navigation on {} of 5 seeds",
        "S5-ckda-2-factors": "two Complex KDA factors {} of 5",
        "S5-deltaproduct4": "DeltaProduct_4 {}",
    }.items():
        assert words.format(result.runs[name].solved) in told


def test_the_four_published_tasks_have_every_arm_by_the_present_protocol():
    """Scored under what is trained now, and of equal size."""
    result = collect([KEPT])
    for task in PUBLISHED_FOUR:
        runs = [result.runs[f"{task}-{arm}"] for arm in ("ckda", "kda", "deltaproduct2", "gru", "transformer")]
        sizes = [one.parameters for one in runs]
        assert max(sizes) <= 1.1 * min(sizes)
        assert {one.recipe["steps"] for one in runs} == {TASKS[task].updates}
        assert {tuple(one.recipe["switches"]) for one in runs} == {TASKS[task].switches(TASKS[task].updates)}


def test_what_the_guide_says_in_short():
    text, result = " ".join((KEPT.parents[1] / "docs/regular.md").read_text().split()), collect([KEPT])
    whole, far = average(result, "ckda"), average(result, "ckda", "2048")
    solved = sum(result.runs[f"{task}-ckda"].solved for task in PUBLISHED_FOUR)
    assert f"Complex KDA has {whole['mean']:.1f} on average over five seeds, and {solved} of 20 seeds" in text
    assert f"at 2048 letters, fifty times the training length, {far['mean']:.1f} on average" in text
    others = [f"{average(result, arm)['mean']:.1f}" for arm in ("gru", "deltaproduct2")]
    assert "The GRU has {} by the same protocol, DeltaProduct_2 {}".format(*others) in text
