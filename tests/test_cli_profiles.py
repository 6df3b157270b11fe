"""profiles, cache and doctor through the command line."""

from __future__ import annotations

import csv
import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from clidata import document, run, saved_host
from profiledata import machine, profile

from latpred import host
from latpred.calibration.timing import disturbance
from latpred.cli import doctor
from latpred.profile import gpus, store
from latpred.profile.document import THREADS
from latpred.profile.hosts import HOSTS
from latpred.runtimes.onnx import onnx_session
from latpred.zoo import names


def test_profiles_list_show_and_path() -> None:
    empty = run("profiles", "list")
    assert "shipped" in empty.stdout
    assert "make one with: latpred calibrate" in empty.stdout
    path = store.save(profile())
    listed = run("profiles", "list")
    assert listed.stdout.splitlines()[0].split() == ["name", "source", "device", "host", "calibrated", "state"]
    assert "make one with" not in listed.stdout
    assert "cpu: cpu, 1 thread, calibrated" in run("profiles", "show", "cpu").stdout
    assert run("profiles", "path", "cpu").stdout == f"{path}\n"
    assert run("profiles", "path").stdout == f"{store.directory()}\n"
    misspelt = run("profiles", "show", "cpuu")
    assert (misspelt.exit_code, "Did you mean cpu?" in misspelt.stderr) == (3, True)


def test_a_device_stands_for_its_profile_whatever_that_is_called() -> None:
    missing = run("profiles", "path", "cpu")
    assert (missing.exit_code, "Make one with: latpred calibrate --device cpu" in missing.stderr) == (3, True)
    path = store.save(profile("cpu-1-thread"))
    assert run("profiles", "path", "cpu").stdout == f"{path}\n"
    assert "cpu-1-thread: cpu, 1 thread" in run("profiles", "show", "cpu").stdout


def test_profiles_are_renamed_and_deleted() -> None:
    store.save(profile("one"))
    store.save(profile("two"))
    assert run("profiles", "rename", "one", "three").stdout == f"{store.file_of('three')}\n"
    assert (store.load("three").name, store.file_of("one").exists()) == ("three", False)
    taken, shipped = run("profiles", "rename", "two", "three"), run("profiles", "delete", "a100")
    assert (taken.exit_code, "is the name of another profile" in taken.stderr) == (3, True)
    assert (shipped.exit_code, "ships with latpred" in shipped.stderr) == (3, True)
    store.file_of("three").write_text("{")  # which nobody can read, and anybody may delete
    assert run("profiles", "delete", "three").stdout == f"deleted {store.file_of('three')}\n"
    assert [entry.name for entry in store.listing() if entry.source == "user"] == ["two"]
    assert "Did you mean two?" in run("profiles", "delete", "twoo").stderr


def test_profiles_as_json_and_csv() -> None:
    store.save(profile("good"))
    store.file_of("bad").write_text("{")
    listed = document("profiles", "list")
    assert listed["schema"] == "latpred.profiles/1"
    own = {entry["name"]: entry for entry in listed["profiles"] if entry["source"] == "user"}
    assert own["good"]["passed"] is True
    assert "is cut short" in own["bad"]["problem"]
    rows = list(csv.DictReader(io.StringIO(run("profiles", "list", "--csv").stdout)))
    assert {row["name"] for row in rows if row["source"] == "user"} == {"good", "bad"}
    shown = document("profiles", "show", "good")
    assert list(shown) == ["schema", "profile"]
    assert shown["profile"]["kernels"]["fp32"]["gemm"]["macs_per_us"] == 50_000.0


def test_datasheets_and_hosts_are_listed() -> None:
    datasheets = document("profiles", "list", "--datasheets")
    assert datasheets["schema"] == "latpred.datasheets/1"
    assert [row["name"] for row in datasheets["datasheets"]] == [spec.name for spec in gpus.SPECS]
    assert "h200" in run("profiles", "list", "--datasheets").stdout
    saved_host("laptop")
    rows = document("profiles", "list", "--hosts")["hosts"]
    assert (rows[0]["name"], rows[0]["cpu"]) == ("laptop", "Example 9000")
    assert [row["name"] for row in rows[1:]] == [host.name for host in HOSTS]
    assert all(row["interval"][0] < row["factor"] < row["interval"][1] and row["source"] for row in rows[1:])
    shown = run("profiles", "list", "--hosts").stdout
    for said in ("by you on", "EPYC 7742", "PassMark"):
        assert said in shown


def test_the_cache_is_shown_and_cleared_and_profiles_stay(latpred_home: Path) -> None:
    store.save(profile())
    folder = latpred_home / "cache" / "graphs"
    folder.mkdir(parents=True)
    (folder / "a.json").write_bytes(b"x" * 2048)
    shown = document("cache", "show")
    assert (shown["schema"], shown["files"], shown["bytes"]) == ("latpred.cache/1", 1, 2048)
    assert run("cache", "clear").stdout == f"removed 1 files, 2.00 KiB, from {latpred_home / 'cache'}\n"
    assert document("cache", "show")["files"] == 0
    assert store.find().name == "cpu"


def test_a_cache_that_is_a_link_stays_one(latpred_home: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"x" * 1024)
    (tmp_path / "file").symlink_to(tmp_path)
    (latpred_home / "cache").symlink_to(tmp_path)
    assert run("cache", "clear").stdout.startswith("removed 2 files, ")
    assert ([*tmp_path.iterdir()], (latpred_home / "cache").is_symlink()) == ([], True)


