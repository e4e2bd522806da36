# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Data sets: files are read correctly, items are functions of (index, seed), and bad data raise an error."""

import gzip
import io
import json
import lzma
import os
import pickle
import random
import string
import struct
import subprocess
import sys
import time
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from pydoc_data.topics import topics
from unittest.mock import patch

import datasets
import numpy as np
import pytest
import scipy.stats
import torch
from hub_server import LoopbackHub
from PIL import Image
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from d3pm_hf import D3PMImagePipeline, D3PMScheduler, create_unet
from d3pm_hf.data import (
    Rows,
    TextCrops,
    character_tokenizer,
    characters,
    cooccurrence_embeddings,
    digits,
    encoding,
    load_cifar10,
    load_images,
    load_lm1b,
    load_sentencepiece,
    load_sentences,
    load_text,
    load_text8,
    python_prose,
    sources,
    statistics,
    text8_normalize,
    token_files,
    tokenize,
    train_piece_tokenizer,
    unigram_probs,
    word_pieces,
)
from d3pm_hf.data.encoding import describe_alphabet
from d3pm_hf.data.image_modes import flatten_picture
from d3pm_hf.data.word_pieces import END_MARKS


ALPHABET = "abcdefghijklmnopqrstuvwxyz "
ENGLISH = text8_normalize(" ".join(topics[name] for name in sorted(topics)))
SENTENCES = [sentence.strip() for sentence in ENGLISH.split(" the ") if sentence.strip()]


def decode(tokens, alphabet=ALPHABET):
    return "".join(alphabet[token] for token in tokens)


# Items


def test_crops_without_a_seed_are_consecutive():
    tokens = np.arange(103, dtype=np.uint8)
    ds = TextCrops(tokens, 10, 103)
    assert len(ds) == 10 and ds.num_tokens == 103
    assert torch.cat(list(ds)).equal(torch.arange(100))  # iteration ends where the items do
    assert ds[3].dtype == torch.long and ds[-1].equal(ds[9])
    for index in (10, -11, (10, 3)):
        with pytest.raises(IndexError):
            ds[index]


def test_random_crops_start_uniformly_in_their_stretch():
    ds = TextCrops(np.arange(103, dtype=np.uint8), 10, 103)
    for index, room in ((0, 10), (4, 10), (9, 4)):  # the last one must end with the text
        starts = [int(ds[index, seed][0]) - 10 * index for seed in range(2000)]
        counts = np.bincount(starts, minlength=room)
        assert len(counts) == room and scipy.stats.chisquare(counts).pvalue > 1e-3
    crop = ds[4, 2**63 - 1]
    assert crop.equal(torch.arange(int(crop[0]), int(crop[0]) + 10))


def test_seeds_of_different_items_are_independent():
    ds = TextCrops(np.zeros(10_000, dtype=np.uint8) + np.arange(10_000, dtype=np.uint16) % 251, 100, 251)
    offsets = np.array([[(int(ds[index, seed][0]) - 100 * index) % 251 for index in (2, 3)] for seed in range(1000)])
    assert abs(np.corrcoef(offsets.T)[0, 1]) < 0.1


def test_half_of_the_images_are_mirrored():
    images = np.arange(2 * 3 * 2 * 4, dtype=np.uint8).reshape(2, 3, 2, 4)
    ds = Rows(images, 256, random_flip=True)
    assert ds[1].equal(torch.from_numpy(images[1]).long()) and ds[1].dtype == torch.long
    mirrored = [bool(ds[1, seed].equal(ds[1].flip(-1))) for seed in range(1000)]
    assert 440 < sum(mirrored) < 560
    assert all(ds[1, seed].equal(ds[1]) for seed in range(1000) if not mirrored[seed])
    plain = Rows(images, 256)
    assert all(plain[1, seed].equal(ds[1]) for seed in range(20))


def workers_view(ds, num_workers):
    """Returns items as training loads them, by pairs of an index and a seed."""
    sampler = [[(i, 7 * i) for i in range(first, first + 4)] for first in (0, 4)]
    return torch.cat(list(DataLoader(ds, batch_sampler=sampler, num_workers=num_workers)))


def test_workers_see_the_same(tmp_path):
    text = TextCrops(np.arange(200, dtype=np.uint8), 20, 200)
    np.save(tmp_path / "rows.npy", np.arange(240, dtype=np.uint16).reshape(8, 30))
    mapped = Rows(np.load(tmp_path / "rows.npy", mmap_mode="r"), 240, random_flip=True)
    for ds in (text, mapped, Rows(mapped.tokens[2:], 240)):
        sent = pickle.loads(pickle.dumps(ds))  # as a spawned worker gets it
        assert all(sent[i, 3].equal(ds[i, 3]) and sent[i].equal(ds[i]) for i in range(len(ds)))
        assert sent.num_tokens == ds.num_tokens
    assert workers_view(text, 0).equal(workers_view(text, 2))
    assert workers_view(mapped, 0).equal(workers_view(mapped, 1))


