"""Text from a run's checkpoint: loads the model through the run's script, and draws tokens."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from speedrun.base.errors import UserError
from speedrun.base.text import short
from speedrun.history.blocks import split_blocks
from speedrun.history.glossary import load_glossary
from speedrun.history.handles import Handles
from speedrun.history.manifest import Milestone, load_manifest
from speedrun.history.tokens import stages
from speedrun.run.checkpoint import (
    brief,
    check_script,
    find_checkpoint,
    read_checkpoint,
)
from speedrun.run.log import SCRIPT
from speedrun.scripts.find import handles_for, load_snapshot
from speedrun.scripts.sizes import BYTE_VOCABULARIES, length_names, longest_dense

GPT2 = 50257  # GPT-2's vocabulary, the last of which starts a document
MOST_AT_ONCE = 500_000  # characters that are encoded at once
LONGEST = 2**24  # tokens of a sequence that a checkpoint may have
GPT2_SIZES = (GPT2, 50304)  # as it is, and padded for the tensor cores


@dataclass(frozen=True)
class Trained:
    """A model in evaluation mode, the device that it is on, its hyperparameters, the most tokens
    that it can be given at once, the optimizer steps that it was trained for, and how to get hold
    of its script's parts.

    cached: the same model, with the same weights, as the class of a generating milestone, called
    cached_by, which reads a token only once; new_caches makes what it fills. None without such.
    """

    model: torch.nn.Module
    device: torch.device
    args: object
    context: int
    step: int
    handles: type[Handles]
    cached: torch.nn.Module | None = None
    cached_by: str | None = None
    new_caches: Callable[[], list] | None = None

    @property
    def markers(self) -> range | None:
        """The ids of start, user, assistant and end; None where a run knows no conversations."""
        return self.handles.markers(self.args)

    @property
    def first_token(self) -> int | None:
        """The id with which documents begin; None where the run's script knows of none."""
        return self.handles.first_token(self.args)


def load_run(run: Path) -> Trained:
    """The trained model of a run: its folder, or the path of its checkpoint.

    The model runs as on any machine: not compiled, without FlexAttention, in float32 unless it was
    trained in bfloat16 and CUDA is there. Where a generating milestone has the same architecture
    with a cache, its model shares the weights. Code in the checkpoint is refused, never run; the
    script beside it is imported. Raises UserError, one line, if a file is missing or damaged, or if
    the two do not fit together.
    """
    script, file = find_run(run)
    check_script(file, script)
    checkpoint = read_checkpoint(file)
    hyperparameters = checkpoint["hyperparameters"]
    _check_sizes(file, checkpoint)
    cuda = torch.cuda.is_available()
    switches = load_glossary().column("cpu") | dict(bf16=cuda and hyperparameters.get("bf16"))
    known = {name: value for name, value in switches.items() if name in hyperparameters}
    try:
        module, handles = load_snapshot(script), handles_for(script)
        defaults = vars(module.Hyperparameters())
        if differing := sorted(defaults.keys() ^ hyperparameters.keys()):
            raise ValueError(f"only one of the two has {', '.join(differing)}")
        args = module.Hyperparameters(**{**hyperparameters, **known})
        model = module.GPT(args)
        model.load_state_dict(checkpoint["model"], strict=True)
        longest = stages(hyperparameters) * getattr(args, length_names(hyperparameters)[0])
        context = min(longest, longest_dense(defaults))
    except (Exception, SystemExit) as error:  # a script of any origin, numbers of any kind
        raise UserError(f"{short(file)} does not fit {short(script)}: {brief(error)}") from None
    device = torch.device("cuda" if cuda else "cpu")
    trained = Trained(model.to(device).eval(), device, args, context, checkpoint["step"],
                      handles)
    twin = cached_twin(script.read_text(encoding="utf-8"))
    return _with_cache(trained, twin) if twin else trained


