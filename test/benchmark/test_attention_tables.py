"""Tables from the rows of the attention benchmark, and that the documents hold those of their rows."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmark"))

import attention_tables  # noqa: E402
import rows  # noqa: E402

RESULTS = ROOT / "docs" / "results"


def measured(samples):
    """Rows of one size: implementation -> microseconds by round. A call reads 1 MB, of int8 half of it."""
    found = []
    for impl, by_round in samples.items():
        timing = rows.summary(list(by_round.values()))
        nbytes = 5e5 if "int8" in impl else 1e6
        found.append(
            {"impl": impl, "status": "ok", "backing": "thp", "native_best_isa": "avx2", "threads": 2, "G": 4,
             "batch": 16, "pages": 64, "models": "M", "gb_per_s": nbytes / timing["median_us"] / 1e3,
             "tokens_per_s": 1e9 / timing["median_us"], "rounds": list(by_round), **timing}
        )  # fmt: skip
    return attention_tables.Measured(found)


def test_a_machine_that_gets_faster_does_not_move_a_ratio():
    # Medians of all samples would say 60 / 100 and 50 / 40.
    slow_then_fast = measured(
        {
            "native-avx2": {0: 100.0, 1: 100.0, 2: 100.0, 3: 50.0},
            "read": {0: 80.0, 1: 80.0, 3: 40.0, 4: 40.0, 5: 40.0},
            "read-sequential": {0: 60.0, 3: 30.0, 4: 30.0},
            "vllm-1234567": {2: 200.0, 3: 100.0},
            "native-int8-avx2": {0: 60.0, 3: 30.0},
        }
    )
    size = (2, 4, 16, 64)
    assert slow_then_fast.faster("native", "read", size) == pytest.approx(0.8)
    assert slow_then_fast.share("native", size) == pytest.approx(0.6)
    assert slow_then_fast.faster("native", "vllm", size) == pytest.approx(2)
    assert slow_then_fast.faster("native-int8", "native", size, "tokens_per_s") == pytest.approx(
        10 / 6
    )
    assert slow_then_fast.share("native-int8", size) == pytest.approx(0.5)
    assert slow_then_fast.faster("native", "ipex-2.8", size) is None


@pytest.mark.parametrize("name", ["bandwidths", "ratios", "shares"])
def test_the_documents_hold_the_tables_of_their_rows(name):
    [text] = re.findall(
        rf"<!-- table: {name} -->\n(.*?)\n\n", (RESULTS / "README.md").read_text(), re.DOTALL
    )
    assert text.splitlines() == attention_tables.tables(RESULTS / "cpu_attention.jsonl")[name]
