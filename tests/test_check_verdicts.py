"""What is wrong is pinned to a block, or to blocks that are wrong only together.

Run: .venv/bin/python -m pytest tests/test_check_verdicts.py
"""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from examinations import MANIFEST, edited, failures, source_of
from speedrun.check.differences import Deviation
from speedrun.check.examine import Examination, in_words, located
from speedrun.check.screen import Outcome
from speedrun.check.transplant import Mixture, judge
from speedrun.history.guide import load_guide

LOOKS = dict(id="02", jobs=["schedules", "model"])  # and the two that all others need
# A change of three blocks that fit together only.
SWAPPED = [("def __init__(self, args, rotary)", "def __init__(self, rotary, args)"),
           ("Block(args, rotary)", "Block(rotary, args)"),
           ("CausalSelfAttention(args, rotary)", "CausalSelfAttention(rotary, args)")]


def test_several_faults_get_several_verdicts(ask):
    text = edited("02", ("F.relu(self.c_fc(x)).square()", "self.c_fc(x) ** 2"),
                  ("X.norm(dim=(-2, -1), keepdim=True)", "torch.linalg.vector_norm(X)"),
                  ("(args.train_steps - step)", "(args.train_steps)"),
                  ("F.scaled_dot_product_attention(q, k, v, is", "F.scaled_dot_product_attention"
                   "(query=q, key=k, value=v, is"))
    outcomes = ask(**LOOKS, text=text)
    found = failures(outcomes)
    assert list(found) == ["lr_multiplier", "MLP", "newton_schulz"]
    line = text[: text.index("self.c_fc(x) **")].count("\n") + 1
    first, last = map(int, re.search(r"MLP \(lines (\d+)-(\d+)\)", found["MLP"]).groups())
    assert first < line <= last
    # Known slips, of which the second is written otherwise here than in the guide.
    assert found["MLP"].endswith("Your activation squares negative inputs too; apply F.relu first.")
    assert found["newton_schulz"].endswith("each matrix should be divided by its own norm.")
    assert "lr_multiplier(4) of 7 steps" in found["lr_multiplier"]
    assert "CausalSelfAttention" in [o.name for o in outcomes if o.passed]


def test_a_pair_that_is_right_together_is_not_blamed_for_another_block():
    text = edited("01", ("[: x.size(1)].to(x.dtype)", "[: x.size(2)].to(x.dtype)"),
                  ("q, k = self.rotary(q), self.rotary(k)", "q, k = map(self.rotary, (q, k))"),
                  ("X.norm(dim=(-2, -1), keepdim=True)", "X.norm()"))
    tried = []

    def look(groups):  # as if the rotation and its use had moved behind the transpose
        tried.extend(map(tuple, groups))
        return [None if {*names} == {"Rotary", "CausalSelfAttention"}
                else (Deviation("a loss", "1", "2"), "model", {}) for names in groups]

    verdicts = judge(Mixture(source_of("01"), text), look)
    assert [v.names for v in verdicts if v.difference] == [("newton_schulz",)]
    assert ("Rotary", "CausalSelfAttention", "newton_schulz") in tried


def test_helpers_of_helpers_go_with_the_block_that_uses_them():
    milestone = "def norm(x):\n    return x\n\n\ndef cap(x):\n    return x\n"
    helpers = [f"def {name}(x):\n    return {body}\n" for name, body in (
        ("half", "x / TWO"), ("twice", "half(4 * x)"), ("unused", "0"))]
    learner = "\n\n".join(["TWO = 2\n", *helpers, "def norm(x):\n    return twice(x) / 2\n"])
    mixture = Mixture(milestone, learner)
    assert mixture.candidates() == ["norm"]
    assert mixture.helpers(["norm"]) == ["twice", "half", "TWO"]
    names = {}
    exec(mixture.script(["norm"])[0], names)
    assert (names["norm"](3), names["cap"](3)) == (3, 3) and "unused" not in names


def test_neighbours_are_those_of_which_one_uses_the_other():
    texts = ["\n\n".join(f"def {name}():\n    return {body}\n" for name, body in bodies)
             for bodies in ((("a", "1"), ("b", "c()")), (("a", "1"), ("b", "a()"), ("c", "2")))]
    pairs = ("ab", "ba", "bc", "cb", "ac", "ca")
    assert [Mixture(*texts).neighbours(*pair) for pair in pairs] == [True] * 4 + [False] * 2


def judged(milestone, learner, look, parent=""):
    """{block: (what is shown, the milestone's block that is replaced)}; look(names): the text of
    what these blocks show in the milestone's script, and its line there, or None."""
    def test(groups):
        found = map(look, groups)
        return [seen and (Deviation("a loss", "1", seen[0], 0, "", seen[1]), "model", {})
                for seen in found]

    verdicts = judge(Mixture(milestone, learner, parent), test)
    return {name: (v.difference and v.difference.got, v.replaced)
            for v in verdicts for name in v.names}


