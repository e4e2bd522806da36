# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The batch script for Slurm, with stand-ins for the commands of Slurm: no cluster is needed, and none was used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from training_run import Sentences

from d3pm_hf import D3PMPipeline
from d3pm_hf.training import read_log


EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPT = EXAMPLES / "slurm/two_nodes.sbatch"
# Starts two tasks as `srun` does, and returns the highest of their statuses. If $PREEMPT_AFTER is set, both tasks get SIGTERM
# when the log has that many lines.
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
export SLURM_NTASKS=2
for id in 0 1; do
    SLURM_PROCID=$id SLURM_LOCALID=$id "$@" &
    tasks[id]=$!
done
if [ -n "$PREEMPT_AFTER" ]; then
    until [ "$(cat "$LOG" 2> /dev/null | wc -l)" -ge "$PREEMPT_AFTER" ]; do sleep 0.05; done
    kill -TERM "${tasks[@]}"
fi
highest=0
for task in "${tasks[@]}"; do
    wait "$task"; status=$?
    if [ $status -gt $highest ]; then highest=$status; fi
done
exit $highest
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$*" >> "$REQUEUED"; fi
"""


def sbatch(folder, *arguments, **environment):
    """Runs the batch script as `sbatch` would, on this machine."""
    commands = {"srun": SRUN, "scontrol": SCONTROL, "python": f'#!/bin/bash\nexec {sys.executable} "$@"\n'}
    for name, text in commands.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "here"}
    environment = {**slurm, "REQUEUED": str(folder / "requeued"), "PREEMPT_AFTER": "", **environment}
    environment |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", SCRIPT, *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)


def test_the_batch_script_passes_on_the_status_of_the_run(tmp_path):
    """A run that ends or fails is not queued again; one that was interrupted is."""
    for status, requeued in ((0, False), (1, False), (137, False), (143, True)):
        task = tmp_path / "task.py"
        task.write_text(
            f"import os, sys\nassert sys.argv[1:] == ['--seed', '1 2', '--resume_from_checkpoint', 'latest']\n"
            f"assert os.environ['WORLD_SIZE'] == '2' and os.environ['MASTER_ADDR'] == '127.0.0.1'\n"
            f"sys.exit({status} if os.environ['RANK'] == os.environ['LOCAL_RANK'] == '1' else 0)\n"
        )
        result = sbatch(tmp_path, task, "--seed", "1 2")
        assert result.returncode == status, result.stderr
        assert (tmp_path / "requeued").exists() == requeued
    assert (tmp_path / "requeued").read_text() == f"requeue {os.getpid()}\n"


@pytest.mark.slow
def test_a_preempted_job_continues(tmp_path):
    """The job is interrupted in the middle of its run, queued again, and ends with all steps in its log."""
    text = "".join(chr(97 + token % 26) for token in Sentences(count=500).rows.flatten().tolist())
    (tmp_path / "text.txt").write_text(text)
    options = "--preset absorbing,cpu --train_batch_size 4 --max_train_steps 40 --logging_steps 1 --num_samples 2"
    options += " --sequence_length 16 --validation_steps 0 --num_inference_steps 5 --checkpointing_steps 100"
    options += f" --dataset_path {tmp_path / 'text.txt'} --output_dir {tmp_path / 'run'}"
    log = tmp_path / "run/log.jsonl"
    command = (tmp_path, EXAMPLES / "train_text8.py", *options.split())
    preempted = sbatch(*command, LOG=str(log), PREEMPT_AFTER="3")
    assert preempted.returncode == 143, preempted.stderr
    step = read_log(log)[-1]["step"]
    assert 3 <= step < 40 and [path.name for path in log.parent.glob("checkpoint-*")] == [f"checkpoint-{step}"]
    assert (tmp_path / "requeued").read_text() == f"requeue {os.getpid()}\n"
    finished = sbatch(*command)
    assert finished.returncode == 0, finished.stderr
    assert [line["step"] for line in read_log(log)] == list(range(1, 41))
    D3PMPipeline.from_pretrained(tmp_path / "run")
