"""Sampling from checkpoints: known answers, streams of random numbers, vocabularies, refusals.

Run: .venv/bin/python -m pytest tests/test_sample.py
"""

import io
import os
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiktoken
import torch

import sample
import speedrun.sample as library
from snapshots import MANIFEST, load_snapshot, micro_args, tried_snapshots
from speedrun.base.errors import UserError
from speedrun.history.manifest import REPOSITORY
from speedrun.run.checkpoint import hash_of, sign, signed_hash
from speedrun.sample import generate, load_run, next_token, random_stream, vocabulary_of
from speedrun.scripts.sizes import length_names

COMMAND = [sys.executable, str(REPOSITORY / "tools" / "sample.py")]

# A script whose model makes the token after the last one almost certain, or all alike.
FAKE = '''
from dataclasses import dataclass

import torch

@dataclass
class Hyperparameters:
    vocab_size: int = 257
    seq_len: int = 8
    compile: bool = False
    bf16: bool = False
    use_flex_attention: bool = False
    certainty: float = 50.0
    favourite: int = -1

class GPT(torch.nn.Module):
    def __init__(self, args):
        super().__init__()
        assert not (args.compile or args.bf16 or args.use_flex_attention), "switched on"
        self.args = args
        self.weight = torch.nn.Parameter(torch.zeros(2, 3))

    def forward(self, inputs):
        assert not self.training and not torch.is_grad_enabled()
        assert inputs.ndim == 2 and 0 < inputs.size(1) <= self.args.seq_len
        following = (inputs + 1) % self.args.vocab_size
        if self.args.favourite >= 0:
            following = following * 0 + self.args.favourite
        one_hot = torch.nn.functional.one_hot(following, self.args.vocab_size)
        return one_hot.float() * self.args.certainty + self.weight.sum()
'''


@pytest.fixture
def fake(tmp_path):
    """Makes a run's folder for the fake script; takes hyperparameters that replace the defaults."""

    def make(**hyperparameters):
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "train_gpt.py").write_text(FAKE, encoding="utf-8")
        # as on a machine with CUDA
        defaults = dict(vocab_size=257, seq_len=8, compile=True, bf16=True,
                        use_flex_attention=True, certainty=50.0, favourite=-1)
        save(folder, defaults | hyperparameters)
        return folder

    return make


def save(folder, hyperparameters, **more):
    checkpoint = dict(step=7, hyperparameters=hyperparameters, model={"weight": torch.zeros(2, 3)})
    torch.save(checkpoint | more, folder / "checkpoint.pt")


@pytest.fixture
def byte_gpt2(monkeypatch):
    """A tiktoken encoding with GPT-2's document token, in which every other token is a byte."""
    encoding = tiktoken.Encoding(
        "bytes", pat_str=r"[\s\S]", mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={"<|endoftext|>": 50256},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: {"gpt2": encoding}[name])


@pytest.fixture
def text_of(capsys):
    """Samples in this process; returns what was printed on stdout and on stderr."""

    def run(run, *options):
        assert sample.main([str(run), *map(str, options)]) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


# ---- checkpoints of the milestones ----


