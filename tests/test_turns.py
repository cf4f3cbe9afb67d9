"""Programs side by side, one timed at a time: order, limits, an end by the clock, no remains.

Run: .venv/bin/python -m pytest tests/test_turns.py
"""

import contextlib
import io
import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from speedrun.base.errors import UserError
from speedrun.compare import turns
from speedrun.compare.turns import End, Launch, Task, take_turns

pytestmark = pytest.mark.skipif(not turns.CAN_STOP, reason="programs cannot be stopped here")
# Programs: one that is timed says what it has seen of the other's counter while it had its turn.
TIMED = """
import json, pathlib, sys, time
say = lambda **what: print(json.dumps(what), flush=True)
say(event="ready")
assert sys.stdin.readline() == "go\\n"
count = pathlib.Path("count")
wait = time.sleep
wait(0.05)  # what was under way
before = count.read_text() if count.exists() else ""
wait(0.15)
after = count.read_text() if count.exists() else ""
print("a line of the script's own")
say(event="timed", moved=before != after)
say(event="over")
"""
COUNTS = """
import os, time
end = time.monotonic() + float(SECONDS)
n = 0
while time.monotonic() < end:
    n += 1
    with open("new", "w") as file: file.write(str(n))
    os.replace("new", "count")
    time.sleep(0.01)
"""
PRINTS = "print('{\"event\": \"result\", \"n\": 1}'); print('{broken'); print('text')"
DIES = "import os; print('{}', flush=True); os.kill(os.getpid(), 9)"
HANGS = "import time; print('{}', flush=True); time.sleep(60)"


@pytest.fixture
def task(tmp_path, monkeypatch):
    """task(name, code, ...): a Task that runs Python code in tmp_path."""
    monkeypatch.chdir(tmp_path)

    def make(name, code, **more):
        command = [sys.executable, "-IS", "-c", code]
        return Task(name, lambda: Launch(command, dict(os.environ), tmp_path / f"{name}.txt"),
                    **more)
    return make


def run(waiting, slots=3, gib=10.0, **more):
    """Everything that take_turns yields: (name, dict or End)."""
    with contextlib.closing(take_turns(waiting, slots, gib, **more)) as results:
        return [(task.name, result) for task, result in results]


def ends(found):
    return {name: result for name, result in found if isinstance(result, End)}


def test_all_others_stand_still_while_one_is_timed(task):
    start = time.monotonic()
    counts = f"import subprocess as s, sys\ns.run([sys.executable, '-IS', '-c', {COUNTS!r}])"
    found = run([task("counts", counts.replace("SECONDS", "1")), task("a", TIMED),
                 task("b", TIMED)])
    whole = time.monotonic() - start
    assert {name: result["moved"] for name, result in found if isinstance(result, dict)} == {
        "a": False, "b": False}
    assert {name: end.code for name, end in ends(found).items()} == {"a": 0, "b": 0, "counts": 0}
    assert found[-1][0] == "counts" and found[-1][1].seconds < whole - 0.4, "without its stops"


def test_a_stop_lasts_as_long_as_the_turn(monkeypatch):
    told, clock = [], [10.0]
    monkeypatch.setattr(turns.time, "monotonic", lambda: clock[0])
    timed, other = (object.__new__(turns._Job) for _ in range(2))
    for job in (timed, other):
        vars(job).update(start=1.0, stopped_s=0.5, turn_start=None, tell=told.append,
                         process=SimpleNamespace(stdin=io.StringIO()))
    timed.begin_turn([timed, other])
    clock[0] = 13.0
    timed.end_turn([timed, other])
    clock[0] = 20.0
    assert (timed.seconds(), other.seconds(), told) == (18.5, 15.5, ["SIGSTOP", "SIGCONT"])


