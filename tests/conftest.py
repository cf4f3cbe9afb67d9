"""Fixtures shared by the tests; nothing to run here."""

import gc
import os
import signal
import sys

import pytest

# Before torch is imported: the tests compare losses of CPU runs, also on a machine with GPUs, and
# micro-sized models are fastest on one thread.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")
gc.disable()  # until all tests are collected: nothing of it is garbage
freeze = gc.freeze
gc.freeze = gc.unfreeze = lambda: None  # for which runs ask, too
# Seconds of each process: what jsonschema would import for IRIs, of which notebooks have none.
sys.modules["rfc3987_syntax"] = None

import torch.distributed as dist  # noqa: E402

from examinations import examinations  # noqa: E402
from snapshots import write_random_shards  # noqa: E402

# The files that take longest, a minute of a core at most, in this order: none is left for the end.
LONGEST = [f"test_{name}.py" for name in (
    "check_right", "smoke", "equivalence", "check_train", "encore", "predict", "parts",
    "check_verdicts", "lessons", "oracle", "new_milestone", "generate", "data", "site", "sample",
    "masks", "comparison", "prelude", "fp8", "attention_kernels", "run_milestone", "tools",
    "anatomy", "propagate", "diff_milestones")]


def pytest_collection_modifyitems(items):
    """Several processes (-n) each take one file after the other (--dist loadfile)."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST
               else len(LONGEST))


def pytest_collection_finish():
    gc.enable()


def pytest_runtest_setup():
    """No garbage of earlier tests is left, and no collection, for which every run asks, walks
    through torch and all that is there."""
    gc.collect()
    freeze()


def pytest_itemcollected(item):
    """Slow tests wait until they are asked for."""
    if item.get_closest_marker("slow") and "RUN_SLOW" not in os.environ:
        item.add_marker(pytest.mark.skip(reason="slow; set RUN_SLOW=1 to run it"))


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """A folder with two short train shards and a val shard of learnable tokens below 64."""
    folder = tmp_path_factory.mktemp("shards")
    write_random_shards(folder)
    return folder


@pytest.fixture(scope="module")
def ask():
    """See examinations.examinations."""
    with examinations() as request:
        yield request


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_works():
    """Jobs in a shell's background ignore SIGINT, and so would every process that a test starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_process_group_left():
    """A run that was refused halfway leaves its process group behind; the next test needs none."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
