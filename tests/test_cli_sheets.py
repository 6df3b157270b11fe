"""The command line around datasheets and hosts: what is listed, measured and refused."""

from __future__ import annotations

import json

import factories
import pytest
from click.testing import CliRunner, Result

from latpred.calibration import host_only
from latpred.cli import main
from latpred.profile import gpus, host_profile
from latpred.profile.host_profile import HOST_SCHEMA, HostProfile


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LATPRED_HOME", str(tmp_path))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def host(name: str) -> HostProfile:
    return HostProfile(
        name, "host", HOST_SCHEMA, "2026-01-02T03:04:05+00:00", factories.machine(), factories.dispatch(), 4.0
    )


def test_datasheets_are_listed() -> None:
    shown = run("profiles", "list", "--datasheets", "--json")
    document = json.loads(shown.stdout)
    assert document["schema"] == "latpred.datasheets/1"
    assert [row["name"] for row in document["datasheets"]] == list(gpus.names())
    assert all(row["source"] for row in document["datasheets"])
    assert "h200" in run("profiles", "list", "--datasheets").stdout


def test_hosts_are_listed() -> None:
    assert "latpred calibrate --host-only" in run("profiles", "list", "--hosts").stdout
    host_profile.save(host("laptop"))
    rows = json.loads(run("profiles", "list", "--hosts", "--json").stdout)["hosts"]
    assert [(row["name"], row["cpu"]) for row in rows] == [("laptop", "Example 9000")]


def test_host_only_measures_keeps_and_says_how_to_use_it(monkeypatch) -> None:
    def measured(name: str = "this-host") -> HostProfile:
        host_profile.save(host(name))
        return host(name)

    monkeypatch.setattr(host_only, "calibrate_host", measured)
    shown = run("calibrate", "--host-only")
    assert shown.exit_code == 0
    assert "--host this-host" in shown.stdout
    named = json.loads(run("calibrate", "--host-only", "--name", "laptop", "--json").stdout)
    assert (named["schema"], named["name"], named["costs_us"][""]) == ("latpred.host/1", "laptop", 7.0)
    assert host_profile.names() == ["laptop", "this-host"]


def test_measuring_knows_no_other_host() -> None:
    shown = run("measure", "resnet18", "--host", "1.3")
    assert (shown.exit_code, "--host means nothing" in shown.stderr) == (2, True)
