"""Our own ladder by units: branches in memory are the runs themselves, calls resume by unit, records merge into tables and fits."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckda.lm import units as module
from ckda.lm.models import config_of
from ckda.lm.paired import cells, collect, differences, interval, noise, training_gaps
from ckda.lm.parallel import World
from ckda.lm.recipe import Recipe
from ckda.lm.studies import BASE, CELL, FACTORS, MOST, STUDIES, best_settings, plan, study
from ckda.lm.tiny import tiny_tokens
from ckda.lm.train import NotFinite, Trainer
from ckda.lm.units import Conditions, OutOfTime, Unit, done_in, evaluate_on, read_units, run_all, run_unit
from ckda.models import ComplexKDAForCausalLM
from ckda.models.ladder import OWN, build, num_parameters
from ckda.record import read_json, write_json
from ckda.scaling.commands import Effort
from ckda.scaling.commands.fit import Config
from ckda.scaling.commands.fit import run as fit


@pytest.fixture(scope="module")
def at(tmp_path_factory) -> Conditions:
    data = tiny_tokens(tmp_path_factory.mktemp("units") / "tokens")
    return Conditions(str(data), dtype="fp32", eval_tokens=256, look_sequences=1, look_sample=1, tests=2)


UNIT = Unit("one", "tiny:ckda", "A", 3, (640, 1280), lr=1e-2, batch=2, length=32, warmup=3, looks=1)


def straight(unit: Unit, budget: int, at: Conditions, out: Path) -> float:
    """The held-out loss of the same run without a trunk."""
    steps = budget // unit.tokens_per_step
    recipe = Recipe(
        steps,
        unit.length,
        unit.batch,
        lr=unit.lr,
        warmup=unit.warmup,
        seed=unit.seed,
        dtype="fp32",
        eval_tokens=at.eval_tokens,
    )
    config = config_of(unit.model)
    trainer = Trainer(lambda: ComplexKDAForCausalLM(config), at.data, recipe, out, World(0, 1, torch.device("cpu")))
    batches = trainer.batches(0, steps)
    for _ in range(steps):
        trainer.update(batches)
    return evaluate_on(trainer, "held_out")


def test_every_cooldown_is_the_run_of_its_budget(at, tmp_path):
    found = run_unit(UNIT, at)
    assert [cell["budget"] for cell in found["cells"]] == [640, 1280]
    for cell in found["cells"]:
        assert cell["held_out"] == round(straight(UNIT, cell["budget"], at, tmp_path), 6)
    assert [look["tokens"] for look in found["looks"]] == [0, 8 * 64]
    assert found["cells"][-1]["look"]["tokens"] == 1280
    assert len(found["curve"]["loss"]) == 16  # the trunk ends at 0.8 of the largest budget
    assert found["eager_because"] == "the device is cpu"


def test_the_time_limit_leaves_units_and_a_kill_loses_only_the_one_under_way(at, tmp_path, monkeypatch):
    todo = [replace(unit, budgets=(128, 256), looks=0) for unit in study("toy")[:3]]
    assert run_all(todo, at, tmp_path, limit=0.0) == (None, [unit.name for unit in todo])
    assert list(tmp_path.iterdir()) == []

    def kill_at_the_second(text: str) -> None:
        if text.startswith("2/3"):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        run_all(todo, at, tmp_path, say=kill_at_the_second)
    have = read_units([tmp_path])
    assert [one["unit"]["name"] for one in have] == [todo[0].name]
    file, left = run_all(todo, at, tmp_path, have)
    assert left == []
    assert len(list(tmp_path.glob("units-*.json"))) == 2
    again = read_units([tmp_path])
    assert {one["unit"]["name"] for one in again} == {unit.name for unit in todo}
    assert file.stat().st_size < 1_000_000
    assert run_all(todo, at, tmp_path, again) == (None, [])
    with pytest.raises(ValueError, match=f"another unit {todo[0].name}: lr differ"):
        done_in([replace(todo[0], lr=0.5)], again)
    monkeypatch.setattr(module, "estimate", lambda unit: 0.0)  # a unit that was thought to fit
    with pytest.raises(OutOfTime):
        run_unit(replace(UNIT, seed=5), at, deadline=time.monotonic())


def test_calls_side_by_side_write_records_of_their_own(at, tmp_path, monkeypatch):
    """They may begin them in the same second."""
    monkeypatch.setattr(module, "run_unit", lambda unit, *others: {"unit": unit.as_json(), "seconds": 1.0})
    monkeypatch.setattr(module.time, "strftime", lambda *about: "20260101T000000")
    units = study("toy")[:2]
    for process, unit in enumerate(units):
        monkeypatch.setattr(module.os, "getpid", lambda process=process: process)
        monkeypatch.setattr(Path, "exists", lambda path: False)  # both look before either writes
        run_all([unit], at, tmp_path)
    monkeypatch.undo()
    assert [one["unit"]["name"] for one in read_units([tmp_path])] == [unit.name for unit in units]


def test_a_toy_ladder_through_to_the_fit_and_the_figure(at, tmp_path):
    units = [replace(unit, looks=0) for unit in study("toy")]
    first, left = run_all(units[:5], at, tmp_path / "a")
    second, left = run_all(units, at, tmp_path / "b", read_units([first]))
    assert left == []
    out = tmp_path / "results"
    written = {path.name for path in collect(read_units([first, second]), out)}
    assert written == {
        "units.json",
        "differences.json",
        "cells.csv",
        "table.md",
        "ladder.png",
        "advantage.png",
        "gap.png",
        "layers-ckda.png",
        "gates.png",
    }
    merged = read_units([out / "units.json"])
    assert cells(merged) == (out / "cells.csv").read_text()
    found = differences(merged)
    assert [(d.rung, d.budget, d.seeds) for d in found] == [(r, b, [0, 1]) for r in "AB" for b in (320, 640)]
    assert noise(merged) > 0
    chosen = Config(
        str(tmp_path / "fit"),
        (str(out / "cells.csv"),),
        form="chinchilla",
        E="1",
        offset="none",
        hold_out=("B/0.00064MT",),
        effort=Effort(starts=20, bootstrap=0),
    )
    result = fit(chosen)
    assert set(result.fit.arms) == {"kda", "ckda"}
    assert all(len(arm.held_out) == 2 for arm in result.fit.arms.values())
    other = read_json(second)
    other["data"]["train_sha256"] = ["x"]
    write_json(tmp_path / "other.json", other)
    with pytest.raises(ValueError, match="was trained on other tokens"):
        collect(read_units([first, tmp_path / "other.json"]), out)


def test_a_unit_that_diverges_is_told_and_the_others_go_on(at, tmp_path, monkeypatch):
    def diverge(unit, *others):
        if unit.seed == 0:
            raise NotFinite("update 3: the loss is nan")
        return {"unit": unit.as_json(), "seconds": 1.0}

    monkeypatch.setattr(module, "run_unit", diverge)
    todo = study("toy")[:2]
    file, left = run_all(todo, at, tmp_path)
    assert left == [todo[0].name]
    written = read_json(file)
    assert written["failed"] == [{"unit": todo[0].name, "why": "update 3: the loss is nan"}]
    assert [one["unit"]["name"] for one in written["units"]] == [todo[1].name]


def record(arm: str, seed: int, loss: float, label: str = "") -> dict:
    look = {
        "tokens": 1,
        "layers": [0, 1],
        "negative_gates": [0.0, 0.1],
        "beta_above_1": [0.5, 0.5],
        "complex": [0.0, 0.0],
    }
    unit = replace(UNIT, name=f"{arm}{seed}{label}", model=f"tiny:{arm}", seed=seed, budgets=(10,), label=label)
    curve = {"tokens": [1], "loss": [1.0], "grad_norm": [0.5], "grad_norm_max": [0.9]}
    data = {"tokens": {}, "train_sha256": ["a"]}
    cell = {"tokens": 10, "budget": 10, "held_out": loss, "look": look}
    return {"unit": unit.as_json(), "parameters": 5, "cells": [cell], "curve": curve, "looks": [], "data": data}


def test_paired_differences_of_known_numbers():
    """Differences .1, .2, .3: mean .2, standard deviation .1, t(.975, 2) = 4.30265."""
    kda, ckda = [3.0, 3.5, 4.0], [3.1, 3.7, 4.3]
    records = [record("kda", s, loss) for s, loss in enumerate(kda)] + [
        record("ckda", s, loss) for s, loss in enumerate(ckda)
    ]
    (found,) = differences(records)
    assert found.mean == pytest.approx(0.2)
    assert found.high == pytest.approx(0.2 + 4.30265 * 0.1 / 3**0.5, abs=1e-5)
    assert found.low == pytest.approx(0.2 - 4.30265 * 0.1 / 3**0.5, abs=1e-5)
    assert noise(records) == pytest.approx(((0.25 + 0.36) / 2) ** 0.5)
    assert interval([1.5]) == (1.5, None, None)
    unpaired = differences([record("kda", 0, 3.0), record("ckda", 1, 3.1)])
    assert unpaired == []


def test_a_study_of_factors_is_told_as_a_table(tmp_path):
    records = [
        record(arm, s, 3.0 + 0.1 * (arm == "ckda") * (label == "base") + 0.01 * s, label)
        for arm in ("kda", "ckda")
        for s in range(2)
        for label in ("base", "x")
    ]
    names = [path.name for path in collect(records, tmp_path)]
    assert names == ["units.json", "factors.md", "gates.png"]
    table = (tmp_path / "factors.md").read_text()
    assert "| base | CKDA | 2 | 3.1050 | +0.1000 | +0.1000 | +0.1000 | 0.500 | 0.90 | 5.00 | 50.00 |" in table
    assert "| x | CKDA | 2 | 3.0050 | +0.0000 |" in table


def test_the_base_of_the_factors_may_come_from_the_ladder(tmp_path):
    """Of the ladder's units those of the size and the budgets that were changed, and no others."""
    other = record("kda", 0, 9.0)
    other["unit"]["rung"] = "47M"
    collect(
        [record("kda", 0, 3.0), other, record("ckda", 0, 3.1), record("ckda-half", 0, 3.2, "beta from 0.5")], tmp_path
    )
    table = (tmp_path / "factors.md").read_text()
    assert "| base | CKDA | 1 | 3.1000 | +0.1000 |" in table
    assert "| beta from 0.5 | ckda-half | 1 | 3.2000 | +0.2000 |" in table
    assert "9.0" not in table


