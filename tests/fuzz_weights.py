"""`python tests/fuzz_weights.py --minutes 60`: what strangers give to the Gemma-4 example, damaged.

Valid files (configs, weights in one file and in many, tokenizers, checkpoints of training runs,
references of the logit checker) are mutated and read. A file may be read or refused; then the error
is a `ValueError` or `OSError` that names a file, short and in plain characters. Never does reading run
code or touch anything outside of the folder (an audit hook looks), take memory that the files do not
justify, or a minute of the processor. Writes `benchmarks/results/fuzz.json`, a row for each kind.

A case is made from its target's name and its number alone: `--target config --only 1234` runs one
again and shows it. Linux only: the peak of memory is read from /proc.
"""

import argparse
import contextlib
import copy
import dataclasses
import io
import json
import logging
import os
import random
import re
import resource
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import tracemalloc
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data" / "gemma4"
RESULTS = ROOT / "benchmarks" / "results" / "fuzz.json"

# What reading may take: so many bytes for each of the files', and what the libraries use anyway.
TIMES, SLACK = 64, 64 * 2**20  # a panic in Rust reads 58 MB of the library's own symbols
ADDRESS_SPACE = 4 * 2**30  # beyond what a process has when it starts
SECONDS = 60.0  # of the processor, until a case is given up; a third of that is too long
LONGEST_MESSAGE = 8000

# -- Mutations ---------------------------------------------------------------------------------------


class Pairs(list[list[Any]]):
    """A JSON object whose keys may be repeated."""


class Raw(str):
    """Text that stands in JSON as it is."""


def parse(text: str) -> Any:
    return json.loads(text, object_pairs_hook=lambda ps: Pairs([k, v] for k, v in ps))


def dump(value: Any) -> str:
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{dump(k)}:{dump(v)}" for k, v in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dump, value)) + "]"
    return str(value) if isinstance(value, Raw) else json.dumps(value)


NUMBERS = (
    0, -1, 1, 2, 3, 7, 255, 256, 2**16, 2**24, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1,
    2**63, 2**64 - 1, 2**64, 10**30, -(2**63), -(2**31), 0.0, -0.0, 0.5, 1.5, 1e-320, 1e308, -1e308,
    Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1" * 400), Raw("1" * 5000), Raw("1e999"),
)  # fmt: skip
TEXTS = (
    "", "x", "a" * 300, "a" * 100_000, "\0", "\x1b[2J", "\n\n", "\ud800", "‮abc", "é" * 50, "null",
    "../../../etc/passwd", "/etc/passwd", "..", ".", "model.safetensors", "config.json",
    "__import__('os').system('touch hacked')", "cos\nsystem\n(S'touch hacked'\ntR.", "%s%n{0}",
    "F64", "BF16", "I8", "F4", "sliding_attention", "full_attention", "model.norm.weight", "int32",
)  # fmt: skip


def hostile(rng: random.Random) -> Any:
    kind = rng.randrange(9)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 5:
        return rng.choice(TEXTS)
    if kind == 5:
        return rng.choice((None, True, False, [], Pairs(), [None], Pairs([["", None]])))
    if kind == 6:  # nested
        depth = rng.choice((10, 200, 1500, 100_000))
        open_, close = rng.choice((("[", "]"), ('{"a":', "}")))
        return Raw(open_ * depth + "1" + close * depth)
    if kind == 7:  # long
        return [rng.choice((0, 1, "a", 2**40, "sliding_attention"))] * rng.choice(
            (1, 9, 1000, 50_000)
        )
    return rng.randrange(-10, 10**6)


def places(value: Any, found: list[tuple[Any, int]] | None = None) -> list[tuple[Any, int]]:
    """Every container and index at which something stands; a pair's index is 0 for key, 1 for value."""
    found = [] if found is None else found
    if isinstance(value, Pairs):
        for pair in value:
            found += [(pair, 0), (pair, 1)]
            places(pair[1], found)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            found.append((value, i))
            places(item, found)
    return found