@pytest.mark.parametrize("command", ["profiles list", "profiles list --hosts", "cache show", "cache clear"])
def test_a_home_that_cannot_be_looked_into_is_said_to_be(command: str, request: pytest.FixtureRequest) -> None:
    assert run(*command.split()).exit_code == 0
    home = request.getfixturevalue("shut_home")  # only now: what the verb imports must be read first
    shown = run(*command.split())
    assert (shown.exit_code, shown.stdout) == (3, "")
    assert shown.stderr.startswith(f"latpred: cannot look into {home}/")
    assert "Permission denied. Make it readable, or choose another directory with LATPRED_HOME=DIR." in shown.stderr


@pytest.mark.usefixtures("read_only_home")
def test_a_cache_that_cannot_be_deleted() -> None:
    shown = run("cache", "clear")
    assert shown.exit_code == 3
    assert "Permission denied. Make it writable, or choose another directory with LATPRED_HOME=DIR." in shown.stderr


def findings(exit_code: int) -> dict[str, dict[str, str]]:
    """What doctor says, by topic."""
    shown = run("doctor", "--json")
    assert shown.exit_code == exit_code
    return {finding["topic"]: finding for finding in json.loads(shown.stdout)["findings"]}


def test_doctor_says_what_is_missing_what_differs_and_what_is_broken(request: pytest.FixtureRequest) -> None:
    assert findings(0)["profile"]["advice"] == "latpred calibrate"
    assert "→ latpred calibrate" in run("doctor").stdout
    store.save(profile(machine=machine(stack={"torch": "2.11.0"})))
    store.file_of("bad").write_text("")
    found = findings(3)
    assert found["profile bad"]["verdict"] == "fail"
    assert "the profile's is 2.11.0" in found["profile cpu"]["detail"]
    request.getfixturevalue("read_only_home")  # only now: what doctor imports must be read first
    advice = findings(3)["profiles directory"]["advice"]
    assert advice == "make it writable, or choose another with LATPRED_HOME=DIR"


@pytest.mark.parametrize(("protocol", "differs"), [({}, True), ({THREADS: "as asked for"}, False)])
def test_doctor_says_that_torch_uses_threads_nobody_asked_for(protocol: dict[str, str], differs: bool) -> None:
    store.save(profile(machine=machine(threads=torch.get_num_threads() + 1), protocol=protocol))
    assert ("the number of threads is" in findings(0)["profile cpu"]["detail"]) == differs


def test_a_home_that_cannot_be_looked_into_is_a_finding(request: pytest.FixtureRequest) -> None:
    findings(0)
    request.getfixturevalue("shut_home")
    assert findings(3)["profiles directory"]["verdict"] == "fail"


def test_a_machine_without_a_folder_for_temporary_files_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gettempdir", Mock(side_effect=FileNotFoundError))
    assert findings(3)["temporary files"]["advice"] == "name one with TMPDIR=DIR"


NOTE = "the machine runs on battery"
BUSY = "other work used 0.9 processors"


@pytest.mark.parametrize(
    ("busy", "threads", "notes", "said", "advice"),
    [
        ("", 4, [], "", ""),
        (BUSY, 1, [], f"; {BUSY}", doctor.STOP),
        ("", 1, [NOTE], f"; {NOTE}", doctor.POWER),
        (BUSY, 1, [NOTE], f"; {BUSY}; {NOTE}", f"{doctor.STOP}; {doctor.POWER}"),
        ("", 64, [], "; PyTorch uses 64 threads, which wait for one another", "set OMP_NUM_THREADS=4"),
    ],
)
def test_processors(
    busy: str, threads: int, notes: list[str], said: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(host, "usable_cores", lambda: 4)
    monkeypatch.setattr(disturbance, "busy_now", lambda: busy)
    monkeypatch.setattr(host, "power_notes", lambda: notes)
    found = doctor._processor()
    assert (found.topic, found.verdict, found.advice) == ("cpu", "note" if said else "ok", advice)
    assert found.detail.partition(" cores")[2].removeprefix(", 4 of them for this process") == said


def test_doctor_without_a_torch_that_loads_still_has_a_line_for_everything(tmp_path: Path) -> None:
    store.save(profile())
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcublas.so.12: cannot open')")
    script = "from latpred.cli import main; main(['doctor', '--json'])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 3, done.stderr
    found = {finding["topic"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert [found[topic]["verdict"] for topic in ("torch", "cuda", "profile cpu")] == ["fail", "ok", "note"]
    assert "libcublas.so.12" in found["profile cpu"]["detail"]


@pytest.mark.parametrize(("name", "verdict"), [("torchvision", "note"), ("onnxruntime", "note"), ("scipy", "fail")])
def test_a_package_that_cannot_be_imported_is_not_ok(name: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: str, *_: object) -> object:
        if module.partition(".")[0] == name:
            raise RuntimeError("operator torchvision::nms does not exist" if name == "torchvision" else "no BLAS")
        return real(module)

    real = importlib.import_module
    monkeypatch.setattr(doctor, "import_module", refuse)
    monkeypatch.setattr(names, "import_module", refuse)
    monkeypatch.setattr(onnx_session, "import_module", refuse)
    found = {finding.topic: finding for finding in doctor.examine()}[name]
    assert found.verdict == verdict
    assert "cannot be" in found.detail
    assert "install" in found.advice
    assert ("does not fit the installed torch" in found.detail) == (name == "torchvision")