def test_a_name_that_only_the_milestones_caller_uses_is_no_fault():
    milestone = ("class GPT:\n    def copy(self):\n        pass\n\n\n"
                 "def train(net):\n    net.copy()\n")
    learner = "class GPT:\n    x = 1\n\n\ndef train(net):\n    net.x = 2\n"
    stops = ("it stops: AttributeError: 'GPT' object has no attribute 'copy'", 7)

    def look(names, train, both):
        return {("GPT",): stops, ("train",): train, ("GPT", "train"): both}[tuple(names)]

    def found(train, both, parent=""):
        return judged(milestone, learner, lambda names: look(names, train, both), parent)

    assert found(None, None) == {"GPT": (None, ""), "train": (None, "")}
    assert found(None, ("3", 0)) == {"GPT": ("3", ""), "train": (None, "")}, "a fault of its own"
    assert found(("2", 0), ("2", 0)) == {"GPT": (None, "train"), "train": ("2", "")}
    assert found(("2", 0), ("2", 0), learner)["GPT"] == (stops[0], ""), "still the parent's"


def test_blocks_of_one_symptom_are_tried_together_though_neither_calls_the_other():
    milestone, learner = ("def a():\n    return 1\n\n\ndef b():\n    return 1\n\n\n"
                          "def c():\n    return 1\n".replace("1", number) for number in "12")

    def look(names):  # b and c each show the other's dtype; a is wrong
        return None if {*names} == {"b", "c"} else ("float32", 0)

    assert judged(milestone, learner, look) == {
        "a": ("float32", ""), "b": (None, ""), "c": (None, "")}


CALLS = dict(a="1", b="a()", c="b()", d="1", e="1")  # five functions; three are neighbours


def named_together(fit, stop):
    """The blocks that are wrong, those that are named together as one text, of five functions,
    all the learner's. fit: what shows nothing if it alone is looked at; stop: what stops the script
    then; else numbers differ."""
    def test(groups):
        return [None if "".join(names) in fit else (Deviation(
            "a loss", "1", "it stops: x" if "".join(names) in stop else "3"), "model", {})
            for names in groups]

    texts = ["\n\n".join(f"def {name}():\n    return {number} * {body}\n"
                         for name, body in CALLS.items()) for number in (1, 2)]
    return ["".join(v.names) for v in judge(Mixture(*texts), test) if v.difference]


@pytest.mark.parametrize("fit, stop, wrong", [
    ("abcde", "", ""), ("abcd", "", "e"), ("abc", "", "d e"), ("ab", "", "c d e"),
    ("ac", "", "b d e"), ("ad", "", "b c e"), ("", "", "a b c d e"), ("", "a b", "a b c d e"),
    ("", "a b c", "abc d e"), ("", "a b c abc", "a b c d e"),
    ("a b c", "", "bc d e"), ("a b c bc ac", "", "ab d e")])
def test_blocks_are_right_wrong_or_wrong_only_together(fit, stop, wrong):
    assert named_together(fit.split(), stop.split()) == wrong.split()


@pytest.mark.parametrize("text, is_definition", [
    ("@cache\ndef f():\n    pass", True), ("async def f():\n    pass", True),
    ("# why\nX = 1", True), ("X: int = 1", True), ("X, Y = 1, 2", True), ("X[0] = 1", False),
    ("X += 1", False), ("assert X == 1", False), ("if X:\n    Y = 1", False)])
def test_new_statements_are_judged_and_new_definitions_are_not(text, is_definition):
    assert bool(Mixture("", f"{text}\n").candidates()) != is_definition