def containers(value: Any) -> Iterator[list[Any]]:
    if isinstance(value, list):
        yield value
        for item in value:
            yield from containers(item[1] if isinstance(value, Pairs) else item)


def mutate_json(rng: random.Random, value: Any) -> Any:
    holder, multiplied = [copy.deepcopy(value)], False
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        where = [p for p in places(holder) if not isinstance(p[0][p[1]], Raw)]
        if not where:
            break
        container, at = rng.choice(where)
        kind = rng.randrange(8)
        others = [c for c in containers(holder[0]) if c]
        if kind < 3 or not others:
            container[at] = hostile(rng)
        elif kind == 3:  # near what it was
            old = container[at]
            if type(old) in (int, float):
                container[at] = rng.choice((old + 1, old - 1, -old, old * 2, float(old), str(old)))
            elif isinstance(old, str):
                i = rng.randrange(len(old) + 1)
                container[at] = rng.choice(
                    (old[:i] + old[i + 1 :], old[:i] + "0" + old[i:], old.upper())
                )
            else:
                container[at] = [old]
        elif kind == 4:  # something dropped
            chosen = rng.choice(others)
            del chosen[rng.randrange(len(chosen))]
        elif kind == 5:  # something twice: a repeated key, or one with another value
            chosen = rng.choice(others)
            again = copy.deepcopy(rng.choice(chosen))
            if isinstance(chosen, Pairs) and rng.random() < 0.5:
                again[1] = hostile(rng)
            chosen.insert(rng.randrange(len(chosen) + 1), again)
        elif kind == 6:  # two things change places
            other, there = rng.choice(where)
            if isinstance(container[at], list) or isinstance(other[there], list):
                container[at] = hostile(rng)  # one may hold the other
            else:
                container[at], other[there] = other[there], container[at]
        else:
            chosen = rng.choice(others)
            times = 2 if multiplied or len(where) > 1000 else rng.choice((2, 2, 50))
            multiplied = True  # more takes longer to write than to read
            chosen[:] = [copy.deepcopy(x) for _ in range(times) for x in chosen]
    return holder[0]


def mutate_bytes(rng: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 5, 30))):
        end = rng.choice((len(data), min(len(data), 200), min(len(data), 20_000)))
        at = rng.randrange(end) if end else 0
        size = rng.choice((1, 1, 4, 8, 100))
        kind = rng.randrange(8)
        if kind < 2 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2 and data:
            data[at] = rng.randrange(256)
        elif kind == 3:
            data[at : at + size] = rng.choice((b"\0", b"\xff", b"[", b"9", b'"')) * size
        elif kind == 4:
            del data[at : at + size]
        elif kind == 5:
            data[at:at] = rng.randbytes(size)
        elif kind == 6:
            data = data[:at]
        else:
            data += rng.choice((rng.randbytes(size), bytes(data[at : at + 1000]), b"\0" * 100_000))
    return bytes(data)


