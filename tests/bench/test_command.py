"""``ckda bench`` on a machine without a GPU: it checks, times, writes JSON and a figure, and refuses what is not there."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ckda.bench import command as bench
from ckda.bench import cudnn, peers, throughput
from ckda.bench.options import Shape
from ckda.bench.timing import earlier
from ckda.cli import main
from ckda.ops import Call, complex_kda
from ckda.ops import fla as fla_backend


def test_a_smoke_run_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "--smoke", "--device", "cpu", "--json", "--out", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    stored = json.loads((tmp_path / "bench.json").read_text())
    assert printed["rows"] == stored["rows"]
    assert {row["peer"] for row in stored["rows"]} == {"ckda", "kda"}
    for row in stored["rows"]:
        assert 0 < row["forward"]["p20"] <= row["forward"]["p50"] <= row["forward"]["p80"]
    assert stored["environment"]["versions"]["torch"] == torch.__version__
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_a_wrong_peer_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = peers.peers("cpu", ["ckda"])[0]

    def bind(call: dict, do: torch.Tensor) -> peers.Bound:
        bound = ours.bind(call, do)
        return peers.Bound(lambda: bound.forward() * 1.1, bound.both)

    monkeypatch.setattr(bench, "peers", lambda *_: [ours._replace(bind=bind)])
    assert main(["bench", "--smoke", "--device", "cpu", "--out", str(tmp_path)]) == 1
    assert not (tmp_path / "bench.json").exists()


def _off(peer: peers.Peer, by: float, **changes: Any) -> peers.Peer:
    """The peer with the gradient of g that much off, and its name changed."""

    def bind(call: dict, do: torch.Tensor) -> peers.Bound:
        bound, at = peer.bind(call, do), [n for n, x in call.items() if isinstance(x, torch.Tensor)].index("g")
        return peers.Bound(bound.forward, lambda: [x * (1 + by) if i == at else x for i, x in enumerate(bound.both())])

    return peer._replace(bind=bind, **changes)


@pytest.mark.parametrize("words", [[], ["--throughput"]])
@pytest.mark.parametrize(("by", "said"), [(0.024, "dg 2.4e-02"), (float("inf"), "dg nan|dg inf")])
def test_a_wrong_peer_of_others_is_timed_and_marked_wherever_it_is_shown(
    words: list[str],
    by: float,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    ours = peers.peers("cpu", ["ckda"])[0]
    legends: list[str] = []
    plain = {kind: kind.legend for kind in (Axes, Figure)}

    def legend(place: Axes | Figure, *arguments: Any, **options: Any) -> Any:
        found = plain[Figure if isinstance(place, Figure) else Axes](place, *arguments, **options)
        legends.extend(text.get_text() for text in found.get_texts())
        return found

    def fail(call: dict, do: torch.Tensor) -> peers.Bound:
        raise RuntimeError("made up")

    for kind in plain:
        monkeypatch.setattr(kind, "legend", legend)
    others = [_off(ours, by, name="theirs", foreign=True), ours._replace(bind=fail, name="not there", foreign=True)]
    monkeypatch.setattr(bench, "peers", lambda *_, **__: [ours, *others])
    assert main(["bench", "--smoke", "--device", "cpu", "--out", str(tmp_path), *words]) == 0
    stored = json.loads((tmp_path / ("throughput.json" if words else "bench.json")).read_text())
    marks = {row["peer"]: row.get("inaccurate") for row in stored["rows"]}
    assert set(marks) == {"ckda", "theirs"}
    assert marks["ckda"] is None
    assert re.fullmatch(f"inaccurate: ({said})", marks["theirs"])
    assert stored["errors"]["theirs"]["inaccurate"] == marks["theirs"]
    assert stored["errors"]["theirs"]["dg"] == (pytest.approx(by, rel=1e-2) if by < 1 else None)
    assert stored["errors"]["not there"] == {"failed": "made up"}
    assert all(row.get("tokens_per_second") or row["forward"]["mean"] > 0 for row in stored["rows"])
    assert legends == ["Complex KDA, ours", f"theirs ({marks['theirs']})"]
    printed = capsys.readouterr().err
    lines = [line for line in printed.splitlines() if "theirs" in line]
    assert len(lines) == 1 + len(stored["rows"]) // 2
    assert all(marks["theirs"] in line for line in lines)


@pytest.mark.parametrize("words", [[], ["--throughput"]])
def test_others_choose_anew_for_every_shape(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that tunes itself keeps its choice from one length for another."""
    ours = peers.peers("cpu", ["ckda"])[0]
    done: list[str] = []

    def bind(call: dict, do: torch.Tensor) -> peers.Bound:
        done.append(f"T {do.shape[1]}")
        return ours.bind(call, do)

    monkeypatch.setattr(bench, "peers", lambda *_, **__: [ours._replace(name="theirs", foreign=True, bind=bind)])
    for module in (bench, throughput):
        monkeypatch.setattr(module, "forget_choices", lambda: done.append("forget"))
    shapes = ["--shape", "1,32,2,16", "--shape", "1,48,2,16"]
    assert main(["bench", "--smoke", "--device", "cpu", "--out", str(tmp_path), *shapes, *words]) == 0
    assert done == ["T 200", "forget", "T 32", "forget", "T 48"]


