"""The list of cases in docs/conformance.md: `python tests/conformance/report.py` writes it."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from conformance import llama_cpp, llama_cpp_routes, sglang, sglang_server, vllm, vllm_completions
from conformance.form import FOLDERS, File

FILES: tuple[File, ...] = (
    *llama_cpp.FILES,
    *llama_cpp_routes.FILES,
    *vllm.FILES,
    *vllm_completions.FILES,
    *sglang.FILES,
    *sglang_server.FILES,
)
PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"

HEAD = """\
# Cases of other servers' tests

llama.cpp, vLLM and SGLang test their servers. Users of those servers rely on what these tests hold, so their cases are sent to
this server as well: what is sent, and what must come back. The cases are data in `tests/conformance/`,
`tests/test_conformance.py` sends them, and this page is made from them (`python tests/conformance/report.py`). Words and models
are this project's own: most cases run on a tiny model, those that need one that ends by itself on the default model. A route that
only the peer has (`/completion`, `/models`) is asked by OpenAI's name. Of a test that runs over several values each is a case.

- *As there*: the peer's expectation holds.
- *Otherwise*: this server answers otherwise on purpose; the case holds its answer, and the list says why.
- *Not yet*: the case ought to hold and does not; not counted.
- *Elsewhere*: about what other tests cover, or what this server has not; not counted.
"""

PARSERS = Path(__file__).with_name("parsers.md")
"""About the cases of parsers, which are tests in Rust."""


def names(cases: Counter[str]) -> str:
    return ", ".join(f"`{test}`" + (f" ({count})" if count > 1 else "") for test, count in cases.items())


def section(file: File) -> list[str]:
    lines = [f"### `{FOLDERS[file.peer]}/{file.path}`", ""]
    same = Counter(case.test for case in file.cases if not case.differs)
    if same:
        lines.append(f"- As there: {names(same)}.")
    why = ""
    for case in file.cases:
        if case.differs:
            why = why if case.differs == "as above" else case.differs
            lines.append(f"- Otherwise: `{case.test}`, {case.what}: {why}.")
    for title, tests in (("Not yet", file.missing), ("Elsewhere", file.elsewhere)):
        for test, why in tests.items():
            lines.append(f"- {title}: {test}: {why}.")
    return [*lines, ""]


def page() -> str:
    """The page, in Markdown."""
    lines = [HEAD, "| Peer | File | As there | Otherwise | Not yet |", "|---|---|---:|---:|---:|"]
    totals: Counter[str] = Counter()
    for file in FILES:
        counts = Counter(
            same=sum(not case.differs for case in file.cases), differs=sum(bool(case.differs) for case in file.cases)
        )
        counts["missing"] = len(file.missing)
        totals += counts
        lines.append(f"| {file.peer} | {file.path} | {counts['same']} | {counts['differs']} | {counts['missing']} |")
    lines.append(f"| all | | {totals['same']} | {totals['differs']} | {totals['missing']} |")
    for peer in FOLDERS:
        lines += ["", f"## {peer}", ""]
        for file in FILES:
            if file.peer == peer:
                lines += section(file)
        lines.pop()
    return "\n".join(lines) + "\n\n" + PARSERS.read_text()


if __name__ == "__main__":
    PAGE.write_text(page())
