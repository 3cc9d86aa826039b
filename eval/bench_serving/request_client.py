"""SGLang's benchmark client with its `custom` dataset read in order, lengths and arrivals exact.

    python -m eval.bench_serving.request_client --dataset-name custom --dataset-path FILE ...

Its own `custom` shuffles the rows of such a file and sends them at one rate; here they are sent in
their order and, where they have a `timestamp`, at that time, by the client's own sender of recorded
arrivals. Whatever is sent, timed and computed is SGLang's.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import orjson
from sglang.benchmark import serving
from sglang.benchmark.datasets import DATASET_MAPPING
from sglang.benchmark.datasets.common import BaseDataset, DatasetRow


@dataclass
class RequestFile(BaseDataset):
    """Rows that eval.workloads.load.write has written."""

    path: Path

    @classmethod
    def from_args(cls, args: Namespace) -> RequestFile:
        return cls(Path(args.dataset_path))

    def load(self, tokenizer=None, model_id=None) -> list[DatasetRow]:
        with self.path.open("rb") as lines:
            rows = [_row(orjson.loads(line)) for line in lines]
        if rows[0].timestamp is not None:
            serving.get_request = functools.partial(serving.get_request, use_trace_timestamps=True)
        return rows


def _row(line: dict) -> DatasetRow:
    prompt = line["conversations"][0]["content"]
    return DatasetRow(
        prompt=prompt, prompt_len=prompt.count(" ") + 1, output_len=line["output_len"],
        timestamp=line.get("timestamp"),
    )  # fmt: skip


if __name__ == "__main__":
    DATASET_MAPPING["custom"] = RequestFile
    serving.cli_main()