@tried_snapshots
def test_every_milestone_writes(milestone, shards, tmp_path, text_of, capsys):
    args = micro_args(milestone, shards, tmp_path / "run", save_checkpoint=True, train_steps=5,
                      vocab_size=257, val_loss_every=0, kernel_warmup_steps=0)
    module = load_snapshot(milestone)
    module.main(args)
    length = getattr(args, length_names(vars(args))[0])
    capsys.readouterr()  # its log
    shutil.copy(milestone.script, tmp_path / "run")

    model = module.GPT(args)
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    prompt = (length * "def")[: length - 3]
    tokens = [256, *prompt.encode()]
    with torch.no_grad():  # beyond the context, so that it slides
        for _ in range(6):
            logits = model.eval()(torch.tensor([tokens[-length:]]))
            tokens.append(int(logits[0, -1].argmax()))
    assert 256 not in tokens[1:]
    expected = bytes(tokens[1:]).decode("utf-8", "replace")

    greedy = ["--prompt", prompt, "--tokens", 6, "--temperature", 0]
    out, err = text_of(tmp_path / "run", *greedy)
    assert out.removesuffix("\n") == expected.removesuffix("\n")
    assert "step 5" in err and "bytes" in err
    assert text_of(tmp_path / "run" / "checkpoint.pt", *greedy)[0] == out

    drawn = [text_of(tmp_path / "run", "--prompt", "a", "--tokens", 8, "--temperature", 1,
                     "--seed", seed)[0] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


# ---- known answers ----


@pytest.mark.parametrize("temperature", [0, 1])
def test_known_answer(fake, text_of, temperature):
    options = ["--tokens", 5, "--temperature", temperature]
    assert text_of(fake(), "--prompt", "abc", *options)[0] == "abcdefgh\n"
    assert text_of(fake(), "--prompt", "", *options)[0] == "\0\1\2\3\4\n"  # a document's start
    # a line end is added only where there is none
    assert text_of(fake(), "--prompt", "\b", "--tokens", 2)[0] == "\b\t\n"


def test_the_context_slides_over_a_long_prompt(fake, text_of):
    letters = "abcdefghijkl"
    out, err = text_of(fake(), "--prompt", letters, "--tokens", 3)
    assert out == letters + "mno\n"
    assert "12 tokens; the model sees the last 8" in err
    assert "the last" not in text_of(fake(), "--prompt", letters[:8], "--tokens", 3)[1]


def test_the_context_is_that_of_training_and_has_a_limit(fake):
    for pattern, tokens in ("SL", 16_384), ("SP", 8192):  # as for the snapshots' dense masks
        run = fake(seq_len=65_536, window_pattern="L")
        script = FAKE.replace("    seq_len", f'    window_pattern: str = "{pattern}"\n    seq_len')
        (run / "train_gpt.py").write_text(script, encoding="utf-8")
        assert load_run(run).context == tokens
    run = fake()
    lengths = dict(train_seq_len=16, val_seq_len=64)
    hyperparameters = torch.load(run / "checkpoint.pt")["hyperparameters"] | lengths
    del hyperparameters["seq_len"]
    save(run, hyperparameters)
    script = FAKE.replace(" seq_len: int = 8", " train_seq_len: int = 8\n    val_seq_len: int = 8")
    (run / "train_gpt.py").write_text(script, encoding="utf-8")
    assert load_run(run).context == 16
    run = fake()
    save(run, hyperparameters | dict(second_stage_peak=1.5, third_stage_peak=1.7))
    stages = ("    second_stage_peak: float = 1.5\n    third_stage_peak: float = 1.7\n"
              "    train_seq_len")
    (run / "train_gpt.py").write_text(script.replace("    train_seq_len", stages), encoding="utf-8")
    assert load_run(run).context == 48  # the last of three stages has rows three times as long


def test_the_end_of_a_document_ends_the_text(fake, text_of):
    run = fake()
    sys_bytes = os.fsdecode(b"\xfd")  # as Python hands on bytes of a command line
    out, err = text_of(run, "--prompt", sys_bytes, "--tokens", 9)
    assert out == 3 * "\N{REPLACEMENT CHARACTER}" + "\n"
    assert "ended after 2 tokens" in err
    out, err = text_of(run, "--prompt", sys_bytes, "--tokens", 5, "--no-stop")
    assert out == 3 * "\N{REPLACEMENT CHARACTER}" + "\n\0\1\n"
    assert "ended" not in err


def test_prompts_from_files_and_stdin(fake, text_of, tmp_path, monkeypatch):
    run = fake()
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xffab")
    expected = "\N{REPLACEMENT CHARACTER}abc\n"
    assert text_of(run, "--tokens", 1, "--prompt-file", file)[0] == expected
    for options in [["--prompt", "-"], ["--prompt-file", "-"], []]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xffab")))
        assert text_of(run, "--tokens", 1, *options)[0] == expected
    terminal = io.TextIOWrapper(io.BytesIO(b"ab"))
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert text_of(run, "--tokens", 1)[0] == "\0\n"  # nobody is asked to type


def test_a_terminal_gets_no_control_characters(fake, text_of, monkeypatch):
    run = fake()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert text_of(run, "--prompt", "\x19", "--tokens", 3)[0] == "␙␚␛␜\n"
    assert text_of(run, "--prompt", "\b", "--tokens", 3)[0] == "␈\t\n␋\n"


# ---- streams of random numbers ----


def samples(text):
    return text.removesuffix("\n").split("\n" + "─" * 40 + "\n")


def test_a_sample_does_not_depend_on_how_many_there_are(fake, text_of):
    run = fake(certainty=0.0, vocab_size=64)
    options = ["--prompt", "5", "--tokens", 12, "--temperature", 1]
    (alone,) = samples(text_of(run, *options)[0])
    three = samples(text_of(run, *options, "--num-samples", 3)[0])
    assert len(three) == 3 and three[0] == alone
    assert len({text.split()[1] for text in three}) == 3  # they differ from the first new token on
    greedy = text_of(run, *options[:-1], 0, "--num-samples", 2)
    assert "all samples are the same" in greedy[1]
    assert samples(text_of(run, *options, "--num-samples", 3)[0]) == three
    other = samples(text_of(run, *options, "--num-samples", 3, "--seed", 1)[0])
    assert not set(other) & set(three)


def frequencies(logits, temperature=1.0, top_k=0, count=4000, top_p=1.0):
    """Of the first tokens of many samples."""
    logits = torch.tensor(logits)
    drawn = Counter(next_token(logits, temperature, top_k, random_stream(3, sample), top_p)
                    for sample in range(count))
    return {id: times / count for id, times in drawn.items()}


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_tokens_are_drawn_with_the_odds_of_the_model(temperature):
    logits = [0.0, 1.0, -1.0, 2.0]
    expected = torch.tensor(logits).div(temperature).softmax(0)
    seen = frequencies(logits, temperature)
    for id in range(4):  # four standard deviations of 4,000 draws
        assert seen.get(id, 0) == pytest.approx(expected[id].item(), abs=0.032)


def test_top_k_keeps_the_most_probable_in_their_proportion():
    seen = frequencies([0.0, 1.0, -1.0, 2.0], top_k=2)
    assert seen.keys() == {1, 3}
    assert seen[3] == pytest.approx(torch.tensor(1.0).sigmoid().item(), abs=0.03)
    assert frequencies([0.0, 1.0, -1.0, 2.0], top_k=1, count=50) == {3: 1.0}
    assert len(frequencies([1.0, 1.0, 1.0, 1.0], top_k=2, count=50)) == 2  # also if all are equal
    for everything in (0, 4, 99):
        assert len(frequencies([1.0, 1.0, 1.0, 1.0], top_k=everything, count=50)) == 4


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 1e-300, 1e-4])
def test_a_cold_sample_is_greedy(temperature):
    assert frequencies([0.0, 30.0, -30.0, 29.0], temperature, count=50) == {1: 1.0}


