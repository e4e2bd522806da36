# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Small runs on several CPU processes, sharded by FSDP2 or replicated by DDP: a script for `accelerate launch`.

`accelerate launch ... sharded_run.py '[{"output_dir": ..., "fsdp": {...}}, ...]'` trains one run after the other in the same
processes, as a start takes longer than a run. A run that has an entry `fsdp` is sharded. The entries of a run are
arguments of `D3PMTrainingArguments`, and those that [`one_run`] takes. The error of a run that has an entry `refused` is
written beside its folder.
"""

import json
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from peft import LoraConfig
from test_masked_lm import ARCHITECTURES, LETTERS, SPECIAL, tiny_model, tiny_tokenizer
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from training_run import LENGTH, Sentences, T
from transformers import TrainingArguments

from d3pm_hf import (
    D3PMImagePipeline,
    D3PMPipeline,
    D3PMScheduler,
    D3PMTextPipeline,
    Denoiser,
    character_tokenizer,
    create_text_model,
    create_unet,
    evaluate_bound,
)
from d3pm_hf.kernels import head_loss
from d3pm_hf.training import D3PMTrainer, D3PMTrainingArguments, train
from d3pm_hf.training.state_files import load_states
from d3pm_hf.utils import kept_logits


SETTINGS = {
    "max_train_steps": 4,
    "train_batch_size": 4,
    "lr_warmup_steps": 1,
    "learning_rate": 1e-2,
    "logging_steps": 2,
    "validation_steps": 2,
    "checkpointing_steps": 3,
    "num_samples": 3,
    "num_inference_steps": 5,
    "eval_batch_size": 5,
    "max_eval_samples": 11,
    "num_eval_timesteps": 3,
    "ema_inv_gamma": 0.5,
}


def shard_on_cpus():
    """Makes Accelerate shard over gloo: for processes on CPUs it drops the plugin of FSDP, and runs DDP."""
    create = AcceleratorState.__init__

    def create_sharded(self, *args, fsdp_plugin=None, **kwargs):
        first = not AcceleratorState._shared_state
        create(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if first and fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = create_sharded


def shard(layer):
    """Prepares this process for a run that is sharded by FSDP2, with one group for each layer of a class."""
    shard_on_cpus()
    policy = {"AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "TRANSFORMER_CLS_TO_WRAP": layer}
    policy |= {"VERSION": "2", "STATE_DICT_TYPE": "SHARDED_STATE_DICT", "RESHARD_AFTER_FORWARD": "true"}
    os.environ |= {"ACCELERATE_USE_FSDP": "true", **{f"FSDP_{name}": value for name, value in policy.items()}}


def shard_text(rank):
    shard("BertLayer")


def shard_images(rank):
    shard("ResnetBlock2D")


def whole_shards(folder):
    """The tensors of a folder of shards, put together."""
    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(folder, file.name)
        return torch.load(file.name, weights_only=False)


def sharded_state(folder, step):
    """All that a sharded checkpoint and a finished run hold, from the folder of the run."""
    checkpoint = Path(folder) / f"checkpoint-{step}"
    shards = [whole_shards(checkpoint / name) for name in ("pytorch_model_fsdp_0", "optimizer_0")]
    rest = load_states(checkpoint, ["progress", "lr_scheduler", "ema"])
    files = {str(path.relative_to(folder)): path for path in Path(folder).rglob("*") if path.is_file()}
    kept = {name: path.read_bytes() for name, path in files.items() if not name.startswith("checkpoint-")}
    return {"shards": shards, "rest": rest, "files": kept}


def make_text_pipeline():
    torch.manual_seed(0)
    model = create_text_model("tiny", 28, backbone="t5")
    return D3PMTextPipeline(model, D3PMScheduler(28, T), character_tokenizer(), sequence_length=LENGTH)


class Table(Denoiser, ModelMixin, ConfigMixin):
    """A denoiser that is a component of the pipeline as it is: one table of logits for all pixels."""

    num_classes, sample_shape = 5, (1, 8, 8)

    @register_to_config
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(5, 5)

    def forward(self, x_t, timestep, **condition):
        return self.table(x_t)


class TiedTable(Table):
    """A table that is its own inverse, and that only this class knows to be tied."""

    @register_to_config
    def __init__(self):
        super().__init__()
        self.inverse = torch.nn.Linear(5, 5, bias=False)
        self.inverse.weight = self.table.weight

    def forward(self, x_t, timestep, **condition):
        return self.inverse(self.table(x_t))


def make_image_pipeline(kind):
    torch.manual_seed(0)
    network = create_unet("tiny", 5, 8, 1) if kind == "images" else {"table": Table, "tied": TiedTable}[kind]()
    return D3PMImagePipeline(network, D3PMScheduler(5, T, transition="uniform", beta_schedule="cosine"))


def make_masked_lm_pipeline(architecture):
    return D3PMTextPipeline.from_masked_lm(
        tiny_model(architecture), tiny_tokenizer(), num_train_timesteps=T, sequence_length=LENGTH
    )


def make_pipeline(kind):
    """`"text"`, `"images"` for a U-Net, `"table"`, `"tied"`, or an architecture of masked language models."""
    if kind in ARCHITECTURES:
        return make_masked_lm_pipeline(kind)
    return make_text_pipeline() if kind == "text" else make_image_pipeline(kind)


def make_lora(base):
    pipeline = D3PMPipeline.from_pretrained(base)
    torch.manual_seed(1)
    pipeline.text_model.add_adapter(LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules="all-linear"))
    return pipeline


class Pictures:
    """Small pictures of stripes. A seed shifts them."""

    def __len__(self):
        return 64

    def __getitem__(self, item):
        index, seed = item if isinstance(item, tuple) else (item, 0)
        return ((torch.arange(8) * (index % 3 + 1) + seed) % 5).expand(1, 8, 8)


class Letters(Sentences):
    """Sentences of the letters of a masked language model, between its special tokens."""

    def __getitem__(self, item):
        tokens = super().__getitem__(item) % len(LETTERS) + len(SPECIAL)
        return torch.cat([torch.tensor([2]), tokens[1:-1], torch.tensor([3])])


def make_data(kind, count=200, seed=0):
    if kind in ARCHITECTURES:
        return Letters(count, seed)
    return Sentences(count, seed) if kind == "text" else Pictures()


def make_evaluation_set(kind):
    return make_data(kind, count=32, seed=1)


def measure(pipeline, kind, accelerator=None):
    """The bound on 11 examples in batches of 10, of which every third element is masked out."""
    rows = torch.stack([make_evaluation_set(kind)[i] for i in range(11)])
    mask = torch.arange(rows.numel()).reshape(rows.shape) % 3 > 0
    batches = [(rows[:10], mask[:10]), (rows[10:], mask[10:])]
    options = {"num_eval_timesteps": 4, "progress_bar": False, "accelerator": accelerator}
    return evaluate_bound(pipeline.scheduler, pipeline.denoiser, batches, **options)


class Hostile:
    """An object whose pickle makes a folder when it is read in full."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@contextmanager
