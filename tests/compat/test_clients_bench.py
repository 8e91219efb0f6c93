"""benchmarks/clients.py on a CPU: parts stand alone, what fails is recorded with its reason, and it goes on where it stopped."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clients(monkeypatch):
    spec = importlib.util.spec_from_file_location("benchmark_of_clients", ROOT / "benchmarks" / "clients.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def run(clients, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["clients.py", "gpu", "--smoke", "--repeats", "1", *words])
    return clients.main()


def test_kimi_linear_is_measured_and_goes_on(clients, monkeypatch, tmp_path, capsys):
    if importlib.util.find_spec("fla") and not torch.cuda.is_available():
        pytest.skip("transformers takes FLA's GPU kernels where FLA is installed")

    def refused(args):
        raise RuntimeError("not on this device")

    monkeypatch.setitem(clients.PARTS, "fla gdn", refused)
    words = ("--out", str(tmp_path), "--parts", "fla gdn,kimi_linear")
    assert run(clients, monkeypatch, *words) == 0
    record = json.loads((tmp_path / "clients_smoke.json").read_text())
    assert record["parts"]["fla gdn"]["failed"] == "RuntimeError: not on this device"
    found = record["parts"]["kimi_linear"]
    assert max(found["operator"]["apart"].values()) < 1e-5
    assert found["layers"] == {"all": 4, "of KDA": 3}
    assert [name.rpartition(".")[2] for name in found["replaced"]][-1] == "causal_conv1d_fn"
    inside = found["operator in the update"]
    assert inside["before"] == pytest.approx(found["update"]["before"] - inside["update without it"])
    assert inside["after"] == pytest.approx(found["update"]["after"] - inside["update without it, after"])
    assert inside["share before"] == pytest.approx(inside["before"] / found["update"]["before"])
    assert inside["ratio"] == pytest.approx(inside["before"] / inside["after"])
    capsys.readouterr()
    monkeypatch.setitem(clients.PARTS, "fla gdn", lambda args: {"ratio": 1.0})
    monkeypatch.setitem(clients.PARTS, "kimi_linear", refused)
    assert run(clients, monkeypatch, *words) == 0
    again = json.loads((tmp_path / "clients_smoke.json").read_text())["parts"]
    assert again["kimi_linear"] == found, "what had succeeded was run again"
    assert again["fla gdn"]["ratio"] == 1.0
    assert "kimi_linear" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"holds other settings.*name another --out"):
        run(clients, monkeypatch, *words, "--length", "64")


def test_the_limit_of_time_ends_a_part(clients, monkeypatch, tmp_path, capsys):
    def endless(args):
        while True:
            torch.zeros(1)

    monkeypatch.setitem(clients.PARTS, "fla kda", endless)
    words = ("--out", str(tmp_path), "--parts", "fla kda,fla gdn", "--limit", "0.3")
    assert run(clients, monkeypatch, *words) == 1
    parts = json.loads((tmp_path / "clients_smoke.json").read_text())["parts"]
    assert parts == {"fla kda": {"failed": "the limit of 0.3 seconds was reached"}}
    assert "the same command goes on" in capsys.readouterr().out


def test_agreement_is_of_theirs_and_ours(clients):
    """Before and after are two operators: accelerate() acts when it is called, not when its block begins."""
    if importlib.util.find_spec("fla") and not torch.cuda.is_available():
        pytest.skip("transformers takes FLA's GPU kernels where FLA is installed")
    args = clients.parse(["gpu", "--smoke"])
    found = clients.agreement(clients.kimi_subject(True), args)
    assert found["by"]["before"].startswith("transformers.")
    assert found["by"]["after"].startswith("ckda.")
    assert set(found["apart"]) == {"loss", "logits", "gradients"}
    assert 0 < found["apart"]["gradients"] < 1e-4
    assert found["apart"]["logits"] < 1e-5
    assert clients.generated(clients.kimi_subject(True), args)["same_tokens"]


def test_what_is_timed_is_tuned(clients, capsys):
    with pytest.raises(SystemExit):
        clients.parse(["gpu", "--smoke", "--one-config"])
    assert "--one-config times nothing: name --parts without fla kda" in capsys.readouterr().err


def test_unknown_parts_are_refused(clients, capsys):
    with pytest.raises(SystemExit):
        clients.parse(["gpu", "--smoke", "--parts", "mamba"])
    assert "there is no part 'mamba'; there are fla kda, kimi_linear" in capsys.readouterr().err


def test_flas_model_is_measured(clients, monkeypatch):
    """With FLA's GPU kernels replaced by its naive functions: the parts that a GPU will run."""
    pytest.importorskip("fla.models.kda", reason="flash-linear-attention is not installed")
    sys.path.insert(0, str(Path(__file__).parent))
    import fla_on_cpu

    def model(size, device, layers, dtype):
        monkeypatch.setitem(fla_on_cpu.SIZES, "num_hidden_layers", layers)
        monkeypatch.setitem(fla_on_cpu.SIZES, "vocab_size", size["vocabulary"])
        monkeypatch.setitem(fla_on_cpu.CONFIGS, "equal", {"safe_gate": True, "lower_bound": -5.0})
        return fla_on_cpu.build("equal").to(dtype)

    monkeypatch.setattr(clients, "fla_model", model)
    args = clients.parse(["gpu", "--smoke", "--repeats", "1"])
    found = clients.PARTS["fla kda"](args)
    assert max(found["operator"]["apart"].values()) < 1e-4
    assert found["layers"] == {"all": 4, "of KDA": 4}
    errors = clients.PARTS["fla agreement"](args)
    assert errors["after"]["loss"] < 1e-5
    assert errors["before"]["loss"] < 1e-4
