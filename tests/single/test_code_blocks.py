# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Each code block of the documentation is executed by a test, or says why not; all names that it
uses exist.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache
from typing import Final

import pytest
from tests.pages import ROOT, Block, all_blocks, blocks_in

BLOCKS: Final = all_blocks()
PYTHON: Final = [block for block in BLOCKS if block.kind in ("python", "py")]
SHELL: Final = [block for block in BLOCKS if block.kind in ("sh", "bash", "console")]

EXECUTED: Final[dict[tuple[str, str], dict[str, set[int]]]] = {
    ("README.md", "python"): {
        "tests/spark/test_pages.py": {0},
        "tests/parallel/test_guide_pages.py": {1},
    },
    ("docs/databricks.md", "python"): {
        "tests/storage/test_unity_volumes.py": {1},
        "tests/storage/test_unity_catalog.py": {2},
    },
    ("docs/moving.md", "python"): {
        "tests/parallel/test_guide_pages.py": {0},
        "tests/spark/test_pages.py": {1, 2},
        "tests/clients/test_synapseml.py": {3},
        "tests/spark/test_petastorm_converter.py": {4, 5},
    },
    ("docs/spark/keras.md", "python"): {"tests/spark/test_pages.py": {0}},
    ("docs/spark/plugin.md", "python"): {"tests/spark/test_pages.py": {0}},
    ("docs/spark/running.md", "python"): {"tests/spark/test_pages.py": {0}},
    ("docs/spark/serving.md", "python"): {
        "tests/spark/test_model_functions.py": {0, 1, 2},
        "tests/single/test_exported_program.py": {3},
        "tests/single/test_models_from_mlflow.py": {4},
    },
    ("docs/spark/torch.md", "python"): {"tests/spark/test_pages.py": {0}},
    ("docs/spark/transformers.md", "python"): {
        "tests/spark/test_text_estimators.py": {0, 2, 3},
        "tests/spark/test_causal_language_model.py": {4, 5},
    },
    ("docs/spark/vision.md", "python"): {"tests/spark/test_image_estimators.py": {0, 1, 2}},
    ("docs/start/index.md", "python"): {
        "tests/parallel/test_guide_pages.py": {0},
        "tests/spark/test_pages.py": {1, 2},
        "tests/notebooks/test_notebooks.py": {3},
    },
    ("docs/user-guide/elastic.md", "python"): {
        "tests/launcher/test_elastic_page.py": {0, 1, 2, 3, 4, 5}
    },
    ("docs/user-guide/elastic.md", "sh"): {"tests/launcher/test_elastic_page.py": {0}},
    ("docs/user-guide/exporting.md", "python"): {"tests/single/test_exporting_page.py": {0, 1, 2}},
    ("docs/user-guide/jax.md", "python"): {"tests/parallel/test_guide_pages.py": {0, 1}},
    ("docs/user-guide/logging.md", "python"): {"tests/parallel/test_guide_pages.py": {0}},
    ("docs/user-guide/lightning.md", "python"): {"tests/launcher/test_script_pages.py": {0}},
    ("docs/user-guide/moving-from-horovod.md", "python"): {
        "tests/parallel/test_guide_pages.py": {0}
    },
    ("docs/user-guide/metrics.md", "sh"): {"tests/launcher/test_run_metrics.py": {0, 1}},
    ("docs/user-guide/operations.md", "python"): {
        "tests/parallel/test_guide_pages.py": {0, 1, 2, 3, 4}
    },
    ("docs/user-guide/preparing-data.md", "python"): {
        "tests/single/test_data_pages.py": {0, 1, 2, 3, 4}
    },
    ("docs/user-guide/ray.md", "python"): {"tests/ray/test_page.py": {0, 1, 2, 3}},
    ("docs/user-guide/reading-data.md", "python"): {
        "tests/single/test_data_pages.py": {0, 2, 4, 5, 6, 7, 8}
    },
    ("docs/user-guide/running/batch-systems.md", "bash"): {
        "tests/launch/test_pages.py": {0, 1, 2, 3}
    },
    ("docs/user-guide/running/batch-systems.md", "sh"): {"tests/launch/test_pages.py": {0, 1}},
    ("docs/user-guide/running/hosts.md", "sh"): {"tests/launch/test_pages.py": {0, 1, 2, 3, 4, 5}},
    ("docs/user-guide/running/other-launchers.md", "python"): {
        "tests/started.py": {0},
        "tests/launch/test_started.py": {0, 1},
    },
    ("docs/user-guide/running/other-launchers.md", "sh"): {"tests/launch/test_started.py": {1}},
    ("docs/user-guide/running/requeue.md", "bash"): {"tests/launch/test_slurm_requeue.py": {0, 1}},
    ("docs/user-guide/running/requeue.md", "python"): {"tests/launch/test_slurm_requeue.py": {0}},
    ("docs/user-guide/timeline.md", "python"): {"tests/parallel/test_guide_pages.py": {1}},
    ("docs/user-guide/torch.md", "python"): {"tests/launcher/test_script_pages.py": {0}},
    ("docs/user-guide/transformers.md", "python"): {
        "tests/launcher/test_transformers.py": {0, 4},
        "tests/spark/test_pages.py": {2},
    },
    ("docs/user-guide/transformers.md", "sh"): {"tests/launcher/test_transformers.py": {0}},
    ("docs/user-guide/tuning.md", "python"): {
        "tests/ray/test_tuning_page.py": {0, 1, 2, 3, 4, 5, 6}
    },
}
"""By page and language: which test executes which blocks."""


