# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Texts in Parquet as batches of padded tokens, next to datasets and Ray Data, and embeddings of
texts on Spark, next to a bare loop of the network.

    pip install datasets
    python bench/text.py [--texts 20000] [--embedded 100000] [--repeat 3]
    python bench/text.py --quick

All use one tokenizer, a BPE of 8,000 tokens that is trained on the texts, and batches of 32 texts
in random order, padded to the longest of them. datasets tokenizes in `map`, before a DataLoader
with two workers reads; its second pass reads the tokens that `map` has stored. Ray Data tokenizes
in `map_batches`, in two tasks. Measured is a pass over all texts, without the start of Ray or
Spark. The bare loop has tokens in memory, in batches of 64 and in the order of the rows, and calls
the network in two processes with a thread each, as Spark does. Passes alternate, so that other load
on the machine slows all alike. Prints medians, and ratios to the best of the others. `--quick`
measures few texts once, and saves nothing; its figures say little.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from saved import save

from farandole.data import ParquetLoader
from farandole.spark.transformers.tokenization import TextTokenization

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCH, EMBEDDED_BATCH, FILES, CORES = 32, 64, 4, 2
MAX_LENGTH, VOCABULARY = 256, 8000
PADDING = 0
VOCABULARY_TEXTS = 5000
"""Texts that the tokenizer is trained on."""
QUICK_TEXTS, QUICK_EMBEDDED, QUICK_REPEAT = 2000, 1000, 1
ANSWER_SECONDS = 600
"""Seconds that a process of the bare loop has for a pass."""


def write_texts(directory: Path, count: int) -> list[str]:
    """Writes files of texts of made-up words, a few to some hundred words long."""
    draw = np.random.default_rng(0)
    letters = np.array(list("aeioubcdfghlmnprstvwy"))
    words = ["".join(draw.choice(letters, draw.integers(2, 11))) for _ in range(20_000)]
    chosen = draw.zipf(1.3, count * 120) % len(words)
    lengths = np.clip(draw.lognormal(3.6, 0.8, count), 3, 400).astype(int)
    starts = draw.integers(0, len(chosen) - 400, count)
    texts = [
        " ".join(words[index] for index in chosen[start : start + length])
        for start, length in zip(starts, lengths, strict=True)
    ]
    for number in range(FILES):
        table = pa.table({"text": texts[number::FILES]})
        pq.write_table(table, directory / f"part{number}.parquet", row_group_size=2_000)
    return texts


