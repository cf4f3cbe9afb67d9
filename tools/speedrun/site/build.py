"""Writes the site into a folder."""

import json
from collections.abc import Collection
from pathlib import Path

from speedrun.base.errors import UserError
from speedrun.base.files import REPOSITORY, locked, replace_file
from speedrun.diff.html import TEMPLATES, templates
from speedrun.site.interactive import PLACES
from speedrun.site.models import drawn
from speedrun.site.pages import NAME, RECORD_FOLDERS, Site
from speedrun.site.search import search_index

ASSETS = {  # made of these files
    "style.css": ("chart.css", "style.css", "figures/style.css"),
    "site.js": ("site.js", "figures/touch.js"), "icon.svg": ("icon.svg",),
    **{f"figures/{name}.js": (f"figures/{name}.js",) for name in PLACES}}
MARK = ".built"  # lists the files that this made, which it may therefore replace


def build(out: Path, root: Path = REPOSITORY, only: Collection[str] = ()) -> list[str]:
    """Builds the site of the repository at `root` in the folder `out`; returns all files' paths.
    A site that is there stays until the new one is whole.

    only: the paths of the pages to build; all, if empty. Raises UserError, one line, if the folder
    holds something else and no site, and what reading the repository raises.
    """
    site, pages, made = Site(root), templates(), {}
    if out.exists() and not (out / MARK).exists() and any(
            path.name != f"{MARK}.lock" for path in out.iterdir()):
        raise UserError(f"{out}: there is something else in it; name an empty folder")
    pages.globals.update(
        layout="layout.html", site_name=NAME, path_of=site.path_of, script_of=site.script_of,
        raw_of=site.raw_of, lesson_of=site.lesson_of, block_paths=site.block_paths,
        version_of=site.version_of, life_of=site.life_of, record_folders=RECORD_FOLDERS,
        no_link=lambda m: None,
        href_to=lambda page: lambda m: site.relative(site.path_of(m), page))
    every = list(site.pages())
    wanted = [page for page in every if not only or page.path in only]
    first = next(iter(site.chains))
    navigation = [(first.capitalize(), f"{first}/index.html"), ("Lessons", "lessons/index.html"),
                  ("Run", "run.html"), ("Reference", "reference.html")]
    paths = {page.path for page in wanted}
    asked = [m for m in site.manifest.milestones if site.path_of(m) in paths]
    with drawn(site.manifest, asked) as site.models:
        pictured = {site.path_of(m) for m in site.models}
        for page in sorted(wanted, key=lambda page: page.path in pictured):  # pictures take longest
            text = pages.get_template(page.template).render(
                **page.what(), path=page.path, title=page.title, about=page.about,
                previous=page.previous, next=page.next, navigation=navigation,
                url=lambda path, page=page: site.relative(path, page.path))
            made[page.path] = text.encode()
    for m in site.manifest.milestones:
        made[site.raw_of(m)] = m.script.read_bytes()
    found = search_index(site, {page.path for page in every})
    index = json.dumps(found, ensure_ascii=True, separators=(",", ":"))
    made["search-index.js"] = f"window.searchIndex = {index};\n".encode()
    for name, parts in ASSETS.items():
        made[name] = b"".join((TEMPLATES / part).read_bytes() for part in parts)
    made |= site.files
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / MARK):
        _replace_site(out, made)
    return sorted(made)


def _replace_site(out, made):
    """Writes the files {path: content} into `out`, then removes those of the site that was there,
    and nothing that somebody has put beside it."""
    mark, old = out / MARK, []
    for left in out.rglob(".*.????????.tmp"):  # by a build that was killed
        left.unlink()
    if mark.exists():
        old = [path for path in mark.read_text(encoding="utf-8").split("\n")
               if path and (out / path).resolve().is_relative_to(out.resolve())]
    replace_file(mark, "\n".join([*made, *old, ""]).encode())  # first, as one may be killed
    for path, data in made.items():
        file = out / path
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{file} cannot be written: {error.strerror}") from None
        replace_file(file, data, to_disk=False)
    for file in (out / path for path in old if path not in made):
        file.unlink(missing_ok=True)
        for parent in file.parents[: len(file.relative_to(out).parts) - 1]:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
    replace_file(mark, "\n".join([*made, ""]).encode())
