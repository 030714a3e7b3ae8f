"""Memory and time of reading a large data file: benchmarks/results/row-memory.json.

    python -m benchmarks.throughput.row_memory [--megabytes 256]

One file of JSON lines like those of GSM8K is read as the problems of a run, in this process, and its fingerprint is
computed. More than `rlinf.tasks.spooled.MOST_IN_MEMORY` rows are kept in a temporary file.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from benchmarks.harness import report

from rlinf.config.tasks import FilesTask
from rlinf.tasks.files import FileProblems

WORDS = ("apples", "buys", "each", "for", "has", "how", "many", "of", "sells", "the", "then", "twice", "week", "with")
QUESTION_WORDS, ANSWER_WORDS = 45, 55


def write_rows(path: Path, num_bytes: int) -> int:
    """Writes rows until the file has that size; returns their number."""
    generator = random.Random(0)
    questions, answers = (
        [" ".join(generator.choices(WORDS, k=num_words)) for _ in range(1000)]
        for num_words in (QUESTION_WORDS, ANSWER_WORDS)
    )
    count = size = 0
    with path.open("w", encoding="utf-8") as file:
        while size < num_bytes:
            question, answer = questions[count % 1000], answers[count % 1000]
            row = {"question": f"{count}: {question}?", "answer": f"{answer} #### {count}"}
            size += file.write(json.dumps(row) + "\n")
            count += 1
    return count


def resident_bytes() -> int:
    """Bytes of this process in memory (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256, help="size of the file (default: 256)")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        train, test = Path(folder, "train.jsonl"), Path(folder, "test.jsonl")
        num_rows = write_rows(train, args.megabytes << 20)
        test.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
        config = FilesTask(kind="files", train_files=(train,), eval_files=(test,), answer_format="gsm8k")
        before, start = resident_bytes(), time.perf_counter()
        problems = FileProblems(config, 0)
        read_s, start = time.perf_counter() - start, time.perf_counter()
        problems.fingerprints()
        fingerprint_s = time.perf_counter() - start
        held = resident_bytes() - before
        ratio = held / train.stat().st_size
    print(f"{num_rows:,} rows, {args.megabytes} MB: {held / 2**20:,.0f} MB in memory, {ratio:.2f} times the file")
    report(
        "row-memory",
        settings={"megabytes": args.megabytes, "num_rows": num_rows},
        samples_s={"read": [read_s], "fingerprint": [fingerprint_s]},
        comparisons=(),
        findings={"resident_bytes": held, "resident_over_file": ratio},
        output=args.output,
    )


if __name__ == "__main__":
    main()