def mutate_safetensors(rng: random.Random, raw: bytes) -> bytes:
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = raw[8 : 8 + length], raw[8 + length :]
    kind = rng.randrange(6)
    if kind < 3:
        header = dump(mutate_json(rng, parse(header.decode()))).encode("utf-8", "surrogatepass")
        length = len(header)
    elif kind == 3:
        length = rng.choice((0, 1, length - 1, length + 1, 2**20, 2**32, 2**40, 2**63, 2**64 - 1))
    elif kind == 4:  # numbers that are none
        data = bytearray(data)
        for _ in range(rng.choice((1, 3))):
            at = rng.randrange(len(data) // 4) * 4
            data[at : at + 4] = rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff"))
    else:
        data = mutate_bytes(rng, data)
    return struct.pack("<Q", length) + header + bytes(data)


def mutate_npz(rng: random.Random, raw: bytes) -> bytes:
    """The archive with one array's own header or bytes changed, its checksums right again."""
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        members = [[info.filename, archive.read(info)] for info in archive.infolist()]
    member = rng.choice(members)
    text = member[1]
    kind = rng.randrange(4)
    if kind == 0:
        member[1] = mutate_bytes(rng, text)
    elif kind == 1:
        digits = list(re.finditer(rb"\d+", text[10:128]))
        chosen = rng.choice(digits) if digits else None
        if chosen is not None:
            new = str(rng.choice(NUMBERS)).encode()
            member[1] = text[: 10 + chosen.start()] + new + text[10 + chosen.end() :]
    elif kind == 2:
        member[0] = rng.choice([n for n, _ in members] + ["../x.npy", "/etc/x.npy", "\0.npy"])
    else:
        word = rng.choice((b"|O", b"<c16", b"<U9", b"<V4", b"True", b"__import__('os').abort()"))
        member[1] = text.replace(rng.choice((b"<f4", b"<i8", b"False")), word, 1)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return out.getvalue()


def mutate_file(rng: random.Random, path: Path) -> str:
    """Changes a file in place; returns in words what was done."""
    raw = path.read_bytes()
    kind = rng.random()
    if kind < 0.02:
        path.unlink()
        return "removed"
    if kind < 0.03:
        path.unlink()
        path.mkdir()
        return "a folder"
    if kind < 0.05:
        path.write_bytes(rng.choice((b"", b"\0" * 1000, rng.randbytes(3000), b"[" * 200_000)))
        return "replaced"
    if kind < 0.06:
        path.unlink()
        path.symlink_to(rng.choice(("/dev/null", "/etc/passwd", path.name)))
        return "a link"
    how: Callable[[random.Random, bytes], bytes] = mutate_bytes
    if kind < 0.75:
        if path.suffix == ".safetensors":
            how = mutate_safetensors
        elif path.suffix == ".npz":
            how = mutate_npz
        else:
            with contextlib.suppress(ValueError):
                value = parse(raw.decode())
                text = dump(mutate_json(rng, value))
                path.write_bytes(text.encode("utf-8", "surrogatepass"))
                return "mutate_json"
    path.write_bytes(how(rng, raw))
    return how.__name__


# -- Targets -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Target:
    """**Attributes:** `make` writes valid files into an empty folder; `read` reads them; `files` says
    which of them are mutated, of those there are."""

    name: str
    make: Callable[[Path], None]
    read: Callable[[Path], object]
    files: str = "*"


def read_config(folder: Path) -> object:
    from examples.gemma4.config import load_config

    return [load_config(path) for path in sorted(folder.iterdir())]


def make_config(folder: Path) -> None:
    text = json.loads((DATA / "tiny_e2b" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text))
    wrapped = json.dumps({"text_config": text, "eos_token_id": [1, 5]})
    (folder / "multimodal.json").write_text(wrapped)
    shutil.copy(DATA / "tiny_e4b" / "config_hub_style.json", folder)


def make_weights(folder: Path, shard_bytes: int = 2**31) -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from gemma4_small import small

    from examples.gemma4 import weights

    model, _ = small()
    weights.save(model, folder, shard_bytes=shard_bytes)


def make_many(folder: Path) -> None:
    make_weights(folder, 100_000)


def read_weights(folder: Path) -> object:
    import jax
    import numpy as np

    from examples.gemma4 import weights

    model = weights.load(folder)
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(model)):
        raise AssertionError("a model of numbers that are not finite")
    return model


def make_tokenizer(folder: Path) -> None:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "_")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("_", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("_", " "), decoders.ByteFallback()])
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=["<pad>", "<eos>", "<bos>", "<unk>"]
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def read_tokenizer(folder: Path) -> object:
    from examples.gemma4 import data

    tokenizer = data.load_tokenizer(folder)
    return tokenizer.decode(tokenizer.encode("def  naïve(self): 日本"))


