"""What the optimizers that share gradients out send travels while they compute: the order, from the
log that lesson 07 draws, of real ranks.

Run: .venv/bin/python -m pytest tests/test_overlap.py
"""

import sys
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ranks import start_ranks
from snapshots import MANIFEST, declaring, handles, load_snapshot, micro_sizes
from speedrun.history.blocks import split_blocks
from speedrun.history.manifest import REPOSITORY

LINK = LATENCY, BANDWIDTH = 5e-3, 1e8  # seconds, bytes per second
WAYS = ((False, None), (False, LINK), (True, LINK))  # whether each waits at once; the link


def scatters_gradients(milestone, name):
    """Whether the block of this name in the milestone's script scatters."""
    blocks = split_blocks(milestone.script.read_text(encoding="utf-8"))
    return any(block.name == name and "reduce_scatter" in block.text for block in blocks)


SHARING = [(milestone.id, name) for name in ("ShardedAdam", "Muon")
           for milestone in declaring(name) if scatters_gradients(milestone, name)]


def log_steps(cases):
    """Of each case, (id, optimizer, at_once, link): what lesson.LoggedDist knows of the messages of
    this rank's step."""
    sys.path.insert(0, str(REPOSITORY / "lessons"))
    from lesson import LoggedDist

    dist.init_process_group("gloo")
    steps = []
    for id, name, *way in cases:
        module = load_snapshot(MANIFEST.get(id))
        module.dist = LoggedDist(*way)
        model = module.GPT(micro_sizes(module))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        if name == "Muon":
            params = [*model.blocks.parameters()]
            messages = len({param.shape for param in params})
            if messages == 1:  # no gates: two groups, as main has them
                params, messages = [dict(params=params[:4]), dict(params=params[4:])], 2
            optimizer = handles(module).make_muon(module, params, lr=0.1)
        else:
            tables = [param for key, param in model.named_parameters()
                      if "blocks." not in key and len(param) % 2 == 0]  # no gate of one row
            optimizer = module.ShardedAdam([dict(params=tables, lr=0.1)], betas=(0.8, 0.95),
                                           eps=1e-8, compiled=False)
            messages = len(tables)
        optimizer.step()
        assert len(module.dist.messages) == 2 * messages  # there and back
        steps.append([SimpleNamespace(**vars(message)) for message in module.dist.messages])
    dist.destroy_process_group()
    return steps


@pytest.fixture(scope="module")
def logs():
    """By case: of each of two ranks its scatters and its gathers."""
    cases = [(*optimizer, *way) for optimizer, way in product(SHARING, WAYS)]
    found = {case: [] for case in cases}
    for steps, _printed in start_ranks(2, log_steps, cases):
        for case, messages in zip(cases, steps, strict=True):
            found[case].append([[each for each in messages if each.name.startswith(kind)]
                                for kind in ("reduce_scatter", "all_gather")])
    return found


optimizers = pytest.mark.parametrize("id, name", SHARING)


@optimizers
def test_messages_travel_while_others_are_computed(logs, id, name):
    for scatters, gathers in logs[id, name, False, None]:
        assert len(scatters) == len(gathers) >= 2
        waits = [each.asked for each in scatters + gathers]
        assert waits == sorted(waits) and all(each.came > each.asked for each in gathers)
        assert max(each.launched for each in scatters) < waits[0]
        for gather, next_scatter in zip(gathers, scatters[1:], strict=False):
            assert gather.launched < next_scatter.asked


@pytest.mark.parametrize("at_once", [False, True])
@optimizers
def test_the_log_tells_who_waits_at_once_and_the_link_holds_back(logs, id, name, at_once):
    for scatters, gathers in logs[id, name, at_once, LINK]:
        for message, following in pairwise(scatters + gathers):
            assert (message.came < following.launched) == at_once
            begins = max(message.due, following.launched)
            assert following.due - begins == pytest.approx(LATENCY + following.nbytes / BANDWIDTH)
            assert following.came >= following.due