PAGE: Final = """
- A list:

  <!-- not executed: needs a cluster -->
  ```sh
  for host in one two; do
    ssh $host
  done
  ```

  1. in a list:

     ```python
     if True:
         print()
     ```

```python
print()
```
"""


def test_blocks_in_lists_are_found_without_their_indentation():
    assert blocks_in(PAGE, "page.md") == [
        Block(
            "page.md", 0, "sh", "for host in one two; do\n  ssh $host\ndone\n", "needs a cluster"
        ),
        Block("page.md", 0, "python", "if True:\n    print()\n", None),
        Block("page.md", 1, "python", "print()\n", None),
    ]


@pytest.mark.parametrize(
    "lines", ["> ```sh\n> ls\n> ```\n", "- ```sh\n  ls\n  ```\n", "~~~sh\nls\n~~~\n"]
)
def test_a_block_that_cannot_be_read_is_no_block_that_is_passed_over(lines):
    with pytest.raises(AssertionError, match=r"page\.md has a code block"):
        blocks_in(lines, "page.md")


def executed_by(block: Block) -> list[str]:
    """The tests that execute a block."""
    tests = EXECUTED.get((block.page, block.kind), {})
    return [test for test, numbers in tests.items() if block.number in numbers]


@pytest.mark.parametrize("block", [*PYTHON, *SHELL], ids=str)
def test_a_test_executes_each_block_or_the_page_says_why_not(block):
    tests = executed_by(block)
    assert bool(tests) != bool(block.why_not), (
        f"{block}: executed by {tests}, not executed: {block.why_not}"
    )
    for test in tests:
        text = (ROOT / test).read_text()
        assert block.page.rpartition("/")[2] in text or "from tests.started import" in text, (
            f"{test}: {block.page}"
        )


def test_no_block_is_said_to_be_executed_that_does_not_exist():
    there = {(block.page, block.kind, block.number) for block in BLOCKS}
    listed = {
        (*key, number)
        for key, tests in EXECUTED.items()
        for numbers in tests.values()
        for number in numbers
    }
    assert not listed - there


def test_all_names_and_keywords_of_ours_in_the_code_of_the_pages_exist():
    # In a process of its own, which imports all frameworks in an order that they bear.
    words = [sys.executable, "-m", "tests.names"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@cache
def flags_of(*command: str) -> set[str]:
    """The flags of a subcommand: of `run` by the reference, which has the short names too, of
    others by their help.
    """
    if command == ("run",):
        page = (ROOT / "docs/reference/command-line.md").read_text()
        text = page.partition("\n## `farandole run`\n")[2].partition("\n## ")[0]
    else:
        words = [sys.executable, "-m", "farandole", *command, "--help"]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"(?<![\w-])-{1,2}[a-zA-Z][\w-]*", text))


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_all_flags_of_commands_of_ours_exist(block):
    command = re.compile(
        r"^(?:\$ )?(?:train\(\) { )?((?:farandole|horovodrun) .+?)(?:; }| #.*)?$", re.MULTILINE
    )
    commands = command.findall(block.text)
    for command in commands:
        words = shlex.split(command)
        words = ["run", *words[1:]] if words[0] == "horovodrun" else words[1:]
        subcommand = words[: 2 if words[0] in ("data", "store") else 1]
        own = words[len(subcommand) :]
        program = next((index for index, word in enumerate(own) if word == "python"), len(own))
        flags = {word.partition("=")[0] for word in own[:program] if word.startswith("-")}
        assert not flags - flags_of(*subcommand), command
