"""What an idea gained is what its sources say, and nothing is computed where nothing compares.

Run: .venv/bin/python -m pytest tests/test_gains.py
"""

import re
from collections import Counter
from dataclasses import replace

import pytest

from snapshots import MILESTONES
from speedrun.diff.facts import changed_values, gained, read_side
from speedrun.figures.causes import causes
from speedrun.figures.tables import saved_table
from speedrun.history.effects import EVIDENCE, TIME, TOKENS, Effect
from speedrun.history.gains import (
    CAVEAT,
    OFFICIAL,
    comparable_base,
    estimates,
    gain_lines,
    loss_effects,
    own_gain,
    whole_effects,
    whole_records,
)
from speedrun.history.manifest import REPOSITORY, load_manifest
from speedrun.site.pages import Site

MANIFEST = load_manifest()
APART = [m for m in MILESTONES if m.incomparable]


# Seconds, percent of the time before, and the letter of the evidence, counted by hand from the
# records' own tables; several parts multiply.
@pytest.mark.parametrize("id, seconds, percent, evidence", [
    ("01", -546.00, -29.0, OFFICIAL), ("02", -428.52, -32.0, EVIDENCE[2]),
    ("03a", -73.82, -10.2, EVIDENCE[2]), ("05i", -9.36, -5.1, EVIDENCE[0]),
    ("09", -6.20, -4.2, EVIDENCE[1]), ("10a", -4.04, -2.8, EVIDENCE[1]),
    ("10e", -0.27, -0.2, EVIDENCE[0]), ("11a", -2.28, -1.8, EVIDENCE[1]),
    ("12c", -2.40, -2.2, EVIDENCE[2]), ("13e", -4.44, -4.7, EVIDENCE[1]),
    ("14b", -0.39, -0.4, EVIDENCE[1]), ("14c", -2.79, -3.3, EVIDENCE[1]),
    ("14d", -0.95, -1.1, EVIDENCE[1]), ("14h", -0.78, -1.0, EVIDENCE[1]),
    ("14i", -1.82, -2.2, EVIDENCE[1]),
])
def test_a_gain_is_that_of_the_idea_alone(id, seconds, percent, evidence):
    gain = own_gain(MANIFEST, MANIFEST.get(id))
    assert (round(gain.seconds, 2), round(100 * (gain.ratio - 1), 1)) == (seconds, percent)
    assert gain.evidence == evidence


def test_costs_and_other_machines_are_no_gain():
    for m in MILESTONES:
        for effect in m.effect:
            if effect.quantity == "seconds" and effect.before and effect.after > effect.before:
                assert not effect.counts or effect.whole, (m.id, effect.measured)
    assert own_gain(MANIFEST, MANIFEST.get("03d")) is None  # a cap costs time, and lowers the loss


def test_a_whole_record_names_who_shares_it():
    def of(id):
        return whole_records(MANIFEST, MANIFEST.get(id))

    assert of("05f") == ["record #17, shared with 05e: 3.8 to 3.57 minutes"]
    assert of("06") == ["record #29, shared with 05q and 05r: 2.812 to 2.731 minutes"]
    assert of("03d") == of("00") == []
    assert estimates(MANIFEST.get("06")) == loss_effects(MANIFEST.get("14g")) == []
    again = replace(MANIFEST)
    again.__dict__["records"] = MANIFEST.records | {16: replace(
        MANIFEST.records[16], retimed=({"minutes": 3.75}, {"minutes": 3.7}))}
    (line,) = whole_records(again, MANIFEST.get("05f"))
    assert line.endswith(": 3.7 to 3.57 minutes"), "the last time that it was timed"
    both = [whole_effects(MANIFEST, MANIFEST.get(id)) for id in ("14f", "14g")]
    assert both[0] == both[1] and {effect.whole for effect in both[0]} == {85}
    for m in MILESTONES:  # of each milestone of the race something is known, but of its start
        known = gain_lines(MANIFEST, m)
        assert known or m.id == "00" or m.chain != MILESTONES[0].chain, m.id


def test_all_that_a_milestone_gained():
    assert gain_lines(MANIFEST, MANIFEST.get("06e")) == [
        "all of #32, seconds 157.98 → 155.98 (-1.3%), 1,670 steps in both; before: #31; after:"
        " #32, on one RunPod node (the record's own before and after; 17 and 12 runs)",
        "all of #32, validation loss 3.2789 → 3.2780 (-0.0009); the same runs (the record's own"
        " before and after; 17 and 12 runs)",
        "the whole record #32, shared with 06c, 06d, 06f and 07: 2.656 to 2.625 minutes",
        "time not comparable with 06d: Minutes against 06b are those of the whole record #32, whose"
        " optimizer is 06f and 07."]