def make_generation(folder: Path) -> None:
    shutil.copy(DATA / "tiny_e2b" / "generation_config.json", folder)


def read_generation(folder: Path) -> object:
    from examples.gemma4 import generate
    from examples.gemma4.config import load_config

    return generate.stop_ids(folder, load_config(DATA / "tiny_e2b"))


def state() -> dict[str, Any]:
    import jax.numpy as jnp

    model = {
        "embed": jnp.ones((7, 5)),
        "layers": [jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4)],
    }
    return {"model": model, "opt_state": {"count": jnp.zeros((), jnp.int32), "mu": model}}


def make_checkpoint(folder: Path) -> None:
    from examples.gemma4.checkpoints import Checkpoints

    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        checkpoints.save(3, state(), {"position": 12, "source": "text"})


def read_checkpoint(folder: Path) -> object:
    import jax

    from examples.gemma4.checkpoints import Checkpoints

    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state())
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        found = checkpoints.restore(wanted)
    same = jax.tree.map(lambda x, w: (x.shape, x.dtype) == (w.shape, w.dtype), found.items, wanted)
    if not jax.tree.all(same):
        raise AssertionError("arrays of other shapes than asked for")
    return found


def make_reference(folder: Path) -> None:
    shutil.copy(DATA / "tiny_e2b" / "reference.npz", folder)


def read_reference(folder: Path) -> object:
    from examples.gemma4.config import load_config
    from examples.gemma4.reference import Reference, batches

    return list(batches(Reference(folder / "reference.npz"), load_config(DATA / "tiny_e2b")))


TARGETS = {
    t.name: t
    for t in (
        Target("config", make_config, read_config),
        Target("weights in one file", make_weights, read_weights),
        Target("weights in many files", make_many, read_weights),
        Target("tokenizer", make_tokenizer, read_tokenizer),
        Target("generation config", make_generation, read_generation),
        Target("training checkpoint", make_checkpoint, read_checkpoint),
        Target("logit reference", make_reference, read_reference),
    )
}


def spoil(target: Target, number: int, valid: Path, folder: Path) -> str:
    """Makes the case `number` in `folder` from the target's valid files; says what was changed."""
    rng = random.Random(f"{target.name}/{number}")
    shutil.copytree(valid, folder)
    files = sorted(p for p in folder.rglob(target.files) if p.is_file())
    done = []
    for path in rng.sample(files, min(len(files), rng.choice((1, 1, 1, 2)))):
        done.append(f"{path.relative_to(folder)}: {mutate_file(rng, path)}")
    return "; ".join(done)


# -- One case ----------------------------------------------------------------------------------------

# What no reader of data does. "exec" is of code objects: a module's, or what `exec` and `eval` run.
FORBIDDEN = (
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen",
    "pickle.find_class", "socket.connect", "socket.bind", "ctypes.dlopen", "os.remove", "os.rename",
    "os.rmdir", "os.mkdir", "os.chmod", "os.link", "os.symlink", "os.truncate", "shutil.rmtree",
    "exec", "import",  # "compile" alone parses: NumPy reads headers with `ast.literal_eval`
)  # fmt: skip


# Where Python and the packages are, and the project's own sources.
INSTALLED = (sys.prefix, sys.base_prefix, str(ROOT / "examples"), str(ROOT / "remat_scan"))


