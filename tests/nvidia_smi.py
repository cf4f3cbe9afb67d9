"""A program that stands for nvidia-smi on a machine with invented GPUs."""

import os
import stat
import sys


def fake_nvidia_smi(folder, monkeypatch, *gpus):
    """Puts it on the PATH, all GPUs visible; gpus: {what --query-gpu names: text} for each, of
    which the uuid may be left out. Asked for anything else it fails, like an old driver's."""
    program = folder / "nvidia-smi"
    rows = [{"uuid": f"GPU-{i}", **gpu} for i, gpu in enumerate(gpus)]
    program.write_text(
        f"#!{sys.executable}\nimport sys\nrows = {rows!r}\n"
        "what = sys.argv[1].removeprefix('--query-gpu=').split(',')\n"
        "unit = '' if 'nounits' in sys.argv[-1] else ' MiB'\n"
        "for row in rows:\n"
        "    print(', '.join(row[w] + unit * w.startswith('memory') for w in what))\n",
        encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