@pytest.mark.parametrize("id, place, line", [
    ("07", 0, "two official records: 2.11 s less (-1.2%)"),  # a sum is first
    ("11a", 0, "the record's own before and after: 2.28 s less (-1.8%); tokens -1.7%, time per"
     " token -0.1%"),
    ("14g", 0, "validation loss: -0.0046; 'Known isolated experiments suggest DC alone accounts for"
     " about 0.0046' (author's estimate)"),  # its own is before those of its whole record
    ("01", -1, "546.00 s less (-29.0%), official minutes"),
])
def test_where_a_line_of_gains_stands(id, place, line):
    assert gain_lines(MANIFEST, MANIFEST.get(id))[place] == line


def test_a_cause_of_evidence_is_named_for_most():
    named = Counter(gain.evidence for m in MILESTONES if (gain := own_gain(MANIFEST, m)))
    assert named[OFFICIAL] == 1 and named[EVIDENCE[1]] >= 30


# ---- nothing is computed where the comparison does not hold ----


def test_no_gain_is_computed_where_nothing_compares():
    assert len(APART) > 50
    for m in APART:
        gain = own_gain(MANIFEST, m)
        if TIME in m.incomparable.what:
            assert comparable_base(MANIFEST, m) is None
            assert gain is None or (gain.evidence != OFFICIAL and m.effect)
        if TOKENS in m.incomparable.what:
            assert comparable_base(MANIFEST, m, TOKENS) is None


def computed(m):
    """What official figures against the nearest timed ancestor would give, as pages would print
    it, unless it is the idea's own gain as well."""
    base = next((a for a in MANIFEST.lineage(m)[1:] if a.minutes), None)
    if not (base and m.minutes and m.record != base.record):
        return set()
    own = own_gain(MANIFEST, m)
    shares = {m.minutes / base.minutes - 1} if TIME in m.incomparable.what else set()
    if TOKENS in m.incomparable.what and base.tokens != m.tokens:
        shares.add(m.tokens / base.tokens - 1)
    known = {f"{abs(value - 1):.1%}" for value in (own.ratio, own.tokens or 1)} if own else set()
    known |= set(re.findall(r"[\d.]+%", " ".join(gain_lines(MANIFEST, m))))
    return {f"{abs(share):.1%}" for share in shares} - known


def test_tables_and_pictures_print_none():
    site, rows = Site(REPOSITORY), {}
    found = site._saved()["rows"]
    saved = [row[1].seconds if row[1] else 0 for row in found]
    others = {row[0].id: [*map(len, row[2:])] for row in found if not row[1]}
    assert [others[id] for id in ("03b", "05c", "08a")] == [[1, 0, 0], [0, 0, 1], [0, 3, 0]]
    assert saved == sorted(saved) and saved[0] < -500, "what saved most comes first"
    for line in saved_table(MANIFEST).splitlines()[2:]:
        rows[re.match(r"\| \[(\w+)\]", line)[1]] = line
    drawn = {cause.label.split()[0] for cause in causes(MANIFEST)}
    for m in APART:
        for figure in site._figures(m, MANIFEST.get(m.parent)):
            is_time = figure.name in ("minutes", "milliseconds per step", "peak memory, MiB")
            is_tokens = figure.name in ("steps", "tokens")
            if (TIME in m.incomparable.what and is_time) or (
                    TOKENS in m.incomparable.what and is_tokens):
                assert figure.change is None, (m.id, figure)
        assert not [text for text in computed(m) if text in rows.get(m.id, "")], m.id
        if not own_gain(MANIFEST, m):
            assert m.id not in drawn and m.id not in rows


