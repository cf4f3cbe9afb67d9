"""Data preparation, without a network. Run: .venv/bin/python -m pytest tests/test_data.py"""

import errno
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

import builtin_chat
import builtin_corpus
import cached_fineweb10B
import fineweb
import hellaswag
import prefixes
import shards
from speedrun.base.errors import UserError
from speedrun.run import conversations, data
from speedrun.run.data import fingerprint, holds_bytes, shards_in

DATA = Path(shards.__file__).parent
TOKENS = np.arange(1000, dtype=np.uint16)


def command(script, *args, **env):
    """Runs data/`script`; returns the finished process with its text output."""
    return subprocess.run(
        [sys.executable, DATA / script, *map(str, args)],
        env=os.environ | env,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


def killed(code, replacements, *args):
    """Runs `code` with data/ importable and dies, as by kill -9, after so many os.replace.

    Returns when the output is closed, that is, when no child is left either.
    """
    dying = f"""
import os, sys
replace, left = os.replace, [None] * {replacements}
def dying_replace(source, target):
    if not left:
        os._exit(9)
    left.pop()
    replace(source, target)
os.replace = dying_replace
"""
    process = subprocess.run(
        [sys.executable, "-c", dying + code, *map(str, args)],
        env=os.environ | {"PYTHONPATH": str(DATA)},
        capture_output=True,
        timeout=300,
    )
    assert process.returncode == 9, process.stderr


def assert_one_line(process, code, *parts):
    assert process.returncode == code, process.stderr
    assert len(process.stderr.splitlines()) == 1, process.stderr
    for part in parts:
        assert part in process.stderr


@pytest.mark.parametrize("script", ["builtin_corpus.py", "cached_fineweb10B.py", "fineweb.py"])
def test_what_cannot_begin_is_one_line(script, tmp_path):
    bare = subprocess.run([sys.executable, "-SP", DATA / script], capture_output=True, text=True)
    assert_one_line(bare, 1, "error: numpy is not installed here: make .venv/installed, "
                    "then . .venv/bin/activate")
    old = ("import runpy, sys; sys.version_info = (3, 10, 18); sys.path.insert(0, sys.argv[1]);"
           f" runpy.run_path(sys.argv[1] + '/{script}')")
    ended = subprocess.run([sys.executable, "-c", old, DATA], capture_output=True, text=True)
    assert_one_line(ended, 1, "error: this is Python 3.10; 3.11 or newer is needed")
    file = tmp_path / "file"
    file.touch()
    arguments = ["1"] if script.startswith("cached") else []
    ended = command(script, *arguments, "--out", file)
    assert_one_line(ended, 1, f"error: --out {file} is not a folder; name one")
    (tmp_path / "link").symlink_to("nowhere")
    ended = command(script, *arguments, "--out", tmp_path / "link")
    assert_one_line(ended, 1, "link is not a folder; name one")


def test_a_full_disk_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended, shards.filling(tmp_path, ""):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert str(ended.value) == f"error: {tmp_path}: No space left on device"
    with pytest.raises(SystemExit) as ended, shards.filling(tmp_path, ""):
        (tmp_path / "no" / "file").touch()
    assert str(ended.value) == f"error: {tmp_path / 'no' / 'file'}: No such file or directory"
    with pytest.raises(SystemExit) as ended, shards.filling(tmp_path, ""):
        (tmp_path / "here").touch()
        (tmp_path / "here").replace(tmp_path / "no" / "file")
    assert str(ended.value) == f"error: {tmp_path / 'no' / 'file'}: No such file or directory"


def test_a_package_that_is_missing_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setattr(sys, "argv", ["cached", "--out", str(tmp_path), "1"])
    with pytest.raises(SystemExit, match="^error: huggingface_hub.* is not installed here: make"):
        cached_fineweb10B.main()


def test_what_to_check_after_a_download_that_failed():
    for names in [], ["http_proxy"], ["HF_ENDPOINT", "ALL_PROXY", "https_proxy", "HTTP_PROXY"]:
        with patch.dict(os.environ, dict.fromkeys([*names, "no_proxy"], "x"), clear=True):
            assert shards.network() == "the network" + (
                f" and {', '.join(names)}, which you have set" if names else "")


@pytest.mark.parametrize("script, folder, work, words", [
    (fineweb, "fineweb10B_own", "make_shards", "the same command goes on after the last whole"
     " shard"),
    (cached_fineweb10B, "fineweb10B", "fetch_all", "the same command goes on from here"),
    (builtin_corpus, "builtin", "sha256", "the same command starts over"),
    (hellaswag, "hellaswag", "fetch", "the same command starts over"),
    (prefixes, "fineweb10B", "gpt2_prefixes", "no table was written"),
])
def test_where_a_script_writes_and_what_ctrl_c_leaves(script, folder, work, words, tmp_path,
                                                      monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    def stopped(folder, words):
        raise LookupError(folder)

    arguments = ["script", *["1"][: script is cached_fineweb10B]]
    functions = ["", interrupted, None][: 3 * (script is builtin_corpus)]
    monkeypatch.setattr(script, work, interrupted)
    monkeypatch.setattr(sys, "argv", [*arguments, "--out", str(tmp_path / "x")])
    with pytest.raises(SystemExit, match="^130$"):
        script.main(*functions)
    assert capsys.readouterr().err == f"\nstopped; {words}\n"
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(shards, "filling", stopped)
    with pytest.raises(LookupError) as default:
        script.main(*functions)
    assert default.value.args == (DATA / folder,)


# The format


def test_shards_round_trip(tmp_path):
    path = tmp_path / "a.bin"
    tokens = [0, 1, 255, 256, 50256, 65535]
    shards.write(path, tokens)
    assert shards.verify(path) == 6
    assert shards.read(path).tolist() == tokens
    data = path.read_bytes()
    assert data[:12] == bytes.fromhex("88d83401 01000000 06000000")
    assert data[12:1024] == bytes(1012)
    assert data[1024:] == bytes.fromhex("0000 0100 ff00 0001 50c4 ffff")
    assert list(tmp_path.iterdir()) == [path]
    shards.write(path, [])
    assert shards.verify(path) == 0
    assert [shards.fineweb_name(index) for index in (0, 1, 103)] == [
        "fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000103.bin"]


@pytest.mark.parametrize("ids", [[65536], [-1], [0, 70000]])
def test_ids_beyond_uint16_are_refused_and_leave_nothing(tmp_path, ids):
    found = f"token ids must lie in 0..65535, not {min(ids)}..{max(ids)}"
    with pytest.raises(ValueError, match=f"^{found}$"):
        shards.write(tmp_path / "a.bin", ids)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda data: b"\0" + data[1:], "not a token shard (magic 20240384, expected 20240520)"),
        (lambda data: data[:4] + b"\2" + data[5:], "shard version 2, expected 1"),
        (lambda data: data[:-1], "truncated, 3023 bytes where 1000 tokens take 3024"),
        (lambda data: data[:1000], "truncated, 1000 bytes where the header takes 1024"),
        (lambda data: b"", "truncated, 0 bytes where the header takes 1024"),
        (lambda data: data + b"\0", "too long, 3025 bytes where 1000 tokens take 3024"),
    ],
)
def test_verify_refuses(tmp_path, damage, message):
    path = tmp_path / "a.bin"
    shards.write(path, TOKENS)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError) as fault:
        shards.verify(path)
    assert str(fault.value) == f"{path}: {message}"
    assert not shards.is_valid(path)


