"""Imports run one way, from the operator up to the command. Lazy imports inside functions count as well."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ckda"

#: lower rooms first; rooms of one line do not know each other, but for :data:`ACROSS`
ORDER = (
    ("record", "command", "transition", "groups"),
    ("ops",),
    ("layers",),
    ("models",),
    ("train", "page"),
    ("experiments", "lm", "scaling", "theory", "bench", "compat"),
    ("site",),
    ("cli", "docs", "results"),
    ("__main__",),
)
#: room -> rooms of the same line that it may use
ACROSS = {"lm": {"compat", "experiments"}, "groups": {"record"}}
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}

#: inside experiments: the demo is about tracking, and both rooms use what is common
EXPERIMENTS = {"common": set(), "tracking": {"common"}, "audio": {"common"}, "demo": {"common", "tracking"}}


def imported(path: Path) -> list[tuple[int, tuple[str, ...]]]:
    """(line, parts of the name after `ckda`) of every import of ours in a file, wherever it stands."""
    here = path.relative_to(PACKAGE.parent).with_suffix("").parts
    package = here[:-1]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names = [f"{module}.{alias.name}" for alias in node.names]
        found += [(node.lineno, tuple(name.split(".")[1:])) for name in names if name.split(".")[0] == "ckda"]
    return found


def complaint(room: str, used: str) -> str | None:
    """Why `room` may not import `used`, or None."""
    if used == room or used not in LEVEL:  # a name of ckda/__init__.py is the operator's or the layer's
        return None
    if LEVEL[used] > LEVEL[room]:
        return "goes up"
    if LEVEL[used] == LEVEL[room] and used not in ACROSS.get(room, ()):
        return "goes across"
    return None


def wrong(path: Path) -> list[str]:
    """The imports of one file that it must not have."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    out = []
    for line, names in imported(path):
        if not names:
            continue
        why = complaint(parts[0], names[0])
        if why is None and parts[0] == names[0] == "experiments" and len(parts) > 1 and len(names) > 1:
            mine, used = parts[1], names[1]
            if mine in EXPERIMENTS and used in EXPERIMENTS and used != mine and used not in EXPERIMENTS[mine]:
                why = "goes across"
        if why:
            out.append(f"{path.relative_to(PACKAGE.parent)}:{line} imports ckda.{'.'.join(names)}, which {why}")
    return out


def test_every_room_has_its_place() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {"__init__"} <= set(LEVEL)


def test_imports_run_one_way() -> None:
    found = [
        line
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent != PACKAGE or path.stem != "__init__"
        for line in wrong(path)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("room", "used", "expected"),
    [("ops", "layers", "goes up"), ("theory", "lm", "goes across"), ("lm", "compat", None), ("cli", "ops", None)],
)
def test_what_is_complained_of(room: str, used: str, expected: str | None) -> None:
    assert complaint(room, used) == expected


def test_lazy_imports_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "ckda"
    (package / "ops").mkdir(parents=True)
    (package / "ops" / "gate.py").write_text(
        "def f():\n    from ckda.layers import ComplexKDA\n    return ComplexKDA\n"
    )
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.setitem(globals(), "PACKAGE", package)
    assert wrong(package / "ops" / "gate.py") == ["ckda/ops/gate.py:2 imports ckda.layers.ComplexKDA, which goes up"]
