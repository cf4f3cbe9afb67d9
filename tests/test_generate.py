"""The encore's generation: the same tokens with a cache as without, streams, stopping, streaming.

Run: .venv/bin/python -m pytest tests/test_generate.py
"""

import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ranks import run_tool
from snapshots import MANIFEST, REPOSITORY, by_id, handles, known_values, load_snapshot, own_values
from speedrun.base.errors import UserError
from speedrun.run.generation import Answers, generate
from test_parts import SMALL, fill

RUNGS = [m for m in MANIFEST.of_chain("encore").milestones if m.program == "generate.py"]
MODULES = {milestone.id: load_snapshot(milestone) for milestone in RUNGS}
every_rung = pytest.mark.parametrize("milestone", RUNGS, ids=by_id)
CACHED = [milestone for milestone in RUNGS if "KVCache" in vars(MODULES[milestone.id])]
RUN = REPOSITORY / "tools" / "run_milestone.py"
COMPARE = REPOSITORY / "tools" / "compare_milestones.py"
PROMPT = torch.tensor([1, 9, 27])
BYTES = dict(vocab_size=260, bos_id=256, num_layers=4, num_heads=2, model_dim=32, seq_len=64,
             bf16=False, checkpoint="a")


def small(id, **sizes):
    """04's small model in a rung's classes, and its hyperparameters; 60 starts the markers."""
    config = Namespace(**{**SMALL, "bos_id": 60, "seq_len": 16, **sizes})
    model = MODULES[id].GPT(config)
    fill(model, 0.5)
    return model.eval(), config