def test_writers_of_one_file_do_not_meet(tmp_path):
    path = tmp_path / "a"
    with shards.atomic_file(path) as slow:
        slow.write(b"slow ")
        with shards.atomic_file(path) as fast:
            fast.write(b"fast")
        assert path.read_bytes() == b"fast"
        slow.write(b"writer")
    assert path.read_bytes() == b"slow writer"
    assert list(tmp_path.iterdir()) == [path]


# The built-in corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("builtin")
    process = command("builtin_corpus.py", "--out", out_dir)
    assert process.returncode == 0, process.stderr
    return out_dir, process.stdout.split()[-1]


def documents_of(path):
    tokens = shards.read(path)
    assert tokens[0] == 256
    starts = np.flatnonzero(tokens == 256)
    return [part[1:].astype(np.uint8).tobytes() for part in np.split(tokens, starts[1:])]


def test_corpus_content(corpus):
    val, first, second = [documents_of(corpus[0] / name) for name in builtin_corpus.SHARDS]
    sizes = [sum(map(len, part)) for part in (val, first, second)]
    assert sizes[0] >= 200_000
    assert 0.03 < sizes[0] / sum(sizes) < 0.07
    assert abs(sizes[1] - sizes[2]) < 5000
    assert sum(sizes) > 8_000_000

    everything = val + first + second
    assert corpus[1] == "185463d0c7f69f7d" or platform.python_version() != "3.11.7"
    assert len(set(everything)) == len(everything)
    assert not set(val) & set(first + second)
    lengths = np.array([len(document) for document in everything])
    assert np.mean((lengths >= 1000) & (lengths <= 2000)) > 0.95
    assert all(
        part == sorted(part, key=lambda document: hashlib.sha256(document).digest())
        for part in (val, first + second)
    )


def test_documents_end_at_blank_lines_and_have_two_kilobytes_at_most():
    for rest, count in (998, 1), (999, 2):
        text = b"x" * 999 + b"\n\n" + b"y" * rest + b"\n"
        assert len(builtin_corpus.documents(text)) == count


def test_corpus_splits_whole_files():
    files = {f"{number}.py": b"%d\n" % number * 500 for number in range(100)}
    train, val = builtin_corpus.split(files)
    train_files = {document.split()[0] for document in train.values()}
    val_files = {document.split()[0] for document in val.values()}
    assert len(train_files | val_files) == 100
    assert val_files and not train_files & val_files


def test_source_files_skips_what_is_not_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(builtin_corpus, "MIN_VAL_TOKENS", 0)
    skipped = ("b/test/t.py", "tests/t.py", "idlelib/i.py", "lib2to3/l.py", "site-packages/s.py",
               "dist-packages/d.py", "config-3.11/c.py", "_sysconfigdata_x.py", "b/notes.txt")
    for name in ("a.py", "b/c.py", *skipped):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x = '\xff'\r\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "a.py")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere")
    text = b"x = '\xff'\n"
    assert builtin_corpus.source_files(tmp_path) == {"a.py": text, "b/c.py": text}


