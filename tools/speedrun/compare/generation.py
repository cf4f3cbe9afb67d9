"""Compares scripts that generate text: their tokens per second, and whether answers are equal."""

from collections.abc import Sequence
from statistics import median
from typing import TextIO

from speedrun.base.errors import UserError
from speedrun.base.text import print_table, visible
from speedrun.compare.collect import parse_target, seeded
from speedrun.run.generation import Answers, generate
from speedrun.run.plan import make_plan
from speedrun.scripts.find import find_script


def only_generate(texts: Sequence[str]) -> bool:
    """Whether the targets called `texts` are scripts that generate; UserError if only some are."""
    scripts = [find_script(t.script) for t in map(parse_target, texts) if not t.log]
    generating = [script for script in scripts if script.generates]
    if generating and len(generating) < len(texts):
        raise UserError(f"{generating[0].name} generates text: only others that do compare with it",
                        2)
    return bool(generating)


def compare_generation(
    texts: Sequence[str], seeds: Sequence[int], stream: TextIO, *, settings: Sequence[str] = (),
    **options,
) -> list[list[Answers]]:
    """Runs the scripts in turn (A B A B), once per seed, and prints a table: the median of their
    tokens per second, least and most, how many times as fast as the first each is, and whether it
    drew the first one's answers.

    options: those of make_plan. Returns each script's Answers in the order of the seeds. Raises
    UserError, in one line, before anything runs, or for the first run that fails.
    """
    targets = [parse_target(text) for text in texts]
    plans = {(seed, target): make_plan(
        target.script, **options, settings=seeded([*settings, *target.settings], seed))
        for seed in seeds for target in targets}
    found = {target: [] for target in targets}
    for turn, ((seed, target), plan) in enumerate(plans.items(), start=1):
        found[target].append(generate(plan))
        print(f"[{turn}/{len(plans)}] {visible(target.text)}, seed {seed}: "
              f"{found[target][-1].tokens_per_s:,.0f} tokens/s", file=stream, flush=True)
    runs = list(found.values())
    speeds = [[one.tokens_per_s for one in answers] for answers in runs]
    ratios = [[a / b for a, b in zip(own, speeds[0], strict=True)] for own in speeds]
    texts_of = [[one.text for one in answers] for answers in runs]
    print_table({
        "": [visible(target.text) for target in found],
        "runs": [f"{len(own)}" for own in speeds],
        "tokens/s": [f"{median(own):,.0f} ({min(own):,.0f}–{max(own):,.0f})" for own in speeds],
        "speed": [f"{median(own):.2f}x ({min(own):.2f}–{max(own):.2f})" for own in ratios],
        "answers": ["the same" if own == texts_of[0] else "others" for own in texts_of],
    }, stream)
    print("median over the runs, least to most; speed: against the first script, seed by seed",
          file=stream)
    return runs