def draw(id, model, config, prompt=PROMPT, **settings):
    """The answers as lists."""
    args = MODULES[id].Hyperparameters(**settings)
    return [list(map(int, answer)) for answer in MODULES[id].generate(model, prompt, config, args)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model of bytes with random weights, as fine-tuning would leave it."""
    file = tmp_path_factory.mktemp("run") / "checkpoint.pt"
    torch.manual_seed(1)
    model = MODULES["e0a"].GPT(Namespace(**BYTES))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    torch.save(dict(step=1, hyperparameters=BYTES, model=model.state_dict()), file)
    return file


# ---- the card's numbers ----


def where_known(key):
    """Runs a test at the rungs whose known.toml has the key."""
    return pytest.mark.parametrize("milestone", [m for m in RUNGS if key in own_values(m.id)],
                                   ids=by_id)


@every_rung
def test_greedy_tokens_and_logits(milestone):
    known, (model, config) = known_values(milestone.id), small(milestone.id)
    (answer,) = draw(milestone.id, model, config, num_samples=1, temperature=0, max_new_tokens=8)
    assert answer == known["greedy"]
    with torch.no_grad():
        logits = model(PROMPT[None])[0, -1, :4]
    torch.testing.assert_close(logits, torch.tensor(known["first_logits"]), rtol=0, atol=2e-6)


@every_rung
def test_drawn_tokens(milestone):
    model, config = small(milestone.id)
    assert known_values(milestone.id)["drawn"] == draw(
        milestone.id, model, config, num_samples=4, temperature=1.0, max_new_tokens=6)


@where_known("step_flops")
def test_a_token_costs_what_the_mathematics_says(milestone):
    config = Namespace(
        vocab_size=260, num_layers=4, num_heads=2, model_dim=128, seq_len=256, bf16=False)
    module, counted = MODULES[milestone.id], {}
    model = module.GPT(config)
    for t in map(int, known_values(milestone.id)["step_flops"]):
        tokens, more = t, {}
        if milestone in CACHED:
            tokens, more = 1, dict(caches=[
                module.KVCache(config, t, model.embed.weight) for _ in model.blocks])
            for cache in more["caches"]:
                cache.filled = t - 1
        with (FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH),
              torch.no_grad()):
            model(torch.zeros(1, tokens, dtype=torch.int64), **more)
        counted[str(t)] = counter.get_total_flops()
    assert counted == known_values(milestone.id)["step_flops"]


@where_known("token_passes")
def test_token_passes_with_and_without_a_cache(milestone):
    model, config = small(milestone.id, seq_len=150)
    read = []
    model.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].numel()))
    draw(milestone.id, model, config, prompt=torch.arange(50), num_samples=1, max_new_tokens=100)
    assert sum(read) == known_values(milestone.id)["token_passes"]


# ---- the cache ----


@pytest.mark.parametrize("num_samples", [1, 4])
@pytest.mark.parametrize("temperature, top_k", [(0, 0), (0.8, 5), (1.0, 0), (0.8, 0), (1.0, 5)])
def test_a_cache_changes_no_token(checkpoint, num_samples, temperature, top_k):
    args = dict(num_samples=num_samples, temperature=temperature, top_k=top_k, max_new_tokens=44)
    for seed in range(2 if temperature else 1):
        answers = []
        for id in ("e0a", "e3"):
            model, config = MODULES[id].load_model(Namespace(checkpoint=checkpoint, bf16=False),
                                                   torch.device("cpu"))
            answers.append(draw(id, model, config, torch.tensor([256, 257, *b"what is it", 258]),
                                seed=seed, **args))
        assert answers[0] == answers[1]


@pytest.mark.parametrize("milestone", CACHED, ids=by_id)
@torch.no_grad()
def test_reading_token_by_token_gives_the_logits_of_one_pass(milestone):
    model, config = small(milestone.id)
    model.embed.weight.mul_(2)
    tokens = torch.arange(32).view(2, 16) % 60
    caches = [MODULES[milestone.id].KVCache(config, 16, model.embed.weight) for _ in model.blocks]
    for cache in caches:
        cache.take([0, 0])
    pieces = [model(tokens[:, a:b], caches=caches) for a, b in [(0, 7)] + [
        (t, t + 1) for t in range(7, 16)]]
    torch.testing.assert_close(torch.cat(pieces, 1), model(tokens), rtol=0, atol=1e-4)
    assert {cache.filled for cache in caches} == {16}
    with pytest.raises(AssertionError, match="a filled cache takes one token at a time"):
        model(tokens[:, :2], caches=caches)


@where_known("cache_bytes")
def test_bytes_of_a_cache(milestone):
    module = MODULES[milestone.id]
    for known in known_values(milestone.id)["cache_bytes"]:
        config = Namespace(num_heads=2, model_dim=known["model_dim"])
        caches = [module.KVCache(config, known["slots"], torch.zeros(1))
                  for _ in range(known["num_layers"])]
        assert known["bytes"] == sum(
            t.nbytes for cache in caches for t in (cache.keys, cache.values))


# ---- samples ----


@where_known("streams")
def test_random_streams(milestone):
    for seed, sample, expected in known_values(milestone.id)["streams"]:
        stream = MODULES[milestone.id].random_stream(seed, sample)
        assert stream.initial_seed() == expected


@pytest.mark.parametrize("id, alike", [("e0a", True), ("e3", True), ("e4", False), ("e4b", False)])
def test_first_tokens_are_independent_from_own_streams_on(id, alike):
    model, config = small(id)
    first = [answer[0] for answer in draw(id, model, config, num_samples=16, max_new_tokens=2)]
    assert (len(set(first)) == 1) == alike


@pytest.mark.parametrize("id", ["e4", "e4a", "e4b"])
def test_a_sample_does_not_depend_on_how_many_are_drawn(id):
    model, config = small(id)
    many = draw(id, model, config, num_samples=16, max_new_tokens=8, temperature=2.0, seed=3)
    few = draw(id, model, config, num_samples=4, max_new_tokens=8, temperature=2.0, seed=3)
    assert many[:4] == few
    assert len({tuple(answer) for answer in many}) > 8


@pytest.mark.slow
@pytest.mark.parametrize("id, fits", [("e3", False), ("e4", True)])
def test_first_tokens_have_the_models_distribution(id, fits):
    from scipy.stats import chisquare

    model, config = small(id)
    with torch.no_grad():
        expected = 2000 * model(PROMPT[None])[0, -1, :64].double().softmax(-1)
    first = [answer[0] for answer in draw(
        id, model, config, num_samples=2000, max_new_tokens=1, temperature=1.0)]
    counts = torch.bincount(torch.tensor(first), minlength=64).double()
    rare = expected < 5
    if rare.any():
        counts, expected = (torch.cat((t[~rare], t[rare].sum()[None])) for t in (counts, expected))
    assert (chisquare(counts, expected).pvalue > 1e-3) == fits


def test_stopping_cuts_what_own_streams_draws():
    """As far as each goes, e4a's answers are e4's; rows that have ended are not read again."""
    answers, read = {}, {}
    for id in ("e4", "e4a"):
        model, config = small(id, bos_id=20)  # a sixth of the ids are markers
        rows = read[id] = []
        model.register_forward_pre_hook(lambda _, inputs, rows=rows: rows.append(len(inputs[0])))
        answers[id] = draw(id, model, config, num_samples=16, max_new_tokens=12, temperature=1.0)
    for whole, cut in zip(answers["e4"], answers["e4a"], strict=True):
        assert whole[: len(cut)] == cut
        assert all(id < 20 for id in cut[:-1]) and (cut[-1] >= 20 or len(cut) == 12)
    known = known_values("e4a")
    assert [len(answer) for answer in answers["e4a"]] == known["lengths"]
    assert read == {"e4": [1, *[16] * 11], "e4a": known["rows_read"]}


@every_rung
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # in bfloat16 many are equal
@pytest.mark.parametrize("top_k, temperature", [(0, 0), (0, 1), (1, 1), (7, 2), (60, 1), (999, 1)])
def test_a_draw_is_one_from_all_ids_in_order(milestone, dtype, top_k, temperature):
    """Sorts everything in float64, as draw need not."""
    module = MODULES[milestone.id]
    args = module.Hyperparameters(top_k=top_k, temperature=temperature)
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)).to(dtype).float()

    def source():
        generators = [torch.Generator().manual_seed(i) for i in range(len(logits))]
        return handles(module).random_source(generators)

    found, ids = module.draw(logits, source(), args), logits.double().argsort(
        descending=True, stable=True)
    if temperature == 0:
        assert torch.equal(found, ids[:, 0])
        return
    ids = ids[:, : top_k or None]
    probabilities = (logits.double().gather(1, ids) / temperature).softmax(-1)
    if isinstance(streams := source(), list):
        ranks = torch.stack([torch.multinomial(row, 1, generator=stream) for row, stream in zip(
            probabilities, streams, strict=True)])
    else:
        ranks = torch.multinomial(probabilities, 1, generator=streams)
    assert torch.equal(found, ids.gather(1, ranks)[:, 0])


def test_drawing_keeps_exactly_k_and_cuts_unused_ids():
    module = MODULES["e0a"]
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]]).expand(200, -1)
    generator = torch.Generator().manual_seed(0)
    args = module.Hyperparameters(top_k=2, temperature=1e-3)
    assert set(module.draw(logits, generator, args).tolist()) == {1, 2}
    args = module.Hyperparameters(top_k=99, temperature=1.0)
    assert set(module.draw(logits, generator, args).tolist()) == {0, 1, 2, 3, 4}
    with pytest.raises(AssertionError, match="not finite"):
        module.draw(logits * torch.inf, generator, args)
    model, config = small("e0a", bos_id=20)
    model.lm_head.weight.data[24:] *= 50  # padding that would win
    assert max(max(a) for a in draw("e0a", model, config, max_new_tokens=8, temperature=3.0)) < 24


# ---- text ----


def test_streamed_pieces_join_to_the_decoded_text(capsys):
    config = Namespace(bos_id=256)
    text = "naïve – 中 🙂!"
    whole = MODULES["e4a"].decode([*text.encode(), 259], config)
    assert whole == text
    writer, printed = MODULES["e4b"].Writer(config, 1), []
    for id in [*text.encode(), 259]:
        writer.add(0, id, id == 259)
        printed.append(capsys.readouterr().out)
    assert "".join(printed) == text + "\n" and "\ufffd" not in "".join(printed)
    assert printed[:5] == ["n", "a", "", "ï", "v"]
    # several in their order, whichever ends first
    writer = MODULES["e4b"].Writer(config, 3)
    for sample, id, ended, expected in known_values("e4b")["printed"]:
        writer.add(sample, id, ended)
        assert capsys.readouterr().out == expected, (sample, hex(id))


def test_streaming_prints_what_is_printed_at_the_end(checkpoint, capsys, monkeypatch):
    printed = []
    for id in ("e4a", "e4b"):
        module = MODULES[id]
        monkeypatch.setattr(module, "encode_prompt", lambda *_: torch.tensor([256, 257, 258]))
        module.main(module.Hyperparameters(checkpoint=str(checkpoint), num_samples=8,
                                           max_new_tokens=61, temperature=1.5))
        printed.append(capsys.readouterr().out.rpartition("\ntokens:"))
    assert printed[0][0] == printed[1][0] and "cut_at_max_new_tokens:" in printed[1][2]
    assert len({len(line) for line in printed[0][0].split("\n")}) > 3  # they end apart


def test_gpt2s_vocabulary_never_becomes_a_marker():
    pytest.importorskip("tiktoken")
    if not os.environ.get("TIKTOKEN_CACHE_DIR"):
        pytest.skip("GPT-2's vocabulary is not here; set TIKTOKEN_CACHE_DIR")
    config = Namespace(bos_id=50256)
    for milestone in RUNGS:
        module = MODULES[milestone.id]
        ids = module.encode_prompt("hi <|endoftext|>", config).tolist()
        assert ids[:2] == [50256, 50257] and ids[-1] == 50258 and max(ids[2:-1]) < 50256


# ---- the command ----


def test_run_milestone_answers(checkpoint):
    settings = ["--set", "max_new_tokens=6", "--prompt", "hi"]
    done = run_tool(RUN, "e4a", "--from", str(checkpoint), *settings)
    assert done.returncode == 0 and not done.stderr
    *_, last = done.stdout.splitlines()
    assert last.startswith("tokens:") and "tokens_per_second:" in last
    done = run_tool(RUN, "e3", "--from", str(checkpoint), "--json", *settings)
    assert '"tokens": 24' in done.stdout


def generated(code, write=None):
    """What speedrun.run.generation makes of a program."""
    return generate(Namespace(
        hyperparameters={}, script=Namespace(milestone=None, tiny_of=None),
        command=[sys.executable, "-IS", "-c", code]), write)


def test_the_last_line_counts_and_not_one_that_the_text_quotes(monkeypatch):
    lines = [f"tokens:{n} time:{1500 * n}ms tokens_per_second:{n}.50" for n in (1, 6)]
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    names = "PYTHONUNBUFFERED", "PYTHONIOENCODING", "PYTHONOPTIMIZE"
    code = (f"import os; print({lines[0]!r}, *map(os.environ.get, {names}))\n"
            f"print({lines[1]!r}, 'cut')")
    written = []
    found = generated(code, written.append)
    assert found == Answers(f"{lines[0]} 1 utf-8 None\n".encode(), 6, 9.0, 6.5)
    assert b"".join(written).startswith(found.text) and written[-1].endswith(b"cut\n")


@pytest.mark.parametrize("code, message, status", [
    ("print('tokens:1')", "the script ended without its last line, tokens:… time:…ms "
     "tokens_per_second:…", 1),
    ("import sys; sys.exit('x.py: error: bad')", "bad", 1),
    ("import os; os._exit(3)", "the script ended with exit code 3", 1),
    ("import os; os.kill(os.getpid(), 9)", "the script was killed by SIGKILL (out of memory?)", 1),
    ("import time; print(1, flush=True); time.sleep(60)", "stopped by SIGTERM", 143),
])
def test_a_script_that_fails_to_answer(code, message, status):
    with pytest.raises(UserError) as error:
        generated(code, lambda text: text == b"1\n" and os.kill(os.getpid(), signal.SIGTERM))
    assert (str(error.value), error.value.status) == (message, status)


def test_a_script_whose_answer_nobody_reads_is_ended():
    def closed(text):
        raise BrokenPipeError

    before = time.monotonic()
    with pytest.raises(BrokenPipeError):
        generated("import time; print(1, flush=True); time.sleep(20)", closed)
    assert time.monotonic() - before < 15


@pytest.mark.parametrize("words, arguments", [
    ("add --from RUN, a run's folder; this makes one: python tools/run_milestone.py e2a", []),
    ("prompt and answer take 104 tokens, the model 64: shorten one", ["--from", "CHECKPOINT"]),
    ("has no markers: fine-tune it first", ["--from", "BASE"]),
    ("holds pickled code, which is not run", ["--from", "PICKLED"]),
    ("is one process; leave --nproc", ["--from", "CHECKPOINT", "--nproc", "2"]),
    ("trains nothing; leave --steps", ["--from", "CHECKPOINT", "--steps", "3"]),
    ("temperature=-1.0 is out of range", ["--from", "CHECKPOINT", "--set", "temperature=-1"]),
    ("--set prompt: it holds bytes that are not UTF-8", ["--from", "CHECKPOINT",
                                                         "--prompt", "\udcff"]),
    ("reads no data; leave it out", ["--from", "CHECKPOINT", "--data", "."]),
])
def test_refusals(words, arguments, checkpoint, tmp_path):
    found = torch.load(checkpoint, weights_only=True)
    base = {k: v for k, v in found["hyperparameters"].items() if k != "checkpoint"}
    torch.save(dict(found, hyperparameters=base), tmp_path / "base.pt")
    torch.save(dict(found, model=F.relu), tmp_path / "pickled.pt")
    files = dict(CHECKPOINT=checkpoint, BASE=tmp_path / "base.pt", PICKLED=tmp_path / "pickled.pt")
    arguments = [str(files.get(argument, argument)) for argument in arguments]
    done = run_tool(RUN, "e3", *arguments, "--set", "prompt=x")
    assert done.returncode in (1, 2) and not done.stdout
    assert words in done.stderr and done.stderr.count("\n") == 1


def test_a_closed_pipe_ends_it_quietly(checkpoint):
    child = subprocess.Popen(
        [sys.executable, "tools/run_milestone.py", "e4b", "--from", str(checkpoint),
         "--set", "num_samples=1", "--set", "max_new_tokens=28"],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.read(2)
    child.stdout.close()
    assert child.stderr.read() == b"" and child.wait() != 0
    child.stderr.close()


def test_compare_times_generation_in_turn(checkpoint):
    done = run_tool(COMPARE, "e0a", "e3", "--from", str(checkpoint), "--repeat",
                    "1", "--set", "max_new_tokens=8")
    assert done.returncode == 0 and done.stdout.count("the same") == 2
    first, second = (float(speed.replace(",", ""))
                     for speed in re.findall(r"seed 0: (.+) tokens/s", done.stderr + done.stdout))
    ratios = [*map(float, re.findall(r"([\d.]+)x \(", done.stdout))]
    assert ratios == pytest.approx([1, second / first], rel=0.02)  # tokens/s are rounded
    done = run_tool(COMPARE, "e0a", "01", "--from", str(checkpoint))
    assert "only others that do compare with it" in done.stderr
    assert set(asdict(MODULES["e3"].Hyperparameters())) == set(
        asdict(MODULES["e4b"].Hyperparameters()))


# ---- another implementation ----


@pytest.mark.slow
def test_transformers_draws_the_same_tokens():
    """transformers' NanoChat is 04 without its shortcuts, which are switched off here."""
    transformers = pytest.importorskip("transformers", minversion="5.18.0",
                                       reason="only here: pip install transformers==5.18.0")
    config = Namespace(vocab_size=260, bos_id=256, num_layers=4, num_heads=2, model_dim=128,
                       seq_len=256, bf16=False)
    torch.manual_seed(0)
    ours, theirs = MODULES["e3"].GPT(config).eval(), transformers.NanoChatForCausalLM(
        transformers.NanoChatConfig(
            vocab_size=260, hidden_size=128, intermediate_size=512, num_hidden_layers=4,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
            rms_norm_eps=torch.finfo(torch.float32).eps, final_logit_softcapping=30.0,
            bos_token_id=256, pad_token_id=256, eos_token_id=None)).eval()
    without_shortcuts(ours)
    names = {"attn.c_proj": "attn.o_proj", "mlp.c_proj": "mlp.fc2", "c_q": "q_proj",
             "c_k": "k_proj", "c_v": "v_proj", "c_fc": "fc1", ".attn": ".self_attn",
             "blocks": "model.layers", "embed": "model.embed_tokens"}
    weights = {}
    for name, tensor in ours.state_dict().items():
        for own, other in names.items():
            name = name.replace(own, other)
        if tensor.ndim == 2:
            weights[name] = tensor
    theirs.load_state_dict(weights, strict=True)
    prompt = torch.randint(0, 256, (41,))
    with torch.no_grad():
        torch.testing.assert_close(theirs(prompt[None]).logits, ours(prompt[None]),
                                   rtol=0, atol=1e-4)
    (answer,) = draw("e3", ours, config, prompt, num_samples=1, temperature=0, max_new_tokens=215)
    found = theirs.generate(prompt[None], max_new_tokens=215, do_sample=False)
    assert found[0, 41:].tolist() == answer


@torch.no_grad()
def without_shortcuts(model):
    """Switches off what NanoChat does not have, and gives zero matrices values."""
    model.skip_weights.zero_()
    for block in model.blocks:
        block.attn.value_lambda.zero_()
        block.lambdas.copy_(torch.tensor([1.0, 0.0]))
        for linear in (block.attn.c_proj, block.mlp.c_proj):
            torch.nn.init.normal_(linear.weight, std=0.1)
    torch.nn.init.normal_(model.lm_head.weight, std=0.1)