class Watch:
    """Notes what the interpreter does while `folder` is set, from any thread."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in FORBIDDEN and not self._late_import(event, args[0]):
            self.seen.append(f"{event} {args[0]!r:.100}")
        elif event == "open" and args[0] is not None and not isinstance(args[0], int):
            path, flags = os.fsdecode(args[0]), args[2] or 0
            inside = Path(path).absolute().is_relative_to(self.folder)
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            # Devices and Python's own sources (for tracebacks) are not the stranger's.
            known = path.startswith(("/proc/", "/sys/", "/dev/", str(DATA), *INSTALLED))
            if writes or not (inside or known):
                self.seen.append(f"open {path!r:.100} with flags {flags}")

    def _late_import(self, event: str, what: Any) -> bool:
        """Libraries import parts of their own, and of Python, only when they are needed."""
        if event == "import":
            top = str(what).partition(".")[0]
            return top in sys.stdlib_module_names or top in sys.modules
        return event == "exec" and what.co_filename.startswith(INSTALLED)


def peak_resident() -> int:
    text = Path("/proc/self/status").read_text()
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", text)
    return int(kib) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def judge(error: BaseException, folder: Path) -> str | None:
    """What is wrong with an error, if anything."""
    if not isinstance(error, ValueError | OSError):
        return f"a {type(error).__name__}"
    text = str(error)
    if len(text) > LONGEST_MESSAGE:
        return "a message that is too long"
    if any(not c.isprintable() and c != "\n" for c in text):
        return "a message with control characters"
    named = [p.name for p in folder.rglob("*")]
    if str(folder) not in text and not any(name in text for name in named):
        return "a message that names no file"
    return None


def run_case(target: Target, number: int, valid: Path, work: Path, watch: Watch) -> dict[str, Any]:
    folder = work / f"case-{number}"
    changed = spoil(target, number, valid, folder)
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    finding, outcome, trace = None, "read", ""
    watch.seen = []
    forget_peak()
    before = peak_resident()
    tracemalloc.start()
    start, used = time.perf_counter(), time.process_time()
    watch.folder = folder
    try:
        target.read(folder)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # Rust's panics are no Exceptions
        watch.folder = None
        outcome = type(error).__name__
        finding = judge(error, folder)
        if finding:
            trace = "".join(traceback.format_exception(error, limit=-6))[-3000:]
    finally:
        watch.folder = None
    seconds, used = time.perf_counter() - start, time.process_time() - used
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    taken = max(taken, peak_resident() - before)
    if watch.seen:
        finding = f"it did {sorted(set(watch.seen))[:5]}"
    elif taken > TIMES * size + SLACK:
        finding = f"{taken} bytes taken for files of {size}"
    elif used > SECONDS / 3:
        finding = f"{used:.0f} seconds taken"
    shutil.rmtree(folder)
    return {
        "case": number,
        "changed": changed,
        "outcome": outcome,
        "finding": finding,
        "trace": trace,
        "bytes": taken,
        "size": size,
        "seconds": round(seconds, 3),
    }


def work(target: Target, first: int, valid: Path) -> None:
    """Runs cases until it is killed, and prints a line of JSON for each."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is not for the parent
    logging.disable(logging.CRITICAL)
    target.read(valid)
    for _ in range(2):  # imports and caches
        with contextlib.suppress(Exception):
            target.read(Path("/nowhere"))
        target.read(valid)
    (pages,) = re.findall(r"^(\d+)", Path("/proc/self/statm").read_text())
    limit = int(pages) * resource.getpagesize() + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    watch = Watch()
    with tempfile.TemporaryDirectory() as name:
        number = first
        while True:
            print(json.dumps(run_case(target, number, valid, Path(name), watch)), file=out)
            number += 1


# -- All of them -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Tally:
    """What came of a target's cases."""

    cases: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = dataclasses.field(default_factory=Counter)
    findings: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    largest: int = 0  # bytes, beyond the slack that is allowed whatever the size
    ratio: float = 0.0
    slowest: float = 0.0

    def add(self, case: dict[str, Any]) -> None:
        self.cases += 1
        self.outcomes[case["outcome"]] += 1
        self.largest = max(self.largest, case["bytes"])
        self.ratio = max(self.ratio, case["bytes"] / max(case["size"], 2**16))
        self.slowest = max(self.slowest, case["seconds"])
        if case["finding"]:
            self.findings.append(case)
            print(f"FOUND {case['case']}: {case['finding']} ({case['changed']})", flush=True)
            print(case["trace"], flush=True)


