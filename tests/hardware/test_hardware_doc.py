"""The YAML shown in docs/hardware.md works as shown."""

import re
from pathlib import Path

import pytest

from distplan.hardware.cluster import load_cluster

DOC = Path(__file__).parents[2] / "docs" / "hardware.md"
EXAMPLES = re.findall(r"```yaml\n(.*?)```", DOC.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_of_the_docs_loads(number, tmp_path):
    path = tmp_path / "example.yaml"
    path.write_text(EXAMPLES[number])
    cluster = load_cluster(path)
    assert cluster.gpus_per_node == 8 and len(cluster.tiers) == 2


def test_the_docs_show_a_cluster_in_ten_lines():
    assert len(EXAMPLES) == 2 and len(EXAMPLES[0].splitlines()) == 10
