"""Reading logs, ours and the public records'. Run: python -m pytest tests/test_runlog.py"""

import math

import pytest

from speedrun.run.log import RULE, RunLog, Step, read_log

SCRIPT = '"""a card\n\nstep:7/20 val_loss:1.0000 train_time:7ms step_avg:1.00ms\n"""\nprint(1)\n'
OURS = f"""{SCRIPT}
{RULE}
environment:{{"python": "3.11.7", "device": "cuda NVIDIA H100 80GB HBM3", "world_size": 8}}
hyperparameters:{{"train_steps": 20, "total_batch_size": 4096}}
{RULE}
step:0/20 val_loss:5.5452 train_time:0ms step_avg:0.00ms
step:1/20 train_time:61ms step_avg:61.30ms
step:10/20 train_loss:4.5000 train_time:610ms step_avg:61.00ms
step:20/20 train_time:1219ms step_avg:60.95ms
step:20/20 val_loss:4.0123 train_time:1220ms step_avg:61.00ms
peak_memory:1234MiB
"""
LLMC = """s:0 tel:11.0092
s:0 trl:11.0091 lr:0.000001 norm:15.37
s:1 trl:10.9598 lr:0.000002 norm:15.24
s:250 tel:6.4600
"""


def write(tmp_path, text):
    path = tmp_path / "log.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_our_log(tmp_path):
    log = read_log(write(tmp_path, OURS))
    assert log.val_curve == [(0, 5.5452), (20, 4.0123)]
    assert log.train_curve == [(10, 4.5)]
    assert all(step.step != 7 for step in log.steps)  # quoted in the script
    assert log.last == Step(20, 20, val_loss=4.0123, train_time_ms=1220, step_avg_ms=61.0)
    assert log.hyperparameters == {"train_steps": 20, "total_batch_size": 4096}
    assert log.environment["device"] == "cuda NVIDIA H100 80GB HBM3"
    assert log.peak_memory_mib == 1234


def test_early_record_has_no_average_in_its_first_steps():
    log = RunLog()
    event = log.feed("step:1/6200 train_loss:10.9184 train_time:74701ms step_avg:nanms\n")
    assert event == Step(1, 6200, train_loss=10.9184, train_time_ms=74701, step_avg_ms=None)
    log.feed("step:5/20 val_loss:nan train_time:1ms step_avg:1.00ms")
    assert math.isnan(log.val_curve[0][1])  # a loss that diverged is kept


def test_times_in_seconds_as_track_3_writes_them(tmp_path):
    log = read_log(write(tmp_path, "step:25/50 val_loss:4.50000 train_time:3.675s step_avg:147.00ms"
                         "\nstep:50/50 val_loss:3.27839 train_time:7.352s step_avg:0.14703s\n"))
    assert log.val_curve == [(25, 4.5), (50, 3.27839)]
    assert [step.train_time_ms for step in log.steps] == pytest.approx([3675, 7352])
    assert log.last.step_avg_ms == pytest.approx(147.03) and log.unread == 0


def test_a_log_that_powershell_redirected(tmp_path):
    path = write(tmp_path, OURS)
    path.write_text(OURS, encoding="utf-16")
    assert read_log(path).val_curve == [(0, 5.5452), (20, 4.0123)]


def test_step_lines_that_are_not_understood_are_counted(tmp_path):
    log = read_log(write(tmp_path, OURS + "step:21/30 val_loss:3 train_time:7.3min step_avg:2ms\n"
                         "step:22/30 val_loss:3.1\n"))
    assert log.last.step == 20 and log.unread == 2


def test_llmc_log(tmp_path):
    log = read_log(write(tmp_path, LLMC))
    assert log.val_curve == [(0, 11.0092), (250, 6.46)]
    assert log.train_curve == [(0, 11.0091), (1, 10.9598)]
    assert log.last == Step(250, None, val_loss=6.46)


@pytest.mark.parametrize(
    "line, name, value",
    [
        ('hyperparameters:{"seed": 0}', "hyperparameters", {"seed": 0}),
        ('environment:{"torch": "2.13.0"}', "environment", {"torch": "2.13.0"}),
        ("python:3.11.7 torch:2.13.0 device:NVIDIA H100 80GB HBM3 world_size:8", "environment",
         {"python": "3.11.7", "torch": "2.13.0", "device": "NVIDIA H100 80GB HBM3",
          "world_size": "8"}),
        ("peak_memory:34217MiB", "peak_memory_mib", 34217),
        ("peak memory allocated: 34217 MiB reserved: 49936 MiB", "peak_memory_mib", 34217),
        ("peak memory consumption: 22881 MiB", "peak_memory_mib", 22881),
    ],
)
def test_facts_become_attributes(line, name, value):
    log = RunLog()
    assert log.feed(line) == name
    assert getattr(log, name) == value


@pytest.mark.parametrize("line", ["", "compiling ...", "step by step", "s:", "step:{step}/20 x",
                                  'hyperparameters:{"a":' + "[" * 100_000])
def test_other_lines_tell_nothing(line):
    log = RunLog()
    assert log.feed(line) is None
    assert log == RunLog()


def test_a_log_cut_anywhere_never_yields_a_wrong_value(tmp_path):
    whole = read_log(write(tmp_path, OURS))
    start = OURS.index("hyperparameters:{") + len('hyperparameters:{"train_steps": 20, "total_ba')
    for end in range(OURS.index("step:0/20"), len(OURS)):
        cut = read_log(write(tmp_path, OURS[:end]))
        assert cut.steps == whole.steps[: len(cut.steps)]
        assert cut.peak_memory_mib in (None, 1234)
    header = read_log(write(tmp_path, OURS[: OURS.index("step:0/20")]))
    assert header.last is None and header.hyperparameters["train_steps"] == 20
    with pytest.raises(ValueError):  # nothing but half a header
        read_log(write(tmp_path, OURS[:start]))


def test_a_cut_llmc_line_is_dropped(tmp_path):
    log = read_log(write(tmp_path, LLMC.rstrip("\n").removesuffix("00")))
    assert log.val_curve == [(0, 11.0092)]


@pytest.mark.parametrize("content", [b"", b"hello\n", bytes(range(256)) * 8])
def test_what_is_no_log_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a training log") as error:
        read_log(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("line", [
    'hyperparameters:{"total_batch_size": "x"}', 'hyperparameters:{"total_batch_size": [1]}',
    'rows:{"tokens": 1}\nhyperparameters:{"total_batch_size": 8}',
])
def test_a_log_whose_tokens_cannot_be_counted_is_refused(tmp_path, line):
    with pytest.raises(ValueError, match="log.txt is damaged: its hyperparameters or rows give"):
        read_log(write(tmp_path, f"{line}\nstep:0/2 train_time:0ms step_avg:nanms\n"))