def test_top_p_keeps_the_fewest_tokens_that_have_this_part():
    logits = [0.0, 1.0, -1.0, 2.0]  # 0.087, 0.237, 0.032, 0.644
    kept = {0.1: {3}, 0.64: {3}, 0.65: {1, 3}, 0.88: {1, 3}, 0.89: {0, 1, 3}, 1.0: {0, 1, 2, 3}}
    for top_p, ids in kept.items():
        assert frequencies(logits, top_p=top_p, count=400).keys() == ids
    seen = frequencies(logits, top_p=0.7)
    assert seen[3] == pytest.approx(torch.tensor(1.0).sigmoid().item(), abs=0.03)
    # after top-k and the temperature
    assert frequencies(logits, top_k=2, top_p=0.74, count=200).keys() == {1, 3}
    assert frequencies(logits, top_k=2, top_p=0.72, count=200).keys() == {3}
    assert frequencies(logits, temperature=0.5, top_p=0.7, count=200).keys() == {3}


# ---- the cache ----


@pytest.fixture
def untrained(tmp_path):
    """Makes a run's folder for a milestone's script, with random weights."""

    def make(id, **more):
        milestone, folder = MANIFEST.get(id), tmp_path / f"{id}-{len(list(tmp_path.iterdir()))}"
        module = load_snapshot(milestone)
        args = module.Hyperparameters(**dict(
            vocab_size=260, num_layers=4, num_heads=2, model_dim=32, seq_len=48, bf16=False,
            log_dir="", **more))
        torch.manual_seed(0)
        model = module.GPT(args)
        for param in model.parameters():
            torch.nn.init.normal_(param, std=0.3)
        folder.mkdir()
        shutil.copy(milestone.script, folder / "train_gpt.py")
        save(folder, vars(args), model=model.state_dict())
        return folder

    return make


