"""The table from the rows of the attention benchmark, and that the document has the current one."""

import re
from pathlib import Path

import pytest

from benchmark import rows
from benchmark.kernels import attention_tables

ROOT = Path(__file__).resolve().parents[2]

RESULTS = ROOT / "docs" / "results"


def measured(samples):
    """Rows of one size: implementation -> microseconds by round. A call reads 1 MB."""
    found = []
    for impl, by_round in samples.items():
        timing = rows.summary(list(by_round.values()))
        row = {"benchmark": "cpu_attention", "impl": impl, "status": "ok"}
        row |= {"threads": 2, "G": 4, "batch": 16, "pages": 64}
        row |= {"models": "M", "gb_per_s": 1e6 / timing["median_us"] / 1e3}
        found.append(row | {"rounds": list(by_round)} | timing)
    return attention_tables.Measured(found)


def test_a_machine_that_gets_faster_does_not_move_a_ratio():
    # Medians of all samples would give 60 / 100 and 40 / 100.
    slow_then_fast = measured(
        {
            "native-avx2": {0: 100.0, 1: 100.0, 2: 100.0, 3: 50.0},
            "read": {0: 80.0, 1: 80.0, 3: 40.0, 4: 40.0, 5: 40.0},
            "read-sequential": {0: 60.0, 2: 60.0, 3: 30.0, 4: 30.0, 5: 30.0},
            "vllm-1234567": {2: 200.0, 3: 100.0},
        }
    )
    size = (2, "M", 16, 64)
    faster = slow_then_fast.faster
    assert faster("read", size) == pytest.approx(0.8)
    assert slow_then_fast.share(size) == pytest.approx(0.6)
    assert faster("vllm", size) == pytest.approx(2.0)
    assert faster("ipex", size) is None


def test_the_document_holds_the_table_of_its_rows():
    [text] = re.findall(
        r"<!-- table: attention -->\n(.*?)\n\n", (RESULTS / "README.md").read_text(), re.DOTALL
    )
    measured_rows = attention_tables.Measured(rows.read_rows(RESULTS / "cpu_attention.jsonl"))
    assert text == attention_tables.attention(measured_rows)
