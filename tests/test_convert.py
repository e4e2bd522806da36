# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Checkpoints of MDLM, SEDD, UDLM and Duo become pipelines, in the layouts of their repositories; broken ones one sentence."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_server import LoopbackHub
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast

from d3pm_hf import D3PMDiT, D3PMPipeline
from d3pm_hf.convert import __main__ as command_line
from d3pm_hf.convert import convert_checkpoint


PEERS = load_file(Path(__file__).parent / "fixtures" / "peers.safetensors")
WEIGHTS = {name.removeprefix("weights/"): value for name, value in PEERS.items() if name.startswith("weights/")}
K, T = 13, 50
# The settings of the repositories, with the sizes of the fixture.
FLAT = {
    "vocab_size": K,
    "model_length": 9,
    "hidden_dim": 16,
    "cond_dim": 8,
    "n_blocks": 2,
    "n_heads": 2,
    "dropout": 0.1,
    "auto_map": {"AutoModelForMaskedLM": "modeling.Model"},
}
CONFIGS = {
    "mdlm": {"model_type": "mdlm", "architectures": ["MDLM"], "time_conditioning": False, **FLAT},
    "udlm": {"model_type": "udlm", "time_conditioning": True, "cfg": False, "cfg_num_classes": -1, **FLAT},
    "duo": {"model_type": "DUO", "causal": False, "var_min": True, **FLAT},
    "sedd": {
        "tokens": K - 1,
        "graph": {"type": "absorb", "file": "data", "report_all": False},
        "noise": {"type": "loglinear", "sigma_min": 1e-4, "sigma_max": 20},
        "model": {
            "type": "ddit",
            "hidden_size": 16,
            "cond_dim": 8,
            "length": 9,
            "n_blocks": 2,
            "n_heads": 2,
            "scale_by_sigma": True,
            "dropout": 0.1,
        },
    },
}
KINDS = pytest.mark.parametrize("kind", CONFIGS)


def words(size=K - 1, **special) -> PreTrainedTokenizerFast:
    """A tokenizer of words."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", **special)


def save_peer(folder: Path, kind: str, weights=None, **changes) -> Path:
    """A checkpoint in the layout of its repository: all but those of SEDD have the network inside of another."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(json.dumps(CONFIGS[kind]))
    for name, value in changes.items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value != "absent"})
    )
    prefix = "" if kind == "sedd" else "backbone."
    weights = WEIGHTS if weights is None else weights
    save_file({prefix + name: value for name, value in weights.items()}, folder / "model.safetensors")
    return folder


def refuse(folder, message, error=ValueError, tokenizer=None, **kwargs):
    with pytest.raises(error, match=message) as raised:
        convert_checkpoint(folder, words() if tokenizer is None else tokenizer, **kwargs)
    assert "\n" not in str(raised.value)


@KINDS
def test_converts(tmp_path, kind):
    """The pipeline has the process and the logits of the authors, also after it is saved and loaded, and samples."""
    pipeline = convert_checkpoint(save_peer(tmp_path / "peer", kind), words(), num_train_timesteps=T)
    config, network = pipeline.scheduler.config, pipeline.text_model
    is_absorbing = kind in ("mdlm", "sedd")
    assert isinstance(network, D3PMDiT) and not network.training
    assert config.transition == ("absorbing" if is_absorbing else "uniform") and config.num_classes == K
    assert config.x0_posterior == "leave_one_out" and config.num_train_timesteps == T
    assert pipeline.scheduler.gap_token_id == (K - 1 if is_absorbing else None)
    survival = [pipeline.scheduler.transition.log_survival(0, n, torch.empty(1)).exp().item() for n in (0, 10, T)]
    assert survival == pytest.approx([1, 0.8, 0])
    assert pipeline.config.sequence_length == 9 and len(pipeline.tokenizer) == K
    x, timestep = PEERS["input_ids"], torch.tensor([0, 24, 49])
    sigma = -torch.log(1 - 0.999 * (timestep.double() + 1) / T)
    with torch.no_grad():
        logits = pipeline.denoiser(x, timestep)
        network.config.num_train_timesteps, network.config.timestep_conditioning = None, True  # sigma itself is read
        assert_close(network(x, PEERS["sigma"]).logits, PEERS["mdlm"], atol=1e-5, rtol=0)
        assert_close(logits, network(x, sigma * (kind != "mdlm")).logits, atol=1e-5, rtol=1e-5)
        network.config.num_train_timesteps, network.config.timestep_conditioning = T, kind != "mdlm"
    pipeline.save_pretrained(tmp_path / "saved")
    loaded = D3PMPipeline.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert_close(loaded.denoiser(x, timestep), pipeline.denoiser(x, timestep))
    output = loaded(batch_size=2, num_inference_steps=5, generator=torch.Generator().manual_seed(0))
    assert output.sequences.shape == (2, 9) and (not is_absorbing or (output.sequences < K - 1).all())