def test_a_file_is_not_copied_to_workers(tmp_path):
    np.save(tmp_path / "rows.npy", np.zeros((1000, 100), dtype=np.uint16))
    (tmp_path / "text.txt").write_text(ENGLISH[:100_000])
    text, _ = load_text(tmp_path / "text.txt", cache_dir=tmp_path / "cache")
    for ds in (Rows(np.load(tmp_path / "rows.npy", mmap_mode="r"), 5), text):
        assert len(pickle.dumps(ds)) < 1000
        sent = pickle.loads(pickle.dumps(ds))
        assert isinstance(sent.tokens, np.memmap) and sent[7, 3].equal(ds[7, 3])


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: TextCrops(np.zeros(5, np.uint8), 6, 3), "5 tokens, fewer than length=6.*smaller length"),
        (lambda: TextCrops(np.zeros(5, np.uint8), 0, 3), "length is 0"),
        (lambda: TextCrops(np.array([0, 1, 7, 2]), 2, 3), r"token 7 at position \(2,\).*vocabulary of 3"),
        (lambda: TextCrops(np.array([0, 1, -1, 2]), 2, 3), r"token -1 at position \(2,\)"),
        (lambda: Rows(np.full((2, 1, 2, 2), 9), 9), r"token 9 at position \(0, 0, 0, 0\).*vocabulary of 9"),
        (lambda: Rows(np.zeros((2, 3)), 9), "float64.*integers"),
        (lambda: Rows(np.zeros((0, 3), np.uint8), 9), r"shape \(0, 3\): pass a data set that is not empty"),
        (lambda: cooccurrence_embeddings(Rows(np.zeros((9, 2), np.uint8), 9)), "2 tokens are too short for contexts"),
        (
            lambda: cooccurrence_embeddings(Rows(np.zeros((9, 9), np.uint8), 9)),
            "have no nearest neighbors.*your own embeddings",
        ),
    ],
)
def test_tokens_that_are_not(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# Statistics


def test_unigram_probs():
    tokens = np.random.default_rng(0).integers(0, 4, 1003).astype(np.uint8)
    expected = torch.from_numpy(np.bincount(tokens, minlength=6) / 1003)
    with patch.object(statistics, "CHUNK_TOKENS", 100):  # the last characters fill no item, and count
        assert unigram_probs(TextCrops(tokens, 10, 6)).equal(expected)
    assert expected.dtype == torch.float64
    assert unigram_probs(Rows(tokens[:1000].reshape(10, 1, 10, 10), 6)).sum() == 1
    assert unigram_probs(TextCrops(tokens.astype(np.uint64), 10, 6)).equal(expected)


def test_vowels_are_near_vowels():
    ds = TextCrops(characters.encode_characters(ENGLISH), 256, 27)
    vectors = cooccurrence_embeddings(ds)
    assert vectors.dtype == torch.float32 and vectors.equal(cooccurrence_embeddings(ds))
    distances = torch.cdist(vectors, vectors).fill_diagonal_(torch.inf)
    vowels = [ALPHABET.index(letter) for letter in "aeiou"]
    neighbors = distances[vowels].topk(4, largest=False).indices
    assert torch.isin(neighbors, torch.tensor(vowels)).sum() >= 14  # of 20, where chance has 3


def cyclic_text(num_tokens=200, num_classes=6, size=20_000):
    """Tokens drawn at random from classes that follow one another; the last five tokens never come."""
    rng = np.random.default_rng(0)
    members = rng.integers(0, (num_tokens - 6) // num_classes, size)
    return (members * num_classes + np.arange(size) % num_classes).astype(np.uint16)


def test_tokens_of_a_large_vocabulary_with_the_same_contexts_are_near(monkeypatch):
    monkeypatch.setattr(statistics, "MAX_DENSE", 199)
    ds = Rows(cyclic_text().reshape(-1, 50), 200)
    vectors = cooccurrence_embeddings(ds, dim=16)
    assert vectors.shape == (200, 16) and vectors.equal(cooccurrence_embeddings(ds, dim=16))
    assert torch.allclose(vectors.norm(dim=1), torch.ones(200))
    seen = unigram_probs(ds) > 0
    assert not seen[-5:].any()
    nearest = torch.cdist(vectors, vectors).fill_diagonal_(torch.inf)[seen].argmin(1)
    assert (nearest % 6 == seen.nonzero()[:, 0] % 6).float().mean() > 0.99
    # Unseen tokens lie apart, and not all in one place, where they would have no neighbors but each other.
    assert torch.pdist(vectors[-5:]).min() > 0.3
    monkeypatch.setattr(statistics, "MAX_DENSE", 200)
    dense = cooccurrence_embeddings(ds, dim=16)
    assert torch.allclose(
        torch.cdist(dense, dense)[seen][:, seen], torch.cdist(vectors, vectors)[seen][:, seen], atol=1e-3
    )


def test_pairs_are_counted_within_rows_only():
    counts = statistics.count_pairs(np.array([[0, 1, 2], [2, 0, 1]], np.uint8), 1, 3).toarray()
    assert counts.tolist() == [[0, 2, 0], [0, 0, 1], [1, 0, 0]]


def test_a_large_corpus_is_thinned_out():
    ds = TextCrops(characters.encode_characters(ENGLISH), 64, 27)
    with (
        patch.object(statistics, "MAX_TOKENS", 100_000),
        patch.object(statistics, "count_pairs", wraps=statistics.count_pairs) as count,
    ):
        cooccurrence_embeddings(ds)
    assert 90_000 < count.call_args.args[0].size <= 100_000


# Characters


def test_text8_normalize():
    assert text8_normalize("In 1986, Élan's  2\ncats!") == "in one nine eight six lan s two cats"


def test_characters_are_those_of_the_tokenizer():
    tokens = characters.encode_characters(ENGLISH[:1000])
    assert tokens.dtype == np.uint8 and tokens.tolist() == character_tokenizer()(ENGLISH[:1000])["input_ids"]


def test_characters_beyond_the_first_chunk():
    text = "abc z" * 50
    with patch.object(characters, "CHUNK_TOKENS", 7):
        assert decode(characters.encode_characters(text)) == text
        with pytest.raises(ValueError, match=r"the character 'ü' at position 250 is not one of 'abc.*normalize"):
            characters.encode_characters(text + "ü")
        with pytest.raises(ValueError, match="character 'A' at position 3"):
            characters.encode_characters("abcABC")
        assert characters.scan_chunks([text, "ü€"]) == (len(text) + 2, " abczü€")


# Local text files


@pytest.fixture
def folder(tmp_path):
    """English text in three files with different compression, and in one file."""
    middle, end = 9000, 9500
    (tmp_path / "prose.train.txt").write_text(ENGLISH[:middle] + "\n")
    with gzip.open(tmp_path / "prose.valid.txt.gz", "wt") as file:
        file.write(ENGLISH[middle:end])
    with lzma.open(tmp_path / "prose.test.txt.xz", "wt") as file:
        file.write(ENGLISH[end:10_000])
    (tmp_path / "README").write_text("How these were made.")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "all.txt").write_text(ENGLISH[:10_000] + "\n")
    return tmp_path


@pytest.mark.parametrize(
    "split, first, last", [("train", 0, 9000), ("validation", 9000, 9500), ("test", 9500, 10_000)]
)
def test_text8_of_this_machine(folder, split, first, last):
    for path in (folder, folder / "one" / "all.txt"):
        ds = load_text8(split, dataset_path=path, length=100)
        assert decode(ds.tokens) == ENGLISH[first:last]
        assert ds.num_tokens == 27 and len(ds) == (last - first) // 100 and decode(ds[1]) == ENGLISH[first:][100:200]


def test_a_text_of_one_s_own(tmp_path):
    text = "Grüße, 世界!\n" * 100
    (tmp_path / "mine.txt").write_text(text)
    ds, tokenizer = load_text(tmp_path / "mine.txt", "validation", length=20)
    assert tokenizer.decode(ds.tokens) == text.rstrip("\n")[len(text) * 9 // 10 - 1 :][: len(ds.tokens)]
    assert ds.num_tokens == len(set(text)) == len(tokenizer) - 1 == tokenizer.mask_token_id
    # Characters of one split alone are in the alphabet of all.
    (tmp_path / "split").mkdir()
    (tmp_path / "split" / "train.txt").write_text("abcabc")
    (tmp_path / "split" / "test.txt").write_text("aXbc")
    ds, tokenizer = load_text(tmp_path / "split", "train", length=3)
    assert tokenizer.decode(ds[1]) == "abc" and ds.num_tokens == 4
    assert tokenizer.get_vocab() == load_text(tmp_path / "split", "test", length=3)[1].get_vocab()


def test_byte_order_marks_and_line_breaks_are_no_characters_of_their_own(pieces, tmp_path):
    lines = ["one two", "three four", "five"] * 20
    for end in ("\n", "\r\n", "\r"):
        path = tmp_path / f"{len(end)}{ord(end[0])}.txt"
        path.write_bytes(b"\xef\xbb\xbf" + (end.join(lines) + end).encode())
        ds, tokenizer = load_text(path, "train", 10)
        assert tokenizer.decode(ds.tokens) == "\n".join(lines)[: len(ds.tokens)] and ds.num_tokens == len(
            set("\n".join(lines))
        )
        assert list(load_sentences("train", dataset_path=path, cache_dir=tmp_path)) == lines[:54]


@pytest.mark.parametrize("name", ["novel.txt", "novel.train.txt"])
def test_one_emoji_does_not_multiply_the_memory(tmp_path, monkeypatch, name):
    """A string with an emoji takes 4 bytes per character, so that a text is never one string, and its tokens are a file."""
    monkeypatch.setattr(sources, "CHUNK_BYTES", 10_001)  # characters of several bytes are cut
    text = "Grüße an die Welt.\r\n" * 200_000 + "\U0001f600" + "\r\n" * 30_000
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    whole = text.replace("\r\n", "\n").rstrip("\n")
    source = path if name == "novel.txt" else tmp_path
    tracemalloc.start()
    try:
        ds, tokenizer = load_text(source, "train", 10)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000 < len(whole) / 1.5  # a table of all code points
    part = whole[: len(whole) * 9 // 10] if source == path else whole
    alphabet = "".join(sorted(set(whole)))
    assert "".join(alphabet[token] for token in ds.tokens) == part and len(tokenizer) == len(alphabet) + 1
    assert "".join(sources.read_chunks(path)) == whole
    path.write_bytes(text.encode()[:30_000] + b"\xff")
    with pytest.raises(ValueError, match=r"is not UTF-8 text \(byte 0xff at position 30000: invalid start byte\)"):
        load_text(source, "train", 10)


def test_text_files_that_will_not_do(folder):
    def write(content, name="bad.txt"):
        (folder / name).write_bytes(content)
        return folder / name

    for error, words, call in (
        (OSError, "nowhere does not exist: pass", lambda: load_text8(dataset_path=folder / "nowhere")),
        (OSError, "one has no file of the test split.*text.test.txt", lambda: load_text8("test", dataset_path=folder / "one")),
        (ValueError, "split is .dev.: it must be one of train, validation, test", lambda: load_text8("dev", dataset_path=folder)),
        (ValueError, "bad.txt is empty", lambda: load_text8(dataset_path=write(b"\n\n"))),
        (ValueError, "the train split of .*bad.txt has 9 of its 10 characters, fewer than length=256: pass a text of at least "
                     "285 characters", lambda: load_text8(dataset_path=write(b"abcdefghij"))),
        (ValueError, "the validation split of .*bad.txt has 12 of its 240 characters, fewer than length=64: pass a text of at "
                     "least 1280 characters, a folder with one file per split, or a smaller length",
         lambda: load_text(write(b"ab" * 120), "validation", 64)),
        (ValueError, "prose.test.txt.xz has 500 characters, fewer than length=501: pass a longer text or a smaller length",
         lambda: load_text(folder, "test", 501)),
        (ValueError, "bad.txt contains only the character 'a': pass a text with at least 2 different", lambda: load_text(write(b"a" * 6000))),
        (ValueError, "character 'B' at position 1 is not one of", lambda: load_text8(dataset_path=write(b"aB" * 600))),
        (ValueError, "bad.txt is not UTF-8 text", lambda: load_text(write(b"abc\xff" * 600))),
        (OSError, "bad.txt.xz cannot be decompressed", lambda: load_text(write(b"no xz", "bad.txt.xz"))),
        (OSError, "bad.txt.gz cannot be decompressed", lambda: load_text(write(gzip.compress(ENGLISH[:999].encode())[:50] + bytes(400), "bad.txt.gz"))),
        (OSError, "bad.txt.gz cannot be decompressed", lambda: load_text(write(gzip.compress(b"abc")[:-9], "bad.txt.gz"))),
        (OSError, "nowhere does not exist: pass", lambda: load_text(folder / "nowhere")),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            call()
    write(b"abc", "more.train.txt")
    with pytest.raises(
        ValueError, match="more.train.txt and prose.train.txt are both files of the train split: remove one"
    ):
        load_text8("train", dataset_path=folder)


# Pieces


@pytest.fixture(scope="module")
def pieces():
    return train_piece_tokenizer(SENTENCES, 500)


def check_pieces(tokenizer, vocab_size, folder):
    assert len(tokenizer) == vocab_size + 1 and tokenizer.mask_token_id == vocab_size
    assert tokenizer.eos_token == "</s>" and tokenizer.eos_token_id < vocab_size
    ids = tokenizer(SENTENCES[:200], add_special_tokens=False)["input_ids"]
    assert tokenizer.batch_decode(ids) == SENTENCES[:200]
    assert max(max(row) for row in ids) < vocab_size and len(sum(ids, [])) < sum(map(len, SENTENCES[:200])) / 1.5
    packed = [*ids[0], tokenizer.eos_token_id, *ids[1], tokenizer.mask_token_id]
    assert tokenizer.decode(packed, skip_special_tokens=True) == f"{SENTENCES[0]} {SENTENCES[1]}"
    tokenizer.save_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded.get_vocab() == tokenizer.get_vocab() and loaded.mask_token_id == vocab_size
    assert loaded(SENTENCES[:200], add_special_tokens=False)["input_ids"] == ids


def test_trained_pieces(pieces, tmp_path):
    check_pieces(pieces, 500, tmp_path)
    assert pieces.mask_token == "[MASK]"
    with pytest.raises(ValueError, match="give [0-9]+ pieces, and vocab_size is 5000: pass more text"):
        train_piece_tokenizer(SENTENCES[:20], 5000)


def test_common_words_are_pieces(pieces):
    """Words that begin no longer word are pieces too; the marks of their ends are not."""
    vocabulary = pieces.get_vocab()
    assert {"▁and", "▁are", "▁that", "▁this", "▁three", "▁self"} <= vocabulary.keys()
    assert not any(mark in piece for piece in vocabulary for mark in END_MARKS)


def test_mask_of_pieces_includes_the_space_before_it(pieces):
    ids = pieces("a list of [MASK][MASK] is", add_special_tokens=False).input_ids
    assert pieces.convert_ids_to_tokens(ids) == ["▁a", "▁list", "▁of", "[MASK]", "[MASK]", "▁is"]


def test_training_pieces_again_gives_the_same():
    """The trainer orders rare characters and tokens of equal frequency at random."""
    texts = [paragraph for name in sorted(topics)[:10] for paragraph in topics[name].split("\n\n")]
    first = train_piece_tokenizer(texts, 500).backend_tokenizer.to_str()
    for again in (iter(texts), texts[::-1]):
        assert train_piece_tokenizer(again, 500).backend_tokenizer.to_str() == first


def sentencepiece_model(pieces, special):
    """A model of sentencepiece, written as it writes them, with `[MASK]` among its pieces as that of the paper has it."""
    model_pb2 = pytest.importorskip("transformers.convert_slow_tokenizer").import_protobuf()
    proto = model_pb2.ModelProto()
    scores = dict(json.loads(pieces.backend_tokenizer.to_str())["model"]["vocab"])
    for piece in special + [piece for piece in scores if piece not in special]:
        proto.pieces.add(piece=piece, score=scores.get(piece, 0.0))
    spec = proto.trainer_spec
    spec.model_type, spec.pad_id, spec.eos_id, spec.unk_id, spec.bos_id = spec.UNIGRAM, 0, 1, 2, -1
    return proto


def test_sentencepiece(pieces, tmp_path):
    special, path = ["<pad>", "</s>", "<unk>", "[MASK]"], tmp_path / "pieces.model"
    proto = sentencepiece_model(pieces, special)
    spec = proto.trainer_spec
    path.write_bytes(proto.SerializeToString())
    tokenizer = load_sentencepiece(path)
    check_pieces(tokenizer, len(proto.pieces), tmp_path / "saved")
    assert tokenizer.convert_ids_to_tokens(list(range(4))) == special
    assert (tokenizer.mask_token, tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (
        "<mask>",
        0,
        1,
        2,
    )
    assert tokenizer.convert_ids_to_tokens(range(len(proto.pieces))) == [piece.piece for piece in proto.pieces]
    assert tokenizer("  two   spaces ")["input_ids"] == tokenizer("two spaces")["input_ids"]
    assert tokenizer.unk_token_id in tokenizer("a € sign")["input_ids"]
    path.write_bytes(b"\xff hello")
    with pytest.raises(ValueError, match="pieces.model is not a sentencepiece model"):
        load_sentencepiece(path)
    spec.model_type = spec.BPE
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ValueError, match="is not a unigram model"):
        load_sentencepiece(path)
    with pytest.raises(OSError, match="nowhere"):
        load_sentencepiece(tmp_path / "nowhere.model")


# Sentences


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "lines.train.txt"
    path.write_text("\n".join(SENTENCES[:300]) + "\n\n \n")
    return path


def test_packed_rows(pieces, lines, tmp_path):
    """The rows contain the sentences with their ends, and the words in the rows are counted."""
    stream = []
    for sentence in SENTENCES[:300]:
        stream += pieces(sentence, add_special_tokens=False)["input_ids"] + [pieces.eos_token_id]
    total = sum(len(sentence.split()) + 1 for sentence in SENTENCES[:300])
    for length in (1, 50, 128, 1000):
        with patch.object(word_pieces, "BATCH_SENTENCES", 64):
            rows = load_lm1b("train", pieces, dataset_path=tmp_path, length=length, cache_dir=tmp_path / "cache")
        kept = len(stream) // length * length
        assert rows.tokens.dtype == np.uint16 and rows.num_tokens == 500 and rows[0].shape == (length,)
        assert rows.tokens.reshape(-1).tolist() == stream[:kept]
        sentences = pieces.decode(stream[:kept]).split("</s>")
        whole = sum(len(sentence.split()) for sentence in sentences) + len(sentences) - 1
        assert whole - 1 <= rows.num_words <= whole  # a word that is cut through is not counted
        assert kept < len(stream) or rows.num_words == total


def test_rows_are_kept(pieces, lines, tmp_path):
    def load(tokenizer=pieces, length=32, **kwargs):
        return load_lm1b(
            "train", tokenizer, dataset_path=tmp_path, length=length, cache_dir=tmp_path / "cache", **kwargs
        )

    first = load()
    with patch.object(word_pieces, "pack_rows", side_effect=AssertionError):
        again = load()
        assert np.array_equal(again.tokens, first.tokens) and again.num_words == first.num_words
        other = train_piece_tokenizer(SENTENCES[:500], 400)
        for kwargs in ({"length": 16}, {"max_examples": 100}, {"tokenizer": other}):
            with pytest.raises(AssertionError):
                load(**kwargs)
        lines.write_text("\n".join(SENTENCES[:200]))
        with pytest.raises(AssertionError):
            load()
    assert len(load(max_examples=100)) < len(load()) < len(first)
    assert {file.suffix for file in (tmp_path / "cache" / "d3pm_hf").iterdir()} == {".npy", ".json", ".lock"}


def test_rows_of_data_in_memory_are_not_those_of_other_data(pieces, tmp_path, monkeypatch):
    """Data that `datasets` keeps in memory have no file that they could be known by."""
    monkeypatch.setattr(datasets.config, "IN_MEMORY_MAX_SIZE", 1 << 30)
    rows = []
    for name, first in (("one", 0), ("two", 100)):
        path = tmp_path / f"{name}.txt"
        path.write_text("\n".join(SENTENCES[first : first + 100]))
        assert not word_pieces.open_sentences("train", "", path, tmp_path, None).cache_files
        rows.append(load_lm1b("train", pieces, dataset_path=path, length=8, cache_dir=tmp_path).tokens)
    assert not np.array_equal(rows[0][:10], rows[1][:10])


def test_a_file_that_is_written_in_part_is_not_there(tmp_path):
    def write(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        token_files.write_once(tmp_path / "rows.npy", write)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.lock"]
    (tmp_path / ".rows.npy.1234.partial").write_bytes(b"half")  # of a process that was killed
    token_files.write_once(tmp_path / "rows.npy", lambda file: file.write(b"whole"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.lock", "rows.npy"]


def test_a_folder_that_cannot_be_written_to(tmp_path):
    path = tmp_path / "rows.npy"

    def write_to_full_disk(file):
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"rows")

    with pytest.raises(
        OSError, match="tokens cannot be written to .*No space left on device.*cache_dir.*HF_DATASETS_CACHE"
    ):
        token_files.write_once(path, write_to_full_disk)
    assert not path.exists()
    path.write_bytes(b"rows")
    path.with_suffix(".lock").unlink()
    path.with_suffix(".lock").mkdir()  # a lock that nobody can take
    token_files.write_once(path, write_to_full_disk)  # is not needed to read
    assert path.read_bytes() == b"rows"
    (tmp_path / "text.txt").write_text("abc " * 100)
    with pytest.raises(OSError, match="tokens cannot be written to .*rows.npy/d3pm_hf"):
        load_text(tmp_path / "text.txt", "train", 8, cache_dir=path)


def test_a_text_that_changes_while_it_is_read(tmp_path):
    """Its tokens do not stay in the cache under the name of the text that it was."""
    texts = iter(["abc" * 10, "cab" * 10, "abc" * 10, "abc" * 10])
    with pytest.raises(OSError, match="the text was changed while it was read: load it again"):
        characters.map_characters(lambda: [next(texts)], "abc", tmp_path)
    assert decode(characters.map_characters(lambda: [next(texts)], "abc", tmp_path)) == "abc" * 10


def test_one_file_of_sentences_is_cut(pieces, tmp_path):
    path = tmp_path / "all.txt.gz"
    with gzip.open(path, "wt") as file:
        file.write("\n".join(SENTENCES[:200]))
    for split, first, last in (("train", 0, 180), ("validation", 180, 190), ("test", 190, 200)):
        assert list(load_sentences(split, dataset_path=path, cache_dir=tmp_path)) == SENTENCES[first:last]
        assert len(load_sentences(split, dataset_path=path, cache_dir=tmp_path, max_examples=7)) == 7
        rows = load_lm1b(split, pieces, dataset_path=path, length=1, cache_dir=tmp_path)
        sentences = pieces.decode(rows.tokens[:, 0].tolist()).split("</s>")
        assert [sentence.strip() for sentence in sentences[:-1]] == SENTENCES[first:last]


def test_sentences_that_will_not_do(pieces, lines, tmp_path):
    def load(tokenizer=pieces, split="train", path=tmp_path, length=128):
        return load_lm1b(split, tokenizer, dataset_path=path, length=length, cache_dir=tmp_path / "cache")

    with pytest.raises(ValueError, match="no end-of-sequence token: set `tokenizer.eos_token`"):
        load(character_tokenizer())
    with pytest.raises(
        ValueError, match=r"train split of .* has 3\d\d sentences with \d+ tokens, fewer than length=100000"
    ):
        load(length=100_000)
    with pytest.raises(OSError, match="has no file of the test split"):
        load(split="test")
    lines.write_bytes(b"abc\xff\n")
    with pytest.raises(
        OSError, match="lines.train.txt cannot be loaded .*can't decode byte 0xff.*check its name, its content"
    ):
        load()
    lines.write_text("")
    with pytest.raises(ValueError, match="is empty: pass a file with one sentence per line"):
        load()


# Images


def save_images(folder, modes=("RGB",) * 4, size=(5, 4), seed=0):
    """Random pictures of a folder, and their pixels `[n, 3, H, W]`."""
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (len(modes), *size[::-1], 3), dtype=np.uint8)
    for i, mode in enumerate(modes):
        Image.fromarray(pixels[i]).convert(mode).save(folder / f"{i}.png")
    return pixels.transpose(0, 3, 1, 2)


def test_a_folder_of_images(tmp_path):
    pixels = {split: save_images(tmp_path / "set" / split, seed=seed) for seed, split in enumerate(("train", "test"))}
    for split in pixels:
        ds = load_images(tmp_path / "set", split, cache_dir=tmp_path / "cache")
        assert ds.tokens.dtype == np.uint8 and ds.num_tokens == 256 and np.array_equal(ds.tokens, pixels[split])
    flipped = load_images(tmp_path / "set", "test", random_flip=True, cache_dir=tmp_path / "cache")
    assert {bool(flipped[0, seed].equal(flipped[0])) for seed in range(20)} == {True, False}
    few = load_images(tmp_path / "set", "test", num_levels=5, cache_dir=tmp_path / "cache")
    assert few.num_tokens == 5 and np.array_equal(
        few.tokens, np.round(pixels["test"] / 255 * 4)
    )  # as the pipeline does
    square = load_cifar10("test", dataset_path=tmp_path / "set", resolution=4, cache_dir=tmp_path / "cache")
    assert square.tokens.shape == (4, 3, 4, 4) and square.random_flip


def test_images_with_classes(tmp_path):
    """One folder per class, as the package datasets reads it; and the digits."""
    for seed, name in enumerate(("cat", "dog")):
        save_images(tmp_path / "set/train" / name, seed=seed)
    ds = load_images(tmp_path / "set", label_column="label", cache_dir=tmp_path / "cache")
    assert ds.num_class_labels == 2 and sorted(ds.labels) == [0] * 4 + [1] * 4
    assert ds[0].keys() == {"x_0", "label"} and ds[7, 5]["label"] == ds.labels[7]
    assert load_images(tmp_path / "set", cache_dir=tmp_path / "cache").num_class_labels is None
    with pytest.raises(ValueError, match="has no column 'kind', only 'image', 'label'"):
        load_images(tmp_path / "set", label_column="kind", cache_dir=tmp_path / "cache")
    train, test = digits(labels=True)
    plain, _ = digits()
    assert train.num_class_labels == test.num_class_labels == 10 and len(test.labels) == 297
    assert train[3]["x_0"].equal(plain[3]) and train[3]["label"] == 3


def test_images_of_other_modes(tmp_path):
    pixels = save_images(tmp_path / "set", modes=("RGB", "L", "RGBA", "LA"))
    color = load_images(tmp_path / "set", cache_dir=tmp_path / "cache")
    assert color.tokens.shape == (4, 3, 4, 5) and np.array_equal(color.tokens[2], pixels[2])
    assert np.array_equal(color.tokens[1, 0], color.tokens[1, 2])
    gray = load_images(tmp_path / "set", grayscale=True, cache_dir=tmp_path / "cache")
    assert gray.tokens.shape == (4, 1, 4, 5) and np.array_equal(gray.tokens[1], color.tokens[1, :1])


def png(color_type, pixels, transparent=b""):
    """A PNG of 16 bits per channel, as other programs write them: Pillow writes gray ones only."""
    height, width = pixels.shape[:2]
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, color_type, 0, 0, 0)), (b"tRNS", transparent)]
    chunks += [
        (b"IDAT", zlib.compress(b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels))),
        (b"IEND", b""),
    ]
    written = (struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
               for name, data in chunks if data or name == b"IEND")  # fmt: skip
    return Image.open(io.BytesIO(b"\x89PNG\r\n\x1a\n" + b"".join(written)))


def encoded(image, format="PNG", **kwargs):
    """The picture as it comes back from a file."""
    buffer = io.BytesIO()
    image.save(buffer, format, **kwargs)
    return Image.open(buffer)


DEEP = np.random.default_rng(0).integers(0, 65536, (4, 6), dtype=np.uint16)
COLORS = np.random.default_rng(1).integers(0, 256, (4, 6, 4), dtype=np.uint8)
OVER_WHITE = COLORS[..., :3] * (COLORS[..., 3:] / 255) + 255 * (1 - COLORS[..., 3:] / 255)
PALETTE = Image.fromarray(np.array([[0, 1], [1, 0]], np.uint8), "P")
PALETTE.putpalette([255, 0, 0, 0, 0, 255])


@pytest.mark.parametrize(
    "image, expected",
    [
        (encoded(Image.fromarray(DEEP)), DEEP / 257),
        (encoded(Image.fromarray(DEEP), "TIFF"), DEEP / 257),
        (Image.open(io.BytesIO(b"P5 6 4 65535\n" + DEEP.astype(">u2").tobytes())), DEEP / 257),
        (png(0, DEEP, int(DEEP[1, 2]).to_bytes(2, "big")), np.where(DEEP == DEEP[1, 2], 255, DEEP / 257)),
        (png(2, np.stack([DEEP] * 3, -1)), DEEP / 257),
        (encoded(Image.fromarray(COLORS)), OVER_WHITE),
        (encoded(Image.fromarray(COLORS[..., [0, 3]], "LA")), OVER_WHITE[..., 0]),
        (encoded(Image.fromarray(COLORS[..., 0]), transparency=int(COLORS[1, 1, 0])),
         np.where(COLORS[..., 0] == COLORS[1, 1, 0], 255, COLORS[..., 0])),
        (encoded(PALETTE, transparency=0), [[[255] * 3, [0, 0, 255]], [[0, 0, 255], [255] * 3]]),
        (encoded(PALETTE, transparency=bytes([51, 255])), [[[255, 204, 204], [0, 0, 255]], [[0, 0, 255], [255, 204, 204]]]),
        (encoded(Image.fromarray(COLORS[..., 0] > 99)), 255 * (COLORS[..., 0] > 99)),
        (encoded(Image.fromarray(np.full((4, 6, 4), [255, 0, 0, 0], np.uint8), "CMYK"), "TIFF"), np.full((4, 6, 3), [0, 255, 255])),
    ],
    ids=["gray16", "tiff16", "pgm16", "gray16-key", "rgb16", "rgba", "la", "gray-key", "palette", "palette-alpha", "1-bit", "cmyk"],
)  # fmt: skip
def test_pictures_of_any_kind(image, expected):
    """Levels of 16 bits are scaled, and transparent pixels are composited over white, to less than one level."""
    expected = np.broadcast_to(np.reshape(expected, (image.height, image.width, -1)), (image.height, image.width, 3))
    assert np.abs(np.asarray(flatten_picture(image, "RGB")) - expected).max() < 1
    luma = expected @ [0.299, 0.587, 0.114]
    assert np.abs(np.asarray(flatten_picture(image, "L")) - luma).max() < 1.5  # rounded twice


def test_pictures_without_a_range():
    for image, words in (
        (Image.fromarray(DEEP.astype(np.int32)), r"32-bit pixels \(mode 'I'\).*convert it to 8 or 16 bits"),
        (encoded(Image.fromarray(DEEP.astype(np.float32)), "TIFF"), r"32-bit pixels \(mode 'F'\)"),
        (png(2, np.stack([DEEP] * 3, -1), b"\1\2" * 3), r"a transparent color, \(258, 258, 258\).*alpha channel"),
    ):
        with pytest.raises(ValueError, match=words):
            flatten_picture(image, "RGB")


def test_files_of_any_kind(tmp_path):
    """`load_images` and pipelines read images alike, and apply their EXIF orientation."""
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned clockwise by a quarter
    (tmp_path / "set").mkdir()
    for i, (image, format) in enumerate([(DEEP, "PNG"), (COLORS, "PNG"), (COLORS[..., :3], "WEBP")]):
        kwargs = {"lossless": True} if format == "WEBP" else {}
        Image.fromarray(image).save(tmp_path / "set" / f"{i}.{format.lower()}", format, exif=turned, **kwargs)
    expected = np.stack([np.stack([DEEP / 257] * 3, -1), OVER_WHITE, COLORS[..., :3]])
    expected = np.rot90(expected, -1, axes=(1, 2)).transpose(0, 3, 1, 2)
    pixels = load_images(tmp_path / "set", cache_dir=tmp_path / "cache").tokens  # [3, C, H, W]
    assert pixels.shape == (3, 3, 6, 4) and np.abs(pixels - expected).max() < 1
    unet = create_unet("tiny", 256, (6, 4), 3, "logistic")
    pipeline = D3PMImagePipeline(unet, D3PMScheduler(256, 4, prediction_type="logistic"))
    pictures = [Image.open(path) for path in sorted((tmp_path / "set").iterdir())]
    assert np.array_equal(pipeline.encode(pictures), pixels)
    assert np.array_equal(pipeline.encode(pictures[1])[0], pixels[1])
    gray = load_images(tmp_path / "set", grayscale=True, cache_dir=tmp_path / "cache").tokens
    mask = pipeline.encode_mask(pictures[:2])
    assert np.array_equal(mask[:, 0], gray[:2, 0] < 127.5)


def test_images_that_will_not_do(tmp_path):
    save_images(tmp_path / "set")

    def load(**kwargs):
        return load_images(tmp_path / "set", cache_dir=tmp_path / "cache", **kwargs)

    with pytest.raises(ValueError, match="has no split 'test': choose one of train"):
        load(split="test")
    with pytest.raises(ValueError, match="num_levels is 257: it must be an integer in 2 .. 256"):
        load(num_levels=257)
    Image.new("RGB", (5, 6)).save(tmp_path / "set" / "3.png")
    with pytest.raises(
        ValueError, match=r"image 3 of .*set \(.*/3.png\) is 5 x 6 and the first image is 5 x 4: pass `res"
    ):
        load()
    assert load(resolution=8).tokens.shape == (4, 3, 8, 8)
    for content in (b"not a picture", (tmp_path / "set" / "1.png").read_bytes()[:-40]):
        (tmp_path / "set" / "2.png").write_bytes(content)
        with pytest.raises(OSError, match=r"image 2 of .*set \(.*/2.png\) cannot be read \(.*\): replace the file"):
            load(resolution=8)
    Image.fromarray(np.zeros((4, 5), np.float32)).save(tmp_path / "set" / "2.tiff")
    (tmp_path / "set" / "2.png").unlink()
    with pytest.raises(
        OSError, match=r"/2.tiff\) cannot be read \(.*32-bit pixels \(mode 'F'\).*convert it to 8 or 16"
    ):
        load(resolution=8)
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "train.txt").write_text("some text")
    with pytest.raises(ValueError, match="has no column 'image' or 'img', only 'text': rename"):
        load_images(tmp_path / "words", cache_dir=tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.parquet").write_bytes(parquet(image=[Image.new("RGB", (5, 4)), None]))
    with pytest.raises(ValueError, match="image 1 of .*rows is missing: remove its row"):
        load_images(tmp_path / "rows", cache_dir=tmp_path / "cache")
    (tmp_path / "empty").mkdir()
    for name in ("empty", "nowhere"):
        with pytest.raises(OSError, match=f"{name} cannot be loaded .*: check its name"):
            load_cifar10(dataset_path=tmp_path / name, cache_dir=tmp_path / "cache")


# Texts as files of tokens


def test_a_text_is_encoded_once(tmp_path):
    """The tokens of a text are a file, which is read again unless the text, the alphabet or the split is another one."""
    path, cache = tmp_path / "mine.txt", tmp_path / "cache"
    path.write_text("abc " * 100)
    with patch.object(characters, "encode_chunks", wraps=characters.encode_chunks) as encode:
        for number, (text, split) in enumerate(
            [("abc ", "train"), ("abc ", "test"), ("abd ", "train"), ("abc  ", "train")]
        ):
            path.write_text(text * 100)
            whole = text * 100
            for _ in range(2):
                ds, tokenizer = load_text(path, split, 8, cache)
                part = whole[slice(*sources.split_range(split, len(whole)))]
                assert isinstance(ds.tokens, np.memmap) and tokenizer.decode(ds.tokens) == part
                assert encode.call_count == number + 1
        lzma.open(tmp_path / "same.txt.xz", "wb").write(b"\xef\xbb\xbf" + b"abc  " * 100)
        load_text(tmp_path / "same.txt.xz", "train", 8, cache)
        assert encode.call_count == 4  # the content decides, not the name, the compression or the time of the file
    assert {file.suffix for file in (cache / "d3pm_hf").iterdir()} == {".npy", ".lock"}


def test_one_process_writes_and_the_others_wait(tmp_path):
    """Eight threads, each with a lock of its own, as processes have; all of them get the one array that was written."""
    path, calls = tmp_path / "tokens.npy", []

    def write(file):
        calls.append(file)
        time.sleep(0.2)
        token_files.write_array(file, [np.arange(5), np.arange(3)], np.uint16)

    def run(_):
        token_files.write_once(path, write)
        return np.load(path, mmap_mode="r").tolist()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(8))) == [[0, 1, 2, 3, 4, 0, 1, 2]] * 8
    assert len(calls) == 1


