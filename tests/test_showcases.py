# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""`binarized_mnist.py`, `mnist.py` and `molecules.py` of `examples/`: their data, and each command for a few steps."""

import gzip
import sys
from pathlib import Path

import binarized_mnist
import mnist
import molecules
import numpy as np
import pytest
import torch
from PIL import Image

from d3pm_hf import D3PMPipeline, evaluate_bound


pytestmark = pytest.mark.usefixtures("fresh_accelerator")
SMILES = ["CC(=O)N", "c1cc[nH]c1", "C1CC2CC12", "CCO", "C[NH2+]CC([O-])=O", "N#CC1CC1", "OC1CCC1=O", "CC#C"]


def run(monkeypatch, module, *arguments):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()


# Binarized MNIST


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """20 images of zeros and ones per split, as `.npz` and as `.amat`."""
    folder = tmp_path_factory.mktemp("digits")
    splits = {
        name: np.random.default_rng(i).integers(0, 2, (20, 784)) for i, name in enumerate(["train", "valid", "test"])
    }
    np.savez(folder / "digits.npz", **{name: np.packbits(bits, axis=1) for name, bits in splits.items()})
    for name, bits in splits.items():
        np.savetxt(folder / f"binarized_mnist_{name}.amat", bits, fmt="%d")
    return folder


def test_both_files_hold_the_same_images(digits):
    for split in ("train", "test"):
        images = binarized_mnist.load_images(str(digits / "digits.npz"), split)
        assert images.shape == (20, 1, 28, 28) and set(np.unique(images)) == {0, 2}
        assert np.array_equal(images, binarized_mnist.load_images(str(digits), split))


def test_images_of_another_size_are_refused(tmp_path):
    np.savez(tmp_path / "small.npz", test=np.zeros((2, 8), dtype=np.uint8))
    with pytest.raises(ValueError, match="write 784 zeros and ones"):
        binarized_mnist.load_images(str(tmp_path / "small.npz"), "test")


def test_binarized_mnist(digits, tmp_path, monkeypatch, capsys):
    data, folder = ["--data", digits / "digits.npz"], tmp_path / "run"
    sizes = ["--max_train_steps", 2, "--train_batch_size", 2]
    run(monkeypatch, binarized_mnist, "train", *data, *sizes, "--output_dir", folder)
    pipeline = D3PMPipeline.from_pretrained(folder)
    assert pipeline.scheduler.never_data == (1,)
    states = pipeline(batch_size=2, num_inference_steps=2, output_type="latent").images
    assert set(states.unique().tolist()) <= {0, 2}
    capsys.readouterr()
    monkeypatch.setattr(binarized_mnist, "evaluate_likelihood", lambda pipeline, batches, **options: fake(batches))
    counts = ["--num_images", 4, "--num_ordered", 4, "--orders", "margin"]
    run(monkeypatch, binarized_mnist, "evaluate", *data, "--checkpoint", folder, *counts)
    lines = capsys.readouterr().out.splitlines()
    bound = float(lines[-2].split()[-3])  # images of independent bits
    assert 784 * 0.6 < bound < 784 * 1.2 and lines[-1].split()[:4] == ["margin", "(exact)", "4", "5.00"]


def test_the_checkpoint_paints_digits():
    """Samples have the share of white pixels of the data, 13 %, and pixels that agree with their neighbors as those of digits do."""
    pipeline = binarized_mnist.load_pipeline(binarized_mnist.CHECKPOINT)
    settings = {"num_inference_steps": 50, "generator": torch.Generator().manual_seed(0), "output_type": "latent"}
    states = pipeline(batch_size=8, **settings).images
    white = states == 2
    agree = (white[..., 1:] == white[..., :-1]).float().mean()
    assert set(states.unique().tolist()) == {0, 2} and 0.08 < white.float().mean() < 0.2 and agree > 0.88
    # Given the upper half of an image, the lower half is drawn and the upper one stays.
    mask = torch.zeros(28, 28)
    mask[14:] = 1
    again = pipeline(image=states.float() / 2, mask_image=mask, **settings).images
    assert torch.equal(again[..., :14, :], states[..., :14, :]) and not torch.equal(again, states)


def fake(batches):
    """One call per pixel takes too long for a test."""
    assert [batch.shape for batch in batches] == [(4, 1, 28, 28)]
    return type("Result", (), {"nats_per_example": torch.full((4,), 5.0)})


