"""Clock constants, found from outside a device that knows its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from latpred.calibration.devices import constants
from latpred.calibration.devices.simulated import SimulatedDevice, SimulatedSpec, TrueCosts
from latpred.errors import CalibrationError


@pytest.mark.parametrize("seed", range(20))
def test_constants_come_back_within_two_percent(seed):
    device = SimulatedDevice(SimulatedSpec(seed=seed, noise=0.02, spikes=0.01))
    truth, found = device.true_costs(), constants.measure(device)
    assert found.launch_us == pytest.approx(truth.launch_us, rel=0.02)
    assert found.gap_us == pytest.approx(truth.gap_us, rel=0.02)
    assert found.sync_us == pytest.approx(truth.sync_us, rel=0.02)
    assert found.floor_us == pytest.approx(truth.law("elementwise").floor_us, rel=0.02)
    assert found.node_gap_us == pytest.approx(truth.node_gap_us, rel=0.04)
    assert found.dispatch_us == pytest.approx(truth.dispatch("elementwise"), rel=0.02)
    assert found.queue == device.spec.queue
    assert found.stable


@pytest.mark.parametrize("queue", [37, 1024, 3000])
def test_queue_depth_is_found_whatever_it_is(queue):
    assert constants.measure(SimulatedDevice(SimulatedSpec(queue=queue))).queue == queue


def test_constants_of_another_device_come_back_too():
    truth = TrueCosts(launch_us=9.0, gap_us=0.9, sync_us=11.0, node_gap_us=0.5)
    found = constants.measure(SimulatedDevice(SimulatedSpec(seed=5, costs=truth)))
    assert (found.launch_us, found.sync_us) == pytest.approx((9.0, 11.0), rel=0.02)
    assert found.gap_us == pytest.approx(0.9, rel=0.05)


def test_what_reading_the_clock_costs_is_not_taken_for_synchronisation():
    slow = SimulatedDevice(SimulatedSpec(clock_us=0.8))
    found, truth = constants.measure(slow), slow.true_costs()
    assert found.sync_us == pytest.approx(truth.sync_us, rel=0.02)
    assert found.launch_us == pytest.approx(truth.launch_us, rel=0.02)


def test_what_was_seen_of_a_lone_kernel_and_of_a_queue_is_kept_whole():
    # Were the marker to travel faster than a kernel, the constants would shift, but no latency made of them.
    fast = replace(TrueCosts(), mark_us=0.1)
    device = SimulatedDevice(SimulatedSpec(noise=0.0, spikes=0.0, drift=0.0, clock_us=0.0, costs=fast))
    found = constants.measure(device)
    assert found.launch_us + found.floor_us + found.sync_us == pytest.approx(4.0 + 1.8 + 3.0)
    assert found.floor_us + found.gap_us == pytest.approx(1.8 + 1.2)


def test_endless_queue_is_reported_not_guessed():
    with pytest.raises(CalibrationError, match="never waited for simulated, though 16384 launches"):
        constants.measure(SimulatedDevice(SimulatedSpec(queue=10**6)))


def test_synchronous_device_has_no_clock_of_its_own():
    class Synchronous:
        name, asynchronous = "cpu", False

    assert constants.measure(Synchronous()) == constants.Clocks()


def test_constants_go_into_the_device_description():
    info = constants.Clocks(launch_us=1.0, gap_us=2.0, sync_us=3.0, queue=4).into(SimulatedDevice().info())
    assert (info.launch_us, info.gap_us, info.sync_us, info.queue) == (1.0, 2.0, 3.0, 4)