@pytest.mark.parametrize("row", [(), (3,)])
def test_an_array_in_parts_is_that_of_numpy(tmp_path, row):
    parts = [np.random.default_rng(n).integers(0, 999, (n, *row), dtype=np.uint16) for n in (4, 0, 100_000, 1)]
    with open(tmp_path / "parts.npy", "wb") as file:
        assert token_files.write_array(file, parts, np.uint16, row) == 100_005
    np.save(tmp_path / "whole.npy", np.concatenate(parts))
    assert (tmp_path / "parts.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()


# Words, spaces and line breaks at which tokenizers differ.
PARTS = "the cat sat's on I'm 12345 mat, and. (\u00fcber) na\u00efve e\u0301te\u0301 \U0001f600 \U0001f468\u200d\U0001f469 \u4e16\u754c don't "
PARTS += "http://x.y a-b 3.14 ... [x] </s> \ufb01ne \u2163"
GAPS = [*" " * 8, "  ", "\n", "\n\n", " \n", "\t", ""]
LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def difficult_text(seed, size):
    chosen = random.Random(seed)
    return "".join(chosen.choice(PARTS.split()) + chosen.choice(GAPS) for _ in range(size)).strip()


def trained_tokenizer(model, trainer, pre_tokenizer=None, normalizer=None, **special):
    """A tokenizer of a few hundred pieces, trained on texts like those that it is to encode."""
    tokenizer = Tokenizer(model)
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator([difficult_text(seed, 50) for seed in range(60)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="[MASK]", **special)


def byte_pairs(pre_tokenizer, normalizer=None):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    return trained_tokenizer(models.BPE(), trainer, pre_tokenizer, normalizer)


def word_pieces_of(pre_tokenizer, normalizer):
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    model = models.WordPiece(unk_token="[UNK]")
    return trained_tokenizer(model, trainer, pre_tokenizer, normalizer, unk_token="[UNK]")


def llama_2():
    """Spaces are pieces, and there is no pre-tokenizer: a piece may contain several words."""
    steps = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    return trained_tokenizer(models.BPE(unk_token="<unk>"), trainer, None, steps, unk_token="<unk>")


def split_then_bytes():
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def sentencepiece_style(folder):
    proto = sentencepiece_model(TOKENIZERS["ours"](folder), ["<pad>", "</s>", "<unk>", "[MASK]"])
    (folder / "pieces.model").write_bytes(proto.SerializeToString())
    return load_sentencepiece(folder / "pieces.model")


TOKENIZERS = {
    "ours": lambda _: train_piece_tokenizer([difficult_text(seed, 50) for seed in range(60)], 120),
    "sentencepiece": sentencepiece_style,
    "gpt2": lambda _: byte_pairs(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2 with a space": lambda _: byte_pairs(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama 3": lambda _: byte_pairs(split_then_bytes()),
    "qwen": lambda _: byte_pairs(split_then_bytes(), normalizers.NFC()),
    "bert": lambda _: word_pieces_of(pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()),
    "words": lambda _: word_pieces_of(pre_tokenizers.Whitespace(), normalizers.NFKC()),
    "t5": lambda _: word_pieces_of(
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]), normalizers.NFKC()
    ),
    "first space": lambda _: word_pieces_of(pre_tokenizers.Metaspace(prepend_scheme="first"), normalizers.NFKC()),
}
WHOLE_TOKENIZERS = {
    "llama 2": lambda _: llama_2(),
    "no words": lambda _: word_pieces_of(pre_tokenizers.Metaspace(split=False), normalizers.NFKC()),
    "five characters": lambda _: word_pieces_of(pre_tokenizers.FixedLength(5), normalizers.NFKC()),
}


@pytest.mark.parametrize("name", [*TOKENIZERS, *WHOLE_TOKENIZERS])
def test_the_tokens_of_the_parts_are_those_of_the_whole_text(tmp_path, monkeypatch, name):
    tokenizer = (TOKENIZERS | WHOLE_TOKENIZERS)[name](tmp_path)
    for near in (16, 256):
        monkeypatch.setattr(encoding, "NUM_NEAR", near)
        num_parts = 0
        for seed in range(20):
            text, size = difficult_text(seed, 800), (2 * near + 30, 700, 1000)[seed % 3]
            chunks = [text[start : start + size] for start in range(0, len(text), size)]
            parts = list(encoding.cut_between_words(chunks, tokenizer))
            num_parts += len(parts)
            assert "".join(parts) == text
            ids = [token for part in parts for token in encoding.find_tokens(part, tokenizer)]
            assert ids == encoding.find_tokens(text, tokenizer)
        assert num_parts == 20 if name in WHOLE_TOKENIZERS else num_parts > 60


def test_a_text_in_word_pieces_is_a_file(tmp_path, monkeypatch):
    """Read in parts, checked in each of them, and kept for the tokenizer that it was encoded by."""
    monkeypatch.setattr(sources, "CHUNK_BYTES", 2000)
    text, path, cache = " ".join(SENTENCES[:400]), tmp_path / "mine.txt", tmp_path / "cache"
    path.write_text(text)
    for tokenizer in (train_piece_tokenizer(SENTENCES[:500], 400), train_piece_tokenizer(SENTENCES[:500], 300)):
        for _ in range(2):
            tokens = encoding.encode_text(lambda: sources.read_chunks(path), tokenizer, "the text", cache)
            assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint16
            assert tokens.tolist() == tokenizer(text, add_special_tokens=False).input_ids
    assert len(list(cache.rglob("*.npy"))) == 2
    path.write_text(text + " \u00fc" + text)
    with pytest.raises(
        ValueError, match="the text has characters that the tokenizer does not know .'\u00fc'.: replace"
    ):
        encoding.encode_text(lambda: sources.read_chunks(path), tokenizer, "the text", cache)
    assert len(list(cache.rglob("*.npy"))) == 2  # none of a part of a text


def test_a_tokenizer_in_python_is_not_cached(tmp_path):
    """Nothing tells whether its code has changed."""

    class Halves:
        def pre_tokenize(self, text):
            text.split(lambda _, part: [part[: len(str(part)) // 2], part[len(str(part)) // 2 :]])

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"ab": 0, "ba": 1})))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Halves())
    assert encoding.encode_text(lambda: ["a", "bba"], tokenizer, "the text", tmp_path).tolist() == [0, 1]
    assert not list(tmp_path.iterdir())