def test_a_picture_of_binarized_mnist(digits, tmp_path, monkeypatch):
    class Process:
        """The draws take a call of the network per pixel."""

        decode = binarized_mnist.create_pipeline().decode

        def __call__(self, batch_size=16, image=None, mask_image=None, **settings):
            drawn = torch.full((16, 1, 28, 28), 2)
            return type("Output", (), {"images": drawn})

    monkeypatch.setattr(binarized_mnist, "load_pipeline", lambda folder: Process())
    path = tmp_path / "picture.png"
    run(monkeypatch, binarized_mnist, "picture", "--data", digits / "digits.npz", "--output", path)
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("L"))
    assert pixels.shape == (4 * 124, 16 * 124)  # each image four times as large, in a frame of 6 pixels
    rows = pixels.reshape(4, 124, 16, 124)[:, 6:-6:4, :, 6:-6:4].transpose(0, 2, 1, 3)  # [4, 16, 28, 28]
    samples, images, halves, completed = rows
    assert (samples == 255).all() and (completed == 255).all() and set(np.unique(images)) == {0, 255}
    assert np.array_equal(halves[:, :14], images[:, :14]) and len(np.unique(halves[:, 14:])) == 1


# MNIST


def quarters(labels):
    """Images `[n, 28, 28]` of bytes: noise, and brighter quarters, which are the class + 1 in binary digits."""
    images = np.random.default_rng(0).integers(0, 80, (len(labels), 2, 14, 2, 14))
    bits = (labels[:, None] + 1) >> np.arange(4) & 1
    return (images + 150 * bits.reshape(-1, 2, 1, 2, 1)).reshape(-1, 28, 28).astype(np.uint8)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A folder with the four files of MNIST: 980 images for training, of which 20 are for validation, and 20 for testing."""
    folder = tmp_path_factory.mktemp("numbers")
    for name, count in (("train", 980), ("t10k", 20)):
        labels = np.tile(np.arange(10, dtype=np.uint8), count // 10)
        for values, suffix in ((quarters(labels), "images-idx3"), (labels, "labels-idx1")):
            header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes()
            (folder / f"{name}-{suffix}-ubyte").write_bytes(header + values.tobytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(mnist.SPLITS, "train", ("train", slice(-20)))
        patch.setitem(mnist.SPLITS, "valid", ("train", slice(-20, None)))
        yield folder


def test_the_files_of_mnist_are_read(numbers, tmp_path):
    digits = {split: mnist.load_digits(str(numbers), split) for split in mnist.SPLITS}
    assert [len(part) for part in digits.values()] == [960, 20, 20]
    test = digits["test"]
    assert test.tokens.shape == (20, 1, 28, 28) and test.labels.tolist() == [*range(10)] * 2
    assert np.array_equal(test.tokens[:, 0], quarters(test.labels) // 16) and test.tokens.max() == 14
    for path in numbers.glob("t10k*"):
        (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert np.array_equal(mnist.load_digits(str(tmp_path), "test").tokens, test.tokens)
    with pytest.raises(FileNotFoundError, match="train-images-idx3-ubyte is missing: pass --data"):
        mnist.load_digits(str(tmp_path), "train")


def test_mnist(numbers, tmp_path, monkeypatch, capsys):
    data, folder = ["--data", numbers], tmp_path / "run"
    sizes = ["--max_train_steps", 2, "--train_batch_size", 2, "--mixed_precision", "no"]
    run(monkeypatch, mnist, "train", *data, *sizes, "--output_dir", folder)
    pipeline = D3PMPipeline.from_pretrained(folder)
    assert pipeline.denoiser.null_class == 10 and pipeline.scheduler.config.prediction_type == "logistic"
    drawn = mnist.draw(pipeline, 11, 0, num_inference_steps=1, guidance_scale=1.0)
    assert drawn.shape == (110, 1, 28, 28) and 0 <= drawn.min() <= drawn.max() <= 15
    # The samples of an untrained network are noise: they are real images here, one of twenty with the wrong class.
    labels = np.repeat(np.arange(10), 2)
    labels[1] = 7
    calls = []
    monkeypatch.setattr(
        mnist, "draw", lambda *args, **options: calls.append(options) or quarters(labels)[:, None] // 16
    )
    capsys.readouterr()
    counts = ["--num_images", 4, "--num_per_class", 2, "--guidance_scales", 1, 3, "--num_inference_steps", 9]
    run(monkeypatch, mnist, "evaluate", *data, "--checkpoint", folder, *counts)
    lines = capsys.readouterr().out.splitlines()
    assert calls == [{"guidance_scale": scale, "num_inference_steps": 9} for scale in (1.0, 3.0)]
    assert "bound given the class" in lines[0] and "reads 100.00% of 20 test images; 9 steps" in lines[1]
    real, first, second = (line.split() for line in lines[3:6])
    assert real[0] == "(real)" and real[2:] == ["100.0%"] + 10 * ["100%"]
    assert first[0] == "1" and first[2:] == ["95.0%", "50%"] + 9 * ["100%"] and second[1:] == first[1:]
    assert float(real[1]) < float(first[1])


@pytest.fixture(scope="module")
def real():
    """The first ten test images of each class of MNIST, `[100, 1, 28, 28]`, class by class."""
    with Image.open(Path(__file__).parent / "fixtures" / "mnist.png") as picture:
        pixels = np.asarray(picture.convert("L"))
    return torch.from_numpy(pixels // 17).long().view(10, 28, 10, 28).transpose(1, 2).reshape(100, 1, 28, 28)


def test_the_checkpoint_draws_the_digit_that_is_asked_for(real):
    """The nearest of 100 real images has the class of a sample in most cases; of a test image it has in 70 %."""
    pipeline = mnist.load_pipeline(mnist.CHECKPOINT)
    states = torch.from_numpy(mnist.draw(pipeline, 4, 0, num_inference_steps=20, guidance_scale=1.5))
    nearest = torch.cdist(states.flatten(1).float(), real.flatten(1).float()).argmin(1) // 10
    assert (nearest == torch.arange(10).repeat_interleave(4)).float().mean() >= 0.8


def test_the_bound_of_the_checkpoint(real):
    """On 50 real images, as it was measured when the checkpoint was made; machines differ in the last digits."""
    pipeline = mnist.load_pipeline(mnist.CHECKPOINT)
    labels = torch.arange(10).repeat_interleave(5)
    batches = [{"x_0": real.view(20, 5, 1, 28, 28)[::2].flatten(0, 1), "condition": {"class_labels": labels}}]
    bound = evaluate_bound(pipeline.scheduler, pipeline.denoiser, batches, num_inference_steps=10)
    assert bound.bits_per_dim == pytest.approx(0.5109, abs=2e-3)


def test_a_picture_of_mnist(numbers, tmp_path, monkeypatch):
    class Process:
        decode = mnist.create_pipeline(mnist.load_digits(str(numbers), "test")).decode

        def __call__(self, class_labels, num_images_per_prompt=1, **settings):
            drawn = torch.tensor(class_labels).repeat_interleave(num_images_per_prompt)  # a class is its level
            return type("Output", (), {"images": drawn[:, None, None, None].repeat(1, 1, 28, 28)})

    monkeypatch.setattr(mnist, "load_pipeline", lambda folder: Process())
    path = tmp_path / "picture.png"
    run(monkeypatch, mnist, "picture", "--data", numbers, "--output", path)
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("L"))
    assert pixels.shape == (7 * 124, 10 * 124)
    rows = pixels.reshape(7, 124, 10, 124)[:, 6:-6:4, :, 6:-6:4].transpose(0, 2, 1, 3)  # [7, 10, 28, 28]
    levels = np.round(rows / 17).astype(int)
    assert (levels[[0, 1, 2, 3, 6]] == np.arange(10)[:, None, None]).all()
    assert np.array_equal(levels[4], quarters(np.arange(10)) // 16)
    assert np.array_equal(levels[5, :, :14], levels[4, :, :14]) and (levels[5, :, 14:] == 8).all()


# Molecules


@pytest.fixture(scope="module")
def smiles(tmp_path_factory):
    path = tmp_path_factory.mktemp("molecules") / "smiles.csv"
    path.write_text("smiles\n" + "\n".join(SMILES * 3) + "\n")
    return path


def test_tokens_are_atoms_bonds_branches_and_rings():
    assert molecules.split_tokens("C[NH2+]CC(=O)ClBr%10c1") == [
        *("C", "[NH2+]", "C", "C", "(", "=", "O", ")", "Cl", "Br", "%10", "c", "1")
    ]
    assert [molecules.count_rings(text) for text in SMILES] == [0, 1, 2, 0, 0, 1, 1, 0]
    tokenizer = molecules.create_tokenizer(SMILES)
    tokens = molecules.encode(tokenizer, SMILES, 16)
    assert tokens.shape == (8, 16) and tokens.max() == tokenizer.pad_token_id < tokenizer.mask_token_id
    assert tokenizer.batch_decode(tokens, skip_special_tokens=True) == SMILES


def test_only_possible_molecules_are_valid():
    assert [molecules.canonical([text])[0] is None for text in ("OCC", "C1CC", "C(C)(C)(C)(C)C", "CC(", "")] == [
        *(False, True, True, True, True)
    ]
    assert molecules.canonical(["OCC", "C(O)C"]) == ["CCO", "CCO"]
    scores = molecules.drug_likeness(["CCO", "C1CC"])
    assert 0 < scores[0] < 1 and scores[1] == 0


def test_molecules(smiles, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(molecules, "NUM_TEST", 4)
    folder = tmp_path / "run"
    sizes = ["--max_train_steps", 2, "--train_batch_size", 4, "--mixed_precision", "no"]
    run(monkeypatch, molecules, "train", "--data", smiles, *sizes, "--output_dir", folder)
    checkpoint = ["--checkpoint", folder, "--num_samples", 6]
    capsys.readouterr()
    # An untrained network writes no molecule: the samples are real ones, one of them new, and one impossible.
    drawn = ["CCO", "OCC", "CCC", "C1CC", "CC#C", "CCC"]
    calls = []
    monkeypatch.setattr(
        molecules, "draw", lambda pipeline, count, seed, **options: calls.append(options) or drawn[:count]
    )
    names = ["first_hitting", "left_to_right"]
    run(monkeypatch, molecules, "evaluate", "--data", smiles, *checkpoint, "--samplers", *names)
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert calls == [molecules.SAMPLERS[name] for name in names]
    shares = [float(word) for word in rows[0].split() if "." in word]
    assert shares[::2] == [83.3, 60.0, 33.3]  # 5 of 6 valid, 3 of 5 unique, 1 of 3 new
    with pytest.raises(ValueError, match="choose among first_hitting"):
        run(monkeypatch, molecules, "evaluate", "--data", smiles, *checkpoint, "--samplers", "fastest")
    with pytest.raises(ValueError, match="pass --data"):
        run(monkeypatch, molecules, "evaluate", *checkpoint)


def test_molecules_are_drawn_guided_and_steered(smiles, tmp_path, monkeypatch, capsys):
    """Each command with an untrained network, whose samples are hardly ever molecules."""
    tokenizer = molecules.create_tokenizer(SMILES)
    pipeline = molecules.create_pipeline(tokenizer, 8, "absorbing")
    pipeline.save_pretrained(tmp_path / "run")
    texts = molecules.draw(pipeline, 5, 0, 3, **molecules.SAMPLERS["left_to_right"])
    assert len(texts) == 5 and all(set(molecules.split_tokens(text)) <= set(tokenizer.get_vocab()) for text in texts)
    assert not any(molecules.PAD in text or molecules.MASK in text for text in texts)
    checkpoint = ["--checkpoint", tmp_path / "run", "--num_samples", 2]
    monkeypatch.setattr(molecules, "NUM_REWARD_STEPS", 3)
    run(monkeypatch, molecules, "reward", *checkpoint)
    rows = capsys.readouterr().out.splitlines()
    assert [row.split("  ")[-1].count("%") for row in rows[1:]] == [1] * 7
    monkeypatch.setattr(molecules, "draw", lambda *arguments, **options: SMILES * 3)
    run(monkeypatch, molecules, "guide", *checkpoint)
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 1 + 2 * 5 and all(" 0.62 " in row for row in rows[1:])  # five rings of eight molecules
    path = tmp_path / "molecules.png"
    run(monkeypatch, molecules, "picture", *checkpoint, "--output", path)
    with Image.open(path) as picture:
        assert picture.size == (8 * 160, 2 * 140)


def test_the_checkpoint_of_molecules_draws_molecules_with_as_many_rings_as_asked():
    pipeline = D3PMPipeline.from_pretrained(molecules.CHECKPOINT)
    assert next(pipeline.text_model.parameters()).dtype == torch.float32  # half precision is for the file alone
    samplers = molecules.SAMPLERS["left_to_right, 0.5"]
    for rings in (0, 2):
        texts = molecules.draw(pipeline, 16, seed=0, rings=rings, **samplers)
        valid = [text for text, found in zip(texts, molecules.canonical(texts)) if found is not None]
        assert len(valid) >= 12 and sum(molecules.count_rings(text) == rings for text in valid) >= 10
    # Without a number of rings, it is drawn for each molecule.
    texts = molecules.draw(pipeline, 16, seed=0, **samplers)
    assert len({molecules.count_rings(text) for text in texts}) > 2