def test_every_size_of_heads_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int]] = []
    plain = bench.errors
    monkeypatch.setattr(bench, "errors", lambda *words: (sizes.append(words[-2:]), plain(*words))[1])
    shapes = ["--shape", "1,32,2,16", "--shape", "1,48,2,16", "--shape", "1,32,1,8"]
    assert main(["bench", "--smoke", "--device", "cpu", "--peer", "ckda", "--out", str(tmp_path), *shapes]) == 0
    assert sizes == [(2, 16), (1, 8)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--peer", "fla kda"], "flash-linear-attention's need a GPU"),
        (["--cudnn", "nowhere"], "nowhere"),
        (["--plan", "--throughput", "--peer", "ckda"], "--peer"),
    ],
)
def test_what_is_refused_leaves_no_folder(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["bench", "--smoke", "--device", "cpu", "--out", str(tmp_path / "new"), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_what_was_measured_survives_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "time_decode", stop)
    assert main(["bench", "--smoke", "--device", "cpu", "--out", str(tmp_path)]) == 130
    assert len(json.loads((tmp_path / "bench.json").read_text())["rows"]) == 2


@pytest.mark.parametrize("words", [["--shape", "1,2"], ["--shape", "1,2,3,300"], ["--dtype", "int8"]])
def test_wrong_arguments(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--smoke", "--device", "cpu", "--out", str(tmp_path), *words])
    assert words[-1] in f"{stop.value.code} {capsys.readouterr().err}"


def test_the_host_is_timed_without_a_gpu_too(tmp_path: Path) -> None:
    assert main(["bench", "--host", "--smoke", "--device", "cpu", "--out", str(tmp_path)]) == 0
    stored = json.loads((tmp_path / "host.json").read_text())
    assert set(stored["host_ms"]) == {
        "operator, 1 x 64",
        "layer, 1 x 64",
        "layer, 1 x 64, autocast",
        "operator, one token",
    }
    assert all(ms > 0 for parts in stored["host_ms"].values() for ms in parts.values())
    both = [part for part in stored["host_ms"]["layer, 1 x 64"] if part.startswith("forward+backward")]
    assert both == ["forward+backward", "forward+backward, one thread"]
    assert stored["bounds"]["layer, 1 x 1024"]["reached"] is None, "the aim is for other sizes"
    assert stored["first_call_s"] is None
    assert (stored["protocol"], stored["count"]) == ("smoke", 2)


def test_a_second_run_measures_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["bench", "--smoke", "--device", "cpu", "--out", str(tmp_path)]
    assert main([*words, "--peer", "ckda"]) == 0
    (first,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert main(words) == 0
    kept, new = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert (kept, new["peer"]) == (first, "kda")


def test_a_record_of_another_commit_is_not_mixed_in(tmp_path: Path, assert_refused: Callable) -> None:
    words = ["bench", "--smoke", "--device", "cpu", "--out", str(tmp_path)]
    assert main(words) == 0
    record = json.loads((tmp_path / "bench.json").read_text())
    record["environment"]["commit"] = "another"
    (tmp_path / "bench.json").write_text(json.dumps(record))
    assert_refused(words, "commit another.*--fresh")
    assert main([*words, "--fresh"]) == 0


def test_the_throughput_of_a_smoke_run(tmp_path: Path) -> None:
    assert main(["bench", "--throughput", "--smoke", "--device", "cpu", "--out", str(tmp_path)]) == 0
    stored = json.loads((tmp_path / "throughput.json").read_text())
    assert [(row["peer"], row["shape"]["T"]) for row in stored["rows"]] == [
        (name, T) for T in (32, 64) for name in ("ckda", "kda")
    ]
    row = stored["rows"][0]
    assert row["tokens_per_second"] == pytest.approx(1e3 * 64 / row["rounds_ms"][0])
    assert max(stored["errors"]["ckda"].values()) < 1e-4


def test_the_throughput_figure_has_a_bar_for_every_row_that_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    bars: dict[str, list[float]] = {}
    plain = Axes.bar

    def bar(axis: Axes, places: list[float], rates: list[float], *more: Any, label: str, **options: Any) -> Any:
        bars[label] = rates
        return plain(axis, places, rates, *more, label=label, **options)

    monkeypatch.setattr(Axes, "bar", bar)
    rows = [
        {"peer": peer, "shape": {"B": 1, "T": T, "H": 1, "D": 8}, "tokens_per_second": rate, "spread": 1e4}
        for peer, T, rate in (("made up", 32, 1e6), ("made up", 64, 2e6), ("another", 64, 3e6))
    ]
    rows.append({"peer": "another", "shape": rows[0]["shape"], "failed": "made up"})
    path = throughput.draw({"rows": rows, "environment": {"device": "none"}, "dtype": "float32"}, tmp_path / "x.png")
    assert path is not None
    assert bars == {"made up": [1.0, 2.0], "another": [3.0]}
    assert path.stat().st_size > 5_000


def test_a_folder_without_cudnn_is_refused(tmp_path: Path, assert_refused: Callable) -> None:
    words = ["bench", "--smoke", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert_refused([*words, "--cudnn", str(tmp_path)], "cuda_host.py is not there; .*cudnn_folder.py")
    assert_refused([*words, "--peer", "cudnn kda"], "--cudnn FOLDER")


def test_cudnn_gets_the_tensors_of_the_call_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As benchmarks of its own call it: addresses, then tokens, sequences and heads (backward: tokens, heads, sequences)."""
    told: dict[str, tuple] = {}

    class Host:
        def __init__(self, name: str) -> None:
            self.name = name

        def launch(self, *arguments: int) -> None:
            told[self.name] = arguments

        def workspace_bytes(self, tokens: int, heads: int, sequences: int) -> int:
            return tokens * heads * sequences

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 7}))
    call = peers.given_inputs(-0.03)(Shape(2, 4, 3, 128), "cpu", torch.bfloat16, 0)
    do = torch.ones(2, 4, 3, 128, dtype=torch.bfloat16)
    bound = cudnn.bind_launches(Host("forward"), Host("backward"), call, do)
    gradients = bound.both()
    addresses = [call[name].data_ptr() for name in ("q", "k", "v", "g", "beta")]
    assert told["forward"][:7] == (0, 7, *addresses)
    assert told["forward"][-3:] == (8, 2, 3)
    assert told["backward"][3:9] == (do.data_ptr(), *addresses)
    assert told["backward"][-9:-4] == tuple(x.data_ptr() for x in gradients)
    assert told["backward"][-3:] == (8, 3, 2)
    assert [x.shape for x in gradients] == [call[name].shape for name in ("q", "k", "v", "g", "beta")]
    with pytest.raises(ValueError, match="heads of 128"):
        cudnn.bind_launches(None, None, peers.given_inputs(-1)(Shape(1, 4, 1, 64), "cpu", torch.bfloat16, 0), do)


def test_the_gauge_is_the_same_under_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for FLA's chunk_kda: the signs are absorbed outside of it, and it sees none."""

    def chunk_kda(*, q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, initial_state: Any, **_: Any) -> Any:
        return complex_kda(q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=True)

    module = ModuleType("fla.ops.kda")
    module.chunk_kda = chunk_kda  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.kda", module)

    def gauge(call: dict[str, Any]) -> torch.Tensor:
        return fla_backend.forward(Call(**call))[0]

    seen: list[str] = []

    def eager(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    call = peers.inputs(Shape(1, 40, 2, 16), "cpu", torch.float32, 0)
    do = torch.randn(1, 40, 2, 16)
    bound = peers.compiled(gauge, backend=eager)(call, do)
    torch.testing.assert_close(bound.forward(), complex_kda(**call)[0], rtol=1e-4, atol=1e-5)
    assert any("ckda.absorb_signs" in name for name in seen), "the sum over time is no part of the compiler's kernels"
    assert not any("cumsum" in name for name in seen)
    wanted = torch.autograd.grad(complex_kda(**call)[0], peers.leaves(call), do)
    for got, want in zip(bound.both(), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [128, 200])
def test_absorbed_signs_compile_beside_broadcasts(T: int) -> None:
    """Inductor stops at such a sum over more than 128 tokens when it makes one kernel of all (pytorch/pytorch#180221)."""
    g, bias, q = torch.randn(1, T, 4, 64), torch.randn(64), torch.randn(1, T, 4, 64)

    def absorbed(g: torch.Tensor, bias: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        sign = torch.where(g + bias < 0, -1, 1).to(torch.int8)
        return torch.nn.functional.normalize(q, dim=-1) * fla_backend.absorb_signs(sign)

    arguments = [x.cuda() for x in (g, bias, q)]
    torch.testing.assert_close(torch.compile(absorbed, dynamic=False)(*arguments), absorbed(*arguments))


def test_the_gauge_of_the_throughput_is_timed_without_a_compiler_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: object())
    found = {peer.name: peer for peer in peers.peers("cuda", None, throughput=True)}
    assert {peers.GAUGE, f"{peers.GAUGE}, not compiled"} <= set(found)
    assert [name for name, peer in found.items() if not peer.foreign] == ["ckda", "kda"]
    assert set(found) == set(throughput.ESTIMATE)


def test_the_plan_adds_up_without_running_anything(capsys: pytest.CaptureFixture, assert_refused: Callable) -> None:
    assert main(["bench", "--plan", "--sweep", "--row", "softplus", "--host", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["seconds"]) == {"sweep: main", "sweep: softplus", "host"}
    assert told["total"] == pytest.approx(sum(told["seconds"].values()))
    assert_refused(["bench", "--plan"], "name what is planned")


@pytest.mark.parametrize("words", [["--jobs", "0"], ["--jobs", "-3"], ["--jobs", "0", "--sweep", "--plan"]])
def test_jobs_are_counted_from_one(words: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", *words])
    assert stop.value.code == 2
    assert f"argument --jobs: {words[1]} is not at least 1" in capsys.readouterr().err


def test_jobs_on_a_cpu_are_said_to_do_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["bench", "--smoke", "--device", "cpu", "--peer", "ckda", "--out", str(tmp_path)]
    assert main([*words, "--jobs", "2"]) == 0
    assert "--jobs 2: no effect on a CPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--row", "states"], "--row belongs to --sweep$"),
        (["--host", "--row", "states"], "--row belongs to --sweep$"),
        (["--sweep", "--peer", "ckda"], "--peer: no effect with --sweep, which reads --out, .*--jobs, --host, --row"),
        (["--sweep", "--dtype", "float16", "--shape", "1,40,2,16"], "--shape, --dtype: no effect with --sweep"),
        (["--sweep", "--seed", "3"], "--seed: no effect with --sweep"),
        (["--sweep", "--host", "--cudnn", "folder"], "--cudnn: no effect with --sweep --host"),
        (["--host", "--jobs", "2"], "--jobs: no effect with --host"),
        (["--plan", "--host", "--shape", "1,40,2,16"], "--shape: no effect with --host"),
        (["--throughput", "--sweep", "--host"], "--throughput goes without --sweep and --host$"),
    ],
)
def test_an_option_without_effect_is_refused(
    words: list[str], told: str, tmp_path: Path, assert_refused: Callable
) -> None:
    assert_refused(["bench", "--smoke", "--device", "cpu", "--out", str(tmp_path / "out"), *words], told)
    assert not (tmp_path / "out").exists()


def test_a_plan_is_of_several_parts_and_of_what_each_reads(capsys: pytest.CaptureFixture) -> None:
    words = ["--sweep", "--row", "states", "--throughput", "--shape", "1,40,2,16", "--jobs", "3"]
    assert main(["bench", "--plan", *words, "--json"]) == 0
    assert {"sweep: states", "throughput: ckda"} <= set(json.loads(capsys.readouterr().out)["seconds"])


@pytest.mark.parametrize(("words", "name"), [([], "bench.json"), (["--sweep", "--row", "states"], "sweep.json")])
def test_a_smoke_run_is_not_mixed_with_others(
    words: list[str], name: str, tmp_path: Path, assert_refused: Callable
) -> None:
    """What a smoke run left is not gone on from; what was measured is not overwritten by one."""
    smoke = ["bench", *words, "--smoke", "--device", "cpu", "--out", str(tmp_path)]
    assert main(smoke) == 0
    record = json.loads((tmp_path / name).read_text())
    assert record["protocol"] == "smoke"
    assert earlier(tmp_path / name, record["environment"], fresh=False, smoke=True) == record["rows"]
    assert earlier(tmp_path / name, record["environment"], fresh=False, smoke=False) == []
    del record["protocol"]
    (tmp_path / name).write_text(json.dumps(record))
    assert_refused(smoke, f"{name} was measured, and this is a smoke run.*--fresh")


def test_what_was_measured_otherwise_is_not_gone_on_from(tmp_path: Path) -> None:
    here = {"device": "cpu", "commit": "a"}
    record = {"environment": here, "seed": 0, "dtype": "float32", "rows": [{"peer": "ckda"}]}
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(record))
    assert earlier(path, here, fresh=False, smoke=False, seed=0, dtype="float32") == record["rows"]
    with pytest.raises(ValueError, match="measured with dtype float32, and this is bfloat16"):
        earlier(path, here, fresh=False, smoke=False, seed=0, dtype="bfloat16")
