"""``ckda inspect track``: representations found by tables alone, and a head that is given one by hand."""

import json

import numpy as np
import pytest
import torch

from ckda.cli import main
from ckda.experiments.tracking.inspect import class_states, exactness, finding, found_representation
from ckda.experiments.tracking.model import build_tracker, icosahedral_quaternions
from ckda.experiments.tracking.quaternions import coxeter_plane, quaternion_heads, rotations
from ckda.experiments.tracking.representations import irreps, nearest
from ckda.experiments.tracking.task import WordProblem, task_named
from ckda.groups import group


@pytest.mark.parametrize(
    ("name", "dimensions"),
    [
        ("S3", [1, 1, 2]),
        ("S4", [1, 1, 2, 3, 3]),
        ("A5", [1, 3, 3, 4, 5]),
        ("Q8", [1, 1, 1, 1, 4]),
        ("Z7", [1, 2, 2, 2]),
    ],
)
def test_irreps_are_representations(name, dimensions):
    G = group(name)
    found = irreps(G)
    assert [irrep.dimension for irrep in found] == dimensions
    for irrep in found:
        A = irrep.matrices
        assert np.abs(A[:, None] @ A[None] - A[G.table]).max() < 1e-8
        assert np.abs(A @ A.transpose(0, 2, 1) - np.eye(irrep.dimension)).max() < 1e-8
    assert np.abs(sum(irrep.projector for irrep in found) - np.eye(G.order)).max() < 1e-8


def test_the_distance_to_the_nearest_is_what_was_added():
    G, rng = group("S4"), np.random.default_rng(0)
    cube = irreps(G)[-1]
    turned = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    noise = rng.normal(size=(24, 3, 3))
    noise *= 0.01 / np.linalg.norm(noise, 2, axis=(1, 2))[:, None, None]
    found = nearest(turned @ cube.matrices @ turned.T + noise, G)
    assert found.parts[0][0].dimension == 3
    assert 0.003 < found.errors.mean() <= found.errors.max() < 0.02


def test_matrices_that_are_nothing_are_near_nothing():
    """Rotations by angles that have nothing to do with the group have traces that are no character."""
    angles = np.linspace(0.3, 2.9, 6)
    turns = np.stack([[[np.cos(t), -np.sin(t)], [np.sin(t), np.cos(t)]] for t in angles])
    found = nearest(turns, group("S3"))
    assert found is None or found.errors.max() > 0.5


def test_quaternions_act_exactly():
    """The start of A5 from the theory: two heads act like a finite group before any training, two do not."""
    torch.manual_seed(0)
    task = WordProblem.named("A5")
    options = {"width": 32, "heads": 4, "head_dim": 4, "beta_init": "spread", "start": "quaternions"}
    heads = exactness(build_tracker("ckda", task, **options), task)
    assert all(head["near"] > 0.99 and head["unturned"] < 1e-6 for head in heads[:2])
    assert all(head["unturned"] > 0.05 for head in heads[2:])


def theory_of_A5(start="quaternions"):
    torch.manual_seed(0)
    task = WordProblem.named("A5")
    options = {"width": 32, "heads": 4, "head_dim": 4, "beta_init": "spread", "start": start}
    return build_tracker("ckda", task, **options), task


def test_the_begin_token_may_keep_its_random_key():
    """As in the authors' code: column 5 of the keys, which only the begin token reads, stays as drawn; letters are the same."""
    keys = {}
    for start in ("random", "quaternions", "quaternions-begin"):
        model, _ = theory_of_A5(start)
        keys[start] = model.mixer.k_proj.weight[:8], model.embedding.weight @ model.mixer.k_proj.weight[:8].T
    drawn = keys["random"][0][:, 5]
    assert torch.equal(keys["quaternions-begin"][1][-1], drawn)
    assert drawn.abs().min() > 0
    assert not keys["quaternions"][1][-1].any()
    assert torch.equal(keys["quaternions-begin"][1][:-1], keys["quaternions"][1][:-1])


def test_inner_products_of_quaternions_follow_from_the_character():
    """One of A5's two homomorphisms into the rotations has the quaternions that the paper gives, the other their twins."""
    G = group("A5")
    q = icosahedral_quaternions(G)
    errors = [np.abs(choice.products - np.abs(q @ q.T)).max() for choice in rotations(G)]
    assert min(errors) < 1e-7
    assert max(errors) > 0.4


@pytest.mark.parametrize(("name", "number"), [("Z2", 1), ("S3", 2), ("S4", 3), ("Q8", 4), ("A5", 2)])
def test_homomorphisms_into_the_rotations(name, number):
    """S4: the cube, S4 / V4 = S3 and S4 / A4 = Z2. Q8: each of its three signs twice, or all three once."""
    found = rotations(group(name))
    assert len({choice.name for choice in found}) == len(found)
    assert len(found) == number


