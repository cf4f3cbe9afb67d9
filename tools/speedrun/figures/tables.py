"""Markdown tables made from the manifest, and the markers that enclose them in a file.

    <!-- begin milestones -->
    (whatever is here is replaced)
    <!-- end milestones -->
"""

import posixpath
import re
from collections.abc import Sequence

from speedrun.base.text import UNKNOWN, markdown, number_ranges
from speedrun.history.gains import own_gain, runs_text
from speedrun.history.manifest import Manifest, Milestone
from speedrun.history.records import Record
from speedrun.run.data import FINEWEB_SHARD_TOKENS, shards_read


def replace_between(text: str, name: str, content: str) -> str:
    """Return `text` with everything between the markers called `name` replaced by `content`.

    Raises ValueError unless both markers occur once, the beginning first.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    pieces = re.split(f"({begin}|{end})", text)
    if pieces[1::2] != [begin, end]:
        raise ValueError(f"{begin} and {end} must occur once each, in this order")
    return f"{pieces[0]}{begin}\n{content}\n{end}{pieces[-1]}"


def milestone_table(manifest: Manifest) -> str:
    """Return the table of the milestones, for a file in history/."""
    head = ["id", "idea", "records", "minutes", "steps", "tokens", "val loss", "kind", "lesson"]
    rows = []
    for m in manifest.milestones:
        rows.append([
            f"[{m.id}]({m.chain}/{m.name})",
            f"**{m.title}.** {m.idea}",
            records_of(m) or UNKNOWN,
            cell(m.minutes, "{:g}"),
            cell(m.train_steps, "{:,d}"),
            cell(m.tokens and m.tokens / 1e9, "{:.2f}B"),
            cell(m.val_loss, "{:.4f}"),
            m.kind,
            f"[read](../{m.lesson})" if m.lesson else UNKNOWN,
        ])  # fmt: skip
    return markdown(head, rows, right=["minutes", "steps", "tokens"])


MOST_SAVED = 20  # rows of saved_table


def saved_table(manifest: Manifest) -> str:
    """Return the table of the ideas that saved most seconds by themselves, for a file in
    history/."""
    found = [(m, gain) for m in manifest.milestones if (gain := own_gain(manifest, m))]
    found.sort(key=lambda pair: pair[1].seconds)
    rows = []
    for m, gain in found[:MOST_SAVED]:
        shares = [f"{value - 1:+.1%}" if value else UNKNOWN
                  for value in (gain.ratio, gain.tokens, gain.speed)]
        rows.append([f"[{m.id}]({m.chain}/{m.name}) {m.title}", f"{gain.seconds:+.2f}", *shares,
                     gain.evidence, runs_text(gain) or UNKNOWN])
    head = ["milestone", "seconds", "time", "tokens", "ms per token", "evidence", "runs"]
    return markdown(head, rows, right=head[1:5])


def rung_table(manifest: Manifest) -> str:
    """Return the table of a chain without records, for a file in its folder: each rung with the
    size of its diff, in lines, and the setting that takes its gain out."""
    from speedrun.diff.difference import find_difference  # difflib, which --help does not need

    rows = []
    for m in manifest.milestones:
        lines = UNKNOWN
        if m.parent:
            scripts = (manifest.get(m.parent).script, m.script)
            texts = [script.read_text(encoding="utf-8") for script in scripts]
            lines = sum(find_difference(*texts).size)
        rows.append([f"[{m.id}]({m.name})", f"**{m.title}.** {m.idea}", m.kind,
                     str(lines), cell(m.parameters, "{:,d}"), f"`{m.ablate}`" if m.ablate else ""])
    head = ["id", "idea", "kind", "diff", "parameters", "taken out by"]
    if not any(m.ablate for m in manifest.milestones):
        head, rows = head[:-1], [row[:-1] for row in rows]
    return markdown(head, rows, right=["diff", "parameters"])


def stated_table(manifest: Manifest) -> str:
    """Return the table of what others have stated of the milestones' steps, and of what is doubtful
    about it."""
    return markdown(["rung", "stated", "remark"], [
        [m.name, *map(" ".join, map(str.split, pair))] for m in manifest.milestones
        for pair in m.stated])


def lesson_table(milestones: Sequence[Milestone], folder: str) -> str:
    """Return the table of the notebooks and the milestones that each of them covers."""
    covered = {}
    for m in milestones:
        if m.lesson:
            covered.setdefault(m.lesson, []).append(m.id)
    return markdown(["notebook", "milestones"], [
        [f"[{posixpath.basename(path).removesuffix('.ipynb')}]({posixpath.relpath(path, folder)})",
         ", ".join(ids)] for path, ids in covered.items()])


def records_of(milestone: Milestone) -> str:
    """Return the records that a milestone covers, as text: "part of #19, #22–#24"."""
    part = [f"part of #{milestone.part_of}"] if milestone.part_of else []
    return ", ".join([*part, number_ranges(milestone.records)] if milestone.records else part)


def shard_table(manifest: Manifest) -> str:
    """Return the table of how many training shards each milestone reads."""
    head = ["milestone", "steps", "tokens a step reads", "steps per shard", "shards"]
    rows = []
    for m in manifest.milestones:
        if m.train_steps and m.tokens_read:
            steps = m.step_tokens_read
            sizes = sorted({steps[0], max(steps)})  # more than one where the batch grows
            rows.append([m.name, f"{len(steps):,}", " to ".join(f"{tokens:,}" for tokens in sizes),
                         " to ".join(f"{(FINEWEB_SHARD_TOKENS - 1) // tokens}" for tokens in sizes),
                         f"{shards_read(steps)}"])
    return markdown(head, rows, right=head[1:])


def record_table(records: Sequence[Record], manifest: Manifest) -> str:
    """Return the table of all public records, each with the milestones that cover it."""
    rows = []
    for r in records:
        covering = [m.id for m in manifest.milestones if r in m.covered]
        what = r.what + "".join(f"; re-timed at {t['minutes']:g} ({t['why']})" for t in r.retimed)
        people = ", ".join(r.people) or UNKNOWN
        rows.append([f"{r.number}", f"{r.minutes:g}", r.date, what, people,
                     ", ".join(covering) or UNKNOWN])  # fmt: skip
    head = ["record", "minutes", "date", "what was new", "who", "milestone"]
    return markdown(head, rows, right=head[:2])


def public_table(manifest: Manifest) -> str:
    """Return the table of the parts of the last script with a record beside the three files of the
    public one after record #89: the lines of both, and what ours leaves out."""
    from speedrun.history.blocks import split_blocks

    last = [m for m in manifest.milestones if m.covered][-1]
    source = last.script.read_text(encoding="utf-8")
    blocks = {block.name: block for block in split_blocks(source)}
    kernels = blocks["heading: Model"].line - blocks["heading: Kernels"].line
    composed = len(blocks["composed_heads"].text.splitlines())
    rest = len(source.splitlines()) - kernels - composed
    return markdown(["part", "public", "here", "what ours leaves out"], [
        ["the training script", "2,382", f"{rest:,d}",
         "the exchange of only those bigram gradients that a rank has touched (#71), one optimizer "
         "in three phases (#61), a transposed head (#61), padding matrices"],
        ["the kernel file", "1,292", f"{kernels:,d}",
         "tensor descriptors, persistent grids, tiles that are fixed for one GPU (#65, #69), "
         "kernels that transpose (#74, #76)"],
        ["the composed heads", "1,315", f"{composed:,d}",
         "kernels of their own, forward and backward (#85): ours are plain PyTorch"],
    ], right=["public", "here"])


def cell(value: float | None, form: str) -> str:
    """Return a number in a form like "{:.2f}", or the sign for what is not known."""
    return UNKNOWN if value is None else form.format(value)