def test_the_gap_along_the_trunk_is_paired_by_seed():
    """Only seeds that both arms have, in pieces of the curve."""

    def trained(arm, seed, losses):
        return record(arm, seed, 1.0) | {"curve": {"tokens": [1, 2, 3, 4], "loss": losses}}

    records = [trained("kda", 0, [4, 3, 2, 1]), trained("ckda", 0, [4, 4, 3, 1]), trained("ckda", 1, [9, 9, 9, 9])]
    (gap,) = training_gaps(records, pieces=2).values()
    assert gap == [(1.5, [0.5]), (3.5, [0.5])]


def test_studies_are_what_the_issue_asks_for():
    for name in STUDIES:
        if name != "toy":
            rows = plan(study(name), set())
            assert max(row["seconds"] for row in rows) <= MOST
            assert len({row["unit"] for row in rows}) == len(rows)
    ladder = study("ladder")
    assert {unit.rung for unit in ladder} == {size.removeprefix("own-") for size in OWN}
    for rung, seeds in (("12M", 8), ("47M", 3)):
        for arm in ("kda", "ckda"):
            assert sorted(u.seed for u in ladder if (u.rung, u.arm) == (rung, arm)) == list(range(seeds))
    assert {u.rung for u in ladder if u.arm.endswith("-hybrid")} == {"47M"}
    assert sum(row["seconds"] for row in plan(ladder, set())) < 90 * 60
    assert {u.seed for u in study("factors")} == {0, 1, 2}
    assert {u.label or BASE for u in study("factors")} == set(FACTORS)
    known = {u.name: u.as_json() for u in study("ladder", budgets=CELL)}
    base = {u.name: u.as_json() for u in study("factors") if not u.label}
    assert len(base) == 6
    assert all(known[name] == unit for name, unit in base.items()), "the ladder's records are the base"
    sweep = [
        {"unit": u.as_json(), "cells": [{"held_out": 4.0 + abs(u.lr - 1e-3) + (u.batch == 16)}]} for u in study("sweep")
    ]
    settings = best_settings(sweep)
    assert settings == {size.removeprefix("own-"): (1e-3, 32) for size in OWN}
    assert all((u.lr, u.batch) == (1e-3, 32) for u in study("ladder", settings))
    warmed = {u.warmup * u.batch for u in study("sweep") + study("ladder") + study("ladder", settings)}
    assert warmed == {200 * 16}  # sequences
    with pytest.raises(ValueError, match="would take"):
        plan([replace(ladder[0], budgets=(10**10,))], set())