def test_a_head_is_off_by_as_much_as_its_keys_are():
    model, task = theory_of_A5()
    turned = torch.tensor([np.cos(0.05), np.sin(0.05), 0.0, 0.0])  # the identity's key is (1, 0, 0, 0)
    assert torch.equal(model.embedding.weight[task.group.identity, :4].abs(), torch.tensor([1.0, 0, 0, 0]))
    with torch.no_grad():
        model.embedding.weight[task.group.identity, :4] = turned
    found = quaternion_heads(model, task)
    assert [head.head for head in found] == [0, 1]
    for head in found:
        assert 0.03 < head.worst < 0.051
        assert 0.09 < head.error < 0.101  # a reflection turns by twice the angle of its key
        assert np.abs(head.keys - head.exact).max() < 0.06


def test_keys_alone_do_not_make_a_quaternion_head():
    """Exact keys under gates or learning rates that do not turn by them; three negative gates do, but for the state's sign."""
    for signs, beta, found in (
        ([1.0, 1, 1, 1], 12.0, []),
        ([-1.0, -1, 1, 1], 12.0, []),
        ([1.0, -1, 1, 1], 12.0, []),
        ([1.0, -1, -1, -1], 12.0, [0, 1]),
        ([-1.0, 1, 1, 1], 0.0, []),
        ([-0.01, 0.01, 0.01, 0.01], 12.0, []),
    ):
        model, task = theory_of_A5()
        with torch.no_grad():
            model.mixer.dt_bias[:8] = 12.0 * torch.tensor(signs * 2)
            model.mixer.b_proj.bias[:2] = beta
        assert [head.head for head in quaternion_heads(model, task)] == found, (signs, beta)


@pytest.mark.parametrize("name", ["Z2", "Z3", "S3", "Q8", "A4", "A5", "S4:generators", "shell3"])
@pytest.mark.parametrize("start", ["random", "orthogonal-quarter"])
def test_heads_that_know_nothing_are_no_quaternions(name, start):
    torch.manual_seed(0)
    task = task_named(name)
    model = build_tracker("ckda", task, heads=8, head_dim=4, beta_init="spread", start=start)
    assert quaternion_heads(model, task) == []


