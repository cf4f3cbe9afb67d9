"""What can be searched for: names, people, other words for the same, headings, commands."""

import re
import tomllib
from collections.abc import Iterator

from speedrun.base.text import number_ranges
from speedrun.history.manifest import Milestone
from speedrun.history.schema import check_keys
from speedrun.site.lessons import lesson_headings, lesson_title
from speedrun.site.pages import SECTIONS, Site, first_line
from speedrun.site.text import HEADING, anchor

TERMS = "search_terms.toml"  # in history/
BEST = "|"  # before the words that mean an entry before all others; site.js looks for it
Found = tuple[str, str, str, str, str]  # name, kind, about, path, words that are not shown


def search_index(site: Site, paths: set[str]) -> list[Found]:
    """What can be found, the best kinds first; paths: the pages of the site. Raises as load_terms.
    """
    return [found for found in _all(site) if found[3].partition("#")[0] in paths]


def load_terms(site: Site) -> dict[Milestone | str, list[str]]:
    """{milestone, or path of a page: the words that people type for it}; empty without a file.
    Words that mean this milestone before all others come last, after a BEST.

    Raises ValueError, one line, for a milestone that there is not.
    """
    path = site.root / "history" / TERMS
    if not path.is_file():
        return {}
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    check_keys(f"{path.name}: ", table, ("milestones", "pages"), ("milestones", "pages"))
    slugs, found, best = {m.slug: m for m in site.manifest.milestones}, {}, {}
    for word, names in table["milestones"].items():
        for place, name in enumerate(names):
            if name not in slugs:
                raise ValueError(f'{path.name}: {word}: there is no milestone "{name}"')
            (found if place else best).setdefault(slugs[name], []).append(word)
    found |= {m: [*found.get(m, ()), BEST, *words] for m, words in best.items()}
    return found | table["pages"]


def _all(site: Site) -> Iterator[Found]:
    terms = load_terms(site)
    for m in site.manifest.milestones:
        yield (f"{m.id} {m.title}", "milestone", m.idea, site.path_of(m), " ".join([
            m.slug.replace("_", " "), "changed change diff script", *m.authors, *terms.get(m, ())]))
    for page in site.pages():
        if page.path in terms:
            yield page.title, "page", page.about, page.path, " ".join(terms[page.path])
    for thread in site.threads:
        steps = [site.manifest.get(step.milestone) for step in thread.step]
        words = [word for m in steps for word in terms.get(m, ()) if word != BEST]
        words += [m.title for m in steps]
        yield (thread.title, "thread", " → ".join(m.id for m in steps), site.thread_path(thread),
               " ".join(["evolution history idea", thread.about, *words]))
    for m in site.manifest.milestones:
        if m.program == site.first_program:
            yield (f"Run {m.id}: GPUs, data, download", "command", m.title,
                   f"run.html#run-{m.id}", f"h100 shards vram {m.slug.replace('_', ' ')}")
            yield (f"Lines of {m.id}", "script", m.title, site.script_of(m), "line origin every")
    for name, path in site.block_paths.items():
        yield name, "block", f"{len(site.lives[name])} versions", path, ""
    for name, entry in site.manifest.glossary.items():
        yield name, "hyperparameter", entry.meaning, f"hyperparameters.html#{name}", ""
    for path in site.notebooks:
        yield lesson_title(path), "lesson", "", f"lessons/{path.stem}.html", ""
    for r in site.records:
        yield (f"Record #{r.number}", "record", f"{r.minutes:g} minutes, {r.date}: {r.what}",
               f"records.html#r{r.number}", " ".join(r.people))
    people = {}
    for r in site.records:
        for person in r.people:
            people.setdefault(person, []).append(r.number)
    for person, numbers in people.items():
        yield (person, "person", f"record{'s' * (len(numbers) > 1)} {number_ranges(numbers)}",
               f"records.html#r{numbers[0]}", "")
    for path in sorted((site.root / "tools").glob("*.py")):
        name = f"tools/{path.name}"
        yield name, "command", first_line(path), f"reference.html#{path.stem}", ""
    for path in site.notebooks:
        for heading in lesson_headings(path):
            yield _plain(heading), "section", lesson_title(path), (
                f"lessons/{path.stem}.html#{anchor(_plain(heading))}"), ""
    titles = {page.path: page.title for page in site.pages()}
    for heading in _headings(site.root / "history" / "README.md"):
        path, _, at = SECTIONS.get(anchor(_plain(heading)), "").partition("#")
        if at:  # a section of a page
            yield _plain(heading), "section", titles[path], f"{path}#{at}", ""
    for file, path, title, _ in site.texts():
        for heading in _headings(site.root / file):
            yield _plain(heading), "section", title, f"{path}#{anchor(_plain(heading))}", ""


def _headings(path):
    """The headings of a Markdown file below its title, each once; none without the file."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return dict.fromkeys(h[2] for h in HEADING.finditer(text) if len(h[1]) > 1)


def _plain(heading):
    """A heading without Markdown's marks, as its anchor is made of it."""
    return re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", lambda found: found[1] or "", heading)
