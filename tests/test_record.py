"""Results are written whole, read back as they were, and refused when damaged."""

import errno
import json
import os
from pathlib import Path

import pytest

from ckda.record import environment, read_json, set_aside, write_bytes, write_json, write_record, write_text


def test_what_is_written_is_read(tmp_path: Path) -> None:
    value = {"loss": [1.5, None], "name": "β", "n": 3, "nested": {"ok": True}}
    path = write_json(tmp_path / "new" / "folder" / "result.json", value)
    assert read_json(path) == value
    assert path.read_text().endswith("}\n")
    assert write_text(tmp_path / "a.txt", "β").read_bytes() == "β".encode()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_lacks_are_refused(number: float, tmp_path: Path) -> None:
    path = write_json(tmp_path / "result.json", {"loss": 1.0})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"loss": number})
    assert read_json(path) == {"loss": 1.0}


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_bytes(tmp_path / "result.bin", b"old")

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="full"):
        write_bytes(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_never_sees_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the rename the old file is there, and the new one is complete under another name in the same folder."""
    path = write_bytes(tmp_path / "result.bin", b"old")
    seen = []
    replace = os.replace

    def watch(source: str | Path, target: str | Path) -> None:
        seen.append((Path(source).parent, Path(source).read_bytes(), Path(target).read_bytes()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watch)
    write_bytes(path, b"new")
    assert seen == [(tmp_path, b"new", b"old")]
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("content", [b"", b'{"loss": 1.', b"\xff\xfe\x00", b"<html>"])
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    path = write_bytes(tmp_path / "result.json", content)
    with pytest.raises(ValueError, match=r"result\.json"):
        read_json(path)


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json")


def test_environment_is_json_and_names_its_versions() -> None:
    found = environment()
    assert json.loads(json.dumps(found)) == found
    assert found["versions"]["torch"]
    assert found["versions"].get("no such package") is None
    assert found["device"].startswith("cpu")


def test_what_is_there_is_set_aside_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under their own names, so that what belongs together is still found together; nothing is said where nothing moves."""
    record, table = tmp_path / "fit.json", tmp_path / "fit.csv"
    assert set_aside(record, table) is None
    write_record(record, 1)
    table.write_text("1")
    assert capsys.readouterr().err == ""
    assert set_aside(record, table) == tmp_path / "earlier" / "1"
    write_record(record, 2)
    write_record(record, 3)
    kept = {path.relative_to(tmp_path).as_posix(): path.read_text().strip() for path in tmp_path.rglob("fit.*")}
    assert kept == {"earlier/1/fit.json": "1", "earlier/1/fit.csv": "1", "earlier/2/fit.json": "2", "fit.json": "3"}
    assert f"{record} was there already; it is kept in {tmp_path}/earlier/2" in capsys.readouterr().err


def test_a_disk_that_fills_up_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/track.json'"):
        write_json(tmp_path / "track.json", {})