def _check_sizes(file, checkpoint):
    """Refuses a checkpoint whose hyperparameters ask for a far larger model than its weights, or
    for a longer context than any, before all of the memory is taken."""
    numbers = {name: value for name, value in checkpoint["hyperparameters"].items()
               if type(value) is int}
    weights = sum(weight.numel() for weight in checkpoint["model"].values())
    if numbers.get("num_layers", 0) * numbers.get("model_dim", 0) ** 2 > weights:
        raise UserError(f"{file} is damaged: num_layers={numbers['num_layers']} and"
                        f" model_dim={numbers['model_dim']} need more than its {weights:,} weights")
    for name in load_glossary().of_kind("length", "train length", "val length"):
        if numbers.get(name, 0) > LONGEST:
            raise UserError(f"{file} is damaged: {name}={numbers[name]} is above {LONGEST:,}")


def _with_cache(trained, twin):
    """The Trained with the model class of the milestone `twin` beside its own."""
    module = load_snapshot(twin.script)
    cached = module.GPT(trained.args).to(trained.device).eval()
    cached.load_state_dict(trained.model.state_dict(), assign=True)  # the tensors are shared
    like = cached.embed.weight

    def new_caches():
        return [module.KVCache(trained.args, trained.context, like) for _ in cached.blocks]

    return replace(trained, cached=cached, cached_by=twin.name, new_caches=new_caches)


def cached_twin(source: str) -> Milestone | None:
    """The last milestone whose model is that of a script, given as its text, and keeps keys and
    values; None if there is none.

    A generating milestone borrows the blocks of its model from a milestone that trains. A script
    that has these, or those of a milestone that fine-tunes the same model, is of the same
    architecture.
    """
    manifest, own = load_manifest(), _blocks(source)
    for milestone in reversed(manifest.milestones):
        if "KVCache" not in _blocks(milestone.script.read_text(encoding="utf-8")):
            continue
        root = manifest.lineage(milestone)[-1]
        tuned = [m for m in manifest.of_chain(milestone.chain).milestones
                 if m.program != milestone.program]
        same = [_blocks(m.script.read_text(encoding="utf-8"))
                for m in (manifest.get(root.borrows.lender), *tuned)]
        if all(own.get(name) in [blocks.get(name) for blocks in same] and name in own
               for name in root.borrows.blocks):
            return milestone
    return None


def _blocks(source):
    return {block.name: block.text for block in split_blocks(source)}


def find_run(run: Path) -> tuple[Path, Path]:
    """The (script, checkpoint) of a run's folder or of a checkpoint's path; UserError if either is
    missing."""
    file = find_checkpoint(run)
    script = file.with_name(SCRIPT)
    if not script.is_file():
        raise UserError(f"{file} has no {SCRIPT} beside it; copy the run's script there "
                        "(the run's log.txt begins with it)")
    return script, file


def random_stream(seed: int, sample: int) -> torch.Generator:
    """The random numbers of one sample, independent of those of other samples and seeds.

    seed and sample: whole numbers from 0 on.
    """
    mixed = np.random.SeedSequence(seed, spawn_key=(sample,)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(mixed[0]))


def next_token(logits: torch.Tensor, temperature: float, top_k: int, stream: torch.Generator,
               top_p: float = 1.0) -> int:
    """An id drawn with the probabilities softmax(logits / temperature); logits are (V,), on a CPU.

    temperature 0: the most probable one. top_k: draws from this many most probable ones; 0 or more
    than V: from all. top_p: of these, draws from the fewest most probable ones that have this part
    of the probability together (above 0; 1: all). Raises UserError if a logit is not finite.
    """
    if not logits.isfinite().all():
        raise UserError("the model's logits are not finite; its training has diverged")
    if temperature == 0:
        return int(logits.argmax())
    logits, ids = logits.double().topk(min(top_k or len(logits), len(logits)))
    # Relative to the largest, so that no temperature, however small, makes an infinity of it.
    probabilities = ((logits - logits[0]) / temperature).softmax(0)
    if top_p < 1:
        more_probable = probabilities.cumsum(0) - probabilities  # what those before a token have
        probabilities = torch.where(more_probable < top_p, probabilities, 0)
    return int(ids[torch.multinomial(probabilities, 1, generator=stream)])


