"""Which features each milestone's small model has, and where its numbers come from.

A milestone is a line of FEATURES, on its parent's. One without a line has its parent's: it changes
numbers, which known.toml states, or systems, which no formula sees.
"""

import tomllib
from functools import cache
from pathlib import Path

HISTORY = Path(__file__).parents[2] / "history"
SMALL = dict(num_layers=2, model_dim=16, num_heads=2)  # and 8 tokens, of a vocabulary of 64

FEATURES = {
    "00": dict(norm_eps=1e-6, activation="gelu", attention="qkv", positions="table", rates="line",
               branch_factor=True, adam="unit gradients", validate_every=128),
    "00a": dict(rates="flat"),
    "00b": dict(positions="rotary"),
    "01": dict(muon="by rms", adam="late eps", adam_lr=None, rates="no warm-up",
               validate_every=125),
    "02": dict(norm_eps=2**-23, activation="squared relu", branch_factor=False, qk_norm=True,
               attention="three"),
    "03a": dict(untied=True, embed_norm=True, muon="by rows"),
    "03b": dict(residual=True, values_from="first layer"),
    "03c": dict(momentum="warms up"),
    "03d": dict(cap=(60, 0, 15)),
    "04": dict(skips="linear"),
    "05": dict(scale="stated", documents=True),
    "05a": dict(windows="64 tokens"),
    "05b": dict(values_from="tables"),
    "05c": dict(averaged_momentum=True),
    "05d": dict(windows="tiles"),
    "05f": dict(half_rotation=True),
    "05g": dict(cap=(30, 0, 7.5), rates="cooldown"),
    "05i": dict(summed=True, windows="tiles, rounded up"),
    "05j": dict(attention="qkv"),
    "05k": dict(long_short=True),
    "05m": dict(rows="aligned"),
    "05n": dict(attention="qkvo", mlp_transposed=True),
    "05p": dict(attention_gates="blocks"),
    "05q": dict(rows="packed"),
    "05r": dict(windows="stages"),
    "06a": dict(first_mlp=False),
    "06b": dict(scale="yarn"),
    "06c": dict(bank=("skip", "x", "x0", "value", "table")),
    "06e": dict(skips="sigmoid"),
    "06f": dict(adam="early eps"),
    "08b": dict(smear=True, after_bank=("smear",)),
    "08c": dict(first_mlp=True),
    "08f": dict(polar=True),
    "08g": dict(validate_every=250),
    "09": dict(backout=True, after_bank=("smear", "backout")),
    "10a": dict(neurons="columns"),
    "10b": dict(muon_decay="twice by rate"),
    "10c": dict(skips="one", x_init=1.1, bank=("x", "x0", "value", "table"),
                after_bank=("smear", "backout", "skip")),
    "10d": dict(rates="stages"),
    "10e": dict(scalars_on_weights=True, bank=("x", "x0", "qkv", "out")),
    "10f": dict(key_offset=True),
    "11": dict(tied_at_first=True),
    "11a": dict(attention_gates="one", x0_weights=True, bank=("x", "qkv", "out")),
    "11b": dict(further_targets=True),
    "11c": dict(cap="stated"),
    "11d": dict(value_gates="stream"),
    "12": dict(betas="by group"),
    "13": dict(bigrams=True, bank=("x", "qkv", "out", "bigram")),
    "13a": dict(one_value_table=True),
    "13c": dict(value_gates="stream and table"),
    "13g": dict(late_injections=True, bank=("x", "qkv", "out")),
    "14": dict(sublayers=True, bank=("qkv", "out")),
    "14a": dict(cached=True),
    "14b": dict(head_pairs=True),
    "14c": dict(mixes=True, backout=False, after_bank=("smear", "skip")),
    "14d": dict(own_values="weights"),
    "14e": dict(signs=True),
    "14f": dict(own_values="stream", stream_gates=True, attention_gates="stream"),
    "14g": dict(composed=True),
    "14h": dict(prefixes=True),
    "p0": dict(norm="layer", biases=True, activation="gelu", attention="three", positions="table",
               adam="decayed", rates="cosine"),
    "p4a": dict(muon="by rows", muon_decay="plain", polar=True, averaged_momentum=True),
    "p4b": dict(neuron_beta=0.95, neurons="shorter side"),
    "p4c": dict(muon_decay="cautious"),
    "p6b": dict(norm="rms", norm_eps=2**-23),
    "p6c": dict(qk_norm=True),
    "e0": dict(like="04"),
    "e0a": dict(like="04"),
    "e2a": dict(documents=True),
}

