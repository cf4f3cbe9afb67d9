"""Lists what a script still needs to become a milestone, by its text alone."""

from speedrun.check.transplant import Mixture, fields_of
from speedrun.history.guide import blocks_of
from speedrun.history.manifest import Milestone, load_manifest

FIELDS = "Hyperparameters"


def left_to_write(milestone: Milestone, text: str) -> list[str]:
    """Lines that name the blocks and fields to write, change and remove in a script of this text,
    [] if there are none. What no ancestor of the milestone has is the learner's own and stays.

    Raises SyntaxError or ValueError as `Mixture`.
    """
    scripts = [m.script.read_text(encoding="utf-8") for m in load_manifest().lineage(milestone)]
    before = {name: block for script in reversed(scripts[1:])
              for name, block in blocks_of(script).items()}
    mixture = Mixture(scripts[0], text)
    wanted, mine = ({name: block.text for name, block in blocks.items()}
                    for blocks in (mixture.milestone, mixture.learner))
    changed = [name for name in mixture.candidates() if name not in ("imports", FIELDS)]
    lines = [("to write", mixture.lacking()),
             ("to change", [name for name in changed if name in wanted]),
             ("to remove", [name for name in mixture.added if name in before])]
    if FIELDS in wanted and FIELDS in mine:
        fields, own = fields_of(wanted[FIELDS]), fields_of(mine[FIELDS])
        once = {name for script in scripts[1:] for name in fields_of(blocks_of(script)[FIELDS])}
        lines += [("fields to add", [name for name in fields if name not in own]),
                  ("fields with another default",
                   [name for name, line in fields.items() if own.get(name, line) != line]),
                  ("fields to remove", [name for name in own if name in once - fields.keys()])]
    return [f"{what}: {', '.join(names)}" for what, names in lines if names]