def test_the_guide_and_the_estimates_say_what_the_code_and_the_record_do():
    root = Path(__file__).parents[2]
    guide = (root / "docs" / "lm.md").read_text()
    for name in ("sweep", "factors", "ladder", "tracking"):
        rows = plan(study(name), set())
        minutes = round(sum(row["seconds"] for row in rows) / 60)
        (line,) = [line for line in guide.splitlines() if line.startswith(f"| `{name}` | {len(rows)} |")]
        assert line.endswith(f"| {minutes} |"), (line, minutes)
    for size in OWN:
        config = build(size, "ckda")
        total = num_parameters(config) / 1e6
        assert num_parameters(build(size, "kda")) / 1e6 == total
        assert f"| `{size}` | {config.num_hidden_layers} | {config.hidden_size} | {total:.2f} M |" in guide
    variant = read_json(root / "results" / "lm" / "profile.json")["variants"]["ckda"]
    best = max(variant["tokens_per_second"], *variant["rounds_tokens_per_second"])
    assert abs(module.MEASURED["tokens_per_second"] / best - 1) < 0.01
    recorded = build("47M", "ckda")
    assert (recorded.num_hidden_layers, recorded.hidden_size, recorded.vocab_size) == tuple(
        module.MEASURED[name] for name in ("layers", "width", "vocabulary")
    )