# The Hub

HUB_SCRIPT = """
import json, sys
import numpy as np
from d3pm_hf.data import load_cifar10, load_lm1b, load_text8, text8
from transformers import AutoTokenizer

result = {split: load_text8(split, length=100).tokens.tolist() for split in ("train", "validation", "test")}
result["only train"] = load_text8("test", "user/only-train", length=100).tokens.tolist()
text8.TEXT8_TRAIN_LENGTH = 8999
result["all in train"] = load_text8("test", length=100).tokens.tolist()
rows = load_lm1b("test", AutoTokenizer.from_pretrained(sys.argv[1]), length=10)
result["lm1b"] = rows.tokens.tolist(), rows.num_words
images = load_cifar10("test")
result["cifar10"] = images.tokens.tolist(), images.num_tokens, images.random_flip
for name, split in (("user/no-such-set", "train"), ("user/no-column", "train"), ("dvruette/lm1b", "validation")):
    try:
        load_lm1b(split, AutoTokenizer.from_pretrained(sys.argv[1]), dataset_name=name)
    except (ValueError, OSError) as error:
        result[name] = f"{type(error).__name__}: {error}"
print(json.dumps(result))
"""


def parquet(**columns):
    """Rows as the Hub stores them."""
    from datasets import Dataset

    buffer = io.BytesIO()
    Dataset.from_dict(columns).to_parquet(buffer)
    return buffer.getvalue()