def generate(trained: Trained, prompt: list[int], size: int, temperature: float, top_k: int,
             stream: torch.Generator, top_p: float = 1.0) -> Iterator[int]:
    """Yields ids that continue the prompt (at least one id), without end.

    The model sees the last `trained.context` tokens. With caches it reads each token once, until
    the context slides (deep layers would keep what they made of tokens that are gone) or a second
    conversation starts (which fine-tuning may mask). size: ids from here on are padding and never
    drawn; temperature, top_k, top_p and stream: see next_token.
    """
    tokens, read = list(prompt)[-trained.context :], 0
    caches = trained.new_caches and trained.new_caches()
    while True:
        if len(tokens) > trained.context or (
                trained.markers and trained.markers[0] in tokens[1:]):
            tokens, caches = tokens[-trained.context :], None
        with torch.inference_mode():
            if caches:
                unread = torch.tensor([tokens[read:]], device=trained.device)
                logits, read = trained.cached(unread, caches=caches), len(tokens)  # (1, T, V)
            else:
                logits = trained.model(torch.tensor([tokens], device=trained.device))
        tokens.append(next_token(logits[0, -1, :size].cpu(), temperature, top_k, stream, top_p))
        yield tokens[-1]


@dataclass(frozen=True)
class Vocabulary:
    """How a model's tokens are written.

    name: for people; size: ids from here on are padding; bos: the id that starts a document, or
    None; encode: a prompt's bytes -> ids, raises UserError; bytes_of: an id that is not bos -> its
    bytes; note: why they are only numbers, if they are.
    """

    name: str
    size: int
    bos: int | None
    encode: Callable[[bytes], list[int]]
    bytes_of: Callable[[int], bytes]
    note: str = ""

    def spell(self, id: int) -> bytes:
        """The bytes of a token, perhaps a part of a character; bos is spelled as a line end."""
        return b"\n" if id == self.bos else self.bytes_of(id)


def vocabulary_of(vocab_size: int, bos_id: int | None) -> Vocabulary:
    """The Vocabulary of a model with `vocab_size` tokens.

    bos_id: the model's own document token, for a size that no known vocabulary has.
    """
    if vocab_size in BYTE_VOCABULARIES:
        return Vocabulary("bytes", 257, 256, list, lambda id: bytes([id]))
    if vocab_size not in GPT2_SIZES:
        note = f"no known vocabulary has {vocab_size} tokens, so their numbers are printed"
        return _numbers(vocab_size, bos_id, note)
    try:
        import tiktoken

        gpt2 = tiktoken.get_encoding("gpt2")
    except (ImportError, OSError, ValueError) as error:
        return _numbers(GPT2, GPT2 - 1, (
            f"GPT-2's vocabulary cannot be loaded ({type(error).__name__}), so the tokens' numbers "
            "are printed; go online once, or set TIKTOKEN_CACHE_DIR to a folder that tiktoken "
            "has used as its cache"))
    return Vocabulary("GPT-2", GPT2, GPT2 - 1,
                      lambda text: [id for piece in _pieces(text.decode("utf-8", "replace"))
                                    for id in gpt2.encode_ordinary(piece)],
                      gpt2.decode_single_token_bytes)


def _pieces(text):
    """A text in pieces, the last of full length: tiktoken panics at 999,999 white-space characters
    in a row. A model sees only the end of a prompt as long as that."""
    starts = range(len(text) % MOST_AT_ONCE, len(text), MOST_AT_ONCE)
    return filter(None, (text[: starts.start], *(text[i : i + MOST_AT_ONCE] for i in starts)))


def _numbers(size, bos, note):
    """Tokens as numbers with spaces between."""

    def encode(text):
        words = text.split()
        if not all(word.isdigit() and int(word) < size for word in words):
            raise UserError(f"the prompt must be token numbers, 0 to {size - 1}, with spaces "
                            "between, because its vocabulary is missing")
        return [int(word) for word in words]

    return Vocabulary("numbers", size, bos, encode, lambda id: b"%d " % id, note)
