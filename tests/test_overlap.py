"""What the optimizers that share gradients out send travels while they compute: the order, from the
log that lesson 07 draws, of real ranks.

Run: .venv/bin/python -m pytest tests/test_overlap.py
"""

import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ranks import start_ranks
from snapshots import by_id, declaring, load_snapshot, micro_sizes
from speedrun.history.blocks import split_blocks
from speedrun.history.manifest import REPOSITORY


def scatters_gradients(milestone, name):
    """Whether the block of this name in the milestone's script scatters."""
    blocks = split_blocks(milestone.script.read_text(encoding="utf-8"))
    return any(block.name == name and "reduce_scatter" in block.text for block in blocks)


SHARING = [pytest.param(milestone, name, id=f"{by_id(milestone)}-{name}")
           for name in ("ShardedAdam", "Muon") for milestone in declaring(name)
           if scatters_gradients(milestone, name)]


def log_a_step(milestone, name, at_once=False, link=None):
    """What lesson.LoggedDist knows of each message of a rank's step of the optimizer."""
    sys.path.insert(0, str(REPOSITORY / "lessons"))
    from lesson import LoggedDist

    dist.init_process_group("gloo")
    module = load_snapshot(milestone)
    module.dist = LoggedDist(at_once, link)
    model = module.GPT(micro_sizes(module))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    if name == "Muon":
        optimizer = module.Muon(model.blocks.parameters(), lr=0.1, momentum=0.9, bf16=False,
                                compiled=False, use_triton=False)
    else:
        tables = [param for key, param in model.named_parameters() if "blocks." not in key]
        optimizer = module.ShardedAdam([dict(params=tables, lr=0.1)], betas=(0.8, 0.95), eps=1e-8,
                                       compiled=False)
    optimizer.step()
    dist.destroy_process_group()
    return [SimpleNamespace(**vars(message)) for message in module.dist.messages]


def steps_of_ranks(*arguments):
    """Of each of two ranks its scatters and its gathers."""
    for messages, _printed in start_ranks(2, log_a_step, *arguments):
        yield ([each for each in messages if each.name.startswith("reduce_scatter")],
               [each for each in messages if each.name.startswith("all_gather")])


@pytest.mark.parametrize("milestone, name", SHARING)
def test_messages_travel_while_others_are_computed(milestone, name):
    for scatters, gathers in steps_of_ranks(milestone, name):
        assert len(scatters) == len(gathers) >= 3
        waits = [each.asked for each in scatters + gathers]
        assert waits == sorted(waits) and all(each.came > each.asked for each in gathers)
        assert max(each.launched for each in scatters) < waits[0]
        for gather, next_scatter in zip(gathers, scatters[1:], strict=False):
            assert gather.launched < next_scatter.asked


def test_the_log_tells_who_waits_at_once_and_a_link_holds_back():
    link = latency, bandwidth = 5e-3, 1e8  # seconds, bytes per second
    milestone, name = SHARING[0].values
    for at_once in (True, False):
        for scatters, gathers in steps_of_ranks(milestone, name, at_once, link):
            for message, following in pairwise(scatters + gathers):
                assert (message.came < following.launched) == at_once
                begins = max(message.due, following.launched)
                assert following.due - begins == pytest.approx(
                    latency + following.nbytes / bandwidth)
                assert following.came >= following.due
