"""AdamW or Muon for a small vision model: letters in fonts that matplotlib ships, on a CPU.

    python lessons/muon_at_home.py adamw    # or muon, with the same rate and weight decay"""
import sys
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import nn

LETTERS, WIDTH = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", 32
FONTS = ["DejaVuSans", "DejaVuSansMono", "DejaVuSerif", "DejaVuSans-Bold", "STIXGeneral", "cmr10",
         "cmtt10", "STIXGeneralBol", "cmss10", "cmb10"]  # the last three are for the test
MATRICES = {"conv2.weight": 1, "conv3.weight": 1, "qkv.weight": 3, "proj.weight": 1, "up.weight": 1,
            "down.weight": 1}  # Muon's parameters; how many matrices each holds (Q, K, V: three)


def render(fonts):  # every letter at nine angles: images (N, 1, 16, 16), and which letter it is
    images, folder = [], Path(matplotlib.get_data_path(), "fonts", "ttf")
    for font in (ImageFont.truetype(folder / f"{name}.ttf", 15) for name in fonts):
        for letter in LETTERS:
            image = Image.new("L", (16, 16))
            ImageDraw.Draw(image).text((8, 8), letter, 255, font, anchor="mm")
            images += [image.rotate(angle).tobytes() for angle in range(-32, 33, 8)]
    x = torch.frombuffer(bytearray(b"".join(images)), dtype=torch.uint8).view(-1, 1, 16, 16) / 64
    return x, torch.arange(len(LETTERS)).repeat_interleave(9).repeat(len(fonts))


class Net(nn.Module):  # three convolutions, then attention and an MLP on 16 places
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, 2, 1), nn.Conv2d(16, WIDTH, 3, 1, 1)
        self.conv3 = nn.Conv2d(WIDTH, WIDTH, 3, 2, 1)
        self.places = nn.Parameter(torch.zeros(16, WIDTH))
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, len(LETTERS))

    def forward(self, x):  # (B, 1, 16, 16)
        x = F.relu(self.conv3(F.relu(self.conv2(F.relu(self.conv1(x)))))).flatten(2).mT
        x = x + self.places  # (B, 16, C)
        q, k, v = self.qkv(F.rms_norm(x, x.shape[-1:])).chunk(3, 2)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v))
        x = x + self.down(F.relu(self.up(F.rms_norm(x, x.shape[-1:]))))
        return self.head(F.rms_norm(x.mean(1), x.shape[-1:]))


def as_matrices(weight, count):  # `count` matrices that share the memory of one weight
    return [nn.Parameter(part.flatten(1)) for part in weight.detach().chunk(count)]


def train(optimizer="muon", lr=3e-3, decay=0.1, steps=300, seed=0, net=Net, names=MATRICES,
          step=lambda each: each.step(), adam_lr=None):  # AdamW's share at another rate than lr
    torch.manual_seed(seed)
    model, (images, letters) = net(), render(FONTS[:-3])
    pieces = {name: as_matrices(model.get_parameter(name), count)
              for name, count in names.items() if optimizer == "muon"}
    others = [p for name, p in model.named_parameters() if name not in pieces]
    optimizers = [torch.optim.AdamW(others, adam_lr or lr, weight_decay=decay)]
    if pieces:
        optimizers.append(torch.optim.Muon(sum(pieces.values(), []), lr, weight_decay=decay,
                                           adjust_lr_fn="match_rms_adamw"))
    falls = [torch.optim.lr_scheduler.LinearLR(each, 1, 0, steps) for each in optimizers]
    for batch in (torch.randint(len(images), (64,)) for _ in range(steps)):
        F.cross_entropy(model(images[batch]), letters[batch]).backward()
        for name, parts in pieces.items():
            whole = model.get_parameter(name).grad
            for part, grad in zip(parts, whole.chunk(len(parts)), strict=True):
                part.grad = grad.flatten(1)
        for each in optimizers + falls:
            step(each)
        model.zero_grad()  # not the optimizers': they do not hold the whole weights
    images, letters = render(FONTS[-3:])  # fonts that it has not seen
    return F.cross_entropy(model(images), letters).item()


if __name__ == "__main__":
    print(f"loss on new fonts: {train(*sys.argv[1:2], *map(float, sys.argv[2:])):.3f}")
