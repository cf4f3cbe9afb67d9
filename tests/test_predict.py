"""Every snapshot's CUDA path runs at record scale on devices that are not there, and faults that
only CUDA would show are caught.

Run: .venv/bin/python -m pytest tests/test_predict.py
"""

import os
import subprocess
import sys

import pytest

from snapshots import known_values
from speedrun.base.errors import UserError
from speedrun.history.manifest import REPOSITORY, load_manifest
from speedrun.predict.cards import CARDS
from speedrun.predict.fake_cuda import reason_against
from speedrun.predict.prediction import largest_micro_batch, observe, predict
from speedrun.run.fit_batch import MARGIN
from speedrun.scripts.find import find_script

pytestmark = pytest.mark.skipif(reason_against() is not None, reason=reason_against() or "")

WRITTEN = load_manifest().written()
H100 = CARDS["h100"]
SMALL = dict(num_layers=2, micro_batch_size=8, total_batch_size=65_536)


@pytest.mark.parametrize("milestone", WRITTEN, ids=[m.id for m in WRITTEN])
def test_a_snapshot_runs_on_eight_fake_gpus_as_in_its_record(milestone):
    found = predict(find_script(milestone.id), H100, 8, {})
    known = known_values(milestone.id)["all_reduce"]
    assert found.collectives == {f"allreduce {dtype}": size for dtype, size in known.items()}
    assert found.flops.keys() == {"bfloat16"}, "a product of a step is not in bfloat16"
    assert found.peaks["training"] > sum(found.memory.values())
    # Products take 6 FLOPs for each weight and token; Newton-Schulz comes on top.
    weights = milestone.parameters * milestone.tokens_per_step / 8
    assert 0.5 < found.flops["bfloat16"] / (6 * weights) < 1.1


FAULTS = {
    "a table left on the CPU": (
        "02", "self.cos[: x.size(1)].to(x.dtype)", "self.cos[: x.size(1)].cpu().to(x.dtype)",
        "two devices"),
    "bfloat16 times float32": (
        "03c", "self.weight.to(x.dtype)", "self.weight", "bfloat16"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_only_cuda_shows_is_caught(fault, tmp_path):
    id, right, wrong, words = FAULTS[fault]
    source = load_manifest().get(id).script.read_text(encoding="utf-8")
    assert source.count(right) == 1
    script = tmp_path / "train_gpt.py"
    script.write_text(source.replace(right, wrong), encoding="utf-8")
    with pytest.raises(UserError, match=words) as refused:
        predict(find_script(str(script)), H100, 8, SMALL)
    assert "\n" not in str(refused.value)


def test_muon_in_float32_is_seen(tmp_path):
    source = load_manifest().get("03").script.read_text(encoding="utf-8")
    right = "self.dtype = torch.bfloat16 if bf16 else torch.float32"
    assert source.count(right) == 1
    script = tmp_path / "train_gpt.py"
    script.write_text(source.replace(right, "self.dtype = torch.float32"), encoding="utf-8")
    found = predict(find_script(str(script)), H100, 8, SMALL)
    assert found.collectives.keys() == {"allreduce float32"}
    assert found.flops.keys() == {"bfloat16", "float32"}


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("RUN_SLOW"), reason="slow; set RUN_SLOW=1 to run it")
def test_micro_steps_add_up():
    script, settings = find_script("01"), {**SMALL, "total_batch_size": 4 * 65_536}
    some, all_of_them = (way(script, H100, 8, settings) for way in (predict, observe))
    assert some.flops == all_of_them.flops and some.collectives == all_of_them.collectives
    assert some.moved == pytest.approx(all_of_them.moved, rel=1e-6)
    assert some.peaks == all_of_them.peaks


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("RUN_SLOW"), reason="slow; set RUN_SLOW=1 to run it")
def test_largest_micro_batch_fits_and_the_next_does_not():
    script, card = find_script("01"), CARDS["4090"]
    settings = dict(num_layers=2)
    largest = largest_micro_batch(script, card, 1, settings)
    assert largest.peak <= MARGIN * card.memory
    more = predict(script, card, 1, {**settings, "micro_batch_size": 2 * largest.micro_batch})
    assert more.peak > MARGIN * card.memory and not more.fits(card)


def test_what_prevents_a_prediction_is_one_line():
    ended = subprocess.run(
        [sys.executable, str(REPOSITORY / "tools" / "predict.py"), "05", "--device-batch", "3"],
        capture_output=True, encoding="utf-8")
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert "total_batch_size is no multiple" in ended.stderr


def test_another_torch_is_refused(monkeypatch):
    monkeypatch.setattr("speedrun.predict.fake_cuda.TORCH", "2.12.0")
    assert reason_against().startswith("predictions need torch 2.12.0; this is ")
