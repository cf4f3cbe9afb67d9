"""Draws why.svg: the two scalars of each sublayer, and the stream's growth at the start."""

import torch

SMALL = dict(model_dim=96, vocab_size=264, bos_id=256, bigram_rows=512, train_seq_len=128,
             val_seq_len=128, attention_kernel="dense", bf16=False, compile=False)


def draw(picture):
    sizes = growth(picture.snapshot)
    picture.title("Two learned numbers at each sublayer")
    y = 66
    picture.arrow(0, y, 372, y, "ink")
    for left, name in ((20, "attention"), (200, "MLP")):
        picture.box(left, y - 12, 24, 24, "own")
        picture.text(left + 12, y + 5, "r", "light", "middle")
        picture.line([(left + 34, y), (left + 34, 34), (left + 48, 34)])
        picture.box(left + 48, 24, 70, 22, "faint")
        picture.text(left + 83, 40, name, "ink", "middle")
        picture.box(left + 124, 22, 24, 24, "own")
        picture.text(left + 136, 39, "p", "light", "middle")
        picture.arrow(left + 136, 48, left + 136, y - 2)
    picture.text(0, 96, "stream ← r × stream + p × output", "own")
    top, tall = 112, 84
    for layer, size in enumerate(sizes):
        height = tall * size / max(sizes)
        picture.box(30 * layer, top + tall - height, 24, height, "own" if layer else "quiet")
    picture.text(0, top + 12, "the stream after each layer, at the start,")
    picture.text(0, top + 29, "while layers add nothing")
    (times,) = picture.printed(r"after layer 10 the stream is (\d\.\d\d)\d* x0")
    picture.number(top + tall + 12, times, "times as long is the stream after the last layer as"
                   " before the first, at the start")


def growth(module):
    """The size of the stream before the first and after each layer, over that before the first,
    while attention and MLPs add nothing."""
    torch.manual_seed(0)
    model, sizes = module.GPT(module.Hyperparameters(**SMALL)).eval(), []
    for block in model.blocks:
        if block.attn is not None:
            block.attn.forward = lambda *_given, **_named: 0.0
        block.register_forward_hook(lambda _block, given, made: sizes.extend(
            [given[0], made] if not sizes else [made]))
    with torch.no_grad():
        model(torch.arange(128)[None])
    return [(size.norm() / sizes[0].norm()).item() for size in sizes]
