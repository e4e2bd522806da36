# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Text as word pieces, as in the paper's LM1B runs: sentences packed into rows, and sentencepiece unigram models.

The mask token comes after all pieces, at K - 1, which is the default mask of absorbing processes.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..utils.checks import check_int, check_path, check_str, check_type, describe
from ..utils.files import write_text_atomically
from .rows import Rows, token_dtype
from .sources import choose_column, choose_split, find_file, load_splits, split_range
from .token_files import cache_path, tokenizer_settings, write_array, write_once


COLUMN = "text"
BATCH_SENTENCES = 10_000
MASK_TOKENS = ("[MASK]", "<mask>", "<d3pm_mask>")
# Two characters that no text contains (Unicode noncharacters), see `mark_ends`.
END_MARKS = ("\ufdd0", "\ufdd1")


def load_lm1b(
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    dataset_name: str = "dvruette/lm1b",
    dataset_path: str | Path | None = None,
    length: int = 128,
    cache_dir: str | None = None,
    max_examples: int | None = None,
) -> Rows:
    """Concatenates sentences, each followed by the end-of-sequence token, and cuts them into rows of `length` tokens.

    Tokens at the end that do not fill a row are dropped. `num_words` of the result is the number of words in the rows,
    plus one for the end of each sentence. The paper's perplexity per word divides by this number. The rows are computed
    once and cached on disk.

    Args:
        split (`str`): A split of the data set, such as `"train"` or `"test"`.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer with an end-of-sequence token. A mask token that comes last in its
            vocabulary is not counted as a state of the data.
        dataset_name (`str`, defaults to `"dvruette/lm1b"`): Id of the data set on the Hub, with one sentence per row in its
            column `text`.
        dataset_path (`str`, *optional*): Local data to read in place of the Hub: a file with one sentence per line (`.txt`,
            `.txt.xz` or `.txt.gz`), which is cut 90 : 5 : 5; or a folder with one file per split, such as
            `lm1b.train.txt`.
        length (`int`, defaults to 128): Number of tokens of a row.
        cache_dir (`str`, *optional*): Folder for downloads and rows.
        max_examples (`int`, *optional*): Number of sentences to read from the start of the split.
    """
    check_type("tokenizer", tokenizer, PreTrainedTokenizerBase, "a tokenizer of transformers")
    check_int("length", length, 1)
    if tokenizer_settings(tokenizer) is None:
        raise ValueError(
            "the tokenizer is not fast, so that its rows cannot be cached: pass a `PreTrainedTokenizerFast`"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-sequence token: set `tokenizer.eos_token`")
    sentences = open_sentences(split, dataset_name, dataset_path, cache_dir, max_examples)
    # The fingerprint of `datasets` has the revision on the Hub, or the path and the time of a local file, and the selection.
    settings = [sentences._fingerprint, tokenizer_settings(tokenizer), tokenizer.eos_token, length]
    path, name = cache_path(settings, cache_dir), f"the {split} split of {dataset_path or dataset_name}"

    def write(file: BinaryIO) -> None:
        num_words = pack_rows(file, sentences[COLUMN], tokenizer, length, name)
        # The rows get their name after this: if they exist, the file beside them is complete.
        write_text_atomically(path.with_suffix(".json"), json.dumps({"words": num_words}))

    write_once(path, write)
    num_tokens = len(tokenizer) - (tokenizer.mask_token_id == len(tokenizer) - 1)
    num_words = json.loads(path.with_suffix(".json").read_text())["words"]
    return Rows(np.load(path, mmap_mode="r"), num_tokens, num_words=num_words)


def load_sentences(
    split: str,
    dataset_name: str = "dvruette/lm1b",
    dataset_path: str | Path | None = None,
    cache_dir: str | None = None,
    max_examples: int | None = None,
) -> Sequence[str]:
    """Loads the sentences that [`load_lm1b`] packs, to train a tokenizer on. They are read from disk on access."""
    return open_sentences(split, dataset_name, dataset_path, cache_dir, max_examples)[COLUMN]


def open_sentences(
    split: str, dataset_name: str, dataset_path: str | Path | None, cache_dir: str | None, max_examples: int | None
):
    """Returns a `datasets.Dataset` with one sentence per row, from the Hub or from local files."""
    check_str("split", split)
    if max_examples is not None:
        check_int("max_examples", max_examples, 1)
    if dataset_path is None:
        sentences = choose_split(load_splits(dataset_name, cache_dir), split, dataset_name)
        choose_column(sentences, (COLUMN,), dataset_name)
    else:
        file, whole = find_file(dataset_path, split)
        if not file.stat().st_size:
            raise ValueError(f"{file} is empty: pass a file with one sentence per line")
        # A byte order mark is dropped, and every kind of line break ends a sentence.
        sentences = load_splits("text", cache_dir, data_files=str(file), encoding="utf-8-sig")["train"]
        if whole:
            sentences = sentences.select(range(*split_range(split, len(sentences))))
    return sentences if max_examples is None else sentences.select(range(min(max_examples, len(sentences))))


def pack_rows(
    file: BinaryIO, sentences: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int, name: str
) -> int:
    """Writes rows of tokens `[n, length]`, and returns their number of words and ends of sentences; errors call them `name`."""
    eos, dtype = tokenizer.eos_token_id, token_dtype(len(tokenizer))
    rest, num_words = np.empty(0, dtype), 0  # tokens that do not fill a row yet

    def rows() -> Iterator[np.ndarray]:
        nonlocal rest, num_words
        with tqdm(total=len(sentences), desc="tokenizing", unit=" sentences", delay=2, leave=False) as progress:
            for start in range(0, len(sentences), BATCH_SENTENCES):
                batch = sentences[start : start + BATCH_SENTENCES]
                texts = [text for text in batch if text and not text.isspace()]
                if texts:
                    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
                    tokens = np.concatenate([rest, *(np.array([*ids, eos], dtype=dtype) for ids in encoded)])
                    yield tokens[: len(tokens) // length * length].reshape(-1, length)
                    rest = tokens[len(tokens) // length * length :]
                    num_words += sum(len(text.split()) + 1 for text in texts)
                progress.update(len(batch))

    if not write_array(file, rows(), dtype, (length,)):
        raise ValueError(
            f"{name} has {len(sentences)} sentences with {len(rest)} tokens, fewer than length={length}: pass more "
            "sentences or a smaller length (--sequence_length)"
        )
    return num_words - count_words(rest, tokenizer)


def count_words(tokens: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the number of words and ends of sentences in a stretch of tokens."""
    ends = np.flatnonzero(tokens == tokenizer.eos_token_id)
    texts = tokenizer.batch_decode([part.tolist() for part in np.split(tokens, ends)], skip_special_tokens=True)
    return len(ends) + sum(len(text.split()) for text in texts)


def train_piece_tokenizer(texts: Iterable[str], vocab_size: int = 8192) -> PreTrainedTokenizerFast:
    """Trains a unigram tokenizer of `vocab_size` pieces, including `</s>` and `<unk>`, followed by `[MASK]`.

    Args:
        texts (`Iterable[str]`): Sentences or documents. A few megabytes suffice for thousands of pieces.
        vocab_size (`int`, defaults to 8192): Number of pieces without the mask.
    """
    check_int("vocab_size", vocab_size, 3)
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise ValueError(f"texts is {describe(texts)}: it must be an iterable of strings")
    tokenizer = Tokenizer(models.Unigram())
    use_metaspace(tokenizer)
    special = {"eos_token": "</s>", "unk_token": "<unk>"}
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size + len(END_MARKS),
        special_tokens=list(special.values()),
        unk_token=special["unk_token"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(mark_ends(check_texts(texts, vocab_size)), trainer)
    learned = [piece for piece in json.loads(tokenizer.to_str())["model"]["vocab"] if piece[0] not in END_MARKS]
    if len(learned) != vocab_size:
        raise ValueError(
            f"the texts give {len(learned)} pieces, and vocab_size is {vocab_size}: pass more text, or another vocab_size"
        )
    pieces = settle_pieces(learned, len(special))
    tokenizer.model = models.Unigram(pieces, unk_id=list(special.values()).index(special["unk_token"]))
    return append_mask(tokenizer, **special)


def check_texts(texts: Iterable[str], vocab_size: int):
    """Yields the texts; after the last one, checks that `vocab_size` has room for all their characters."""
    characters: set[str] = set()
    for text in texts:
        check_type("one of texts", text, str, "a string")
        characters.update(text)
        yield text
    if not characters:
        raise ValueError("texts are empty: pass text to train the tokenizer on")
    least = len(characters | {" "}) + 2  # one piece per character and for the space, and </s> and <unk>
    if vocab_size < least:
        raise ValueError(
            f"vocab_size is {vocab_size}, and the texts have {len(characters)} different characters: pass at least {least}"
        )


def mark_ends(texts: Iterable[str]):
    """Yields each text twice, with another mark at the ends of its words.

    A candidate of the trainer is a string that at least two different characters follow, and the end of a word is not one of
    them. Without marks "that" is no candidate in a text without longer words that begin with it, and is cut into "tha" and "t".
    """
    for text in texts:
        for mark in END_MARKS:
            yield text.replace(" ", f"{mark} ") + mark


def settle_pieces(pieces: list, num_special: int) -> list[tuple[str, float]]:
    """Returns pieces and scores that are the same whenever the same texts are trained on.

    The trainer sums in a different order each time, which changes the last digits of a score. It also adds characters
    without a piece in any order, each 0.0001 above the one before, starting from the lowest score. Without this function,
    several processes or a resumed run would number the pieces differently.
    """
    special, learned = pieces[:num_special], pieces[num_special:]
    lowest = min(score for _, score in learned)
    highest_added = lowest + 1e-4 * sum(len(piece) == 1 for piece, _ in learned)
    scores = {
        piece: round(lowest if len(piece) == 1 and score < highest_added else score, 4) for piece, score in learned
    }
    return [(piece, score) for piece, score in special] + sorted(scores.items(), key=lambda item: (-item[1], item[0]))


def load_sentencepiece(path: str | Path) -> PreTrainedTokenizerFast:
    """Loads a sentencepiece unigram model (`.model`) as a tokenizer, with its token ids, followed by a mask token.

    The mask token is `[MASK]`, or `<mask>` if `[MASK]` is a piece of the model, as in the paper's LM1B runs. The package
    protobuf must be installed.

    Args:
        path (`str`): File written by sentencepiece.
    """
    from transformers.utils import is_protobuf_available

    if not is_protobuf_available():
        raise ImportError("reading a sentencepiece model needs the package protobuf: pip install 'd3pm-hf[training]'")
    from google.protobuf.message import DecodeError
    from transformers.convert_slow_tokenizer import import_protobuf

    check_path("path", path)
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"path is {path}, which is not a file: pass the `.model` file that sentencepiece wrote"
        )
    content = Path(path).read_bytes()
    proto = import_protobuf().ModelProto()
    try:
        proto.ParseFromString(content)
    except DecodeError as error:
        raise ValueError(f"{path} is not a sentencepiece model: pass a file that sentencepiece has written") from error
    trained = proto.trainer_spec
    if not proto.pieces or trained.model_type != trained.UNIGRAM:
        raise ValueError(f"{path} is not a unigram model: train sentencepiece with --model_type=unigram")
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    tokenizer = Tokenizer(models.Unigram(pieces, trained.unk_id, trained.byte_fallback))
    # Single spaces, and none at both ends of the text, as in sentencepiece.
    steps: list[normalizers.Normalizer] = [
        normalizers.Replace(Regex(" {2,}"), " "),
        normalizers.Replace(Regex(r"\A | \z"), ""),
    ]
    if proto.normalizer_spec.precompiled_charsmap:
        steps.insert(0, normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap))
    tokenizer.normalizer = normalizers.Sequence(steps)
    use_metaspace(tokenizer)
    numbers = {"eos_token": trained.eos_id, "unk_token": trained.unk_id, "pad_token": trained.pad_id}
    return append_mask(tokenizer, **{name: pieces[number][0] for name, number in numbers.items() if number >= 0})


def use_metaspace(tokenizer: Tokenizer) -> None:
    """Makes spaces part of the piece that follows, and puts one before the text."""
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()


def append_mask(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    """Wraps a tokenizer for transformers and adds a mask token after all of its pieces.

    The mask includes the space before it, as those of ALBERT and RoBERTa do: a piece that fills it in begins with its own.
    """
    mask_token = next(token for token in MASK_TOKENS if tokenizer.token_to_id(token) is None)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        mask_token=AddedToken(mask_token, lstrip=True, special=True),
        clean_up_tokenization_spaces=False,
        **special,
    )