def test_log_scores_of_sedd_are_logits():
    """At a mask, the log-scores of SEDD differ from the logits by a constant, which the scheduler does not see."""
    x = PEERS["input_ids"]
    difference = (PEERS["sedd"] - PEERS["mdlm"])[x == K - 1][:, : K - 1]
    assert len(difference) == 10
    assert_close(difference, difference[:, :1].expand_as(difference), atol=1e-5, rtol=0)


def test_class_embeddings_of_udlm(tmp_path):
    """The last row of the table is "no class"."""
    weights = {**WEIGHTS, "cond_map.embedding_table.weight": torch.randn(4, 8)}
    folder = save_peer(tmp_path, "udlm", weights, cfg=True, cfg_num_classes=3)
    pipeline = convert_checkpoint(folder, words())
    assert pipeline.denoiser.num_class_labels == 3 and pipeline.denoiser.null_class == 3
    assert pipeline(class_labels=1, guidance_scale=2.0, num_inference_steps=2).sequences.shape == (1, 9)


def test_settings_of_newer_versions_of_the_hub(tmp_path):
    """`PyTorchModelHubMixin` writes the arguments of the network by their names."""
    folder = save_peer(tmp_path, "sedd")
    (folder / "config.json").write_text(json.dumps({"config": CONFIGS["sedd"]}))
    assert convert_checkpoint(folder, words()).scheduler.config.transition == "absorbing"


def test_tokenizer_of_the_checkpoint_with_a_mask(tmp_path):
    """The mask of a tokenizer that has one, such as that of BERT, is the mask of the process, wherever it is."""
    folder = save_peer(tmp_path, "mdlm")
    words(K, mask_token="w4").save_pretrained(folder)
    pipeline = convert_checkpoint(folder)
    assert pipeline.scheduler.mask_token_id == 4 and len(pipeline.tokenizer) == K


def test_a_uniform_process_with_a_mask_token(tmp_path):
    """UDLM's LM1B has BERT's tokenizer: its mask is a state of the process like any other, and the gap of a prompt."""
    pipeline = convert_checkpoint(save_peer(tmp_path, "udlm"), words(K, mask_token="w4", pad_token="w0"))
    assert pipeline.scheduler.never_data == () and pipeline.gap_token_id == 4
    sequences = pipeline(["w1 w4 w2"] * 64, num_inference_steps=3, output_type="latent").sequences
    assert (sequences[:, [0, 2]] == torch.tensor([1, 2])).all() and len(sequences[:, 1].unique()) > 3


# Bad input


