"""Recordings: what is saved comes back, replays without a device, and no change goes unnoticed."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import msgspec
import pandas as pd
import pytest
from factories import graph, linear
from profiledata import profile
from tabledata import measured

from latpred.accuracy.predicted import GraphKey
from latpred.accuracy.recording import GRAPHS, MANIFEST, TABLE, Manifest, Recording, _encode, _signed, load
from latpred.errors import RecordingError, TableError

KEY = GraphKey("bert", "seq", 16, "fp32")
GRAPH = graph(linear(16, 64), linear(16, 64), model="bert", input_size=16)
GRAPHS_BY_KEY = dict.fromkeys(
    [KEY, KEY._replace(memory_format="channels_last"), KEY._replace(attention="eager")], GRAPH
)


def recording() -> Recording:
    cells = measured([("bert", batch, 5e-5 * batch) for batch in (1, 2, 4)], status="ok")
    return Recording("try", "two layers", cells, GRAPHS_BY_KEY, reasons={"isolated_ops": "no time"})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return recording().save(tmp_path / "try")


def test_what_is_saved_comes_back_and_is_saved_again_to_the_byte(saved: Path) -> None:
    back = load(saved)
    assert back.graphs == GRAPHS_BY_KEY
    assert back.reasons == {"isolated_ops": "no time"}
    assert (back.name, back.about) == ("try", "two layers")
    pd.testing.assert_frame_equal(back.table, recording().table)
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    assert before.keys() == {MANIFEST, TABLE, GRAPHS}
    back.save(saved)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before


def test_replay_needs_no_device(saved: Path) -> None:
    report = load(saved).replay(profile())
    assert report.overall.cells == 3
    # profile: 5 us fixed + 2 ops of 10 us + 2 kernels of 1 us floor and, at batch 1, little more
    assert report.cells["latency_s_predicted"][0] == pytest.approx(30e-6, rel=0.2)


@pytest.mark.parametrize("name", [TABLE, GRAPHS, MANIFEST])
def test_a_flipped_bit_is_noticed_and_a_missing_file_named(saved: Path, name: str) -> None:
    body = bytearray((saved / name).read_bytes())
    body[len(body) // 2] ^= 1
    (saved / name).write_bytes(bytes(body))
    with pytest.raises(RecordingError, match=r"was changed|is damaged|is no recording|holds what"):
        load(saved)
    (saved / name).unlink()
    with pytest.raises(RecordingError, match=name.replace(".", r"\.")):
        load(saved)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (TABLE, b"latency_s", b"latency_ms", "lacks latency_s"),
        (GRAPHS, b'"syncs":0', b'"syncs":NaN', "holds what no recording may hold"),
        (GRAPHS, b'"syncs"', b'"sinks"', "sinks"),
    ],
)
def test_a_forged_file_must_still_keep_its_schema(saved: Path, name: str, old: bytes, new: bytes, message: str) -> None:
    """Other contents, with every checksum made to fit."""
    body = (saved / name).read_bytes()
    packed = name == GRAPHS
    forged = (gzip.decompress(body) if packed else body).replace(old, new, 1)
    body = gzip.compress(forged) if packed else forged
    (saved / name).write_bytes(body)
    manifest = msgspec.json.decode((saved / MANIFEST).read_bytes(), type=Manifest)
    sha256 = {**manifest.sha256, name: hashlib.sha256(body).hexdigest()}
    (saved / MANIFEST).write_bytes(_encode(_signed(msgspec.structs.replace(manifest, sha256=sha256))))
    with pytest.raises(RecordingError, match=message):
        load(saved)


def test_another_version_is_said(saved: Path) -> None:
    manifest = json.loads((saved / MANIFEST).read_text())
    for extra, said in (({}, "version 2; latpred reads a latpred.recording of 1"), ({"extra": 1}, "a newer latpred")):
        (saved / MANIFEST).write_text(json.dumps({**manifest, "version": 2, **extra}))
        with pytest.raises(RecordingError, match=said):
            load(saved)


def test_what_is_no_recording(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"schema": "latpred.profile/1"}')
    with pytest.raises(RecordingError, match="missing required field"):
        load(tmp_path)
    with pytest.raises(RecordingError, match=r"There is no recording in .*, or a shipped one: epyc-genoa-compile, "):
        load(tmp_path / "nowhere")


def test_every_measured_model_needs_its_graph() -> None:
    with pytest.raises(RecordingError, match="No graph for vit"):
        Recording("x", "", measured([("vit", 1, 0.1)]), {KEY: GRAPH})
    failed = measured([("vit", 1, 0.1)], status="out of memory")
    assert len(Recording("x", "", failed, {}).table) == 1
    with pytest.raises(TableError, match="lacks stack"):
        Recording("x", "", measured([("bert", 1, 0.1)]).drop(columns="stack"), {KEY: GRAPH})