def test_final_states_are_told_by_arm_kind_and_length(tmp_path):
    records = [record(arm, seed, 3.0) for arm in ("kda", "ckda") for seed in range(2)]
    for one, right in zip(records, (0.1, 0.3, 0.8, 1.0), strict=True):
        one["cells"][0]["programs"] = {"shell": {"1x": 1.0, "4x": right}}
    assert "programs.md" in [path.name for path in collect(records, tmp_path)]
    table = (tmp_path / "programs.md").read_text().splitlines()
    assert table[0] == "| arm | program | seeds | exact at 1x, % | exact at 4x, % |"
    assert table[2:] == ["| KDA | shell | 2 | 100.0 | 20.0 |", "| CKDA | shell | 2 | 100.0 | 90.0 |"]


def test_a_unit_in_bfloat16_is_looked_at_in_bfloat16(at):
    """Counts of gates and learning rates are those of float32 but for rounding."""
    half = run_unit(replace(UNIT, budgets=(128,), looks=0), replace(at, dtype="bf16"))
    full = run_unit(replace(UNIT, budgets=(128,), looks=0), at)
    for one, other in zip(half["looks"], full["looks"], strict=True):
        assert one["alpha_median"] == pytest.approx(other["alpha_median"], abs=0.02)
        assert one["beta_above_1"] == pytest.approx(other["beta_above_1"], abs=0.2)
        assert one["complex"] == other["complex"]
    assert half["cells"][0]["held_out"] == pytest.approx(full["cells"][0]["held_out"], abs=0.05)
