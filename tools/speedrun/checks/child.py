"""Runs the checks in a process of its own, started by speedrun.checks.session.

Arguments: script, milestone's id, answer file, the id of the process that started it. Each line of
the answer file is a JSON object: {"begin": [group, check]}, {"group": ..., "outcome": {...}}, and
{"end": true} if the checks came to their end.
"""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path


def main(script: Path, id: str, answers: Path, parent: int) -> None:
    """Checks the script and writes the answers."""
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    sys.argv = [str(script)]  # as if it had been started itself

    from speedrun.checks.catalog import load_catalog
    from speedrun.checks.examine import examine

    with open(answers, "a", encoding="utf-8") as file:
        def tell(**answer):
            file.write(json.dumps(answer) + "\n")
            file.flush()

        catalog = load_catalog()
        milestone = catalog.manifest.get(id)
        tell(begin=["syntax", "syntax"])
        for group, outcome in examine(script, milestone, catalog,
                                      lambda group, name: tell(begin=[group, name])):
            tell(group=group, outcome=asdict(outcome))
        tell(end=True)


def end_with(parent):
    """Ends this process and those that it started when the command is gone."""
    while os.getppid() == parent:
        time.sleep(0.5)
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    os._exit(0)  # threads of the learner's script must not keep the command waiting
