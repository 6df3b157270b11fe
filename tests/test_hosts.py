"""Hosts: found by the names that others write, and swapped for another, which scales dispatch and no kernel."""

from __future__ import annotations

import math
from pathlib import Path

import factories
import msgspec
import numpy as np
import pytest

import latpred
from latpred.errors import HostError, UsageError
from latpred.prediction import host_swap
from latpred.profile import host_profile, hosts, store
from latpred.profile.document import DispatchFit
from latpred.profile.host_profile import HOST_SCHEMA, HostProfile
from latpred.profile.hosts import HOSTS, HostRow

EACH = pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("EPYC 7742", "EPYC 7742"),
        ("amd epyc-7742", "EPYC 7742"),
        ("AMD EPYC 7742 64-Core Processor", "EPYC 7742"),
        ("DGX A100 (datasheet: 2x EPYC 7742)", "EPYC 7742"),
        ("Intel(R) Xeon(R) CPU E5-2698 v4 @ 2.20GHz", "Xeon E5-2698 v4"),
        ("DGX-1", "Xeon E5-2698 v4"),
        ("Intel(R) Xeon(R) CPU E5-2670 0 @ 2.60GHz", "Xeon E5-2670"),
        ("xeon e5 2670 V2", "Xeon E5-2670 v2"),
        ("AWS g4dn.metal (2x Xeon Platinum 8259CL)", "Xeon Platinum 8259CL"),
        ("g4dn.xlarge", "Xeon Platinum 8259CL"),
        ("AWS g5.xlarge", "EPYC 7R32"),
        ("p5.48xlarge", "EPYC 7R13"),
        ("Standard_NC4as_T4_v3", "EPYC 7V12"),
        ("a2-highgpu-1g", "Xeon Platinum 8273CL"),
        ("Intel(R) Core(TM) i9-9900K CPU @ 3.60GHz", "Core i9-9900K"),
        ("AMD Ryzen 9 5950X 16-Core Processor", "Ryzen 9 5950X"),
        ("Intel(R) Xeon(R) Platinum 8480C", "Xeon Platinum 8480+"),
        # What only looks like a host is none.
        *((asked, None) for asked in ("Xeon E5-2670 v3", "Ryzen 9 7950X3D", "Intel(R) Xeon(R) CPU @ 2.20GHz")),
        *((asked, None) for asked in ("AMD EPYC", "12-core Intel CPU", "")),
        *((asked, None) for asked in ("HP Z8 G5", "ThinkStation P5", "PowerEdge p3 (lab)")),
    ],
)
def test_a_host_has_many_names(asked: str, name: str | None) -> None:
    host = hosts.find(asked)
    assert (host and host.name) == name


@EACH
def test_what_a_factor_rests_on_is_there(host: HostRow) -> None:
    assert host.basis_text
    assert (host.basis == "measured") == bool(host.measured_in)
    assert host.source
    assert (host.rating is None) == (host.rating_per_ghz is not None)
    if host.rating is None:
        assert host.boost_ghz
        assert host.basis == "clock"
    assert 1000 < host.speed < 5000
    assert 2010 < host.year < 2030
    assert host.boost_ghz is None or 2.5 < host.boost_ghz < 6.5
    assert 0.3 < host.factor < 3.0
    assert 0.05 < host.log_std < 0.6
    assert {hosts.find(name).name for name in (host.name, *host.aliases)} == {host.name}


CPU = factories.device(kind="cpu", asynchronous=False)
COSTS = {"view.transpose": 2.0, "view.reshape": 3.0, "view.slice": 4.0, "free.dropout": 1.0, "gemm.linear": 12.0}


def dispatch(factor: float = 1.0, kernels: float = 1.0) -> DispatchFit:
    """Costs of a host `factor` times slower, whose ops that launch kernels cost `kernels` times more than that."""
    costs = {name: us * factor * (kernels if name.startswith("gemm") else 1.0) for name, us in COSTS.items()}
    return DispatchFit(costs | {"view": 3.0 * factor, "": 5.0 * factor}, 3.0 * factor, 0.1 * factor, 10.0 * factor)


def measured(name: str, fit: DispatchFit, **machine: object) -> HostProfile:
    made = HostProfile(name, "host", HOST_SCHEMA, "2026-01-02T03:04:05+00:00", factories.machine(**machine), fit, 3.0)
    host_profile.save(made)
    return made


def device_profile(fit: DispatchFit) -> latpred.profile.DeviceProfile:
    return factories.profile(runtimes={"eager": fit, "torchscript": msgspec.structs.replace(fit, fixed_us=7.0)})


