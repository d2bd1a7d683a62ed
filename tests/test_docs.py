"""The documentation: its code runs, its links lead somewhere, and it knows every public name."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

import remat_scan

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NAMES = [str(p.relative_to(DOCS)) for p in PAGES]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BARE_FIGURE = re.compile(r"\b\d[\d,.]*\s*(GiB|MiB|%)")


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name", ["../README.md", *(n for n in NAMES if BLOCK.search((DOCS / n).read_text()))]
)
def test_code_of_a_page_runs(name):
    if name == "migrating.md":
        pytest.importorskip("flax", reason="the page migrates from it")
    text = (DOCS / name).read_text()
    namespace = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        line = text[: block.start()].count("\n") + 1
        code = compile("\n" * line + block[1], str(DOCS / name), "exec")
        exec(code, namespace)


def test_every_public_name_has_its_place_in_the_api():
    public = {n for n in vars(remat_scan) if not n.startswith("_")}
    modules = {n for n in public if n in sys.modules or f"remat_scan.{n}" in sys.modules}
    api = "\n".join(p.read_text() for p in (DOCS / "api").glob("*.md"))
    missing = {n for n in public - modules if not re.search(rf"remat_scan\.{n}\b", api)}
    assert not missing, f"add '::: remat_scan.NAME' to a page under docs/api: {sorted(missing)}"


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    examples = {p.stem for p in (DOCS.parent / "examples").glob("*.py")}
    for link in re.findall(r"\]\(([^)#\s]+)", (DOCS / name).read_text()):
        if link.startswith("https://"):
            continue
        if (made := re.fullmatch(r"examples/(\w+)\.md", link)) is not None:
            assert made[1] in examples, link
        elif not link.startswith("plots/"):
            assert ((DOCS / name).parent / link).is_file(), link


@pytest.mark.parametrize("name", NAMES)
def test_figures_come_from_result_files(name, hooks):
    text = (DOCS / name).read_text()
    found = BARE_FIGURE.search(re.sub(r"\{\{.*?\}\}", "", BLOCK.sub("", text)))
    assert found is None, f"write {found[0]} as {{{{ ... }}}}: docs/hooks.py"
    assert "{{" not in hooks.fill(text.replace(hooks.PRINTED, ""))


def test_pages_show_what_their_code_prints(hooks):
    page = hooks.fill("```python\nprint(6 * 7)\n```\n\nSays\n\n{{ printed }}\n\nlater")
    assert page.endswith("Says\n\n```text\n42\n```\n\nlater")
    with pytest.raises(ZeroDivisionError):
        hooks.fill("```python\n1 / 0\n```\n{{ printed }}")


def test_every_page_is_in_the_navigation():
    navigation = (DOCS.parent / "mkdocs.yml").read_text().partition("nav:")[2]
    assert sorted(re.findall(r": ([\w/\-]+\.md)", navigation)) == NAMES


def test_a_script_becomes_a_page(hooks):
    script = DOCS.parent / "examples" / "moe.py"
    page = hooks.as_markdown(script)
    assert page.startswith("# A mixture of experts")
    assert page.count("```python") == page.count("```\n") >= 2
    assert "(moe.ipynb)" in page


def test_a_script_becomes_a_notebook_with_the_same_code(hooks):
    script = DOCS.parent / "examples" / "moe.py"
    notebook = json.loads(hooks.as_notebook(script))
    assert (notebook["nbformat"], notebook["cells"][0]["cell_type"]) == (4, "markdown")
    code = [c["source"] for c in notebook["cells"] if c["cell_type"] == "code"]
    plain = [line for line in script.read_text().splitlines() if line and line[0] != "#"]
    assert [line for source in code for line in source.splitlines() if line] == plain
