"""The example about clusters gives one table on every engine: the only test of dask and of ray as backends."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from profiledata import profile

from latpred.profile import store


@pytest.mark.slow
def test_engines_started_here_give_the_serial_table(tmp_path: Path) -> None:
    packages = {"dask": "distributed", "ray": "ray"}
    wanted = [name for name, package in packages.items() if find_spec(package) is not None]
    if not wanted:
        pytest.skip("neither dask nor ray is installed")
    store.save(profile())
    table = tmp_path / "table.parquet"
    script = Path(__file__).parents[2] / "examples" / "search_cluster.py"
    asked = ["--candidates", "8", "--engines", ",".join(wanted), "--resume", str(table)]
    done = subprocess.run([sys.executable, script, *asked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plain = re.sub(r"\x1b\[\d+m", "", done.stdout)  # a busy Ray leaves the end of a colour behind
    # What Ray says of a busy machine comes in between.
    serial, *engines = (line for line in plain.splitlines() if line and not line.startswith("(raylet)"))
    assert re.fullmatch(r"serial +\d+\.\d candidates a second", serial)
    assert [line.split()[0] for line in engines] == wanted
    assert all(line.endswith("candidates a second, the same table") for line in engines)
    assert table.stat().st_size > 0