def test_results_and_ends(task, tmp_path):
    def refused():
        raise UserError("no such script")

    gone = Task("gone", lambda: Launch([str(tmp_path / "x")], {}, tmp_path / "gone.txt"))
    found = run([task("prints", PRINTS), Task("refused", refused), gone, task("dies", DIES),
                 task("hangs", HANGS, limit_s=0.3)], slots=1)
    assert found[:2] == [("prints", {"event": "result", "n": 1}), ("prints", found[1][1])]
    last = ends(found)
    assert last["refused"] == End(None, "no such script")
    assert last["gone"] == End(None, f"[Errno 2] No such file or directory: '{tmp_path / 'x'}'")
    assert (last["prints"].code, last["dies"].code) == (0, -signal.SIGKILL)
    assert last["hangs"].reason == "it did not end within 0.3 s" and last["hangs"].code
    assert [name for name, end in found if isinstance(end, End)] == [
        "prints", "refused", "gone", "dies", "hangs"], "one at a time, in order"


def test_a_turn_that_does_not_end_is_taken_away(task, monkeypatch):
    monkeypatch.setattr(turns, "TURN_S", 0.3)
    monkeypatch.setattr(turns, "PATIENCE_S", 0.3)
    hangs = ("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
             "print('{\"event\": \"ready\"}', flush=True)\ninput()\ntime.sleep(60)")
    found = ends(run([task("hangs", hangs), task("next", f"{TIMED}wait(0.4)  # its turn is over")]))
    assert found["hangs"].reason == "it was not timed within 0.3 s" and found["next"].code == 0
    assert found["hangs"].code == -signal.SIGKILL


@pytest.mark.parametrize("how", ["seconds", "signal", "error"])
def test_what_is_cut_off_waits_again_and_nothing_stays(task, how, tmp_path):
    child = f"import subprocess, sys\nsubprocess.run([sys.executable, '-IS', '-c', {HANGS!r}])"
    waiting = [task("hangs", child), task("counts", COUNTS.replace("SECONDS", "60")),
               task("timed", TIMED.replace("wait(0.15)", "wait(60)")), task("later", PRINTS)]
    names = [it.name for it in waiting]
    start, more = time.monotonic(), {}
    if how == "seconds":
        more["seconds"] = 0.5
    elif how == "signal":
        more["is_stopped"] = lambda: time.monotonic() > start + 0.5
    else:  # the caller cannot write what it was given
        waiting.insert(2, task("prints", PRINTS))
        del names[2:]
    with pytest.raises(OSError) if how == "error" else contextlib.nullcontext():
        with contextlib.closing(take_turns(waiting, 3, 0.0, **more)) as results:
            for _, result in results:
                if isinstance(result, End):
                    time.sleep(0.2)
                    raise OSError(28, "No space left on device")
    assert [it.name for it in waiting][:len(names)] == names
    before = (tmp_path / "count").read_text() if (tmp_path / "count").exists() else ""
    time.sleep(0.1)
    assert not before or (tmp_path / "count").read_text() == before
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("running, waiting, starts", [
    ([], ["b", "c"], "b"), (["a"], ["b", "c"], "c"), (["a"], ["b"], None),  # b comes after a
    ([], ["c", "b", "a"], "c"), (["4"], ["6"], "6"), (["5"], ["6", "5"], None),
    (["5"], ["6", "4"], "4"), ([], ["11", "4"], "11"), (["1"], ["11", "5", "4"], "4")])
def test_who_starts_next(running, waiting, starts):
    def made(name):  # a number: GiB of ten
        return Task(name, None, float(name) if name.isdecimal() else 0.0,
                    after=frozenset({"a"} if name == "b" else ()))

    jobs = [SimpleNamespace(task=made(name)) for name in running]
    found = turns._next([made(name) for name in waiting], jobs, 10.0)
    assert (found and found.name) == starts


def test_memory_and_order_decide_who_starts(task):
    running = []

    def listed(name, **more):
        inner = task(name, PRINTS, **more)

        def prepare():
            running.append(name)
            return inner.prepare()
        return Task(name, prepare, inner.gib, inner.limit_s, inner.after)

    waiting = [listed("a", gib=8), listed("huge", gib=99), listed("b", gib=5),
               listed("small", gib=2), listed("last", after=frozenset({"b"})), listed("cpu")]
    found = ends(run(waiting))
    assert running == ["a", "small", "cpu", "huge", "b", "last"]
    assert found["a"].shared and found["small"].shared and not found["huge"].shared
    assert not waiting