def limited_files(size):
    """A context in which no file may grow beyond so many bytes, if a size is given."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def one_run(
    kind="text",
    evaluate=True,
    lora=None,
    trainer=None,
    fsdp=None,
    copy_of=None,
    damage=None,
    hostile=None,
    largest_file=None,
    few_states=kept_logits.FEW_STATES,
    piece_bytes=head_loss.PIECE_BYTES,
    **settings,
):
    """Trains, and writes what each process gets to the folder of the run.

    `returned-<process>.pt` has the weights of the returned pipeline, and `bound-<process>.pt` its bound, for which the
    processes share the examples.

    Args:
        kind: The network and its data, see [`make_pipeline`].
        evaluate: Whether there is an evaluation set.
        lora: Folder of a pipeline, a LoRA of which is trained in place of the network of `kind`.
        trainer: Arguments of `TrainingArguments` for a run of `D3PMTrainer` in place of `train`.
        fsdp: Environment variables of the plugin of FSDP. Without them, the run is replicated by DDP.
        copy_of: Folder of an earlier run, which is copied to `output_dir` before.
        damage: File of the copy that is cut to half of its length.
        hostile: File of the copy that becomes a [`Hostile`] pickle.
        largest_file: Number of bytes beyond which no file may grow, as with a full disk.
        few_states: Number of states up to which a network is asked for all logits.
        piece_bytes: Bytes of logits that exist at a time.
    """
    kept_logits.FEW_STATES, head_loss.PIECE_BYTES = few_states, piece_bytes
    os.environ.update({"ACCELERATE_USE_FSDP": str(fsdp is not None).lower(), **(fsdp or {})})
    state = PartialState(cpu=True)
    if copy_of and state.is_main_process:
        shutil.copytree(copy_of, settings["output_dir"])
        if damage:
            path = Path(settings["output_dir"], damage)
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        if hostile:
            Path(settings["output_dir"], hostile).write_bytes(pickle.dumps(Hostile(settings["output_dir"] + ".ran")))
    state.wait_for_everyone()
    pipeline, data = make_pipeline(kind) if lora is None else make_lora(lora), make_data(kind)
    held_out = make_evaluation_set(kind) if evaluate else None
    if trainer is not None:
        arguments = TrainingArguments(
            settings["output_dir"], use_cpu=True, report_to="none", save_strategy="no", **trainer
        )
        running = D3PMTrainer(pipeline, arguments, data, held_out)
        running.train()
        metrics = running.evaluate() if evaluate else {}
        running.save_model()
        Path(settings["output_dir"], f"metrics-{os.environ['RANK']}.json").write_text(json.dumps(metrics))
        return
    with limited_files(largest_file):
        pipeline = train(D3PMTrainingArguments(**{**SETTINGS, **settings}), pipeline, data, held_out)
    weights = getattr(pipeline, pipeline.network_name).state_dict()
    torch.save(weights, os.path.join(settings["output_dir"], f"returned-{os.environ['RANK']}.pt"))
    pipeline.set_progress_bar_config(disable=True)
    pipeline(num_inference_steps=2)  # without the other processes
    if evaluate:
        bound = measure(pipeline, kind, Accelerator())
        torch.save(vars(bound), os.path.join(settings["output_dir"], f"bound-{os.environ['RANK']}.pt"))


def main():
    torch.set_num_threads(1)
    shard_on_cpus()
    torch.distributed.destroy_process_group = lambda group=None: None  # the next run needs it
    for settings in json.loads(sys.argv[1]):
        refused = settings.pop("refused", False)
        try:
            one_run(**settings)
        except (ValueError, OSError) as error:
            if not refused:
                raise
            Path(settings["output_dir"]).with_suffix(f".error-{os.environ['RANK']}").write_text(str(error))
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


if __name__ == "__main__":
    import sharded_run

    sharded_run.main()  # from a module that a checkpoint can name