def network() -> latpred.ModelGraph:
    return factories.graph(*[op for _ in range(8) for op in (factories.linear(), factories.add(), factories.view())])


def test_only_dispatch_is_scaled() -> None:
    store.save(device_profile(dispatch()))
    plain = latpred.predict(network(), device="example")
    other = latpred.predict(network(), device="example", host=np.float32(2.0))
    assert other.overhead_ms == pytest.approx(2.0 * plain.overhead_ms)
    assert other.compute_ms == pytest.approx(plain.compute_ms)
    assert "dispatch is 2.00 times that of the profile's host" in other.provenance.caveats[0]
    ratio = [point.interval_ms[1] / point.interval_ms[0] for point in (plain, other)]
    assert ratio[1] > ratio[0]
    cold = msgspec.structs.replace(dispatch(), cold_costs_us={"": 6.0}, attribute_read_us=0.2)
    swapped = host_swap.swapped(device_profile(cold), host_swap.Swap(1.5, 0.1, "x"))
    assert swapped.runtimes["torchscript"].fixed_us == 10.5
    assert swapped.runtimes["eager"].cold_costs_us == {"": 9.0}
    assert swapped.runtimes["eager"].attribute_read_us == pytest.approx(0.3)


def test_a_measured_host_scales_by_what_both_were_measured_in() -> None:
    profile = device_profile(dispatch())
    measured("old-server", dispatch(1.7))
    found = host_swap.find("old-server", profile)
    assert found.factor == pytest.approx(1.7)
    assert "Example 9000" in found.caveat
    measured("EPYC 7742", dispatch(1.6))  # a user's own name comes before those of the table
    assert host_swap.find("EPYC 7742", profile).factor == pytest.approx(1.6)
    # On a CPU, ops that launch kernels hold the kernel and not the launch: what launches nothing tells.
    measured("cpu-server", dispatch(1.3, kernels=4.0))
    assert host_swap.find("cpu-server", profile).factor == pytest.approx(1.3)
    odd = dispatch(0.8)
    odd = msgspec.structs.replace(odd, costs_us=odd.costs_us | {"view.slice": 40.0, "view.reshape": 0.0})
    measured("odd", odd)
    found = host_swap.find("odd", profile)
    assert found.factor == pytest.approx(0.8)
    assert found.log_std >= host_swap.LEAST_LOG_STD


def test_a_host_measured_again_is_noticed(tmp_path: Path) -> None:
    def overhead_ms(host: Path | str | None = None) -> float:
        return latpred.predict(network(), device="example", host=host).overhead_ms

    store.save(device_profile(dispatch()))
    for factor in (1.7, 2.75):
        measured("old-server", dispatch(factor))
        assert overhead_ms("old-server") == pytest.approx(factor * overhead_ms())
        elsewhere = host_profile.path("old-server").rename(tmp_path / "host.json")
        assert overhead_ms(elsewhere) == pytest.approx(factor * overhead_ms())


def test_all_classes_tell_of_two_hosts_that_fed_no_gpu() -> None:
    def fit(factor: float, launch_us: float) -> DispatchFit:
        plain = dispatch(factor)
        costs = {f"gemm.{number}": launch_us for number in range(9)}
        return msgspec.structs.replace(plain, costs_us=plain.costs_us | costs | {"gemm": launch_us})

    gpu, cpu = device_profile(fit(1.0, 60.0)), factories.profile(CPU, runtimes={"eager": fit(1.0, 48.0)})
    measured("cpu-server", fit(2.5, 30.0))
    assert host_swap.find("cpu-server", gpu).factor == pytest.approx(2.5)  # what launches nothing
    assert host_swap.find("cpu-server", cpu).factor == pytest.approx(30.0 / 48.0)


def test_this_host_is_the_one_measured_here_else_the_cpu_profile_s() -> None:
    profile = device_profile(dispatch())
    with pytest.raises(HostError, match="latpred calibrate --host-only"):
        host_swap.find("this", profile)
    cpu = factories.profile(CPU, runtimes={"eager": dispatch(1.2)})
    store.save(msgspec.structs.replace(cpu, name="cpu", machine=factories.machine_here()))
    assert host_swap.find("this", profile).factor == pytest.approx(1.2)
    measured("elsewhere", dispatch(9.0))
    measured("here", dispatch(1.4), **msgspec.structs.asdict(factories.machine_here()))
    assert host_swap.find("this", profile).factor == pytest.approx(1.4)