def test_zipped_library_is_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match="regular installation"):
        builtin_corpus.source_files(tmp_path / "python311.zip")


@pytest.mark.parametrize("script, made", [
    (builtin_corpus, "builtin_val_000000.bin         2 documents         74 tokens\n"
                     "builtin_train_000001.bin      18 documents        666 tokens\n"
                     "builtin_train_000002.bin      20 documents        740 tokens\n"),
    (builtin_chat, "chat_train.jsonl              38 conversations\n"
                   "chat_val.jsonl                 2 conversations\n"),
])
def test_what_is_made_is_said(script, made, tmp_path, monkeypatch, capsys):
    text = b'def f%d():\n    """Does thing %d."""\n'
    files = {f"{n}.py": text % (n, n) for n in range(10, 50)}
    monkeypatch.setattr(script, "source_files", lambda root: files)
    monkeypatch.setattr(sys, "argv", ["script", "--out", str(tmp_path)])
    for name in (".chat_val.jsonl.01234567.tmp", ".builtin_val_000000.bin.01234567.tmp"):
        (tmp_path / name).touch()  # a killed call's
    for first in made, f"already there: {tmp_path}\n":
        script.main("", script.existing, script.build)
        assert capsys.readouterr().out == (
            f"{first}python {platform.python_version()}, fingerprint {script.existing(tmp_path)}\n")
    assert not list(tmp_path.glob(".*.tmp"))
    monkeypatch.setattr(platform, "python_version", lambda: "2.7.18")
    assert script.existing(tmp_path) is None


def test_second_corpus_call_changes_nothing(corpus):
    before = {path: path.stat().st_mtime_ns for path in corpus[0].iterdir()}
    process = command("builtin_corpus.py", "--out", corpus[0])
    assert process.returncode == 0
    assert "already there" in process.stdout and corpus[1] in process.stdout
    assert {path: path.stat().st_mtime_ns for path in corpus[0].iterdir()} == before


@pytest.mark.parametrize(
    "name, damage",
    [
        ("builtin_val_000000.bin", lambda data: data[:-2]),
        ("builtin_train_000002.bin", lambda data: data[:-2] + b"ab"),
        ("corpus.json", lambda data: re.sub(b'"python": "[0-9.]+', b'"python": "2.7.18', data)),
    ],
)
def test_damaged_or_foreign_corpus_is_not_complete(corpus, tmp_path, name, damage):
    for path in corpus[0].iterdir():
        data = path.read_bytes()
        (tmp_path / path.name).write_bytes(damage(data) if path.name == name else data)
    assert builtin_corpus.existing(corpus[0]) == corpus[1]
    assert builtin_corpus.existing(tmp_path) is None


