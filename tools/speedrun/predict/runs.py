"""What a run at record scale would need of each GPU, from runs on devices that are not there."""

import contextlib
import multiprocessing
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import resource_tracker

from speedrun.base.errors import UserError
from speedrun.history.tokens import tokens_after
from speedrun.predict.cards import Card
from speedrun.predict.prediction import STEPS, Prediction, Time
from speedrun.run.failure import describe_exit
from speedrun.run.fit_batch import MARGIN
from speedrun.run.gpus import peak_flops
from speedrun.run.preflight import check_values
from speedrun.scripts.find import Script
from speedrun.scripts.sizes import length_names, micro_batches

CTRL_C = {signal.SIGINT}
LONGEST = {False: 300, True: 2400}  # seconds that a run may compute, {compiled}


def predict(script: Script, card: Card, world_size: int, settings: dict[str, object],
            compiled: bool = False) -> Prediction:
    """Runs the script's main() on `world_size` fake cards, with its own hyperparameters and these,
    in float32 where the card has no bfloat16.

    Takes a minute, compiled several. All micro-steps of a step are alike, so of more than two only
    two are run. Raises UserError, one line: for values that no run takes, where fake cards cannot
    be (see speedrun.compat), with the script's last words, or if it does not end.
    """
    if "checkpoint" in script.hyperparameters:
        raise UserError(f"{script.name} starts from a checkpoint, and fake GPUs have no weights;"
                        " predict the milestone that makes it")
    settings = _for_card(script, card, settings)
    values = {**script.hyperparameters, **settings}
    check_values(values, script.hyperparameters, world_size, on_gpu=True,
                 capability=divmod(card.sm, 10))
    micro_tokens, micro_steps = _micro_steps(script, world_size, settings)
    if micro_steps <= 2:
        return observe(script, card, world_size, settings, compiled, assembled=compiled)
    with _side_by_side() as pool:
        one, two = pool.map(lambda n: observe(
            script, card, world_size, {**settings, "total_batch_size": n * micro_tokens}, compiled,
            assembled=compiled and n == 2), (1, 2))
    more = micro_steps - 2
    return replace(
        two, micro_steps=micro_steps, moved=two.moved + more * (two.moved - one.moved),
        flops={dtype: flops + more * (flops - one.flops[dtype])
               for dtype, flops in two.flops.items()})


def predict_time(script: Script, card: Card, world_size: int, settings: dict[str, object],
                 mfu: float) -> Time | None:
    """The time of a step and of the run if each card reaches the share `mfu` of its peak in
    bfloat16; arguments as for `predict`. None for a card whose peak is not known. Validation is not
    timed in a run, and not counted here. Raises what the script raises for its hyperparameters."""
    peak = peak_flops(card.name)
    if peak is None:
        return None
    run_s = run_flops(script, settings) / (mfu * peak * world_size)
    steps = {**script.hyperparameters, **settings}["train_steps"]
    return Time(run_s / max(steps, 1), run_s, mfu, peak)


def run_flops(script: Script, settings: dict[str, object]) -> float:
    """FLOPs of all forward and backward passes of a run with these settings; raises as
    training_flops_per_token."""
    from speedrun.scripts.flops import training_flops_per_token  # torch, which takes seconds

    values = {**script.hyperparameters, **settings}
    return training_flops_per_token(script.path, values) * tokens_after(
        values, values["train_steps"])


def _for_card(script, card, settings):
    """The settings; without bfloat16 where the card has none."""
    off = {} if card.bf16 or "bf16" not in script.hyperparameters else {"bf16": False}
    return {**off, **settings}


def _micro_steps(script, world_size, settings):
    """Tokens of a forward pass of all ranks, and how many passes make a step."""
    values = {**script.hyperparameters, **settings}
    tokens = values["micro_batch_size"] * values[length_names(values)[0]] * world_size
    return tokens, values["total_batch_size"] // tokens


