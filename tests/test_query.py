"""What is asked: batches, options, devices, and lengths in their two forms, with a sentence for each mistake."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from latpred.errors import UsageError
from latpred.query import DeviceQuery, Lengths, Options, checked_batches, checked_lengths, parse_lengths


def test_a_typical_batch_has_the_mean_and_the_deviation_asked_for() -> None:
    lengths = Lengths(mean=20.92, std=10.18, padded_to=128).of(128)
    assert statistics.mean(lengths) == pytest.approx(20.92, rel=0.02)
    assert statistics.pstdev(lengths) == pytest.approx(10.18, rel=0.05)
    assert min(lengths) >= 1
    assert max(lengths) < 60
    assert Lengths(12, 0, 40).of(3) == (12, 12, 12)
    numbers = Lengths(np.float32(12), np.int64(0), np.int64(40))  # type: ignore[arg-type]
    assert [type(value) for value in (numbers.mean, numbers.std, numbers.padded_to)] == [float, float, int]
    given = checked_lengths([12, 40, 7])
    assert (given.of(3), given.padded_to) == ((12, 40, 7), 40)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: checked_lengths([]), "list of lengths is empty"),
        (lambda: DeviceQuery(host="EPYC 7742", now=True), "is another host, whose present speed cannot be timed here"),
        (lambda: checked_lengths([12, 0]), "length=0 is not a number of tokens"),
        (lambda: checked_lengths([12, 3.5]), "length=3.5 is not a number of tokens"),
        (lambda: checked_lengths("12,40"), "are not lengths"),
        (lambda: checked_lengths(12), "are not lengths"),
        (lambda: checked_lengths([12, 40, 7]).of(8), "3 lengths are a batch of 3, not of 8"),
        (lambda: Lengths(200, 10, 128), "mean of 200 tokens is not possible"),
        (lambda: Lengths(20, 60, 128), "cannot have a standard deviation of 60; give one from 0 to 45.3"),
        (lambda: Lengths(20, -1, 128), "cannot have a standard deviation of -1"),
        (lambda: Lengths(20, 5, 0), "padded_to=0 is not a number of tokens"),
        (lambda: Lengths(float("nan"), 5, 128), "mean=nan is not a number"),
        (lambda: Lengths("20", 5, 128), "mean='20' is not a number"),
        (lambda: checked_batches(0), "smallest batch is 1"),
        (lambda: checked_batches([4, 0]), "smallest batch is 1"),
        (lambda: checked_batches(2.5), "not a whole number"),
        (lambda: checked_batches(True), "not a whole number"),
        (lambda: checked_batches("8"), "not a whole number"),
        (lambda: checked_batches([]), "names no batch size"),
        (lambda: checked_batches(10**9), "the largest that is predicted"),
        (lambda: Options(protocol="double"), "protocol='double' is not known; choose from: single, pipelined"),
        (lambda: Options(inputs_on="disk"), "inputs_on='disk' is not known"),
    ],
)
def test_what_cannot_be_asked(ask: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ask()


@pytest.mark.parametrize(
    "text", ["", "twelve", "mean=20", "mean=20,std=3,pad=4.5", "mean=20,std=3,pad=40,seed=1", "1,,2"]
)
def test_texts_that_are_no_lengths(text: str) -> None:
    with pytest.raises(ValueError, match=r"are not lengths; write 12,40,7 or mean=20\.92,std=10\.18,pad=128"):
        parse_lengths(text)


def test_one_batch_and_several() -> None:
    assert checked_batches(8) == (8,)
    assert checked_batches(np.int64(8)) == (8,)
    assert checked_batches(range(1, 3)) == checked_batches(np.array([1, 2])) == checked_batches([1, 2, 1]) == (1, 2)


def test_a_device_goes_by_its_name_or_its_path() -> None:
    assert DeviceQuery(torch.device("cuda", 0)) == DeviceQuery("cuda:0") != DeviceQuery(Path("cuda:0"))
    assert DeviceQuery(torch.device("cpu", 0)) == DeviceQuery("cpu") != DeviceQuery(Path("cpu:0"))
    assert DeviceQuery(host="this", now=True).now