@pytest.mark.parametrize("id, more", [("04", {}), ("e0", dict(bos_id=256)),
                                      ("e2a", dict(bos_id=256))])
def test_a_cache_changes_no_token(untrained, id, more):
    trained = load_run(untrained(id, **more))
    assert trained.cached_by == "e4b_stream"
    read = []
    for model in (trained.cached, trained.model):
        model.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].size(1)))
    texts = {}
    for name, one in dict(cached=trained, whole=replace(trained, new_caches=None)).items():
        new = generate(one, [256, *b"what is it"], 256, 0.8, 40, random_stream(1, 0))
        texts[name] = [next(new) for _ in range(60)]  # beyond the context
    # the prompt, then token by token, then the window that slides; without a cache all again
    assert read == [11, *[1] * 37, *[48] * 22, *range(11, 48), *[48] * 23]
    assert texts["cached"] == texts["whole"]


def test_a_second_conversation_is_read_as_the_script_does(untrained):
    """e2a's mask keeps documents apart, which the cache does not."""
    trained = load_run(untrained("e2a", bos_id=256))
    prompt = [256, *b"one", 256, *b"two"]
    new = generate(trained, prompt, 257, 0, 0, random_stream(0, 0))
    alone = generate(trained, prompt[4:], 257, 0, 0, random_stream(0, 0))
    assert [next(new) for _ in range(20)] == [next(alone) for _ in range(20)]


@pytest.mark.parametrize("id, word", [("04", "with the cache of e4b_stream"),
                                      ("02", "reads the whole text again")])
def test_it_says_whether_there_is_a_cache(untrained, text_of, id, word):
    assert word in text_of(untrained(id), "--prompt", "a", "--tokens", 2)[1]


# ---- conversations ----


@pytest.fixture
def chat(untrained, monkeypatch, text_of):
    """Holds a conversation of these lines with a run whose answers are given, each as long as there
    are tokens; returns the ids that the model was given, stdout and stderr."""

    def run(lines, answers, *options):
        asked, answers = [], iter(answers)

        def generate(trained, prompt, size, *_):
            asked.append((prompt, size))
            return iter(next(answers))

        monkeypatch.setattr("speedrun.sample.generate", generate)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
        out, err = text_of(untrained("e2a", bos_id=256), "--chat", *options)
        return asked, out, err

    return run


def test_a_conversation(chat):
    asked, out, err = chat(b"hi\n\n  \n\tyo \r\n", [[*b"two", 259, 9]] * 2)
    first = [256, 257, *b"hi", 258]
    assert asked == [(first, 260), ([*first, *b"two", 259, 257, *b"\tyo ", 258], 260)]
    assert out == "two\ntwo\n" and "cut" not in err


