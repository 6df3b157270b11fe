"""A sentence on stderr and an exit code for every command that cannot be done."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from clidata import models_file, run
from factories import device, dispatch
from profiledata import profile
from test_cli_measure import study_plan

from latpred.calibration.measurement import recorder
from latpred.profile import store

PICTURE = "{models}:picture --image 8"
GENERATE = "generate {models}:gpt2 --prompt 6"
NONE_YET = "--device cuda:0 --yes"
STUDY = "--suite paper --device simulated"
UNEQUAL = "predict distilbert-base-uncased --lengths"
ON_A_PROFILE = ("predict", "curve", "rank", "timeline", "explain", "report")
NEAREST = "No runtime is called 'onnxruntim'. Did you mean 'onnxruntime'"


@pytest.fixture(autouse=True)
def known(calibrated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles of this machine and of a simulated GPU, a small study, and no CUDA."""
    costs = {"eager": profile().runtimes["eager"], "cuda-graphs": dispatch(costs_us={"": 3.0}, spread=0.05)}
    store.save(profile("gpu", device=device(), runtimes=costs))
    monkeypatch.setattr(recorder, "plan", study_plan)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)


@pytest.mark.parametrize(
    ("command", "exit_code", "sentence"),
    [
        ("predcit", 2, "No such command 'predcit'. Did you mean 'predict'?"),
        ("predict resnet18 --batch=0", 2, "'0' asks for batch 0; the smallest batch is 1."),
        ("predict resnet18 --batch=8-4", 2, "'8-4' ends before it starts; write 4-8."),
        ("explain resnet18 --batch=1-999999999999", 2, "names more batch sizes than 1; give fewer."),
        ("predict resnet18 --seq 8 --batch 1 --seq 9", 2, "--seq takes one value and is given 2 times; give one."),
        ("predict resnet18 resnet34", 2, "Got unexpected extra argument (resnet34)"),
        (f"predict {PICTURE} -d CPU", 3, "no profile is called 'CPU'. Did you mean cpu"),
        (f"predict {PICTURE} -d cpu --runtime ort", 2, "No runtime is called 'ort'. Did you mean 'onnxruntime'?"),
        ("calibrate --budget=0", 2, "is not a time to spend; write 90s, 5m or 1h."),
        ("predict {models}:broken --image 8", 2, "broken failed: ValueError: no such layer"),
        ("predict {models}:Mismatched --image 8", 2, "the forward pass failed at aten::linear in module 'head'"),
        (f"predict {PICTURE} --batch 99999999", 2, "Batch 99999999 is beyond anything a device holds"),
        (f"predict {PICTURE} --runtime torchscript", 3, "latpred calibrate --device cpu --runtimes torchscript"),
        (f"predict {PICTURE} --precision fp16", 3, "no kernels in fp16 (it has: fp32)"),
        (f"predict {PICTURE} --device {{models}}", 3, "models.py is damaged: JSON is malformed"),
        (f"predict {PICTURE} --execution packed", 2, "unequal lengths; give lengths= (--lengths) too"),
        (f"{UNEQUAL} 12,7 --channels-last", 2, "have no channels; leave out memory_format (--channels-last)"),
        (f"{UNEQUAL} 12,40,7 --batch 1 -d cpu", 2, "3 lengths are a batch of 3, not of 1; leave batch out"),
        (f"{UNEQUAL} 12,7 --strict", 2, "--strict looks at models whose inputs are alike; leave it out, or --lengths"),
        (f"predict {PICTURE} -d cpu --cudnn-benchmark", 3, "cudnn runs on CUDA devices only"),
        (f"predict {PICTURE} -d a100 --precision amp-fp16 --runtime torchscript", 2, "does not run models under"),
        (f"predict {PICTURE} --runtime torchscript {NONE_YET}", 3, "--device cuda:0 --runtimes torchscript"),
        (f"predict bert-bas-uncased {NONE_YET}", 2, "did you mean bert-base-uncased"),
        (f"predict {PICTURE} {NONE_YET}", 3, "no CUDA device here"),
        ("calibrate -d cuda:0", 3, "no CUDA device here"),
        ("predict {models}:Strange --image 8 --strict", 1, "latpred_cli_test::mystery"),
        (f"curve {PICTURE} --plot c.gif", 2, "end it in .png, .svg, .pdf"),
        (f"curve {PICTURE} --measured {{models}}", 2, "add --plot curve.png"),
        (f"report {PICTURE} -o {{models}}/r.html", 2, "cannot write"),
        (f"explain {PICTURE} -o e.html", 2, "-o writes text, .json or .csv, not .html; latpred report writes HTML"),
        (f"rank {PICTURE} --json -o r.csv", 2, "--json and a file .csv exclude each other; leave --json out"),
        (f"report {PICTURE} -d gpu -o r.pdf", 2, "a report is HTML, and r.pdf does not end in .html"),
        ("calibrate -d cpu --threads 9999", 2, "9999 threads are more than the"),
        ("generate {models}:picture", 2, "generates no text"),
        *((f"{verb} {PICTURE} {NONE_YET} --runtime onnxruntim", 2, NEAREST) for verb in ON_A_PROFILE),
        (f"generate gpt2 {NONE_YET} --runtime onnxruntim", 2, NEAREST),
        (f"{GENERATE} --attention eager --measure", 2, "leave it out, or --attention"),
        (f"generate gpt2 {NONE_YET} --prompt 99999", 2, "gpt2 has 1024; ask for a shorter prompt"),
        (f"explain {PICTURE} {NONE_YET} --host epyc-774", 3, "no host is called 'epyc-774'. Did you mean EPYC 7742"),
        (f"predict {PICTURE} {NONE_YET} --host 1.3 --now", 2, "host='1.3' is another host, whose present speed"),
        (f"{UNEQUAL} 12,7 --seq 8 {NONE_YET}", 2, "lengths= says what the inputs are; leave out seq"),
        (f"measure {PICTURE} -d cpu --runtime onnxruntim", 2, NEAREST),
        ("calibrate -d cpu --runtimes eager,onnxruntim", 2, NEAREST),
        (f"trace {PICTURE} --precision amp-fp16 --check", 2, "of which autocast changes none"),
        (f"trace {PICTURE} --runtime torchscript --check", 2, "--check counts what eager does"),
        ("calibrate --device abacus", 3, "on 'abacus'. Use device='cpu', 'cuda:0' or 'simulated'."),
        ("calibrate --device simulated --budget 1s", 2, "a budget of 1 s measures nothing"),
        ("measure", 2, "Name at least one, or a study with --suite"),
        ("measure resnet18 --record {folder}", 2, "--record is for a study; add --suite, or leave it out"),
        ("measure resnet18 -o {models}/m.csv", 2, "cannot write {models}/m.csv"),
        ("measure resnet18 --json --csv", 2, "--json and --csv exclude each other; give one."),
        ("validate --replay nowhere", 3, "There is no recording in nowhere"),
        ("evaluate", 2, "There is no table to evaluate. Name at least one CSV file."),
        ("validate --replay epyc-genoa-sealed --batch 1", 2, "recorded, and measures nothing; leave out --batch."),
        ("calibrate --host-only --quick", 2, "what dispatch costs on this host, and no more; leave out --quick."),
        (f"measure {STUDY} bert", 2, "Models and --suite exclude each other"),
        (f"measure {STUDY} --batch 4", 2, "--suite paper plans --batch itself; leave that out"),
        ("fit {models} -o report.csv", 2, "-o report.csv is where the profile goes; give it a name that ends in .json"),
        ("fit", 2, "either tables of latencies or --raw"),
        ("profiles list --datasheets --hosts", 2, "--datasheets and --hosts exclude each other; give one."),
        ("fit --raw {folder}", 3, "there is no journal.jsonl or last.jsonl in {folder}"),
        ("models no-such-model", 2, "no model has 'no-such-model' in its name"),
    ],
)
def test_what_cannot_be_done_is_said(command: str, exit_code: int, sentence: str, tmp_path: Path) -> None:
    names = {"models": models_file(tmp_path), "folder": str(tmp_path)}
    shown = run(*shlex.split(command.format(**names)))
    assert (shown.exit_code, shown.stdout) == (exit_code, "")
    assert sentence.format(**names) in " ".join(shown.stderr.split())
    assert shown.stderr.startswith(("latpred: ", "Usage: ", "asking ")), "something else was announced before"
    assert "Traceback" not in shown.stderr