def test_a_host_by_name_dispatches_alike_whatever_gpu_it_feeds() -> None:
    """Each fitted GPU has a middle host of its own; these differ by a third."""
    unnamed, named = [], []
    for device in ("rtx-a6000", "rtx-2080ti"):
        plain = latpred.predict("resnet-18", device=device)
        found = latpred.predict("resnet-18", device=device, host="AMD EPYC 7742 64-Core Processor")
        assert found.compute_ms == pytest.approx(plain.compute_ms)
        assert "EPYC 7742 (measured in published latencies)" in found.provenance.caveats[0]
        unnamed.append(plain.overhead_ms)
        named.append(found.overhead_ms)
    assert unnamed[0] < 0.8 * unnamed[1]
    assert named[0] == pytest.approx(named[1], rel=1e-3)
    factor = host_swap.find("EPYC 7742", store.load("h100")).factor
    row = hosts.find("EPYC 7742")
    assert factor == pytest.approx(row.factor)
    # The interval covers what its factor leaves open, and no more.
    profile = store.load("rtx-8000")
    swapped = host_swap.swapped(profile, host_swap.find("EPYC 7742", profile))
    assert {fit.host_spread for fit in swapped.runtimes.values()} == {row.log_std}
    assert row.log_std < profile.runtimes["eager"].host_spread


def test_a_measured_profile_is_compared_by_its_own_cpu() -> None:
    profile = device_profile(dispatch())
    with pytest.raises(HostError, match=r"Example 9000\) is not among the known hosts.*--host 1\.3"):
        host_swap.find("EPYC 7742", profile)
    known = msgspec.structs.replace(profile, machine=factories.machine(cpu="Intel(R) Xeon(R) CPU E5-2698 v4 @ 2.20GHz"))
    swap = host_swap.find("g4dn", known)
    mine, theirs = hosts.find("g4dn"), hosts.find("DGX-1")
    assert swap.factor == pytest.approx(mine.factor / theirs.factor)
    assert swap.log_std == pytest.approx(math.hypot(mine.log_std, theirs.log_std))


def test_an_unnamed_host_is_said_where_a_host_may_set_the_latency() -> None:
    def said(batch: object = 1, **asked: object) -> str:
        found = latpred.predict("resnet-18", batch=batch, device="rtx-8000", **asked)
        return " | ".join(caveat for caveat in found.setting.provenance.caveats if "--host" in caveat)

    caveat = said()
    assert caveat.startswith("dispatch is that of the middle of 11 published hosts; hosts known by name take ")
    factors = [host.factor for host in hosts.HOSTS]
    level = hosts.find("EPYC 7742").factor / host_swap.find("EPYC 7742", store.load("rtx-8000")).factor
    assert f"take {min(factors) / level:.1f} to {max(factors) / level:.1f} times as long" in caveat
    assert said(batch=[1, 512]) == caveat
    assert not said(batch=512)
    assert not said(runtime="cuda-graphs")
    assert not said(host=1.0)
    assert not said(host="EPYC 7742")
    others = latpred.predict("resnet-18", device="h100").provenance.caveats
    assert any("middle of the published hosts" in caveat for caveat in others)


def test_factors_and_names_that_are_none() -> None:
    profile = device_profile(dispatch())
    for wrong in (0.0, -1.0, "nan", 1e6):
        with pytest.raises(UsageError, match=r"--host 1\.3"):
            host_swap.find(wrong, profile)
    measured("old-server", dispatch(1.7))
    with pytest.raises(HostError, match=r"'old-sever'\. Did you mean old-server\?"):
        host_swap.find("old-sever", profile)
    with pytest.raises(HostError, match=r"'EPYC 7743'\. Did you mean .*EPYC 7742.*--host 1\.3.*calibrate --host-only"):
        host_swap.find("EPYC 7743", profile)
    with pytest.raises(HostError, match="latpred profiles list --hosts"):
        host_swap.find("a toaster", profile)
    few = msgspec.structs.replace(dispatch(), costs_us={"view.transpose": 1.0})
    with pytest.raises(HostError, match="share 3 dispatch classes"):
        host_swap.ratio(few, dispatch(), no_launch=True)


def test_a_damaged_host_profile_says_so() -> None:
    made = measured("laptop", dispatch())
    assert host_profile.load("laptop") == made
    host_profile.path("laptop").write_text('{"name": "laptop"}')
    with pytest.raises(HostError, match="is not a host profile"):
        host_profile.load("laptop")
    assert host_profile.listing() == []
