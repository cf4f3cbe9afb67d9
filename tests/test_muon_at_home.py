"""Muon outside the speedrun: torch's is 01's at mapped rates, and the script to copy from trains.

Run: .venv/bin/python -m pytest tests/test_muon_at_home.py
"""

import sys
from functools import partial

import pytest
import torch

from snapshots import load_snapshot
from speedrun.history.manifest import REPOSITORY, load_manifest

LESSONS = REPOSITORY / "lessons"
RATE, COSINE, NORM = 3.6e-4, 0.9997, 0.004
SHAPES = [(96, 96), (48, 192), (192, 48), (96, 40)]
MAPPED = {"original": lambda shape: RATE * shape[1] ** 0.5, "match_rms_adamw": lambda _: 5 * RATE}


@pytest.fixture(scope="module")
def home():
    sys.path.insert(0, str(LESSONS))
    import muon_at_home

    return muon_at_home


def moves(make_muon, gradients):
    """What each step subtracts from a matrix of zeros."""
    weight = torch.nn.Parameter(torch.zeros_like(gradients[0]))
    muon, found = make_muon([weight]), []
    for gradient in gradients:
        before, weight.grad = weight.detach().clone(), gradient.clone()
        muon.step()
        found.append(before - weight.detach())
    return found, muon.state[weight]["momentum_buffer"]


@pytest.mark.parametrize("mode", MAPPED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torchs_muon_makes_01s_update(shape, mode):
    torch.manual_seed(1)
    gradients = list(torch.randn(5, *shape))
    m01 = load_snapshot(load_manifest().get("01"))
    ours, sums = moves(partial(m01.Muon, lr=RATE, momentum=0.95, bf16=True, compiled=False),
                       gradients)
    theirs, means = moves(partial(torch.optim.Muon, lr=MAPPED[mode](shape), momentum=0.95,
                                  weight_decay=0.0, adjust_lr_fn=mode), gradients)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.cosine_similarity(a.flatten(), b.flatten(), 0) >= COSINE
        assert abs(b.norm() / a.norm() - 1) < NORM
    torch.testing.assert_close(sums.view(shape), 20 * means)  # 1 / (1 - 0.95)


def test_torch_decays_unless_told_otherwise():
    weight = torch.nn.Parameter(torch.eye(8))
    weight.grad = torch.zeros(8, 8)
    muon = torch.optim.Muon([weight], lr=0.02, adjust_lr_fn="original")
    muon.step()
    torch.testing.assert_close(weight.detach(), torch.eye(8) * (1 - 0.02 * 0.1))
    with pytest.raises(ValueError, match="2D"):
        torch.optim.Muon([torch.nn.Parameter(torch.zeros(4, 2, 3, 3))])


def test_the_script_is_short_and_converts_every_hidden_matrix(home):
    assert (LESSONS / "muon_at_home.py").read_text(encoding="utf-8").count("\n") <= 80
    model = home.Net()
    left = {name for name, p in model.named_parameters() if p.ndim > 1} - {*home.MATRICES}
    assert left == {"conv1.weight", "places", "head.weight"}
    for name, count in home.MATRICES.items():
        weight = model.get_parameter(name)
        parts = home.as_matrices(weight, count)
        assert len(parts) == count and all(part.ndim == 2 and part.is_leaf for part in parts)
        weight.data.fill_(2.0)
        assert sum(part.sum().item() for part in parts) == 2 * weight.numel()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_script_trains(home, optimizer):
    guess = torch.tensor(len(home.LETTERS)).log().item()
    assert home.train(optimizer, steps=40) < guess - 0.05


def test_muon_moves_the_models_own_weights(home, monkeypatch):
    seen = []

    class Seen(home.Net):
        def __init__(self):
            super().__init__()
            seen.append((self, {n: p.detach().clone() for n, p in self.named_parameters()}))

    home.train("muon", steps=1, net=Seen)
    ((model, before),) = seen
    still = [n for n, p in model.named_parameters() if p.equal(before[n])]
    assert still == []
