"""Whose a profile is: told by the hardware and the machine's id, not by names that clouds give to all machines."""

from __future__ import annotations

import msgspec
import pytest
from factories import graph, linear, machine_here
from profiledata import machine, profile

import latpred
from latpred import host
from latpred.profile import store
from latpred.profile.codec import _digest, decode, encode
from latpred.profile.store import Owner, caveat, owner

OLD = {"machine_id": "", "cpu_model": ""}  # as profiles were before


@pytest.fixture(autouse=True)
def _known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "machine_id", lambda: "a" * 16)
    monkeypatch.setattr(host, "cpu_model", lambda: "GenuineIntel 6-85-7 0123abcd")
    monkeypatch.setattr(host, "cpu_name", lambda: "Intel(R) Xeon(R) Processor")


def test_the_same_machine_is_this_one_under_any_name() -> None:
    assert owner(machine_here(hostname_hash="b" * 16)) is Owner.THIS
    assert owner(machine_here(memory_bytes=int(host.memory_bytes() * 1.01))) is Owner.THIS
    assert owner(machine_here(machine_id="")) is Owner.THIS
    assert caveat(machine_here()) == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cpu_model": "GenuineIntel 6-143-8 4567cdef"}, "model GenuineIntel 6-143-8 4567cdef, here GenuineIntel 6-85"),
        ({"cores": 1000}, "1000 cores, here "),
        ({"memory_bytes": 2**50}, "1048576.0 GiB of memory, here "),
        ({"cpu": "AMD EPYC"}, "AMD EPYC, here Intel"),
        ({"cores": 1000, **OLD}, "1000 cores, here "),
    ],
)
def test_other_hardware_is_another_machine_though_all_names_are_equal(changes: dict[str, object], said: str) -> None:
    found = machine(**changes)
    assert found.hostname_hash == host.hostname_hash()
    assert owner(found) is Owner.ANOTHER
    assert said in caveat(found)


def test_an_id_that_differs_is_another_machine_of_the_same_hardware() -> None:
    found = machine(machine_id="b" * 16)
    assert owner(found) is Owner.ALIKE
    assert caveat(found).startswith("measured on another machine of the same hardware (Intel(R) Xeon(R) Processor, ")


def test_an_older_profile_loads_and_says_that_it_may_be_anothers() -> None:
    store.save(profile(machine=machine(**OLD)))
    found = latpred.predict(graph(linear()))
    assert any(caveat.startswith("perhaps measured on another machine") for caveat in found.provenance.caveats)


def test_a_document_without_the_new_fields_is_read() -> None:
    document = msgspec.json.decode(encode(profile(machine=machine(**OLD))))
    for name in OLD:
        del document["machine"][name]
    del document["sha256"]
    document["sha256"] = _digest(document)
    read = decode(msgspec.json.encode(document), "old.json")
    assert store.owner(read.machine) is Owner.ALIKE


def test_another_number_of_threads_is_a_caveat(monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(profile(machine=machine(threads=2)))
    said = (
        "measured with 2 threads, but torch uses 1 here: make a profile for that with latpred calibrate --threads 1, "
        "or set torch.set_num_threads(2) where the model runs"
    )
    assert said in latpred.predict(graph(linear())).provenance.caveats
    assert said not in latpred.predict(graph(linear()), threads=2).provenance.caveats
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    assert said not in latpred.predict(graph(linear())).provenance.caveats
