"""Tables of what others found when they tried the milestones' ideas elsewhere."""

import statistics

from speedrun.base.text import UNKNOWN, markdown
from speedrun.figures.prelude import Timings
from speedrun.history.carries_over import Idea, Outside
from speedrun.history.manifest import Manifest

GITHUB_DROPS = str.maketrans("", "", ",.():'")


def anchor_of(idea: Idea) -> str:
    """The address of an idea's section within the page, as GitHub makes it of the heading."""
    return idea.name.lower().translate(GITHUB_DROPS).replace(" ", "-")


def idea_table(outside: Outside, manifest: Manifest) -> str:
    """A Markdown table for a file in lessons/: each idea, its milestones, and who found what."""
    rows = []
    for idea in outside.ideas:
        rows.append([f"[{idea.name}](#{anchor_of(idea)})", _links(idea, manifest),
                     "; ".join(f"**{verdict}**: {', '.join(names)}"
                               for verdict, names in names_by_verdict(idea).items())])
    return markdown(["idea", "milestones", "what others found"], rows)


def names_by_verdict(idea: Idea) -> dict[str, list[str]]:
    """{verdict: who found it, each once}; what was a relative of the idea, or its proposers' own
    test, says so. An idea without findings is unknown to all."""
    found = {verdict: list(dict.fromkeys(f"{f.who} ({f.of})" if f.of else f.who for f in findings))
             for verdict, findings in idea.by_verdict().items()}
    return found or {"unknown": ["no test was found"]}


def setting_table(outside: Outside) -> str:
    """A Markdown table of the settings that several findings share."""
    return markdown(["setting", "what is trained, and how it is judged"], [
        [f"[{s.who}]({s.url})", s.what] for s in outside.settings.values()])


def finding_sections(outside: Outside, manifest: Manifest) -> str:
    """A Markdown section for each idea, for a file in lessons/."""
    return "\n\n".join(
        f"### {idea.name}\n\nMilestones: {_links(idea, manifest)}\n\n{finding_table(idea)}"
        for idea in outside.ideas)


def finding_table(idea: Idea) -> str:
    """An idea's findings as a Markdown table, one a row, and what is unknown about it."""
    rows = []
    for f in idea.finding:
        notes = [f.of, "abstract or summary read" if f.read else None]
        note = "".join(f", {text}" for text in notes if text)
        setting = "" if f.setting else f"{f.what}; "
        rows.append([f"[{f.who}]({f.url}){note}", f.date,
                     setting + "; ".join(filter(None, (f.size, f.tokens))),
                     f.effect, f"**{f.verdict}**"])
    head = ["source", "date", "setting, size, tokens", "what was found", "verdict"]
    parts = [idea.unknown or "", markdown(head, rows) if rows else ""]
    return "\n\n".join(filter(None, parts))


def race_table(race: Timings) -> str:
    """A Markdown table of AdamW and Muon in one script, each with the settings that it was tuned
    to: the final loss of each seed, and the mean."""
    rows = []
    for (_, label), losses in race.losses.items():
        settings = label.split(" ")
        name = "Muon" if "muon=True" in settings else "AdamW"
        kept = ", ".join(f"`{s}`" for s in settings if not s.startswith("muon="))
        rows.append([name, kept, ", ".join(f"{loss:.4f}" for loss in losses),
                     f"{statistics.mean(losses):.4f}"])
    return markdown(["optimizer", "settings", "val loss of three seeds", "mean"], rows,
                    right=["mean"])


def _links(idea, manifest):
    """The idea's milestones as links of a file in lessons/."""
    found = [manifest.get(id) for id in idea.milestones]
    return ", ".join(f"[{m.id}](../history/{m.chain}/{m.name})" for m in found) or UNKNOWN
