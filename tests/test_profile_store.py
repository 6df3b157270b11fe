"""The profile store: round trips, whose a profile is, a sentence for everything that can be wrong with one."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from factories import graph, linear, machine_here
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiledata import kernel, machine, profile

import latpred
from latpred import host
from latpred.errors import NoProfileError, ProfileError
from latpred.profile import host_profile, store
from latpred.profile.document import (
    ADAPTED,
    BENCHMARK,
    CUDNN,
    OPENED,
    SCHEMA_VERSION,
    THREADS,
    DeviceInfo,
    decode,
    encode,
)
from latpred.profile.store import Owner, caveat, owner


def rewritten(change: Callable[[dict], None]) -> bytes:
    """A saved profile with its document changed and its checksum made right again."""
    document = json.loads(encode(profile()))
    change(document)
    body = {key: value for key, value in document.items() if key != "sha256"}
    document["sha256"] = hashlib.sha256(msgspec.json.encode(body, order="sorted")).hexdigest()
    return json.dumps(document).encode()


def refusal(data: bytes) -> str:
    with pytest.raises(ProfileError) as caught:
        decode(data, "p.json")
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_profiles_measured_in_several_ways_are_told_apart() -> None:
    store.save(profile())
    asked = profile("cpu-2-threads", machine=machine(threads=2), protocol={THREADS: "2, as asked for"})
    store.save(msgspec.structs.replace(asked, created="2026-05-01T00:00:00+00:00"))
    assert store.find().name == "cpu"  # although the other is newer
    assert store.find("cpu", threads=1).name == "cpu"
    assert store.find(threads=2).name == "cpu-2-threads"
    with pytest.raises(NoProfileError) as refused:
        store.find("cpu", threads=3)
    assert str(refused.value).startswith("no profile of cpu was measured with 3 threads (there is cpu")
    assert str(refused.value).endswith("Make one with: latpred calibrate --device cpu --threads 3")
    # A profile that is named is held to how it was measured.
    with pytest.raises(NoProfileError, match=r"measured with 4 threads \(there is cpu-2-threads: 2 threads\)"):
        store.find("cpu-2-threads", threads=4)
    with pytest.raises(NoProfileError, match=r"is of another machine, and holds for 1 thread\. Ask without --threads"):
        store.find("rtx-8000", threads=4)
    with pytest.raises(NoProfileError, match=r"profile 'h100' is of another machine\. Ask without --threads"):
        store.find("h100", threads=1)


def test_cudnn_benchmark_is_a_way_of_measuring() -> None:
    info = msgspec.structs.replace(profile().device, kind="cuda", name="gpu")
    plain = profile("gpu", device=info, protocol={CUDNN: "no benchmark"})
    store.save(plain)
    asked = r"cudnn.benchmark on .*latpred calibrate --device cuda:0 --cudnn-benchmark"
    with pytest.raises(NoProfileError, match=asked):
        store.find("cuda:0", cudnn_benchmark=True)
    store.save(profile("gpu-cudnn-benchmark", device=info, protocol={CUDNN: BENCHMARK}))
    assert store.find("cuda:0", cudnn_benchmark=True).name == "gpu-cudnn-benchmark"
    assert store.find(cudnn_benchmark=False).name == "gpu"
    assert store.find().name == "gpu"
    # Where it is all there is of a GPU, it answers with a caveat, unless it was meant.
    store.file_of("gpu").unlink()
    store.save(profile("cuda:0-cudnn-benchmark", device=info, protocol={CUDNN: BENCHMARK}))
    asks: list[dict[str, Any]] = [
        *({}, {"device": "cuda"}, {"device": "cuda:0"}),
        *({"cudnn_benchmark": True}, {"device": "cuda:0-cudnn-benchmark"}),
    ]
    said = [" ".join(latpred.predict(graph(linear()), **asked).provenance.caveats) for asked in asks]
    assert ["cudnn.benchmark on, which PyTorch has off" in one for one in said] == [True] * 3 + [False] * 2
    assert "make a profile without it: latpred calibrate --device cuda:0" in said[0]


def test_a_profile_prints_in_one_line() -> None:
    assert repr(store.load("rtx-8000")).startswith("DeviceProfile(rtx-8000, fitted from published measurements 2026-")
    assert repr(store.load("rtx-8000")).endswith(": eager, torchscript in fp32, fp16, gate passed)")


def test_what_is_saved_is_found_again() -> None:
    store.save(profile(seconds=1.0))
    path = store.save(profile())
    assert path == store.file_of("cpu")
    assert [*store.directory().iterdir()] == [path]
    for found in (store.find(), store.find("cpu"), store.load("cpu"), store.load(path)):
        assert msgspec.structs.replace(found, sha256="") == profile()


def test_a_write_that_fails_midway_keeps_the_old_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(profile(seconds=1.0))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(ProfileError, match=r"cannot write .*cpu\.json: No space left on device\. Make .* writable"):
        store.save(profile(seconds=2.0))
    assert [file.name for file in store.directory().iterdir()] == ["cpu.json"]
    assert store.find().seconds == 1.0


def test_without_a_profile_the_message_names_the_command() -> None:
    with pytest.raises(NoProfileError, match=r"latpred calibrate --device cpu --threads 3$"):
        store.find(threads=3)
    with pytest.raises(NoProfileError, match=r"latpred calibrate --device cuda:1 --cudnn-benchmark$"):
        store.find("cuda:1", cudnn_benchmark=True)
    with pytest.raises(NoProfileError, match=r"no profile of this machine in .*\. Make one with: latpred calibrate$"):
        store.find()
    with pytest.raises(NoProfileError, match=r"no profile of cuda:0 .*latpred calibrate --device cuda:0$"):
        store.find("cuda:0")
    # Settings tell which kind of device is meant, whatever others were measured.
    gpu = msgspec.structs.replace(profile().device, kind="cuda", name="gpu")
    store.save(profile("gpu", device=gpu))
    with pytest.raises(NoProfileError, match=r"no profile of cpu measured with 4 threads .* --device cpu --threads 4$"):
        store.find(threads=4)
    store.file_of("gpu").unlink()
    store.save(profile())
    for benchmark, said in ((True, r"on .* --device cuda --cudnn-benchmark$"), (False, r"off .* --device cuda$")):
        with pytest.raises(NoProfileError, match=rf"no profile of cuda measured with cudnn\.benchmark {said}"):
            store.find(cudnn_benchmark=benchmark)


NO_NAMES = ("", "..", ".hidden", "a/b", "a\0b", "mine.json", "a" * 251)  # of a file in the directory


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: store.load("workstatoin"), r"no profile is called 'workstatoin'\. Did you mean workstation\?"),
        (lambda: store.load("cpu"), r"no profile is called 'cpu'\. Did you mean cpu-2-threads\?"),
        (lambda: store.load("CUDA:0"), r"no profile is called 'CUDA:0'\. Did you mean cuda:0"),
        (lambda: store.load("h100x"), r"no profile is called 'h100x'\. Did you mean h100, "),
        (lambda: store.load("rtx 4009"), r"no profile is called 'rtx 4009'\. Did you mean .*rtx-4090"),
        (lambda: store.locate("h200"), "'h200' is known from its datasheet only"),
        (lambda: store.load("gone.json"), r"there is no profile at gone\.json\. List .* latpred profiles list"),
        (lambda: store.load(Path(".")), "cannot read .: Is a directory"),
        (lambda: store.find("a" * 300), r"'a+' cannot name a profile: it is too long\. Use a shorter one"),
        *[(partial(store.file_of, name), "cannot name a profile") for name in NO_NAMES],
        *[(partial(host_profile.path, name), "cannot name a host") for name in (*NO_NAMES, "1.3")],
    ],
)
def test_what_is_no_profile_is_said(ask: Callable[[], object], said: str) -> None:
    for name in ("workstation", "cpu-2-threads"):
        store.save(profile(name))
    with pytest.raises(ProfileError, match=said):
        ask()


def test_another_machines_profile_is_used_only_when_named() -> None:
    # Names do not make a machine this one: clouds call all processors the same.
    store.save(profile("server", machine=machine(cpu_model="GenuineIntel 6-143-8 01234567")))
    with pytest.raises(NoProfileError, match=r"another machine's can be named, as in --device server"):
        store.find()
    assert store.find("server").name == "server"
    # A file that is called as a device of this machine goes by its path alone.
    path = store.file_of("server").rename(store.file_of("cpu"))
    with pytest.raises(NoProfileError, match=rf"can be named, as in --device {re.escape(str(path))}\)"):
        store.find("cpu")
    assert store.find(path).name == "server"
    store.save(profile(machine=machine(hostname_hash="0" * 16, machine_id="")))  # as in a container of this one
    assert store.find().name == "cpu"


def test_this_machines_own_profile_comes_before_one_of_the_same_hardware() -> None:
    store.save(profile("node", created="2026-02-01T00:00:00+00:00", machine=machine(machine_id="0" * 16)))
    assert store.find().name == "node"
    store.save(profile("own", created="2026-01-01T00:00:00+00:00"))
    assert store.find().name == "own"


def test_the_gpu_comes_before_the_cpu_and_the_newest_before_the_older() -> None:
    gpu = DeviceInfo(name="nvidia-h200", kind="cuda", asynchronous=True, memory_bytes=2**37)
    store.save(profile("old", created="2025-01-01T00:00:00+00:00"))
    store.save(profile("new", created="2026-01-01T00:00:00+00:00"))
    assert store.find().name == "new"
    store.save(profile("simulated", device=msgspec.structs.replace(gpu, kind="simulated")))
    assert store.find().name == "new"
    assert store.find("simulated").name == "simulated"
    store.save(profile("gpu", device=gpu))
    assert store.find().name == "gpu"
    assert store.find("cuda:0").name == "gpu"
    assert store.find("cpu").name == "new"
    store.save(profile("lab", created="2026-02-01T00:00:00+00:00", device=gpu, protocol={OPENED: "cuda:2"}))
    assert [store.find(name).name for name in ("cuda:0", "cuda", "cuda:2")] == ["gpu", "gpu", "lab"]
    assert store.find().name == "lab"  # the newest of all GPUs
    with pytest.raises(NoProfileError, match=r"no profile of cuda:1 .*latpred calibrate --device cuda:1$"):
        store.find("cuda:1")
    assert [store.live_name(store.load(name)) for name in ("gpu", "lab", "new")] == ["cuda:0", "cuda:2", "cpu"]


def with_number(text: bytes) -> bytes:
    """A profile one of whose numbers is written otherwise."""
    return encode(profile()).replace(b"50000.0", text, 1)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        *[(encode(profile())[:end], "is damaged.* make a new one with: latpred calibrate$") for end in (1, 900, -3)],
        *[(data, "p.json is damaged") for data in (b"", b" \n", b"\x80\x04\x95\x00\x00")],
        *[(data, "p.json is JSON but not a profile") for data in (b"[1, 2]", b'"profile"', b"{}", b'{"schema": "1"}')],
        (with_number(b"50001.0"), "was altered after it was written: its sha256 does not match"),
        (with_number(b"1e999"), "p.json"),
        *[(with_number(name), "p.json is damaged") for name in (b"NaN", b"Infinity", b"-Infinity")],
        (
            rewritten(lambda document: document["device"].update(colour="red")),
            r"unknown field `colour`.*`\$\.device`.*newer latpred wrote it\. Install a newer latpred, or",
        ),
        (
            rewritten(lambda document: document["device"].update(memory_bytes="much")),
            r"Expected `int`, got `str`.*`\$\.device\.memory_bytes`",
        ),
        (rewritten(lambda document: document.pop("machine")), "missing required field `machine`"),
        (json.dumps({"schema": SCHEMA_VERSION}).encode(), "missing required field"),
        (b'{"schema": "latpred.profile/1", "profile": {}}', "copy that one"),
        (
            rewritten(lambda document: document.update(schema=0)),
            rf"has schema 0 and this latpred reads {SCHEMA_VERSION}\. Restore",
        ),
        (
            rewritten(lambda document: document.update(schema=99, hologram=True)),
            rf"has schema 99 and this latpred reads {SCHEMA_VERSION}\. Install a newer latpred, ",
        ),
    ],
)
def test_a_damaged_document_is_refused_in_a_sentence(data: bytes, said: str) -> None:
    assert re.search(said, refusal(data))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_flipped_bit_goes_unnoticed(data: st.DataObject) -> None:
    document = bytearray(encode(profile()))
    position = data.draw(st.integers(0, len(document) - 1))
    document[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        read = decode(bytes(document), "p.json")
    except ProfileError:
        return
    # A flip in white space (blank to tab) or in the case of a hexadecimal escape says the same thing.
    assert msgspec.structs.replace(read, sha256="") == profile()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_profile_that_is_not_finite_is_not_saved(number: float) -> None:
    broken = msgspec.structs.replace(kernel("gemm"), floor_us=number)
    with pytest.raises(ProfileError, match=r"a number is not finite: .*`\$\.kernels\[\.\.\.\]\[\.\.\.\]\.floor_us`"):
        store.save(profile(kernels={"fp32": {"gemm": broken}}))
    assert not store.directory().exists()


@pytest.mark.usefixtures("read_only_home")
def test_read_only_directory() -> None:
    with pytest.raises(ProfileError, match=r"Permission denied\. Make .* LATPRED_HOME=DIR"):
        store.save(profile())


def test_a_damaged_own_profile_is_not_passed_over_in_silence() -> None:
    store.save(profile()).write_bytes(b"{")
    with pytest.raises(ProfileError, match="is damaged") as caught:
        store.find()
    assert not isinstance(caught.value, NoProfileError)


def test_mismatch_is_said_in_sentences() -> None:
    assert store.mismatch(machine(), machine()) == []
    gpu, other = (machine(accelerator="H200", threads=threads) for threads in (1, 8))
    assert store.mismatch(gpu, other) == []  # a GPU's ops use none of them
    known, unknown = (machine(accelerator="H200", driver=driver) for driver in ("570.1", ""))
    assert store.mismatch(known, unknown) == store.mismatch(unknown, known) == []
    then = machine(stack={"python": "3.11.7", "torch": "2.13.0"})
    now = machine(
        cpu="Other CPU", accelerator="H200", threads=8, stack={"python": "3.11.7", "torch": "2.14.0", "timm": "1"}
    )
    assert store.mismatch(then, now) == [
        f"the host CPU is Other CPU, the profile's is {then.cpu}",
        "the accelerator is H200, the profile's is none",
        "the number of threads is 8, the profile's is 1",
        "torch is 2.14.0, the profile's is 2.13.0",
    ]


@pytest.mark.parametrize(
    ("name", "changes", "command"),
    [
        ("cpu", {}, "--device cpu"),
        ("my box", {}, "--device cpu --name 'my box'"),
        ("cpu-1-thread", {"protocol": {THREADS: "1, as asked for"}}, "--device cpu --threads 1 --name cpu-1-thread"),
        ("cpu-adapted", {"protocol": {ADAPTED: "from cpu"}}, "--device cpu"),
        ("cpu", {"provenance": "fitted from published measurements"}, "--device cpu"),
        ("server", {"machine": machine(cpu="Another CPU")}, "--device cpu"),
        ("gpu", {"kind": "cuda"}, "--device cuda:0 --name gpu"),
        ("lab", {"kind": "cuda", "protocol": {OPENED: "cuda:2"}}, "--device cuda:2 --name lab"),
        (
            "cuda:1-cudnn-benchmark",
            {"kind": "cuda", "protocol": {CUDNN: BENCHMARK, OPENED: "cuda:1"}},
            "--device cuda:1 --cudnn-benchmark --name cuda:1-cudnn-benchmark",
        ),
    ],
)
def test_a_profile_is_measured_again_by_a_command_of_its_own(name: str, changes: dict[str, Any], command: str) -> None:
    others = {key: value for key, value in changes.items() if key != "kind"}
    info = msgspec.structs.replace(profile().device, kind=changes.get("kind", "cpu"))
    assert store.calibration(profile(name, device=info, **others)) == f"latpred calibrate {command}"


@pytest.fixture
def _known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "machine_id", lambda: "a" * 16)
    monkeypatch.setattr(host, "cpu_model", lambda: "GenuineIntel 6-85-7 0123abcd")
    monkeypatch.setattr(host, "cpu_name", lambda: "Intel(R) Xeon(R) Processor")


@pytest.mark.usefixtures("_known_machine")
def test_the_same_machine_is_this_one_under_any_name() -> None:
    assert owner(machine_here(hostname_hash="b" * 16)) is Owner.THIS
    assert owner(machine_here(memory_bytes=int(host.memory_bytes() * 1.01))) is Owner.THIS
    assert owner(machine_here(machine_id="")) is Owner.THIS
    assert caveat(profile(machine=machine_here())) == ""
    another = caveat(profile(machine=machine(cpu="AMD EPYC", machine_id="b" * 16)))
    assert another.endswith("(AMD EPYC, here Intel(R) Xeon(R) Processor): times are those of that machine")
    alike = caveat(profile(machine=machine(machine_id="b" * 16)))
    assert alike.startswith("measured on another machine of the same hardware (Intel(R) Xeon(R) Processor, ")


@pytest.mark.usefixtures("_known_machine")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cpu_model": "GenuineIntel 6-143-8 4567cdef"}, "model GenuineIntel 6-143-8 4567cdef, here GenuineIntel 6-85"),
        ({"cores": 1000}, "1000 cores, here "),
        ({"memory_bytes": 2**50}, "1048576.0 GiB of memory, here "),
        ({"cpu": "AMD EPYC"}, "AMD EPYC, here Intel"),
        ({"cpu_model": ""}, "model unknown, here GenuineIntel 6-85"),
    ],
)
def test_other_hardware_is_another_machine_though_all_names_are_equal(changes: dict[str, object], said: str) -> None:
    found = machine(**changes)
    assert found.hostname_hash == host.hostname_hash()
    assert owner(found) is Owner.ANOTHER
    assert said in caveat(profile(machine=found))


@pytest.mark.usefixtures("_known_machine")
def test_another_number_of_threads_is_a_caveat(monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(profile(machine=machine(threads=2)))
    said = (
        "measured with 2 threads, but torch uses 1 here: make a profile for that with "
        "latpred calibrate --device cpu --threads 1, or set torch.set_num_threads(2) where the model runs"
    )
    assert said in latpred.predict(graph(linear())).provenance.caveats
    assert said not in latpred.predict(graph(linear()), threads=2).provenance.caveats
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    assert said not in latpred.predict(graph(linear())).provenance.caveats


def test_a_gpus_profile_has_a_file_where_names_may_hold_no_colon(monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.file_of("cuda:0").name == "cuda:0.json"
    monkeypatch.setattr(store, "os", SimpleNamespace(name="nt"))
    assert store.file_of("cuda:0").name == "cuda-0.json"


def test_a_system_that_tells_no_model_knows_its_own_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cpu_model", lambda: "")
    monkeypatch.setattr(host, "machine_id", lambda: "a" * 16)
    mine, foreign = (profile(machine=machine_here(**said)) for said in ({}, {"machine_id": "b" * 16}))
    store.save(mine)
    assert (store.name_here("cpu", "cpu"), caveat(mine)) == ("cpu", "")
    assert caveat(foreign).startswith("measured on another machine of the same hardware")


def test_a_name_that_another_machine_has_gets_digits_of_this_one() -> None:
    assert store.name_here("cpu", "cpu") == "cpu"
    store.save(profile())
    assert store.name_here("cpu", "cpu") == "cpu"
    store.save(profile(machine=machine(machine_id="0" * 16)))
    name = store.name_here("cpu", "cpu")
    store.save(profile(name))
    assert name == store.name_here("cpu", "cpu") == store.find("cpu").name == f"cpu-{host.short_id()}"


def test_a_name_that_another_device_of_this_machine_has_gets_the_name_of_the_device() -> None:
    assert store.name_here("cuda:0", "nvidia-h100") == "cuda:0"
    first = profile("cuda:0", device=msgspec.structs.replace(profile().device, name="nvidia-h100", kind="cuda"))
    store.save(first)
    assert store.name_here("cuda:0", "nvidia-h100") == "cuda:0"
    assert store.name_here("cuda:0", "nvidia-a100") == "cuda:0-nvidia-a100"
    store.save(msgspec.structs.replace(first, machine=machine(machine_id="0" * 16)))
    assert store.name_here("cuda:0", "nvidia-a100") == f"cuda:0-{host.short_id()}"
