"""What a training run in a rank is recorded as: its losses, a hash of every micro-batch that
`token_batches` dealt, and who orthogonalized what."""

import hashlib
import os

from snapshots import MANIFEST, load_snapshot, orthogonalizer, train


def record(milestone_id, overrides):
    """Trains and returns {losses, streams, matrices, buffers} of this rank.

    losses: unrounded, one for each validation; streams: {"train" or "val": one list of hashes for
    each stream that was read from}; orthogonalized: how many entries of matrices were; buffers: of
    how many there is a momentum.
    """
    module = load_snapshot(MANIFEST.get(milestone_id))
    streams = dict(train=[], val=[])
    token_batches = module.token_batches

    def recorded(pattern, *args, **kwargs):
        hashes = []
        streams["val" if "_val_" in pattern else "train"].append(hashes)
        for inputs, targets in token_batches(pattern, *args, **kwargs):
            hashes.append(batch_hash(inputs.numpy(), targets.numpy()))
            yield inputs, targets

    module.token_batches = recorded
    muons, sizes = watch_muon(module)
    losses = train(module, module.Hyperparameters(**overrides))
    buffers = sum(state["momentum_buffer"].numel() for muon in muons
                  for state in muon.state.values() if "momentum_buffer" in state)
    return dict(losses=losses, streams=streams, orthogonalized=sum(sizes), buffers=buffers)


def remembered(muon):
    """The number of matrices, or of stacks, of which a Muon keeps the momentum."""
    buffers = {param: state["momentum_buffer"] for param, state in muon.state.items()
               if "momentum_buffer" in state}
    return sum(len(buffer) if buffer.ndim > param.ndim else 1 for param, buffer in buffers.items())


def watch_muon(module):
    """Two lists that fill while the module trains: its Muon optimizers, and the number of entries
    each time that matrices are orthogonalized. Both stay empty for a milestone without Muon."""
    muons, sizes = [], []
    if hasattr(module, "Muon"):
        orthogonalize, init = getattr(module, orthogonalizer(module)), module.Muon.__init__

        def counted(matrices, *args, **kwargs):
            sizes.append(matrices.numel())
            return orthogonalize(matrices, *args, **kwargs)

        def noted(self, *args, **kwargs):
            muons.append(self)
            init(self, *args, **kwargs)

        setattr(module, orthogonalizer(module), counted)
        module.Muon.__init__ = noted
    return muons, sizes


def batch_hash(inputs, targets):
    """A hash of one micro-batch of int64 tokens, inputs and targets."""
    return hashlib.sha256(inputs.tobytes() + targets.tobytes()).hexdigest()


def threads_of_the_server():
    """How many threads the process has that this rank was forked from."""
    return len(os.listdir(f"/proc/{os.getppid()}/task"))