@pytest.fixture(scope="module")
def pages():
    """The site's pages that show gains, {path: text}."""
    from speedrun.diff.html import templates
    from speedrun.site.build import NAME

    site, env = Site(REPOSITORY), templates()
    env.globals.update(
        layout="layout.html", site_name=NAME, path_of=site.path_of, script_of=site.script_of,
        raw_of=site.raw_of, lesson_of=site.lesson_of, block_paths={}, record_folders="",
        life_of=lambda m: lambda name: None, no_link=lambda m: None,
        href_to=lambda page: lambda m: None)
    wanted = {"saved.html", f"{MILESTONES[0].chain}/index.html",
              *(site.path_of(MANIFEST.get(id)) for id in ("03d", "13d", "13e", "14g"))}
    site.__dict__["lives"] = {}  # they take long, and show no gains
    return {page.path: env.get_template(page.template).render(
        **page.what(), path=page.path, title=page.title, about=page.about, previous=None, next=None,
        navigation=(), url=lambda path: path) for page in site.pages() if page.path in wanted}


def test_pages_print_none(pages):
    site = Site(REPOSITORY)
    for name, row in ((f"{MILESTONES[0].chain}/index.html", "<tr[^>]*>.*?</tr>"),
                      ("saved.html", "<tr>.*?</tr>")):
        rows = re.findall(row, pages[name], re.DOTALL)
        for m in APART:
            own = [text for text in rows if f'href="{site.path_of(m)}"' in text]
            assert not [t for text in own for t in computed(m) if f">{t}" in text or
                        f"−{t}" in text or f"+{t}" in text], (name, m.id)
    for id in ("03d", "13d", "13e", "14g"):
        m = MANIFEST.get(id)
        text = pages[site.path_of(m)]
        assert computed(m) and not [share for share in computed(m) if share in text], id
        assert m.incomparable.why.replace("'", "&#39;") in text


def test_a_diff_shows_no_minutes_that_do_not_compare():
    sides = [read_side(id) for id in ("13c", "13d")]
    names = [name for name, *_ in changed_values(*sides)["official figures"]]
    assert names == ["val loss"]
    lines = gained(*sides)
    assert lines[0].startswith(
        "seconds 106.74 → 105.78 (-0.9%), 1,775 steps in both; before: #59; after: #60")
    assert lines[-1].startswith("time and tokens not comparable with 13c: #60 is older than")
    names = [name for name, *_ in changed_values(read_side("03e"), read_side("04"))[
        "official figures"]]
    assert names[:3] == ["minutes", "steps", "tokens"]
    assert gained(read_side("03"), read_side("04")) == []


def test_a_change_has_its_sign():
    loss, seconds = [effect.measured for effect in MANIFEST.get("14g").effect
                     if effect.before and effect.quantity in ("val_loss", "seconds")][:2]
    assert loss.startswith("validation loss 3.2848 → 3.2771 (-0.0076)")
    assert seconds.startswith("seconds 78.56 → 78.97 (+0.5%)")


@pytest.mark.parametrize("quantity, before, after, more, text", [
    ("step_ms", 1500.25, 1400, {}, "milliseconds per step 1500.25 → 1400.00 (-6.7%)"),
    ("memory_mib", 31_000, 30_000, {}, "memory in MiB 31,000 → 30,000 (-3.2%)"),
    ("val_loss", 3.28, 3.2756, {}, "validation loss 3.2800 → 3.2756 (-0.0044)"),
    ("seconds", 90, 81, dict(steps=(1500, 1500), tokens=(3000, 2000)),
     "seconds 90.00 → 81.00 (-10.0%), 1,500 steps in both, tokens 3,000 → 2,000"),
    ("steps", None, None, dict(delta="a tenth fewer"), "steps: a tenth fewer"),
])
def test_a_change_in_words(quantity, before, after, more, text):
    effect = Effect(quantity=quantity, how="ablation", what="", source="", before=before,
                    after=after, **more)
    assert (effect.measured, effect.evidence) == (text, "ablation")


@pytest.mark.parametrize("runs, text", [
    ((1, 1), "one run each"), ((0, 1), "1 run after it, not stated before"),
    ((0, 5), "5 runs after it, not stated before"), ((1, 5), "1 and 5 runs")])
def test_evidence_counts_its_runs(runs, text):
    effect = Effect(quantity="steps", how="ablation", what="", source="", runs=runs)
    assert effect.evidence == f"ablation; {text}"


def test_a_caveat_stands_below_its_effect():
    for id in ("04", "05i", "12"):
        m = MANIFEST.get(id)
        lines = gain_lines(MANIFEST, m)
        for effect in m.effect:
            if effect.caveat:
                at = lines.index(f"{CAVEAT}{effect.caveat}")
                assert lines[at - 1].startswith(effect.measured), id
    assert sum(line.startswith(CAVEAT) for line in gain_lines(MANIFEST, MANIFEST.get("05i"))) == 2