@KINDS
def test_missing_and_surplus_tensors(tmp_path, kind):
    without = {name: value for name, value in WEIGHTS.items() if "blocks.1" not in name}
    refuse(save_peer(tmp_path / "a", kind, without), r"lack 10 tensors \(blocks.1.adaLN_modulation.bias")
    more = {**WEIGHTS, "noise.weight": torch.zeros(2)}
    refuse(
        save_peer(tmp_path / "b", kind, more),
        r"hold 1 tensor \((backbone.)?noise.weight\), which the network that config.json describes does not have",
    )
    other = {**WEIGHTS, "output_layer.linear.bias": torch.zeros(K + 1)}
    refuse(
        save_peer(tmp_path / "c", kind, other),
        r"output_layer.linear.bias in .* has the shape \(14,\), .* needs \(13,\)",
    )
    other = {**WEIGHTS, "rotary_emb.inv_freq": 2 * WEIGHTS["rotary_emb.inv_freq"]}
    refuse(save_peer(tmp_path / "d", kind, other), "holds other frequencies")


@KINDS
def test_another_vocabulary_than_that_of_the_tokenizer(tmp_path, kind):
    folder = save_peer(tmp_path, kind)
    for size in (K - 2, K + 1):
        refuse(folder, f"has a vocabulary of {size}, and the network one of 13", tokenizer=words(size))
    with pytest.raises(
        ValueError, match="no tokenizer and a vocabulary of 13, for which none is known: pass `tokenizer`"
    ):
        convert_checkpoint(folder)


def test_a_tokenizer_without_a_mask(tmp_path):
    refuse(save_peer(tmp_path, "mdlm"), "network one of 13, the mask included", tokenizer=words(K))


def test_a_score_model_read_as_logits(tmp_path):
    folder = save_peer(tmp_path, "sedd")
    for wrong in ("subs", "mean"):
        refuse(
            folder, f"parameterization is '{wrong}', and .* describes a network with 'score'", parameterization=wrong
        )
    refuse(save_peer(tmp_path / "duo", "duo"), "describes a network with 'mean'", parameterization="score")


def test_networks_of_the_same_tensors(tmp_path):
    """A network that its configuration does not name is read as the caller says."""
    folder = save_peer(tmp_path, "mdlm", model_type="mine")
    refuse(folder, "model_type='mine', which is none of mdlm, udlm, duo")
    for parameterization, transition in {"subs": "absorbing", "score": "absorbing", "mean": "uniform"}.items():
        pipeline = convert_checkpoint(folder, words(), parameterization=parameterization)
        assert pipeline.scheduler.config.transition == transition
    refuse(folder, "parameterization is 'logits': it must be one of subs, score, mean", parameterization="logits")


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("sedd", {"graph": {"type": "uniform"}}, "score model with graph.type='uniform'"),
        ("sedd", {"noise": {"type": "geometric"}}, "noise.type='geometric'"),
        ("sedd", {"tokens": "absent"}, "has no tokens"),
        ("sedd", {"model": 3}, "has no hidden_dim"),
        ("duo", {"causal": True}, "causal=true, an autoregressive network"),
        ("mdlm", {"n_blocks": "absent"}, "has no n_blocks"),
        ("mdlm", {"n_blocks": 10**6}, "n_blocks=1000000, and the weights beside it hold 31 tensors"),
        ("mdlm", {"n_blocks": 1}, "hold 10 tensors"),
        ("mdlm", {"hidden_dim": "16"}, "hidden_dim of .* is '16'"),
        ("mdlm", {"hidden_dim": 1 << 60}, "hidden_dim of .* must be"),
        ("mdlm", {"hidden_dim": 1 << 20}, "has the shape"),
        ("mdlm", {"n_heads": 3}, "must be a multiple of 2"),
        ("mdlm", {"n_heads": 4}, "other frequencies than those of 4 heads"),
        ("mdlm", {"time_conditioning": "no"}, "time_conditioning of"),
        ("mdlm", {"vocab_size": 14}, r"has the shape \(13,\), .* needs \(14,\)"),
    ],
)
def test_wrong_settings(tmp_path, kind, changes, message):
    refuse(save_peer(tmp_path, kind, **changes), message)


