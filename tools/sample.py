#!/usr/bin/env python3
"""Let a trained model write: text from the checkpoint of any milestone.

    python tools/sample.py runs/muon-20250101-120000 --prompt "def "
    echo "import os" | python tools/sample.py runs/muon-20250101-120000 --num-samples 3
    python tools/sample.py runs/x/checkpoint.pt --prompt-file p.txt --temperature 0
    python tools/sample.py runs/isolation-20250101-120000 --chat    a conversation, a line per turn

A run has a checkpoint if it was made with: python tools/run_milestone.py ID --save-checkpoint
The text goes to stdout, everything else to stderr. The same seed gives the same text again.
The train_gpt.py beside the checkpoint is run, with your rights: sample only runs that you trust.
"""

import argparse
import codecs
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from speedrun.base.cli import Parser, natural, not_negative, positive, run_command
from speedrun.base.errors import UserError
from speedrun.base.text import short, visible

MOST_BYTES = 2**24  # of a prompt; a model sees only its end


def main(argv: list[str] | None = None) -> int:
    """Parses (None: the command line), loads, writes; returns the exit code."""
    args = parse_args(argv)
    if args.chat and args.num_samples > 1:
        raise UserError("--chat is one conversation; leave --num-samples out", 2)
    is_asked = args.prompt is not None or args.prompt_file is not None
    prompt = read_prompt(args.prompt, args.prompt_file) if is_asked or not args.chat else b""
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # waiting threads give a shared CPU away sooner

    from speedrun.sample import load_run, vocabulary_of  # torch, which takes seconds

    trained = load_run(args.run)
    vocabulary = vocabulary_of(trained.args.vocab_size, trained.first_token)
    if vocabulary.note:
        note(vocabulary.note)
    note(f"{short(args.run)}: step {trained.step}, on {trained.device.type}, "
         f"tokens: {vocabulary.name}")
    note(f"each token is read once, with the cache of {trained.cached_by}" if trained.cached else
         "no cache is known for this architecture, so each new token reads the whole text again")
    return (chat if args.chat else write_samples)(trained, vocabulary, prompt, args)


def write_samples(trained, vocabulary, prompt: bytes, args: argparse.Namespace) -> int:
    """Prints the samples; returns the exit code."""
    from speedrun.sample import generate, random_stream

    start = [] if vocabulary.bos is None else [vocabulary.bos]
    ids = vocabulary.encode(prompt)
    if not start + ids:
        raise UserError("this vocabulary has no start of a document; give a prompt")
    if len(ids) > trained.context:
        note(f"the prompt has {len(ids)} tokens; the model sees the last {trained.context}")
    if args.temperature == 0 and args.num_samples > 1:
        note("temperature 0: all samples are the same")

    for sample in range(args.num_samples):
        if sample:
            print("─" * 40)
        new = generate(trained, start + ids, vocabulary.size, args.temperature, args.top_k,
                       random_stream(args.seed, sample), args.top_p)
        count = len(write(vocabulary, ids, new, args.tokens, start if args.stop else []))
        if count < args.tokens:
            note(f"the document ended after {count} tokens (--no-stop continues)")
    return 0


