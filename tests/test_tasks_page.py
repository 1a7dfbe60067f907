"""The table "I want to …" of docs/tasks.md: each link leads to a section with lines to copy, which other tests run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "tasks.md"
TABLE = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
ROWS = [
    line.split(" | ")[0].removeprefix("| ") for line in TABLE.splitlines() if "](" in line and line.startswith("| ")
]
LINKS = sorted(set(re.findall(r"\]\(([^)]+)\)", TABLE)))


def anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")


def section(page: str, wanted: str) -> str:
    """The text below a heading up to the next one of its level, or the whole page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    if not wanted:
        return text
    without_code = re.sub(r"```.*?```", lambda block: re.sub(r"(?m)^#", " ", block[0]), text, flags=re.DOTALL)
    for found in re.finditer(r"^(#+) (.+)$", without_code, re.MULTILINE):
        if anchor(found[2]) == wanted:
            rest = text[found.end() :]
            end = re.search(rf"^#{{1,{len(found[1])}}} ", without_code[found.end() :], re.MULTILINE)
            return rest[: end.start()] if end else rest
    raise AssertionError(f"{page} has no section {wanted}")


# Words of the everyday tasks by which a stranger looks for them, those of one row joined by "+".
TASKS = """
forecast+windows; image and a table; two outputs; keypoints+cannot be seen; siamese; triplets; sentence pairs+in-batch;
cosine; autoencoder; distill; ordinal+quantiles+Poisson+gamma+Cox; loss as an ONNX file; discriminative;
token classification+-100; recommender; online steps; folders+table of labels; large Parquet; test-time augmentation;
saliency+Jacobian; CRLF+BOM+Unicode paths; another machine; fork, spawn, joblib; DataLoader+workers; seeds and threads;
TensorBoard+MLflow; Weights & Biases; WAV+mel; texts of a CSV+tokenizer; variational; weighted sampler;
torchvision+albumentations; larger than memory; WebDataset+tar; ColumnTransformer+GridSearchCV; vote, stack, bag;
permutation importance; labels as text+metric losses; active learning+pseudo-labels; float16 or int8;
compare runs+in the shell; Jupyter; without a home folder; tab key; gray or with a palette; PNG masks in two folders;
GAN; missing labels+several labels; find a learning rate; temperature scaling; gradual unfreezing; mixup; generator;
mypy+pyright; boxes+COCO; several target columns; class labels+heads of several kinds; folder of shards+stream;
Monte Carlo dropout; in a server+FastAPI; multilabel y+class_weight; pip install; IPO+SimPO+CPO; ROUGE+exact match;
ShareGPT+Alpaca+JSON arrays; L-BFGS+physics-informed; NEFTune; Dice and cross-entropy; `Gradient` nodes; TF-IDF+sparse;
k folds; EMA+accumulate; label smoothing; warm it up; predictions with ids
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("task", [" ".join(task.split()) for task in TASKS.split(";")])
def test_a_row_has_the_words_of_a_task(task):
    assert any(all(word.lower() in row.lower() for word in task.split("+")) for row in ROWS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("link", LINKS)
def test_a_link_leads_to_lines(link):
    page, _, wanted = link.partition("#")
    text = section(page or PAGE.name, wanted)
    assert "```python\n" in text or "```sh\n" in text or "\n    " in text


def test_every_section_of_the_page_is_in_the_table():
    sections = re.findall(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [heading for heading in sections if f"#{anchor(heading)}" not in LINKS] == []


def test_tasks_are_listed_once():
    assert len(ROWS) >= 63
    assert len(set(ROWS)) == len(ROWS)


def test_the_readme_leads_to_the_page():
    assert "](docs/tasks.md)" in (DOCS.parent / "README.md").read_text(encoding="utf-8")
