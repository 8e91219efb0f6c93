"""What ``ckda track --suite regular`` leaves: one table and one figure, pure functions of its result."""

from pathlib import Path
from statistics import fmean
from typing import Any

from ckda.experiments.common.store import keep_report
from ckda.experiments.regular.run import LENGTHS, RANGE, SOLVED, SuiteResult, SuiteRun, average
from ckda.experiments.regular.tasks import TASKS
from ckda.page import empty_figure, markdown_table, print_table
from ckda.record import write_json, write_text

__all__ = ["print_result", "suite_figure", "table", "timed_alike", "write_report"]

_COLOURS = {
    "ckda": "#16548c",
    "kda": "#9aa5b1",
    "deltaproduct2": "#2f7f4f",
    "gru": "#c8553d",
    "transformer": "#b58900",
    "ckda-2-layers": "#6baed6",
    "ckda-2-factors": "#7a4fa3",
    "deltaproduct4": "#8ab79a",
}

_FEW = ("task", "arm", "seeds with it", "mean, 40 to 256", f"mean, {LENGTHS[-1]}")  # columns of a narrow terminal


def _device(one: SuiteRun) -> str:
    """GPU or CPU, where its milliseconds were taken."""
    return "CPU" if one.environment["device"].startswith("cpu") else "GPU"


def table(result: SuiteResult) -> tuple[list[str], list[list[str]]]:
    """Head and rows, one number a cell: how many seeds have the task, mean and best over 40 to 256, the mean at longer lengths."""
    far = [str(n) for n in LENGTHS if n > RANGE[1]]
    head = [
        "task",
        "arm",
        "layers",
        "parameters",
        "updates",
        "seeds",
        "seeds with it",
        "mean, 40 to 256",
        "best seed",
        *(f"mean, {n}" for n in far),
        "ms an update",
        "trained on",
    ]
    rows = []
    for one in result.runs.values():
        rest = [f"{100 * fmean(one.scores[n]):.1f}" if n in one.scores else "-" for n in far]
        rows.append(
            [
                one.task,
                one.label,
                str(one.layers),
                f"{one.parameters:,}",
                f"{one.recipe['steps']:,}",
                str(len(one.seeds)),
                str(one.solved),
                f"{100 * fmean(one.main):.1f}",
                f"{100 * max(one.main):.1f}",
                *rest,
                f"{one.update_ms:.2f}",
                _device(one),
            ]
        )
    for arm, values in result.to_json()["averages"].items():
        if values is not None:
            label = next(one.label for one in result.runs.values() if one.arm == arm)
            beyond = [average(result, arm, n) for n in far]
            more = ["-" if v is None else f"{v['mean']:.1f}" for v in beyond]
            numbers = [f"{values['mean']:.1f}", f"{values['best']:.1f}", *more, "", ""]
            rows.append(["average of the first four", label, "", "", "", "", "", *numbers])
    return head, rows


def suite_figure(result: SuiteResult) -> Any:
    """One panel a task: scaled accuracy by length, seeds thin and the best one thick. The last panel is the cost."""
    names = [name for name in TASKS if any(one.task == name for one in result.runs.values())]
    timed = timed_alike(result)
    num = len(names) + bool(timed)
    columns = min(3, num)
    rows = -(-num // columns)
    figure = empty_figure(figsize=(4.6 * columns, 3.3 * rows))
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, name in zip(panels, names, strict=False):
        for one in (one for one in result.runs.values() if one.task == name):
            lengths = sorted(int(n) for n in one.scores if n.isdigit())
            best = max(range(len(one.seeds)), key=lambda r: (one.main[r], [one.scores[str(n)][r] for n in lengths]))
            for r in range(len(one.seeds)):
                values = [one.scores[str(n)][r] for n in lengths]
                thick = {"linewidth": 2.2, "label": f"{one.label} ({one.solved}/{len(one.seeds)})"}
                style = thick if r == best else {"linewidth": 0.7, "alpha": 0.5}
                axes.plot(lengths, values, color=_COLOURS[one.arm], zorder=3 if one.arm == "ckda" else 2, **style)
        axes.axvline(RANGE[0], color="#5c6b7a", linewidth=1, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.set(title=name, ylim=(-0.1, 1.06), xlabel="length")
        axes.legend(fontsize=6.5, framealpha=0.8, edgecolor="none").set_zorder(4)
    if timed:
        _draw_cost(panels[len(names)], timed)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[num:]:
        axes.set_axis_off()
    panels[0].set_ylabel("scaled accuracy")
    return figure


def timed_alike(result: SuiteResult) -> list[SuiteRun]:
    """The runs whose milliseconds can be compared: of the tasks on which all arms were timed on one kind of device, those that
    most arms have, on the kind of device that has more of these runs."""
    by_task: dict[str, list[SuiteRun]] = {}
    for one in result.runs.values():
        by_task.setdefault(one.task, []).append(one)
    alike = [runs for runs in by_task.values() if len({_device(one) for one in runs}) == 1]
    most = max(map(len, alike), default=0)
    by_kind: dict[str, list[SuiteRun]] = {}
    for runs in alike:
        if len(runs) == most:
            by_kind.setdefault(_device(runs[0]), []).extend(runs)
    return max(by_kind.values(), key=len, default=[])


def _draw_cost(axes: Any, timed: list[SuiteRun]) -> None:
    """A bar an arm: the mean time of its update on the tasks of these runs, and its mean score on them in words."""
    by_arm: dict[str, list[SuiteRun]] = {}
    for one in timed:
        by_arm.setdefault(one.arm, []).append(one)
    cost = {arm: fmean(one.update_ms for one in runs) for arm, runs in by_arm.items()}
    arms = sorted(cost, key=cost.__getitem__, reverse=True)
    axes.barh(
        [by_arm[arm][0].label for arm in arms], [cost[arm] for arm in arms], color=[_COLOURS[arm] for arm in arms]
    )
    for place, arm in enumerate(arms):
        axes.text(
            cost[arm], place, f" score {fmean(fmean(one.main) for one in by_arm[arm]):.2f}", va="center", fontsize=6.5
        )
    tasks = ", ".join(dict.fromkeys(one.task for one in timed))
    axes.set(title=f"cost on {tasks} ({_device(timed[0])})", xlabel="ms an update of all seeds")
    axes.margins(x=0.2)
    axes.tick_params(axis="y", labelsize=6.5)


def write_report(result: SuiteResult, out: Path) -> None:
    """suite.json, table.md and suite.png."""
    keep_report(out, "suite.json", set(result.runs), ("table.md", "suite.png"))
    write_json(out / "suite.json", result.to_json())
    if result.runs:
        write_text(out / "table.md", markdown_table(*table(result)))
        suite_figure(result).savefig(out / "suite.png", dpi=160, metadata={"Software": None})


def print_result(result: SuiteResult, out: Path) -> None:
    """The table on the terminal, what is absent, and where everything lies."""
    if result.runs:
        strong = [i for i, one in enumerate(result.runs.values()) if one.arm == "ckda"]
        title = f"scaled accuracy in percent (chance is 0); a seed has a task from {100 * SOLVED:g} on"
        if not print_table(title, *table(result), strong, _FEW):
            print(f"All columns: {out / 'table.md'}")
    for name, why in result.absent.items():
        print(f"{name}: {why}")
    print(f"{result.seconds:.0f} s. Figure, table and numbers: {out}")