def test_a_conversation_begins_with_the_prompt(chat):
    asked, out, _ = chat(b"yo", [[259], [*b"ok", 257]], "--prompt", "a\nb")
    assert asked[0][0] == [256, 257, *b"a\nb", 258]
    assert asked[1][0] == [256, 257, *b"a\nb", 258, 259, 257, *b"yo", 258]
    assert out == "\nok\n"  # an empty answer; and another marker ends one, too


def test_old_turns_leave_a_conversation_that_no_longer_fits(chat):
    lines = [bytes([letter]) * 6 for letter in b"abcd"]
    asked, _, err = chat(b"\n".join(lines), [[*b"yes.", 259]] * 4)  # turns of 13 ids
    turns = [[257, *line, 258, *b"yes.", 259] for line in lines]
    assert asked[3][0] == [256, *turns[1], *turns[2], 257, *lines[3], 258]  # the oldest left first
    assert err.count("no longer fit") == 1
    question, answer = b"q" * 20, [*b"a" * 12, 259]  # 22 and 13 ids of 48; a quarter stays free
    asked, _, err = chat(question + b"\n" + b"r" * 10, [answer, answer])
    assert asked[1][0] == [256, 257, *b"r" * 10, 258] and "no longer fit" in err
    asked, out, err = chat(b"x" * 46 + b"\n" + b"y" * 20, [b"z" * 99])
    assert "the message has 46 tokens, and the model's context 48" in err
    assert asked[0][0] == [256, 257, *b"y" * 20, 258]
    assert out == "z" * 25 + "\n" and "the answer was cut after 25 tokens" in err


# ---- vocabularies ----


@pytest.mark.parametrize("top_k", [0, 60_000, 50_300])
def test_padding_is_never_drawn(fake, byte_gpt2, top_k):
    run = load_run(fake(vocab_size=50304, favourite=50300, certainty=9.0))
    assert [vocabulary_of(size, None).size for size in (50304, 50257, 257, 64)] == [
        50257, 50257, 257, 64]
    for temperature in (0, 1, 100):
        new = generate(run, [50256], 50257, temperature, top_k, random_stream(0, 0))
        assert all(next(new) < 50257 for _ in range(30))


def test_gpt2_text(fake, text_of, byte_gpt2):
    out, err = text_of(fake(vocab_size=50304), "--prompt", "é<|endoftext|>", "--tokens", 2)
    assert out == "é<|endoftext|>?@\n"  # the document token is no text
    assert "GPT-2" in err
    out, err = text_of(fake(vocab_size=50257, favourite=50256), "--prompt", "x")
    assert out == "x\n" and "ended after 0 tokens" in err


def test_a_prompt_is_encoded_in_pieces(byte_gpt2, monkeypatch):
    """tiktoken panics at 999,999 white-space characters in a row."""
    assert library.MOST_AT_ONCE < 999_999
    monkeypatch.setattr(library, "MOST_AT_ONCE", 4)
    encoded = []
    encoding = tiktoken.get_encoding("gpt2")
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: Mock(
        encode_ordinary=lambda text: encoded.append(text) or encoding.encode_ordinary(text)))
    encode = vocabulary_of(50304, None).encode
    for text in (b"", b"abc", b"abcd", b"abcdefghij"):
        assert encode(text) == [*text]
    assert encoded == ["abc", "abcd", "ab", "cdef", "ghij"]


def test_gpt2_without_its_vocabulary_prints_numbers(fake, text_of, monkeypatch):
    def unreachable(name):
        raise ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    run = fake(vocab_size=50304)
    out, err = text_of(run, "--prompt", "50000 50001", "--tokens", 2)
    assert out == "50000 50001 50002 50003 \n"
    assert "GPT-2's vocabulary cannot be loaded (ConnectionError)" in err
    assert "TIKTOKEN_CACHE_DIR" in err
    assert text_of(run, "--prompt", "50254", "--tokens", 9)[0] == "50254 50255 \n"
    for prompt in ("some text", "50257", "-1"):  # padding is no token either
        with pytest.raises(UserError, match="must be token numbers, 0 to 50256"):
            sample.main([str(run), f"--prompt={prompt}"])


