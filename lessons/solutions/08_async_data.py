"""Checks, hints and solutions of the exercises in lessons/08_async_data.ipynb."""

import queue
import random
import tempfile
import threading
import time
from itertools import islice
from pathlib import Path

# ---- 1: batches that must wait to hide a shard's change ----


def check_depth(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a number of batches, not {answer!r}") from None
    meanings = {
        1: "one batch ahead gives the thread one step of 90 ms; a change takes 365",
        4: "four steps are 360 ms, so the loop would still wait for 5; a step takes 90 ms, not 93,"
           " because the thread works while the loop computes",
        6: "that hides the change, but a smaller number does as well",
        122: "that covers the change with ordinary batches of 3 ms; what covers it are steps",
        365: "that is the change in ms; count the steps of 90 ms that cover it",
    }
    assert value == round(value), (
        f"{value:g} is not a whole number; after four batches the change is not hidden yet")
    if value != 5:
        raise AssertionError(
            f"{value:g} is not the smallest number of batches;"
            f" {meanings.get(value, 'a batch requested n steps ahead has 90 n ms to get ready')}")


# ---- 2: several ranks, which wait for each other ----


def step_waits(loads, compute, ahead):
    asked, waits, now = [], [], 0.0
    ready = [0.0] * len(loads)
    for k in range(len(loads[0])):
        asked.append(now)
        begin = asked[max(0, k - ahead)]
        ready = [max(free, begin) + load[k] for free, load in zip(ready, loads, strict=True)]
        waits.append(max(0.0, max(ready) - now))
        now += waits[-1] + compute
    return waits


def check_ranks(answer):
    assert callable(answer), f"expected the function step_waits, not {answer!r}"
    early, late, plain = ([45 if step == slow else 1 for step in range(12)] for slow in (5, 6, 99))
    draw = random.Random(0)
    mixed = [[draw.choice((1, 3, 30)) for _step in range(12)] for _rank in range(4)]
    cases = {
        "one rank": ([late], "compare it with the lesson's `waits`"),
        "two ranks, of which one is late": (
            [plain, late], "a step is as late as its slowest rank"),
        "two ranks that are late in the same step": (
            [late, late], "they wait at the same time, so it counts once"),
        "two ranks that are late one after the other": (
            [early, late], "while one rank waits for its batch, the other's thread goes on"),
        "four ranks": (mixed, "a thread begins a batch once it has been requested and the one"
                              " before is ready, each rank's thread for itself"),
    }
    for name, (loads, why) in cases.items():
        for ahead, compute in ((0, 10), (1, 10), (3, 10), (1, 17)):
            result = answer([list(load) for load in loads], compute, ahead)
            assert result is not None, "the function returns nothing; return a wait for each step"
            assert hasattr(result, "__len__"), (
                f"expected a list with a wait for each of 12 steps, not {result!r}")
            assert len(result) == 12, f"expected a wait for each of 12 steps, got {len(result)}"
            for step, right in enumerate(step_waits(loads, compute, ahead)):
                assert abs(result[step] - right) < 1e-6, (
                    f"with {name}, steps of {compute} ms and ahead = {ahead}, step {step} waits for"
                    f" {right:g} ms, not {result[step]:g}; {why}")
    for name, spread in (("in the same steps", 0), ("in different steps", 1)):
        loads = [[400 if step % 64 == 8 * rank * spread else 3 for step in range(1, 257)]
                 for rank in range(8)]
        print(f"8 ranks, 256 steps of 90 ms, shards that end {name}: waits",
              ", ".join(f"{sum(answer(loads, 90, ahead)):.0f} ms ({ahead} ahead)"
                        for ahead in (0, 1, 4)))


# ---- 3: a thread and a queue ----

CHANGE, AHEAD = 0.05, 8  # seconds that a shard's change takes; batches that may wait


def prefetched(batches, ahead):
    waiting = queue.Queue(maxsize=ahead)

    def work():
        error = None
        try:
            for batch in batches:
                waiting.put((batch, None))
        except Exception as problem:
            error = problem
        waiting.put((None, error or StopIteration()))

    threading.Thread(target=work, daemon=True).start()
    while True:
        batch, error = waiting.get()
        if isinstance(error, StopIteration):
            return
        if error:
            raise error
        yield batch


class Loader:
    """Yields 0, 1, 2 ... and counts them; after `count` numbers raises `error`."""

    def __init__(self, count=1000, error=StopIteration):
        self.made, self.threads, self.daemon = 0, set(), True
        self.count, self.error = count, error

    def __iter__(self):
        return self

    def __next__(self):
        self.threads.add(threading.get_ident())
        self.daemon = threading.current_thread().daemon
        if self.made == self.count:
            raise self.error
        self.made += 1
        return self.made - 1

    def settle(self):
        """Waits until no more is made, for a twentieth of a second."""
        made = -1
        while made != self.made:
            made = self.made
            time.sleep(0.05)


def at_once(work, why):
    """What work() returns or raises; AssertionError if it waits for more than two seconds."""
    told = queue.SimpleQueue()

    def run():
        try:
            told.put((work(), None))
        except Exception as error:
            told.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = told.get(timeout=2)
    except queue.Empty:
        raise AssertionError(f"the loop waits and never goes on; {why}") from None
    if error:
        raise error
    return result


def check_order(answer):
    loader = Loader(20)
    consumer, got = at_once(
        lambda: (threading.get_ident(), list(islice(answer(loader, 3), 40))),
        "after the last batch the thread must say that there is none, or nobody tells the loop")
    assert got == [*range(20)], (
        f"a loader that yields 0 to 19 comes out as {str(got)[:90]}; every batch comes once, in"
        " its place, and after the last the loop ends")
    assert consumer not in loader.threads, (
        "the loop asks the loader itself, so it waits for every batch; let a thread ask")
    loader = Loader(3)
    list(answer(loader, 3))  # a thread inherits `daemon` from the one that starts it
    assert loader.daemon, (
        "your thread is not a daemon: Python waits for it at the exit, for ever if the loop has"
        " ended early and the queue is full; threading.Thread(..., daemon=True)")


def check_ahead(answer):
    for ahead in (1, 4):
        loader = Loader()
        batches = iter(answer(loader, ahead))
        at_once(lambda batches=batches: next(batches),
                "with a loader of 1,000 batches, for the first; who puts it into the queue?")
        loader.settle()
        assert ahead < loader.made <= ahead + 2, (
            f"with ahead = {ahead}, {loader.made} batches are made while the loop holds the first;"
            f" {ahead} may wait in the queue and one in the thread's hand")


BROKEN = "shard 2 is no whole token shard"  # what the loader raises


class Unreadable(Exception):
    """An error of the loader that no answer can name."""


def check_error(answer):
    error = Unreadable(BROKEN)
    loader, got = Loader(3, error), []

    def take_all():
        for batch in answer(loader, 4):
            got.append(batch)
            loader.settle()

    try:
        at_once(take_all, "the loader has raised an exception in the thread, which may be of any"
                " class: hand it to the loop")
    except (Unreadable, ValueError) as raised:
        assert raised is error, f"the loop raises {raised!r} instead of the loader's {error!r}"
    else:
        raise AssertionError(f"the loader raises {error!r} after 3 batches, but the loop just ends,"
                             " as if there were no more data; raise it in the loop")
    assert got == [0, 1, 2], (
        f"the loader yields 0, 1, 2 and then raises, but the loop gets {got} before it raises;"
        " an exception waits behind the batches that were made before it")


def train(way):
    """The loss of a micro 08 on a simulated slow disk, and the seconds that its loop waits."""
    import lesson

    import shards

    module, waits = lesson.snapshot("08"), []
    own = module.prefetched, module.packed_rows

    def slow_disk(shard, T, args):
        time.sleep(CHANGE)
        yield from own[1](shard, T, args)

    def timed(batches, args, device):
        batches = way(batches, AHEAD)
        while True:
            start = time.perf_counter()
            batch = next(batches)
            waits.append(time.perf_counter() - start)
            yield batch

    module.prefetched, module.packed_rows = timed, slow_disk
    text = shards.read(min(lesson.BUILTIN.glob("*_train_*.bin")))
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(3):
                shards.write(Path(folder, f"{number}.bin"), text[24_000 * number :][:24_000])
            log = lesson.train_here(module, **lesson.MANIFEST.overrides(
                lesson.MANIFEST.get("08"), "tiny") | dict(
                train_files=f"{folder}/*.bin", model_dim=32, num_layers=2, num_heads=1,
                total_batch_size=512, micro_batch_size=2, max_document_len=4096, train_steps=24,
                scheduled_steps=24, momentum_warmup_steps=8, val_tokens=2048, val_loss_every=0,
                value_embed_pattern="00", window_pattern="LL", layer_without_attention=9,
                kernel_warmup_steps=0))
    finally:
        module.prefetched, module.packed_rows = own
    return log.val_curve[-1][1], sum(waits[1:])


def check_prefetched(answer):
    assert callable(answer), f"expected the function prefetched, not {answer!r}"
    result = answer(iter(()), 1)
    assert result is not None, "the function returns nothing; yield the batches"
    report, died = threading.excepthook, []
    threading.excepthook = lambda told: died.append(told.exc_value)
    try:
        for check in (check_order, check_ahead, check_error):
            check(answer)
    except AssertionError:
        own = [error for error in died if str(error) != BROKEN]
        if own:  # which the loop only sees as a batch that never comes
            raise AssertionError(f"your thread ends with {own[0]!r}") from None
        raise
    finally:
        threading.excepthook = report
    (theirs, waited), (ours, waits) = train(lambda batches, ahead: batches), train(answer)
    assert ours == theirs, (
        f"a model trained with your batches ends at {ours}, without a thread at {theirs}; the"
        " batches must be the same")
    assert waits < waited / 2, (
        f"the training loop waits for {1000 * waits:.0f} ms in all, and without a thread for"
        f" {1000 * waited:.0f}; do you make batches ready while the loop computes?")
    print(f"both end at loss {ours}; after the first batch the loop waits for"
          f" {1000 * waited:.0f} ms without a thread, for {1000 * waits:.0f} ms with yours")


# ---- typical wrong answers: every check must refuse them ----


def _drifting(loads, compute, ahead):
    """Every rank for itself, as if nothing brought them together after each step."""
    return [max(step) for step in zip(*(step_waits([load], compute, ahead) for load in loads),
                                      strict=True)]


def _added(loads, compute, ahead):
    return [sum(step) for step in zip(*(step_waits([load], compute, ahead) for load in loads),
                                      strict=True)]


def _first_rank(loads, compute, ahead):
    return step_waits(loads[:1], compute, ahead)


def _slowest_load(loads, compute, ahead):
    """One thread for all ranks' slowest batches."""
    return step_waits([[max(step) for step in zip(*loads, strict=True)]], compute, ahead)


def _covered(loads, compute, ahead):
    """Forgets that a thread is still busy with the batch before."""
    return [max(0.0, max(step) - min(k, ahead) * compute)
            for k, step in enumerate(zip(*loads, strict=True))]


def _steps_of_10(loads, compute, ahead):
    return step_waits(loads, 10, ahead)


def _total(loads, compute, ahead):
    return sum(step_waits(loads, compute, ahead))


def _no_thread(batches, ahead):
    yield from batches


def _reads_all(batches, ahead):
    yield from list(batches)


def _unbounded(batches, ahead):
    yield from prefetched(batches, 0)


def _one_ahead(batches, ahead):
    yield from prefetched(batches, 1)


def _without_end(batches, ahead, tell=lambda waiting, error: None, get=queue.Queue.get,
                 daemon=True):
    """A thread that hands over its batches and, by default, nothing else."""
    waiting = queue.Queue(maxsize=ahead)

    def work():
        error = None
        try:
            for batch in batches:
                waiting.put(batch)
        except Exception as problem:
            error = problem
        tell(waiting, error)

    threading.Thread(target=work, daemon=daemon).start()
    while (batch := get(waiting)) is not None:
        if isinstance(batch, Exception):
            raise batch
        yield batch


def _error_ends(batches, ahead):
    yield from _without_end(batches, ahead, lambda waiting, error: waiting.put(None))


def _dies(batches, ahead):
    yield from _without_end(batches, ahead, lambda waiting, error: waiting.putt(None))


def _error_lost(batches, ahead):
    yield from _without_end(
        batches, ahead, lambda waiting, error: None if error else waiting.put(None))


def _another_error(batches, ahead):
    yield from _without_end(
        batches, ahead, lambda waiting, error: waiting.put(error and ValueError("no data")))


def _one_class_of_errors(batches, ahead):
    waiting = queue.Queue(maxsize=ahead)

    def work():
        error = None
        try:
            for batch in batches:
                waiting.put((batch, None))
        except ValueError as problem:
            error = problem
        waiting.put((None, error or StopIteration()))

    threading.Thread(target=work, daemon=True).start()
    while not isinstance((found := waiting.get())[1], StopIteration):
        if found[1]:
            raise found[1]
        yield found[0]


def _no_daemon(batches, ahead):
    yield from _without_end(
        batches, ahead, lambda waiting, error: waiting.put(error), daemon=None)


def _error_first(batches, ahead):
    failed = []

    def tell(waiting, error):
        failed.append(error)
        waiting.put(error)

    def get(waiting):
        batch = waiting.get()
        if failed and failed[0]:
            raise failed[0]
        return batch

    yield from _without_end(batches, ahead, tell, get)


EXERCISES = {
    "1": dict(
        check=check_depth,
        hints=[
            "When does the thread begin with the slow batch, and when does the loop request it?",
            "A batch that is begun n steps before it is requested has 90 n ms to get ready.",
            "The smallest whole n with 90 n >= 365. The other batches take 3 ms each: the thread"
            " has nothing else to do.",
            "365 / 90 = 4.06...",
        ],
        solution=5,
        wrong=[1, round(365 / 90), -(-365 // (90 + 3)), 365 / 90, 6, 122, 365, "some"],
    ),
    "2": dict(
        check=check_ranks,
        hints=[
            "What in `waits` does a rank have for itself, and what do all ranks share?",
            "Step k begins at max over ranks of ready[rank]. All ranks request the next batch at"
            " the same moment, as they wait for each other.",
            "Keep one `ready` per rank, and one `now` and one list `asked` for all. In each step"
            " move every rank's `ready` on; the wait is the largest of them minus `now`.",
            "ready = [max(free, asked[max(0, k - ahead)]) + load[k] for free, load in zip(ready,"
            " loads)]; waits.append(max(0, max(ready) - now)); ...",
        ],
        solution=step_waits,
        wrong=[_drifting, _added, _first_rank, _slowest_load, _covered, _steps_of_10,
               _total],
    ),
    "3": dict(
        check=check_prefetched,
        hints=[
            "What has to go through the queue besides batches? Two more things can happen.",
            "queue.Queue(maxsize=ahead): put waits while the queue is full, get while it is empty."
            " That alone keeps the thread `ahead` batches ahead.",
            "The thread puts (batch, None) for each batch; at the end, or when an exception comes,"
            " (None, exception), with StopIteration() for the end. The loop gets pairs, returns at"
            " the end, raises what else it gets, and yields batches.",
            "def work(): try: for batch in batches: waiting.put((batch, None)); except Exception as"
            " error: waiting.put((None, error)); else: waiting.put((None, StopIteration())). Start"
            " it with threading.Thread(target=work, daemon=True).start(); ...",
        ],
        solution=prefetched,
        wrong=[_no_thread, _reads_all, _unbounded, _one_ahead, _without_end, _error_ends,
               _error_lost, _another_error, _one_class_of_errors, _error_first, _no_daemon, _dies],
    ),
}
