"""Started by tests, one process per rank: trains a milestone and records its losses, a hash of
every micro-batch that `token_batches` dealt, and who orthogonalized.

Arguments: milestone id, folder with overrides.json; writes rank<r>.json there.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tools"), str(Path(__file__).parents[1] / "data")]

from snapshots import load_snapshot  # noqa: E402
from speedrun.manifest import load_manifest  # noqa: E402


def main(milestone_id, folder):
    module = load_snapshot(load_manifest().get(milestone_id))
    overrides = json.loads(Path(folder, "overrides.json").read_text(encoding="utf-8"))
    streams = dict(train=[], val=[])  # one list of hashes per stream that was read from
    token_batches = module.token_batches

    def recorded(shards, *args, **kwargs):
        hashes = []
        streams["val" if "_val_" in str(shards[0].filename) else "train"].append(hashes)
        for inputs, targets in token_batches(shards, *args, **kwargs):
            hashes.append(batch_hash(inputs.numpy(), targets.numpy()))
            yield inputs, targets

    module.token_batches = recorded
    muons, orthogonalized = watch_muon(module)
    losses = module.main(module.Hyperparameters(**overrides))
    rank = int(os.environ.get("RANK", 0))
    buffers = sum("momentum_buffer" in state for muon in muons for state in muon.state.values())
    record = dict(
        losses=losses, streams=streams, orthogonalized=len(orthogonalized), buffers=buffers
    )
    Path(folder, f"rank{rank}.json").write_text(json.dumps(record), encoding="utf-8")


def watch_muon(module):
    """Two lists that fill while the module trains: its Muon optimizers, and an entry for each call
    of newton_schulz. They stay empty for a milestone without Muon."""
    muons, calls = [], []
    if hasattr(module, "Muon"):
        newton_schulz, init = module.newton_schulz, module.Muon.__init__

        def counted(*args, **kwargs):
            calls.append(None)
            return newton_schulz(*args, **kwargs)

        def noted(self, *args, **kwargs):
            muons.append(self)
            init(self, *args, **kwargs)

        module.newton_schulz, module.Muon.__init__ = counted, noted
    return muons, calls


def batch_hash(inputs, targets):
    """A hash of one micro-batch of int64 tokens, inputs and targets."""
    return hashlib.sha256(inputs.tobytes() + targets.tobytes()).hexdigest()


if __name__ == "__main__":
    main(*sys.argv[1:])