def test_the_hub_s_data_sets(pieces, tmp_path):
    cuts = {"train": ENGLISH[:9000], "validation": ENGLISH[9000:9500], "test": ENGLISH[9500:10_000]}
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    images = parquet(img=[Image.fromarray(image) for image in pixels], label=[3, 8, 8])
    configuration = (
        "---\nconfigs:\n- config_name: plain_text\n  data_files:\n  - split: test\n    path: plain_text/test-*\n---\n"
    )
    pieces.save_pretrained(tmp_path / "tokenizer")
    with LoopbackHub() as hub:
        for repo, files in {
            "afmck/text8": {f"data/{split}-00000-of-00001.parquet": parquet(text=[text]) for split, text in cuts.items()},
            "user/only-train": {"data/train-00000-of-00001.parquet": parquet(text=[ENGLISH[:10_000]])},
            "user/no-column": {"data/train-00000-of-00001.parquet": parquet(sentence=SENTENCES[:9])},
            "dvruette/lm1b": {
                "data/train-00000-of-00001.parquet": parquet(text=SENTENCES[:9]),
                "data/test-00000-of-00001.parquet": parquet(text=SENTENCES[9:15]),
            },
            "uoft-cs/cifar10": {"README.md": configuration, "plain_text/test-00000-of-00001.parquet": images},
        }.items():  # fmt: skip
            hub.put(repo, files, repo_type="dataset")
        environment = hub.environment(tmp_path / "home", PYTHONPATH=os.pathsep.join(sys.path))
        command = [sys.executable, "-c", HUB_SCRIPT, str(tmp_path / "tokenizer")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    for split in cuts:
        assert decode(result[split]) == cuts[split]
    assert decode(result["only train"]) == cuts["test"]
    assert decode(result["all in train"]) == ENGLISH[8550:9000]  # the last twentieth of what is in there
    stream = sum(
        ([*pieces(text, add_special_tokens=False)["input_ids"], pieces.eos_token_id] for text in SENTENCES[9:15]), []
    )
    assert sum(result["lm1b"][0], []) == stream[: len(stream) // 10 * 10]
    assert result["cifar10"] == [pixels.transpose(0, 3, 1, 2).tolist(), 256, True]
    assert "OSError: the data set user/no-such-set cannot be loaded" in result["user/no-such-set"]
    assert "ValueError: user/no-column has no column 'text', only 'sentence'" in result["user/no-column"]
    assert "ValueError: dvruette/lm1b has no split 'validation': choose one of train, test" in result["dvruette/lm1b"]


# Embedded data sets


def test_python_prose():
    train, validation = python_prose(200)
    assert train.num_tokens == 27 and len(train.tokens) + len(validation.tokens) > 1_500_000
    assert 0.08 < len(validation.tokens) / len(train.tokens) < 0.15
    text, held_out = decode(train.tokens), decode(validation.tokens)
    for words in (text, held_out):
        assert "  " not in words and words.count(" the ") > len(words) / 500
        assert all(f" {word} " in words for word in ("of", "is", "one", "object"))
    # Hardly anything that is held out can be found in the training text.
    stretches = [decode(validation[i, 0]) for i in range(0, len(validation), 5)]
    assert sum(stretch in text for stretch in stretches) < 0.02 * len(stretches)


def test_digits():
    train, test = digits()
    assert (len(train), len(test), train.num_tokens) == (1500, 297, 17)
    assert train[0].shape == (1, 8, 8) and train.tokens.dtype == np.uint8
    assert {int(train.tokens.min()), int(train.tokens.max())} == {0, 16}


# What a tokenizer does not know


@pytest.mark.parametrize(
    "alphabet, words",
    [
        (string.ascii_lowercase + " ", "a to z and space"),
        ("abc", "a, b and c"),
        (string.ascii_letters + string.digits + ".,\n ", "0 to 9, A to Z, a to z, ',', '.', space and line break"),
        ("ACDEFGHIKLMNPQRSTVWY", "C to I, K to N, P to T, A, V, W and Y"),
        ("!\"#$%&'()*+,-./", "'!', '\"', '#', '$', '%', '&', \"'\", '(', ')', '*' and 5 more"),
    ],
)
def test_an_alphabet_in_words(alphabet, words):
    assert describe_alphabet(alphabet) == words


def test_a_character_tokenizer_lowercases_where_it_has_no_capitals():
    lower, mixed = character_tokenizer(), character_tokenizer(string.ascii_letters + " ")
    assert lower("The Cat [MASK]").input_ids == lower("the cat [MASK]").input_ids
    assert mixed.decode(mixed("The Cat").input_ids) == "The Cat"


def test_a_character_tokenizer_pads_with_gaps():
    """No token is added for it, so that the states of the process stay what they were."""
    tokenizer = character_tokenizer()
    assert len(tokenizer) == 28 and tokenizer.pad_token_id == tokenizer.mask_token_id == 27
    batch = tokenizer(["abc", "a"], padding=True, return_tensors="pt")
    assert batch.input_ids.tolist() == [[0, 1, 2], [0, 27, 27]] and batch.attention_mask.tolist() == [
        [1] * 3,
        [1, 0, 0],
    ]


def test_a_document_that_a_tokenizer_cannot_encode():
    dataset = datasets.Dataset.from_list([{"text": "all is well"}, {"text": "50% off"}])
    with pytest.raises(
        ValueError, match=r"document 1 has characters that .* \('5' '0' '%'\): .*; it knows a to z and space"
    ):
        tokenize(dataset, character_tokenizer())
