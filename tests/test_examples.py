# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The examples run for real, for a few steps."""

import ast
import gzip
import json
import os
import random
import re
import runpy
import subprocess
import sys
from pathlib import Path

import concepts
import numpy as np
import pytest
import torch
import yaml
from filelock import FileLock
from PIL import Image
from safetensors.torch import save_file

import d3pm_hf
from d3pm_hf import D3PMPipeline, D3PMTablePipeline, evaluate_bound
from d3pm_hf.data import Rows, TextCrops
from d3pm_hf.data.characters import encode_characters
from d3pm_hf.losses import prior_loss
from d3pm_hf.schedules import cosine_betas, exponents_from_betas
from d3pm_hf.training import D3PMTrainingArguments, read_log
from d3pm_hf.training.run_state import LOCK_NAME
from d3pm_hf.training.script_arguments import ImageModelArguments, ProcessArguments, parse_arguments
from d3pm_hf.training.script_parts import count_groups, create_scheduler, load_embeddings
from d3pm_hf.transitions import register_transition
from d3pm_hf.transitions.dense import MatrixTransition
from d3pm_hf.utils import scripts


pytestmark = pytest.mark.usefixtures("fresh_accelerator")
EXAMPLES = Path(__file__).parents[1] / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
WORDS = "the a cat dog sat ran on under mat tree and saw big small red one two".split()
SMALL_TEXT = (
    "--hidden_size 16 --num_hidden_layers 1 --num_attention_heads 2 --intermediate_size 32 --sequence_length 16"
)
SMALL_IMAGE = "--block_out_channels 8 8 --layers_per_block 1 --resolution 8"
SHORT = (
    "--max_train_steps 3 --train_batch_size 4 --logging_steps 1 --checkpointing_steps 2 --validation_steps 3 --num_samples 2 "
    "--num_inference_steps 3 --max_eval_samples 4 --num_eval_timesteps 3 --lr_warmup_steps 1 --num_train_timesteps 20"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A text, sentences and pictures."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    sentences = [" ".join(rng.choices(WORDS, k=8)) for _ in range(600)]
    (folder / "text.txt").write_text(" ".join(sentences))
    (folder / "sentences.txt").write_text("\n".join(sentences) + "\n")
    for split, count in (("train", 12), ("test", 4)):
        (folder / "images" / split).mkdir(parents=True)
        for i in range(count):
            pixels = np.random.default_rng(i).integers(0, 256, (10, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / split / f"{i}.png")
    return folder


def run_script(monkeypatch, name, *options):
    """An example in this process, as if from the command line."""
    monkeypatch.setattr(sys, "argv", [name, *(word for option in options for word in str(option).split())])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def check_run(folder):
    """What a run leaves: lines in the log, a checkpoint, samples, and a pipeline that can be loaded and called."""
    lines = read_log(folder / "log.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 3] and "eval_bits_per_dim" in lines[-1]
    assert (folder / "checkpoint-3").is_dir() and list((folder / "samples").glob("final.*"))
    pipeline = D3PMPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    pipeline(num_inference_steps=3)
    return pipeline


@pytest.mark.slow
def test_swiss_roll(tmp_path):
    options = ["--max_train_steps", "3", "--num_inference_steps", "7", "--output_dir", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, EXAMPLES / "swiss_roll.py", *options], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("bits/dim") == 4  # three bounds, and the entropy of the data
    with Image.open(tmp_path / "swiss_roll.png") as picture:
        assert min(picture.size) > 1000 and len(picture.convert("RGB").resize((200, 200)).getcolors(40_000)) > 1000


def test_concepts(tmp_path):
    """Noise of the pictures, and one picture of each kind."""
    corpus = TextCrops(encode_characters("the thing that they thought of was there " * 20), 64, 27)
    image = concepts.photograph()
    frequencies = torch.full((concepts.LEVELS,), 1 / concepts.LEVELS, dtype=torch.float64)
    for family, shares in (
        ("absorbing", concepts.SHARES),
        ("uniform", (0, 0, 0, 0)),
        ("autoregressive", concepts.SHARES),
    ):
        scheduler = concepts.create_scheduler(family, image, concepts.LEVELS, frequencies, None)
        masked = [
            (state == concepts.LEVELS).float().mean().item() for state in concepts.noisy_states(scheduler, image)
        ]
        assert masked == pytest.approx(shares, abs=0.04), family
    concepts.draw_family("absorbing", corpus, tmp_path)
    concepts.draw_schedules(corpus, tmp_path)
    concepts.draw_posteriors(corpus, tmp_path)
    for name, width in (("family_absorbing", 1110), ("schedules", 1290), ("leave_one_out", 1200)):
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert picture.width == width


def test_minimal(tmp_path, monkeypatch, capsys):
    """The bound that the script prints last is that of the pipeline that it saves; its samples have the right length."""
    data = TextCrops(encode_characters(" ".join(random.Random(0).choices(WORDS, k=1000))), 16, 27)
    monkeypatch.setattr(d3pm_hf.data, "python_prose", lambda length: (data, data))  # the prose takes seconds to read
    options = "--max_train_steps 3 --train_batch_size 4 --sequence_length 16 --num_inference_steps 4"
    run_script(monkeypatch, "minimal.py", options, f"--output_dir {tmp_path}")
    first, *samples = capsys.readouterr().out.splitlines()
    printed = re.fullmatch(r"step 3: (\d\.\d+) ± (\d\.\d+) bits/dim \(100 examples, 1600 elements, .*\)", first)
    pipeline = D3PMPipeline.from_pretrained(tmp_path)
    x_0 = torch.stack([data[i * len(data) // 100] for i in range(100)])
    bound = evaluate_bound(pipeline.scheduler, pipeline.denoiser, [x_0], num_eval_timesteps=20, progress_bar=False)
    assert float(printed[1]) == pytest.approx(bound.bits_per_dim, abs=1e-3)
    assert [len(ast.literal_eval(line)) for line in samples[:4]] == [16] * 4
    assert ast.literal_eval(samples[4]).startswith("the value of the ") and len(samples) == 5


@pytest.mark.parametrize("preset", ["absorbing", "uniform", "nearest_neighbor", "autoregressive"])
def test_text8(preset, data, tmp_path, monkeypatch):
    steps = (
        SHORT.replace("--num_inference_steps 3", "--num_inference_steps 16") if preset == "autoregressive" else SHORT
    )
    options = (
        f"--preset {preset} --dataset_path {data / 'text.txt'} --output_dir {tmp_path / 'run'}",
        SMALL_TEXT,
        steps,
    )
    run_script(monkeypatch, "train_text8.py", *options)
    pipeline = check_run(tmp_path / "run")
    assert pipeline.scheduler.config.transition == preset
    assert pipeline.text_model.config.vocab_size == (27 if preset in ("uniform", "nearest_neighbor") else 28)
    assert pipeline.text_model.config.is_decoder == (preset == "autoregressive")


def test_text8_on_two_processes(data, tmp_path):
    """As a user starts it, with a configuration that we ship."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file"]
    command += [EXAMPLES / "accelerate_configs/two_cpu_processes.yaml", EXAMPLES / "train_text8.py"]
    options = f"{SMALL_TEXT} {SHORT} --dataset_path {data / 'text.txt'} --output_dir {tmp_path / 'run'}".split()
    run = subprocess.run([*map(str, command), *options], env=ENVIRONMENT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("training:   0%") == 1  # one progress bar for all
    check_run(tmp_path / "run")


@pytest.mark.parametrize("preset", ["absorbing", "uniform"])
def test_lm1b(preset, data, tmp_path, monkeypatch):
    source = f"--dataset_path {data / 'sentences.txt'} --cache_dir {tmp_path / 'cache'} --vocab_size 30"
    options = (f"--preset {preset} --output_dir {tmp_path / 'run'}", source, SMALL_TEXT, SHORT)
    run_script(monkeypatch, "train_lm1b.py", *options)
    pipeline = check_run(tmp_path / "run")
    assert len(pipeline.tokenizer) == 31 and pipeline.scheduler.config.num_classes == (
        31 if preset == "absorbing" else 30
    )


@pytest.mark.parametrize("preset", ["gaussian_logistic", "gaussian_vb", "absorbing", "uniform"])
def test_cifar10(preset, data, tmp_path, monkeypatch):
    options = (
        f"--preset {preset} --dataset_path {data / 'images'} --output_dir {tmp_path / 'run'}",
        SMALL_IMAGE,
        SHORT,
        "--beta_end 1" if "gaussian" in preset else "",  # the paper's 0.02 is for 1000 timesteps
    )
    run_script(monkeypatch, "train_cifar10.py", *options)
    pipeline = check_run(tmp_path / "run")
    config = pipeline.scheduler.config
    assert config.num_classes == 256 and config.transition == preset.split("_")[0]
    assert config.prediction_type == ("logistic" if preset == "gaussian_logistic" else "x0")
    if preset == "absorbing":
        assert config.mask_token_id == 128 and config.mask_in_data


def test_own_data(data, tmp_path, monkeypatch):
    text = f"--dataset_path {data / 'text.txt'} --output_dir {tmp_path / 'text'}"
    run_script(monkeypatch, "train.py", text, SMALL_TEXT, SHORT)
    assert check_run(tmp_path / "text").tokenizer.mask_token == "[MASK]"
    images = f"--preset images --dataset_path {data / 'images'} --output_dir {tmp_path / 'images'} --num_levels 8"
    run_script(monkeypatch, "train.py", images, SMALL_IMAGE, SHORT, "--norm_num_groups 2")
    pipeline = check_run(tmp_path / "images")
    assert (pipeline.scheduler.config.num_classes, pipeline.unet.config.norm_num_groups) == (8, 2)
    with pytest.raises(SystemExit, match="error: after 20 steps .* of the 2.08 nats of the data"):
        run_script(monkeypatch, "train.py", images, SMALL_IMAGE, SHORT, "--beta_schedule linear")
    # It is trained further, on images with its levels and of its size.
    model = f"--model_name_or_path {tmp_path / 'images'} --output_dir {tmp_path / 'further'}"
    run_script(monkeypatch, "train.py", model, f"--preset images --dataset_path {data / 'images'}", SHORT)
    further = check_run(tmp_path / "further")
    assert (further.scheduler.config.num_classes, further.sample_shape) == (8, pipeline.sample_shape)
    with pytest.raises(SystemExit, match="error: .*text.txt is text, and --model_name_or_path a pipeline: pass"):
        run_script(monkeypatch, "train.py", model, f"--dataset_path {data / 'text.txt'}", SHORT)
    with pytest.raises(SystemExit, match="error: norm_num_groups is 3, .*pass a divisor of 8"):
        run_script(monkeypatch, "train.py", images, SMALL_IMAGE, SHORT, "--norm_num_groups 3")
    digits = f"--preset images,digits --dataset_path digits --output_dir {tmp_path / 'digits'}"
    classes = "--label_column label --condition_dropout 0.1"
    run_script(monkeypatch, "train.py", digits, classes, SMALL_IMAGE, SHORT)
    pipeline = check_run(tmp_path / "digits")
    assert (pipeline.scheduler.config.num_classes, pipeline.denoiser.num_class_labels) == (17, 10)
    with pytest.raises(SystemExit, match="error: label_column is 'label', and classes are those of images"):
        run_script(monkeypatch, "train.py", text, classes, SMALL_TEXT, SHORT)


def test_a_folder_of_texts(data, tmp_path, monkeypatch):
    """One file per split, beside files that are no data; without a file for a split, the error names what is missing."""
    folder, text = tmp_path / "novel", (data / "text.txt").read_text()
    (folder / ".git").mkdir(parents=True)
    (folder / "README.md").write_text("my novel")
    (folder / "novel.train.txt").write_text(text)
    options = f"--dataset_path {folder} --output_dir {tmp_path / 'run'}", SMALL_TEXT, SHORT
    with pytest.raises(SystemExit, match="novel has no file of the validation split: add one with a name like"):
        run_script(monkeypatch, "train.py", *options)
    (folder / "novel.validation.txt.gz").write_bytes(gzip.compress(b"Z" + text[:999].encode()))
    run_script(monkeypatch, "train.py", *options)
    assert check_run(tmp_path / "run").tokenizer.mask_token_id == len(set(text) | {"Z"})
    with pytest.raises(SystemExit, match="error: label_column is 'label', and classes are those of images"):
        run_script(monkeypatch, "train.py", *options, "--label_column label")


@pytest.mark.parametrize("num_levels", [2, 8, 17, 256])
def test_the_preset_of_images_reaches_noise_with_any_number_of_levels(num_levels):
    script = runpy.run_path(str(EXAMPLES / "train.py"))
    words = ["--preset", "images", "--num_levels", str(num_levels), "--num_train_timesteps", "200"]
    process, _, _, _ = parse_arguments(
        (ProcessArguments, script["DataArguments"], ImageModelArguments, D3PMTrainingArguments),
        script["PRESETS"],
        "",
        arguments=words if num_levels < 256 else words[:4],
    )
    dataset = Rows(np.random.default_rng(0).integers(0, num_levels, (4, 1, 8, 8)), num_levels)
    scheduler = create_scheduler(process, dataset, num_levels)
    assert scheduler.config.beta_schedule == ("linear" if num_levels == 256 else "mutual_information")
    assert prior_loss(scheduler, dataset[0]).mean() < 0.01


@pytest.mark.parametrize(
    "channels, num_groups",
    [([128, 256, 256, 256], 32), ([32, 64, 64], 8), ([256, 512], 32), ([24, 40], 2), ([14, 28], 2), ([3, 6], 1)],
    ids=str,
)
def test_four_channels_are_normalized_together(channels, num_groups):
    """Or more, if the channels of each level could not be divided otherwise."""
    assert count_groups(ImageModelArguments(block_out_channels=channels)) == num_groups


def test_what_is_refused_is_said_in_a_sentence(data, tmp_path, monkeypatch):
    """The script ends with it; errors of others keep their stack."""
    (tmp_path / "short.txt").write_text("the cat")
    for options, sentence in (
        (f"--dataset_path {tmp_path / 'none.txt'}", "error: .*none.txt"),
        (
            f"--dataset_path {tmp_path / 'short.txt'}",
            "error: the train split of .*short.txt has 6 of its 7 "
            "characters, fewer than length=16: pass a text of at least 18 characters, a folder .*--sequence_length",
        ),
        (
            f"--dataset_path {data / 'text.txt'} --train_batch_size 5000",
            "error: the data set has .* use a smaller batch",
        ),
        (
            f"--dataset_path {data / 'text.txt'} --transition rate",
            "error: transition is 'rate', which needs rate_matrix: pass --tensors_path",
        ),
    ):
        with pytest.raises(SystemExit, match=sentence):
            run_script(monkeypatch, "train_text8.py", SMALL_TEXT, SHORT, options, f"--output_dir {tmp_path / 'run'}")

    def broken():
        torch.zeros(2).reshape(3)

    def of_others():
        json.loads("x")

    with pytest.raises(RuntimeError):
        scripts.run_script(broken)
    with pytest.raises(ValueError, match="Expecting value"):
        scripts.run_script(of_others)


def launch_without_data(folder, *options):
    """Lets Accelerate start a script whose data does not exist, and returns its end and the sentence that says so."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", *options]
    script = [EXAMPLES / "train.py", "--dataset_path", folder / "none.txt", "--output_dir", folder]
    ended = subprocess.run(list(map(str, [*launch, *script])), env=ENVIRONMENT, capture_output=True, text=True)
    return ended, f"the path {folder / 'none.txt'} does not exist: pass the path of a text file"


@pytest.mark.slow
def test_a_launcher_ends_with_the_sentence(tmp_path):
    """With --quiet, as our commands have it."""
    ended, sentence = launch_without_data(tmp_path)
    assert ended.returncode == 1 and f"error: {sentence}" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_launcher_of_several_processes_reports_the_sentence(tmp_path):
    config = EXAMPLES / "accelerate_configs/two_cpu_processes.yaml"
    ended, sentence = launch_without_data(tmp_path, "--main_process_port", "0", "--config_file", config)
    assert ended.returncode and sentence in ended.stderr.partition("Root Cause")[2]


def test_a_folder_that_another_run_writes_to(data, tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    with (
        FileLock(tmp_path / "text" / LOCK_NAME),
        pytest.raises(SystemExit, match=r"^error: another run is writing to .*text: wait for its end, or pass"),
    ):
        folders = f"--dataset_path {data / 'text.txt'} --output_dir {tmp_path / 'text'}"
        run_script(monkeypatch, "train_text8.py", folders, SMALL_TEXT, SHORT)


def test_data_without_the_extra(data, tmp_path, monkeypatch):
    """A missing package is named with the extra that has it, without a stack of calls."""
    for module, path, extra in (("datasets", data / "images", "training"), ("sklearn.datasets", "digits", "demo")):
        monkeypatch.setitem(sys.modules, module, None)
        options = f"--preset images --dataset_path {path} --output_dir {tmp_path / 'run'}"
        with pytest.raises(SystemExit, match=rf"^error: .* pip install 'd3pm-hf\[{extra}\]'$"):
            run_script(monkeypatch, "train.py", options, SMALL_IMAGE, SHORT)


def test_demo(tmp_path, monkeypatch, capsys):
    steps = "--max_text_steps 2 --max_image_steps 2 --max_eval_samples 2"
    run_script(monkeypatch, "demo.py", f"--output_dir {tmp_path / 'outputs'}", steps)
    made = {path.name for path in (tmp_path / "outputs").iterdir()}
    ready = {"ready_mnist.png", "ready_binarized-mnist.png"}
    assert made == {"text", "digits", *ready, "digits.png", "digits.gif", "progressive.png", "text.html"}
    printed = capsys.readouterr().out
    assert len(re.findall("(?:text8|pieces)-absorbing: '", printed)) == 4 and "ready_mnist.png" in printed
    assert "-> 534678912672195348198342567" in printed  # the puzzle is solved
    assert re.search(r"-> And it came to pass in those days, that the king of \w+ went up against \w+\.", printed)
    assert "bits per pixel" in printed and "Next: " in printed
    per_character, per_piece = (
        float(re.search(rf"([\d.]+) ± [\d.]+ bits per {unit}", printed)[1]) for unit in ("character", "word piece")
    )
    assert 4 < per_piece / per_character < 6 and "4096 word pieces" in printed  # letters of a piece
    for name in made - {"text", "digits"}:
        assert name in printed
    with Image.open(tmp_path / "outputs/digits.gif") as animation:
        assert animation.n_frames > 3


@pytest.mark.slow
def test_timesteps_and_samplers_of_images(tmp_path, monkeypatch, capsys):
    """Timesteps are chosen and stored with the checkpoint, whose samplers then stand side by side in a table."""
    sizes = "--beta_schedule mutual_information --max_train_steps 2 --num_train_timesteps 12 --num_examples 4 --grid 6 --max_eval_samples 4 --steps 2 4"
    run_script(monkeypatch, "optimal_timesteps.py", sizes, f"--output_dir {tmp_path}")
    assert len(re.findall(r"^\| [24] \|", capsys.readouterr().out, re.MULTILINE)) == 2
    scheduler = d3pm_hf.D3PMScheduler.from_pretrained(tmp_path / "scheduler")
    scheduler.register_inference_timesteps({4: [11, 5, 2, 0]})  # so few examples may not be enough to choose
    scheduler.save_pretrained(tmp_path / "scheduler")
    sizes = "--steps 12 4 --num_corrected_steps 3 --turns 1 --batch_size 64 --max_eval_samples 4 --num_classifier_steps 100"
    run_script(monkeypatch, "image_samplers.py", str(tmp_path), sizes)
    printed = capsys.readouterr().out
    assert float(re.search(r"reads ([\d.]+)% of the test digits", printed)[1]) > 80
    cells = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")][2:]
    rows = {title: others for title, *others in cells}
    calls = {"12 even": 12, "4 even": 4, "4 chosen": 4, "3 even, forward-backward": 5, "3 even, gibbs": 5}
    assert {title: int(row[0]) for title, row in rows.items() if row[0].strip()} == calls
    *drawn, real = (float(row[-1]) for row in rows.values())
    assert "297 real test images" in rows and 0 < real < min(drawn)  # the network has hardly been trained
    assert rows["4 even"][3] != rows["4 chosen"][3] and not rows["3 even, gibbs"][3].strip()
    assert len(list(tmp_path.glob("samples_*.png"))) == len(calls)


def test_reverse_strings(tmp_path, monkeypatch, capsys):
    """Untrained, it prints whatever it writes behind each prompt; the saved pipeline writes the same."""
    num_threads = torch.get_num_threads()
    sizes = "--num_train_strings 20 --num_test_strings 4 --train_batch_size 4 --num_inference_steps 3"
    run_script(monkeypatch, "reverse_strings.py", "--max_train_steps 2", sizes, f"--output_dir {tmp_path / 'run'}")
    torch.set_num_threads(num_threads)
    _, summary, _, *lines, last = capsys.readouterr().out.splitlines()
    assert summary.startswith("Trained for 2 steps") and len(lines) == 4
    assert re.fullmatch(r"exact match: 0.0% of 4 held-out strings", last)
    pipeline = D3PMPipeline.from_pretrained(tmp_path / "run")
    pipeline.set_progress_bar_config(disable=True)
    options = {"max_new_tokens": 13, "num_inference_steps": 3, "generator": torch.Generator().manual_seed(0)}
    assert pipeline([f"{line.split('>')[0]}>" for line in lines], **options).texts == lines


# The command line


def test_presets_and_flags():
    presets = {"a": {"transition": "uniform", "learning_rate": 1.0}, "b": {"learning_rate": 2.0, "seed": 3}}
    classes = (ProcessArguments, D3PMTrainingArguments)

    def parse(line, **kwargs):
        return parse_arguments(classes, presets, "", arguments=line.split(), **kwargs)

    for arguments in ({"line": "--preset a,b --seed 4"}, {"line": "--preset b --seed 4", "default_preset": "a"}):
        process, training = parse(**arguments)
        assert (process.transition, training.learning_rate, training.seed) == ("uniform", 2.0, 4)
    for flag in ("--beta_schedule cosine", "--schedule cosine", "--schedule=cosine"):  # the others are earlier names
        process, training = parse(f"--preset a {flag}")
        assert (process.transition, process.beta_schedule, training.learning_rate) == ("uniform", "cosine", 1.0)
    for flags in (
        "--loss hybrid --auxiliary denoising",
        "--loss hybrid_denoising",
        "--loss=hybrid_denoising --seed 3",
    ):
        _, training = parse(flags)
        assert (training.loss, training.auxiliary) == ("hybrid", "denoising")
    _, training = parse("--output_dir hybrid_denoising --loss hybrid_denoising")  # a folder is no loss
    assert (training.output_dir, training.loss) == ("hybrid_denoising", "hybrid")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--preset c", "there is no preset 'c': choose from a"),
        ("--transition blur", "invalid choice: 'blur'"),
        ("--what 3", "--what"),
    ],
)
def test_a_command_line_that_cannot_be(line, message, capsys):
    with pytest.raises((SystemExit, ValueError)) as error:
        parse_arguments((ProcessArguments,), {"a": {}}, "", arguments=line.split())
    assert message in capsys.readouterr().err + str(error.value)


@pytest.mark.parametrize("name", ["train_text8.py", "train_lm1b.py", "train_cifar10.py", "train.py"])
def test_help_shows_the_presets(name, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_script(monkeypatch, name, "--help")
    shown = capsys.readouterr().out
    assert "--learning_rate" in shown and "cpu: " in shown and "accelerate launch" in shown


RATES = torch.tensor([[-1.0, 1, 0], [0.5, -1, 0.5], [0, 1, -1]], dtype=torch.float64)
STAYS = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]], dtype=torch.float64)


def scheduler_of(path=None, tensors=None, **process):
    """The scheduler of a command line over three states, of which the data show two: 0 thirty times, 1 ten times."""
    if tensors is not None:
        save_file(tensors, path)
    dataset = Rows(np.repeat([0, 0, 0, 1], 10).reshape(4, 10), 3)
    return create_scheduler(ProcessArguments(num_train_timesteps=4, tensors_path=path, **process), dataset, 3)


@pytest.mark.filterwarnings(
    "ignore:after 4 steps q", "ignore:'d3pm_hf.training.script_arguments' found in sys.modules"
)
def test_a_process_from_a_file(tmp_path):
    """`rate`, `matrix` and `stationary` are the processes that the file defines."""
    path = str(tmp_path / "process.safetensors")
    transition = scheduler_of(path, {"rate_matrix": RATES}, transition="rate", beta_schedule="cosine").transition
    exponents = exponents_from_betas(cosine_betas(4)).cumsum(0)
    for t in range(1, 4):
        assert torch.allclose(transition.matrix(0, t), torch.matrix_exp(exponents[t - 1] * RATES), atol=1e-12)
    transition = scheduler_of(path, {"transition_matrices": STAYS}, transition="matrix").transition
    for t in range(5):
        assert torch.allclose(transition.matrix(0, t), torch.linalg.matrix_power(STAYS, t), atol=1e-12)
    pi = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    scheduler = scheduler_of(path, {"stationary_probs": pi}, transition="stationary")
    assert torch.allclose(scheduler.transition.matrix(0, 4), pi.expand(3, 3), atol=1e-12)
    # Without a file the frequencies of the data, each state counted once more.
    scheduler = scheduler_of(transition="stationary")
    expected = torch.tensor([31 / 43, 11 / 43, 1 / 43], dtype=torch.float64)
    assert torch.allclose(scheduler.transition.matrix(0, 4), expected.expand(3, 3), atol=1e-12)


def test_a_process_from_a_file_that_will_not_do(tmp_path):
    path = str(tmp_path / "process.safetensors")
    for words, options in (
        ("transition is 'rate', which needs rate_matrix: pass --tensors_path", {"transition": "rate"}),
        ("transition is 'matrix', which needs transition_matrices: pass --tensors_path", {"transition": "matrix"}),
        (r"holds the tensors \['rates'\], and a 'rate' process takes rate_matrix",
         {"transition": "rate", "path": path, "tensors": {"rates": RATES}}),
        (r"holds the tensors \['rate_matrix', 'x'\], and a 'rate' process takes rate_matrix",
         {"transition": "rate", "path": path, "tensors": {"rate_matrix": RATES, "x": RATES + 1}}),
        ("and a 'uniform' process needs no tensors: leave it out", {"transition": "uniform", "path": path}),
        (r"rate_matrix has the shape \(2, 2\).*\(3, 3\)",
         {"transition": "rate", "path": path, "tensors": {"rate_matrix": torch.eye(2)}}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            scheduler_of(**options)
    with pytest.raises(OSError, match="nowhere cannot be read as safetensors"):
        scheduler_of(str(tmp_path / "nowhere"), transition="rate")


@register_transition("given", "states move by a given matrix")
class GivenTransition(MatrixTransition):
    """A family from outside the package, with a tensor of its own."""

    required_tensors = ("step_matrix",)

    @classmethod
    def create(cls, settings):
        return cls(settings.tensors["step_matrix"], settings.num_steps)

    @classmethod
    def input_tensors(cls):
        return cls.required_tensors

    @classmethod
    def tensor_shapes(cls, num_classes, num_steps):
        return {"step_matrix": [(num_classes, num_classes)]}


@pytest.mark.filterwarnings(
    "ignore:after 4 steps q", "ignore:'d3pm_hf.training.script_arguments' found in sys.modules"
)
def test_a_family_of_ones_own_on_the_command_line(tmp_path, capsys):
    """`--transition`, `--tensors_path` and `--help` know what is registered before the arguments are imported."""
    arguments = runpy.run_module("d3pm_hf.training.script_arguments")

    def parse(*words):
        return arguments["parse_arguments"]((arguments["ProcessArguments"],), {}, "", arguments=list(words))[0]

    with pytest.raises(SystemExit):
        parse("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "given: states move by a given matrix." in shown and "given: step_matrix." in shown
    words = ["--transition", "given", "--num_train_timesteps", "4"]
    dataset = Rows(np.zeros((4, 10), dtype=np.int64), 3)
    with pytest.raises(ValueError, match="transition is 'given', which needs step_matrix: pass --tensors_path"):
        create_scheduler(parse(*words), dataset, 3)
    save_file({"step_matrix": STAYS}, tmp_path / "given.safetensors")
    process = parse(*words, "--tensors_path", str(tmp_path / "given.safetensors"))
    transition = create_scheduler(process, dataset, 3).transition
    assert isinstance(transition, GivenTransition)
    assert torch.allclose(transition.matrix(0, 3), torch.linalg.matrix_power(STAYS, 3), atol=1e-12)


def test_training_with_given_rates(data, tmp_path, monkeypatch):
    """The checkpoint has the rates of the file, and not those of nearest neighbors in the data."""
    rates = torch.ones(27, 27) - 27 * torch.eye(27)
    save_file({"rate_matrix": rates}, tmp_path / "rates.safetensors")
    options = f"--transition rate --tensors_path {tmp_path / 'rates.safetensors'} --output_dir {tmp_path / 'run'}"
    run_script(monkeypatch, "train_text8.py", f"--dataset_path {data / 'text.txt'}", options, SMALL_TEXT, SHORT)
    scheduler = check_run(tmp_path / "run").scheduler
    stay = scheduler.transition.matrix(0, 1)[0, 0]  # uniform noise, by its rates: all states are alike
    assert torch.allclose(scheduler.transition.matrix(0, 1), uniform_matrix(27, stay), atol=1e-12)


def uniform_matrix(num_classes, stay):
    """All states change with equal chances, and stay with probability `stay`."""
    change = (1 - stay) / (num_classes - 1)
    return torch.full((num_classes, num_classes), change.item(), dtype=torch.float64).fill_diagonal_(stay.item())


def test_given_embeddings(tmp_path):
    class Tokens:
        num_tokens = 5

    save_file({"vectors": torch.eye(5)}, tmp_path / "vectors.safetensors")
    assert torch.equal(load_embeddings(tmp_path / "vectors.safetensors", Tokens()), torch.eye(5))
    save_file({"vectors": torch.eye(4)}, tmp_path / "vectors.safetensors")
    with pytest.raises(ValueError, match=r"holds tensors of shape \[\(4, 4\)\]: one of shape \(5, d\) is needed"):
        load_embeddings(tmp_path / "vectors.safetensors", Tokens())
    (tmp_path / "vectors.safetensors").write_text("no tensors")
    with pytest.raises(OSError, match="cannot be read as safetensors"):
        load_embeddings(tmp_path / "vectors.safetensors", Tokens())


@pytest.mark.parametrize("path", sorted((EXAMPLES / "accelerate_configs").glob("*.yaml")), ids=lambda path: path.name)
def test_accelerate_configs_are_read(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes == yaml.safe_load(path.read_text())["num_processes"]


def test_a_table(monkeypatch, tmp_path, capsys):
    seasons = np.random.default_rng(0).integers(0, 4, 120)
    place = ["here"] * 120
    place[np.random.default_rng(0).permutation(120).argmin()] = (
        "there"  # a category of the rows that are held out alone
    )
    rows = "\n".join(
        f"{i},{s},{'clear' if s % 2 else 'gray'},{10 * s + i % 3},{place[i]}" for i, s in enumerate(seasons)
    )
    (tmp_path / "data.csv").write_text("id,season,sky,degrees,place\n" + rows)
    options = [
        "--drop",
        "id",
        "--target",
        "sky",
        "--output_dir",
        str(tmp_path / "mine"),
        "--max_train_steps",
        "3",
        "--hidden_size",
        "8",
    ]
    run_script(monkeypatch, "train_table.py", str(tmp_path / "data.csv"), *options)
    shown = capsys.readouterr().out
    assert "sky predicted from real rows: macro F1 1.000" in shown and "sky predicted from drawn rows" in shown
    assert isinstance(D3PMPipeline.from_pretrained(tmp_path / "mine"), D3PMTablePipeline)
    with pytest.raises(SystemExit, match="error: --drop has 'moon', which is no column of"):
        run_script(monkeypatch, "train_table.py", str(tmp_path / "data.csv"), "--drop", "moon")
    with pytest.raises(SystemExit, match="error: column 'id' counts the rows, from"):
        run_script(monkeypatch, "train_table.py", str(tmp_path / "data.csv"), "--output_dir", str(tmp_path / "other"))
