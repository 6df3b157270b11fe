"""Reads a folder of raw samples: JSON lines of cells that were timed on another machine, and what that machine was.

Seconds throughout. What cannot be used (torn lines, cells that failed) is left out and counted, because samples from a
machine that is gone cannot be taken again. What the samples amount to is `rawfit`'s business.
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from latpred.errors import CalibrationError

NORMAL_SHARE = 0.6745 / (2 * 1.2816)  # of p90 - p10: half the interquartile range of a normal distribution

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What every line has: a key of its own, and why there are no times, if there are none."""

    cell: str
    error: str = ""
    skipped: str = ""


class Stats(msgspec.Struct, frozen=True):
    """Times of one call; the deciles are missing where there were too few for them."""

    median: Seconds
    n: Count
    p10: Seconds | None = None
    p90: Seconds | None = None

    @property
    def spread(self) -> float:
        """Half the interquartile range in seconds."""
        return NORMAL_SHARE * (self.p90 - self.p10) if self.p10 and self.p90 else 0.0


class OpRow(Cell, frozen=True, kw_only=True):
    """A small op issued back to back, or a wait for an idle device ("sync_idle")."""

    op: str
    precision: str = ""
    median: Seconds
    n: Count
    p10: Seconds | None = None
    p90: Seconds | None = None

    @property
    def stats(self) -> Stats:
        """Its times."""
        return Stats(self.median, self.n, self.p10, self.p90)


class KernelRow(OpRow, frozen=True, kw_only=True):
    """A kernel by its dims; on an asynchronous device from a replayed graph."""

    op: str = ""
    family: str
    dims: tuple[int | bool | str, ...]


class ForwardRow(Cell, frozen=True, kw_only=True):
    """A callable of many kernels, timed by both protocols.

    single : synchronised after each call. pipelined : the period when calls follow each other. host_issue : host time
    of each of those `single.n` calls, before the wait at the end.
    """

    single: Stats
    pipelined: Seconds
    host_issue: Seconds


class ChainRow(ForwardRow, frozen=True, kw_only=True):
    """A number of tiny kernels in a row: issued one by one ("eager_chain"), or replayed ("cuda_graph_nodes")."""

    op: str
    nodes: Count


class ModelRow(ForwardRow, frozen=True, kw_only=True):
    """A whole model in one runtime at one batch size."""

    model: str
    precision: str
    runtime: str
    batch: Count


class LaunchRow(Cell, frozen=True, kw_only=True):
    """What a profiler saw of one eager forward pass: its kernels and the sum of their times."""

    model: str
    precision: str
    batch: Count
    kernels: Annotated[int, msgspec.Meta(ge=0)]
    kernel_s: Annotated[float, msgspec.Meta(ge=0)]


class Environment(msgspec.Struct, frozen=True):
    """The machine that was sampled, as its own tools describe it; `gpu` is empty on a CPU."""

    python: str
    platform: str
    torch: str
    cpu: str = ""
    threads: int = 1
    gpu: str = ""
    sms: int = 0
    memory: int = 0
    l2: int | None = None
    nvidia_smi: str = ""
    transformers: str = ""
    numpy: str = ""


class Folder(NamedTuple):
    """Everything usable in a folder, and how often what was not."""

    environment: Environment
    ops: tuple[OpRow, ...]
    chains: tuple[ChainRow, ...]
    kernels: tuple[KernelRow, ...]
    models: tuple[ModelRow, ...]
    launches: tuple[LaunchRow, ...]
    left_out: Counter[str]


Row = TypeVar("Row", bound=Cell)


def read(folder: Path) -> Folder:
    """Read env.json, dispatch.jsonl, kernels.jsonl and, where there are any, models.jsonl and launches.jsonl.

    Any of the JSON lines may be gzipped. Of a cell that was sampled twice the last sample counts.

    Raises
    ------
    CalibrationError
        When a file that is needed is missing or cannot be read, or holds no line that can be used.
    """
    left_out: Counter[str] = Counter()
    dispatch = _lines(folder, "dispatch", left_out, needed=True)
    found = Folder(
        environment=environment(folder),
        ops=_rows([line for line in dispatch if not _is_chain(line)], OpRow, "dispatch", left_out),
        chains=_rows([line for line in dispatch if _is_chain(line)], ChainRow, "dispatch", left_out),
        kernels=_rows(_lines(folder, "kernels", left_out, needed=True), KernelRow, "kernels", left_out),
        models=_rows(_lines(folder, "models", left_out), ModelRow, "models", left_out),
        launches=_rows(_lines(folder, "launches", left_out), LaunchRow, "launches", left_out),
        left_out=left_out,
    )
    for name, rows in (("dispatch", found.ops), ("kernels", found.kernels)):
        if not rows:
            raise CalibrationError(
                f"{folder / name}.jsonl holds no cell that can be used ({told(left_out)}). Sample the machine again."
            )
    return found


def environment(folder: Path) -> Environment:
    """What env.json says of the machine.

    Raises
    ------
    CalibrationError
        When it is missing or no such description.
    """
    path = folder / "env.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Environment)
    except OSError as error:
        raise CalibrationError(_unreadable(path, error)) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CalibrationError(
            f"{path} does not describe a machine ({error}). It needs at least python, platform and torch; sample that "
            "machine's environment again."
        ) from error


def told(left_out: Mapping[str, int]) -> str:
    """What was left out, as a sentence part.

    >>> told({"torn lines in kernels": 2})
    '2 torn lines in kernels'
    """
    return ", ".join(f"{count} {what}" for what, count in sorted(left_out.items())) or "nothing left out"


def _is_chain(line: bytes) -> bool:
    return b'"nodes"' in line


def _rows(lines: list[bytes], kind: type[Row], part: str, left_out: Counter[str]) -> tuple[Row, ...]:
    """Usable rows of a kind, each cell once."""
    found: dict[str, Row] = {}
    for line in lines:
        try:
            row = msgspec.json.decode(line, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            left_out[_why(line, part)] += 1
            continue
        found[row.cell] = row
    return tuple(found.values())


def _why(line: bytes, part: str) -> str:
    """Why a line is of no use: a cell that failed says so, anything else is damaged."""
    try:
        cell = msgspec.json.decode(line, type=Cell)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return f"damaged lines in {part}"
    if cell.error:
        return f"failed cells in {part}"
    return f"skipped cells in {part}" if cell.skipped else f"lines without times in {part}"


def _lines(folder: Path, part: str, left_out: Counter[str], *, needed: bool = False) -> list[bytes]:
    plain, packed = folder / f"{part}.jsonl", folder / f"{part}.jsonl.gz"
    path = plain if plain.exists() or not packed.exists() else packed
    if not needed and not path.exists():
        return []
    try:
        return list(_whole(path, part, left_out))
    except OSError as error:
        raise CalibrationError(_unreadable(path, error)) from error


def _whole(path: Path, part: str, left_out: Counter[str]) -> Iterator[bytes]:
    """Lines of a file, up to where a gzipped one is torn."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            for line in file:
                if line.strip():
                    yield line
        except (EOFError, zlib.error):
            left_out[f"torn ends of {part}"] += 1


def _unreadable(path: Path, error: OSError) -> str:
    return (
        f"cannot read {path}: {error.strerror or error}. A folder of raw samples holds env.json, dispatch.jsonl, "
        "kernels.jsonl and models.jsonl, or the journal.jsonl of a calibration."
    )