def lines(process: subprocess.Popen[bytes], until: float) -> Iterator[bytes | None]:
    """A worker's lines; `None` when one takes too long, an empty one when the worker is gone."""
    assert process.stdout is not None
    rest, used = b"", cpu_seconds(process.pid)
    while time.perf_counter() < until:
        ready, _, _ = select.select([process.stdout], [], [], 5)
        if not ready:
            # Its own time on the processor: other work on this machine is no case's doing.
            if cpu_seconds(process.pid) - used > SECONDS:
                yield None
                return
            continue
        chunk = os.read(process.stdout.fileno(), 2**16)
        if not chunk:
            yield b""
            return
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
        used = cpu_seconds(process.pid)


def cpu_seconds(pid: int) -> float:
    """What a process has used of the processor, without its name, which may hold anything."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fuzz(target: Target, first: int, seconds: float) -> tuple[Tally, int]:
    """Runs cases for so long; returns what came of them and the next case's number."""
    tally, number = Tally(), first
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        valid = Path(name) / "valid"
        valid.mkdir()
        target.make(valid)
        while time.perf_counter() < start + seconds:
            command = [sys.executable, __file__, "--target", target.name, "--from", str(number)]
            errors = (Path(name) / "errors").open("wb")
            process = subprocess.Popen(
                [*command, "--worker", str(valid)], stdout=subprocess.PIPE, stderr=errors
            )
            begun = number
            try:
                for line in lines(process, start + seconds):
                    if line:
                        tally.add(json.loads(line))
                        number += 1
                        if number - begun >= 2000:  # what leaks is no case's doing
                            break
                        continue
                    code = None if line is None else process.wait()
                    what = "longer than a minute" if code is None else f"the process ended: {code}"
                    said = (Path(name) / "errors").read_text(errors="replace")[-2000:]
                    if number == begun and code is not None and code > 0:
                        raise SystemExit(f"{target.name}: the worker does not start:\n{said}")
                    lost = {"case": number, "changed": "?", "outcome": what, "finding": what}
                    tally.add(lost | {"trace": said, "bytes": 0, "size": 1, "seconds": SECONDS})
                    number += 1
            finally:
                process.kill()
                process.wait()
                errors.close()
    tally.seconds = time.perf_counter() - start
    return tally, number


def row(target: Target, first: int, tally: Tally) -> dict[str, Any]:
    versions = {}
    for package in ("jax", "safetensors", "tokenizers", "orbax-checkpoint", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    kinds = Counter(str(f["finding"]) for f in tally.findings)
    return {
        "target": target.name,
        "first_case": first,
        "cases": tally.cases,
        "seconds": round(tally.seconds),
        "outcomes": dict(tally.outcomes.most_common()),
        "findings": dict(kinds.most_common()),
        "cases_found": [f["case"] for f in tally.findings][:50],
        "largest_bytes": tally.largest,
        "largest_times_the_files": round(tally.ratio, 1),
        "slowest_seconds": tally.slowest,
        "python": ".".join(map(str, sys.version_info[:3])),
        **versions,
        "commit": commit or "unknown",
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="of all targets together")
    parser.add_argument("--target", action="append", choices=TARGETS, help="repeatable; all")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first case's number")
    parser.add_argument("--only", type=int, help="run this case alone, here, and show it")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    targets = [TARGETS[name] for name in options.target or TARGETS]
    if options.worker is not None:
        work(targets[0], options.first, options.worker)
    if options.only is not None:
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / "valid").mkdir()
            targets[0].make(Path(name) / "valid")
            changed = spoil(targets[0], options.only, Path(name) / "valid", Path(name) / "case")
            print(changed)
            print(targets[0].read(Path(name) / "case"))
        return 0
    rows, found = [], 0
    for target in targets:
        tally, _ = fuzz(target, options.first, options.minutes * 60 / len(targets))
        rows.append(row(target, options.first, tally))
        found += len(tally.findings)
        print(json.dumps(rows[-1]), flush=True)
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
