"""What owners of one GPU learn before anything starts, with a program that stands for nvidia-smi.

Run: .venv/bin/python -m pytest tests/test_cards.py
"""

import os
from types import SimpleNamespace

import pytest

from nvidia_smi import fake_nvidia_smi
from speedrun.base.errors import UserError
from speedrun.doctor import checks
from speedrun.history.manifest import load_manifest
from speedrun.history.predictions import StoredPrediction
from speedrun.predict.cards import CARDS
from speedrun.run import gpus, plan
from speedrun.run.fit_batch import MARGIN
from speedrun.run.gpus import visible_capabilities, visible_gpus, visible_memory
from speedrun.run.plan import make_plan
from speedrun.run.preflight import check_values

pytestmark = pytest.mark.skipif(os.name == "nt", reason="a script stands for nvidia-smi")
T4, A100, B200 = (("Tesla T4", 15_360, "7.5"), ("NVIDIA A100-SXM4-80GB", 81_920, "8.0"),
                  ("NVIDIA B200", 183_359, "10.0"))
RTX_3090, RTX_4090 = (("NVIDIA GeForce RTX 3090", 24_576, "8.6"),
                      ("NVIDIA GeForce RTX 4090", 24_564, "8.9"))
H100 = "NVIDIA H100 80GB HBM3", 81_559, "9.0"
LAST = load_manifest().of_chain().milestones[-1]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function that gives this machine GPUs (name, MiB, compute capability), a torch that is
    built for a version of CUDA, and shards."""
    monkeypatch.setattr(plan, "has_shards", lambda folder: True)

    def has(*cards, driver="580.65.06", cuda="'13.0'", used=300):
        (tmp_path / "version.py").write_text(f"cuda: Optional[str] = {cuda}\n", encoding="utf-8")
        monkeypatch.setattr(gpus, "find_spec", lambda name: SimpleNamespace(
            origin=str(tmp_path / "__init__.py")))
        fake_nvidia_smi(tmp_path, monkeypatch, *({
            "name": name, "memory.total": str(mib), "memory.used": str(used),
            "compute_cap": capability, "driver_version": driver}
            for name, mib, capability in cards))

    return has


def planned(target="06", **choices):
    """The plan of a run whose shards may be missing."""
    return make_plan(target, for_elsewhere=True, **choices)


@pytest.mark.parametrize("card", [T4, RTX_3090, RTX_4090, A100, H100, B200], ids=lambda c: c[0])
def test_a_card_runs_what_it_can(card, machine, monkeypatch):
    machine(card)
    name, mib, text = card
    capability = tuple(map(int, text.split(".")))
    assert visible_capabilities() == [capability]
    assert [c.bf16 for c in CARDS.values() if c.name == name] == [card is not T4]
    (scale, *notes), options = (it := planned()).notes, it.options
    if card is T4:
        assert scale == ("scale: tiny (Tesla T4 has no bfloat16 tensor cores, without which the"
                         " record's sizes take days; --scale record overrides this)")
        assert options["bf16"] is False and notes[0].startswith("bf16: off (Tesla T4")
        assert gpus.peak_flops(name) is None  # so that no time is predicted
        with pytest.raises(UserError, match="^attention_kernel=FA2: .* this GPU has 7.5; leave"):
            planned(settings=["attention_kernel=FA2"])
        with pytest.raises(UserError, match="^train_seq_len=49152 is too long for a dense "
                           "mask; a GPU below compute capability 8.0 is fit for the tiny scale"):
            planned(scale="record")  # the script itself would choose a dense mask
        planned("01", scale="record")
    else:
        assert scale.startswith(f"scale: record (1 x {name}") and "bf16" not in options
        assert gpus.peak_flops(name)
    sizes = dict(vocab_size=257, use_fp8=None)  # None: the script looks
    if capability >= (8, 9):
        with pytest.raises(UserError, match="^vocab_size=257 is not a multiple of 16"):
            check_values(sizes, {}, 1, True, capability)
    else:
        check_values(sizes, {}, 1, True, capability)


@pytest.mark.parametrize("card", [T4, RTX_3090, RTX_4090, A100, H100, B200], ids=lambda c: c[0])
def test_the_doctors_advice_fits_the_memory(card, machine, monkeypatch):
    machine(card)
    line = StoredPrediction("", 0, fixed=7 * 10**9, per_token=400_000, val_per_token=130_000)
    monkeypatch.setattr(checks, "find_prediction", lambda script, options: line)
    capability = visible_capabilities()[0]
    torch = SimpleNamespace(cuda=SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 1,
        get_device_capability=lambda i: capability), version=SimpleNamespace(cuda="13.0"))
    scale = planned().scale
    gpu, cuda = checks.gpu_checks(torch, visible_gpus(), visible_memory(), scale, LAST)
    assert (gpu.name, cuda.name) == ("GPU", "CUDA")
    if card is T4:
        assert gpu.do == f"python tools/run_milestone.py {LAST.id} --scale tiny"
    elif card in (A100, H100, B200):
        assert (gpu.status, gpu.do) == ("ok", None)
    else:
        command, *options = gpu.do.split(" --set ")
        assert command == (
            f"python tools/run_milestone.py {LAST.id} --nproc 1 --device-batch 1")
        sizes = {name: int(value) for name, _, value in (it.partition("=") for it in options)}
        assert sizes == {"train_seq_len": 16_384, "val_seq_len": 65_536} or (
            line.alone(16_384, sizes["val_seq_len"]) <= MARGIN * card[1] * 2**20)
    monkeypatch.setattr(checks, "find_prediction", lambda script, options: None)
    assert checks.advice(LAST, card[1]).endswith("--device-batch auto")


# ---- what is wrong, in one line each ----


def test_a_driver_that_is_too_old(machine):
    words = ("driver 535.183.01 is too old for this torch, which is built for CUDA 13.0: update it"
             " to 580 or newer")
    machine(H100, driver="535.183.01")
    assert planned(scale="tiny").gpus == [] and planned().notes[0] == (
        f"scale: tiny ({words}; --scale record overrides this)")
    assert f"not on this machine: {words}, and the record's sizes need one" in (
        planned("01", scale="record").notes)
    machine(H100, driver="535.183.01", cuda="'12.6'")
    assert planned().scale == "record"
    machine(H100, cuda="None")
    assert "(torch is a build without CUDA; for the GPU: pip install" in planned().notes[0]


def test_two_different_gpus(machine):
    machine(RTX_4090, RTX_3090)
    assert planned("01").notes[1].startswith(
        "1 x NVIDIA GeForce RTX 4090, 1 x NVIDIA GeForce RTX 3090: all take the same share")
    assert not any("same share" in note for note in planned("01", nproc=1).notes)
    machine(RTX_4090, RTX_4090)
    assert not any("same share" in note for note in planned("01").notes)
    machine(RTX_4090, T4)
    assert [planned(nproc=ranks).scale for ranks in (1, 2)] == ["record", "tiny"]


def test_a_gpu_full_of_other_programs(machine):
    machine(RTX_4090, used=20_480)
    assert planned("01").notes[1] == (
        "GPU 0: 20.0 of 24.0 GiB taken by other programs, which nvidia-smi lists")
    for used, told in ((2_000, False), (3_600, False), (3_601, True)):  # a desktop; the border
        machine(("NVIDIA B200", 24_000, "10.0"), used=used)
        assert any("taken" in note for note in planned("01").notes) == told


def test_no_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert planned().notes[0].startswith("scale: tiny (nvidia-smi shows no GPU here")
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True),
                            version=SimpleNamespace(cuda="13.0"))
    gpu = next(checks.gpu_checks(torch, [], [], "tiny", LAST))
    assert gpu.status == "note" and "nvidia-smi, by which the tools find it, is not" in gpu.text
