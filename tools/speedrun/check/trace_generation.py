"""Jobs that observe a script which draws text from a fine-tuned model: its logits, the tokens that
it draws, what the model reads for them, and what it prints."""

import dataclasses
import io
import re
import sys
import traceback
from pathlib import Path
from unittest import mock

import torch

from speedrun.check.weights import arguments, fill

# Of the model: its last four rows are padding, which is never drawn.
SIZES = dict(vocab_size=264, bos_id=256, num_layers=4, num_heads=2, model_dim=32, seq_len=48,
             checkpoint="a pretrained model", bf16=False)
QUESTION = "naïve?"
# Temperature, top_k, num_samples, seed; drawn up to the model's last slot.
DRAWS = [(0.0, 0, 1, 0), (0.8, 0, 1, 0), (0.8, 5, 4, 0), (1.0, 0, 4, 1), (3.0, 0, 6, 2),
         (3.0, 999, 6, 3), (1e-9, 0, 2, 0)]
CPU = torch.device("cpu")


def logits(module, values, note, **_):
    """The logits and the loss of GPT.forward, for texts of several lengths."""
    net, _ = _model(module)
    generator = torch.Generator().manual_seed(0)
    seen, losses = {}, {}
    with torch.no_grad():
        for shape in ((1, 1), (2, 7), (3, SIZES["seq_len"])):
            inputs = torch.randint(SIZES["vocab_size"], shape, generator=generator)
            seen[f"logits of {shape[0]} x {shape[1]} tokens"] = net(inputs).float()
            losses[f"loss of {shape[0]} x {shape[1]} tokens"] = net(inputs, inputs).item()
    note.note("GPT.forward", "tensors", seen, 1e-5)
    note.note("GPT.forward with targets", "numbers", losses, 1e-5)


def prompts(module, values, note, folder, **_):
    """The ids of a prompt, and the model that is loaded."""
    model, config = module.load_model(_args(module, folder), CPU)
    note.fact("the loaded model is in evaluation mode", not model.training)
    note.fact("encode_prompt", module.encode_prompt(QUESTION, config).tolist())
    note.fact("encode_prompt of no text", module.encode_prompt("", config).tolist())


def tokens(module, values, note, folder, **_):
    """The tokens that are drawn, and what the model reads for them."""
    reads, kept = [], []

    def saw(_, args, kwargs):
        some = [*args, *kwargs.values()]
        reads.append(tuple(next(t for t in some if torch.is_tensor(t)).shape))
        kept.append(sum(_storages(some).values()))

    for temperature, top_k, num_samples, seed in DRAWS:
        args = _args(module, folder, temperature=temperature, top_k=top_k, seed=seed,
                     num_samples=num_samples)
        model, config = module.load_model(args, CPU)
        prompt = module.encode_prompt(QUESTION, config)
        args = dataclasses.replace(args, max_new_tokens=SIZES["seq_len"] - len(prompt))
        model.register_forward_pre_hook(saw, with_kwargs=True)
        reads.clear()
        name = f"temperature {temperature}, top_k {top_k}, {num_samples} samples, seed {seed}"
        with note.guard(f"tokens at {name}"):
            drawn = module.generate(model, prompt, config, args)
            note.note(f"tokens at {name}", "has", {
                f"sample {i}": " ".join(map(str, map(int, sample)))
                for i, sample in enumerate(drawn)})
            passes = sum(rows * columns for rows, columns in reads)
            note.fact(f"tokens that the model reads at {name}", passes)
    note.note("bytes of the tensors that the model is given", "at most", max(kept), (1.15, 4096))


def printing(module, values, note, folder, **_):
    """What main prints: of one sample, of several, and whenever it is shown."""
    for num_samples, length in ((1, 30), (3, 30), (8, 2)):  # short ones are cut within characters
        screen = Screen()
        args = _args(module, folder, num_samples=num_samples, max_new_tokens=length, seed=1,
                     temperature=1.0, prompt=QUESTION)
        with note.guard(f"main with {num_samples} samples"), mock.patch.object(
                sys, "stdout", screen):
            module.main(args)
        *text, last = screen.getvalue().rstrip("\n").split("\n")
        note.fact(f"text of {num_samples} samples", repr("\n".join(text)))
        note.fact(f"the last line after {num_samples} samples", re.sub(
            r"(time:|per_second:)[\d.]+", r"\1N", last))
        if screen.shown:
            note.fact(f"text at each flush of {num_samples} samples", screen.shown)


def refusals(module, values, note, folder, **_):
    """What a run refuses."""
    def run(save=True, weights=1.0, **change):
        file = Path(folder, "checkpoint.pt")
        net, config = _model(module)
        config = {name: value for name, value in config.items() if name not in change}
        for param in net.parameters():
            param.data *= weights
        args = _args(module, folder, prompt=QUESTION, max_new_tokens=change.pop("count", 4))
        if save:
            torch.save(dict(step=1, hyperparameters=config, model=net.state_dict()), file)
        else:
            file.unlink()
        with mock.patch.object(sys, "stdout", io.StringIO()):
            module.main(args)

    trials = {"no checkpoint": dict(save=False), "a model without markers": dict(checkpoint=None),
              "logits that are not finite": dict(weights=torch.nan),
              "an answer beyond the last slot": dict(count=40)}
    seen = {}
    for what, change in trials.items():
        try:
            run(**change)
            seen[what] = "taken"
        except Exception as error:
            own = traceback.extract_tb(error.__traceback__)[-1].filename == module.__file__
            seen[what] = "refused" if own else f"not refused: later {type(error).__name__}"
    note.note("what is refused", "has", seen)


class Screen(io.StringIO):
    """A stdout that keeps what can be read after each flush that shows more."""

    def __init__(self):
        super().__init__()
        self.shown = []

    def flush(self):
        super().flush()
        if self.getvalue() != "".join(self.shown):
            self.shown.append(self.getvalue().removeprefix("".join(self.shown)))


def _model(module):
    """A model whose weights follow from their names, and its hyperparameters."""
    config = dict(SIZES)
    net = module.GPT(type("Config", (), config)()).eval()
    fill(net)
    return net, config


def _args(module, folder, **more):
    """The script's hyperparameters, of a checkpoint that is saved in the folder."""
    file = Path(folder, "checkpoint.pt")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        net, config = _model(module)
        torch.save(dict(step=1, hyperparameters=config, model=net.state_dict()), file)
    return arguments(module, dict(checkpoint=str(file), bf16=False, **more))


def _storages(things, deep=4):
    """{address: bytes} of the storages of tensors in lists, and in objects' attributes."""
    found = {}
    for thing in things:
        if torch.is_tensor(thing):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif deep and isinstance(thing, list | tuple):
            found |= _storages(thing, deep - 1)
        elif deep and isinstance(thing, dict):
            found |= _storages(thing.values(), deep - 1)
        elif deep and hasattr(thing, "__dict__"):
            found |= _storages(vars(thing).values(), deep - 1)
    return found