# Keys of known.toml that no formula here makes, by what makes them; "e." before one: the encore's.
ELSEWHERE = {
    "settings of tests and numbers of cards": """form micro micro_steps record notes small_model
        small_sizes small_training_rates small_training_within moved_scalars aligned
        small_loss_in_bfloat16_within norm_epsilon filler tall init python shards_in_memory
        full_scores softcap_at rotary_in_float32 few_documents""",
    "where tests find a part": """picture attention_writes adam_groups head_in_loss gated_tables
        networks table_factors bfloat16_parts gates_read_tables products init_layers
        unused_in_small head_rows""",
    "counts of shapes, rows or bytes": """tensors initial_loss all_reduce reduce_scatter
        all_gather traffic muon_batches bfloat16_tensors document_starts kernel_tiles state_bytes
        owners owned_shapes owned_layers stream_gates token_passes step_flops cache_bytes""",
    "orders of events or layers": "muon_events values_from skip_pairs layers",
    "walks over tokens": """packed packed_starts rows slots read read_val bytes sha256 e.tokens
        answer_tokens most_conversations prefixes""",
    "arithmetic in 8 or 16 bits": """small_loss_in_bfloat16 quantized fp8_mlp root bits
        softcap_in_training""",
    "a few products by hand": """silent initial_stream initial_mix activation offset_keys own_value
        composed_heads masked_update""",
    "random numbers": "drawn streams lengths rows_read printed",
}


def elsewhere(chain):
    """The names of these keys in a chain."""
    words = [word for words in ELSEWHERE.values() for word in words.split()]
    return {word.removeprefix("e.") for word in words
            if chain == "encore" or not word.startswith("e.")}


class Numbers(dict):
    """Features and hyperparameters by name; what a milestone does not have is None."""

    __getattr__ = dict.get

    def but(self, **values):
        return Numbers(self, **values)


def merged(inherited, own):
    """A parent's table with its child's entries, without those that are "none"."""
    return {key: value for key, value in (inherited | own).items() if value != "none"}


class Milestone:
    """A milestone's features, and its known values with what they leave to its parent."""

    def __init__(self, id, folder, parent):
        file, changes = folder / "known.toml", dict(FEATURES.get(id, {}))
        like = milestones("speedrun")[changes.pop("like")] if "like" in changes else parent
        self.id, self.chain, self.trainings = id, folder.parent.name, {}
        self.own = tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        self.inherited = parent.known if parent else {}
        self.known = self.inherited | {
            key: merged(self.inherited.get(key, {}), value) if value and isinstance(value, dict)
            else value for key, value in self.own.items()}
        self.features = (like.features if like else {}) | changes
        self.record = Numbers(self.known.get("record", {}) | self.features)

    def small(self, **more):
        """Features and the small model's numbers."""
        return self.record.but(**SMALL | self.known.get("small_sizes", {}) | more)


@cache
def milestones(chain):
    """{id: Milestone} of a chain, in order; a parent is the folder before, or stated."""
    found, parent = {}, None
    for folder in sorted(path for path in (HISTORY / chain).iterdir() if path.is_dir()):
        manifest = tomllib.loads((folder / "milestone.toml").read_text(encoding="utf-8"))
        id = folder.name.split("_")[0]
        found[id] = parent = Milestone(id, folder, found.get(manifest["parent"])
                                       if "parent" in manifest else parent)
    return found