def test_a_mixed_script_has_both_imports_and_the_learners_new_fields():
    milestone = ('"""card"""\nimport math\n\n\nclass Hyperparameters:\n    a: int = 1\n\n\n'
                 "def f():\n    return 1\n\n\ndef g():\n    return f()\n\n\n"
                 'if __name__ == "__main__":\n    f()\n')
    learner = ('"""mine"""\nfrom __future__ import annotations\nimport json\n\n\nSIZE = 4\n\n\n'
               "class Hyperparameters:\n    a: int = 3\n    b: int = SIZE\n    c: str\n"
               "    d: int = 5\n\n\ndef g():\n    return 5\n\n\nprint(1)\n")
    mixture = Mixture(milestone, learner)
    assert mixture.candidates() == ["imports", "Hyperparameters", "g", "print(1)"]
    assert (mixture.lacking(), mixture.span("g"), mixture.span("print(1)")) == (
        ["f"], "lines 16-17", "line 20")
    assert [mixture.block_at(line) for line in (1, 5, 16, 17, 18, 20, 21)] == [
        "card", "", "g", "g", "", "print(1)", ""]
    text, origin = mixture.script(["g"])
    assert [(*where, line) for where, line in zip(origin, text.split("\n"), strict=False)
            if line.strip()] == [
        ("milestone", 1, '"""card"""'), ("milestone", 2, "import math"), ("learner", 0, "try:"),
        ("learner", 0, "    import json"), ("learner", 0, "    pass"),
        ("learner", 0, "except Exception:"), ("learner", 0, "    pass"),
        ("learner", 6, "SIZE = 4"), ("milestone", 5, "class Hyperparameters:"),
        ("milestone", 6, "    a: int = 1"), ("learner", 0, "    b: int = SIZE"),
        ("learner", 0, "    d: int = 5"), ("milestone", 9, "def f():"),
        ("milestone", 10, "    return 1"), ("learner", 16, "def g():"),
        ("learner", 17, "    return 5"), ("milestone", 17, 'if __name__ == "__main__":'),
        ("milestone", 18, "    f()")]
    whole = mixture.script(mixture.candidates())[0]
    exec(whole, names := {"__name__": "x"})
    assert "json" in names and "    a: int = 3\n    b: int = SIZE\n    c: str\n" in whole
    assert "print(1)" in whole and '"""mine"""' not in whole


@pytest.mark.parametrize("error, caller", [
    ("AttributeError", "f"), ("TypeError", "f"), ("KeyError", "f"), ("ValueError", "")])
def test_only_what_a_block_lacks_is_its_callers_business(error, caller):
    milestone, learner = (f"def g():\n    return {n}\n\n\ndef f():\n    return g() + {n}\n"
                          for n in (1, 2))
    lacks = Deviation("a loss", "1", f"it stops: {error}: x", milestone_line=6)
    assert Mixture(milestone, learner).caller("g", lacks) == caller
    assert Mixture(milestone, learner, learner).caller("g", lacks) == ""


@pytest.mark.parametrize("blocks", [
    ["CausalSelfAttention", "Block"],
    pytest.param(["CausalSelfAttention"], marks=pytest.mark.slow)])
def test_blocks_that_stop_alone_and_are_wrong_together_are_named_together(blocks, ask):
    slips = {slip.block: slip for slip in load_guide(MANIFEST.get("02")).slips}
    text = edited("02", *SWAPPED)
    for block in blocks:
        text = slips[block].apply(text)
    (found,) = failures(ask(**LOOKS, text=text)).values()
    assert found.startswith("CausalSelfAttention and Block and GPT (lines ")
    assert "These blocks fit only each other" in found
    assert [block for block in blocks if slips[block].words not in found] == [], "known slips"


def test_blocks_that_are_wrong_only_together_are_named_together(ask):
    # Each helper is right by itself; the second hands a view on that the first then changes.
    text = edited("02", ("momentum_buffer.mul_(momentum).add_(grad)\n    return grad.add("
                         "momentum_buffer, alpha=momentum)",
                         "momentum_buffer.mul_(momentum).add_(grad)\n"
                         "    return momentum_buffer.mul_(momentum).add_(grad)"
                         " if KEEP else grad.add(momentum_buffer, alpha=momentum)"),
                  ("class Muon(", "KEEP = False\n\n\nclass Muon("))
    state = "                state = self.state[matrices[0]]"
    text = text.replace(state, f"                globals().update(KEEP=True)\n{state}")
    found = failures(ask(**LOOKS, text=text))
    assert list(found) == ["nesterov_update"]
    assert found["nesterov_update"].startswith("nesterov_update and Muon (lines ")
    assert "These blocks fit only each other" in found["nesterov_update"]


def test_an_import_that_is_missing_is_told_with_its_line(ask):
    text = edited("02", ("import gc\n", ""))
    found = failures(ask(**LOOKS, text=text))
    line = text[: text.index("gc.collect")].count("\n") + 1
    assert any(f"line {line}: NameError" in said for said in found.values()), found


def test_a_name_of_the_contract_that_is_missing(ask):
    text = edited("02", ("def lr_multiplier(", "def lr_factor("),
                  ("* lr_multiplier(", "* lr_factor("))
    found = failures(ask(**LOOKS, text=text))
    assert "lr_multiplier(step, args), which tools call by this name" in found["lr_multiplier"]


def test_a_name_that_is_defined_twice():
    from speedrun.check.examine import examine

    text, looks = source_of("02"), {"model": [Deviation("a loss", "1", "2")]}
    examination = SimpleNamespace(text=text, parent="", differing=lambda _: looks)
    found = examine(f"{text}\n\ndef norm(x):\n    return x\n".encode(), examination)
    assert "two blocks are called norm" in failures(found)["blocks"]