def chat(trained, vocabulary, prompt: bytes, args: argparse.Namespace) -> int:
    """Answers the prompt, if it is not empty, then each line of stdin; returns the exit code."""
    from speedrun.sample import generate, random_stream

    if trained.markers is None:
        raise UserError(f"{short(args.run)} knows no conversations; fine-tune it: "
                        f"python tools/run_milestone.py e2a --from {short(args.run)}")
    start, user, assistant, end = trained.markers
    stream, turns = random_stream(args.seed, 0), []  # the ids of each question with its answer
    for text in messages(prompt):
        question = [user, *vocabulary.encode(text), assistant]
        most = trained.context - 1 - len(question)
        if most < 1:
            note(f"the message has {len(question) - 2} tokens, and the model's context "
                 f"{trained.context}; give a shorter one")
            continue
        wanted = min(args.tokens, most, trained.context // 4)
        while turns and sum(map(len, turns)) > most - wanted:
            note("the oldest question and its answer no longer fit into the context")
            del turns[0]
        before = [start, *(id for turn in turns for id in turn), *question]
        limit = min(args.tokens, trained.context - len(before))
        new = generate(trained, before, end + 1, args.temperature, args.top_k, stream, args.top_p)
        answer = write(vocabulary, [], new, limit, trained.markers)
        if len(answer) == limit:
            note(f"the answer was cut after {limit} tokens")
        turns.append([*question, *answer, end])
    return 0


def messages(first: bytes) -> Iterator[bytes]:
    """Yields the first message, if it is not empty, then the lines of stdin that are not blank."""
    if first:
        yield first
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline(MOST_BYTES)
        if not line:
            return
        if line.strip():
            yield line.rstrip(b"\r\n")


def write(vocabulary, prompt, new, tokens, stops) -> list[int]:
    """Prints the prompt's ids and up to `tokens` more, each as soon as it is drawn, but none from
    the first of the ids `stops` on. Returns the new ids."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # waits for a character's last byte
    is_terminal = sys.stdout.isatty()
    last = ""

    def show(data, final=False):
        nonlocal last
        text = utf8.decode(data, final)
        last = text or last
        print(visible(text) if is_terminal else text, end="", flush=True)

    drawn = []
    try:
        show(b"".join(map(vocabulary.spell, prompt)))
        while len(drawn) < tokens and (id := next(new)) not in stops:
            drawn.append(id)
            show(vocabulary.spell(id))
        show(b"", final=True)
    finally:  # also before the line that reports Ctrl-C
        if not last.endswith("\n"):
            print(flush=True)
    return drawn


def read_prompt(text: str | None, file: Path | None) -> bytes:
    """The prompt from the command line, from a file or, for "-" and without either, from stdin
    unless that is a terminal. Raises UserError if the file cannot be read."""
    if text == "-" or file == Path("-") or (text is None and file is None):
        asked = text or file
        return read_some(sys.stdin.buffer) if asked or not sys.stdin.isatty() else b""
    if file is not None:
        try:
            with open(file, "rb") as stream:
                return read_some(stream)
        except OSError as error:
            raise UserError(f"--prompt-file {file}: {error.strerror}") from None
    return text.encode("utf-8", "surrogateescape")  # bytes of the command line that are no UTF-8


def read_some(stream: BinaryIO) -> bytes:
    """The whole stream; UserError if it is longer than MOST_BYTES, as /dev/urandom is."""
    prompt = stream.read(MOST_BYTES + 1)
    if len(prompt) > MOST_BYTES:
        raise UserError(f"the prompt is longer than {MOST_BYTES:,} bytes; give a shorter one")
    return prompt


def note(line: str) -> None:
    """Prints a remark, which is not part of the text."""
    print(visible(line), file=sys.stderr, flush=True)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line; a wrong one ends the process with one line and exit code 2."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("run", type=Path, help="folder of a run, or the path of its checkpoint.pt")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT",
                        help="what to continue (default: stdin if it is not a terminal, else "
                        "nothing; nothing begins a document); - is stdin")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE",
                        help="the same from a file, as it is; - is stdin")
    add("--tokens", type=positive, default=256, metavar="N", help="new tokens (default: 256)")
    add("--temperature", type=not_negative, default=0.8, metavar="T",
        help="0 always takes the most probable token, 1 the model's own odds (default: 0.8)")
    add("--top-k", type=natural, default=0, metavar="K",
        help="draw from the K most probable tokens (default: 0, from all)")
    add("--top-p", type=part, default=1.0, metavar="P",
        help="draw from the fewest most probable tokens that have this part of the probability "
        "together (default: 1, from all)")
    add("--seed", type=natural, default=0, metavar="N", help="of the draws (default: 0)")
    add("--num-samples", type=positive, default=1, metavar="N", help="texts to write (default: 1)")
    add("--no-stop", dest="stop", action="store_false",
        help="continue after the end of a document; the next one begins on a new line")
    add("--chat", action="store_true",
        help="answer as a fine-tuned run does: the prompt, if any, then each line of stdin")
    return parser.parse_args(argv)


def part(text: str) -> float:
    """A float above 0 and at most 1, for argparse."""
    number = not_negative(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0 and at most 1")
    return number


if __name__ == "__main__":
    run_command(main)