def test_an_unknown_vocabulary_prints_numbers(fake, text_of):
    run = fake(vocab_size=64)
    out, err = text_of(run, "--prompt", "61", "--tokens", 4)
    assert out == "61 62 63 0 1 \n" and "no known vocabulary has 64 tokens" in err
    with pytest.raises(UserError, match="has no start of a document; give a prompt"):
        sample.main([str(run), "--prompt", ""])


def test_an_unknown_vocabulary_may_have_a_document_token():
    vocabulary = vocabulary_of(64, 3)
    assert vocabulary.bos == 3 and vocabulary.note
    for padded in (257, 264):
        bytes_ = vocabulary_of(padded, 3)
        assert (bytes_.size, bytes_.bos) == (257, 256)  # there the data's counts


def test_characters_that_are_spread_over_tokens(fake, text_of, monkeypatch):
    printed = []
    monkeypatch.setattr("speedrun.sample.generate",
                        lambda *options: iter("aé€".encode() + b"\xe2\x82"))
    monkeypatch.setattr("builtins.print", lambda *text, **options: printed.extend(text))
    text_of(fake(), "--prompt", "x", "--tokens", 8)
    assert printed[2:] == ["x", "a", "", "é", "", "", "€", "", "", "\N{REPLACEMENT CHARACTER}"]


# ---- refusals ----


class Malicious:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def refuse(run, message):
    with pytest.raises(UserError, match=message) as caught:
        sample.main([str(run), "--prompt", "a", "--tokens", "2"])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 450


def test_pickled_code_is_refused_and_not_run(fake, tmp_path):
    run = fake()
    save(run, Malicious(tmp_path / "made"))
    refuse(run, "holds pickled code")
    assert not (tmp_path / "made").exists()


def test_a_checkpoint_knows_its_script(fake):
    """01's beside 02's script has the same names and shapes of weights."""
    folder, other = fake(), MANIFEST.get("02")
    file, script = folder / "checkpoint.pt", folder / "train_gpt.py"
    assert signed_hash(file) is None
    sign(file, script)
    signed = file.read_bytes()
    sign(file, script)  # once is enough
    assert file.read_bytes() == signed
    assert signed_hash(file) == hash_of(script) and load_run(folder).step == 7
    files = [path.name for path in sorted(folder.iterdir()) if path.is_file()]
    assert files == ["checkpoint.pt", "train_gpt.py"]
    script.write_bytes(FAKE.replace("\n", "\r\n").encode())
    assert load_run(folder).step == 7
    script.write_text(FAKE.replace("+ 1)", "+ 2)"), encoding="utf-8")
    for text, owner in ((FAKE, ""), (other.script.read_text("utf-8"), f", but of {other.name}")):
        save(folder, {})
        script.write_text(text, encoding="utf-8")
        sign(file, script)
        script.write_text(FAKE.replace("+ 1)", "+ 2)"), encoding="utf-8")
        with pytest.raises(UserError) as error:
            load_run(folder)
        assert str(error.value) == (f"{file} is not of the script beside it{owner}; copy its own"
                                    " run's script there (that run's log.txt begins with it)")
    (folder / "checkpoint.pt").write_bytes(b"PK")
    sign(file, script)
    assert file.read_bytes() == b"PK"  # no archive, so nothing is added


@pytest.mark.parametrize("sizes, words", [
    (dict(num_layers=10**9, model_dim=8), "num_layers=1000000000 and model_dim=8 need more than"),
    (dict(num_layers=1, model_dim=3), "num_layers=1 and model_dim=3 need more than its 6 weights"),
    (dict(seq_len=10**9), "seq_len=1000000000 is above 16,777,216"),
])
def test_a_checkpoint_of_a_model_without_end_is_refused(fake, sizes, words):
    with pytest.raises(UserError, match=f"checkpoint.pt is damaged: {words}"):
        load_run(fake(**sizes))