def observe(script: Script, card: Card, world_size: int, settings: dict[str, object],
            compiled: bool = False, assembled: bool = False) -> Prediction:
    """As `predict`, from a run with all of its micro-steps; its kernels only if `assembled`."""
    seen = _apart(script, compiled, assembled, world_size, card,
                  *(f"--{name}={value}" for name, value in settings.items()))
    training = seen["training"]
    return Prediction(
        micro_batch=seen["micro_batch"],
        micro_steps=_micro_steps(script, world_size, settings)[1],
        peaks={phase: seen[phase]["peak"] for phase in ("warm-up", "training", "validation")},
        memory=training["memory"],
        flops={dtype: flops / STEPS for dtype, flops in training["flops"].items()},
        moved=training["moved"] / STEPS,
        collectives={name: size / STEPS for name, size in training["collectives"].items()},
        launches=tuple(seen["launches"]),
        saved=seen["saved"],
        graphs=training["graphs"],
        recompiled=training["graphs"] - seen["warm-up"]["graphs"],
        kernels=tuple(seen["kernels"]),
    )


@contextlib.contextmanager
def _side_by_side():
    """A pool of threads that wait for runs; all runs end when one fails or Ctrl-C is pressed."""
    with ThreadPoolExecutor() as pool:
        try:
            yield pool
        except BaseException:
            for process in multiprocessing.active_children():
                process.kill()
            raise


def _apart(script, compiled, *arguments):
    """What fake_run.main gives in a process of its own, which the fake devices change for good.

    It is the fork of a server that has imported torch once for all runs.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the server, which imports torch, finds no real GPU
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload(["torch._dynamo", "torch.nn.attention.flex_attention"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_answer, args=(theirs, script, LONGEST[compiled], compiled, *arguments), daemon=True)
    resource_tracker.ensure_running()  # which lets Ctrl-C through again
    signal.pthread_sigmask(signal.SIG_BLOCK, CTRL_C)  # a server that imports would print where
    process.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CTRL_C)
    theirs.close()
    try:
        seen, failure = ours.recv()
    except EOFError:
        process.join()
        how = f"{describe_exit(process.exitcode)} before its last step"
        if process.exitcode == -signal.SIGXCPU:
            how = (f"has computed for {LONGEST[compiled]} seconds and not ended, though a run there"
                   f" has {STEPS} steps; is there a loop without end?")
        failure = UserError(f"{script.name} on the fake GPU {how}")
    if failure:
        raise failure
    return seen


def _answer(answer, script, longest, *arguments):
    """Sends what fake_run.main gives and None, or None and the error to raise; SIGXCPU ends it once
    it has computed for `longest` seconds."""
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (longest, longest + 5))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU of this machine would answer for the fake ones
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it without a word; its parent has one
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CTRL_C)
    try:
        from speedrun.predict import fake_run
    except ModuleNotFoundError as error:
        return answer.send((None, error))

    multiprocessing.set_start_method("fork", force=True)  # else locks of libraries are missed later
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(nowhere, stream.fileno())
    try:
        answer.send((fake_run.main(script.path.resolve(), *arguments), None))
    except UserError as error:
        answer.send((None, error))
    except BaseException as error:
        line = f"{script.name} on the fake GPU: {type(error).__name__}: {error}".partition("\n")[0]
        answer.send((None, UserError(line)))
    os._exit(0)  # at a normal end torch would ask the devices that are not there to finish


def largest_micro_batch(script: Script, card: Card, world_size: int,
                        settings: dict[str, object], compiled: bool = False) -> Prediction | None:
    """The prediction with the largest micro batch whose peak fits the card and which divides the
    batch; None if not even one sequence fits.

    Memory grows in a line with the micro batch, so two runs tell where to look, and a third looks.
    Raises as `predict`.
    """
    def run(micro_batch):
        tokens = 2 * micro_batch * values[length_names(values)[0]] * world_size
        return observe(script, card, world_size, {
            **settings, "micro_batch_size": micro_batch,
            "total_batch_size": min(tokens, values["total_batch_size"])}, compiled)

    settings = _for_card(script, card, settings)
    values = {**script.hyperparameters, **settings}
    sizes = micro_batches(values, world_size) or [values["micro_batch_size"]]  # which is refused
    usual = script.hyperparameters["micro_batch_size"]
    if len(sizes) < 2:
        only = run(*sizes)
        return only if only.fits(card) else None
    middle = min(sizes[1:], key=lambda size: (abs(size - usual / 4), size))
    with _side_by_side() as pool:
        small, large = pool.map(run, (sizes[0], middle))
    slope = (large.peak - small.peak) / (large.micro_batch - small.micro_batch)
    room = MARGIN * card.memory - small.peak
    fitting = [size for size in sizes if slope * (size - small.micro_batch) <= room]
    while fitting:
        found = run(fitting.pop())
        if found.fits(card):
            return found
    return None
