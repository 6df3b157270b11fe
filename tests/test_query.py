"""What is asked: batches, options, devices, and lengths in their two forms, with a sentence for each mistake."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

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


def test_the_same_question_has_the_same_answer() -> None:
    assert Lengths(20.92, 10.18, 128).of(7) == Lengths(20.92, 10.18, 128).of(7)


def test_without_deviation_all_are_alike() -> None:
    assert Lengths(12, 0, 40).of(3) == (12, 12, 12)


def test_given_lengths_are_the_batch() -> None:
    given = checked_lengths([12, 40, 7])
    assert given.of(3) == (12, 40, 7)
    assert given.padded_to == 40


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([], "list of lengths is empty"),
        ([12, 0], "length of 0 is not possible"),
        ([12, -3], "length of -3 is not possible"),
        ([12, 3.5], "3.5 is not a whole number"),
        ([True], "True is not a whole number"),
        ("12,40", "are not lengths"),
        (12, "are not lengths"),
    ],
)
def test_wrong_lists(lengths: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        checked_lengths(lengths)


def test_a_batch_that_contradicts() -> None:
    with pytest.raises(UsageError, match="3 lengths are a batch of 3, not of 8"):
        checked_lengths([12, 40, 7]).of(8)


@pytest.mark.parametrize(
    ("mean", "std", "padded_to", "said"),
    [
        (200, 10, 128, "mean of 200 tokens is not possible"),
        (0.5, 0.1, 128, "mean of 0.5 tokens is not possible"),
        (20, 60, 128, "cannot have a standard deviation of 60; give one from 0 to 45.3"),
        (20, -1, 128, "cannot have a standard deviation of -1"),
        (20, 5, 0, "padded_to of 0 is not possible"),
        (20, 5, 12.5, "12.5 is not a whole number"),
        (float("nan"), 5, 128, "mean=nan is not a number"),
        ("20", 5, 128, "mean='20' is not a number"),
    ],
)
def test_wrong_distributions(mean: Any, std: Any, padded_to: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Lengths(mean=mean, std=std, padded_to=padded_to)


@pytest.mark.parametrize(
    "text", ["", "twelve", "mean=20", "mean=20,std=3,pad=4.5", "mean=20,std=3,pad=40,seed=1", "1,,2"]
)
def test_texts_that_are_no_lengths(text: str) -> None:
    with pytest.raises(ValueError, match=r"are not lengths; write 12,40,7 or mean=20\.92,std=10\.18,pad=128"):
        parse_lengths(text)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (0, "smallest batch is 1"),
        (-3, "smallest batch is 1"),
        ([4, 0], "smallest batch is 1"),
        (2.5, "not a whole number"),
        (True, "not a whole number"),
        (np.array([True]), "not a whole number"),
        ("8", "not a whole number"),
        ([], "names no batch size"),
        (10**9, "the largest that is predicted"),
    ],
)
def test_impossible_batches(batch: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        checked_batches(batch)


def test_one_batch_and_several() -> None:
    assert checked_batches(8) == (8,)
    assert checked_batches(np.int64(8)) == (8,)
    assert checked_batches(range(1, 3)) == checked_batches(np.array([1, 2])) == (1, 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"protocol": "double"}, "protocol='double' is not known; choose from: single, pipelined"),
        ({"inputs_on": "disk"}, "inputs_on='disk' is not known"),
    ],
)
def test_options_that_are_none(options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Options(**options)  # type: ignore[arg-type]


def test_a_device_goes_by_its_name_or_its_path() -> None:
    assert DeviceQuery(torch.device("cuda", 0)) == DeviceQuery("cuda:0") != DeviceQuery(Path("cuda:0"))
