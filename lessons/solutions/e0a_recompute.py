"""Checks, hints and solutions of the exercises in lessons/e0a_recompute.ipynb."""

from argparse import Namespace

import torch

from speedrun.history.manifest import load_manifest
from speedrun.scripts.find import load_snapshot

e3, e4 = (load_snapshot(load_manifest().get(id).script) for id in ("e3", "e4"))

# ---- 1: the cache's bytes ----


def check_bytes(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a number of MiB, not {answer!r}") from None
    causes = {
        0.5625: "that is in GiB; a GiB is 1,024 MiB",
        576 * 2**20: "that is in bytes; a MiB is 2^20 of them",
        36: "that is one sample; each of 16 has a cache of its own",
        288: "that is one tensor per layer; keys and values are both kept",
        48: "that is one layer; each of 12 layers has keys and values of its own",
        96: "that is one head; model_dim counts all 6 heads, 128 numbers each",
        1152: "that is 4 bytes per number, float32; bfloat16 has 2",
        3456: "6 heads share model_dim = 768 among them; do not multiply by both",
        18: "that is one sample of 512 tokens; the question is about 16 of 1,024",
        603.98: "that is in units of 10^6 bytes; a MiB is 2^20",
    }
    near = next((why for wrong, why in causes.items() if abs(value - wrong) < 0.01 * wrong), (
        "multiply numbers per token and layer, layers, tokens, samples and bytes per number"))
    assert value == 576, f"expected the MiB of all caches together, got {value:g}: {near}"


# ---- 2: a ring of W slots ----


class Ring(e3.KVCache):
    def append(self, k, v):
        slot = self.filled % self.keys.size(2)
        self.keys[:, :, slot], self.values[:, :, slot] = k[:, :, 0], v[:, :, 0]
        self.filled += 1
        return self.keys[:, :, : self.filled], self.values[:, :, : self.filled]


class _Sliding(e3.KVCache):
    def append(self, k, v):
        if self.filled == 0:
            self.keys, self.values = k, v
        else:
            length = 3 if self.keys.size(1) == 1 else 4
            self.keys = torch.cat((self.keys, k), 2)[:, :, -length:]
            self.values = torch.cat((self.values, v), 2)[:, :, -length:]
        self.filled += 1
        return self.keys, self.values


class _LastSlot(e3.KVCache):
    def append(self, k, v):
        slot = min(self.filled, self.keys.size(2) - 1)
        self.keys[:, :, slot], self.values[:, :, slot] = k[:, :, 0], v[:, :, 0]
        self.filled += 1
        return self.keys[:, :, : self.filled], self.values[:, :, : self.filled]


class _StartsOver(e3.KVCache):
    def append(self, k, v):
        self.filled %= self.keys.size(2)
        self.keys[:, :, self.filled], self.values[:, :, self.filled] = k[:, :, 0], v[:, :, 0]
        self.filled += 1
        return self.keys[:, :, : self.filled], self.values[:, :, : self.filled]


class _AllSlots(Ring):
    def append(self, k, v):
        super().append(k, v)
        return self.keys, self.values


class _SlotCount(Ring):
    def append(self, k, v):
        kept = super().append(k, v)
        self.filled = min(self.filled, self.keys.size(2))
        return kept


class _Unrolled(e3.KVCache):
    def append(self, k, v):
        self.keys[:, :, self.filled], self.values[:, :, self.filled] = k[:, :, 0], v[:, :, 0]
        self.filled += 1
        return self.keys[:, :, : self.filled], self.values[:, :, : self.filled]


class _KeysOnly(Ring):
    def append(self, k, v):
        return super().append(k, k)


class _WithoutIndex(e3.KVCache):
    def append(self, k, v):
        slot = self.filled % self.keys.size(2)
        self.keys[:, :, slot], self.values[:, :, slot] = k, v
        self.filled += 1
        return self.keys[:, :, : self.filled], self.values[:, :, : self.filled]


class _Nothing(Ring):
    def append(self, k, v):
        super().append(k, v)


WINDOW = 4


class LastOfAll(e3.KVCache):
    """A cache of all tokens that shows attention the window's."""

    def append(self, k, v):
        keys, values = super().append(k, v)
        return keys[:, :, -WINDOW:], values[:, :, -WINDOW:]


def random_model(module, **sizes):
    """A micro model whose logits differ, and its hyperparameters, the same for each call."""
    torch.manual_seed(0)
    config = Namespace(**dict(vocab_size=34, bos_id=30, num_layers=2, num_heads=2, model_dim=32,
                              seq_len=24, bf16=False) | sizes)
    model = module.GPT(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model.eval(), config


@torch.inference_mode()
def read_by_token(cache_class, length):
    """The logits of a micro model that reads 12 tokens one by one through such caches."""
    model, config = random_model(e3)
    caches = [cache_class(config, length, model.embed.weight) for _ in model.blocks]
    return torch.cat([model(token, caches=caches) for token in torch.arange(12)[None].split(1, 1)],
                     1)


def check_ring(answer):
    assert isinstance(answer, type) and issubclass(answer, e3.KVCache), (
        "expected a class that inherits from e3.KVCache; keep the line `class Ring(e3.KVCache):`")
    size = 3
    ring = answer(Namespace(num_heads=1, model_dim=1), size, torch.empty(0))
    storage = ring.keys.data_ptr(), ring.values.data_ptr()
    for t in range(8):
        k = torch.full((1, 1, 1, 1), float(t))
        try:
            found = ring.append(k, 100 + k)
        except IndexError:
            raise AssertionError(
                f"token {t} has no slot: your slot is {ring.filled}, the ring has slots 0 to"
                f" {size - 1}. Behind the last slot comes the first again: use %") from None
        assert isinstance(found, tuple) and len(found) == 2, (
            f"append should return the keys and the values that the token sees; yours returns"
            f" {'nothing' if found is None else type(found).__name__}")
        keys, values = (kept.flatten().tolist() for kept in found)
        held, seen = min(t + 1, size), list(range(max(0, t + 1 - size), t + 1))
        assert len(keys) == len(values) == held, (
            f"after token {t} your ring returns {len(keys)} keys and {len(values)} values, expected"
            f" {held}: " + (
                "an empty slot is no token, and softmax would give it weight" if len(keys) > held
                else "the new token sees the whole window, whichever slot it took itself"))
        assert sorted(keys) == seen, (
            f"after token {t} your ring of {size} slots holds the tokens"
            f" {[int(key) for key in sorted(keys)]}, expected {seen}: the new one replaces the"
            " oldest")
        assert [value - 100 for value in values] == keys, (
            f"after token {t} key and value of one slot belong to different tokens, or your"
            " values are the keys: write both into the same slot")
        assert (ring.keys.data_ptr(), ring.values.data_ptr()) == storage, (
            "your ring copies all slots for every token; write the new one into its slot, and"
            " leave the others where they are: attention does not need them in order")
        assert ring.filled == t + 1, (
            f"after token {t} your `filled` is {ring.filled}: attention takes the next"
            " token's position from it, so its key would be rotated as that of an earlier one")
    try:
        read = read_by_token(answer, WINDOW)
    except RuntimeError as problem:
        raise AssertionError(
            f"with two heads: {problem}: k is (B, H, 1, D), and one slot (B, H, D), so write"
            " k[:, :, 0] into it") from None
    gap = (read - read_by_token(LastOfAll, 12)).abs().max()
    assert gap < 1e-4, (
        f"a micro model with your rings of {WINDOW} slots gives logits that are off by {gap:.2g}:"
        " compare with a window over a cache of all tokens. Are all heads and rows written?")
    print(f"12 tokens through rings of {WINDOW} slots: logits as with a window, to {gap:.0e}")


# ---- 3: rows that leave ----


def leave(ended, active, tokens, caches):
    rows = (~ended).nonzero()[:, 0].tolist()
    for cache in caches:
        cache.take(rows)
    return [active[row] for row in rows], tokens[rows]


def _tokens_only(ended, active, tokens, caches):
    rows = (~ended).nonzero()[:, 0].tolist()
    return [active[row] for row in rows], tokens[rows]


def _by_sample(ended, active, tokens, caches):
    rows = (~ended).nonzero()[:, 0].tolist()
    active = [active[row] for row in rows]
    for cache in caches:
        cache.take(active)
    return active, tokens[rows]


def _one_layer(ended, active, tokens, caches):
    rows = (~ended).nonzero()[:, 0].tolist()
    caches[0].take(rows)
    return [active[row] for row in rows], tokens[rows]


def _keeps_ended(ended, active, tokens, caches):
    return leave(~ended, active, tokens, caches)


def _row_numbers(ended, active, tokens, caches):
    _, tokens = leave(ended, active, tokens, caches)
    return list(range(len(tokens))), tokens


def _same_active(ended, active, tokens, caches):
    return active, leave(ended, active, tokens, caches)[1]


def _first_rows(ended, active, tokens, caches):
    rows = list(range(int((~ended).sum())))
    for cache in caches:
        cache.take(rows)
    return [sample for sample, end in zip(active, ended.tolist(), strict=True) if not end], (
        tokens[~ended])


def _deletes_in_a_loop(ended, active, tokens, caches):
    for row in ended.nonzero()[:, 0].tolist():
        del active[row]
    return active, leave(ended, list(range(len(ended))), tokens, caches)[1]


def _list_by_mask(ended, active, tokens, caches):
    return active[~ended], leave(ended, active, tokens, caches)[1]


def _three_values(ended, active, tokens, caches):
    return *leave(ended, active, tokens, caches), caches


def _returns_nothing(ended, active, tokens, caches):
    leave(ended, active, tokens, caches)


START, USER, ASSISTANT, END = range(30, 34)
LONGEST = 12  # tokens of an answer


def trained_model():
    """A micro model that counts from one of the ids 0 to 9, in a circle, and ends at some point."""
    torch.manual_seed(0)
    config = Namespace(vocab_size=34, bos_id=START, num_layers=2, num_heads=2, model_dim=32,
                       seq_len=24, bf16=False)
    model = e4.GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rng = torch.Generator().manual_seed(0)
    for _step in range(60):
        lengths = torch.randint(1, 10, (64, 1), generator=rng)
        starts = torch.randint(10, (64, 1), generator=rng)
        answers = (starts + torch.arange(11)) % 10
        answers[(torch.arange(11) >= lengths)] = END
        prompt = torch.tensor([START, USER, 20, ASSISTANT]).expand(64, -1)
        tokens = torch.cat((prompt, answers), 1)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), config


@torch.inference_mode()
def draw_with(answer, model, config, prompt, args):
    """e4a's loop, in which the answer removes the rows that have ended; checks what it does.

    Returns the samples' ids and the number of row-steps.
    """
    streams = [e4.random_stream(args.seed, sample) for sample in range(args.num_samples)]
    length = len(prompt) + args.max_new_tokens
    caches = [e4.KVCache(config, length, model.embed.weight) for _ in model.blocks]
    answers, active = [None] * args.num_samples, list(range(args.num_samples))
    tokens, steps = prompt[None], 0
    while active:
        unread = tokens[:, caches[0].filled :]
        logits = model(unread, caches=caches)[:, -1]
        if len(unread) < len(active):
            for cache in caches:
                cache.take([0] * len(active))
        logits, tokens = (t.expand(len(active), -1) for t in (logits, tokens))
        new = e4.draw(logits, [streams[sample] for sample in active], args)
        steps += len(active)
        tokens = torch.cat((tokens, new[:, None]), 1)
        ended = (new >= config.bos_id) | (tokens.size(1) == length)
        for row in ended.nonzero()[:, 0].tolist():
            answers[active[row]] = tokens[row, len(prompt) :].tolist()
        if ended.any():
            active, tokens = removed(answer, ended, active, tokens, caches)
    return answers, steps


def removed(answer, ended, active, tokens, caches):
    """The active samples and tokens that the answer leaves, if it does the right thing."""
    before = [cache.keys.clone() for cache in caches]
    samples = [sample for sample, end in zip(active, ended.tolist(), strict=True) if not end]
    gone = [sample for sample in active if sample not in samples]
    try:
        found = answer(ended.clone(), list(active), tokens.clone(), caches)
    except IndexError as error:
        raise AssertionError(
            f"{error}: row numbers are those of today's {len(active)} rows, not the samples'"
            " numbers") from None
    except TypeError as error:
        if "index" not in f"{error}":
            raise
        raise AssertionError(
            f"{error}: `active` is a list, which a tensor of bools cannot index; make a list of the"
            " row numbers that stay") from None
    kind = ("nothing" if found is None else f"{len(found)} values" if isinstance(found, tuple)
            else type(found).__name__)
    assert isinstance(found, tuple) and len(found) == 2, (
        f"expected two values, active and tokens; yours returns {kind}: end with `return ..., ...`")
    left, rest = list(found[0]), found[1]
    assert left != gone or left == samples, (
        f"samples {gone} have ended, and your `active` keeps just these; keep the others, ~ended")
    shifted = list(active)
    for row in ended.nonzero()[:, 0].tolist():
        if row < len(shifted):
            del shifted[row]
    assert left == samples or left != shifted, (
        f"samples {gone} have ended, and your `active` keeps {left}: each `del` moves the rows"
        " behind it, so the next number deletes another sample; choose what stays instead")
    assert left == samples, (
        f"samples {gone} have ended, and of {active} your `active` keeps {left}, expected"
        f" {samples}: it names samples, not rows, so that answers and streams stay theirs")
    assert torch.equal(rest, tokens[~ended]), (
        f"after samples {gone} have ended, your tokens are not those of samples {samples}; take"
        " the rows where ended is False")
    for layer, (cache, keys) in enumerate(zip(caches, before, strict=True)):
        assert len(cache.keys) == len(samples), (
            f"the cache of layer {layer} has {len(cache.keys)} rows, your tokens have"
            f" {len(samples)}: call cache.take(rows) for every layer's cache")
        assert torch.equal(cache.keys, keys[~ended]), (
            f"the cache of layer {layer} holds other rows than your tokens: samples {gone} of"
            f" {active} have ended. take needs row numbers of today's batch, not samples' numbers,"
            " and not the first rows")
    return left, rest


def check_leave(answer):
    model, config = trained_model()
    prompt = torch.tensor([START, USER, 20, ASSISTANT])
    args = e4.Hyperparameters(num_samples=12, max_new_tokens=LONGEST, temperature=1.0)
    found, steps = draw_with(answer, model, config, prompt, args)
    whole = e4.generate(model, prompt, config, args).tolist()
    expected = [ids[: next((i + 1 for i, id in enumerate(ids) if id >= START), LONGEST)]
                for ids in whole]
    assert found == expected, (
        "your answers are not e4's up to the first marker: after a row has left, some sample goes"
        " on with another's tokens or cache")
    print(f"a micro model after 60 steps: 12 samples of {min(map(len, found))} to"
          f" {max(map(len, found))} tokens, {steps} row-steps instead of {12 * LONGEST}")


EXERCISES = {
    "1": dict(
        check=check_bytes,
        hints=[
            "How many numbers does one layer keep of one token?",
            "2 · model_dim numbers per layer and token; do not count the heads again, they share"
            " model_dim.",
            "2 · 768 numbers · 12 layers · 1,024 tokens · 2 bytes for one sample, then 16 samples.",
            "2 * 768 * 12 * 1024 * 2 * 16 / 2**20",
        ],
        solution=576,
        wrong=[36, 288, 48, 96, 1152, 3456, 603.98, 18, 0.5625, 576 * 2**20, "576 MiB"],
    ),
    "2": dict(
        check=check_ring,
        hints=[
            "With 3 slots, tokens 0, 1 and 2 fill them. Whose slot may token 3 take?",
            "Token t goes into slot t mod W. Before the ring is full, only slots 0 to t hold"
            " something.",
            "Take the slot from self.filled and self.keys.size(2), write k[:, :, 0] and v[:, :, 0],"
            " count the token, and return the filled slots; a slice may end behind the last slot.",
            "slot = self.filled % self.keys.size(2); self.keys[:, :, slot] = k[:, :, 0]; the same"
            " for values; self.filled += 1; return self.keys[:, :, : self.filled], ...",
        ],
        solution=Ring,
        wrong=[_Sliding, _LastSlot, _StartsOver, _AllSlots, _SlotCount, _Unrolled, _KeysOnly,
               _WithoutIndex, _Nothing],
    ),
    "3": dict(
        check=check_leave,
        hints=[
            "Three things have a row for each sample in the batch: tokens, every layer's cache, and"
            " one more. Which?",
            "rows = the numbers i with ended[i] False. All three keep exactly these rows, in this"
            " order.",
            "Make the list of rows, call take(rows) on each cache, then index active and tokens"
            " with the same rows.",
            "rows = (~ended).nonzero()[:, 0].tolist(), then cache.take(rows) for each cache and"
            " return [active[row] for row in rows], ...",
        ],
        solution=leave,
        wrong=[_tokens_only, _by_sample, _one_layer, _keeps_ended, _row_numbers, _same_active,
               _first_rows, _deletes_in_a_loop, _list_by_mask, _three_values,
               _returns_nothing],
    ),
}