def train_tokenizer(texts: list[str]) -> Any:
    """Returns a tokenizer of pieces of words."""
    from tokenizers import (  # noqa: PLC0415 - transformers brings it
        Tokenizer,
        models,
        pre_tokenizers,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(texts[:VOCABULARY_TEXTS], trainer)
    return tokenizer


def own_pass(directory: Path, tokenizer: Any) -> int:
    """Reads all texts as an estimator does."""
    tokenize = TextTokenization(
        text_col="text", tokenizer=tokenizer.to_str(), max_length=MAX_LENGTH
    )

    def tokenize_batch(batch: pa.RecordBatch) -> dict[str, Any]:
        return {"text": tokenize.tokenize_texts(batch.column("text").to_pylist())}

    loader = ParquetLoader(
        str(directory), BATCH, ["text"], framework="torch", transformation_fn=tokenize_batch,
        rank=0, size=1,
    )  # fmt: skip
    return sum(len(batch["text"]) for batch in loader)


def pad_rows(rows: list[list[int]]) -> torch.Tensor:
    """Returns a batch of tokens, padded to the longest text."""
    return torch.nn.utils.rnn.pad_sequence(
        [torch.as_tensor(row) for row in rows], batch_first=True, padding_value=PADDING
    )


class DatasetsPass:
    """Reads all texts with datasets, and then only the tokens that it has stored."""

    def __init__(self, directory: Path, tokenizer: Any) -> None:
        self._directory = directory
        self._tokenizer = tokenizer
        self._tokens: Any = None

    def tokenize_and_read(self) -> int:
        """Tokenizes all texts with `map`, and reads batches."""
        import datasets  # noqa: PLC0415 - only if it is installed

        datasets.disable_progress_bars()
        files = [str(path) for path in sorted(self._directory.glob("*.parquet"))]
        with tempfile.TemporaryDirectory() as cache:
            rows = datasets.load_dataset(
                "parquet", data_files=files, split="train", cache_dir=cache
            )
            self._tokens = rows.map(
                lambda some: {"ids": self._tokenize(some["text"])},
                batched=True,
                remove_columns=["text"],
                keep_in_memory=True,
                load_from_cache_file=False,
            )
            return self.read_tokens()

    def read_tokens(self) -> int:
        """Reads batches of the stored tokens."""
        loader = torch.utils.data.DataLoader(
            self._tokens,
            batch_size=BATCH,
            shuffle=True,
            num_workers=CORES,
            collate_fn=collate_tokens,
        )
        return sum(len(batch) for batch in loader)

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        return self._tokenizer(texts, truncation=True, max_length=MAX_LENGTH)["input_ids"]


def collate_tokens(rows: list[dict[str, list[int]]]) -> torch.Tensor:
    """Returns a batch of rows of datasets."""
    return pad_rows([row["ids"] for row in rows])


def ray_pass(directory: Path, tokenizer: Any) -> int:
    """Reads all texts with Ray Data."""
    import ray  # noqa: PLC0415 - only if it is installed

    def tokenize(batch: dict[str, Any]) -> dict[str, Any]:
        texts = batch["text"].tolist()
        tokens = tokenizer(texts, truncation=True, max_length=MAX_LENGTH)["input_ids"]
        return {"ids": pa.array(tokens)}

    rows = ray.data.read_parquet(str(directory)).map_batches(tokenize, batch_size=1024)
    batches = rows.iter_batches(
        batch_size=BATCH, batch_format="numpy", local_shuffle_buffer_size=4096
    )
    return sum(len(pad_rows(list(batch["ids"]))) for batch in batches)


def medians(passes: dict[str, Callable[[], int]], repeat: int, count: int) -> dict[str, float]:
    """Returns the seconds of one pass of each; they take turns after one round of warming."""
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(repeat + 1):
        for name, function in passes.items():
            start = time.perf_counter()
            if function() != count:
                raise RuntimeError(f"{name} has not read all texts")
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(some) for name, some in seconds.items()}