def test_pickled_weights_are_not_read(tmp_path):
    folder = save_peer(tmp_path, "sedd")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    refuse(folder, r"pickled weights \(\*.bin, \*.ckpt, \*.pth\) can run code and are not read; .*save_file", OSError)


def test_broken_files(tmp_path):
    folder = save_peer(tmp_path, "mdlm")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    refuse(folder, "truncated or not a safetensors file", OSError)
    (folder / "config.json").write_text("[]")
    refuse(folder, "does not contain a JSON object", OSError)
    (folder / "config.json").unlink()
    refuse(folder, "config.json is missing", OSError)


def test_wrong_arguments(tmp_path):
    folder = save_peer(tmp_path, "mdlm")
    refuse(folder, "num_train_timesteps is 0", num_train_timesteps=0)
    refuse(folder, "an argument of the download is 'dtype'", dtype=torch.float16)
    refuse(folder, "tokenizer is 3", error=(TypeError, ValueError), tokenizer=3)


# The command line


def run(arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "d3pm_hf.convert", *map(str, arguments)], capture_output=True, text=True, **environment
    )
    return done.returncode, done.stdout, done.stderr


def test_the_command_line_saves_over_nothing(tmp_path, capsys):
    folder, tokenizer = save_peer(tmp_path / "peer", "mdlm"), tmp_path / "words"
    words().save_pretrained(tokenizer)
    command_line.main(
        [str(folder), str(tmp_path / "out"), "--tokenizer", str(tokenizer), "--num_train_timesteps", "20"]
    )
    shown = capsys.readouterr().out
    assert "parameters; a process of 13 states, absorbing" in shown and "are in" in shown
    assert len(D3PMPipeline.from_pretrained(tmp_path / "out").scheduler) == 20
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    with pytest.raises(OSError, match="is not an empty folder: choose another one, nothing is saved over"):
        command_line.main([str(folder), str(tmp_path / "out")])
    with pytest.raises(ValueError, match="none is known"):
        command_line.main([str(folder), str(tmp_path / "new")])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before and not (tmp_path / "new").exists()


def test_from_the_hub(tmp_path):
    """The command downloads settings and safetensors, runs no code, and the card names the repository."""
    folder, tokenizer = save_peer(tmp_path / "peer", "sedd"), tmp_path / "words"
    words().save_pretrained(tokenizer)
    with LoopbackHub(lfs=(".safetensors", ".bin")) as hub:
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        code = f"open({str(tmp_path / 'ran')!r}, 'w')"
        hub.put("louaaron/sedd-tiny", {**files, "modeling.py": code, "pytorch_model.bin": pickle.dumps({})})
        hub.put("org/words", {path.name: path.read_bytes() for path in tokenizer.iterdir()})
        hub.put("org/pickled", {"config.json": files["config.json"], "pytorch_model.bin": pickle.dumps({})})
        environment = {"env": hub.environment(tmp_path / "home")}
        arguments = ["--tokenizer", "org/words"]
        status, shown, errors = run(["louaaron/sedd-tiny", tmp_path / "out", *arguments], **environment)
        assert status == 0, errors
        assert "Reading louaaron/sedd-tiny ..." in shown
        wanted = [request.path for request in hub.requests if request.method == "GET"]
        assert any("model.safetensors" in path for path in wanted)
        assert not any(path.endswith((".py", ".bin")) for path in wanted) and not (tmp_path / "ran").exists()
        for repository, message in (
            ("org/pickled", "are not read"),
            ("org/absent", "there is no folder and no repository 'org/absent'"),
        ):
            status, _, errors = run([repository, tmp_path / "none", *arguments], **environment)
            assert status == 1 and errors.splitlines()[-1].startswith("error: ") and message in errors.splitlines()[-1]
    assert not (tmp_path / "none").exists()
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.base_model == "louaaron/sedd-tiny" and "`D3PMDiT`" in card.content
    assert D3PMPipeline.from_pretrained(tmp_path / "out").tokenizer.mask_token_id == K - 1