def test_quaternions_in_four_of_sixteen_channels(tmp_path, capsys):
    """S4 by the cube's quaternions in a head of 16, through the command, with its figure."""
    torch.manual_seed(0)
    task = WordProblem.named("S4")
    model = build_tracker("ckda", task, width=32, heads=2, head_dim=16, beta_init="spread")
    values, vectors = np.linalg.eigh(_signed_products(task.group))
    q = torch.from_numpy(vectors[:, -4:] * np.sqrt(values[-4:])).float()
    one = q[task.group.identity]
    basis = torch.linalg.qr(torch.cat([one[:, None], torch.eye(4)[:, :3]], 1))[
        0
    ]  # the identity's quaternion comes first
    with torch.no_grad():
        model.embedding.weight.zero_()
        model.embedding.weight[:-1, :4] = q @ basis
        mixer = model.mixer
        mixer.k_proj.weight[:16] = 0
        mixer.k_proj.weight[[3, 5, 6, 9], [0, 1, 2, 3]] = 1.0
        mixer.f_proj[1].weight[:16] = 0
        mixer.dt_bias[:16] = 14.0
        mixer.dt_bias[3] = -14.0
        mixer.b_proj.weight[0], mixer.b_proj.bias[0] = 0, 14.0
    (head,) = quaternion_heads(model, task)
    assert head.rotations == "3-dimensional, faithful"
    assert head.error < 1e-3
    path = tmp_path / "runs/S4-ckda.pt"
    path.parent.mkdir()
    about = {"group": "S4", "mixer": "ckda", "recipe": "by hand", "best": 0, "seeds": [5]}
    options = {"width": 32, "heads": 2, "head_dim": 16, "beta_init": "spread"}
    parameters = {name: p.detach()[None] for name, p in model.state_dict().items()}
    torch.save(about | {"model": options, "parameters": parameters}, path)
    assert main(["inspect", "track", str(path), "--length", "32", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["quaternions_by_seed"]["5"][0]["head"] == 0
    assert len(seen["picture"]["keys"]) == 24
    assert (tmp_path / "inspect/S4-ckda.seed5.quaternions.png").stat().st_size > 10_000
    assert "head 0 works by quaternions" in finding(task, {"head": 0}, {}, {}, [head])


def _signed_products(G):
    """[n, n] q_x . q_y of the cube's rotations, by matrices: the quaternion of a rotation from its 4 x 4 form."""
    cube = next(irrep for irrep in irreps(G) if irrep.dimension == 3 and np.allclose(np.linalg.det(irrep.matrices), 1))
    quaternions = []
    for R in cube.matrices:  # the eigenvector of the largest eigenvalue (Bar-Itzhack)
        K = np.array(
            [
                [R[0, 0] - R[1, 1] - R[2, 2], R[1, 0] + R[0, 1], R[2, 0] + R[0, 2], R[1, 2] - R[2, 1]],
                [R[1, 0] + R[0, 1], R[1, 1] - R[0, 0] - R[2, 2], R[2, 1] + R[1, 2], R[2, 0] - R[0, 2]],
                [R[2, 0] + R[0, 2], R[2, 1] + R[1, 2], R[2, 2] - R[0, 0] - R[1, 1], R[0, 1] - R[1, 0]],
                [R[1, 2] - R[2, 1], R[2, 0] - R[0, 2], R[0, 1] - R[1, 0], np.trace(R)],
            ]
        )
        quaternions.append(np.linalg.eigh(K)[1][:, -1])
    q = np.stack(quaternions)
    return q @ q.T


def test_the_600_cell_has_thirty_corners_in_its_plane():
    q = icosahedral_quaternions(group("A5"))
    place = q @ coxeter_plane(q)
    radii = np.linalg.norm(place, axis=1)
    rings = np.unique(radii.round(6), return_counts=True)[1]
    assert rings.tolist() == [15, 15, 15, 15]  # and as many opposite ones


def by_hand():
    """A tracker of S3 whose head 0 moves by the plane's dihedral group: A_g = H_k D, D = Diag(-1, 1) for turns, I for flips."""
    torch.manual_seed(0)
    task = WordProblem.named("S3")
    model = build_tracker("ckda", task, heads=2, head_dim=4, beta_init="spread").double()
    keys, gates = torch.zeros(7, 4, dtype=torch.float64), torch.full((7, 2), 40.0, dtype=torch.float64)
    for g, A in enumerate(irreps(task.group)[-1].matrices):
        if np.linalg.det(A) > 0:
            gates[g, 0] = -40.0
            A = A @ np.diag([-1.0, 1.0])
        keys[g, :2] = torch.from_numpy(np.linalg.eigh(A)[1][:, 0].copy())  # where the reflection has -1
    keys[6, :2] = torch.tensor([0.6, 0.8])  # the begin token writes one vector, and nothing else does
    with torch.no_grad():
        x = torch.linalg.qr(torch.randn(48, 7, dtype=torch.float64))[
            0
        ].T  # orthonormal: any function of the token is linear
        model.embedding.weight.copy_(x)
        mixer = model.mixer
        mixer.k_proj.weight[:4] = keys.T @ x
        mixer.f_proj[0].weight[:2] = gates.T @ x
        mixer.f_proj[1].weight[:4] = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]])
        mixer.dt_bias[:4], mixer.b_proj.weight[0], mixer.b_proj.bias[0] = 0, 0, 40.0
        mixer.v_proj.weight[:4] = 0
        mixer.v_proj.weight[0] = x[6]
    return task, model


def test_a_representation_put_in_by_hand_is_found():
    task, model = by_hand()
    states = class_states(model, task, (32, 128), size=32)
    found = found_representation(model, task, states["mean"], 0)
    shares = {part["name"]: part["share"] for part in found["shares"]}
    assert shares["2-dimensional, faithful"] > 0.999
    assert found["told_apart"] == 6
    assert found["dimension"] == 2
    assert found["nearest"]["worst_error"] < 1e-6
    assert states["closure"]["128"][0] < 1e-9


def test_command(tmp_path, capsys, assert_refused):
    command = [
        "track",
        "S3",
        "--smoke",
        "--mixer",
        "ckda,gru",
        "--seeds",
        "2",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    assert main([*command, "--json"]) == 0
    capsys.readouterr()
    run = str(tmp_path / "runs/S3-ckda+smoke.pt")
    assert main(["inspect", "track", run, "--seed", "1", "--length", "32", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["seed"] == 1
    assert len(seen["mechanism"]["beta"]) == 6
    assert len(seen["mechanism"]["keys"]) == 6
    assert (tmp_path / "inspect/S3-ckda+smoke.seed1.png").stat().st_size > 10_000
    assert main(["inspect", "track", run, "--length", "32"]) == 0
    assert "works" in capsys.readouterr().out
    for arguments, says in (
        ([run, "--seed", "9"], "no seed 9"),
        ([run, "--length", "8"], "--length is 8"),
        ([str(tmp_path / "runs/S3-gru+smoke.pt")], "is a gru"),
        ([str(tmp_path / "none.pt")], "does not exist"),
        ([str(tmp_path / "track.json")], "holds no weights"),
    ):
        assert_refused(["inspect", "track", *arguments], says)