def test_the_fingerprint_of_a_run_is_that_of_the_shards_now(corpus, tmp_path):
    for path in corpus[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert fingerprint(tmp_path) == corpus[1]
    with open(tmp_path / "builtin_train_000001.bin", "r+b") as shard:
        shard.seek(5000)
        shard.write(b"\1")
    assert fingerprint(tmp_path) not in (corpus[1], None)
    (tmp_path / "corpus.json").unlink()
    assert fingerprint(tmp_path) is None  # of other shards nothing is said


def test_a_script_that_cannot_fill_a_folder_says_why(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(data, "REPOSITORY", tmp_path)
    for text, reason in (("import sys; sys.exit('error: no room')", "no room"),
                         ("import os; os._exit(3)", "no reason given")):
        (tmp_path / "data" / "x.py").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=f"^data/x.py failed: {reason}$"):
            data.fill(tmp_path, "x.py")
    (tmp_path / "data" / "x.py").write_text("pass", encoding="utf-8")
    data.fill(tmp_path, "x.py")


def test_a_file_that_begins_with_a_dot_is_not_there(tmp_path):
    """macOS writes ._x beside each x; a script's glob.glob does not see it either."""
    names = ["a_train_1.bin", "a_val_0.bin", "b_train.jsonl", "b_val.jsonl"]
    for name in names:
        shards.write(tmp_path / name, [300] * 9)
        (tmp_path / f"._{name}").write_bytes(bytes(4096))
    train, val, *conversation_files = (tmp_path / name for name in names)
    assert [shards_in(tmp_path, split) for split in ("train", "val")] == [[train], [val]]
    assert not holds_bytes(tmp_path)
    assert list(conversations.files_in(tmp_path).values()) == [*map(str, conversation_files)]
    assert data.has_shards(tmp_path)
    val.unlink()
    assert not data.has_shards(tmp_path), "of training only"


@pytest.mark.parametrize("replacements", [1, 3])
def test_killed_corpus_build_leaves_nothing_complete(corpus, tmp_path, replacements):
    build = "import builtin_corpus; builtin_corpus.build(sys.argv[1])"
    killed(build, replacements, tmp_path)
    assert len(list(tmp_path.glob("builtin_*.bin"))) == replacements
    assert not (tmp_path / "corpus.json").exists()
    assert builtin_corpus.existing(tmp_path) is None


def test_simultaneous_corpus_builds(corpus, tmp_path):
    arguments = [sys.executable, DATA / "builtin_corpus.py", "--out", tmp_path]
    processes = [subprocess.Popen(arguments, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(30) for process in processes] == [0, 0]
    assert builtin_corpus.existing(tmp_path) == corpus[1]


# The hub


class Hub(ThreadingHTTPServer):
    """Speaks the hub's file layout: metadata, and a redirect to a storage host with ranges."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = {}  # name: content
        self.limits = {}  # name: bytes after which the storage host goes silent
        self.requests = []  # (method, name, range header, has a token) of the storage host
        self.flipped = {}  # name: position of a byte that is damaged on the way
        self.tags = {}  # name: an ETag that is no SHA-256
        self.heads = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def env(self, tmp_path):
        return {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}",
            "HF_HOME": str(tmp_path / "hf_home"),
            "HF_TOKEN": "hf_secret",
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "*",
        }


class HubHandler(BaseHTTPRequestHandler):
    prefix = "/datasets/kjj0/fineweb10B-gpt2/resolve/main/"

    def log_message(self, *args):
        pass

    def answer(self, status, **headers):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()

    def do_HEAD(self):
        self.server.heads.append(self.path.rpartition("/")[2])
        self.redirect()

    def redirect(self):
        name = self.path.rpartition("/")[2]
        content = self.server.files.get(name)
        if content is None or not self.path.startswith(self.prefix):
            self.answer(404, X_Error_Code="EntryNotFound", Content_Length=0)
            return
        self.answer(
            302,
            Location=f"http://localhost:{self.server.server_port}/storage/{name}",
            X_Repo_Commit="0" * 40,
            X_Linked_Size=len(content),
            X_Linked_ETag=f'"{self.server.tags.get(name) or hashlib.sha256(content).hexdigest()}"',
            Content_Length=0,
        )

    def do_GET(self):
        if not self.path.startswith("/storage/"):
            self.redirect()
            return
        name = self.path.rpartition("/")[2]
        content = self.server.files[name]
        wanted = self.headers.get("Range")
        self.server.requests.append((name, wanted, "Authorization" in self.headers))
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        headers = {"Accept_Ranges": "bytes", "Content_Length": len(content) - start}
        if wanted:
            headers["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.answer(206 if wanted else 200, **headers)
        if flipped := self.server.flipped.get(name):
            content = content[:flipped] + bytes([content[flipped] ^ 255]) + content[flipped + 1 :]
        limit = self.server.limits.get(name)
        try:
            self.wfile.write(content[start:limit])
            if limit:
                self.connection.settimeout(30)
                self.connection.recv(1)  # silent until the client gives up
        except OSError:
            pass


@pytest.fixture
def hub(tmp_path):
    server = Hub()
    for index in range(3):
        shards.write(tmp_path / "shard", TOKENS + index)
        server.files[shards.fineweb_name(index)] = (tmp_path / "shard").read_bytes()
    (tmp_path / "shard").unlink()
    yield server
    server.shutdown()
    server.server_close()


def test_fetch_then_no_request_at_all(hub, tmp_path):
    arguments = "cached_fineweb10B.py", 2, "--out", tmp_path / "out"
    process = command(*arguments, **hub.env(tmp_path))
    assert process.returncode == 0, process.stderr
    for name, content in hub.files.items():
        assert (tmp_path / "out" / name).read_bytes() == content
    assert "SHA-256" not in process.stderr
    assert process.stdout == "".join(f"[{number}/3] {name}\n" for number, name in enumerate(
        hub.files, 1)) + f"3 shards in {tmp_path / 'out'}\n"
    assert hub.heads == list(hub.files)
    assert hub.requests == [(name, None, False) for name in hub.files]  # the token stays at the hub

    hub.heads.clear()
    hub.requests.clear()
    process = command(*arguments, **hub.env(tmp_path))
    assert (process.returncode, process.stdout) == (0, f"3 shards in {tmp_path / 'out'}\n")
    assert not hub.heads and not hub.requests


def test_only_missing_and_broken_shards_are_fetched(hub, tmp_path):
    out_dir = tmp_path / "out"
    out_dir.mkdir()
    val, first, second = hub.files
    (out_dir / val).write_bytes(hub.files[val])
    (out_dir / first).write_bytes(hub.files[first][:-10])
    hub.tags[first] = "some-version"
    process = command("cached_fineweb10B.py", 1, "--out", out_dir, **hub.env(tmp_path))
    assert process.returncode == 0, process.stderr
    assert hub.requests == [(first, None, False)]
    assert (out_dir / first).read_bytes() == hub.files[first]
    assert f"note: the hub gives no SHA-256 of {first}, so" in process.stderr
    assert not (out_dir / second).exists()


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX Ctrl-C")
def test_interrupted_download_resumes(hub, tmp_path):
    out_dir = tmp_path / "out"
    name = shards.fineweb_name(0)
    shards.write(tmp_path / "shard", np.arange(7_000_000) % 50257)
    hub.files[name] = (tmp_path / "shard").read_bytes()  # 14 MB; the client writes 10 MiB at a time
    hub.limits[name] = 12_000_000
    process = subprocess.Popen(
        [sys.executable, DATA / "cached_fineweb10B.py", "1", "--out", out_dir],
        env=os.environ | hub.env(tmp_path),
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    deadline = time.monotonic() + 20
    while sum(path.stat().st_size for path in out_dir.rglob("*")) < 10_000_000:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=300)[1]
    assert process.returncode == 130 and len(stderr.split("\n")) <= 3, stderr
    assert "goes on from here" in stderr
    assert not list(out_dir.glob("*.bin"))

    hub.limits.clear()
    hub.requests.clear()
    again = command("cached_fineweb10B.py", 1, "--out", out_dir, **hub.env(tmp_path))
    assert again.returncode == 0, again.stderr
    assert hub.requests[0] == (name, f"bytes={10 * 2**20}-", False)
    assert (out_dir / name).read_bytes() == hub.files[name]


def test_wrong_file_on_the_hub_is_refused_and_fetched_again(hub, tmp_path):
    out_dir = tmp_path / "out"
    arguments = "cached_fineweb10B.py", 1, "--out", out_dir
    name = shards.fineweb_name(1)
    good = hub.files[name]
    hub.files[name] = b"no shard" + good[8:]
    assert_one_line(command(*arguments, **hub.env(tmp_path)), 1, name, "magic")
    assert [path.name for path in out_dir.glob("*.bin")] == [shards.fineweb_name(0)]

    # Even if the hub still claims the same version of the file: nothing of it is used again.
    assert not list(out_dir.rglob(f"{name}*"))
    hub.files[name] = good
    assert command(*arguments, **hub.env(tmp_path)).returncode == 0
    assert (out_dir / name).read_bytes() == good


def test_hub_without_the_file_or_the_hub(hub, tmp_path):
    hub.files.clear()
    env = hub.env(tmp_path)
    assert_one_line(command("cached_fineweb10B.py", 1, "--out", tmp_path, **env), 1, "404")
    env |= dict(HF_ENDPOINT="http://127.0.0.1:9", HTTPS_PROXY="http://127.0.0.1:9")
    process = command("cached_fineweb10B.py", 1, "--out", tmp_path, **env)
    assert_one_line(process, 1, "network", "HF_ENDPOINT", "HTTPS_PROXY",
                    "which you have set; run again")


def test_one_writer_in_a_folder_at_a_time(hub, inputs, tmp_path):
    out_dir = tmp_path / "out"
    with shards.only_writer(out_dir, []):
        process = command("cached_fineweb10B.py", 1, "--out", out_dir, **hub.env(tmp_path))
        assert_one_line(process, 1, f"error: another process is filling {out_dir}; wait until it"
                        " has ended, or choose another --out\n")
        assert_one_line(make(out_dir, *inputs), 1, f"another process is filling {out_dir}")
    assert not hub.heads and not list(out_dir.glob("*.bin"))


def test_a_killed_writers_temporary_files_go(tmp_path):
    killed = shards.atomic_file(tmp_path / "a_1.bin")
    killed.__enter__()
    (tmp_path / ".other.bin.0123abcd.tmp").touch()
    with shards.only_writer(tmp_path, ["a_*.bin"]):
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            ".lock", ".other.bin.0123abcd.tmp"]


@pytest.mark.parametrize("left", ["nothing", "zeros", "too long", "whole"])
def test_content_is_compared_with_the_hubs_sha256(hub, tmp_path, left):
    """What an earlier call left may be damaged: then the download starts over."""
    name, out_dir = shards.fineweb_name(0), tmp_path / "out"
    good = hub.files[name]
    version = hashlib.sha256(hashlib.sha256(good).hexdigest().encode()).hexdigest()[:16]
    partial = cached_fineweb10B.staging_folder(out_dir) / f"{name}.{version}"
    if left == "nothing":
        hub.flipped = {name: 1500}  # of every answer
        process = command("cached_fineweb10B.py", 1, "--out", out_dir, **hub.env(tmp_path))
        sent = hashlib.sha256(good[:1500] + bytes([good[1500] ^ 255]) + good[1501:]).hexdigest()
        assert_one_line(process, 1, f"refused what the hub sent as {name}: its SHA-256 begins with "
                        f"{sent[:12]}, not {hashlib.sha256(good).hexdigest()[:12]}; run again\n")
        assert not list(out_dir.rglob(f"{name}*"))
        return
    partial.write_bytes(good[:1200] + bytes(600) if left == "zeros" else
                        good + b"x" * 10 * (left == "too long"))
    (outdated := partial.with_suffix(".0123456789abcdef")).touch()  # of another version
    process = command("cached_fineweb10B.py", 1, "--out", out_dir, **hub.env(tmp_path))
    assert process.returncode == 0, process.stderr
    assert (out_dir / name).read_bytes() == good and not outdated.exists()
    assert (name not in {asked for asked, *_ in hub.requests}) == (left == "whole")


def test_a_proxy_that_needs_a_package_is_one_line(tmp_path):
    process = command("cached_fineweb10B.py", 1, "--out", tmp_path / "out", HF_HUB_OFFLINE="0",
                      ALL_PROXY="socks5://127.0.0.1:9", NO_PROXY="")
    assert_one_line(process, 1, "error: ", "socks")


@pytest.mark.parametrize("number", ["0", "104", "many", ""])
def test_number_of_shards_out_of_range(tmp_path, monkeypatch, capsys, number):
    monkeypatch.setattr(sys, "argv", ["cached", "--out", str(tmp_path / "out"), number])
    with pytest.raises(SystemExit, match="^2$"):
        cached_fineweb10B.main()
    message = capsys.readouterr().err
    assert message == (f"error: N must be a number of shards from 1 to 103, 200 MB each, not"
                       f" {number or 'nothing'}; --all fetches all, 20.8 GB\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("argument, count", [("1", 2), ("103", 104), ("--all", 104)])
def test_number_of_shards(argument, count, tmp_path, monkeypatch, capsys):
    fetched = []
    monkeypatch.setattr(cached_fineweb10B, "fetch_all", lambda names, out: fetched.extend(names))
    monkeypatch.setattr(sys, "argv", ["cached", "--out", str(tmp_path), argument])
    cached_fineweb10B.main()
    assert fetched == [shards.fineweb_name(index) for index in range(count)]
    assert capsys.readouterr().out == f"{count} shards in {tmp_path}\n"


# Own shards


TEXTS = ["first" * 70, "", "naïve 🙂 text", "x" * 99, "y" * 1000, "<|endoftext|>", "end"]
STREAM = np.array([id for text in TEXTS if text for id in (256, *text.encode())], np.uint16)


@pytest.fixture
def inputs(tmp_path):
    """TEXTS as a .jsonl file (with a blank line) and, for the last two, .txt files."""
    lines = [json.dumps({"text": text, "id": 1}) for text in TEXTS[:-2]]
    paths = [tmp_path / name for name in ("a.jsonl", "b.txt", "c.txt")]
    contents = ["\n\n".join(lines), *TEXTS[-2:]]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content.encode())
    return paths


@pytest.fixture
def at_once(monkeypatch):
    """In place of worker processes, this one: two documents at a time, encoded when handed over."""
    class Pool(ExitStack):
        def __init__(self, workers, mp_context, initializer):
            super().__init__()
            assert initializer is fineweb.start_worker and mp_context.get_start_method() == "spawn"

        def submit(self, function, *arguments):
            (future := Future()).set_result(function(*arguments))
            return future

    monkeypatch.setattr(fineweb, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(fineweb, "BATCH", 2)


def make(out_dir, *inputs):
    """Runs fineweb.py with two processes and shards of 100 tokens."""
    return command(
        "fineweb.py",
        *("--tokenizer", "bytes", "--workers", 2, "--shard-size", 100),
        *("--out", out_dir, "--input", *inputs),
    )


def stream(out_dir):
    """Returns all tokens in out_dir, having checked the shards' names and sizes."""
    paths = sorted(out_dir.glob("*.bin"), key=lambda path: path.stem[-6:])
    assert [path.name for path in paths] == [shards.fineweb_name(i) for i in range(len(paths))]
    parts = [shards.read(path) for path in paths]
    assert all(len(part) == 100 for part in parts[:-1])
    return np.concatenate(parts)


def test_white_space_without_end_is_encoded(tmp_path, monkeypatch):
    """tiktoken's pattern panics at 999,999 white-space characters, and a panic is no Exception."""
    long = " " * 1_200_000 + "x\n" + "\t" * fineweb.LONGEST_SPACE + "y"
    for text in ("", "a  b", long, long[:999_999], long[: fineweb.LONGEST_SPACE]):
        pieces = list(fineweb.without_long_space(text))
        assert "".join(pieces) == text and all(pieces) or pieces == [""]
        assert max(map(len, re.findall(r"\s*", "|".join(pieces)))) <= fineweb.LONGEST_SPACE
    words = "x" * fineweb.LONGEST_SPACE + "  y"
    assert list(fineweb.without_long_space(words)) == [words]
    gpt2 = pytest.importorskip("tiktoken").Encoding(
        "bytes", pat_str=r"\s+(?!\S)|\s+|\S+", mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={"<|endoftext|>": 256})
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: gpt2)
    fineweb.tokenizer.cache_clear()
    (tokens,) = fineweb.encode_batch("gpt2", [long])
    fineweb.tokenizer.cache_clear()
    assert tokens.tolist() == [256, *long.encode()]


def test_batches_keep_their_order_and_few_are_under_way(at_once):
    taken = []
    texts = (taken.append(n) or str(n) for n in range(40))
    for n, tokens in enumerate(fineweb.encode_all("bytes", texts, 3)):
        assert tokens.tolist() == [256, *str(n).encode()]
        assert len(taken) == min(40, 2 * (n // 2 + 12)), "four batches for each process"
    assert n == 39


def test_a_worker_leaves_ctrl_c_to_its_parent_and_ends_with_it(monkeypatch):
    ended, exits, signals = threading.Event(), [], []
    monkeypatch.setattr("multiprocessing.parent_process", lambda: Namespace(join=ended.wait))
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(signal, "signal", lambda *what: signals.append(what))
    before = {*threading.enumerate()}
    fineweb.start_worker()
    (thread,) = {*threading.enumerate()} - before
    assert thread.daemon, "at its own end the process waits for the others"
    assert (signals, exits) == ([(signal.SIGINT, signal.SIG_IGN)], [])
    ended.set()
    thread.join()
    assert exits == [1]


def test_half_a_surrogate_pair_is_a_question_mark():
    (tokens,) = fineweb.encode_batch("bytes", ["\ud800é"])
    assert tokens.tolist() == [256, *"?é".encode()]


def test_exact_stream_across_shard_edges(inputs, tmp_path):
    process = make(tmp_path / "out", *inputs)
    assert process.returncode == 0, process.stderr
    np.testing.assert_array_equal(stream(tmp_path / "out"), STREAM)
    sizes = [100] * (len(STREAM) // 100) + [len(STREAM) % 100]
    *lines, last = process.stdout.splitlines()
    assert lines == [f"{shards.fineweb_name(number)}{size:>{14 - 2 * (number > 0)}} tokens"
                     for number, size in enumerate(sizes)]
    assert re.fullmatch(rf"{len(sizes)} shards in {tmp_path / 'out'}; this call:"
                        rf" {len(STREAM):,} tokens in \d+ s", last)

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    process = make(tmp_path / "out", *inputs)
    assert process.returncode == 0 and "this call: 0 tokens" in process.stdout
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("replacements", [4, 5])
def test_restart_after_a_kill(inputs, tmp_path, replacements):
    out_dir = tmp_path / "out"
    run = (
        "import fineweb; from pathlib import Path; out_dir, *inputs = map(Path, sys.argv[1:])\n"
        "fineweb.make_shards(out_dir, inputs, 'bytes', 100, 2)"
    )
    # progress.json and a shard take turns: after 4 and 5 replacements there are two shards.
    killed(run, replacements, out_dir, *inputs)
    kept = {path: path.stat().st_mtime_ns for path in out_dir.glob("*.bin")}
    assert len(kept) == replacements // 2
    process = make(out_dir, *inputs)
    assert process.returncode == 0, process.stderr
    assert f"this call: {len(STREAM) - 100 * len(kept):,} tokens" in process.stdout
    np.testing.assert_array_equal(stream(out_dir), STREAM)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_missing_or_broken_shard_is_made_again(inputs, tmp_path, at_once):
    out_dir = tmp_path / "out"
    assert fineweb.make_shards(out_dir, inputs, "bytes", 100, 1)[1] == len(STREAM)
    path = out_dir / shards.fineweb_name(3)
    path.write_bytes(path.read_bytes()[:-2])
    assert fineweb.make_shards(out_dir, inputs, "bytes", 100, 1)[1] == len(STREAM) - 300
    np.testing.assert_array_equal(stream(out_dir), STREAM)


def test_fineweb_through_datasets(tmp_path, monkeypatch, at_once):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": TEXTS, "id": range(len(TEXTS))})
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or rows)
    fineweb.make_shards(tmp_path, None, "bytes", 100, 1)
    np.testing.assert_array_equal(stream(tmp_path), STREAM)
    assert asked == [(("HuggingFaceFW/fineweb",), {"name": "sample-10BT", "split": "train"})]
    assert list(fineweb.hub_documents(5)) == TEXTS[5:]

    def unreachable(*_, **__):
        raise RuntimeError("no route\nto it")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(OSError) as error:
        fineweb.hub_documents(0)
    assert str(error.value) == ("cannot get HuggingFaceFW/fineweb from the Hugging Face hub (no"
                                f" route); check {shards.network()}")


def test_a_command_without_options(monkeypatch, capsys):
    given = []
    monkeypatch.setattr(shards, "only_writer", lambda *_: nullcontext())
    monkeypatch.setattr(fineweb, "make_shards", lambda *some: given.append(some) or (7, 1234))
    monkeypatch.setattr(sys, "argv", ["fineweb.py"])
    fineweb.main()
    assert given == [(DATA / "fineweb10B_own", None, "gpt2", 100_000_000, os.cpu_count())]
    assert capsys.readouterr().out == (
        f"7 shards in {DATA / 'fineweb10B_own'}; this call: 1,234 tokens in 0 s\n")

    def died(*_):
        raise BrokenProcessPool

    monkeypatch.setattr(fineweb, "make_shards", died)
    with pytest.raises(SystemExit, match="^error: a worker process died, perhaps for lack of memory"
                                         "; try fewer --workers$"):
        fineweb.main()


def test_an_input_of_one_shard_leaves_nothing_to_train_on(inputs, tmp_path, at_once):
    with pytest.raises(ValueError, match="^the input's 4 tokens leave nothing to train on after a "
                                         "validation shard of 4; pass a smaller --shard-size$"):
        fineweb.make_shards(tmp_path / "out", inputs[2:], "bytes", 4, 1)
    assert fineweb.make_shards(tmp_path / "other", inputs[2:], "bytes", 3, 1) == (2, 4)


@pytest.mark.parametrize(
    "name, content, parts",
    [
        ("none.jsonl", None, ["none.jsonl", "no such file"]),
        ("a.csv", "text", ["a.csv", ".jsonl"]),
        ("a.jsonl", "", ["holds no text"]),
        ("a.txt", "short", ["6 tokens", "--shard-size"]),
        ("a.jsonl", '{"text": "one"}\n\n{"text": "two"\n', ["a.jsonl, line 3", "not JSON"]),
        ("a.jsonl", '{"text": "one"}\n{"body": "two"}\n', ["a.jsonl, line 2", "text"]),
        ("a.jsonl", "[1]\n", ["a.jsonl, line 1", "text"]),
        ("a.jsonl", "[" * 100_000, ["a.jsonl, line 1", "not JSON"]),
        ("a.txt", b"\xff\xfe", ["a.txt", "UTF-8"]),
        ("a.txt", b"\xef\xbb\xbfshort", ["6 tokens"]),  # a mark of Windows editors is no text
    ],
)
def test_faulty_input_is_one_clear_line(tmp_path, monkeypatch, name, content, parts):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    arguments = ["fineweb.py", "--tokenizer", "bytes", "--workers", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--input", str(path)])
    with pytest.raises(SystemExit) as exit:
        fineweb.main()
    message = exit.value.code
    assert message.startswith("error: ") and "\n" not in message
    assert all(part in message for part in parts), message
    assert not list(tmp_path.rglob("*.bin"))


def test_an_input_is_named_once(inputs, tmp_path, monkeypatch):
    (tmp_path / "link.jsonl").symlink_to(inputs[0])
    for again in (tmp_path / "." / inputs[0].name, tmp_path / "link.jsonl"):
        monkeypatch.setattr(sys, "argv", ["fineweb.py", "--out", str(tmp_path / "out"), "--input",
                                          *map(str, inputs), str(again)])
        with pytest.raises(SystemExit, match=f"{again.name} is named twice"):
            fineweb.main()


@pytest.mark.parametrize("script", [builtin_corpus, cached_fineweb10B, fineweb])
def test_an_empty_folders_name_is_not_the_current_folder(script, monkeypatch, capsys):
    arguments = ["1"] if script is cached_fineweb10B else []
    monkeypatch.setattr(sys, "argv", ["script", *arguments, "--out", ""])
    with pytest.raises(SystemExit, match="^2$"):
        script.main(*["", None, None][: 3 * (script is builtin_corpus)])
    assert "the folder's name is empty" in capsys.readouterr().err
    assert shards.folder("~/data") == Path.home() / "data"


@pytest.mark.parametrize("option, value, fault", [
    ("--input", "texts.txt", "texts.txt is not a regular file"),
    ("--workers", "0", "must be at least 1, not 0"),
    ("--shard-size", str(2**31), "must lie in 1..2147483647, not 2147483648"),
    ("--shard-size", "0", "must lie in 1..2147483647, not 0"),
])
def test_an_argument_is_refused_before_any_work(option, value, fault, tmp_path, monkeypatch):
    (tmp_path / "texts.txt").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fineweb.py", "--out", "out", option, value])
    with pytest.raises(SystemExit, match=f"{fault}$"):
        fineweb.main()
    assert not (tmp_path / "out").exists()
    for size in (1, 2**31 - 1):
        fineweb.check_arguments(Namespace(shard_size=size, workers=1, input=None))


def test_other_settings_in_one_folder_are_refused(inputs, tmp_path, at_once):
    out_dir = tmp_path / "out"
    fineweb.make_shards(out_dir, inputs, "bytes", 100, 1)
    renamed, longer = tmp_path / "d.txt", tmp_path / "of the same time" / "c.txt"
    longer.parent.mkdir()
    for copy in (renamed, longer):
        copy.write_text(TEXTS[-1] + "." * (copy == longer))
        shutil.copystat(inputs[2], copy)
    for files, name, shard_size in ((inputs, "bytes", 101), (inputs[:1], "bytes", 100),
                                    (inputs, "gpt2", 100), ([*inputs[:2], renamed], "bytes", 100),
                                    ([*inputs[:2], longer], "bytes", 100)):
        with pytest.raises(ValueError, match="another or a changed input, tokenizer or shard size"):
            fineweb.make_shards(out_dir, files, name, shard_size, 1)
    assert fineweb.make_shards(out_dir, inputs, "bytes", 100, 1)[1] == 0
    settings = json.loads((out_dir / "progress.json").read_text())["settings"]
    wrong_ends = [json.dumps(dict(settings=settings, ends=ends)) for ends in ([["x", 1]], [3], 7)]
    for damaged in wrong_ends:
        (out_dir / "progress.json").write_text(damaged)
        with pytest.raises(ValueError, match="its progress.json is missing or damaged"):
            fineweb.make_shards(out_dir, inputs, "bytes", 100, 1)
    (out_dir / "progress.json").write_text(json.dumps(dict(settings=settings, ends=[[0, 100]])))
    os.utime(inputs[0], (1, 1))  # as after an edit that keeps the size
    with pytest.raises(ValueError, match="another or a changed input"):
        fineweb.make_shards(out_dir, inputs, "bytes", 100, 1)
    for damaged in ("[1]", "{}", "[", "[" * 100_000):
        (out_dir / "progress.json").write_text(damaged)
        with pytest.raises(ValueError, match="its progress.json is missing or damaged"):
            fineweb.make_shards(out_dir, inputs, "bytes", 100, 1)
    (out_dir / "progress.json").unlink()
    with pytest.raises(ValueError, match="its progress.json is missing or damaged"):
        fineweb.make_shards(out_dir, inputs, "bytes", 100, 1)


def test_unreachable_vocabulary_names_the_cache(inputs, tmp_path):
    pytest.importorskip("tiktoken")
    process = command(
        *("fineweb.py", "--out", tmp_path / "out", "--input", *inputs),
        TIKTOKEN_CACHE_DIR=str(tmp_path / "empty"),
        HTTPS_PROXY="http://127.0.0.1:9",
        NO_PROXY="",
    )
    assert_one_line(process, 1, "TIKTOKEN_CACHE_DIR")
