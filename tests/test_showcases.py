# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""`examples/binarized_mnist.py` and `examples/molecules.py`: their data, and each command for a few steps."""

import sys

import binarized_mnist
import molecules
import numpy as np
import pytest
import torch
from PIL import Image

from d3pm_hf import D3PMPipeline


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
    sizes = ["--max_train_steps", 2, "--train_batch_size", 4]
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
    assert len(capsys.readouterr().out.splitlines()) == 1 + 3 * 5
    path = tmp_path / "molecules.png"
    run(monkeypatch, molecules, "picture", *checkpoint, "--output", path)
    with Image.open(path) as picture:
        assert picture.size == (8 * 160, 2 * 140)
