"""The pictures of the milestones' models. A model is traced as it runs, which takes a second."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread

from markupsafe import Markup

from speedrun.anatomy import ACCENT
from speedrun.history.manifest import Manifest, Milestone, load_manifest

PLACES, DIGITS = re.compile(r' [dxy]="[^"]*"'), re.compile(r"(?<=\.\d\d)\d+")
UNTURNED = re.compile(r' transform="rotate\(-0 [^"]*"')
FEW = 2  # models that are traced sooner than processes start
MOST = 4  # processes, each of which holds PyTorch
PARTS = 4  # of a process's pictures, so that the first can be shown while the others are drawn


def compared_with(manifest: Manifest, m: Milestone) -> Milestone | None:
    """The nearest ancestor whose model may differ, beside which a milestone's is drawn."""
    return next((a for a in manifest.lineage(m)[1:] if has_picture(a)), None)


def has_picture(m: Milestone) -> bool:
    """Whether a milestone is about the model: a root or of kind architecture."""
    return m.kind == "architecture" or m.parent is None


@contextmanager
def drawn(
    manifest: Manifest, milestones: Iterable[Milestone]
) -> Iterator[dict[Milestone, Callable[[], tuple[Markup | None, list[str]]]]]:
    """{milestone: what returns its picture, or None for a script that has no model, and the names
    of removed parts, which it does not show}, for those that are about the model. They are drawn
    while others work, neighbours in one process: a picture needs the parent's model too."""
    wanted = [m for m in milestones if has_picture(m)]
    bases = [compared_with(manifest, m) for m in wanted]
    pairs = [(m.id, base and base.id) for m, base in zip(wanted, bases, strict=True)]
    if len(wanted) <= FEW:
        pictures = _draw(manifest.history, pairs)
        yield {m: partial(pictures.__getitem__, i) for i, m in enumerate(wanted)}
        return
    workers = max(1, min(MOST, (os.cpu_count() or 1) - 1))  # a core is left for the pages
    size = -(-len(wanted) // (PARTS * workers))
    with ProcessPoolExecutor(workers, get_context("spawn"), _alone) as pool:
        jobs = [pool.submit(_draw, manifest.history, pairs[start : start + size])
                for start in range(0, len(pairs), size)]
        yield {m: partial(_picked, jobs[i // size], i % size) for i, m in enumerate(wanted)}


def in_page(svg: str) -> Markup:
    """A picture in the colours of the page that holds it, places to a hundredth of a point."""
    svg = UNTURNED.sub("", svg)
    svg = PLACES.sub(lambda place: DIGITS.sub("", place[0]).replace("  ", " "), svg)
    svg = svg.replace('height="100%" fill="white"', 'height="100%" fill="none"')
    return Markup(svg.replace(ACCENT, "var(--accent)"))


def _alone():
    """A process traces on one thread, as the others have their cores, and ends with its parent."""
    Thread(target=_follow_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)


def _follow_parent():
    parent_process().join()
    os._exit(1)


def _draw(history: Path, pairs: list[tuple[str, str | None]]
          ) -> list[tuple[Markup | None, list[str]]]:
    from speedrun.anatomy.picture import model_svg, removed  # needs torch

    manifest, pictures = load_manifest(history), []
    for id, base in pairs:
        try:
            svg = in_page(model_svg(manifest, id, base or ()).decode())
            pictures.append((svg, removed(manifest, id, base) if base else []))
        except AttributeError:  # the script has no GPT
            pictures.append((None, []))
    return pictures


def _picked(job, number):
    return job.result()[number]