@pytest.mark.parametrize("jobs, said", [
    (["two ranks"], True), (["model"], False), (["model", "two ranks"], False)])
def test_one_rank_is_called_right_only_where_it_is(jobs, said, monkeypatch):
    from speedrun.check import examine

    text, judged = source_of("02"), []
    monkeypatch.setattr(examine, "_judged", lambda *_: judged)
    line = text[: text.index("class MLP")].count("\n") + 2
    looks = dict.fromkeys(jobs, [Deviation("a loss", "1", "2", line), Deviation("it", "3", "4")])
    examination = SimpleNamespace(text=text, parent="", differing=lambda seen: (
        {"contract": [], **looks} if seen == text else {}), wanted={
            job: {"a loss": ["numbers"], "it": ["fact"]} for job in jobs})
    source = text.encode("utf-8-sig").replace(b"\n", b"\r\n")  # as editors may save it
    passed, *found = examine.examine(source, examination)
    words = examine.MORE_RANKS * said
    assert passed == Outcome("contract") and found == [
        Outcome(job, "a loss: 1", f"line {line}: 2. Further signs: it: 4, not 3", words,
                block="MLP") for job in jobs]
    judged += [Outcome("MLP", "1", "2"), Outcome("GPT"), Outcome("Muon", "1", "2", "It is known.")]
    assert [*examine.examine(source, examination)] == [
        passed, replace(judged[0], meaning=words), *judged[1:]]


@pytest.mark.parametrize("line, also, got", [
    (0, "", "2, at x = d['x']"), (0, "more", "2, at x = d['x']. Further signs: more"),
    (1, "more", "line 12: 2, at `x = d['x']`. Further signs: more"),
    (2, "", "2, at the milestone's x = d['x']"),
])
def test_a_difference_in_words_has_the_learners_own_line(line, also, got):
    found = located(Deviation("a loss", "1", "2", line, "x = d['x']"),
                    [("learner", 12), ("milestone", 34)])
    assert found.milestone_line == (34 if line == 2 else 0)
    assert in_words(found, also) == ("a loss: 1", got)
    bare = replace(found, got="it stops: KeyError", source="")
    assert in_words(bare)[1] == ("line 12: KeyError" if line == 1 else "it stops: KeyError")


@pytest.mark.parametrize("hung, jobs", [
    (None, ["contract", "model", "updates", "training"]), ("updates", ["contract", "updates"])])
def test_no_more_is_run_of_a_script_that_hangs(hung, jobs):
    every, asked = ["contract", "model", "schedules", "updates", "training"], []

    def shown(right):
        return {"a look": ["fact", str(right), 0.0]}

    def run(scripts, some):
        asked.append((scripts, some))
        return [{job: SimpleNamespace(hung=job == hung, observations=shown(job != "model"))
                 for job in some}]

    wanted = dict.fromkeys(every, shown(True)) | {"schedules": {}}  # nothing to see there
    here = SimpleNamespace(write=str.upper, wanted=wanted, jobs=every, _run=run)
    assert [*Examination.differing(here, "a").items()] == [
        (job, [Deviation("a look", "True", "False")] * (job == "model")) for job in jobs]
    assert asked == [(["A"], ["contract", "updates"]), (["A"], ["model", "training"])][
        : len(jobs) // 2]


@pytest.mark.parametrize("text, check, words", [
    ("def f(:\n", "syntax", "line 1: invalid syntax"),
    ("x = 1\0", "syntax", "null bytes"),
    ("import sys\nsys.exit(3)\n", "sys.exit(3)", "line 2: it ends the process: sys.exit(3)"),
    ("import no_such_thing\n", "imports", "line 1: ModuleNotFoundError"),
    ("", "Hyperparameters", "no such name in the script"),
])
def test_a_script_that_cannot_be_used(text, check, words, ask):
    found = failures(ask(**LOOKS, text=text))
    assert words in found.get(check, ""), found


@pytest.mark.parametrize("source, got, meaning", [
    (b"x = 1\n# caf\xe9\n", "line 2: byte 0xe9 is not UTF-8",
     "Save the file as UTF-8: Python and the tools read it so."),
    (b"\xff", "line 1: byte 0xff is not UTF-8",
     "Save the file as UTF-8: Python and the tools read it so."),
    (b"x = 1\n\ndef f(:\n", "line 3: invalid syntax", ""),
    (b"return 1", "line 1: 'return' outside function", ""),
    (b"\xef\xbb\xbfx = '\xc3\xa9'\r\n", "", ""),
])
def test_what_is_no_python_is_told_with_its_line(source, got, meaning):
    from speedrun.check.syntax import check_syntax

    told = check_syntax(source)
    assert told.got.startswith(got) and bool(told.got) == bool(got)
    assert (told.name, told.expected, told.meaning) == (
        "syntax", "a Python file" * bool(got), meaning)