def compare_tokens(directory: Path, tokenizer: Any, count: int, repeat: int) -> dict[str, float]:
    """Returns the seconds of a pass with each."""
    passes: dict[str, Callable[[], int]] = {
        "farandole": lambda: own_pass(directory, tokenizer.backend_tokenizer)
    }
    if find_spec("datasets") is None:
        print("datasets is not installed: it is not measured", flush=True)
    else:
        their = DatasetsPass(directory, tokenizer)
        passes["datasets"] = their.tokenize_and_read
        passes["datasets, stored tokens"] = their.read_tokens
    import ray  # noqa: PLC0415 - --help works without it

    ray.init(num_cpus=CORES, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    passes["ray data"] = lambda: ray_pass(directory, tokenizer)
    try:
        return medians(passes, repeat, count)
    finally:
        ray.shutdown()


def make_encoder() -> Any:
    """Returns an encoder with random weights."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=512, max_position_embeddings=MAX_LENGTH,
    )  # fmt: skip
    return transformers.BertModel(config).eval()


def serve_bare_loops(connection: Any, directory: str, texts: list[str]) -> None:
    """Calls the network on ready tokens each time the parent asks, and then answers."""
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    network = transformers.AutoModel.from_pretrained(directory).eval()
    batches = [
        tokenizer(
            texts[start : start + EMBEDDED_BATCH], truncation=True, max_length=MAX_LENGTH,
            padding=True, return_tensors="pt",
        )
        for start in range(0, len(texts), EMBEDDED_BATCH)
    ]  # fmt: skip
    connection.send(None)
    while connection.recv():
        with torch.inference_mode():
            for batch in batches:
                states = network(
                    input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
                ).last_hidden_state
                shares = batch["attention_mask"][:, :, None].to(states.dtype)
                mean = (states * shares).sum(dim=1) / shares.sum(dim=1)
                torch.nn.functional.normalize(mean, dim=1)
        connection.send(None)


@contextlib.contextmanager
def bare_loop(directory: str, texts: list[str]) -> Iterator[Callable[[], int]]:
    """Yields a pass over all texts, in processes that stay."""
    context = multiprocessing.get_context("spawn")
    connections, processes = [], []
    for number in range(CORES):
        parent, child = context.Pipe()
        process = context.Process(
            target=serve_bare_loops, args=(child, directory, texts[number::CORES])
        )
        process.start()
        processes.append(process)
        connections.append(parent)

    def wait_for_answers() -> None:
        for connection in connections:
            if not connection.poll(ANSWER_SECONDS):
                raise TimeoutError(f"a bare loop takes more than {ANSWER_SECONDS} s")
            connection.recv()

    def run() -> int:
        for connection in connections:
            connection.send(True)
        wait_for_answers()
        return len(texts)

    try:
        wait_for_answers()
        yield run
    finally:
        for connection, process in zip(connections, processes, strict=True):
            with contextlib.suppress(BrokenPipeError):
                connection.send(False)
            process.join(60)
            process.kill()


def compare_embeddings(
    directory: Path, tokenizer: Any, texts: list[str], repeat: int
) -> dict[str, float]:
    """Returns the seconds in which all texts are embedded."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - --help works without it

    from farandole.spark.transformers import TextEmbedder  # noqa: PLC0415

    checkpoint = str(directory / "checkpoint")
    make_encoder().save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    path = str(directory / "embedded.parquet")
    pq.write_table(pa.table({"text": texts}), path, row_group_size=1000)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master(f"local[{CORES}]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.files.maxPartitionBytes", Path(path).stat().st_size // CORES + 4096)
        .config("spark.sql.files.openCostInBytes", 0)
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", 2048)
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    embedder = TextEmbedder(
        checkpoint=checkpoint, text_col="text", batch_size=EMBEDDED_BATCH, verbose=0
    )
    rows = spark.read.parquet(path)

    def transform() -> int:
        embedder.transform(rows).write.format("noop").mode("overwrite").save()
        return len(texts)

    try:
        with bare_loop(checkpoint, texts) as bare:
            return medians({"bare loop": bare, "farandole": transform}, repeat, len(texts))
    finally:
        spark.stop()


def show_medians(title: str, count: int, medians: dict[str, float], base: float, of: str) -> None:
    """Prints a line for each."""
    for name, seconds in medians.items():
        print(
            f"{title:<12}{name:<24} {count / seconds:9.0f} texts/s {base / seconds:6.2f} x {of}",
            flush=True,
        )


def main() -> None:
    """Measures both."""
    parser = argparse.ArgumentParser(description="Texts as tokens and as embeddings.")
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--embedded", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if given.quick:
        given.texts, given.embedded, given.repeat = QUICK_TEXTS, QUICK_EMBEDDED, QUICK_REPEAT
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        (directory / "texts").mkdir()
        texts = write_texts(directory / "texts", given.texts)
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=train_tokenizer(texts), unk_token="[UNK]", pad_token="[PAD]",
            model_max_length=MAX_LENGTH,
        )  # fmt: skip
        tokens = compare_tokens(directory / "texts", tokenizer, len(texts), given.repeat)
        best = min(seconds for name, seconds in tokens.items() if name != "farandole")
        show_medians("tokens", len(texts), tokens, best, "the best of the others")
        texts = (texts * (given.embedded // len(texts) + 1))[: given.embedded]
        embedded = compare_embeddings(directory, tokenizer, texts, given.repeat)
        show_medians("embeddings", len(texts), embedded, embedded["bare loop"], "the bare loop")
    if not given.quick:
        sizes = {"texts": given.texts, "embedded": given.embedded}
        save("text", {**sizes, "tokens": tokens, "embeddings": embedded})


if __name__ == "__main__":
    main()
