"""Hosts by name: found as makers, kernels, papers and clouds write them, with figures that agree with each other."""

from __future__ import annotations

import pytest

from latpred.errors import HostError
from latpred.profile import hosts
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
        ("Standard_NC4as_T4_v3", "EPYC 7V12"),
        ("a2-highgpu-1g", "Xeon Platinum 8273CL"),
        ("Intel(R) Core(TM) i9-9900K CPU @ 3.60GHz", "Core i9-9900K"),
        ("AMD Ryzen 9 5950X 16-Core Processor", "Ryzen 9 5950X"),
        ("Intel(R) Xeon(R) Platinum 8480C", "Xeon Platinum 8480+"),
        # What only looks like a host is none.
        *((asked, None) for asked in ("Xeon E5-2670 v3", "Ryzen 9 7950X3D", "Intel(R) Xeon(R) CPU @ 2.20GHz")),
        *((asked, None) for asked in ("AMD EPYC", "12-core Intel CPU", "")),
    ],
)
def test_a_host_has_many_names(asked: str, name: str | None) -> None:
    assert (hosts.find(asked).name if hosts.known(asked) else None) == name


def test_an_unknown_host_is_told_what_is_near() -> None:
    with pytest.raises(HostError, match=r"'EPYC 7743'\. Did you mean .*EPYC 7742"):
        hosts.find("EPYC 7743")
    with pytest.raises(HostError, match="latpred profiles list --hosts"):
        hosts.find("a toaster")


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


def test_twice_the_rating_is_half_the_factor() -> None:
    for makers in (("EPYC", "Ryzen"), ("Xeon", "Core")):
        rated = [host for host in HOSTS if not (host.measured_in or host.like) and host.name.startswith(makers)]
        products = [host.factor * host.speed for host in rated]
        assert max(products) / min(products) < 1.02


def test_hosts_of_one_architecture_differ_by_their_clocks() -> None:
    siblings = [host for host in HOSTS if host.like]
    assert {"EPYC 7232P", "EPYC 7V12"} < {host.name for host in siblings}
    for host in siblings:
        like = hosts.find(host.like)
        assert (like.basis, like.architecture) == ("measured", host.architecture)
        assert host.factor * (host.boost_ghz or 0) == pytest.approx(like.factor * (like.boost_ghz or 0), rel=0.01)
        assert host.log_std > like.log_std