def test_damaged_files_are_refused(fake, monkeypatch):
    run = fake()
    file = run / "checkpoint.pt"
    whole = file.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        refuse(run, "is damaged, or no checkpoint: File is not a zip file")
    weights = whole.index(bytes(24))  # the zeros of the model
    file.write_bytes(whole[:weights] + b"\1" + whole[weights + 1:])
    refuse(run, "is damaged, or no checkpoint: wrong check sum")
    with monkeypatch.context() as patch:
        patch.setattr("zipfile.ZipFile", Mock(side_effect=PermissionError(13, "Permission denied")))
        refuse(run, "checkpoint.pt: Permission denied$")
    torch.save([1, 2], file)
    refuse(run, "is not a snapshot's checkpoint")
    torch.save(dict(step=1, model={}), file)
    refuse(run, "is not a snapshot's checkpoint")


def test_missing_files_are_refused(fake, tmp_path, monkeypatch):
    run = fake()
    refuse(tmp_path / "none", "none does not exist; name a run's folder or its checkpoint")
    refuse(Path("/dev/null"), "is neither a run's folder nor a checkpoint")
    (run / "train_gpt.py").unlink()
    refuse(run, "has no train_gpt.py beside it")
    (run / "checkpoint.pt").unlink()
    refuse(run, r"holds no checkpoint.pt; .*run_milestone.py ID --save-checkpoint")
    with pytest.raises(UserError, match="--prompt-file .*: No such file"):
        sample.main([str(fake()), "--prompt-file", str(tmp_path / "none")])
    monkeypatch.setattr(sample, "MOST_BYTES", 3)
    (tmp_path / "long").write_bytes(b"four")
    with pytest.raises(UserError, match="the prompt is longer than 3 bytes"):
        sample.main([str(fake()), "--prompt-file", str(tmp_path / "long")])


def test_a_checkpoint_of_another_script_is_refused(fake):
    run = fake()
    shutil.copy(MANIFEST.get("00").script, run / "train_gpt.py")
    refuse(run, "does not fit .*only one of the two has adam_beta1, adam_beta2, .*…$")
    run = fake()
    script = run / "train_gpt.py"
    script.write_text(FAKE.replace("zeros(2, 3)", "zeros(3, 2)"), encoding="utf-8")
    refuse(run, "does not fit .*size mismatch for weight")
    run = fake()
    for weights in ({}, {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}):
        save(run, torch.load(run / "checkpoint.pt")["hyperparameters"], model=weights)
        refuse(run, "does not fit .*(Missing|Unexpected) key")


@pytest.mark.parametrize("script, message", [
    ("import torch\n", "does not fit .*no attribute 'Hyperparameters'"),
    ("this is no Python", "does not fit .*invalid syntax"),
    (FAKE + "\nraise SystemExit('trains at once')\n", "does not fit .*trains at once"),
    (FAKE.replace("class GPT", "class GPT2"), "does not fit .*no attribute 'GPT'"),
])
def test_scripts_that_are_no_snapshots_are_refused(fake, script, message):
    run = fake()
    (run / "train_gpt.py").write_text(script, encoding="utf-8")
    refuse(run, message)


def test_chat_needs_a_run_that_knows_conversations(fake):
    with pytest.raises(UserError, match="knows no conversations; fine-tune it: python tools/"):
        sample.main([str(fake()), "--chat", "--prompt", "a"])
    with pytest.raises(UserError, match="leave --num-samples out"):
        sample.main([str(fake()), "--chat", "--num-samples", "2"])


def test_a_diverged_model_is_refused(fake):
    refuse(fake(certainty=float("nan")), "logits are not finite")


@pytest.mark.parametrize("option", [
    "--tokens=0", "--temperature=nan", "--top-k=-1", "--seed=-1", "--num-samples=0",
    "--prompt-file=x", "--top-p=0", "--top-p=1.1",
])
def test_wrong_options(fake, option, capsys):
    with pytest.raises(SystemExit) as ended:
        sample.main(["run", "--prompt", "a", option])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
