"""One rank of a checked run, started by speedrun.checks.ranks with a folder as argument."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from speedrun.checks import sizes
from speedrun.checks.matrices import Mapping
from speedrun.checks.short_run import train
from speedrun.checks.subject import explain
from speedrun.snapshot import load_snapshot


def main(folder: Path) -> None:
    """Trains and writes rank<N>.json: the fields of Run, or `error`."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    script = Path(request["script"])
    mapping = request["mapping"]
    mapping["order"] = tuple(mapping["order"])
    try:
        initial = torch.load(folder / "initial.pt", weights_only=True)["initial"]
        module = load_snapshot(script)
        args = sizes.arguments(module, request["values"])
        answer = asdict(train(module, args, initial, Mapping(**mapping)))
    except BaseException as error:  # the learner's script may do anything
        answer = dict(error=explain(error, script))
    file = folder / f"rank{os.environ['RANK']}.json"
    file.write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # threads of a process group may outlive the interpreter and abort it
